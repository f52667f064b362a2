//! One worker's io_uring. It owns every buffer and descriptor from submission until completion.
//!
//! A [`Ring`] is created on the thread that uses it and never leaves it. Operations are queued without a system call;
//! [`Ring::enter`] submits them and optionally waits, with one call. Operations do not allocate while the number in flight stays
//! below an earlier maximum. This crate contains `unsafe` code; its exported API is safe. Memory that the kernel may still
//! access is leaked, never freed.
//!
//! Also here, because they need system calls: [`guard`] and [`RunDelayReader`]. Tests: `tests/`.

mod event;
mod fd;
pub mod guard;
mod kernel;
mod memory;
mod message;
mod now;
mod ramp;
mod restrict;
mod ring;
mod run_delay;
mod setup;
mod signal;
#[cfg(feature = "simulated")]
pub mod simulated;
mod slab;

use guest_memory::IoBuffer;

pub use event::Event;
pub use fd::RingFd;
pub use message::Message;
pub use ring::{Receive, Ring, Wait, WatchId};
pub use run_delay::{RunDelay, RunDelayReader};
pub use signal::{Blocked, Signal};

/// Recipient of completions, used by the reactor for dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner(pub u32);

/// The end of an operation, or one event of a watch.
#[derive(Debug)]
pub struct Completion {
    /// Owner that started the operation.
    pub owner: Owner,
    /// Token given by the owner.
    pub token: u64,
    /// Bytes transferred, or the mask of poll events, or 0; on failure the errno.
    pub result: Result<u32, i32>,
    /// Buffer of the operation, if it has one.
    pub buffer: Option<IoBuffer>,
    /// Message of a send.
    pub message: Option<Box<Message>>,
    /// More completions with this token follow. Only for watches.
    pub more: bool,
}
