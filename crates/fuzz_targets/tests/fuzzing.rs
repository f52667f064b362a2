//! Runs every fuzz target with the stable compiler: its corpus first, then mutations of the corpus.
//!
//! Without coverage feedback, a mutation that reaches new code is not added to the corpus. `make fuzz` has feedback, through libFuzzer.
//! `make unit` runs each target for a second, and `make guests` for a minute in the background. A target that gets less than two thirds
//! of a CPU in its time runs longer, up to `STRETCH_MAX` times.
//!
//! Environment variables: `FUZZ_SECONDS` is the time for the mutations of one target, `FUZZ_SEED` repeats a run, and `FUZZ_INPUT` is a
//! file to run instead. An argument selects the targets with this text in their names. The current input of a target is in a file, so
//! that it can be found after an abort.
#![forbid(unsafe_code)]

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use fuzz_targets::{TARGETS, Target};
use rustix::time::{ClockId, clock_gettime};

/// Default of `FUZZ_SECONDS`, the time for the mutations of one target.
const SECONDS: u64 = 1;
/// Number of targets that run at a time.
const THREADS: usize = 2;
/// Time limit for an input, after which it is a failure. An input takes milliseconds, but the machine may be loaded.
const INPUT_SECONDS_MAX: u64 = 60;
/// Maximum size of an input in bytes.
const INPUT_MAX: usize = 16 << 10;
/// Maximum size of all corpora in bytes, because the corpus is in the repository.
const CORPUS_MAX: usize = 300 << 10;
/// Maximum factor for the time of a run. A run takes longer while other processes use the CPUs.
const STRETCH_MAX: u32 = 2;
const THREAD_NAME: &str = "fuzzing";

/// A worker of a target has panicked, which is a thread other than the drivers' own.
static WORKER_PANICKED: AtomicBool = AtomicBool::new(false);

struct Settings {
    duration: Duration,
    seed: u64,
    /// Folder for the current and the failed inputs.
    work: PathBuf,
}

impl Settings {
    /// Returns true if a target has run long enough.
    fn is_enough(&self, elapsed: Duration, cpu_time: Duration) -> bool {
        elapsed >= self.duration * STRETCH_MAX
            || (elapsed >= self.duration && cpu_time >= self.duration * 2 / 3)
    }
}

struct Outcome {
    seeds: usize,
    executions: u64,
    /// CPU time of the thread that feeds the target.
    cpu_time: Duration,
    failure: Option<String>,
}

/// Current input of a thread and its start time.
type Running = Mutex<Option<(PathBuf, Instant)>>;

fn corpus(name: &str) -> io::Result<Vec<Vec<u8>>> {
    let folder = root().join("fuzz/corpus").join(name);
    let entries = std::fs::read_dir(&folder)?;
    let mut files = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<io::Result<Vec<PathBuf>>>()?;
    files.sort();
    files.iter().map(std::fs::read).collect()
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

struct Random(fastrand::Rng);

impl Random {
    fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// Returns a number below `end`, which must not be 0.
    fn below(&mut self, end: usize) -> usize {
        self.0.usize(..end)
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}

/// Boundary values, written in 1, 2, 4 or 8 bytes.
const INTERESTING: [u64; 16] = [
    0,
    1,
    2,
    7,
    16,
    0x7f,
    0x80,
    0xff,
    0x100,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 63,
    u64::MAX,
];

/// Applies one to eight changes to a seed.
fn mutation(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut data = random.pick(seeds).clone();
    for _ in 0..=random.below(8) {
        change(random, seeds, &mut data);
    }
    data.truncate(INPUT_MAX);
    data
}

fn change(random: &mut Random, seeds: &[Vec<u8>], data: &mut Vec<u8>) {
    let kind = random.below(9);
    if data.is_empty() || kind == 0 {
        let at = random.below(data.len() + 1);
        let count = 1 + random.below(16);
        let bytes: Vec<u8> = (0..count).map(|_| random.next() as u8).collect();
        data.splice(at..at, bytes);
        return;
    }
    let at = random.below(data.len());
    let end = at + 1 + random.below((data.len() - at).min(64));
    match kind {
        1 | 2 => data[at] ^= 1 << random.below(8),
        3 => data[at] = random.next() as u8,
        4 => data[at] = data[at].wrapping_add(*random.pick(&[1, 2, 0xff, 0xfe])),
        5 => {
            let width = *random.pick(&[1, 2, 4, 8]);
            let number = *random.pick(&INTERESTING);
            let (little, big) = (number.to_le_bytes(), number.to_be_bytes());
            let bytes = *random.pick(&[&little[..width], &big[8 - width..]]);
            for (place, byte) in data[at..].iter_mut().zip(bytes) {
                *place = *byte;
            }
        }
        6 => drop(data.drain(at..end)),
        7 => {
            let copied = data[at..end].to_vec();
            let into = random.below(data.len() + 1);
            data.splice(into..into, copied);
        }
        _ => {
            let other = random.pick(seeds);
            let from = random.below(other.len() + 1);
            data.truncate(at);
            data.extend(&other[from..]);
        }
    }
}

/// Runs one input. Returns a description of the failure.
fn execute(target: Target, input: &[u8], place: &Path, running: &Running) -> Option<String> {
    let (name, run) = target;
    *running.lock().expect("no panic while it is held") = Some((place.to_owned(), Instant::now()));
    let ended = catch_unwind(AssertUnwindSafe(|| run(input)));
    *running.lock().expect("no panic while it is held") = None;
    if ended.is_ok() && !WORKER_PANICKED.swap(false, Ordering::AcqRel) {
        return None;
    }
    let mut hash = DefaultHasher::new();
    input.hash(&mut hash);
    let file = place.with_file_name(format!("{name}-{:016x}", hash.finish()));
    if let Err(error) = std::fs::write(&file, input) {
        return Some(format!(
            "panicked; cannot write {}: {error}",
            file.display()
        ));
    }
    Some(format!(
        "panicked on {0}; hint: FUZZ_INPUT={0} cargo test --workspace --exclude lunette-fuzz --test fuzzing -- {name}",
        file.display()
    ))
}

fn run_target(target: Target, settings: &Settings, running: &Running) -> io::Result<Outcome> {
    let (name, _) = target;
    let seeds = corpus(name)?;
    let mut outcome = Outcome {
        seeds: seeds.len(),
        executions: 0,
        cpu_time: Duration::ZERO,
        failure: None,
    };
    if seeds.is_empty() {
        outcome.failure = Some(format!("fuzz/corpus/{name} has no file"));
        return Ok(outcome);
    }
    let place = settings.work.join(format!("{name}.running"));
    let current = File::create(&place)?;
    let mut hash = DefaultHasher::new();
    (settings.seed, name).hash(&mut hash);
    let mut random = Random(fastrand::Rng::with_seed(hash.finish()));
    let mut left = seeds.iter();
    let (begun, cpu_time_before) = (Instant::now(), thread_cpu_time());
    loop {
        outcome.cpu_time = thread_cpu_time().saturating_sub(cpu_time_before);
        let input = match left.next() {
            Some(seed) => seed.clone(),
            None if settings.is_enough(begun.elapsed(), outcome.cpu_time) => break,
            None => mutation(&mut random, &seeds),
        };
        current.write_all_at(&input, 0)?;
        current.set_len(input.len() as u64)?;
        outcome.executions += 1;
        outcome.failure = execute(target, &input, &place, running);
        if outcome.failure.is_some() {
            break;
        }
    }
    std::fs::remove_file(&place)?;
    Ok(outcome)
}

fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Ends the process if an input exceeds the time limit, because a single thread cannot be ended.
fn watch(running: &[Running]) {
    for one in running {
        let one = one.lock().expect("no panic while it is held");
        if let Some((place, since)) = &*one
            && since.elapsed() > Duration::from_secs(INPUT_SECONDS_MAX)
        {
            println!(
                "fuzzing: {} takes more than {INPUT_SECONDS_MAX} s",
                place.display()
            );
            std::process::exit(1);
        }
    }
}

fn number_of(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Checks that every target has a file for libFuzzer and a corpus, and that the corpora are small.
fn check_files() -> Result<(), String> {
    let names = |folder: &str| -> Result<Vec<String>, String> {
        let entries = std::fs::read_dir(root().join(folder));
        let entries = entries.map_err(|error| format!("{folder}: {error}"))?;
        let paths = entries.flatten().map(|entry| entry.path());
        let mut names: Vec<String> = paths
            .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
            .collect();
        names.sort();
        Ok(names)
    };
    for folder in ["fuzz/fuzz_targets", "fuzz/corpus"] {
        let found = names(folder)?;
        let expected: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
        if found != expected {
            return Err(format!(
                "{folder} has {found:?}, the targets are {expected:?}"
            ));
        }
    }
    let mut bytes = 0;
    for (name, _) in TARGETS {
        let seeds = corpus(name).map_err(|error| format!("fuzz/corpus/{name}: {error}"))?;
        bytes += seeds.iter().map(Vec::len).sum::<usize>();
    }
    match bytes {
        0..CORPUS_MAX => Ok(()),
        _ => Err(format!(
            "fuzz/corpus has {bytes} bytes, {CORPUS_MAX} are the most"
        )),
    }
}

fn note_panics_of_workers() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().name() != Some(THREAD_NAME) {
            WORKER_PANICKED.store(true, Ordering::Release);
        }
        usual(panic);
    }));
}

fn main() -> ExitCode {
    let mut filters = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with('-'));
    let filter = filters.next().unwrap_or_default();
    if std::env::args().any(|argument| argument == "--ignored" || argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let chosen: Vec<Target> = TARGETS
        .into_iter()
        .filter(|(name, _)| name.contains(&filter))
        .collect();
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let settings = Settings {
        duration: Duration::from_secs(number_of("FUZZ_SECONDS").unwrap_or(SECONDS)),
        seed: number_of("FUZZ_SEED").unwrap_or(clock.map_or(1, |now| now.as_millis() as u64)),
        work: Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzzing"),
    };
    if let Err(error) = check_files().and_then(|()| {
        std::fs::create_dir_all(&settings.work)
            .map_err(|error| format!("{}: {error}", settings.work.display()))
    }) {
        println!("fuzzing: {error}");
        return ExitCode::FAILURE;
    }
    // This work can wait if the guest of another test runs.
    rustix::process::nice(10).ok();
    note_panics_of_workers();
    if let Some(file) = std::env::var_os("FUZZ_INPUT") {
        return run_file(Path::new(&file), &chosen);
    }
    println!(
        "\nrunning {} fuzz targets, {} s each, FUZZ_SEED={}",
        chosen.len(),
        settings.duration.as_secs(),
        settings.seed
    );
    let begun = Instant::now();
    let failures = targets_survive_the_corpus_and_its_mutations(&chosen, &settings);
    println!(
        "\ntest result: {}. {} passed; {failures} failed; 0 ignored; 0 measured; {} filtered out; finished in {:.2}s\n",
        if failures == 0 { "ok" } else { "FAILED" },
        chosen.len() - failures,
        TARGETS.len() - chosen.len(),
        begun.elapsed().as_secs_f64()
    );
    ExitCode::from(u8::from(failures > 0))
}

/// Runs targets on one file, without catching a panic.
fn run_file(file: &Path, chosen: &[Target]) -> ExitCode {
    match std::fs::read(file) {
        Ok(input) => chosen.iter().for_each(|(_, run)| run(&input)),
        Err(error) => {
            println!(
                "fuzzing: cannot read FUZZ_INPUT={}: {error}; hint: give an absolute path",
                file.display()
            );
            return ExitCode::FAILURE;
        }
    }
    ExitCode::from(u8::from(WORKER_PANICKED.load(Ordering::Acquire)))
}

/// Runs targets on a few threads and returns the number of failures.
fn targets_survive_the_corpus_and_its_mutations(chosen: &[Target], settings: &Settings) -> usize {
    let (next, failures) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let running: [Running; THREADS] = Default::default();
    std::thread::scope(|scope| {
        let threads: Vec<_> = running
            .iter()
            .map(|running| {
                let thread = std::thread::Builder::new().name(THREAD_NAME.to_owned());
                let work = || {
                    while let Some(target) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if !report(target.0, run_target(*target, settings, running)) {
                            failures.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                };
                thread.spawn_scoped(scope, work).expect("a thread")
            })
            .collect();
        while !threads.iter().all(|thread| thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(50));
            watch(&running);
        }
    });
    failures.into_inner()
}

/// Prints the outcome of a target. Returns false if it failed.
fn report(name: &str, outcome: io::Result<Outcome>) -> bool {
    match outcome {
        Ok(Outcome {
            seeds,
            executions,
            cpu_time,
            failure: None,
        }) => {
            println!(
                "fuzzing: {name} ok, {seeds} corpus files, {executions} executions in {:.1} s of CPU time",
                cpu_time.as_secs_f64()
            );
            true
        }
        Ok(Outcome {
            executions,
            failure: Some(failure),
            ..
        }) => {
            println!("fuzzing: {name} FAILED after {executions} executions: {failure}");
            false
        }
        Err(error) => {
            println!("fuzzing: {name} FAILED: {error}");
            false
        }
    }
}
