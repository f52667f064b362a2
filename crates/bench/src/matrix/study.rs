//! Runs the study and stores its records.

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use latency::{Clock, Operation, Span};
use serde::{Deserialize, Serialize};

use super::polling::{self, PollLine, PollRecord};
use super::{DEPTHS, MIXTURES};
use crate::children::{Daemon, Scratch, Start};
use crate::driver::DriverOptions;
use crate::job::{Job, apply};
use crate::run::{
    Environment, Plan, Progress, Repetition, environment, run as run_plan, run_until_interrupted,
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
        let queues = if self.queues == 1 {
            "1 queue".to_owned()
        } else {
            format!("{} queues", self.queues)
        };
        format!("{}, {workers}, {queues}", self.transport)
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

/// First line of a result file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Header {
    environment: Environment,
    disks: u16,
    turn_ms: u64,
    polling: bool,
}

/// All records of a study.
#[derive(Clone, Debug)]
pub struct Study {
    /// Machine and build.
    pub environment: Environment,
    /// Number of disks.
    pub disks: u16,
    /// Measured time of one run in milliseconds.
    pub turn_ms: u64,
    /// The driver polled.
    pub polling: bool,
    /// Runs in order of execution.
    pub records: Vec<Record>,
    /// Comparison of a polling daemon with a non-polling one.
    pub polls: Vec<PollRecord>,
    /// Number of runs of a complete study without that comparison; 0: unknown.
    pub planned: usize,
}

/// Result file; each run appends a line.
pub(super) struct Results(std::fs::File);

impl Results {
    pub fn add(&mut self, record: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_string(record)?;
        line.push('\n');
        self.0.write_all(line.as_bytes())?;
        Ok(())
    }
}

type Key = (Configuration, String, u16, u32);

impl Record {
    fn key(&self) -> Key {
        (
            self.configuration.clone(),
            self.mixture.clone(),
            self.depth,
            self.turn,
        )
    }

    /// Returns all requests per second.
    pub fn iops(&self) -> f64 {
        self.read_iops + self.write_iops
    }
}

/// Reads a result file. A truncated last line is ignored.
fn read(path: &Path) -> Result<Option<Study>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let mut lines = text.lines();
    let Some(first) = lines.next() else {
        return Ok(None);
    };
    let header: Header = serde_json::from_str(first)
        .with_context(|| format!("{} is not a result file of this study", path.display()))?;
    let poll = |line: &str| {
        Some(
            serde_json::from_str::<PollLine>(line)
                .ok()?
                .polling_comparison,
        )
    };
    Ok(Some(Study {
        environment: header.environment,
        disks: header.disks,
        turn_ms: header.turn_ms,
        polling: header.polling,
        records: lines
            .clone()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect(),
        polls: lines.filter_map(poll).collect(),
        planned: 0,
    }))
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

/// Runs the missing part of the study and returns the complete study.
pub fn run(
    options: &StudyOptions,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<Study> {
    let clock = Clock::new();
    let configurations = configurations(options);
    ensure!(
        !configurations.is_empty(),
        "nothing to compare: a disk has at most as many queues as workers, but all queue counts {:?} exceed the worker counts {:?}",
        options.queues,
        options.workers
    );
    let mut study = open(options)?;
    let done: HashSet<Key> = study.records.iter().map(Record::key).collect();
    let mut results = Results(OpenOptions::new().append(true).open(&options.results)?);
    let cases = MIXTURES.len() * DEPTHS.len();
    let whole = configurations.len() * cases * options.repetitions as usize;
    study.planned = whole;
    if !done.is_empty() || !study.polls.is_empty() {
        progress.say(&format!(
            "continuing after {} of {} runs",
            done.len() + study.polls.len(),
            whole + polling::planned(options)
        ));
    }
    // Turns are the outermost loop, so that drift of the machine affects all configurations equally.
    for turn in 1..=options.repetitions {
        for configuration in &configurations {
            let missing: Vec<(&str, &str, u8, u16)> = MIXTURES
                .iter()
                .flat_map(|(name, rw, reads)| DEPTHS.map(|depth| (*name, *rw, *reads, depth)))
                .filter(|(name, _, _, depth)| {
                    !done.contains(&(configuration.clone(), (*name).to_owned(), *depth, turn))
                })
                .collect();
            if missing.is_empty() {
                continue;
            }
            let rig = match Rig::start(options, configuration, &[]) {
                Err(_) if interrupted.load(Ordering::Relaxed) => return Ok(study),
                started => started?,
            };
            for (mixture, rw, reads, depth) in missing {
                if interrupted.load(Ordering::Relaxed) {
                    return Ok(study);
                }
                let plan = rig.plan(options, configuration, mixture, rw, reads, depth)?;
                let before = rig.snapshot();
                let outcome = run_until_interrupted(&plan, &clock, interrupted, progress)?;
                let Some(outcome) = outcome else {
                    return Ok(study);
                };
                let one = outcome.subjects.first().and_then(|s| s.repetitions.first());
                let Some(one) = one else {
                    return Ok(study);
                };
                let mut record = record(one, configuration, mixture, depth, turn);
                record.steps_ns = rig.steps_since(before).unwrap_or_default();
                results.add(&record)?;
                study.records.push(record);
            }
            progress.say(&format!(
                "{} of {whole} runs: {}",
                study.records.len(),
                configuration.name()
            ));
        }
    }
    polling::compare(options, &mut study, &mut results, interrupted, progress)?;
    Ok(study)
}

/// Describes program and machine.
fn made_by(environment: &Environment) -> String {
    format!(
        "lunette {} on {}, {} CPUs {}",
        environment.build(),
        environment.kernel,
        environment.cpus,
        environment.cpu
    )
}

fn open(options: &StudyOptions) -> Result<Study> {
    if let Some(study) = read(&options.results)? {
        ensure!(
            study.disks == options.disks
                && u128::from(study.turn_ms) == options.turn.as_millis()
                && study.polling == options.polling,
            "{} contains another study ({} disks, {} ms, polling {}); hint: choose another folder with --place",
            options.results.display(),
            study.disks,
            study.turn_ms,
            study.polling
        );
        let (here, there) = (environment(), &study.environment);
        ensure!(
            made_by(&here) == made_by(there),
            "{} was created by {}, this is {}, and their figures are not comparable; hint: choose another folder, or remove that one",
            options.results.display(),
            made_by(there),
            made_by(&here)
        );
        cut_torn_line(&options.results)?;
        return Ok(study);
    }
    let header = Header {
        environment: environment(),
        disks: options.disks,
        turn_ms: options.turn.as_millis() as u64,
        polling: options.polling,
    };
    let line = serde_json::to_string(&header)?;
    std::fs::write(&options.results, format!("{line}\n"))
        .with_context(|| format!("cannot write {}", options.results.display()))?;
    Ok(Study {
        environment: header.environment,
        disks: header.disks,
        turn_ms: header.turn_ms,
        polling: header.polling,
        records: Vec::new(),
        polls: Vec::new(),
        planned: 0,
    })
}

/// Removes a truncated last line, so that the next line starts correctly.
fn cut_torn_line(path: &Path) -> Result<()> {
    let bytes = std::fs::read(path)?;
    let whole = bytes
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |at| at + 1);
    if whole < bytes.len() {
        OpenOptions::new()
            .write(true)
            .open(path)?
            .set_len(whole as u64)?;
    }
    Ok(())
}

/// Size of each disk in bytes.
const DISK: u64 = 64 << 20;

/// A daemon with the disks of one configuration, filled.
pub(super) struct Rig {
    // Dropped in this order: the daemon's sockets are in the folder.
    _daemon: Daemon,
    folder: Scratch,
    subjects: Vec<String>,
}

impl Rig {
    /// Starts the daemon; `more`: further arguments of `serve`.
    pub fn start(
        options: &StudyOptions,
        configuration: &Configuration,
        more: &[&str],
    ) -> Result<Rig> {
        let folder = Scratch::for_sockets("lm")?;
        let at = |name: &str| folder.path().join(name);
        let control = at("control");
        let mut command = Start::new(&options.program, None);
        command
            .args(["--log", "warn", "serve", "--control"])
            .arg(&control)
            .args(more);
        if configuration.workers == 0 {
            command.args(["--workers", "1"]);
        } else {
            let cpus: Vec<String> = (0..configuration.workers).map(|n| n.to_string()).collect();
            command.arg("--cpus").arg(cpus.join(","));
        }
        let mut sockets = vec![control];
        let mut subjects = Vec::new();
        let queues = configuration.queues;
        for disk in 0..options.disks {
            let socket = at(&format!("s{disk}"));
            let place = socket.display();
            command.arg("--disk").arg(format!("d{disk}=ram:{DISK}"));
            if configuration.transport == "blk" {
                command
                    .arg("--vhost-blk")
                    .arg(format!("d{disk}:{place},queues={queues}"));
            } else {
                command
                    .arg("--vhost-scsi")
                    .arg(format!("c{disk}:{place},queues={queues}"));
                command.arg("--lun").arg(format!("c{disk}/0:0=d{disk}"));
            }
            subjects.push(format!("vhost-user-{}:{place}", configuration.transport));
            sockets.push(socket);
        }
        let daemon = Daemon::start(command, &at("log"), &sockets)?;
        let rig = Rig {
            _daemon: daemon,
            folder,
            subjects,
        };
        rig.fill()?;
        Ok(rig)
    }

    fn jobs(&self, options: &[(&str, &str)]) -> Result<Vec<Job>> {
        let jobs = self.subjects.iter().map(|subject| {
            let mut job = Job {
                name: subject.clone(),
                filenames: vec![subject.clone()],
                ..Job::default()
            };
            for (option, value) in options {
                apply(&mut job, option, Some(value)).map_err(anyhow::Error::msg)?;
            }
            Ok(job)
        });
        jobs.collect()
    }

    fn fill(&self) -> Result<()> {
        let jobs = self.jobs(&[("rw", "write"), ("bs", "256k"), ("iodepth", "4")])?;
        let plan = plan_of(jobs, false);
        let never = Arc::new(AtomicBool::new(false));
        run_plan(&plan, &Clock::new(), &never, &Progress::silent())
            .context("cannot fill the disks")?;
        Ok(())
    }

    pub fn plan(
        &self,
        options: &StudyOptions,
        configuration: &Configuration,
        mixture: &str,
        rw: &str,
        reads: u8,
        depth: u16,
    ) -> Result<Plan> {
        let mut jobs = self.jobs(&[
            ("rwmixread", &reads.to_string()),
            ("rw", rw),
            ("iodepth", &depth.to_string()),
            ("numjobs", &configuration.queues.to_string()),
            ("norandommap", "1"),
            ("runtime", &format!("{}ms", options.turn.as_millis())),
            ("time_based", "1"),
        ])?;
        for job in &mut jobs {
            job.description = mixture.to_owned();
        }
        Ok(Plan {
            warm_up: Duration::from_millis(100),
            retries: 1,
            disturbance_max: 0.1,
            ..plan_of(jobs, options.polling)
        })
    }

    fn snapshot(&self) -> Option<latency::Snapshot> {
        control::get(&self.folder.path().join("control"), "/v1/latency").ok()
    }

    /// Returns the mean time of each step since `before`, for reads and writes together.
    fn steps_since(&self, before: Option<latency::Snapshot>) -> Option<Vec<(String, f64)>> {
        let merged = self.snapshot()?.since(&before?).merged();
        let steps = Span::STEPS.into_iter().filter(|span| !span.is_optional());
        let steps = steps.map(|span| {
            let (mut count, mut sum) = (0u64, 0.0);
            for operation in [Operation::Read, Operation::Write] {
                let spans = merged.operations.get(&operation);
                if let Some(histogram) = spans.and_then(|spans| spans.spans.get(&span)) {
                    count += histogram.count;
                    sum += histogram.sum_ns;
                }
            }
            (span.name().to_owned(), sum / count.max(1) as f64)
        });
        Some(steps.collect())
    }
}

fn record(
    one: &Repetition,
    configuration: &Configuration,
    mixture: &str,
    depth: u16,
    turn: u32,
) -> Record {
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
        mixture: mixture.to_owned(),
        depth,
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

fn plan_of(jobs: Vec<Job>, polling: bool) -> Plan {
    Plan {
        jobs,
        driver: DriverOptions {
            polling,
            ..DriverOptions::default()
        },
        ..Plan::default()
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

    fn options(folder: &Path) -> StudyOptions {
        StudyOptions {
            program: PathBuf::new(),
            results: folder.join("r.jsonl"),
            disks: 8,
            workers: vec![0, 1, 2],
            queues: vec![1, 2],
            repetitions: 1,
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
            assert!(error.contains(&made_by(&other)), "{error}");
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
        assert!(open(&options).unwrap().records.is_empty());
        let line = serde_json::to_string(&record(1)).unwrap();
        let mut file = OpenOptions::new()
            .append(true)
            .open(&options.results)
            .unwrap();
        write!(file, "{line}\n{}", &line[..20]).unwrap();
        let study = open(&options).unwrap();
        assert_eq!(study.records.len(), 1);
        assert_eq!(study.records[0].key(), record(1).key());
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
