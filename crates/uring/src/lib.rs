//! One worker's io_uring, which owns every buffer and descriptor from submission until completion.
//!
//! A [`Ring`] is made on the thread that uses it and never leaves it. It queues operations without a system
//! call; [`Ring::enter`] submits all of them, and waits where asked, with one. No allocation per operation once
//! as many slots exist as operations were ever in flight together. One of the crates where `unsafe`
//! lives; what it exports is safe: memory that the kernel may still touch is leaked rather than freed.
//! Also here, because they need raw system calls: [`file_lock`], [`guard`], [`first_unwritten`], [`inherited`], [`make_tap`] and
//! [`make_tun`]. Tests: `tests/`.

mod discard;
mod event;
mod fd;
pub mod file_lock;
pub mod guard;
mod inherited;
mod kernel;
mod memory;
mod message;
mod now;
mod ramp;
mod restrict;
mod ring;
mod setup;
mod signal;
#[cfg(feature = "simulated")]
pub mod simulated;
mod slab;
mod tap;
mod unwritten;

use guest_memory::IoBuffer;

pub use discard::discard_now;
pub use event::Event;
pub use fd::RingFd;
pub use inherited::inherited;
pub use message::Message;
pub use ring::{Receive, Ring, Wait, WatchId};
pub use signal::{HeldUp, Signal};
pub use tap::{make_tap, make_tun};
pub use unwritten::first_unwritten;

/// Who is told of a completion: the reactor deals completions out by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner(pub u32);

/// The end of an operation, or one event of a watch.
#[derive(Debug)]
pub struct Completion {
    /// Whoever started the operation.
    pub owner: Owner,
    /// What the owner called it.
    pub token: u64,
    /// Bytes moved, or the mask of poll events, or 0; else the errno.
    pub result: Result<u32, i32>,
    /// The buffer given with the operation, if one was.
    pub buffer: Option<IoBuffer>,
    /// The message given with a send.
    pub message: Option<Box<Message>>,
    /// The operation goes on: more completions with this token follow. Only ever true for a watch.
    pub more: bool,
}
