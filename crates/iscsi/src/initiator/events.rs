//! What an initiator tells its caller.

use crate::login::{LoginError, LoginResult};
use crate::pdu::{Bhs, FormatError};

/// A command that has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandDone {
    /// Initiator Task Tag.
    pub itt: u32,
    /// iSCSI service response: 0 command completed at target.
    pub response: u8,
    /// SCSI status.
    pub status: u8,
    /// Sense data.
    pub sense: Vec<u8>,
    /// What was read, up to the last byte that came.
    pub data: Vec<u8>,
    /// What was to be written, given back.
    pub written: Vec<u8>,
    /// Residual count; negative: underflow, positive: overflow.
    pub residual: i64,
    /// The same for the read of a bidirectional command.
    pub bidirectional_residual: i64,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// The connection is in the full feature phase.
    LoggedIn(Box<LoginResult>),
    /// A command has ended.
    Command(CommandDone),
    /// A task management function has ended, with the value of its response.
    TaskManagement {
        /// Initiator Task Tag.
        itt: u32,
        /// Response (11.6.1).
        response: u8,
    },
    /// A text exchange has ended.
    Text {
        /// Initiator Task Tag.
        itt: u32,
        /// All pairs of the target, as text.
        text: Vec<u8>,
    },
    /// A NOP-Out was answered.
    Nop {
        /// Initiator Task Tag.
        itt: u32,
        /// What came back.
        data: Vec<u8>,
    },
    /// A logout was answered; the connections concerned are over.
    LoggedOut {
        /// Initiator Task Tag.
        itt: u32,
        /// Response (11.15.1).
        response: u8,
    },
    /// A request went with its connection: whether it was done is not known, and the target does not do it any more.
    Lost {
        /// Initiator Task Tag.
        itt: u32,
        /// What a command was to write, given back.
        written: Vec<u8>,
    },
    /// The tasks of this connection, which was lost, go on, on it or on another one.
    Recovered {
        /// Its CID.
        cid: u16,
        /// Where they go on.
        to: u16,
    },
    /// A PDU was rejected; a task that began with it is over.
    Rejected {
        /// Reason (11.17.1).
        reason: u8,
        /// The header that was rejected.
        header: Option<Bhs>,
        /// What the command that it began was to write, given back.
        written: Vec<u8>,
    },
    /// An Asynchronous Message.
    Async {
        /// Event (11.9.1).
        event: u8,
        /// Logical unit.
        lun: [u8; 8],
        /// Parameters.
        parameters: [u16; 3],
        /// Sense data with its length, or vendor data.
        data: Vec<u8>,
    },
}

/// The connection cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InitiatorError {
    /// The framing is lost.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Login failed.
    #[error(transparent)]
    Login(#[from] LoginError),
    /// The target broke a rule.
    #[error("target breaks the protocol: {0}")]
    Protocol(&'static str),
    /// A data digest does not match: at error recovery level 0 the session is over. At others the data does not come again.
    #[error("data digest does not match")]
    DataDigest,
    /// There is no such connection.
    #[error("no connection {0}")]
    NoConnection(u16),
}
