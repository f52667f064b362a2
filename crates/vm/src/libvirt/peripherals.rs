//! Devices other than disks: network, graphics, input, random numbers, balloon, watchdog, serial ports, channels, TPM and sound.
//!
//! A device is converted completely or stays unread: an attribute or element without an equivalent on QEMU's command line is listed as
//! unread.

use super::addresses::Owner;
use super::disks::number;
use super::domain::Parts;
use crate::topology::{MachineType, PciAddress, qemu_value};
use roxmltree::Node;

/// The USB controller of the i440FX chipset, function 2 of its slot.
const CHIPSET_UHCI: &str = "piix3-usb-uhci,id=usb,bus=pci.0,addr=0x1.0x2";

/// Returns a device with its address.
fn at(driver: &str, address: &PciAddress) -> String {
    let properties = address.properties();
    let properties = properties.iter();
    let properties = properties.map(|(key, value)| format!(",{key}={value}"));
    format!("{driver}{}", properties.collect::<String>())
}

/// Devices as QEMU arguments.
#[derive(Default)]
pub(super) struct Peripherals {
    arguments: Vec<String>,
    has_display: bool,
    serials: usize,
    /// Ports of channels: controller and number.
    channel_ports: Vec<(u32, u32)>,
}

impl Peripherals {
    pub(super) fn add(&mut self, option: &str, value: impl Into<String>) {
        self.arguments.extend([option.to_owned(), value.into()]);
    }
}

impl<'d> Parts<'_, 'd> {
    pub(super) fn peripherals(&mut self) -> Vec<String> {
        let reader = self.reader;
        let mut found = Peripherals::default();
        let Some(devices) = reader.child(self.root, "devices") else {
            return vec!["-display".to_owned(), "none".to_owned()];
        };
        self.options.emulator = reader.text(devices, "emulator").map(str::to_owned);
        let all = |name| reader.candidates(devices, name).enumerate();
        for node in reader.candidates(devices, "controller") {
            self.usb_controller(node, &mut found);
            self.serial_controller(node, &mut found);
        }
        self.added_controllers(&mut found);
        for (index, node) in all("interface") {
            self.interface(node, index, &mut found);
        }
        for (index, node) in all("serial") {
            self.serial(node, index, &mut found);
        }
        for (index, node) in all("console") {
            self.console(node, index, &mut found);
        }
        for (index, node) in all("channel") {
            self.channel(node, index, &mut found);
        }
        for (_, node) in all("graphics") {
            self.graphics(node, &mut found);
        }
        for (index, node) in all("video") {
            self.video(node, index, &mut found);
        }
        for (index, node) in all("input") {
            self.input(node, index, &mut found);
        }
        for (_, node) in all("audio") {
            // QEMU needs no output device, unless a sound card is in the domain.
            if (reader.peek(node, "type"), reader.peek(node, "id")) == (Some("none"), Some("1")) {
                self.take(node, &["type", "id"]);
            }
        }
        for (index, node) in all("sound") {
            self.sound(node, index, &mut found);
        }
        for (index, node) in all("rng") {
            self.rng(node, index, &mut found);
        }
        for (_, node) in all("memballoon") {
            self.balloon(node, &mut found);
        }
        if self.adds_balloon() {
            let address = self.assigned_address(Owner::Balloon);
            let device = at("virtio-balloon-pci,id=balloon0", &address);
            found.add("-device", device);
        }
        for (_, node) in all("watchdog") {
            self.watchdog(node, &mut found);
        }
        for (_, node) in all("tpm") {
            self.tpm(node, &mut found);
        }
        if !found.has_display {
            found.add("-display", "none");
        }
        found.arguments
    }

    /// Returns a PCI device: driver, properties and address.
    pub(super) fn pci_device(&mut self, node: Node<'d, 'd>, driver: &str) -> String {
        at(driver, &self.pci_address(node))
    }

    /// Adds the controllers that libvirt adds.
    fn added_controllers(&mut self, found: &mut Peripherals) {
        if self.adds_usb() {
            let device = match self.options.machine {
                MachineType::Q35 => {
                    let address = self.assigned_address(Owner::Usb);
                    at("qemu-xhci,id=usb", &address)
                }
                MachineType::Pc => CHIPSET_UHCI.to_owned(),
            };
            found.add("-device", device);
        }
        if self.adds_serial() {
            let address = self.assigned_address(Owner::Serial);
            let device = at("virtio-serial-pci,id=virtio-serial0", &address);
            found.add("-device", device);
        }
    }

    fn serial_controller(&mut self, node: Node<'d, 'd>, found: &mut Peripherals) {
        let reader = self.reader;
        if reader.peek(node, "type") != Some("virtio-serial") {
            return;
        }
        let index = reader.peek(node, "index").and_then(number).unwrap_or(0);
        self.take(node, &["type", "index"]);
        self.take_alias(node);
        let mut driver = format!("virtio-serial-pci,id=virtio-serial{index}");
        for (name, property) in [("ports", "max_ports"), ("vectors", "vectors")] {
            if let Some(value) = reader.parsed(node, name, number) {
                driver.push_str(&format!(",{property}={value}"));
            }
        }
        let device = self.pci_device(node, &driver);
        found.add("-device", device);
    }

    /// Marks a libvirt alias as read. No QEMU argument needs it.
    pub(super) fn take_alias(&self, node: Node<'d, 'd>) {
        if let Some(alias) = self.reader.child(node, "alias") {
            self.reader.attribute(alias, "name");
        }
    }

    fn usb_controller(&mut self, node: Node<'d, 'd>, found: &mut Peripherals) {
        let reader = self.reader;
        if reader.peek(node, "type") != Some("usb") {
            return;
        }
        let is_pc = self.options.machine == MachineType::Pc;
        let driver = match reader.peek(node, "model") {
            Some("qemu-xhci") => "qemu-xhci",
            Some("nec-xhci") => "nec-usb-xhci",
            Some("piix3-uhci") => "piix3-usb-uhci",
            None if is_pc => "piix3-usb-uhci",
            _ => return,
        };
        let index = reader.peek(node, "index").and_then(number).unwrap_or(0);
        self.take(node, &["type", "model", "index"]);
        self.take_alias(node);
        let ports = match driver {
            "piix3-usb-uhci" => None,
            _ => reader.parsed(node, "ports", number),
        };
        let ports = ports.map_or(String::new(), |ports| format!(",p2={ports},p3={ports}"));
        let id = if index == 0 {
            "usb".to_owned()
        } else {
            format!("usb{index}")
        };
        let has_address = node
            .children()
            .any(|child| child.tag_name().name() == "address");
        let device = match driver {
            "piix3-usb-uhci" if is_pc && index == 0 && !has_address => CHIPSET_UHCI.to_owned(),
            _ => self.pci_device(node, &format!("{driver},id={id}{ports}")),
        };
        found.add("-device", device);
    }

    pub(super) fn take(&self, node: Node<'d, 'd>, attributes: &[&str]) {
        self.reader.take(node);
        for name in attributes {
            self.reader.attribute(node, name);
        }
    }

    /// Returns a character device, if QEMU supports the type and the path is known.
    fn chardev(&self, node: Node<'d, 'd>, id: &str) -> Option<String> {
        let reader = self.reader;
        let source = reader.candidates(node, "source").next();
        let path = source.and_then(|source| reader.peek(source, "path"));
        let is_listening = match source.and_then(|source| reader.peek(source, "mode")) {
            Some("bind") => ",server=on,wait=off",
            _ => "",
        };
        let backend = match (reader.peek(node, "type")?, path) {
            // In a running domain it has a path, which changes with each start.
            ("pty", _) => format!("pty,id={id}"),
            (kind @ ("null" | "stdio"), None) => format!("{kind},id={id}"),
            ("file", Some(path)) => {
                let append = source.and_then(|source| reader.peek(source, "append"));
                let append = if append == Some("on") {
                    ",append=on"
                } else {
                    ""
                };
                format!("file,id={id},path={}{append}", qemu_value(path))
            }
            ("unix", Some(path)) => {
                format!("socket,id={id},path={}{is_listening}", qemu_value(path))
            }
            ("tcp", None) => {
                let source = source?;
                let (host, service) = (
                    reader.peek(source, "host")?,
                    reader.peek(source, "service")?,
                );
                let telnet = reader.candidates(node, "protocol").next();
                let telnet = match telnet.map(|protocol| reader.peek(protocol, "type")) {
                    None | Some(Some("raw")) => "",
                    Some(Some("telnet")) => ",telnet=on",
                    Some(_) => return None,
                };
                format!("socket,id={id},host={host},port={service}{is_listening}{telnet}")
            }
            _ => return None,
        };
        self.take(node, &["type", "tty"]);
        if let Some(source) = source {
            self.take(source, &["path", "mode", "append", "host", "service"]);
        }
        if let Some(protocol) = reader.candidates(node, "protocol").next() {
            self.take(protocol, &["type"]);
        }
        Some(backend)
    }

    fn serial(&mut self, node: Node<'d, 'd>, index: usize, found: &mut Peripherals) {
        let reader = self.reader;
        let target = reader.candidates(node, "target").next();
        let kind = target.and_then(|target| reader.peek(target, "type"));
        if !matches!(kind, None | Some("isa-serial")) {
            return;
        }
        let port = target.and_then(|target| reader.peek(target, "port"));
        let port = port.and_then(number).unwrap_or(index as u32);
        let id = format!("charserial{index}");
        let Some(chardev) = self.chardev(node, &id) else {
            return;
        };
        if let Some(target) = target {
            self.take(target, &["type", "port"]);
            if let Some(model) = reader.candidates(target, "model").next()
                && reader.peek(model, "name") == Some("isa-serial")
            {
                self.take(model, &["name"]);
            }
        }
        self.take_alias(node);
        found.serials += 1;
        found.add("-chardev", chardev);
        found.add(
            "-device",
            format!("isa-serial,chardev={id},id=serial{index},index={port}"),
        );
    }

    /// Reads a console. The first console is the first serial port, and creates it if there is none.
    fn console(&mut self, node: Node<'d, 'd>, index: usize, found: &mut Peripherals) {
        let reader = self.reader;
        let target = reader.candidates(node, "target").next();
        let kind = target.and_then(|target| reader.peek(target, "type"));
        if !matches!(kind, None | Some("serial")) || index > 0 {
            return;
        }
        if found.serials == 0 {
            self.serial_of_console(node, found);
        } else if reader.peek(node, "type").is_some() {
            self.take(node, &["type", "tty"]);
            for name in ["source", "protocol", "alias"] {
                if let Some(child) = reader.child(node, name) {
                    self.take(
                        child,
                        &["path", "name", "mode", "append", "host", "service", "type"],
                    );
                }
            }
        }
        if let Some(target) = target {
            self.take(target, &["type", "port"]);
        }
    }

    fn serial_of_console(&mut self, node: Node<'d, 'd>, found: &mut Peripherals) {
        let Some(chardev) = self.chardev(node, "charserial0") else {
            return;
        };
        self.take_alias(node);
        found.serials += 1;
        found.add("-chardev", chardev);
        found.add(
            "-device",
            "isa-serial,chardev=charserial0,id=serial0,index=0",
        );
    }

    /// Reads a virtio-serial port, used by an agent in the guest.
    fn channel(&mut self, node: Node<'d, 'd>, index: usize, found: &mut Peripherals) {
        let reader = self.reader;
        let Some(target) = reader.candidates(node, "target").next() else {
            return;
        };
        let (Some("virtio"), Some(name)) =
            (reader.peek(target, "type"), reader.peek(target, "name"))
        else {
            return;
        };
        let id = format!("charchannel{index}");
        let Some(chardev) = self.channel_source(node, &id, name) else {
            return;
        };
        self.take(target, &["type", "name", "state"]);
        self.take_alias(node);
        let address = reader.candidates(node, "address").next();
        let part = |name| reader.peek(address?, name).and_then(number);
        let (controller, port) = (part("controller").unwrap_or(0), part("port"));
        if let Some(address) = address {
            self.take(address, &["type", "controller", "bus", "port"]);
        }
        // Port 0 is for consoles.
        let used = &mut found.channel_ports;
        let free = (1..).find(|port| !used.contains(&(controller, *port)));
        let port = port.or(free).unwrap_or(1);
        used.push((controller, port));
        found.add("-chardev", chardev);
        found.add(
            "-device",
            format!(
                "virtserialport,bus=virtio-serial{controller}.0,nr={port},chardev={id},id=channel{index},name={}",
                qemu_value(name)
            ),
        );
    }

    /// Returns the character device of a channel. For a UNIX socket without a path libvirt creates one; here it is in the folder of the
    /// sockets.
    fn channel_source(&mut self, node: Node<'d, 'd>, id: &str, name: &str) -> Option<String> {
        let reader = self.reader;
        let source = reader.candidates(node, "source").next();
        let path = source.and_then(|source| reader.peek(source, "path"));
        let mode = source.and_then(|source| reader.peek(source, "mode"));
        let (Some("unix"), None, None | Some("bind")) = (reader.peek(node, "type"), path, mode)
        else {
            return self.chardev(node, id);
        };
        self.take(node, &["type"]);
        if let Some(source) = source {
            self.take(source, &["mode"]);
        }
        let file = format!("{}-{name}.sock", self.options.name).replace('/', "_");
        let path = self.options.sockets.join(file).display().to_string();
        Some(format!(
            "socket,id={id},path={},server=on,wait=off",
            qemu_value(&path)
        ))
    }

    fn graphics(&mut self, node: Node<'d, 'd>, found: &mut Peripherals) {
        let reader = self.reader;
        let port = reader.peek(node, "port").and_then(number);
        let listen = reader.candidates(node, "listen").next();
        let listen = listen.filter(|listen| reader.peek(*listen, "type") == Some("address"));
        let address = reader.peek(node, "listen");
        let address = address.or_else(|| reader.peek(listen?, "address"));
        let host = address.unwrap_or("127.0.0.1");
        match reader.peek(node, "type") {
            Some("vnc") => {
                // libvirt and QEMU both search for a free port from 5900 on.
                let display = match port {
                    Some(port) if port >= 5900 => format!("{host}:{}", port - 5900),
                    Some(_) => return,
                    None => format!("{host}:0,to=99"),
                };
                found.add("-vnc", display);
            }
            Some("spice") => {
                // QEMU does not search for a free port.
                let Some(port) = port else {
                    return;
                };
                found.add(
                    "-spice",
                    format!("port={port},addr={host},disable-ticketing=on"),
                );
            }
            _ => return,
        }
        found.has_display = true;
        self.take(node, &["type", "listen"]);
        reader.parsed(node, "port", |port| {
            (port == "-1" || number(port).is_some()).then_some(())
        });
        reader.parsed(node, "autoport", |auto| {
            (port.is_none() || auto == "no").then_some(())
        });
        if let Some(listen) = listen {
            self.take(listen, &["type", "address"]);
        }
        self.take_alias(node);
    }

    fn video(&mut self, node: Node<'d, 'd>, index: usize, found: &mut Peripherals) {
        let reader = self.reader;
        let Some(model) = reader.candidates(node, "model").next() else {
            return;
        };
        let driver = match (reader.peek(model, "type"), index) {
            (Some("none"), _) => {
                self.take(node, &[]);
                self.take(model, &["type"]);
                return;
            }
            (Some("vga"), 0) => "VGA",
            (Some("cirrus"), 0) => "cirrus-vga",
            (Some("bochs"), 0) => "bochs-display",
            (Some("qxl"), 0) => "qxl-vga",
            (Some("qxl"), _) => "qxl",
            (Some("virtio"), 0) => "virtio-vga",
            (Some("virtio"), _) => "virtio-gpu-pci",
            _ => return,
        };
        self.take(node, &[]);
        self.take(model, &["type"]);
        reader.parsed(model, "primary", |primary| {
            ((primary == "yes") == (index == 0)).then_some(())
        });
        reader.parsed(model, "heads", |heads| (heads == "1").then_some(()));
        let memory = match driver {
            "VGA" | "qxl-vga" => Some("vgamem_mb"),
            _ => None,
        };
        // libvirt's unit is KiB.
        let attribute = if driver == "VGA" { "vram" } else { "vgamem" };
        let memory = memory.and_then(|property| {
            let kib = reader.parsed(model, attribute, |kib| {
                number(kib).filter(|kib| kib % 1024 == 0 && *kib > 0)
            })?;
            Some(format!(",{property}={}", kib / 1024))
        });
        self.take_alias(node);
        let outputs = match driver {
            "virtio-vga" | "virtio-gpu-pci" | "qxl-vga" | "qxl" => ",max_outputs=1",
            _ => "",
        };
        let memory = memory.unwrap_or_default();
        let driver = format!("{driver},id=video{index}{outputs}{memory}");
        let device = self.pci_device(node, &driver);
        found.add("-device", device);
    }

    fn input(&mut self, node: Node<'d, 'd>, index: usize, found: &mut Peripherals) {
        let reader = self.reader;
        let kind = match reader.peek(node, "type") {
            Some("tablet") => "tablet",
            Some("mouse") => "mouse",
            Some("keyboard") => "kbd",
            _ => return,
        };
        match (reader.peek(node, "bus"), kind) {
            // The machine has both.
            (Some("ps2"), "mouse" | "kbd") => {}
            (Some("usb"), _) => {
                let address = reader.candidates(node, "address").next();
                let part = |name| reader.peek(address?, name);
                let bus = part("bus").and_then(number).unwrap_or(0);
                let bus = if bus == 0 {
                    "usb".to_owned()
                } else {
                    format!("usb{bus}")
                };
                let port = part("port").map_or(String::new(), |port| format!(",port={port}"));
                if let Some(address) = address {
                    self.take(address, &["type", "bus", "port"]);
                }
                found.add(
                    "-device",
                    format!("usb-{kind},id=input{index},bus={bus}.0{port}"),
                );
            }
            (Some("virtio"), _) => {
                let name = if kind == "kbd" { "keyboard" } else { kind };
                let device = self.pci_device(node, &format!("virtio-{name}-pci,id=input{index}"));
                found.add("-device", device);
            }
            _ => return,
        }
        self.take(node, &["type", "bus"]);
        self.take_alias(node);
    }

    fn sound(&mut self, node: Node<'d, 'd>, index: usize, found: &mut Peripherals) {
        let reader = self.reader;
        let (driver, has_codec) = match reader.peek(node, "model") {
            Some("ich6") => ("intel-hda", true),
            Some("ich9") => ("ich9-intel-hda", true),
            Some("ac97") => ("AC97", false),
            Some("es1370") => ("ES1370", false),
            _ => return,
        };
        self.take(node, &["model"]);
        self.take_alias(node);
        // No output device: libvirt's default without <audio> and SPICE.
        if index == 0 {
            found.add("-audiodev", "none,id=audio1");
        }
        let audio = if has_codec { "" } else { ",audiodev=audio1" };
        let device = self.pci_device(node, &format!("{driver},id=sound{index}{audio}"));
        found.add("-device", device);
        if has_codec {
            let codec = reader.candidates(node, "codec").next();
            let kind = codec
                .and_then(|codec| reader.peek(codec, "type"))
                .unwrap_or("duplex");
            if let Some(codec) = codec {
                self.take(codec, &["type"]);
            }
            found.add(
                "-device",
                format!(
                    "hda-{kind},id=sound{index}-codec0,bus=sound{index}.0,cad=0,audiodev=audio1"
                ),
            );
        }
    }

    fn rng(&mut self, node: Node<'d, 'd>, index: usize, found: &mut Peripherals) {
        let reader = self.reader;
        let Some(backend) = reader.candidates(node, "backend").next() else {
            return;
        };
        let object = match (reader.peek(node, "model"), reader.peek(backend, "model")) {
            (Some("virtio"), Some("random")) => {
                let path = backend.text().unwrap_or_default().trim();
                let path = if path.is_empty() { "/dev/random" } else { path };
                format!("rng-random,id=objrng{index},filename={}", qemu_value(path))
            }
            (Some("virtio"), Some("builtin")) => format!("rng-builtin,id=objrng{index}"),
            _ => return,
        };
        self.take(node, &["model"]);
        self.take(backend, &["model"]);
        self.take_alias(node);
        let mut driver = format!("virtio-rng-pci,rng=objrng{index},id=rng{index}");
        if let Some(rate) = reader.candidates(node, "rate").next()
            && let Some(bytes) = reader.peek(rate, "bytes").and_then(number)
        {
            let period = reader.peek(rate, "period").and_then(number).unwrap_or(1000);
            self.take(rate, &["bytes", "period"]);
            driver.push_str(&format!(",max-bytes={bytes},period={period}"));
        }
        let device = self.pci_device(node, &driver);
        found.add("-object", object);
        found.add("-device", device);
    }

    fn balloon(&mut self, node: Node<'d, 'd>, found: &mut Peripherals) {
        let reader = self.reader;
        if reader.peek(node, "model") != Some("virtio") {
            return;
        }
        self.take(node, &["model"]);
        self.take_alias(node);
        let mut driver = "virtio-balloon-pci,id=balloon0".to_owned();
        for (attribute, property) in [
            ("autodeflate", "deflate-on-oom"),
            ("freePageReporting", "free-page-reporting"),
        ] {
            let value = reader.parsed(node, attribute, |value| {
                matches!(value, "on" | "off").then(|| value.to_owned())
            });
            if let Some(value) = value {
                driver.push_str(&format!(",{property}={value}"));
            }
        }
        let device = self.pci_device(node, &driver);
        found.add("-device", device);
    }

    fn watchdog(&mut self, node: Node<'d, 'd>, found: &mut Peripherals) {
        let reader = self.reader;
        let action = reader.peek(node, "action").unwrap_or("reset");
        if ![
            "reset",
            "shutdown",
            "poweroff",
            "pause",
            "none",
            "inject-nmi",
        ]
        .contains(&action)
        {
            return;
        }
        match (reader.peek(node, "model"), self.options.machine) {
            (Some("i6300esb"), _) => {
                let device = self.pci_device(node, "i6300esb,id=watchdog0");
                found.add("-device", device);
            }
            // An ISA device.
            (Some("ib700"), _) => found.add("-device", "ib700,id=watchdog0"),
            // Part of the chipset, which ignores the watchdog by default.
            (Some("itco"), MachineType::Q35) => found.add("-global", "ICH9-LPC.noreboot=off"),
            _ => return,
        }
        self.take(node, &["model", "action"]);
        self.take_alias(node);
        found.add("-action", format!("watchdog={action}"));
    }

    /// Reads a TPM of the host or of a running emulator. libvirt starts `swtpm` itself for other types, which no QEMU argument does.
    fn tpm(&mut self, node: Node<'d, 'd>, found: &mut Peripherals) {
        let reader = self.reader;
        let driver = match reader.peek(node, "model") {
            Some("tpm-crb") => "tpm-crb",
            None | Some("tpm-tis") => "tpm-tis",
            _ => return,
        };
        let Some(backend) = reader.candidates(node, "backend").next() else {
            return;
        };
        let inner = match reader.peek(backend, "type") {
            Some("passthrough") => reader.candidates(backend, "device").next(),
            Some("external") => reader.candidates(backend, "source").next(),
            _ => return,
        };
        let path = inner.and_then(|inner| reader.peek(inner, "path"));
        let (Some(inner), Some(path)) = (inner, path) else {
            return;
        };
        match reader.peek(backend, "type") {
            Some("passthrough") => found.add(
                "-tpmdev",
                format!("passthrough,id=tpm-tpm0,path={}", qemu_value(path)),
            ),
            _ => {
                found.add(
                    "-chardev",
                    format!("socket,id=chrtpm,path={}", qemu_value(path)),
                );
                found.add("-tpmdev", "emulator,id=tpm-tpm0,chardev=chrtpm");
            }
        }
        found.add("-device", format!("{driver},tpmdev=tpm-tpm0,id=tpm0"));
        self.take(node, &["model"]);
        self.take(backend, &["type"]);
        self.take(inner, &["path"]);
        reader.parsed(inner, "type", |kind| (kind == "unix").then_some(()));
        reader.parsed(inner, "mode", |mode| (mode == "connect").then_some(()));
        self.take_alias(node);
    }
}
