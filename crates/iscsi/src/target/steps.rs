//! What a connection tells its caller, and what the caller tells it back.

use smallvec::SmallVec;

use super::tasks::TaskId;
use crate::login::LoggedIn;
use crate::pdu::{FormatError, LoginStatus, TaskFunction};
use crate::session::ConnectionKey;

/// Where the next bytes of the stream belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The task whose write data they are.
    pub task: TaskId,
    /// Offset in the command's data buffer.
    pub offset: u32,
    /// Bytes left of the data segment, never 0.
    pub length: u32,
}

/// A task management function to be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskManagement {
    /// Names the request in [`crate::target::Connection::task_management_response`].
    pub tag: u32,
    /// What to do.
    pub function: TaskFunction,
    /// Logical unit, as on the wire.
    pub lun: [u8; 8],
    /// The task of ABORT TASK and QUERY TASK; it is in progress on this connection.
    pub referenced: Option<TaskId>,
    /// Its tag. An ABORT TASK without a task means one that has ended as far as is known here: it is answered
    /// [`TaskFunctionResponse::TaskDoesNotExist`], but for one that was aborted and is still at work.
    pub referenced_tag: u32,
    /// The request's CmdSN: of its session's tasks the older ones are meant (4.2.2.3.4).
    pub cmd_sn: u32,
}

/// What an initiator logs out (RFC 7143, 11.14.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogoutScope {
    /// The session with all its connections.
    Session,
    /// The connection by which the request came.
    Connection,
    /// Another connection of the session.
    Other(ConnectionKey),
    /// Another connection, whose tasks are kept for reassignment; `None`: it has ended by itself.
    ForRecovery(Option<ConnectionKey>),
}

impl LogoutScope {
    /// Is it the end of the connection by which the request came?
    pub(super) fn is_own(self) -> bool {
        matches!(self, LogoutScope::Session | LogoutScope::Connection)
    }
}

/// A logout to be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logout {
    /// Names the request in [`crate::target::Connection::logout_response`].
    pub tag: u32,
    /// What ends.
    pub scope: LogoutScope,
}

/// Why a connection has to be dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// The initiator logged out; `whole_session`: with all connections.
    LoggedOut {
        /// The session ends too.
        whole_session: bool,
    },
    /// Login was refused.
    LoginFailed(LoginStatus),
    /// A PDU other than Login came before login.
    NotLoggedIn,
    /// The framing is lost.
    Format(FormatError),
    /// The session was reinstated, closed or dropped elsewhere.
    SessionGone,
    /// The peer made us hold more than the limits allow.
    LimitExceeded(&'static str),
}

/// What came of the bytes received. Act on it before the next call.
#[derive(Debug)]
pub enum Step {
    /// All bytes are taken; receive more.
    More,
    /// The next bytes of the stream are write data: put them there and call `placed`, in as many pieces as they come.
    Data(Placement),
    /// The full feature phase has begun.
    LoggedIn(Box<LoggedIn>),
    /// A command, in the order of CmdSN, its immediate data already placed: begin it, before the next call.
    Command(TaskId),
    /// All data that `solicit` asked for has been placed.
    DataComplete(TaskId),
    /// The task is gone without the caller's doing (its data was faulty, the response is queued): give up what it holds.
    Abandoned(TaskId),
    /// A task management function; begin it, before the next call.
    TaskManagement(TaskManagement),
    /// The command whose turn it is waits on another connection of the session: have that one's owner call `receive(&[])`.
    Wake(u16),
    /// The task with this ITT, which has lost its connection, was aborted: nobody has to wait for it any more.
    Forgotten(u32),
    /// The initiator logs out: give up the commands of what ends, drop what of it is another connection, and answer when none of
    /// these commands can do anything any more (11.15).
    Logout(Logout),
    /// Send what is queued, then drop the connection and call `close`.
    Close(CloseReason),
}

/// How far [`crate::target::Connection::receive`] came.
#[derive(Debug)]
pub struct Received {
    /// Bytes taken from the input.
    pub used: usize,
    /// What to do now.
    pub step: Step,
}

/// What the end of a connection means for others of its session.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Closed {
    /// To be dropped with it: at error recovery level 0 a session does not outlive a connection that was not logged out.
    pub drop: Vec<ConnectionKey>,
    /// CIDs that may have waited for it: have their owners call `receive(&[])`, as for [`Step::Wake`].
    pub wake: Vec<u16>,
}

/// Bytes that the command as given by its CDB moves, whatever the initiator expects: the residual counts come from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transfer {
    /// To the initiator.
    pub data_in: u64,
    /// From the initiator.
    pub data_out: u64,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion<'a> {
    /// iSCSI service response: 0 command completed at target, 1 target failure.
    pub response: u8,
    /// SCSI status.
    pub status: u8,
    /// Sense data.
    pub sense: &'a [u8],
    /// What the command moves.
    pub transfer: Transfer,
}

/// What follows a piece of read data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// More data of the same command.
    More,
    /// Nothing: a `respond` ends the command.
    Response,
    /// The command is over with a status without sense data; it rides on the last Data-In PDU where it may.
    Status {
        /// SCSI status.
        status: u8,
        /// What the command moves.
        transfer: Transfer,
    },
}

/// An answer for a task that is not (or no longer) in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no such task in progress on this connection")]
pub struct NoSuchTask;

/// The residual count and its flags: (count, overflow, underflow).
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

/// Tags of requests that are being answered.
pub(crate) type Tags = SmallVec<[u32; 4]>;
