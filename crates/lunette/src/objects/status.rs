//! `lunette status`: a summary of the daemon's health on one screen.

use std::collections::BTreeMap;
use std::io::Write;

use control::objects::{Export, Job, JobState, Reservation, Session};
use control::statistics::{Statistics, WorkerStatistics};
use control::{Changes, Severity, Status, StatusProblem, counted, status_problems};

use super::arguments::LookArguments;
use super::export::serving;
use super::{print_json, size_text};
use crate::failure::{Failure, Outcome};

/// Maximum lines of exports; the rest of an 80x24 screen is for the summary.
const EXPORTS_SHOWN: usize = 12;

/// Maximum lines of workers.
const WORKERS_SHOWN: usize = 4;

/// Maximum lines of values of the file that are not in effect.
const SHADOWED_SHOWN: usize = 4;

/// Prints the status. Fails if there are problems.
pub fn run(arguments: &LookArguments) -> Outcome {
    let client = arguments.ask.daemon.client()?;
    let status: Status = client.get("/v1/status")?;
    let statistics: Statistics = client.get("/v1/statistics")?;
    // An older daemon reports no problems itself.
    let problems = status_problems(&status, &statistics);
    if arguments.ask.json {
        print_json(&status)?;
        return verdict(&problems);
    }
    let exports: Vec<Export> = client.get("/v1/exports")?;
    let sessions: Vec<Session> = client.get("/v1/sessions")?;
    let reservations: Vec<Reservation> = client.get("/v1/reservations")?;
    let changes: Changes = client.get("/v1/config/changes")?;

    let mut text = String::new();
    let mut line = |words: String| {
        text.push_str(&cli_common::printable(&words));
        text.push('\n');
    };
    line(format!(
        "lunette {}, process {}, up {}, {}",
        status.version,
        status.pid,
        duration(status.uptime_seconds),
        count(status.workers, "worker"),
    ));
    let known = reservations.iter().filter(|one| one.unknown.is_none());
    let sizes = status.disks.iter().map(|disk| disk.size);
    let bytes = sizes.fold(0, u64::saturating_add);
    line(format!(
        "{} with {}, {}, {}, {}",
        count(status.disks.len(), "disk"),
        size_text(bytes),
        count(exports.len(), "export"),
        count(sessions.len(), "session"),
        count(known.count(), "disk with reservations"),
    ));
    line(changes_line(&changes));
    line(sandbox_line(&status));
    worker_lines(&statistics.workers)
        .into_iter()
        .for_each(&mut line);
    line(String::new());
    for export in exports.iter().take(EXPORTS_SHOWN) {
        line(export_line(export));
    }
    if exports.len() > EXPORTS_SHOWN {
        let more = exports.len() - EXPORTS_SHOWN;
        line(format!("  and {more} more: see lunette export list"));
    }
    backup_lines(&statistics.jobs)
        .into_iter()
        .for_each(&mut line);
    line(String::new());
    for problem in &problems {
        line(match problem.severity {
            Severity::Error => format!("! {problem}"),
            Severity::Warning => format!("warning: {problem}"),
        });
    }
    let shadowed = shadowed(&changes);
    if problems.is_empty() && shadowed.is_empty() {
        line("all is well".to_owned());
    }
    shadowed.into_iter().for_each(line);
    let mut stdout = cli_common::stdout();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    verdict(&problems)
}

/// Returns the line of an export: its clients, workers and portal groups.
fn export_line(export: &Export) -> String {
    let sessions = export.status.as_ref().map_or(0, |status| status.sessions);
    let client = match sessions {
        0 => "no client".to_owned(),
        sessions => count(sessions, "client"),
    };
    let workers = serving(export).map(|words| format!(", served by {}", worker_words(&words)));
    let groups = export.status.iter().flat_map(|status| &status.port_groups);
    let groups = groups.filter_map(|group| {
        let state = group.remarkable()?;
        Some(format!(", portal group {}: {state}", group.group))
    });
    format!(
        "  {:10}  {:40}  {client}{}{}",
        export.kind.as_str(),
        export.name.as_str(),
        workers.unwrap_or_default(),
        groups.collect::<String>()
    )
}

/// Returns a line for each running backup.
fn backup_lines(jobs: &[Job]) -> Vec<String> {
    let mut all: BTreeMap<&str, Vec<&Job>> = BTreeMap::new();
    for job in jobs.iter().filter(|job| !job.state.has_ended()) {
        if let Some(backup) = &job.backup {
            all.entry(backup).or_default().push(job);
        }
    }
    let line = |(backup, jobs): (&str, Vec<&Job>)| {
        let disks: Vec<String> = jobs.iter().map(|job| one_disk(job)).collect();
        let disks = disks.join(", ");
        let waits = jobs.iter().any(|job| job.state == JobState::Ready);
        match waits {
            true => format!("  backup {backup} of {disks}: waits for lunette backup end {backup}"),
            false => format!("  backup {backup} of {disks}"),
        }
    };
    all.into_iter().map(line).collect()
}

fn one_disk(job: &Job) -> String {
    let part = job.done as f64 / (job.total as f64).max(1.0);
    match job.state {
        JobState::Ready => format!("disk {}", job.disk),
        JobState::Running => format!("disk {} ({:.0} %)", job.disk, part * 100.0),
        state => format!("disk {} ({})", job.disk, state.word()),
    }
}

/// Changes at run time, and whether they are persistent.
fn changes_line(changes: &Changes) -> String {
    match (changes.changes.len(), changes.kept) {
        (0, _) => "as configured".to_owned(),
        (changed, true) => format!("{}, persistent", count(changed, "change at run time")),
        (changed, false) => format!(
            "{}, lost when the daemon ends (hint: serve --state DIR)",
            count(changed, "change at run time")
        ),
    }
}

/// Returns the words of [`serving`] with their noun.
fn worker_words(words: &str) -> String {
    let (numbers, is_dedicated) = match words.strip_suffix("dedicated") {
        Some(numbers) => (numbers.trim_end(), true),
        None => (words, false),
    };
    match (numbers, is_dedicated) {
        ("", _) => "a dedicated worker".to_owned(),
        (numbers, true) => format!("dedicated worker {numbers}"),
        (numbers, false) if numbers.contains(' ') => format!("workers {numbers}"),
        (numbers, false) => format!("worker {numbers}"),
    }
}

/// Returns lines about values of the file that are not in effect. They do not count as problems.
fn shadowed(changes: &Changes) -> Vec<String> {
    let shadowed = changes.shadowed.iter().take(SHADOWED_SHOWN);
    let shadowed = shadowed.map(|line| format!("warning: not as in the file: {line}"));
    let more = changes.shadowed.len().saturating_sub(SHADOWED_SHOWN);
    let more = (more > 0).then(|| format!("  and {more} more: see lunette config diff"));
    shadowed.chain(more).collect()
}

/// Missing kernel features are shown but are not a problem of the daemon.
fn sandbox_line(status: &Status) -> String {
    let mode = match status.sandbox.as_str() {
        "" => "unknown",
        mode => mode,
    };
    match status.sandbox_missing.is_empty() {
        true => format!("sandbox: {mode}"),
        false => format!(
            "sandbox: {mode}, but the kernel lacks {}",
            status.sandbox_missing.join(", ")
        ),
    }
}

/// Returns the use of time of the busiest workers since the start of the daemon. An older daemon does not report it.
fn worker_lines(workers: &[WorkerStatistics]) -> Vec<String> {
    let share = |part: u64, all: u64| format!("{:.0} %", 100.0 * part as f64 / all as f64);
    let total = |one: &WorkerStatistics| {
        let parts = [
            one.work_ns,
            one.poll_found_ns,
            one.poll_empty_ns,
            one.sleep_ns,
        ];
        parts.into_iter().fold(0, u64::saturating_add)
    };
    let mut measured: Vec<&WorkerStatistics> =
        workers.iter().filter(|one| total(one) > 0).collect();
    measured.sort_by_key(|one| one.sleep_ns);
    let mut shown: Vec<&WorkerStatistics> = measured.iter().take(WORKERS_SHOWN).copied().collect();
    shown.sort_by_key(|one| one.worker);
    let lines = shown.into_iter().map(|one| {
        let of = |part| share(part, total(one));
        format!(
            "worker {} since the start: work {}, polling with a result {}, polling without a result {}, sleep {}",
            one.worker,
            of(one.work_ns),
            of(one.poll_found_ns),
            of(one.poll_empty_ns),
            of(one.sleep_ns)
        )
    });
    let more = measured.len().saturating_sub(WORKERS_SHOWN);
    let more = (more > 0).then(|| format!("and {more} idler workers: see lunette top workers"));
    lines.chain(more).collect()
}

fn verdict(problems: &[StatusProblem]) -> Outcome {
    let is_error = |problem: &StatusProblem| problem.severity == Severity::Error;
    match problems.iter().any(is_error) {
        true => Err(Failure::Reported),
        false => Ok(()),
    }
}

fn count(number: usize, noun: &str) -> String {
    counted(number as u64, noun)
}

fn duration(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, minutes) => format!("{minutes} min"),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_workers_are_shown_with_their_time() {
        let workers: Vec<WorkerStatistics> = (0..6)
            .map(|worker| WorkerStatistics {
                worker,
                work_ns: 30 - u64::from(worker),
                poll_found_ns: 5,
                poll_empty_ns: 5,
                sleep_ns: 60 + u64::from(worker),
                ..WorkerStatistics::default()
            })
            .collect();
        let lines = worker_lines(&workers);
        let first = "worker 0 since the start: work 30 %, polling with a result 5 %, polling without a result 5 %, sleep 60 %";
        assert_eq!(lines[0], first);
        assert_eq!(lines.len(), 5);
        assert_eq!(lines[4], "and 2 idler workers: see lunette top workers");
        assert!(worker_lines(&[WorkerStatistics::default()]).is_empty());
    }

    #[test]
    fn numbers_have_their_words() {
        assert_eq!(count(1, "disk"), "1 disk");
        assert_eq!(count(3, "change at run time"), "3 changes at run time");
        for (words, text) in [
            ("0", "worker 0"),
            ("1 3", "workers 1 3"),
            ("2 dedicated", "dedicated worker 2"),
            ("dedicated", "a dedicated worker"),
        ] {
            assert_eq!(worker_words(words), text);
        }
        assert_eq!(duration(59), "59 s");
        assert_eq!(duration(90_061), "1 d 1 h");
    }

    #[test]
    fn running_backups_have_a_line_each() {
        let job = |disk: &str, backup: &str, state| Job {
            disk: disk.to_owned(),
            kind: "backup".to_owned(),
            target: None,
            incremental: None,
            backup: Some(backup.to_owned()),
            state,
            done: 1 << 20,
            copied: 0,
            total: 4 << 20,
            speed: None,
            seconds: 3,
            reason: None,
        };
        let lines = backup_lines(&[
            job("a", "mon", JobState::Running),
            job("b", "mon", JobState::Done),
            job("c", "pull", JobState::Ready),
            job("d", "pull", JobState::Ready),
        ]);
        let pull = "  backup pull of disk c, disk d: waits for lunette backup end pull";
        assert_eq!(lines, ["  backup mon of disk a (25 %)", pull]);
    }
}
