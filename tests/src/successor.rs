//! A daemon that has taken over from the one that a rig started.

use crate::{Context, Daemon, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;
use vm::wait_until;

/// A process that no rig tracks. Killed on drop, so that it ends before the folders of its rig are removed.
pub struct Successor(Pid);

impl Successor {
    /// Runs `lunette WORDS`, which replaces the process of a daemon.
    ///
    /// # Errors
    /// Fails if the command fails, or if the same process serves afterwards.
    pub fn of(daemon: &Daemon, words: &[&str]) -> Result<Successor> {
        let pid = || -> Result<Option<i64>> {
            let version: Value = control::get(&daemon.control(), "/v1/version")?;
            Ok(version["pid"].as_i64())
        };
        let before = pid()?;
        daemon.lunette(words)?;
        let after = pid()?;
        ensure!(after != before, "it is the same process");
        let after = after.and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        Ok(Successor(after.context("no process ID")?))
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        kill_process(self.0, Signal::KILL).ok();
        let place = format!("/proc/{}", self.0.as_raw_nonzero());
        let is_gone = || (!Path::new(&place).exists()).then_some(());
        wait_until(Duration::from_secs(20), is_gone);
    }
}
