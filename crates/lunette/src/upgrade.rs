//! `lunette upgrade`: starts another program in place of a running daemon, which hands over its front ends.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use control::{Client, ClientError, HANDOVER_VERSION, Method, Version, shell_word};
use daemon::Signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use crate::cli::UpgradeArguments;
use crate::failure::{Failure, Outcome};
use crate::take_over;

/// Maximum time until the old daemon has ended and the new one serves. Both have shorter limits.
const PATIENCE: Duration = Duration::from_secs(90);
const PAUSE: Duration = Duration::from_millis(10);

/// Limits of the report of a program's handover version.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);
const ANSWER_MAX: u64 = 64 << 10;

/// A running process and its start parameters.
struct Process {
    pid: u32,
    arguments: Vec<std::ffi::OsString>,
    environment: Vec<(std::ffi::OsString, std::ffi::OsString)>,
    folder: PathBuf,
    /// Becomes readable when the process ends.
    ending: OwnedFd,
    /// Executable of the daemon, even if its path has been replaced since.
    program: File,
    program_path: PathBuf,
}

pub fn run(arguments: &UpgradeArguments) -> Outcome {
    if arguments.handover_version {
        return Ok(writeln!(cli_common::stdout(), "{HANDOVER_VERSION}")?);
    }
    if arguments.daemon.api.is_some() {
        return Err(Failure::mistake(
            "an upgrade over TCP is not possible; hint: run it on the daemon's machine, with --socket",
        ));
    }
    let client = arguments.daemon.client()?;
    let before: Version = client.get("/v1/version")?;
    let process = Process::of(before.pid)?;
    if let Some(command) = process.restart_command() {
        return Err(Failure::because(format!(
            "the daemon is a service of systemd; hint: run {command}, which also preserves front end sessions"
        )));
    }
    let program = match &arguments.to {
        Some(program) => std::path::absolute(program),
        None => std::env::current_exe(),
    };
    let program = program.map_err(Failure::cannot("find the program to start"))?;
    check(&program, &before)?;
    check_clients(&client, arguments)?;
    let signals = Signals::listen()
        .map_err(|error| Failure::because(format!("cannot handle signals: {error}")))?;
    let began = Instant::now();
    let mut child = Group::of(process.start(&program, true)?);
    match wait(&client, &mut child.process, &process, Some(signals)) {
        Ok(after) => {
            child.is_kept = true;
            Ok(writeln!(
                cli_common::stderr(),
                "upgraded from {} (process {}) to {} (process {}) in {} ms",
                before.version,
                before.pid,
                after.version,
                after.pid,
                began.elapsed().as_millis()
            )?)
        }
        Err(failure) => {
            let new = child.process.id();
            drop(child);
            process.finish_handover(&client, new);
            if client.get::<Version>("/v1/version").is_ok() {
                return Err(failure);
            }
            Err(restart(&client, &process, failure))
        }
    }
}

/// Starts the previous program again after a failure of the new one. Returns all failures.
fn restart(client: &Client, process: &Process, failure: Failure) -> Failure {
    let Failure::Reasons(mut reasons) = failure else {
        return failure;
    };
    let program = format!(
        "/proc/{}/fd/{}",
        std::process::id(),
        process.program.as_raw_fd()
    );
    let again = process.start(Path::new(&program), false);
    match again.and_then(|mut again| wait(client, &mut again, process, None)) {
        Ok(_) => {
            reasons.push("the previous program runs again; front ends must reconnect".to_owned());
        }
        Err(failure) => {
            if let Failure::Reasons(more) = failure {
                let more = more.into_iter();
                reasons.extend(more.map(|one| format!("the previous program failed too: {one}")));
            }
            reasons.push(format!(
                "no daemon serves now; hint: after a correction start it: {}",
                process.start_command()
            ));
        }
    }
    Failure::Reasons(reasons)
}

/// Waits until the new daemon responds.
fn wait(
    client: &Client,
    child: &mut Child,
    before: &Process,
    mut signals: Option<Signals>,
) -> Result<Version, Failure> {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Ok(version) = client.get::<Version>("/v1/version")
            && version.pid == child.id()
        {
            return Ok(version);
        }
        let ended = child.try_wait();
        if let Some(status) = ended.map_err(Failure::cannot("wait for the new daemon"))? {
            return Err(Failure::because(format!(
                "the new daemon ended, {status}; hint: see its errors in the output of process {}",
                before.pid
            )));
        }
        let signal = signals.as_mut().and_then(Signals::poll);
        if matches!(signal, Some(daemon::Signal::End | daemon::Signal::Reload)) {
            return Err(Failure::because("interrupted before the new daemon served"));
        }
        if Instant::now() > until {
            return Err(Failure::because(format!(
                "the new daemon, process {}, was not ready within {} s",
                child.id(),
                PATIENCE.as_secs()
            )));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Checks that a program supports the running daemon's handover version, before any change.
fn check(program: &Path, running: &Version) -> Outcome {
    let shown = program.display();
    let (status, text) = ask_version(program)?;
    match text.trim().parse::<u32>() {
        Ok(version) if status.success() && version == running.handover => Ok(()),
        Ok(version) if status.success() => Err(Failure::because(format!(
            "the running daemon uses handover version {}, but {shown} version {version}; hint: restart the daemon with the new program",
            running.handover
        ))),
        _ => Err(Failure::because(format!(
            "{shown} does not report a handover version: it ended, {status}; hint: give a lunette program of a version with `lunette upgrade`"
        ))),
    }
}

/// Runs a program for its handover version. Returns its exit status and output.
fn ask_version(program: &Path) -> Result<(ExitStatus, String), Failure> {
    let shown = program.display();
    let asked = Command::new(program)
        .args(["upgrade", "--handover-version"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn();
    let mut asked =
        Group::of(asked.map_err(|error| Failure::because(format!("cannot run {shown}: {error}")))?);
    let output = asked.process.stdout.take();
    let (sender, receiver) = std::sync::mpsc::channel();
    // The thread ends with the program, which `Group` kills.
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = output.map(|output| output.take(ANSWER_MAX + 1).read_to_end(&mut bytes));
        sender.send(read.transpose().map(|_| bytes)).ok();
    });
    let until = Instant::now() + ANSWER_PATIENCE;
    let late = || {
        Failure::because(format!(
            "{shown} did not report its handover version within {} s",
            ANSWER_PATIENCE.as_secs()
        ))
    };
    let bytes = receiver.recv_timeout(ANSWER_PATIENCE).map_err(|_| late())?;
    let bytes =
        bytes.map_err(|error| Failure::because(format!("cannot read from {shown}: {error}")))?;
    if bytes.len() as u64 > ANSWER_MAX {
        return Err(Failure::because(format!(
            "{shown} does not report a handover version: its output exceeds {} KiB",
            ANSWER_MAX >> 10
        )));
    }
    loop {
        let ended = asked.process.try_wait();
        let failed = Failure::cannot("wait for the report of the handover version");
        if let Some(status) = ended.map_err(failed)? {
            return Ok((status, String::from_utf8_lossy(&bytes).into_owned()));
        }
        if Instant::now() > until {
            return Err(late());
        }
        std::thread::sleep(PAUSE);
    }
}

/// A process and its group, which are killed with this value unless it is kept.
struct Group {
    process: Child,
    is_kept: bool,
}

impl Group {
    fn of(process: Child) -> Group {
        Group {
            process,
            is_kept: false,
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        if let Some(pid) = Pid::from_raw(self.process.id().cast_signed()) {
            // Fails if no process is left.
            kill_process_group(pid, Signal::KILL).ok();
        }
        self.process.wait().ok();
    }
}

/// Fails if the daemon reports that the upgrade would lose data, jobs or clients.
fn check_clients(client: &Client, arguments: &UpgradeArguments) -> Outcome {
    let (lose_ram_disks, end_jobs, force) = (
        arguments.lose_ram_disks,
        arguments.end_jobs,
        arguments.force,
    );
    let path = format!(
        "/v1/upgrade/check?lose_ram_disks={lose_ram_disks}&end_jobs={end_jobs}&force={force}"
    );
    match client.change(Method::GET, &path, None) {
        Ok(_) => Ok(()),
        Err(ClientError::Problem { problem }) if matches!(problem.status, 404 | 405) => {
            if force && lose_ram_disks && end_jobs {
                return Ok(());
            }
            Err(Failure::because(
                "the running daemon is too old to check whether RAM disks, jobs and clients survive; hint: restart it, or add --force --lose-ram-disks --end-jobs",
            ))
        }
        Err(error) => Err(error.into()),
    }
}

impl Process {
    fn of(pid: u32) -> Result<Process, Failure> {
        let place = PathBuf::from(format!("/proc/{pid}"));
        let failed = |error: std::io::Error| {
            Failure::because(format!(
                "cannot read the command line of process {pid}: {error}; hint: run this as the daemon's user, on its machine"
            ))
        };
        let words = |name: &str| -> Result<Vec<std::ffi::OsString>, Failure> {
            let bytes = std::fs::read(place.join(name)).map_err(failed)?;
            let words = bytes
                .split(|byte| *byte == 0)
                .filter(|word| !word.is_empty());
            Ok(words
                .map(|word| std::ffi::OsString::from_vec(word.to_vec()))
                .collect())
        };
        let environment = words("environ")?.into_iter().filter_map(|word| {
            let bytes = word.into_vec();
            let at = bytes.iter().position(|byte| *byte == b'=')?;
            let (name, value) = (bytes[..at].to_vec(), bytes[at + 1..].to_vec());
            Some((
                std::ffi::OsString::from_vec(name),
                std::ffi::OsString::from_vec(value),
            ))
        });
        let Some(id) = Pid::from_raw(pid.cast_signed()) else {
            return Err(Failure::because("the daemon reports no process"));
        };
        Ok(Process {
            pid,
            ending: pidfd_open(id, PidfdFlags::empty()).map_err(|errno| failed(errno.into()))?,
            arguments: words("cmdline")?,
            environment: environment.collect(),
            folder: std::fs::read_link(place.join("cwd")).map_err(failed)?,
            program: File::open(place.join("exe")).map_err(failed)?,
            program_path: std::fs::read_link(place.join("exe")).map_err(failed)?,
        })
    }

    /// Returns the command that restarts it, if it is a service of systemd.
    fn restart_command(&self) -> Option<String> {
        let has = |name: &str| self.environment.iter().any(|(known, _)| known == name);
        control::restart_command(self.pid, has)
    }

    /// Waits for the end of the process, if the killed process `new` had begun to receive its descriptors: the handover cannot be undone.
    fn finish_handover(&self, client: &Client, new: u32) {
        let socket = client
            .socket()
            .map(|socket| take_over::socket_path(socket, new));
        // Without the socket, the daemon refuses a request that it has not read yet.
        if socket.is_some_and(|path| std::fs::remove_file(path).is_ok()) {
            let limit = Timespec::try_from(take_over::END_LIMIT).ok();
            poll(
                &mut [PollFd::new(&self.ending, PollFlags::IN)],
                limit.as_ref(),
            )
            .ok();
        }
    }

    /// Returns the command that starts the daemon.
    fn start_command(&self) -> String {
        let program = self.program_path.to_string_lossy();
        let mut words = vec![shell_word(program.trim_end_matches(" (deleted)"))];
        let given = self.arguments.iter().skip(1);
        let given = given.filter(|word| *word != "--take-over");
        words.extend(given.map(|word| shell_word(&word.to_string_lossy())));
        let folder = shell_word(&self.folder.to_string_lossy());
        format!("cd {folder} && {}", words.join(" "))
    }

    /// Opens an output of the process for the new program; discards output if that fails.
    fn output(&self, number: u32) -> Stdio {
        let path = format!("/proc/{}/fd/{number}", self.pid);
        let file = OpenOptions::new().append(true).open(path);
        file.map_or_else(|_| Stdio::null(), Stdio::from)
    }

    fn start(&self, program: &Path, takes_over: bool) -> Result<Child, Failure> {
        let before = self.arguments.iter().skip(1);
        let arguments = before.filter(|word| *word != "--take-over");
        let mut command = Command::new(program);
        command.args(arguments);
        if takes_over {
            command.arg("--take-over");
        }
        let own = self.environment.iter();
        // Descriptors from a service manager were passed to the old process only.
        let passed = own.filter(|(name, _)| !name.to_string_lossy().starts_with("LISTEN_"));
        let started = command
            .env_clear()
            .envs(passed.map(|(name, value)| (name, value)))
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .stdout(self.output(1))
            .stderr(self.output(2))
            .process_group(0)
            .spawn();
        started.map_err(|error| {
            Failure::because(format!("cannot start {}: {error}", program.display()))
        })
    }
}
