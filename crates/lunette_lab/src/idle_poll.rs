//! `--idle-poll`: keeps CPUs out of sleep states during a measurement.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use clap::Args;
use cli_common::Failure;

/// While a process holds this file open, CPUs enter only sleep states with an exit latency up to the value written
/// (Documentation/power/pm_qos_interface.rst).
const FILE: &str = "/dev/cpu_dma_latency";

/// The option `--idle-poll`.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct IdlePoll {
    /// Keep the CPUs of this host out of sleep states during the run, so that latencies do not include their wake-up time
    #[arg(long, global = true)]
    idle_poll: bool,
}

/// Keeps CPUs out of sleep states until dropped.
#[derive(Debug)]
pub struct SleepInhibitor {
    _file: Option<std::fs::File>,
}

impl IdlePoll {
    /// Keeps CPUs awake if the option is set.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn hold(self) -> Result<SleepInhibitor, Failure> {
        self.hold_by(Path::new(FILE))
    }

    fn hold_by(self, path: &Path) -> Result<SleepInhibitor, Failure> {
        if !self.idle_poll {
            return Ok(SleepInhibitor { _file: None });
        }
        let open = || -> std::io::Result<std::fs::File> {
            let mut file = OpenOptions::new().write(true).open(path)?;
            // Microseconds, as 32 bits.
            file.write_all(&0_i32.to_ne_bytes())?;
            Ok(file)
        };
        match open() {
            Ok(file) => Ok(SleepInhibitor { _file: Some(file) }),
            Err(error) => Err(Failure::because(format!(
                "--idle-poll: cannot write {}: {error}; hint: run as root, or grant access with a udev rule",
                path.display()
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_latency_is_written_and_the_file_stays_open() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let nothing = IdlePoll::default().hold_by(file.path()).unwrap();
        assert!(nothing._file.is_none());
        let awake = IdlePoll { idle_poll: true }.hold_by(file.path()).unwrap();
        assert_eq!(std::fs::read(file.path()).unwrap(), [0, 0, 0, 0]);
        assert!(awake._file.is_some());
        let missing = IdlePoll { idle_poll: true }.hold_by(Path::new("/nonexistent/file"));
        assert!(missing.is_err());
    }
}
