//! The guest around its devices: machine, CPU, clock, boot order, features and power management.

use super::disks::{number, switch};
use super::domain::Parts;
use crate::topology::{GuestKernel, MachineType};
use roxmltree::Node;
use std::path::PathBuf;

/// Hyper-V features with a CPU flag of the same meaning, and no value.
const HYPERV: [(&str, &str); 13] = [
    ("relaxed", "hv-relaxed"),
    ("vapic", "hv-vapic"),
    ("vpindex", "hv-vpindex"),
    ("runtime", "hv-runtime"),
    ("synic", "hv-synic"),
    ("stimer", "hv-stimer"),
    ("reset", "hv-reset"),
    ("frequencies", "hv-frequencies"),
    ("reenlightenment", "hv-reenlightenment"),
    ("tlbflush", "hv-tlbflush"),
    ("ipi", "hv-ipi"),
    ("evmcs", "hv-evmcs"),
    ("avic", "hv-avic"),
];

/// Returns true if the word is `wanted`.
fn is(wanted: &'static str) -> impl Fn(&str) -> Option<()> {
    move |word| (word == wanted).then_some(())
}

fn on_off(is_on: bool) -> &'static str {
    if is_on { "on" } else { "off" }
}

impl<'d> Parts<'_, 'd> {
    /// Reads the CPUs and their topology. libvirt's default has one core for each socket, QEMU's has one socket.
    pub(super) fn cpus(&mut self) {
        let reader = self.reader;
        let (mut most, mut current) = (1, 1);
        if let Some(cpus) = reader.child(self.root, "vcpu") {
            reader.parsed(cpus, "placement", is("static"));
            most = cpus
                .text()
                .and_then(|text| number(text.trim()))
                .unwrap_or(1);
            current = reader.parsed(cpus, "current", number).unwrap_or(most);
        }
        self.options.cpus = current;
        let cpu = reader.candidates(self.root, "cpu").next();
        let element = cpu.and_then(|cpu| reader.candidates(cpu, "topology").next());
        let topology = element.and_then(|element| {
            let names = ["sockets", "dies", "cores", "threads"];
            let values =
                names.map(|name| (name, reader.peek(element, name).map_or(Some(1), number)));
            let product = values
                .iter()
                .try_fold(1_u32, |product, (_, value)| product.checked_mul((*value)?));
            if product != Some(most) {
                return None;
            }
            reader.take(element);
            let words = values.iter().filter_map(|(name, value)| {
                let value = (*value)?;
                reader.attribute(element, name);
                Some(format!("{name}={value}"))
            });
            Some(words.collect::<Vec<_>>().join(","))
        });
        let topology = topology.unwrap_or_else(|| format!("sockets={most},cores=1,threads=1"));
        self.options.cpu_topology = Some(match most == current {
            true => topology,
            false => format!("maxcpus={most},{topology}"),
        });
    }

    /// Reads the number and the names of the I/O threads.
    pub(super) fn iothreads(&mut self) {
        let reader = self.reader;
        let count = reader.text(self.root, "iothreads").and_then(number);
        let mut ids = Vec::new();
        if let Some(element) = reader.child(self.root, "iothreadids") {
            for thread in reader.candidates(element, "iothread") {
                if let Some(id) = reader.parsed(thread, "id", number) {
                    reader.take(thread);
                    ids.push(id);
                }
            }
        }
        let wanted = count.unwrap_or(0).min(1024) as usize;
        let others = (1..).filter(|id| !ids.contains(id));
        let missing: Vec<u32> = others.take(wanted.saturating_sub(ids.len())).collect();
        let all = ids.into_iter().chain(missing);
        self.options.iothreads = all.map(|id| format!("iothread{id}")).collect();
    }

    /// Reads the machine, a kernel, and the boot order.
    pub(super) fn boot(&mut self) {
        let reader = self.reader;
        let has_order = self.root.descendants().any(|node| {
            let parent = node.parent().map(|parent| parent.tag_name().name());
            node.tag_name().name() == "boot" && matches!(parent, Some("disk" | "interface"))
        });
        let Some(os) = reader.child(self.root, "os") else {
            return;
        };
        if let Some(kind) = reader.child(os, "type") {
            reader.parsed(kind, "arch", is("x86_64"));
            let machine = reader.parsed(kind, "machine", |machine| match machine {
                "q35" => Some((MachineType::Q35, None)),
                "pc" => Some((MachineType::Pc, None)),
                _ if machine.starts_with("pc-q35-") => {
                    Some((MachineType::Q35, Some(machine.to_owned())))
                }
                _ if machine.starts_with("pc-i440fx-") => {
                    Some((MachineType::Pc, Some(machine.to_owned())))
                }
                _ => None,
            });
            (self.options.machine, self.options.machine_version) =
                machine.unwrap_or((MachineType::Pc, None));
        }
        let image = reader.text(os, "kernel").map(PathBuf::from);
        self.options.kernel = image.map(|image| GuestKernel {
            image,
            initrd: reader.text(os, "initrd").map(PathBuf::from),
            append: reader.text(os, "cmdline").unwrap_or_default().to_owned(),
        });
        for boot in reader.candidates(os, "boot") {
            let device = reader.parsed(boot, "dev", |device| {
                ["hd", "network", "cdrom", "fd"]
                    .contains(&device)
                    .then(|| device.to_owned())
            });
            if let Some(device) = device {
                reader.take(boot);
                self.boots.push(device);
            }
        }
        if self.boots.is_empty() && !has_order {
            self.boots.push("hd".to_owned());
        }
        self.boot_options(os);
    }

    /// Reads the boot menu, and the time after which the firmware boots again without a bootable device.
    fn boot_options(&mut self, os: Node<'d, 'd>) {
        let reader = self.reader;
        let (mut menu, mut splash, mut reboot) = (String::new(), String::new(), String::new());
        if let Some(element) = reader.candidates(os, "bootmenu").next()
            && let Some(is_on) = reader.parsed(element, "enable", yes_no)
        {
            reader.take(element);
            menu = format!("menu={},", on_off(is_on));
            if let Some(time) = reader.parsed(element, "timeout", number).filter(|_| is_on) {
                splash = format!("splash-time={time},");
            }
        }
        if let Some(bios) = reader.candidates(os, "bios").next() {
            let time = |text: &str| text.parse().ok().filter(|time| (-1..=65535).contains(time));
            if let Some(time) = reader.parsed(bios, "rebootTimeout", time) {
                reader.take(bios);
                reboot = format!("reboot-timeout={time},");
            }
        }
        self.set("-boot", format!("{menu}{reboot}{splash}strict=on"));
    }

    fn set(&mut self, option: &str, value: String) {
        let words = [option.to_owned(), value];
        self.options.settings.extend(words);
    }

    /// Returns the place of a disk or network card in the boot order of `<os>`, which names kinds of devices: the first device of a kind boots.
    pub(super) fn boot_index(&self, node: Node<'d, 'd>) -> Option<u32> {
        let (kind, first) = match node.tag_name().name() {
            "interface" => {
                let mut nodes = self.root.descendants();
                (
                    "network",
                    nodes.find(|node| node.tag_name().name() == "interface"),
                )
            }
            _ => {
                let mut disks = self.sorted_disks().into_iter();
                let is_disk =
                    |node: &Node<'d, 'd>| matches!(node.attribute("device"), None | Some("disk"));
                ("hd", disks.find(is_disk))
            }
        };
        let index = self.boots.iter().position(|boot| boot == kind)?;
        (first == Some(node)).then_some(index as u32 + 1)
    }

    /// Reads the features. libvirt's machines have no ACPI unless requested; QEMU's always have an APIC.
    pub(super) fn features(&mut self) {
        let reader = self.reader;
        self.options.has_acpi = false;
        let Some(features) = reader.child(self.root, "features") else {
            return;
        };
        self.options.has_acpi = reader.child(features, "acpi").is_some();
        reader.child(features, "apic");
        // QEMU's CPU models have it.
        reader.child(features, "pae");
        for name in ["vmport", "smm"] {
            if let Some(element) = reader.candidates(features, name).next()
                && let Some(is_on) = reader.parsed(element, "state", switch)
            {
                reader.take(element);
                let property = format!("{name}={}", on_off(is_on));
                self.options.machine_properties.push(property);
            }
        }
    }

    /// Reads CPU features that libvirt has under `<features>`.
    fn cpu_flags(&self) -> Vec<String> {
        let reader = self.reader;
        let mut flags = Vec::new();
        let Some(features) = reader.child(self.root, "features") else {
            return flags;
        };
        if let Some(hyperv) = reader.candidates(features, "hyperv").next() {
            reader.take(hyperv);
            reader.parsed(hyperv, "mode", is("custom"));
            for (name, flag) in HYPERV {
                let element = reader.candidates(hyperv, name).next();
                let state = element.and_then(|element| reader.parsed(element, "state", switch));
                let (Some(element), Some(is_on)) = (element, state) else {
                    continue;
                };
                reader.take(element);
                flags.extend(is_on.then(|| format!("{flag}=on")));
            }
            if let Some(element) = reader.candidates(hyperv, "spinlocks").next()
                && let Some(is_on) = reader.parsed(element, "state", switch)
            {
                reader.take(element);
                let retries = reader.parsed(element, "retries", number);
                let retries = retries.filter(|_| is_on);
                flags.extend(retries.map(|retries| format!("hv-spinlocks=0x{retries:x}")));
            }
        }
        if let Some(kvm) = reader.candidates(features, "kvm").next() {
            reader.take(kvm);
            if let Some(hidden) = reader.candidates(kvm, "hidden").next()
                && let Some(is_on) = reader.parsed(hidden, "state", switch)
            {
                reader.take(hidden);
                flags.extend(is_on.then(|| "kvm=off".to_owned()));
            }
        }
        flags
    }

    /// Reads the CPU model. `host-model` is expanded by libvirt from the host's CPU and stays unread.
    pub(super) fn cpu(&mut self) {
        let reader = self.reader;
        let mut words = vec!["qemu64".to_owned()];
        if let Some(cpu) = reader.child(self.root, "cpu") {
            // The checks happen in libvirt.
            reader.parsed(cpu, "check", |check| {
                ["none", "partial", "full"].contains(&check).then_some(())
            });
            reader.parsed(cpu, "match", is("exact"));
            let mode = reader.peek(cpu, "mode");
            let model = match mode {
                Some("maximum") => "max",
                Some("host-passthrough") => "host",
                None | Some("custom") => {
                    let model = reader.child(cpu, "model");
                    if let Some(model) = model {
                        reader.parsed(model, "fallback", |word| {
                            ["allow", "forbid"].contains(&word).then_some(())
                        });
                    }
                    let name = model.and_then(|model| model.text()).map(str::trim);
                    name.filter(|name| !name.is_empty()).unwrap_or("qemu64")
                }
                Some(_) => "max",
            };
            words = vec![model.to_owned()];
            if mode != Some("host-model") {
                reader.attribute(cpu, "mode");
            }
            let migratable = reader.parsed(cpu, "migratable", switch);
            let migratable = migratable.filter(|_| ["max", "host"].contains(&model));
            words.extend(migratable.map(|is_on| format!("migratable={}", on_off(is_on))));
            for feature in reader.candidates(cpu, "feature") {
                let policy = reader.parsed(feature, "policy", |policy| match policy {
                    "require" | "force" => Some("on"),
                    "disable" | "forbid" => Some("off"),
                    _ => None,
                });
                if let (Some(value), Some(name)) = (policy, reader.attribute(feature, "name")) {
                    reader.take(feature);
                    // QEMU's names have dashes.
                    words.push(format!("{}={value}", name.replace('_', "-")));
                }
            }
        }
        words.extend(self.timers());
        words.extend(self.cpu_flags());
        self.options.cpu = words.join(",");
    }

    /// Reads the timers that are features of the CPU.
    fn timers(&self) -> Vec<String> {
        let reader = self.reader;
        let mut flags = Vec::new();
        let Some(clock) = reader.child(self.root, "clock") else {
            return flags;
        };
        for timer in reader.candidates(clock, "timer") {
            let present = reader.peek(timer, "present").and_then(yes_no);
            match (reader.peek(timer, "name"), present) {
                (Some("kvmclock"), Some(is_on)) => {
                    flags.push(format!("kvmclock={}", on_off(is_on)))
                }
                (Some("hypervclock"), Some(is_on)) => {
                    flags.extend(is_on.then(|| "hv-time=on".to_owned()))
                }
                _ => continue,
            }
            reader.take(timer);
            reader.attribute(timer, "name");
            reader.attribute(timer, "present");
        }
        flags
    }

    /// Reads the clock and its other timers.
    pub(super) fn clock(&mut self) {
        let reader = self.reader;
        let mut rtc = "base=utc".to_owned();
        let mut settings = Vec::new();
        if let Some(clock) = reader.child(self.root, "clock") {
            let base = reader.parsed(clock, "offset", |offset| {
                ["utc", "localtime"]
                    .contains(&offset)
                    .then(|| offset.to_owned())
            });
            rtc = format!("base={}", base.as_deref().unwrap_or("utc"));
            for timer in reader.candidates(clock, "timer") {
                let name = reader.peek(timer, "name");
                let policy = reader.peek(timer, "tickpolicy");
                let present = reader.peek(timer, "present").and_then(yes_no);
                match (name, policy, present) {
                    (Some("rtc"), Some("catchup"), _) => rtc.push_str(",driftfix=slew"),
                    (Some("rtc"), Some("delay") | None, _) => {}
                    (Some("pit"), Some("delay" | "discard"), _) => {
                        let policy = policy.unwrap_or_default();
                        settings.push(("-global", format!("kvm-pit.lost_tick_policy={policy}")));
                    }
                    // QEMU's default.
                    (Some("pit"), Some("catchup") | None, _) | (Some("hpet"), None, Some(true)) => {
                    }
                    (Some("hpet"), None, Some(false)) => {
                        self.options.machine_properties.push("hpet=off".to_owned());
                    }
                    _ => continue,
                }
                reader.take(timer);
                for attribute in ["name", "tickpolicy"] {
                    reader.attribute(timer, attribute);
                }
                match name {
                    Some("hpet") => reader.attribute(timer, "present").map(drop),
                    _ => reader.parsed(timer, "present", is("yes")),
                };
                if name == Some("rtc") {
                    let track = reader.parsed(timer, "track", |track| match track {
                        "guest" => Some(",clock=vm"),
                        "wall" => Some(""),
                        _ => None,
                    });
                    rtc.push_str(track.unwrap_or_default());
                }
            }
        }
        self.set("-rtc", rtc);
        for (option, value) in settings {
            self.set(option, value);
        }
    }

    /// Reads power management, and the actions at the end of the guest. QEMU ends at a power-off and restarts at a reboot by default.
    pub(super) fn power(&mut self) {
        let reader = self.reader;
        let controller = match self.options.machine {
            MachineType::Q35 => "ICH9-LPC",
            MachineType::Pc => "PIIX4_PM",
        };
        if let Some(power) = reader.child(self.root, "pm") {
            for (name, property) in [
                ("suspend-to-mem", "disable_s3"),
                ("suspend-to-disk", "disable_s4"),
            ] {
                if let Some(element) = reader.candidates(power, name).next()
                    && let Some(is_on) = reader.parsed(element, "enabled", yes_no)
                {
                    reader.take(element);
                    let value = u32::from(!is_on);
                    self.set("-global", format!("{controller}.{property}={value}"));
                }
            }
        }
        for (name, default) in [
            ("on_poweroff", "destroy"),
            ("on_reboot", "restart"),
            ("on_crash", "destroy"),
        ] {
            let Some(element) = reader.candidates(self.root, name).next() else {
                continue;
            };
            match (name, element.text().unwrap_or_default().trim()) {
                (_, word) if word == default => {}
                ("on_reboot", "destroy") => self.set("-action", "reboot=shutdown".to_owned()),
                _ => continue,
            }
            reader.take(element);
        }
    }
}

fn yes_no(text: &str) -> Option<bool> {
    match text {
        "yes" => Some(true),
        "no" => Some(false),
        _ => None,
    }
}
