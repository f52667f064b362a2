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

/// Failed attempt to reach the device.
#[derive(Debug)]
struct Failure {
    who: u32,
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

/// Called when the first I/O begins to wait (true) and when none waits any more (false).
type OnWaiting = Box<dyn Fn(bool) + Send + Sync>;

/// State of a disk, from its workers. Read by the control plane; changes when a worker attaches or fails to, and when I/Os begin or cease
/// to wait.
#[derive(Default)]
pub struct StateCell {
    failures: Mutex<Vec<Failure>>,
    /// Waiting I/Os with the number of their worker.
    waiting: Mutex<Vec<(u32, WaitingIo)>>,
    on_waiting: OnceLock<OnWaiting>,
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
    pub fn failed(&self, who: u32, reason: String, wait: Duration) {
        let failure = Failure {
            who,
            reason,
            next_try: Clock::shared().elapsed() + wait,
        };
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.retain(|failure| failure.who != who);
        failures.push(failure);
    }

    /// Records that worker `who` has attached, or no longer needs the device.
    pub fn cleared(&self, who: u32) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.retain(|failure| failure.who != who);
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
            && let Some(on_waiting) = self.on_waiting.get()
        {
            // Called under the lock, so that the calls have the order of the changes.
            on_waiting(!now);
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

    /// Registers a callback on workers: the first I/O begins to wait, or none waits any more. Once per disk; must be quick.
    pub fn on_waiting(&self, on_waiting: impl Fn(bool) + Send + Sync + 'static) {
        self.on_waiting.set(Box::new(on_waiting)).ok();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_and_last_waiting_io_of_all_workers_are_reported() {
        use std::sync::Arc;
        let (state, changes) = (StateCell::default(), Arc::new(Mutex::new(Vec::new())));
        let seen = changes.clone();
        state.on_waiting(move |waits| seen.lock().unwrap().push(waits));
        let full = IoError::from(block::IoErrorKind::NoSpace);
        let offline = IoError::from(block::IoErrorKind::Offline);
        state.waits(0, 1, full);
        state.waits(1, 2, offline);
        state.waits(0, 2, full);
        let waiting = state.waiting().unwrap();
        assert_eq!((waiting.count, waiting.error), (4, full));
        state.waits(0, 0, full);
        assert_eq!(state.waiting().map(|waiting| waiting.error), Some(offline));
        assert_eq!(*changes.lock().unwrap(), [true]);
        state.waits(1, 0, offline);
        assert_eq!(
            (state.waiting(), &changes.lock().unwrap()[..]),
            (None, &[true, false][..])
        );
    }

    #[test]
    fn disk_is_ready_when_no_worker_fails_to_attach() {
        let state = StateCell::default();
        assert_eq!(state.get().to_string(), "ready");
        state.failed(0, "no descriptors".to_owned(), Duration::from_secs(900));
        state.failed(1, "no memory".to_owned(), Duration::from_secs(400));
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
