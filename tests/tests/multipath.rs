//! dm-multipath in a guest. Disks of one name in two daemons stay separate, and a write to one never reaches the other. Two iSCSI
//! portals are two paths to one disk, and the loss of one path causes no error.
//!
//! Needs multipath-tools, dmsetup and open-iscsi, which `scripts/setup test` unpacks; takes about 40 seconds.
#![forbid(unsafe_code)]

use end_to_end::multipath::multipath_maps;
use end_to_end::open_iscsi;
use end_to_end::proxy::Proxy;
use end_to_end::rig::free_portal;
use end_to_end::{DaemonBuilder, GuestBuilder, Result, Rig, Scratch, bail, ensure};

const MARK: &str = "written to the disk of the second daemon";

/// Adds the same disks to both daemons: `d0`, and `same` with a common WWN.
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
    let maps = multipath_maps(&mut guest)?;
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
    // Writes through the multipath maps.
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

#[test]
fn path_through_a_portal_is_lost_under_load_without_an_error() -> Result<()> {
    const TARGET: &str = "iqn.2026-11.org.example:t0";
    let address = free_portal()?;
    let portal = address.to_string();
    let mut rig = Rig::new(|daemon| {
        let target = format!("{TARGET}=d");
        daemon
            .disk("d=ram:64M")
            .arguments(["--iscsi", &target])
            .arguments(["--portal", &portal, "--demo-mode", "rw"])
    })?;
    rig.iscsi_portal(TARGET)?;
    let (first, second) = (Proxy::start(address)?, Proxy::start(address)?);
    let mut guest = GuestBuilder::new("paths")
        .cpus(2)
        .initiator()
        .multipath()
        .boot()?;
    open_iscsi::start(&mut guest)?;
    open_iscsi::discover(&mut guest, first.address())?;
    // Time in seconds after which a lost path fails its commands.
    let settings = [("node.session.timeo.replacement_timeout", "2")];
    open_iscsi::login(&mut guest, first.address(), TARGET, &settings)?;
    open_iscsi::login(&mut guest, second.address(), TARGET, &settings)?;
    guest.wait_for_disks(&["sda", "sdb"])?;
    let maps = multipath_maps(&mut guest)?;
    ensure!(
        maps.len() == 1 && maps.values().all(|paths| paths.len() == 2),
        "two portals are two paths to one disk: {maps:?}"
    );
    let map = maps.keys().next().cloned().unwrap_or_default();
    let name = format!("/tools/dmsetup info -c --noheadings -o blkdevname {map}");
    let device = format!("/dev/{}", guest.ok(&name)?.trim());
    // Writes each of 60 places at least once, and continues until a path has failed.
    let load = guest.start(&format!(
        "dd if=/dev/urandom of=/tmp/data bs=64k count=16 2>/dev/null
        n=0
        until [ $n -ge 60 ] && [ -e /tmp/failed ]; do
            dd if=/tmp/data of={device} bs=64k seek=$((n % 60 * 16)) oflag=direct 2>/dev/null || exit 1
            n=$((n + 1))
            echo $n >/tmp/written
        done"
    ))?;
    guest.ok("until [ -s /tmp/written ]; do sleep 0.1; done")?;
    drop(first);
    // The kernel shows a failed path as F.
    guest.run_within_limit(
        std::time::Duration::from_secs(60),
        &format!("until /tools/dmsetup status {map} | grep -q ' F '; do sleep 0.1; done; touch /tmp/failed"),
    )?;
    guest.wait_ok(load, std::time::Duration::from_secs(120))?;
    guest.ok(&format!(
        "n=0; while [ $n -lt 60 ]; do dd if={device} bs=64k skip=$((n * 16)) count=16 iflag=direct 2>/dev/null | cmp - /tmp/data || exit 1; n=$((n + 1)); done"
    ))?;
    guest.kill()
}
