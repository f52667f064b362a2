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

#[test]
#[allow(clippy::too_many_lines, reason = "a table of cases")]
fn what_is_not_understood_is_named_with_its_path() {
    let wanted: [(&str, usize, &[&str]); 10] = [
        (
            "virt-install-q35.xml",
            1,
            &[
                "/domain/metadata",
                "/domain/os/boot dev=\"hd\"",
                "/domain/clock offset=\"utc\"",
                "/domain/devices/emulator \"/usr/bin/qemu-system-x86_64\"",
                "/domain/devices/interface type=\"network\"",
            ],
        ),
        (
            "openstack-scsi.xml",
            1,
            &[
                "/domain/cputune",
                "/domain/devices/disk[2] type=\"network\" device=\"disk\"",
                "/domain/devices/controller/driver/@max_sectors = \"512\"",
            ],
        ),
        (
            "ovirt-iothreads.xml",
            1,
            &[
                "/domain/metadata",
                "/domain/vcpu/@current = \"2\"",
                "/domain/devices/disk/@snapshot = \"no\"",
                "/domain/devices/disk/driver/@error_policy = \"stop\"",
                "/domain/devices/disk/source/@index = \"1\"",
                "/domain/devices/controller/target chassis=\"3\" port=\"0x12\"",
            ],
        ),
        ("vhostuser.xml", 1, &[]),
        (
            "hugepages-numa.xml",
            1,
            &[
                "/domain/memoryBacking/hugepages",
                "/domain/cpu mode=\"host-model\"",
                "/domain/devices/disk/iotune",
            ],
        ),
        (
            "ide-cdrom.xml",
            0,
            &[
                "/domain/devices/disk[1] type=\"file\" device=\"disk\"",
                "/domain/devices/disk[2] type=\"file\" device=\"cdrom\"",
            ],
        ),
        (
            "virt-manager-scsi.xml",
            2,
            &["/domain/devices/graphics type=\"spice\" autoport=\"yes\""],
        ),
        (
            "lsilogic.xml",
            0,
            &[
                "/domain/devices/disk type=\"file\" device=\"disk\"",
                "/domain/devices/controller type=\"scsi\" index=\"0\" model=\"lsilogic\"",
            ],
        ),
        ("kernel-boot.xml", 1, &[]),
        (
            "command-line.xml",
            0,
            &["/domain/commandline/env name=\"QEMU_AUDIO_DRV\" value=\"none\""],
        ),
    ];
    for (name, disks, unread) in wanted {
        let domain = read(name);
        assert_eq!(domain.unread, unread, "{name}");
        assert_eq!(domain.plan.disks.len(), disks, "{name}");
    }
}

#[test]
fn a_domain_becomes_a_command_line_and_a_configuration_file() {
    let domain = read("kernel-boot.xml");
    let text = domain.plan.qemu_text();
    assert!(
        text.contains("-blockdev 'file,node-name=vda-node,aio=threads,discard=unmap,filename=/images/root,, old.raw'")
            && text.contains("-device virtio-blk-pci,id=vda,drive=vda-node,num-queues=1,bus=pcie.0,addr=0x1")
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

#[test]
fn devices_around_the_disks_are_on_the_command_line_or_named() {
    let domain = read("desktop.xml");
    let wanted = "\
-device qemu-xhci,id=usb,p2=15,p3=15,bus=pcie.0,addr=0x3
-netdev user,id=hostnet0
-device virtio-net-pci,netdev=hostnet0,id=net0,mac=52:54:00:11:22:33,bus=pcie.0,addr=0x4
-netdev bridge,br=br0,id=hostnet1
-device e1000e,netdev=hostnet1,id=net1,bus=pcie.0,addr=0x5
-netdev tap,ifname=tap7,script=no,downscript=no,id=hostnet2,vhost=on,queues=4
-device virtio-net-pci,netdev=hostnet2,id=net2,mq=on,vectors=10,host_mtu=9000,bus=pcie.0,addr=0x6
-chardev socket,id=charserial0,host=127.0.0.1,port=4555,server=on,wait=off,telnet=on
-device isa-serial,chardev=charserial0,id=serial0,index=0
-device virtio-serial-pci,id=virtio-serial0,bus=pcie.0,addr=0x7
-chardev socket,id=charchannel0,path=/run/agent,, one.sock,server=on,wait=off
-device virtserialport,bus=virtio-serial0.0,chardev=charchannel0,id=channel0,name=org.qemu.guest_agent.0
-vnc 0.0.0.0:7
-device VGA,id=video0,vgamem_mb=16,bus=pcie.0,addr=0x1
-device usb-tablet,id=input0,bus=usb.0,port=1
-audiodev none,id=audio1
-device ich9-intel-hda,id=sound0,bus=pcie.0,addr=0x1b
-device hda-duplex,id=sound0-codec0,bus=sound0.0,cad=0,audiodev=audio1
-object rng-random,id=objrng0,filename=/dev/urandom
-device virtio-rng-pci,rng=objrng0,id=rng0,max-bytes=1024,period=500,bus=pcie.0,addr=0x8
-device virtio-balloon-pci,id=balloon0,deflate-on-oom=on,bus=pcie.0,addr=0x9
-global ICH9-LPC.noreboot=off
-action watchdog=poweroff
-chardev socket,id=chrtpm,path=/run/swtpm.sock
-tpmdev emulator,id=tpm-tpm0,chardev=chrtpm
-device tpm-crb,tpmdev=tpm-tpm0,id=tpm0";
    let console = domain.plan.options.console.chunks(2);
    let console: Vec<String> = console.map(|pair| pair.join(" ")).collect();
    assert_eq!(console.join("\n"), wanted);
    assert_eq!(
        domain.unread,
        [
            "/domain/devices/interface[3]/driver/@rx_queue_size = \"1024\"",
            "/domain/devices/interface[4] type=\"network\"",
            "/domain/devices/graphics[1]/@passwd = \"secret\"",
            "/domain/devices/graphics[2] type=\"spice\" autoport=\"yes\"",
            "/domain/devices/video/model/acceleration accel3d=\"yes\"",
            "/domain/devices/hostdev mode=\"subsystem\" type=\"pci\"",
        ]
    );
}
