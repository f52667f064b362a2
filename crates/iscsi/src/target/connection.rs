//! One connection of a target: splits the stream into PDUs and passes them to the login phase or the full feature phase.
//!
//! Owned by one worker. Never blocks. Holds at most one control PDU in addition to the task table; [`Limits`] bounds all
//! memory.

use std::collections::VecDeque;
use std::sync::Arc;

use super::full_feature::{Destination, FullFeature, Io};
use super::outgoing::Outgoing;
use super::reassign::DetachedState;
use super::responses::Content;
use super::steps::{CloseReason, Closed, Completion, NoSuchTask, Placement, Received, Step, Then};
use super::tasks::{Command, TaskId};
use crate::Limits;
use crate::login::{ChapFailure, LoginOutcome, TargetLogin, TargetPolicy, Visitor};
use crate::pdu::{
    AsyncEvent, Decoder, Digests, LoginRequest, LogoutReason, Opcode, Progress,
    TaskFunctionResponse, encode,
};
use crate::session::{ConnectionKey, Leaving, Session};

/// Maximum data segment before negotiation in bytes (13.12).
const LOGIN_SEGMENT_MAX: u32 = 8192;

enum Phase {
    Login(Box<TargetLogin>),
    Full(Box<FullFeature>),
}

/// The target's side of one connection.
pub struct Connection {
    decoder: Decoder,
    phase: Phase,
    io: Io,
    limits: Limits,
    policy: Arc<dyn TargetPolicy>,
    max_recv: u32,
    /// Data segment of the control PDU that is being received.
    inline: Vec<u8>,
    destination: Destination,
    closing: Option<CloseReason>,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("Connection");
        match &self.phase {
            Phase::Login(login) => out.field("login", login),
            Phase::Full(full) => out.field("full_feature", full),
        };
        out.field("closing", &self.closing).finish_non_exhaustive()
    }
}

impl Connection {
    /// Creates the state of an accepted connection. Only the addresses of `visitor` are used.
    pub fn new(policy: Arc<dyn TargetPolicy>, visitor: Visitor, limits: Limits) -> Self {
        let login = TargetLogin::new(policy.clone(), visitor, &limits);
        Connection {
            decoder: Decoder::new(limits.additional_header_bytes, LOGIN_SEGMENT_MAX),
            phase: Phase::Login(Box::new(login)),
            io: Io {
                out: Outgoing::default(),
                steps: VecDeque::new(),
            },
            max_recv: LOGIN_SEGMENT_MAX,
            limits,
            policy,
            inline: Vec::new(),
            destination: Destination::Discard,
            closing: None,
        }
    }

    /// Consumes bytes of the stream up to the next step. Call it again with the rest until [`Step::More`]: only the next
    /// call releases a turn that another connection of the session waits for.
    pub fn receive(&mut self, input: &[u8]) -> Received {
        let mut used = 0;
        loop {
            if let Some(step) = self.next_step() {
                return Received { used, step };
            }
            match self.decoder.push(&input[used..]) {
                Err(error) => self.close_with(CloseReason::Format(error)),
                Ok((taken, progress)) => {
                    used += taken;
                    match progress {
                        Progress::NeedMore(_) => {
                            return Received {
                                used,
                                step: Step::More,
                            };
                        }
                        Progress::Header => self.header(),
                        Progress::Data(left) => match self.destination {
                            Destination::TaskBuffer { task, offset } if self.takes_data(task) => {
                                let step = Step::Data(Placement {
                                    task,
                                    offset,
                                    length: left,
                                });
                                return Received { used, step };
                            }
                            _ if used == input.len() => {
                                return Received {
                                    used,
                                    step: Step::More,
                                };
                            }
                            _ => {
                                let take = (left as usize).min(input.len() - used);
                                self.control_data(&input[used..used + take]);
                                used += take;
                            }
                        },
                        Progress::End { digest_ok } => self.end(digest_ok),
                    }
                }
            }
        }
    }

    /// Reports a piece of write data stored at the place given by [`Step::Data`]. A data digest reads the bytes.
    ///
    /// # Panics
    /// If the piece is longer than the range of [`Step::Data`].
    pub fn data_stored(&mut self, piece: &[u8]) {
        self.decoder.take_data(piece);
        self.advance(piece.len());
    }

    /// As [`Connection::data_stored`], for bytes that the kernel stored in place. Requires that [`Connection::digests`] has no
    /// data digest.
    ///
    /// # Panics
    /// If there is a data digest, or if the length exceeds the range of [`Step::Data`].
    pub fn data_stored_by_kernel(&mut self, length: usize) {
        assert!(
            !self.digests().data,
            "data digests are computed over received data"
        );
        self.decoder.take_unseen(length);
        self.advance(length);
    }

    fn advance(&mut self, length: usize) {
        if let Destination::TaskBuffer { offset, .. } = &mut self.destination {
            *offset = offset.wrapping_add(length as u32);
        }
    }

    /// Returns the digests of the full feature phase; none before it.
    pub fn digests(&self) -> Digests {
        match &self.phase {
            Phase::Login(_) => Digests::default(),
            Phase::Full(full) => full.digests(),
        }
    }

    /// Returns the output queue. Swap it for an empty one, or send it and call `clear`.
    pub fn outgoing(&mut self) -> &mut Outgoing {
        &mut self.io.out
    }

    /// Returns the number of task slots; [`TaskId::index`] is below it. 0 before the full feature phase.
    pub fn task_slots(&self) -> usize {
        self.full().map_or(0, |full| full.tasks.size())
    }

    /// Returns the command of a task in progress.
    pub fn command(&self, task: TaskId) -> Option<&Command> {
        self.full()?.tasks.get(task).map(|task| &task.command)
    }

    /// Returns the tasks in progress that were reported to the caller.
    pub fn tasks(&self) -> impl Iterator<Item = TaskId> {
        let tasks = self.full().into_iter().flat_map(|full| full.tasks.iter());
        tasks.filter(|(_, task)| task.seen).map(|(id, _)| id)
    }

    /// Returns the session after login.
    pub fn session(&self) -> Option<&Arc<Session>> {
        self.full().map(|full| &full.session)
    }

    /// Returns the key of this connection after login.
    pub fn key(&self) -> Option<ConnectionKey> {
        self.full().map(|full| full.key)
    }

    /// Returns the initiator that is logged in or attempts a login.
    pub fn visitor(&self) -> &Visitor {
        match &self.phase {
            Phase::Login(login) => login.visitor(),
            Phase::Full(full) => &full.peer.visitor,
        }
    }

    /// Returns the claimed CHAP user and the reason of a failed authentication.
    pub fn chap_failure(&self) -> Option<(Option<&str>, ChapFailure)> {
        match &self.phase {
            Phase::Login(login) => login.chap_failure(),
            Phase::Full(_) => None,
        }
    }

    /// Requests the first `wanted` bytes of a write, limited to the length announced by the initiator. Returns true if all
    /// of them have arrived; otherwise [`Step::DataComplete`] follows.
    pub fn solicit(&mut self, task: TaskId, wanted: u32) -> Result<bool, NoSuchTask> {
        let (full, io) = self.full_mut()?;
        full.solicit(io, task, wanted)
    }

    /// Queues read data. `data` is at `offset` of both the command's data and the caller's `buffer`, which must stay valid
    /// until the data is sent. Data beyond the expected length is omitted. `Then::Status` ends the task. Pieces must be
    /// passed in order, and the last one must not be empty, because it carries the F bit.
    pub fn data_in(
        &mut self,
        task: TaskId,
        buffer: u64,
        offset: u32,
        data: &[u8],
        then: Then,
    ) -> Result<(), NoSuchTask> {
        let (full, io) = self.full_mut()?;
        full.data_in(io, task, Some(buffer), offset, Content::Seen(data), then)
    }

    /// As [`Connection::data_in`], for data that need not be read.
    ///
    /// # Panics
    /// If [`Connection::sees_data`] is true.
    pub fn data_in_unseen(
        &mut self,
        task: TaskId,
        buffer: u64,
        offset: u32,
        length: u32,
        then: Then,
    ) -> Result<(), NoSuchTask> {
        assert!(
            !self.sees_data(),
            "digests and retransmission need the data in this buffer"
        );
        let (full, io) = self.full_mut()?;
        let content = Content::Unseen(length as usize);
        full.data_in(io, task, Some(buffer), offset, content, then)
    }

    /// Ends a task with a SCSI Response. The response is delayed until the initiator has sent all requested data, which is
    /// discarded from now on.
    pub fn respond(&mut self, task: TaskId, completion: &Completion<'_>) -> Result<(), NoSuchTask> {
        let (full, io) = self.full_mut()?;
        full.respond(io, task, completion)
    }

    /// Ends a task without a response, after a task management function or the loss of another nexus aborted it. The rest
    /// of a data segment in progress may still be reported with `data_stored`; otherwise `receive` discards it.
    pub fn abort(&mut self, task: TaskId) -> Result<(), NoSuchTask> {
        let (full, _) = self.full_mut()?;
        full.abort(task).map(|_| ())
    }

    /// Answers a task management function.
    pub fn task_management_response(
        &mut self,
        tag: u32,
        response: TaskFunctionResponse,
    ) -> Result<(), NoSuchTask> {
        let (full, io) = self.full_mut()?;
        full.task_management_response(io, tag, response)
    }

    /// Answers a logout. If it ends this connection, [`Step::Close`] follows.
    pub fn logout_response(&mut self, tag: u32) -> Result<(), NoSuchTask> {
        let (full, io) = self.full_mut()?;
        full.logout_response(io, tag)
    }

    /// Pings the initiator and returns the tag of the ping. Returns `None` if too many pings are unanswered or login is not
    /// complete.
    pub fn ping(&mut self) -> Option<u32> {
        let (full, io) = self.full_mut().ok()?;
        full.ping(io)
    }

    /// Returns true if the ping was answered, which means that the initiator received all earlier output.
    pub fn is_answered(&self, ping: u32) -> bool {
        self.full()
            .is_none_or(|full| !full.unanswered.pings.contains(&ping))
    }

    /// Sends the current command window. Needed after commands ended without a response.
    pub fn send_window(&mut self) {
        if let Ok((full, io)) = self.full_mut() {
            full.send_window(io);
        }
    }

    /// Returns the number of unanswered pings.
    pub fn pings_outstanding(&self) -> usize {
        self.full().map_or(0, |full| full.unanswered.pings.len())
    }

    /// Sends an Asynchronous Message; `data` is SCSI sense data with its length, or vendor data.
    pub fn async_message(
        &mut self,
        event: AsyncEvent,
        lun: [u8; 8],
        parameters: [u16; 3],
        data: &[u8],
    ) -> Result<(), NoSuchTask> {
        let (full, io) = self.full_mut()?;
        full.async_message(io, event, lun, parameters, data);
        Ok(())
    }

    /// Marks the connection as logged out by another connection (RFC 7143, 11.14, "close the connection"). The session
    /// continues.
    pub fn mark_logged_out(&mut self) {
        self.closing.get_or_insert(CloseReason::LoggedOut {
            whole_session: false,
        });
    }

    /// Returns true if the session survives the loss of this connection now. Then every task in progress must be left
    /// behind before `close`.
    pub fn recovers(&self) -> bool {
        recovers_from(self.closing) && self.full().is_some_and(FullFeature::recovers)
    }

    /// Detaches a task from the lost connection until it is reassigned. Returns its ITT. A task whose CmdSN was not reached
    /// is dropped.
    pub fn detach_task(
        &mut self,
        task: TaskId,
        left: DetachedState<'_>,
    ) -> Result<u32, NoSuchTask> {
        let (full, _) = self.full_mut()?;
        full.detach_task(task, left)
    }

    /// Returns true if `data_in` must read the data, for digests or retransmission.
    pub fn sees_data(&self) -> bool {
        self.digests().data
            || self
                .full()
                .is_some_and(|full| full.retransmission.is_some())
    }

    /// Marks the session as ended by the target. Nothing of this connection is recovered.
    pub fn mark_dismissed(&mut self) {
        self.closing.get_or_insert(CloseReason::SessionEnded);
    }

    /// Closes the connection and leaves the session. The caller releases its tasks before this call (see
    /// [`Connection::tasks`]). Mandatory after login.
    pub fn close(&mut self) -> Closed {
        let Phase::Full(full) = &mut self.phase else {
            return Closed::default();
        };
        let (wake, leaving) = match self.closing {
            Some(CloseReason::LoggedOut {
                whole_session: false,
            }) => (full.leave_session(), Leaving::LoggedOut),
            closing if recovers_from(closing) && full.recovers() => {
                (full.leave_session_for_recovery(), Leaving::ForRecovery)
            }
            _ => (full.leave_session(), Leaving::Lost),
        };
        let drop = self.policy.detach(full.key, leaving);
        Closed {
            drop,
            wake: wake.to_vec(),
        }
    }

    /// Returns true if the caller has a buffer for the data of the task. It releases the buffer with its response; the rest of
    /// a data segment is then discarded.
    fn takes_data(&self, task: TaskId) -> bool {
        let task = self.full().and_then(|full| full.tasks.get(task));
        task.is_some_and(|task| task.pending.is_none())
    }

    fn full(&self) -> Option<&FullFeature> {
        match &self.phase {
            Phase::Login(_) => None,
            Phase::Full(full) => Some(full),
        }
    }

    fn full_mut(&mut self) -> Result<(&mut FullFeature, &mut Io), NoSuchTask> {
        match &mut self.phase {
            Phase::Login(_) => Err(NoSuchTask),
            Phase::Full(full) => Ok((full, &mut self.io)),
        }
    }

    fn next_step(&mut self) -> Option<Step> {
        if let Some(step) = self.io.steps.pop_front() {
            return Some(step);
        }
        if let Some(reason) = self.closing {
            return Some(Step::Close(reason));
        }
        if let Phase::Full(full) = &mut self.phase {
            full.end_turn(&mut self.io);
            if full.session.is_closed() {
                self.closing = Some(CloseReason::SessionEnded);
            } else {
                self.closing = full.take_closing();
            }
        }
        match self.io.steps.pop_front() {
            None => self.closing.map(Step::Close),
            step => step,
        }
    }

    fn close_with(&mut self, reason: CloseReason) {
        self.closing = Some(reason);
    }

    fn header(&mut self) {
        let bhs = self.decoder.bhs();
        let length = self.decoder.data_left();
        self.inline.clear();
        self.destination = match &mut self.phase {
            Phase::Login(_) if bhs.kind() == Some(Opcode::LoginRequest) => Destination::Inline,
            Phase::Login(_) => {
                // The first PDU must be a Login Request (6.3).
                self.closing = Some(CloseReason::NotLoggedIn);
                Destination::Discard
            }
            Phase::Full(full) => full.header(&mut self.io, &bhs, self.decoder.ahs(), length),
        };
    }

    fn control_data(&mut self, bytes: &[u8]) {
        self.decoder.take_data(bytes);
        if self.destination == Destination::Inline {
            self.inline.extend_from_slice(bytes);
        }
    }

    fn end(&mut self, digest_ok: bool) {
        let bhs = self.decoder.bhs();
        match &mut self.phase {
            Phase::Login(login) => {
                let reply = login.handle(&LoginRequest::from_bhs(&bhs), &self.inline);
                let header = reply.header.to_bhs();
                self.io
                    .out
                    .bytes(|out| encode(out, header, &[], &reply.text, Digests::default()));
                match reply.outcome {
                    LoginOutcome::Continues => {}
                    LoginOutcome::Failed(status) => {
                        self.close_with(CloseReason::LoginFailed(status))
                    }
                    LoginOutcome::Done(logged_in) => {
                        let mut key = [0; 8];
                        self.policy.random(&mut key);
                        self.max_recv = logged_in.max_recv;
                        self.decoder.set_digests(logged_in.parameters.digests);
                        self.decoder.set_data_limit(self.max_recv);
                        let full = FullFeature::new(
                            &logged_in,
                            &self.limits,
                            self.policy.clone(),
                            u64::from_le_bytes(key),
                        );
                        self.phase = Phase::Full(Box::new(full));
                        self.io.steps.push_back(Step::LoggedIn(logged_in));
                    }
                }
            }
            Phase::Full(full) => {
                full.end(&mut self.io, &bhs, &self.inline, digest_ok);
                // Releases the memory of a large ping.
                if self.inline.capacity() > 64 * 1024 {
                    self.inline = Vec::new();
                }
            }
        }
        self.destination = Destination::Discard;
    }

    /// Asks the initiator to log out within `seconds` (11.9.1, event 1).
    pub fn request_logout(&mut self, seconds: u16) -> Result<(), NoSuchTask> {
        self.async_message(AsyncEvent::RequestLogout, [0; 8], [0, 0, seconds], &[])
    }

    /// Announces that all connections of the session will be dropped (11.9.1, event 3), with the time after which the
    /// initiator may reconnect.
    pub fn announce_drop(&mut self) -> Result<(), NoSuchTask> {
        let wait = self
            .session()
            .map_or(0, |session| session.parameters.time_to_wait);
        self.async_message(AsyncEvent::DropSession, [0; 8], [0, wait, 0], &[])
    }

    /// Returns the reason of the logout in progress, for logs.
    pub fn logout_reason(&self) -> Option<LogoutReason> {
        match self.closing? {
            CloseReason::LoggedOut {
                whole_session: true,
            } => Some(LogoutReason::CloseSession),
            CloseReason::LoggedOut {
                whole_session: false,
            } => Some(LogoutReason::CloseConnection),
            _ => None,
        }
    }
}

/// Returns true if this close reason counts as the loss of the connection.
fn recovers_from(closing: Option<CloseReason>) -> bool {
    matches!(
        closing,
        None | Some(CloseReason::Format(_) | CloseReason::LimitExceeded(_))
    )
}

impl Drop for Connection {
    /// A turn that is never released would stop the whole session, even if `close` was not called.
    fn drop(&mut self) {
        if let Phase::Full(full) = &mut self.phase {
            full.leave_session();
        }
    }
}
