//! Holes of Ceph RBD images in GET LBA STATUS, and backups to Ceph, against a real cluster.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use end_to_end::ceph::Ceph;
use end_to_end::files::recipe;
use end_to_end::{Context, IscsiSession, Result, Rig, ensure};

const TARGET: &str = "iqn.2026-11.org.example:rbd";

/// GET LBA STATUS from a block on. Returns first block, number of blocks and provisioning status of each descriptor.
fn lba_status(session: &mut IscsiSession, lba: u16) -> Result<Vec<(u64, u32, u8)>> {
    let [high, low] = lba.to_be_bytes();
    let cdb = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, high, low, 0, 0, 1, 8, 0, 0];
    let done = session.command(&cdb, None, 264)?;
    ensure!(done.status == 0, "{done:?}");
    let list = done.data.get(8..).context("no descriptors")?;
    let field = |one: &[u8]| -> Option<(u64, u32, u8)> {
        let lba = u64::from_be_bytes(one.get(..8)?.try_into().ok()?);
        let blocks = u32::from_be_bytes(one.get(8..12)?.try_into().ok()?);
        Some((lba, blocks, *one.get(12)?))
    };
    list.chunks_exact(16)
        .map(|one| field(one).context("a short descriptor"))
        .collect()
}

/// WRITE(10) of eight blocks.
fn write(session: &mut IscsiSession, lba: u16, byte: u8) -> Result<()> {
    let [high, low] = lba.to_be_bytes();
    let cdb = [0x2a, 0, 0, 0, high, low, 0, 0, 8, 0];
    let done = session.command(&cdb, Some(&[byte; 4096]), 0)?;
    ensure!(done.status == 0, "{done:?}");
    Ok(())
}

/// Runs the recipe of docs/backup.md for backups to Ceph. The disk has 4 KiB of the byte 7 at 8 MiB and at 20 MiB.
fn recipe_to_ceph(ceph: &Ceph, rig: &Rig, session: &mut IscsiSession) -> Result<()> {
    let document = include_str!("../../docs/backup.md");
    let folder = rig.scratch.files().display().to_string();
    for (part, byte) in [("rbd create", 8), ("--since ceph", 9), ("restored=", 9)] {
        let commands = recipe(document, part)?
            .replace("backup/d0", "rbd/copy")
            .replace("20G", "64M")
            .replace("$(date +%F)", "2026-11-24")
            .replace("/vm", &folder);
        for line in commands.lines() {
            let words = line.split_whitespace().map(|word| match word {
                "d0" => "a".to_owned(),
                word if word.contains("rbd:") => format!("{word},{}", ceph.connection()),
                word => word.to_owned(),
            });
            let words: Vec<String> = words.collect();
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            match words.as_slice() {
                ["rbd", words @ ..] => ceph.rbd(words).map(drop)?,
                ["lunette", words @ ..] => rig.daemon.lunette(words).map(drop)?,
                _ => {}
            }
        }
        write(session, 0x4000, byte)?;
    }
    let monday = format!("{folder}/monday.raw");
    ceph.rbd(&["export", "rbd/copy@2026-11-23", &monday])?;
    for (file, byte) in [("monday.raw", 7), ("d0.raw", 8)] {
        let content = std::fs::read(rig.scratch.file(file))?;
        let found = (content.len(), content[8 << 20], content[20 << 20]);
        ensure!(found == (64 << 20, byte, 7), "{file}: {found:?}");
    }
    let restored: serde_json::Value = control::get(&rig.daemon.control(), "/v1/disks/restored")?;
    ensure!(restored["status"]["state"] == "ready", "{restored}");
    Ok(())
}

/// A blocking call lists the holes. The worker must serve other sessions meanwhile, even while the cluster is unreachable.
#[test]
fn holes_of_an_image_are_reported_without_delay() -> Result<()> {
    const MAPPED: u8 = 0;
    const DEALLOCATED: u8 = 1;
    const OTHER: &str = "iqn.2026-11.org.example:ram";
    let mut ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/a", "--size", "64M"])?;
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk(&format!("a={}", ceph.disk("rbd/a")))
            .disk("r=ram:16M")
            .arguments(["--workers", "1", "--iscsi", &format!("{TARGET}=a")])
            .arguments(["--iscsi", &format!("{OTHER}=r")])
            .arguments(["--portal", "127.0.0.1:0", "--demo-mode", "rw"])
    })?;
    let portal = rig.iscsi_portal(TARGET)?;
    let mut session = IscsiSession::login(&portal, TARGET, 1)?;
    ensure!(lba_status(&mut session, 0)? == [(0, 131_072, DEALLOCATED)]);
    // 4 KiB at 8 MiB and at 20 MiB.
    for lba in [0x4000_u16, 0xa000] {
        write(&mut session, lba, 7)?;
    }
    let extents = lba_status(&mut session, 0)?;
    let expected = [
        (0, 0x4000, DEALLOCATED),
        (0x4000, 8, MAPPED),
        (0x4008, 0x5ff8, DEALLOCATED),
        (0xa000, 8, MAPPED),
        (0xa008, 0x1_5ff8, DEALLOCATED),
    ];
    ensure!(extents == expected, "{extents:x?}");
    ensure!(lba_status(&mut session, 0x4004)?.first() == Some(&(0x4004, 4, MAPPED)));

    recipe_to_ceph(&ceph, &rig, &mut session)?;

    // While the OSD is down the list waits, and the worker does not.
    let mut other = IscsiSession::login(&rig.iscsi_portal(OTHER)?, OTHER, 2)?;
    ceph.kill_osd();
    let extents = std::thread::scope(|scope| {
        let waits = scope.spawn(|| lba_status(&mut session, 0));
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(1) {
            ensure!(lba_status(&mut other, 0)? == [(0, 32_768, DEALLOCATED)]);
        }
        ensure!(!waits.is_finished(), "the list of a cluster that is away");
        ceph.start_osd()?;
        waits.join().ok().context("a thread panicked")
    })?;
    // If the list exceeds the time limit of librbd's calls, the command fails and must be repeated.
    let extents = extents.or_else(|_| lba_status(&mut session, 0))?;
    ensure!(extents == expected, "{extents:x?}");
    Ok(())
}
