//! The NBD transport: listeners, handshakes and connections on workers, around the sans-I/O crate `nbd`.
//!
//! ```text
//!   accepting thread:  listeners ─▶ negotiations ─▶ worker:  Connection   receive ─▶ requests ─▶ output
//!                      (Unix, TCP)  (handshake)              (transmission phase)
//! ```
//!
//! [`Server`] accepts on one control thread, which also runs the handshakes: they read and write little, and no worker waits for a client
//! that does not finish. A client that has opened an export gets a connection on a worker. Connections of one export share nothing but the
//! disk. A peer that breaks the protocol, is too slow or never reads loses its own connection only.

#![forbid(unsafe_code)]

mod connection;
mod encryption;
mod export;
mod lifecycle;
mod limits;
mod listeners;
mod measure;
mod negotiations;
mod output;
mod progress;
mod receive;
mod requests;
mod server;
mod shared;
mod slots;
mod status;

pub use export::{DirtyContext, ExportOptions};
pub use limits::ServerLimits;
pub use listeners::{Address, ListenError, WaitingAddress};
pub use server::{ExportStatus, Server, ServerError, SessionStatus};
pub use shared::SessionChange;
