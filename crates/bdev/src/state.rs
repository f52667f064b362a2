//! Whether a disk can do I/O, as its users see it.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use latency::Clock;

/// The state of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DiskState {
    /// I/O goes to the device.
    #[default]
    Ready,
    /// The device is being opened.
    Opening,
    /// The device cannot be reached. It is tried again by itself.
    Unavailable {
        /// Why, for people.
        reason: String,
        /// How soon.
        next_try: Duration,
    },
}

impl DiskState {
    /// The state in one word.
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

/// Of whoever could not reach the device: a worker, or the control plane.
#[derive(Debug)]
struct Failure {
    who: u32,
    reason: String,
    /// On the process' clock.
    next_try: Duration,
}

/// The state of a disk, told by its workers. Read by the control plane; changed only when a worker attaches, or fails to.
#[derive(Debug, Default)]
pub struct StateCell(Mutex<Vec<Failure>>);

impl StateCell {
    /// The worker `who` cannot attach to the device, and tries again after `wait`.
    pub fn failed(&self, who: u32, reason: String, wait: Duration) {
        let failure = Failure {
            who,
            reason,
            next_try: Clock::shared().elapsed() + wait,
        };
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        failures.retain(|failure| failure.who != who);
        failures.push(failure);
    }

    /// The worker `who` has attached, or needs the device no more.
    pub fn cleared(&self, who: u32) {
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        failures.retain(|failure| failure.who != who);
    }

    /// The state now.
    pub fn get(&self) -> DiskState {
        let failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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
