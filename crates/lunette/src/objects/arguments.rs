//! Definitions of `lunette disk`, `job`, `export`, `lun`, `session`, `reservation`, `config`, `status` and `reload`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use cli_common::DaemonAddress;

/// Address of the daemon, and output format.
#[derive(Clone, Debug, Args)]
pub struct Ask {
    /// Address of the daemon
    #[command(flatten)]
    pub daemon: DaemonAddress,
    /// Print JSON
    #[arg(long, global = true, help_heading = "Options")]
    pub json: bool,
}

/// `lunette status`
#[derive(Debug, Args)]
#[command(after_help = AFTER_STATUS)]
pub struct LookArguments {
    /// Address of the daemon
    #[command(flatten)]
    pub ask: Ask,
}

const AFTER_STATUS: &str = "\
Examples:
    lunette status
    lunette status --json | jq .exports

Exit code 0: no problems. 1: problems, or the daemon cannot be reached.";

/// `lunette disk`
#[derive(Debug, Args)]
#[command(after_help = AFTER_DISK)]
pub struct DiskCommand {
    /// Address of the daemon
    #[command(flatten)]
    pub ask: Ask,
    /// Subcommand
    #[command(subcommand)]
    pub action: DiskAction,
}

const AFTER_DISK: &str = "\
Examples:
    lunette disk list
    lunette disk add scratch=ram:512M
    lunette disk add d1=file:vm.raw,size=10G,cache=none
    lunette disk resize d1 20G
    lunette disk resize d1                         the present size of its file or block device
    lunette disk limit d1 iops=500,bandwidth=20M   replaces all limits
    lunette disk limit d1 none
    lunette disk set d1 on_error=enospc            I/O waits when the device is full
    lunette disk resume d1
    lunette disk snapshot d1 --to d1-new.qcow2     d1 continues in the new image, with vm.raw as backing image
    lunette disk mirror d1 rbd:rbd/d1 --switch     moves it to Ceph while clients use it
    lunette disk backup d1 file:d1.bak --wait
    lunette disk stream d1                         copies all data into the image, which then needs no backing image
    lunette disk commit d1                         copies the image's data into its backing image and switches to it
    lunette disk identity d1
    lunette disk identity d1 --new                 for a copy of another disk
    lunette disk remove scratch";

/// Actions of `lunette disk`.
#[derive(Debug, Subcommand)]
pub enum DiskAction {
    /// List disks
    List,
    /// Show the properties of a disk
    Show {
        /// Name of the disk
        disk: String,
    },
    /// Add a disk
    Add {
        /// Name and backend: NAME=ram:SIZE, NAME=null:SIZE, NAME=file:PATH, NAME=image:PATH, NAME=rbd:POOL/IMAGE,
        /// NAME=iscsi://HOST/TARGET/LUN or NAME=nbd://HOST/EXPORT, then ,KEY=VALUE as for serve --disk
        #[arg(value_name = "NAME=BACKEND:...")]
        disk: String,
    },
    /// Grow or shrink a disk, and notify its clients
    Resize {
        /// Name of the disk
        disk: String,
        /// New size in bytes, or with K, M, G, T (powers of 1024) [default: the present size of its file, block device or image]
        size: Option<String>,
        /// Allow a smaller size; the data beyond the new end is lost
        #[arg(long)]
        force: bool,
    },
    /// Set the limits of a disk for the sum of all its clients
    Limit {
        /// Name of the disk
        disk: String,
        /// New limits, which replace all present ones: iops (requests per second), iops_burst (requests), bandwidth (bytes per second, or
        /// with K, M, G, T), bandwidth_burst (bytes); or none
        #[arg(value_name = "KEY=VALUE,...|none")]
        limits: String,
    },
    /// Set the error policy of a disk
    Set {
        /// Name of the disk
        disk: String,
        /// on_error: report (clients get the error), stop (I/O waits) or enospc (I/O waits if the device is full). io_timeout: seconds
        /// after which an I/O is cancelled, 1 to 86400, or none
        #[arg(value_name = "KEY=VALUE,...")]
        setting: String,
    },
    /// Resubmit the waiting I/Os of a disk
    Resume {
        /// Name of the disk
        disk: String,
    },
    /// Take a snapshot of disks atomically: each disk continues in a new qcow2 image over its present content
    Snapshot {
        /// Names of the disks
        #[arg(required = true)]
        disk: Vec<String>,
        /// Image to create, one per disk in the same order
        #[arg(long, value_name = "IMAGE", required = true)]
        to: Vec<String>,
    },
    /// Copy a disk to a target while clients use it, and switch the disk to the target
    Mirror {
        /// Name of the disk
        disk: String,
        /// Target of the copy: file:PATH, image:PATH, rbd:POOL/IMAGE, iscsi://HOST/TARGET/LUN or nbd://HOST/EXPORT, then ,KEY=VALUE
        /// as for serve --disk. Files are created
        target: String,
        /// Switch the disk to the target as soon as the copy is complete. Without it, the disk switches at lunette job switch
        #[arg(long)]
        switch: bool,
        /// Speed and wait options
        #[command(flatten)]
        how: Speed,
    },
    /// Copy a disk to a target while clients use it. The copy has the content at the start of the job
    Backup(DiskBackup),
    /// List and remove dirty bitmaps, which record the changes since the last backup of each name
    Bitmap {
        /// Subcommand
        #[command(subcommand)]
        action: BitmapAction,
    },
    /// Copy an image's data into its backing image, and switch the disk to the backing image
    Commit {
        /// Name of the disk
        disk: String,
        /// Speed and wait options
        #[command(flatten)]
        how: Speed,
    },
    /// Copy the backing images' data into the image, which then needs no backing image
    Stream {
        /// Name of the disk
        disk: String,
        /// Speed and wait options
        #[command(flatten)]
        how: Speed,
    },
    /// Show the identity of a disk, or give it a new one
    Identity {
        /// Name of the disk
        disk: String,
        /// Create a new identity, for a disk that is a copy of another; no export may serve the disk
        #[arg(long)]
        new: bool,
    },
    /// Remove a disk
    Remove {
        /// Name of the disk
        disk: String,
        /// Also remove its exports and logical units
        #[arg(long)]
        force: bool,
    },
}

/// `lunette disk bitmap`.
#[derive(Clone, Debug, Subcommand)]
pub enum BitmapAction {
    /// List bitmaps
    List {
        /// List only the bitmaps of this disk
        disk: Option<String>,
    },
    /// Remove a bitmap; the next backup of its name copies everything
    Remove {
        /// Name of the disk
        disk: String,
        /// Name of the bitmap
        bitmap: String,
    },
}

/// Speed of a job, and whether to wait for it.
#[derive(Clone, Debug, Args)]
pub struct Speed {
    /// Speed limit in bytes per second, or with K, M, G (powers of 1024) [default: no limit]
    #[arg(long, value_name = "SIZE")]
    pub speed: Option<String>,
    /// Show the progress, and wait until the job ends or a mirror is complete
    #[arg(long)]
    pub wait: bool,
}

/// `lunette disk backup`
#[derive(Clone, Debug, Args)]
pub struct DiskBackup {
    /// Name of the disk
    pub disk: String,
    /// Target of the copy, as for lunette disk mirror
    pub target: String,
    /// Copy only the changes since the last backup with this name. The target is the previous target, or a new image with it as
    /// backing image. The first backup copies everything
    #[arg(long, value_name = "NAME")]
    pub incremental: Option<String>,
    /// Point in time of the copy: start or end of the job. A copy of the end needs no scratch file
    #[arg(long, value_name = "start|end", default_value = "start")]
    pub at: String,
    /// Scratch file
    #[command(flatten)]
    pub scratch: Scratch,
    /// Speed and wait options
    #[command(flatten)]
    pub how: Speed,
}

/// Scratch files of backups.
#[derive(Clone, Debug, Default, Args)]
pub struct Scratch {
    /// Folder of the scratch file, which stores the data that clients overwrite during the backup [default: that of the disk's file, the
    /// state folder, or /var/tmp]
    #[arg(long, value_name = "DIR")]
    pub scratch: Option<PathBuf>,
    /// Most bytes in the scratch file of a disk. If clients overwrite more, the backup fails [default: half of the free space]
    #[arg(long, value_name = "SIZE")]
    pub scratch_limit: Option<String>,
}

/// `lunette job`
#[derive(Debug, Args)]
#[command(after_help = AFTER_JOB)]
pub struct JobCommand {
    /// Address of the daemon
    #[command(flatten)]
    pub ask: Ask,
    /// Subcommand
    #[command(subcommand)]
    pub action: JobAction,
}

const AFTER_JOB: &str = "\
Examples:
    lunette disk mirror d1 file:/new/d1.raw
    lunette job list
    lunette job speed d1 100M
    lunette job wait d1
    lunette job switch d1
    lunette job cancel d1

A disk has at most one job. A job does not survive an exit of the daemon; its disk then stays on its previous device.
Exit code 0: done or started. 1: failed or cancelled.";

/// Actions of `lunette job`.
#[derive(Debug, Subcommand)]
pub enum JobAction {
    /// List the last job of each disk
    List,
    /// Show the job of a disk
    Show {
        /// Name of the disk
        disk: String,
    },
    /// Pause a job until it is resumed
    Pause {
        /// Name of the disk
        disk: String,
    },
    /// Resume a paused job
    Resume {
        /// Name of the disk
        disk: String,
    },
    /// Set the speed limit of a job
    Speed {
        /// Name of the disk
        disk: String,
        /// Speed limit in bytes per second, or with K, M, G (powers of 1024); none removes the limit
        #[arg(value_name = "SIZE|none")]
        speed: String,
    },
    /// Switch the disk to the target of its mirror: now, or as soon as the copy is complete
    Switch {
        /// Name of the disk
        disk: String,
        /// Switch although the disk cannot be flushed; writes that it has lost are missing in the copy
        #[arg(long)]
        force: bool,
    },
    /// Cancel a job; its disk stays on its previous device
    Cancel {
        /// Name of the disk
        disk: String,
    },
    /// Wait until a job ends or a mirror is complete
    Wait {
        /// Name of the disk
        disk: String,
    },
}

/// `lunette export`
#[derive(Debug, Args)]
#[command(after_help = AFTER_EXPORT)]
pub struct ExportCommand {
    /// Address of the daemon
    #[command(flatten)]
    pub ask: Ask,
    /// Subcommand
    #[command(subcommand)]
    pub action: ExportAction,
}

const AFTER_EXPORT: &str = "\
Examples:
    lunette export list
    lunette export add vhost-blk d0:/run/lunette/d0.sock
    lunette export add vhost-scsi vm0:/run/lunette/vm0.sock
    lunette export add iscsi iqn.2026-11.org.example:t0=d0,d1 --portal 192.0.2.1 --demo-mode ro
    lunette export add nbd d0:/run/lunette/nbd.sock,name=nbd-d0
    lunette export place d0 1,3         workers 1 and 3 serve new queues
    lunette export place d0 dedicated   a worker for this export alone
    lunette export access-state iqn.2026-11.org.example:t0
    lunette export access-state iqn.2026-11.org.example:t0 2 standby
    lunette export remove vm0 --force";

/// Actions of `lunette export`.
#[derive(Debug, Subcommand)]
pub enum ExportAction {
    /// List exports
    List,
    /// Show an export
    Show {
        /// Name of the export
        export: String,
    },
    /// Add an export
    Add {
        /// Kind of export
        #[command(subcommand)]
        export: NewExport,
    },
    /// Choose the workers that serve new queues and connections of an export
    #[command(name = "place")]
    SetWorkers {
        /// Name of the export
        export: String,
        /// Numbers of shared workers, such as 1,3; dedicated for a new worker that serves only this export; or shared for all shared
        /// workers
        #[arg(value_name = "WORKERS|dedicated|shared")]
        workers: String,
    },
    /// Show or set the access states (ALUA) of the portal groups of a target
    AccessState {
        /// Name of the export
        export: String,
        /// Number of the portal group [default: show all groups]
        group: Option<u16>,
        /// New state: active/optimized, active/non-optimized, standby or unavailable. Without it, the state is shown
        #[arg(value_name = "STATE")]
        state: Option<String>,
    },
    /// Remove an export
    Remove {
        /// Name of the export
        export: String,
        /// Disconnect its clients. Without it, an export with clients is not removed
        #[arg(long)]
        force: bool,
    },
}

/// An export to add.
#[derive(Debug, Subcommand)]
pub enum NewExport {
    /// Export a disk as virtio-blk on a vhost-user socket
    VhostBlk {
        /// Disk and socket, then ,name=NAME, ,queues=N, ,socket_mode=0660, ,socket_owner=USER, ,socket_group=GROUP, ,workers=1+3 or
        /// ,dedicated, as for serve --vhost-blk
        #[arg(value_name = "DISK:SOCKET")]
        export: String,
    },
    /// Export a virtio-scsi controller on a vhost-user socket
    VhostScsi {
        /// Name and socket, then ,queues=N, ,nexus=NAME, ,socket_mode=0660, ,socket_owner=USER, ,socket_group=GROUP, ,workers=1+3 or
        /// ,dedicated, as for serve --vhost-scsi
        #[arg(value_name = "NAME:SOCKET")]
        export: String,
    },
    /// Export an iSCSI target with these disks as LUNs from 0
    Iscsi {
        /// Name of the target and its disks, then ,KEY=VALUE such as ,alias=TEXT, ,workers=1+3 or ,dedicated=on, as for serve --iscsi
        #[arg(value_name = "IQN=DISK,...")]
        export: String,
        /// Portal: an IP address, optionally with a port [default: 3260] and a portal group [default: 1]; may be given several times
        #[arg(long, value_name = "ADDRESS:PORT,GROUP", required = true)]
        portal: Vec<String>,
        /// Address in discovery responses, instead of the portals of the same group; may be given several times
        #[arg(long, value_name = "ADDRESS:PORT,GROUP")]
        announce: Vec<String>,
        /// Access of initiators without a CHAP user: none, ro or rw [default: none]
        #[arg(long, value_name = "MODE")]
        demo_mode: Option<String>,
        /// File with CHAP users, as for serve --chap-user. The daemon reads it
        #[arg(long, value_name = "FILE")]
        chap_user: Option<String>,
    },
    /// Export a disk over NBD on a Unix socket or a TCP address
    Nbd {
        /// Disk and place, then ,name=NAME, ,export_name=NAME, ,description=TEXT, ,ro, ,socket_mode=0660, ,workers=1+3 or ,dedicated, as
        /// for serve --nbd
        #[arg(value_name = "DISK:SOCKET|DISK:ADDRESS:PORT")]
        export: String,
    },
}

/// `lunette lun`
#[derive(Debug, Args)]
#[command(after_help = AFTER_LUN)]
pub struct LunCommand {
    /// Address of the daemon
    #[command(flatten)]
    pub ask: Ask,
    /// Subcommand
    #[command(subcommand)]
    pub action: LunAction,
}

const AFTER_LUN: &str = "\
Examples:
    lunette lun list vm0
    lunette lun add vm0 4:0 scratch      the guest sees a new disk at target 4, LUN 0
    lunette lun remove vm0 4:0           waits until its requests have completed
    lunette lun remove vm0 4:0 --force   aborts its requests";

/// Actions of `lunette lun`.
#[derive(Debug, Subcommand)]
pub enum LunAction {
    /// List logical units of all exports or of one
    List {
        /// Name of the virtio-scsi controller or iSCSI target
        export: Option<String>,
    },
    /// Show a logical unit
    Show {
        /// Name of the virtio-scsi controller or iSCSI target
        export: String,
        /// Address, such as 4:0. For an iSCSI target, TARGET is 0
        #[arg(value_name = "TARGET:LUN")]
        address: String,
    },
    /// Add a logical unit, and notify connected clients
    Add {
        /// Name of the virtio-scsi controller or iSCSI target
        export: String,
        /// Address, such as 4:0. For an iSCSI target, TARGET is 0
        #[arg(value_name = "TARGET:LUN")]
        address: String,
        /// Name of the disk
        disk: String,
        /// Replace the disk that is at this address
        #[arg(long)]
        force: bool,
    },
    /// Remove a logical unit, and notify connected clients
    Remove {
        /// Name of the virtio-scsi controller or iSCSI target
        export: String,
        /// Address, such as 4:0. For an iSCSI target, TARGET is 0
        #[arg(value_name = "TARGET:LUN")]
        address: String,
        /// Abort its requests instead of waiting for them. Remove it even if an initiator holds a reservation
        #[arg(long)]
        force: bool,
    },
}

/// `lunette session`
#[derive(Debug, Args)]
#[command(after_help = AFTER_SESSION)]
pub struct SessionCommand {
    /// Address of the daemon
    #[command(flatten)]
    pub ask: Ask,
    /// Subcommand
    #[command(subcommand)]
    pub action: SessionAction,
}

const AFTER_SESSION: &str = "\
Examples:
    lunette session list
    lunette session remove iscsi-3      the initiator may log in again";

/// Actions of `lunette session`.
#[derive(Debug, Subcommand)]
pub enum SessionAction {
    /// List sessions
    List,
    /// Show a session
    Show {
        /// ID of the session, from lunette session list
        session: String,
    },
    /// End an iSCSI session: request a logout, and drop the connections after two seconds. A second call drops them at once
    Remove {
        /// ID of the session, from lunette session list
        session: String,
    },
}

/// `lunette reservation`
#[derive(Debug, Args)]
#[command(after_help = AFTER_RESERVATION)]
pub struct ReservationCommand {
    /// Address of the daemon
    #[command(flatten)]
    pub ask: Ask,
    /// Subcommand
    #[command(subcommand)]
    pub action: ReservationAction,
}

const AFTER_RESERVATION: &str = "\
Examples:
    lunette reservation list
    lunette reservation show d0";

/// Actions of `lunette reservation`.
#[derive(Debug, Subcommand)]
pub enum ReservationAction {
    /// List all registrations and reservations
    List,
    /// Show the registrations and reservations of one disk
    Show {
        /// Name of the disk
        disk: String,
    },
}

/// `lunette state`
#[derive(Debug, Args)]
#[command(after_help = AFTER_STATE)]
pub struct StateCommand {
    /// Address of the daemon
    #[command(flatten)]
    pub ask: Ask,
    /// Subcommand
    #[command(subcommand)]
    pub action: StateAction,
}

const AFTER_STATE: &str = "\
Examples:
    lunette state list
    lunette state reset reservations-6f9619ff-8b86-4011-b42d-00c04fc964ff.saved

The daemon neither uses nor replaces a file that is empty, truncated, changed or unreadable:
the object of the file is unavailable or responds BUSY. Restore the file from a backup, or reset it.
If the daemon still has the state in memory, the reset saves it.

The reset of unit-DISK.saved makes an iSCSI disk accept another logical unit.";

/// Actions of `lunette state`.
#[derive(Debug, Subcommand)]
pub enum StateAction {
    /// List the files, with the object and the condition of each
    List,
    /// Reset a damaged file, or the record of a unit: move it aside, and serve its object with the default state
    Reset {
        /// Name of the file, from lunette state list
        file: String,
        /// Do not ask for confirmation
        #[arg(long)]
        yes: bool,
    },
}

/// `lunette config`
#[derive(Debug, Args)]
#[command(after_help = AFTER_CONFIG)]
pub struct ConfigCommand {
    /// Address of the daemon
    #[command(flatten)]
    pub ask: Ask,
    /// Subcommand
    #[command(subcommand)]
    pub action: ConfigAction,
}

const AFTER_CONFIG: &str = "\
Examples:
    lunette config show > lunette.toml   the configuration in effect, as a file
    lunette config diff                  changes made at run time";

/// Actions of `lunette config`.
#[derive(Debug, Subcommand)]
pub enum ConfigAction {
    /// Show the configuration that is in effect, as the text of a file
    Show {
        /// Show the configuration in effect. The command always does this, so the option has no effect
        #[arg(long)]
        effective: bool,
    },
    /// Show changes made at run time, relative to the file and the flags
    Diff,
}

/// `lunette reload`
#[derive(Debug, Args)]
#[command(after_help = AFTER_RELOAD)]
pub struct ReloadArguments {
    /// Address of the daemon
    #[command(flatten)]
    pub ask: Ask,
    /// Apply the file even if objects are in use: disconnect clients, abort requests, and discard data beyond the new end of a disk
    #[arg(long)]
    pub force: bool,
}

const AFTER_RELOAD: &str = "\
Examples:
    lunette reload

Applies the smallest set of changes. If a change is refused, applies none and prints all reasons. SIGHUP does the same.
Changes made at run time remain in effect: see lunette config diff.";
