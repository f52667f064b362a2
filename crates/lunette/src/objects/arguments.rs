//! Definitions of `lunette disk`, `job`, `export`, `lun`, `session`, `reservation`, `config`, `status` and `reload`.

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

Exit code 0: no problems, 1: problems, or the daemon cannot be reached.";

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
    /// Show a disk
    Show {
        /// Name
        disk: String,
    },
    /// Add a disk
    Add {
        /// NAME=ram:SIZE, NAME=null:SIZE, NAME=file:PATH, NAME=image:PATH, NAME=rbd:POOL/IMAGE or NAME=iscsi://HOST/TARGET/LUN, then ,KEY=VALUE as for serve --disk
        #[arg(value_name = "NAME=BACKEND:...")]
        disk: String,
    },
    /// Grow or shrink a disk; clients are notified
    Resize {
        /// Name
        disk: String,
        /// New size: bytes, or K, M, G, T [default: the present size of its file, block device or image]
        size: Option<String>,
        /// Shrink the disk and lose the data beyond the new end
        #[arg(long)]
        force: bool,
    },
    /// Set the limits of a disk, for all its clients together
    Limit {
        /// Name
        disk: String,
        /// All limits: iops, iops_burst, bandwidth, bandwidth_burst; or none
        #[arg(value_name = "KEY=VALUE,...|none")]
        limits: String,
    },
    /// Set the error policy of a disk
    Set {
        /// Name
        disk: String,
        /// on_error: report (clients get the error), stop (I/O waits) or enospc (I/O waits if the device is full); io_timeout: seconds
        /// after which an I/O is cancelled, or none
        #[arg(value_name = "KEY=VALUE,...")]
        setting: String,
    },
    /// Resubmit the waiting I/Os of a disk
    Resume {
        /// Name
        disk: String,
    },
    /// Take a snapshot of disks atomically: each disk continues in a new qcow2 image over its present content
    Snapshot {
        /// Names
        #[arg(required = true)]
        disk: Vec<String>,
        /// Image to create, one per disk in the same order
        #[arg(long, value_name = "IMAGE", required = true)]
        to: Vec<String>,
    },
    /// Copy a disk while it is used, and move it to the copy
    Mirror {
        /// Name
        disk: String,
        /// file:PATH, image:PATH, rbd:POOL/IMAGE or iscsi://HOST/TARGET/LUN, then ,KEY=VALUE as for serve --disk; files are created
        target: String,
        /// Switch to the copy as soon as it is complete [default: wait for lunette job switch]
        #[arg(long)]
        switch: bool,
        /// Speed and wait options
        #[command(flatten)]
        how: Speed,
    },
    /// Copy a disk while it is used; the copy has the content at the end of the job
    Backup {
        /// Name
        disk: String,
        /// As for mirror
        target: String,
        /// Copy the changes since the last backup of this name: to the same target, or into a new image over it. The first backup
        /// copies everything
        #[arg(long, value_name = "NAME")]
        incremental: Option<String>,
        /// Speed and wait options
        #[command(flatten)]
        how: Speed,
    },
    /// List and remove dirty bitmaps, which record the changes since the last backup of each name
    Bitmap {
        /// Subcommand
        #[command(subcommand)]
        action: BitmapAction,
    },
    /// Copy an image's data into its backing image, and move the disk there
    Commit {
        /// Name
        disk: String,
        /// Speed and wait options
        #[command(flatten)]
        how: Speed,
    },
    /// Copy the backing images' data into the image, which then needs no backing image
    Stream {
        /// Name
        disk: String,
        /// Speed and wait options
        #[command(flatten)]
        how: Speed,
    },
    /// Show the identity of a disk, or give it a new one
    Identity {
        /// Name
        disk: String,
        /// Create a new identity, for a disk that is a copy of another; no export may serve the disk
        #[arg(long)]
        new: bool,
    },
    /// Remove a disk
    Remove {
        /// Name
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
        /// Only the bitmaps of this disk
        disk: Option<String>,
    },
    /// Remove a bitmap; the next backup of its name copies everything
    Remove {
        /// The disk's name
        disk: String,
        /// The bitmap's name
        bitmap: String,
    },
}

/// Speed of a job, and whether to wait for it.
#[derive(Clone, Debug, Args)]
pub struct Speed {
    /// Limit in bytes per second: K, M, G [default: no limit]
    #[arg(long, value_name = "SIZE")]
    pub speed: Option<String>,
    /// Wait for the end of the job, or until a mirror is complete, and show the progress
    #[arg(long)]
    pub wait: bool,
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

A disk has at most one job. If the daemon ends or is killed, the disk is as before the job.
Exit code 0: done or started, 1: failed or cancelled.";

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
    /// Limit the speed of a job
    Speed {
        /// Name of the disk
        disk: String,
        /// Limit in bytes per second: K, M, G, or none
        #[arg(value_name = "SIZE|none")]
        speed: String,
    },
    /// Switch to a mirror: now, or when it is complete
    Switch {
        /// Name of the disk
        disk: String,
    },
    /// Cancel a job; the disk stays as it was
    Cancel {
        /// Name of the disk
        disk: String,
    },
    /// Wait until a job has ended, or a mirror is complete
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
        /// Name
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
        /// Name
        export: String,
        /// Worker numbers such as 1,3; dedicated to start a worker for this export; or shared for all shared workers
        #[arg(value_name = "WORKERS|dedicated|shared")]
        workers: String,
    },
    /// Show or set the access states (ALUA) of the portal groups of a target
    AccessState {
        /// Name
        export: String,
        /// Portal group [default: show all groups]
        group: Option<u16>,
        /// active/optimized, active/non-optimized, standby or unavailable [default: show the state]
        #[arg(value_name = "STATE")]
        state: Option<String>,
    },
    /// Remove an export
    Remove {
        /// Name
        export: String,
        /// Disconnect its clients
        #[arg(long)]
        force: bool,
    },
}

/// An export to add.
#[derive(Debug, Subcommand)]
pub enum NewExport {
    /// One disk as virtio-blk on a vhost-user socket
    VhostBlk {
        /// Then ,name=NAME, ,queues=N, ,socket_mode=0660, ,socket_owner=USER, ,socket_group=GROUP, ,workers=1+3 or ,dedicated
        #[arg(value_name = "DISK:SOCKET")]
        export: String,
    },
    /// A virtio-scsi controller on a vhost-user socket
    VhostScsi {
        /// Then ,queues=N, ,socket_mode=0660, ,socket_owner=USER, ,socket_group=GROUP, ,workers=1+3 or ,dedicated
        #[arg(value_name = "NAME:SOCKET")]
        export: String,
    },
    /// An iSCSI target with these disks as LUNs from 0
    Iscsi {
        /// Then ,alias=TEXT, ,workers=1+3 or ,dedicated=on
        #[arg(value_name = "IQN=DISK,...")]
        export: String,
        /// Portal [default port: 3260, default portal group: 1]
        #[arg(long, value_name = "ADDRESS:PORT,GROUP", required = true)]
        portal: Vec<String>,
        /// Address for discovery, instead of the portals of the same group
        #[arg(long, value_name = "ADDRESS:PORT,GROUP")]
        announce: Vec<String>,
        /// Access of any initiator: none, ro or rw [default: none]
        #[arg(long, value_name = "MODE")]
        demo_mode: Option<String>,
        /// CHAP users: a file that the daemon may read, as for serve --chap-user
        #[arg(long, value_name = "FILE")]
        chap_user: Option<String>,
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
    /// List logical units, of all exports or of one
    List {
        /// The controller or target
        export: Option<String>,
    },
    /// Show a logical unit
    Show {
        /// The controller or target
        export: String,
        /// Address; an iSCSI target has target 0 only
        #[arg(value_name = "TARGET:LUN")]
        address: String,
    },
    /// Add a logical unit; connected clients are notified
    Add {
        /// The controller or target
        export: String,
        /// Address; an iSCSI target has target 0 only
        #[arg(value_name = "TARGET:LUN")]
        address: String,
        /// The disk
        disk: String,
        /// Replace the disk at this address
        #[arg(long)]
        force: bool,
    },
    /// Remove a logical unit; connected clients are notified
    Remove {
        /// The controller or target
        export: String,
        /// Address
        #[arg(value_name = "TARGET:LUN")]
        address: String,
        /// Abort its requests, and ignore reservations
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
        /// ID, as listed
        session: String,
    },
    /// End an iSCSI session: requests a logout, and drops the connection after two seconds or at the second call
    Remove {
        /// ID, as listed
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
        /// Name
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

An empty, truncated, changed or unreadable file is neither used nor replaced: its
object is unavailable or responds BUSY. Restore the file from a backup, or reset it.
The reset saves state that the daemon still has in memory.";

/// Actions of `lunette state`.
#[derive(Debug, Subcommand)]
pub enum StateAction {
    /// List the files, with the object and the condition of each
    List,
    /// Reset a damaged file: move it aside, and serve its object with the default state
    Reset {
        /// Name of the file, as listed
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
        /// Accepted for clarity: the configuration in effect is always shown
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
    /// Reload even if objects are in use: disconnects clients, aborts requests, drops data beyond a new end
    #[arg(long)]
    pub force: bool,
}

const AFTER_RELOAD: &str = "\
Examples:
    lunette reload

Applies the smallest set of changes, or none and prints all reasons. SIGHUP does the same.
Changes made at run time remain in effect: see lunette config diff.";
