//! Handling of failed I/Os: the client gets the error, or the I/O waits until the disk is resumed. Also the time limit after which I/O is
//! cancelled and fails.
//!
//! Set by the control plane at any time. Workers read it when an I/O fails, and on submission while the disk's [`Conditions`] are not
//! clear. A disk that reports all errors has no overhead.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

pub use block::{ErrorPolicy, OnError};

use crate::conditions::{Condition, Conditions};

/// Error policy of one disk, as its workers read it.
#[derive(Debug)]
pub(crate) struct ErrorPolicyCell {
    conditions: Arc<Conditions>,
    on_error: AtomicU8,
    io_timeout: AtomicU32,
    lock_timeout: AtomicU32,
}

impl ErrorPolicyCell {
    /// Creates the default policy; the conditions show whether to read it.
    pub fn new(conditions: Arc<Conditions>) -> ErrorPolicyCell {
        ErrorPolicyCell {
            conditions,
            on_error: AtomicU8::new(OnError::Report as u8),
            io_timeout: AtomicU32::new(0),
            lock_timeout: AtomicU32::new(0),
        }
    }

    pub fn set(&self, policy: ErrorPolicy) {
        self.on_error
            .store(policy.on_error as u8, Ordering::Release);
        self.io_timeout.store(policy.io_timeout, Ordering::Release);
        self.lock_timeout
            .store(policy.lock_timeout, Ordering::Release);
        let tracked = policy.on_error != OnError::Report || policy.io_timeout > 0;
        self.conditions.set(Condition::Tracked, tracked);
    }

    pub fn on_error(&self) -> OnError {
        match self.on_error.load(Ordering::Acquire) {
            1 => OnError::Stop,
            2 => OnError::Enospc,
            _ => OnError::Report,
        }
    }

    pub fn io_timeout(&self) -> Option<Duration> {
        time_limit(&self.io_timeout)
    }

    pub fn lock_timeout(&self) -> Option<Duration> {
        time_limit(&self.lock_timeout)
    }
}

fn time_limit(seconds: &AtomicU32) -> Option<Duration> {
    let seconds = seconds.load(Ordering::Acquire);
    (seconds > 0).then(|| Duration::from_secs(seconds.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_tell_whether_ios_are_retained() {
        let conditions = Arc::<Conditions>::default();
        let cell = ErrorPolicyCell::new(conditions.clone());
        assert!(cell.on_error() == OnError::Report && conditions.is_clear());
        for (_, on_error) in OnError::WORDS {
            for io_timeout in [0, 30] {
                cell.set(ErrorPolicy {
                    on_error,
                    io_timeout,
                    lock_timeout: 0,
                });
                let seconds = cell.io_timeout().map_or(0, |timeout| timeout.as_secs());
                assert_eq!((cell.on_error(), seconds), (on_error, io_timeout.into()));
                let tracked = on_error != OnError::Report || io_timeout > 0;
                assert_eq!(conditions.has(Condition::Tracked), tracked);
            }
        }
        cell.set(ErrorPolicy::default());
        assert!(conditions.is_clear());
    }
}
