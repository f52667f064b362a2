//! A child process that ends with its owner: killed on drop, and by the kernel when the owner's thread ends.

use crate::interrupt::interrupted;
use crate::places::tool;
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Polling interval of a condition.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Waits until `condition` returns a value. Returns `None` after the limit or an interruption.
pub fn wait_until<T>(limit: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(value) = condition() {
            return Some(value);
        }
        if Instant::now() >= end || interrupted() {
            return None;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// A running child with its log file.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command`; stdout and stderr are appended to `log`.
    pub fn start(name: &str, command: &Command, log: &Path) -> Result<Process> {
        let output = File::options().create(true).append(true).open(log)?;
        let mut wrapped = Command::new(tool("setpriv")?);
        wrapped
            .args(["--pdeathsig", "KILL", "--"])
            .arg(command.get_program())
            .args(command.get_args());
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => wrapped.env(key, value),
                None => wrapped.env_remove(key),
            };
        }
        if let Some(directory) = command.get_current_dir() {
            wrapped.current_dir(directory);
        }
        let child = wrapped
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            // Ctrl-C in a terminal reaches the owner alone, which ends its children in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {name}: {command:?}"))?;
        Ok(Process {
            name: name.to_owned(),
            child,
            log: log.to_owned(),
        })
    }

    /// Starts `command` in an existing process group. The owner of that group kills it.
    pub fn start_in_group(
        name: &str,
        mut command: Command,
        log: &Path,
        group: u32,
    ) -> Result<Process> {
        let output = File::options().create(true).append(true).open(log);
        let output = output.with_context(|| format!("cannot write {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(i32::try_from(group)?)
            .spawn()
            .with_context(|| format!("cannot start {name}: {}", command.get_program().display()))?;
        Ok(Process {
            name: name.to_owned(),
            child,
            log: log.to_owned(),
        })
    }

    /// Returns the name for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(Pid::from_child(&self.child), signal)
            .with_context(|| format!("cannot signal {}", self.name))
    }

    /// Returns the exit status, `None` while the process runs.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Returns an error with the end of the log if the process has ended.
    pub fn check_running(&mut self) -> Result<()> {
        match self.ended()? {
            None => Ok(()),
            Some(status) => bail!("{} ended early, {status}\n{}", self.name, self.log_tail()),
        }
    }

    /// Waits for the end of the process.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        match wait_until(limit, || self.child.try_wait().transpose()) {
            Some(status) => Ok(status?),
            None => bail!(
                "{} is still running after {limit:?}\n{}",
                self.name,
                self.log_tail()
            ),
        }
    }

    /// Kills the process with SIGKILL and waits for the end.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Returns the user and system time of all threads.
    pub fn cpu_time(&self) -> Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.id()))?;
        // The second field is a name in parentheses that may contain spaces: proc(5), fields 14 and 15.
        let (_, fields) = stat.rsplit_once(") ").context("malformed /proc/PID/stat")?;
        let ticks: u64 = fields
            .split(' ')
            .skip(11)
            .take(2)
            .filter_map(|field| field.parse::<u64>().ok())
            .sum();
        Ok(Duration::from_secs_f64(
            ticks as f64 / rustix::param::clock_ticks_per_second() as f64,
        ))
    }

    /// Returns the complete output.
    pub fn log(&self) -> String {
        std::fs::read(&self.log)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Returns the end of the output, with a heading.
    pub fn log_tail(&self) -> String {
        tail(&self.name, &self.log)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended before; in both cases it is gone afterwards.
        self.kill().unwrap_or(());
    }
}

/// Returns the last lines of a log, with a heading.
pub fn tail(name: &str, log: &Path) -> String {
    const LINES: usize = 40;
    let text = std::fs::read(log)
        .map(|bytes| String::from_utf8_lossy(&bytes).replace('\r', ""))
        .unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(LINES)..];
    format!(
        "--- last output of {name} ---\n{}\n--- end ---",
        last.join("\n")
    )
}

/// Lock for tests that start processes or check file locks: between fork and exec a child holds the descriptors of all threads, including
/// their locks.
#[cfg(test)]
pub(crate) fn no_other_starts() -> std::sync::MutexGuard<'static, ()> {
    static STARTS: std::sync::Mutex<()> = std::sync::Mutex::new(());
    STARTS
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
