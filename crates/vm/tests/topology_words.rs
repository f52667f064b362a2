//! Words of a topology and the resulting command lines as literals.
#![forbid(unsafe_code)]

use vm::topology::{
    Aio, Backing, GuestKernel, MachineType, Plan, PlanOptions, QemuVersion, Shape, SystemDisk,
    Topology, Via,
};

fn options() -> PlanOptions {
    PlanOptions {
        name: "g".to_owned(),
        seed: "a machine".to_owned(),
        accelerators: vec!["kvm".to_owned()],
        memory_mib: 512,
        kernel: Some(GuestKernel {
            image: "/boot/vmlinuz".into(),
            initrd: Some("/boot/initrd".into()),
            append: "console=ttyS0".to_owned(),
        }),
        ..PlanOptions::default()
    }
}

fn plan(words: &str) -> Plan {
    plan_with(words, options())
}

fn plan_with(words: &str, options: PlanOptions) -> Plan {
    let topology = words.parse::<Topology>().unwrap();
    Plan::new(&topology, options).unwrap()
}

/// Returns QEMU's arguments between those of the machine and those of the console.
fn devices(plan: &Plan) -> Vec<String> {
    let arguments = plan.qemu_arguments();
    let start = arguments
        .iter()
        .position(|argument| argument == "-m")
        .unwrap();
    let end = arguments
        .iter()
        .position(|argument| argument == "-display")
        .unwrap();
    let pairs = arguments[start + 2..end].chunks(2);
    pairs.map(|pair| pair.join(" ")).collect()
}

#[test]
fn words_are_read_with_all_their_options() {
    let topology = Topology::parse(&[
        "scsi:4x1,queues=2,removable=2,cmd_per_lun=64,virtqueue-size=128",
        "blk:3,packed,via=qemu-iothread,aio=io_uring,backing=file:/v,size=2G",
        "backing=ram:700M",
    ])
    .unwrap();
    let [scsi, blk] = &topology.groups[..] else {
        panic!("{topology:?}");
    };
    let four_targets = Shape::Scsi {
        targets: 4,
        luns: 1,
    };
    assert_eq!(scsi.shape, four_targets);
    assert_eq!((scsi.queues, scsi.removable), (Some(2), 2));
    assert_eq!((scsi.cmd_per_lun, scsi.queue_size), (Some(64), Some(128)));
    assert_eq!((scsi.via, &scsi.backing), (Via::Lunette, &Backing::Ram));
    assert_eq!(scsi.size, Some(700 << 20));
    assert_eq!(blk.shape, Shape::Blk { count: 3 });
    assert_eq!((blk.via, blk.packed), (Via::QemuIothread, true));
    assert_eq!(blk.aio, Some(Aio::IoUring));
    assert_eq!(blk.backing, Backing::File("/v".into()));
    assert_eq!(blk.size, Some(2 << 30));
}

#[test]
fn mistakes_name_the_word_what_is_allowed_and_what_to_write() {
    let cases = [
        (
            "disk:4",
            "disk:4: not a word of a topology; allowed are scsi:TARGETSxLUNS, blk:COUNT, via=WHO and backing=WHAT; \
             hint: scsi:4x1,queues=2 or blk:4 via=qemu",
        ),
        (
            "scsi:4",
            "scsi:4: \"4\" is not of the form TARGETSxLUNS; hint: scsi:4x1 has four targets of one LUN, scsi:1x4 one \
             target of four LUNs",
        ),
        (
            "scsi:257x1",
            "scsi:257x1: TARGETS is \"257\"; allowed are 1 to 256; hint: a whole number, such as 4",
        ),
        (
            "blk:+4",
            "blk:+4: COUNT is \"+4\"; allowed are 1 to 4096; hint: a whole number, such as 4",
        ),
        (
            "blk:4 via=vhost",
            "via=vhost: via is \"vhost\"; allowed are lunette, qemu, qemu-iothread, ide, ahci, vhost-scsi; hint: via=lunette",
        ),
        (
            "blk:4,queus=2",
            "blk:4,queus=2: the key \"queus\" is unknown or given twice; allowed are queues, virtqueue_size, packed, indirect, via, \
             backing, size, aio, ioeventfd, scsi, iothreads, iothread_vq_mapping, and for scsi removable, cmd_per_lun and wwpn; \
             hint: scsi:4x1,queues=2,cmd_per_lun=64",
        ),
        (
            "blk:1 backing=ram:7X",
            "backing=ram:7X: the size is \"7X\"; allowed are multiples of 4096 bytes, with K, M, G or T (powers of 1024); \
             hint: 700M",
        ),
        (
            "blk:1 backing=disk",
            "backing=disk: backing is \"disk\"; allowed are ram:SIZE, file:FOLDER, tmpfs:FOLDER, block:DEVICE+DEVICE and \
             daemon:DISK+DISK; hint: backing=ram:700M",
        ),
        (
            "blk:3,backing=block:/dev/sdb+/dev/sdc",
            "blk:3,backing=block:/dev/sdb+/dev/sdc: 3 disks, but backing names 2; hint: give one for each disk, with + between them",
        ),
        (
            "blk:1,via=qemu,backing=ram:1M",
            "blk:1,via=qemu,backing=ram:1M: backing=ram is memory of Lunette's daemon, which QEMU cannot access; \
             hint: backing=tmpfs:/dev/shm works with both",
        ),
        (
            "blk:1,aio=native",
            "blk:1,aio=native: aio applies to QEMU's devices only, these are Lunette's; hint: add via=qemu or via=qemu-iothread, or omit the key",
        ),
        (
            "blk:1,removable=1",
            "blk:1,removable=1: removable and cmd_per_lun are for scsi: virtio-blk has neither; hint: scsi:4x1,removable=2",
        ),
        (
            "blk:1 via=qemu via=lunette",
            "via=lunette: via is given twice for all groups; hint: give one group its own, as in blk:2,via=lunette",
        ),
        (
            "via=qemu",
            "TOPOLOGY: no word specifies disks; hint: scsi:4x1 is one controller with four targets, blk:4 four virtio-blk \
             devices",
        ),
    ];
    for (words, wanted) in cases {
        let error = words.parse::<Topology>().unwrap_err();
        assert_eq!(error.to_string(), wanted, "{words}");
    }
}

#[test]
fn mistakes_about_ata_disks_name_what_they_have() {
    let cases = [
        (
            "scsi:4x1,via=ahci",
            "scsi:4x1,via=ahci: via=ahci is for blk: an ATA controller has no SCSI targets; hint: blk:4,via=ahci",
        ),
        (
            "blk:5,via=ide",
            "blk:5,via=ide: the IDE controller has at most 4 disks; hint: blk:4,via=ide, or via=ahci",
        ),
        (
            "blk:1,via=ide,queues=2",
            "blk:1,via=ide,queues=2: queues is for virtio devices, but via=ide has ATA disks; hint: omit queues",
        ),
        (
            "blk:1,via=ahci,backing=daemon:d0",
            "blk:1,via=ahci,backing=daemon:d0: backing=daemon needs a daemon, but via=ahci serves disks with QEMU; hint: via=lunette, or \
             backing=file:FOLDER",
        ),
    ];
    for (words, wanted) in cases {
        let error = words.parse::<Topology>().unwrap_err();
        assert_eq!(error.to_string(), wanted, "{words}");
    }
}

#[test]
fn mistakes_about_the_kernels_target_name_what_it_has() {
    const WWPN: &str = "wwpn=naa.5001405bf0e7a2c4";
    let example = "scsi:1x4,via=vhost-scsi,wwpn=naa.5001405bf0e7a2c4";
    let named = "needs the wwpn of a target: naa. and 16 hexadecimal digits";
    for (word, problem, hint) in [
        ("scsi:1x1,via=vhost-scsi", named, example),
        (
            "scsi:1x1,via=vhost-scsi,wwpn=naa.5001405bf0e7a2c",
            named,
            example,
        ),
        (
            "scsi:1x1,via=vhost-scsi,wwpn=naa.5001405bf0e7a2c4,,",
            "the key \"\" is unknown",
            "",
        ),
        ("scsi:1x1,WWPN", "wwpn is for via=vhost-scsi", example),
        (
            "scsi:2x2,via=vhost-scsi,WWPN",
            "SCSI disks of one target",
            "scsi:1x4",
        ),
        (
            "blk:3,via=vhost-scsi,WWPN",
            "SCSI disks of one target",
            "scsi:1x3",
        ),
        (
            "scsi:1x1,via=vhost-scsi,WWPN,size=1G",
            "size does not apply",
            "omit size",
        ),
        (
            "scsi:1x1,via=vhost-scsi,WWPN,removable=1",
            "removable does not apply",
            "omit removable",
        ),
        (
            "scsi:1x1,via=vhost-scsi,WWPN,ioeventfd=on",
            "ioeventfd does not apply",
            "omit ioeventfd",
        ),
    ] {
        let word = word.replace("WWPN", WWPN);
        let error = word.parse::<Topology>().unwrap_err();
        assert!(
            error.problem.contains(problem) && error.hint.contains(hint),
            "{error}"
        );
    }
    let all = format!("scsi:1x1,{WWPN} via=vhost-scsi backing=ram:1M");
    let error = all.parse::<Topology>().unwrap_err();
    assert!(error.problem.contains("has no backing"), "{error}");
    let twice = format!("scsi:1x1,{WWPN} scsi:1x2,{WWPN} via=vhost-scsi");
    let error = Plan::new(&twice.parse().unwrap(), options()).unwrap_err();
    assert!(error.problem.contains("is given twice"), "{error}");
}

#[test]
fn a_whole_command_line_boots_two_virtio_blk_disks() {
    let plan = plan("blk:2,queues=2,packed,virtqueue_size=256,indirect=off");
    assert_eq!(
        plan.qemu_text(),
        "qemu-system-x86_64 \\
    -nodefaults \\
    -no-user-config \\
    -name g \\
    -machine q35,memory-backend=mem \\
    -accel kvm \\
    -cpu max \\
    -smp 2 \\
    -m 512M \\
    -object memory-backend-memfd,id=mem,size=512M,share=on \\
    -chardev socket,id=d0-socket,path=/tmp/d0.sock,reconnect=1 \\
    -device vhost-user-blk-pci,id=d0,chardev=d0-socket,num-queues=2,queue-size=256,packed=on,indirect_desc=off,bus=pcie.0,addr=0x1 \\
    -chardev socket,id=d1-socket,path=/tmp/d1.sock,reconnect=1 \\
    -device vhost-user-blk-pci,id=d1,chardev=d1-socket,num-queues=2,queue-size=256,packed=on,indirect_desc=off,bus=pcie.0,addr=0x2 \\
    -display none \\
    -serial mon:stdio \\
    -kernel /boot/vmlinuz \\
    -initrd /boot/initrd \\
    -append console=ttyS0
"
    );
}

#[test]
fn one_controller_has_all_targets() {
    let plan = plan("scsi:4x1,queues=2,cmd_per_lun=64,virtqueue_size=128");
    assert_eq!(
        devices(&plan),
        [
            "-object memory-backend-memfd,id=mem,size=512M,share=on",
            "-chardev socket,id=c0-socket,path=/tmp/c0.sock",
            "-device vhost-user-scsi-pci,id=c0,chardev=c0-socket,num_queues=2,virtqueue_size=128,cmd_per_lun=64,\
             bus=pcie.0,addr=0x1"
        ]
    );
    let addresses = plan.disks.iter().map(|disk| disk.guest.scsi.as_deref());
    let wanted = ["0:0:0:0", "0:0:1:0", "0:0:2:0", "0:0:3:0"];
    assert!(addresses.eq(wanted.map(Some)));
}

#[test]
fn qemu_serves_the_same_disks_itself() {
    let plan = plan("scsi:1x2,removable=1,queues=4,via=qemu-iothread blk:1,via=qemu,ioeventfd=off");
    let [first, second, third] = &plan.disks[..] else {
        panic!("{:?}", plan.disks);
    };
    let (serial, wwn) = (
        first.serial.as_deref().unwrap(),
        format!("{:016x}", first.wwn.unwrap()),
    );
    let (serial2, wwn2) = (
        second.serial.as_deref().unwrap(),
        format!("{:016x}", second.wwn.unwrap()),
    );
    let serial3 = third.serial.as_deref().unwrap();
    assert_eq!(
        devices(&plan),
        [
            "-object iothread,id=iothread1".to_owned(),
            "-blockdev file,node-name=d0-node,aio=threads,discard=unmap,filename=/dev/shm/g-d0.raw"
                .to_owned(),
            "-blockdev file,node-name=d1-node,aio=threads,discard=unmap,filename=/dev/shm/g-d1.raw"
                .to_owned(),
            "-device virtio-scsi-pci,id=c0,num_queues=4,iothread=iothread1,bus=pcie.0,addr=0x1"
                .to_owned(),
            format!(
                "-device scsi-hd,id=d0,bus=c0.0,channel=0,scsi-id=0,lun=0,drive=d0-node,serial={serial},wwn=0x{wwn},removable=on"
            ),
            format!(
                "-device scsi-hd,id=d1,bus=c0.0,channel=0,scsi-id=0,lun=1,drive=d1-node,serial={serial2},wwn=0x{wwn2}"
            ),
            "-blockdev file,node-name=d2-node,aio=threads,discard=unmap,filename=/dev/shm/g-d2.raw"
                .to_owned(),
            format!(
                "-device virtio-blk-pci,id=d2,drive=d2-node,serial={serial3},num-queues=2,ioeventfd=off,bus=pcie.0,addr=0x2"
            ),
        ]
    );
    assert!(
        plan.qemu_text()
            .starts_with("[ -e /dev/shm/g-d0.raw ] || truncate -s 268435456 /dev/shm/g-d0.raw\n")
    );
}

#[test]
fn ata_disks_sit_on_the_ports_of_their_controllers() {
    let plan = plan("blk:3,via=ide blk:7,via=ahci scsi:1x1,via=qemu");
    let serials = plan.disks.iter().map(|disk| disk.serial.clone().unwrap());
    let serials: Vec<String> = serials.collect();
    let lines = devices(&plan);
    let lines: Vec<&String> = lines
        .iter()
        .filter(|line| line.starts_with("-device"))
        .collect();
    let ata = |disk: usize, bus: &str, unit: u32| {
        let serial = &serials[disk];
        format!(
            "-device ide-hd,id=d{disk},bus={bus},unit={unit},drive=d{disk}-node,serial={serial}"
        )
    };
    let wanted = [
        "-device piix3-ide,id=ide0,bus=pcie.0,addr=0x1".to_owned(),
        ata(0, "ide0.0", 0),
        ata(1, "ide0.0", 1),
        ata(2, "ide0.1", 0),
        "-device ich9-ahci,id=ahci1,bus=pcie.0,addr=0x2".to_owned(),
        ata(3, "ahci1.0", 0),
        ata(4, "ahci1.1", 0),
        ata(5, "ahci1.2", 0),
        ata(6, "ahci1.3", 0),
        ata(7, "ahci1.4", 0),
        ata(8, "ahci1.5", 0),
        "-device ich9-ahci,id=ahci2,bus=pcie.0,addr=0x3".to_owned(),
        ata(9, "ahci2.0", 0),
    ];
    assert!(lines[..13].iter().copied().eq(&wanted), "{lines:#?}");
    assert!(
        lines[13].starts_with("-device virtio-scsi-pci,id=c0,num_queues=2,bus=pcie.0,addr=0x4")
    );
    let guest = &plan.disks[1].guest;
    assert_eq!(guest.by_path, ["pci-0000:00:01.0-ata-1.1"]);
    let find = format!(
        "grep -l {} /sys/block/sd*/device/vpd_pg80 | cut -d / -f 4",
        serials[1]
    );
    assert_eq!((guest.find.as_ref(), guest.queues), (Some(&find), 1));
    let xml = plan.libvirt_xml();
    assert!(
        xml.contains("<qemu:arg value='ich9-ahci,id=ahci1,bus=pcie.0,addr=0x2'/>"),
        "{xml}"
    );
    let pc = PlanOptions {
        machine: MachineType::Pc,
        ..options()
    };
    for (words, options) in [
        ("blk:1,via=ide", pc),
        ("blk:1,via=ide blk:2,via=ide", self::options()),
    ] {
        let error = Plan::new(&words.parse().unwrap(), options).unwrap_err();
        assert!(
            error
                .problem
                .contains("a guest has one, and the pc machine has its own"),
            "{error}"
        );
    }
}

#[test]
fn the_kernels_target_has_its_luns_at_the_portal_group() {
    let plan = plan(
        "scsi:1x2,queues=4,virtqueue_size=256,cmd_per_lun=64,via=vhost-scsi,wwpn=naa.5001405bf0e7a2c4 blk:1,via=qemu",
    );
    let lines = devices(&plan);
    assert_eq!(
        lines[0],
        "-device vhost-scsi-pci,id=c0,wwpn=naa.5001405bf0e7a2c4,num_queues=4,virtqueue_size=256,cmd_per_lun=64,bus=pcie.0,addr=0x1"
    );
    assert!(lines[1].contains("node-name=d2-node"), "{lines:#?}");
    assert_eq!(lines.len(), 3);
    let addresses = plan.disks.iter().map(|disk| disk.guest.scsi.as_deref());
    assert!(addresses.eq([Some("0:0:1:0"), Some("0:0:1:1"), None]));
    let disk = &plan.disks[1];
    assert_eq!(disk.guest.by_path, ["pci-0000:00:01.0-scsi-0:0:1:1"]);
    assert_eq!((&disk.serial, disk.wwn, disk.size), (&None, None, None));
    assert!(!plan.needs_daemon() && plan.files_of_qemu().len() == 1);
    let json = plan.json();
    assert_eq!(json["devices"][0]["via"], "vhost-scsi");
    assert_eq!(json["devices"][0]["wwpn"], "naa.5001405bf0e7a2c4");
    assert!(json["devices"][0]["aio"].is_null(), "{json}");
    let text = plan.text();
    assert!(
        text.contains("serves one guest at a time") && !text.contains("lunette disk identity"),
        "{text}"
    );
    let xml = plan.libvirt_xml();
    for wanted in [
        "<source protocol='vhost' wwpn='naa.5001405bf0e7a2c4'/>",
        "<qemu:device alias='ua-c0'><qemu:frontend><qemu:property name='num_queues' type='unsigned' value='4'/>",
        "name='cmd_per_lun' type='unsigned' value='64'",
        "name='virtqueue_size' type='unsigned' value='256'",
    ] {
        assert!(xml.contains(wanted), "{wanted}: {xml}");
    }
    assert_eq!(xml.matches("<hostdev").count(), 1, "{xml}");
}

#[test]
fn queues_are_spread_over_threads_where_qemu_can() {
    let words = "blk:1,queues=4,via=qemu-iothread,iothread-vq-mapping=2,backing=file:/v";
    let old = Plan::new(&words.parse().unwrap(), options()).unwrap_err();
    assert_eq!(
        old.to_string(),
        format!(
            "{words}: iothread_vq_mapping needs QEMU 9.0, this is 7.2; hint: plan for a later version with --qemu-version 10.0; \
             without iothread_vq_mapping each device has one thread"
        )
    );
    let qemu = QemuVersion::parse("QEMU emulator version 9.0.2 (Debian)").unwrap();
    let plan = plan_with(words, PlanOptions { qemu, ..options() });
    let lines = devices(&plan);
    assert_eq!(
        lines[..3],
        [
            "-object iothread,id=iothread1",
            "-object iothread,id=iothread2",
            "-blockdev file,node-name=d0-node,cache.direct=on,aio=native,discard=unmap,filename=/v/g-d0.raw"
        ]
    );
    let device: serde_json::Value =
        serde_json::from_str(lines[3].strip_prefix("-device ").unwrap()).unwrap();
    assert_eq!(device["driver"], "virtio-blk-pci");
    assert_eq!(device["num-queues"], 4);
    let mapping = r#"[{"iothread":"iothread1"},{"iothread":"iothread2"}]"#;
    assert_eq!(device["iothread-vq-mapping"].to_string(), mapping);
}

#[test]
fn later_versions_reconnect_both_transports() {
    let chardevs = |version: &str| {
        let qemu = QemuVersion::parse(version).unwrap();
        let plan = plan_with("blk:1 scsi:1x1", PlanOptions { qemu, ..options() });
        let lines = devices(&plan).into_iter();
        let lines = lines.filter(|line| line.starts_with("-chardev"));
        lines
            .map(|line| line.split(".sock").nth(1).unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(chardevs("7.2"), [",reconnect=1", ""]);
    assert_eq!(chardevs("8.2"), [",reconnect=1", ",reconnect=1"]);
    assert_eq!(
        chardevs("10.0.3"),
        [",reconnect-ms=1000", ",reconnect-ms=1000"]
    );
}

#[test]
fn the_system_disk_is_the_first_one() {
    let system = SystemDisk {
        path: "/v/system.qcow2".into(),
        is_qcow2: true,
        by_lunette: false,
    };
    let options = PlanOptions {
        system: Some(system),
        kernel: None,
        ..options()
    };
    let plan = plan_with("blk:4", options);
    let names: Vec<_> = plan
        .disks
        .iter()
        .map(|disk| disk.guest.device.as_deref().unwrap())
        .collect();
    assert_eq!(
        names,
        ["/dev/vda", "/dev/vdb", "/dev/vdc", "/dev/vdd", "/dev/vde"]
    );
    let lines = devices(&plan);
    assert_eq!(
        lines[1],
        "-blockdev qcow2,node-name=system-node,discard=unmap,file.driver=file,file.cache.direct=on,file.aio=native,\
         file.discard=unmap,file.filename=/v/system.qcow2"
    );
    assert!(
        lines[2].contains("bootindex=1,bus=pcie.0,addr=0x1"),
        "{}",
        lines[2]
    );
}

#[test]
fn more_devices_than_slots_sit_behind_ports() {
    let plan = plan("blk:40");
    let lines = devices(&plan);
    assert_eq!(plan.budget.ports, 2);
    assert_eq!(
        lines[1..3],
        [
            "-device pcie-root-port,id=port1,bus=pcie.0,addr=0x1d,chassis=1",
            "-device pcie-root-port,id=port2,bus=pcie.0,addr=0x1e,chassis=2"
        ]
    );
    assert!(lines.iter().any(|line| {
        line.ends_with("chardev=d28-socket,num-queues=2,bus=port1,addr=0x0.0x0,multifunction=on")
    }));
    assert!(
        lines
            .iter()
            .any(|line| line.ends_with("chardev=d29-socket,num-queues=2,bus=port1,addr=0x0.0x1"))
    );
    let pc = PlanOptions {
        machine: MachineType::Pc,
        ..options()
    };
    let lines = devices(&plan_with("blk:40", pc));
    assert_eq!(
        lines[1],
        "-device pci-bridge,id=port1,bus=pci.0,addr=0x1f,chassis_nr=1,shpc=off"
    );
    assert!(
        lines
            .iter()
            .any(|line| line.ends_with("bus=port1,addr=0x1"))
    );
}

#[test]
fn names_in_the_guest_follow_from_serial_number_and_place() {
    let plan = plan("blk:1 scsi:2x300");
    let blk = &plan.disks[0];
    let serial = blk.serial.as_deref().unwrap();
    assert!(serial.starts_with("d0-") && serial.len() == 15, "{serial}");
    assert_eq!(blk.guest.by_id, [format!("virtio-{serial}")]);
    assert_eq!(
        blk.guest.by_path,
        ["pci-0000:00:01.0", "virtio-pci-0000:00:01.0"]
    );
    let last = plan.disks.last().unwrap();
    let wwn = last.wwn.unwrap();
    assert_eq!(wwn >> 60, 3);
    assert_eq!(
        last.guest.by_id,
        [format!("scsi-3{wwn:016x}"), format!("wwn-0x{wwn:016x}")]
    );
    // LUN 299 with the address method bits.
    assert_eq!(last.guest.scsi.as_deref(), Some("0:0:1:16683"));
    assert_eq!(last.guest.by_path, ["pci-0000:00:02.0-scsi-0:0:1:16683"]);
    assert_eq!(last.guest.device, None);
    let other = plan_with(
        "blk:1",
        PlanOptions {
            seed: "another machine".to_owned(),
            ..options()
        },
    );
    assert_ne!(other.disks[0].serial, blk.serial);
    assert_ne!(other.disks[0].wwn, blk.wwn);
}
