//! Locks of a device against other writers that follow its use by workers (`lock = "while-active"`).
//!
//! A worker uses the device from its attachment to the close of its channel: while it has queues, connections or jobs on the disk. The
//! first use takes the locks and the end of the last one releases them. The lock service of a network file system or a cluster may not
//! answer, so a thread of the device makes these calls. A worker that waits for the locks attaches again when they are taken. A conflict
//! fails the attachment with [`io::ErrorKind::ResourceBusy`], and the worker tries again.
//!
//! ```text
//!   Unlocked ──first use──▶ Locking ──taken──▶ Locked ──last use ends──▶ Unlocking ──▶ Unlocked
//!       ▲                      │ ▲                                           │
//!       └──────conflict────────┘ └──────────used again meanwhile─────────────┘
//! ```

use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::attach::Wake;
use crate::blocking::BlockingCalls;
use crate::{OnTurn, Turn};

/// Device with locks that follow its use.
pub(crate) trait TurnLocks: Send + Sync {
    fn users(&self) -> &Users;

    /// Returns the path or name, for messages.
    fn object(&self) -> String;

    /// Returns the services that answer a request for the locks, for messages.
    fn lock_service(&self) -> &'static str;

    /// Takes the locks and adopts the size that another process has set. May block.
    ///
    /// # Errors
    /// Another process has the lock, or the system refuses. A part of the locks may be taken.
    fn begin_turn(&self) -> io::Result<()>;

    /// Releases the locks. May block.
    ///
    /// # Errors
    /// The system refuses.
    fn end_turn(&self) -> io::Result<()>;
}

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
pub(crate) struct Users {
    lock: Option<TurnLock>,
    on_turn: OnceLock<OnTurn>,
}

impl Users {
    pub fn new(takes_turns: bool) -> Users {
        Users {
            lock: takes_turns.then(TurnLock::default),
            on_turn: OnceLock::new(),
        }
    }

    /// Returns true if the locks depend on the use of the disk.
    pub fn decide(&self) -> bool {
        self.lock.is_some()
    }

    /// See [`crate::TurnDevice::on_turn`].
    pub fn on_turn(&self, on_turn: OnTurn) {
        // Set only once, by the disk.
        self.on_turn.set(on_turn).ok();
    }

    /// Reports a change of a turn to the disk.
    pub fn turn(&self, turn: Turn) {
        if let Some(on_turn) = self.on_turn.get() {
            on_turn(turn);
        }
    }

    /// See [`crate::TurnDevice::wait_for_release`].
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

/// A use of a device. The locks are held until the last one is dropped.
pub(crate) struct InUse(Arc<dyn TurnLocks>);

impl InUse {
    /// Begins a use. Waits for the lock service.
    ///
    /// # Errors
    /// Another process has the lock, or the system refuses it.
    pub(crate) fn begin(device: Arc<dyn TurnLocks>) -> io::Result<InUse> {
        let Some(lock) = &device.users().lock else {
            return Ok(InUse(device));
        };
        let (wait, must_lock) = LockWait::register(&device, lock, None);
        if must_lock {
            change_locks(&*device);
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

    /// Returns another use of the same device.
    fn again(&self) -> InUse {
        if let Some(lock) = &self.0.users().lock {
            lock.uses().count += 1;
        }
        InUse(self.0.clone())
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let Some(lock) = &self.0.users().lock else {
            return;
        };
        let mut uses = lock.uses();
        uses.count -= 1;
        if uses.count > 0 || uses.state != LockState::Locked {
            return;
        }
        uses.state = LockState::Unlocking;
        drop(uses);
        let device = self.0.clone();
        if let Err(error) = lock.calls.make(Box::new(move || change_locks(&*device))) {
            let object = self.0.object();
            tracing::warn!("{object}: cannot start a thread to release the locks: {error}");
            change_locks(&*self.0);
        }
    }
}

/// A worker's wait for the locks of a device. The locks stay taken for it.
pub(crate) struct LockWait {
    user: InUse,
    /// Value of [`Uses::failures`] at the start.
    failures: u64,
}

impl LockWait {
    /// Starts to take the locks on a thread of the device, unless they are taken. `None`: the locks do not depend on the use.
    pub fn begin(device: &Arc<dyn TurnLocks>, wake: &Wake) -> Option<LockWait> {
        let lock = device.users().lock.as_ref()?;
        let (wait, must_lock) = LockWait::register(device, lock, Some(wake));
        if must_lock {
            let of_thread = device.clone();
            let started = lock.calls.make(Box::new(move || change_locks(&*of_thread)));
            if let Err(error) = started {
                lock_failed(lock, &error);
            }
        }
        Some(wait)
    }

    /// Returns the wait, and true if the caller must run [`change_locks`].
    fn register(
        device: &Arc<dyn TurnLocks>,
        lock: &TurnLock,
        wake: Option<&Wake>,
    ) -> (LockWait, bool) {
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
            user: InUse(device.clone()),
            failures: uses.failures,
        };
        (wait, must_lock)
    }

    pub fn is_of(&self, device: &Arc<dyn TurnLocks>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.user.0), Arc::as_ptr(device))
    }

    /// Returns a use when the locks are taken; `None` until then.
    ///
    /// # Errors
    /// Another process has the lock, or the system refuses it.
    pub fn result(&self) -> io::Result<Option<InUse>> {
        let result = match &self.user.0.users().lock {
            Some(lock) => lock.uses().result(self.failures),
            None => Some(Ok(())),
        };
        Ok(result.transpose()?.map(|()| self.user.again()))
    }
}

/// Takes or releases the locks until they suit the present uses. Only the thread that has changed the state from `Unlocked` or `Locked`
/// calls this. May block.
fn change_locks(device: &dyn TurnLocks) {
    let users = device.users();
    let Some(lock) = &users.lock else { return };
    let mut state = lock.uses().state;
    loop {
        // In the other states, uses on other threads may change the state and call this, too.
        state = match state {
            LockState::Locking => {
                if let Err(error) = device.begin_turn() {
                    // A part of the locks may be taken.
                    device.end_turn().ok();
                    return lock_failed(lock, &error);
                }
                users.turn(Turn::Begun);
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
                users.turn(Turn::Ending);
                if let Err(error) = device.end_turn() {
                    let object = device.object();
                    tracing::warn!("{object}: cannot release its locks: {error}");
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

fn lock_failed(lock: &TurnLock, error: &io::Error) {
    let mut uses = lock.uses();
    uses.state = LockState::Unlocked;
    uses.failures += 1;
    uses.error = Some((error.kind(), error.to_string()));
    wake_all(lock, uses);
}

fn wake_all(lock: &TurnLock, mut uses: MutexGuard<'_, Uses>) {
    let wakes = std::mem::take(&mut uses.wakes);
    drop(uses);
    lock.changed.notify_all();
    for wake in wakes {
        wake();
    }
}
