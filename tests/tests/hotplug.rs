//! Disks are added, grown, shrunk and removed through the command line while a guest runs.
#![forbid(unsafe_code)]

use end_to_end::rig::number;
use end_to_end::{Guest, GuestBuilder, Result, Rig, Soak, ensure};
use std::time::{Duration, Instant};

/// Time limit for a change to be visible: milliseconds natively, much longer in a guest under TCG on a busy machine.
const SEEN_LIMIT: Duration = Duration::from_secs(60);
const ROUNDS: usize = 100;

/// Waits in the guest until `test` holds.
fn until(guest: &mut Guest, test: &str) -> Result<()> {
    let script =
        format!("i=0; until {test}; do sleep 0.02; i=$((i+1)); [ $i -lt 2500 ] || exit 1; done");
    guest.run_within_limit(SEEN_LIMIT, &script)?;
    Ok(())
}

/// Returns kernel errors, except those of the unit that is added and removed.
fn kernel_complains(guest: &mut Guest, but: &str) -> Result<String> {
    let words = "I/O error|critical|blocked for more|Call Trace|BUG:|WARNING:|timed out|abort|host reset|bus reset";
    let found = guest.run(&format!("dmesg | grep -E '{words}' | grep -v -E '{but}'"))?;
    Ok(found.stdout)
}

#[test]
fn a_unit_comes_and_goes_a_hundred_times_under_io_on_another() -> Result<()> {
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk("base=ram:64M")
            .disk("hot=ram:32M")
            .vhost_scsi("c")
            .lun("c/0:0=base")
            .arguments(["--workers", "2"])
    })?;
    let mut guest = GuestBuilder::new("hotplug")
        .cpus(2)
        .vhost_user_scsi(&rig.socket("c"), 2)
        .boot()?;
    let other = guest.scsi_disk(0, 0, 0)?;
    let options = format!("--file /dev/{other} --seed 1 --depth 2 --pause 5");
    let soak = Soak::start(&mut guest, &options)?;
    let place = "/sys/class/scsi_device/0:0:4:0/device/block/sd*";
    let mut slowest = Duration::ZERO;
    for round in 0..ROUNDS {
        let begun = Instant::now();
        rig.daemon.lunette(&["lun", "add", "c", "4:0", "hot"])?;
        until(&mut guest, &format!("ls -d {place} 2>/dev/null"))?;
        slowest = slowest.max(begun.elapsed());
        if round % 20 == 0 {
            let disk = guest.scsi_disk(0, 4, 0)?;
            guest.io_ok(&format!("soak --file /dev/{disk} --seed 2 --runtime 1"))?;
        }
        rig.daemon.lunette(&["lun", "remove", "c", "4:0"])?;
        until(&mut guest, "! [ -e /sys/class/scsi_device/0:0:4:0 ]")?;
    }
    println!("the slowest unit was seen {slowest:?} after the call began");
    soak.finish(&mut guest)?;
    // The kernel logs an error about a unit that is removed during the partition scan, with its name or its address.
    let letter = other.trim_start_matches("sd");
    let complaints = kernel_complains(&mut guest, &format!("0:0:4:0|dev sd[^{letter}]"))?;
    ensure!(complaints.is_empty(), "{complaints}");
    // The disk is unused and can be removed.
    rig.daemon.lunette(&["disk", "remove", "hot"])?;
    rig.daemon.process().check_running()
}

#[test]
fn lun_in_use_goes_when_its_requests_end_or_by_force() -> Result<()> {
    let rig = Rig::new(|daemon| {
        daemon
            .disk("base=ram:64M")
            .disk("hot=ram:32M")
            .vhost_scsi("c")
            .lun("c/0:0=base")
            .lun("c/4:0=hot")
    })?;
    let mut guest = GuestBuilder::new("in-use")
        .vhost_user_scsi(&rig.socket("c"), 2)
        .boot()?;
    guest.wait_for_disks(&["sda", "sdb"])?;
    let in_use = rig.daemon.ask(&["disk", "remove", "hot"])?;
    let error_text = String::from_utf8_lossy(&in_use.stderr).into_owned();
    ensure!(
        in_use.status.code() == Some(1) && error_text.contains("c/4:0"),
        "{error_text}"
    );
    let in_use = rig.daemon.ask(&["export", "remove", "c"])?;
    let error_text = String::from_utf8_lossy(&in_use.stderr).into_owned();
    ensure!(
        in_use.status.code() == Some(1) && error_text.contains("has a client"),
        "{error_text}"
    );

    for forced in [false, true] {
        let disk = guest.scsi_disk(0, 4, 0)?;
        let load =
            format!("guest-agent load --file /dev/{disk} --rw randread --depth 8 --runtime 5");
        let load = guest.start(&load)?;
        rig.daemon.wait_for_requests("hot", 100)?;
        let mut words = vec!["lun", "remove", "c", "4:0"];
        words.extend(forced.then_some("--force"));
        rig.daemon.lunette(&words)?;
        // The unit's requests fail instead of hanging, so the load ends.
        guest.wait(load, Duration::from_secs(120))?;
        until(&mut guest, "! [ -e /sys/class/scsi_device/0:0:4:0 ]")?;
        rig.daemon.lunette(&["lun", "add", "c", "4:0", "hot"])?;
        until(
            &mut guest,
            "ls -d /sys/class/scsi_device/0:0:4:0/device/block/sd* 2>/dev/null",
        )?;
    }
    let other = guest.scsi_disk(0, 0, 0)?;
    guest.io_ok(&format!("soak --file /dev/{other} --seed 3 --runtime 2"))?;
    Ok(())
}

#[test]
fn a_guest_sees_a_disk_grow_and_shrink_without_a_reboot() -> Result<()> {
    let rig = Rig::new(|daemon| {
        daemon
            .disk("a=file:a.raw,size=64M,cache=none")
            .disk("b=ram:64M")
            .disk("n=null:64M")
            .vhost_blk("a")
            .vhost_blk("n")
            .vhost_scsi("c")
            .lun("c/0:0=b")
    })?;
    let mut guest = GuestBuilder::new("resize")
        .vhost_user_blk(&rig.socket("a"), 1)
        .vhost_user_blk(&rig.socket("n"), 1)
        .vhost_user_scsi(&rig.socket("c"), 1)
        .boot()?;
    guest.wait_for_disks(&["vda", "vdb", "sda"])?;
    let disks = [("a", "vda"), ("n", "vdb"), ("b", "sda")];
    for (disk, seen) in disks {
        let options = format!("--file /dev/{seen} --seed 4 --size 32M");
        let soak = Soak::start(&mut guest, &options)?;
        rig.daemon.lunette(&["disk", "resize", disk, "160M"])?;
        until(
            &mut guest,
            &format!("[ $(cat /sys/block/{seen}/size) = 327680 ]"),
        )?;
        if disk != "n" {
            // The last block of the added space.
            guest.ok(&format!(
                "dd if=/dev/urandom of=/tmp/x bs=4096 count=1 2>/dev/null; \
                 dd if=/tmp/x of=/dev/{seen} bs=4096 seek=40959 oflag=direct && \
                 dd if=/dev/{seen} of=/tmp/y bs=4096 skip=40959 iflag=direct && cmp /tmp/x /tmp/y"
            ))?;
        }
        let refused = rig.daemon.ask(&["disk", "resize", disk, "48M"])?;
        ensure!(refused.status.code() == Some(1), "shrunk without --force");
        rig.daemon
            .lunette(&["disk", "resize", disk, "48M", "--force"])?;
        until(
            &mut guest,
            &format!("[ $(cat /sys/block/{seen}/size) = 98304 ]"),
        )?;
        // A null disk stores no data to compare.
        if disk == "n" {
            soak.end(&mut guest)?;
        } else {
            soak.finish(&mut guest)?;
        }
    }
    let size = std::fs::metadata(rig.scratch.file("a.raw"))?.len();
    ensure!(size == 48 << 20, "the file has {size} bytes");
    Ok(())
}

/// The guest has the old disk open and writes to it during the replacement. The two disks differ in size and block size.
#[test]
fn replaced_lun_is_a_new_disk_to_the_guest() -> Result<()> {
    const BYTE: u8 = 0x55;
    const WRITTEN: std::ops::Range<usize> = 40960..45056;
    let rig = Rig::new(|daemon| {
        daemon
            .disk("a=file:a.raw,size=32M")
            .disk("b=file:b.raw,size=64M,block_size=4096")
            .vhost_scsi("c")
            .lun("c/4:0=a")
            .arguments(["--workers", "2"])
    })?;
    let mut guest = GuestBuilder::new("replaced")
        .cpus(2)
        .vhost_user_scsi(&rig.socket("c"), 2)
        .boot()?;
    let place = "/sys/class/scsi_device/0:0:4:0/device/block/sd*";
    // Number of 512-byte sectors, and bytes per block.
    let disks = [("b", 131_072, 4096), ("a", 65_536, 512)];
    for round in 0..4 {
        let (name, sectors, block_size) = disks[round % 2];
        let old = guest.scsi_disk(0, 4, 0)?;
        let holder = guest.start(&format!(
            "rm -f /tmp/replaced; exec 3<>/dev/{old}; touch /tmp/open{round}; \
             until [ -e /tmp/replaced ]; do sleep 0.1; done; \
             tr '\\0' '\\252' </dev/zero | dd bs=4096 count=1 seek=10 iflag=fullblock conv=notrunc,fsync >&3"
        ))?;
        until(&mut guest, &format!("[ -e /tmp/open{round} ]"))?;
        let load = guest.start(&format!(
            "guest-agent load --file /dev/{old} --rw randwrite --depth 8 --runtime 6"
        ))?;
        guest.ok("sleep 1")?;
        let file = rig.scratch.file(&format!("{name}.raw"));
        let mut content = std::fs::read(&file)?;
        rig.daemon
            .lunette(&["lun", "add", "c", "4:0", name, "--force"])?;
        until(
            &mut guest,
            &format!("[ \"$(cat {place}/size 2>/dev/null)\" = {sectors} ]"),
        )?;
        guest.ok("touch /tmp/replaced")?;
        let load = guest.wait(load, Duration::from_secs(120))?;
        let held = guest.wait(holder, Duration::from_secs(60))?;
        ensure!(held.code != 0, "the old disk took a write: {held:?}");
        ensure!(std::fs::read(&file)? == content, "{name}: {load:?}");

        let new = guest.scsi_disk(0, 4, 0)?;
        let seen = number(&mut guest, &new, "queue/logical_block_size")?;
        ensure!(seen == block_size, "{name}: blocks of {seen} bytes");
        guest.ok(&format!(
            "tr '\\0' '\\125' </dev/zero | dd of=/dev/{new} bs=4096 count=1 seek=10 iflag=fullblock oflag=direct"
        ))?;
        content[WRITTEN].fill(BYTE);
        ensure!(std::fs::read(&file)? == content, "{name}: another place");
    }
    Ok(())
}
