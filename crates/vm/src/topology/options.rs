//! What a plan is made for: the guest around its disks, and the QEMU that will run it.

use super::pci::MachineType;
use super::words::TopologyError;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// A version of QEMU, as far as its options differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QemuVersion {
    /// The first number.
    pub major: u32,
    /// The second.
    pub minor: u32,
}

impl QemuVersion {
    /// The oldest that is supported.
    pub const OLDEST: QemuVersion = QemuVersion { major: 7, minor: 2 };

    /// Reads `7.2`, `10.0.3`, or what `qemu-system-x86_64 --version` prints.
    ///
    /// # Errors
    /// Where no number is, or it is too old.
    pub fn parse(text: &str) -> Result<QemuVersion, TopologyError> {
        let wrong =
            |problem: String| TopologyError::new("QEMU's version", problem, "--qemu-version 7.2");
        let text = text.lines().next().unwrap_or_default();
        let number = text.split_whitespace().find_map(|word| {
            let (major, rest) = word.split_once('.')?;
            let minor = rest.split(|c: char| !c.is_ascii_digit()).next()?;
            Some(QemuVersion {
                major: major.parse().ok()?,
                minor: minor.parse().ok()?,
            })
        });
        let number =
            number.ok_or_else(|| wrong(format!("{text:?} holds no number such as 7.2")))?;
        match number < QemuVersion::OLDEST {
            true => Err(wrong(format!(
                "{number} is too old, {} is the oldest that is supported",
                QemuVersion::OLDEST
            ))),
            false => Ok(number),
        }
    }

    /// Is it this version, or a later one?
    pub fn is_at_least(self, major: u32, minor: u32) -> bool {
        self >= QemuVersion { major, minor }
    }
}

impl fmt::Display for QemuVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A kernel that QEMU loads itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The image.
    pub image: PathBuf,
    /// The first file system.
    pub initrd: Option<PathBuf>,
    /// The command line.
    pub append: String,
}

/// A disk that the guest boots from, or has beside the others; always the first one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SystemDisk {
    /// The file.
    pub path: PathBuf,
    /// Is it qcow2? Else it is raw.
    pub is_qcow2: bool,
    /// Served by Lunette; else by QEMU.
    pub by_lunette: bool,
}

/// What a running daemon says of one of its disks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownDisk {
    /// Bytes.
    pub size: Option<u64>,
    /// Serial number.
    pub serial: Option<String>,
    /// NAA identifier.
    pub wwn: Option<u64>,
}

/// The guest around the disks.
#[derive(Clone, Debug)]
pub struct PlanOptions {
    /// The guest's name.
    pub name: String,
    /// Its UUID.
    pub uuid: Option<String>,
    /// What makes its disks' serial numbers differ from those of other guests on this and other machines.
    pub seed: String,
    /// Virtual CPUs.
    pub cpus: u32,
    /// Memory.
    pub memory_mib: u32,
    /// Is it shared, also where no device of the plan needs that?
    pub is_memory_shared: bool,
    /// The chipset.
    pub machine: MachineType,
    /// Has it ACPI, by which it hears of power-off and hot-plug?
    pub has_acpi: bool,
    /// QEMU's `-cpu`.
    pub cpu: String,
    /// QEMU's `-accel`, in the order in which QEMU tries them.
    pub accelerators: Vec<String>,
    /// The folder of the exports' sockets.
    pub sockets: PathBuf,
    /// The QEMU that is to run it.
    pub qemu: QemuVersion,
    /// What it boots without a disk.
    pub kernel: Option<Kernel>,
    /// What it boots from.
    pub system: Option<SystemDisk>,
    /// Names of PCI devices that the caller adds: each gets an address, from the upper end of the bus.
    pub reserved: Vec<String>,
    /// Arguments of QEMU that come last.
    pub extra: Vec<String>,
    /// QEMU's consoles, unless the caller has its own.
    pub console: Vec<String>,
    /// Of disks that a running daemon has, by name.
    pub known: BTreeMap<String, KnownDisk>,
}

impl Default for PlanOptions {
    fn default() -> PlanOptions {
        PlanOptions {
            name: "lunette-guest".to_owned(),
            uuid: None,
            seed: String::new(),
            cpus: 2,
            memory_mib: 1024,
            is_memory_shared: false,
            machine: MachineType::Q35,
            has_acpi: true,
            cpu: "max".to_owned(),
            accelerators: vec!["kvm".to_owned(), "tcg,thread=multi".to_owned()],
            sockets: PathBuf::from("/tmp"),
            qemu: QemuVersion::OLDEST,
            kernel: None,
            system: None,
            reserved: Vec::new(),
            extra: Vec::new(),
            console: ["-display", "none", "-serial", "mon:stdio"]
                .map(str::to_owned)
                .to_vec(),
            known: BTreeMap::new(),
        }
    }
}
