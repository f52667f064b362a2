//! Handling of failed I/Os: the client gets the error, or the I/O waits until the disk is resumed. Also the time limit after which I/O is
//! cancelled and fails.
//!
//! Set by the control plane at any time. Workers read it when an I/O fails, and on submission while the disk's [`Conditions`] are not
//! clear. A disk that reports all errors has no overhead.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use block::{IoError, IoErrorKind};

use crate::conditions::{Condition, Conditions};

/// Handling of failed I/Os of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum OnError {
    /// The client gets the error.
    #[default]
    Report,
    /// The I/O waits after every error of the device.
    Stop,
    /// The I/O waits if the device is full; other errors are reported.
    Enospc,
}

impl OnError {
    /// All policies, with their configuration words.
    pub const WORDS: [(&'static str, OnError); 3] = [
        ("report", OnError::Report),
        ("stop", OnError::Stop),
        ("enospc", OnError::Enospc),
    ];

    /// Returns the configuration word.
    pub const fn word(self) -> &'static str {
        OnError::WORDS[self as usize].0
    }

    /// Returns true if an I/O with this error waits. Client errors and aborts never do.
    pub const fn holds(self, error: IoError) -> bool {
        match self {
            OnError::Report => false,
            OnError::Enospc => matches!(error.kind, IoErrorKind::NoSpace),
            OnError::Stop => matches!(
                error.kind,
                IoErrorKind::NoSpace
                    | IoErrorKind::ReadMedium
                    | IoErrorKind::WriteMedium
                    | IoErrorKind::Offline
                    | IoErrorKind::TimedOut
            ),
        }
    }
}

/// Error policy of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorPolicy {
    /// Handling of failed I/Os.
    pub on_error: OnError,
    /// Time limit in seconds, after which I/O is cancelled if the device can; 0: none.
    pub io_timeout: u32,
    /// Time in seconds after which I/O no longer waits for locks that another process has; 0: it waits for them.
    pub lock_timeout: u32,
}

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
    fn only_device_errors_wait_and_enospc_only_for_no_space() {
        use IoErrorKind as K;
        let of_device = [
            K::NoSpace,
            K::ReadMedium,
            K::WriteMedium,
            K::Offline,
            K::TimedOut,
        ];
        for kind in K::ALL {
            let error = IoError::from(kind);
            assert!(!OnError::Report.holds(error), "{kind:?}");
            assert_eq!(OnError::Stop.holds(error), of_device.contains(&kind));
            assert_eq!(OnError::Enospc.holds(error), kind == K::NoSpace);
        }
    }

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
