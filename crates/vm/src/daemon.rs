//! A running `lunette serve`.

use crate::build::{Profile, lunette_program};
use crate::process::{Process, wait_until};
use crate::scratch::Scratch;
use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

/// Its start is a matter of milliseconds; the machine may be busy.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// What to start.
#[derive(Clone, Debug)]
pub struct DaemonBuilder {
    directory: PathBuf,
    sockets: PathBuf,
    profile: Profile,
    program: Option<PathBuf>,
    wrapper: Vec<String>,
    arguments: Vec<String>,
    exports: Vec<PathBuf>,
}

impl DaemonBuilder {
    /// `lunette serve` in the directory for files: relative paths of disks refer to it. Its state is kept beside its
    /// sockets.
    pub fn new(scratch: &Scratch) -> DaemonBuilder {
        DaemonBuilder {
            directory: scratch.files().to_owned(),
            sockets: scratch.sockets().to_owned(),
            profile: Profile::Dev,
            program: None,
            wrapper: Vec::new(),
            arguments: Vec::new(),
            exports: Vec::new(),
        }
    }

    /// The optimised program instead of the checked one.
    #[must_use]
    pub fn release(mut self) -> Self {
        self.profile = Profile::Release;
        self
    }

    /// This program instead of one that is built.
    #[must_use]
    pub fn program(mut self, program: &Path) -> Self {
        self.program = Some(program.to_owned());
        self
    }

    /// Runs it under another program, such as `setpriv` with its options.
    #[must_use]
    pub fn under(mut self, wrapper: &[&str]) -> Self {
        self.wrapper = wrapper.iter().map(|&word| word.to_owned()).collect();
        self
    }

    /// A disk: `d0=ram:512M`.
    #[must_use]
    pub fn disk(self, disk: &str) -> Self {
        self.arguments(["--disk", disk])
    }

    /// A virtio-blk export of a disk, at the socket `<disk>.sock`.
    #[must_use]
    pub fn vhost_blk(self, disk: &str) -> Self {
        self.export("--vhost-blk", disk)
    }

    /// A virtio-scsi export, a controller, at the socket `<controller>.sock`.
    #[must_use]
    pub fn vhost_scsi(self, controller: &str) -> Self {
        self.export("--vhost-scsi", controller)
    }

    /// A disk on a controller: `c0/0:0=d1`.
    #[must_use]
    pub fn lun(self, lun: &str) -> Self {
        self.arguments(["--lun", lun])
    }

    /// Any other arguments.
    #[must_use]
    pub fn arguments<'a>(mut self, arguments: impl IntoIterator<Item = &'a str>) -> Self {
        self.arguments
            .extend(arguments.into_iter().map(str::to_owned));
        self
    }

    /// Starts it and waits until all exports can be connected to.
    pub fn start(&self) -> Result<Daemon> {
        let mut daemon = Daemon {
            builder: self.clone(),
            process: self.spawn()?,
            starts: 1,
        };
        daemon.wait_ready()?;
        Ok(daemon)
    }

    /// Starts it where it is expected to refuse; gives its exit status and what it said.
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

    /// The command line, for people.
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
            .arg(self.control())
            .arg("--state")
            .arg(self.sockets.join("state"))
            .args(&self.arguments);
        command.current_dir(&self.directory);
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

/// A daemon that is ready; killed on drop.
pub struct Daemon {
    builder: DaemonBuilder,
    process: Process,
    starts: usize,
}

impl Daemon {
    /// Its process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Asks it to end and waits.
    pub fn stop(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.process.signal(Signal::TERM)?;
        self.process.wait(limit)
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()
    }

    /// Starts it again after it ended, with the same arguments.
    pub fn start_again(&mut self) -> Result<()> {
        if self.process.ended()?.is_none() {
            bail!("it still runs");
        }
        self.process = self.builder.spawn()?;
        self.starts += 1;
        self.wait_ready()
    }

    /// Runs `lunette WORDS` against this daemon; gives what it prints.
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

    /// Runs `lunette WORDS` against this daemon, which may refuse.
    pub fn ask(&self, words: &[&str]) -> Result<std::process::Output> {
        let output = Command::new(lunette_program(self.builder.profile)?)
            .args(words)
            .arg("--socket")
            .arg(self.builder.control())
            .output()?;
        Ok(output)
    }

    /// Where its control socket is.
    pub fn control(&self) -> PathBuf {
        self.builder.control()
    }

    /// The stage table that `lunette latency` prints.
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

    /// One line on stdout for each export, in each life; then one more, when all of them are there.
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
