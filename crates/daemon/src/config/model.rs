//! The object model as data: what a daemon serves, from a file, flags or both, checked.
//!
//! The names here are the names in the file, in the flags and on the control socket.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::iscsi::IscsiConfig;

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
    /// Where the control socket is; `None`: at the usual place, see [`crate::control::default_socket`].
    pub control: Option<PathBuf>,
    /// Where what must survive a restart is kept; `None`: at the usual place, see [`crate::state::default_folder`].
    pub state: Option<PathBuf>,
    /// Where metrics are served over TCP; `None`: on the control socket only.
    pub metrics_listen: Option<SocketAddr>,
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
}

impl Config {
    /// The disk of this name.
    pub fn disk(&self, name: &str) -> Option<&DiskConfig> {
        self.disks.iter().find(|disk| disk.name == name)
    }
}

/// How many threads, where, and how long they poll.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkersConfig {
    /// How many, and whether each has a CPU of its own.
    pub placement: Placement,
    /// How long a worker polls before it sleeps.
    pub poll: PollLimit,
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
    /// The engine that does its I/O.
    pub backend: BackendConfig,
    /// Logical block size in bytes, 512 or 4096; `None`: 512, and for a block device what it has.
    pub block_size: Option<u32>,
    /// Nothing may be written.
    pub read_only: bool,
    /// What clients see as serial number; `None`: made from the name.
    pub serial: Option<String>,
    /// What else its clients see.
    pub shown: ShownConfig,
    /// What all its clients together may do.
    pub limits: LimitsConfig,
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
    /// NAA identifier; `None`: made from the machine, the name and the serial.
    pub wwn: Option<u64>,
    /// Physical block size in bytes; `None`: what the back end says.
    pub physical_block_size: Option<u32>,
    /// SCSI initiators may eject and load the medium.
    pub removable: bool,
}

/// The engine that does a disk's I/O, with its options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackendConfig {
    /// Memory of the daemon, taken when touched.
    Ram {
        /// Bytes.
        size: u64,
    },
    /// Completes at once and keeps nothing, for measuring.
    Null {
        /// Bytes.
        size: u64,
    },
    /// A raw file or a block device.
    File {
        /// The file; relative to the folder that the daemon was started in.
        path: PathBuf,
        /// Bytes; a file that is not there is created with this size, sparse.
        size: Option<u64>,
        /// What sits between it and stable storage.
        cache: CacheMode,
    },
}

impl BackendConfig {
    /// The word for it in files and flags.
    pub fn word(&self) -> &'static str {
        match self {
            BackendConfig::Ram { .. } => "ram",
            BackendConfig::Null { .. } => "null",
            BackendConfig::File { .. } => "file",
        }
    }
}

/// What sits between a file and stable storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// O_DIRECT: the page cache is passed by.
    None,
    /// The page cache holds written data until a flush.
    Writeback,
    /// Every write is on stable storage before it is answered.
    Writethrough,
}

impl CacheMode {
    /// All of them, with their words.
    pub const WORDS: [(&'static str, CacheMode); 3] = [
        ("none", CacheMode::None),
        ("writeback", CacheMode::Writeback),
        ("writethrough", CacheMode::Writethrough),
    ];

    /// The word for it in files and flags.
    pub fn word(self) -> &'static str {
        match self {
            CacheMode::None => "none",
            CacheMode::Writeback => "writeback",
            CacheMode::Writethrough => "writethrough",
        }
    }
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
    /// Most request queues that a client may use.
    pub queues: u16,
}

/// A virtio-scsi controller on one vhost-user socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostScsiConfig {
    /// The controller's name.
    pub name: String,
    /// Path of the vhost-user socket.
    pub socket: PathBuf,
    /// Most request queues that a client may use; control and event queue come on top.
    pub queues: u16,
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
