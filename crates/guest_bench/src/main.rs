//! `lunette bench` for guests: runs a job file in fio's language on the named files and block devices.
//!
//! Linked statically, because `lunette vm bench` copies it into any guest system. Prints fio's JSON on stdout and writes the requested
//! logs into the current folder. SIGINT ends the jobs, and the results so far are printed. `--progress` prints lines with the rate and the
//! remaining time on stderr, `--announce` a line after the first completed request. `files` runs file system workloads, `profile` samples the CPUs. Exit codes: 1 after a failure, 2 for
//! invalid arguments.
#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bench::job::{Job, JobContext, parse};
use bench::report;
use bench::run::{PROGRESS_MARK, Plan, Progress, Repetition, STARTED_MARK, run};
use latency::Clock;
use signal_hook::consts::{SIGINT, SIGTERM};

mod files;
mod profile;
mod symbols;

const USAGE: &str = "usage: guest-bench [--progress|--announce] JOB.fio
       guest-bench files PRESET FOLDER THREADS MILLISECONDS BYTES
       guest-bench profile MILLISECONDS HERTZ [PID...]";

/// Interval of the lines of --progress.
const HEARTBEAT: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let done = match &words[..] {
        [command, rest @ ..] if command == "files" => files::run(rest),
        [command, rest @ ..] if command == "profile" => profile::run(rest),
        [file] => measure(file, &Progress::silent()),
        [flag, file] if flag == "--progress" => measure(
            file,
            // A closed stderr is not an error.
            &Progress::heartbeats(HEARTBEAT, |beat| {
                writeln!(std::io::stderr(), "{PROGRESS_MARK}{beat}").unwrap_or(());
            }),
        ),
        [flag, file] if flag == "--announce" => measure(
            file,
            &Progress::on_start(|| writeln!(std::io::stderr(), "{STARTED_MARK}").unwrap_or(())),
        ),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("guest-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn measure(file: &str, progress: &Progress) -> Result<()> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
    let jobs = JobContext::here(|here| parse(file, &text, &Job::default(), here))?;
    let plan = Plan {
        jobs,
        ..Plan::default()
    };
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted))?;
    }
    let outcome = run(&plan, &Clock::new(), &interrupted, progress)?;
    let document = report::to_json(&outcome, &plan.jobs, true);
    writeln!(std::io::stdout(), "{document:#}").context("cannot write the result")?;
    let turns = || outcome.subjects.iter().flat_map(|one| &one.repetitions);
    let mut first = 1;
    for (job, result) in plan.jobs.iter().zip(turns().flat_map(|turn| &turn.jobs)) {
        report::write_logs(job, first, result)?;
        first += u32::from(job.numjobs);
    }
    let errors: u64 = turns().map(Repetition::errors).sum();
    let complaints = turns().flat_map(|turn| &turn.jobs);
    let mut complaints = complaints.flat_map(|job| &job.complaints);
    let complaint = complaints.next().map_or("", String::as_str);
    ensure!(
        errors == 0,
        "{errors} requests failed or returned wrong data: {complaint}"
    );
    Ok(())
}
