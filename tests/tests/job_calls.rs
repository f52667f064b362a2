//! API calls while each kind of job runs: none of them waits for the job. Needs: qemu-img. Takes: 10 s.
#![forbid(unsafe_code)]

use end_to_end::{Context, Result, Rig, ensure};
use serde_json::Value;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, Instant};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, status};
use vm::wait_until;

/// Time limit of a call. The machine may be busy. At its speed limit a job takes two minutes.
const SOON: Duration = Duration::from_secs(15);
const SPEED: [&str; 2] = ["--speed", "64K"];
const MIB: usize = 1 << 20;

/// Creates an image with 4 MiB of data over a backing image with 8 MiB.
fn image_over_another() -> Result<Rig> {
    Rig::prepared(|scratch, daemon| {
        let create = |words: &[&str]| -> Result<()> {
            let output = Command::new("qemu-img")
                .args(words)
                .current_dir(scratch.files())
                .output()
                .context("cannot run qemu-img; hint: apt-get install qemu-utils")?;
            ensure!(output.status.success(), "qemu-img {words:?}: {output:?}");
            Ok(())
        };
        let file = |name: &str| scratch.file(name);
        std::fs::write(file("base.raw"), vec![7; 8 * MIB])?;
        create(&["convert", "-O", "qcow2", "base.raw", "base.qcow2"])?;
        let over = ["-b", "base.qcow2", "-F", "qcow2", "d.qcow2"];
        create(&[&["create", "-q", "-f", "qcow2"], &over[..]].concat())?;
        let disk = format!("d=image:{},cache=writeback", file("d.qcow2").display());
        Ok(daemon.disk(&disk).vhost_blk("d"))
    })
}

fn write_data(rig: &Rig) -> Result<()> {
    let mut front_end = FrontEnd::connect(&rig.socket("d"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 1, MIB, Layout::Separate)?;
    for at in 0..4 {
        let done = queue.write((at * MIB) as u64, &vec![9; MIB])?;
        ensure!(done == status::OK, "status {done}");
    }
    Ok(())
}

/// Makes a call, which may be refused, and checks its duration.
fn soon(rig: &Rig, words: &[&str]) -> Result<String> {
    let begun = Instant::now();
    let output = rig.daemon.ask(words)?;
    let took = begun.elapsed();
    ensure!(took < SOON, "{words:?} took {took:?}");
    let texts = [output.stdout, output.stderr].concat();
    Ok(String::from_utf8_lossy(&texts).into_owned())
}

fn state(rig: &Rig) -> Result<String> {
    let job: Value = control::get(&rig.daemon.control(), "/v1/disks/d/job")?;
    let state = job["state"].as_str();
    Ok(state.with_context(|| job.to_string())?.to_owned())
}

#[test]
fn refused_job_leaves_the_record_of_the_last_one() -> Result<()> {
    let rig = image_over_another()?;
    let target = |name: &str| format!("file:{}", rig.scratch.file(name).display());
    let (backup, nowhere) = (target("backup.raw"), target("missing/x.raw"));
    rig.daemon
        .lunette(&["disk", "backup", "d", &backup, "--wait"])?;
    let refused = soon(&rig, &["disk", "mirror", "d", &nowhere])?;
    ensure!(refused.contains("missing"), "{refused}");
    ensure!(state(&rig)? == "done", "{}", state(&rig)?);
    Ok(())
}

/// Only jobs that change the configuration of a disk need a daemon that persists changes.
#[test]
fn backup_needs_no_state_folder_and_mirror_needs_one() -> Result<()> {
    let rig = Rig::prepared(|scratch, daemon| {
        std::fs::write(scratch.file("d.raw"), vec![7; MIB])?;
        let disk = format!("d=file:{}", scratch.file("d.raw").display());
        Ok(daemon.without_state().disk(&disk).vhost_blk("d"))
    })?;
    let target = |name: &str| format!("file:{}", rig.scratch.file(name).display());
    let backup = target("backup.raw");
    rig.daemon
        .lunette(&["disk", "backup", "d", &backup, "--wait"])?;
    ensure!(std::fs::read(rig.scratch.file("backup.raw"))? == vec![7; MIB]);
    let refused = soon(&rig, &["disk", "mirror", "d", &target("mirror.raw")])?;
    ensure!(refused.contains("--state"), "{refused}");
    Ok(())
}

/// A read-only disk is copied to writable targets, and stays read-only. `lunette status` lists a failed job and a damaged image.
#[test]
fn status_names_failed_jobs_and_damaged_images() -> Result<()> {
    let rig = Rig::prepared(|scratch, daemon| {
        std::fs::write(scratch.file("r.raw"), vec![7; 2 * MIB])?;
        std::fs::write(scratch.file("old.raw"), vec![0; 2 * MIB])?;
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "d.qcow2", "8M"])
            .current_dir(scratch.files())
            .status()?;
        ensure!(made.success());
        // The first entry of the refcount table is gone.
        let image = std::fs::File::options()
            .write(true)
            .open(scratch.file("d.qcow2"))?;
        image.write_all_at(&[0; 8], 0x1_0000)?;
        let read_only = format!(
            "r=file:{},ro,cache=writeback",
            scratch.file("r.raw").display()
        );
        let image = format!(
            "d=image:{},cache=writeback",
            scratch.file("d.qcow2").display()
        );
        let daemon = daemon.disk(&read_only).disk(&image).vhost_blk("d");
        let export = format!("d:{},name=nbd-d", scratch.file("nbd").display());
        Ok(daemon.arguments(["--nbd", &export]))
    })?;
    let target = |name: &str| format!("file:{},cache=writeback", rig.scratch.file(name).display());
    let content = |name: &str| std::fs::read(rig.scratch.file(name));
    for name in ["new.raw", "old.raw"] {
        rig.daemon
            .lunette(&["disk", "backup", "r", &target(name), "--wait"])?;
        ensure!(content(name)? == vec![7; 2 * MIB]);
    }
    let own = soon(&rig, &["disk", "backup", "r", &target("r.raw")])?;
    ensure!(own.contains("the target is the medium of disk r"), "{own}");
    // The daemon's own export of the disk.
    let export = format!(
        "nbd+unix:///nbd-d?socket={}",
        rig.scratch.file("nbd").display()
    );
    let own = soon(&rig, &["disk", "backup", "d", &export])?;
    ensure!(own.contains("the target is the medium of disk d"), "{own}");
    rig.daemon.lunette(&[
        "disk",
        "mirror",
        "r",
        &target("moved.raw"),
        "--switch",
        "--wait",
    ])?;
    let disk = rig.daemon.lunette(&["disk", "show", "r"])?;
    ensure!(disk.contains("moved.raw"), "{disk}");
    let status: Value = control::get(&rig.daemon.control(), "/v1/status")?;
    ensure!(status["disks"][0]["read_only"] == true, "{status}");
    let text = soon(&rig, &["status"])?;
    ensure!(
        text.contains("warning: not as in the file: ~ disk r: path is ") && !text.contains("! "),
        "{text}"
    );

    let backup = target("gone.raw");
    rig.daemon.lunette(&["disk", "mirror", "d", &backup])?;
    std::fs::remove_file(rig.scratch.file("gone.raw"))?;
    let problem = "disk d: the last job, a mirror, failed: cannot use the target";
    let listed = wait_until(SOON, || {
        let text = soon(&rig, &["status"]).ok()?;
        text.contains(problem).then_some(())
    });
    ensure!(listed.is_some(), "{}", soon(&rig, &["status"])?);

    let mut front_end = FrontEnd::connect(&rig.socket("d"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 1, MIB, Layout::Separate)?;
    for at in 0..4 {
        queue.write((at * MIB) as u64, &vec![9; MIB])?;
    }
    let text = soon(&rig, &["status"])?;
    ensure!(
        text.contains("! disk d: ")
            && text.contains("d.qcow2: the image is ")
            && text.contains("hint: remove the disk, then lunette image check --repair all"),
        "{text}"
    );
    Ok(())
}

/// Names of the open files of the daemon in the test's folder.
fn open_files(rig: &Rig, pid: u32) -> Result<Vec<String>> {
    let folder = format!("/proc/{}/fd", pid);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        // A descriptor may be closed between the two calls.
        let Ok(path) = std::fs::read_link(entry?.path()) else {
            continue;
        };
        if path.starts_with(rig.scratch.files()) {
            names.extend(
                path.file_name()
                    .map(|name| name.to_string_lossy().into_owned()),
            );
        }
    }
    Ok(names)
}

/// A job closes the files that the disk does not use any more, while clients are connected.
#[test]
fn ended_job_closes_the_files_that_the_disk_has_left() -> Result<()> {
    let mut rig = image_over_another()?;
    let pid = rig.daemon.process().id();
    let mut front_end = FrontEnd::connect(&rig.socket("d"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 1, MIB, Layout::Separate)?;
    let path = |name: &str| rig.scratch.file(name).display().to_string();
    let (over, backup) = (
        path("over.qcow2"),
        format!("image:{}", path("backup.qcow2")),
    );
    let mirror = format!("image:{}", path("mirror.qcow2"));
    for (job, left, has) in [
        (&["stream", "d"][..], "base.qcow2", "d.qcow2"),
        (
            &["snapshot", "d", "--to", &over],
            "base.qcow2",
            "over.qcow2",
        ),
        (&["commit", "d"], "over.qcow2", "d.qcow2"),
        (&["backup", "d", &backup], "backup.qcow2", "d.qcow2"),
        (
            &["mirror", "d", &mirror, "--switch"],
            "d.qcow2",
            "mirror.qcow2",
        ),
    ] {
        // Each worker has the files open.
        let mut data = vec![0; MIB];
        for at in 0..8 {
            let done = queue.read((at * MIB) as u64, &mut data)?;
            ensure!(
                done == status::OK && data == vec![7; MIB],
                "{job:?}, status {done}"
            );
        }
        let wait: &[&str] = if job[0] == "snapshot" {
            &[]
        } else {
            &["--wait"]
        };
        rig.daemon.lunette(&[&["disk"], job, wait].concat())?;
        let open = open_files(&rig, pid)?;
        ensure!(
            open.iter().any(|name| name == has) && !open.iter().any(|name| name == left),
            "{job:?}: {open:?}"
        );
        if job[0] == "stream" {
            let disk: Value = control::get(&rig.daemon.control(), "/v1/disks/d")?;
            ensure!(
                disk["status"]["stack"] == serde_json::json!(["image"]),
                "{disk}"
            );
            for again in ["stream", "commit"] {
                let refused = soon(&rig, &["disk", again, "d"])?;
                ensure!(refused.contains("disk d has no backing image"), "{refused}");
            }
            // Another program can lock the old backing image and write it.
            let write = ["-c", "write -P 1 0 64k", &path("base.qcow2")];
            let output = Command::new("qemu-io").args(write).output()?;
            ensure!(output.status.success(), "{output:?}");
        }
    }
    Ok(())
}

#[test]
fn no_call_waits_for_a_job() -> Result<()> {
    let rig = image_over_another()?;
    let target = |name: &str| format!("file:{}", rig.scratch.file(name).display());
    for target in ["null:8M", "ram:8M", "delay:1us,size=8M,storage=ram"] {
        let answer = soon(&rig, &["disk", "mirror", "d", target, "--switch"])?;
        ensure!(answer.contains("loses its data"), "{answer}");
    }
    let (mirror, backup, other) = (
        target("mirror.raw"),
        target("backup.raw"),
        target("other.raw"),
    );
    for job in [
        &["mirror", "d", &mirror][..],
        &["backup", "d", &backup],
        &["stream", "d"],
        &["commit", "d"],
    ] {
        write_data(&rig)?;
        rig.daemon.lunette(&[&["disk"], job, &SPEED[..]].concat())?;
        ensure!(state(&rig)? == "running", "{job:?}: {}", state(&rig)?);
        soon(&rig, &["job", "pause", "d"])?;
        ensure!(state(&rig)? == "paused", "{job:?}: {}", state(&rig)?);
        soon(&rig, &["job", "resume", "d"])?;
        for refused in [
            &["disk", "remove", "d", "--force"][..],
            &["disk", "resize", "d", "16M"],
            &["disk", "backup", "d", &other],
        ] {
            let answer = soon(&rig, refused)?;
            let named = ["job", "lunette backup cancel backup-"];
            let is_named = named.iter().any(|name| answer.contains(name));
            ensure!(is_named, "{job:?}, {refused:?}: {answer}");
        }
        // The disk is served meanwhile.
        write_data(&rig)?;
        soon(&rig, &["job", "cancel", "d"])?;
        let is_over = || (!["running", "cancelling"].contains(&&*state(&rig).ok()?)).then_some(());
        wait_until(SOON, is_over).with_context(|| format!("{job:?} continues"))?;
    }
    Ok(())
}
