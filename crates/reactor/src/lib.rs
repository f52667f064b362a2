//! One worker's iteration: collect from sources, drain, submit, reap, notify.
//!
//! A [`Worker`] is a thread with one io_uring. It owns [`Source`]s (virtqueues or connections), their slots, and its own
//! handle on every disk in use. No state is shared per request: configuration arrives as messages between iterations,
//! through a [`WorkerHandle`]. [`PollLimit`] selects how the worker waits. Tests: in each module, and the transports' own.

#![forbid(unsafe_code)]

mod accepting;
mod activity;
mod admission;
mod attaching;
mod disk_waits;
mod disks;
mod drain;
mod ledger;
mod mailbox;
mod pacing;
mod peer_rate_limit;
mod polling;
mod pool;
mod rate_limit;
mod retry;
mod socket_path;
mod source;
mod source_handle;
mod step;
mod sync;
mod tcp;
mod time_use;
mod unix_socket;
mod waiting;
mod worker;

pub use accepting::Accepting;
pub use activity::Activity;
pub use disks::{DiskHandle, Io, Tag};
pub use ledger::{DiskCounters, FailureCounters, KindCounters};
pub use mailbox::{WorkerGone, WorkerHandle};
pub use peer_rate_limit::PeerRateLimit;
pub use polling::{PollLimit, PollLimits, PollMode};
pub use pool::{ExportPlacement, OwnedQueue, Pool, PoolError, WorkerOptions};
pub use rate_limit::RateLimit;
pub use retry::{Retry, address_can_heal};
pub use socket_path::{FileId, FolderLock, Obstacle, file_at, lock_folder, remove_stale};
pub use source::{Source, SourceId};
pub use source_handle::{Addressed, SourceHandle};
pub use step::{Job, Step};
pub use tcp::{listen_tcp, listening_tcp, write_listen_error};
pub use unix_socket::{Bound, Rights, SocketError, TakenOverSockets, bind, bind_with, set_rights};
pub use worker::{Worker, WorkerCounters};
