//! Primitives of extended L2 entries. The crate `models` compiles these entries with loom's instead.

pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
