//! `lunette job`, and the actions of `lunette disk` that start a job.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use config::{DEVICE_KINDS, DiskConfig, ExportAddress, Flags, parse_size};
use control::objects::{Disk, Job, JobSettings, JobState, NewJob, NewSnapshot, SnapshotDisk};
use control::{Method, escape};
use serde_json::json;

use super::arguments::{Ask, DiskBackup, JobAction, JobCommand, Speed};
use super::table::Table;
use super::{force, print_json, read_flags, size_text};
use crate::failure::{Failure, Outcome};

/// Poll interval while waiting for a job.
const PAUSE: Duration = Duration::from_millis(200);

pub fn run(command: JobCommand) -> Outcome {
    let ask = &command.ask;
    match command.action {
        JobAction::List => {
            let jobs: Vec<Job> = ask.daemon.client()?.get("/v1/jobs")?;
            ask.print(&jobs, table)
        }
        JobAction::Show { disk } => {
            let job: Job = ask.daemon.client()?.get(&path(&disk))?;
            ask.print(&[job], table)
        }
        JobAction::Pause { disk } => set(ask, &disk, Some(true), None),
        JobAction::Resume { disk } => set(ask, &disk, Some(false), None),
        JobAction::Speed { disk, speed } => set(ask, &disk, None, Some(bytes_of(&speed)?)),
        JobAction::Switch {
            disk,
            force: forced,
        } => {
            let path = format!("{}/switch{}", path(&disk), force(forced));
            ask.daemon.client()?.change(Method::POST, &path, None)?;
            wait(ask, &disk, Until::Ended)
        }
        JobAction::Cancel { disk } => ask.change(Method::DELETE, &path(&disk), None),
        JobAction::Wait { disk } => wait(ask, &disk, Until::EndedOrReady),
    }
}

pub fn mirror(ask: &Ask, disk: &str, target: &str, how: &Speed, switch: bool) -> Outcome {
    let job = NewJob {
        switch,
        ..copy("mirror", disk, target, how)?
    };
    begin(ask, disk, &job, how.wait)
}

pub fn backup(ask: &Ask, backup: &DiskBackup) -> Outcome {
    let DiskBackup { disk, how, .. } = backup;
    let job = NewJob {
        incremental: backup.incremental.clone(),
        at: Some(backup.at.clone()),
        scratch: backup.scratch.folder(),
        scratch_limit: backup.scratch.limit()?,
        ..copy("backup", disk, &backup.target, how)?
    };
    begin(ask, disk, &job, how.wait)
}

/// Refuses a target without the word of a device, such as a bare path.
pub(super) fn check_target(kind: &str, disk: &str, target: &str) -> Result<(), String> {
    let word = target.split_once(':').map_or(target, |(word, _)| word);
    let is_kind = DEVICE_KINDS.iter().any(|(known, _)| *known == word);
    if is_kind || ExportAddress::looks_like_one(target) {
        return Ok(());
    }
    let of_path = match Path::new(target)
        .extension()
        .is_some_and(|end| end == "qcow2")
    {
        true => "image",
        false => "file",
    };
    Err(format!(
        "target {target}: must be file:PATH, image:PATH (qcow2), rbd:POOL/IMAGE, iscsi://HOST[:PORT]/TARGET/LUN or nbd://HOST/EXPORT; \
         hint: lunette disk {kind} {disk} {of_path}:{target}"
    ))
}

pub(super) fn copy(kind: &str, disk: &str, target: &str, how: &Speed) -> Result<NewJob, Failure> {
    check_target(kind, disk, target).map_err(Failure::mistake)?;
    let flags = Flags {
        disk: vec![format!("{disk}={target}")],
        ..Flags::default()
    };
    let read = read_flags(&flags, &[])?.disks.into_iter().next();
    let Some(target) = read else {
        return Err(Failure::mistake(format!(
            "{target:?} is not a block device"
        )));
    };
    let body = body(target);
    Ok(NewJob {
        kind: kind.to_owned(),
        target: Some(json!(body)),
        speed: how.bytes()?,
        ..NewJob::default()
    })
}

/// Starts a job within the images of a disk: a stream or a commit.
pub fn within(ask: &Ask, kind: &str, disk: &str, how: &Speed) -> Outcome {
    let job = NewJob {
        kind: kind.to_owned(),
        speed: how.bytes()?,
        ..NewJob::default()
    };
    begin(ask, disk, &job, how.wait)
}

pub fn snapshot(ask: &Ask, disks: &[String], to: &[String]) -> Outcome {
    if disks.len() != to.len() {
        return Err(Failure::mistake(format!(
            "found {} disks and {} images; hint: give --to once for each disk, in the same order",
            disks.len(),
            to.len()
        )));
    }
    let disks = disks.iter().zip(to).map(|(disk, path)| SnapshotDisk {
        disk: disk.clone(),
        path: absolute(Path::new(path)).display().to_string(),
    });
    let body = json!(NewSnapshot {
        disks: disks.collect()
    });
    ask.change(Method::POST, "/v1/snapshot", Some(&body))
}

/// Returns a disk as the body of a request. Its paths are absolute, because the daemon may run in another folder.
pub(super) fn body(mut disk: DiskConfig) -> Disk {
    disk.backend = disk.backend.at_absolute_paths();
    Disk::new(&disk.name, disk.backend.word(), disk.body_values())
}

fn absolute(path: &Path) -> std::path::PathBuf {
    std::path::absolute(path).unwrap_or(path.to_owned())
}

fn begin(ask: &Ask, disk: &str, job: &NewJob, waits: bool) -> Outcome {
    let client = ask.daemon.client()?;
    let (_, begun) = client.change(Method::POST, &path(disk), Some(&json!(job)))?;
    match (waits, ask.json) {
        (true, _) if job.switch => wait(ask, disk, Until::Ended),
        (true, _) => wait(ask, disk, Until::EndedOrReady),
        (false, true) => print_json(&begun),
        (false, false) => Ok(writeln!(
            cli_common::stderr(),
            "{} of disk {disk} started; hint: lunette job wait {disk}",
            job.kind
        )?),
    }
}

fn path(disk: &str) -> String {
    format!("/v1/disks/{}/job", escape(disk))
}

fn set(ask: &Ask, disk: &str, paused: Option<bool>, speed: Option<u64>) -> Outcome {
    let settings = JobSettings { paused, speed };
    ask.change(Method::PUT, &path(disk), Some(&json!(settings)))
}

fn bytes_of(text: &str) -> Result<u64, Failure> {
    match text {
        "none" => Ok(0),
        _ => parse_size(text).map_err(|_| {
            Failure::mistake(format!(
                "{text:?} is not a speed; give bytes per second such as 100M or 1G, or none"
            ))
        }),
    }
}

impl Speed {
    pub(super) fn bytes(&self) -> Result<Option<u64>, Failure> {
        self.speed.as_deref().map(bytes_of).transpose()
    }
}

/// End of the wait for a job.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Until {
    /// The job has ended, or its switch has failed.
    Ended,
    /// The job has ended, or is ready and needs a command.
    EndedOrReady,
}

/// Waits for a job. The exit code is the job's result.
pub(super) fn wait(ask: &Ask, disk: &str, until: Until) -> Outcome {
    let client = ask.daemon.client()?;
    let shows = std::io::stderr().is_terminal();
    let mut is_first = true;
    loop {
        let job: Job = client.get(&path(disk))?;
        // A job that is ready at the first poll may be switching already.
        let is_complete = until == Until::EndedOrReady && !is_first;
        let needs_command = job.state == JobState::Ready && (is_complete || job.reason.is_some());
        if shows {
            let mut stderr = cli_common::stderr();
            stderr.control("\r\x1b[K")?;
            write!(stderr, "{}", progress(&job))?;
        }
        if job.state.has_ended() || needs_command {
            if shows {
                writeln!(cli_common::stderr())?;
            }
            return ended(ask, &job);
        }
        is_first = false;
        std::thread::sleep(PAUSE);
    }
}

fn ended(ask: &Ask, job: &Job) -> Outcome {
    if ask.json {
        print_json(job)?;
    }
    let Job { kind, disk, .. } = job;
    match (job.state, &job.reason) {
        // The table and the JSON contain these numbers already.
        (JobState::Done, _) if kind == "backup" && !ask.json => Ok(writeln!(
            cli_common::stderr(),
            "backup of disk {disk} complete: copied {} of {} to {}",
            size_text(job.copied),
            size_text(job.total),
            job.target.as_deref().unwrap_or("its target")
        )?),
        (JobState::Done, _) => Ok(()),
        (JobState::Ready, None) if job.backup.is_some() => Ok(writeln!(
            cli_common::stderr(),
            "disk {disk} is served for a backup; hint: lunette backup end {}",
            job.backup.as_deref().unwrap_or_default()
        )?),
        (JobState::Ready, None) => {
            let hint = format!("hint: lunette job switch {disk}");
            Ok(writeln!(
                cli_common::stderr(),
                "mirror of disk {disk} complete and kept in sync; {hint}"
            )?)
        }
        (state, Some(reason)) => Err(Failure::because(format!(
            "{kind} of disk {disk} {}: {reason}",
            state.word()
        ))),
        (state, None) => Err(Failure::because(format!(
            "{kind} of disk {disk} {}",
            state.word()
        ))),
    }
}

fn per_cent(job: &Job) -> String {
    let part = job.done as f64 / (job.total as f64).max(1.0);
    format!("{:.0} %", part * 100.0)
}

fn progress(job: &Job) -> String {
    format!(
        "{} of {}: {}, {} of {} ({})",
        job.kind,
        job.disk,
        job.state.word(),
        size_text(job.done),
        size_text(job.total),
        per_cent(job)
    )
}

pub(super) fn table(jobs: &[Job]) -> Table {
    let head = Table::new(&[
        "DISK", "JOB", "STATE", "DONE", "OF", "", "COPIED", "TIME", "TARGET", "REASON",
    ]);
    jobs.iter().fold(head, |table, job| {
        table.row([
            job.disk.clone(),
            job.kind.clone(),
            job.state.word().to_owned(),
            size_text(job.done),
            size_text(job.total),
            per_cent(job),
            size_text(job.copied),
            format!("{} s", job.seconds),
            job.target.clone().unwrap_or_default(),
            job.reason.clone().unwrap_or_default(),
        ])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_sizes_or_none() {
        assert_eq!(bytes_of("100M").ok(), Some(100 << 20));
        assert_eq!(bytes_of("none").ok(), Some(0));
        assert!(bytes_of("fast").is_err());
    }

    #[test]
    fn target_without_a_device_names_the_forms() {
        for (target, form) in [
            ("/a/b.raw", "hint: lunette disk backup d0 file:/a/b.raw"),
            ("b.qcow2", "hint: lunette disk backup d0 image:b.qcow2"),
            ("/dev/sdx", "hint: lunette disk backup d0 file:/dev/sdx"),
        ] {
            let text = check_target("backup", "d0", target).unwrap_err();
            assert!(
                text.contains("must be file:PATH, ") && text.ends_with(form),
                "{text}"
            );
        }
        for target in [
            "file:/a",
            "image:a,cache=none",
            "rbd:p/i",
            "iscsi://h/t/0",
            "nbd://h/e",
            "nbd+unix:///e?socket=/s",
            "ram",
        ] {
            assert!(check_target("mirror", "d0", target).is_ok(), "{target}");
        }
    }

    #[test]
    fn progress_is_in_bytes_and_per_cent() {
        let job = Job {
            disk: "d0".to_owned(),
            kind: "mirror".to_owned(),
            target: None,
            incremental: None,
            backup: None,
            state: JobState::Running,
            done: 512 << 20,
            copied: 0,
            total: 1 << 30,
            speed: None,
            seconds: 3,
            reason: None,
        };
        assert_eq!(progress(&job), "mirror of d0: running, 512M of 1G (50 %)");
    }
}
