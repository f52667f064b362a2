//! Devices other than disks: network, graphics, input, random numbers, balloon, watchdog, serial ports, channels, TPM and sound.
//!
//! A device is converted completely or stays unread: an attribute or element without an equivalent on QEMU's command line is listed as
//! unread.

use super::domain::Parts;
use crate::topology::{MachineType, qemu_value};
use roxmltree::Node;

/// Devices as QEMU arguments.
#[derive(Default)]
pub(super) struct Peripherals {
    arguments: Vec<String>,
    has_display: bool,
    serials: usize,
    has_port_bus: bool,
}

impl Peripherals {
    fn add(&mut self, option: &str, value: impl Into<String>) {
        self.arguments.extend([option.to_owned(), value.into()]);
    }
}

fn number(text: &str) -> Option<u32> {
    text.parse().ok()
}

impl<'d> Parts<'_, 'd> {
    pub(super) fn peripherals(&mut self) -> Vec<String> {
        let reader = self.reader;
        let mut found = Peripherals::default();
        let Some(devices) = reader.child(self.root, "devices") else {
            return vec!["-display".to_owned(), "none".to_owned()];
        };
        let all = |name| reader.candidates(devices, name).enumerate();
        for node in reader.candidates(devices, "controller") {
            self.usb_controller(node, &mut found);
        }
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
        for (index, node) in all("sound") {
            self.sound(node, index, &mut found);
        }
        for (index, node) in all("rng") {
            self.rng(node, index, &mut found);
        }
        for (_, node) in all("memballoon") {
            self.balloon(node, &mut found);
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
    fn pci_device(&mut self, node: Node<'d, 'd>, driver: &str) -> String {
        let address = self.pci_address(node).properties();
        let address = address.iter().map(|(key, value)| format!(",{key}={value}"));
        format!("{driver}{}", address.collect::<String>())
    }

    /// Marks a libvirt alias as read. No QEMU argument needs it.
    fn take_alias(&self, node: Node<'d, 'd>) {
        if let Some(alias) = self.reader.child(node, "alias") {
            self.reader.attribute(alias, "name");
        }
    }

    fn usb_controller(&mut self, node: Node<'d, 'd>, found: &mut Peripherals) {
        let reader = self.reader;
        if reader.peek(node, "type") != Some("usb") {
            return;
        }
        let driver = match reader.peek(node, "model") {
            Some("qemu-xhci") => "qemu-xhci",
            Some("nec-xhci") => "nec-usb-xhci",
            Some("piix3-uhci") => "piix3-usb-uhci",
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
        let device = self.pci_device(node, &format!("{driver},id={id}{ports}"));
        found.add("-device", device);
    }

    fn take(&self, node: Node<'d, 'd>, attributes: &[&str]) {
        self.reader.take(node);
        for name in attributes {
            self.reader.attribute(node, name);
        }
    }

    fn interface(&mut self, node: Node<'d, 'd>, index: usize, found: &mut Peripherals) {
        let reader = self.reader;
        let source = reader.candidates(node, "source").next();
        let target = reader.candidates(node, "target").next();
        let peek = |of: Option<Node<'d, 'd>>, name| of.and_then(|of| reader.peek(of, name));
        let Some(driver) = card(node) else {
            return;
        };
        let (backend, of_source, of_target): (String, &[&str], &[&str]) =
            match reader.peek(node, "type") {
                Some("user") => ("user".to_owned(), &[], &[]),
                // libvirt creates a tap itself; here QEMU's helper does. The bridge of a network is known only while the domain runs.
                Some("bridge" | "network") => match peek(source, "bridge") {
                    Some(bridge) => {
                        let all: &[&str] = &["bridge", "network", "portid"];
                        (format!("bridge,br={}", qemu_value(bridge)), all, &[])
                    }
                    None => return,
                },
                Some("ethernet") => match peek(target, "dev") {
                    Some(tap) => (
                        format!("tap,ifname={},script=no,downscript=no", qemu_value(tap)),
                        &[],
                        &["dev", "managed"],
                    ),
                    None => return,
                },
                _ => return,
            };
        self.take(node, &["type"]);
        if let Some(source) = source.filter(|_| !of_source.is_empty()) {
            self.take(source, of_source);
        }
        if let Some(target) = target.filter(|_| !of_target.is_empty()) {
            self.take(target, of_target);
        }
        if let Some(model) = reader.child(node, "model") {
            reader.attribute(model, "type");
        }
        let mut netdev = format!("{backend},id=hostnet{index}");
        let mut device = format!("{driver},netdev=hostnet{index},id=net{index}");
        if let Some(mac) = reader.child(node, "mac") {
            let mac = reader.attribute(mac, "address").unwrap_or_default();
            device.push_str(&format!(",mac={mac}"));
        }
        if let Some(options) = reader.candidates(node, "driver").next() {
            self.card_options(options, &backend, &mut netdev, &mut device);
        }
        if let Some(mtu) = reader.candidates(node, "mtu").next()
            && driver.starts_with("virtio")
            && let Some(size) = reader.peek(mtu, "size").and_then(number)
        {
            self.take(mtu, &["size"]);
            device.push_str(&format!(",host_mtu={size}"));
        }
        if let Some(boot) = reader.candidates(node, "boot").next()
            && let Some(order) = reader.peek(boot, "order").and_then(number)
        {
            self.take(boot, &["order"]);
            device.push_str(&format!(",bootindex={}", order.saturating_sub(1)));
        }
        self.take_alias(node);
        let device = self.pci_device(node, &device);
        found.add("-netdev", netdev);
        found.add("-device", device);
    }

    fn card_options(
        &self,
        options: Node<'d, 'd>,
        backend: &str,
        netdev: &mut String,
        device: &mut String,
    ) {
        let reader = self.reader;
        reader.take(options);
        let is_tap = backend.starts_with("tap");
        let vhost = reader.parsed(options, "name", |name| match name {
            "vhost" if is_tap => Some(true),
            "qemu" => Some(false),
            _ => None,
        });
        if vhost == Some(true) {
            netdev.push_str(",vhost=on");
        }
        let queues = reader.parsed(options, "queues", |queues| match number(queues)? {
            1 => Some(1),
            queues if is_tap => Some(queues),
            _ => None,
        });
        if let Some(queues) = queues.filter(|queues| *queues > 1) {
            netdev.push_str(&format!(",queues={queues}"));
            // One vector per direction and queue, one for the control queue, one for configuration changes.
            device.push_str(&format!(",mq=on,vectors={}", 2 * queues + 2));
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
        let Some(chardev) = self.chardev(node, &id) else {
            return;
        };
        self.take(target, &["type", "name", "state"]);
        self.take_alias(node);
        if !found.has_port_bus {
            found.has_port_bus = true;
            let bus = self.port_bus();
            found.add("-device", bus);
        }
        // libvirt's port number on the controller; the guest finds the port by its name.
        if let Some(address) = reader.candidates(node, "address").next() {
            self.take(address, &["type", "controller", "bus", "port"]);
        }
        found.add("-chardev", chardev);
        found.add(
            "-device",
            format!(
                "virtserialport,bus=virtio-serial0.0,chardev={id},id=channel{index},name={}",
                qemu_value(name)
            ),
        );
    }

    /// Returns the controller of the ports, which libvirt adds by default.
    fn port_bus(&mut self) -> String {
        let reader = self.reader;
        let devices = reader.child(self.root, "devices");
        let mut controllers = devices
            .into_iter()
            .flat_map(|devices| reader.candidates(devices, "controller"));
        let driver = "virtio-serial-pci,id=virtio-serial0";
        match controllers.find(|node| reader.peek(*node, "type") == Some("virtio-serial")) {
            Some(node) => {
                self.take(node, &["type", "index"]);
                self.take_alias(node);
                self.pci_device(node, driver)
            }
            None => self.pci_device(self.root, driver),
        }
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
        let driver = format!("{driver},id=video{index}{}", memory.unwrap_or_default());
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

/// Returns QEMU's driver for a network card model. libvirt's default depends on the machine version, so the model must be explicit.
fn card(node: Node<'_, '_>) -> Option<&'static str> {
    let model = node
        .children()
        .find(|child| child.tag_name().name() == "model");
    match model?.attribute("type")? {
        "virtio" => Some("virtio-net-pci"),
        "e1000" => Some("e1000"),
        "e1000e" => Some("e1000e"),
        "rtl8139" => Some("rtl8139"),
        _ => None,
    }
}
