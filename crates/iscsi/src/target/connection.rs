//! One connection: the stream is cut into PDUs here and handed to the login phase or to the full feature phase.
//!
//! Owned by one worker. Never blocks; holds at most one control PDU beside what the task table and [`Limits`] bound.

use std::collections::VecDeque;
use std::sync::Arc;

use super::full_feature::{Destination, FullFeature, Io};
use super::outgoing::Outgoing;
use super::reassign::Left;
use super::responses::Content;
use super::steps::{CloseReason, Closed, Completion, NoSuchTask, Placement, Received, Step, Then};
use super::tasks::{Command, TaskId};
use crate::Limits;
use crate::login::{LoginOutcome, TargetLogin, TargetPolicy, Visitor};
use crate::pdu::{
    AsyncEvent, Decoder, Digests, LoginRequest, LogoutReason, Opcode, Progress,
    TaskFunctionResponse, encode,
};
use crate::session::{ConnectionKey, Leaving, Session};

/// The data segment that is accepted before it could be negotiated (13.12).
const LOGIN_SEGMENT_MAX: u32 = 8192;

enum Phase {
    Login(Box<TargetLogin>),
    Full(Box<FullFeature>),
}

/// The target's end of one connection.
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
    /// A connection that was just accepted. Of `visitor` the addresses count.
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

    /// Takes bytes of the stream up to the next step. Call it again, with what is left, until [`Step::More`]: a turn that
    /// another connection of the session waits for is only given up by the next call.
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
                            Destination::Place { task, offset } if self.command(task).is_some() => {
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

    /// A piece of write data is where [`Step::Data`] wanted it. With a data digest its bytes are looked at.
    ///
    /// # Panics
    /// When more is placed than [`Step::Data`] offered.
    pub fn placed(&mut self, piece: &[u8]) {
        self.decoder.take_data(piece);
        self.advance(piece.len());
    }

    /// As [`Connection::placed`] for bytes that the kernel put in place; only when [`Connection::digests`] has no data digest.
    ///
    /// # Panics
    /// When there is a data digest, or when more is placed than [`Step::Data`] offered.
    pub fn placed_unseen(&mut self, length: usize) {
        assert!(!self.digests().data, "a data digest needs to see the data");
        self.decoder.take_unseen(length);
        self.advance(length);
    }

    fn advance(&mut self, length: usize) {
        if let Destination::Place { offset, .. } = &mut self.destination {
            *offset = offset.wrapping_add(length as u32);
        }
    }

    /// The digests of the full feature phase; none before it.
    pub fn digests(&self) -> Digests {
        match &self.phase {
            Phase::Login(_) => Digests::default(),
            Phase::Full(full) => full.digests(),
        }
    }

    /// What is to be sent. Swap it for an empty one, or look and `clear` it.
    pub fn outgoing(&mut self) -> &mut Outgoing {
        &mut self.io.out
    }

    /// How many tasks there can be: [`TaskId::index`] is below it. 0 before the full feature phase.
    pub fn task_slots(&self) -> usize {
        self.full().map_or(0, |full| full.tasks.size())
    }

    /// A task in progress.
    pub fn command(&self, task: TaskId) -> Option<&Command> {
        self.full()?.tasks.get(task).map(|task| &task.command)
    }

    /// Tasks that the caller has been told of and that are in progress.
    pub fn tasks(&self) -> impl Iterator<Item = TaskId> {
        let tasks = self.full().into_iter().flat_map(|full| full.tasks.iter());
        tasks.filter(|(_, task)| task.seen).map(|(id, _)| id)
    }

    /// The session, once logged in.
    pub fn session(&self) -> Option<&Arc<Session>> {
        self.full().map(|full| &full.session)
    }

    /// This connection in its session, once logged in.
    pub fn key(&self) -> Option<ConnectionKey> {
        self.full().map(|full| full.key)
    }

    /// Who is, or wants to be, logged in.
    pub fn visitor(&self) -> &Visitor {
        match &self.phase {
            Phase::Login(login) => login.visitor(),
            Phase::Full(full) => &full.visitor,
        }
    }

    /// A write wants the first `wanted` bytes of its data (no more than the initiator expects to send are asked for).
    /// `true`: they are all there; else [`Step::DataComplete`] will say so.
    pub fn solicit(&mut self, task: TaskId, wanted: u32) -> Result<bool, NoSuchTask> {
        let (full, io) = self.full_mut()?;
        full.solicit(io, task, wanted)
    }

    /// Queues read data: `data` is at `offset` of the command's data and of the caller's `buffer`, in which it has to stay
    /// until sent. What the initiator does not expect is left out. With `Then::Status` the task is over. Pieces come in
    /// order, and the last of them has data, for it carries the F bit.
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

    /// As [`Connection::data_in`] for data that need not be seen.
    ///
    /// # Panics
    /// When [`Connection::sees_data`].
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
            "digests and retransmission need to see the data"
        );
        let (full, io) = self.full_mut()?;
        let content = Content::Unseen(length as usize);
        full.data_in(io, task, Some(buffer), offset, content, then)
    }

    /// Ends a task with a SCSI Response; held back until the initiator has sent the data that it was asked for.
    pub fn respond(&mut self, task: TaskId, completion: &Completion<'_>) -> Result<(), NoSuchTask> {
        let (full, io) = self.full_mut()?;
        full.respond(io, task, completion)
    }

    /// Ends a task without an answer: a task management function, or the loss of another nexus, aborted it. What is left
    /// of a data segment that is being placed may still be told with `placed`, or is passed over by `receive`.
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

    /// Answers a logout. Where it ends this connection, [`Step::Close`] follows.
    pub fn logout_response(&mut self, tag: u32) -> Result<(), NoSuchTask> {
        let (full, io) = self.full_mut()?;
        full.logout_response(io, tag)
    }

    /// Requests a sign of life of the initiator, by a ping with this tag. `None`: too many are unanswered (or login is not over).
    pub fn ping(&mut self) -> Option<u32> {
        let (full, io) = self.full_mut().ok()?;
        full.ping(io)
    }

    /// Is a ping answered, and so the initiator has everything that was sent before it?
    pub fn is_answered(&self, ping: u32) -> bool {
        self.full().is_none_or(|full| !full.pings.contains(&ping))
    }

    /// Tells the initiator how far it may go on: for when commands have ended without an answer, which would say so.
    pub fn tell_window(&mut self) {
        if let Ok((full, io)) = self.full_mut() {
            full.tell_window(io);
        }
    }

    /// Pings without an answer.
    pub fn pings_outstanding(&self) -> usize {
        self.full().map_or(0, |full| full.pings.len())
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

    /// Another connection of the session has logged this one out (RFC 7143, 11.14, "close the connection"): its end is not the
    /// session's.
    pub fn is_logged_out(&mut self) {
        self.closing.get_or_insert(CloseReason::LoggedOut {
            whole_session: false,
        });
    }

    /// Does the session go on when the connection is lost now? Then every task in progress is to be left behind, before `close`.
    pub fn recovers(&self) -> bool {
        recovers_from(self.closing) && self.full().is_some_and(FullFeature::recovers)
    }

    /// The connection is lost, and the task with it: it waits for another connection. Gives its ITT; one that has not had its turn by
    /// CmdSN is none any more.
    pub fn leave_behind(&mut self, task: TaskId, left: Left<'_>) -> Result<u32, NoSuchTask> {
        let (full, _) = self.full_mut()?;
        full.leave_behind(task, left)
    }

    /// Has `data_in` to see the data? For digests, and to keep it for retransmission.
    pub fn sees_data(&self) -> bool {
        self.digests().data || self.full().is_some_and(|full| full.kept.is_some())
    }

    /// The target ends the session: what is lost with this connection is not recovered.
    pub fn is_dismissed(&mut self) {
        self.closing.get_or_insert(CloseReason::SessionGone);
    }

    /// The connection is over, for whatever reason: leaves the session. Tasks that the caller was told of are its to give
    /// up (see [`Connection::tasks`], before this). Must be called once the connection has logged in.
    pub fn close(&mut self) -> Closed {
        let Phase::Full(full) = &mut self.phase else {
            return Closed::default();
        };
        let (wake, leaving) = match self.closing {
            Some(CloseReason::LoggedOut {
                whole_session: false,
            }) => (full.leave(), Leaving::LoggedOut),
            closing if recovers_from(closing) && full.recovers() => {
                (full.leave_for_recovery(), Leaving::ForRecovery)
            }
            _ => (full.leave(), Leaving::Lost),
        };
        let drop = self.policy.detach(full.key, leaving);
        Closed {
            drop,
            wake: wake.to_vec(),
        }
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
                self.closing = Some(CloseReason::SessionGone);
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
                // the first PDU must be a Login Request (6.3)
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
                // a large ping must not keep its memory for ever
                if self.inline.capacity() > 64 * 1024 {
                    self.inline = Vec::new();
                }
            }
        }
        self.destination = Destination::Discard;
    }

    /// Asks the initiator to log out within so many seconds (11.9.1, event 1).
    pub fn request_logout(&mut self, seconds: u16) -> Result<(), NoSuchTask> {
        self.async_message(AsyncEvent::RequestLogout, [0; 8], [0, 0, seconds], &[])
    }

    /// Says that all connections of the session will be dropped (11.9.1, event 3), and when it may come back.
    pub fn announce_drop(&mut self) -> Result<(), NoSuchTask> {
        let wait = self
            .session()
            .map_or(0, |session| session.parameters.time_to_wait);
        self.async_message(AsyncEvent::DropSession, [0; 8], [0, wait, 0], &[])
    }

    /// The reason of the logout that is being answered, for logs.
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

/// Is a connection that closes for this reason one that was lost?
fn recovers_from(closing: Option<CloseReason>) -> bool {
    matches!(
        closing,
        None | Some(CloseReason::Format(_) | CloseReason::LimitExceeded(_))
    )
}

impl Drop for Connection {
    /// A turn that nobody would give up stops the whole session, even where `close` was forgotten.
    fn drop(&mut self) {
        if let Phase::Full(full) = &mut self.phase {
            full.leave();
        }
    }
}
