//! `lunette vm run` with a user's own data: a system that boots from its disk, raw by QEMU and qcow2 by Lunette, with other disks; and a
//! host folder in the guest. Needs: qemu-system-common (virtiofsd), qemu-utils, syslinux, mtools. Takes: 40 s.
#![forbid(unsafe_code)]

use control::Client;
use end_to_end::{Context, Result, UserGuests, ensure};
use serde_json::Value;
use std::process::Command;
use std::time::{Duration, Instant};

/// Time limit for a boot from a disk under TCG on a busy machine.
const BOOT_LIMIT: Duration = Duration::from_secs(240);

/// Repeats `vm exec` until the system's agent answers. `vm run` does not wait for it, because the system may have no agent.
fn exec_when_up(guests: &UserGuests, name: &str, command: &str) -> Result<String> {
    let begun = Instant::now();
    loop {
        let output = guests.vm(&["exec", name, command])?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let wrong = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            begun.elapsed() < BOOT_LIMIT && guests.state(name).is_some(),
            "{wrong}"
        );
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Returns the arguments that start the kernel from a disk of Lunette. Under KVM the disk's boot loader starts it. TCG continues with its
/// translation of the boot sector after another process overwrites it, so QEMU must load the kernel.
fn loader(guests: &UserGuests) -> Result<Vec<String>> {
    if vm::Accelerator::detect()? == vm::Accelerator::Kvm {
        return Ok(Vec::new());
    }
    let refused = guests.vm(&[
        "run",
        "--name",
        "bios",
        "blk:1",
        "--system",
        "/no/such,by=lunette",
    ])?;
    let warned = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(warned.contains("by=qemu"), "{warned}");
    let system = vm::setup::user_system()?;
    let path = |path: &std::path::Path| path.display().to_string();
    let append = format!(
        "{} {}=/dev/vda2",
        vm::initramfs::user_command_line("own"),
        vm::initramfs::ROOT
    );
    Ok(vec![
        "--kernel".to_owned(),
        path(&system.kernel),
        "--initrd".to_owned(),
        path(&system.initramfs),
        "--append".to_owned(),
        append,
    ])
}

#[test]
fn own_system_boots_raw_by_qemu_and_qcow2_by_lunette() -> Result<()> {
    let guests = UserGuests::new()?;
    let (raw, qcow2) = (guests.file("own.raw"), guests.file("own.qcow2"));
    end_to_end::bootable::bootable_image(&raw, 192, end_to_end::bootable::BootableSystem::User)?;
    let run = |system: &str, more: &[&str]| {
        let words = [
            "run",
            "--detach",
            "--name",
            "own",
            "--smp",
            "1",
            "--memory",
            "256M",
            "blk:1",
            "backing=ram:16M",
            "--system",
            system,
        ];
        guests.ok(&[&words[..], more].concat())
    };
    let serial = guests.file("serial");
    run(
        &raw.display().to_string(),
        &["--serial", &serial.display().to_string()],
    )?;
    let seen = "grep ' / ' /proc/mounts; ls /sys/block; cat /proc/cmdline";
    let first = exec_when_up(&guests, "own", seen)?;
    ensure!(first.contains("/dev/vda2 / ext4"), "{first}");
    ensure!(first.contains("\nvda\nvdb\n"), "{first}");
    // The command line is the boot loader's and not QEMU's.
    ensure!(first.contains("BOOT_IMAGE="), "{first}");
    guests.ok(&["exec", "own", "echo kept > /mark && sync"])?;
    guests.ok(&["stop", "own"])?;
    let printed = std::fs::read_to_string(&serial)?;
    ensure!(printed.contains("A shell in the guest"), "{printed}");

    let mut convert = Command::new(vm::tool("qemu-img")?);
    convert
        .args(["convert", "-f", "raw", "-O", "qcow2"])
        .args([&raw, &qcow2]);
    ensure!(convert.status()?.success());
    let system = format!("{},by=lunette", qcow2.display());
    run(
        &system,
        &loader(&guests)?
            .iter()
            .map(String::as_str)
            .collect::<Vec<_>>(),
    )?;
    let second = exec_when_up(&guests, "own", "cat /mark; grep ' / ' /proc/mounts")?;
    ensure!(
        second.starts_with("kept\n") && second.contains("/dev/vda2 / ext4"),
        "{second}"
    );
    let state = guests.state("own").context("it has ended")?;
    let client = Client::new(&state.control.context("no daemon")?);
    let disk: Value = client.get("/v1/disks/system")?;
    ensure!(
        disk["backend"] == "image" && disk["status"]["state"] == "ready",
        "{disk}"
    );
    guests.ok(&["exec", "own", "echo again > /mark && sync"])?;
    guests.ok(&["stop", "own"])?;
    let mut check = Command::new(vm::tool("qemu-img")?);
    ensure!(check.arg("check").arg(&qcow2).output()?.status.success());
    guests.nothing_is_left()
}

#[test]
fn folder_of_the_host_is_read_and_written_in_the_guest() -> Result<()> {
    let guests = UserGuests::new()?;
    let folder = guests.file("a folder");
    std::fs::create_dir(&folder)?;
    std::fs::write(folder.join("there"), "from the host\n")?;
    let share = folder.display().to_string();
    let refused = guests.refused(&["run", "blk:1", "--share", "/no/such/folder"])?;
    ensure!(
        refused.contains("/no/such/folder") && refused.contains("hint:"),
        "{refused}"
    );
    // Errors in the topology are also reported with --detach.
    let memory = ["run", "--detach", "blk:1,via=qemu", "backing=ram:16M"];
    let refused = guests.refused(&memory)?;
    ensure!(refused.contains("which QEMU cannot access"), "{refused}");
    for machine in ["q35", "pc"] {
        guests.ok(&[
            "run",
            "--detach",
            "--name",
            "sharer",
            "--smp",
            "1",
            "--memory",
            "192M",
            "--machine",
            machine,
            "blk:1",
            "backing=ram:16M",
            "--share",
            &share,
        ])?;
        let seen = guests.ok(&[
            "exec",
            "sharer",
            "cat /share/there; echo from the guest > /share/back",
        ])?;
        ensure!(seen == "from the host\n", "{seen}");
        let back = std::fs::read_to_string(folder.join("back"))?;
        ensure!(back == "from the guest\n", "{back}");
        std::fs::remove_file(folder.join("back"))?;
        guests.ok(&["reboot", "sharer"])?;
        let again = guests.ok(&["exec", "sharer", "cat /share/there"])?;
        ensure!(again == "from the host\n", "{again}");
        guests.ok(&["kill", "sharer"])?;
    }
    guests.nothing_is_left()
}
