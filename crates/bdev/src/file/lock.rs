//! Locks of a file or block device against other writers, held always or in turns with other processes ([`crate::turn_lock`]).

use std::io;
use std::os::fd::{AsFd, OwnedFd};

pub use block::FileLock;
use rustix::fs::Advice;
use sys::file_lock;

use super::{CacheMode, Coverage, SharedFile, open, reopen};
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
        if self.has_cached_writes() {
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
    /// Returns true if writes go through the page cache: all of them, or those of the tables of an image.
    fn has_cached_writes(&self) -> bool {
        let is_container = matches!(self.coverage, Coverage::Container { .. });
        !self.info.read_only && (is_container || self.cache != CacheMode::None)
    }

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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use latency::Clock;

    use super::*;
    use crate::{File, FileOptions, TurnDevice};

    #[test]
    fn image_with_lost_tables_keeps_its_locks() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, [0; 8192]).unwrap();
        let open = || {
            File::open(FileOptions {
                is_container: true,
                lock: FileLock::WhileActive,
                ..FileOptions::new(&path)
            })
            .unwrap()
        };
        let (first, second) = (open(), open());
        let limit = || Clock::shared().elapsed() + Duration::from_secs(30);
        for is_lost in [false, true] {
            let used = first.begin_use().unwrap();
            assert!(second.begin_use().is_err());
            if is_lost {
                first.shared.durability.lose(libc::EIO);
            }
            drop(used);
            first.wait_for_release(limit());
            assert_eq!(first.release_error().is_some(), is_lost);
            assert_eq!(second.begin_use().is_err(), is_lost);
            second.wait_for_release(limit());
        }
    }
}
