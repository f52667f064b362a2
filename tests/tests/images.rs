//! Disks in qcow2 images: a guest's verified I/O through kills of the daemon, on an image with a backing image; growth at run time; the
//! commands of `lunette image`, checked by qemu-img. Needs: a guest, qemu-img, Ceph. Takes: 40 s.
#![forbid(unsafe_code)]

use end_to_end::ceph::{CEPH_USER, Ceph};
use end_to_end::rig::{free_portal, kernel_is_content};
use end_to_end::{Context, GuestBuilder, Result, Rig, Scratch, Soak, ensure};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, VerifiedLoad, status};
use vm::wait_until;

const MIB: usize = 1 << 20;
/// Images may name any file, unit or RBD image.
const ANY: [&str; 2] = ["--named-files", "any"];
const SOON: Duration = Duration::from_secs(60);

fn run(folder: &Path, program: &str, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(program);
    let ran = command.args(arguments).current_dir(folder).output();
    ran.with_context(|| format!("cannot run {program}; hint: apt-get install qemu-utils"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a command that must succeed and returns its standard output.
fn succeeds(folder: &Path, program: &str, arguments: &[&str]) -> Result<String> {
    let ran = run(folder, program, arguments)?;
    let (stdout, stderr) = (text(&ran.stdout), text(&ran.stderr));
    ensure!(
        ran.status.success(),
        "{program} {arguments:?}: {}: {stdout}{stderr}",
        ran.status
    );
    Ok(stdout)
}

fn lunette(folder: &Path, arguments: &[&str]) -> Result<String> {
    succeeds(folder, &program()?, &[&["image"], arguments].concat())
}

fn program() -> Result<String> {
    Ok(vm::lunette_program(vm::Profile::Dev)?.display().to_string())
}

/// The raw backing image is a logical unit of another daemon's target. It is read as needed, never written, and waited for while its
/// target restarts.
#[test]
fn image_on_an_iscsi_backing_unit_survives_a_target_restart() -> Result<()> {
    const TARGET: &str = "iqn.2026-11.org.example:base";
    let portal = free_portal()?.to_string();
    let content: Vec<u8> = (0..32 * MIB).map(|at| (at / 512 % 251) as u8).collect();
    let mut far = Rig::prepared(|scratch, daemon| {
        let base = scratch.file("base.raw");
        std::fs::write(&base, &content)?;
        let disk = format!("d=file:{}", base.display());
        let target = format!("{TARGET}=d");
        let serves = ["--iscsi", &target, "--portal", &portal, "--demo-mode", "ro"];
        Ok(daemon.disk(&disk).arguments(serves))
    })?;
    let folder = Scratch::new()?;
    let unit = format!("iscsi://{portal}/{TARGET}/0");
    let image = folder.file("disk.qcow2");
    let shown = image.display().to_string();
    let create = [
        "create", "-q", "-u", "-f", "qcow2", "-b", &unit, "-F", "raw", &shown, "40M",
    ];
    succeeds(folder.files(), "qemu-img", &create)?;
    let mut near = far.beside(|daemon| daemon.disk(&format!("d=image:{shown}")).vhost_blk("d"))?;
    {
        let mut front_end = FrontEnd::connect(&near.socket("d"), &Options::default())?;
        let queue = QueueOptions::default();
        let mut queue = BlkQueue::start(&mut front_end, 0, &queue, 16, 1 << 20, Layout::Separate)?;
        for at in [0, 5 * MIB + 512, 32 * MIB - 64 * 1024] {
            let mut bytes = vec![0; 64 * 1024];
            ensure!(queue.read(at as u64, &mut bytes)? == status::OK);
            ensure!(bytes == content[at..at + bytes.len()], "{at}");
        }
        // Beyond the backing image's end the disk reads zeroes. A write to a part of a cluster copies the rest of the cluster.
        let mut bytes = vec![1; 512];
        ensure!(queue.read(39 << 20, &mut bytes)? == status::OK && bytes == [0; 512]);
        ensure!(queue.write(7 << 20, &[0xee; 512])? == status::OK);
        let mut bytes = vec![0; 1024];
        ensure!(queue.read(7 << 20, &mut bytes)? == status::OK);
        ensure!(bytes[..512] == [0xee; 512] && bytes[512..] == content[7 * MIB + 512..][..512]);
    }
    let load = VerifiedLoad::start(&near.socket("d"))?;
    load.expect_progress(SOON)?;
    far.daemon.kill()?;
    std::thread::sleep(Duration::from_millis(500));
    far.daemon.start_again()?;
    load.expect_progress(SOON)?;
    ensure!(load.finish()? > 0);
    // An orderly stop leaves no leaked clusters.
    near.daemon.stop(SOON)?;
    ensure!(
        std::fs::read(far.scratch.file("base.raw"))? == content,
        "it was written"
    );
    succeeds(folder.files(), "qemu-img", &["check", "-q", &shown])?;
    Ok(())
}

/// A logical unit replaces files: as backing image, source of a copy, target of a copy, and target of a commit.
#[test]
fn units_are_backing_images_and_copy_destinations() -> Result<()> {
    const TARGET: &str = "iqn.2026-11.org.example:far";
    let portal = free_portal()?.to_string();
    let content: Vec<u8> = (0..4 * MIB).map(|at| (at / 512 % 251) as u8).collect();
    let far = Rig::prepared(|scratch, daemon| {
        let base = scratch.file("far.raw");
        std::fs::write(&base, &content)?;
        let disk = format!("d=file:{}", base.display());
        let target = format!("{TARGET}=d");
        let serves = ["--iscsi", &target, "--portal", &portal, "--demo-mode", "rw"];
        Ok(daemon.disk(&disk).arguments(serves))
    })?;
    let there = far.scratch.file("far.raw");
    let folder = Scratch::new()?;
    std::fs::write(folder.file("before.raw"), &content)?;
    let folder = folder.files();
    let unit = format!("iscsi://{portal}/{TARGET}/0");
    lunette(folder, &["create", "over.qcow2", "--backing", &unit])?;
    let shown = lunette(folder, &["info", "over.qcow2", "--chain", ANY[0], ANY[1]])?;
    ensure!(
        shown.contains(&format!("image: {unit}\nformat: raw\ndisk: 4194304")),
        "{shown}"
    );
    lunette(
        folder,
        &["compare", "over.qcow2", "before.raw", ANY[0], ANY[1]],
    )?;
    let write = ["-f", "qcow2", "-c", "write -P 7 1M 1M", "over.qcow2"];
    succeeds(folder, "qemu-io", &write)?;
    lunette(
        folder,
        &[
            "convert",
            "over.qcow2",
            "after.raw",
            "--to",
            "raw",
            ANY[0],
            ANY[1],
        ],
    )?;
    // The image names a file outside of its folder.
    let outcome = run(folder, &program()?, &["image", "commit", "over.qcow2"])?;
    ensure!(
        text(&outcome.stderr).contains("named_files=any"),
        "{outcome:?}"
    );
    lunette(folder, &["commit", "over.qcow2", ANY[0], ANY[1]])?;
    let mut after = content;
    after[MIB..2 * MIB].fill(7);
    ensure!(std::fs::read(folder.join("after.raw"))? == after);
    ensure!(std::fs::read(&there)? == after, "it is not committed");
    lunette(
        folder,
        &["rebase", "over.qcow2", "--no-backing", ANY[0], ANY[1]],
    )?;
    lunette(folder, &["compare", "over.qcow2", &unit])?;
    let back = ["rebase", "over.qcow2", "--backing", &unit];
    ensure!(lunette(folder, &back)?.contains("(raw): 0 clusters copied"));
    overwritten_or_refused(folder, &unit, &there, after)
}

/// Over existing data, holes are written as zeroes.
fn overwritten_or_refused(
    folder: &Path,
    unit: &str,
    there: &Path,
    mut after: Vec<u8>,
) -> Result<()> {
    let create = |format: &str, name: &str, size: &str| {
        let create = ["create", "-q", "-f", format, name, size];
        succeeds(folder, "qemu-img", &create)
    };
    create("qcow2", "small.qcow2", "1M")?;
    create("raw", "large.raw", "5M")?;
    lunette(folder, &["convert", "small.qcow2", unit, "--to", "raw"])?;
    after[..MIB].fill(0);
    ensure!(std::fs::read(there)? == after);
    let small = std::fs::read(folder.join("small.qcow2"))?;
    let zeroes = vec![0; 4 * MIB - small.len()];
    std::fs::write(there, [small, zeroes].concat())?;
    for (command, part) in [
        (
            &["convert", "large.raw", unit, "--to", "raw"][..],
            "less than the 5242880 bytes",
        ),
        (
            &["convert", "small.qcow2", unit, "--to", "qcow2"],
            "can only be raw",
        ),
        // A guest may have written this header.
        (
            &["create", "other.qcow2", "--backing", unit],
            "signature of a disk image in the format qcow2",
        ),
        (
            &["info", "iscsi://127.0.0.1:1/iqn.2026-11.org.example:x/0"],
            "cannot connect",
        ),
    ] {
        let refused = run(folder, &program()?, &[&["image"], command].concat())?;
        let error_text = text(&refused.stderr);
        ensure!(
            !refused.status.success() && error_text.contains(part),
            "{command:?}: {error_text}"
        );
    }
    Ok(())
}

/// A raw file may end within a block. Like QEMU, the rest of the block is filled with zeroes.
#[test]
fn raw_files_that_end_within_a_block_are_copied_as_qemu_does() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    std::fs::write(folder.join("odd.raw"), vec![7; 70_000])?;
    for (to, made) in [("raw", "our.raw"), ("qcow2", "our.qcow2")] {
        lunette(folder, &["convert", "odd.raw", made, "--to", to])?;
        let compare = ["compare", "-q", "-f", "raw", "-F", to, "odd.raw", made];
        succeeds(folder, "qemu-img", &compare)?;
    }
    ensure!(std::fs::metadata(folder.join("our.raw"))?.len() == 70_144);
    Ok(())
}

/// An image in a file whose backing image is a snapshot in the Ceph cluster, in QEMU's notation.
#[test]
fn rbd_snapshot_is_a_backing_image() -> Result<()> {
    let ceph = Ceph::start()?;
    let folder = Scratch::new()?;
    let content: Vec<u8> = (0..8 << 20).map(|at| (at / 512 % 251) as u8).collect();
    std::fs::write(folder.file("base.raw"), &content)?;
    let raw = folder.file("base.raw").display().to_string();
    ceph.rbd(&["import", &raw, "rbd/base"])?;
    ceph.rbd(&["snap", "create", "rbd/base@first"])?;
    let (conf, keyring) = (ceph.conf(), ceph.keyring());
    let base = format!(
        "rbd:rbd/base@first:conf={}:id={CEPH_USER}:keyring={}",
        conf.display(),
        keyring.display()
    );
    let image = folder.file("disk.qcow2").display().to_string();
    let create = [
        "create", "-q", "-u", "-f", "qcow2", "-b", &base, "-F", "raw", &image, "8M",
    ];
    let made = std::process::Command::new("qemu-img").args(create).output();
    let made = made.context("cannot run qemu-img; hint: apt-get install qemu-utils")?;
    ensure!(
        made.status.success(),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
    let mut rig = Rig::new(|daemon| daemon.disk(&format!("d=image:{image}")).vhost_blk("d"))?;
    let mut front_end = FrontEnd::connect(&rig.socket("d"), &Options::default())?;
    let queue = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &queue, 16, 1 << 20, Layout::Separate)?;
    let mut bytes = vec![0; 64 * 1024];
    let read = queue.read(5 << 20, &mut bytes)?;
    ensure!(read == status::OK, "{}", rig.daemon.process().log_tail());
    ensure!(bytes == content[5 << 20..][..bytes.len()]);
    ensure!(queue.write(5 << 20, &[0xee; 512])? == status::OK);
    ensure!(queue.read(5 << 20, &mut bytes)? == status::OK);
    ensure!(
        bytes[..512] == [0xee; 512]
            && bytes[512..] == content[(5 << 20) + 512..][..bytes.len() - 512]
    );
    rig.daemon.stop(SOON)?;
    // Without the daemon: copies, compares, and overwrites the image in the cluster.
    lunette(
        folder.files(),
        &["convert", &base, "copy.raw", "--to", "raw"],
    )?;
    ensure!(std::fs::read(folder.file("copy.raw"))? == content);
    let writable = base.replace("@first", "");
    lunette(
        folder.files(),
        &["convert", &image, &writable, "--to", "raw", ANY[0], ANY[1]],
    )?;
    lunette(
        folder.files(),
        &["compare", &image, &writable, ANY[0], ANY[1]],
    )?;
    lunette(folder.files(), &["compare", "copy.raw", &base])?;
    Ok(())
}

/// Takes a snapshot of a remote disk. The disk continues in a local image that names its backing image, also after a restart.
fn goes_on_in_a_snapshot(near: &mut Rig, image: &Path) -> Result<()> {
    let load = VerifiedLoad::start(&near.socket("d"))?;
    load.expect_progress(SOON)?;
    let to = image.display().to_string();
    let taken = near.daemon.ask(&["disk", "snapshot", "d", "--to", &to])?;
    ensure!(taken.status.success(), "{}", text(&taken.stderr));
    load.expect_progress(SOON)?;
    ensure!(load.finish()? > 0);
    let written = |queue: &mut BlkQueue| -> Result<()> {
        ensure!(queue.write(5 << 20, &[0xab; 4096])? == status::OK);
        Ok(())
    };
    let open = |near: &Rig| -> Result<(FrontEnd, BlkQueue)> {
        let mut front_end = FrontEnd::connect(&near.socket("d"), &Options::default())?;
        let queue = QueueOptions::default();
        let queue = BlkQueue::start(&mut front_end, 0, &queue, 16, 1 << 20, Layout::Separate)?;
        Ok((front_end, queue))
    };
    let (front_end, mut queue) = open(near)?;
    written(&mut queue)?;
    let mut before = vec![0; 16 << 20];
    for (at, piece) in before.chunks_mut(1 << 20).enumerate() {
        ensure!(queue.read((at as u64) << 20, piece)? == status::OK);
    }
    drop((queue, front_end));
    near.daemon.kill()?;
    near.daemon.start_again()?;
    let shown: Value = control::get(&near.daemon.control(), "/v1/disks/d")?;
    ensure!(shown["backend"] == "image", "{shown}");
    let (_front_end, mut queue) = open(near)?;
    for (at, expected) in before.chunks(1 << 20).enumerate() {
        let mut found = vec![0; 1 << 20];
        ensure!(queue.read((at as u64) << 20, &mut found)? == status::OK);
        ensure!(
            found == expected,
            "another content after a restart, MiB {at}"
        );
    }
    Ok(())
}

/// Serves a disk `d` with these options, and takes a snapshot of it in another daemon, where it has this name.
fn continues_in_its_snapshot(serves: &[&str], name: &str) -> Result<()> {
    let far = Rig::prepared(|scratch, daemon| {
        let base = scratch.file("base.raw");
        std::fs::write(&base, vec![7; 16 * MIB])?;
        let disk = format!("d=file:{},cache=writeback", base.display());
        Ok(daemon.disk(&disk).arguments(serves.iter().copied()))
    })?;
    let folder = Scratch::new()?;
    let disk = format!("d={name}");
    let mut near = far.beside(|daemon| daemon.disk(&disk).vhost_blk("d"))?;
    let image = folder.file("over.qcow2");
    goes_on_in_a_snapshot(&mut near, &image)?;
    near.daemon.stop(SOON)?;
    let base = std::fs::read(far.scratch.file("base.raw"))?;
    ensure!(
        base[5 << 20..][..4096] != [0xab; 4096],
        "its base was written"
    );
    let shown = lunette(folder.files(), &["info", &image.display().to_string()])?;
    ensure!(shown.contains(&format!("{name} (raw)")), "{shown}");
    has_leaks_at_most(folder.files(), "over.qcow2")
}

#[test]
fn disk_on_an_iscsi_unit_continues_in_its_snapshot() -> Result<()> {
    const TARGET: &str = "iqn.2026-11.org.example:snapped";
    let portal = free_portal()?.to_string();
    let target = format!("{TARGET}=d");
    let serves = ["--iscsi", &target, "--portal", &portal, "--demo-mode", "rw"];
    continues_in_its_snapshot(&serves, &format!("iscsi://{portal}/{TARGET}/0"))
}

#[test]
fn disk_on_nbd_continues_in_its_snapshot() -> Result<()> {
    let address = free_portal()?;
    let serves = ["--nbd", &format!("d:{address}")];
    continues_in_its_snapshot(&serves, &format!("nbd://{address}/d"))
}

#[test]
fn disk_in_ceph_continues_in_its_snapshot() -> Result<()> {
    let ceph = Ceph::start()?;
    for image in ["rbd/snapped", "rbd/backup"] {
        ceph.rbd(&["create", image, "--size", "16M"])?;
    }
    let folder = Scratch::new()?;
    let (conf, keyring) = (ceph.conf(), ceph.keyring());
    let way = format!(
        "conf={},id={CEPH_USER},keyring={}",
        conf.display(),
        keyring.display()
    );
    let disk = format!("d=rbd:rbd/snapped,{way}");
    let mut near = Rig::new(|daemon| daemon.disk(&disk).vhost_blk("d"))?;
    // The second backup also goes to an image whose backing image is the first backup in the cluster.
    let second = folder.file("second.qcow2").display().to_string();
    for target in [
        format!("rbd:rbd/backup,{way}"),
        format!("image:{second},cache=writethrough"),
    ] {
        let words = [
            "disk",
            "backup",
            "d",
            &target,
            "--incremental",
            "daily",
            "--wait",
        ];
        let made = near.daemon.ask(&words)?;
        ensure!(made.status.success(), "{target}: {}", text(&made.stderr));
    }
    let shown = lunette(folder.files(), &["info", &second])?;
    ensure!(
        shown.contains("backing image: rbd:rbd/backup:conf="),
        "{shown}"
    );
    goes_on_in_a_snapshot(&mut near, &folder.file("over.qcow2"))?;
    near.daemon.stop(SOON)?;
    let base = folder.file("base.raw").display().to_string();
    ceph.rbd(&["export", "rbd/snapped", &base])?;
    let base = std::fs::read(base)?;
    ensure!(
        base[5 << 20..][..4096] != [0xab; 4096],
        "its base was written"
    );
    has_leaks_at_most(folder.files(), "over.qcow2")
}

/// Creates an overlay on a raw image of 32 MiB.
fn make_overlay(folder: &Path) -> Result<()> {
    let content: Vec<u8> = (0..32 * MIB).map(|at| (at / 512 % 251) as u8).collect();
    std::fs::write(folder.join("base.raw"), content)?;
    let create = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        "base.raw",
        "-F",
        "raw",
        "disk.qcow2",
    ];
    succeeds(folder, "qemu-img", &create)?;
    Ok(())
}

/// Checks that an image has leaked clusters at most. A kill may leave them, and a repair frees them.
fn has_leaks_at_most(folder: &Path, image: &str) -> Result<()> {
    let checked = run(folder, "qemu-img", &["check", image])?;
    let code = checked.status.code();
    ensure!(
        matches!(code, Some(0 | 3)),
        "{}{}",
        text(&checked.stdout),
        text(&checked.stderr)
    );
    lunette(folder, &["check", image, "--repair", "leaks"])?;
    succeeds(folder, "qemu-img", &["check", image])?;
    Ok(())
}

#[test]
fn an_image_whose_daemon_is_killed_under_load_has_no_fault() -> Result<()> {
    let mut rig = Rig::prepared(|scratch, daemon| {
        make_overlay(scratch.files())?;
        Ok(daemon.disk("d=image:disk.qcow2").vhost_blk("d"))
    })?;
    for is_killed in [false, true, true] {
        let load = VerifiedLoad::start(&rig.socket("d"))?;
        load.expect_progress(SOON)?;
        if is_killed {
            rig.daemon.kill()?;
            drop(load);
            has_leaks_at_most(rig.scratch.files(), "disk.qcow2")?;
            rig.daemon.start_again()?;
            continue;
        }
        ensure!(load.finish()? > 0);
        let held = run(rig.scratch.files(), "qemu-img", &["info", "disk.qcow2"])?;
        ensure!(
            text(&held.stderr).contains("lock"),
            "QEMU opens an image that the daemon serves: {}",
            text(&held.stdout)
        );
    }
    Ok(())
}

/// One data file is a raw disk, and the other is in another folder. The images go through kills, a snapshot and a commit.
#[test]
fn images_with_data_files_are_those_of_qemu() -> Result<()> {
    let mut rig = Rig::prepared(|scratch, daemon| {
        let at = scratch.files();
        let raw = ["--data-file", "d.raw", "--data-file-raw"];
        lunette(at, &[&["create", "d.qcow2", "64M"][..], &raw].concat())?;
        std::fs::create_dir(at.join("far"))?;
        let data = at.join("e.data").display().to_string();
        lunette(at, &["create", "far/e.qcow2", "64M", "--data-file", &data])?;
        let elsewhere = format!("e=image:far/e.qcow2,data_file={data}");
        Ok(daemon
            .disk("d=image:d.qcow2,data_file=d.raw")
            .vhost_blk("d")
            .disk(&elsewhere)
            .vhost_blk("e"))
    })?;
    for (disk, image) in [("d", "d.qcow2"), ("e", "far/e.qcow2")] {
        let load = VerifiedLoad::start(&rig.socket(disk))?;
        load.expect_progress(SOON)?;
        rig.daemon.kill()?;
        drop(load);
        let at = rig.scratch.files();
        has_leaks_at_most(at, image)?;
        rig.daemon.start_again()?;
    }
    let at = rig.scratch.files().to_owned();
    let shown = lunette(&at, &["info", "d.qcow2"]);
    ensure!(shown.is_err(), "a served image was opened: {shown:?}");
    let load = VerifiedLoad::start(&rig.socket("d"))?;
    load.expect_progress(SOON)?;
    let over = at.join("over.qcow2").display().to_string();
    for words in [
        &["disk", "snapshot", "d", "--to", &over][..],
        &["disk", "commit", "d", "--wait"],
    ] {
        let done = rig.daemon.ask(words)?;
        ensure!(done.status.success(), "{words:?}: {}", text(&done.stderr));
        load.expect_progress(SOON)?;
    }
    ensure!(load.finish()? > 0);
    let status = rig.daemon.stop(SOON)?;
    ensure!(status.success(), "{}", rig.daemon.process().log_tail());
    for image in ["d.qcow2", "far/e.qcow2"] {
        succeeds(&at, "qemu-img", &["check", image])?;
    }
    let same = ["compare", "-f", "raw", "-F", "qcow2", "d.raw", "d.qcow2"];
    succeeds(&at, "qemu-img", &same)?;
    let shown = lunette(&at, &["info", "d.qcow2"])?;
    ensure!(shown.contains("data file: d.raw, with raw data"), "{shown}");
    let refused = run(&at, &program()?, &["image", "resize", "far/e.qcow2", "1G"])?;
    let refused = text(&refused.stderr);
    ensure!(refused.contains("not in the folder"), "{refused}");
    lunette(&at, &["resize", "d.qcow2", "80M"])?;
    succeeds(&at, "qemu-img", &["check", "d.qcow2"])?;
    succeeds(&at, "qemu-img", &same)?;
    Ok(())
}

/// The daemon ends while a front end is connected and a client reads statistics.
#[test]
fn image_has_no_unused_clusters_after_an_orderly_stop() -> Result<()> {
    let mut rig = Rig::prepared(|scratch, daemon| {
        make_overlay(scratch.files())?;
        Ok(daemon.disk("d=image:disk.qcow2").vhost_blk("d"))
    })?;
    let load = VerifiedLoad::start(&rig.socket("d"))?;
    load.expect_progress(SOON)?;
    let status = rig.daemon.stop(SOON)?;
    ensure!(status.success(), "{}", rig.daemon.process().log_tail());
    drop(load);
    succeeds(rig.scratch.files(), "qemu-img", &["check", "disk.qcow2"])?;
    Ok(())
}

/// A client is active during the removal. Reserved clusters are freed, and other programs can use the image.
#[test]
fn image_removed_under_load_is_closed_and_served_again() -> Result<()> {
    let rig = Rig::prepared(|scratch, daemon| {
        make_overlay(scratch.files())?;
        Ok(daemon.disk("d=image:disk.qcow2").vhost_blk("d"))
    })?;
    for _ in 0..3 {
        let load = VerifiedLoad::start(&rig.socket("d"))?;
        load.expect_progress(SOON)?;
        let removed = rig.daemon.ask(&["disk", "remove", "d", "--force"])?;
        ensure!(removed.status.success(), "{}", text(&removed.stderr));
        drop(load);
        let closed = wait_until(SOON, || {
            let checked = run(rig.scratch.files(), "qemu-img", &["check", "disk.qcow2"]).ok()?;
            checked.status.success().then_some(())
        });
        closed.context("the image is not closed, or not clean")?;
        let socket = rig.socket("d").display().to_string();
        let image = format!("d=image:{}", rig.scratch.file("disk.qcow2").display());
        for words in [
            &["disk", "add", &image][..],
            &["export", "add", "vhost-blk", &format!("d:{socket}")],
        ] {
            let added = rig.daemon.ask(words)?;
            ensure!(added.status.success(), "{words:?}: {}", text(&added.stderr));
        }
        let ready = wait_until(SOON, || {
            let shown: Value = control::get(&rig.daemon.control(), "/v1/disks/d").ok()?;
            (shown["status"]["state"] == "ready").then_some(())
        });
        ready.context("the image is not served again")?;
    }
    Ok(())
}

#[test]
fn guest_data_in_a_growing_image_survives_kills() -> Result<()> {
    let mut rig = Rig::prepared(|scratch, daemon| {
        make_overlay(scratch.files())?;
        let image = daemon.disk("d=image:disk.qcow2").vhost_blk("d");
        Ok(image.arguments(["--workers", "2"]))
    })?;
    let mut guest = GuestBuilder::new("image")
        .cpus(2)
        .vhost_user_blk(&rig.socket("d"), 2)
        .boot()?;
    guest.wait_for_disks(&["vda"])?;
    let soak = Soak::start(&mut guest, "--file /dev/vda --seed 38 --depth 8")?;
    for _ in 0..3 {
        rig.daemon.wait_for_requests("d", 200)?;
        rig.daemon.kill()?;
        rig.daemon.start_again()?;
    }
    rig.daemon.wait_for_requests("d", 200)?;
    soak.finish(&mut guest)
        .with_context(|| rig.daemon.process().log_tail())?;
    let resized = rig.daemon.ask(&["disk", "resize", "d", "48M"])?;
    ensure!(resized.status.success(), "{}", text(&resized.stderr));
    let sectors = guest.ok(
        "for n in $(seq 100); do test $(cat /sys/block/vda/size) = 98304 && break; sleep 0.1; done; cat /sys/block/vda/size",
    )?;
    ensure!(
        sectors.trim() == "98304",
        "the guest sees {sectors} sectors"
    );
    let zeroes =
        guest.ok("dd if=/dev/vda bs=1M skip=32 count=16 2>/dev/null | tr -d '\\0' | wc -c")?;
    ensure!(
        zeroes.trim() == "0",
        "{zeroes} bytes of its new part are not zero"
    );
    kernel_is_content(&mut guest)?;
    drop(guest);
    // The image keeps its new size. Configuration and daemon adopt it.
    rig.daemon.kill()?;
    rig.daemon.start_again()?;
    let shown: Value = control::get(&rig.daemon.control(), "/v1/disks/d")?;
    ensure!(shown["status"]["size"] == 48 << 20, "{shown}");
    rig.daemon.kill()?;
    has_leaks_at_most(rig.scratch.files(), "disk.qcow2")
}

#[test]
fn images_are_made_checked_and_converted_as_qemu_does() -> Result<()> {
    let scratch = Scratch::new()?;
    let at = scratch.files();
    lunette(at, &["create", "new.qcow2", "64M", "--cluster-size", "32K"])?;
    succeeds(at, "qemu-img", &["check", "new.qcow2"])?;
    succeeds(
        at,
        "qemu-io",
        &[
            "-c",
            "write -P 7 5M 3M",
            "-c",
            "write -P 9 60M 4M",
            "new.qcow2",
        ],
    )?;
    lunette(at, &["create", "overlay.qcow2", "--backing", "new.qcow2"])?;
    succeeds(
        at,
        "qemu-io",
        &[
            "-c",
            "write -P 8 6M 64k",
            "-c",
            "write -z 60M 1M",
            "overlay.qcow2",
        ],
    )?;

    let info: Value = serde_json::from_str(&lunette(at, &["info", "overlay.qcow2", "--json"])?)?;
    let theirs = succeeds(at, "qemu-img", &["info", "--output=json", "overlay.qcow2"])?;
    let theirs: Value = serde_json::from_str(&theirs)?;
    for key in [
        "virtual-size",
        "format",
        "cluster-size",
        "backing-filename",
        "backing-filename-format",
        "dirty-flag",
    ] {
        ensure!(info[key] == theirs[key], "{key}: {info} and {theirs}");
    }
    let chain: Value = serde_json::from_str(&lunette(
        at,
        &["info", "--chain", "overlay.qcow2", "--json"],
    )?)?;
    ensure!(chain[1]["virtual-size"] == 64 << 20, "{chain}");

    lunette(at, &["convert", "overlay.qcow2", "ours.raw", "--to", "raw"])?;
    succeeds(at, "qemu-img", &["compare", "overlay.qcow2", "ours.raw"])?;
    lunette(at, &["convert", "ours.raw", "back.qcow2", "--to", "qcow2"])?;
    succeeds(at, "qemu-img", &["compare", "overlay.qcow2", "back.qcow2"])?;
    succeeds(at, "qemu-img", &["check", "back.qcow2"])?;
    succeeds(
        at,
        "qemu-img",
        &["convert", "-c", "-O", "qcow2", "ours.raw", "small.qcow2"],
    )?;
    lunette(at, &["compare", "overlay.qcow2", "small.qcow2"])?;
    let map: Value = serde_json::from_str(&lunette(at, &["map", "overlay.qcow2", "--json"])?)?;
    let theirs = succeeds(at, "qemu-img", &["map", "--output=json", "overlay.qcow2"])?;
    let theirs: Value = serde_json::from_str(&theirs)?;
    ensure!(map == theirs, "{map} and {theirs}");

    images_are_resized(at)
}

fn images_are_resized(at: &Path) -> Result<()> {
    lunette(at, &["resize", "overlay.qcow2", "+16M"])?;
    let refused = run(
        at,
        &program()?,
        &["image", "resize", "overlay.qcow2", "32M"],
    )?;
    ensure!(
        text(&refused.stderr).contains("--shrink"),
        "{}",
        text(&refused.stderr)
    );
    lunette(at, &["resize", "overlay.qcow2", "32M", "--shrink"])?;
    succeeds(at, "qemu-img", &["check", "overlay.qcow2"])?;
    let differs = run(
        at,
        &program()?,
        &["image", "compare", "overlay.qcow2", "ours.raw"],
    )?;
    ensure!(
        differs.status.code() == Some(1) && text(&differs.stderr).contains("byte 63963136"),
        "{}",
        text(&differs.stderr)
    );
    let again = run(at, &program()?, &["image", "create", "new.qcow2", "1M"])?;
    ensure!(
        text(&again.stderr).contains("already exists"),
        "{}",
        text(&again.stderr)
    );
    Ok(())
}

/// A refcount that is too low is an error. One that is too high is a leak.
#[test]
fn check_distinguishes_corruption_from_leaks() -> Result<()> {
    let scratch = Scratch::new()?;
    let at = scratch.files();
    let disk = at.join("disk.qcow2");
    succeeds(
        at,
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "disk.qcow2", "8M"],
    )?;
    succeeds(at, "qemu-io", &["-c", "write -P 7 0 256k", "disk.qcow2"])?;
    // In a new image of QEMU the refcount block is the third cluster. Refcounts have 16 bits.
    let count_of = |cluster: usize| 2 * 65_536 + 2 * cluster + 1;
    std::fs::File::options()
        .write(true)
        .open(&disk)?
        .set_len(20 * 65_536)?;
    let sound = std::fs::read(&disk)?;
    for (cluster, count, code) in [(12, 1, 3), (6, 0, 2), (6, 2, 2)] {
        let mut wrong = sound.clone();
        wrong[count_of(cluster)] = count;
        std::fs::write(&disk, wrong)?;
        let ours = run(at, &program()?, &["image", "check", "disk.qcow2"])?;
        let theirs = run(at, "qemu-img", &["check", "disk.qcow2"])?;
        ensure!(
            ours.status.code() == Some(code) && theirs.status.code() == Some(code),
            "cluster {cluster}, count {count}: {}{}",
            text(&ours.stdout),
            text(&theirs.stdout)
        );
        lunette(at, &["check", "disk.qcow2", "--repair", "all"])?;
        succeeds(at, "qemu-img", &["check", "disk.qcow2"])?;
    }
    Ok(())
}
