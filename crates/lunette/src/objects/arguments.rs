//! The definitions of `lunette disk`, `export`, `lun`, `session`, `reservation`, `config`, `status` and `reload`.

use clap::{Args, Subcommand};

use crate::whom::Whom;

/// Which daemon is asked, and how the answer is printed.
#[derive(Clone, Debug, Args)]
pub struct Ask {
    /// Which daemon
    #[command(flatten)]
    pub whom: Whom,
    /// Print JSON
    #[arg(long, global = true, help_heading = "Options")]
    pub json: bool,
}

/// `lunette status`
#[derive(Debug, Args)]
#[command(after_help = AFTER_STATUS)]
pub struct LookArguments {
    /// Which daemon
    #[command(flatten)]
    pub ask: Ask,
}

const AFTER_STATUS: &str = "\
Examples:
    lunette status
    lunette status --json | jq .exports

Exit code 0: all is well, 1: something is not, or there is no daemon.";

/// `lunette disk`
#[derive(Debug, Args)]
#[command(after_help = AFTER_DISK)]
pub struct DiskCommand {
    /// Which daemon
    #[command(flatten)]
    pub ask: Ask,
    /// What to do
    #[command(subcommand)]
    pub action: DiskAction,
}

const AFTER_DISK: &str = "\
Examples:
    lunette disk list
    lunette disk add scratch=ram:512M
    lunette disk add d1=file:vm.raw,size=10G,cache=none
    lunette disk resize d1 20G
    lunette disk resize d1                         as large as its file or block device is by now
    lunette disk limit d1 iops=500,bandwidth=20M   and no others
    lunette disk limit d1 none
    lunette disk set d1 on_error=enospc            when the device is full, I/O waits
    lunette disk resume d1
    lunette disk identity d1
    lunette disk identity d1 --new   a copy of another disk becomes one of its own
    lunette disk remove scratch";

/// What to do with disks.
#[derive(Debug, Subcommand)]
pub enum DiskAction {
    /// All disks
    List,
    /// One disk
    Show {
        /// Its name
        disk: String,
    },
    /// Add a disk, which exports and logical units then can show
    Add {
        /// NAME=ram:SIZE, NAME=null:SIZE, NAME=file:PATH or NAME=rbd:POOL/IMAGE, then ,KEY=VALUE as for serve --disk
        #[arg(value_name = "NAME=BACKEND:...")]
        disk: String,
    },
    /// Grow or shrink a disk; its clients see it at once
    Resize {
        /// Its name
        disk: String,
        /// How large it is to be: bytes, or K, M, G, T [default: as large as its file or block device is by now]
        size: Option<String>,
        /// Shrink it, although what is beyond the new end is lost
        #[arg(long)]
        force: bool,
    },
    /// Limit what all clients of a disk together may do in a second; holds at once
    Limit {
        /// Its name
        disk: String,
        /// All its limits: iops, iops_burst, bandwidth, bandwidth_burst; or none
        #[arg(value_name = "KEY=VALUE,...|none")]
        limits: String,
    },
    /// Set what becomes of I/O that fails or takes too long; holds at once
    Set {
        /// Its name
        disk: String,
        /// on_error: report (clients get the error), stop (I/O waits) or enospc (I/O waits if the device is full); io_timeout: seconds that
        /// an I/O may take before it is cancelled, or none
        #[arg(value_name = "KEY=VALUE,...")]
        setting: String,
    },
    /// Submit again the I/O that has failed and waits
    Resume {
        /// Its name
        disk: String,
    },
    /// Show which disk it is to its clients, or make it another one
    Identity {
        /// Its name
        disk: String,
        /// Give it a new identity, as a copy of another disk needs; nothing may show it
        #[arg(long)]
        new: bool,
    },
    /// Remove a disk
    Remove {
        /// Its name
        disk: String,
        /// Remove what shows it too
        #[arg(long)]
        force: bool,
    },
}

/// `lunette export`
#[derive(Debug, Args)]
#[command(after_help = AFTER_EXPORT)]
pub struct ExportCommand {
    /// Which daemon
    #[command(flatten)]
    pub ask: Ask,
    /// What to do
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
    lunette export place d0 dedicated   a worker that serves nothing else
    lunette export remove vm0 --force";

/// What to do with exports.
#[derive(Debug, Subcommand)]
pub enum ExportAction {
    /// All exports
    List,
    /// One export
    Show {
        /// Its name
        export: String,
    },
    /// Add an export
    Add {
        /// What sort
        #[command(subcommand)]
        export: NewExport,
    },
    /// Choose the workers that serve an export; what clients use already stays where it is
    Place {
        /// Its name
        export: String,
        /// Numbers of workers such as 1,3; or dedicated: a worker of its own; or shared: any that exports share
        #[arg(value_name = "WORKERS|dedicated|shared")]
        workers: String,
    },
    /// Remove an export
    Remove {
        /// Its name
        export: String,
        /// Disconnect its clients
        #[arg(long)]
        force: bool,
    },
}

/// An export that is to be added.
#[derive(Debug, Subcommand)]
pub enum NewExport {
    /// One disk as virtio-blk on a vhost-user socket
    VhostBlk {
        /// Then ,name=NAME, ,queues=N, ,workers=1+3 or ,dedicated
        #[arg(value_name = "DISK:SOCKET")]
        export: String,
    },
    /// A virtio-scsi controller on a vhost-user socket
    VhostScsi {
        /// Then ,queues=N, ,workers=1+3 or ,dedicated
        #[arg(value_name = "NAME:SOCKET")]
        export: String,
    },
    /// An iSCSI target with these disks as LUNs from 0
    Iscsi {
        /// Then ,alias=TEXT, ,workers=1+3 or ,dedicated=on
        #[arg(value_name = "IQN=DISK,...")]
        export: String,
        /// Where it is found [default port: 3260, default portal group: 1]
        #[arg(long, value_name = "ADDRESS:PORT,GROUP", required = true)]
        portal: Vec<String>,
        /// Where initiators are told to find it, instead of the portals of the same group
        #[arg(long, value_name = "ADDRESS:PORT,GROUP")]
        announce: Vec<String>,
        /// What any initiator may do: none, ro or rw [default: none]
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
    /// Which daemon
    #[command(flatten)]
    pub ask: Ask,
    /// What to do
    #[command(subcommand)]
    pub action: LunAction,
}

const AFTER_LUN: &str = "\
Examples:
    lunette lun list vm0
    lunette lun add vm0 4:0 scratch      the guest sees a new disk at target 4, LUN 0
    lunette lun remove vm0 4:0           once its requests have ended
    lunette lun remove vm0 4:0 --force   its requests are aborted";

/// What to do with logical units.
#[derive(Debug, Subcommand)]
pub enum LunAction {
    /// All logical units, or those of one export
    List {
        /// The controller or target
        export: Option<String>,
    },
    /// One logical unit
    Show {
        /// The controller or target
        export: String,
        /// Where it is; an iSCSI target has target 0 only
        #[arg(value_name = "TARGET:LUN")]
        address: String,
    },
    /// Add a logical unit; clients that are connected see it at once
    Add {
        /// The controller or target
        export: String,
        /// Where it is to be; an iSCSI target has target 0 only
        #[arg(value_name = "TARGET:LUN")]
        address: String,
        /// The disk
        disk: String,
        /// Replace the disk that is there
        #[arg(long)]
        force: bool,
    },
    /// Remove a logical unit; clients that are connected hear of it
    Remove {
        /// The controller or target
        export: String,
        /// Where it is
        #[arg(value_name = "TARGET:LUN")]
        address: String,
        /// Abort its requests, and never mind reservations
        #[arg(long)]
        force: bool,
    },
}

/// `lunette session`
#[derive(Debug, Args)]
#[command(after_help = AFTER_SESSION)]
pub struct SessionCommand {
    /// Which daemon
    #[command(flatten)]
    pub ask: Ask,
    /// What to do
    #[command(subcommand)]
    pub action: SessionAction,
}

const AFTER_SESSION: &str = "\
Examples:
    lunette session list
    lunette session remove iscsi-3      the initiator may log in again";

/// What to do with sessions.
#[derive(Debug, Subcommand)]
pub enum SessionAction {
    /// All sessions
    List,
    /// One session
    Show {
        /// Its id, as listed
        session: String,
    },
    /// End an iSCSI session: its initiator is asked to log out, and dropped after two seconds, or at once when this is said again
    Remove {
        /// Its id, as listed
        session: String,
    },
}

/// `lunette reservation`
#[derive(Debug, Args)]
#[command(after_help = AFTER_RESERVATION)]
pub struct ReservationCommand {
    /// Which daemon
    #[command(flatten)]
    pub ask: Ask,
    /// What to do
    #[command(subcommand)]
    pub action: ReservationAction,
}

const AFTER_RESERVATION: &str = "\
Examples:
    lunette reservation list
    lunette reservation show d0";

/// What to do with reservations.
#[derive(Debug, Subcommand)]
pub enum ReservationAction {
    /// All registrations and reservations
    List,
    /// Those of one disk
    Show {
        /// Its name
        disk: String,
    },
}

/// `lunette config`
#[derive(Debug, Args)]
#[command(after_help = AFTER_CONFIG)]
pub struct ConfigCommand {
    /// Which daemon
    #[command(flatten)]
    pub ask: Ask,
    /// What to do
    #[command(subcommand)]
    pub action: ConfigAction,
}

const AFTER_CONFIG: &str = "\
Examples:
    lunette config show > lunette.toml   what is in effect, as a file
    lunette config diff                  what was changed at run time, beside the file";

/// What to do with the configuration.
#[derive(Debug, Subcommand)]
pub enum ConfigAction {
    /// The configuration that is in effect, as the text of a file
    Show {
        /// What is in effect is what is shown in any case
        #[arg(long)]
        effective: bool,
    },
    /// What was changed at run time, beside what the file and the flags say
    Diff,
}

/// `lunette reload`
#[derive(Debug, Args)]
#[command(after_help = AFTER_RELOAD)]
pub struct ReloadArguments {
    /// Which daemon
    #[command(flatten)]
    pub ask: Ask,
    /// What is in the way goes too
    #[arg(long)]
    pub force: bool,
}

const AFTER_RELOAD: &str = "\
Examples:
    lunette reload

The smallest set of changes is made, or none with all the reasons. SIGHUP does the same.
What was changed at run time stays: see lunette config diff.";
