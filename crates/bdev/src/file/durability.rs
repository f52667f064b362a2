//! Sticky error: once data could not be made durable, every flush fails until the disk is reopened.
//!
//! After a failed write-back Linux marks the pages clean and reports it once per open file description. The next fsync succeeds although
//! the data is lost, and would deceive a client that repeats flushes. Read by all workers, written once.

use std::sync::atomic::{AtomicI32, Ordering};

use block::{IoError, IoErrorKind, IoOutcome};

/// Errno of the first failure, or 0.
#[derive(Debug, Default)]
pub(crate) struct Durability(AtomicI32);

impl Durability {
    pub(crate) fn lost(&self) -> Option<i32> {
        match self.0.load(Ordering::Acquire) {
            0 => None,
            errno => Some(errno),
        }
    }

    /// Returns an error if data could not be made durable.
    pub(crate) fn check(&self) -> IoOutcome {
        match self.lost() {
            None => Ok(()),
            Some(errno) => Err(IoError::with_errno(IoErrorKind::WriteMedium, errno)),
        }
    }

    /// Records a failure. Returns true for the first one.
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
