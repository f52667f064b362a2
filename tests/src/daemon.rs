//! A running `lunette serve`.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use vm::{Process, Profile, guest_directory, lunette_program, wait_until};

use crate::{Context, Result, Scratch, bail, loop_device};

/// Timeout of a start, which takes milliseconds on an idle machine.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// Time limit for requests of an emulated guest. Its front end may have to reconnect.
const REQUESTS_LIMIT: Duration = Duration::from_secs(240);

/// Options of a daemon.
#[derive(Clone, Debug)]
pub struct DaemonBuilder {
    directory: PathBuf,
    sockets: PathBuf,
    profile: Profile,
    program: Option<PathBuf>,
    has_state: bool,
    wrapper: Vec<String>,
    arguments: Vec<String>,
    exports: Vec<PathBuf>,
}

impl DaemonBuilder {
    /// Creates a builder for `lunette serve`. It runs in the folder for files, so disk paths are relative to that. Its state folder is
    /// next to its sockets. It runs in the sandbox of the packaged unit, `enforce`, and may add loop devices, and disks in its folders
    /// and in [`vm::guest_directory`]. `LUNETTE_SANDBOX` or `--sandbox` selects another mode.
    pub fn new(scratch: &Scratch) -> DaemonBuilder {
        DaemonBuilder {
            directory: scratch.files().to_owned(),
            sockets: scratch.sockets().to_owned(),
            profile: Profile::Dev,
            program: None,
            has_state: true,
            wrapper: Vec::new(),
            arguments: Vec::new(),
            exports: Vec::new(),
        }
    }

    /// Uses the optimized program.
    #[must_use]
    pub fn release(mut self) -> Self {
        self.profile = Profile::Release;
        self
    }

    /// Uses this program instead of a built one.
    #[must_use]
    pub fn program(mut self, program: &Path) -> Self {
        self.program = Some(program.to_owned());
        self
    }

    /// Starts the daemon without `--state`.
    #[must_use]
    pub fn without_state(mut self) -> Self {
        self.has_state = false;
        self
    }

    /// Runs the daemon under another program, such as `setpriv` with its options.
    #[must_use]
    pub fn under(mut self, wrapper: &[&str]) -> Self {
        self.wrapper = wrapper.iter().map(|&word| word.to_owned()).collect();
        self
    }

    /// Adds a disk: `d0=ram:512M`.
    #[must_use]
    pub fn disk(self, disk: &str) -> Self {
        self.arguments(["--disk", disk])
    }

    /// Adds a virtio-blk export of a disk, at the socket `<disk>.sock`.
    #[must_use]
    pub fn vhost_blk(self, disk: &str) -> Self {
        self.export("--vhost-blk", disk)
    }

    /// Adds a virtio-scsi controller, at the socket `<controller>.sock`.
    #[must_use]
    pub fn vhost_scsi(self, controller: &str) -> Self {
        self.export("--vhost-scsi", controller)
    }

    /// Adds a disk to a controller: `c0/0:0=d1`.
    #[must_use]
    pub fn lun(self, lun: &str) -> Self {
        self.arguments(["--lun", lun])
    }

    /// Adds other arguments.
    #[must_use]
    pub fn arguments<'a>(mut self, arguments: impl IntoIterator<Item = &'a str>) -> Self {
        self.arguments
            .extend(arguments.into_iter().map(str::to_owned));
        self
    }

    /// Starts the daemon and waits until all exports accept connections.
    pub fn start(&self) -> Result<Daemon> {
        let mut daemon = Daemon {
            builder: self.clone(),
            process: self.spawn()?,
            starts: 1,
        };
        daemon.wait_ready()?;
        Ok(daemon)
    }

    /// Starts a daemon that is expected to fail. Returns its exit status and output.
    pub fn start_refused(&self) -> Result<(ExitStatus, String)> {
        let mut process = self.spawn()?;
        let status = process.wait(READY_LIMIT)?;
        Ok((status, process.log()))
    }

    fn export(mut self, option: &str, name: &str) -> Self {
        let socket = self.sockets.join(format!("{name}.sock"));
        self.arguments
            .extend([option.to_owned(), format!("{name}:{}", socket.display())]);
        self.exports.push(socket);
        self
    }

    /// Returns the command line for display.
    pub fn command_line(&self) -> String {
        format!("lunette serve {}", self.arguments.join(" "))
    }

    fn spawn(&self) -> Result<Process> {
        let program = match &self.program {
            Some(program) => program.clone(),
            None => lunette_program(self.profile)?,
        };
        let mut words = self
            .wrapper
            .iter()
            .map(OsStr::new)
            .chain([program.as_os_str()]);
        let mut command = Command::new(words.next().context("no program")?);
        command
            .args(words)
            .arg("serve")
            .arg("--control")
            .arg(self.control());
        if self.has_state {
            command.arg("--state").arg(self.sockets.join("state"));
        }
        command.args(&self.arguments);
        command.current_dir(&self.directory);
        if std::env::var_os("LUNETTE_SANDBOX").is_none() {
            command.env("LUNETTE_SANDBOX", "enforce");
        }
        let mut allowed = loop_device::nodes();
        allowed.push(guest_directory());
        command.env("LUNETTE_SANDBOX_PATHS", std::env::join_paths(allowed)?);
        Process::start(
            "lunette serve",
            &command,
            &self.directory.join("lunette.log"),
        )
    }

    fn control(&self) -> PathBuf {
        self.sockets.join("control.sock")
    }
}

/// A daemon that is ready, killed on drop.
pub struct Daemon {
    builder: DaemonBuilder,
    process: Process,
    starts: usize,
}

impl Daemon {
    /// Returns the process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Sends SIGTERM and waits for the end.
    pub fn stop(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.process.signal(Signal::TERM)?;
        self.process.wait(limit)
    }

    /// Kills the daemon with SIGKILL and waits for the end.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()
    }

    /// Starts the daemon again after its end, with the same arguments.
    pub fn start_again(&mut self) -> Result<()> {
        if self.process.ended()?.is_none() {
            bail!("it is still running");
        }
        self.process = self.builder.spawn()?;
        self.starts += 1;
        self.wait_ready()
    }

    /// Runs `lunette WORDS` with this daemon. Returns the output.
    pub fn lunette(&self, words: &[&str]) -> Result<String> {
        let output = self.ask(words)?;
        if !output.status.success() {
            bail!(
                "lunette {} failed, {}: {}",
                words.join(" "),
                output.status,
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Runs `lunette WORDS` with this daemon; the command may fail.
    pub fn ask(&self, words: &[&str]) -> Result<std::process::Output> {
        let output = Command::new(lunette_program(self.builder.profile)?)
            .args(words)
            .arg("--socket")
            .arg(self.builder.control())
            .output()?;
        Ok(output)
    }

    /// Returns the path of the control socket.
    pub fn control(&self) -> PathBuf {
        self.builder.control()
    }

    /// Returns the output of `lunette latency`.
    pub fn latency(&self, options: &[&str]) -> Result<String> {
        let output = Command::new(lunette_program(self.builder.profile)?)
            .args(["latency", "--socket"])
            .arg(self.builder.control())
            .args(options)
            .output()?;
        if !output.status.success() {
            bail!(
                "lunette latency failed, {}: {}",
                output.status,
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Waits until the log contains a text.
    pub fn logs(&mut self, text: &str) -> Result<()> {
        let is_logged = || self.process.log().contains(text).then_some(());
        let logged = wait_until(READY_LIMIT, is_logged);
        logged.with_context(|| format!("no {text:?} in the log:\n{}", self.process.log()))
    }

    /// Waits until the daemon has answered `count` more reads and writes of a disk.
    pub fn wait_for_requests(&self, disk: &str, count: u64) -> Result<()> {
        let answered = || -> Result<u64> {
            let statistics: Value = control::get(&self.control(), "/v1/statistics")?;
            let mut disks = statistics["disks"].as_array().into_iter().flatten();
            let found = disks.find(|one| one["name"] == disk);
            let operations = &found.context("no such disk")?["operations"];
            let requests = |kind: &str| operations[kind]["requests"].as_u64().unwrap_or(0);
            Ok(requests("read") + requests("write"))
        };
        let before = answered()?;
        let done = wait_until(REQUESTS_LIMIT, || {
            (answered().ok()? >= before + count).then_some(())
        });
        done.with_context(|| format!("disk {disk} answers no {count} requests"))
    }

    /// Waits for one line on stdout per export and start, and for the final line that reports readiness.
    fn wait_ready(&mut self) -> Result<()> {
        let starts = self.starts;
        let ready = wait_until(READY_LIMIT, || {
            if let Err(error) = self.process.check_running() {
                return Some(Err(error));
            }
            let log = self.process.log();
            let announced = |path: &PathBuf| {
                let path = path.to_string_lossy();
                log.lines().filter(|line| line.contains(&*path)).count() >= starts
            };
            let serves = log
                .lines()
                .filter(|line| line.contains(" serving control="));
            let ready = serves.count() >= starts && self.builder.exports.iter().all(announced);
            ready.then_some(Ok(()))
        });
        ready.unwrap_or_else(|| {
            bail!(
                "lunette is not ready after {READY_LIMIT:?}\n{}",
                self.process.log_tail()
            )
        })
    }
}
