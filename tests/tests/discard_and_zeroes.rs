//! Discards free space in the file, zeroed ranges read as zeroes, and read-only disks refuse writes.
#![forbid(unsafe_code)]

use end_to_end::rig::{kernel_is_content, number};
use end_to_end::{GuestBuilder, Result, Rig, ensure};

const MIB: u64 = 1 << 20;

#[test]
fn discard_shrinks_the_file_and_zeroed_ranges_read_as_zeroes() -> Result<()> {
    let rig = Rig::new(|daemon| {
        daemon
            .disk("a=file:a.raw,size=128M,cache=none")
            .disk("b=file:b.raw,size=128M,cache=writeback")
            .disk("r=ram:64M")
            .vhost_blk("a")
            .vhost_blk("r")
            .vhost_scsi("c")
            .lun("c/0:0=b")
    })?;
    let mut guest = GuestBuilder::new("space")
        .cpus(2)
        .vhost_user_blk(&rig.socket("a"), 2)
        .vhost_user_blk(&rig.socket("r"), 2)
        .vhost_user_scsi(&rig.socket("c"), 2)
        .boot()?;
    guest.wait_for_disks(&["vda", "vdb", "sda"])?;
    for (disk, file) in [
        ("vda", Some("a.raw")),
        ("sda", Some("b.raw")),
        ("vdb", None),
    ] {
        ensure!(
            number(&mut guest, disk, "queue/discard_max_bytes")? > 0,
            "{disk} offers discard"
        );
        ensure!(
            number(&mut guest, disk, "queue/write_zeroes_max_bytes")? > 0,
            "{disk} offers write zeroes"
        );
        guest.ok(&format!("tr '\\0' x </dev/zero | dd of=/dev/{disk} bs=1M count=24 iflag=fullblock conv=fsync 2>&1"))?;
        if let Some(file) = file {
            let full = rig.allocated(file)?;
            ensure!(
                full >= 24 * MIB,
                "{file} takes {full} bytes after 24 MiB were written"
            );
        }

        guest.ok(&format!(
            "/tools/blkdiscard -o 4M -l 16M /dev/{disk} && sync"
        ))?;
        if let Some(file) = file {
            let left = rig.allocated(file)?;
            ensure!(
                left <= 9 * MIB,
                "{file} takes {left} bytes after 16 of 24 MiB were discarded"
            );
        }

        // Zeroes 2 MiB between written data, and 1536 bytes at an unaligned offset.
        guest.ok(&format!(
            "/tools/blkdiscard -z -o 1M -l 2M /dev/{disk} && /tools/blkdiscard -z -o 20979200 -l 1536 /dev/{disk}"
        ))?;
        guest.io_ok(&format!(
            "zeroes --file /dev/{disk} --offset 1M --length 2M"
        ))?;
        guest.io_ok(&format!(
            "zeroes --file /dev/{disk} --offset 20979200 --length 1536 --buffered"
        ))?;
        let rest = guest.ok(&format!(
            "dd if=/dev/{disk} bs=1M count=24 iflag=direct 2>/dev/null | tr -d '\\0' | wc -c"
        ))?;
        let rest: u64 = rest.trim().parse()?;
        let kept = (24 - 16 - 2) * MIB - 1536;
        ensure!(
            rest == kept,
            "{disk}: {rest} bytes of data are left, {kept} were not touched"
        );
    }
    kernel_is_content(&mut guest)
}

#[test]
fn a_read_only_disk_is_read_only_at_both_transports() -> Result<()> {
    let content = vec![0x5a; 4 << 20];
    let rig = Rig::prepared(|scratch, daemon| {
        std::fs::write(scratch.file("ro.raw"), &content)?;
        Ok(daemon
            .disk("ro=file:ro.raw,read_only=on")
            .vhost_blk("ro")
            .vhost_scsi("c")
            .lun("c/0:0=ro"))
    })?;
    let mut guest = GuestBuilder::new("read-only")
        .vhost_user_blk(&rig.socket("ro"), 1)
        .vhost_user_scsi(&rig.socket("c"), 1)
        .boot()?;
    guest.wait_for_disks(&["vda", "sda"])?;
    for disk in ["vda", "sda"] {
        ensure!(
            number(&mut guest, disk, "ro")? == 1,
            "{disk} is not marked read-only"
        );
        let read = guest.ok(&format!("head -c 16 /dev/{disk}"))?;
        ensure!(read == "Z".repeat(16), "{disk} reads {read:?}");
        let outcome = guest.io(&format!(
            "probe --file /dev/{disk} --op write --length 4096"
        ))?;
        ensure!(
            outcome.get("bytes").is_none(),
            "{disk} was written: {outcome}"
        );
        let discard = guest.run(&format!("/tools/blkdiscard /dev/{disk}"))?;
        ensure!(discard.code != 0, "{disk} was discarded");
    }
    // WRITE(10) and WRITE SAME(16) bypass the kernel's own check of /dev/sda. Expected: DATA PROTECT, WRITE PROTECTED.
    for command in [
        "2a 00 00 00 00 00 00 00 01 00",
        "93 00 00 00 00 00 00 00 00 00 00 00 00 01 00 00",
    ] {
        let outcome = guest
            .run(&format!("sg_raw -s 512 /dev/sg0 {command} </dev/zero 2>&1"))?
            .stdout;
        ensure!(
            outcome.contains("Data Protect") || outcome.contains("Write protected"),
            "{command}: {outcome}"
        );
    }
    ensure!(
        std::fs::read(rig.scratch.file("ro.raw"))? == content,
        "the file has changed"
    );
    Ok(())
}
