//! Two daemons in one guest with dm-multipath: disks of one name stay two disks, and a write meant for one never lands on the other.
//!
//! Needs multipath-tools and dmsetup, which `scripts/setup test` unpacks; takes about 10 seconds.
#![forbid(unsafe_code)]

use end_to_end::{DaemonBuilder, GuestBuilder, Result, Rig, Scratch, bail, ensure};

const MARK: &str = "written to the disk of the second daemon";

/// Both daemons have the same words: a disk `d0`, and one that says to be the other's.
fn described(builder: DaemonBuilder) -> DaemonBuilder {
    builder
        .disk("d0=ram:64M")
        .disk("same=ram:64M,wwn=3a5b000000000001")
        .vhost_scsi("c")
        .lun("c/0:0=d0")
        .lun("c/1:0=same")
}

#[test]
fn disks_of_one_name_in_two_daemons_stay_two_disks_under_multipath() -> Result<()> {
    let first = Rig::new(described)?;
    let scratch = Scratch::new()?;
    let mut second = described(DaemonBuilder::new(&scratch)).start()?;
    let mut guest = GuestBuilder::new("multipath")
        .cpus(2)
        .multipath()
        .vhost_user_scsi(&first.socket("c"), 1)
        .vhost_user_scsi(&scratch.socket("c.sock"), 1)
        .boot()?;
    guest.wait_for_disks(&["sda", "sdb", "sdc", "sdd"])?;
    let (one, other) = (guest.scsi_disk(0, 0, 0)?, guest.scsi_disk(1, 0, 0)?);
    let maps = guest.multipath_maps()?;
    let paths: Vec<usize> = maps.values().map(Vec::len).collect();
    ensure!(
        maps.len() == 3 && paths.iter().filter(|paths| **paths == 2).count() == 1,
        "d0 of either daemon is a map with one path, and the disks of one wwn are one with two: {maps:?}"
    );
    let map_of = |disk: &String| {
        let found = maps.iter().find(|(_, paths)| paths.contains(disk));
        found.map(|(map, paths)| (map.clone(), paths.len()))
    };
    let (Some((_, 1)), Some((second_map, 1))) = (map_of(&one), map_of(&other)) else {
        bail!("{one} and {other} are paths to one disk: {maps:?}");
    };
    // Through the maps, as who mounts them does.
    let device =
        |map: &str| format!("/dev/$(/tools/dmsetup info -c --noheadings -o blkdevname {map})");
    guest.ok(&format!(
        "echo '{MARK}' | dd of={} bs=4k conv=sync oflag=direct",
        device(&second_map)
    ))?;
    let read =
        |disk: &str| format!("dd if={disk} bs=4k count=1 iflag=direct 2>/dev/null | tr -d '\\000'");
    ensure!(guest.ok(&read(&format!("/dev/{other}")))?.trim() == MARK);
    ensure!(guest.ok(&read(&format!("/dev/{one}")))?.trim().is_empty());
    guest.kill()?;
    second.kill()
}
