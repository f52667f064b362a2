//! Devices of a domain that a plan can express: virtio disks, virtio-scsi controllers, root ports and bridges, and QEMU arguments that
//! libvirt passes through.

use super::addresses::location;
use super::domain::Parts;
use crate::topology::{
    Aio, DiskDevice, MachineType, Medium, NodeSettings, PciAddress, PlannedDevice, PlannedDisk,
    Via, blk_names, scsi_names,
};
use roxmltree::Node;
use std::path::PathBuf;

/// Units per controller for disks without an address: those of narrow SCSI without the controller's own ID.
const UNITS: u32 = 7;

pub(super) fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

pub(super) fn switch(text: &str) -> Option<bool> {
    match text {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}

/// Returns the index of `vdc` or `sdab`.
fn letters_index(name: &str, prefix: &str) -> Option<u32> {
    let letters = name.strip_prefix(prefix)?;
    let mut index: u32 = 0;
    for byte in letters.bytes() {
        let digit = u32::from(byte.checked_sub(b'a')?);
        if digit > 25 {
            return None;
        }
        index = index.checked_mul(26)?.checked_add(digit + 1)?;
    }
    index.checked_sub(1)
}

/// Values of a disk that belong to its block node and to its device.
struct Driver {
    is_qcow2: bool,
    node: NodeSettings,
    properties: Vec<(String, String)>,
}

fn property(name: &str, value: impl Into<String>) -> (String, String) {
    (name.to_owned(), value.into())
}

impl<'d> Parts<'_, 'd> {
    pub(super) fn devices(&mut self) {
        let (reader, root) = (self.reader, self.root);
        if let Some(devices) = reader.child(root, "devices") {
            let nodes = || reader.candidates(devices, "controller");
            let mut controllers: Vec<_> = nodes().collect();
            // The guest finds controllers in this order.
            controllers.sort_by_key(|node| reader.peek(*node, "index").and_then(number));
            for node in controllers {
                self.controller(node);
            }
            for node in self.sorted_disks() {
                self.disk(node);
            }
            for node in reader.candidates(devices, "memballoon") {
                if reader.peek(node, "model") == Some("none") {
                    reader.take(node);
                    reader.attribute(node, "model");
                }
            }
        }
        self.command_line();
        self.overrides();
    }

    /// Returns the disks in libvirt's order: those of one bus by target name.
    pub(super) fn sorted_disks(&self) -> Vec<Node<'d, 'd>> {
        let nodes = self.root.descendants();
        let mut disks: Vec<_> = nodes
            .filter(|node| node.tag_name().name() == "disk")
            .map(|node| {
                (
                    node,
                    node.children()
                        .find(|child| child.tag_name().name() == "target"),
                )
            })
            .collect();
        let bus = |target: &Option<Node<'d, 'd>>| (*target)?.attribute("bus");
        let buses: Vec<_> = disks.iter().map(|(_, target)| bus(target)).collect();
        disks.sort_by_key(|(_, target)| {
            let first = buses.iter().position(|other| *other == bus(target));
            let name = target.and_then(|target| target.attribute("dev"));
            let index = name.and_then(|name| letters_index(name, name.get(..2)?));
            (first, index)
        });
        disks.into_iter().map(|(node, _)| node).collect()
    }

    fn controller(&mut self, node: Node<'d, 'd>) {
        let reader = self.reader;
        let peek = |name| reader.peek(node, name);
        match (peek("type"), peek("model")) {
            (Some("scsi"), Some("virtio-scsi")) => self.scsi_controller(node),
            // Every machine has this controller.
            (Some("pci"), Some("pcie-root" | "pci-root")) | (Some("usb"), Some("none")) => {
                reader.take(node);
                for name in ["type", "model", "index"] {
                    reader.attribute(node, name);
                }
            }
            // The chipset has one of each.
            (Some(kind @ ("sata" | "ide")), _) if peek("index") == Some("0") => {
                let at = match (kind, self.options.machine) {
                    ("sata", MachineType::Q35) => (0, 0x1f, 2),
                    ("ide", MachineType::Pc) => (0, 1, 1),
                    _ => return,
                };
                self.take_chipset(node, at);
            }
            _ => {}
        }
    }

    fn take_chipset(&self, node: Node<'d, 'd>, at: (u32, u32, u32)) {
        let reader = self.reader;
        let address = reader.candidates(node, "address").next();
        if address.is_some_and(|address| location(address) != Some(at)) {
            return;
        }
        reader.take(node);
        for name in ["type", "index"] {
            reader.attribute(node, name);
        }
        if let Some(address) = address {
            reader.take(address);
            for name in ["type", "domain", "bus", "slot", "function"] {
                reader.attribute(address, name);
            }
        }
    }

    fn device(&self, id: String, is_scsi: bool, via: Via) -> PlannedDevice {
        PlannedDevice {
            id,
            address: PciAddress {
                bus: String::new(),
                number: 0,
                slot: 0,
                function: 0,
                multifunction: false,
            },
            is_scsi,
            via,
            queues: None,
            queue_size: None,
            cmd_per_lun: None,
            packed: false,
            indirect: true,
            aio: Aio::Threads,
            ioeventfd: None,
            iothreads: Vec::new(),
            is_mapped: false,
            socket: None,
            wwpn: None,
            boots: false,
            properties: Vec::new(),
        }
    }

    /// Returns the user's alias, otherwise `other`, and marks the alias as read. A name in use gets libvirt's alias or a number.
    fn alias(&mut self, node: Node<'d, 'd>, other: String) -> String {
        let reader = self.reader;
        let alias = reader.candidates(node, "alias").next();
        let named = alias.and_then(|alias| {
            reader.take(alias);
            reader.attribute(alias, "name")
        });
        let own = named.and_then(|name| name.strip_prefix("ua-"));
        let wanted = own.map_or(other, str::to_owned);
        let named = named.map(str::to_owned).into_iter();
        let numbered = (2_u32..).map(|number| format!("{wanted}-{number}"));
        let mut names = std::iter::once(wanted.clone()).chain(named).chain(numbered);
        let name = names.find(|name| !self.ids.contains(name));
        let name = name.unwrap_or(wanted);
        self.ids.insert(name.clone());
        name
    }

    fn scsi_controller(&mut self, node: Node<'d, 'd>) {
        let reader = self.reader;
        let index = reader.peek(node, "index");
        let index = index.map_or(Some(0), number);
        let Some(index) = index.filter(|index| !self.scsi_hosts.contains_key(index)) else {
            return;
        };
        reader.take(node);
        for name in ["type", "model", "index"] {
            reader.attribute(node, name);
        }
        let id = self.alias(node, format!("scsi{index}"));
        let mut device = self.device(id, true, Via::Qemu);
        if let Some(driver) = reader.child(node, "driver") {
            self.queue_options(driver, &mut device);
            device.cmd_per_lun = reader.parsed(driver, "cmd_per_lun", number);
            if let Some(sectors) = reader.parsed(driver, "max_sectors", number) {
                let property = property("max_sectors", sectors.to_string());
                device.properties.push(property);
            }
        }
        device.address = self.pci_address(node);
        self.scsi_hosts.insert(index, self.devices.len());
        self.devices.push(device);
    }

    /// Reads the common part of `<driver>` of disks and controllers.
    fn queue_options(&self, driver: Node<'d, 'd>, device: &mut PlannedDevice) {
        let reader = self.reader;
        if let Some(queues) = reader.parsed(driver, "queues", number) {
            device.queues = Some(queues);
        }
        device.queue_size = reader.parsed(driver, "queue_size", number);
        device.packed = reader.parsed(driver, "packed", switch) == Some(true);
        device.ioeventfd = reader.parsed(driver, "ioeventfd", switch);
        for (attribute, name) in [
            ("event_idx", "event_idx"),
            ("iommu", "iommu_platform"),
            ("ats", "ats"),
            ("page_per_vq", "page-per-vq"),
        ] {
            if let Some(is_on) = reader.parsed(driver, attribute, switch) {
                let value = if is_on { "on" } else { "off" };
                device.properties.push(property(name, value));
            }
        }
        if let Some(thread) = reader.parsed(driver, "iothread", number) {
            device.iothreads.push(format!("iothread{thread}"));
        }
        if let Some(threads) = reader.child(driver, "iothreads") {
            device.is_mapped = true;
            for thread in reader.candidates(threads, "iothread") {
                if let Some(id) = reader.parsed(thread, "id", number) {
                    reader.take(thread);
                    device.iothreads.push(format!("iothread{id}"));
                }
            }
        }
        if !device.iothreads.is_empty() {
            device.via = Via::QemuIothread;
        }
    }

    fn disk(&mut self, node: Node<'d, 'd>) {
        let reader = self.reader;
        let kind = reader.peek(node, "type").unwrap_or("file");
        let target = reader.candidates(node, "target").next();
        let bus = target.and_then(|target| reader.peek(target, "bus"));
        let source = reader.candidates(node, "source").next();
        let is_disk = matches!(reader.peek(node, "device"), None | Some("disk"));
        let (Some(target), Some(source), true) = (target, source, is_disk) else {
            return;
        };
        let name = reader.peek(target, "dev").unwrap_or("disk").to_owned();
        let location = match (kind, bus) {
            ("file" | "block" | "vhostuser", Some("virtio")) => None,
            ("file" | "block", Some("scsi")) => match self.drive(node, &name) {
                Some(location) => Some(location),
                None => return,
            },
            _ => return,
        };
        for node in [node, target, source] {
            reader.take(node);
        }
        for attribute in ["type", "device"] {
            reader.attribute(node, attribute);
        }
        for attribute in ["dev", "bus"] {
            reader.attribute(target, attribute);
        }
        let id = self.alias(node, name);
        match location {
            None => self.blk(node, source, kind, id),
            Some(location) => self.scsi_disk(node, source, kind, id, location),
        }
    }

    /// Returns the position of a SCSI disk on a virtio-scsi controller, if it is free.
    fn drive(&self, node: Node<'d, 'd>, name: &str) -> Option<DiskDevice> {
        let reader = self.reader;
        let address = reader.candidates(node, "address").next();
        let (controller, target, lun) = match address {
            Some(address) => {
                let part = |name| reader.peek(address, name).and_then(number).unwrap_or(0);
                if part("bus") != 0 {
                    return None;
                }
                (part("controller"), part("target"), part("unit"))
            }
            None => {
                let index = letters_index(name, "sd")?;
                (index / UNITS, 0, index % UNITS)
            }
        };
        let device = *self.scsi_hosts.get(&controller)?;
        let location = |lun| DiskDevice::Scsi {
            device,
            target,
            lun,
        };
        let is_free = |lun: &u32| {
            let mut disks = self.disks.iter();
            disks.all(|disk| disk.location != location(*lun))
        };
        let Some(address) = address else {
            return (lun..UNITS).chain(0..lun).find(is_free).map(location);
        };
        if !is_free(&lun) {
            return None;
        }
        reader.take(address);
        for name in ["type", "controller", "bus", "target", "unit"] {
            reader.attribute(address, name);
        }
        Some(location(lun))
    }

    fn driver(&self, node: Node<'d, 'd>, device: &mut PlannedDevice) -> Driver {
        let reader = self.reader;
        let mut read = Driver {
            is_qcow2: false,
            node: NodeSettings {
                is_direct: false,
                ignores_flush: false,
                discards: false,
                is_read_only: reader.child(node, "readonly").is_some(),
                detect_zeroes: None,
                aio: Aio::Threads,
            },
            properties: self.disk_properties(node),
        };
        let Some(driver) = reader.child(node, "driver") else {
            return read;
        };
        reader.parsed(driver, "name", |name| (name == "qemu").then_some(()));
        let discards = reader.parsed(driver, "discard", |discard| match discard {
            "unmap" => Some(true),
            "ignore" => Some(false),
            _ => None,
        });
        read.node.discards = discards.unwrap_or(false);
        let format = reader.parsed(driver, "type", |format| match format {
            "raw" => Some(false),
            "qcow2" => Some(true),
            _ => None,
        });
        read.is_qcow2 = format.unwrap_or(false);
        let cache = reader.parsed(driver, "cache", |cache| match cache {
            "writeback" | "default" => Some((false, false, true)),
            "none" => Some((true, false, true)),
            "unsafe" => Some((false, true, true)),
            "writethrough" => Some((false, false, false)),
            "directsync" => Some((true, false, false)),
            _ => None,
        });
        let (is_direct, ignores_flush, is_writeback) = cache.unwrap_or((false, false, true));
        (read.node.is_direct, read.node.ignores_flush) = (is_direct, ignores_flush);
        if !is_writeback {
            read.properties.push(property("write-cache", "off"));
        }
        let aio = reader.parsed(driver, "io", |word| {
            let found = Aio::WORDS.iter().find(|(name, _)| *name == word);
            found.map(|(_, aio)| *aio)
        });
        read.node.aio = aio.unwrap_or(Aio::Threads);
        device.aio = read.node.aio;
        let detect = reader.parsed(driver, "detect_zeroes", |word| {
            // libvirt turns unmap off without discard.
            let word = match (word, read.node.discards) {
                ("unmap", false) => "on",
                ("on" | "off" | "unmap", _) => word,
                _ => return None,
            };
            Some(word.to_owned())
        });
        read.node.detect_zeroes = detect;
        let policy = |name, words: &[&str]| {
            reader.parsed(driver, name, |word| {
                words.contains(&word).then(|| word.to_owned())
            })
        };
        let on_write = policy("error_policy", &["stop", "report", "ignore", "enospace"]);
        let on_read = policy("rerror_policy", &["stop", "report", "ignore"]);
        if let Some(word) = &on_write {
            let word = if word == "enospace" { "enospc" } else { word };
            read.properties.push(property("werror", word));
        }
        // libvirt's default for reads is the policy for writes.
        if let Some(word) = on_read.or(on_write).filter(|word| word != "enospace") {
            read.properties.push(property("rerror", word));
        }
        self.queue_options(driver, device);
        read
    }

    /// Reads the elements of a disk that are properties of its device.
    fn disk_properties(&self, node: Node<'d, 'd>) -> Vec<(String, String)> {
        let reader = self.reader;
        let mut properties = Vec::new();
        if let Some(boot) = reader.candidates(node, "boot").next() {
            if let Some(order) = reader.parsed(boot, "order", number) {
                reader.take(boot);
                properties.push(property("bootindex", order.to_string()));
            }
        } else if let Some(order) = self.boot_index(node) {
            properties.push(property("bootindex", order.to_string()));
        }
        if reader.child(node, "shareable").is_some() {
            properties.push(property("share-rw", "on"));
        }
        if let Some(sizes) = reader.candidates(node, "blockio").next() {
            reader.take(sizes);
            for name in ["logical_block_size", "physical_block_size"] {
                if let Some(size) = reader.parsed(sizes, name, number) {
                    properties.push(property(name, size.to_string()));
                }
            }
        }
        properties
    }

    fn blk(&mut self, node: Node<'d, 'd>, source: Node<'d, 'd>, kind: &str, id: String) {
        let reader = self.reader;
        let via = match kind {
            "vhostuser" => Via::Lunette,
            _ => Via::Qemu,
        };
        let mut device = self.device(id.clone(), false, via);
        let mut driver = self.driver(node, &mut device);
        let medium = match via {
            Via::Lunette => {
                // The daemon has the other settings.
                driver.properties.retain(|(name, _)| name == "bootindex");
                reader.attribute(source, "type");
                device.socket = reader.attribute(source, "path").map(PathBuf::from);
                self.reconnect(source);
                Medium::Daemon
            }
            _ => self.medium(source, kind, &driver),
        };
        device.address = self.pci_address(node);
        let serial = reader.text(node, "serial").map(str::to_owned);
        let index = self
            .disks
            .iter()
            .filter(|disk| matches!(disk.location, DiskDevice::Blk { .. }));
        let queues = self.guest_queues(&device);
        let guest = blk_names(index.count(), &device.address, serial.as_deref(), queues);
        let location = DiskDevice::Blk {
            device: self.devices.len(),
        };
        self.devices.push(device);
        self.disks.push(PlannedDisk {
            name: id,
            medium,
            size: None,
            serial,
            wwn: None,
            removable: false,
            properties: driver.properties,
            location,
            guest,
        });
    }

    /// Reads the reconnect settings. QEMU's command line reconnects every second, if possible.
    fn reconnect(&self, source: Node<'d, 'd>) {
        let reader = self.reader;
        if let Some(reconnect) = reader.child(source, "reconnect") {
            reader.parsed(reconnect, "enabled", |enabled| {
                (enabled == "yes").then_some(())
            });
            reader.parsed(reconnect, "timeout", |timeout| {
                (timeout == "1").then_some(())
            });
        }
    }

    fn medium(&self, source: Node<'d, 'd>, kind: &str, driver: &Driver) -> Medium {
        let is_device = kind == "block";
        let name = if is_device { "dev" } else { "file" };
        let path = self.reader.attribute(source, name).unwrap_or_default();
        Medium::Existing {
            path: PathBuf::from(path),
            is_qcow2: driver.is_qcow2,
            is_device,
            node: driver.node.clone(),
        }
    }

    fn scsi_disk(
        &mut self,
        node: Node<'d, 'd>,
        source: Node<'d, 'd>,
        kind: &str,
        id: String,
        location: DiskDevice,
    ) {
        let reader = self.reader;
        let DiskDevice::Scsi {
            device: index,
            target,
            lun,
        } = location
        else {
            return;
        };
        let hosts = self.scsi_hosts.iter();
        let host_index = hosts.filter(|(_, device)| **device == index);
        let host_index = host_index.map(|(number, _)| *number).next().unwrap_or(0);
        let mut options = self.device(String::new(), true, Via::Qemu);
        let mut driver = self.driver(node, &mut options);
        driver.properties.append(&mut options.properties);
        let medium = self.medium(source, kind, &driver);
        let serial = reader.text(node, "serial").map(str::to_owned);
        for name in ["vendor", "product"] {
            if let Some(text) = reader.text(node, name) {
                driver.properties.push(property(name, text));
            }
        }
        if serial.is_none() {
            let alias = reader.candidates(node, "alias").next();
            let alias = alias.and_then(|alias| reader.peek(alias, "name"));
            let alias = alias.filter(|alias| alias.starts_with("ua-"));
            let alias = alias.map_or(format!("scsi{host_index}-0-{target}-{lun}"), str::to_owned);
            let text = format!("drive-{alias}");
            driver.properties.push(property("device_id", text));
        }
        let wwn = reader.text(node, "wwn");
        let wwn = wwn.and_then(|wwn| u64::from_str_radix(wwn.trim_start_matches("0x"), 16).ok());
        let before = self.devices.iter().take(index);
        let host = before.filter(|device| device.is_scsi).count();
        let controller = &self.devices[index];
        let queues = self.guest_queues(controller);
        let guest = scsi_names(host, (target, lun), &controller.address, wwn, queues);
        self.disks.push(PlannedDisk {
            name: id,
            medium,
            size: None,
            serial,
            wwn,
            removable: false,
            properties: driver.properties,
            location,
            guest,
        });
    }

    /// Returns the number of queues that the guest uses.
    fn guest_queues(&self, device: &PlannedDevice) -> u32 {
        let cpus = self.options.cpus;
        let version = self.options.machine_version.as_deref();
        let version = version.and_then(|name| name.rsplit('-').next()?.split_once('.'));
        let version = version.and_then(|(major, minor)| Some((number(major)?, number(minor)?)));
        // Machines of QEMU 5.1 and earlier have one queue by default, later ones have one for each CPU.
        let default = match version {
            Some(version) if version < (5, 2) => 1,
            _ => cpus,
        };
        device.queues.unwrap_or(default).min(cpus)
    }

    /// Reads arguments that libvirt passes to QEMU.
    fn command_line(&mut self) {
        let reader = self.reader;
        let Some(line) = reader.child(self.root, "commandline") else {
            return;
        };
        for argument in reader.candidates(line, "arg") {
            reader.take(argument);
            let value = reader.attribute(argument, "value").unwrap_or_default();
            self.options.extra.push(value.to_owned());
        }
    }

    /// Reads device properties that libvirt passes to QEMU.
    fn overrides(&mut self) {
        let reader = self.reader;
        let Some(overrides) = reader.child(self.root, "override") else {
            return;
        };
        for node in reader.candidates(overrides, "device") {
            let alias = reader.peek(node, "alias").unwrap_or_default();
            let id = alias.strip_prefix("ua-").unwrap_or(alias).to_owned();
            let Some(front) = reader.candidates(node, "frontend").next() else {
                continue;
            };
            for property in reader.candidates(front, "property") {
                let name = reader.peek(property, "name");
                let value = reader.peek(property, "value").unwrap_or_default();
                if self.override_property(&id, name.unwrap_or_default(), value) {
                    for node in [node, front, property] {
                        reader.take(node);
                    }
                    reader.attribute(node, "alias");
                    for attribute in ["name", "type", "value"] {
                        reader.attribute(property, attribute);
                    }
                }
            }
        }
    }

    fn override_property(&mut self, id: &str, name: &str, value: &str) -> bool {
        match name {
            "removable" => {
                let disk = self.disks.iter_mut().find(|disk| disk.name == id);
                let is_on = value == "true";
                disk.map(|disk| disk.removable = is_on).is_some()
            }
            "indirect_desc" => {
                let device = self.devices.iter_mut().find(|device| device.id == id);
                let is_on = value != "false";
                device.map(|device| device.indirect = is_on).is_some()
            }
            "virtqueue_size" => {
                let device = self.devices.iter_mut().find(|device| device.id == id);
                let size = number(value);
                device
                    .zip(size)
                    .map(|(device, size)| device.queue_size = Some(size))
                    .is_some()
            }
            _ => false,
        }
    }
}
