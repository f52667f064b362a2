//! `make bench-images`: a qcow2 image compared with a raw file and with qemu-storage-daemon on an image of the same shape, in turns, as
//! one table.
//!
//! All clusters are allocated before. Files use direct I/O. Both daemons run on one CPU.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use latency::Clock;

use super::served::{CASES, Served, fill_all, measure};
use super::{BLK, PEER, RAW, SCSI, TableOptions, chosen};
use crate::children::{Daemon, Scratch, Start};
use crate::run::Progress;

const SIZE: &str = "1G";

/// Runs the cases. Returns the table as text for a terminal and for a file of notes.
pub fn image_table(
    options: &TableOptions,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<String> {
    chosen(options, CASES.iter().map(|(name, _)| *name))?;
    std::fs::create_dir_all(&options.place)
        .with_context(|| format!("cannot create {}", options.place.display()))?;
    let disks = Scratch::new("lunette-bench", &options.place)?;
    let sockets = Scratch::for_sockets("li")?;
    progress.print("starting the daemons and filling their images");
    let mut daemons = vec![lunette(options, disks.path(), sockets.path())?];
    match qemu(options, disks.path(), sockets.path()) {
        Ok(peer) => daemons.push(peer),
        Err(error) => progress.print(&format!(
            "without qemu-storage-daemon (Debian: apt-get install qemu-system-common): {error:#}"
        )),
    }
    fill_all(&daemons, &Clock::new(), interrupted)?;
    measure(&daemons, options, interrupted, progress)
}

/// Runs a command that creates an image.
fn run(command: &mut Command) -> Result<()> {
    let made = command.output();
    let made = made.with_context(|| format!("cannot run {command:?}"))?;
    let wrong = String::from_utf8_lossy(&made.stderr).into_owned();
    ensure!(made.status.success(), "{command:?}: {wrong}");
    Ok(())
}

fn lunette(options: &TableOptions, disks: &Path, sockets: &Path) -> Result<Served> {
    let image = disks.join("lunette.qcow2");
    let mut create = Command::new(&options.program);
    run(create.args(["image", "create"]).arg(&image).arg(SIZE))?;
    let socket = |name: &str| sockets.join(name);
    let (raw, blk, scsi, control) = (
        socket("raw"),
        socket("blk"),
        socket("scsi"),
        socket("control"),
    );
    let file = disks.join("raw");
    let mut command = Start::new(&options.program, Some(options.device_cpu));
    command.args(["--log", "warn", "serve", "--cpus"]);
    command.arg(options.device_cpu.to_string());
    command.arg("--control").arg(&control);
    let disk = format!("raw=file:{},size={SIZE},cache=none", file.display());
    command.args(["--disk", &disk]);
    let disk = format!("image=image:{},cache=none", image.display());
    command.args(["--disk", &disk]);
    command.args(["--vhost-blk", &format!("raw:{}", raw.display())]);
    command.args(["--vhost-blk", &format!("image:{}", blk.display())]);
    command.args(["--vhost-scsi", &format!("c0:{}", scsi.display())]);
    command.args(["--lun", "c0/0:0=image"]);
    let all = [control, raw.clone(), blk.clone(), scsi.clone()];
    Ok(Served {
        name: "lunette",
        daemon: Daemon::start(command, &sockets.join("lunette.log"), &all)?,
        sockets: vec![(BLK, blk), (RAW, raw), (SCSI, scsi)],
    })
}

fn qemu(options: &TableOptions, disks: &Path, sockets: &Path) -> Result<Served> {
    let image = disks.join("qemu.qcow2");
    let mut create = Command::new("qemu-img");
    run(create
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&image)
        .arg(SIZE))?;
    let socket = sockets.join("qemu");
    let mut command = Start::new(Path::new("qemu-storage-daemon"), Some(options.device_cpu));
    command.arg("--blockdev").arg(format!(
        "driver=file,node-name=file,filename={},cache.direct=on,aio=io_uring",
        image.display()
    ));
    command
        .arg("--blockdev")
        .arg("driver=qcow2,node-name=d0,file=file,cache.direct=on");
    command.arg("--export").arg(format!(
        "type=vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path={},writable=on",
        socket.display()
    ));
    let all = std::slice::from_ref(&socket);
    Ok(Served {
        name: PEER,
        daemon: Daemon::start(command, &sockets.join("qemu.log"), all)?,
        sockets: vec![(PEER, socket)],
    })
}
