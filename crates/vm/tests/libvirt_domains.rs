//! libvirt domains written by other programs, and our own domains read back.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::Path;
use vm::libvirt::Domain;
use vm::topology::{Plan, PlanOptions, QemuVersion, SystemDisk, Topology};

fn read(name: &str) -> Domain {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/domains")
        .join(name);
    let text = std::fs::read_to_string(file).unwrap();
    Domain::read(&text, PlanOptions::default()).unwrap()
}

/// Returns the options for disks and their devices, sorted, with sorted properties. Names that only QEMU uses are replaced.
fn devices(plan: &Plan) -> Vec<BTreeMap<String, String>> {
    let arguments = plan.qemu_arguments();
    let pairs = arguments.windows(2);
    let pairs = pairs
        .filter(|pair| ["-device", "-blockdev", "-chardev", "-object"].contains(&pair[0].as_str()));
    // The caller determines the position of a plan's console.
    let pairs = pairs.filter(|pair| !pair[1].contains("charserial0"));
    let mut found: Vec<BTreeMap<String, String>> = pairs
        .map(|pair| {
            if let Ok(json) = serde_json::from_str::<serde_json::Value>(&pair[1]) {
                let object = json.as_object().unwrap().iter();
                return object
                    .map(|(key, value)| (key.clone(), value.to_string()))
                    .collect();
            }
            let value = pair[1]
                .replace("port", "pci.")
                .replace("pcie-root-pci.", "pcie-root-port");
            let properties = value.split(',').enumerate();
            // The number of a root port in its capability: libvirt assigns one, a plan has QEMU's default.
            let properties = properties.filter(|(_, property)| !property.starts_with("pci.="));
            properties
                .map(|(index, property)| match property.split_once('=') {
                    Some((key, value)) => (key.to_owned(), value.to_owned()),
                    None => (format!("#{index}"), property.to_owned()),
                })
                .collect()
        })
        .collect();
    found.sort();
    found
}

#[test]
fn a_plan_as_a_domain_and_back_has_the_same_devices() {
    let system = SystemDisk {
        path: "/v/system.qcow2".into(),
        is_qcow2: true,
        by_lunette: false,
    };
    let cases = [
        "scsi:4x1,queues=2,removable=2,cmd_per_lun=64,virtqueue_size=128",
        "scsi:1x4 blk:2,packed,virtqueue_size=256",
        "scsi:1x2,indirect=off blk:2,indirect=off",
        "scsi:1x2,indirect=off blk:1,indirect=off via=qemu backing=file:/v",
        "scsi:4x1,removable=2,virtqueue_size=128,cmd_per_lun=64 blk:2,ioeventfd=off via=qemu",
        "scsi:1x4 blk:2,packed,queues=4 via=qemu-iothread backing=file:/v",
        "scsi:2x1 blk:2 via=qemu-iothread,iothread_vq_mapping=2",
        "blk:40",
    ];
    for words in cases {
        let words = words.replace(
            " via=qemu-iothread,iothread_vq_mapping=2",
            ",queues=4,via=qemu-iothread,iothread_vq_mapping=2 via=qemu",
        );
        let topology: Topology = words.parse().unwrap();
        let options = PlanOptions {
            qemu: QemuVersion {
                major: 10,
                minor: 0,
            },
            system: Some(system.clone()),
            ..PlanOptions::default()
        };
        let plan = Plan::new(&topology, options.clone()).unwrap();
        let xml = plan.libvirt_xml();
        let base = PlanOptions {
            system: None,
            ..options
        };
        let domain = Domain::read(&xml, base).unwrap();
        assert!(domain.unread.is_empty(), "{:?}\n{xml}", domain.unread);
        let (wanted, found) = (devices(&plan), devices(&domain.plan));
        for (wanted, found) in wanted.iter().zip(&found) {
            assert_eq!(wanted, found, "{words}\n{xml}");
        }
        assert_eq!(wanted.len(), found.len(), "{words}");
    }
}

/// Returns the conversion of a domain: unsupported parts, then the command line.
fn converted(domain: &Domain) -> String {
    let unread = domain.unread.iter();
    let unread = unread.map(|element| format!("unsupported: {element}\n"));
    unread.collect::<String>() + &domain.plan.qemu_text()
}

/// `tests/libvirt.rs` compares the same lines with those of libvirt, which this test does not need.
#[test]
fn every_domain_has_its_recorded_command_line() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/domains");
    let mut domains = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "xml") {
            continue;
        }
        let found = converted(&read(path.file_name().unwrap().to_str().unwrap()));
        let recorded = path.with_extension("txt");
        if std::env::var_os("LUNETTE_WRITE_DOMAINS").is_some() {
            std::fs::write(&recorded, &found).unwrap();
        }
        let recorded = std::fs::read_to_string(&recorded).unwrap_or_default();
        assert_eq!(
            found,
            recorded,
            "{}: write the recorded lines with LUNETTE_WRITE_DOMAINS=1",
            path.display()
        );
        domains += 1;
    }
    assert!(domains >= 32, "{domains}");
}

fn command_line(devices: &str, machine: &str) -> (String, Vec<String>) {
    let text = format!(
        "<domain type='kvm'><name>q</name><memory unit='MiB'>512</memory><vcpu>4</vcpu>\
         <os><type arch='x86_64' machine='{machine}'>hvm</type></os><devices>{devices}</devices></domain>"
    );
    let domain = Domain::read(&text, PlanOptions::default()).unwrap();
    (domain.plan.qemu_text(), domain.unread)
}

#[test]
fn a_device_without_queues_has_the_default_of_qemu() {
    let devices = "<controller type='scsi' index='0' model='virtio-scsi'/>\
         <disk type='file'><source file='/a'/><target dev='vda' bus='virtio'/></disk>";
    let (line, unread) = command_line(devices, "pc-q35-5.1");
    assert!(!line.contains("queues"), "{line}");
    assert!(line.contains("-machine pc-q35-5.1"), "{line}");
    assert!(unread.is_empty(), "{unread:?}");
    let queues = |machine: &str| {
        let text = format!(
            "<domain><memory unit='MiB'>512</memory><vcpu>4</vcpu><os><type machine='{machine}'>hvm</type></os>\
             <devices>{devices}</devices></domain>"
        );
        let domain = Domain::read(&text, PlanOptions::default()).unwrap();
        domain.plan.disks[0].guest.queues
    };
    // QEMU has one queue for each CPU since the machines of version 5.2.
    assert_eq!(["pc-q35-5.1", "pc-q35-5.2", "q35"].map(queues), [1, 4, 4]);
}

#[test]
fn ids_and_addresses_are_unique() {
    let domain = read("multipath-2012.xml");
    let line = domain.plan.qemu_text();
    let words = line.split([',', ' ', '\n']);
    let ids: Vec<&str> = words.filter(|word| word.starts_with("id=")).collect();
    let unique: std::collections::BTreeSet<&&str> = ids.iter().collect();
    assert_eq!(ids.len(), unique.len(), "{line}");
    let names = domain.plan.disks.iter().map(|disk| disk.name.as_str());
    let names: Vec<&str> = names.collect();
    assert_eq!(
        names,
        ["sda", "scsi0-0-1-0", "sda-2", "vda", "virtio-disk0", "vdb"]
    );
    // The second disk of an address, an address in use, and a bus that does not exist.
    for element in [
        "/domain/devices/disk[4] type=\"file\" device=\"disk\"",
        "/domain/devices/disk[6]/address type=\"pci\"",
        "/domain/devices/disk[7]/address type=\"pci\"",
        "/domain/os/type/@machine = \"pc-0.14\"",
    ] {
        let mut unread = domain.unread.iter();
        let is_named = unread.any(|unread| unread.starts_with(element));
        assert!(is_named, "{element}: {:#?}", domain.unread);
    }
}

#[test]
fn a_hostile_document_has_no_endless_addresses() {
    let disk = "<disk type='file'><source file='/a'/><target dev='vda' bus='virtio'/></disk>";
    for machine in ["pc", "q35"] {
        let (line, _) = command_line(&disk.repeat(400), machine);
        assert_eq!(line.matches("-device virtio-blk-pci").count(), 400);
    }
    let (_, unread) = command_line(
        "<controller type='pci' index='4294967295' model='pcie-root-port'>\
         <address type='pci' bus='0' slot='4294967295' function='9'/></controller>",
        "q35",
    );
    assert!(!unread.is_empty());
}

#[test]
fn a_domain_becomes_a_command_line_and_a_configuration_file() {
    let domain = read("kernel-boot.xml");
    let text = domain.plan.qemu_text();
    assert!(
        text.contains("filename=/images/root,, old.raw'")
            && text.contains("-append 'console=ttyS0 root=/dev/vda'")
            // As in libvirt: without <acpi/>, no ACPI.
            && text.contains("-machine q35,acpi=off")
            && !read("virt-install-q35.xml").plan.qemu_text().contains("acpi"),
        "{text}"
    );
    let served = domain.served(Path::new("/run/lunette"));
    assert_eq!(
        served.toml(),
        "[[disk]]\nname = \"vda\"\nbackend = \"file\"\npath = \"/images/root, old.raw\"\n\n\
         [[vhost_blk]]\ndisk = \"vda\"\nsocket = \"/run/lunette/vda.sock\"\n"
    );
    let served = read("virt-install-q35.xml").served(Path::new("/tmp"));
    let image =
        "name = \"vda\"\nbackend = \"image\"\npath = \"/var/lib/libvirt/images/debian12.qcow2\"\n";
    assert!(served.toml().contains(image), "{}", served.toml());
}

#[test]
fn what_is_no_domain_is_refused_with_a_reason() {
    for (text, reason) in [
        ("", "not well-formed XML"),
        ("<network/>", "the document is a <network>, not a <domain>"),
        ("<domain type='kvm'/>", "the domain has no <memory>"),
        (
            "<domain><memory unit='parsec'>1</memory></domain>",
            "/domain/memory: \"1\" is not a size",
        ),
    ] {
        let error = Domain::read(text, PlanOptions::default()).unwrap_err();
        assert!(error.to_string().contains(reason), "{text}: {error}");
    }
}
