//! A plan as libvirt's domain XML.
//!
//! libvirt has elements for virtio-blk over vhost-user and for all devices that QEMU emulates. Virtio-scsi over vhost-user has no element
//! and uses `<qemu:commandline>`; a few properties use `<qemu:override>`.

use super::names::disk_letters;
use super::options::PlanOptions;
use super::pci::{MachineType, PciAddress, Port};
use super::plan::{DiskDevice, Plan, PlannedDevice, PlannedDisk};
use super::words::Via;
use std::collections::BTreeSet;
use std::fmt::Write;

/// Escapes text between tags or in quotes.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '\'' => escaped.push_str("&apos;"),
            '"' => escaped.push_str("&quot;"),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Indented lines.
#[derive(Default)]
struct Xml(String);

impl Xml {
    fn line(&mut self, depth: usize, text: &str) {
        // Writing to a String cannot fail.
        writeln!(self.0, "{}{text}", "  ".repeat(depth)).unwrap_or(());
    }
}

impl Plan {
    /// Returns the domain for `virsh create` or `virsh define`.
    pub fn libvirt_xml(&self) -> String {
        let mut xml = Xml::default();
        xml.line(0, &head(&self.options));
        self.guest(&mut xml);
        xml.line(1, "<devices>");
        let model = match self.options.machine {
            MachineType::Q35 => "pcie-root-port",
            MachineType::Pc => "pci-bridge",
        };
        for port in &self.ports {
            controller_of_port(&mut xml, port, model);
        }
        for (index, device) in self.devices.iter().enumerate() {
            if device.is_scsi && device.via.is_qemu() {
                scsi_controller(&mut xml, device, self.host(index));
            }
            if let Some(wwpn) = &device.wwpn {
                kernel_target(&mut xml, device, wwpn);
            }
            for disk in self.disks_of(index) {
                match (device.via, device.is_scsi) {
                    (Via::Lunette, false) => vhost_user_disk(&mut xml, device, disk),
                    // Controller and disks are on QEMU's command line, or the disks are those of the kernel's target.
                    (Via::Lunette, true) | (Via::Ide | Via::Ahci | Via::VhostScsi, _) => {}
                    _ => self.qemu_disk(&mut xml, device, disk),
                }
            }
        }
        xml.line(2, "<controller type='usb' model='none'/>");
        xml.line(2, "<serial type='pty'/>");
        xml.line(2, "<memballoon model='none'/>");
        xml.line(1, "</devices>");
        self.command_line(&mut xml);
        self.overrides(&mut xml);
        xml.line(0, "</domain>");
        xml.0
    }

    /// Writes the elements that are not devices.
    fn guest(&self, xml: &mut Xml) {
        let options = &self.options;
        xml.line(1, &format!("<name>{}</name>", escape(&options.name)));
        if let Some(uuid) = &options.uuid {
            xml.line(1, &format!("<uuid>{}</uuid>", escape(uuid)));
        }
        let memory = options.memory_mib;
        xml.line(1, &format!("<memory unit='MiB'>{memory}</memory>"));
        if self.needs_daemon() {
            xml.line(1, "<memoryBacking>");
            xml.line(2, "<source type='memfd'/>");
            xml.line(2, "<access mode='shared'/>");
            xml.line(1, "</memoryBacking>");
        }
        xml.line(1, &format!("<vcpu>{}</vcpu>", options.cpus));
        let threads = self.devices.iter().flat_map(|device| &device.iothreads);
        let threads = threads.collect::<BTreeSet<_>>().len();
        if threads > 0 {
            xml.line(1, &format!("<iothreads>{threads}</iothreads>"));
        }
        xml.line(1, "<os>");
        let machine = options.machine.word();
        xml.line(
            2,
            &format!("<type arch='x86_64' machine='{machine}'>hvm</type>"),
        );
        if let Some(kernel) = &options.kernel {
            let path = |path: &std::path::Path| escape(&path.display().to_string());
            xml.line(2, &format!("<kernel>{}</kernel>", path(&kernel.image)));
            if let Some(initrd) = &kernel.initrd {
                xml.line(2, &format!("<initrd>{}</initrd>", path(initrd)));
            }
            if !kernel.append.is_empty() {
                xml.line(2, &format!("<cmdline>{}</cmdline>", escape(&kernel.append)));
            }
        }
        xml.line(1, "</os>");
        // Without this element libvirt's machine has no ACPI, and the guest does not notice hot-plug and power-off.
        let acpi = if options.has_acpi { "<acpi/>" } else { "" };
        xml.line(1, &format!("<features>{acpi}<apic/></features>"));
        match options.cpu.as_str() {
            "max" => xml.line(1, "<cpu mode='maximum'/>"),
            "host" => xml.line(1, "<cpu mode='host-passthrough'/>"),
            model => {
                let model = escape(model);
                xml.line(
                    1,
                    &format!("<cpu mode='custom'><model>{model}</model></cpu>"),
                );
            }
        }
    }

    /// Returns libvirt's index of a QEMU controller.
    fn host(&self, device: usize) -> usize {
        let preceding = self.devices.iter().take(device);
        preceding
            .filter(|device| device.is_scsi && device.via.is_qemu())
            .count()
    }

    fn qemu_disk(&self, xml: &mut Xml, device: &PlannedDevice, disk: &PlannedDisk) {
        let is_device = disk.medium.is_device();
        let (kind, source) = if is_device {
            ("block", "dev")
        } else {
            ("file", "file")
        };
        let format = match disk.medium.is_qcow2() {
            true => "qcow2",
            false => "raw",
        };
        let cache = if disk.medium.is_direct() {
            "none"
        } else {
            "writeback"
        };
        let mut driver = format!(
            "<driver name='qemu' type='{format}' cache='{cache}' io='{}' discard='unmap'",
            device.aio.word()
        );
        let mut threads = String::new();
        if !device.is_scsi {
            driver.push_str(&queue_attributes(device));
            if let Some(ioeventfd) = device.ioeventfd {
                let ioeventfd = if ioeventfd { "on" } else { "off" };
                driver.push_str(&format!(" ioeventfd='{ioeventfd}'"));
            }
            match device.is_mapped {
                true => threads = mapped_threads(device),
                false => driver.push_str(&thread_attribute(device)),
            }
        }
        xml.line(2, &format!("<disk type='{kind}' device='disk'>"));
        match threads.is_empty() {
            true => xml.line(3, &format!("{driver}/>")),
            false => xml.line(3, &format!("{driver}>{threads}</driver>")),
        }
        let path = disk.medium.path().unwrap_or(std::path::Path::new(""));
        let path = escape(&path.display().to_string());
        xml.line(3, &format!("<source {source}='{path}'/>"));
        let (name, bus) = self.target(disk);
        xml.line(3, &format!("<target dev='{name}' bus='{bus}'/>"));
        if let Some(serial) = &disk.serial {
            xml.line(3, &format!("<serial>{}</serial>", escape(serial)));
        }
        if let (Some(wwn), true) = (disk.wwn, device.is_scsi) {
            xml.line(3, &format!("<wwn>{wwn:016x}</wwn>"));
        }
        if device.boots {
            xml.line(3, "<boot order='1'/>");
        }
        xml.line(3, &format!("<alias name='ua-{}'/>", escape(&disk.name)));
        match disk.location {
            DiskDevice::Blk { .. } | DiskDevice::Ata { .. } => {
                xml.line(3, &pci_address(&device.address));
            }
            DiskDevice::Scsi {
                device: index,
                target,
                lun,
            } => {
                let host = self.host(index);
                xml.line(3, &format!("<address type='drive' controller='{host}' bus='0' target='{target}' unit='{lun}'/>"));
            }
        }
        xml.line(2, "</disk>");
    }

    /// Returns the target name, which libvirt requires for each disk. The guest may name SCSI disks differently.
    fn target(&self, disk: &PlannedDisk) -> (String, &'static str) {
        if let (DiskDevice::Blk { .. }, Some(device)) = (disk.location, &disk.guest.device) {
            return (device.trim_start_matches("/dev/").to_owned(), "virtio");
        }
        let scsi = self.disks.iter();
        let mut scsi = scsi.filter(|disk| disk.guest.scsi.is_some());
        let index = scsi.position(|other| other.name == disk.name);
        (disk_letters("sd", index.unwrap_or_default()), "scsi")
    }

    /// Writes virtio-scsi over vhost-user, ATA controllers, and the user's arguments. libvirt has no IDE controller for q35.
    fn command_line(&self, xml: &mut Xml) {
        let devices = self.devices.iter().enumerate();
        let mut devices = devices.filter(|(_, device)| is_argument(device)).peekable();
        if devices.peek().is_none() && self.options.extra.is_empty() {
            return;
        }
        xml.line(1, "<qemu:commandline>");
        for (index, device) in devices {
            // libvirt's name of the bus behind a port is pci.N.
            let mut device = device.clone();
            if device.address.number > 0 {
                device.address.bus = format!("pci.{}", device.address.number);
            }
            for (option, value) in self.device_arguments(index, &device) {
                xml.line(2, &format!("<qemu:arg value='{option}'/>"));
                xml.line(2, &format!("<qemu:arg value='{}'/>", escape(&value)));
            }
        }
        for argument in &self.options.extra {
            xml.line(2, &format!("<qemu:arg value='{}'/>", escape(argument)));
        }
        xml.line(1, "</qemu:commandline>");
    }

    /// Writes properties without an element in libvirt.
    fn overrides(&self, xml: &mut Xml) {
        let mut lines = Vec::new();
        for (index, device) in self.devices.iter().enumerate() {
            if !is_argument(device) && !device.indirect {
                let alias = match device.is_scsi || !device.via.is_qemu() {
                    true => None,
                    false => self.disks_of(index).next().map(|disk| &disk.name),
                };
                let alias = alias.unwrap_or(&device.id);
                lines.push(property(alias, "indirect_desc", "bool", "false"));
            }
            if !device.is_scsi || device.via == Via::Lunette {
                continue;
            }
            // libvirt has attributes for two of them, except for vhost-scsi.
            let is_kernel = device.via == Via::VhostScsi;
            let numbers = [
                ("num_queues", device.queues.filter(|_| is_kernel)),
                ("cmd_per_lun", device.cmd_per_lun.filter(|_| is_kernel)),
                ("virtqueue_size", device.queue_size),
            ];
            for (name, number) in numbers {
                let number = number.map(|number| number.to_string());
                lines.extend(number.map(|number| property(&device.id, name, "unsigned", &number)));
            }
            let disks = self.disks_of(index).filter(|disk| disk.removable);
            lines.extend(disks.map(|disk| property(&disk.name, "removable", "bool", "true")));
        }
        if lines.is_empty() {
            return;
        }
        xml.line(1, "<qemu:override>");
        for line in lines {
            xml.line(2, &line);
        }
        xml.line(1, "</qemu:override>");
    }
}

/// Returns true for devices on QEMU's command line, which has all their properties.
fn is_argument(device: &PlannedDevice) -> bool {
    (device.is_scsi && device.via == Via::Lunette) || device.via.ata_disks().is_some()
}

fn property(id: &str, name: &str, kind: &str, value: &str) -> String {
    format!(
        "<qemu:device alias='ua-{}'><qemu:frontend><qemu:property name='{name}' type='{kind}' value='{value}'/></qemu:frontend></qemu:device>",
        escape(id)
    )
}

fn head(options: &PlanOptions) -> String {
    let is_kvm = options
        .accelerators
        .first()
        .is_none_or(|first| first.starts_with("kvm"));
    let kind = if is_kvm { "kvm" } else { "qemu" };
    format!("<domain type='{kind}' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>")
}

fn pci_address(address: &PciAddress) -> String {
    let multifunction = match address.multifunction && address.function == 0 {
        true => " multifunction='on'",
        false => "",
    };
    format!(
        "<address type='pci' domain='0x0000' bus='0x{:02x}' slot='0x{:02x}' function='0x{:x}'{multifunction}/>",
        address.number, address.slot, address.function
    )
}

fn controller_of_port(xml: &mut Xml, port: &Port, model: &str) {
    xml.line(
        2,
        &format!(
            "<controller type='pci' index='{}' model='{model}'>",
            port.number
        ),
    );
    xml.line(
        3,
        &format!(
            "<address type='pci' domain='0x0000' bus='0x00' slot='0x{:02x}' function='0x0'/>",
            port.address.slot
        ),
    );
    xml.line(2, "</controller>");
}

fn queue_attributes(device: &PlannedDevice) -> String {
    let queues = device.queues.iter();
    let mut text: String = queues.map(|queues| format!(" queues='{queues}'")).collect();
    if let Some(size) = device.queue_size {
        text.push_str(&format!(" queue_size='{size}'"));
    }
    if device.packed {
        text.push_str(" packed='on'");
    }
    text
}

/// Returns the number in a thread name; libvirt counts threads from 1, as the names do.
fn thread_number(name: &str) -> &str {
    name.trim_start_matches("iothread")
}

fn thread_attribute(device: &PlannedDevice) -> String {
    let thread = device.iothreads.first();
    thread.map_or(String::new(), |thread| {
        format!(" iothread='{}'", thread_number(thread))
    })
}

fn mapped_threads(device: &PlannedDevice) -> String {
    let threads = device.iothreads.iter();
    let threads = threads.map(|thread| format!("<iothread id='{}'/>", thread_number(thread)));
    format!("<iothreads>{}</iothreads>", threads.collect::<String>())
}

fn scsi_controller(xml: &mut Xml, device: &PlannedDevice, index: usize) {
    let queues = device.queues.iter();
    let queues: String = queues.map(|queues| format!(" queues='{queues}'")).collect();
    let mut driver = format!("<driver{queues}");
    if let Some(commands) = device.cmd_per_lun {
        driver.push_str(&format!(" cmd_per_lun='{commands}'"));
    }
    if let Some(ioeventfd) = device.ioeventfd {
        let ioeventfd = if ioeventfd { "on" } else { "off" };
        driver.push_str(&format!(" ioeventfd='{ioeventfd}'"));
    }
    xml.line(
        2,
        &format!("<controller type='scsi' index='{index}' model='virtio-scsi'>"),
    );
    match device.is_mapped {
        true => xml.line(3, &format!("{driver}>{}</driver>", mapped_threads(device))),
        false => xml.line(3, &format!("{driver}{}/>", thread_attribute(device))),
    }
    xml.line(3, &format!("<alias name='ua-{}'/>", escape(&device.id)));
    xml.line(3, &pci_address(&device.address));
    xml.line(2, "</controller>");
}

/// Writes the adapter of a target in the host's kernel.
fn kernel_target(xml: &mut Xml, device: &PlannedDevice, wwpn: &str) {
    xml.line(2, "<hostdev mode='subsystem' type='scsi_host'>");
    xml.line(3, &format!("<source protocol='vhost' wwpn='{wwpn}'/>"));
    xml.line(3, &format!("<alias name='ua-{}'/>", escape(&device.id)));
    xml.line(3, &pci_address(&device.address));
    xml.line(2, "</hostdev>");
}

fn vhost_user_disk(xml: &mut Xml, device: &PlannedDevice, disk: &PlannedDisk) {
    xml.line(2, "<disk type='vhostuser' device='disk'>");
    xml.line(
        3,
        &format!(
            "<driver name='qemu' type='raw'{}/>",
            queue_attributes(device)
        ),
    );
    let socket = device.socket.as_ref();
    let socket = socket.map_or(String::new(), |socket| socket.display().to_string());
    xml.line(
        3,
        &format!("<source type='unix' path='{}'>", escape(&socket)),
    );
    xml.line(4, "<reconnect enabled='yes' timeout='1'/>");
    xml.line(3, "</source>");
    let name = disk.guest.device.as_deref().unwrap_or_default();
    let name = name.trim_start_matches("/dev/");
    xml.line(3, &format!("<target dev='{name}' bus='virtio'/>"));
    if device.boots {
        xml.line(3, "<boot order='1'/>");
    }
    xml.line(3, &format!("<alias name='ua-{}'/>", escape(&device.id)));
    xml.line(3, &pci_address(&device.address));
    xml.line(2, "</disk>");
}
