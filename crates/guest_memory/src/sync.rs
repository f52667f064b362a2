//! Atomic types of the SIGBUS handler's table. The crate `models` compiles its slots with loom's instead.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};
