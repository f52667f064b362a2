//! Snapshots, mirrors, backups and streams of disks in use, with kills of the daemon in between. Checked by qemu-img. Needs: qemu-img,
//! a guest, Ceph. Takes: 40 s.
#![forbid(unsafe_code)]

use end_to_end::ceph::{CEPH_USER, Ceph};
use end_to_end::rig::{free_portal, kernel_is_content};
use end_to_end::{Context, GuestBuilder, Result, Rig, Scratch, Soak, ensure};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, VerifiedLoad, status};

const SOON: Duration = Duration::from_secs(60);

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn run(folder: &Path, program: &str, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(program);
    let ran = command.args(arguments).current_dir(folder).output();
    ran.with_context(|| format!("cannot run {program}; hint: apt-get install qemu-utils"))
}

/// Runs a command that must succeed and returns its standard output.
fn succeeds(folder: &Path, program: &str, arguments: &[&str]) -> Result<String> {
    let ran = run(folder, program, arguments)?;
    let (stdout, stderr) = (text(&ran.stdout), text(&ran.stderr));
    ensure!(
        ran.status.success(),
        "{program} {arguments:?}: {stdout}{stderr}"
    );
    Ok(stdout)
}

fn ask(rig: &Rig, words: &[&str]) -> Result<String> {
    rig.daemon.lunette(words)
}

fn refused(rig: &Rig, words: &[&str], expected: &str) -> Result<()> {
    let output = rig.daemon.ask(words)?;
    let stderr = text(&output.stderr);
    ensure!(
        !output.status.success() && stderr.contains(expected),
        "{words:?}: {stderr}"
    );
    Ok(())
}

fn shown(rig: &Rig, disk: &str) -> Result<Value> {
    let disk = format!("/v1/disks/{disk}");
    Ok(control::get(&rig.daemon.control(), &disk)?)
}

/// Returns a disk's back end and file name.
fn place(rig: &Rig, disk: &str) -> Result<String> {
    let shown = shown(rig, disk)?;
    let path = shown["path"].as_str().unwrap_or_default();
    let name = Path::new(path).file_name().unwrap_or_default();
    Ok(format!(
        "{}:{}",
        shown["backend"].as_str().unwrap_or_default(),
        name.display()
    ))
}

fn is_at(rig: &Rig, disk: &str, wanted: &str) -> Result<()> {
    let found = place(rig, disk)?;
    ensure!(
        found == wanted,
        "disk {disk} is at {found}, not at {wanted}"
    );
    Ok(())
}

/// Connects a driver to a disk, runs `work` and disconnects.
fn driver(rig: &Rig, disk: &str, work: impl FnOnce(&mut BlkQueue) -> Result<()>) -> Result<()> {
    let mut front_end = FrontEnd::connect(&rig.socket(disk), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 16, 1 << 20, Layout::Separate)?;
    work(&mut queue)
}

fn mark_at(nth: u64) -> u64 {
    (32 << 20) + nth * (192 << 10)
}

/// Checks all marks below `nth`, then writes mark `nth`.
fn mark(rig: &Rig, disk: &str, nth: u8) -> Result<()> {
    marks_are_there(rig, disk, nth)?;
    driver(rig, disk, |queue| {
        let written = queue.write(mark_at(nth.into()), &[nth + 1; 1024])?;
        ensure!(written == status::OK, "mark {nth}: status {written}");
        Ok(())
    })
}

fn marks_are_there(rig: &Rig, disk: &str, count: u8) -> Result<()> {
    driver(rig, disk, |queue| {
        for nth in 0..count {
            let mut bytes = vec![0; 1024];
            let read = queue.read(mark_at(nth.into()), &mut bytes)?;
            ensure!(read == status::OK, "mark {nth}: status {read}");
            ensure!(bytes == [nth + 1; 1024], "mark {nth} is not there");
        }
        Ok(())
    })
}

/// Runs `work` under verified load, writes a mark, kills and restarts the daemon, and checks all marks.
fn under_load(
    rig: &mut Rig,
    disk: &str,
    nth: u8,
    work: impl FnOnce(&Rig) -> Result<()>,
) -> Result<()> {
    let load = VerifiedLoad::start(&rig.socket(disk))?;
    load.expect_progress(SOON)?;
    work(rig)?;
    load.expect_progress(SOON)?;
    ensure!(load.finish()? > 0);
    mark(rig, disk, nth)?;
    rig.daemon.kill()?;
    rig.daemon.start_again()?;
    marks_are_there(rig, disk, nth + 1)
}

/// Two disks of 64 MiB in files.
fn two_disks() -> Result<Rig> {
    Rig::prepared(|scratch, daemon| {
        let disk = |name: &str| {
            let file = scratch.file(&format!("{name}.raw"));
            format!("{name}=file:{},size=64M,cache=writeback", file.display())
        };
        let daemon = daemon.disk(&disk("d0")).disk(&disk("d1"));
        let two_workers = ["--workers", "2"];
        Ok(daemon
            .vhost_blk("d0")
            .vhost_blk("d1")
            .arguments(two_workers))
    })
}

/// Load that writes the same number to one disk and, after its completion, to the other.
#[derive(Default)]
struct Turns {
    /// Last number on both disks.
    written: AtomicU64,
    is_over: AtomicBool,
}

impl Turns {
    /// Waits until more numbers are written.
    fn wait_for_more(&self) -> Result<()> {
        let before = self.written.load(Ordering::Relaxed);
        let more = || (self.written.load(Ordering::Relaxed) > before + 10).then_some(());
        vm::wait_until(SOON, more).context("the load does not progress")
    }
}

/// Writes until the end is requested. Returns the last number.
fn write_in_turns(rig: &Rig, turns: &Turns) -> Result<u64> {
    let connect = |disk: &str| FrontEnd::connect(&rig.socket(disk), &Options::default());
    let (mut first, mut second) = (connect("d0")?, connect("d1")?);
    let start = |front_end| {
        BlkQueue::start(
            front_end,
            0,
            &QueueOptions::default(),
            16,
            1 << 20,
            Layout::Separate,
        )
    };
    let (mut first, mut second) = (start(&mut first)?, start(&mut second)?);
    let mut number = 0_u64;
    while !turns.is_over.load(Ordering::Relaxed) {
        number += 1;
        let mut block = [0; 512];
        block[..8].copy_from_slice(&number.to_le_bytes());
        for queue in [&mut first, &mut second] {
            let answer = queue.write(1 << 20, &block)?;
            ensure!(answer == status::OK, "write {number}: status {answer}");
        }
        turns.written.store(number, Ordering::Relaxed);
    }
    Ok(number)
}

fn number_in(folder: &Path, image: &str) -> Result<u64> {
    let raw = format!("{image}.number");
    succeeds(
        folder,
        "qemu-img",
        &["convert", "-U", "-O", "raw", image, &raw],
    )?;
    let content = std::fs::read(folder.join(&raw))?;
    std::fs::remove_file(folder.join(&raw))?;
    let bytes = content[1 << 20..][..8].try_into()?;
    Ok(u64::from_le_bytes(bytes))
}

#[test]
fn snapshot_of_two_disks_is_of_one_moment() -> Result<()> {
    let rig = two_disks()?;
    let folder = rig.scratch.files();
    let turns = Turns::default();
    let last = std::thread::scope(|scope| -> Result<u64> {
        let writer = scope.spawn(|| write_in_turns(&rig, &turns));
        let snapshots = (1..=6).try_for_each(|nth| -> Result<()> {
            turns.wait_for_more()?;
            let (to_0, to_1) = (format!("d0-{nth}.qcow2"), format!("d1-{nth}.qcow2"));
            let path = |name: &str| rig.scratch.file(name).display().to_string();
            let (to_0, to_1) = (path(&to_0), path(&to_1));
            ask(
                &rig,
                &["disk", "snapshot", "d0", "d1", "--to", &to_0, "--to", &to_1],
            )?;
            Ok(())
        });
        let more = turns.wait_for_more();
        turns.is_over.store(true, Ordering::Relaxed);
        let written = writer.join().expect("the writer does not panic")?;
        snapshots
            .and(more)
            .with_context(|| "after the writer has ended well")?;
        Ok(written)
    })?;
    let mut before = 0;
    for nth in 0..6 {
        let image = |disk: &str| match nth {
            0 => format!("{disk}.raw"),
            nth => format!("{disk}-{nth}.qcow2"),
        };
        let (first, second) = (
            number_in(folder, &image("d0"))?,
            number_in(folder, &image("d1"))?,
        );
        ensure!(
            first == second || first == second + 1,
            "snapshot {nth}: {first} and {second}"
        );
        ensure!(first > before, "snapshot {nth}: {first} after {before}");
        before = first;
    }
    ensure!(before < last, "{before} of {last}");
    // Other programs may read the former disks but not write them.
    succeeds(folder, "qemu-img", &["info", "d0.raw", "-f", "raw"])?;
    succeeds(folder, "qemu-img", &["check", "d1-5.qcow2"])?;
    let held = run(
        folder,
        "qemu-img",
        &["resize", "-f", "raw", "d0.raw", "65M"],
    )?;
    ensure!(text(&held.stderr).contains("lock"), "{held:?}");
    is_at(&rig, "d0", "image:d0-6.qcow2")?;
    let stack = &shown(&rig, "d0")?["status"]["stack"];
    ensure!(
        stack
            .as_array()
            .is_some_and(|stack| stack.len() == 7 && stack[6] == "file"),
        "{stack}"
    );
    Ok(())
}

#[test]
fn disk_continues_in_its_snapshot_after_kills() -> Result<()> {
    let mut rig = two_disks()?;
    let identity = shown(&rig, "d0")?["status"]["identity"].clone();
    let path = |rig: &Rig, name: &str| rig.scratch.file(name).display().to_string();
    mark(&rig, "d0", 0)?;
    for nth in 1..=3 {
        let to = path(&rig, &format!("new-{nth}.qcow2"));
        under_load(&mut rig, "d0", nth, |rig| {
            ask(rig, &["disk", "snapshot", "d0", "--to", &to]).map(drop)
        })?;
        is_at(&rig, "d0", &format!("image:new-{nth}.qcow2"))?;
        ensure!(shown(&rig, "d0")?["status"]["identity"] == identity);
    }
    let again = path(&rig, "new-3.qcow2");
    refused(
        &rig,
        &["disk", "snapshot", "d0", "--to", &again],
        "already exists",
    )?;
    refused(
        &rig,
        &["disk", "snapshot", "d9", "--to", &again],
        "there is no disk",
    )?;
    let other = path(&rig, "other.qcow2");
    let both = [
        "disk", "snapshot", "d1", "d0", "--to", &other, "--to", &again,
    ];
    refused(&rig, &both, "already exists")?;
    ensure!(!rig.scratch.file("other.qcow2").exists());
    is_at(&rig, "d1", "file:d1.raw")?;

    // Copies all data into the top image, so that it needs no backing image.
    under_load(&mut rig, "d0", 4, |rig| {
        ask(rig, &["disk", "stream", "d0", "--wait"]).map(drop)
    })?;
    ensure!(rig.daemon.stop(SOON)?.success());
    let folder = rig.scratch.files().to_owned();
    // A kill may leave leaked clusters, but no other error.
    let checked = run(&folder, "qemu-img", &["check", "new-3.qcow2"])?;
    ensure!(matches!(checked.status.code(), Some(0 | 3)), "{checked:?}");
    let info = succeeds(&folder, "qemu-img", &["info", "new-3.qcow2"])?;
    ensure!(!info.contains("backing file"), "{info}");
    for below in ["d0.raw", "new-1.qcow2", "new-2.qcow2"] {
        std::fs::remove_file(folder.join(below))?;
    }
    rig.daemon.start_again()?;
    marks_are_there(&rig, "d0", 5)
}

#[test]
fn disk_goes_back_into_its_base_step_by_step() -> Result<()> {
    let mut rig = two_disks()?;
    let path = |rig: &Rig, name: &str| rig.scratch.file(name).display().to_string();
    let folder = rig.scratch.files().to_owned();
    refused(&rig, &["disk", "commit", "d0"], "has no backing image")?;
    mark(&rig, "d0", 0)?;
    for (nth, name) in [(1, "a.qcow2"), (2, "b.qcow2")] {
        let to = path(&rig, name);
        under_load(&mut rig, "d0", nth, |rig| {
            ask(rig, &["disk", "snapshot", "d0", "--to", &to]).map(drop)
        })?;
    }
    // Another image has the same backing image, whose content must not change.
    let other = path(&rig, "other.qcow2");
    let create = [
        "create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", &other,
    ];
    succeeds(&folder, "qemu-img", &create)?;
    ask(&rig, &["disk", "add", &format!("e=image:{other},ro=on")])?;
    refused(&rig, &["disk", "commit", "d0"], "in use")?;
    let held = run(&folder, "qemu-img", &["info", "b.qcow2"])?;
    ensure!(
        text(&held.stderr).contains("lock"),
        "its lock is gone: {held:?}"
    );
    marks_are_there(&rig, "d0", 3)?;
    ask(&rig, &["disk", "remove", "e"])?;

    // A cancelled or killed commit leaves the disk on its image.
    let slow = ["disk", "commit", "d0", "--speed", "64K"];
    under_load(&mut rig, "d0", 3, |rig| {
        ask(rig, &slow)?;
        ask(rig, &["job", "cancel", "d0"])?;
        is_at(rig, "d0", "image:b.qcow2")?;
        succeeds(&folder, "qemu-img", &["info", "a.qcow2"])?;
        ask(rig, &slow).map(drop)
    })?;
    is_at(&rig, "d0", "image:b.qcow2")?;
    for (nth, wanted) in [(4, "image:a.qcow2"), (5, "file:d0.raw")] {
        under_load(&mut rig, "d0", nth, |rig| {
            ask(rig, &["disk", "commit", "d0", "--wait"])?;
            is_at(rig, "d0", wanted)
        })?;
        is_at(&rig, "d0", wanted)?;
    }
    ensure!(rig.daemon.stop(SOON)?.success());
    for image in ["a.qcow2", "b.qcow2"] {
        let checked = run(&folder, "qemu-img", &["check", image])?;
        ensure!(matches!(checked.status.code(), Some(0 | 3)), "{checked:?}");
    }
    // The former images are unused.
    for image in ["a.qcow2", "b.qcow2"] {
        std::fs::remove_file(folder.join(image))?;
    }
    rig.daemon.start_again()?;
    marks_are_there(&rig, "d0", 6)
}

#[test]
fn disk_moves_to_an_image_and_to_an_iscsi_unit_and_back() -> Result<()> {
    const TARGET: &str = "iqn.2026-11.org.example:far";
    let mut rig = two_disks()?;
    let portal = free_portal()?.to_string();
    let far = rig.beside(|daemon| {
        let target = format!("{TARGET}=r");
        let serves = ["--iscsi", &target, "--portal", &portal, "--demo-mode", "rw"];
        daemon.disk("r=ram:64M").arguments(serves)
    })?;
    let path = |name: &str| rig.scratch.file(name).display().to_string();
    let (image, raw) = (path("moved.qcow2"), path("back.raw"));
    let unit = format!("iscsi://{portal}/{TARGET}/0");
    let places = [
        (
            format!("image:{image},cache=writeback"),
            "image:moved.qcow2",
        ),
        (unit, "iscsi:"),
        // The remote RAM disk has no volatile cache, and clients were informed of that.
        (format!("file:{raw},cache=writethrough"), "file:back.raw"),
    ];
    for (nth, (target, wanted)) in (0..).zip(places) {
        let mirror = [
            "disk", "mirror", "d0", &target, "--speed", "40M", "--switch", "--wait",
        ];
        under_load(&mut rig, "d0", nth, |rig| {
            ask(rig, &mirror)?;
            is_at(rig, "d0", wanted)
        })?;
        is_at(&rig, "d0", wanted)?;
        let stack = &shown(&rig, "d0")?["status"]["stack"];
        ensure!(
            stack.as_array().is_some_and(|stack| stack.len() == 1),
            "{stack}"
        );
    }
    ensure!(rig.daemon.stop(SOON)?.success());
    let folder = rig.scratch.files();
    let checked = run(folder, "qemu-img", &["check", "moved.qcow2"])?;
    ensure!(matches!(checked.status.code(), Some(0 | 3)), "{checked:?}");
    drop(far);
    Ok(())
}

#[test]
fn disk_moves_into_a_ceph_cluster_and_out_again() -> Result<()> {
    let ceph = Ceph::start()?;
    ceph.rbd(&["create", "--size", "64", "rbd/moved"])?;
    let mut rig = two_disks()?;
    let image = rig.scratch.file("out.qcow2").display().to_string();
    let (conf, keyring) = (ceph.conf(), ceph.keyring());
    let rbd = format!(
        "rbd:rbd/moved,conf={},id={CEPH_USER},keyring={}",
        conf.display(),
        keyring.display()
    );
    let places = [
        (rbd, "rbd:"),
        // The disk in the cluster has no volatile cache.
        (
            format!("image:{image},cache=writethrough"),
            "image:out.qcow2",
        ),
    ];
    for (nth, (target, wanted)) in (0..).zip(places) {
        let mirror = ["disk", "mirror", "d0", &target, "--switch", "--wait"];
        under_load(&mut rig, "d0", nth, |rig| {
            ask(rig, &mirror)?;
            is_at(rig, "d0", wanted)
        })?;
        is_at(&rig, "d0", wanted)?;
    }
    Ok(())
}

/// Waits until the disk's layers are `wanted`. The job changes them on its own thread, which runs late on a busy machine.
fn stack_becomes(rig: &Rig, wanted: &str) -> Result<()> {
    let mut now = String::new();
    let is_so = vm::wait_until(SOON, || {
        now = shown(rig, "d0").ok()?["status"]["stack"].to_string();
        (now == wanted).then_some(())
    });
    is_so.with_context(|| format!("{now} does not become {wanted}"))
}

#[test]
fn mirror_that_is_killed_or_cancelled_leaves_its_disk() -> Result<()> {
    let mut rig = two_disks()?;
    let path = |rig: &Rig, name: &str| rig.scratch.file(name).display().to_string();
    let load = VerifiedLoad::start(&rig.socket("d0"))?;
    load.expect_progress(SOON)?;
    let slow = format!("file:{},cache=writeback", path(&rig, "slow.raw"));
    let slow = ["disk", "mirror", "d0", &slow, "--speed", "4M"];
    ask(&rig, &slow)?;
    load.expect_progress(SOON)?;
    stack_becomes(&rig, r#"["mirror","file"]"#)?;
    // A disk has at most one job. Meanwhile its size and location cannot change.
    refused(&rig, &slow, "has a running mirror")?;
    refused(
        &rig,
        &["disk", "resize", "d0", "65M"],
        "has a running mirror",
    )?;
    let to = path(&rig, "snapshot.qcow2");
    refused(
        &rig,
        &["disk", "snapshot", "d0", "--to", &to],
        "has a running mirror",
    )?;
    ensure!(load.finish()? > 0);
    mark(&rig, "d0", 0)?;
    rig.daemon.kill()?;
    rig.daemon.start_again()?;
    marks_are_there(&rig, "d0", 1)?;
    is_at(&rig, "d0", "file:d0.raw")?;
    refused(&rig, &["job", "show", "d0"], "has no job")?;

    let load = VerifiedLoad::start(&rig.socket("d0"))?;
    ask(&rig, &slow)?;
    ask(&rig, &["job", "pause", "d0"])?;
    let listed = ask(&rig, &["job", "list"])?;
    ensure!(listed.contains("paused"), "{listed}");
    ask(&rig, &["job", "speed", "d0", "none"])?;
    ask(&rig, &["job", "resume", "d0"])?;
    ask(&rig, &["job", "wait", "d0"])?;
    load.expect_progress(SOON)?;
    let ready = ask(&rig, &["job", "show", "d0"])?;
    ensure!(
        ready.contains("ready") && ready.contains("100 %"),
        "{ready}"
    );
    ask(&rig, &["job", "cancel", "d0"])?;
    load.expect_progress(SOON)?;
    stack_becomes(&rig, r#"["file"]"#)?;
    refused(&rig, &["job", "wait", "d0"], "cancelled")?;

    // Unsuitable targets are refused, and newly created target files are removed.
    ask(&rig, &["disk", "add", "r=ram:1M"])?;
    for kind in ["file", "image"] {
        let target = format!("{kind}:{},cache=writeback", path(&rig, "new"));
        refused(
            &rig,
            &["disk", "mirror", "r", &target],
            "volatile write cache",
        )?;
        ensure!(!rig.scratch.file("new").exists(), "{kind}");
    }
    std::fs::write(rig.scratch.file("small.raw"), vec![0; 1 << 20])?;
    let small = format!("file:{},cache=writeback", path(&rig, "small.raw"));
    refused(&rig, &["disk", "mirror", "d0", &small], "1048576")?;
    let used = format!("file:{},cache=writeback", path(&rig, "d1.raw"));
    refused(&rig, &["disk", "mirror", "d0", &used], "in use")?;
    refused(&rig, &["disk", "stream", "d0"], "has no backing image")?;
    ensure!(load.finish()? > 0);
    is_at(&rig, "d0", "file:d0.raw")
}

/// If the target is truncated or replaced, the job fails and the disk stays on its source.
#[test]
fn mirror_whose_target_is_changed_by_another_program_fails() -> Result<()> {
    let rig = two_disks()?;
    let ready = |path: &Path, speed: &str| -> Result<()> {
        let target = format!("file:{},cache=writeback", path.display());
        ask(&rig, &["disk", "mirror", "d0", &target, "--speed", speed]).map(drop)
    };
    let fails = |why: &[&str]| -> Result<()> {
        let outcome = rig.daemon.ask(&["job", "wait", "d0"])?;
        let stderr = text(&outcome.stderr);
        let names_reason = why.iter().all(|part| stderr.contains(part));
        ensure!(
            !outcome.status.success() && names_reason,
            "{why:?}: {outcome:?}"
        );
        is_at(&rig, "d0", "file:d0.raw")?;
        stack_becomes(&rig, r#"["file"]"#)
    };
    mark(&rig, "d0", 0)?;
    // Truncates the target during the copy. Without the check, the rest of the copy would extend the file to its former size.
    let path = rig.scratch.file("copying.raw");
    driver(&rig, "d0", |queue| {
        let written = queue.write(0, &vec![5; 1 << 20])?;
        let again = queue.write(1 << 20, &vec![6; 1 << 20])?;
        ensure!(written == status::OK && again == status::OK);
        Ok(())
    })?;
    ready(&path, "256K")?;
    let truncate = |path: &Path| {
        let file = std::fs::File::options().write(true).open(path);
        file.and_then(|file| file.set_len(4096))
    };
    truncate(&path)?;
    // A write of a client or of the copy may come before the next check.
    fails(&[&path.display().to_string(), "bytes instead of 67108864"])?;
    // Changes the target of a complete mirror that waits for the switch.
    for is_replaced in [false, true] {
        let path = rig.scratch.file(&format!("ready-{is_replaced}.raw"));
        ready(&path, "0")?;
        ask(&rig, &["job", "wait", "d0"])?;
        match is_replaced {
            false => truncate(&path)?,
            true => {
                std::fs::write(rig.scratch.file("other"), [0; 512])?;
                std::fs::rename(rig.scratch.file("other"), &path)?;
            }
        }
        // The job may have failed already.
        rig.daemon.ask(&["job", "switch", "d0"])?;
        let size = if is_replaced {
            "512 bytes"
        } else {
            "4096 bytes"
        };
        fails(&[&path.display().to_string(), size])?;
    }
    marks_are_there(&rig, "d0", 1)
}

/// Copies `d0` under the load. Returns the last number before the start, after the start and after the end, and the number in the copy.
fn backup_under_load(rig: &Rig, turns: &Turns, moment: &str) -> Result<[u64; 4]> {
    let name = format!("{moment}.qcow2");
    let target = format!(
        "image:{},cache=writeback",
        rig.scratch.file(&name).display()
    );
    let number = || turns.written.load(Ordering::Relaxed);
    turns.wait_for_more()?;
    let before = number();
    let backup = ["disk", "backup", "d0", &target, "--at", moment];
    ask(rig, &[&backup[..], &["--speed", "256K"]].concat())?;
    let begun = number();
    turns.wait_for_more()?;
    ask(rig, &["job", "speed", "d0", "none"])?;
    ask(rig, &["job", "wait", "d0"])?;
    let ended = number();
    let found = number_in(rig.scratch.files(), &name)?;
    succeeds(rig.scratch.files(), "qemu-img", &["check", &name])?;
    Ok([before, begun, ended, found])
}

/// The daemon ends during the test. Here an orderly stop is equivalent to a kill.
#[test]
fn backup_has_the_content_at_its_start_or_at_its_end() -> Result<()> {
    let mut rig = two_disks()?;
    // The copy takes half a minute at its first speed, and is set free when the load has written more.
    driver(&rig, "d0", |queue| {
        for at in 8..16 {
            ensure!(queue.write(at << 20, &vec![5; 1 << 20])? == status::OK);
        }
        Ok(())
    })?;
    let turns = Turns::default();
    let [at_start, at_end] = std::thread::scope(|scope| -> Result<_> {
        let writer = scope.spawn(|| write_in_turns(&rig, &turns));
        let moments = ["start", "end"].map(|moment| backup_under_load(&rig, &turns, moment));
        turns.is_over.store(true, Ordering::Relaxed);
        writer.join().expect("the writer does not panic")?;
        Ok(moments)
    })?;
    // A write that is not yet counted may be on the disk.
    let [before, begun, ended, found] = at_start?;
    ensure!(
        (before..=begun + 1).contains(&found) && begun + 1 < ended,
        "{found} at the start, between {before} and {begun}"
    );
    let [_, begun, ended, found] = at_end?;
    ensure!(
        (begun..=ended + 1).contains(&found),
        "{found} at the end, between {begun} and {ended}"
    );
    is_at(&rig, "d0", "file:d0.raw")?;
    let slow = rig.scratch.file("slow.raw").display().to_string();
    let slow = format!("file:{slow},cache=writeback");
    ask(&rig, &["disk", "backup", "d1", &slow, "--speed", "1M"])?;
    ensure!(rig.daemon.stop(SOON)?.success());
    Ok(())
}

/// A snapshot of two file systems in use is crash-consistent, and the guest continues.
#[test]
fn guest_is_snapshotted_and_moved_while_it_writes() -> Result<()> {
    let mut rig = two_disks()?;
    let path = |rig: &Rig, name: &str| rig.scratch.file(name).display().to_string();
    succeeds(
        rig.scratch.files(),
        "mke2fs",
        &["-q", "-t", "ext4", "d0.raw"],
    )?;
    let mut guest = GuestBuilder::new("jobs")
        .cpus(2)
        .vhost_user_blk(&rig.socket("d0"), 2)
        .vhost_user_blk(&rig.socket("d1"), 2)
        .boot()?;
    guest.wait_for_disks(&["vda", "vdb"])?;
    guest.ok("mount -t ext4 /dev/vda /mnt")?;
    let files = guest.start(
        "for n in $(seq 400); do dd if=/dev/urandom of=/mnt/$n bs=64k count=1 conv=fsync 2>/dev/null || exit 1; rm -f /mnt/$((n - 50)); done; echo written",
    )?;
    let soak = Soak::start(&mut guest, "--file /dev/vdb --seed 38 --depth 8 --pause 2")?;
    rig.daemon.wait_for_requests("d0", 100)?;
    let (a, b) = (path(&rig, "a.qcow2"), path(&rig, "b.qcow2"));
    let both = ["disk", "snapshot", "d0", "d1", "--to", &a, "--to", &b];
    ask(&rig, &both)?;
    succeeds(
        rig.scratch.files(),
        "qemu-img",
        &["convert", "-f", "raw", "-O", "raw", "d0.raw", "taken.raw"],
    )?;
    rig.daemon.kill()?;
    rig.daemon.start_again()?;
    let moved = format!("file:{},cache=writeback", path(&rig, "moved.raw"));
    ask(
        &rig,
        &["disk", "mirror", "d1", &moved, "--switch", "--wait"],
    )?;
    rig.daemon.kill()?;
    rig.daemon.start_again()?;
    ask(&rig, &["disk", "stream", "d0", "--wait"])?;
    soak.finish(&mut guest)
        .with_context(|| rig.daemon.process().log_tail())?;
    let written = guest.wait_ok(files, Duration::from_secs(180))?;
    ensure!(written.contains("written"), "{written}");
    guest.ok("umount /mnt")?;
    kernel_is_content(&mut guest)?;
    drop(guest);
    is_at(&rig, "d0", "image:a.qcow2")?;
    is_at(&rig, "d1", "file:moved.raw")?;
    ensure!(rig.daemon.stop(SOON)?.success());
    let end = ["convert", "-f", "qcow2", "-O", "raw", "a.qcow2", "end.raw"];
    succeeds(rig.scratch.files(), "qemu-img", &end)?;
    succeeds(rig.scratch.files(), "e2fsck", &["-fn", "end.raw"])?;
    // As after a power loss, the journal is replayed and the file system is then clean.
    let folder = Scratch::new()?;
    std::fs::rename(rig.scratch.file("taken.raw"), folder.file("taken.raw"))?;
    let at = folder.files();
    let replayed = run(at, "e2fsck", &["-p", "-E", "journal_only", "taken.raw"])?;
    ensure!(
        replayed.status.code().is_some_and(|code| code <= 1),
        "{replayed:?}"
    );
    succeeds(at, "e2fsck", &["-fn", "taken.raw"])?;
    Ok(())
}

/// The cost of a job follows allocated data. Cancelling waits for one step of the job.
#[test]
fn jobs_of_huge_empty_images_end_soon_and_are_cancelled_at_once() -> Result<()> {
    let rig = Rig::prepared(|scratch, daemon| {
        let folder = scratch.files();
        for (name, more) in [
            ("base.qcow2", &[][..]),
            ("over.qcow2", &["-b", "base.qcow2", "-F", "qcow2"]),
        ] {
            let create = [&["create", "-q", "-f", "qcow2"], more, &[name, "32T"]].concat();
            succeeds(folder, "qemu-img", &create)?;
        }
        let over = scratch.file("over.qcow2").display().to_string();
        Ok(daemon.disk(&format!("d=image:{over}")))
    })?;
    let target = format!("image:{}", rig.scratch.file("copy.qcow2").display());
    let begun = Instant::now();
    ask(&rig, &["disk", "mirror", "d", &target, "--speed", "1K"])?;
    ask(&rig, &["job", "cancel", "d"])?;
    ensure!(
        begun.elapsed() < Duration::from_secs(10),
        "cancel: {:?}",
        begun.elapsed()
    );
    let begun = Instant::now();
    ask(&rig, &["disk", "stream", "d", "--speed", "1M", "--wait"])?;
    ensure!(
        begun.elapsed() < Duration::from_secs(20),
        "stream: {:?}",
        begun.elapsed()
    );
    let target = format!("image:{}", rig.scratch.file("backup.qcow2").display());
    let begun = Instant::now();
    ask(&rig, &["disk", "backup", "d", &target, "--wait"])?;
    ensure!(
        begun.elapsed() < Duration::from_secs(30),
        "backup: {:?}",
        begun.elapsed()
    );
    Ok(())
}
