//! Conditions of a daemon that need attention, derived from its status and counters. `lunette status` and the page show them.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::objects::{Job, JobState, WaitingListener};
use crate::plural::counted;
use crate::statistics::Statistics;
use crate::status::{DiskFailures, DiskStatus, FailureKind, QueueFailures, RefusedLogin, Status};

/// Time after the last failure at a queue during which the failures are an error. Later they are a warning.
const ONGOING_SECONDS: u64 = 300;

/// Severity of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Requests fail or wait, or clients cannot connect.
    Error,
    /// A condition that may be a mistake, or that may become an error.
    Warning,
}

/// A condition that needs attention.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StatusProblem {
    /// Severity.
    pub severity: Severity,
    /// Kind of the object.
    #[schema(pattern = "^(disk|export|listener|job|bitmap|state|queue|login|certificate)$")]
    pub object: String,
    /// Name of the object: of the disk for jobs and bitmaps, of the export for queues and logins, of the file for state and
    /// certificates.
    pub name: String,
    /// Object and reason, in one sentence.
    pub problem: String,
    /// Seconds until the daemon tries again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_try_seconds: Option<u64>,
    /// Action or command that helps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl StatusProblem {
    /// Moves a hint at the end of `problem` to its field.
    fn new(severity: Severity, object: &str, name: &str, problem: String) -> StatusProblem {
        let (problem, hint) = match problem.split_once("; hint: ") {
            Some((problem, hint)) => (problem.to_owned(), Some(hint.to_owned())),
            None => (problem, None),
        };
        StatusProblem {
            severity,
            object: object.to_owned(),
            name: name.to_owned(),
            problem,
            next_try_seconds: None,
            hint,
        }
    }

    /// Sets the hint, unless the reason has one.
    fn or_hint(mut self, hint: String) -> StatusProblem {
        self.hint.get_or_insert(hint);
        self
    }
}

impl fmt::Display for StatusProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problem)?;
        if let Some(seconds) = self.next_try_seconds {
            write!(f, ", next try in {seconds} s")?;
        }
        match &self.hint {
            Some(hint) => write!(f, "; hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl WaitingListener {
    /// Returns the reason why the listener is closed, the time of the next attempt, and a hint.
    pub fn problem(&self) -> StatusProblem {
        let name = self.export.as_deref().unwrap_or(&self.kind);
        let problem = format!("{self} is not open: {}", self.reason);
        StatusProblem {
            next_try_seconds: Some(self.next_try_seconds),
            ..StatusProblem::new(Severity::Error, "listener", name, problem).or_hint(self.hint())
        }
    }
}

/// Returns all problems of a daemon, errors first.
pub fn status_problems(status: &Status, statistics: &Statistics) -> Vec<StatusProblem> {
    let mut problems: Vec<StatusProblem> = status.disks.iter().flat_map(of_disk).collect();
    problems.extend(
        status
            .waiting_listeners
            .iter()
            .map(WaitingListener::problem),
    );
    problems.extend(status.exports.iter().filter_map(|export| {
        let warning = export.warning.as_ref()?;
        let name = &export.name;
        let problem = format!("export {name}: {warning}");
        Some(StatusProblem::new(
            Severity::Warning,
            "export",
            name,
            problem,
        ))
    }));
    problems.extend(statistics.jobs.iter().filter_map(of_job));
    problems.extend(statistics.bitmaps.iter().filter_map(|bitmap| {
        let (reason, disk, name) = (bitmap.reason.as_ref()?, &bitmap.disk, &bitmap.name);
        let problem = format!(
            "disk {disk}: bitmap {name} is unusable, the next backup copies everything: {reason}"
        );
        let problem = StatusProblem::new(Severity::Warning, "bitmap", disk, problem);
        Some(problem.or_hint(format!(
            "start the next backup, or lunette disk bitmap remove {disk} {name}"
        )))
    }));
    problems.extend(status.damaged_state.iter().map(|one| {
        let (file, reason) = (&one.file, &one.reason);
        let problem = format!("state file {file} {reason}");
        let problem = StatusProblem::new(Severity::Error, "state", file, problem);
        problem.or_hint(format!(
            "restore it and restart the daemon, or lunette state reset {file}"
        ))
    }));
    problems.extend(status.certificates.iter().filter_map(|one| {
        let (file, warning) = (&one.file, one.warning.as_ref()?);
        let problem = format!("TLS: {file}: {warning}");
        Some(StatusProblem::new(
            Severity::Error,
            "certificate",
            file,
            problem,
        ))
    }));
    let failures = status.failures.iter();
    let unexplained = failures.filter(|one| !has_failures_of_disks(status, one));
    problems.extend(unexplained.map(of_failures));
    let logins = status.refused_logins.iter();
    problems.extend(logins.map(|login| of_login(status, login)));
    problems.sort_by_key(|problem| problem.severity);
    problems
}

fn of_disk(disk: &DiskStatus) -> Vec<StatusProblem> {
    let name = &disk.name;
    let new = |severity, problem| StatusProblem::new(severity, "disk", name, problem);
    let mut problems = Vec::new();
    if disk.state != "ready" {
        let show = format!("lunette disk show {name}");
        let reason = disk.reason.as_deref();
        let mut problem = match reason {
            Some(reason) => format!("disk {name} is {}: {reason}", disk.state),
            None => format!("disk {name} is {}", disk.state),
        };
        if let (Some(path), Some(reason)) = (&disk.path, reason)
            && !reason.contains(path.as_str())
        {
            problem = format!("disk {name} ({path}) is {}: {reason}", disk.state);
        }
        problems.push(StatusProblem {
            next_try_seconds: disk.next_try_seconds,
            ..new(Severity::Error, problem).or_hint(show)
        });
    }
    if disk.waiting > 0 {
        let waiting = match disk.waiting {
            1 => "1 failed I/O waits".to_owned(),
            many => format!("{many} failed I/Os wait"),
        };
        let reason = disk.waiting_reason.as_deref();
        let reason = reason.unwrap_or("the log of the daemon has the reason");
        let path = disk.path.as_ref().map(|path| format!(" ({path})"));
        let path = path.unwrap_or_default();
        let problem = format!("disk {name}{path}: {waiting} for a resume: {reason}");
        let resume = format!("correct the cause, then lunette disk resume {name}");
        problems.push(new(Severity::Error, problem).or_hint(resume));
    }
    problems.extend(of_failed_ios(disk));
    if let Some(reason) = &disk.reservations_unknown {
        let problem = format!(
            "disk {name}: reservations unknown, SCSI reads and writes are answered BUSY: {reason}"
        );
        problems.push(new(Severity::Error, problem).or_hint("lunette state list".to_owned()));
    }
    if let Some(damage) = &disk.damage {
        problems.push(new(Severity::Error, format!("disk {name}: {damage}")));
    }
    if let Some(warning) = &disk.warning {
        problems.push(new(Severity::Warning, format!("disk {name}: {warning}")));
    }
    if let Some(ns) = disk.slow_ns {
        let path = disk.path.as_ref().map(|path| format!(" ({path})"));
        let path = path.unwrap_or_default();
        let seconds = ns as f64 / 1e9;
        let problem =
            format!("disk {name}{path} is slow: 1 % of its requests take longer than {seconds} s");
        let slowest =
            format!("lunette latency {name} --slowest prints the stage that takes the time");
        problems.push(new(Severity::Warning, problem).or_hint(slowest));
    }
    problems
}

/// Returns the failed I/Os of a disk as a problem. While I/Os wait, their problem has the reason.
fn of_failed_ios(disk: &DiskStatus) -> Option<StatusProblem> {
    let last = disk.failures.iter().map(|one| one.seconds).min()?;
    if disk.waiting > 0 {
        return None;
    }
    let name = &disk.name;
    let path = disk.path.as_ref().map(|path| format!(" ({path})"));
    let path = path.unwrap_or_default();
    let failed = counted(count_of(&disk.failures), "I/O");
    let classes = disk.failures.iter();
    let classes: Vec<_> = classes
        .map(|one| format!("{} {}", one.count, one.class))
        .collect();
    let problem = format!(
        "disk {name}{path}: {failed} failed in the last hour, last {} ago: {}",
        duration(last),
        classes.join(", ")
    );
    let hint = match &disk.path {
        Some(path) if disk.failures.iter().any(|one| one.class == "no_space") => {
            format!("free space in the storage of {path}; the log of the daemon has the errors")
        }
        _ => "the log of the daemon has the errors".to_owned(),
    };
    let problem = StatusProblem::new(severity_of(last), "disk", name, problem);
    Some(problem.or_hint(hint))
}

fn count_of(failures: &[DiskFailures]) -> u64 {
    failures.iter().map(|one| one.count).sum()
}

/// Returns true if failed I/Os of the export's disks explain the failed requests of a queue: their problems have the classes.
fn has_failures_of_disks(status: &Status, failures: &QueueFailures) -> bool {
    let export = status
        .exports
        .iter()
        .find(|one| one.name == failures.export);
    let luns = export.map_or(&[][..], |export| &export.luns);
    let is_used = |disk: &&DiskStatus| luns.iter().any(|lun| lun.disk == disk.name);
    let disks = status.disks.iter().filter(is_used);
    let failed: u64 = disks.map(|disk| count_of(&disk.failures)).sum();
    failures.kind == FailureKind::Request && failures.count <= failed
}

fn of_job(job: &Job) -> Option<StatusProblem> {
    let (kind, disk) = (&job.kind, &job.disk);
    let reason = job.reason.as_deref();
    let (problem, hint) = match job.state {
        JobState::Failed => {
            let reason = reason.unwrap_or("the log of the daemon has the reason");
            (
                format!("disk {disk}: the last job, a {kind}, failed: {reason}"),
                format!("lunette job list; lunette job cancel {disk} removes it from the list"),
            )
        }
        // Reason of a failed switch.
        JobState::Ready => (
            format!("disk {disk}: the {kind} could not switch: {}", reason?),
            format!("lunette job switch {disk} tries again"),
        ),
        _ => return None,
    };
    Some(StatusProblem::new(Severity::Error, "job", disk, problem).or_hint(hint))
}

/// Returns a duration in seconds, or in whole minutes, which do not change the text each second.
fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        _ => format!("{} min", seconds / 60),
    }
}

/// Returns the severity of failures by the seconds since the last one.
fn severity_of(seconds: u64) -> Severity {
    match seconds {
        0..ONGOING_SECONDS => Severity::Error,
        _ => Severity::Warning,
    }
}

fn of_failures(failures: &QueueFailures) -> StatusProblem {
    let QueueFailures { export, queue, .. } = failures;
    let (event, hint) = match failures.kind {
        FailureKind::Request => (
            format!("{} failed", counted(failures.count, "request")),
            "the log of the daemon has the errors",
        ),
        FailureKind::Protocol => (
            format!(
                "driver or front end violated the protocol {}",
                counted(failures.count, "time")
            ),
            "the log of the daemon names each violation; update the driver or the front end",
        ),
    };
    let last = duration(failures.seconds);
    let problem = format!("queue {export}/{queue}: {event} in the last hour, last {last} ago");
    StatusProblem::new(severity_of(failures.seconds), "queue", export, problem)
        .or_hint(hint.to_owned())
}

/// Returns true for a configured iSCSI target. An initiator may request any name.
fn has_target(status: &Status, name: &str) -> bool {
    let mut exports = status.exports.iter();
    exports.any(|export| export.kind == "iscsi" && export.name == name)
}

fn of_login(status: &Status, login: &RefusedLogin) -> StatusProblem {
    let RefusedLogin {
        initiator,
        address,
        reason,
        ..
    } = login;
    let (place, hint) = match &login.export {
        Some(target) if !has_target(status, target) => (
            format!("target {target} is unknown"),
            "lunette export list".to_owned(),
        ),
        Some(export) => (
            format!("export {export}"),
            format!(
                "lunette export show {export}; its keys acl, chap_users and demo_mode admit initiators"
            ),
        ),
        None => (
            "discovery".to_owned(),
            "check the CHAP user and secret of the initiator for discovery".to_owned(),
        ),
    };
    let times = counted(login.count, "time");
    let last = duration(login.seconds);
    let problem = format!(
        "{place}: login of {initiator} at {address} refused {times}, last {last} ago: {reason}"
    );
    let name = login.export.as_deref().unwrap_or("discovery");
    StatusProblem::new(Severity::Warning, "login", name, problem).or_hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::{Bitmap, Job};
    use crate::status::{CertificateStatus, DamagedState, ExportStatus, LunStatus};

    fn disk(name: &str, state: &str) -> DiskStatus {
        DiskStatus {
            name: name.to_owned(),
            backend: "file".to_owned(),
            path: Some(format!("/vm/{name}.raw")),
            size: 0,
            allocated: None,
            free: None,
            block_size: 512,
            read_only: false,
            serial: String::new(),
            state: state.to_owned(),
            reason: None,
            waiting: 0,
            waiting_reason: None,
            next_try_seconds: None,
            reservations_unknown: None,
            warning: None,
            slow_ns: None,
            damage: None,
            failures: Vec::new(),
        }
    }

    fn export(name: &str, disks: &[&str]) -> ExportStatus {
        let lun = |disk: &&str| LunStatus {
            target: 0,
            lun: 0,
            disk: (*disk).to_owned(),
        };
        ExportStatus {
            name: name.to_owned(),
            kind: "iscsi".to_owned(),
            socket: None,
            addresses: Vec::new(),
            queues: 0,
            connected: false,
            served: Vec::new(),
            waiting_portals: Vec::new(),
            port_groups: Vec::new(),
            luns: disks.iter().map(lun).collect(),
            queue_stops: None,
            warning: None,
        }
    }

    fn job(state: JobState, reason: Option<&str>) -> Job {
        Job {
            disk: "d".to_owned(),
            kind: "mirror".to_owned(),
            target: None,
            incremental: None,
            backup: None,
            state,
            done: 0,
            copied: 0,
            total: 0,
            speed: None,
            seconds: 0,
            reason: reason.map(str::to_owned),
        }
    }

    fn texts(status: &Status, statistics: &Statistics) -> Vec<String> {
        let problems = status_problems(status, statistics);
        problems.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn each_problem_of_a_disk_has_reason_path_next_try_and_hint() {
        let gone = DiskStatus {
            reason: Some("no such file; hint: correct the path".to_owned()),
            next_try_seconds: Some(7),
            ..disk("gone", "unavailable")
        };
        let full = DiskStatus {
            waiting: 2,
            waiting_reason: Some("no space left".to_owned()),
            warning: Some("shared; hint: a".to_owned()),
            slow_ns: Some(500_000_000),
            ..disk("full", "ready")
        };
        let status = Status {
            disks: vec![full, disk("good", "ready"), gone],
            ..Status::default()
        };
        assert_eq!(
            texts(&status, &Statistics::default()),
            [
                "disk full (/vm/full.raw): 2 failed I/Os wait for a resume: no space left; hint: correct the cause, then lunette disk resume full",
                "disk gone (/vm/gone.raw) is unavailable: no such file, next try in 7 s; hint: correct the path",
                "disk full: shared; hint: a",
                "disk full (/vm/full.raw) is slow: 1 % of its requests take longer than 0.5 s; hint: lunette latency full --slowest prints the stage that takes the time",
            ]
        );
    }

    #[test]
    fn failures_become_a_warning_five_minutes_after_the_last_one() {
        let failures = |kind, count, seconds| QueueFailures {
            export: "d0".to_owned(),
            queue: 1,
            kind,
            count,
            seconds,
        };
        let status = Status {
            failures: vec![
                failures(FailureKind::Request, 1, 300),
                failures(FailureKind::Protocol, 2, 59),
            ],
            ..Status::default()
        };
        let found = status_problems(&status, &Statistics::default());
        let found: Vec<_> = found
            .iter()
            .map(|one| (one.severity, one.problem.as_str()))
            .collect();
        assert_eq!(
            found,
            [
                (
                    Severity::Error,
                    "queue d0/1: driver or front end violated the protocol 2 times in the last hour, last 59 s ago"
                ),
                (
                    Severity::Warning,
                    "queue d0/1: 1 request failed in the last hour, last 5 min ago"
                ),
            ]
        );
    }

    #[test]
    fn failed_ios_of_a_disk_have_classes_and_replace_failures_of_queues() {
        let failed = |class: &str, count, seconds| DiskFailures {
            class: class.to_owned(),
            count,
            seconds,
        };
        let full = DiskStatus {
            failures: vec![failed("no_space", 3, 7), failed("write_medium", 1, 400)],
            ..disk("full", "ready")
        };
        let old = DiskStatus {
            failures: vec![failed("read_medium", 1, 300)],
            ..disk("old", "ready")
        };
        let requests = |queue, count| QueueFailures {
            export: "e".to_owned(),
            queue,
            kind: FailureKind::Request,
            count,
            seconds: 7,
        };
        let mut status = Status {
            disks: vec![old, full],
            exports: vec![export("e", &["full"])],
            failures: vec![requests(0, 4), requests(1, 5)],
            ..Status::default()
        };
        let found = texts(&status, &Statistics::default());
        assert_eq!(
            found,
            [
                "disk full (/vm/full.raw): 4 I/Os failed in the last hour, last 7 s ago: 3 no_space, 1 write_medium; hint: free space in the storage of /vm/full.raw; the log of the daemon has the errors",
                "queue e/1: 5 requests failed in the last hour, last 7 s ago; hint: the log of the daemon has the errors",
                "disk old (/vm/old.raw): 1 I/O failed in the last hour, last 5 min ago: 1 read_medium; hint: the log of the daemon has the errors",
            ]
        );
        // The problem of the waiting I/Os has the reason.
        status.disks[1].waiting = 1;
        let found = texts(&status, &Statistics::default());
        assert!(found[0].contains("1 failed I/O waits"), "{found:?}");
        assert_eq!(found.len(), 3, "{found:?}");
    }

    /// Counters since the start of the daemon do not show whether requests still fail.
    #[test]
    fn failures_before_the_last_hour_are_no_problem() {
        let mut queue = latency::QueueSnapshot::default();
        let counters = &mut queue.latencies.counters;
        counters.of_mut(latency::Operation::Read).errors = 7;
        counters.malformed = 1;
        let mut statistics = Statistics::default();
        statistics.latency.queues.push(queue);
        assert!(status_problems(&Status::default(), &statistics).is_empty());
    }

    #[test]
    fn other_objects_have_problems_too() {
        let status = Status {
            exports: vec![ExportStatus {
                warning: Some("no initiator may log in; hint: acl".to_owned()),
                ..export("t", &[])
            }],
            damaged_state: vec![DamagedState {
                file: "a.saved".to_owned(),
                reason: "has a wrong checksum".to_owned(),
            }],
            waiting_listeners: vec![WaitingListener {
                kind: "metrics".to_owned(),
                export: None,
                address: "127.0.0.1:9".to_owned(),
                reason: "in use".to_owned(),
                next_try_seconds: 3,
            }],
            certificates: vec![CertificateStatus {
                file: "tls.pem".to_owned(),
                not_before: 0,
                not_after: 1,
                warning: Some("it expired; hint: renew it".to_owned()),
            }],
            refused_logins: vec![RefusedLogin {
                export: Some("t".to_owned()),
                initiator: "iqn.i".to_owned(),
                address: "192.0.2.1".to_owned(),
                reason: "not admitted".to_owned(),
                count: 2,
                seconds: 9,
            }],
            ..Status::default()
        };
        let statistics = Statistics {
            jobs: vec![
                job(JobState::Failed, Some("disk full")),
                job(JobState::Ready, None),
                job(JobState::Ready, Some("is in use")),
            ],
            bitmaps: vec![Bitmap {
                disk: "d".to_owned(),
                name: "daily".to_owned(),
                dirty: 0,
                target: String::new(),
                at: 0,
                reason: Some("lost".to_owned()),
            }],
            ..Statistics::default()
        };
        let found = status_problems(&status, &statistics);
        let found: Vec<_> = found
            .iter()
            .map(|one| (one.severity, one.object.as_str(), one.name.as_str()))
            .collect();
        let (error, warning) = (Severity::Error, Severity::Warning);
        assert_eq!(
            found,
            [
                (error, "listener", "metrics"),
                (error, "job", "d"),
                (error, "job", "d"),
                (error, "state", "a.saved"),
                (error, "certificate", "tls.pem"),
                (warning, "export", "t"),
                (warning, "bitmap", "d"),
                (warning, "login", "t"),
            ]
        );
        let all = status_problems(&status, &statistics);
        // An export has one name in all problems.
        let of_export = all.iter().filter(|one| one.name == "t");
        for problem in of_export {
            assert!(problem.problem.starts_with("export t: "), "{problem}");
        }
        assert!(all.iter().all(|one| one.hint.is_some()), "{all:?}");
    }

    /// An export of another transport is no target.
    #[test]
    fn a_login_at_an_unknown_target_has_the_list_as_its_hint() {
        let login = |target: &str| RefusedLogin {
            export: Some(target.to_owned()),
            initiator: "iqn.i".to_owned(),
            address: "192.0.2.1".to_owned(),
            reason: "target not found".to_owned(),
            count: 1,
            seconds: 9,
        };
        let status = Status {
            exports: vec![
                export("t", &[]),
                ExportStatus {
                    kind: "vhost-blk".to_owned(),
                    ..export("b", &[])
                },
            ],
            refused_logins: ["t", "b", "iqn.typo"].map(login).to_vec(),
            ..Status::default()
        };
        let refused = "login of iqn.i at 192.0.2.1 refused 1 time, last 9 s ago: target not found";
        assert_eq!(
            texts(&status, &Statistics::default()),
            [
                format!(
                    "export t: {refused}; hint: lunette export show t; its keys acl, chap_users and demo_mode admit initiators"
                ),
                format!("target b is unknown: {refused}; hint: lunette export list"),
                format!("target iqn.typo is unknown: {refused}; hint: lunette export list"),
            ]
        );
    }
}
