//! Runs one seed with a trace, or many seeds until one fails.

use std::cell::RefCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use uring::simulated::Faults;

use crate::schedule::{ScheduleStep, shrink, steps};
use crate::world::World;

/// A run that takes longer is stuck: a run usually takes some tens of milliseconds.
const HANGS: Duration = Duration::from_secs(60);
/// Limits for shrinking: time and number of runs.
const SHRINK_TIME: Duration = Duration::from_secs(30);
const SHRINK_TRIES: usize = 600;
/// Number of trace lines printed before the failure.
const LINES: usize = 60;

thread_local! {
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Installs a panic hook that stores the message instead of printing it.
pub fn quiet_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let payload = panic.payload();
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        let message = text.unwrap_or("a panic without a message");
        let place = panic
            .location()
            .map_or_else(String::new, |place| format!(" ({place})"));
        PANIC.with_borrow_mut(|stored| {
            if stored.is_empty() {
                *stored = format!("{message}{place}");
            }
        });
    }));
}

/// Runs a schedule. Returns the digest or the failure, and the trace if requested.
fn run(seed: u64, steps: &[ScheduleStep], traced: bool) -> (Result<u64, String>, Vec<String>) {
    run_on(Faults::default(), seed, steps, traced)
}

/// Runs a schedule on disks with additional faults.
fn run_on(
    corruption: Faults,
    seed: u64,
    steps: &[ScheduleStep],
    traced: bool,
) -> (Result<u64, String>, Vec<String>) {
    PANIC.take();
    let mut world = None;
    let ended = catch_unwind(AssertUnwindSafe(|| {
        world = Some(World::new(seed, traced, corruption));
        for step in steps {
            world.as_mut().expect("made above").step(*step);
        }
        world.as_mut().expect("made above").finish()
    }));
    match ended {
        Ok((digest, trace)) => (Ok(digest), trace),
        Err(_) => {
            let message = PANIC.take();
            let trace = world.as_mut().map_or_else(Vec::new, World::take_trace);
            // Dropping the remains may panic again.
            drop(catch_unwind(AssertUnwindSafe(|| drop(world))));
            (Err(message), trace)
        }
    }
}

/// Runs one seed and prints the result.
pub fn one(seed: u64, count: usize, shrinks: bool) -> ExitCode {
    let all = steps(seed, count);
    let (result, trace) = run(seed, &all, true);
    match result {
        Ok(digest) => {
            trace.iter().for_each(|line| println!("{line}"));
            println!("seed {seed}: {count} steps passed (digest {digest:016x})");
            ExitCode::SUCCESS
        }
        Err(message) => {
            explain(seed, all, &message, shrinks);
            ExitCode::FAILURE
        }
    }
}

fn explain(seed: u64, all: Vec<ScheduleStep>, message: &str, shrinks: bool) {
    let count = all.len();
    println!("seed {seed} fails: {message}");
    println!("again: cargo run --profile sim -p sim -- --seed {seed} --steps {count}");
    let started = Instant::now();
    let needed = match shrinks {
        true => shrink(all, SHRINK_TRIES, |fewer| {
            started.elapsed() < SHRINK_TIME && run(seed, fewer, false).0.is_err()
        }),
        false => all,
    };
    let (result, trace) = run(seed, &needed, true);
    let skipped = trace.len().saturating_sub(LINES);
    if skipped > 0 {
        println!("... {skipped} lines before");
    }
    trace[skipped..].iter().for_each(|line| println!("{line}"));
    if let Err(shorter) = result {
        let left = needed.len();
        println!("seed {seed} with {left} of its {count} steps: {shorter}");
    }
}

/// State of a thread: its current seed with the start time, or its end.
#[derive(Default)]
struct Running(Mutex<SeedState>);

#[derive(Clone, Copy, Default)]
enum SeedState {
    #[default]
    Idle,
    Seed(u64, Instant),
    Crashed,
}

impl Running {
    fn put(&self, state: SeedState) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    fn get(&self) -> SeedState {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for all threads. Ends the process if one of them is stuck.
fn watch(threads: &[Running], count: usize) {
    loop {
        let states: Vec<SeedState> = threads.iter().map(Running::get).collect();
        for state in &states {
            if let SeedState::Seed(seed, since) = state
                && since.elapsed() > HANGS
            {
                println!("seed {seed} fails: it does not terminate");
                println!("again: cargo run --profile sim -p sim -- --seed {seed} --steps {count}");
                std::process::exit(1);
            }
        }
        if states
            .iter()
            .all(|state| matches!(state, SeedState::Crashed))
        {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs many seeds until one fails or the time is up.
pub fn many(
    seeds: Range<u64>,
    limit: Option<Duration>,
    jobs: u64,
    count: usize,
    shrinks: bool,
) -> ExitCode {
    let started = Instant::now();
    let (next, failed) = (AtomicU64::new(seeds.start), AtomicBool::new(false));
    let failure = Mutex::new(None);
    let running: Vec<Running> = (0..jobs.max(1)).map(|_| Running::default()).collect();
    let (failure, next, failed, end) = (&failure, &next, &failed, seeds.end);
    std::thread::scope(|scope| {
        for running in &running {
            scope.spawn(move || {
                while !failed.load(Ordering::Relaxed)
                    && limit.is_none_or(|limit| started.elapsed() < limit)
                {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        break;
                    }
                    let all = steps(seed, count);
                    running.put(SeedState::Seed(seed, Instant::now()));
                    let (result, _) = run(seed, &all, false);
                    running.put(SeedState::Idle);
                    if let Err(message) = result
                        && !failed.swap(true, Ordering::Relaxed)
                    {
                        let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
                        *failure = Some((seed, all, message));
                    }
                }
                running.put(SeedState::Crashed);
            });
        }
        watch(&running, count);
    });
    let done = next.load(Ordering::Relaxed).min(seeds.end) - seeds.start;
    let seconds = started.elapsed().as_secs();
    let failure = failure
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take();
    match failure {
        None => {
            println!(
                "{done} seeds from {}, {count} steps each, in {seconds} s: passed",
                seeds.start
            );
            ExitCode::SUCCESS
        }
        Some((seed, all, message)) => {
            println!("{done} seeds in {seconds} s");
            explain(seed, all, &message, shrinks);
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: usize = 400;

    #[test]
    fn seed_is_always_the_same_run() {
        for seed in 0..6 {
            let all = steps(seed, STEPS);
            let (first, trace) = run(seed, &all, true);
            let (again, other) = run(seed, &all, true);
            assert_eq!(first, again);
            assert_eq!(trace, other);
            first.unwrap_or_else(|message| panic!("seed {seed}: {message}"));
        }
    }

    fn is_noticed(corruption: Faults) -> bool {
        quiet_panics();
        (0..40).any(|seed| {
            run_on(corruption, seed, &steps(seed, STEPS), false)
                .0
                .is_err()
        })
    }

    #[test]
    fn flipped_bit_on_a_disk_is_detected() {
        let flipped = 100;
        assert!(is_noticed(Faults {
            flipped,
            ..Faults::default()
        }));
    }

    #[test]
    fn misdirected_write_is_detected() {
        let misdirected = 100;
        assert!(is_noticed(Faults {
            misdirected,
            ..Faults::default()
        }));
    }
}
