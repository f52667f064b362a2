//! Locks of a device against other writers that follow its use by workers (`lock = "while-active"`).
//!
//! A worker uses the device from its attachment to the close of its channel: while it has queues, connections or jobs on the disk. The
//! first use takes the locks and the end of the last one releases them. The lock service of a network file system or a cluster may not
//! answer, so a thread of the device makes these calls. A worker that waits for the locks attaches again when they are taken. A conflict
//! fails the attachment with [`io::ErrorKind::ResourceBusy`], and the worker tries again. A failed release, for example in a full pool, is
//! tried again after a delay, because other daemons wait for the locks.
//!
//! ```text
//!   Unlocked ──first use──▶ Locking ──taken──▶ Locked ──last use ends──▶ Unlocking ──▶ Unlocked
//!       ▲                    │ ▲  ▲                                       │ │   ▲
//!       └─────conflict───────┘ │  └────────used again meanwhile───────────┘ │   │ delay
//!                              │                                   failed   ▼   │
//!                              └────────────────used again────────── ReleaseFailed
//! ```

use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use block::Backoff;
use latency::Clock;

use crate::attach::Wake;
use crate::blocking::BlockingCalls;
use crate::{OnTurn, Turn};

/// Delay before a failed release is tried again; doubles up to the maximum.
const RELEASE_DELAY: Duration = match cfg!(test) {
    true => Duration::from_millis(10),
    false => Duration::from_secs(1),
};
const RELEASE_DELAY_MAX: Duration = Duration::from_secs(30);

/// Device with locks that follow its use.
pub(crate) trait TurnLocks: Send + Sync {
    fn users(&self) -> &Users;

    /// Returns the path or name, for messages.
    fn object(&self) -> String;

    /// Returns the services that answer a request for the locks, for messages.
    fn lock_service(&self) -> &'static str;

    /// Takes the locks and adopts the size and the content that another process has written. May block.
    ///
    /// # Errors
    /// Another process has the lock, or the system refuses. A part of the locks may be taken.
    fn begin_turn(&self) -> io::Result<()>;

    /// Writes cached data and releases the locks. Also called after a failed [`TurnLocks::begin_turn`]. May block.
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
    /// The release has failed. A thread tries again after a delay, unless the disk is used before.
    ReleaseFailed,
}

#[derive(Default)]
struct Uses {
    state: LockState,
    /// Number of uses, and of workers that wait for one.
    count: u32,
    /// Number of failed attempts to take the locks, and the error of the last one.
    failures: u64,
    error: Option<(io::ErrorKind, String)>,
    /// Error of the last release, until one succeeds or the locks are taken again.
    release_error: Option<String>,
    /// A thread will try a failed release again.
    has_retry: bool,
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

    /// Waits for the next attempt to release the locks. Returns false if it is not needed any more; the thread that tries again ends.
    fn wait_to_release(&self, delay: Duration) -> bool {
        let has_failed = |uses: &mut Uses| uses.state == LockState::ReleaseFailed;
        let waited = self
            .changed
            .wait_timeout_while(self.uses(), delay, has_failed);
        let mut uses = waited.unwrap_or_else(PoisonError::into_inner).0;
        let is_needed = has_failed(&mut uses);
        match is_needed {
            true => uses.state = LockState::Unlocking,
            false => uses.has_retry = false,
        }
        is_needed
    }
}

/// Users of a disk, if its locks depend on them.
#[derive(Default)]
pub(crate) struct Users {
    lock: Option<Arc<TurnLock>>,
    on_turn: OnceLock<OnTurn>,
    /// Turn in progress, as reported to the disk. Locked during the report, so that reports have an order.
    has_turn: Mutex<bool>,
}

impl Users {
    pub fn new(takes_turns: bool) -> Users {
        Users {
            lock: takes_turns.then(Arc::default),
            ..Users::default()
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

    /// Reports a change of a turn to the disk. The end of a turn is reported once.
    fn turn(&self, turn: Turn) {
        let mut has_turn = self.has_turn.lock().unwrap_or_else(PoisonError::into_inner);
        let had_turn = std::mem::replace(&mut *has_turn, turn == Turn::Begun);
        if had_turn || turn == Turn::Begun {
            self.report(turn);
        }
    }

    /// Reports the begin of the turn once more, because another process may have had the locks since. Does nothing between turns, or if
    /// the end of the turn is reported already.
    pub fn renew_turn(&self) {
        let has_turn = self.has_turn.lock().unwrap_or_else(PoisonError::into_inner);
        if *has_turn {
            self.report(Turn::Begun);
        }
    }

    fn report(&self, turn: Turn) {
        if let Some(on_turn) = self.on_turn.get() {
            on_turn(turn);
        }
    }

    /// See [`crate::TurnDevice::release_error`].
    pub fn release_error(&self) -> Option<String> {
        let uses = self.lock.as_ref()?.uses();
        let error = uses.release_error.clone();
        error.filter(|_| uses.count == 0)
    }
}

/// See [`crate::TurnDevice::wait_for_release`].
pub(crate) fn wait_for_release(device: &dyn TurnLocks, until: Duration) {
    let Some(lock) = &device.users().lock else {
        return;
    };
    let is_pending = |uses: &mut Uses| {
        let is_over = matches!(uses.state, LockState::Unlocked | LockState::ReleaseFailed);
        uses.count == 0 && !is_over && uses.release_error.is_none()
    };
    let left = until.saturating_sub(Clock::shared().elapsed());
    let waited = lock
        .changed
        .wait_timeout_while(lock.uses(), left, is_pending);
    let (mut uses, result) = waited.unwrap_or_else(PoisonError::into_inner);
    if result.timed_out() && uses.state == LockState::Unlocking {
        let service = device.lock_service();
        let error = format!("no answer yet; hint: check {service}");
        uses.release_error = Some(error.clone());
        drop(uses);
        log_late_release(&device.object(), &error);
    }
}

/// Logs that a release continues after the wait for it.
pub(crate) fn log_late_release(object: &str, error: &str) {
    tracing::warn!("{object}: its locks are not released yet: {error}");
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
            change_locks(&device);
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
        if let Err(error) = lock.calls.make(Box::new(move || change_locks(&device))) {
            let object = self.0.object();
            tracing::warn!("{object}: cannot start a thread to release the locks: {error}");
            change_locks(&self.0);
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
            let started = lock.calls.make(Box::new(move || change_locks(&of_thread)));
            if let Err(error) = started {
                start_failed(device, lock, &error);
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
        let must_lock = matches!(uses.state, LockState::Unlocked | LockState::ReleaseFailed);
        if must_lock {
            uses.state = LockState::Locking;
            lock.changed.notify_all();
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

/// Takes or releases the locks until they suit the present uses. Only the thread that has changed the state from `Unlocked`, `Locked` or
/// `ReleaseFailed` calls this. May block. If the release fails, a thread tries it again.
fn change_locks(device: &Arc<dyn TurnLocks>) {
    if change_locks_once(&**device) == LockState::ReleaseFailed {
        release_later(device);
    }
}

/// Returns the state that suits the uses, or `ReleaseFailed`.
fn change_locks_once(device: &dyn TurnLocks) -> LockState {
    let users = device.users();
    let Some(lock) = &users.lock else {
        return LockState::Unlocked;
    };
    let mut state = lock.uses().state;
    loop {
        // In the other states, uses on other threads may change the state and call this, too.
        state = match state {
            LockState::Locking => {
                if let Err(error) = device.begin_turn() {
                    // A part of the locks may be taken.
                    let kept = device.end_turn().err().map(|error| error.to_string());
                    return lock_failed(lock, &error, kept);
                }
                users.turn(Turn::Begun);
                let mut uses = lock.uses();
                let next = match uses.count {
                    0 => LockState::Unlocking,
                    _ => LockState::Locked,
                };
                uses.state = next;
                uses.release_error = None;
                wake_all(lock, uses);
                next
            }
            LockState::Unlocking => {
                users.turn(Turn::Ending);
                let error = device.end_turn().err().map(|error| error.to_string());
                let mut uses = lock.uses();
                let next = match (uses.count, &error) {
                    (0, None) => LockState::Unlocked,
                    (0, Some(_)) => LockState::ReleaseFailed,
                    _ => LockState::Locking,
                };
                uses.state = next;
                let kept = error.clone().filter(|_| next == LockState::ReleaseFailed);
                let before = std::mem::replace(&mut uses.release_error, kept);
                drop(uses);
                lock.changed.notify_all();
                log_release(&device.object(), before, error);
                next
            }
            LockState::Unlocked | LockState::Locked | LockState::ReleaseFailed => return state,
        }
    }
}

/// Logs the first failure, another reason, and the end of the failures.
fn log_release(object: &str, before: Option<String>, error: Option<String>) {
    match (before, error) {
        (before, Some(error)) if before.as_ref() != Some(&error) => tracing::warn!(
            "{object}: cannot release its locks, other daemons wait for them, trying again: {error}"
        ),
        (Some(_), None) => tracing::info!("{object}: locks released"),
        _ => {}
    }
}

/// Starts a thread that releases the locks when the cause of the failure is gone, unless there is one. It ends when the disk is used again
/// or removed.
fn release_later(device: &Arc<dyn TurnLocks>) {
    let Some(lock) = device.users().lock.clone() else {
        return;
    };
    if std::mem::replace(&mut lock.uses().has_retry, true) {
        return;
    }
    let of_thread = lock.clone();
    let weak = Arc::downgrade(device);
    let release = move || {
        let mut backoff = Backoff::new(RELEASE_DELAY, RELEASE_DELAY_MAX);
        while of_thread.wait_to_release(backoff.pause()) {
            // The drop of a removed disk closes its file or image, and with it the locks.
            let Some(device) = weak.upgrade() else {
                return;
            };
            change_locks_once(&*device);
        }
    };
    let thread = std::thread::Builder::new().name("lock-release".to_owned());
    if let Err(error) = thread.spawn(release) {
        lock.uses().has_retry = false;
        let object = device.object();
        tracing::warn!("{object}: cannot start a thread to release the locks: {error}");
    }
}

/// Ends an attempt to take the locks without a thread. After a failed release the locks are still held.
fn start_failed(device: &Arc<dyn TurnLocks>, lock: &TurnLock, error: &io::Error) {
    let kept = lock.uses().release_error.clone();
    if lock_failed(lock, error, kept) == LockState::ReleaseFailed {
        release_later(device);
    }
}

/// Ends an attempt to take the locks. `kept`: error of the release of those that are held. Returns the new state.
fn lock_failed(lock: &TurnLock, error: &io::Error, kept: Option<String>) -> LockState {
    let mut uses = lock.uses();
    let state = match kept {
        Some(_) => LockState::ReleaseFailed,
        None => LockState::Unlocked,
    };
    uses.state = state;
    uses.release_error = kept;
    uses.failures += 1;
    uses.error = Some((error.kind(), error.to_string()));
    wake_all(lock, uses);
    state
}

fn wake_all(lock: &TurnLock, mut uses: MutexGuard<'_, Uses>) {
    let wakes = std::mem::take(&mut uses.wakes);
    drop(uses);
    lock.changed.notify_all();
    for wake in wakes {
        wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    const LIMIT: Duration = Duration::from_secs(30);

    /// Locks with a number of failed releases.
    struct Locks {
        users: Users,
        failures: AtomicU32,
        turns: Arc<Mutex<Vec<Turn>>>,
        /// The lock service does not answer while this is locked.
        service: Mutex<()>,
    }

    impl Locks {
        fn new(failures: u32) -> Arc<Locks> {
            let locks = Locks {
                users: Users::new(true),
                failures: AtomicU32::new(failures),
                turns: Arc::default(),
                service: Mutex::default(),
            };
            let turns = locks.turns.clone();
            let on_turn = move |turn| turns.lock().unwrap().push(turn);
            locks.users.on_turn(Box::new(on_turn));
            Arc::new(locks)
        }

        fn turns(&self) -> Vec<Turn> {
            self.turns.lock().unwrap().clone()
        }
    }

    impl TurnLocks for Locks {
        fn users(&self) -> &Users {
            &self.users
        }

        fn object(&self) -> String {
            "image".to_owned()
        }

        fn lock_service(&self) -> &'static str {
            "the test"
        }

        fn begin_turn(&self) -> io::Result<()> {
            Ok(())
        }

        fn end_turn(&self) -> io::Result<()> {
            drop(self.service.lock().unwrap());
            let failures = &self.failures;
            let next = |left: u32| left.checked_sub(1);
            match failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
                Ok(_) => Err(io::ErrorKind::StorageFull.into()),
                Err(_) => Ok(()),
            }
        }
    }

    fn soon() -> Duration {
        Clock::shared().elapsed() + Duration::from_millis(100)
    }

    fn wait_until(condition: impl Fn() -> bool) {
        let begun = std::time::Instant::now();
        while !condition() {
            assert!(begun.elapsed() < LIMIT);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn failed_release_is_tried_again_until_it_succeeds() {
        let locks = Locks::new(3);
        drop(InUse::begin(locks.clone()).unwrap());
        // The front end gets its answer while the locks are kept.
        wait_for_release(&*locks, soon());
        let is_released = || {
            let lock = locks.users.lock.as_ref().unwrap();
            lock.uses().state == LockState::Unlocked
        };
        wait_until(is_released);
        assert_eq!(locks.failures.load(Ordering::Relaxed), 0);
        assert_eq!(locks.users.release_error(), None);
        assert_eq!(locks.turns(), [Turn::Begun, Turn::Ending]);
    }

    /// A front end blocks until its queue has stopped.
    #[test]
    fn queue_stops_while_the_lock_service_does_not_answer() {
        let locks = Locks::new(0);
        let hung = locks.service.lock().unwrap();
        drop(InUse::begin(locks.clone()).unwrap());
        wait_for_release(&*locks, soon());
        let error = locks.users.release_error().unwrap();
        assert!(error.contains("no answer"), "{error}");
        // The disk is in use again: its locks are wanted.
        let device: Arc<dyn TurnLocks> = locks.clone();
        let again = LockWait::begin(&device, &(Arc::new(|| ()) as Wake)).unwrap();
        assert_eq!(locks.users.release_error(), None);
        drop(again);
        assert!(locks.users.release_error().is_some());
        drop(hung);
        wait_until(|| locks.users.release_error().is_none());
        wait_for_release(&*locks, soon());
        let lock = locks.users.lock.as_ref().unwrap();
        assert_eq!(lock.uses().state, LockState::Unlocked);
    }

    /// The disks of a controller share one deadline.
    #[test]
    fn release_without_an_answer_is_reported_after_the_deadline() {
        let locks = Locks::new(0);
        let hung = locks.service.lock().unwrap();
        drop(InUse::begin(locks.clone()).unwrap());
        wait_for_release(&*locks, Clock::shared().elapsed());
        assert!(locks.users.release_error().is_some());
        drop(hung);
    }

    #[test]
    fn use_ends_the_attempts_to_release() {
        let locks = Locks::new(u32::MAX);
        drop(InUse::begin(locks.clone()).unwrap());
        wait_for_release(&*locks, soon());
        wait_until(|| locks.users.release_error().is_some());
        let in_use = InUse::begin(locks.clone()).unwrap();
        assert_eq!(locks.users.release_error(), None);
        let attempts = locks.failures.load(Ordering::Relaxed);
        std::thread::sleep(3 * RELEASE_DELAY);
        assert_eq!(locks.failures.load(Ordering::Relaxed), attempts);
        assert_eq!(locks.turns(), [Turn::Begun, Turn::Ending, Turn::Begun]);
        drop(in_use);
        // The thread does not keep a disk that is removed.
        let removed = Arc::downgrade(&locks);
        drop(locks);
        wait_until(|| removed.strong_count() == 0);
    }

    #[test]
    fn locks_stay_held_if_no_thread_can_take_them_again() {
        let locks = Locks::new(u32::MAX);
        let device: Arc<dyn TurnLocks> = locks.clone();
        let lock = locks.users.lock.clone().unwrap();
        let is = |state| wait_until(|| lock.uses().state == state);
        drop(InUse::begin(device.clone()).unwrap());
        let wait = loop {
            is(LockState::ReleaseFailed);
            // The thread may be trying again at this moment.
            if let (wait, true) = LockWait::register(&device, &lock, None) {
                break wait;
            }
        };
        start_failed(&device, &lock, &io::ErrorKind::OutOfMemory.into());
        assert!(wait.result().is_err());
        drop(wait);
        assert!(locks.users.release_error().is_some());
        locks.failures.store(0, Ordering::Relaxed);
        is(LockState::Unlocked);
        assert_eq!(locks.users.release_error(), None);
        wait_until(|| !lock.uses().has_retry);
    }

    #[test]
    fn turn_that_ends_is_not_begun_again() {
        let locks = Locks::new(0);
        let users = &locks.users;
        users.renew_turn();
        users.turn(Turn::Ending);
        assert!(locks.turns().is_empty());
        users.turn(Turn::Begun);
        users.renew_turn();
        users.turn(Turn::Ending);
        users.renew_turn();
        users.turn(Turn::Ending);
        assert_eq!(locks.turns(), [Turn::Begun, Turn::Begun, Turn::Ending]);
    }
}
