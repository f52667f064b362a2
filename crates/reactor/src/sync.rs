//! Primitives that the mailbox shares between threads. The crate `models` compiles the mailbox with loom's instead.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard, mpsc};
