//! How large a disk is now: one word that all who use the disk share.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a disk. Read with every I/O, written when the disk grows or shrinks.
#[derive(Debug)]
pub struct Capacity(AtomicU64);

impl Capacity {
    /// So many bytes.
    pub const fn new(bytes: u64) -> Capacity {
        Capacity(AtomicU64::new(bytes))
    }

    /// Bytes now. Whoever sees a larger disk sees what was made ready for it.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// From now on so many bytes.
    pub fn set(&self, bytes: u64) {
        self.0.store(bytes, Ordering::Release);
    }
}
