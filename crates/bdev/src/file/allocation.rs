//! Ways to release or zero space without a transfer, and those that the file system or device has refused.

use std::sync::atomic::{AtomicU8, Ordering};

/// Operation on the allocation of a file or block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Allocation {
    /// Discards blocks of a block device.
    DiscardBlocks = 1,
    /// Punches a hole.
    Punch = 2,
    /// Zeroes a range and keeps its space.
    ZeroRange = 4,
}

/// Operations that the file system or device has refused; not tried again.
#[derive(Debug, Default)]
pub(super) struct Refused(AtomicU8);

impl Refused {
    /// Returns true if the operation was refused. A hint: without it the kernel refuses, and the next operation is tried.
    pub fn has(&self, operation: Allocation) -> bool {
        self.0.load(Ordering::Relaxed) & operation as u8 != 0
    }

    pub fn add(&self, operation: Allocation) {
        self.0.fetch_or(operation as u8, Ordering::Relaxed);
    }
}
