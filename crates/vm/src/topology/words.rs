//! What the words of a topology mean: groups of disks, how they reach the guest, and what their content lies on.

use std::fmt;
use std::path::PathBuf;

/// Who emulates a disk's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// Lunette, over vhost-user.
    Lunette,
    /// QEMU, in its main loop.
    Qemu,
    /// QEMU, in threads for I/O.
    QemuIothread,
}

impl Via {
    /// All, by their words.
    pub const WORDS: [(&str, Via); 3] = [
        ("lunette", Via::Lunette),
        ("qemu", Via::Qemu),
        ("qemu-iothread", Via::QemuIothread),
    ];

    /// Its word.
    pub fn word(self) -> &'static str {
        let found = Via::WORDS.iter().find(|(_, via)| *via == self);
        found.map_or("", |(word, _)| word)
    }

    /// Is it a device of QEMU's own?
    pub fn is_qemu(self) -> bool {
        self != Via::Lunette
    }
}

/// What the content of disks lies on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Memory of the daemon.
    Ram,
    /// A raw file for each disk in a folder.
    File(PathBuf),
    /// The same in a folder that is memory, where O_DIRECT may not work.
    Tmpfs(PathBuf),
    /// Block devices of the host, one for each disk.
    Block(Vec<PathBuf>),
    /// Disks that a running daemon has, by name.
    Daemon(Vec<String>),
}

/// How QEMU does the I/O of its own devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aio {
    /// Linux's native asynchronous I/O, which needs O_DIRECT.
    Native,
    /// io_uring.
    IoUring,
    /// A pool of threads.
    Threads,
}

impl Aio {
    /// All, by their words.
    pub const WORDS: [(&str, Aio); 3] = [
        ("native", Aio::Native),
        ("io_uring", Aio::IoUring),
        ("threads", Aio::Threads),
    ];

    /// Its word, which QEMU and libvirt use too.
    pub fn word(self) -> &'static str {
        let found = Aio::WORDS.iter().find(|(_, aio)| *aio == self);
        found.map_or("", |(word, _)| word)
    }
}

/// How the disks of a group are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One virtio-scsi controller with so many targets, and so many logical units in each.
    Scsi {
        /// Targets, numbered from 0.
        targets: u32,
        /// Logical units of each target, numbered from 0.
        luns: u32,
    },
    /// So many virtio-blk devices.
    Blk {
        /// Devices.
        count: u32,
    },
}

impl Shape {
    /// Disks of the group.
    pub fn disks(self) -> u32 {
        match self {
            Shape::Scsi { targets, luns } => targets.saturating_mul(luns),
            Shape::Blk { count } => count,
        }
    }

    /// PCI devices of the group.
    pub fn devices(self) -> u32 {
        match self {
            Shape::Scsi { .. } => 1,
            Shape::Blk { count } => count,
        }
    }
}

/// One `scsi:` or `blk:` word with all that applies to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The word as it was written.
    pub word: String,
    /// How its disks are arranged.
    pub shape: Shape,
    /// Request queues of each device; `None`: one for each virtual CPU.
    pub queues: Option<u32>,
    /// Entries of each queue; `None`: QEMU's default.
    pub queue_size: Option<u32>,
    /// Commands that a logical unit may have in flight; `None`: QEMU's default.
    pub cmd_per_lun: Option<u32>,
    /// So many of its disks, from the first, have a removable medium.
    pub removable: u32,
    /// Packed rings.
    pub packed: bool,
    /// A request may take one descriptor of the ring, whatever its parts (VIRTIO_F_INDIRECT_DESC).
    pub indirect: bool,
    /// Who emulates the devices.
    pub via: Via,
    /// What the disks lie on.
    pub backing: Backing,
    /// Size of each disk in bytes; `None`: what lies there has one.
    pub size: Option<u64>,
    /// How QEMU does its I/O.
    pub aio: Option<Aio>,
    /// Does a kick arrive by eventfd? `None`: QEMU's default.
    pub ioeventfd: Option<bool>,
    /// Each device's queues are spread over so many threads for I/O.
    pub vq_mapping: Option<u32>,
    /// Threads that the group's devices share.
    pub iothreads: Option<u32>,
}

/// All disks of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// In the order in which they were written.
    pub groups: Vec<Group>,
}

/// A word that makes no sense, or a plan that cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopologyError {
    /// The word.
    pub word: String,
    /// What is wrong with it, with the values that are allowed.
    pub problem: String,
    /// What to write instead.
    pub hint: String,
}

impl TopologyError {
    pub(super) fn new(
        word: &str,
        problem: impl Into<String>,
        hint: impl Into<String>,
    ) -> TopologyError {
        TopologyError {
            word: word.to_owned(),
            problem: problem.into(),
            hint: hint.into(),
        }
    }
}

impl fmt::Display for TopologyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; hint: {}", self.word, self.problem, self.hint)
    }
}

impl std::error::Error for TopologyError {}
