//! Addresses on a guest's PCI bus: slots of the first bus while there are enough, otherwise slots of root ports or bridges.

use super::words::TopologyError;
use std::fmt;

/// Number of slots of one bus.
const SLOTS: u32 = 32;

/// Number of functions of one slot, and of devices behind one root port.
const FUNCTIONS: u32 = 8;

/// Machine type of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineType {
    /// PCI Express.
    Q35,
    /// i440FX: conventional PCI.
    Pc,
}

impl MachineType {
    /// Returns QEMU's name of the machine.
    pub fn word(self) -> &'static str {
        match self {
            MachineType::Q35 => "q35",
            MachineType::Pc => "pc",
        }
    }

    /// Returns QEMU's name of the first bus.
    pub fn bus(self) -> &'static str {
        match self {
            MachineType::Q35 => "pcie.0",
            MachineType::Pc => "pci.0",
        }
    }

    /// Returns the slots of the chipset.
    pub fn chipset(self) -> &'static [u32] {
        match self {
            // host bridge; LPC, AHCI and SMBus
            MachineType::Q35 => &[0x00, 0x1f],
            // host bridge; ISA, IDE and ACPI
            MachineType::Pc => &[0x00, 0x01],
        }
    }

    /// Returns the number of devices behind one port or bridge.
    fn slots_per_port(self) -> u32 {
        match self {
            MachineType::Q35 => FUNCTIONS,
            // Bridges may have a hot-plug controller in slot 0.
            MachineType::Pc => SLOTS - 1,
        }
    }

    /// Returns the name of the device that adds slots.
    pub fn extension(self) -> &'static str {
        match self {
            MachineType::Q35 => "root port",
            MachineType::Pc => "PCI bridge",
        }
    }
}

/// PCI address of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciAddress {
    /// QEMU's name of the bus.
    pub bus: String,
    /// Bus number in the guest, assigned by firmware and kernel.
    pub number: u32,
    /// Slot on the bus.
    pub slot: u32,
    /// Function in the slot.
    pub function: u32,
    /// The slot has further functions.
    pub multifunction: bool,
}

impl PciAddress {
    /// Returns the address as properties of a QEMU device.
    pub fn properties(&self) -> Vec<(String, String)> {
        let mut properties = vec![("bus".to_owned(), self.bus.clone())];
        let address = match self.multifunction {
            true => format!("0x{:x}.0x{:x}", self.slot, self.function),
            false => format!("0x{:x}", self.slot),
        };
        properties.push(("addr".to_owned(), address));
        if self.multifunction && self.function == 0 {
            properties.push(("multifunction".to_owned(), "on".to_owned()));
        }
        properties
    }

    /// Returns true if the address in the guest follows from the command line, independent of the firmware's bus numbers.
    pub fn is_certain(&self) -> bool {
        self.number == 0
    }
}

/// Formats the address like Linux: `0000:00:03.0`.
impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "0000:{:02x}:{:02x}.{:x}",
            self.number, self.slot, self.function
        )
    }
}

/// Kind of a device that adds a bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortKind {
    /// PCI Express root port.
    RootPort,
    /// Bridge between conventional PCI buses.
    PciBridge,
    /// Bridge from PCI Express to conventional PCI.
    PciePciBridge,
}

/// A root port or a PCI bridge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Name of the port and of the bus behind it.
    pub id: String,
    /// Number of its bus, from 1.
    pub number: u32,
    /// Kind.
    pub kind: PortKind,
    /// Chassis number.
    pub chassis: u32,
    /// Port number of a root port in its capability.
    pub link: Option<u32>,
    /// Address of the port itself.
    pub address: PciAddress,
}

impl Port {
    /// Returns QEMU's driver and its properties.
    pub fn device(&self) -> (&'static str, Vec<(String, String)>) {
        let mut properties = vec![("id".to_owned(), self.id.clone())];
        properties.extend(self.address.properties());
        let mut add = |key: &str, value: String| properties.push((key.to_owned(), value));
        let driver = match self.kind {
            PortKind::RootPort => {
                add("chassis", self.chassis.to_string());
                if let Some(link) = self.link {
                    add("port", link.to_string());
                }
                "pcie-root-port"
            }
            PortKind::PciBridge => {
                add("chassis_nr", self.chassis.to_string());
                // A hot-plug controller would occupy slot 0.
                add("shpc", "off".to_owned());
                "pci-bridge"
            }
            PortKind::PciePciBridge => "pcie-pci-bridge",
        };
        (driver, properties)
    }
}

/// Use of the slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Number of slots of the first bus.
    pub slots: u32,
    /// Slots in use by the chipset, devices and ports.
    pub used: u32,
    /// Number of planned devices.
    pub devices: u32,
    /// Number of ports or bridges for the devices.
    pub ports: u32,
    /// Reason for the ports: the word of the group that does not fit, and the number of slots that were free for it.
    pub reason: Option<(String, u32)>,
    /// Name of a port or bridge for messages.
    pub extension: &'static str,
}

impl Budget {
    /// Returns the number of free slots.
    pub fn free(&self) -> u32 {
        self.slots.saturating_sub(self.used)
    }
}

/// Formats "12 of 32 slots used, 20 free", and the reason for ports.
impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} slots used, {} free",
            self.used,
            self.slots,
            self.free()
        )?;
        if let Some((word, free)) = &self.reason {
            let plural = if self.ports == 1 { "" } else { "s" };
            write!(
                f,
                "; {word} found {free} free and needs {} {}{plural}",
                self.ports, self.extension
            )?;
        }
        Ok(())
    }
}

/// Addresses of all devices.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    /// Addresses of the devices, in the given order.
    pub devices: Vec<PciAddress>,
    /// Addresses of the reserved devices.
    pub reserved: Vec<PciAddress>,
    /// Ports, in the order of their buses.
    pub ports: Vec<Port>,
    /// Use of the slots.
    pub budget: Budget,
}

/// Assigns addresses in Linux's probe order: first those on the first bus by slot, then those behind ports by
/// port. `devices` are groups of devices with their words; `reserved` is the number of devices added by the caller, which are placed at
/// the upper end, so that they are found last.
pub(super) fn assign_addresses(
    machine: MachineType,
    devices: &[(String, u32)],
    reserved: usize,
) -> Result<Layout, TopologyError> {
    let direct = |slot: u32| PciAddress {
        bus: machine.bus().to_owned(),
        number: 0,
        slot,
        function: 0,
        multifunction: false,
    };
    let mut free: Vec<u32> = (0..SLOTS)
        .filter(|slot| !machine.chipset().contains(slot))
        .collect();
    let reserved_slots = free.split_off(free.len().saturating_sub(reserved));
    let reserved = reserved_slots
        .into_iter()
        .rev()
        .map(direct)
        .collect::<Vec<_>>();
    let count: u32 = devices.iter().map(|(_, count)| count).sum();
    let slots = free.len() as u32;
    let ports = ports_for(machine, count, slots).ok_or_else(|| {
        let word = devices.iter().max_by_key(|(_, count)| *count);
        TopologyError::new(
            word.map_or("TOPOLOGY", |(word, _)| word),
            format!(
                "{count} PCI devices; {} with {} holds at most {}",
                machine.word(),
                match slots {
                    1 => "1 free slot".to_owned(),
                    _ => format!("{slots} free slots"),
                },
                slots * machine.slots_per_port()
            ),
            "use one virtio-scsi controller for all disks, such as scsi:1x64",
        )
    })?;
    let on_bus = count.min(slots - ports);
    let mut addresses: Vec<PciAddress> = free
        .iter()
        .take(on_bus as usize)
        .map(|slot| direct(*slot))
        .collect();
    let port_slots = free.iter().skip(on_bus as usize).take(ports as usize);
    let ports: Vec<Port> = (1..)
        .zip(port_slots)
        .map(|(number, slot)| Port {
            id: format!("port{number}"),
            number,
            kind: match machine {
                MachineType::Q35 => PortKind::RootPort,
                MachineType::Pc => PortKind::PciBridge,
            },
            chassis: number,
            link: None,
            address: direct(*slot),
        })
        .collect();
    let mut rest = count - on_bus;
    for port in &ports {
        let on_port = rest.min(machine.slots_per_port());
        addresses.extend((0..on_port).map(|index| slots_per_port(machine, port, index, on_port)));
        rest -= on_port;
    }
    let used = machine.chipset().len() as u32 + reserved.len() as u32 + on_bus + ports.len() as u32;
    let budget = Budget {
        slots: SLOTS,
        used,
        devices: count,
        ports: ports.len() as u32,
        reason: overflowing(devices, slots).filter(|_| !ports.is_empty()),
        extension: machine.extension(),
    };
    Ok(Layout {
        devices: addresses,
        reserved,
        ports,
        budget,
    })
}

/// Returns the smallest number of ports that makes room for the devices.
fn ports_for(machine: MachineType, devices: u32, slots: u32) -> Option<u32> {
    (0..=slots).find(|ports| slots - ports + ports * machine.slots_per_port() >= devices)
}

/// Returns the first group that does not fit, and the number of free slots for it.
fn overflowing(devices: &[(String, u32)], mut free: u32) -> Option<(String, u32)> {
    for (word, count) in devices {
        if *count > free {
            return Some((word.clone(), free));
        }
        free -= count;
    }
    None
}

fn slots_per_port(machine: MachineType, port: &Port, index: u32, on_port: u32) -> PciAddress {
    let (slot, function) = match machine {
        MachineType::Q35 => (0, index),
        MachineType::Pc => (index + 1, 0),
    };
    PciAddress {
        bus: port.id.clone(),
        number: port.number,
        slot,
        function,
        multifunction: machine == MachineType::Q35 && on_port > 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(groups: &[(&str, u32)]) -> Vec<(String, u32)> {
        let groups = groups.iter();
        groups
            .map(|(word, count)| ((*word).to_owned(), *count))
            .collect()
    }

    #[test]
    fn devices_sit_on_the_first_bus_while_it_has_room() {
        let layout = assign_addresses(MachineType::Q35, &words(&[("blk:4", 4)]), 1).unwrap();
        let shown: Vec<String> = layout.devices.iter().map(ToString::to_string).collect();
        assert_eq!(
            shown,
            [
                "0000:00:01.0",
                "0000:00:02.0",
                "0000:00:03.0",
                "0000:00:04.0"
            ]
        );
        assert_eq!(layout.reserved[0].to_string(), "0000:00:1e.0");
        assert_eq!(layout.budget.to_string(), "7 of 32 slots used, 25 free");
    }

    #[test]
    fn forty_devices_beside_ten_others_need_three_root_ports() {
        let layout = assign_addresses(
            MachineType::Q35,
            &words(&[("blk:10", 10), ("blk:40", 40)]),
            0,
        )
        .unwrap();
        assert_eq!(
            layout.budget.to_string(),
            "32 of 32 slots used, 0 free; blk:40 found 20 free and needs 3 root ports"
        );
        assert_eq!(layout.devices.len(), 50);
        assert_eq!(layout.devices[26].to_string(), "0000:00:1b.0");
        assert_eq!(layout.devices[27].to_string(), "0000:01:00.0");
        assert!(layout.devices[27].multifunction);
        assert_eq!(layout.devices[49].to_string(), "0000:03:00.6");
        let slots: Vec<u32> = layout.ports.iter().map(|port| port.address.slot).collect();
        assert_eq!(slots, [0x1c, 0x1d, 0x1e]);
    }

    #[test]
    fn conventional_pci_has_bridges() {
        let layout = assign_addresses(MachineType::Pc, &words(&[("blk:31", 31)]), 0).unwrap();
        assert_eq!(
            layout.budget.to_string(),
            "32 of 32 slots used, 0 free; blk:31 found 30 free and needs 1 PCI bridge"
        );
        assert_eq!(layout.devices[29].to_string(), "0000:01:01.0");
        assert_eq!(layout.devices[30].to_string(), "0000:01:02.0");
    }

    #[test]
    fn more_than_all_ports_hold_is_an_error() {
        let error = assign_addresses(MachineType::Q35, &words(&[("blk:241", 241)]), 0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "blk:241: 241 PCI devices; q35 with 30 free slots holds at most 240; hint: use one virtio-scsi controller for all disks, such as scsi:1x64"
        );
    }
}
