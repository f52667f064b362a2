//! Incremental backups of disks in use copy exactly the changed data, through kills, restarts, snapshots and growth. Checked by
//! qemu-img. Needs: qemu-img. Takes: 20 s.
#![forbid(unsafe_code)]

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use control::objects::{Bitmap, Job};
use end_to_end::{Context, DaemonBuilder, Result, Rig, Scratch, Successor, ensure};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, Range, status};

const SOON: Duration = Duration::from_secs(60);
/// Bytes per bit of a bitmap.
const CHUNK: u64 = 64 << 10;
const SIZE: u64 = 64 << 20;

fn qemu_img(folder: &Path, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("qemu-img");
    let ran = command.args(arguments).current_dir(folder).output();
    let ran = ran.context("cannot run qemu-img; hint: apt-get install qemu-utils")?;
    let (stdout, stderr) = (
        String::from_utf8_lossy(&ran.stdout),
        String::from_utf8_lossy(&ran.stderr),
    );
    ensure!(ran.status.success(), "{arguments:?}: {stdout}{stderr}");
    Ok(stdout.into_owned())
}

/// Connects a driver to the disk, runs `work` and disconnects.
fn driver(rig: &Rig, work: impl FnOnce(&mut BlkQueue) -> Result<()>) -> Result<()> {
    let mut front_end = FrontEnd::connect(&rig.socket("d0"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 16, 1 << 20, Layout::Separate)?;
    work(&mut queue)
}

/// Writes the last 1024 bytes of each chunk.
fn write(rig: &Rig, chunks: &[u64], byte: u8) -> Result<()> {
    driver(rig, |queue| {
        for chunk in chunks {
            let written = queue.write((chunk + 1) * CHUNK - 1024, &[byte; 1024])?;
            ensure!(written == status::OK, "chunk {chunk}: status {written}");
        }
        Ok(())
    })
}

fn one_disk() -> Result<Rig> {
    Rig::prepared(|scratch, daemon| Ok(with_disk(scratch, daemon)))
}

fn with_disk(scratch: &Scratch, daemon: DaemonBuilder) -> DaemonBuilder {
    let file = scratch.file("d0.raw");
    let disk = format!("d0=file:{},size={SIZE},cache=writeback", file.display());
    daemon
        .disk(&disk)
        .vhost_blk("d0")
        .arguments(["--workers", "2"])
}

fn image(rig: &Rig, name: &str) -> String {
    let path = rig.scratch.file(name);
    format!("image:{},cache=writeback", path.display())
}

/// Runs the incremental backup `daily` and returns the number of copied bytes.
fn backup(rig: &Rig, target: &str) -> Result<u64> {
    let words = ["disk", "backup", "d0", target, "--incremental", "daily"];
    let report = rig
        .daemon
        .lunette(&[&words[..], &["--wait", "--json"]].concat())?;
    let job: Job = serde_json::from_str(&report)?;
    Ok(job.copied)
}

fn refused(rig: &Rig, target: &str, expected: &str) -> Result<()> {
    let words = ["disk", "backup", "d0", target, "--incremental", "daily"];
    let output = rig.daemon.ask(&words)?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(
        !output.status.success() && stderr.contains(expected),
        "{target}: {stderr}"
    );
    Ok(())
}

fn bitmaps(rig: &Rig) -> Result<Vec<Bitmap>> {
    let report = rig.daemon.lunette(&["disk", "bitmap", "list", "--json"])?;
    Ok(serde_json::from_str(&report)?)
}

fn is_dirty(rig: &Rig, chunks: u64) -> Result<()> {
    let all = bitmaps(rig)?;
    ensure!(all.len() == 1, "{all:?}");
    let one = &all[0];
    ensure!(
        one.dirty == chunks * CHUNK && one.reason.is_none(),
        "{one:?}"
    );
    Ok(())
}

/// Writes to the file of a stopped daemon's disk like another program. The next daemon detects it.
fn write_is_detected(rig: &mut Rig) -> Result<()> {
    let file = rig.scratch.file("d0.raw");
    let file = std::fs::File::options().write(true).open(file)?;
    std::os::unix::fs::FileExt::write_all_at(&file, &[9; 512], 200 * CHUNK)?;
    rig.daemon.start_again()?;
    let reason = bitmaps(rig)?.remove(0).reason;
    ensure!(
        reason
            .as_deref()
            .is_some_and(|why| why.contains("not served")),
        "{reason:?}"
    );
    Ok(())
}

fn same(rig: &Rig, disk: &str, copy: &str) -> Result<()> {
    let folder = rig.scratch.files();
    qemu_img(folder, &["compare", "-U", disk, copy])?;
    Ok(())
}

#[test]
fn only_changes_are_copied_through_kills() -> Result<()> {
    let mut rig = one_disk()?;
    let folder = rig.scratch.files().to_owned();
    write(&rig, &[0, 1, 100, 1023], 1)?;
    let copied = backup(&rig, &image(&rig, "monday.qcow2"))?;
    ensure!(copied > 0, "nothing was copied");
    is_dirty(&rig, 0)?;
    same(&rig, "d0.raw", "monday.qcow2")?;

    write(&rig, &[100, 500], 2)?;
    rig.daemon.kill()?;
    rig.daemon.start_again()?;
    is_dirty(&rig, 2)?;
    driver(&rig, |queue| {
        let zeroes = Range {
            sector: 0,
            sectors: 8,
            flags: 0,
        };
        ensure!(queue.write_zeroes(&[zeroes])? == status::OK);
        let hole = Range {
            sector: 1023 * CHUNK / 512,
            sectors: (CHUNK / 512) as u32,
            flags: 0,
        };
        ensure!(queue.discard(&[hole])? == status::OK);
        Ok(())
    })?;
    is_dirty(&rig, 4)?;
    qemu_img(&folder, &["create", "-f", "qcow2", "other.qcow2", "64M"])?;
    refused(&rig, &image(&rig, "other.qcow2"), "monday.qcow2")?;
    let copied = backup(&rig, &image(&rig, "tuesday.qcow2"))?;
    ensure!(copied <= 4 * CHUNK, "{copied} bytes of four chunks");
    is_dirty(&rig, 0)?;
    same(&rig, "d0.raw", "tuesday.qcow2")?;
    let info = qemu_img(&folder, &["info", "-U", "tuesday.qcow2"])?;
    ensure!(info.contains("monday.qcow2"), "{info}");
    qemu_img(&folder, &["check", "tuesday.qcow2"])?;

    // A second backup to the same target updates it.
    write(&rig, &[7], 3)?;
    ensure!(rig.daemon.stop(SOON)?.success());
    rig.daemon.start_again()?;
    is_dirty(&rig, 1)?;
    let copied = backup(&rig, &image(&rig, "tuesday.qcow2"))?;
    ensure!(copied > 0 && copied <= CHUNK, "{copied} bytes of one chunk");
    same(&rig, "d0.raw", "tuesday.qcow2")?;

    ensure!(rig.daemon.stop(SOON)?.success());
    write_is_detected(&mut rig)?;
    ensure!(backup(&rig, &image(&rig, "wednesday.qcow2"))? > 4 * CHUNK);
    same(&rig, "d0.raw", "wednesday.qcow2")?;
    is_dirty(&rig, 0)?;

    rig.daemon
        .lunette(&["disk", "bitmap", "remove", "d0", "daily"])?;
    ensure!(bitmaps(&rig)?.is_empty());
    let gone = rig
        .daemon
        .ask(&["disk", "bitmap", "remove", "d0", "daily"])?;
    ensure!(!gone.status.success());
    Ok(())
}

/// Writes at random offsets until `is_over` is set. Returns the number of writes.
fn scatter(rig: &Rig, is_over: &AtomicBool) -> Result<u64> {
    let mut front_end = FrontEnd::connect(&rig.socket("d0"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 16, 1 << 20, Layout::Separate)?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut count = 0;
    while !is_over.load(Ordering::Relaxed) {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let offset = (state >> 20) % (SIZE / 4096) * 4096;
        let written = queue.write(offset, &[(state >> 40) as u8; 4096])?;
        ensure!(written == status::OK, "byte {offset}: status {written}");
        count += 1;
        // Slow enough that some chunks are clean at the end of a backup.
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(count)
}

/// The disk gets a snapshot, moves to another file and grows during the backups. Its bitmap remains valid.
#[test]
fn nothing_is_missed_while_clients_write() -> Result<()> {
    let mut rig = one_disk()?;
    let folder = rig.scratch.files().to_owned();
    let target = image(&rig, "copy.qcow2");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        let writer = scope.spawn(|| scatter(&rig, &is_over));
        let path = |name: &str| rig.scratch.file(name).display().to_string();
        let worked = (|| -> Result<()> {
            for _ in 0..5 {
                backup(&rig, &target)?;
            }
            rig.daemon
                .lunette(&["disk", "snapshot", "d0", "--to", &path("overlay.qcow2")])?;
            backup(&rig, &target)?;
            let moved = image(&rig, "moved.qcow2");
            rig.daemon
                .lunette(&["disk", "mirror", "d0", &moved, "--switch", "--wait"])?;
            backup(&rig, &target)?;
            // A cancelled backup leaves its remaining data to the next one.
            let words = [
                "disk",
                "backup",
                "d0",
                &target,
                "--incremental",
                "daily",
                "--speed",
                "1M",
            ];
            rig.daemon.lunette(&words)?;
            rig.daemon.wait_for_requests("d0", 20)?;
            rig.daemon.lunette(&["job", "cancel", "d0"])?;
            Ok(())
        })();
        let more = rig.daemon.wait_for_requests("d0", 20);
        is_over.store(true, Ordering::Relaxed);
        ensure!(writer.join().expect("the writer does not panic")? > 0);
        worked.and(more)
    })?;
    rig.daemon.kill()?;
    rig.daemon.start_again()?;
    let dirty = bitmaps(&rig)?.remove(0);
    ensure!(
        dirty.dirty > 0 && dirty.dirty < SIZE && dirty.reason.is_none(),
        "{dirty:?}"
    );
    let copied = backup(&rig, &target)?;
    ensure!(
        copied <= dirty.dirty,
        "{copied} bytes copied, of {}",
        dirty.dirty
    );
    same(&rig, "moved.qcow2", "copy.qcow2")?;

    rig.daemon.lunette(&["disk", "resize", "d0", "65M"])?;
    is_dirty(&rig, 16)?;
    refused(&rig, &target, "bytes")?;
    write(&rig, &[3, 1030], 5)?;
    let larger = image(&rig, "larger.qcow2");
    backup(&rig, &larger)?;
    same(&rig, "moved.qcow2", "larger.qcow2")?;
    ensure!(rig.daemon.stop(SOON)?.success());
    qemu_img(&folder, &["check", "larger.qcow2"])?;
    Ok(())
}

/// A service manager stores the sockets of a daemon that stops, as for a restart.
#[test]
fn write_while_the_service_is_stopped_is_detected() -> Result<()> {
    let mut manager = None;
    let mut rig = Rig::prepared(|scratch, daemon| {
        let path = scratch.socket("notify");
        manager = Some(UnixDatagram::bind(&path)?);
        let variable = format!("NOTIFY_SOCKET={}", path.display());
        Ok(with_disk(scratch, daemon.under(&["env", &variable])))
    })?;
    let manager = manager.context("no service manager")?;
    manager.set_nonblocking(true)?;
    let stop = |rig: &mut Rig| -> Result<()> {
        ensure!(rig.daemon.stop(SOON)?.success());
        let (mut bytes, mut messages) = ([0; 512], String::new());
        // This closes the sockets, which the next daemon replaces.
        while let Ok(length) = manager.recv(&mut bytes) {
            messages.push_str(&String::from_utf8_lossy(&bytes[..length]));
        }
        ensure!(messages.contains("FDNAME=handover.export"), "{messages}");
        Ok(())
    };
    backup(&rig, &image(&rig, "full.qcow2"))?;
    write(&rig, &[1], 1)?;
    is_dirty(&rig, 1)?;
    stop(&mut rig)?;
    rig.daemon.start_again()?;
    is_dirty(&rig, 1)?;
    stop(&mut rig)?;
    write_is_detected(&mut rig)
}

/// After an upgrade the new daemon continues the recorded bitmaps.
#[test]
fn bitmaps_continue_after_an_upgrade() -> Result<()> {
    let mut rig = one_disk()?;
    write(&rig, &[1], 1)?;
    backup(&rig, &image(&rig, "full.qcow2"))?;
    write(&rig, &[2], 2)?;
    let _successor = Successor::of(&rig.daemon, &["upgrade"])?;
    rig.daemon.process().wait(SOON).ok();
    is_dirty(&rig, 1)?;
    write(&rig, &[3], 3)?;
    is_dirty(&rig, 2)?;
    backup(&rig, &image(&rig, "next.qcow2"))?;
    same(&rig, "d0.raw", "next.qcow2")?;
    Ok(())
}
