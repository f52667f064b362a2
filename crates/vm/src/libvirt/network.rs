//! Network cards and their back ends.

use super::disks::number;
use super::domain::Parts;
use super::peripherals::Peripherals;
use crate::topology::qemu_value;
use roxmltree::Node;

impl<'d> Parts<'_, 'd> {
    pub(super) fn interface(&mut self, node: Node<'d, 'd>, index: usize, found: &mut Peripherals) {
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
        let options = reader.candidates(node, "driver").next();
        self.card_options(options, driver, &mut netdev, &mut device);
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
            device.push_str(&format!(",bootindex={order}"));
        } else if let Some(order) = self.boot_index(node) {
            device.push_str(&format!(",bootindex={order}"));
        }
        self.take_alias(node);
        let device = self.pci_device(node, &device);
        found.add("-netdev", netdev);
        found.add("-device", device);
    }

    /// Reads `<driver>` of a card. Without it, a virtio card on a tap device uses vhost-net, if the domain uses KVM.
    fn card_options(
        &self,
        options: Option<Node<'d, 'd>>,
        driver: &str,
        netdev: &mut String,
        device: &mut String,
    ) {
        let reader = self.reader;
        let is_virtio = driver.starts_with("virtio");
        let is_tap = netdev.starts_with("tap");
        let is_kvm = self.options.accelerators.iter().any(|word| word == "kvm");
        let vhost = options.and_then(|options| {
            reader.take(options);
            reader.parsed(options, "name", |name| match name {
                "vhost" if is_tap => Some(true),
                "qemu" => Some(false),
                _ => None,
            })
        });
        if vhost.unwrap_or(is_kvm && is_tap && is_virtio) {
            netdev.push_str(",vhost=on");
        }
        let Some(options) = options.filter(|_| is_virtio) else {
            return;
        };
        let queues = reader.parsed(options, "queues", |queues| match number(queues)? {
            1 => Some(1),
            queues if is_tap => Some(queues),
            _ => None,
        });
        if let Some(queues) = queues.filter(|queues| *queues > 1) {
            netdev.push_str(&format!(",queues={queues}"));
            // One vector per direction and queue, one for the control queue, one for configuration changes.
            device.push_str(&format!(",mq=on,vectors={}", 2 * u64::from(queues) + 2));
        }
        for name in ["rx_queue_size", "tx_queue_size"] {
            if let Some(size) = reader.parsed(options, name, number) {
                device.push_str(&format!(",{name}={size}"));
            }
        }
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
