//! Locks of a file or block device against other writers, held always or while workers use it.
//!
//! A worker uses the device from its attachment to the close of its channel: while it has queues, connections or jobs on the disk. With
//! [`FileLock::WhileActive`] the first use takes the locks and the end of the last one releases them. A conflict fails the attachment
//! with [`io::ErrorKind::ResourceBusy`], and the worker tries again.

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

pub use block::FileLock;
use sys::file_lock;

use super::{SharedFile, open, reopen};
use crate::{OnTurn, Turn};

/// Number of workers that use a disk, if its locks depend on it.
#[derive(Default)]
pub(super) struct Users {
    count: Option<Mutex<u32>>,
    on_turn: OnceLock<OnTurn>,
}

impl Users {
    pub fn new(lock: FileLock) -> Users {
        Users {
            count: (lock == FileLock::WhileActive).then(Mutex::default),
            on_turn: OnceLock::new(),
        }
    }

    /// Returns true if the locks depend on the use of the disk.
    pub fn decide(&self) -> bool {
        self.count.is_some()
    }

    /// See [`crate::Lockable::on_turn`].
    pub fn on_turn(&self, on_turn: OnTurn) {
        // Set only once, by the disk.
        self.on_turn.set(on_turn).ok();
    }

    fn turn(&self, turn: Turn) {
        if let Some(on_turn) = self.on_turn.get() {
            on_turn(turn);
        }
    }
}

impl fmt::Debug for Users {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Users").field(&self.count).finish()
    }
}

/// A use of a file. The locks are held until the last one is dropped.
pub(crate) struct InUse(Arc<SharedFile>);

impl InUse {
    /// Begins a use.
    ///
    /// # Errors
    /// Another process has the lock, or the file system refuses it.
    pub(super) fn begin(file: &Arc<SharedFile>) -> io::Result<InUse> {
        if let Some(users) = &file.users.count {
            let mut users = users.lock().unwrap_or_else(PoisonError::into_inner);
            if *users == 0 {
                if let Err(error) = file.take_locks().and_then(|()| file.follow_size()) {
                    // A part of the locks may be taken.
                    file.release_locks().ok();
                    return Err(error);
                }
                file.users.turn(Turn::Begun);
            }
            *users += 1;
        }
        Ok(InUse(file.clone()))
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let Some(users) = &self.0.users.count else {
            return;
        };
        let mut users = users.lock().unwrap_or_else(PoisonError::into_inner);
        *users -= 1;
        if *users > 0 {
            return;
        }
        self.0.users.turn(Turn::Ending);
        if let Err(error) = self.0.release_locks() {
            let path = self.0.path.display();
            tracing::warn!("{path}: cannot release its locks: {error}");
        }
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

    /// See [`crate::Lockable::take_locks`].
    pub(super) fn take_locks(&self) -> io::Result<()> {
        let is_writer = !self.info.read_only;
        let mut claim = self.claim();
        if self.block_device && is_writer && claim.is_none() {
            *claim = Some(reopen(self.control.as_fd(), open::CLAIM)?);
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
