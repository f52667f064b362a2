//! Virtqueues of virtio 1.3, split (clause 2.7) and packed (2.8): device side and driver side.
//!
//! One worker owns a [`DeviceQueue`]. It pops descriptor chains into the caller's [`Chain`], pushes used elements, and returns whether the
//! driver wants a notification. It never blocks, allocates only at creation, and uses no eventfd. The ring's content is untrusted: each
//! index, address and length is read once and checked here. An error of the ring breaks the queue; an error of a request refuses that
//! request only. [`driver`] is the driver side, for tests and benchmarks. Tests: beside the code, and in `tests/`.

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
mod ring_log;
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
pub use refusal::{PopError, Refusal, ResponseSpace};
