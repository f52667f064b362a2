//! A daemon with delayed disks.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

/// A daemon with two delayed disks for one guest.
pub struct SlowDaemon {
    _process: vm::Process,
    pub control: PathBuf,
    _sockets: tempfile::TempDir,
}

impl SlowDaemon {
    pub fn start(
        delay: &str,
        size: &str,
        is_polling_off: bool,
        folder: &Path,
    ) -> Result<SlowDaemon> {
        let sockets = tempfile::tempdir()?;
        let control = sockets.path().join("control.sock");
        let mut command = std::process::Command::new(
            cli_common::find_sibling("lunette")
                .map_err(|_| anyhow::anyhow!("cannot find the program lunette"))?,
        );
        command.arg("serve").arg("--control").arg(&control);
        for disk in ["d0", "d1"] {
            command
                .arg("--disk")
                .arg(format!("{disk}=delay:{delay},size={size},storage=ram"));
        }
        if is_polling_off {
            command.args(["--poll-us=0", "--disk-poll-us=0"]);
        }
        let mut process = vm::Process::start("lunette", &command, &folder.join("daemon.log"))?;
        let up = vm::wait_until(Duration::from_secs(20), || match process.check_running() {
            Err(error) => Some(Err(error)),
            Ok(()) => control.exists().then_some(Ok(())),
        });
        up.context("the daemon of the delayed disks did not start")??;
        Ok(SlowDaemon {
            _process: process,
            control,
            _sockets: sockets,
        })
    }
}
