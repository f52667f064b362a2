//! Mirrors, backups and commits to block devices. If clients were promised that discarded blocks read as zeroes, they do so on the
//! device. Needs: root, losetup(8); `make unit` runs them. Takes: 10 s.
#![forbid(unsafe_code)]

use end_to_end::loop_device::Loop;
use end_to_end::{Context, IscsiSession, Result, Rig, ensure};
use serde_json::Value;
use std::os::unix::fs::FileExt;
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, Range, status};

const TARGET: &str = "iqn.2026-11.io.example:d";
const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;

/// A disk behind iSCSI, and a block device full of other data.
struct Bed {
    rig: Rig,
    portal: String,
    /// Detached after the daemon has ended.
    device: Loop,
    block: u64,
}

impl Bed {
    fn new(disk: &str, block: u32, device_bytes: u64) -> Result<Bed> {
        let mut device = None;
        let portal = end_to_end::rig::free_portal()?.to_string();
        let rig = Rig::prepared(|scratch, daemon| {
            let backing = scratch.file("device.img");
            std::fs::write(&backing, vec![0xee; device_bytes as usize])?;
            device = Some(Loop::with_sectors(&backing, block)?);
            let disk = disk.replace('@', &scratch.file("").display().to_string());
            Ok(daemon
                .disk(&format!("d={disk},block_size={block}"))
                .arguments(["--iscsi", &format!("{TARGET}=d"), "--portal", &portal])
                .arguments(["--demo-mode", "rw"]))
        })?;
        let device = device.context("no loop device")?;
        Ok(Bed {
            rig,
            portal,
            device,
            block: block.into(),
        })
    }

    fn session(&self) -> Result<IscsiSession> {
        IscsiSession::login(&self.portal, TARGET, 1)
    }

    fn ask(&self, words: &[&str]) -> Result<String> {
        self.rig.daemon.lunette(words)
    }

    fn copy(&self, kind: &str, more: &[&str]) -> Result<()> {
        let target = format!("file:{}", self.device.0);
        self.ask(&[&["disk", kind, "d", &target, "--wait"], more].concat())?;
        Ok(())
    }

    fn shown(&self) -> Result<Value> {
        Ok(control::get(&self.rig.daemon.control(), "/v1/disks/d")?)
    }

    /// WRITE (16) of one block.
    fn write(&self, session: &mut IscsiSession, offset: u64, byte: u8) -> Result<()> {
        let mut cdb = [0; 16];
        cdb[0] = 0x8a;
        cdb[2..10].copy_from_slice(&(offset / self.block).to_be_bytes());
        cdb[13] = 1;
        let data = vec![byte; self.block as usize];
        let done = session.command(&cdb, Some(&data), 0)?;
        ensure!(done.status == 0, "write at {offset}: {done:?}");
        Ok(())
    }

    /// UNMAP of one block.
    fn unmap(&self, session: &mut IscsiSession, offset: u64) -> Result<()> {
        let cdb = [0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0];
        let mut list = [0; 24];
        (list[1], list[3], list[19]) = (22, 16, 1);
        list[8..16].copy_from_slice(&(offset / self.block).to_be_bytes());
        let done = session.command(&cdb, Some(&list), 0)?;
        ensure!(done.status == 0, "unmap at {offset}: {done:?}");
        Ok(())
    }

    /// READ (16) of one block, compared with `byte`.
    fn reads(&self, session: &mut IscsiSession, offset: u64, byte: u8) -> Result<()> {
        let mut cdb = [0; 16];
        cdb[0] = 0x88;
        cdb[2..10].copy_from_slice(&(offset / self.block).to_be_bytes());
        cdb[13] = 1;
        let done = session.command(&cdb, None, self.block as u32)?;
        let found = done.data.first().copied();
        let is_right = done.data.iter().all(|found| *found == byte);
        ensure!(
            done.status == 0 && is_right,
            "at {offset}: {found:?}, not {byte}"
        );
        Ok(())
    }
}

#[test]
#[ignore = "as root: see the head of this file"]
fn disk_moves_to_a_block_device_with_its_promises() -> Result<()> {
    for (disk, block, device_bytes) in [
        ("file:@d.raw,size=16M", 512, SIZE),
        ("file:@d.raw,size=16M", 4096, SIZE),
        // Volumes are rounded up in size.
        ("file:@d.raw,size=16M", 512, SIZE + 4 * MIB),
        ("ram:16M", 512, SIZE),
    ] {
        let mut bed = Bed::new(disk, block, device_bytes)?;
        let mut session = bed.session()?;
        bed.write(&mut session, 0, 1)?;
        bed.write(&mut session, 2 * MIB, 2)?;
        bed.copy("backup", &[])?;
        let mut copy = vec![0; SIZE as usize];
        std::fs::File::open(&bed.device.0)?.read_exact_at(&mut copy, 0)?;
        let at = |offset: u64| copy[offset as usize];
        ensure!((at(0), at(MIB), at(2 * MIB)) == (1, 0, 2), "{disk}: backup");
        if disk.starts_with("ram") {
            let target = format!("file:{},cache=writethrough", bed.device.0);
            bed.ask(&["disk", "mirror", "d", &target, "--switch", "--wait"])?;
        } else {
            bed.copy("mirror", &["--switch"])?;
        }
        bed.unmap(&mut session, 0)?;
        bed.reads(&mut session, 0, 0)?;
        bed.reads(&mut session, 2 * MIB, 2)?;
        bed.reads(&mut session, 3 * MIB, 0)?;
        drop(session);
        bed.rig.daemon.kill()?;
        bed.rig.daemon.start_again()?;
        let shown = bed.shown()?;
        ensure!(shown["path"] == bed.device.0.as_str(), "{shown}");
        ensure!(shown["status"]["size"] == SIZE, "{shown}");
        let mut session = bed.session()?;
        bed.unmap(&mut session, 2 * MIB)?;
        bed.reads(&mut session, 2 * MIB, 0)?;
        drop(session);
        // Stops the daemon before its files are removed.
        drop(bed.rig);
    }
    Ok(())
}

#[test]
#[ignore = "as root: see the head of this file"]
fn block_device_that_is_too_small_or_in_use_is_no_target() -> Result<()> {
    let bed = Bed::new("file:@d.raw,size=16M", 512, SIZE - MIB)?;
    for (kind, hint) in [
        ("backup", "of at least that size"),
        ("mirror", "of at least that size"),
    ] {
        let refused = bed.copy(kind, &[]).err().context("it is too small")?;
        ensure!(refused.to_string().contains(hint), "{refused}");
    }
    let other = bed.rig.scratch.file("other.img");
    std::fs::write(&other, vec![0; SIZE as usize])?;
    let other = Loop::over(&other)?;
    let target = format!("file:{}", other.0);
    bed.ask(&["disk", "add", &format!("e={target}")])?;
    let refused = bed.ask(&["disk", "mirror", "d", &target]).err();
    let refused = refused.context("another disk has it")?.to_string();
    ensure!(refused.contains("in use"), "{refused}");
    drop(bed);
    Ok(())
}

#[test]
#[ignore = "as root: see the head of this file"]
fn block_device_is_committed_to_before_and_after_a_restart() -> Result<()> {
    let mut bed = Bed::new("file:@d.raw,size=16M", 512, SIZE + MIB)?;
    bed.copy("mirror", &["--switch"])?;
    for (nth, restarts) in [false, true, false].into_iter().enumerate() {
        let mark = 10 + nth as u8;
        let image = bed.rig.scratch.file(&format!("s{nth}.qcow2"));
        let image = image.display().to_string();
        bed.ask(&["disk", "snapshot", "d", "--to", &image])?;
        let mut session = bed.session()?;
        bed.write(&mut session, 5 * MIB, mark)?;
        bed.write(&mut session, 6 * MIB, mark)?;
        bed.unmap(&mut session, 6 * MIB)?;
        drop(session);
        if restarts {
            bed.rig.daemon.kill()?;
            bed.rig.daemon.start_again()?;
        }
        // A cancelled commit leaves the device free for the next one.
        bed.ask(&["disk", "commit", "d", "--speed", "1K"])?;
        bed.ask(&["job", "cancel", "d"])?;
        bed.ask(&["disk", "commit", "d", "--wait"])?;
        let shown = bed.shown()?;
        ensure!(shown["path"] == bed.device.0.as_str(), "{shown}");
        let mut session = bed.session()?;
        bed.reads(&mut session, 5 * MIB, mark)?;
        bed.reads(&mut session, 6 * MIB, 0)?;
    }
    drop(bed);
    Ok(())
}

/// Virtio-blk promises nothing about discarded blocks, so discards are passed to the device unchanged.
#[test]
#[ignore = "as root: see the head of this file"]
fn discards_of_virtio_clients_alone_are_not_turned_into_writes() -> Result<()> {
    let mut device = None;
    let rig = Rig::prepared(|scratch, daemon| {
        let backing = scratch.file("device.img");
        std::fs::write(&backing, vec![0xee; SIZE as usize])?;
        device = Some(Loop::over(&backing)?);
        let file = scratch.file("d.raw").display().to_string();
        let daemon = daemon.disk(&format!("d=file:{file},size=16M"));
        Ok(daemon.vhost_blk("d"))
    })?;
    let device = device.context("no loop device")?;
    let target = format!("file:{}", device.0);
    rig.daemon
        .lunette(&["disk", "mirror", "d", &target, "--switch", "--wait"])?;
    let shown: Value = control::get(&rig.daemon.control(), "/v1/disks/d")?;
    ensure!(shown["discard"].is_null(), "{shown}");
    ensure!(
        shown["status"]["stack"] == serde_json::json!(["file"]),
        "{shown}"
    );
    let mut front_end = FrontEnd::connect(&rig.socket("d"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 16, 1 << 20, Layout::Separate)?;
    let range = Range {
        sector: 0,
        sectors: 8,
        flags: 0,
    };
    ensure!(queue.discard(&[range])? == status::OK);
    drop(rig);
    Ok(())
}
