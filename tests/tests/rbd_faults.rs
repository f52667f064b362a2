//! Faults of a Ceph cluster and of how a disk names it: guests see waiting or errors, and nothing hangs.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use end_to_end::{Context, Result, Rig, ensure};
use vhost_frontend::{BlkQueue, Cuts, FrontEnd, Options, QueueOptions, kind, status};
use vm::{CEPH_USER, Ceph, wait_until};

const LIMIT: Duration = Duration::from_secs(60);
/// How long a daemon may take to end at most.
const STOP_LIMIT: Duration = Duration::from_secs(40);

/// Waits until the disk `d` is shown in this state, for this reason.
fn wait_for_state(rig: &Rig, state: &str, reason: &str) -> Result<()> {
    let show = || rig.daemon.lunette(&["disk", "show", "d"]);
    let shown = wait_until(LIMIT, || {
        let shown = show().ok()?;
        (shown.contains(state) && shown.contains(reason)).then_some(())
    });
    ensure!(shown.is_some(), "not {state}: {}", show()?);
    Ok(())
}

/// From which parts of its store in use on an OSD is nearly full, takes no more copies, and is full.
fn set_full_ratios(ceph: &Ceph, ratios: [&str; 3]) -> Result<()> {
    let [nearly, copies, full] = ratios;
    for (command, ratio) in [
        ("set-nearfull-ratio", nearly),
        ("set-backfillfull-ratio", copies),
        ("set-full-ratio", full),
    ] {
        ceph.ceph(&["osd", command, ratio])?;
    }
    Ok(())
}

#[test]
fn a_full_cluster_makes_writes_wait_and_a_removed_pool_makes_all_io_fail() -> Result<()> {
    let ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/a", "--size", "8M"])?;
    let disk = format!("a={}", ceph.disk("rbd/a"));
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk(&disk)
            .disk("r=ram:1M")
            .vhost_blk("a")
            .vhost_blk("r")
    })?;
    let options = QueueOptions::default();
    let mut front_end = FrontEnd::connect(&rig.socket("a"), &Options::default())?;
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 4, 4096, Cuts::Usual)?;
    ensure!(queue.write(0, &[1; 512])? == status::OK);

    // Full: writes wait, reads and other disks do not; with room again the write ends well.
    set_full_ratios(&ceph, ["0.00001", "0.00002", "0.00003"])?;
    let slot = queue.take().context("no slot")?;
    queue.data(slot).write(0, &[2; 512]);
    let begun = Instant::now();
    // Writes pass until the daemon's connection has heard of it.
    loop {
        ensure!(
            queue.submit(slot, kind::OUT, 0, 512, 0),
            "no room in the ring"
        );
        queue.publish();
        match queue.wait_for(Duration::from_secs(2)) {
            Err(vhost_frontend::Error::Timeout(_)) => break,
            done => ensure!(done?.status == status::OK, "a full cluster is an error"),
        }
        ensure!(begun.elapsed() < LIMIT, "a full cluster takes writes");
    }
    let mut other = FrontEnd::connect(&rig.socket("r"), &Options::default())?;
    let mut other = BlkQueue::start(&mut other, 0, &options, 4, 4096, Cuts::Usual)?;
    ensure!(other.write(0, &[3; 512])? == status::OK);
    rig.daemon.lunette(&["status"])?;
    set_full_ratios(&ceph, ["0.85", "0.90", "0.95"])?;
    ensure!(queue.wait()?.status == status::OK);
    queue.release(slot);
    let mut bytes = [0; 512];
    ensure!(queue.read(0, &mut bytes)? == status::OK && bytes == [2; 512]);

    // The pool goes, and the image with it: errors, no hang, and an end in time.
    let sure = "--yes-i-really-really-mean-it";
    ceph.ceph(&["osd", "pool", "rm", "rbd", "rbd", sure])?;
    let begun = Instant::now();
    while queue.read(0, &mut bytes)? == status::OK {
        ensure!(begun.elapsed() < LIMIT, "a removed pool is read");
    }
    ensure!(queue.write(0, &[4; 512])? == status::IOERR);
    ensure!(other.write(0, &[5; 512])? == status::OK);
    drop((queue, other));
    rig.daemon.stop(STOP_LIMIT)?;
    Ok(())
}

#[test]
fn a_disk_with_a_wrong_key_or_without_its_image_comes_when_that_is_mended() -> Result<()> {
    let ceph = Ceph::start()?;
    let keyring = ceph.folder().join("changed.keyring");
    std::fs::copy(ceph.wrong_keyring()?, &keyring)?;
    let (conf, keyring) = (ceph.conf(), &keyring);
    let disk = format!(
        "d=rbd:rbd/late,conf={},id={CEPH_USER},keyring={}",
        conf.display(),
        keyring.display()
    );
    let rig = Rig::new(|daemon| daemon.disk(&disk))?;
    wait_for_state(&rig, "unavailable", "the monitors refuse the key")?;
    std::fs::copy(ceph.keyring(), keyring)?;
    wait_for_state(&rig, "unavailable", "lunette rbd list rbd")?;
    ceph.rbd(&["create", "rbd/late", "--size", "8M"])?;
    wait_for_state(&rig, "ready", "")
}
