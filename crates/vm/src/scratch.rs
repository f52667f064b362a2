//! Temporary places of one run: a short path for sockets (the kernel allows 108 bytes), and one on a real file system
//! for disks, because `/tmp` may be memory. Both are removed on drop.

use crate::places::guest_directory;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use tempfile::{Builder, TempDir};

/// Two temporary directories.
pub struct Scratch {
    sockets: TempDir,
    files: TempDir,
}

impl Scratch {
    /// Empty places. Open to all, for a daemon may run as another user.
    pub fn new() -> Result<Scratch> {
        let parent = guest_directory();
        std::fs::create_dir_all(&parent)
            .with_context(|| format!("cannot make {}", parent.display()))?;
        let sockets = Builder::new().prefix("lunette-").tempdir()?;
        let files = Builder::new().prefix("scratch-").tempdir_in(&parent)?;
        Ok(Scratch { sockets, files })
    }

    /// The path of a socket.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.sockets.path().join(name)
    }

    /// The path of a disk's file or of anything else.
    pub fn file(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    /// Where the sockets are.
    pub fn sockets(&self) -> &Path {
        self.sockets.path()
    }

    /// Where the files are.
    pub fn files(&self) -> &Path {
        self.files.path()
    }
}
