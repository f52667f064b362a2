//! Locks of a file or block device against other writers, held always or in turns with other processes ([`crate::turn_lock`]).

use std::io;
use std::os::fd::{AsFd, OwnedFd};

pub use block::FileLock;
use rustix::fs::Advice;
use sys::file_lock;

use super::{CacheMode, SharedFile, open, reopen};
use crate::turn_lock::{TurnLocks, Users};

impl TurnLocks for SharedFile {
    fn users(&self) -> &Users {
        &self.users
    }

    fn object(&self) -> String {
        self.path.display().to_string()
    }

    fn lock_service(&self) -> &'static str {
        "the file system and its lock service"
    }

    fn begin_turn(&self) -> io::Result<()> {
        self.take_locks()?;
        if self.cache != CacheMode::None {
            // The pages of this host are those of its last turn.
            rustix::fs::fadvise(&self.control, 0, None, Advice::DontNeed)?;
        }
        self.follow_size()
    }

    fn end_turn(&self) -> io::Result<()> {
        if self.cache != CacheMode::None && !self.info.read_only {
            // The kernel reports lost writes once. The locks stay until the disk is opened again.
            if let Some(errno) = self.durability.lost() {
                return Err(io::Error::from_raw_os_error(errno));
            }
            // Another host reads the storage, not the pages of this one.
            rustix::fs::fdatasync(&self.control)
                .inspect_err(|error| self.lose(error.raw_os_error()))?;
        }
        self.release_locks()
    }
}

impl SharedFile {
    /// See [`crate::Lockable::release_locks`].
    pub(super) fn release_locks(&self) -> io::Result<()> {
        file_lock::unlock(self.control.as_fd())?;
        // A process cannot open a device exclusively twice.
        self.claim().take();
        Ok(())
    }

    fn claim_device(&self) -> io::Result<OwnedFd> {
        reopen(self.control.as_fd(), open::CLAIM).map_err(|error| {
            let path = self.path.display();
            io::Error::new(
                error.kind(),
                format!(
                    "{path}: cannot open it exclusively: {error}; hint: find the process with fuser -v {path}, or the mount with lsblk"
                ),
            )
        })
    }

    /// See [`crate::Lockable::take_locks`].
    pub(super) fn take_locks(&self) -> io::Result<()> {
        let is_writer = !self.info.read_only;
        let mut claim = self.claim();
        if self.block_device && is_writer && claim.is_none() {
            *claim = Some(self.claim_device()?);
        }
        match file_lock::lock(self.control.as_fd(), is_writer)? {
            None => Ok(()),
            Some(_) => {
                let path = self.path.display();
                Err(io::Error::new(
                    io::ErrorKind::ResourceBusy,
                    format!(
                        "{path}: another process has locked the file; hint: find the process with lslocks or fuser -v {path}"
                    ),
                ))
            }
        }
    }
}
