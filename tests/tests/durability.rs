//! Acknowledged data survives remounts, daemon restarts and a new guest. Requests that cannot be executed fail with the right error
//! and affect nothing else.
#![forbid(unsafe_code)]

use end_to_end::files::{file_system_check, file_system_round_trip};
use end_to_end::rig::{kernel_is_content, number};
use end_to_end::{Context, Guest, GuestBuilder, Result, Rig, Scratch, Soak, bail, ensure};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::time::Duration;
use vhost_frontend::{FrontEnd, Options};

const EIO: i64 = 5;
const EINVAL: i64 = 22;
const ENOSPC: i64 = 28;
/// Errno that Linux reports for MEDIUM ERROR. Virtio-blk has only a general error.
const ENODATA: i64 = 61;

#[test]
fn virtio_blk_data_survives_remounts_and_daemon_restarts() -> Result<()> {
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk("direct=file:direct.raw,size=256M,cache=none")
            .disk("cached=file:cached.raw,size=256M,cache=writeback,block_size=4096")
            .vhost_blk("direct")
            .vhost_blk("cached")
    })?;
    let mut guest = GuestBuilder::new("blk-data")
        .cpus(2)
        .vhost_user_blk(&rig.socket("direct"), 2)
        .vhost_user_blk(&rig.socket("cached"), 2)
        .boot()?;
    guest.wait_for_disks(&["vda", "vdb"])?;
    file_system_round_trip(&mut guest, "vda")?;
    guest.io_ok("fill --file /dev/vdb --seed 21 --writes 4000 --bs 8192 --depth 8")?;

    // The guest is idle and the file system stays mounted.
    rig.daemon.stop(Duration::from_secs(60))?;
    rig.daemon.start_again()?;
    file_system_check(&mut guest)?;
    guest.io_ok("check --file /dev/vdb --seed 21 --writes 4000 --bs 8192 --depth 8")?;

    // Repeated under load, because the moment of the end within a request is random. A daemon that stops on request completes its
    // requests first. A killed daemon leaves them to its successor. The guest waits and continues in both cases.
    let soak = Soak::start(&mut guest, "--file /dev/vdb --seed 22 --depth 8")?;
    for round in 0..7 {
        rig.daemon.wait_for_requests("cached", 200)?;
        if round % 2 == 0 {
            rig.daemon.process().kill()?;
        } else {
            let status = rig.daemon.stop(Duration::from_secs(60))?;
            ensure!(
                status.success(),
                "{status}\n{}",
                rig.daemon.process().log_tail()
            );
        }
        rig.daemon.start_again()?;
    }
    rig.daemon.wait_for_requests("cached", 200)?;
    soak.finish(&mut guest)
        .with_context(|| rig.daemon.process().log_tail())?;

    file_system_check(&mut guest)?;
    guest.ok("umount /mnt && /tools/e2fsck -fn /dev/vda")?;
    kernel_is_content(&mut guest)
}

/// A packed ring is overwritten while its requests are in flight, and its front end does not track the ring position. After a kill
/// only the in-flight region has this state.
#[test]
fn packed_ring_continues_after_kills_of_the_daemon() -> Result<()> {
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk("d=file:d.raw,size=128M,cache=writeback")
            .vhost_blk("d")
    })?;
    let mut guest = GuestBuilder::new("blk-packed")
        .vhost_user_blk_with(&rig.socket("d"), 1, "packed=on")
        .boot()?;
    guest.wait_for_disks(&["vda"])?;
    // VIRTIO_F_RING_PACKED is bit 34 of the accepted features.
    let features = guest.ok("cat /sys/class/block/vda/device/features")?;
    ensure!(
        features.trim().as_bytes().get(34) == Some(&b'1'),
        "{features}"
    );
    let soak = Soak::start(&mut guest, "--file /dev/vda --seed 23 --depth 8")?;
    for round in 0..5 {
        rig.daemon.wait_for_requests("d", 200)?;
        if round == 2 {
            rig.daemon.stop(Duration::from_secs(60))?;
        } else {
            rig.daemon.process().kill()?;
        }
        rig.daemon.start_again()?;
    }
    rig.daemon.wait_for_requests("d", 200)?;
    soak.finish(&mut guest)
        .with_context(|| rig.daemon.process().log_tail())?;
    kernel_is_content(&mut guest)
}

#[test]
fn scsi_data_survives_remounts_and_is_seen_by_virtio_blk() -> Result<()> {
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk("d=file:d.raw,size=256M,cache=none")
            .disk("e=file:e.raw,size=128M,cache=writethrough,block_size=4096")
            .vhost_scsi("c")
            .lun("c/0:0=d")
            .lun("c/0:1=e")
            .vhost_blk("d")
            .vhost_blk("e")
    })?;
    let scsi = GuestBuilder::new("scsi-data")
        .cpus(2)
        .vhost_user_scsi(&rig.socket("c"), 2);
    let mut guest = scsi.boot()?;
    let (d, e) = (guest.scsi_disk(0, 0, 0)?, guest.scsi_disk(0, 0, 1)?);
    file_system_round_trip(&mut guest, &d)?;
    guest.io_ok(&format!(
        "fill --file /dev/{e} --seed 31 --writes 3000 --bs 4096 --depth 8"
    ))?;
    guest.ok(&format!("umount /mnt && /tools/e2fsck -fn /dev/{d}"))?;
    kernel_is_content(&mut guest)?;
    guest.power_off()?;

    rig.daemon.stop(Duration::from_secs(60))?;
    rig.daemon.start_again()?;
    let mut guest = GuestBuilder::new("blk-after-scsi")
        .vhost_user_blk(&rig.socket("d"), 1)
        .vhost_user_blk(&rig.socket("e"), 1)
        .boot()?;
    guest.wait_for_disks(&["vda", "vdb"])?;
    guest.ok("mount -t ext4 /dev/vda /mnt")?;
    file_system_check(&mut guest)?;
    guest.io_ok("check --file /dev/vdb --seed 31 --writes 3000 --bs 4096 --depth 8")?;
    kernel_is_content(&mut guest)
}

/// Returns a probe's errno. Fails if the probe succeeded.
fn errno(guest: &mut Guest, words: &str) -> Result<i64> {
    let outcome = guest.io(&format!("probe {words}"))?;
    match outcome.get("errno").and_then(Value::as_i64) {
        Some(errno) => Ok(errno),
        None => bail!("probe {words} did not fail: {outcome}"),
    }
}

fn bytes(guest: &mut Guest, words: &str) -> Result<u64> {
    let outcome = guest.io(&format!("probe {words}"))?;
    match outcome.get("bytes").and_then(Value::as_u64) {
        Some(bytes) => Ok(bytes),
        None => bail!("probe {words} failed: {outcome}"),
    }
}

/// Sends a CDB through the SCSI generic driver and returns the output of `sg_raw`.
fn cdb(guest: &mut Guest, disk: &str, cdb: &str, options: &str) -> Result<String> {
    let output = guest.run(&format!(
        "sg_raw {options} /dev/{disk} {cdb} </dev/zero 2>&1"
    ))?;
    Ok(output.stdout)
}

#[test]
#[allow(
    clippy::too_many_lines,
    reason = "one test, from its beginning to its end"
)]
fn unsupported_requests_get_the_standards_error() -> Result<()> {
    let rig = Rig::new(|daemon| {
        daemon
            .disk("a=ram:16M,block_size=4096")
            .disk("b=file:b.raw,size=16M,cache=none,block_size=4096")
            .vhost_blk("a")
            .vhost_scsi("c")
            .lun("c/0:0=b")
    })?;
    let mut guest = GuestBuilder::new("errors")
        .vhost_user_blk(&rig.socket("a"), 1)
        .vhost_user_scsi(&rig.socket("c"), 1)
        .boot()?;
    guest.wait_for_disks(&["vda", "sda"])?;
    const END: u64 = 16 << 20;
    for disk in ["vda", "sda"] {
        ensure!(
            number(&mut guest, disk, "queue/logical_block_size")? == 4096,
            "block size of {disk}"
        );
        let file = format!("--file /dev/{disk}");
        let last = format!("--offset {}", END - 4096);
        ensure!(
            bytes(
                &mut guest,
                &format!("{file} --op read {last} --length 4096")
            )? == 4096
        );
        ensure!(
            bytes(
                &mut guest,
                &format!("{file} --op read {last} --length 8192")
            )? == 4096,
            "{disk}: a read across the end is short"
        );
        ensure!(
            bytes(
                &mut guest,
                &format!("{file} --op read --offset {END} --length 4096")
            )? == 0,
            "{disk}: end of file"
        );
        ensure!(
            errno(
                &mut guest,
                &format!("{file} --op write --offset {END} --length 4096")
            )? == ENOSPC
        );
        for unaligned in [
            "--offset 0 --length 512",
            "--offset 512 --length 4096",
            "--offset 4096 --length 6144",
        ] {
            for op in ["read", "write"] {
                let found = errno(&mut guest, &format!("{file} --op {op} {unaligned}"))?;
                ensure!(
                    found == EINVAL,
                    "{disk}: {op} {unaligned} gives errno {found}"
                );
            }
        }
        ensure!(
            bytes(
                &mut guest,
                &format!("{file} --op read --offset 512 --length 1024 --buffered")
            )? == 1024
        );
    }

    // Requests to the device that bypass the kernel's own checks. 16 MiB are 4096 = 0x1000 blocks of 4096 bytes.
    const OUT_OF_RANGE: &str = "Logical block address out of range";
    for (name, command, options) in [
        (
            "READ(10) of the block after the last one",
            "28 00 00 00 10 00 00 00 01 00",
            "-r 4096",
        ),
        (
            "READ(10) across the end",
            "28 00 00 00 0f ff 00 00 02 00",
            "-r 8192",
        ),
        (
            "READ(16) of the largest address",
            "88 00 ff ff ff ff ff ff ff ff 00 00 00 01 00 00",
            "-r 4096",
        ),
        (
            "WRITE(10) across the end",
            "2a 00 00 00 0f ff 00 00 02 00",
            "-s 8192",
        ),
        (
            "SYNCHRONIZE CACHE(10) past the end",
            "35 00 00 00 10 01 00 00 01 00",
            "",
        ),
        (
            "WRITE SAME(16) with UNMAP past the end",
            "93 08 00 00 00 00 00 00 10 00 00 00 00 01 00 00",
            "-s 4096",
        ),
    ] {
        let outcome = cdb(&mut guest, "sda", command, options)?;
        ensure!(
            outcome.contains(OUT_OF_RANGE) && outcome.contains("Illegal Request"),
            "{name}: {outcome}"
        );
    }
    let good = cdb(
        &mut guest,
        "sda",
        "28 00 00 00 0f ff 00 00 01 00",
        "-r 4096",
    )?;
    ensure!(good.contains("Good"), "READ(10) of the last block: {good}");
    let unknown = cdb(&mut guest, "sda", "ff 00 00 00 00 00", "")?;
    ensure!(
        unknown.contains("Invalid command operation code"),
        "an unknown command: {unknown}"
    );
    guest.io_ok("soak --file /dev/vda --runtime 2")?;
    guest.io_ok("soak --file /dev/sda --runtime 2")?;
    Ok(())
}

#[test]
fn a_full_file_system_and_a_lost_file_end_reach_the_guest_as_errors() -> Result<()> {
    // The daemon has its own file system of 24 MiB. Without root this needs a user namespace.
    let script = "mkdir -p small && mount -t tmpfs -o size=24M tmpfs small && exec \"$0\" \"$@\"";
    let as_user: &[&str] = match rustix::process::geteuid().is_root() {
        true => &["unshare"],
        false => &["unshare", "--user", "--map-root-user"],
    };
    let own_mounts = [as_user, &["--mount", "sh", "-c", script]].concat();
    let rig = Rig::new(|daemon| {
        daemon
            .under(&own_mounts)
            .disk("full=file:small/full.raw,size=64M,cache=writeback")
            .disk("short=file:short.raw,size=64M,cache=none")
            .disk("fine=file:fine.raw,size=64M,cache=none")
            .vhost_blk("full")
            .vhost_blk("short")
            .vhost_blk("fine")
            .vhost_scsi("c")
            .lun("c/0:0=full")
            .lun("c/0:1=short")
    })?;
    let mut guest = GuestBuilder::new("host-errors")
        .cpus(2)
        .vhost_user_blk(&rig.socket("full"), 1)
        .vhost_user_blk(&rig.socket("short"), 1)
        .vhost_user_blk(&rig.socket("fine"), 1)
        .vhost_user_scsi(&rig.socket("c"), 1)
        .boot()?;
    guest.wait_for_disks(&["vda", "vdb", "vdc"])?;
    let (full, short) = (guest.scsi_disk(0, 0, 0)?, guest.scsi_disk(0, 0, 1)?);
    let bystander = Soak::start(&mut guest, "--file /dev/vdc --pause 5")?;

    guest.io_ok("fill --file /dev/vda --seed 41 --writes 500 --size 8M")?;
    for disk in ["vda", &full] {
        let output = guest.run(&format!(
            "dd if=/dev/zero of=/dev/{disk} bs=1M seek=16 count=32 oflag=direct 2>&1"
        ))?;
        let has_errno = output.stdout.contains("No space left")
            || output.stdout.contains("Input/output error")
            || output.stdout.contains("I/O error");
        ensure!(
            output.code != 0 && has_errno,
            "{disk}: writing 32 MiB to a file system of 24 MiB: {output:?}"
        );
    }
    // Previously written data is intact and can be rewritten.
    for pass in [
        "check --file /dev/vda".to_owned(),
        format!("fill --file /dev/{full}"),
        "check --file /dev/vda".to_owned(),
    ] {
        guest.io_ok(&format!("{pass} --seed 41 --writes 500 --size 8M"))?;
    }

    guest.io_ok("fill --file /dev/vdb --seed 43 --writes 500 --size 8M")?;
    File::options()
        .write(true)
        .open(rig.scratch.file("short.raw"))?
        .set_len(16 << 20)?;
    for (disk, expected) in [("vdb", EIO), (short.as_str(), ENODATA)] {
        let found = errno(
            &mut guest,
            &format!("--file /dev/{disk} --op read --offset 32M --length 4096"),
        )?;
        ensure!(
            found == expected,
            "{disk}: a read of lost data returns errno {found}"
        );
        guest.io_ok(&format!(
            "check --file /dev/{disk} --seed 43 --writes 500 --size 8M"
        ))?;
    }
    bystander.finish(&mut guest)?;

    // Proves that the check can fail: it detects data that is changed behind the daemon.
    guest.io_ok("fill --file /dev/vdc --seed 44 --writes 100 --size 1M")?;
    let mut file = File::options()
        .write(true)
        .open(rig.scratch.file("fine.raw"))?;
    file.write_all(&vec![0xa5; 1 << 20])?;
    let report = guest.io("check --file /dev/vdc --seed 44 --writes 100 --size 1M")?;
    ensure!(
        report["mismatches"] == report["reads"] && report["errors"] == 0,
        "{report}"
    );
    Ok(())
}

#[test]
fn second_daemon_cannot_open_a_written_file() -> Result<()> {
    let mut rig = Rig::new(|daemon| daemon.disk("d=file:d.raw,size=16M").vhost_blk("d"))?;
    let other = Scratch::new()?;
    let file = rig.scratch.file("d.raw");
    let (status, log) = end_to_end::DaemonBuilder::new(&other)
        .disk(&format!("d=file:{},require=on", file.display()))
        .vhost_blk("d")
        .start_refused()?;
    ensure!(
        !status.success() && log.contains("d.raw"),
        "{status}: {log}"
    );
    rig.daemon.process().check_running()
}

/// Another export of the disk, to which a guest migrates, does not have this state.
#[test]
fn disabled_write_cache_is_state_of_the_disk() -> Result<()> {
    let rig = Rig::new(|daemon| {
        let daemon = daemon.disk("d=file:d.raw,size=1M,cache=writeback");
        daemon.vhost_blk("d")
    })?;
    let front_end = FrontEnd::connect(&rig.socket("d"), &Options::default())?;
    for (writeback, expected) in [(0, json!(["writethrough"])), (1, Value::Null)] {
        // Offset 32 of the configuration space is `writeback`.
        front_end.write_config(32, &[writeback])?;
        let disk: Value = control::get(&rig.daemon.control(), "/v1/disks/d")?;
        let state = &disk["status"]["initiator_state"];
        ensure!(*state == expected, "{disk}");
    }
    Ok(())
}
