//! Temporary folders of a run: one with a short path for sockets (the limit is 108 bytes), and one on a disk file system for disks,
//! because `/tmp` may be in memory. Both are removed on drop.

use std::path::{Path, PathBuf};

use tempfile::{Builder, TempDir};
use vm::guest_directory;

use crate::{Context, Result};

/// Two temporary directories.
pub struct Scratch {
    sockets: TempDir,
    files: TempDir,
}

impl Scratch {
    /// Creates both folders, accessible for all users, because a daemon may run as another user.
    pub fn new() -> Result<Scratch> {
        let parent = guest_directory();
        std::fs::create_dir_all(&parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
        let sockets = Builder::new().prefix("lunette-").tempdir()?;
        let files = Builder::new().prefix("scratch-").tempdir_in(&parent)?;
        Ok(Scratch { sockets, files })
    }

    /// Returns the path of a socket.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.sockets.path().join(name)
    }

    /// Returns the path of a disk or another file.
    pub fn file(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    /// Returns the folder of the sockets.
    pub fn sockets(&self) -> &Path {
        self.sockets.path()
    }

    /// Returns the folder of the files.
    pub fn files(&self) -> &Path {
        self.files.path()
    }
}
