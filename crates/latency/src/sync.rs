//! Atomic types of counters. The crate `models` compiles counters with loom's instead.

pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

impl crate::Word {
    /// Creates a word. Not in `word.rs`: loom's types have no constant constructor.
    pub const fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }
}
