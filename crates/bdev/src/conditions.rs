//! Conditions that prevent I/Os of a disk from starting at once, as one atomic word.
//!
//! Workers load the word for every I/O. While it is clear, which is nearly always, the I/O starts without further checks. Each condition
//! has one owner that sets and clears it: [`crate::RangeLocks`], [`crate::Throttle`], [`crate::Recorder`] and the disk's
//! [`crate::ErrorPolicy`].

use std::sync::atomic::{AtomicU32, Ordering};

/// One condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Condition {
    /// The disk is closed: [`crate::Disk::close`].
    Closed = 1,
    /// A range of the disk is locked.
    Locked = 2,
    /// The disk has rate limits.
    Limited = 4,
    /// Failed I/Os may have to wait, or I/Os have a time limit. Workers track them: [`crate::ErrorPolicy`].
    Tracked = 8,
    /// Changes are recorded in dirty bitmaps: [`crate::Recorder`].
    Recorded = 16,
}

/// The conditions of one disk.
#[derive(Debug, Default)]
pub struct Conditions(AtomicU32);

impl Conditions {
    /// Returns true if every I/O may start. The only load on the fast path.
    #[inline]
    pub fn is_clear(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    /// Returns true if this condition is set.
    #[inline]
    pub fn has(&self, condition: Condition) -> bool {
        self.0.load(Ordering::Acquire) & condition as u32 != 0
    }

    /// Sets or clears a condition. Only its owner calls this, one thread at a time.
    pub(crate) fn set(&self, condition: Condition, holds: bool) {
        let bit = condition as u32;
        if holds {
            self.0.fetch_or(bit, Ordering::AcqRel);
        } else {
            self.0.fetch_and(!bit, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_is_clear_when_the_last_condition_has_gone() {
        let conditions = Conditions::default();
        let all = [Condition::Closed, Condition::Locked, Condition::Limited];
        for condition in all {
            conditions.set(condition, true);
            conditions.set(condition, true);
        }
        for condition in all {
            assert!(!conditions.is_clear() && conditions.has(condition));
            conditions.set(condition, false);
            assert!(!conditions.has(condition));
        }
        assert!(conditions.is_clear());
    }
}
