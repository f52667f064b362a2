//! Once data could not be made durable, nothing is promised any more: the error sticks until the disk is reopened.
//!
//! After a failed write-back Linux marks the pages clean and tells each open file description of it once. The next
//! fsync succeeds although the data is gone. So a client that repeats a flush until it succeeds would be told a
//! lie; here it never succeeds again. Read by all workers, written once.

use std::sync::atomic::{AtomicI32, Ordering};

use block::{IoError, IoErrorKind, IoOutcome};

/// The errno of the first failure, or 0.
#[derive(Debug, Default)]
pub(crate) struct Durability(AtomicI32);

impl Durability {
    pub(crate) fn lost(&self) -> Option<i32> {
        match self.0.load(Ordering::Acquire) {
            0 => None,
            errno => Some(errno),
        }
    }

    /// May something be answered as durable?
    pub(crate) fn check(&self) -> IoOutcome {
        match self.lost() {
            None => Ok(()),
            Some(errno) => Err(IoError::with_errno(IoErrorKind::WriteMedium, errno)),
        }
    }

    /// Notes a failure; true for the first.
    pub(crate) fn lose(&self, errno: i32) -> bool {
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        self.0.compare_exchange(0, errno, success, failure).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_errno_sticks() {
        let durability = Durability::default();
        assert_eq!(durability.check(), Ok(()));
        assert!(durability.lose(5));
        assert!(!durability.lose(28));
        assert_eq!(durability.check().unwrap_err().errno, 5);
    }
}
