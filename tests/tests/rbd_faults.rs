//! Faults of a Ceph cluster and of a disk's reference to it: guests see delays or errors, and nothing hangs.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use end_to_end::ceph::{CEPH_USER, Ceph};
use end_to_end::{Context, Result, Rig, ensure};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, kind, status};
use vm::wait_until;

const LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(40);

fn wait_for_state(rig: &Rig, disk: &str, state: &str, reason: &str) -> Result<()> {
    let show = || rig.daemon.lunette(&["disk", "show", disk]);
    let shown = wait_until(LIMIT, || {
        let shown = show().ok()?;
        (shown.contains(state) && shown.contains(reason)).then_some(())
    });
    ensure!(shown.is_some(), "not {state}, {reason}: {}", show()?);
    Ok(())
}

/// Blocklists the client that has an image open and returns its address.
fn blocklist(ceph: &Ceph, image: &str) -> Result<String> {
    let status = ceph.rbd(&["status", image, "--format", "json"])?;
    let status: serde_json::Value = serde_json::from_str(&status)?;
    let address = status["watchers"][0]["address"].as_str();
    let address = address.context("the image has no watcher")?.to_owned();
    ceph.ceph(&["osd", "blocklist", "add", &address])?;
    Ok(address)
}

/// Sets the used fractions at which an OSD is nearly full, refuses backfill, and is full.
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
fn full_cluster_makes_writes_wait_and_removed_pool_fails_io() -> Result<()> {
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
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 4, 4096, Layout::Separate)?;
    ensure!(queue.write(0, &[1; 512])? == status::OK);

    // A full cluster delays writes, but no reads and no other disks. With free space again the write succeeds.
    set_full_ratios(&ceph, ["0.00001", "0.00002", "0.00003"])?;
    let slot = queue.take().context("no slot")?;
    queue.data(slot).write(0, &[2; 512]);
    let begun = Instant::now();
    // Writes succeed until the daemon's connection has the new OSD map.
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
    let mut other = BlkQueue::start(&mut other, 0, &options, 4, 4096, Layout::Separate)?;
    ensure!(other.write(0, &[3; 512])? == status::OK);
    rig.daemon.lunette(&["status"])?;
    set_full_ratios(&ceph, ["0.85", "0.90", "0.95"])?;
    ensure!(queue.wait()?.status == status::OK);
    queue.release(slot);
    let mut bytes = [0; 512];
    ensure!(queue.read(0, &mut bytes)? == status::OK && bytes == [2; 512]);

    // The pool and its image are removed. I/O fails without a hang, and the daemon stops in time.
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
fn disk_becomes_available_after_key_or_image_is_fixed() -> Result<()> {
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
    wait_for_state(&rig, "d", "unavailable", "the monitors reject the key")?;
    std::fs::copy(ceph.keyring(), keyring)?;
    wait_for_state(&rig, "d", "unavailable", "lunette rbd list rbd")?;
    ceph.rbd(&["create", "rbd/late", "--size", "8M"])?;
    wait_for_state(&rig, "d", "ready", "")
}

fn image_id(ceph: &Ceph, image: &str) -> Result<String> {
    let info = ceph.rbd(&["info", image, "--format", "json"])?;
    let info: serde_json::Value = serde_json::from_str(&info)?;
    let id = info["id"].as_str().context("an image without id")?;
    Ok(id.to_owned())
}

#[test]
fn renamed_image_is_served_despite_a_new_namesake() -> Result<()> {
    let ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/a", "--size", "8M"])?;
    let disk = format!("d={},on_error=stop", ceph.disk("rbd/a"));
    let mut rig = Rig::new(|daemon| daemon.disk(&disk).vhost_blk("d"))?;
    let options = QueueOptions::default();
    let mut front_end = FrontEnd::connect(&rig.socket("d"), &Options::default())?;
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 4, 4096, Layout::Separate)?;
    ensure!(queue.write(0, &[1; 512])? == status::OK);
    ceph.rbd(&["rename", "rbd/a", "rbd/b"])?;
    ensure!(queue.write(512, &[2; 512])? == status::OK);
    ceph.rbd(&["resize", "rbd/b", "--size", "16M", "--no-progress"])?;
    wait_for_state(&rig, "d", "16M", "")?;
    let mut bytes = [0; 512];
    ensure!(queue.read(0, &mut bytes)? == status::OK && bytes == [1; 512]);

    // A reopen finds the image by name. The log names its new name, and I/O waits.
    let address = blocklist(&ceph, "rbd/b")?;
    wait_for_state(&rig, "d", "unavailable", "blocklisted")?;
    let slot = queue.take().context("no slot")?;
    queue.data(slot).write(0, &[3; 512]);
    ensure!(queue.submit(slot, kind::OUT, 1, 512, 0), "no room");
    queue.publish();
    ceph.ceph(&["osd", "blocklist", "rm", &address])?;
    wait_for_state(
        &rig,
        "d",
        "unavailable",
        "renamed to b; hint: rbd rename rbd/b rbd/a",
    )?;
    ceph.rbd(&["create", "rbd/a", "--size", "16M"])?;
    wait_for_state(
        &rig,
        "d",
        "unavailable",
        "belongs to another image or snapshot",
    )?;
    let waits = queue.wait_for(Duration::from_millis(100));
    ensure!(
        matches!(waits, Err(vhost_frontend::Error::Timeout(_))),
        "{waits:?}"
    );
    ceph.rbd(&["rm", "rbd/a", "--no-progress"])?;
    let id = image_id(&ceph, "rbd/b")?;
    let moved = wait_until(LIMIT, || ceph.rbd(&["trash", "mv", "rbd/b"]).ok());
    ensure!(moved.is_some(), "the image is not moved to the trash");
    let restore = ["trash", "restore", &format!("rbd/{id}"), "--image", "a"];
    wait_for_state(&rig, "d", "unavailable", &restore.join(" "))?;
    ceph.rbd(&restore)?;
    wait_for_state(&rig, "d", "ready", "")?;
    ensure!(queue.wait()?.status == status::OK, "I/O that waited");
    queue.release(slot);
    for (at, byte) in [(0, 1), (512, 3)] {
        ensure!(queue.read(at, &mut bytes)? == status::OK && bytes == [byte; 512]);
    }
    drop(queue);
    rig.daemon.stop(STOP_LIMIT)?;
    Ok(())
}

/// Removed objects read as zeroes. A guest must not see them.
#[test]
fn removed_image_fails_io_despite_a_new_namesake() -> Result<()> {
    let ceph = Ceph::start()?;
    let mut disks = Vec::new();
    for name in ["report", "stop", "header"] {
        let image = format!("rbd/{name}");
        ceph.rbd(&["create", &image, "--size", "8M"])?;
        disks.push(format!("{name}={}", ceph.disk(&image)));
    }
    disks[1].push_str(",on_error=stop");
    let mut rig = Rig::new(|daemon| {
        let daemon = disks.iter().fold(daemon, |daemon, disk| daemon.disk(disk));
        daemon
            .vhost_blk("report")
            .vhost_blk("stop")
            .vhost_blk("header")
    })?;
    let mut ends = Vec::new();
    for name in ["report", "stop", "header"] {
        ends.push(FrontEnd::connect(&rig.socket(name), &Options::default())?);
    }
    let options = QueueOptions::default();
    let queues = ends.iter_mut();
    let queues = queues.map(|end| BlkQueue::start(end, 0, &options, 4, 4096, Layout::Separate));
    let mut queues = queues.collect::<std::result::Result<Vec<BlkQueue>, _>>()?;
    for queue in &mut queues {
        ensure!(queue.write(0, &[1; 512])? == status::OK);
    }
    let [report, stop, header] = &mut queues[..] else {
        unreachable!("three disks");
    };
    let mut bytes = [0; 512];

    // An image without its header is invalid, even if a client has it open.
    let id = image_id(&ceph, "rbd/header")?;
    for object in [format!("rbd_header.{id}"), "rbd_id.header".to_owned()] {
        ceph.output("rados", &["-p", "rbd", "rm", &object])?;
    }
    wait_for_state(&rig, "header", "unavailable", "removed")?;
    ensure!(header.read(0, &mut bytes)? == status::IOERR);
    ensure!(header.write(0, &[2; 512])? == status::IOERR);

    // The client is blocklisted and idle while the images are removed.
    let address = blocklist(&ceph, "rbd/report")?;
    for image in ["rbd/report", "rbd/stop"] {
        let removed = wait_until(LIMIT, || ceph.rbd(&["rm", image, "--no-progress"]).ok());
        ensure!(removed.is_some(), "{image} is not removed");
    }
    wait_for_state(&rig, "report", "unavailable", "blocklisted")?;
    ceph.ceph(&["osd", "blocklist", "rm", &address])?;
    ensure!(report.read(0, &mut bytes)? == status::IOERR, "{bytes:?}");
    ensure!(report.write(0, &[2; 512])? == status::IOERR);
    let slot = stop.take().context("no slot")?;
    stop.data(slot).write(0, &[2; 512]);
    ensure!(stop.submit(slot, kind::OUT, 0, 512, 0), "no room");
    stop.publish();
    for disk in ["report", "stop"] {
        wait_for_state(&rig, disk, "unavailable", "was removed")?;
    }
    wait_for_state(&rig, "stop", "waiting", "")?;

    // Another image of this name is another disk and is opened only on request.
    ceph.rbd(&["create", "rbd/report", "--size", "8M"])?;
    wait_for_state(
        &rig,
        "report",
        "unavailable",
        "belongs to another image or snapshot",
    )?;
    ensure!(report.read(0, &mut bytes)? == status::IOERR);
    drop(queues);
    drop(ends);
    rig.daemon
        .lunette(&["export", "remove", "report", "--force"])?;
    rig.daemon.lunette(&["disk", "remove", "report"])?;
    rig.daemon.lunette(&["disk", "add", &disks[0]])?;
    wait_for_state(&rig, "report", "ready", "")?;
    rig.daemon.stop(STOP_LIMIT)?;
    Ok(())
}
