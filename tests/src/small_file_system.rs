//! A small file system that tests can fill quickly.

use crate::Scratch;
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use vm::wait_until;

/// A tmpfs of 24 MiB at `small`, in a mount namespace that outlives daemons.
pub struct SmallFileSystem(Child);

impl SmallFileSystem {
    /// Mounts the file system in a new mount namespace.
    pub fn mount(scratch: &Scratch) -> Result<SmallFileSystem> {
        let script = "mkdir -p small && mount -t tmpfs -o size=24M tmpfs small && touch small/mounted && exec sleep 3600";
        let as_user: &[&str] = match is_root() {
            true => &["--mount"],
            false => &["--user", "--map-root-user", "--mount"],
        };
        let keeper = Command::new("unshare")
            .args(as_user)
            .args(["sh", "-c", script])
            .current_dir(scratch.files())
            .stdout(Stdio::null())
            .spawn()
            .context("unshare")?;
        let keeper = SmallFileSystem(keeper);
        let mounted = keeper.folder_from_outside(scratch).join("mounted");
        let is_mounted = wait_until(Duration::from_secs(20), || {
            std::fs::exists(&mounted).ok()?.then_some(())
        });
        is_mounted.context("no tmpfs was mounted")?;
        Ok(keeper)
    }

    /// Path of the file system inside its mount namespace.
    pub fn folder(scratch: &Scratch) -> PathBuf {
        scratch.files().join("small")
    }

    /// Path of the file system for this process.
    pub fn folder_from_outside(&self, scratch: &Scratch) -> PathBuf {
        let root = format!("/proc/{}/root{}", self.0.id(), scratch.files().display());
        PathBuf::from(root).join("small")
    }

    /// Returns the command prefix that runs a program in the mount namespace.
    pub fn wrapper(&self, scratch: &Scratch) -> Vec<String> {
        let folder = scratch.files().display();
        let script = format!("cd '{folder}' && exec \"$0\" \"$@\"");
        let (process, user) = (self.0.id().to_string(), !is_root());
        let user = user.then_some(["--user", "--preserve-credentials"]);
        let words = ["nsenter", "--target", &process, "--mount"];
        let words = words.into_iter().chain(user.into_iter().flatten());
        words
            .chain(["sh", "-c", &script])
            .map(str::to_owned)
            .collect()
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        // Fails if the process has already ended.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
