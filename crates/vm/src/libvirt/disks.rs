//! Devices of a domain that a plan can express: virtio disks, virtio-scsi controllers, root ports and bridges, and QEMU arguments that
//! libvirt passes through.

use super::domain::Parts;
use crate::topology::{
    Aio, DiskDevice, GuestNames, MachineType, Medium, PciAddress, PlannedDevice, PlannedDisk, Port,
    Via, blk_names, scsi_names,
};
use roxmltree::Node;
use std::path::PathBuf;

/// Units per controller for disks without an address: those of narrow SCSI without the controller's own ID.
const UNITS: u32 = 7;

fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

fn switch(text: &str) -> Option<bool> {
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

/// Values of a disk's `<driver>`.
struct Driver {
    is_qcow2: bool,
    is_direct: bool,
}

impl<'d> Parts<'_, 'd> {
    pub(super) fn devices(&mut self) {
        let (reader, root) = (self.reader, self.root);
        if let Some(devices) = reader.child(root, "devices") {
            for node in reader.candidates(devices, "controller") {
                self.controller(node);
            }
            for node in reader.candidates(devices, "disk") {
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

    fn controller(&mut self, node: Node<'d, 'd>) {
        let reader = self.reader;
        let peek = |name| reader.peek(node, name);
        match (peek("type"), peek("model")) {
            (Some("scsi"), Some("virtio-scsi")) => self.scsi_controller(node),
            (Some("pci"), Some("pcie-root-port" | "pci-bridge")) => self.port(node),
            // Every machine has this controller.
            (Some("pci"), Some("pcie-root" | "pci-root")) | (Some("usb"), Some("none")) => {
                reader.take(node);
                for name in ["type", "model", "index"] {
                    reader.attribute(node, name);
                }
            }
            _ => {}
        }
    }

    fn port(&mut self, node: Node<'d, 'd>) {
        let reader = self.reader;
        let index = reader.peek(node, "index").and_then(number);
        let address = reader.candidates(node, "address").next();
        let on_root = address.filter(|address| {
            reader.peek(*address, "bus").and_then(number).unwrap_or(0) == 0
                && reader
                    .peek(*address, "function")
                    .and_then(number)
                    .unwrap_or(0)
                    == 0
                && reader.peek(*address, "multifunction") != Some("on")
        });
        let slot = on_root.and_then(|address| number(reader.peek(address, "slot")?));
        let (Some(number), Some(slot)) = (index, slot) else {
            return;
        };
        reader.take(node);
        for name in ["type", "model", "index"] {
            reader.attribute(node, name);
        }
        self.pci_address(node);
        // libvirt's name of the bus behind the port, used in QEMU arguments.
        self.ports.push(Port {
            id: format!("pci.{number}"),
            number,
            slot,
        });
    }

    /// Returns the address of a device and marks it as read. A device without an address gets the next free slot.
    pub(super) fn pci_address(&mut self, node: Node<'d, 'd>) -> PciAddress {
        let reader = self.reader;
        let root = self.options.machine.bus().to_owned();
        let Some(address) = reader.child(node, "address") else {
            let slot = self.free_slot();
            self.assigned_slots.push(slot);
            return PciAddress {
                bus: root,
                number: 0,
                slot,
                function: 0,
                multifunction: false,
            };
        };
        reader.attribute(address, "type");
        reader.parsed(address, "domain", |domain| {
            (number(domain)? == 0).then_some(())
        });
        let part = |name| reader.parsed(address, name, number).unwrap_or(0);
        let (bus, slot, function) = (part("bus"), part("slot"), part("function"));
        let is_multifunction = reader.parsed(address, "multifunction", switch);
        PciAddress {
            bus: match bus {
                0 => root,
                bus => format!("pci.{bus}"),
            },
            number: bus,
            slot,
            function,
            multifunction: function > 0 || is_multifunction == Some(true),
        }
    }

    /// Returns the lowest slot that is free in the document and not assigned yet.
    fn free_slot(&self) -> u32 {
        let chipset: &[u32] = match self.options.machine {
            MachineType::Q35 | MachineType::Pc => self.options.machine.chipset(),
        };
        let named = self.root.descendants().filter(|node| {
            node.tag_name().name() == "address"
                && node.attribute("type") == Some("pci")
                && node.attribute("bus").and_then(number).unwrap_or(0) == 0
        });
        let named: Vec<u32> = named
            .filter_map(|node| number(node.attribute("slot")?))
            .collect();
        let taken = |slot: &u32| {
            chipset.contains(slot)
                || self.assigned_slots.contains(slot)
                || named.contains(slot)
                || self
                    .devices
                    .iter()
                    .any(|device| device.address.is_certain() && device.address.slot == *slot)
        };
        (1..32).find(|slot| !taken(slot)).unwrap_or(31)
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
            queues: 1,
            queue_size: None,
            cmd_per_lun: None,
            packed: false,
            indirect: true,
            aio: Aio::Threads,
            ioeventfd: None,
            iothreads: Vec::new(),
            is_mapped: false,
            socket: None,
            boots: false,
        }
    }

    /// Returns the user's alias, otherwise `other`.
    fn alias(&self, node: Node<'d, 'd>, other: String) -> String {
        let reader = self.reader;
        let alias = reader.candidates(node, "alias").next();
        let named = alias.and_then(|alias| {
            reader.take(alias);
            reader.attribute(alias, "name")
        });
        let own = named.and_then(|name| name.strip_prefix("ua-"));
        own.map_or(other, str::to_owned)
    }

    fn scsi_controller(&mut self, node: Node<'d, 'd>) {
        let reader = self.reader;
        reader.take(node);
        for name in ["type", "model"] {
            reader.attribute(node, name);
        }
        let index = reader.parsed(node, "index", number).unwrap_or(0);
        let id = self.alias(node, format!("scsi{index}"));
        let mut device = self.device(id, true, Via::Qemu);
        if let Some(driver) = reader.child(node, "driver") {
            self.queue_options(driver, &mut device);
            device.cmd_per_lun = reader.parsed(driver, "cmd_per_lun", number);
        }
        device.address = self.pci_address(node);
        self.devices.push(device);
    }

    /// Reads the common part of `<driver>` of disks and controllers.
    fn queue_options(&self, driver: Node<'d, 'd>, device: &mut PlannedDevice) {
        let reader = self.reader;
        if let Some(queues) = reader.parsed(driver, "queues", number) {
            device.queues = queues;
        }
        device.queue_size = reader.parsed(driver, "queue_size", number);
        device.packed = reader.parsed(driver, "packed", switch) == Some(true);
        device.ioeventfd = reader.parsed(driver, "ioeventfd", switch);
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

    /// Returns the position of a SCSI disk on a virtio-scsi controller.
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
        let controllers = self.devices.iter().enumerate();
        let mut controllers = controllers.filter(|(_, device)| device.is_scsi);
        let (device, _) = controllers.nth(controller as usize)?;
        if let Some(address) = address {
            reader.take(address);
            for name in ["type", "controller", "bus", "target", "unit"] {
                reader.attribute(address, name);
            }
        }
        Some(DiskDevice::Scsi {
            device,
            target,
            lun,
        })
    }

    fn driver(&self, node: Node<'d, 'd>, device: &mut PlannedDevice) -> Driver {
        let reader = self.reader;
        let mut read = Driver {
            is_qcow2: false,
            is_direct: false,
        };
        let Some(driver) = reader.child(node, "driver") else {
            return read;
        };
        reader.parsed(driver, "name", |name| (name == "qemu").then_some(()));
        reader.parsed(driver, "discard", |discard| {
            (discard == "unmap").then_some(())
        });
        let format = reader.parsed(driver, "type", |format| match format {
            "raw" => Some(false),
            "qcow2" => Some(true),
            _ => None,
        });
        read.is_qcow2 = format.unwrap_or(false);
        let cache = reader.parsed(driver, "cache", |cache| match cache {
            "none" => Some(true),
            "writeback" | "default" => Some(false),
            _ => None,
        });
        read.is_direct = cache.unwrap_or(false);
        let aio = reader.parsed(driver, "io", |word| {
            let found = Aio::WORDS.iter().find(|(name, _)| *name == word);
            found.map(|(_, aio)| *aio)
        });
        device.aio = aio.unwrap_or(Aio::Threads);
        self.queue_options(driver, device);
        read
    }

    fn blk(&mut self, node: Node<'d, 'd>, source: Node<'d, 'd>, kind: &str, id: String) {
        let reader = self.reader;
        let via = match kind {
            "vhostuser" => Via::Lunette,
            _ => Via::Qemu,
        };
        let mut device = self.device(id.clone(), false, via);
        let driver = self.driver(node, &mut device);
        let medium = match via {
            Via::Lunette => {
                reader.attribute(source, "type");
                device.socket = reader.attribute(source, "path").map(PathBuf::from);
                self.reconnect(source);
                Medium::Daemon
            }
            _ => self.medium(source, kind, &driver),
        };
        if let Some(boot) = reader.candidates(node, "boot").next()
            && reader.peek(boot, "order") == Some("1")
        {
            reader.take(boot);
            reader.attribute(boot, "order");
            device.boots = true;
        }
        device.address = self.pci_address(node);
        let serial = reader.text(node, "serial").map(str::to_owned);
        let index = self
            .disks
            .iter()
            .filter(|disk| matches!(disk.location, DiskDevice::Blk { .. }));
        let queues = device.queues.min(self.options.cpus);
        let guest = blk_names(index.count(), &device.address, serial.as_deref(), queues);
        let location = DiskDevice::Blk {
            device: self.devices.len(),
        };
        self.devices.push(device);
        self.add_disk(id, medium, serial, None, location, guest);
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
            is_direct: driver.is_direct,
            is_device,
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
        let mut options = self.device(String::new(), true, Via::Qemu);
        let driver = self.driver(node, &mut options);
        let medium = self.medium(source, kind, &driver);
        let serial = reader.text(node, "serial").map(str::to_owned);
        let wwn = reader.text(node, "wwn");
        let wwn = wwn.and_then(|wwn| u64::from_str_radix(wwn.trim_start_matches("0x"), 16).ok());
        let before = self.devices.iter().take(index);
        let host = before.filter(|device| device.is_scsi).count();
        let controller = &mut self.devices[index];
        // A plan has one I/O mode for all disks of a controller.
        controller.aio = options.aio;
        let queues = controller.queues.min(self.options.cpus);
        let guest = scsi_names(host, (target, lun), &controller.address, wwn, queues);
        self.add_disk(id, medium, serial, wwn, location, guest);
    }

    fn add_disk(
        &mut self,
        name: String,
        medium: Medium,
        serial: Option<String>,
        wwn: Option<u64>,
        location: DiskDevice,
        guest: GuestNames,
    ) {
        self.disks.push(PlannedDisk {
            name,
            medium,
            size: None,
            serial,
            wwn,
            removable: false,
            location,
            guest,
        });
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
