//! Availability of a disk, as its users see it.

use std::fmt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use latency::Clock;

use block::IoError;

/// State of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DiskState {
    /// I/O goes to the device.
    #[default]
    Ready,
    /// The device is being opened.
    Opening,
    /// The device cannot be reached. Further attempts are automatic.
    Unavailable {
        /// Reason, in words.
        reason: String,
        /// Time until the next attempt.
        next_try: Duration,
    },
}

impl DiskState {
    /// Returns the state in one word.
    pub const fn word(&self) -> &'static str {
        match self {
            DiskState::Ready => "ready",
            DiskState::Opening => "opening",
            DiskState::Unavailable { .. } => "unavailable",
        }
    }
}

impl fmt::Display for DiskState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DiskState::Ready | DiskState::Opening => f.write_str(self.word()),
            DiskState::Unavailable { reason, next_try } => {
                write!(
                    f,
                    "unavailable: {reason}, next try in {} s",
                    next_try.as_secs()
                )
            }
        }
    }
}

/// Kind of a failure to attach to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachFailure {
    /// The locks are being taken. I/O waits.
    Locking,
    /// Another process has the locks, and I/O waits for them.
    Locked,
    /// Another process has the locks, and I/O does not wait any longer.
    LockTimeout,
    /// Any other error.
    Other,
}

/// Change of a disk's state, for clients of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskEvent {
    /// The first failed I/O begins to wait.
    Waiting,
    /// No failed I/O waits any more.
    Resumed,
    /// The first worker waits for locks that another process has.
    LockWaiting,
    /// A worker does not wait for the locks any longer; its I/O fails.
    LockTimeout,
    /// No worker waits for the locks any more.
    LockResumed,
}

/// Failed attempt to reach the device.
#[derive(Debug)]
struct Failure {
    who: u32,
    kind: AttachFailure,
    reason: String,
    /// Time of the next attempt, on the clock of the process.
    next_try: Duration,
}

/// Failed I/Os that wait to be submitted again: see [`crate::OnError`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingIo {
    /// Number of I/Os.
    pub count: usize,
    /// Error of the last one.
    pub error: IoError,
}

/// Callback for changes of the state.
type OnEvent = Box<dyn Fn(DiskEvent) + Send + Sync>;

/// State of a disk, from its workers. Read by the control plane; changes when a worker attaches or fails to, and when I/Os begin or cease
/// to wait.
#[derive(Default)]
pub struct StateCell {
    failures: Mutex<Vec<Failure>>,
    /// Waiting I/Os with the number of their worker.
    waiting: Mutex<Vec<(u32, WaitingIo)>>,
    on_event: OnceLock<OnEvent>,
    unknown_reservations: Mutex<Option<String>>,
}

impl fmt::Debug for StateCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("StateCell");
        shown.field("failures", &self.failures);
        shown
            .field("waiting", &self.waiting)
            .finish_non_exhaustive()
    }
}

impl StateCell {
    /// Records that worker `who` cannot attach and tries again after `wait`.
    pub fn failed(&self, who: u32, kind: AttachFailure, reason: String, wait: Duration) {
        let failure = Failure {
            who,
            kind,
            reason,
            next_try: Clock::shared().elapsed() + wait,
        };
        self.replace(who, Some(failure));
    }

    /// Records that worker `who` has attached, or no longer needs the device.
    pub fn cleared(&self, who: u32) {
        self.replace(who, None);
    }

    /// Replaces the failure of a worker. Events are sent under the lock, so that they have the order of the changes.
    fn replace(&self, who: u32, failure: Option<Failure>) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let before = lock_failures(&failures);
        failures.retain(|failure| failure.who != who);
        failures.extend(failure);
        let after = lock_failures(&failures);
        let Some(on_event) = self.on_event.get() else {
            return;
        };
        if after.1 && !before.1 {
            on_event(DiskEvent::LockTimeout);
        } else if after.0 && !before.0 {
            on_event(DiskEvent::LockWaiting);
        } else if before.0 && !after.0 {
            on_event(DiskEvent::LockResumed);
        }
    }

    /// Sets the waiting I/Os of worker `who`, and the error of the last one.
    pub fn waits(&self, who: u32, count: usize, error: IoError) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let before = waiting.is_empty();
        waiting.retain(|(known, _)| *known != who);
        if count > 0 {
            waiting.push((who, WaitingIo { count, error }));
        }
        let now = waiting.is_empty();
        if before != now
            && let Some(on_event) = self.on_event.get()
        {
            // Called under the lock, so that the calls have the order of the changes.
            on_event(match now {
                true => DiskEvent::Resumed,
                false => DiskEvent::Waiting,
            });
        }
    }

    /// Sets the reason why the saved state of the disk cannot be used. `None`: the state can be used.
    pub fn set_reservations_unknown(&self, reason: Option<String>) {
        *self.unknown() = reason;
    }

    /// Returns why the saved state of the disk cannot be used, if so.
    pub fn reservations_unknown(&self) -> Option<String> {
        self.unknown().clone()
    }

    fn unknown(&self) -> MutexGuard<'_, Option<String>> {
        let unknown = self.unknown_reservations.lock();
        unknown.unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the waiting I/Os of all workers, if any.
    pub fn waiting(&self) -> Option<WaitingIo> {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, last) = waiting.last()?;
        let count = waiting.iter().map(|(_, waiting)| waiting.count).sum();
        Some(WaitingIo {
            count,
            error: last.error,
        })
    }

    /// Registers a callback for changes, called on workers. Once per disk; must be quick.
    pub fn on_event(&self, on_event: impl Fn(DiskEvent) + Send + Sync + 'static) {
        self.on_event.set(Box::new(on_event)).ok();
    }

    /// Returns the present state.
    pub fn get(&self) -> DiskState {
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        match failures.iter().min_by_key(|failure| failure.next_try) {
            None => DiskState::Ready,
            Some(first) => DiskState::Unavailable {
                reason: first.reason.clone(),
                next_try: first.next_try.saturating_sub(Clock::shared().elapsed()),
            },
        }
    }
}

/// Returns whether any worker lacks the locks, and whether one has stopped waiting for them.
fn lock_failures(failures: &[Failure]) -> (bool, bool) {
    let any = |kind| failures.iter().any(|failure| failure.kind == kind);
    let has_timeout = any(AttachFailure::LockTimeout);
    let waits = any(AttachFailure::Locked) || any(AttachFailure::Locking);
    (has_timeout || waits, has_timeout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_and_last_waiting_io_of_all_workers_are_reported() {
        use std::sync::Arc;
        let (state, changes) = (StateCell::default(), Arc::new(Mutex::new(Vec::new())));
        let seen = changes.clone();
        state.on_event(move |event| seen.lock().unwrap().push(event));
        let full = IoError::from(block::IoErrorKind::NoSpace);
        let offline = IoError::from(block::IoErrorKind::Offline);
        state.waits(0, 1, full);
        state.waits(1, 2, offline);
        state.waits(0, 2, full);
        let waiting = state.waiting().unwrap();
        assert_eq!((waiting.count, waiting.error), (4, full));
        state.waits(0, 0, full);
        assert_eq!(state.waiting().map(|waiting| waiting.error), Some(offline));
        assert_eq!(*changes.lock().unwrap(), [DiskEvent::Waiting]);
        state.waits(1, 0, offline);
        assert_eq!(
            (state.waiting(), &changes.lock().unwrap()[..]),
            (None, &[DiskEvent::Waiting, DiskEvent::Resumed][..])
        );
    }

    #[test]
    fn wait_for_locks_is_reported_once_for_all_workers() {
        use std::sync::Arc;
        let (state, changes) = (StateCell::default(), Arc::new(Mutex::new(Vec::new())));
        let seen = changes.clone();
        state.on_event(move |event| seen.lock().unwrap().push(event));
        let failed = |who, kind| state.failed(who, kind, "locked".to_owned(), Duration::ZERO);
        failed(0, AttachFailure::Other);
        failed(0, AttachFailure::Locked);
        failed(1, AttachFailure::Locked);
        failed(1, AttachFailure::Locked);
        failed(1, AttachFailure::LockTimeout);
        failed(0, AttachFailure::LockTimeout);
        state.cleared(0);
        state.cleared(1);
        use DiskEvent::{LockResumed, LockTimeout, LockWaiting};
        let expected = [LockWaiting, LockTimeout, LockResumed];
        assert_eq!(*changes.lock().unwrap(), expected);
    }

    #[test]
    fn disk_is_ready_when_no_worker_fails_to_attach() {
        let state = StateCell::default();
        assert_eq!(state.get().to_string(), "ready");
        let failed = |who, reason: &str, seconds| {
            let wait = Duration::from_secs(seconds);
            state.failed(who, AttachFailure::Other, reason.to_owned(), wait);
        };
        failed(0, "no descriptors", 900);
        failed(1, "no memory", 400);
        let text = state.get().to_string();
        assert!(
            text.starts_with("unavailable: no memory, next try in "),
            "{text}"
        );
        state.cleared(1);
        let text = state.get().to_string();
        assert!(text.starts_with("unavailable: no descriptors, "), "{text}");
        state.cleared(0);
        assert_eq!(state.get(), DiskState::Ready);
    }
}
