//! The initiator's side: one [`Initiator`] is a session, with as many connections as were agreed to (RFC 7143, 4.2).
//!
//! Sans-IO: the caller moves bytes between each connection's socket and [`Initiator::receive`] / [`Initiator::outgoing`].
//! One owner for the whole session. What a target sends is checked as strictly as what an initiator sends.

mod events;
mod receive;
mod recovery;
mod reinstate;
mod requests;
mod session;
mod snack;

pub use events::{CommandDone, Event, InitiatorError};
pub use requests::{Request, TaskManagementRequestFields};
pub use session::{Initiator, InitiatorSettings, NotReady};
