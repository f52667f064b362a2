//! Locks of a file or block device against other writers, held always or while workers use it.
//!
//! A worker uses the device from its attachment to the close of its channel: while it has queues, connections or jobs on the disk. With
//! [`FileLock::WhileActive`] the first use takes the locks and the end of the last one releases them. The lock service of a network file
//! system may not answer, so a thread of the device makes these calls. A worker that waits for the locks attaches again when they are taken.
//! A conflict fails the attachment with [`io::ErrorKind::ResourceBusy`], and the worker tries again.
//!
//! ```text
//!   Unlocked ──first use──▶ Locking ──taken──▶ Locked ──last use ends──▶ Unlocking ──▶ Unlocked
//!       ▲                      │ ▲                                           │
//!       └──────conflict────────┘ └──────────used again meanwhile─────────────┘
//! ```

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

pub use block::FileLock;
use sys::file_lock;

use super::{SharedFile, open, reopen};
use crate::attach::Wake;
use crate::blocking::BlockingCalls;
use crate::{OnTurn, Turn};

/// State of locks that follow the use of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LockState {
    #[default]
    Unlocked,
    /// The locks are being taken.
    Locking,
    Locked,
    /// The locks are being released.
    Unlocking,
}

#[derive(Default)]
struct Uses {
    state: LockState,
    /// Number of uses, and of workers that wait for one.
    count: u32,
    /// Number of failed attempts to take the locks, and the error of the last one.
    failures: u64,
    error: Option<(io::ErrorKind, String)>,
    /// Called after the present attempt.
    wakes: Vec<Wake>,
}

impl Uses {
    /// Returns the result of an attempt that began after `failures` failures; `None` while it lasts.
    fn result(&self, failures: u64) -> Option<io::Result<()>> {
        if self.state == LockState::Locked {
            return Some(Ok(()));
        }
        let (kind, text) = self.error.as_ref().filter(|_| self.failures != failures)?;
        Some(Err(io::Error::new(*kind, text.clone())))
    }
}

/// Locks that follow the use of a disk.
#[derive(Default)]
struct TurnLock {
    uses: Mutex<Uses>,
    /// The state has changed.
    changed: Condvar,
    calls: BlockingCalls,
}

impl TurnLock {
    fn uses(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, uses: MutexGuard<'a, Uses>) -> MutexGuard<'a, Uses> {
        self.changed
            .wait(uses)
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Users of a disk, if its locks depend on them.
#[derive(Default)]
pub(super) struct Users {
    lock: Option<TurnLock>,
    on_turn: OnceLock<OnTurn>,
}

impl Users {
    pub fn new(lock: FileLock) -> Users {
        Users {
            lock: (lock == FileLock::WhileActive).then(TurnLock::default),
            on_turn: OnceLock::new(),
        }
    }

    /// Returns true if the locks depend on the use of the disk.
    pub fn decide(&self) -> bool {
        self.lock.is_some()
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

    /// See [`crate::Lockable::wait_for_release`].
    pub fn wait_for_release(&self) {
        let Some(lock) = &self.lock else { return };
        let mut uses = lock.uses();
        while uses.count == 0 && uses.state != LockState::Unlocked {
            uses = lock.wait(uses);
        }
    }
}

impl fmt::Debug for Users {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock.as_ref().map(|lock| lock.uses().state);
        f.debug_tuple("Users").field(&state).finish()
    }
}

/// A use of a file. The locks are held until the last one is dropped.
pub(crate) struct InUse(Arc<SharedFile>);

impl InUse {
    /// Begins a use. Waits for the lock service.
    ///
    /// # Errors
    /// Another process has the lock, or the file system refuses it.
    pub(crate) fn begin(file: &Arc<SharedFile>) -> io::Result<InUse> {
        let Some(lock) = &file.users.lock else {
            return Ok(InUse(file.clone()));
        };
        let (wait, must_lock) = LockWait::register(file, lock, None);
        if must_lock {
            file.change_locks();
        }
        let mut uses = lock.uses();
        loop {
            match uses.result(wait.failures) {
                Some(result) => {
                    drop(uses);
                    return result.map(|()| wait.user);
                }
                None => uses = lock.wait(uses),
            }
        }
    }

    /// Returns another use of the same file.
    fn again(&self) -> InUse {
        if let Some(lock) = &self.0.users.lock {
            lock.uses().count += 1;
        }
        InUse(self.0.clone())
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let Some(lock) = &self.0.users.lock else {
            return;
        };
        let mut uses = lock.uses();
        uses.count -= 1;
        if uses.count > 0 || uses.state != LockState::Locked {
            return;
        }
        uses.state = LockState::Unlocking;
        drop(uses);
        let file = self.0.clone();
        if let Err(error) = lock.calls.make(Box::new(move || file.change_locks())) {
            let path = self.0.path.display();
            tracing::warn!("{path}: cannot start a thread to release the locks: {error}");
            self.0.change_locks();
        }
    }
}

/// A worker's wait for the locks of a file. The locks stay taken for it.
pub(crate) struct LockWait {
    user: InUse,
    /// Value of [`Uses::failures`] at the start.
    failures: u64,
}

impl LockWait {
    /// Starts to take the locks on a thread of the device, unless they are taken. `None`: the locks do not depend on the use.
    pub fn begin(file: &Arc<SharedFile>, wake: &Wake) -> Option<LockWait> {
        let lock = file.users.lock.as_ref()?;
        let (wait, must_lock) = LockWait::register(file, lock, Some(wake));
        if must_lock {
            let of_thread = file.clone();
            let started = lock.calls.make(Box::new(move || of_thread.change_locks()));
            if let Err(error) = started {
                file.lock_failed(lock, &error);
            }
        }
        Some(wait)
    }

    /// Returns the wait, and true if the caller must run [`SharedFile::change_locks`].
    fn register(file: &Arc<SharedFile>, lock: &TurnLock, wake: Option<&Wake>) -> (LockWait, bool) {
        let mut uses = lock.uses();
        uses.count += 1;
        let must_lock = uses.state == LockState::Unlocked;
        if must_lock {
            uses.state = LockState::Locking;
        }
        if uses.state != LockState::Locked {
            uses.wakes.extend(wake.cloned());
        }
        let wait = LockWait {
            user: InUse(file.clone()),
            failures: uses.failures,
        };
        (wait, must_lock)
    }

    pub fn is_of(&self, file: &Arc<SharedFile>) -> bool {
        Arc::ptr_eq(&self.user.0, file)
    }

    /// Returns a use when the locks are taken; `None` until then.
    ///
    /// # Errors
    /// Another process has the lock, or the file system refuses it.
    pub fn result(&self) -> io::Result<Option<InUse>> {
        let result = match &self.user.0.users.lock {
            Some(lock) => lock.uses().result(self.failures),
            None => Some(Ok(())),
        };
        Ok(result.transpose()?.map(|()| self.user.again()))
    }
}

impl SharedFile {
    /// Takes or releases the locks until they suit the present uses. Only the thread that has changed the state from `Unlocked` or `Locked`
    /// calls this. May block.
    fn change_locks(&self) {
        let Some(lock) = &self.users.lock else { return };
        let mut state = lock.uses().state;
        loop {
            // In the other states, uses on other threads may change the state and call this, too.
            state = match state {
                LockState::Locking => {
                    let taken = self.take_locks().and_then(|()| self.follow_size());
                    if let Err(error) = taken {
                        // A part of the locks may be taken.
                        self.release_locks().ok();
                        return self.lock_failed(lock, &error);
                    }
                    self.users.turn(Turn::Begun);
                    let mut uses = lock.uses();
                    let next = match uses.count {
                        0 => LockState::Unlocking,
                        _ => LockState::Locked,
                    };
                    uses.state = next;
                    wake_all(lock, uses);
                    next
                }
                LockState::Unlocking => {
                    self.users.turn(Turn::Ending);
                    if let Err(error) = self.release_locks() {
                        let path = self.path.display();
                        tracing::warn!("{path}: cannot release its locks: {error}");
                    }
                    let mut uses = lock.uses();
                    let next = match uses.count {
                        0 => LockState::Unlocked,
                        _ => LockState::Locking,
                    };
                    uses.state = next;
                    lock.changed.notify_all();
                    next
                }
                LockState::Unlocked | LockState::Locked => return,
            }
        }
    }

    fn lock_failed(&self, lock: &TurnLock, error: &io::Error) {
        let mut uses = lock.uses();
        uses.state = LockState::Unlocked;
        uses.failures += 1;
        uses.error = Some((error.kind(), error.to_string()));
        wake_all(lock, uses);
    }
}

fn wake_all(lock: &TurnLock, mut uses: MutexGuard<'_, Uses>) {
    let wakes = std::mem::take(&mut uses.wakes);
    drop(uses);
    lock.changed.notify_all();
    for wake in wakes {
        wake();
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
