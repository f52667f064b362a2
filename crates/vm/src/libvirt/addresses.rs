//! PCI addresses: those of the document, and the ones that libvirt assigns to ports and devices without an address.
//!
//! On a conventional machine the free slots of the first bus are taken in libvirt's order. On q35 libvirt puts each PCI Express device behind a
//! root port of its own.

use super::disks::{number, switch};
use super::domain::Parts;
use crate::topology::{MachineType, PciAddress, Port, PortKind};
use roxmltree::{Node, NodeId};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Functions of one slot.
const FUNCTIONS: u32 = 8;
/// Slots of one bus.
const SLOTS: u32 = 32;
/// Highest bus number.
const BUSES: u32 = 255;

/// A device that needs an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Owner {
    /// Element of the document.
    Element(NodeId),
    /// USB controller that libvirt adds.
    Usb,
    /// virtio-serial controller that libvirt adds.
    Serial,
    /// Balloon that libvirt adds.
    Balloon,
}

/// Addresses of devices without one in the document, and addresses in use.
#[derive(Default)]
pub(super) struct Addresses {
    assigned: HashMap<Owner, PciAddress>,
    taken: HashSet<(u32, u32, u32)>,
}

/// Slot for a device without an address.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SlotChoice {
    /// This slot of the first bus, if it is free.
    Slot(u32),
    /// Any slot of the first bus.
    Root,
    /// A root port on q35, otherwise any slot.
    Express,
}

/// Returns the bus, slot and function in an `<address type='pci'>`.
pub(super) fn location(address: Node<'_, '_>) -> Option<(u32, u32, u32)> {
    let part = |name| address.attribute(name).and_then(number);
    if !matches!(address.attribute("type"), None | Some("pci")) || part("domain").unwrap_or(0) > 0 {
        return None;
    }
    Some((
        part("bus").unwrap_or(0),
        part("slot")?,
        part("function").unwrap_or(0),
    ))
}

fn named<'d>(node: Node<'d, 'd>, name: &str) -> Option<Node<'d, 'd>> {
    node.children()
        .find(|child| child.tag_name().name() == name)
}

fn location_of(node: Node<'_, '_>) -> Option<(u32, u32, u32)> {
    location(named(node, "address")?)
}

/// Returns the kind of a port or bridge that has an equivalent in a plan.
fn port_kind(node: Node<'_, '_>) -> Option<PortKind> {
    match (node.attribute("type")?, node.attribute("model")?) {
        ("pci", "pcie-root-port") => Some(PortKind::RootPort),
        ("pci", "pci-bridge") => Some(PortKind::PciBridge),
        ("pci", "pcie-to-pci-bridge") => Some(PortKind::PciePciBridge),
        _ => None,
    }
}

impl<'d> Parts<'_, 'd> {
    /// Reads the ports and bridges, and assigns addresses to all devices without one.
    pub(super) fn addresses(&mut self) {
        let reader = self.reader;
        let Some(devices) = reader.child(self.root, "devices") else {
            return;
        };
        let controllers: Vec<_> = reader.candidates(devices, "controller").collect();
        let used = self.root.descendants().filter(|node| {
            let is_device = node
                .parent()
                .is_some_and(|node| node.tag_name().name() != "source");
            is_device
                && node.tag_name().name() == "address"
                && node.attribute("type") == Some("pci")
        });
        let used: Vec<_> = used.filter_map(location).collect();
        let mut slots: BTreeSet<u32> = self.options.machine.chipset().iter().copied().collect();
        slots.extend(used.iter().filter(|at| at.0 == 0).map(|at| at.1));
        let mut wanted = self.wanted(devices);
        for (owner, choice) in &mut wanted {
            if let SlotChoice::Slot(slot) = *choice {
                match slots.insert(slot) {
                    true => {
                        let address = self.on_root(slot);
                        self.addresses.assigned.insert(*owner, address);
                    }
                    false => *choice = SlotChoice::Root,
                }
            }
        }
        wanted.retain(|(_, choice)| !matches!(choice, SlotChoice::Slot(_)));
        self.ports_with_addresses(&controllers);
        let mut maker = PortMaker {
            machine: self.options.machine,
            slots,
            shared: BTreeMap::new(),
        };
        let first = |port: &&Port| port.address.multifunction && port.address.function == 0;
        for port in self
            .ports
            .iter()
            .filter(|port| port.address.number == 0)
            .filter(first)
        {
            let slot = port.address.slot;
            let functions = used
                .iter()
                .filter(|at| at.0 == 0 && at.1 == slot && at.2 < FUNCTIONS);
            let functions = functions.fold(0, |functions, at| functions | 1 << at.2);
            maker.shared.insert(slot, functions);
        }
        self.ports_without_addresses(&controllers, &mut maker);
        let behind: BTreeSet<u32> = used.iter().map(|at| at.0).collect();
        let is_express = self.options.machine == MachineType::Q35;
        let ports = self.ports.iter();
        let mut free: BTreeSet<u32> = ports
            .filter(|port| port.kind == PortKind::RootPort && !behind.contains(&port.number))
            .map(|port| port.number)
            .collect();
        let has_ports = !self.ports.is_empty();
        let mut has_new = false;
        for (owner, choice) in wanted {
            let address = match choice {
                SlotChoice::Express if is_express => {
                    has_new = true;
                    let port = free.pop_first().or_else(|| self.new_port(&mut maker));
                    port.map(behind_port)
                }
                _ => maker.slot().map(|slot| self.on_root(slot)),
            };
            if let Some(address) = address {
                self.addresses.assigned.insert(owner, address);
            }
        }
        // libvirt keeps one port for hot-plug, if it chose the number of ports.
        if has_new && !has_ports {
            self.new_port(&mut maker);
        }
        maker.mark_shared_slots(&mut self.ports);
        self.ports.sort_by_key(|port| port.number);
    }

    fn on_root(&self, slot: u32) -> PciAddress {
        PciAddress {
            bus: self.options.machine.bus().to_owned(),
            number: 0,
            slot,
            function: 0,
            multifunction: false,
        }
    }

    /// Returns the devices without an address, in libvirt's order.
    fn wanted(&self, devices: Node<'d, 'd>) -> Vec<(Owner, SlotChoice)> {
        let is_q35 = self.options.machine == MachineType::Q35;
        let all = |name: &'static str| {
            let found = devices.children();
            found.filter(move |node| node.tag_name().name() == name)
        };
        let model = |node: Node<'d, 'd>| {
            let inner = named(node, "model").and_then(|model| model.attribute("type"));
            node.attribute("model").or(inner).unwrap_or_default()
        };
        let mut found: Vec<(Node<'d, 'd>, SlotChoice)> = Vec::new();
        for node in all("interface") {
            let is_express = model(node).starts_with("virtio") || model(node) == "e1000e";
            let choice = if is_express {
                SlotChoice::Express
            } else {
                SlotChoice::Root
            };
            found.push((node, choice));
        }
        for node in all("sound") {
            match model(node) {
                "ich9" if is_q35 => found.push((node, SlotChoice::Slot(0x1b))),
                "ich6" | "ich9" | "ac97" | "es1370" => found.push((node, SlotChoice::Root)),
                _ => {}
            }
        }
        let mut controllers: Vec<_> = all("controller").collect();
        // libvirt sorts the controllers of one type by number, and leaves the types in the document's order.
        let kinds = controllers.iter().map(|node| node.attribute("type"));
        let kinds: Vec<_> = kinds.collect();
        controllers.sort_by_key(|node| {
            let kind = node.attribute("type");
            let first = kinds.iter().position(|other| *other == kind);
            (first, node.attribute("index").and_then(number))
        });
        for node in controllers {
            match (node.attribute("type"), model(node)) {
                (Some("usb"), "qemu-xhci" | "nec-xhci") => found.push((node, SlotChoice::Express)),
                (Some("scsi"), model) if model.starts_with("virtio") => {
                    found.push((node, SlotChoice::Express));
                }
                (Some("scsi"), _) => found.push((node, SlotChoice::Root)),
                (Some("virtio-serial"), _) => found.push((node, SlotChoice::Express)),
                _ => {}
            }
        }
        let mut wanted = without_address(found);
        // On a conventional machine the default USB controller is a function of the chipset.
        if is_q35 && self.adds_usb() {
            wanted.push((Owner::Usb, SlotChoice::Express));
        }
        if self.adds_serial() {
            wanted.push((Owner::Serial, SlotChoice::Express));
        }
        let disks = self.sorted_disks().into_iter().filter(|node| {
            let target = named(*node, "target");
            target.and_then(|target| target.attribute("bus")) == Some("virtio")
        });
        let disks = disks.map(|node| (node, SlotChoice::Express));
        wanted.extend(without_address(disks));
        let balloons = all("memballoon").filter(|node| model(*node).starts_with("virtio"));
        wanted.extend(without_address(
            balloons.map(|node| (node, SlotChoice::Express)),
        ));
        if self.adds_balloon() {
            wanted.push((Owner::Balloon, SlotChoice::Express));
        }
        let mut found: Vec<_> = all("rng").map(|node| (node, SlotChoice::Express)).collect();
        let watchdogs = all("watchdog").filter(|node| model(*node) == "i6300esb");
        found.extend(watchdogs.map(|node| (node, SlotChoice::Root)));
        let primary = SlotChoice::Slot(if is_q35 { 1 } else { 2 });
        for (index, node) in all("video").enumerate() {
            match (index, model(node)) {
                (_, "none") => {}
                (0, _) => found.push((node, primary)),
                _ => found.push((node, SlotChoice::Root)),
            }
        }
        let inputs = all("input").filter(|node| node.attribute("bus") == Some("virtio"));
        found.extend(inputs.map(|node| (node, SlotChoice::Express)));
        wanted.extend(without_address(found));
        wanted
    }

    fn has_controller(&self, kind: &str) -> bool {
        let mut nodes = self.root.descendants();
        nodes.any(|node| {
            node.tag_name().name() == "controller" && node.attribute("type") == Some(kind)
        })
    }

    /// Returns true if libvirt adds a USB controller.
    pub(super) fn adds_usb(&self) -> bool {
        !self.has_controller("usb")
    }

    /// Returns true if libvirt adds a virtio-serial controller.
    pub(super) fn adds_serial(&self) -> bool {
        let mut channels = self.root.descendants().filter(|node| {
            matches!(node.tag_name().name(), "channel" | "console")
                && named(*node, "target").and_then(|target| target.attribute("type"))
                    == Some("virtio")
        });
        channels.next().is_some() && !self.has_controller("virtio-serial")
    }

    /// Returns true if libvirt adds a balloon.
    pub(super) fn adds_balloon(&self) -> bool {
        let mut nodes = self.root.descendants();
        !nodes.any(|node| node.tag_name().name() == "memballoon")
    }

    /// Reads the ports with an address. Those on a bus that does not exist stay unread.
    fn ports_with_addresses(&mut self, controllers: &[Node<'d, 'd>]) {
        let reader = self.reader;
        let mut ports: Vec<_> = controllers
            .iter()
            .filter_map(|node| {
                let number = node.attribute("index").and_then(number)?;
                Some((number, port_kind(*node)?, *node, location_of(*node)?))
            })
            .collect();
        ports.sort_by_key(|(number, ..)| *number);
        for (number, kind, node, at) in ports {
            let has_bus = at.0 == 0 || self.ports.iter().any(|port| port.number == at.0);
            let is_new = (1..=BUSES).contains(&number)
                && self.ports.iter().all(|port| port.number != number);
            if !has_bus || !is_new || !self.addresses.taken.insert(at) {
                continue;
            }
            let Some(element) = reader.child(node, "address") else {
                continue;
            };
            let address = self.read_address(element, at);
            self.add_port(node, number, kind, address);
        }
    }

    fn ports_without_addresses(&mut self, controllers: &[Node<'d, 'd>], maker: &mut PortMaker) {
        let last = self.ports.iter().map(|port| port.number).max();
        for node in controllers {
            let Some(kind) = port_kind(*node).filter(|_| named(*node, "address").is_none()) else {
                continue;
            };
            let index = node.attribute("index").and_then(number);
            let Some(number) = index.or_else(|| self.free_bus()) else {
                continue;
            };
            let is_new = (1..=BUSES).contains(&number)
                && self.ports.iter().all(|port| port.number != number);
            let address = match (is_new, kind, maker.machine) {
                (true, PortKind::RootPort, MachineType::Q35) => maker.port(),
                (true, PortKind::PciBridge, MachineType::Pc) => {
                    maker.slot().map(|slot| self.on_root(slot))
                }
                _ => None,
            };
            if let Some(address) = address {
                self.add_port(*node, number, kind, address);
            }
        }
        // libvirt numbers buses without gaps.
        let last = last.filter(|_| maker.machine == MachineType::Q35);
        for number in 1..last.unwrap_or(0) {
            if self.ports.iter().all(|port| port.number != number)
                && let Some(address) = maker.port()
            {
                self.ports.push(root_port(number, address));
            }
        }
    }

    fn add_port(&mut self, node: Node<'d, 'd>, number: u32, kind: PortKind, address: PciAddress) {
        let reader = self.reader;
        reader.take(node);
        for name in ["type", "model", "index"] {
            reader.attribute(node, name);
        }
        let mut port = Port {
            kind,
            ..root_port(number, address)
        };
        // libvirt writes the name of QEMU's driver, which follows from the model.
        if let Some(model) = reader.candidates(node, "model").next()
            && reader.peek(model, "name") == Some(port.device().0)
        {
            reader.take(model);
            reader.attribute(model, "name");
        }
        if let Some(target) = reader.candidates(node, "target").next() {
            let (chassis, link) = match kind {
                PortKind::RootPort => ("chassis", Some("port")),
                _ => ("chassisNr", None),
            };
            reader.take(target);
            if let Some(chassis) = reader.parsed(target, chassis, super::disks::number) {
                port.chassis = chassis;
            }
            if let Some(link) =
                link.and_then(|link| reader.parsed(target, link, super::disks::number))
            {
                port.link = Some(link);
            }
        }
        self.ports.push(port);
    }

    fn free_bus(&self) -> Option<u32> {
        (1..=BUSES).find(|number| self.ports.iter().all(|port| port.number != *number))
    }

    /// Adds a root port. Returns the number of its bus.
    fn new_port(&mut self, maker: &mut PortMaker) -> Option<u32> {
        let number = self.free_bus()?;
        let address = maker.port()?;
        self.ports.push(root_port(number, address));
        Some(number)
    }

    /// Marks an address as read and returns it.
    fn read_address(&self, element: Node<'d, 'd>, at: (u32, u32, u32)) -> PciAddress {
        let reader = self.reader;
        for name in ["type", "domain", "bus", "slot", "function"] {
            reader.attribute(element, name);
        }
        let is_multifunction = reader.parsed(element, "multifunction", switch);
        let (bus, slot, function) = at;
        PciAddress {
            bus: match bus {
                0 => self.options.machine.bus().to_owned(),
                // libvirt's name of the bus behind a port, used in QEMU arguments.
                bus => format!("pci.{bus}"),
            },
            number: bus,
            slot,
            function,
            multifunction: function > 0 || is_multifunction == Some(true),
        }
    }

    /// Returns the address of a device. An address that is in use, or on a bus that does not exist, stays unread.
    pub(super) fn pci_address(&mut self, node: Node<'d, 'd>) -> PciAddress {
        if let Some(element) = named(node, "address")
            && let Some(at) = location(element)
            && (at.0 == 0 || self.ports.iter().any(|port| port.number == at.0))
            && at.1 < SLOTS
            && at.2 < FUNCTIONS
            && self.addresses.taken.insert(at)
        {
            self.reader.take(element);
            return self.read_address(element, at);
        }
        if let Some(element) = named(node, "address")
            && element.attribute("type") == Some("pci")
            && element.attribute("slot").is_none()
        {
            // The same as no address.
            self.reader.take(element);
            self.reader.attribute(element, "type");
        }
        self.assigned_address(Owner::Element(node.id()))
    }

    /// Returns the address that libvirt assigns.
    pub(super) fn assigned_address(&mut self, owner: Owner) -> PciAddress {
        let assigned = self.addresses.assigned.remove(&owner);
        let address = assigned.unwrap_or_else(|| {
            let given = self.addresses.assigned.values();
            let given: BTreeSet<u32> = given
                .chain(self.ports.iter().map(|port| &port.address))
                .filter(|address| address.number == 0)
                .map(|address| address.slot)
                .collect();
            let is_taken = |slot: &u32| {
                self.options.machine.chipset().contains(slot)
                    || given.contains(slot)
                    || self
                        .addresses
                        .taken
                        .iter()
                        .any(|at| at.0 == 0 && at.1 == *slot)
            };
            self.on_root((1..SLOTS).find(|slot| !is_taken(slot)).unwrap_or(SLOTS - 1))
        });
        let at = (address.number, address.slot, address.function);
        self.addresses.taken.insert(at);
        address
    }
}

fn without_address<'d>(
    found: impl IntoIterator<Item = (Node<'d, 'd>, SlotChoice)>,
) -> Vec<(Owner, SlotChoice)> {
    let found = found.into_iter();
    let found = found.filter(|(node, _)| location_of(*node).is_none());
    found
        .map(|(node, choice)| (Owner::Element(node.id()), choice))
        .collect()
}

fn behind_port(number: u32) -> PciAddress {
    PciAddress {
        bus: format!("pci.{number}"),
        number,
        slot: 0,
        function: 0,
        multifunction: false,
    }
}

fn root_port(number: u32, address: PciAddress) -> Port {
    Port {
        id: format!("pci.{number}"),
        number,
        kind: PortKind::RootPort,
        chassis: number,
        link: Some(address.slot << 3 | address.function),
        address,
    }
}

/// Free slots of the first bus. New root ports share slots.
struct PortMaker {
    machine: MachineType,
    slots: BTreeSet<u32>,
    /// Slots of root ports: a bit for each function in use.
    shared: BTreeMap<u32, u32>,
}

impl PortMaker {
    fn slot(&mut self) -> Option<u32> {
        let slot = (1..SLOTS).find(|slot| !self.slots.contains(slot))?;
        self.slots.insert(slot);
        Some(slot)
    }

    /// Returns the lowest free function of a slot for root ports.
    fn port(&mut self) -> Option<PciAddress> {
        let next = (1..SLOTS).find_map(|slot| match self.shared.get(&slot) {
            Some(functions) => {
                let function = functions.trailing_ones();
                (function < FUNCTIONS).then_some((slot, function))
            }
            None => (!self.slots.contains(&slot)).then_some((slot, 0)),
        });
        let (slot, function) = next?;
        self.slots.insert(slot);
        *self.shared.entry(slot).or_default() |= 1 << function;
        Some(PciAddress {
            bus: self.machine.bus().to_owned(),
            number: 0,
            slot,
            function,
            multifunction: function > 0,
        })
    }

    /// Sets the multifunction flag of function 0 in slots with further functions.
    fn mark_shared_slots(&self, ports: &mut [Port]) {
        let shared: BTreeSet<u32> = ports
            .iter()
            .filter(|port| port.address.number == 0 && port.address.function > 0)
            .map(|port| port.address.slot)
            .collect();
        for port in ports {
            let address = &mut port.address;
            address.multifunction |= address.number == 0 && shared.contains(&address.slot);
        }
    }
}
