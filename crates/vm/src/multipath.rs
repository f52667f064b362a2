//! Linux's dm-multipath in a guest: groups disks into paths to one disk.

use crate::guest::Guest;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;

/// Without udev, `multipath` reads VPD page 83h from the kernel and prefers the same designators. Disks with a single path also have a
/// map.
pub(crate) const MULTIPATH_CONF: &str = "defaults {
    uid_attribute \"\"
    find_multipaths no
    user_friendly_names no
    detect_prio no
    detect_checker no
    prio const
    path_checker tur
    no_path_retry fail
    skip_kpartx yes
}
";

impl Guest {
    /// Creates the multipath maps. Returns the disks of each map by identifier. Requires [`crate::GuestBuilder::multipath`].
    pub fn multipath_maps(&mut self) -> Result<BTreeMap<String, Vec<String>>> {
        // multipath accepts only disks in udev's database.
        let said = self.ok("mkdir -p /run/udev/data /var/lib /etc/multipath; \
             for disk in /sys/block/sd*; do echo I:1 >/run/udev/data/b$(cat $disk/dev); done; \
             /tools/multipath -v3 2>&1; true")?;
        let table = self.ok("/tools/dmsetup table --target multipath")?;
        ensure!(table.contains(": "), "multipath made no map:\n{said}");
        let lines = table.lines().filter(|line| line.contains(": "));
        let maps = lines.map(|line| {
            let (name, parameters) = line.split_once(": ").context("no table")?;
            let numbers = parameters.split_whitespace().filter(|word| {
                let mut parts = word.split(':').map(|part| part.parse::<u32>().is_ok());
                parts.next() == Some(true) && parts.next() == Some(true)
            });
            let mut paths = Vec::new();
            for number in numbers {
                let link = self.ok(&format!("basename $(readlink -f /sys/dev/block/{number})"))?;
                paths.push(link.trim().to_owned());
            }
            Ok((name.to_owned(), paths))
        });
        maps.collect()
    }
}
