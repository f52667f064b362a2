//! A guest matches the output of `lunette vm plan`: its text starts daemon and guest unmodified, and names, addresses, queues and
//! serial numbers are as planned.
#![forbid(unsafe_code)]

use end_to_end::rig::{attribute, kernel_is_content};
use end_to_end::{Context, Guest, GuestBuilder, Profile, Result, Rig, Scratch, bail, ensure};
use serde_json::Value;
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use vm::{Accelerator, lunette_program};

/// Arguments and options of one plan.
struct Case<'a> {
    name: &'a str,
    words: Vec<String>,
    system: Option<&'a Path>,
}

/// Runs `lunette vm plan` with the kernel, consoles and sockets of the test.
fn plan(case: &Case<'_>, scratch: &Scratch, format: &str) -> Result<String> {
    let (kernel, initramfs, append) = GuestBuilder::boot_files()?;
    let agent = scratch.socket("agent.sock");
    let mut command = Command::new(lunette_program(Profile::Dev)?);
    command
        .args(["vm", "plan"])
        .args(&case.words)
        .args(["--name", case.name, "--smp", "4", "--memory", "384M"])
        .args(["--accel", Accelerator::detect()?.qemu_option()])
        .args(["--format", format, "--append", &append])
        .arg("--kernel")
        .arg(kernel)
        .arg("--initrd")
        .arg(initramfs)
        .arg("--sockets")
        .arg(scratch.sockets());
    for argument in [
        "-chardev",
        &format!("socket,id=agent,path={}", agent.display()),
        "-serial",
        "chardev:agent",
    ] {
        command.arg(format!("--qemu-arg={argument}"));
    }
    if let Some(system) = case.system {
        command.arg("--system").arg(system);
    }
    let output = command.output()?;
    ensure!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

/// Runs the text in a shell and returns the arguments of `program`, which a script replaces to record them.
fn arguments_of(text: &str, program: &str, scratch: &Scratch) -> Result<Vec<String>> {
    let folder = scratch.file("bin");
    std::fs::create_dir_all(&folder)?;
    let noted = scratch.file("arguments");
    let script = folder.join(program);
    let body = format!("#!/bin/sh\nprintf '%s\\0' \"$@\" > '{}'\n", noted.display());
    std::fs::write(&script, body)?;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
    let path = std::env::var("PATH").unwrap_or_default();
    let status = Command::new("sh")
        .args(["-e", "-c", text])
        .env("PATH", format!("{}:{path}", folder.display()))
        .status()?;
    ensure!(status.success(), "{status} from\n{text}");
    let noted = String::from_utf8(std::fs::read(noted)?)?;
    let noted = noted.strip_suffix('\0').context("no arguments")?;
    Ok(noted.split('\0').map(str::to_owned).collect())
}

fn text<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    value[key]
        .as_str()
        .with_context(|| format!("no {key} in {value}"))
}

fn compare(guest: &mut Guest, plan: &Value) -> Result<()> {
    let disks = plan["disks"].as_array().context("no disks")?;
    let mut scsi = BTreeSet::new();
    for disk in disks {
        let seen = &disk["guest"];
        let name = match seen["scsi_address"].as_str() {
            None => {
                let device = text(seen, "device")?.trim_start_matches("/dev/").to_owned();
                guest.wait_for_disks(&[&device])?;
                device
            }
            Some(address) => {
                scsi.insert(address.to_owned());
                let parts: Vec<u32> = address.split(':').flat_map(str::parse).collect();
                let [host, 0, target, lun] = parts[..] else {
                    bail!("the address {address}");
                };
                guest.scsi_disk(host, target, lun)?
            }
        };
        compare_disk(guest, disk, &name, plan)?;
    }
    let found = guest.ok("ls /sys/class/scsi_device 2>/dev/null; true")?;
    let found: BTreeSet<String> = found.split_whitespace().map(str::to_owned).collect();
    ensure!(found == scsi, "planned {scsi:?}, found {found:?}");
    let block = guest.ok("ls /sys/block | grep -c '^[sv]d'")?;
    ensure!(block.trim() == disks.len().to_string(), "{block} disks");
    kernel_is_content(guest)
}

fn compare_disk(guest: &mut Guest, disk: &Value, name: &str, plan: &Value) -> Result<()> {
    let seen = &disk["guest"];
    if let Some(size) = disk["size"].as_u64() {
        let sectors = attribute(guest, name, "size")?;
        ensure!(sectors == (size / 512).to_string(), "{name}: {sectors}");
    }
    let queues = guest.ok(&format!("ls /sys/block/{name}/mq | wc -l"))?;
    ensure!(
        queues.trim().parse() == Ok(seen["queues"].as_u64().unwrap_or_default()),
        "{name} has {} queues, not {}",
        queues.trim(),
        seen["queues"]
    );
    let is_removable = if disk["removable"] == true { "1" } else { "0" };
    ensure!(
        attribute(guest, name, "removable")? == is_removable,
        "removable of {name}"
    );
    // PCI address of the device. udev derives by-path names from it.
    let device = text(disk, "device")?;
    let devices = plan["devices"].as_array().context("no devices")?;
    let device = devices.iter().find(|found| found["id"] == device);
    let address = text(device.context("no such device")?, "pci")?;
    let place = guest.ok(&format!("readlink -f /sys/block/{name}"))?;
    ensure!(place.contains(&format!("/{address}/")), "{name}: {place}");
    let serial = text(disk, "serial")?;
    let by_id: BTreeSet<&str> = seen["by_id"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    if seen["scsi_address"].is_null() {
        // The name from udev is `virtio-` and the serial number.
        let found = attribute(guest, name, "serial")?;
        ensure!(found == serial, "{name}: {found}, planned {serial}");
        ensure!(by_id.contains(format!("virtio-{found}").as_str()));
        return Ok(());
    }
    // udev reads the same pages: 83h for scsi-3 and wwn-0x, 80h for the serial number.
    let naa = text(disk, "wwn")?;
    ensure!(
        by_id.contains(format!("scsi-3{naa}").as_str())
            && by_id.contains(format!("wwn-0x{naa}").as_str()),
        "{name}: {naa}, planned {by_id:?}"
    );
    let page = guest.ok(&format!(
        "od -An -v -tx1 /sys/block/{name}/device/vpd_pg83 | tr -d ' \\n'"
    ))?;
    // Binary, NAA of the logical unit, 8 bytes (SPC-5, 7.7.6.6).
    ensure!(
        page.contains(&format!("01030008{naa}")),
        "{name}: no {naa} in {page}"
    );
    let page = guest.ok(&format!(
        "tail -c +5 /sys/block/{name}/device/vpd_pg80 | tr -d '\\0'"
    ))?;
    ensure!(page.trim() == serial, "{name}: {page}, planned {serial}");
    Ok(())
}

/// Starts the printed plan and compares the guest with it.
fn boots(case: &Case<'_>) -> Result<()> {
    let rig = Rig::prepared(|scratch, builder| {
        let flags = plan(case, scratch, "flags")?;
        if flags.starts_with('#') {
            return Ok(builder);
        }
        let words = arguments_of(&flags, "lunette", scratch)?;
        let [serve, flags @ ..] = &words[..] else {
            bail!("no words");
        };
        ensure!(serve == "serve", "{serve}");
        Ok(builder.arguments(flags.iter().map(String::as_str)))
    })?;
    let planned: Value = serde_json::from_str(&plan(case, &rig.scratch, "json")?)?;
    let qemu = plan(case, &rig.scratch, "qemu")?;
    let arguments = arguments_of(&qemu, vm::topology::QEMU, &rig.scratch)?;
    let agent = rig.scratch.socket("agent.sock");
    let mut guest = GuestBuilder::new(case.name)
        .planned(arguments, &agent)
        .boot()?;
    compare(&mut guest, &planned).with_context(|| format!("{:?}", case.words))?;
    guest.power_off()
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

#[test]
fn targets_and_luns_match_the_plan() -> Result<()> {
    boots(&Case {
        name: "scsi",
        words: words(&[
            "scsi:4x1,queues=2,removable=2,cmd_per_lun=64,virtqueue_size=128",
            "scsi:1x4,queues=4",
            "backing=ram:16M",
        ]),
        system: None,
    })
}

#[test]
fn four_virtio_blk_disks_beside_a_system_disk() -> Result<()> {
    let scratch = Scratch::new()?;
    let system = scratch.file("system.raw");
    std::fs::File::create(&system)?.set_len(32 << 20)?;
    boots(&Case {
        name: "blk",
        words: words(&["blk:2,queues=2,packed", "blk:2,queues=4", "backing=ram:16M"]),
        system: Some(&system),
    })
}

#[test]
fn qemus_own_devices_show_the_same() -> Result<()> {
    let scratch = Scratch::new()?;
    let system = scratch.file("system.raw");
    std::fs::File::create(&system)?.set_len(32 << 20)?;
    let folder = format!("backing=file:{},size=16M", scratch.files().display());
    boots(&Case {
        name: "qemu",
        words: words(&[
            "scsi:4x1,queues=2,removable=2,virtqueue_size=128,via=qemu-iothread,aio=threads",
            "scsi:1x4,queues=4,aio=threads",
            "blk:2,queues=2,packed,aio=io_uring",
            "blk:2,queues=4,ioeventfd=off,aio=threads",
            "via=qemu",
            &folder,
        ]),
        system: Some(&system),
    })
}

/// libvirt's own schema of a domain.
const SCHEMA: &str = "/usr/share/libvirt/schemas/domain.rng";

#[test]
fn the_domain_is_valid_by_libvirts_own_schema() -> Result<()> {
    let scratch = Scratch::new()?;
    ensure!(
        Path::new(SCHEMA).is_file(),
        "no {SCHEMA}\nhint: scripts/setup test\n  or: apt-get install --no-install-recommends libvirt0"
    );
    let system = scratch.file("system.raw");
    let cases: [(&[&str], Option<&Path>); 8] = [
        (
            &["scsi:4x1,removable=2,cmd_per_lun=64,virtqueue_size=128"],
            None,
        ),
        (&["scsi:1x4,queues=2", "blk:2,packed"], None),
        (
            &[
                "scsi:2x2,removable=1,virtqueue_size=128",
                "blk:2,ioeventfd=on",
                "via=qemu-iothread",
            ],
            None,
        ),
        (&["blk:4"], Some(&system)),
        (&["blk:40,queues=2"], None),
        (&["blk:40,queues=2,via=qemu", "--machine=pc"], None),
        (&["blk:2,via=ide", "blk:7,via=ahci"], None),
        (
            &["scsi:1x2,via=vhost-scsi,wwpn=naa.5001405bf0e7a2c4", "blk:1"],
            None,
        ),
    ];
    for (case, system) in cases {
        let case = Case {
            name: "schema",
            words: words(case),
            system,
        };
        let file = scratch.file("domain.xml");
        std::fs::write(&file, plan(&case, &scratch, "xml")?)?;
        let output = Command::new(vm::tool("xmllint")?)
            .args(["--noout", "--relaxng", SCHEMA])
            .arg(&file)
            .output()?;
        ensure!(
            output.status.success(),
            "{:?}: {}\n{}",
            case.words,
            String::from_utf8_lossy(&output.stderr),
            std::fs::read_to_string(&file)?
        );
    }
    Ok(())
}

#[test]
fn configuration_file_equals_the_flags() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = format!("{},size=16M", scratch.files().display());
    let case = Case {
        name: "toml",
        words: words(&[
            "scsi:2x2,removable=1",
            "blk:2",
            &format!("blk:1,backing=tmpfs:{folder}"),
            &format!("backing=file:{folder}"),
        ]),
        system: None,
    };
    let file = scratch.file("lunette.toml");
    std::fs::write(&file, plan(&case, &scratch, "toml")?)?;
    let rig = Rig::new(|daemon| daemon.arguments(["--config", &file.display().to_string()]))?;
    let of_file = rig.daemon.lunette(&["config", "show"])?;
    drop(rig);
    let flags = plan(&case, &scratch, "flags")?;
    let flags = arguments_of(&flags, "lunette", &scratch)?;
    let flags = flags.iter().skip(1).map(String::as_str);
    let rig = Rig::new(|daemon| daemon.arguments(flags))?;
    let of_flags = rig.daemon.lunette(&["config", "show"])?;
    let disks = |text: &str| {
        let lines = text.lines();
        lines
            .filter(|line| !line.starts_with("control ") && !line.starts_with("state "))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    ensure!(
        disks(&of_file) == disks(&of_flags) && of_file.contains("d4"),
        "by the file:\n{of_file}\nby flags:\n{of_flags}"
    );
    Ok(())
}
