//! Live migration between two QEMUs, with one daemon for both sides or with one for each.
#![forbid(unsafe_code)]

use end_to_end::rig::kernel_is_content;
use end_to_end::{Context, DaemonBuilder, GuestBuilder, Result, Rig, Scratch, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, kind, status};

/// Guest with a virtio-blk and a virtio-scsi disk at these sockets.
fn machine([blk, scsi]: &[PathBuf; 2], properties: &str) -> GuestBuilder {
    GuestBuilder::new("migrating")
        .memory_mib(192)
        .vhost_user_blk_with(blk, 1, properties)
        .vhost_user_scsi(scsi, 1)
}

/// Migrates a guest back and forth under a verifying load, after a cancelled migration.
fn migrates(sides: &[[PathBuf; 2]; 2], properties: &str) -> Result<()> {
    let mut guest = machine(&sides[0], properties).boot()?;
    guest.wait_for_disks(&["vda", "sda"])?;
    let loads = ["vda", "sda"].map(|disk| {
        guest.start(&format!(
            "guest-agent soak --file /dev/{disk} --seed 1 --depth 4 --runtime 6"
        ))
    });
    let moment = Duration::from_millis(500);
    guest.cancel_migration(&machine(&sides[1], properties), moment)?;
    for side in [1, 0, 1, 0] {
        let migration = guest.migrate(&machine(&sides[side], properties))?;
        println!("{properties}: to side {side}: {migration:?}");
    }
    for load in loads {
        let report = guest.wait_ok(load?, Duration::from_secs(120))?;
        ensure!(report.contains("\"mismatches\":0"), "{report}");
    }
    kernel_is_content(&mut guest)?;
    guest.kill()
}

/// Option of a second export.
fn export(scratch: &Scratch, object: &str, name: &str) -> String {
    let socket = scratch.socket(&format!("{name}.sock"));
    format!("{object}:{},name={name}", socket.display())
}

#[test]
fn guest_migrates_between_exports_of_one_daemon() -> Result<()> {
    let mut rig = Rig::prepared(|scratch, daemon| {
        for file in ["d.raw", "s.raw"] {
            std::fs::write(scratch.file(file), vec![0; 32 << 20])?;
        }
        let mut daemon = daemon.disk("d=file:d.raw").disk("s=file:s.raw");
        for side in 0..2 {
            let (blk, scsi) = (format!("b{side}"), format!("c{side}"));
            daemon = daemon
                .arguments(["--vhost-blk", &export(scratch, "d", &blk)])
                .vhost_scsi(&scsi)
                .lun(&format!("{scsi}/0:0=s"));
        }
        Ok(daemon.arguments(["--workers", "2"]))
    })?;
    let sides = [["b0", "c0"], ["b1", "c1"]].map(|names| names.map(|name| rig.socket(name)));
    migrates(&sides, "packed=off")?;
    let log = rig.daemon.process().log();
    ensure!(!log.contains("session ended"), "{log}");
    rig.daemon.process().check_running()
}

/// Options of a disk that two daemons serve in turns.
fn shared_disk(file: &Path, name: &str, number: u8) -> String {
    let kind = match file.extension() {
        Some(extension) if extension == "qcow2" => "image",
        _ => "file",
    };
    format!(
        "{name}={kind}:{},lock=while-active,serial=SHARED-{number},wwn=500000000000000{number}",
        file.display()
    )
}

fn create_image(path: &Path, size: &str) -> Result<()> {
    let program = vm::lunette_program(vm::Profile::Dev)?;
    let made = Command::new(program)
        .args(["image", "create"])
        .arg(path)
        .arg(size)
        .output()?;
    let stderr = String::from_utf8_lossy(&made.stderr);
    ensure!(made.status.success(), "{stderr}");
    Ok(())
}

/// Starts two daemons with the same raw file and the same image.
fn two_daemons() -> Result<(tempfile::TempDir, Rig, Rig)> {
    let folder = tempfile::tempdir()?;
    let files = ["d.raw", "s.qcow2"].map(|file| folder.path().join(file));
    std::fs::write(&files[0], vec![0; 32 << 20])?;
    create_image(&files[1], "32M")?;
    let describe = |daemon: DaemonBuilder| {
        daemon
            .disk(&shared_disk(&files[0], "d", 1))
            .disk(&shared_disk(&files[1], "s", 2))
            .vhost_blk("d")
            .vhost_blk("s")
            .vhost_scsi("c")
            .lun("c/0:0=s")
    };
    let first = Rig::new(describe)?;
    let second = first.beside(describe)?;
    Ok((folder, first, second))
}

#[test]
fn guest_migrates_between_two_daemons() -> Result<()> {
    let (_folder, first, second) = two_daemons()?;
    let sides = [&first, &second].map(|rig| ["d", "c"].map(|name| rig.socket(name)));
    migrates(&sides, "packed=on")?;
    drop(second);
    Ok(())
}

/// The daemon with running queues has the lock of a file or an image. Requests of the other one wait.
#[test]
fn lock_follows_the_queues_of_two_daemons() -> Result<()> {
    let (_folder, first, second) = two_daemons()?;
    lock_follows_the_queues("d", &first, &second)?;
    lock_follows_the_queues("s", &first, &second)?;
    drop(second);
    Ok(())
}

fn lock_follows_the_queues(export: &str, first: &Rig, second: &Rig) -> Result<()> {
    const LIMIT: Duration = Duration::from_secs(30);
    let connect = |rig: &Rig| FrontEnd::connect(&rig.socket(export), &Options::default());
    let mut ends = [connect(first)?, connect(second)?];
    let start = |end: &mut FrontEnd| {
        BlkQueue::start(end, 0, &QueueOptions::default(), 4, 4096, Layout::Separate)
    };
    let mut queue = start(&mut ends[0])?;
    for round in 1..4u8 {
        ensure!(queue.write(0, &[round; 4096])? == status::OK);
        let (here, there) = (usize::from(round + 1) % 2, usize::from(round) % 2);
        let mut next = start(&mut ends[there])?;
        let slot = next.take().context("a free slot")?;
        ensure!(next.submit(slot, kind::IN, 0, 0, 4096));
        next.publish();
        let waits = next.wait_for(Duration::from_millis(300));
        ensure!(
            matches!(waits, Err(vhost_frontend::Error::Timeout(_))),
            "{waits:?}"
        );
        let other = if there == 1 { second } else { first };
        let shown = other.daemon.ask(&["status"])?.stdout;
        let shown = String::from_utf8(shown)?;
        ensure!(
            shown.contains("another process has locked the file"),
            "{shown}"
        );
        ends[here].stop_queue(0)?;
        let done = next.wait_for(LIMIT)?;
        let mut read = [0; 4096];
        next.data(slot).read(0, &mut read);
        ensure!(done.status == status::OK && read == [round; 4096]);
        next.release(slot);
        queue = next;
    }
    Ok(())
}
