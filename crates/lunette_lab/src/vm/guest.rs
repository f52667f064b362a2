//! Properties of the guest, as options of every subcommand that plans one.

use std::path::PathBuf;
use std::process::Command;
use std::str::FromStr;

use super::running_daemon;
use clap::Args;
use cli_common::Failure;
use vm::topology::{
    GuestKernel, MachineType, Plan, PlanOptions, QEMU, QemuVersion, SystemDisk, Topology,
    TopologyError,
};

/// Disks and their guest.
#[derive(Clone, Debug, Args)]
pub struct GuestArguments {
    /// Disks and how they are attached, as words: scsi:TARGETSxLUNS (a controller and its disks), blk:N (N virtio-blk devices),
    /// via=lunette|qemu|qemu-iothread|ide|ahci|vhost-scsi (server of the disks),
    /// backing=ram:SIZE|file:FOLDER|tmpfs:FOLDER|block:DEVICE+DEVICE|daemon:DISK+DISK. Example: scsi:4x1,queues=2 blk:1 backing=ram:256M
    #[arg(value_name = "TOPOLOGY", required = true)]
    pub topology: Vec<String>,
    /// Control socket of the running daemon for backing=daemon [default: that of the system's daemon, if it runs]. With `vm run`, this
    /// daemon serves all disks of the guest
    #[arg(long, value_name = "SOCKET", help_heading = "Guest")]
    pub control: Option<PathBuf>,
    /// Name of the guest. Serial numbers and file names of its disks derive from it
    #[arg(long, default_value = "lunette-guest", help_heading = "Guest")]
    pub name: String,
    /// Number of virtual CPUs, and their topology as for QEMU's -smp: `N,sockets=N,cores=N,threads=N`; each part after the first is optional
    #[arg(long, value_name = "N", default_value = "2", help_heading = "Guest")]
    pub smp: Cpus,
    /// Size of the guest's memory, with M or G (powers of 1024)
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = memory, help_heading = "Guest")]
    pub memory: u32,
    /// Chipset: q35 or pc, or a version of QEMU's machine type, such as pc-q35-7.2 or pc-i440fx-7.2
    #[arg(
        long,
        value_name = "TYPE",
        default_value = "q35",
        help_heading = "Guest"
    )]
    pub machine: Machine,
    /// CPU model, as for QEMU's -cpu
    #[arg(
        long,
        value_name = "MODEL",
        default_value = "max",
        help_heading = "Guest"
    )]
    pub cpu: String,
    /// Accelerator, as for QEMU's -accel; may be given several times, and the first that works is used [default: kvm, then tcg]
    #[arg(long, value_name = "NAME", help_heading = "Guest")]
    pub accel: Vec<String>,
    /// UUID of the guest. With it, the serial numbers of the disks derive from the UUID instead of this machine's ID
    #[arg(long, help_heading = "Guest")]
    pub uuid: Option<String>,
    /// Disk to boot from, the first disk of the guest: FILE, then ,format=raw|qcow2 [default: by the suffix .qcow2] and ,by=qemu|lunette
    /// (server of the disk) [default: qemu]
    #[arg(long, value_name = "FILE", help_heading = "Boot")]
    pub system: Option<String>,
    /// Kernel to boot
    #[arg(long, value_name = "FILE", help_heading = "Boot")]
    pub kernel: Option<PathBuf>,
    /// Initramfs for --kernel
    #[arg(long, value_name = "FILE", requires = "kernel", help_heading = "Boot")]
    pub initrd: Option<PathBuf>,
    /// Command line for --kernel
    #[arg(
        long,
        value_name = "TEXT",
        requires = "kernel",
        default_value = "console=ttyS0",
        help_heading = "Boot"
    )]
    pub append: String,
    /// Folder for the sockets of the exports
    #[arg(
        long,
        value_name = "FOLDER",
        default_value = "/tmp",
        help_heading = "Hypervisor"
    )]
    pub sockets: PathBuf,
    /// Version of QEMU to plan for [default: the installed version, otherwise 7.2]
    #[arg(long, value_name = "N.N", help_heading = "Hypervisor")]
    pub qemu_version: Option<String>,
    /// Additional argument for QEMU; may be given several times
    #[arg(
        long,
        value_name = "ARGUMENT",
        allow_hyphen_values = true,
        help_heading = "Hypervisor"
    )]
    pub qemu_arg: Vec<String>,
}

/// Virtual CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus {
    number: u32,
    topology: Option<String>,
}

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Cpus, String> {
        let (number, topology) = match text.split_once(',') {
            Some((number, topology)) => (number, Some(topology)),
            None => (text, None),
        };
        let is_known = |part: &str| {
            let (key, value) = part.split_once('=').unwrap_or_default();
            ["sockets", "dies", "cores", "threads"].contains(&key) && value.parse::<u32>().is_ok()
        };
        let number = number.parse().ok().filter(|number| *number > 0);
        match (number, topology) {
            (Some(number), topology) if topology.is_none_or(|all| all.split(',').all(is_known)) => {
                Ok(Cpus {
                    number,
                    topology: topology.map(str::to_owned),
                })
            }
            _ => Err("expected N[,sockets=N][,dies=N][,cores=N][,threads=N]; hint: --smp 4,sockets=4,cores=1,threads=1".to_owned()),
        }
    }
}

/// Machine type with its version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    chipset: MachineType,
    version: Option<String>,
}

impl FromStr for Machine {
    type Err = String;

    fn from_str(text: &str) -> Result<Machine, String> {
        let version = |prefix| {
            let version = text.strip_prefix(prefix)?;
            let mut numbers = version.split('.');
            numbers
                .all(|number| number.parse::<u32>().is_ok())
                .then(|| text.to_owned())
        };
        let known = match text {
            "q35" => Some((MachineType::Q35, None)),
            "pc" => Some((MachineType::Pc, None)),
            _ => version("pc-q35-")
                .map(|version| (MachineType::Q35, Some(version)))
                .or_else(|| Some((MachineType::Pc, Some(version("pc-i440fx-")?)))),
        };
        let (chipset, version) = known.ok_or(
            "allowed are q35, pc, pc-q35-N.N and pc-i440fx-N.N; hint: `qemu-system-x86_64 -machine help` lists the versions",
        )?;
        Ok(Machine { chipset, version })
    }
}

/// Parses a size with M or G as MiB.
fn memory(text: &str) -> Result<u32, String> {
    let (digits, factor) = match text.as_bytes().last() {
        Some(b'M') => (&text[..text.len() - 1], 1),
        Some(b'G') => (&text[..text.len() - 1], 1024),
        _ => return Err("allowed are sizes with M or G, such as 512M".to_owned()),
    };
    let number = digits.parse::<u32>().ok();
    number
        .and_then(|number| number.checked_mul(factor))
        .ok_or_else(|| "allowed are sizes with M or G, such as 512M".to_owned())
}

/// Converts an error of a topology to a mistake of the command line.
pub fn mistake(error: TopologyError) -> Failure {
    Failure::mistake(error)
}

impl GuestArguments {
    /// Creates the plan.
    ///
    /// # Errors
    /// Contradictory or invalid arguments.
    pub fn plan(&self) -> Result<Plan, Failure> {
        let topology = Topology::parse(&self.topology).map_err(mistake)?;
        let mut options = self.options()?;
        options.known = running_daemon::known(self.control.as_deref(), &topology)?;
        Plan::new(&topology, options).map_err(mistake)
    }

    /// Options for the guest, without the disks.
    ///
    /// # Errors
    /// Invalid arguments.
    pub fn options(&self) -> Result<PlanOptions, Failure> {
        let usual = PlanOptions::default();
        let accelerators = match self.accel.is_empty() {
            true => usual.accelerators.clone(),
            false => self.accel.clone(),
        };
        Ok(PlanOptions {
            name: self.name.clone(),
            uuid: self.uuid.clone(),
            seed: self.uuid.clone().unwrap_or_else(machine_id),
            cpus: self.smp.number,
            cpu_topology: self.smp.topology.clone(),
            memory_mib: self.memory,
            machine: self.machine.chipset,
            machine_version: self.machine.version.clone(),
            cpu: self.cpu.clone(),
            accelerators,
            sockets: absolute(&self.sockets)?,
            qemu: qemu_version(self.qemu_version.as_deref())?,
            kernel: self.kernel.as_ref().map(|image| GuestKernel {
                image: image.clone(),
                initrd: self.initrd.clone(),
                append: self.append.clone(),
            }),
            system: self.system.as_deref().map(system).transpose()?,
            extra: self.qemu_arg.clone(),
            ..usual
        })
    }
}

fn absolute(path: &std::path::Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path)
        .map_err(|error| Failure::because(format!("cannot resolve {}: {error}", path.display())))
}

/// Unique identifier of this machine. It makes serial numbers differ from those of other machines' guests.
fn machine_id() -> String {
    let text = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    text.trim().to_owned()
}

/// Returns the given version, otherwise that of the installed QEMU, otherwise the oldest.
fn qemu_version(named: Option<&str>) -> Result<QemuVersion, Failure> {
    if let Some(text) = named {
        return QemuVersion::parse(text).map_err(mistake);
    }
    match Command::new(QEMU).arg("--version").output() {
        Ok(output) if output.status.success() => {
            QemuVersion::parse(&String::from_utf8_lossy(&output.stdout)).map_err(mistake)
        }
        // Not installed; the plan may be for another machine.
        _ => Ok(QemuVersion::OLDEST),
    }
}

fn system(text: &str) -> Result<SystemDisk, Failure> {
    let mut parts = text.split(',');
    let path = PathBuf::from(parts.next().unwrap_or_default());
    let extension = path.extension().and_then(|extension| extension.to_str());
    let mut disk = SystemDisk {
        is_qcow2: extension == Some("qcow2"),
        path: absolute(&path)?,
        by_lunette: false,
    };
    for part in parts {
        match part {
            "format=raw" => disk.is_qcow2 = false,
            "format=qcow2" => disk.is_qcow2 = true,
            "by=qemu" => disk.by_lunette = false,
            "by=lunette" => disk.by_lunette = true,
            other => {
                return Err(Failure::mistake(format!(
                    "--system {text}: {other:?} is unknown; allowed are format=raw, format=qcow2, by=qemu and by=lunette; hint: --system disk.qcow2"
                )));
            }
        }
    }
    Ok(disk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_a_size_with_a_unit() {
        assert_eq!(memory("512M"), Ok(512));
        assert_eq!(memory("2G"), Ok(2048));
        for wrong in ["", "G", "12", "1T", "99999999G", "-1G"] {
            assert!(memory(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn processors_and_machines_are_words_of_qemu() {
        let cpus = |text: &str| text.parse::<Cpus>();
        let four = cpus("4,sockets=4,cores=1,threads=1").unwrap();
        assert_eq!((four.number, cpus("2").unwrap().topology), (4, None));
        assert_eq!(
            four.topology.as_deref(),
            Some("sockets=4,cores=1,threads=1")
        );
        for wrong in ["", "0", "4,", "4,maxcpus=8", "4,cores", "four"] {
            assert!(cpus(wrong).is_err(), "{wrong}");
        }
        let machine = |text: &str| text.parse::<Machine>();
        let versioned = machine("pc-i440fx-7.2").unwrap();
        assert_eq!(versioned.chipset, MachineType::Pc);
        assert_eq!(versioned.version.as_deref(), Some("pc-i440fx-7.2"));
        assert_eq!(machine("q35").unwrap().version, None);
        for wrong in ["", "isapc", "pc-q35-", "pc-q35-x", "q35,acpi=off"] {
            assert!(machine(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_system_disk_is_qcow2_by_its_name_or_by_its_word() {
        let read = |text: &str| system(text).map_err(|_| ()).unwrap();
        assert!(read("/a/b.qcow2").is_qcow2);
        assert!(!read("/a/b.qcow2,format=raw").is_qcow2);
        assert!(read("/a/b.raw,by=lunette").by_lunette);
        assert!(system("/a/b.raw,format=vmdk").is_err());
    }
}
