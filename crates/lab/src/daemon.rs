//! A running `lunette serve`.

use crate::build::{Profile, lunette_program};
use crate::process::{Process, wait_until};
use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

/// Its start is a matter of milliseconds; the machine may be busy.
const READY_LIMIT: Duration = Duration::from_secs(30);

/// What to start.
#[derive(Clone, Debug)]
pub struct DaemonBuilder {
    directory: PathBuf,
    profile: Profile,
    wrapper: Vec<String>,
    arguments: Vec<String>,
    exports: usize,
}

impl DaemonBuilder {
    /// `lunette serve` in `directory`, which relative paths of sockets and files refer to.
    pub fn new(directory: &Path) -> DaemonBuilder {
        DaemonBuilder {
            directory: directory.to_owned(),
            profile: Profile::Dev,
            wrapper: Vec::new(),
            arguments: Vec::new(),
            exports: 0,
        }
    }

    /// The optimised program instead of the checked one.
    #[must_use]
    pub fn release(mut self) -> Self {
        self.profile = Profile::Release;
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

    /// A virtio-blk export: `d0:d0.sock`.
    #[must_use]
    pub fn vhost_blk(mut self, export: &str) -> Self {
        self.exports += 1;
        self.arguments(["--vhost-blk", export])
    }

    /// A virtio-scsi export, a controller: `c0:c0.sock`.
    #[must_use]
    pub fn vhost_scsi(mut self, export: &str) -> Self {
        self.exports += 1;
        self.arguments(["--vhost-scsi", export])
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

    fn spawn(&self) -> Result<Process> {
        let program = lunette_program(self.profile)?;
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
            .args(&self.arguments);
        command.current_dir(&self.directory);
        Process::start(
            "lunette serve",
            &command,
            &self.directory.join("lunette.log"),
        )
    }

    fn control(&self) -> PathBuf {
        self.directory.join("control.sock")
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

    /// Starts it again after it ended, with the same arguments.
    pub fn start_again(&mut self) -> Result<()> {
        if self.process.ended()?.is_none() {
            bail!("it still runs");
        }
        self.process = self.builder.spawn()?;
        self.starts += 1;
        self.wait_ready()
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

    /// A file or socket in its directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.builder.directory.join(name)
    }

    /// One line on stdout for each export, in each life.
    fn wait_ready(&mut self) -> Result<()> {
        let sockets: Vec<PathBuf> = self
            .builder
            .arguments
            .windows(2)
            .filter(|words| words[0] == "--vhost-blk" || words[0] == "--vhost-scsi")
            .filter_map(|words| words[1].split_once(':'))
            .map(|(_, path)| self.path(path))
            .collect();
        let (builder, starts) = (self.builder.clone(), self.starts);
        let ready = wait_until(READY_LIMIT, || {
            if let Err(error) = self.process.check_running() {
                return Some(Err(error));
            }
            let log = self.process.log();
            let announced = |path: &PathBuf| {
                let name = path
                    .file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned();
                log.lines().filter(|line| line.contains(&name)).count() >= starts && path.exists()
            };
            let lines = log.lines().count();
            (sockets.iter().all(announced) && lines >= builder.exports * starts).then_some(Ok(()))
        });
        ready.unwrap_or_else(|| {
            bail!(
                "lunette is not ready after {READY_LIMIT:?}\n{}",
                self.process.log_tail()
            )
        })
    }
}
