//! Linux's dm-multipath in a guest: groups disks into paths to one disk.

use std::collections::BTreeMap;

use vm::Guest;

use crate::{Context, Result, ensure};

/// Creates the multipath maps. Returns the disks of each map by identifier. Requires [`GuestBuilder::multipath`](vm::GuestBuilder::multipath).
pub fn multipath_maps(guest: &mut Guest) -> Result<BTreeMap<String, Vec<String>>> {
    // multipath accepts only disks in udev's database.
    let set_up_output = guest.ok("mkdir -p /run/udev/data /var/lib /etc/multipath; \
         for disk in /sys/block/sd*; do echo I:1 >/run/udev/data/b$(cat $disk/dev); done; \
         /tools/multipath -v3 2>&1; true")?;
    let table = guest.ok("/tools/dmsetup table --target multipath")?;
    ensure!(
        table.contains(": "),
        "multipath created no map:\n{set_up_output}"
    );
    let lines = table.lines().filter(|line| line.contains(": "));
    let maps = lines.map(|line| {
        let (name, parameters) = line.split_once(": ").context("no table")?;
        let numbers = parameters.split_whitespace().filter(|word| {
            let mut parts = word.split(':').map(|part| part.parse::<u32>().is_ok());
            parts.next() == Some(true) && parts.next() == Some(true)
        });
        let mut paths = Vec::new();
        for number in numbers {
            let link = guest.ok(&format!("basename $(readlink -f /sys/dev/block/{number})"))?;
            paths.push(link.trim().to_owned());
        }
        Ok((name.to_owned(), paths))
    });
    maps.collect()
}
