//! Runs jobs repeatedly on one or several subjects, in turns, and records disturbances.
//!
//! A repetition runs all phases of the jobs (a phase ends where a job has `stonewall`) on one subject. Several subjects take turns, A B A
//! B, so that drift of the machine affects all equally. A disturbed repetition (`machine`) is run again, a limited number of times. The
//! calling thread only watches.

mod bar;
mod line;
mod machine;
mod phase;
mod progress;
#[cfg(feature = "host")]
mod stages;
mod statistics;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use latency::{Clock, Ends, Latencies, Operation, Span};
use serde::{Deserialize, Serialize};

pub use machine::{
    Disturbance, Environment, allowed_retries, children_ns, cpu_of, environment, least_disturbed,
    pin,
};
pub use phase::{Phase, phases};
pub use progress::{PROGRESS_MARK, Progress, STARTED_MARK};
pub use statistics::{
    Interval, Spread, bootstrap_middle, bootstrap_ratio, bootstrap_ratio_apart, middle_mean, spread,
};

use crate::drive::{LogEntry, Moments, Tally};
use crate::driver::{DriverOptions, Subject};
use crate::job::Job;

/// Plan of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Subjects; empty: the files named in the jobs.
    pub subjects: Vec<Subject>,
    /// Jobs.
    pub jobs: Vec<Job>,
    /// Options of the driver.
    pub driver: DriverOptions,
    /// Repetitions per subject.
    pub repetitions: u32,
    /// Ramp time, unless the job sets one.
    pub warm_up: Duration,
    /// CPUs for the driver's threads, in turn, unless the job sets them.
    pub cpus: Vec<usize>,
    /// CPU of the devices, if known. Its distance from the driver's first CPU is measured before each turn.
    pub device_cpu: Option<usize>,
    /// Maximum number of retries of a disturbed repetition.
    pub retries: u32,
    /// Limit of the foreign load in CPUs; above it, a repetition counts as disturbed.
    pub disturbance_max: f64,
}

impl Default for Plan {
    /// An empty plan with one repetition that accepts any disturbance.
    fn default() -> Self {
        Plan {
            subjects: Vec::new(),
            jobs: Vec::new(),
            driver: DriverOptions::default(),
            repetitions: 1,
            warm_up: Duration::ZERO,
            cpus: Vec::new(),
            device_cpu: None,
            retries: 0,
            disturbance_max: f64::INFINITY,
        }
    }
}

/// Accepts results of earlier versions, which have no tally for discards.
fn tallies<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<[Tally; 4], D::Error> {
    let mut list = Vec::<Tally>::deserialize(deserializer)?;
    list.resize_with(list.len().max(4), Tally::default);
    let found = list.len();
    list.try_into()
        .map_err(|_| serde::de::Error::invalid_length(found, &"3 or 4 tallies"))
}

/// Result of one job in one repetition.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct JobResult {
    /// Name of the job.
    pub name: String,
    /// Index of its phase.
    pub phase: usize,
    /// Reads, writes, flushes, discards.
    #[serde(deserialize_with = "tallies")]
    pub tallies: [Tally; 4],
    /// Measured time in nanoseconds.
    pub elapsed_ns: u64,
    /// Number of failed requests.
    pub errors: u64,
    /// Number of differences found by verification.
    pub differences: u64,
    /// Bytes verified as correct.
    pub verified_bytes: u64,
    /// Errors and differences as text.
    pub complaints: Vec<String>,
    /// Entries for log files, by clone.
    #[serde(skip)]
    pub logs: Vec<(u32, Vec<LogEntry>)>,
    /// Stamp sums of reads, writes, flushes and discards.
    #[serde(skip)]
    pub moments: [Moments; 4],
}

impl JobResult {
    /// Returns the tallies of reads, writes and discards.
    fn of_data(&self) -> impl Iterator<Item = &Tally> {
        [0, 1, 3].into_iter().map(|at| &self.tallies[at])
    }

    /// Returns the number of reads, writes and discards.
    pub fn ios(&self) -> u64 {
        self.of_data().map(|tally| tally.ios).sum()
    }

    /// Returns the bytes of all of them.
    pub fn bytes(&self) -> u64 {
        self.of_data().map(|tally| tally.bytes).sum()
    }

    /// Returns the requests per second of one direction.
    pub fn iops_of(&self, direction: usize) -> f64 {
        self.tallies[direction].ios as f64 * 1e9 / self.elapsed_ns.max(1) as f64
    }
}

/// Result of one turn of one subject.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Repetition {
    /// Results of all jobs.
    pub jobs: Vec<JobResult>,
    /// Kicks per request.
    pub kicks_per_io: f64,
    /// Interrupts per request.
    pub interrupts_per_io: f64,
    /// CPU seconds of the device's process per million requests, if known.
    pub device_cpu_per_million: Option<f64>,
    /// CPU seconds of the driver's threads per million requests.
    pub driver_cpu_per_million: f64,
    /// Foreign load in CPUs.
    pub foreign_cpus: f64,
    /// Time taken by the hypervisor, in CPUs.
    pub stolen_cpus: f64,
    /// Round-trip time of a cache line to the device's CPU in nanoseconds, measured before the turn, if that CPU is known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub line_ns: Option<f64>,
    /// The turn and all its retries were disturbed.
    pub disturbed: bool,
    /// Number of attempts.
    #[serde(default)]
    pub attempts: u32,
    /// Latencies of the stages in a Lunette daemon.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stages: Option<Latencies>,
    /// Time of a request before and after those stages, for reads, writes and flushes. Known if driver and device counted the same
    /// requests on one clock.
    #[serde(default)]
    pub ends: [Option<Ends>; 3],
}

impl Repetition {
    /// Returns requests per second of all jobs: jobs of a phase are added, phases are weighted by their time.
    pub fn iops(&self) -> f64 {
        self.per_second(JobResult::ios)
    }

    /// Returns bytes per second, calculated in the same way.
    pub fn bandwidth(&self) -> f64 {
        self.per_second(JobResult::bytes)
    }

    fn per_second(&self, of: impl Fn(&JobResult) -> u64) -> f64 {
        let mut time = 0;
        let mut sum = 0;
        let last = self.jobs.iter().map(|job| job.phase).max().unwrap_or(0);
        for phase in 0..=last {
            let jobs = self.jobs.iter().filter(|job| job.phase == phase);
            time += jobs.clone().map(|job| job.elapsed_ns).max().unwrap_or(0);
            sum += jobs.map(&of).sum::<u64>();
        }
        sum as f64 * 1e9 / time.max(1) as f64
    }

    /// Returns the number of failed requests and differences.
    pub fn errors(&self) -> u64 {
        let each = self.jobs.iter();
        each.map(|job| job.errors + job.differences).sum()
    }

    /// Returns the number of requests of all jobs, including flushes, which also cause kicks and responses.
    pub fn requests(&self) -> u64 {
        let tallies = self.jobs.iter().flat_map(|job| &job.tallies);
        tallies.map(|tally| tally.ios).sum()
    }

    /// Returns latencies of reads, writes and discards of all jobs.
    pub fn latency(&self) -> latency::SparseHistogram {
        let mut all = latency::SparseHistogram::default();
        for tally in self.jobs.iter().flat_map(JobResult::of_data) {
            all.merge(&tally.latency);
        }
        all
    }
}

/// All repetitions of one subject.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SubjectResult {
    /// Name of the subject.
    pub name: String,
    /// Repetitions in order.
    pub repetitions: Vec<Repetition>,
}

impl SubjectResult {
    /// Returns a quantity of each repetition.
    pub fn each(&self, of: impl Fn(&Repetition) -> f64) -> Vec<f64> {
        self.repetitions.iter().map(of).collect()
    }

    /// Returns the repetition with the median rate.
    pub fn median_repetition(&self) -> Option<&Repetition> {
        let mut order: Vec<&Repetition> = self.repetitions.iter().collect();
        order.sort_by(|a, b| a.iops().total_cmp(&b.iops()));
        order.get(order.len().saturating_sub(1) / 2).copied()
    }
}

/// Complete result of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Environment.
    pub environment: Environment,
    /// Results in the order of the plan.
    pub subjects: Vec<SubjectResult>,
    /// The run was interrupted.
    pub interrupted: bool,
}

/// Runs a plan for a comparison. All requests must succeed.
///
/// # Errors
/// As [`run`], and if a request failed; the error names subject and failure.
pub fn run_without_errors(
    plan: &Plan,
    clock: &Clock,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<Outcome> {
    let outcome = run(plan, clock, interrupted, progress)?;
    without_errors(&outcome)?;
    Ok(outcome)
}

fn without_errors(outcome: &Outcome) -> Result<()> {
    for subject in &outcome.subjects {
        let bad = subject.repetitions.iter().find(|one| one.errors() > 0);
        let Some(bad) = bad else {
            continue;
        };
        let complaint = bad.jobs.iter().flat_map(|job| &job.complaints).next();
        let complaint = complaint.map_or("", String::as_str);
        anyhow::bail!(
            "{}: {} requests failed or returned wrong data: {complaint}",
            subject.name,
            bad.errors()
        );
    }
    Ok(())
}

/// Runs a plan. Ends early with the results so far when `interrupted` becomes true.
pub fn run(
    plan: &Plan,
    clock: &Clock,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<Outcome> {
    for subject in &plan.subjects {
        stages::check_export(subject)?;
    }
    let phases = phases(&plan.jobs);
    let named: Vec<Option<&Subject>> = if plan.subjects.is_empty() {
        vec![None]
    } else {
        plan.subjects.iter().map(Some).collect()
    };
    let mut outcome = Outcome {
        environment: environment(),
        subjects: named
            .iter()
            .map(|subject| SubjectResult {
                name: subject.map_or("the jobs' files".to_owned(), |s| s.name.clone()),
                repetitions: Vec::new(),
            })
            .collect(),
        interrupted: false,
    };
    for repetition in 1..=plan.repetitions {
        for (subject, result) in named.iter().zip(&mut outcome.subjects) {
            let title = format!("{} {repetition}/{}", result.name, plan.repetitions);
            let notes = |one: &Repetition| {
                progress.note(&format!(
                    "{title}: disturbed: others used {:.2} CPUs, the hypervisor took {:.2}",
                    one.foreign_cpus, one.stolen_cpus
                ));
            };
            let one = attempt(plan, interrupted, notes, || {
                turn(
                    plan,
                    &phases,
                    *subject,
                    clock,
                    interrupted,
                    progress,
                    &title,
                )
            })?;
            let ended = interrupted.load(Ordering::Relaxed);
            // An interrupted repetition is recorded only if it is the only one.
            if !ended || result.repetitions.is_empty() {
                result.repetitions.push(one);
            }
            if ended {
                outcome.interrupted = true;
                return Ok(outcome);
            }
        }
    }
    Ok(outcome)
}

/// As [`run`], with daemons of our own; returns `None` if interrupted. A terminal also interrupts the daemons, so an ended session is
/// then no error.
pub fn run_until_interrupted(
    plan: &Plan,
    clock: &Clock,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<Option<Outcome>> {
    match run_without_errors(plan, clock, interrupted, progress) {
        Err(_) if interrupted.load(Ordering::Relaxed) => Ok(None),
        Ok(outcome) if outcome.interrupted => Ok(None),
        other => other.map(Some),
    }
}

/// Runs one repetition, and repeats it while it is disturbed. Returns the least disturbed attempt.
fn attempt(
    plan: &Plan,
    interrupted: &AtomicBool,
    note: impl Fn(&Repetition),
    mut turn: impl FnMut() -> Result<Repetition>,
) -> Result<Repetition> {
    let noise = |one: &Repetition| one.foreign_cpus + one.stolen_cpus;
    let mut best: Option<Repetition> = None;
    for attempt in 1..=machine::allowed_retries(plan.retries) + 1 {
        let mut one = turn()?;
        one.disturbed = noise(&one) > plan.disturbance_max;
        one.attempts = attempt;
        let ended = interrupted.load(Ordering::Relaxed);
        if !one.disturbed || ended || one.errors() > 0 {
            return Ok(one);
        }
        note(&one);
        match &mut best {
            Some(best) if noise(best) <= noise(&one) => best.attempts = attempt,
            best => *best = Some(one),
        }
    }
    Ok(best.unwrap_or_default())
}

fn turn(
    plan: &Plan,
    phases: &[Phase],
    subject: Option<&Subject>,
    clock: &Clock,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
    title: &str,
) -> Result<Repetition> {
    let mut one = Repetition::default();
    if let (Some(&driver), Some(device)) = (plan.cpus.first(), plan.device_cpu) {
        one.line_ns = line::round_trip((driver, device))?;
    }
    let mut totals = phase::Totals::default();
    let before = stages::read(subject);
    for (phase, number) in phases.iter().zip(0..) {
        if interrupted.load(Ordering::Relaxed) {
            break;
        }
        let jobs = phase.run(
            plan,
            subject,
            number,
            clock,
            interrupted,
            progress,
            title,
            &mut totals,
        )?;
        one.jobs.extend(jobs);
    }
    let ios = totals.ios.max(1) as f64;
    let measured = one.requests();
    let seconds = totals.elapsed.as_secs_f64().max(1e-9);
    one.kicks_per_io = totals.kicks as f64 / measured.max(1) as f64;
    one.interrupts_per_io = totals.interrupts as f64 / measured.max(1) as f64;
    one.device_cpu_per_million = totals.device_cpu_ns.map(|cpu| cpu as f64 / 1e3 / ios);
    one.driver_cpu_per_million = totals.driver_cpu_ns as f64 / 1e3 / ios;
    one.foreign_cpus = totals.foreign_ns as f64 / 1e9 / seconds;
    one.stolen_cpus = totals.stolen_ns as f64 / 1e9 / seconds;
    for _ in 0..LOOKS_MAX {
        one.stages = stages::since(subject, before.clone());
        if one
            .stages
            .as_ref()
            .is_none_or(|stages| has_all(&one.jobs, stages))
        {
            break;
        }
        std::thread::sleep(LOOKS_APART);
    }
    if let Some(stages) = &one.stages {
        one.ends = ends(&one.jobs, stages, clock);
    }
    Ok(one)
}

/// The device counts a request after its driver has seen the response, on a busy machine milliseconds later.
const LOOKS_MAX: u32 = 50;
const LOOKS_APART: std::time::Duration = std::time::Duration::from_millis(2);

/// Operations by the index under which a driver counts them.
const DIRECTIONS: [(usize, Operation); 3] = [
    (0, Operation::Read),
    (1, Operation::Write),
    (2, Operation::Flush),
];

/// Returns true if the device has counted all requests of these jobs.
fn has_all(jobs: &[JobResult], stages: &Latencies) -> bool {
    DIRECTIONS.into_iter().all(|(direction, operation)| {
        let ours: u64 = jobs.iter().map(|job| job.moments[direction].count).sum();
        let spans = stages.operations.get(&operation);
        let total = spans.and_then(|of| of.spans.get(&Span::Total));
        ours <= total.map_or(0, |total| total.count)
    })
}

/// Returns the time between driver and device, from the sums of both sides' stamps.
fn ends(jobs: &[JobResult], stages: &Latencies, clock: &Clock) -> [Option<Ends>; 3] {
    let of = |(direction, operation): (usize, Operation)| {
        let mut ours = Moments::default();
        jobs.iter()
            .for_each(|job| ours.merge(&job.moments[direction]));
        let total = stages.operations.get(&operation)?.spans.get(&Span::Total)?;
        // Other clients' requests are included, or an error took another path.
        if ours.count == 0 || total.count != ours.count {
            return None;
        }
        let counted = stages.counters.of(operation);
        let before = counted.noticed_ticks.wrapping_sub(ours.published);
        let whole = ours.seen.wrapping_sub(ours.published);
        let mean = |ticks: u64| clock.nanos(ticks) as f64 / ours.count as f64;
        // More than half of the value range: the clocks differ.
        let (before, whole) = match (i64::try_from(before), i64::try_from(whole)) {
            (Ok(_), Ok(_)) => (mean(before), mean(whole)),
            _ => return None,
        };
        Some(Ends {
            count: ours.count,
            noticed_ns: before,
            seen_ns: whole - before - total.mean_ns(),
        })
    };
    DIRECTIONS.map(of)
}

/// Guests measure files, which no daemon serves.
#[cfg(not(feature = "host"))]
mod stages {
    use latency::Snapshot;

    use super::{Latencies, Result, Subject};

    pub(super) fn check_export(_: &Subject) -> Result<()> {
        Ok(())
    }

    pub(super) fn read(_: Option<&Subject>) -> Option<Snapshot> {
        None
    }

    pub(super) fn since(_: Option<&Subject>, _: Option<Snapshot>) -> Option<Latencies> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_that_answers_with_errors_has_no_figures() {
        let job = JobResult {
            errors: 1,
            complaints: vec!["read of 4096 at 0 failed".to_owned()],
            ..JobResult::default()
        };
        let with = |jobs| Outcome {
            subjects: vec![SubjectResult {
                name: "peer".to_owned(),
                repetitions: vec![Repetition {
                    jobs,
                    ..Repetition::default()
                }],
            }],
            ..Outcome::default()
        };
        without_errors(&with(vec![JobResult::default()])).unwrap();
        let error = without_errors(&with(vec![job])).unwrap_err().to_string();
        assert!(error.starts_with("peer: 1 requests failed") && error.ends_with("at 0 failed"));
    }

    fn plan(retries: u32) -> Plan {
        Plan {
            retries,
            disturbance_max: 0.1,
            ..Plan::default()
        }
    }

    /// Runs `attempt` with given foreign and stolen CPUs per turn.
    fn attempted(retries: u32, turns: &[(f64, f64)]) -> (Repetition, usize) {
        let notes = std::cell::Cell::new(0);
        let mut turns = turns.iter();
        let one = attempt(
            &plan(retries),
            &AtomicBool::new(false),
            |_| notes.set(notes.get() + 1),
            || {
                let (foreign_cpus, stolen_cpus) = *turns.next().unwrap();
                Ok(Repetition {
                    foreign_cpus,
                    stolen_cpus,
                    ..Repetition::default()
                })
            },
        );
        assert!(turns.next().is_none(), "some turns are missing");
        (one.unwrap(), notes.get())
    }

    #[test]
    fn a_disturbed_repetition_is_run_again_and_the_quiet_one_counts() {
        let (one, notes) = attempted(2, &[(0.5, 0.0), (0.02, 0.03)]);
        assert_eq!((one.foreign_cpus, one.disturbed), (0.02, false));
        assert_eq!((one.attempts, notes), (2, 1));
        let (one, notes) = attempted(2, &[(0.05, 0.05)]);
        assert_eq!((one.disturbed, one.attempts, notes), (false, 1, 0));
    }

    #[test]
    fn where_all_are_disturbed_the_least_disturbed_counts_and_is_marked() {
        let (one, notes) = attempted(2, &[(0.9, 0.0), (0.1, 0.2), (0.5, 0.0)]);
        assert_eq!((one.foreign_cpus, one.stolen_cpus), (0.1, 0.2));
        assert!(one.disturbed);
        assert_eq!((one.attempts, notes), (3, 3));
        // Time taken by the hypervisor is also a disturbance.
        assert!(attempted(0, &[(0.0, 0.2)]).0.disturbed);
    }
}
