//! The target's side of a connection (RFC 7143): one [`Connection`] per TCP connection, owned by one worker.
//!
//! ```text
//! bytes -> receive() -> Step::Data        caller stores write data, then placed()
//!                       Step::Command     caller starts it: solicit(), data_in(), respond()
//!                       Step::...
//!          outgoing() <- output queued by these calls
//! ```
//! Never blocks. The data path takes no lock (see [`crate::session::CommandWindow`]) and allocates only during warm-up.

mod commands;
mod connection;
mod control;
mod data_out;
mod full_feature;
mod outgoing;
mod reassign;
mod responses;
mod retransmission;
mod steps;
mod tasks;
mod text_exchange;

pub use connection::Connection;
pub use outgoing::{Outgoing, Piece};
pub(crate) use reassign::Reassignable;
pub use reassign::{DetachedState, ReassignableTasks};
pub use steps::{
    CloseReason, Closed, Completion, Logout, LogoutScope, NoSuchTask, Placement, Received, Step,
    TaskManagement, Then, Transfer,
};
pub use tasks::{Command, TaskId};
