//! Primitives of range locks, conditions and inboxes. The crate `models` compiles these with loom's instead.

/// Reference-counted pointer. Its last drop runs code.
pub(crate) use std::sync::Arc as CountingArc;
pub(crate) use std::sync::atomic::{AtomicU32, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard};
