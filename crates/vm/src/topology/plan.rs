//! The resolved plan: every disk with name, serial number, size and position, and every device with its PCI address. The renderers in
//! this folder only format it.

use super::names::{self, GuestNames, ScsiDiskLocation};
use super::options::{KnownDisk, PlanOptions, SystemDisk};
use super::pci::{Budget, Layout, MachineType, PciAddress, Port, assign_addresses};
use super::words::{Aio, Backing, Group, Shape, Topology, TopologyError, Via};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Maximum length of a socket path: sockaddr_un has 108 bytes including the NUL.
const SOCKET_PATH_MAX: usize = 107;

/// Tag of the portal group that targetcli creates first.
pub(crate) const PORTAL_GROUP: u32 = 1;

/// Storage of a disk's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Medium {
    /// Memory of the daemon.
    Ram {
        /// Size in bytes.
        size: u64,
    },
    /// A raw file, created with this size if it does not exist.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Size in bytes.
        size: u64,
        /// The file is in memory (tmpfs), where only the page cache exists.
        is_tmpfs: bool,
    },
    /// A block device of the host.
    Block {
        /// Path of the device.
        path: PathBuf,
    },
    /// A disk of the running daemon with this name.
    Daemon,
    /// A logical unit of a target in the host's kernel.
    KernelTarget,
    /// The system disk, unmodified.
    System(SystemDisk),
    /// An existing file or device, unmodified.
    Existing {
        /// Path of the file or device.
        path: PathBuf,
        /// The format is qcow2, otherwise raw.
        is_qcow2: bool,
        /// The path is a block device.
        is_device: bool,
        /// QEMU's settings of the block node.
        node: NodeSettings,
    },
}

/// QEMU's settings of the block node of an existing file or device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSettings {
    /// Bypass the page cache.
    pub is_direct: bool,
    /// Ignore flushes.
    pub ignores_flush: bool,
    /// Pass discards to the file or device.
    pub discards: bool,
    /// The guest may only read.
    pub is_read_only: bool,
    /// Value of QEMU's `detect-zeroes`.
    pub detect_zeroes: Option<String>,
    /// I/O mode.
    pub aio: Aio,
}

impl Medium {
    /// Returns the path of the file or device.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Medium::File { path, .. } | Medium::Block { path } | Medium::Existing { path, .. } => {
                Some(path)
            }
            Medium::System(system) => Some(&system.path),
            Medium::Ram { .. } | Medium::Daemon | Medium::KernelTarget => None,
        }
    }

    /// Returns true for direct I/O.
    pub fn is_direct(&self) -> bool {
        let is_cached = matches!(
            self,
            Medium::File { is_tmpfs: true, .. }
                | Medium::Existing {
                    node: NodeSettings {
                        is_direct: false,
                        ..
                    },
                    ..
                }
        );
        !is_cached
    }

    /// Returns the daemon's back end for a file of this format.
    pub fn kind(&self) -> &'static str {
        match self.is_qcow2() {
            true => "image",
            false => "file",
        }
    }

    /// Returns true for qcow2, false for raw.
    pub fn is_qcow2(&self) -> bool {
        match self {
            Medium::System(system) => system.is_qcow2,
            Medium::Existing { is_qcow2, .. } => *is_qcow2,
            _ => false,
        }
    }

    /// Returns true for a block device.
    pub fn is_device(&self) -> bool {
        matches!(
            self,
            Medium::Block { .. }
                | Medium::Existing {
                    is_device: true,
                    ..
                }
        )
    }
}

/// Device of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskDevice {
    /// A virtio-blk device: an index into [`Plan::devices`].
    Blk {
        /// Index of the device.
        device: usize,
    },
    /// A logical unit of a virtio-scsi controller.
    Scsi {
        /// Index of the controller in [`Plan::devices`].
        device: usize,
        /// Target number.
        target: u32,
        /// Logical unit number.
        lun: u32,
    },
    /// A disk of an ATA controller.
    Ata {
        /// Index of the controller in [`Plan::devices`].
        device: usize,
        /// IDE channel or AHCI port.
        port: u32,
        /// Position on the IDE channel: 0 is the master, 1 the slave.
        unit: u32,
    },
}

impl DiskDevice {
    /// Returns the index of the device.
    pub fn device(self) -> usize {
        match self {
            DiskDevice::Blk { device }
            | DiskDevice::Scsi { device, .. }
            | DiskDevice::Ata { device, .. } => device,
        }
    }
}

/// One disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedDisk {
    /// Name in the daemon, and ID of its device in QEMU.
    pub name: String,
    /// Storage of its content.
    pub medium: Medium,
    /// Size in bytes, if known.
    pub size: Option<u64>,
    /// Serial number, if known.
    pub serial: Option<String>,
    /// NAA identifier, if known.
    pub wwn: Option<u64>,
    /// The medium is removable.
    pub removable: bool,
    /// Further properties of QEMU's device: the virtio-blk device or the SCSI disk.
    pub properties: Vec<(String, String)>,
    /// Device of the disk.
    pub location: DiskDevice,
    /// Names in the guest.
    pub guest: GuestNames,
}

/// One virtio device or ATA controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedDevice {
    /// ID in QEMU, and name of its export in the daemon.
    pub id: String,
    /// PCI address.
    pub address: PciAddress,
    /// The device is a virtio-scsi controller, otherwise a virtio-blk device.
    pub is_scsi: bool,
    /// Program that emulates it.
    pub via: Via,
    /// Number of request queues; `None`: QEMU's default.
    pub queues: Option<u32>,
    /// Entries of each queue.
    pub queue_size: Option<u32>,
    /// Maximum number of commands in flight per logical unit.
    pub cmd_per_lun: Option<u32>,
    /// Use packed rings.
    pub packed: bool,
    /// Use indirect descriptors.
    pub indirect: bool,
    /// QEMU's I/O mode.
    pub aio: Aio,
    /// Use an eventfd for kicks.
    pub ioeventfd: Option<bool>,
    /// I/O threads: one, or the set over which its queues are distributed.
    pub iothreads: Vec<String>,
    /// The queues are distributed over the threads.
    pub is_mapped: bool,
    /// vhost-user socket.
    pub socket: Option<PathBuf>,
    /// WWPN of the target in the host's kernel.
    pub wwpn: Option<String>,
    /// The guest boots from it.
    pub boots: bool,
    /// Further properties of QEMU's device.
    pub properties: Vec<(String, String)>,
}

/// Resolved disks of a guest.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Options of the guest.
    pub options: PlanOptions,
    /// Disks, in the order of the words.
    pub disks: Vec<PlannedDisk>,
    /// Devices, ordered as the guest finds them.
    pub devices: Vec<PlannedDevice>,
    /// Root ports or bridges.
    pub ports: Vec<Port>,
    /// Addresses for devices that the caller adds.
    pub reserved: Vec<(String, PciAddress)>,
    /// Use of the PCI slots.
    pub budget: Budget,
    /// Notes for the user.
    pub notes: Vec<String>,
}

impl Plan {
    /// Resolves a topology.
    ///
    /// # Errors
    /// The reason why the plan is impossible.
    pub fn new(topology: &Topology, options: PlanOptions) -> Result<Plan, TopologyError> {
        check_options(&options)?;
        let mut words: Vec<(String, u32)> = Vec::new();
        if options.system.is_some() {
            words.push(("--system".to_owned(), 1));
        }
        let groups = topology.groups.iter();
        words.extend(groups.map(|group| (group.word.clone(), group.devices())));
        let layout = assign_addresses(options.machine, &words, options.reserved.len())?;
        let mut builder = Builder::new(options, &layout);
        builder.add_system();
        for group in &topology.groups {
            builder.add_group(group)?;
        }
        builder.check_names()?;
        builder.finish(layout)
    }

    /// Returns true if Lunette emulates a device.
    pub fn needs_daemon(&self) -> bool {
        self.devices.iter().any(|device| device.via == Via::Lunette)
    }

    /// Returns the device of a disk.
    pub fn device_of(&self, disk: &PlannedDisk) -> &PlannedDevice {
        &self.devices[disk.location.device()]
    }

    /// Returns the disks of a device, by its index.
    pub fn disks_of(&self, device: usize) -> impl Iterator<Item = &PlannedDisk> {
        let disks = self.disks.iter();
        disks.filter(move |disk| disk.location.device() == device)
    }

    /// Returns the files that QEMU needs before it starts, with their sizes. The daemon creates its files itself.
    pub fn files_of_qemu(&self) -> Vec<(&Path, u64)> {
        let disks = self.disks.iter();
        let disks = disks.filter(|disk| self.device_of(disk).via.is_qemu());
        disks
            .filter_map(|disk| match &disk.medium {
                Medium::File { path, size, .. } => Some((path.as_path(), *size)),
                _ => None,
            })
            .collect()
    }
}

pub(super) fn check_options(options: &PlanOptions) -> Result<(), TopologyError> {
    let wrong =
        |word: &str, problem: String, hint: &str| Err(TopologyError::new(word, problem, hint));
    let is_name = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let starts = options
        .name
        .starts_with(|c: char| c.is_ascii_alphanumeric());
    if !starts || options.name.len() > 64 || !options.name.chars().all(is_name) {
        let problem = format!(
            "{:?}; allowed are 1 to 64 letters, digits, `.`, `_` and `-`, the first a letter or a digit",
            options.name
        );
        return wrong("--name", problem, "--name guest1");
    }
    if !(1..=255).contains(&options.cpus) {
        let problem = format!("{}; allowed are 1 to 255", options.cpus);
        return wrong("--smp", problem, "--smp 2");
    }
    if options.memory_mib < 64 {
        let problem = format!("{} MiB; a guest needs 64 MiB", options.memory_mib);
        return wrong("--memory", problem, "--memory 1G");
    }
    Ok(())
}

/// Builds a plan, group by group.
pub(super) struct Builder {
    options: PlanOptions,
    addresses: std::vec::IntoIter<PciAddress>,
    disks: Vec<PlannedDisk>,
    devices: Vec<PlannedDevice>,
    notes: BTreeSet<String>,
    blk: usize,
    hosts: usize,
    /// Number of ATA controllers.
    ata: usize,
    next_disk: usize,
    iothreads: usize,
    /// Group with devices that share threads: its word, its first thread, and its number of devices so far.
    shared: Option<(String, usize, u32)>,
}

impl Builder {
    pub(super) fn new(options: PlanOptions, layout: &Layout) -> Builder {
        Builder {
            options,
            addresses: layout.devices.clone().into_iter(),
            disks: Vec::new(),
            devices: Vec::new(),
            notes: BTreeSet::new(),
            blk: 0,
            hosts: 0,
            ata: 0,
            next_disk: 0,
            iothreads: 0,
            shared: None,
        }
    }

    pub(super) fn add_system(&mut self) {
        let Some(system) = self.options.system.clone() else {
            return;
        };
        let via = match system.by_lunette {
            true => Via::Lunette,
            false => Via::Qemu,
        };
        let group = Group {
            word: "--system".to_owned(),
            shape: Shape::Blk { count: 1 },
            queues: None,
            queue_size: None,
            cmd_per_lun: None,
            removable: 0,
            packed: false,
            indirect: true,
            via,
            backing: Backing::Ram,
            size: None,
            aio: None,
            ioeventfd: None,
            scsi_commands: None,
            vq_mapping: None,
            iothreads: None,
        };
        // QEMU gives a directly loaded kernel the first place in the boot order.
        let boots = self.options.kernel.is_none();
        let device = self.device("system".to_owned(), &group, boots);
        self.disk(
            "system".to_owned(),
            Medium::System(system),
            &group,
            DiskDevice::Blk { device },
        );
    }

    fn add_group(&mut self, group: &Group) -> Result<(), TopologyError> {
        self.check_version(group)?;
        self.check_kernel_target(group)?;
        match group.shape {
            Shape::Blk { count } if group.via.ata_disks().is_some() => {
                self.add_ata(group, count)?;
            }
            Shape::Blk { count } => {
                for index in 0..count {
                    let (name, medium) = self.medium(group, index)?;
                    let device = self.device(name.clone(), group, false);
                    self.disk(name, medium, group, DiskDevice::Blk { device });
                }
            }
            Shape::Scsi { targets, luns } => {
                let device = self.device(format!("c{}", self.hosts), group, false);
                // The target number of vhost-scsi is the tag of the portal group.
                let first = match group.via {
                    Via::VhostScsi => PORTAL_GROUP,
                    _ => 0,
                };
                for index in 0..targets * luns {
                    let (name, medium) = self.medium(group, index)?;
                    let location = DiskDevice::Scsi {
                        device,
                        target: first + index / luns,
                        lun: index % luns,
                    };
                    self.disk(name, medium, group, location);
                }
                self.end_controller();
            }
        }
        let queues = self.queues(group);
        if queues > self.options.cpus {
            self.notes.insert(format!(
                "{}: a guest with {} CPUs uses {} of {queues} queues",
                group.word, self.options.cpus, self.options.cpus
            ));
        }
        Ok(())
    }

    /// Adds ATA controllers with `count` disks.
    fn add_ata(&mut self, group: &Group, count: u32) -> Result<(), TopologyError> {
        let most = group.via.ata_disks().unwrap_or(1);
        let is_ide = group.via == Via::Ide;
        let has_ide = self.devices.iter().any(|device| device.via == Via::Ide);
        if is_ide && (has_ide || self.options.machine != MachineType::Q35) {
            return Err(TopologyError::new(
                &group.word,
                "the I/O ports of an IDE controller are fixed, so a guest has one, and the pc machine has its own",
                "one group such as blk:4,via=ide with --machine q35, or via=ahci",
            ));
        }
        let mut device = 0;
        for index in 0..count {
            let at = index % most;
            if at == 0 {
                let id = format!("{}{}", group.via.word(), self.ata);
                device = self.device(id, group, false);
                self.ata += 1;
            }
            let (name, medium) = self.medium(group, index)?;
            let (port, unit) = if is_ide { (at / 2, at % 2) } else { (at, 0) };
            let location = DiskDevice::Ata { device, port, unit };
            self.disk(name, medium, group, location);
        }
        Ok(())
    }

    /// Rejects a second controller with a target of the host's kernel, and notes the scope of the target.
    fn check_kernel_target(&mut self, group: &Group) -> Result<(), TopologyError> {
        let Backing::KernelTarget(wwpn) = &group.backing else {
            return Ok(());
        };
        let mut devices = self.devices.iter();
        if devices.any(|device| device.wwpn.as_ref() == Some(wwpn)) {
            return Err(TopologyError::new(
                &group.word,
                format!("target {wwpn} is given twice, but serves one controller at a time"),
                "one group with all LUNs of the target, such as scsi:1x4",
            ));
        }
        self.notes.insert(format!(
            "{}: the guest sees all LUNs of all portal groups of target {wwpn}, which serves one guest at a time",
            group.word
        ));
        Ok(())
    }

    /// Ends a controller; the next SCSI disk belongs to another one.
    pub(super) fn end_controller(&mut self) {
        self.hosts += 1;
    }

    pub(super) fn has_device(&self, id: &str) -> bool {
        self.devices.iter().any(|device| device.id == id)
    }

    /// Sets the socket of an existing export.
    pub(super) fn set_socket(&mut self, device: usize, socket: PathBuf) {
        self.devices[device].socket = Some(socket);
    }

    fn check_version(&self, group: &Group) -> Result<(), TopologyError> {
        let qemu = self.options.qemu;
        let needed = match (group.vq_mapping, group.shape) {
            (None, _) => return Ok(()),
            (Some(_), Shape::Blk { .. }) => (9, 0),
            (Some(_), Shape::Scsi { .. }) => (10, 0),
        };
        if qemu.is_at_least(needed.0, needed.1) {
            return Ok(());
        }
        Err(TopologyError::new(
            &group.word,
            format!(
                "iothread_vq_mapping needs QEMU {}.{}, this is {qemu}",
                needed.0, needed.1
            ),
            "plan for a later version with --qemu-version 10.0; without iothread_vq_mapping each device has one thread",
        ))
    }

    fn queues(&self, group: &Group) -> u32 {
        if group.via.ata_disks().is_some() {
            return 1;
        }
        group.queues.unwrap_or(self.options.cpus)
    }

    /// Returns the name and the medium of a group's next disk.
    fn medium(&mut self, group: &Group, index: u32) -> Result<(String, Medium), TopologyError> {
        let at = index as usize;
        let size = group.size.unwrap_or_default();
        let name = match &group.backing {
            Backing::Daemon(disks) => disks[at].clone(),
            _ => {
                self.next_disk += 1;
                format!("d{}", self.next_disk - 1)
            }
        };
        if self.disks.iter().any(|disk| disk.name == name) {
            return Err(TopologyError::new(
                &group.word,
                format!("two disks have the name {name}"),
                "give each disk of the daemon once, and none with a name such as d0 or d1 if there are new disks",
            ));
        }
        let file = |folder: &Path, is_tmpfs| Medium::File {
            path: folder.join(format!("{}-{name}.raw", self.options.name)),
            size,
            is_tmpfs,
        };
        let medium = match &group.backing {
            Backing::Ram => Medium::Ram { size },
            Backing::File(folder) => file(folder, false),
            Backing::Tmpfs(folder) => file(folder, true),
            Backing::Block(devices) => Medium::Block {
                path: devices[at].clone(),
            },
            Backing::Daemon(_) => Medium::Daemon,
            Backing::KernelTarget(_) => Medium::KernelTarget,
        };
        Ok((name, medium))
    }

    /// Returns the thread of the next device in a group with shared threads, in turn.
    fn shared_thread(&mut self, group: &Group, threads: u32) -> (usize, usize) {
        let devices = match group.shape {
            Shape::Blk { count } => count,
            Shape::Scsi { .. } => 1,
        };
        let fresh = (group.word.clone(), self.iothreads, 0);
        let (word, first, used) = self.shared.take().unwrap_or_else(|| fresh.clone());
        let (_, first, used) = match word == group.word && used < devices {
            true => (word, first, used),
            false => fresh,
        };
        let thread = first + (used % threads) as usize;
        self.shared = Some((group.word.clone(), first, used + 1));
        (thread, thread + 1)
    }

    /// Adds a device. Returns its index.
    pub(super) fn device(&mut self, id: String, group: &Group, boots: bool) -> usize {
        let queues = self.queues(group);
        let threads = match group.via {
            Via::QemuIothread => group.vq_mapping.unwrap_or(1).min(queues),
            _ => 0,
        };
        let (first, end) = match group.iothreads {
            Some(shared) => self.shared_thread(group, shared),
            None => (self.iothreads, self.iothreads + threads as usize),
        };
        self.iothreads = self.iothreads.max(end);
        let is_tmpfs = matches!(group.backing, Backing::Tmpfs(_));
        let socket = self.options.sockets.join(format!("{id}.sock"));
        self.devices.push(PlannedDevice {
            id,
            // The layout has one address per device.
            address: self.addresses.next().unwrap_or(PciAddress {
                bus: self.options.machine.bus().to_owned(),
                number: 0,
                slot: 0,
                function: 0,
                multifunction: false,
            }),
            is_scsi: matches!(group.shape, Shape::Scsi { .. }),
            via: group.via,
            queues: group.via.ata_disks().is_none().then_some(queues),
            queue_size: group.queue_size,
            cmd_per_lun: group.cmd_per_lun,
            packed: group.packed,
            indirect: group.indirect,
            aio: group.aio.unwrap_or(match is_tmpfs {
                true => Aio::Threads,
                false => Aio::Native,
            }),
            ioeventfd: group.ioeventfd,
            iothreads: (first..end)
                .map(|index| format!("iothread{}", index + 1))
                .collect(),
            is_mapped: group.vq_mapping.is_some(),
            socket: (group.via == Via::Lunette).then_some(socket),
            wwpn: match &group.backing {
                Backing::KernelTarget(wwpn) => Some(wwpn.clone()),
                _ => None,
            },
            boots,
            properties: group
                .scsi_commands
                .map(|on| ("scsi".to_owned(), if on { "on" } else { "off" }.to_owned()))
                .into_iter()
                .collect(),
        });
        self.devices.len() - 1
    }

    pub(super) fn disk(
        &mut self,
        name: String,
        medium: Medium,
        group: &Group,
        location: DiskDevice,
    ) {
        let known = match medium {
            Medium::Daemon => self.options.known.get(&name).cloned().unwrap_or_default(),
            // The kernel's target has its own identifiers.
            Medium::KernelTarget => KnownDisk::default(),
            _ => self.options.identity(&name),
        };
        let index = self.disks.iter().rev();
        let index = index.take_while(|disk| disk.location.device() == location.device());
        let removable = (index.count() as u32) < group.removable;
        let device = &self.devices[location.device()];
        let queues = self.queues(group).min(self.options.cpus);
        let guest = match location {
            DiskDevice::Blk { .. } => {
                self.blk += 1;
                names::of_blk(
                    self.blk - 1,
                    &device.address,
                    known.serial.as_deref(),
                    queues,
                )
            }
            DiskDevice::Scsi { target, lun, .. } => {
                let location = ScsiDiskLocation {
                    host: self.hosts,
                    target,
                    lun,
                    address: &device.address,
                    // Determined when all disks are added.
                    is_alone: false,
                };
                names::of_scsi(&location, known.wwn, queues)
            }
            DiskDevice::Ata { port, unit, .. } => names::of_ata(
                (port, unit),
                &device.address,
                known.serial.as_deref().unwrap_or_default(),
            ),
        };
        self.disks.push(PlannedDisk {
            name,
            size: match &medium {
                Medium::Ram { size } | Medium::File { size, .. } => Some(*size),
                _ => known.size,
            },
            medium,
            serial: known.serial,
            wwn: known.wwn,
            removable: removable && matches!(location, DiskDevice::Scsi { .. }),
            properties: Vec::new(),
            location,
            guest,
        });
    }

    pub(super) fn finish(mut self, layout: Layout) -> Result<Plan, TopologyError> {
        for device in &self.devices {
            let Some(socket) = &device.socket else {
                continue;
            };
            if socket.as_os_str().len() > SOCKET_PATH_MAX {
                return Err(TopologyError::new(
                    "--sockets",
                    format!(
                        "the path {} has more than {SOCKET_PATH_MAX} bytes",
                        socket.display()
                    ),
                    "a shorter folder, such as /tmp",
                ));
            }
        }
        // ATA disks have names such as sda, too.
        let mut scsi = self
            .disks
            .iter_mut()
            .filter(|disk| disk.guest.find.is_some());
        if let (Some(disk), None) = (scsi.next(), scsi.next()) {
            disk.guest.device = Some("/dev/sda".to_owned());
        }
        self.add_notes();
        Ok(Plan {
            reserved: self
                .options
                .reserved
                .iter()
                .cloned()
                .zip(layout.reserved)
                .collect(),
            options: self.options,
            disks: self.disks,
            devices: self.devices,
            ports: layout.ports,
            budget: layout.budget,
            notes: self.notes.into_iter().collect(),
        })
    }

    /// Checks names: devices and disks of controllers share QEMU's ID space.
    fn check_names(&self) -> Result<(), TopologyError> {
        let disks = self.disks.iter();
        let disks = disks.filter(|disk| disk.guest.find.is_some());
        let names = disks.map(|disk| &disk.name);
        let mut taken = BTreeSet::new();
        let devices = self.devices.iter().map(|device| &device.id);
        match devices.chain(names).find(|name| !taken.insert(*name)) {
            None => Ok(()),
            Some(name) => Err(TopologyError::new(
                "backing=daemon",
                format!("a device and a disk are both called {name}"),
                "give the daemon's disks other names than system, c0, c1 and so on",
            )),
        }
    }

    fn add_notes(&mut self) {
        let scsi = self.disks.iter().filter(|disk| disk.guest.find.is_some());
        if scsi.count() > 1 {
            self.notes.insert("Linux probes SCSI and ATA disks concurrently, so names such as /dev/sda vary; use the address or /dev/disk/by-id".to_owned());
        }
        let lunette = self
            .devices
            .iter()
            .filter(|device| device.via == Via::Lunette);
        if lunette.clone().any(|device| device.is_scsi) && !self.options.qemu.is_at_least(8, 2) {
            self.notes.insert(format!(
                "QEMU {} does not reconnect vhost-user-scsi: restart the guest after the daemon, or use QEMU 8.2",
                self.options.qemu
            ));
        }
        if self.options.kernel.is_none() && self.options.system.is_none() {
            self.notes.insert(
                "nothing to boot; hint: give a disk with --system FILE or a kernel with --kernel FILE"
                    .to_owned(),
            );
        }
        if self
            .devices
            .iter()
            .any(|device| !device.address.is_certain())
        {
            self.notes.insert("the firmware assigns the PCI bus numbers behind ports; usually the first port has bus 1".to_owned());
        }
    }
}
