//! Guests start, stop, reboot and are killed while the daemon continues to serve.
#![forbid(unsafe_code)]

use end_to_end::rig::kernel_is_content;
use end_to_end::{GuestBuilder, Profile, Result, Rig, Soak, ensure};
use std::fs::{Permissions, copy, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions};

#[test]
fn guest_reboot_and_kill_do_not_affect_another_guest() -> Result<()> {
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk("a=file:a.raw,size=64M,cache=none")
            .disk("b=ram:64M")
            .disk("other=file:other.raw,size=64M,cache=writeback")
            .vhost_blk("a")
            .vhost_scsi("c")
            .lun("c/0:0=b")
            .vhost_blk("other")
            .arguments(["--workers", "2"])
    })?;
    let mut other = GuestBuilder::new("bystander")
        .vhost_user_blk(&rig.socket("other"), 1)
        .boot()?;
    other.wait_for_disks(&["vda"])?;
    let soak = Soak::start(&mut other, "--file /dev/vda --depth 2 --pause 5")?;

    let subject = GuestBuilder::new("subject")
        .cpus(2)
        .vhost_user_blk(&rig.socket("a"), 2)
        .vhost_user_scsi(&rig.socket("c"), 2);
    let mut guest = subject.boot()?;
    guest.wait_for_disks(&["vda", "sda"])?;
    for disk in ["vda", "sda"] {
        guest.io_ok(&format!(
            "fill --file /dev/{disk} --seed 51 --writes 1000 --size 16M"
        ))?;
    }
    for _ in 0..3 {
        // Reboots during unacknowledged I/O. Data acknowledged before must survive.
        for disk in ["vda", "sda"] {
            guest.start(&format!(
                "guest-agent load --file /dev/{disk} --rw randread --depth 4 --runtime 60"
            ))?;
        }
        guest.reboot()?;
        guest.wait_for_disks(&["vda", "sda"])?;
        for disk in ["vda", "sda"] {
            guest.io_ok(&format!(
                "check --file /dev/{disk} --seed 51 --writes 1000 --size 16M"
            ))?;
        }
    }
    kernel_is_content(&mut guest)?;

    for disk in ["vda", "sda"] {
        // The load writes above the 16 MiB that are verified.
        guest.start(&format!(
            "dd if=/dev/urandom of=/tmp/noise bs=1M count=1; while :; do dd if=/tmp/noise of=/dev/{disk} bs=64k seek=$((256 + RANDOM % 500)) count=16 oflag=direct; done"
        ))?;
        guest.start(&format!(
            "guest-agent load --file /dev/{disk} --rw randread --depth 8 --runtime 60"
        ))?;
    }
    for disk in ["a", "b"] {
        rig.daemon.wait_for_requests(disk, 200)?;
    }
    guest.kill()?;
    rig.daemon.process().check_running()?;

    let mut guest = subject.boot()?;
    guest.wait_for_disks(&["vda", "sda"])?;
    for disk in ["vda", "sda"] {
        guest.io_ok(&format!(
            "check --file /dev/{disk} --seed 51 --writes 1000 --size 16M"
        ))?;
        guest.io_ok(&format!("soak --file /dev/{disk} --runtime 2 --seed 52"))?;
    }
    kernel_is_content(&mut guest)?;

    rig.daemon.wait_for_requests("other", 100)?;
    soak.finish(&mut other)?;
    kernel_is_content(&mut other)?;
    other.power_off()?;
    let status = rig.daemon.stop(Duration::from_secs(60))?;
    ensure!(
        status.success(),
        "{status}\n{}",
        rig.daemon.process().log_tail()
    );
    Ok(())
}

#[test]
fn memory_is_plugged_in_and_out_while_io_is_in_flight() -> Result<()> {
    let rig = Rig::new(|daemon| {
        daemon
            .disk("a=file:a.raw,size=64M,cache=none")
            .disk("b=ram:64M")
            .disk("d=ram:64M")
            .vhost_blk("a")
            .vhost_blk("d")
            .vhost_scsi("c")
            .lun("c/0:0=b")
    })?;
    let mut guest = GuestBuilder::new("memory")
        .cpus(2)
        .pluggable_memory_mib(512)
        .vhost_user_blk(&rig.socket("d"), 1)
        .vhost_user_blk(&rig.socket("a"), 2)
        .vhost_user_scsi(&rig.socket("c"), 2)
        .boot()?;
    guest.wait_for_disks(&["vda", "vdb", "sda"])?;
    let mut soaks = vec![Soak::start(&mut guest, "--file /dev/vda")?];
    guest.plug_memory("dimm", 128)?;
    // The kernel allocates movable memory to programs first, so the next buffers are in it.
    guest.ok(
        "n=0; until grep -l offline /sys/devices/system/memory/*/state >/tmp/offline; do n=$((n+1)); [ $n -lt 100 ] || exit 1; sleep 0.1; done; \
         for state in $(cat /tmp/offline); do echo online_movable > $state || exit 1; done; grep -A9 Movable /proc/zoneinfo | grep -q 'managed *[1-9]'",
    )?;
    for disk in ["vdb", "sda"] {
        let options = format!("--file /dev/{disk} --bs 64k --depth 8");
        soaks.push(Soak::start(&mut guest, &options)?);
    }
    let progress = || ["a", "b", "d"].map(|disk| rig.daemon.wait_for_requests(disk, 200));
    for outcome in progress() {
        outcome?;
    }
    guest.unplug_memory("dimm")?;
    for outcome in progress() {
        outcome?;
    }
    for soak in soaks {
        soak.finish(&mut guest)?;
    }
    kernel_is_content(&mut guest)
}

#[test]
fn an_unprivileged_daemon_serves_a_guest_within_the_usual_limits() -> Result<()> {
    let limits = ["prlimit", "--memlock=8388608", "--nofile=1024"];
    let nobody = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "--no-new-privs",
    ];
    let wrapper = match rustix::process::geteuid().is_root() {
        true => [&nobody[..], &limits[..]].concat(),
        false => limits.to_vec(),
    };
    let mut rig = Rig::prepared(|scratch, daemon| {
        // Copied to a folder that every user can reach. The build directory may be in a home folder.
        let program = scratch.socket("lunette");
        copy(vm::lunette_program(Profile::Dev)?, &program)?;
        set_permissions(scratch.sockets(), Permissions::from_mode(0o777))?;
        let file = scratch.socket("a.raw");
        Ok(daemon
            .under(&wrapper)
            .program(&program)
            .disk(&format!("a=file:{},size=32M", file.display()))
            .disk("b=ram:32M")
            .vhost_blk("a")
            .vhost_scsi("c")
            .lun("c/0:0=b"))
    })?;
    let mut guest = GuestBuilder::new("unprivileged")
        .vhost_user_blk(&rig.socket("a"), 1)
        .vhost_user_scsi(&rig.socket("c"), 1)
        .boot()?;
    guest.wait_for_disks(&["vda", "sda"])?;
    guest.io_ok("soak --file /dev/vda --runtime 2")?;
    guest.io_ok("soak --file /dev/sda --runtime 2")?;
    guest.power_off()?;
    ensure!(rig.daemon.stop(Duration::from_secs(60))?.success());
    Ok(())
}

/// A driver that has turned write-back off sends no flushes any more. This must hold for the next daemon, too.
#[test]
fn write_back_turned_off_stays_off_after_the_daemon_is_killed() -> Result<()> {
    const WRITEBACK: u32 = 32;
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk("d=file:d.raw,size=64M,cache=writeback")
            .vhost_blk("d")
    })?;
    let driver = |rig: &Rig| -> Result<(BlkQueue, FrontEnd)> {
        let mut front_end = FrontEnd::connect(&rig.socket("d"), &Options::default())?;
        let options = QueueOptions::default();
        let queue = BlkQueue::start(&mut front_end, 0, &options, 2, 4096, Layout::Separate)?;
        Ok((queue, front_end))
    };
    let (_queue, front_end) = driver(&rig)?;
    ensure!(front_end.config(WRITEBACK, 1)? == [1]);
    front_end.write_config(WRITEBACK, &[0])?;
    for _ in 0..2 {
        rig.daemon.kill()?;
        rig.daemon.start_again()?;
        let (_queue, front_end) = driver(&rig)?;
        ensure!(front_end.config(WRITEBACK, 1)? == [0]);
    }
    // Powers the driver's machine off.
    let (queue, front_end) = driver(&rig)?;
    front_end.stop_queue(0)?;
    drop((queue, front_end));
    let begun = std::time::Instant::now();
    loop {
        let (_queue, front_end) = driver(&rig)?;
        if front_end.config(WRITEBACK, 1)? == [1] {
            return Ok(());
        }
        ensure!(
            begun.elapsed() < Duration::from_secs(20),
            "it is never forgotten"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}
