//! Options of a plan: the guest around its disks, and the QEMU version.

use super::pci::MachineType;
use super::words::TopologyError;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// Length of a virtio-blk serial number in bytes (virtio 1.3, 5.2.6).
const SERIAL_MAX: usize = 20;

/// QEMU version, as far as its options differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QemuVersion {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
}

impl QemuVersion {
    /// Oldest supported version.
    pub const OLDEST: QemuVersion = QemuVersion { major: 7, minor: 2 };

    /// Parses `7.2`, `10.0.3`, or the output of `qemu-system-x86_64 --version`.
    ///
    /// # Errors
    /// There is no version number, or the version is too old.
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
            number.ok_or_else(|| wrong(format!("{text:?} contains no number such as 7.2")))?;
        match number < QemuVersion::OLDEST {
            true => Err(wrong(format!(
                "{number} is too old, the oldest supported version is {}",
                QemuVersion::OLDEST
            ))),
            false => Ok(number),
        }
    }

    /// Returns true for this version and later ones.
    pub fn is_at_least(self, major: u32, minor: u32) -> bool {
        self >= QemuVersion { major, minor }
    }
}

impl fmt::Display for QemuVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A kernel that QEMU loads directly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Image.
    pub image: PathBuf,
    /// Initial RAM file system.
    pub initrd: Option<PathBuf>,
    /// Command line.
    pub append: String,
}

/// A disk with the guest's system, or an additional disk; always the first one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SystemDisk {
    /// Path of the file.
    pub path: PathBuf,
    /// The format is qcow2, otherwise raw.
    pub is_qcow2: bool,
    /// Served by Lunette, otherwise by QEMU.
    pub by_lunette: bool,
}

/// Properties of a running daemon's disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownDisk {
    /// Size in bytes.
    pub size: Option<u64>,
    /// Serial number.
    pub serial: Option<String>,
    /// NAA identifier.
    pub wwn: Option<u64>,
}

/// Properties of the guest, except its disks.
#[derive(Clone, Debug)]
pub struct PlanOptions {
    /// Name of the guest.
    pub name: String,
    /// UUID of the guest.
    pub uuid: Option<String>,
    /// Seed of the disks' serial numbers, which makes them unique across guests and machines.
    pub seed: String,
    /// Number of virtual CPUs.
    pub cpus: u32,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Additional memory in KiB, see [`crate::MIGRATING_KIB`].
    pub more_memory_kib: u32,
    /// Share the memory even if no device of the plan requires that.
    pub is_memory_shared: bool,
    /// Machine type.
    pub machine: MachineType,
    /// QEMU's name of a machine version, such as `pc-q35-7.2`.
    pub machine_version: Option<String>,
    /// Further `-machine` properties, such as `vmport=off`.
    pub machine_properties: Vec<String>,
    /// CPU topology for `-smp`, such as `sockets=2,cores=1,threads=1`.
    pub cpu_topology: Option<String>,
    /// Provide ACPI, which the guest needs for power-off and hot-plug.
    pub has_acpi: bool,
    /// QEMU's `-cpu`.
    pub cpu: String,
    /// QEMU's `-accel` values, in the order of preference.
    pub accelerators: Vec<String>,
    /// Folder of the exports' sockets.
    pub sockets: PathBuf,
    /// Version of QEMU.
    pub qemu: QemuVersion,
    /// Kernel for a direct boot.
    pub kernel: Option<Kernel>,
    /// System disk.
    pub system: Option<SystemDisk>,
    /// Names of PCI devices that the caller adds. Each gets an address from the upper end of the bus.
    pub reserved: Vec<String>,
    /// Program, if it is not `qemu-system-x86_64`.
    pub emulator: Option<String>,
    /// QEMU arguments for the clock, the boot menu and power management.
    pub settings: Vec<String>,
    /// I/O threads that exist even if no device uses them.
    pub iothreads: Vec<String>,
    /// Further QEMU arguments, added last.
    pub extra: Vec<String>,
    /// QEMU arguments for consoles, unless the caller has its own.
    pub console: Vec<String>,
    /// Known disks of a running daemon, by name.
    pub known: BTreeMap<String, KnownDisk>,
}

impl PlanOptions {
    /// Returns serial number and NAA identifier of a new disk. They are derived from the guest's seed and name and the disk's name, so a
    /// plan is reproducible and identifiers differ between guests.
    pub(super) fn identity(&self, name: &str) -> KnownDisk {
        let mut hash = Sha256::new();
        for part in [&self.seed, &self.name, name] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part.as_bytes());
        }
        let hash = hash.finalize();
        let number = |from: usize| {
            let bytes = hash.iter().skip(from).take(8);
            bytes.fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
        };
        let short: String = name.chars().take(SERIAL_MAX - 13).collect();
        KnownDisk {
            size: None,
            serial: Some(format!("{short}-{:012x}", number(0) >> 16)),
            // NAA 3h, locally assigned (SPC-5, 7.7.6.6.4).
            wwn: Some(3 << 60 | number(8) >> 4),
        }
    }
}

impl Default for PlanOptions {
    fn default() -> PlanOptions {
        PlanOptions {
            name: "lunette-guest".to_owned(),
            uuid: None,
            seed: String::new(),
            cpus: 2,
            memory_mib: 1024,
            more_memory_kib: 0,
            is_memory_shared: false,
            machine: MachineType::Q35,
            machine_version: None,
            machine_properties: Vec::new(),
            cpu_topology: None,
            has_acpi: true,
            cpu: "max".to_owned(),
            accelerators: vec!["kvm".to_owned(), "tcg,thread=multi".to_owned()],
            sockets: PathBuf::from("/tmp"),
            qemu: QemuVersion::OLDEST,
            kernel: None,
            system: None,
            reserved: Vec::new(),
            emulator: None,
            settings: Vec::new(),
            iothreads: Vec::new(),
            extra: Vec::new(),
            console: ["-display", "none", "-serial", "mon:stdio"]
                .map(str::to_owned)
                .to_vec(),
            known: BTreeMap::new(),
        }
    }
}
