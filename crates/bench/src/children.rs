//! Child processes and temporary folders of a measurement. They are removed however it ends.
//!
//! The kernel kills a daemon when the thread that started it ends, even by SIGKILL. A folder is removed when its owner is dropped, or by
//! [`abandon`] before the process exits without drops.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Timeout for a daemon to open its sockets.
const PATIENCE: Duration = Duration::from_secs(20);

/// Existing temporary folders.
static SCRATCHES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A temporary folder, removed on drop.
pub struct Scratch(tempfile::TempDir);

impl Scratch {
    /// Creates a folder in `place`; its name begins with `prefix`.
    ///
    /// # Errors
    /// The folder cannot be created; the error names its place.
    pub fn new(prefix: &str, place: &Path) -> Result<Scratch> {
        let folder = tempfile::Builder::new().prefix(prefix).tempdir_in(place);
        let folder =
            folder.with_context(|| format!("cannot create a folder in {}", place.display()))?;
        let mut all = SCRATCHES.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(folder.path().to_owned());
        Ok(Scratch(folder))
    }

    /// Creates a folder for sockets in /tmp, because socket paths have at most 107 bytes.
    ///
    /// # Errors
    /// As [`Scratch::new`].
    pub fn for_sockets(prefix: &str) -> Result<Scratch> {
        Scratch::new(prefix, Path::new("/tmp"))
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let mut all = SCRATCHES.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|path| path != self.0.path());
    }
}

/// Removes all folders before the process exits. Its daemons end with it.
pub fn abandon() {
    let all = SCRATCHES.lock().unwrap_or_else(PoisonError::into_inner);
    for folder in all.iter() {
        // Errors cannot be reported any more.
        std::fs::remove_dir_all(folder).ok();
    }
}

/// Command line of a daemon.
pub struct Start {
    name: String,
    command: Command,
}

impl Start {
    /// Prepares a start of `program`, optionally pinned to a CPU.
    pub fn new(program: &Path, cpu: Option<usize>) -> Start {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        if let Some(cpu) = cpu {
            command.args(["taskset", "-c"]).arg(cpu.to_string());
        }
        command.arg(program);
        Start {
            name: program.display().to_string(),
            command,
        }
    }

    /// Adds an argument.
    pub fn arg(&mut self, argument: impl AsRef<OsStr>) -> &mut Start {
        self.command.arg(argument);
        self
    }

    /// Adds arguments.
    pub fn args(&mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> &mut Start {
        self.command.args(arguments);
        self
    }
}

/// A process that is killed on drop.
pub struct Daemon {
    child: Child,
}

impl Daemon {
    /// Starts the daemon and waits for its sockets.
    ///
    /// # Errors
    /// The daemon cannot be started, or does not serve in time; the error contains its output.
    pub fn start(mut start: Start, log: &Path, sockets: &[PathBuf]) -> Result<Daemon> {
        let out = File::create(log)?;
        let name = start.name;
        let child = start
            .command
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            // Ctrl-C in a terminal reaches only this process, which then ends its children.
            .process_group(0)
            .spawn();
        let child = match child {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                bail!(
                    "cannot start {name}: there is no setpriv (Debian: apt-get install util-linux)"
                )
            }
            other => other.with_context(|| format!("cannot start {name}"))?,
        };
        let mut daemon = Daemon { child };
        let until = Instant::now() + PATIENCE;
        while !sockets.iter().all(|socket| socket.exists()) {
            let ended = daemon.child.try_wait()?;
            if ended.is_some() || Instant::now() > until {
                let mut text = String::new();
                File::open(log)?.read_to_string(&mut text)?;
                bail!("{name} is not ready: {}", text.trim());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(daemon)
    }

    /// Returns true if the process has ended.
    ///
    /// # Errors
    /// The state cannot be read.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Returns the process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Both calls fail only if the process has ended.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_goes_with_its_owner() {
        let folder = Scratch::for_sockets("lt").unwrap();
        let path = folder.path().to_owned();
        let known = |path: &PathBuf| SCRATCHES.lock().unwrap().contains(path);
        std::fs::write(path.join("file"), "x").unwrap();
        assert!(known(&path));
        drop(folder);
        assert!(!path.exists() && !known(&path));
    }

    #[test]
    fn a_program_that_does_not_serve_is_named_and_says_why() {
        let folder = Scratch::for_sockets("lt").unwrap();
        let log = folder.path().join("log");
        let mut start = Start::new(Path::new("ls"), Some(0));
        start.arg("/nonexistent-folder");
        let error = Daemon::start(start, &log, &[folder.path().join("never")]);
        let text = error
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default();
        assert!(text.starts_with("ls is not ready: "), "{text}");
        assert!(text.contains("nonexistent-folder"), "{text}");
    }
}
