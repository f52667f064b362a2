//! `make bench-rbd`: Lunette's transports compared with qemu-storage-daemon, each on an image of one Ceph cluster, in turns, as one
//! table.
//!
//! The cluster must exist; both images are overwritten. Both daemons run on one CPU with librbd's threads and without a cache. The driver
//! waits for interrupts, so that a cluster on the same machine has CPU time.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use latency::Clock;

use super::served::{CASES, Served, fill_all, measure};
use super::{BLK, PEER, SCSI, TableOptions, chosen};
use crate::children::{Daemon, Scratch, Start};
use crate::run::Progress;

/// Ceph cluster and images.
#[derive(Clone, Debug)]
pub struct RbdPlace {
    /// Ceph's configuration file, which also names the user's keyring.
    pub conf: PathBuf,
    /// User name without `client.`.
    pub id: String,
    /// `POOL/IMAGE` served by Lunette.
    pub image: String,
    /// `POOL/IMAGE` served by qemu-storage-daemon.
    pub peer_image: String,
}

/// Runs the cases. Returns the table as text for a terminal and for a file of notes.
pub fn rbd_table(
    options: &TableOptions,
    rbd: &RbdPlace,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<String> {
    chosen(options, CASES.iter().map(|(name, _)| *name))?;
    ensure!(
        rbd.image != rbd.peer_image,
        "both daemons would write to the image {}",
        rbd.image
    );
    let clock = Clock::new();
    let folder = Scratch::for_sockets("lr")?;
    progress.print("starting the daemons and filling their images");
    let mut daemons = vec![lunette(options, rbd, folder.path())?];
    match qemu(options, rbd, folder.path()) {
        Ok(peer) => daemons.push(peer),
        Err(error) => progress.print(&format!(
            "without qemu-storage-daemon (Debian: apt-get install qemu-system-common qemu-block-extra): {error:#}"
        )),
    }
    fill_all(&daemons, &clock, interrupted)?;
    measure(&daemons, options, interrupted, progress)
}

fn lunette(options: &TableOptions, rbd: &RbdPlace, folder: &Path) -> Result<Served> {
    let socket = |name: &str| folder.join(name);
    let (blk, scsi, control) = (socket("blk"), socket("scsi"), socket("control"));
    let mut command = Start::new(&options.program, Some(options.device_cpu));
    command.args(["--log", "warn", "serve", "--cpus"]);
    command.arg(options.device_cpu.to_string());
    command.arg("--control").arg(&control);
    command.args([
        "--disk",
        &format!(
            "d0=rbd:{},conf={},id={},require",
            rbd.image,
            rbd.conf.display(),
            rbd.id
        ),
    ]);
    command.args(["--vhost-blk", &format!("d0:{}", blk.display())]);
    command.args(["--vhost-scsi", &format!("c0:{}", scsi.display())]);
    command.args(["--lun", "c0/0:0=d0"]);
    let sockets = [control, blk.clone(), scsi.clone()];
    Ok(Served {
        name: "lunette",
        daemon: Daemon::start(command, &folder.join("lunette.log"), &sockets)?,
        sockets: vec![(BLK, blk), (SCSI, scsi)],
    })
}

/// Starts Debian's qemu-storage-daemon with its rbd driver, without a cache like ours.
fn qemu(options: &TableOptions, rbd: &RbdPlace, folder: &Path) -> Result<Served> {
    let socket = folder.join("qemu");
    let (pool, image) = rbd
        .peer_image
        .split_once('/')
        .context("an image name has the form POOL/IMAGE")?;
    let mut command = Start::new(Path::new("qemu-storage-daemon"), Some(options.device_cpu));
    command.arg("--blockdev").arg(format!(
        "driver=rbd,node-name=d0,pool={pool},image={image},conf={},user={},cache.direct=on",
        rbd.conf.display(),
        rbd.id
    ));
    command.arg("--export").arg(format!(
        "type=vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path={},writable=on",
        socket.display()
    ));
    let sockets = std::slice::from_ref(&socket);
    Ok(Served {
        name: PEER,
        daemon: Daemon::start(command, &folder.join("qemu.log"), sockets)?,
        sockets: vec![(PEER, socket)],
    })
}
