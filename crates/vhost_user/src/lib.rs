//! The vhost-user server: control plane only. The crate `vhost_user_wire` parses messages; this crate implements sockets, sessions and the
//! placement of queues on workers.
//!
//! `listener` owns the sockets with one thread. `front_end` is the thread of one connection, asleep between messages. `dispatch` receives
//! messages and replies. `session` is the state changed by messages, `vring` the state of one queue. Queues run on workers. A front end that breaks the protocol ends its own
//! session only. Tests: here and in `tests/`.

#![forbid(unsafe_code)]

mod dispatch;
mod front_end;
#[doc(hidden)]
pub mod fuzzing;
mod inflight;
mod listener;
mod queue_times;
mod record;
mod resume;
mod session;
mod vring;

pub use listener::{ExportStatus, Server, WaitingSocket};
pub use queue_times::QueueTimeHistograms;
pub use record::SessionHandover;
