//! A vhost-user front end: what a VMM and its guest's driver do, for tests and benchmarks.
//!
//! `channel` sends and receives messages, of its own making, so that both ends of a test do not share a mistake;
//! [`FrontEnd`] negotiates, shares memory and sets vrings up; [`Queue`] is one running vring with its eventfds;
//! [`BlkQueue`] and [`ScsiQueue`] put requests into it, many in flight. [`Verifier`] writes and reads back, [`VerifiedLoad`] goes on doing so;
//! [`hostile`] holds front ends that break the rules. Blocks its thread where it waits; trusts its back end,
//! but for [`hostile`].

#![forbid(unsafe_code)]

mod block;
mod channel;
mod cuts;
pub mod hostile;
mod inflight;
mod load;
mod memory;
mod queue;
mod scsi;
mod session;
mod verify;

pub use block::{BlkDone, BlkQueue, Range, kind, status};
pub use channel::{Channel, Message, request};
pub use cuts::Cuts;
pub use hostile::Case;
pub use inflight::InflightMemory;
pub use load::VerifiedLoad;
pub use memory::{Area, Memory, Region};
pub use queue::{Queue, QueueOptions};
pub use scsi::{ScsiDone, ScsiQueue, ScsiRequest, attribute};
pub use session::{FrontEnd, Options, feature, protocol_feature};
pub use verify::Verifier;

/// Why something did not work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The back end has closed the session.
    #[error("the back end closed the session")]
    Closed,
    /// The kernel says no.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The back end answered that a request failed.
    #[error("the back end refused request {0}")]
    Refused(u32),
    /// The back end's answer is not one.
    #[error("request {request} got an answer that is none: {what}")]
    Answer {
        /// What was asked.
        request: u32,
        /// What is wrong.
        what: String,
    },
    /// The machine has not set aside as many huge pages.
    #[error(
        "{pages} huge pages of 2 MiB are needed ({error}); hint, as root: \
         echo $(($(cat /proc/sys/vm/nr_hugepages) + {pages})) > /proc/sys/vm/nr_hugepages"
    )]
    HugePages {
        /// How many are needed.
        pages: u64,
        /// What the kernel said.
        error: std::io::Error,
    },
    /// Nothing came in time.
    #[error("no answer within {0:?}")]
    Timeout(std::time::Duration),
    /// Memory is too small, or an address is outside of it.
    #[error("{0}")]
    Memory(#[from] guest_memory::MemoryError),
    /// There is no room left in the front end's memory.
    #[error("no {0} bytes left in the front end's memory")]
    Full(u64),
    /// What came back is not what had been written, or an answer is wrong.
    #[error("{0}")]
    Wrong(String),
}

impl From<rustix::io::Errno> for Error {
    fn from(errno: rustix::io::Errno) -> Error {
        Error::Io(errno.into())
    }
}

/// What things here give back.
pub type Result<T> = std::result::Result<T, Error>;
