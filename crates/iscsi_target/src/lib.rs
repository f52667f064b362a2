//! The iSCSI transport: portals, connections and sessions on workers, around the sans-IO crate `iscsi` and the SCSI core.
//!
//! [`Server`] accepts on one control thread and places each connection on a worker. There, `connection` owns it: `receive` parses the
//! stream, `commands` executes commands through the core, `output` sends. Connections of one session may be on different workers. They
//! share state in `shared`; `management` applies task management to all of them.

#![forbid(unsafe_code)]

mod command_slot;
mod commands;
mod connection;
mod contest;
mod deadlines;
mod initiator_counters;
mod lifecycle;
mod limits;
mod management;
mod measure;
mod memory;
mod new_connections;
mod output;
mod policy;
mod portals;
mod receive;
mod recovery;
mod refused_logins;
mod responses;
mod retained;
mod server;
mod shared;
#[cfg(feature = "simulated")]
mod simulated;
mod slots;
mod target;

pub use initiator_counters::InitiatorStatus;
pub use iscsi::Limits as ProtocolLimits;
pub use iscsi::access::{AclEntry, Announced, DemoMode, Network, Portal};
pub use iscsi::chap::Secret;
pub use iscsi::login::ChapUser;
pub use iscsi::negotiation::LoginBounds;
pub use iscsi_name::is_iscsi_name;
pub use limits::ServerLimits;
pub use portals::WaitingPortal;
pub use refused_logins::RefusedLogin;
pub use scsi::{AccessState, AccessStates, StateSetters};
pub use server::{Server, ServerError, SessionStatus, TargetStatus};
pub use shared::{ConnectionStatus, SessionChange};
#[cfg(feature = "simulated")]
pub use simulated::SimulatedServer;
pub use target::{PortGroupStatus, TargetOptions};
