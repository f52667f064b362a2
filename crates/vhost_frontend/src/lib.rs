//! A vhost-user front end: acts as a VMM and its guest's driver, for tests and benchmarks.
//!
//! `channel` sends messages and waits for replies; [`FrontEnd`] negotiates, shares memory and configures vrings; [`Queue`] is a running
//! vring with its eventfds; [`BlkQueue`] and [`ScsiQueue`] submit requests, many in flight. [`Verifier`] writes and reads back,
//! [`VerifiedLoad`] repeats that on a thread. Waits block the calling thread. The crate `conformance` has the tests of back ends, among
//! them front ends that violate the protocol.

#![forbid(unsafe_code)]

mod block;
mod channel;
mod inflight;
mod layout;
mod load;
mod log;
mod memory;
mod queue;
mod scsi;
mod session;
mod verify;

pub use block::{BlkDone, BlkQueue, Range, kind, status};
pub use channel::Channel;
pub use inflight::InflightMemory;
pub use layout::Layout;
pub use load::VerifiedLoad;
pub use log::LogMemory;
pub use memory::{Area, Memory, Region};
pub use queue::{Queue, QueueOptions};
pub use scsi::{ScsiDone, ScsiQueue, ScsiRequest, attribute};
pub use session::{FrontEnd, Options, feature};
pub use verify::Verifier;
pub use vhost_user_wire::{protocol_feature, request};

/// A message to the back end.
pub type Message<'a> = vhost_user_wire::Message<std::os::fd::BorrowedFd<'a>>;

/// Errors of the front end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The back end has closed the session.
    #[error("the back end closed the session")]
    Closed,
    /// The kernel reported an error.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The back end reported that a request failed.
    #[error("the back end refused request {0}")]
    Refused(u32),
    /// The reply of the back end is invalid.
    #[error("invalid reply to request {request}: {reason}")]
    Answer {
        /// Request number.
        request: u32,
        /// Description of the fault.
        reason: String,
    },
    /// The machine has too few huge pages.
    #[error(
        "cannot allocate {pages} huge pages of 2 MiB: {error}; hint, as root: echo $(($(cat /proc/sys/vm/nr_hugepages) + {pages})) > /proc/sys/vm/nr_hugepages"
    )]
    HugePages {
        /// Number of required huge pages.
        pages: u64,
        /// Error of the kernel.
        error: std::io::Error,
    },
    /// A wait timed out.
    #[error("no reply within {0:?}")]
    Timeout(std::time::Duration),
    /// Memory is too small, or an address is outside of it.
    #[error("{0}")]
    Memory(#[from] guest_memory::MemoryError),
    /// The front end's memory is full.
    #[error("the front end's memory has no {0} free bytes")]
    Full(u64),
    /// Data or a reply is wrong.
    #[error("{0}")]
    Wrong(String),
}

impl From<rustix::io::Errno> for Error {
    fn from(errno: rustix::io::Errno) -> Error {
        Error::Io(errno.into())
    }
}

/// Result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;
