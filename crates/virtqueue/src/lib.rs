//! Virtqueues of virtio 1.3, split (clause 2.7) and packed (2.8): device side and driver side.
//!
//! [`DeviceQueue`] is owned by one worker: it pops descriptor chains into the caller's [`Chain`], pushes used
//! elements, and says whether the driver wants a notification; it never blocks, allocates only when made, and
//! knows no eventfd. Everything in the ring is a hostile driver's word: each index, address and length is read
//! once and checked here. A mistake of the ring's breaks the queue, one of a request's refuses that request alone. [`driver`] is the other side, for tests
//! and benchmarks. Tests: beside the code, and in `tests/`.

#![forbid(unsafe_code)]

mod chain;
mod config;
mod device;
pub mod driver;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod inflight;
mod interrupted;
pub mod layout;
mod packed;
mod packed_inflight;
mod refusal;
mod split;
mod unanswered;

pub use chain::Chain;
pub use config::{PACKED_START, QueueConfig};
pub use device::{DeviceQueue, Resumed};
pub use error::QueueError;
pub use inflight::Inflight;
#[cfg(feature = "simulated")]
pub use interrupted::simulated;
pub use packed_inflight::PackedInflight;
pub use refusal::{ErrorPlace, PopError, Refusal};
