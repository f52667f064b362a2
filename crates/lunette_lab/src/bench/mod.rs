//! `lunette bench`: passes the command line to the crate `bench` and prints the results.

mod arguments;
mod disktest;
mod matrix;
mod self_check;
mod table;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bench::driver::{DriverOptions, FORMS, Subject};
use bench::job::{Job, JobContext, Mistake, Mistakes, apply, check, parse};
use bench::report;
use bench::run::{Plan, Progress, run as run_plan};
use latency::Clock;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

pub use arguments::BenchArguments;
use arguments::{BenchCommand, Format, JobFlags, RingKind, Trial};
pub use table::note;

use cli_common::{Failure, Outcome, print_line};

pub fn run(arguments: BenchArguments) -> Outcome {
    let _awake = arguments.idle.hold()?;
    match arguments.command {
        Some(BenchCommand::Disktest(arguments)) => disktest::run(&arguments),
        Some(BenchCommand::Compare { first, second }) => compare(&first, &second),
        Some(BenchCommand::Table(arguments)) => table::vhost(arguments),
        Some(BenchCommand::IscsiTable(arguments)) => table::iscsi(arguments),
        Some(BenchCommand::ImageTable(arguments)) => table::images(arguments),
        Some(BenchCommand::RbdTable(arguments)) => table::rbd(arguments),
        Some(BenchCommand::Mcs(arguments)) => table::mcs(arguments),
        Some(BenchCommand::StampCost(arguments)) => self_check::stamp_cost(&arguments),
        Some(BenchCommand::SelfCheck(arguments)) => self_check::self_check(&arguments),
        Some(BenchCommand::Matrix(arguments)) => matrix::run(&arguments),
        None => trial(&arguments.trial),
    }
}

/// Returns a flag that is set by Ctrl-C, SIGTERM or the end of the terminal. The second signal ends the process immediately
/// and removes its children.
fn interrupted() -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    // `nohup` ignores SIGHUP, which stays ignored. A shell's `&` ignores SIGINT, which is handled nevertheless: a SIGINT then
    // was sent on purpose.
    let hangup = Some(SIGHUP).filter(|signal| !is_ignored(*signal));
    let mut signals = Signals::new([SIGINT, SIGTERM].into_iter().chain(hangup))?;
    let is_interrupted = flag.clone();
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            for signal in signals.forever() {
                if is_interrupted.swap(true, Ordering::Relaxed) {
                    bench::children::abandon();
                    emulate_default_handler(signal).ok();
                }
            }
        })?;
    Ok(flag)
}

/// Returns true if the parent of this process made it ignore the signal.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

fn failed(error: anyhow::Error) -> Failure {
    Failure::because(format!("{error:#}"))
}

/// Reports an error after an interruption as the interruption.
fn unless_interrupted<T>(made: anyhow::Result<T>, interrupted: &AtomicBool) -> Result<T, Failure> {
    made.map_err(|error| match interrupted.load(Ordering::Relaxed) {
        true => Failure::Interrupted,
        false => failed(error),
    })
}

/// Fails if the run was interrupted. Partial results have been printed.
fn to_its_end(interrupted: &AtomicBool) -> Outcome {
    match interrupted.load(Ordering::Relaxed) {
        true => Err(Failure::Interrupted),
        false => Ok(()),
    }
}

fn compare(first: &Path, second: &Path) -> Outcome {
    let read = |path: &Path| {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| Failure::because(format!("cannot read {name}: {error}")))?;
        let outcome =
            report::read(&text).map_err(|error| Failure::because(format!("{name}: {error:#}")))?;
        Ok::<_, Failure>((name, outcome))
    };
    let (a, b) = (read(first)?, read(second)?);
    let text = report::compare((&a.0, &a.1), (&b.0, &b.1));
    write!(cli_common::stdout(), "{text}")?;
    Ok(())
}

fn trial(trial: &Trial) -> Outcome {
    let (subjects, files): (Vec<&String>, Vec<&String>) = trial
        .what
        .iter()
        .partition(|word| Subject::looks_like_one(word));
    let subjects = subjects.into_iter().chain(&trial.vs);
    let subjects = subjects
        .map(|text| Subject::parse(text).map_err(Failure::mistake))
        .collect::<Result<Vec<_>, _>>()?;
    let jobs = jobs(&trial.quick, &files)?;
    if subjects.is_empty() && jobs.iter().all(|job| job.filenames.is_empty()) {
        return Err(Failure::mistake(format_args!(
            "nothing to measure; hint: give a subject ({})",
            FORMS
        )));
    }
    let plan = plan(trial, subjects, jobs)?;
    let output = trial.output.as_deref().map(Output::open).transpose()?;
    for engine in plan.jobs.iter().filter_map(|job| job.engine.as_ref()) {
        if engine != "io_uring" {
            print_line(&format_args!(
                "lunette: ioengine={engine}: requests go through the subject's own driver"
            ));
        }
    }
    let interrupted = interrupted()?;
    let heartbeat = trial.quick.threads.as_ref().map(|_| Duration::from_secs(1));
    let progress = Progress::new(heartbeat);
    let outcome = run_plan(&plan, &Clock::new(), &interrupted, &progress);
    let outcome = unless_interrupted(outcome, &interrupted)?;
    drop(progress);
    match print(trial, &plan, &outcome, output) {
        // A closed stdout does not change the result.
        Ok(()) | Err(Failure::OutputClosed) => {}
        failed => return failed,
    }
    logs(&plan, &outcome)?;
    let errors: u64 = outcome
        .subjects
        .iter()
        .flat_map(|subject| &subject.repetitions)
        .map(bench::run::Repetition::errors)
        .sum();
    if errors > 0 {
        return Err(Failure::because(format!(
            "{errors} requests failed or returned wrong data"
        )));
    }
    to_its_end(&interrupted)
}

/// Destination of the result. Opened before the measurement, so that a wrong path does not lose the result of an hour.
struct Output {
    path: PathBuf,
    file: File,
}

impl Output {
    fn open(path: &Path) -> Result<Output, Failure> {
        // Keeps the previous contents until the result is written.
        let mut options = File::options();
        let options = options.write(true).create(true).truncate(false);
        let file = options.open(path).map_err(|error| refused(path, &error))?;
        Ok(Output {
            path: path.to_owned(),
            file,
        })
    }

    fn write(&mut self, text: &str) -> std::io::Result<()> {
        // Pipes and terminals have no length.
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        self.file.write_all(text.as_bytes())
    }
}

fn refused(path: &Path, error: &std::io::Error) -> Failure {
    Failure::because(format!("cannot write {}: {error}", path.display()))
}

fn logs(plan: &Plan, outcome: &bench::run::Outcome) -> Outcome {
    let Some(one) = outcome.subjects.first().and_then(|s| s.repetitions.last()) else {
        return Ok(());
    };
    let mut number = 1;
    for (job, result) in plan.jobs.iter().zip(&one.jobs) {
        for name in report::write_logs(job, number, result).map_err(failed)? {
            print_line(&format_args!("lunette: wrote {name}"));
        }
        number += u32::from(job.numjobs);
    }
    Ok(())
}

fn print(
    trial: &Trial,
    plan: &Plan,
    outcome: &bench::run::Outcome,
    output: Option<Output>,
) -> Outcome {
    let as_json = trial.json || trial.output_format != Format::Normal;
    let text = if as_json {
        let bins = trial.output_format == Format::JsonPlus;
        format!("{:#}\n", report::to_json(outcome, &plan.jobs, bins))
    } else {
        report::to_text(outcome)
    };
    let Some(mut output) = output else {
        return Ok(write!(cli_common::stdout(), "{text}")?);
    };
    output.write(&text).or_else(|error| {
        // Prints the result on stdout if the file cannot be written.
        write!(cli_common::stdout(), "{text}")?;
        Err(refused(&output.path, &error))
    })
}

fn plan(trial: &Trial, subjects: Vec<Subject>, jobs: Vec<Job>) -> Result<Plan, Failure> {
    let driver = &trial.driver;
    let several = subjects.len() > 1;
    let mut cpus = Job::default();
    if let Some(text) = &driver.cpus {
        flag(&mut cpus, "cpus_allowed", Some(text))?;
    }
    Ok(Plan {
        subjects,
        jobs,
        driver: DriverOptions {
            polling: !driver.interrupts,
            poll_files: driver.poll_files,
            queues: driver.queues,
            indirect: !driver.direct_descriptors,
            event_idx: !driver.no_event_idx,
            packed: driver.ring == RingKind::Packed,
            huge_pages: driver.huge_pages,
        },
        repetitions: trial.repetitions.unwrap_or(if several { 5 } else { 1 }),
        warm_up: Duration::from_millis(trial.warm_up_ms),
        cpus: cpus.cpus,
        retries: trial.retries,
        disturbance_max: trial.disturbance,
        ..Plan::default()
    })
}

fn flag(job: &mut Job, option: &str, value: Option<&str>) -> Result<(), Failure> {
    apply(job, option, value)
        .map_err(|message| Failure::mistake(format_args!("command line: {option}: {message}")))
}

/// Returns the jobs of the files, or one job of the flags without files.
fn jobs(quick: &JobFlags, files: &[&String]) -> Result<Vec<Job>, Failure> {
    let mut base = Job::default();
    for (option, value) in quick.options()? {
        flag(&mut base, &option, value.as_deref())?;
    }
    if files.is_empty() {
        base.name = base.pattern.word().to_owned();
        if base.runtime.is_none()
            && base.size.is_none()
            && base.io_size.is_none()
            && base.verify.is_none()
        {
            base.runtime = Some(Duration::from_secs(5));
            base.time_based = true;
        }
        check(&base).map_err(|(option, message)| {
            Failure::mistake(format_args!("command line: {option}: {message}"))
        })?;
        return Ok(vec![base]);
    }
    let mut jobs = Vec::new();
    let mut mistakes = Mistakes::default();
    for file in files {
        match std::fs::read_to_string(file) {
            Ok(text) => match JobContext::here(|here| parse(file, &text, &base, here)) {
                Ok(more) => jobs.extend(more),
                Err(more) => mistakes.0.extend(more.0),
            },
            Err(error) => mistakes.0.push(Mistake {
                file: (*file).clone(),
                line: 0,
                option: String::new(),
                message: match file.contains(':') {
                    true => format!("neither a subject ({FORMS}) nor a job file: {error}"),
                    false => format!("cannot read the job file: {error}; hint: lunette bench --help lists the commands"),
                },
            }),
        }
    }
    if mistakes.0.is_empty() {
        Ok(jobs)
    } else {
        for mistake in &mistakes.0 {
            print_line(&format_args!("lunette: {mistake}"));
        }
        Err(Failure::Mistaken)
    }
}
