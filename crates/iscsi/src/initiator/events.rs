//! Events that an initiator reports to its caller.

use crate::login::{LoginError, LoginResult};
use crate::pdu::{Bhs, FormatError};

/// A completed command.
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
    /// Read data, up to the last byte received.
    pub data: Vec<u8>,
    /// Write data, returned to the caller.
    pub written: Vec<u8>,
    /// Residual count; negative for underflow, positive for overflow.
    pub residual: i64,
    /// Residual count of the read part of a bidirectional command.
    pub bidirectional_residual: i64,
}

/// An event of the session.
#[derive(Clone, Debug)]
pub enum Event {
    /// The connection is in the full feature phase.
    LoggedIn(Box<LoginResult>),
    /// A command has completed.
    Command(CommandDone),
    /// A task management function has completed.
    TaskManagement {
        /// Initiator Task Tag.
        itt: u32,
        /// Response code (11.6.1).
        response: u8,
    },
    /// A text exchange has ended.
    Text {
        /// Initiator Task Tag.
        itt: u32,
        /// All pairs sent by the target, as text.
        text: Vec<u8>,
    },
    /// A NOP-Out was answered.
    Nop {
        /// Initiator Task Tag.
        itt: u32,
        /// Echoed data.
        data: Vec<u8>,
    },
    /// A logout was answered; the connections in its scope are closed.
    LoggedOut {
        /// Initiator Task Tag.
        itt: u32,
        /// Response code (11.15.1).
        response: u8,
    },
    /// A request was lost with its connection. Its effect is unknown, and the target no longer executes it.
    Lost {
        /// Initiator Task Tag.
        itt: u32,
        /// Write data of the command, returned to the caller.
        written: Vec<u8>,
    },
    /// The tasks of a lost connection continue, on the same connection or another one.
    Recovered {
        /// CID of the lost connection.
        cid: u16,
        /// CID of the connection that continues the tasks.
        to: u16,
    },
    /// A PDU was rejected; the task that it started has ended.
    Rejected {
        /// Reason (11.17.1).
        reason: u8,
        /// The rejected header.
        header: Option<Bhs>,
        /// Write data of the command, returned to the caller.
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

/// A fatal error of the connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InitiatorError {
    /// Framing error.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Login failed.
    #[error(transparent)]
    Login(#[from] LoginError),
    /// The target violated the protocol.
    #[error("target breaks the protocol: {0}")]
    Protocol(&'static str),
    /// Data digest mismatch that is not recoverable: at error recovery level 0, or if the data is not sent again at higher
    /// levels.
    #[error("data digest does not match")]
    DataDigest,
    /// The connection does not exist.
    #[error("no connection {0}")]
    NoConnection(u16),
}
