//! Loop devices (losetup(8)), for tests that run as root.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

/// A loop device over a file, detached on drop.
pub struct Loop(pub String);

impl Loop {
    /// Attaches a free loop device to a file.
    ///
    /// # Errors
    /// Fails with the output of losetup.
    pub fn over(path: &Path) -> Result<Loop> {
        Loop::with_sectors(path, 512)
    }

    /// Attaches a free loop device of this logical block size to a file.
    ///
    /// # Errors
    /// Fails with the output of losetup.
    pub fn with_sectors(path: &Path, bytes: u32) -> Result<Loop> {
        let (bytes, path) = (bytes.to_string(), path.display().to_string());
        let device = losetup(&["--find", "--show", "--sector-size", &bytes, &path])?;
        Ok(Loop(device))
    }

    /// Updates the device size to the current size of the file.
    ///
    /// # Errors
    /// Fails with the output of losetup.
    pub fn take_size(&self) -> Result<()> {
        losetup(&["--set-capacity", &self.0])?;
        Ok(())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        losetup(&["--detach", &self.0]).ok();
    }
}

/// Returns the nodes of all loop devices. A test may attach one of them while its daemon runs.
pub(crate) fn nodes() -> Vec<PathBuf> {
    let nodes = (0..).map(|number| PathBuf::from(format!("/dev/loop{number}")));
    nodes.take_while(|node| node.exists()).collect()
}

fn losetup(arguments: &[&str]) -> Result<String> {
    let output = Command::new("losetup").args(arguments).output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "losetup {arguments:?}: {errors}");
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
