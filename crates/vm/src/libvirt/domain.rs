//! A domain: reads its memory, and combines all parts.

use super::addresses::Addresses;
use super::document::Reader;
use crate::topology::{
    Budget, DiskDevice, Plan, PlanOptions, PlannedDevice, PlannedDisk, Port, Via,
};
use roxmltree::{Document, Node};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::Path;

/// Error for text that is not a domain.
#[derive(Debug)]
pub struct DomainError(pub(super) String);

impl fmt::Display for DomainError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}; hint: print one with virsh dumpxml --inactive DOMAIN",
            self.0
        )
    }
}

impl std::error::Error for DomainError {}

/// A domain and its unsupported parts.
#[derive(Debug)]
pub struct Domain {
    /// Supported part of the domain.
    pub plan: Plan,
    /// Unsupported parts: paths in the document with values.
    pub unread: Vec<String>,
}

/// Parts collected while reading.
pub(super) struct Parts<'r, 'd> {
    pub reader: &'r Reader<'d>,
    pub root: Node<'d, 'd>,
    pub options: PlanOptions,
    pub devices: Vec<PlannedDevice>,
    pub disks: Vec<PlannedDisk>,
    pub ports: Vec<Port>,
    pub addresses: Addresses,
    /// IDs of QEMU's devices.
    pub ids: HashSet<String>,
    /// Indices of the SCSI controllers in `devices`, by libvirt's number.
    pub scsi_hosts: BTreeMap<u32, usize>,
    /// Kinds of devices in the boot order of `<os>`.
    pub boots: Vec<String>,
}

impl Domain {
    /// Reads a domain.
    ///
    /// # Errors
    /// The text is not a domain; the error contains the reason.
    pub fn read(text: &str, options: PlanOptions) -> Result<Domain, DomainError> {
        let document = Document::parse(text)
            .map_err(|error| DomainError(format!("not well-formed XML: {error}")))?;
        let reader = Reader::new(&document);
        let root = reader.root();
        if root.tag_name().name() != "domain" {
            let name = root.tag_name().name();
            return Err(DomainError(format!(
                "the document is a <{name}>, not a <domain>"
            )));
        }
        let mut parts = Parts {
            reader: &reader,
            root,
            options,
            devices: Vec::new(),
            disks: Vec::new(),
            ports: Vec::new(),
            addresses: Addresses::default(),
            ids: HashSet::new(),
            scsi_hosts: BTreeMap::new(),
            boots: Vec::new(),
        };
        parts.guest()?;
        parts.addresses();
        parts.devices();
        // The peripherals take the place of a plan's consoles.
        parts.options.console = parts.peripherals();
        let plan = parts.finish();
        Ok(Domain {
            unread: reader.unread(),
            plan,
        })
    }

    /// Returns the same guest with every virtio disk served by Lunette, at sockets in this folder.
    pub fn served(&self, sockets: &Path) -> Plan {
        let mut plan = self.plan.clone();
        for device in plan
            .devices
            .iter_mut()
            .filter(|device| device.via.is_qemu())
        {
            device.via = Via::Lunette;
            device.socket = Some(sockets.join(format!("{}.sock", device.id)));
            device.iothreads.clear();
            device.is_mapped = false;
            device.ioeventfd = None;
        }
        plan
    }
}

/// Returns a size in MiB. Sizes without a unit are in KiB.
fn mebibytes(node: Node<'_, '_>) -> Option<u32> {
    let factor: u64 = match node.attribute("unit").unwrap_or("KiB") {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" => 1 << 40,
        _ => return None,
    };
    let number: u64 = node.text()?.trim().parse().ok()?;
    u32::try_from(number.checked_mul(factor)? >> 20).ok()
}

impl Parts<'_, '_> {
    fn guest(&mut self) -> Result<(), DomainError> {
        let (reader, root) = (self.reader, self.root);
        let kind = reader.attribute(root, "type");
        self.options.accelerators = match kind {
            Some("qemu") => vec!["tcg,thread=multi".to_owned()],
            _ => vec!["kvm".to_owned()],
        };
        if let Some(name) = reader.text(root, "name") {
            self.options.name = name.to_owned();
        }
        self.options.uuid = reader.text(root, "uuid").map(str::to_owned);
        let memory = reader.child(root, "memory");
        let memory = memory.ok_or_else(|| DomainError("the domain has no <memory>".to_owned()))?;
        reader.attribute(memory, "unit");
        self.options.memory_mib = mebibytes(memory).ok_or_else(|| {
            DomainError(format!(
                "{}: {:?} is not a size",
                reader.path(memory),
                memory.text().unwrap_or_default()
            ))
        })?;
        // Equal to <memory> unless a balloon is in use.
        if let Some(current) = reader.candidates(root, "currentMemory").next()
            && mebibytes(current) == Some(self.options.memory_mib)
        {
            reader.take(current);
            reader.attribute(current, "unit");
        }
        self.memory_backing();
        self.cpus();
        self.iothreads();
        self.boot();
        self.features();
        self.cpu();
        self.clock();
        self.power();
        Ok(())
    }

    /// Reads the memory backing. vhost-user needs shared memory, which QEMU's command line always has then.
    fn memory_backing(&mut self) {
        let reader = self.reader;
        let Some(backing) = reader.child(self.root, "memoryBacking") else {
            return;
        };
        for (name, attribute, value) in [("source", "type", "memfd"), ("access", "mode", "shared")]
        {
            for node in reader.candidates(backing, name) {
                if reader.peek(node, attribute) == Some(value) {
                    reader.take(node);
                    reader.attribute(node, attribute);
                    self.options.is_memory_shared |= name == "access";
                }
            }
        }
    }

    fn finish(self) -> Plan {
        let slots = self
            .devices
            .iter()
            .filter(|device| device.address.is_certain());
        let used = self.options.machine.chipset().len() + slots.count() + self.ports.len();
        let budget = Budget {
            slots: 32,
            used: used as u32,
            devices: self.devices.len() as u32,
            ports: self.ports.len() as u32,
            reason: None,
            extension: self.options.machine.extension(),
        };
        let options = self.options;
        let mut disks = self.disks;
        disks.sort_by_key(|disk| match disk.location {
            DiskDevice::Blk { device } => (device, 0, 0),
            DiskDevice::Scsi {
                device,
                target,
                lun,
            } => (device, target, lun),
            DiskDevice::Ata { device, port, unit } => (device, port, unit),
        });
        Plan {
            options,
            disks,
            devices: self.devices,
            ports: self.ports,
            reserved: Vec::new(),
            budget,
            notes: Vec::new(),
        }
    }
}
