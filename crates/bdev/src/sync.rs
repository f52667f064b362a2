//! Primitives of range locks, conditions, inboxes and token buckets. The crate `models` compiles these with loom's instead.

/// Reference-counted pointer. Its last drop runs code.
pub(crate) use std::sync::Arc as CountingArc;
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard};
