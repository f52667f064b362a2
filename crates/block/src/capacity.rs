//! The current size of a disk: one word shared by all its users.

use std::sync::atomic::{AtomicU64, Ordering};

/// Size of a disk in bytes. Read for every I/O, written when the disk grows or shrinks.
#[derive(Debug)]
pub struct Capacity(AtomicU64);

impl Capacity {
    /// Creates a capacity of `bytes`.
    pub const fn new(bytes: u64) -> Capacity {
        Capacity(AtomicU64::new(bytes))
    }

    /// Returns the current size in bytes. A reader of a larger size also sees everything prepared for it (acquire).
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Sets the size in bytes.
    pub fn set(&self, bytes: u64) {
        self.0.store(bytes, Ordering::Release);
    }
}
