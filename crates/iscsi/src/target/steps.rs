//! Interface types between a connection and its caller.

use smallvec::SmallVec;

use super::tasks::TaskId;
use crate::login::LoggedIn;
use crate::pdu::{FormatError, LoginStatus, TaskFunction};
use crate::session::ConnectionKey;

/// Destination of the next bytes of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The task that receives the write data.
    pub task: TaskId,
    /// Offset in the command's data buffer.
    pub offset: u32,
    /// Remaining bytes of the data segment, never 0.
    pub length: u32,
}

/// A task management function to execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskManagement {
    /// Identifies the request in [`crate::target::Connection::task_management_response`].
    pub tag: u32,
    /// The function.
    pub function: TaskFunction,
    /// Logical unit, as on the wire.
    pub lun: [u8; 8],
    /// The task of ABORT TASK and QUERY TASK, in progress on this connection.
    pub referenced: Option<TaskId>,
    /// The referenced task tag. An ABORT TASK without `referenced` means a task that has ended on this connection. The
    /// answer is `TaskFunctionResponse::TaskDoesNotExist`, unless the task was aborted and its I/O is still running.
    pub referenced_tag: u32,
    /// The request's CmdSN: only older tasks of the session are affected (4.2.2.3.4).
    pub cmd_sn: u32,
}

/// Scope of a logout (RFC 7143, 11.14.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogoutScope {
    /// The session with all its connections.
    Session,
    /// The connection that carried the request.
    Connection,
    /// Another connection of the session.
    Other(ConnectionKey),
    /// Another connection; its tasks wait for reassignment; `None` if it has already ended.
    ForRecovery(Option<ConnectionKey>),
}

impl LogoutScope {
    /// Returns true if the logout ends the connection that carried the request.
    pub(super) fn is_own(self) -> bool {
        matches!(self, LogoutScope::Session | LogoutScope::Connection)
    }
}

/// A logout to execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logout {
    /// Identifies the request in [`crate::target::Connection::logout_response`].
    pub tag: u32,
    /// The scope of the logout.
    pub scope: LogoutScope,
}

/// Reason for dropping a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// The initiator logged out.
    LoggedOut {
        /// All connections of the session end.
        whole_session: bool,
    },
    /// Login was refused.
    LoginFailed(LoginStatus),
    /// The first PDU was not a Login Request.
    NotLoggedIn,
    /// Framing error.
    Format(FormatError),
    /// The session was reinstated, closed or dropped by another connection.
    SessionEnded,
    /// The peer exceeded a resource limit.
    LimitExceeded(&'static str),
}

/// Result of the received bytes. The caller acts on it before the next call.
#[derive(Debug)]
pub enum Step {
    /// All bytes are consumed; receive more.
    More,
    /// The next bytes of the stream are write data. Store them there and call `data_stored`, once per received piece.
    Data(Placement),
    /// The full feature phase has begun.
    LoggedIn(Box<LoggedIn>),
    /// Start this command before the next call. Commands arrive in CmdSN order with their immediate data already placed.
    Command(TaskId),
    /// All data requested with `solicit` is placed.
    DataComplete(TaskId),
    /// The connection ended the task (faulty data; the response is queued). Release its resources.
    Abandoned(TaskId),
    /// Start this task management function before the next call.
    TaskManagement(TaskManagement),
    /// The next command by CmdSN waits on another connection of the session. The owner of that connection must call
    /// `receive(&[])`.
    Wake(u16),
    /// The detached task with this ITT was aborted; stop waiting for it.
    Forgotten(u32),
    /// Logout: abort the commands in the scope, drop the other connections in the scope, and answer when none of these
    /// commands can have an effect any more (11.15).
    Logout(Logout),
    /// Send the queued output, then drop the connection and call `close`.
    Close(CloseReason),
}

/// Result of [`crate::target::Connection::receive`].
#[derive(Debug)]
pub struct Received {
    /// Number of consumed input bytes.
    pub used: usize,
    /// The next action.
    pub step: Step,
}

/// Consequences of a closed connection for the rest of its session.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Closed {
    /// Connections to drop too: at error recovery level 0 the session ends with a connection that was not logged out.
    pub drop: Vec<ConnectionKey>,
    /// CIDs that may have waited for this connection. Their owners must call `receive(&[])`, as for [`Step::Wake`].
    pub wake: Vec<u16>,
}

/// Bytes that the CDB transfers, independent of the initiator's expectation. The residual counts are computed from them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transfer {
    /// Bytes to the initiator.
    pub data_in: u64,
    /// Bytes from the initiator.
    pub data_out: u64,
}

/// Outcome of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion<'a> {
    /// iSCSI service response: 0 command completed at target, 1 target failure.
    pub response: u8,
    /// SCSI status.
    pub status: u8,
    /// Sense data.
    pub sense: &'a [u8],
    /// Bytes transferred by the CDB.
    pub transfer: Transfer,
}

/// Continuation after a piece of read data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// More data of the same command.
    More,
    /// `respond` ends the command.
    Response,
    /// The command ends with a status without sense data. The status is sent in the last Data-In PDU if possible.
    Status {
        /// SCSI status.
        status: u8,
        /// Bytes transferred by the CDB.
        transfer: Transfer,
    },
}

/// The task does not exist or has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no such task in progress on this connection")]
pub struct NoSuchTask;

/// Returns the residual count and its flags: (count, overflow, underflow).
pub(crate) fn residual(expected: u32, moves: u64) -> (u32, bool, bool) {
    let expected = u64::from(expected);
    if moves > expected {
        (
            u32::try_from(moves - expected).unwrap_or(u32::MAX),
            true,
            false,
        )
    } else if moves < expected {
        ((expected - moves) as u32, false, true)
    } else {
        (0, false, false)
    }
}

/// Tags of unanswered requests.
pub(crate) type Tags = SmallVec<[u32; 4]>;
