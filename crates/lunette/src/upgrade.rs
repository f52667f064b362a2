//! `lunette upgrade`: starts another program in place of a running daemon, which hands over its front ends.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use control::{Client, ClientError, HANDOVER_VERSION, Method, Version};

use crate::cli::UpgradeArguments;
use crate::failure::{Failure, Outcome};

/// Maximum time until the old daemon has ended and the new one serves. Both have shorter limits.
const PATIENCE: Duration = Duration::from_secs(90);
const PAUSE: Duration = Duration::from_millis(10);

/// A running process and its start parameters.
struct Process {
    pid: u32,
    arguments: Vec<std::ffi::OsString>,
    environment: Vec<(std::ffi::OsString, std::ffi::OsString)>,
    folder: PathBuf,
    /// Executable of the daemon, even if its path has been replaced since.
    program: File,
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
        Some(program) => std::path::absolute(program)?,
        None => std::env::current_exe()?,
    };
    check(&program, &before)?;
    check_clients(&client, arguments)?;
    let began = Instant::now();
    let mut child = process.start(&program, true)?;
    match wait(&client, &mut child, &process) {
        Ok(after) => Ok(writeln!(
            cli_common::stderr(),
            "upgraded from {} (process {}) to {} (process {}) in {} ms",
            before.version,
            before.pid,
            after.version,
            after.pid,
            began.elapsed().as_millis()
        )?),
        Err(failure) if client.get::<Version>("/v1/version").is_ok() => Err(failure),
        Err(Failure::Reasons(mut reasons)) => {
            let program = format!(
                "/proc/{}/fd/{}",
                std::process::id(),
                process.program.as_raw_fd()
            );
            let mut again = process.start(Path::new(&program), false)?;
            wait(&client, &mut again, &process)?;
            reasons.push("the previous program runs again; front ends must reconnect".to_owned());
            Err(Failure::Reasons(reasons))
        }
        Err(failure) => Err(failure),
    }
}

/// Waits until the new daemon responds.
fn wait(client: &Client, child: &mut Child, before: &Process) -> Result<Version, Failure> {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Ok(version) = client.get::<Version>("/v1/version")
            && version.pid == child.id()
        {
            return Ok(version);
        }
        if let Some(status) = child.try_wait()? {
            return Err(Failure::because(format!(
                "the new daemon ended, {status}; hint: see its errors in the output of process {}",
                before.pid
            )));
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
    let asked = Command::new(program)
        .args(["upgrade", "--handover-version"])
        .output()
        .map_err(|error| Failure::because(format!("cannot run {shown}: {error}")))?;
    let version_text = String::from_utf8_lossy(&asked.stdout).trim().to_owned();
    match version_text.parse::<u32>() {
        Ok(version) if asked.status.success() && version == running.handover => Ok(()),
        Ok(version) => Err(Failure::because(format!(
            "the running daemon uses handover version {}, but {shown} version {version}; hint: restart the daemon with the new program",
            running.handover
        ))),
        Err(_) => Err(Failure::because(format!(
            "{shown} does not report a handover version; hint: give a lunette program of a version with `lunette upgrade`"
        ))),
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
        Ok(Process {
            pid,
            arguments: words("cmdline")?,
            environment: environment.collect(),
            folder: std::fs::read_link(place.join("cwd")).map_err(failed)?,
            program: File::open(place.join("exe")).map_err(failed)?,
        })
    }

    /// Returns the command that restarts it, if it is a service of systemd.
    fn restart_command(&self) -> Option<String> {
        let has = |name: &str| self.environment.iter().any(|(known, _)| known == name);
        control::restart_command(self.pid, has)
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
