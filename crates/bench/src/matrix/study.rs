//! Runs the study and stores its records.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use latency::Clock;
use serde::{Deserialize, Serialize};

use super::rig::Rig;
use super::{DEPTHS, MIXTURES, case_name, polling};
use crate::run::{Environment, Progress, Repetition, environment, run_until_interrupted};
use crate::study::{
    Position, Report, Results, Run, Subject, Variant, missing_turns, run_missing, run_until_sure,
};

/// Options of the study.
#[derive(Clone, Debug)]
pub struct StudyOptions {
    /// Program of the daemon: this one.
    pub program: PathBuf,
    /// Result file.
    pub results: PathBuf,
    /// Number of disks.
    pub disks: u16,
    /// Worker counts; 0: one shared, unpinned worker; others are pinned to a CPU each.
    pub workers: Vec<usize>,
    /// Queue counts per disk.
    pub queues: Vec<u16>,
    /// Turns of each run.
    pub repetitions: u32,
    /// Largest number of turns, if further turns follow until all conclusions are certain.
    pub until_sure: Option<u32>,
    /// Measured time of one run.
    pub turn: Duration,
    /// The driver polls.
    pub polling: bool,
}

/// A compared configuration.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Configuration {
    /// `blk` or `scsi`.
    pub transport: String,
    /// Number of workers; 0: one shared, unpinned worker.
    pub workers: usize,
    /// Queues per disk.
    pub queues: u16,
}

impl Configuration {
    /// Returns a short description.
    pub fn name(&self) -> String {
        let workers = match self.workers {
            0 => "shared worker".to_owned(),
            1 => "1 worker".to_owned(),
            n => format!("{n} workers"),
        };
        let queues = match self.queues {
            1 => "1 queue".to_owned(),
            n => format!("{n} queues"),
        };
        format!("{}, {workers}, {queues}", self.transport)
    }

    /// Returns it as a variant of the study.
    pub fn variant(&self) -> Variant {
        Variant {
            name: self.name(),
            settings: vec![
                ("transport", self.transport.clone()),
                ("workers", self.workers.to_string()),
                ("queues", self.queues.to_string()),
            ],
        }
    }
}

/// One run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// Configuration.
    pub configuration: Configuration,
    /// Name of the mixture.
    pub mixture: String,
    /// Requests in flight per disk and queue.
    pub depth: u16,
    /// Number of the turn, from 1.
    pub turn: u32,
    /// Reads per second of all disks.
    pub read_iops: f64,
    /// Writes per second.
    pub write_iops: f64,
    /// Bytes read per second.
    pub read_bandwidth: f64,
    /// Bytes written per second.
    pub write_bandwidth: f64,
    /// Mean, p50, p99 and p99.9 in nanoseconds.
    pub latency_ns: [f64; 4],
    /// Device CPU time per request in microseconds.
    pub device_cpu_us: f64,
    /// Mean nanoseconds of each step in the device.
    pub steps_ns: Vec<(String, f64)>,
    /// Other load was present.
    pub disturbed: bool,
}

impl Run for Record {
    fn variant(&self) -> Cow<'_, str> {
        self.configuration.name().into()
    }

    fn case(&self) -> Cow<'_, str> {
        case_name(&self.mixture, self.depth).into()
    }

    fn turn(&self) -> u32 {
        self.turn
    }

    fn iops(&self) -> f64 {
        self.read_iops + self.write_iops
    }

    fn is_disturbed(&self) -> bool {
        self.disturbed
    }
}

/// One run of the comparison of a polling daemon with a non-polling one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PollRecord {
    /// The daemon polls as by default; otherwise `--poll off`.
    pub polls: bool,
    /// Transport, workers and queues.
    pub configuration: Configuration,
    /// Number of driven disks.
    pub disks: u16,
    /// Name of the mixture.
    pub mixture: String,
    /// Requests in flight per disk.
    pub depth: u16,
    /// Number of the pair, from 1.
    pub pair: u32,
    /// Requests per second of all disks.
    pub iops: f64,
    /// Device CPU time per request in microseconds.
    pub device_cpu_us: f64,
    /// Other load was present.
    pub disturbed: bool,
}

impl Run for PollRecord {
    fn variant(&self) -> Cow<'_, str> {
        variant_name(&self.configuration, Some(self.polls)).into()
    }

    fn case(&self) -> Cow<'_, str> {
        case_of_disks(self.disks, &self.mixture, self.depth).into()
    }

    fn turn(&self) -> u32 {
        self.pair
    }

    fn iops(&self) -> f64 {
        self.iops
    }

    fn is_disturbed(&self) -> bool {
        self.disturbed
    }
}

/// A line of the result file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    Polling { polling_comparison: PollRecord },
    Matrix(Record),
}

impl Line {
    fn run(&self) -> &dyn Run {
        match self {
            Line::Polling { polling_comparison } => polling_comparison,
            Line::Matrix(record) => record,
        }
    }
}

impl Run for Line {
    fn variant(&self) -> Cow<'_, str> {
        self.run().variant()
    }

    fn case(&self) -> Cow<'_, str> {
        self.run().case()
    }

    fn turn(&self) -> u32 {
        self.run().turn()
    }

    fn iops(&self) -> f64 {
        self.run().iops()
    }
}

/// First line of a result file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Machine and build.
    pub environment: Environment,
    /// Number of disks.
    pub disks: u16,
    /// Measured time of one run in milliseconds.
    pub turn_ms: u64,
    /// The driver polled.
    pub polling: bool,
}

/// All records of a study.
#[derive(Clone, Debug, Default)]
pub struct Study {
    /// Parameters.
    pub header: Header,
    /// Runs in order of execution.
    pub records: Vec<Record>,
    /// Comparison of a polling daemon with a non-polling one.
    pub polls: Vec<PollRecord>,
    /// Number of runs of a complete study without that comparison.
    pub planned: usize,
}

/// Returns the configurations without those that have more queues per disk than workers.
fn configurations(options: &StudyOptions) -> Vec<Configuration> {
    let mut list = Vec::new();
    for workers in &options.workers {
        for queues in &options.queues {
            if usize::from(*queues) > (*workers).max(1) {
                continue;
            }
            for transport in ["blk", "scsi"] {
                list.push(Configuration {
                    transport: transport.to_owned(),
                    workers: *workers,
                    queues: *queues,
                });
            }
        }
    }
    list
}

/// Load on the disks.
pub(super) struct Case {
    /// Name, pattern, percentage of reads.
    pub mixture: (&'static str, &'static str, u8),
    pub depth: u16,
    /// Number of driven disks.
    pub disks: u16,
}

/// A daemon of the study. `polls` is set in the polling comparison.
pub(super) struct Variation {
    pub configuration: Configuration,
    pub polls: Option<bool>,
}

fn variant_name(configuration: &Configuration, polls: Option<bool>) -> String {
    let polls = match polls {
        None => "",
        Some(true) => ", polling",
        Some(false) => ", no polling",
    };
    configuration.name() + polls
}

fn case_of_disks(disks: u16, mixture: &str, depth: u16) -> String {
    let plural = if disks == 1 { "" } else { "s" };
    format!("{disks} disk{plural}, {}", case_name(mixture, depth))
}

/// The study, or its polling comparison.
struct Part<'a> {
    options: &'a StudyOptions,
    interrupted: &'a Arc<AtomicBool>,
    progress: &'a Progress,
    clock: Clock,
    /// Daemons that run at the same time.
    groups: Vec<Vec<Variation>>,
    cases: Vec<Case>,
}

impl Subject for Part<'_> {
    type Run = Line;
    type Rig = Vec<Rig>;

    fn groups(&self) -> Vec<Vec<String>> {
        let name = |one: &Variation| variant_name(&one.configuration, one.polls);
        let names = |group: &Vec<Variation>| group.iter().map(name).collect();
        self.groups.iter().map(names).collect()
    }

    fn cases(&self) -> Vec<String> {
        let is_comparison = self.groups.iter().flatten().any(|one| one.polls.is_some());
        let name = |case: &Case| match is_comparison {
            true => case_of_disks(case.disks, case.mixture.0, case.depth),
            false => case_name(case.mixture.0, case.depth),
        };
        self.cases.iter().map(name).collect()
    }

    fn start(&self, group: usize, _results: &mut Results<Line>) -> Result<Vec<Rig>> {
        let start = |one: &Variation| {
            let more: &[&str] = match one.polls {
                Some(false) => &["--poll", "off"],
                _ => &[],
            };
            Rig::start(self.options, &one.configuration, more)
        };
        self.groups[group].iter().map(start).collect()
    }

    fn measure(&self, rigs: &Vec<Rig>, position: Position) -> Result<Line> {
        let Variation {
            configuration,
            polls,
        } = &self.groups[position.group][position.variant];
        let (case, rig) = (&self.cases[position.case], &rigs[position.variant]);
        let plan = rig.plan(self.options, configuration, case)?;
        let before = rig.snapshot();
        let outcome = run_until_interrupted(&plan, &self.clock, self.interrupted, self.progress)?;
        let subject = outcome.and_then(|outcome| outcome.subjects.into_iter().next());
        let one = subject.and_then(|subject| subject.repetitions.into_iter().next());
        let one = one.context("interrupted")?;
        let Some(polls) = *polls else {
            let mut record = record(&one, configuration, case, position.turn);
            record.steps_ns = rig.steps_since(before).unwrap_or_default();
            return Ok(Line::Matrix(record));
        };
        Ok(Line::Polling {
            polling_comparison: PollRecord {
                polls,
                configuration: configuration.clone(),
                disks: case.disks,
                mixture: case.mixture.0.to_owned(),
                depth: case.depth,
                pair: position.turn,
                iops: one.iops(),
                device_cpu_us: one.device_cpu_per_million.unwrap_or(0.0),
                disturbed: one.disturbed,
            },
        })
    }

    fn end(&self, _rigs: Vec<Rig>) -> Result<()> {
        Ok(())
    }

    fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    fn print(&self, line: &str) {
        self.progress.print(line);
    }
}

/// Runs the missing part of the study and returns the complete study.
pub fn run(
    options: &StudyOptions,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<Study> {
    let configurations = configurations(options);
    ensure!(
        !configurations.is_empty(),
        "nothing to compare: a disk has at most as many queues as workers, but all queue counts {:?} exceed the worker counts {:?}",
        options.queues,
        options.workers
    );
    let (header, mut results) = open(options)?;
    let cases = MIXTURES.iter().flat_map(|mixture| {
        DEPTHS.map(|depth| Case {
            mixture: *mixture,
            depth,
            disks: options.disks,
        })
    });
    let cases: Vec<Case> = cases.collect();
    let planned = configurations.len() * cases.len() * options.repetitions as usize;
    if !results.runs.is_empty() {
        let done = results.runs.len();
        let whole = planned + polling::planned(options);
        progress.print(&format!("continuing after {done} of {whole} runs"));
    }
    let variants: Vec<Variant> = configurations.iter().map(Configuration::variant).collect();
    let groups = configurations.into_iter().map(|configuration| {
        vec![Variation {
            configuration,
            polls: None,
        }]
    });
    let part = |groups, cases| Part {
        options,
        interrupted,
        progress,
        clock: Clock::new(),
        groups,
        cases,
    };
    let matrix = part(groups.collect(), cases);
    let missing = |runs: &[Line]| {
        missing_turns(&Report {
            runs,
            variants: variants.iter().collect(),
            cases: matrix.cases(),
            notes: Vec::new(),
        })
    };
    let turns = 1..options.repetitions + 1;
    let limit = options.until_sure.map_or(turns.end, |most| most + 1);
    run_until_sure(&matrix, turns, limit, &mut results, missing)?;
    let (groups, cases) = polling::part(options);
    let pairs = polling::pairs(options);
    if !matrix.is_interrupted() {
        run_missing(&part(groups, cases), 1..pairs + 1, &mut results)?;
    }
    let mut study = Study {
        header,
        planned,
        ..Study::default()
    };
    for line in results.runs {
        match line {
            Line::Polling { polling_comparison } => study.polls.push(polling_comparison),
            Line::Matrix(record) => study.records.push(record),
        }
    }
    Ok(study)
}

/// Reads the result file, and checks that its runs are comparable with new ones.
fn open(options: &StudyOptions) -> Result<(Header, Results<Line>)> {
    let shown = options.results.display();
    let mut results = Results::read(&options.results)?;
    let here = Header {
        environment: environment(),
        disks: options.disks,
        turn_ms: options.turn.as_millis() as u64,
        polling: options.polling,
    };
    results.begin(&here)?;
    let there: Header = serde_json::from_value(results.header.clone())
        .with_context(|| format!("{shown} is not a result file of this study"))?;
    ensure!(
        (there.disks, there.turn_ms, there.polling) == (here.disks, here.turn_ms, here.polling),
        "{shown} contains another study ({} disks, {} ms, polling {}); hint: choose another folder with --place",
        there.disks,
        there.turn_ms,
        there.polling
    );
    let [made_here, made_there] = [&here, &there].map(|header| header.environment.describe());
    ensure!(
        made_here == made_there,
        "{shown} was created on {made_there}, this is {made_here}, and their figures are not comparable; hint: choose another folder, or remove that one"
    );
    Ok((there, results))
}

fn record(one: &Repetition, configuration: &Configuration, case: &Case, turn: u32) -> Record {
    let per_second = |direction: usize, bytes: bool| {
        let each = one.jobs.iter().map(|job| {
            let tally = &job.tallies[direction];
            let amount = if bytes { tally.bytes } else { tally.ios };
            amount as f64 * 1e9 / job.elapsed_ns.max(1) as f64
        });
        each.sum::<f64>()
    };
    let latency = one.latency();
    let quantile = |q: f64| latency.quantile_ns(q) as f64;
    Record {
        configuration: configuration.clone(),
        mixture: case.mixture.0.to_owned(),
        depth: case.depth,
        turn,
        read_iops: per_second(0, false),
        write_iops: per_second(1, false),
        read_bandwidth: per_second(0, true),
        write_bandwidth: per_second(1, true),
        latency_ns: [
            latency.mean_ns(),
            quantile(0.5),
            quantile(0.99),
            quantile(0.999),
        ],
        device_cpu_us: one.device_cpu_per_million.unwrap_or(0.0),
        steps_ns: Vec::new(),
        disturbed: one.disturbed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(turn: u32) -> Record {
        Record {
            configuration: Configuration {
                transport: "blk".to_owned(),
                workers: 0,
                queues: 1,
            },
            mixture: "randread".to_owned(),
            depth: 1,
            turn,
            read_iops: 1.0,
            write_iops: 2.0,
            read_bandwidth: 3.0,
            write_bandwidth: 4.0,
            latency_ns: [1.0; 4],
            device_cpu_us: 0.5,
            steps_ns: vec![("popped".to_owned(), 1.0)],
            disturbed: false,
        }
    }

    fn options(folder: &std::path::Path) -> StudyOptions {
        StudyOptions {
            program: PathBuf::new(),
            results: folder.join("r.jsonl"),
            disks: 8,
            workers: vec![0, 1, 2],
            queues: vec![1, 2],
            repetitions: 1,
            until_sure: None,
            turn: Duration::from_millis(500),
            polling: false,
        }
    }

    #[test]
    fn figures_of_another_program_or_machine_are_not_added_to() {
        let folder = tempfile::tempdir().unwrap();
        let options = options(folder.path());
        open(&options).unwrap();
        let text = std::fs::read_to_string(&options.results).unwrap();
        let mut header: Header = serde_json::from_str(&text).unwrap();
        // Start time and command line are ignored.
        header.environment.time += 1;
        header.environment.command.clear();
        let write = |header: &Header| {
            let line = serde_json::to_string(header).unwrap();
            std::fs::write(&options.results, format!("{line}\n")).unwrap();
        };
        write(&header);
        open(&options).unwrap();
        for change in [
            (|one: &mut Environment| one.version.push('x')) as fn(&mut Environment),
            |one| one.commit = Some("another".to_owned()),
            |one| one.cpu.push('x'),
            |one| one.cpus += 1,
            |one| one.kernel.push('x'),
        ] {
            let mut other = header.environment.clone();
            change(&mut other);
            write(&Header {
                environment: other.clone(),
                ..header.clone()
            });
            let error = open(&options).unwrap_err().to_string();
            assert!(error.contains(&other.describe()), "{error}");
        }
    }

    #[test]
    fn a_study_of_nothing_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let options = StudyOptions {
            queues: vec![3, 9],
            ..options(folder.path())
        };
        let never = Arc::new(AtomicBool::new(false));
        let error = run(&options, &never, &Progress::silent()).unwrap_err();
        assert!(error.to_string().contains("[3, 9]"), "{error}");
        assert!(!options.results.exists());
    }

    #[test]
    fn a_study_that_was_cut_short_is_read_up_to_its_last_whole_line() {
        let folder = tempfile::tempdir().unwrap();
        let options = options(folder.path());
        assert!(open(&options).unwrap().1.runs.is_empty());
        let line = serde_json::to_string(&record(1)).unwrap();
        let header = std::fs::read_to_string(&options.results).unwrap();
        let text = format!("{header}{line}\n{}", &line[..20]);
        std::fs::write(&options.results, text).unwrap();
        let (_, results) = open(&options).unwrap();
        let names: Vec<_> = results.runs.iter().map(Run::case).collect();
        assert_eq!(names, ["randread, depth 1"]);
        // The next line is appended after a newline.
        let text = std::fs::read_to_string(&options.results).unwrap();
        assert!(text.ends_with(&format!("{line}\n")), "{text}");
        let other = StudyOptions {
            disks: 4,
            ..options.clone()
        };
        assert!(
            open(&other)
                .unwrap_err()
                .to_string()
                .contains("another study")
        );
        let names: Vec<String> = configurations(&options)
            .iter()
            .map(Configuration::name)
            .collect();
        assert_eq!(names.len(), 8, "{names:?}");
        assert_eq!(names[0], "blk, shared worker, 1 queue");
    }
}
