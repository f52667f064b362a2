//! Keys of a disk that say what becomes of its I/Os that fail, and how long one may take.

use bdev::{ErrorPolicy, OnError};

use super::value::Reader;

/// The longest timeout, in seconds: a day.
const IO_TIMEOUT_MAX: u64 = 86_400;

/// What is said of a disk's error policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorPolicyChange {
    /// What becomes of an I/O that fails.
    pub on_error: Option<OnError>,
    /// Seconds that an I/O may take; 0: any time.
    pub io_timeout: Option<u32>,
}

impl ErrorPolicyChange {
    /// What is not said stays as it is.
    pub fn applied_to(self, now: ErrorPolicy) -> ErrorPolicy {
        ErrorPolicy {
            on_error: self.on_error.unwrap_or(now.on_error),
            io_timeout: self.io_timeout.unwrap_or(now.io_timeout),
        }
    }
}

/// Reads both keys.
pub fn read_error_policy(reader: &mut Reader<'_, '_>) -> ErrorPolicyChange {
    let on_error = reader.choice("on_error", &OnError::WORDS);
    let io_timeout = reader.number("io_timeout", 0..=IO_TIMEOUT_MAX);
    ErrorPolicyChange {
        on_error: on_error.map(|at| at.value),
        io_timeout: io_timeout.and_then(|at| u32::try_from(at.value).ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_of_the_policy_stays() {
        let now = ErrorPolicy {
            on_error: OnError::Stop,
            io_timeout: 30,
        };
        assert_eq!(ErrorPolicyChange::default().applied_to(now), now);
        let change = ErrorPolicyChange {
            on_error: None,
            io_timeout: Some(0),
        };
        let changed = change.applied_to(now);
        assert_eq!((changed.on_error, changed.io_timeout), (OnError::Stop, 0));
    }
}
