//! The vhost-user server: control plane only. Messages come from the crate `vhost`; sockets, sessions and the
//! placement of queues on workers are ours.
//!
//! `listener` owns the sockets (one thread for all of them), `front_end` is the thread of one connection, asleep
//! but for its messages, `session` is what they change, `vring` is one queue's state between messages. Queues run on workers. A front end
//! that breaks the protocol ends its own session and nothing else. Tests: here and in `tests/`.

#![forbid(unsafe_code)]

mod front_end;
#[doc(hidden)]
pub mod fuzzing;
mod inflight;
mod listener;
mod record;
mod relay;
mod resume;
mod session;
mod socket;
mod socket_path;
mod vring;
mod whole_message;

pub use listener::{ExportStatus, Server, WaitingSocket};
pub use record::HandedOver;
pub use socket::{Rights, SocketError, bind};
pub use socket_path::{FileId, FolderLock, Obstacle, file_at, lock_folder, remove_stale};
