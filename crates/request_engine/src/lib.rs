//! The parts of the request path that several transports share: virtqueues, iSCSI connections and NBD connections.
//!
//! The code is generic over the transport and monomorphised: no call per request goes through a table, and nothing here allocates or locks
//! per request. `docs/adr/0013-one-request-engine.md` lists the parts that are here and those that the transports implement.

#![forbid(unsafe_code)]

mod batch;
mod buffer_pool;
mod buffers;
mod measurement;
mod memory;
mod memory_budget;
mod pace;
mod prefetch;
mod send_queue;
mod stream;
#[cfg(test)]
mod testing;
mod transport;

pub use batch::{BatchTransport, Submitted};
pub use buffer_pool::{BufferPool, buffer_size};
pub use buffers::Buffers;
pub use measurement::Measurement;
pub use memory::{MemoryShare, SharedMemory};
pub use memory_budget::{GroupMemory, MemoryBudget};
pub use pace::Pace;
pub use prefetch::prefetch_following;
pub use send_queue::{CopyProgress, SendMemory, SendQueue};
pub use stream::{Link, Receiver, StreamParts, StreamTransport, token};
pub use transport::Transport;
