//! Conditions that delay I/Os of a disk, as one atomic word.
//!
//! Workers load it for every I/O; while it is clear, as nearly always, the I/O starts without further checks. Each condition is set and
//! cleared by one owner: [`crate::RangeLocks`], [`crate::Throttle`], [`crate::Recorder`] or the disk's [`crate::ErrorPolicy`].

use crate::sync::{AtomicU32, Ordering};

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
    /// I/Os may wait after errors or have a time limit; workers track them: [`crate::ErrorPolicy`].
    Tracked = 8,
    /// Changes are recorded in dirty bitmaps: [`crate::Recorder`].
    Recorded = 16,
    /// The device takes only multiples of more than a sector: [`block::DiskInfo::io_alignment`]. Workers check every I/O.
    Coarse = 32,
}

/// The conditions of one disk.
#[derive(Debug, Default)]
pub struct Conditions(AtomicU32);

impl Conditions {
    /// Returns true if every I/O may start: the only load of the fast path.
    #[inline]
    pub fn is_clear(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    /// Returns true if every I/O may start that the device takes as it is.
    #[inline]
    pub fn is_clear_for_aligned(&self) -> bool {
        self.0.load(Ordering::Acquire) & !(Condition::Coarse as u32) == 0
    }

    /// Returns true if this condition is set.
    #[inline]
    pub fn has(&self, condition: Condition) -> bool {
        self.0.load(Ordering::Acquire) & condition as u32 != 0
    }

    /// Sets or clears a condition, from one thread of its owner at a time.
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
    fn word_is_clear_after_the_last_condition_ends() {
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
        conditions.set(Condition::Coarse, true);
        assert!(!conditions.is_clear() && conditions.is_clear_for_aligned());
        conditions.set(Condition::Locked, true);
        assert!(!conditions.is_clear_for_aligned());
    }
}
