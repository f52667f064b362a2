//! Data model of a topology: groups of disks, their devices, and their storage.

use std::fmt;
use std::path::PathBuf;

/// Program that emulates a disk's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// Lunette, over vhost-user.
    Lunette,
    /// QEMU, in its main loop.
    Qemu,
    /// QEMU, in I/O threads.
    QemuIothread,
    /// QEMU, as ATA disks of a PIIX3 IDE controller.
    Ide,
    /// QEMU, as ATA disks of AHCI controllers.
    Ahci,
    /// The SCSI target of the host's kernel (vhost-scsi).
    VhostScsi,
}

impl Via {
    /// All values with their words.
    pub const WORDS: [(&str, Via); 6] = [
        ("lunette", Via::Lunette),
        ("qemu", Via::Qemu),
        ("qemu-iothread", Via::QemuIothread),
        ("ide", Via::Ide),
        ("ahci", Via::Ahci),
        ("vhost-scsi", Via::VhostScsi),
    ];

    /// Returns the word.
    pub fn word(self) -> &'static str {
        let found = Via::WORDS.iter().find(|(_, via)| *via == self);
        found.map_or("", |(word, _)| word)
    }

    /// Returns true for devices emulated by QEMU.
    pub fn is_qemu(self) -> bool {
        !matches!(self, Via::Lunette | Via::VhostScsi)
    }

    /// Returns the maximum number of disks of an ATA controller; `None` for virtio devices.
    pub fn ata_disks(self) -> Option<u32> {
        match self {
            // Two channels with a master and a slave.
            Via::Ide => Some(4),
            Via::Ahci => Some(6),
            Via::Lunette | Via::Qemu | Via::QemuIothread | Via::VhostScsi => None,
        }
    }
}

/// Storage of the disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Memory of the daemon.
    Ram,
    /// A raw file per disk in a folder.
    File(PathBuf),
    /// A raw file per disk in a folder in memory, where O_DIRECT may not work.
    Tmpfs(PathBuf),
    /// Block devices of the host, one per disk.
    Block(Vec<PathBuf>),
    /// Disks of a running daemon, by name.
    Daemon(Vec<String>),
    /// Logical units of a target in the host's kernel, by the WWPN of the target.
    KernelTarget(String),
}

/// I/O mode of QEMU's own devices.
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
    /// All values with their words.
    pub const WORDS: [(&str, Aio); 3] = [
        ("native", Aio::Native),
        ("io_uring", Aio::IoUring),
        ("threads", Aio::Threads),
    ];

    /// Returns the word, which QEMU and libvirt also use.
    pub fn word(self) -> &'static str {
        let found = Aio::WORDS.iter().find(|(_, aio)| *aio == self);
        found.map_or("", |(word, _)| word)
    }
}

/// Arrangement of the disks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One virtio-scsi controller with a number of targets and of logical units per target.
    Scsi {
        /// Number of targets, numbered from 0.
        targets: u32,
        /// Number of logical units per target, numbered from 0.
        luns: u32,
    },
    /// Separate virtio-blk devices, or ATA disks.
    Blk {
        /// Number of devices.
        count: u32,
    },
}

impl Shape {
    /// Returns the number of disks in the group.
    pub fn disks(self) -> u32 {
        match self {
            Shape::Scsi { targets, luns } => targets.saturating_mul(luns),
            Shape::Blk { count } => count,
        }
    }
}

/// One `scsi:` or `blk:` word with its settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The word as written.
    pub word: String,
    /// Arrangement of the disks.
    pub shape: Shape,
    /// Request queues per device; `None`: one per virtual CPU.
    pub queues: Option<u32>,
    /// Entries per queue; `None`: QEMU's default.
    pub queue_size: Option<u32>,
    /// Maximum number of commands in flight per logical unit; `None`: QEMU's default.
    pub cmd_per_lun: Option<u32>,
    /// Number of disks, from the first, with a removable medium.
    pub removable: u32,
    /// Use packed rings.
    pub packed: bool,
    /// Use indirect descriptors (VIRTIO_F_INDIRECT_DESC): a request needs one descriptor of the ring, regardless of its parts.
    pub indirect: bool,
    /// Program that emulates the devices.
    pub via: Via,
    /// Storage of the disks.
    pub backing: Backing,
    /// Size of each disk in bytes; `None`: that of the existing storage.
    pub size: Option<u64>,
    /// QEMU's I/O mode.
    pub aio: Option<Aio>,
    /// Use an eventfd for kicks; `None`: QEMU's default.
    pub ioeventfd: Option<bool>,
    /// Accept SCSI commands of virtio-blk (VIRTIO_BLK_F_SCSI); `None`: QEMU's default.
    pub scsi_commands: Option<bool>,
    /// Number of I/O threads over which the queues of each device are distributed.
    pub vq_mapping: Option<u32>,
    /// Number of threads that the group's devices share.
    pub iothreads: Option<u32>,
}

impl Group {
    /// Returns the number of PCI devices of the group: controllers, or virtio-blk devices.
    pub fn devices(&self) -> u32 {
        match (self.shape, self.via.ata_disks()) {
            (Shape::Scsi { .. }, _) => 1,
            (Shape::Blk { count }, Some(disks)) => count.div_ceil(disks),
            (Shape::Blk { count }, None) => count,
        }
    }
}

/// All disks of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Groups, in the order of the words.
    pub groups: Vec<Group>,
}

/// An invalid word, or an impossible plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopologyError {
    /// The word.
    pub word: String,
    /// Description of the problem, with the permitted values.
    pub problem: String,
    /// Text to use instead.
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
