//! Self-check of the benchmark: claims that users can verify on their machine, each with its result.
//!
//! Uses devices with known service times, a null device, manually sorted latencies, and fio on the same device in turns. Claims that
//! depend on the speed of the machine can be left without a verdict, for tests.

mod fio;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use bdev::DelayTime;
use latency::table::time;
use latency::{Clock, Operation, Span};

use crate::children::{Daemon, Scratch, Start};
use crate::driver::{DriverOptions, Subject};
use crate::job::{Job, apply};
use crate::run::{Plan, Progress, Repetition, run};

/// Options of the self-check.
#[derive(Clone, Debug)]
pub struct CheckOptions {
    /// Program of the daemon: this one.
    pub program: PathBuf,
    /// Folder of the file for the comparison with fio.
    pub place: PathBuf,
    /// Also judge claims that depend on the speed of this machine.
    pub timing: bool,
}

/// Result of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The claim holds.
    Right,
    /// The claim does not hold.
    Wrong,
    /// Measured, without a verdict.
    NotJudged,
    /// A requirement is missing.
    NotChecked,
}

/// One claim with its result.
#[derive(Clone, Debug)]
pub struct Finding {
    /// Claim.
    pub claim: String,
    /// Measurement.
    pub found: String,
    /// Verdict.
    pub verdict: Verdict,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let word = match self.verdict {
            Verdict::Right => "ok",
            Verdict::Wrong => "WRONG",
            Verdict::NotJudged => "not judged",
            Verdict::NotChecked => "not checked",
        };
        write!(f, "{word:<11} {}: {}", self.claim, self.found)
    }
}

/// Tolerance of measured times: a fraction or nanoseconds, the larger of both.
const PART_MAX: f64 = 0.02;
const NANOS_MAX: f64 = 200.0;

/// Service times: fixed ones, and distributions with compared quantiles.
const DELAYS: [&str; 4] = ["2ms", "10ms", "2ms-6ms", "exp:4ms"];

/// The null disk, the reference for the others.
const NULL: &str = "null";

/// A daemon with a disk of each kind.
struct Served {
    folder: Scratch,
    _daemon: Daemon,
}

impl Served {
    fn start(options: &CheckOptions) -> Result<Served> {
        let folder = Scratch::for_sockets("lc")?;
        let mut command = Start::new(&options.program, None);
        command.args(["--log", "warn", "serve", "--workers", "1"]);
        // The wake-up latency of a sleeping worker is not part of this check.
        command.args(["--poll", "always", "--control"]);
        let control = folder.path().join("control");
        command.arg(&control);
        let mut sockets = vec![control];
        let disks = DELAYS.iter().enumerate();
        let disks = disks.map(|(number, time)| (delayed(number), format!("delay:{time},size=1G")));
        for (name, engine) in disks.chain([(NULL.to_owned(), "null:1G".to_owned())]) {
            let socket = folder.path().join(&name);
            command.arg("--disk").arg(format!("{name}={engine}"));
            command
                .arg("--vhost-blk")
                .arg(format!("{name}:{}", socket.display()));
            sockets.push(socket);
        }
        let log = folder.path().join("log");
        let daemon = Daemon::start(command, &log, &sockets)?;
        Ok(Served {
            folder,
            _daemon: daemon,
        })
    }

    fn subject(&self, disk: &str) -> Result<Subject> {
        let (socket, control) = (self.folder.path().join(disk), self.folder.path());
        Subject::parse(&format!(
            "vhost-user-blk:{},control={}",
            socket.display(),
            control.join("control").display()
        ))
    }
}

fn delayed(number: usize) -> String {
    format!("delay{number}")
}

/// Runs all checks that are possible on this machine.
///
/// # Errors
/// A part cannot be run.
pub fn self_check(
    options: &CheckOptions,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<Vec<Finding>> {
    let served = Served::start(options)?;
    let runner = Runner {
        clock: Clock::new(),
        interrupted,
        progress,
    };
    let mut findings = vec![counts(&runner, &served)?, percentiles(&runner, &served)?];
    findings.extend(service_times(&runner, &served, options)?);
    findings.extend(fio::same_as_fio(&runner, options)?);
    Ok(findings)
}

struct Runner<'a> {
    clock: Clock,
    interrupted: &'a Arc<AtomicBool>,
    progress: &'a Progress,
}

impl Runner<'_> {
    fn run(&self, subjects: Vec<Subject>, job: Job, polling: bool) -> Result<Repetition> {
        let plan = Plan {
            subjects,
            jobs: vec![job],
            driver: DriverOptions {
                polling,
                ..DriverOptions::default()
            },
            ..Plan::default()
        };
        let outcome = run(&plan, &self.clock, self.interrupted, self.progress)?;
        anyhow::ensure!(!self.interrupted.load(Ordering::Relaxed), "interrupted");
        let mut repetitions = outcome.subjects.into_iter().flat_map(|one| one.repetitions);
        repetitions.next().context("nothing ran")
    }
}

fn job(options: &[(&str, &str)]) -> Result<Job> {
    let mut job = Job {
        name: "check".to_owned(),
        no_random_map: true,
        ..Job::default()
    };
    for (option, value) in options {
        apply(&mut job, option, Some(value)).map_err(anyhow::Error::msg)?;
    }
    Ok(job)
}

fn judged(right: bool) -> Verdict {
    if right {
        Verdict::Right
    } else {
        Verdict::Wrong
    }
}

/// Checks that every histogram, of the driver and of each stage of the device, has as many values as there were I/Os.
fn counts(runner: &Runner<'_>, served: &Served) -> Result<Finding> {
    let job = job(&[("rw", "randrw"), ("io_size", "80m"), ("iodepth", "16")])?;
    let one = runner.run(vec![served.subject(NULL)?], job, true)?;
    let ios: u64 = one.jobs.iter().map(|job| job.ios()).sum();
    let mut counted = vec![one.latency().count];
    let stages = one.stages.as_ref().context("no stages")?;
    for span in Span::COMMON {
        let of = |operation: &Operation| {
            let spans = stages.operations.get(operation)?;
            spans.spans.get(&span).map(|histogram| histogram.count)
        };
        let sum = [Operation::Read, Operation::Write].iter().filter_map(of);
        counted.push(sum.sum());
    }
    Ok(Finding {
        claim: "a null device's histograms count exactly the I/Os".to_owned(),
        found: format!("{ios} I/Os, counted {counted:?}"),
        verdict: judged(ios > 0 && counted.iter().all(|count| *count == ios)),
    })
}

/// Checks percentiles against all latencies, sorted.
fn percentiles(runner: &Runner<'_>, served: &Served) -> Result<Finding> {
    let log = served.folder.path().join("lat");
    let log = log.to_string_lossy();
    let job = job(&[
        ("rw", "randread"),
        ("io_size", "80m"),
        ("iodepth", "4"),
        ("write_lat_log", &log),
    ])?;
    let one = runner.run(vec![served.subject(NULL)?], job, true)?;
    let logs = one.jobs.iter().flat_map(|job| &job.logs);
    let entries = logs.flat_map(|(_, entries)| entries);
    let mut sorted: Vec<u64> = entries.map(|entry| entry.latency_ns).collect();
    sorted.sort_unstable();
    let latency = one.latency();
    let mut worst: f64 = 0.0;
    for q in [0.1, 0.5, 0.9, 0.99, 0.999, 0.9999] {
        let rank = ((q * sorted.len() as f64).ceil() as usize).clamp(1, sorted.len().max(1));
        let exact = sorted.get(rank - 1).copied().context("an empty log")?;
        let found = latency.quantile_ns(q);
        // Rounding may change either value by a nanosecond.
        let apart = (found.abs_diff(exact)).saturating_sub(1);
        worst = worst.max(apart as f64 / exact.max(1) as f64);
    }
    let bound = latency::Histogram::RELATIVE_ERROR;
    Ok(Finding {
        claim: format!(
            "percentiles agree with an exact sort within {:.1} %",
            bound * 100.0
        ),
        found: format!(
            "{} latencies, {:.2} % apart at most",
            sorted.len(),
            worst * 100.0
        ),
        verdict: judged(latency.count == sorted.len() as u64 && worst <= bound),
    })
}

/// Checks that measured service times equal the injected ones.
fn service_times(
    runner: &Runner<'_>,
    served: &Served,
    options: &CheckOptions,
) -> Result<Vec<Finding>> {
    let base = [("rw", "randread"), ("iodepth", "1"), ("io_size", "4m")];
    // Reference without service time on the same path.
    let bare = runner.run(vec![served.subject(NULL)?], job(&base)?, false)?;
    let way = bare.latency().quantile_ns(0.5) as f64;
    let mut findings = Vec::new();
    for (number, text) in DELAYS.iter().enumerate() {
        let delay = DelayTime::parse(text).context("a valid delay")?;
        // A distribution needs many requests; concurrent ones reduce the run time.
        let (depth, size, quantiles): (_, _, &[f64]) = match delay {
            DelayTime::Fixed(_) => ("1", "1m", &[0.5]),
            _ => ("64", "80m", &[0.25, 0.5, 0.75, 0.9]),
        };
        let more = [("rw", "randread"), ("iodepth", depth), ("io_size", size)];
        let subject = served.subject(&delayed(number))?;
        let one = runner.run(vec![subject], job(&more)?, false)?;
        let latency = one.latency();
        let mut found = Vec::new();
        let mut right = latency.count > 0;
        for q in quantiles {
            let meant = delay.quantile(*q).as_nanos() as f64;
            let apart = latency.quantile_ns(*q) as f64 - way - meant;
            right &= apart.abs() <= (PART_MAX * meant).max(NANOS_MAX);
            found.push(format!(
                "p{:.0} {} for {} ({:+.2} %)",
                q * 100.0,
                time(latency.quantile_ns(*q) as f64 - way),
                time(meant),
                apart / meant * 100.0
            ));
        }
        findings.push(Finding {
            claim: format!("an injected service time of {text} is measured within 2 %"),
            found: format!("{}; the round trip took {}", found.join(", "), time(way)),
            verdict: match options.timing {
                true => judged(right),
                false => Verdict::NotJudged,
            },
        });
    }
    Ok(findings)
}

fn folder_in(place: &Path) -> Result<Scratch> {
    std::fs::create_dir_all(place).with_context(|| format!("cannot create {}", place.display()))?;
    Scratch::new("lunette-check", place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let made = folder_in(Path::new("/proc/no-place"));
        let error = format!("{:#}", made.err().unwrap());
        assert!(error.contains("/proc/no-place"), "{error}");
    }
}
