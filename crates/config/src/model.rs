//! The object model as data: what a daemon serves, from a file, flags or both, checked.
//!
//! The names here are the names in the file, in the flags and on the control socket.

use std::net::SocketAddr;
use std::path::PathBuf;

use bdev::{DiscardMode, ErrorPolicy};
use reactor::ExportPlacement;

use super::devices::BlockDeviceConfig;
use super::iscsi::IscsiConfig;
use super::iscsi_limits::IscsiLimits;
use super::socket_rights::SocketRights;

/// Most workers a daemon may have.
pub const WORKERS_MAX: usize = 128;
/// Most request queues of a vhost-blk export.
pub const BLK_QUEUES_MAX: u16 = 256;
/// Most request queues of a vhost-scsi controller: its control and event queues are the other two.
pub const SCSI_QUEUES_MAX: u16 = 254;
/// Most targets of a vhost-scsi controller.
pub const TARGETS_MAX: u16 = 256;
/// Most logical units of one target (SAM-5, 4.7.7.3: flat space addressing has 14 bits).
pub const LUNS_MAX: u16 = 16_384;
/// Longest name of a disk or an export.
pub const NAME_MAX: usize = 64;
/// Longest serial: virtio-blk's GET_ID returns 20 bytes (virtio 1.3, 5.2.6).
pub const SERIAL_MAX: usize = 20;
/// Longest path of a Unix socket: `sun_path` with its closing zero.
pub const SOCKET_PATH_MAX: usize = 107;
/// Longest bound on polling, in microseconds: beyond it, say `always`.
pub const POLL_MICROS_MAX: u32 = 1_000_000;

/// All that one daemon serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where the control socket is; `None`: at the usual place.
    pub control: Option<PathBuf>,
    /// Who may ask there.
    pub access: AccessConfig,
    /// Where what must survive a restart is kept; `None`: at the usual place.
    pub state: Option<PathBuf>,
    /// Where metrics are served over TCP; `None`: on the control socket only.
    pub metrics_listen: Option<SocketAddr>,
    /// What becomes of a thread that does what it has no need of.
    pub sandbox: sandbox::Mode,
    /// Folders and files that the daemon may open beside those of the configuration.
    pub sandbox_paths: Vec<PathBuf>,
    /// The threads that do the work.
    pub workers: WorkersConfig,
    /// Named block devices.
    pub disks: Vec<DiskConfig>,
    /// Exports of one disk each as virtio-blk.
    pub vhost_blk: Vec<VhostBlkConfig>,
    /// Exports of many disks each as a virtio-scsi controller.
    pub vhost_scsi: Vec<VhostScsiConfig>,
    /// iSCSI targets.
    pub iscsi: Vec<IscsiConfig>,
    /// The file with the CHAP users of discovery sessions; `None`: these need not authenticate.
    pub discovery_auth: Option<PathBuf>,
    /// What their initiators may take.
    pub iscsi_limits: IscsiLimits,
}

impl Config {
    /// The disk of this name.
    pub fn disk(&self, name: &str) -> Option<&DiskConfig> {
        self.disks.iter().find(|disk| disk.name == name)
    }

    /// The same without disks and exports.
    pub fn without_objects(&self) -> Config {
        Config {
            control: self.control.clone(),
            access: self.access.clone(),
            state: self.state.clone(),
            metrics_listen: self.metrics_listen,
            sandbox: self.sandbox,
            sandbox_paths: self.sandbox_paths.clone(),
            workers: self.workers.clone(),
            disks: Vec::new(),
            vhost_blk: Vec::new(),
            vhost_scsi: Vec::new(),
            iscsi: Vec::new(),
            discovery_auth: self.discovery_auth.clone(),
            iscsi_limits: self.iscsi_limits.clone(),
        }
    }

    /// Returns the daemon's own keys of this configuration with the disks and exports of another.
    pub fn with_objects_of(&self, other: &Config) -> Config {
        Config {
            disks: other.disks.clone(),
            vhost_blk: other.vhost_blk.clone(),
            vhost_scsi: other.vhost_scsi.clone(),
            iscsi: other.iscsi.clone(),
            ..self.clone()
        }
    }

    /// Puts a disk in the place of the one of its name, or behind the others.
    pub fn put_disk(&mut self, disk: DiskConfig) {
        match self.disks.iter_mut().find(|known| known.name == disk.name) {
            Some(known) => *known = disk,
            None => self.disks.push(disk),
        }
    }
}

/// Who may ask beside root and the daemon's own user: on the control socket by groups, over TCP by tokens; without
/// any nobody.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessConfig {
    /// Its members may change everything, with files in `allow_paths`.
    pub control_group: Option<String>,
    /// Its members may look on.
    pub control_readers: Option<String>,
    /// Where the API is served over TCP; `None`: nowhere.
    pub api_listen: Option<SocketAddr>,
    /// Clients that show the token in this file over TCP may do the same.
    pub token_file: Option<PathBuf>,
    /// Who shows the token in this file over TCP may look on.
    pub readers_token_file: Option<PathBuf>,
    /// Names, beside `localhost` and IP addresses, that browsers may use for the API.
    pub api_names: Vec<String>,
    /// Folders and files that requests of the control group and of token holders may name. Empty: those that the configuration names.
    pub allow_paths: Vec<PathBuf>,
}

impl AccessConfig {
    /// Is any group named?
    pub fn has_groups(&self) -> bool {
        self.control_group.is_some() || self.control_readers.is_some()
    }
}

/// How many threads, where, and how long they poll.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkersConfig {
    /// How many, and whether each has a CPU of its own.
    pub placement: Placement,
    /// How long a worker that serves guests' rings polls before it sleeps.
    pub poll: PollLimit,
    /// And one whose clients are all connections.
    pub network_poll: PollLimit,
    /// And one that waits for a disk.
    pub disk_poll: PollLimit,
}

/// Where workers run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// So many, wherever the kernel puts them.
    Count(usize),
    /// One for each of these CPUs, pinned to it.
    Cpus(Vec<usize>),
}

impl Placement {
    /// How many workers there are.
    pub fn count(&self) -> usize {
        match self {
            Placement::Count(count) => *count,
            Placement::Cpus(cpus) => cpus.len(),
        }
    }
}

/// The bound on polling before a worker arms notifications and sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollLimit {
    /// Sleep as soon as nothing is there.
    Never,
    /// Poll at most so many microseconds; the worker tunes itself below it.
    Micros(u32),
    /// Never sleep.
    Always,
}

/// A named block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Its name: exports refer to it.
    pub name: String,
    /// The block device that does its I/O.
    pub backend: BlockDeviceConfig,
    /// Effect of a discard.
    pub discard: DiscardMode,
    /// Logical block size in bytes, 512 or 4096; `None`: 512, and for a block device what it has.
    pub block_size: Option<u32>,
    /// Nothing may be written.
    pub read_only: bool,
    /// The daemon does not start without it.
    pub require: bool,
    /// What clients see as serial number; `None`: from the disk's identity.
    pub serial: Option<String>,
    /// What else its clients see.
    pub shown: ShownConfig,
    /// What all its clients together may do.
    pub limits: LimitsConfig,
    /// What becomes of an I/O that fails or takes too long.
    pub errors: ErrorPolicy,
}

/// Limits of a disk; `None`: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitsConfig {
    /// Requests in a second.
    pub iops: Option<u64>,
    /// Requests that may come at once after a pause; `None`: a twentieth of `iops`.
    pub iops_burst: Option<u64>,
    /// Bytes read and written in a second.
    pub bandwidth: Option<u64>,
    /// Bytes that may come at once after a pause; `None`: a twentieth of `bandwidth`.
    pub bandwidth_burst: Option<u64>,
}

/// What clients see of a disk beyond its size, its blocks and its serial number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShownConfig {
    /// NAA identifier; `None`: from the disk's identity.
    pub wwn: Option<u64>,
    /// Physical block size in bytes; `None`: what the back end says.
    pub physical_block_size: Option<u32>,
    /// SCSI initiators may eject and load the medium.
    pub removable: bool,
    /// EXTENDED COPY through targets that do not have the disk may read and write it.
    pub copy_across_targets: bool,
}

/// One disk as virtio-blk on one vhost-user socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostBlkConfig {
    /// The export's name; the disk's unless said otherwise.
    pub name: String,
    /// The disk's name.
    pub disk: String,
    /// Path of the vhost-user socket.
    pub socket: PathBuf,
    /// Mode, owner and group of the socket.
    pub rights: SocketRights,
    /// Most request queues that a client may use.
    pub queues: u16,
    /// Which workers serve it.
    pub placement: ExportPlacement,
}

/// A virtio-scsi controller on one vhost-user socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostScsiConfig {
    /// The controller's name.
    pub name: String,
    /// Path of the vhost-user socket.
    pub socket: PathBuf,
    /// Mode, owner and group of the socket.
    pub rights: SocketRights,
    /// Most request queues that a client may use; control and event queue come on top.
    pub queues: u16,
    /// Which workers serve it.
    pub placement: ExportPlacement,
    /// Its logical units.
    pub luns: Vec<LunConfig>,
}

/// One logical unit of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LunConfig {
    /// Target, 0 to 255.
    pub target: u8,
    /// Logical unit number, 0 to 16383.
    pub lun: u16,
    /// The disk's name.
    pub disk: String,
}
