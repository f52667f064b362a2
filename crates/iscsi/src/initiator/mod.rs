//! The initiator's side: an [`Initiator`] is one session with all its connections (RFC 7143, 4.2).
//!
//! No I/O: the caller moves bytes between each socket and [`Initiator::receive`] / [`Initiator::outgoing`]. A session has
//! one owner. Input from a target is checked as strictly as input from an initiator.

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
