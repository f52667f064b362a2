//! Creates, fills, remounts and checks a file system in a guest. Reads commands from documents.

use crate::{Context, Guest, Result, ensure};

/// Returns the first block of commands in a document that contains a text.
pub fn recipe<'a>(document: &'a str, part: &str) -> Result<&'a str> {
    let blocks = document.split("\n```").skip(1).step_by(2);
    let mut found = blocks.filter(|block| block.contains(part));
    let block = found.next().with_context(|| format!("no {part}"))?;
    let (_language, text) = block.split_once('\n').context("an empty block")?;
    Ok(text)
}

/// Creates a file system on `disk`, fills files in it, remounts and checks them.
pub fn file_system_round_trip(guest: &mut Guest, disk: &str) -> Result<()> {
    guest.ok(&format!(
        "/tools/mke2fs -q -t ext4 /dev/{disk} && mount -t ext4 /dev/{disk} /mnt && truncate -s 16M /mnt/direct /mnt/cached && mkdir /mnt/tree && \
         for i in $(seq 200); do echo line $i > /mnt/tree/file$i; done"
    ))?;
    guest.io_ok("fill --file /mnt/direct --seed 11 --writes 2000 --bs 4096")?;
    guest.io_ok("fill --file /mnt/cached --seed 12 --writes 2000 --bs 4096 --buffered")?;
    guest.ok(&format!(
        "umount /mnt && /tools/e2fsck -fn /dev/{disk} && mount -t ext4 /dev/{disk} /mnt"
    ))?;
    file_system_check(guest)
}

/// Checks the files of `file_system_round_trip`.
pub fn file_system_check(guest: &mut Guest) -> Result<()> {
    guest.io_ok("check --file /mnt/direct --seed 11 --writes 2000 --bs 4096")?;
    guest.io_ok("check --file /mnt/cached --seed 12 --writes 2000 --bs 4096 --buffered")?;
    let lines = guest.ok("cat /mnt/tree/* | wc -l; cat /mnt/tree/file137")?;
    ensure!(lines == "200\nline 137\n", "the small files hold {lines:?}");
    Ok(())
}
