//! `lunette vm bench`: runs a job file in fio's language in a guest, with the load generator of `lunette bench` or with the guest's
//! fio.

mod job_text;
mod result;

use std::fmt::Write as _;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bench::job::{Job, JobContext, parse};
use bench::run::{PROGRESS_MARK, STARTED_MARK, cpu_of, environment, least_disturbed};
use clap::{Args, ValueEnum};
use cli_common::{Failure, Outcome, print_line};
use signal_hook::consts::SIGINT;
use vm::GuestProgram;
use vm::running::{AGENT_SOCKET, CommandEnd, ExecInput, Registry, RuntimeFolder, State, exec};
use vm::setup::program_for_guests;

use crate::idle_poll::IdlePoll;

use super::copy::{copy_in, copy_out, run_script};
use super::failed;
use super::study::qemu_version;
pub use job_text::{for_disks, with_overrides};
use result::{CpuTimes, Measured};
pub use result::{add_bins, quantile};

/// `lunette vm bench`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct BenchArguments {
    /// Name of the guest
    name: String,
    /// fio job file. Its files and devices are those of the guest
    job: PathBuf,
    /// Disks for all jobs, instead of those in the job file: names in /dev, or paths
    #[arg(long, value_name = "DISK,DISK", value_delimiter = ',')]
    disks: Vec<String>,
    /// Option `size` for all jobs, instead of the one in the job file
    #[arg(long, value_name = "SIZE", help_heading = "Overrides")]
    size: Option<String>,
    /// Option `loops` for all jobs, instead of the one in the job file
    #[arg(long, value_name = "N", help_heading = "Overrides")]
    loops: Option<u32>,
    /// Option `runtime` for all jobs, instead of the one in the job file
    #[arg(long, value_name = "TIME", help_heading = "Overrides")]
    runtime: Option<String>,
    /// Another option for all jobs, instead of the one in the job file; may be given several times
    #[arg(long, value_name = "OPTION=VALUE", value_parser = job_text::option, help_heading = "Overrides")]
    set: Vec<(String, String)>,
    /// Load generator
    #[arg(long, value_enum, default_value = "lunette")]
    with: Generator,
    /// Output format: a table, or fio's JSON
    #[arg(long, value_enum, default_value = "normal")]
    output_format: Format,
    /// Write the result to this file instead of stdout
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Sleep states of the host's CPUs
    #[command(flatten)]
    idle: IdlePoll,
    /// Folder for the logs of the jobs [default: name of the job file without its suffix]
    #[arg(long, value_name = "FOLDER")]
    logs: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Generator {
    /// Load generator of `lunette bench`, which this command copies to the guest
    Lunette,
    /// fio in the guest
    Fio,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A table
    Normal,
    /// fio's JSON, with CPU times in the object `vm`
    Json,
}

const AFTER: &str = "\
The jobs run on files and block devices of the guest. Jobs that write destroy data on the disks. Logs (write_bw_log and
similar options) are copied to files of the same names. CPU times cover the whole guest and the processes of the host. They are measured from
the start of the load generator to its end, including ramp_time. Ctrl-C ends the jobs, prints the results so far and exits with 130.

Examples:
    lunette vm bench guest1 contrib/jobs/four-disks.fio --size 16m --loops 1
    lunette vm bench guest1 job.fio --disks vda,vdb --runtime 5s --output-format json --output result.json
    lunette vm bench guest1 job.fio --with fio";

/// Runs the jobs and prints the results.
///
/// # Errors
/// A mistake in the job file, or a failure in the guest.
pub fn run(arguments: &BenchArguments) -> Outcome {
    let _awake = arguments.idle.hold()?;
    let registry = Registry::open().map_err(failed)?;
    let (place, state) = registry.find(&arguments.name).map_err(failed)?;
    let text = job_file(arguments)?;
    check_devices(
        &place.file(AGENT_SOCKET),
        &state.name,
        &job_text::devices(&text),
    )?;
    vm::watch_until_second().map_err(failed)?;
    print_line(&format_args!(
        "{} runs in guest {}; Ctrl-C ends it and prints the results so far",
        arguments.job.display(),
        arguments.name
    ));
    let load = Load {
        with: arguments.with,
        logs: Some(match &arguments.logs {
            Some(folder) => folder.clone(),
            None => PathBuf::from(arguments.job.file_stem().unwrap_or_default()),
        }),
        words: None,
        has_progress: true,
        observers: Vec::new(),
    };
    let measured = with_origin(&load, &place, &state, &text).map_err(|error| {
        failed(error.context(format!(
            "guest {}: bench {}",
            arguments.name,
            arguments.job.display()
        )))
    })?;
    let text = match arguments.output_format {
        Format::Normal => measured.table(),
        Format::Json => format!("{:#}\n", measured.json()),
    };
    match &arguments.output {
        Some(path) => std::fs::write(path, text).map_err(|error| {
            Failure::because(format!("cannot write {}: {error}", path.display()))
        })?,
        None => std::io::Write::write_all(&mut cli_common::stdout(), text.as_bytes())?,
    }
    match measured.errors() {
        _ if measured.is_interrupted() => Err(Failure::Interrupted),
        0 => Ok(()),
        count => Err(Failure::because(format!(
            "guest {}: {count} jobs ended with errors",
            arguments.name
        ))),
    }
}

/// Runs the jobs once, and adds the conditions and the other load on the host to the result. Jobs may write and take long, so a disturbed
/// run is not repeated.
fn with_origin(load: &Load, place: &RuntimeFolder, state: &State, job: &str) -> Result<Measured> {
    // Before the jobs, so that a guest that ends after them does not cost their result.
    let mut kernel = Vec::new();
    let socket = place.file(AGENT_SOCKET);
    let release = "cat /proc/sys/kernel/osrelease";
    run_script(&socket, release, &[], ExecInput::Nothing, &mut kernel)?;
    let processes: Vec<u32> = [state.qemu, state.daemon].into_iter().flatten().collect();
    let run = || in_guest(load, place, state, job);
    let (mut measured, other) = least_disturbed(&processes, 0, |_| (), vm::interrupted, run)?;
    let kernel = String::from_utf8_lossy(&kernel).trim().to_owned();
    let emulated = match state.accelerator.as_str() {
        "TCG" => " (emulated)",
        _ => "",
    };
    let guest = format!(
        "{}{emulated}, {}, guest Linux {kernel}, {} virtual CPUs, {} MiB; disks: {}",
        state.accelerator,
        qemu_version(),
        state.cpus,
        state.memory_mib,
        state.topology
    );
    measured.set_origin(&guest, &environment(), &other, state.daemon.is_some());
    Ok(measured)
}

/// Returns the job file's text with the overrides of the command line, after checking it.
fn job_file(arguments: &BenchArguments) -> Result<String, Failure> {
    let name = arguments.job.display().to_string();
    let text = std::fs::read_to_string(&arguments.job)
        .map_err(|error| Failure::mistake(format!("cannot read {name}: {error}")))?;
    let mut overrides = arguments.set.clone();
    let size = arguments.size.clone().map(|size| ("size", size));
    let loops = arguments.loops.map(|loops| ("loops", loops.to_string()));
    let runtime = arguments.runtime.clone().map(|time| ("runtime", time));
    let given = [size, loops, runtime].into_iter().flatten();
    overrides.extend(given.map(|(option, value)| (option.to_owned(), value)));
    if !arguments.disks.is_empty() {
        let disks = job_text::filename(&arguments.disks);
        overrides.push(("filename".to_owned(), disks));
    }
    let text = job_text::with_overrides(&text, &overrides)
        .map_err(|message| Failure::mistake(format!("{name}: {message}")))?;
    if arguments.with == Generator::Lunette {
        let jobs = JobContext::here(|here| parse(&name, &text, &Job::default(), here));
        if let Err(mistakes) = jobs {
            for mistake in &mistakes.0 {
                print_line(&format_args!("lunette: {mistake}"));
            }
            return Err(Failure::Mistaken);
        }
    }
    Ok(text)
}

/// Checks that the jobs' devices are block devices of the guest. A load generator would create a missing one as a regular file.
fn check_devices(socket: &Path, guest: &str, devices: &[String]) -> Result<(), Failure> {
    const SCRIPT: &str = "for device; do [ -b \"$device\" ] || echo \"$device\"; done";
    let words: Vec<&str> = devices.iter().map(String::as_str).collect();
    let mut missing = Vec::new();
    run_script(socket, SCRIPT, &words, ExecInput::Nothing, &mut missing).map_err(failed)?;
    match String::from_utf8_lossy(&missing).lines().next() {
        None => Ok(()),
        Some(device) => Err(Failure::because(format!(
            "guest {guest}: {device} is not a block device; hint: lunette vm exec {guest} 'cat /proc/partitions'"
        ))),
    }
}

/// A folder in the guest, removed on drop.
struct GuestFolder<'a> {
    socket: &'a Path,
    path: String,
}

impl Drop for GuestFolder<'_> {
    fn drop(&mut self) {
        // Fails if the guest has ended, which is harmless.
        let words = [self.path.as_str()];
        let nothing = ExecInput::Nothing;
        run_script(
            self.socket,
            "rm -rf \"$1\"",
            &words,
            nothing,
            &mut std::io::sink(),
        )
        .unwrap_or(());
    }
}

impl GuestFolder<'_> {
    /// Runs a script in the folder and returns its output.
    fn ask(&self, script: &str, words: &[&str]) -> Result<String> {
        let script = format!("cd {} || exit 1\n{script}", self.path);
        let mut output = Vec::new();
        run_script(self.socket, &script, words, ExecInput::Nothing, &mut output)?;
        String::from_utf8(output).context("the output of the guest is not text")
    }
}

/// Load generator and destination of its logs.
pub(super) struct Load {
    with: Generator,
    logs: Option<PathBuf>,
    /// Arguments of the generator in place of a job file.
    words: Option<String>,
    /// Prints the rate and the remaining time meanwhile.
    has_progress: bool,
    /// Receivers of the events of the load. Excludes `has_progress`.
    observers: Vec<Sender<LoadEvent>>,
}

/// Event of a load in a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoadEvent {
    /// The first request has completed.
    Started,
    /// The load generator has ended.
    Ended,
}

/// Sends an event. A receiver that has failed needs none.
fn announce(event: LoadEvent, observers: &[Sender<LoadEvent>]) {
    for observer in observers {
        observer.send(event).unwrap_or(());
    }
}

impl Load {
    /// Uses Lunette's generator. Logs stay in the guest.
    pub(super) fn plain() -> Load {
        Load {
            with: Generator::Lunette,
            logs: None,
            words: None,
            has_progress: false,
            observers: Vec::new(),
        }
    }

    /// Same as [`Load::plain`], with the events of the load.
    pub(super) fn announced(observers: Vec<Sender<LoadEvent>>) -> Load {
        Load {
            observers,
            ..Load::plain()
        }
    }

    /// Same as [`Load::plain`], on files of a file system.
    pub(super) fn files(words: &[String]) -> Load {
        Load {
            words: Some(format!("files {}", words.join(" "))),
            ..Load::plain()
        }
    }
}

/// Runs the jobs of a text in a guest.
pub(super) fn in_guest(
    load: &Load,
    place: &RuntimeFolder,
    state: &State,
    job: &str,
) -> Result<Measured> {
    let socket = place.file(AGENT_SOCKET);
    let mut path = Vec::new();
    // mktemp replaces each X by a letter or digit.
    let make = "mktemp -d /tmp/bench.XXXXXX";
    run_script(&socket, make, &[], ExecInput::Nothing, &mut path)?;
    let path = String::from_utf8_lossy(&path).trim().to_owned();
    let is_sound = |c: char| c.is_ascii_alphanumeric() || "/.".contains(c);
    ensure!(
        path.starts_with("/tmp/bench.") && path.chars().all(is_sound) && !path.contains(".."),
        "the guest made the folder {path:?}"
    );
    let folder = GuestFolder {
        socket: &socket,
        path,
    };
    let bytes = ExecInput::Bytes(job.as_bytes().to_vec());
    let words = [folder.path.as_str()];
    let put = "cat > \"$1/job.fio\"";
    run_script(&socket, put, &words, bytes, &mut std::io::sink())?;
    let command = match load.with {
        Generator::Lunette => {
            let generator = generator(&socket)?;
            match &load.words {
                Some(words) => format!("{generator} {words} > result.json"),
                // An early SIGINT is ignored until the generator has a handler.
                None => {
                    let flag = match (load.has_progress, load.observers.is_empty()) {
                        (true, _) => " --progress",
                        (false, false) => " --announce",
                        (false, true) => "",
                    };
                    format!("(trap '' INT; exec {generator}{flag} job.fio > result.json)")
                }
            }
        }
        Generator::Fio => {
            ensure!(
                folder
                    .ask("command -v fio >/dev/null && echo yes || echo no", &[])?
                    .trim()
                    == "yes",
                "the guest has no fio; hint: use --with lunette, copy a static fio with `lunette vm copy {} fio :/bin/fio`, or boot a system that has fio (--system)",
                state.name
            );
            "(trap '' INT; exec fio --output-format=json --output=result.json job.fio >&2)"
                .to_owned()
        }
    };
    let (elapsed, qemu, daemon) = watched(&folder, state, &command, &load.observers)?;
    let is_interrupted = vm::interrupted();
    let times = |file: &str| -> Result<CpuTimes> {
        let text = folder.ask(&format!("cat {file}"), &[])?;
        CpuTimes::parse(&text)
            .with_context(|| format!("cannot parse the guest's /proc/stat: {text:?}"))
    };
    let guest_cpu = times("after")?.since(&times("before")?);
    let result = folder.ask("cat result.json", &[])?;
    let logs = match &load.logs {
        Some(target) => fetch_logs(target, &folder)?,
        None => Vec::new(),
    };
    let mut measured = Measured::new(&result, state, elapsed, guest_cpu, [qemu, daemon], logs)?;
    if is_interrupted {
        measured.set_interrupted();
    }
    Ok(measured)
}

/// Runs the load. Returns the duration and the CPU times of QEMU and the daemon.
fn watched(
    folder: &GuestFolder<'_>,
    state: &State,
    load: &str,
    observers: &[Sender<LoadEvent>],
) -> Result<(Duration, Option<u64>, Option<u64>)> {
    let script = format!(
        "cd {} || exit 1\ntrap : INT\ncat /proc/stat > before\n{load}\ncode=$?\ncat /proc/stat > after\nexit $code\n",
        folder.path
    );
    let used = || [state.qemu, state.daemon].map(|pid| pid.and_then(cpu_of));
    let (mut output, mut errors) = (Vec::new(), ErrorLines::new(observers));
    let (begin, before) = (Instant::now(), used());
    let is_over = AtomicBool::new(false);
    let ended = std::thread::scope(|scope| {
        let (sender, signals) = channel();
        let is_over = &is_over;
        scope.spawn(move || forward_interruption(&sender, is_over));
        let ended = exec(
            folder.socket,
            script.as_bytes(),
            ExecInput::Nothing,
            &mut output,
            &mut errors,
            Some(signals),
        );
        is_over.store(true, Ordering::Relaxed);
        ended
    })?;
    let (elapsed, after) = (begin.elapsed(), used());
    announce(LoadEvent::Ended, observers);
    let errors = errors.errors();
    match ended {
        // A job with errors has a result too, which contains them.
        CommandEnd::Code(0) => {}
        CommandEnd::Code(code) => {
            let has_result = folder.ask("test -s result.json && echo yes || echo no", &[])?;
            if code > 128 || has_result.trim() != "yes" {
                bail!("{} (exit code {code} in the guest)", errors.trim());
            }
            print_line(&format_args!("lunette: {}", errors.trim()));
        }
        CommandEnd::OutputClosed => bail!("the reader of the guest's output has ended"),
    }
    let spent = |at: usize| Some(after[at]?.saturating_sub(before[at]?));
    Ok((elapsed, spent(0), spent(1)))
}

/// Errors of a load generator. Lines of its progress are printed as they arrive.
struct ErrorLines<'a> {
    errors: Vec<u8>,
    /// Line without its end.
    rest: Vec<u8>,
    /// Receivers of [`LoadEvent::Started`] at the line [`STARTED_MARK`].
    observers: &'a [Sender<LoadEvent>],
}

impl ErrorLines<'_> {
    fn new(observers: &[Sender<LoadEvent>]) -> ErrorLines<'_> {
        ErrorLines {
            errors: Vec::new(),
            rest: Vec::new(),
            observers,
        }
    }

    fn errors(mut self) -> String {
        self.errors.append(&mut self.rest);
        String::from_utf8_lossy(&self.errors).into_owned()
    }
}

impl std::io::Write for ErrorLines<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        for byte in bytes {
            self.rest.push(*byte);
            if *byte != b'\n' {
                continue;
            }
            if self.rest.starts_with(PROGRESS_MARK.as_bytes()) {
                let line = String::from_utf8_lossy(&self.rest);
                print_line(&cli_common::printable(line.trim()));
            } else if self.rest.trim_ascii_end() == STARTED_MARK.as_bytes() {
                announce(LoadEvent::Started, self.observers);
            } else {
                self.errors.extend_from_slice(&self.rest);
            }
            self.rest.clear();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Sends SIGINT after an interruption, until the command is over. The first one may arrive before the generator has a handler.
fn forward_interruption(signals: &Sender<u8>, is_over: &AtomicBool) {
    const STEP: Duration = Duration::from_millis(20);
    const STEPS: u32 = 25;
    let mut waits = 0;
    while !is_over.load(Ordering::Relaxed) {
        if vm::interrupted() {
            if waits % STEPS == 0 && signals.send(SIGINT as u8).is_err() {
                return;
            }
            waits += 1;
        }
        std::thread::sleep(STEP);
    }
}

/// Returns the path of the load generator in the guest, where it stays for later runs.
pub(super) fn generator(socket: &Path) -> Result<String> {
    let program = program_for_guests(GuestProgram::Bench)?;
    let metadata = std::fs::metadata(&program)
        .with_context(|| format!("cannot stat {}", program.display()))?;
    let made = metadata.modified()?.duration_since(std::time::UNIX_EPOCH);
    let made = made.map_or(0, |time| time.as_nanos());
    let path = format!("/tmp/guest-bench-{:x}-{made:x}", metadata.len());
    let mut there = Vec::new();
    let look = "test -x \"$1\" && echo yes || echo no";
    run_script(socket, look, &[&path], ExecInput::Nothing, &mut there)?;
    if there != b"yes\n" {
        copy_in(socket, &program, &path).context("cannot put the load generator into the guest")?;
    }
    Ok(path)
}

/// Copies the logs. The guest's names are checked, so that they stay within the folder.
fn fetch_logs(target: &Path, folder: &GuestFolder<'_>) -> Result<Vec<PathBuf>> {
    let list = folder.ask("ls -1", &[])?;
    let names: Vec<&str> = list.lines().filter(|name| name.ends_with(".log")).collect();
    let mut logs = Vec::new();
    for name in names {
        let mut parts = Path::new(name).components();
        ensure!(
            matches!(parts.next(), Some(Component::Normal(_))) && parts.next().is_none(),
            "the guest has an invalid log name {name:?}"
        );
        std::fs::create_dir_all(target)
            .with_context(|| format!("cannot create {}", target.display()))?;
        let place = target.join(name);
        copy_out(folder.socket, &format!("{}/{name}", folder.path), &place)?;
        logs.push(place);
    }
    Ok(logs)
}

/// Formats nanoseconds as seconds; `None` as a dash.
fn seconds(nanos: Option<u64>) -> String {
    let mut text = String::new();
    match nanos {
        Some(nanos) => write!(text, "{:.2} s", nanos as f64 / 1e9).unwrap_or(()),
        None => text.push('-'),
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn progress_of_a_generator_is_no_error() {
        let (sender, started) = channel();
        let receivers = [sender];
        let mut lines = ErrorLines::new(&receivers);
        for piece in [
            "progress: 5 s, 7 IOPS, 5 s left\nguest-",
            "bench: cannot read /dev/vda\n",
            "progre",
            "ss: 10 s, 7 IOPS, 0 s left\nstarted: the first",
        ] {
            lines.write_all(piece.as_bytes()).unwrap();
        }
        assert!(started.try_recv().is_err());
        lines.write_all(b" request has completed\ncut").unwrap();
        assert_eq!(started.try_recv(), Ok(LoadEvent::Started));
        assert_eq!(lines.errors(), "guest-bench: cannot read /dev/vda\ncut");
    }
}
