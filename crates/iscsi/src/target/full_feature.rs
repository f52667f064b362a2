//! The full feature phase: sorting PDUs by kind, and their turns by CmdSN.
//!
//! A request with a CmdSN is acted on in its turn. In order, on one connection, that costs one compare-and-swap; what comes
//! early is parked here, bounded by the window and by [`Limits::parked_bytes`].

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;

use super::data_out::Rules;
use super::kept::Kept;
use super::outgoing::Outgoing;
use super::steps::{CloseReason, Logout, Step, Tags};
use super::tasks::{TaskId, TaskTable};
use super::text_exchange::TextExchange;
use crate::Limits;
use crate::login::{LoggedIn, TargetPolicy, Visitor};
use crate::negotiation::Responder;
use crate::pdu::{Bhs, Digests, NopOut, Opcode, RejectReason, TaskFunction};
use crate::serial::before;
use crate::session::{ConnectionKey, Session, Turn, Wake};

/// What a connection's parts write to.
#[derive(Debug)]
pub(super) struct Io {
    pub out: Outgoing,
    pub steps: VecDeque<Step>,
}

/// Where the data segment of the current PDU goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// Into the write data of a task, from this offset on.
    Place { task: TaskId, offset: u32 },
    /// Into the buffer for control PDUs.
    Inline,
    /// Nowhere.
    Discard,
}

/// What a header came to: what is to be done when the PDU is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Command(TaskId),
    DataOut(TaskId),
    Control,
    Reject(RejectReason),
    Ignore,
}

/// A request that waits for its turn.
#[derive(Debug)]
pub(super) enum Request {
    Command(TaskId),
    Control { bhs: Box<Bhs>, data: Box<[u8]> },
}

impl Request {
    fn is_immediate(&self) -> bool {
        matches!(self, Request::Control { bhs, .. } if bhs.is_immediate())
    }

    fn bytes(&self) -> usize {
        match self {
            Request::Command(_) => 0,
            Request::Control { data, .. } => size_of::<Bhs>() + data.len(),
        }
    }
}

#[derive(Debug)]
struct Parked {
    cmd_sn: u32,
    request: Request,
}

/// The state of a connection in the full feature phase.
pub(super) struct FullFeature {
    pub session: Arc<Session>,
    pub key: ConnectionKey,
    pub visitor: Visitor,
    pub policy: Arc<dyn TargetPolicy>,
    pub responder: Responder,
    pub rules: Rules,
    pub tasks: TaskTable,
    pub stat_sn: u32,
    pub next_ttt: u32,
    pub text: TextExchange,
    pub pings: Tags,
    pub functions: Tags,
    /// Logouts that are not answered yet.
    pub logouts: SmallVec<[Logout; 1]>,
    /// ITTs of the last tasks that were aborted, as many as there can be at a time: data for them may still come.
    pub aborted: VecDeque<u32>,
    pub immediate_commands: u32,
    pub limits: Limits,
    pub closing: Option<CloseReason>,
    /// From error recovery level 1 on: what may have to be sent again.
    pub kept: Option<Box<Kept>>,
    current: Verdict,
    holds_turn: bool,
    parked: VecDeque<Parked>,
    parked_bytes: usize,
}

impl std::fmt::Debug for FullFeature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FullFeature")
            .field("key", &self.key)
            .field("tasks", &self.tasks)
            .field("parked", &self.parked.len())
            .finish_non_exhaustive()
    }
}

impl FullFeature {
    pub fn new(
        logged_in: &LoggedIn,
        limits: &Limits,
        policy: Arc<dyn TargetPolicy>,
        random: u64,
    ) -> Self {
        let parameters = &logged_in.session.parameters;
        let rules = Rules {
            initial_r2t: parameters.initial_r2t,
            immediate_data: parameters.immediate_data,
            first_burst: parameters.first_burst_length,
            max_burst: parameters.max_burst_length,
            max_outstanding: u32::from(parameters.max_outstanding_r2t).min(limits.outstanding_r2t)
                as usize,
            pdu_in_order: parameters.data_pdu_in_order,
            sequence_in_order: parameters.data_sequence_in_order,
            gaps: limits.gaps_per_r2t,
            asks_again: parameters.error_recovery_level > 0,
        };
        let keeps = parameters.error_recovery_level > 0;
        // one more for a command whose number turns out to be taken
        let window = logged_in.session.window.size();
        let slots = window as usize + limits.immediate_commands as usize + 1;
        FullFeature {
            session: logged_in.session.clone(),
            key: logged_in.connection,
            visitor: logged_in.visitor.clone(),
            policy,
            responder: logged_in.responder.clone(),
            rules,
            tasks: TaskTable::new(slots, random | 1),
            stat_sn: logged_in.stat_sn,
            next_ttt: random as u32 >> 8,
            text: TextExchange::new(limits.text_bytes),
            pings: Tags::new(),
            functions: Tags::new(),
            logouts: SmallVec::new(),
            aborted: VecDeque::new(),
            immediate_commands: 0,
            limits: limits.clone(),
            closing: None,
            kept: keeps.then(Box::default),
            current: Verdict::Ignore,
            holds_turn: false,
            parked: VecDeque::new(),
            parked_bytes: 0,
        }
    }

    pub fn digests(&self) -> Digests {
        self.responder.connection.digests
    }

    /// Bytes that the initiator takes in one data segment.
    pub fn max_send(&self) -> usize {
        self.responder.connection.peer_max_recv as usize
    }

    pub fn take_closing(&mut self) -> Option<CloseReason> {
        self.closing.take()
    }

    /// A header has come: decides where its data segment goes.
    pub fn header(&mut self, io: &mut Io, bhs: &Bhs, ahs: &[u8], length: u32) -> Destination {
        if self.kept.is_some() {
            self.acknowledged(bhs);
        }
        let (current, destination) = match bhs.kind() {
            _ if self.is_leaving() => (Verdict::Ignore, Destination::Discard),
            Some(Opcode::ScsiCommand) => self.command_header(io, bhs, ahs, length),
            Some(Opcode::DataOut) => self.data_out_header(bhs, length),
            Some(
                Opcode::NopOut
                | Opcode::TaskManagementRequest
                | Opcode::TextRequest
                | Opcode::LogoutRequest
                | Opcode::SnackRequest,
            ) => (Verdict::Control, Destination::Inline),
            // a target's own PDU, or a second login (11.12)
            Some(_) => (
                Verdict::Reject(RejectReason::ProtocolError),
                Destination::Discard,
            ),
            None => (
                Verdict::Reject(RejectReason::CommandNotSupported),
                Destination::Discard,
            ),
        };
        self.current = current;
        match destination {
            Destination::Place { .. } if length == 0 => Destination::Discard,
            other => other,
        }
    }

    /// The PDU is over.
    pub fn end(&mut self, io: &mut Io, bhs: &Bhs, data: &[u8], digest_ok: bool) {
        match std::mem::replace(&mut self.current, Verdict::Ignore) {
            Verdict::Command(task) => self.command_end(io, bhs, task, digest_ok),
            Verdict::DataOut(task) => self.data_out_end(io, bhs, task, digest_ok),
            Verdict::Control if !digest_ok => {
                self.count_as_received(io, bhs);
                self.reject(io, bhs, RejectReason::DataDigestError);
            }
            Verdict::Control => self.control_end(io, bhs, data),
            Verdict::Reject(reason) => self.reject(io, bhs, reason),
            Verdict::Ignore => {}
        }
    }

    fn control_end(&mut self, io: &mut Io, bhs: &Bhs, data: &[u8]) {
        let kind = bhs.kind();
        if kind == Some(Opcode::SnackRequest) {
            return self.snack(io, bhs);
        }
        let cmd_sn = cmd_sn(bhs);
        if bhs.is_immediate() {
            // a task management function concerns the commands before it: those may be under way on other connections
            let early = before(self.session.window.next_turn(), cmd_sn);
            let waits = kind == Some(Opcode::TaskManagementRequest)
                && early
                && self.session.is_shared()
                && !is_reassign(bhs);
            if !waits {
                return self.control(io, bhs, data);
            }
            let waiting = self.parked.iter();
            let immediate = waiting.filter(|parked| parked.request.is_immediate());
            if immediate.count() >= self.limits.immediate_commands as usize {
                return self.reject(io, bhs, RejectReason::TooManyImmediateCommands);
            }
            return self.park(
                io,
                cmd_sn,
                Request::Control {
                    bhs: Box::new(*bhs),
                    data: data.into(),
                },
            );
        }
        match self.session.window.claim(cmd_sn) {
            Turn::Claimed => {
                self.holds_turn = true;
                self.session.window.finished();
                self.control(io, bhs, data);
            }
            Turn::Early => self.park(
                io,
                cmd_sn,
                Request::Control {
                    bhs: Box::new(*bhs),
                    data: data.into(),
                },
            ),
            Turn::Stale | Turn::Outside => {}
        }
    }

    /// The command PDU is over: takes its turn, or waits for it.
    pub fn take_turn(&mut self, io: &mut Io, task: TaskId, cmd_sn: u32) {
        match self.session.window.claim(cmd_sn) {
            Turn::Claimed => {
                self.holds_turn = true;
                self.deliver(io, task);
            }
            Turn::Early => self.park(io, cmd_sn, Request::Command(task)),
            Turn::Stale | Turn::Outside => self.forget_task(io, task),
        }
    }

    fn park(&mut self, io: &mut Io, cmd_sn: u32, request: Request) {
        let bytes = request.bytes();
        if self.parked_bytes + bytes > self.limits.parked_bytes {
            self.closing = Some(CloseReason::LimitExceeded(
                "requests that wait for their CmdSN",
            ));
            return;
        }
        if request.is_immediate() {
            self.session.window.listen(cmd_sn, self.key);
        } else if !self.session.window.park(cmd_sn, self.key) {
            // the number is taken: as if it had never come
            if let Request::Command(task) = request {
                self.forget_task(io, task);
            }
            return;
        }
        self.parked_bytes += bytes;
        let place = self
            .parked
            .partition_point(|other| before(other.cmd_sn, cmd_sn));
        self.parked.insert(place, Parked { cmd_sn, request });
        // the turn may have come between the look and the word: `end_turn` looks again before anything else happens
    }

    /// Gives up the turn held, and takes the next one if the request for it waits here.
    pub fn end_turn(&mut self, io: &mut Io) {
        self.release(io);
        while let Some(first) = self.parked.front() {
            let cmd_sn = first.cmd_sn;
            if first.request.is_immediate() {
                if before(self.session.window.next_turn(), cmd_sn) {
                    return;
                }
            } else {
                match self.session.window.claim(cmd_sn) {
                    Turn::Claimed => {
                        self.session.window.unpark(cmd_sn, self.key);
                        self.holds_turn = true;
                    }
                    Turn::Early => return,
                    Turn::Stale | Turn::Outside => self.session.window.unpark(cmd_sn, self.key),
                }
            }
            let Some(parked) = self.parked.pop_front() else {
                return;
            };
            self.run(io, parked);
            if !io.steps.is_empty() {
                return;
            }
            self.release(io);
        }
    }

    fn run(&mut self, io: &mut Io, parked: Parked) {
        self.parked_bytes -= parked.request.bytes();
        match parked.request {
            Request::Command(task) if self.holds_turn => self.deliver(io, task),
            Request::Command(task) => self.forget_task(io, task),
            Request::Control { bhs, data } => {
                if self.holds_turn {
                    self.session.window.finished();
                }
                if self.holds_turn || bhs.is_immediate() {
                    self.control(io, &bhs, &data);
                }
            }
        }
    }

    fn release(&mut self, io: &mut Io) {
        if std::mem::take(&mut self.holds_turn) {
            let wake = self.session.window.release();
            self.wake(io, wake);
        }
    }

    pub fn wake(&mut self, io: &mut Io, connections: Wake) {
        // what waits here is looked at by `end_turn` anyway
        let others = connections.into_iter().filter(|cid| *cid != self.key.cid);
        io.steps.extend(others.map(Step::Wake));
    }

    /// The connection goes: nobody may wait for a turn that it holds, or for a command that it will never begin, and the
    /// window gets its commands back. Gives who has to look at its parked requests again.
    pub fn leave(&mut self) -> Wake {
        let mut wake = Wake::new();
        if std::mem::take(&mut self.holds_turn) {
            wake.extend(self.session.window.release());
        }
        wake.extend(self.abandon_parked());
        let begun = self
            .tasks
            .iter()
            .filter(|(_, task)| task.delivered && !task.command.immediate)
            .count();
        for _ in 0..begun {
            self.session.window.finished();
        }
        self.tasks.clear();
        wake
    }

    /// As [`FullFeature::leave`] where the session goes on without the connection: its tasks wait for another one, and what has not
    /// had its turn comes again, so its numbers are not passed over.
    pub fn leave_for_recovery(&mut self) -> Wake {
        let mut wake = Wake::new();
        if std::mem::take(&mut self.holds_turn) {
            wake.extend(self.session.window.release());
        }
        self.session.window.forget(self.key);
        self.parked.clear();
        self.parked_bytes = 0;
        self.leave_all_behind();
        wake
    }

    /// What waits for its turn never takes it: its numbers are passed over. Gives who has to look again.
    pub fn abandon_parked(&mut self) -> Wake {
        let window = &self.session.window;
        window.forget(self.key);
        self.parked_bytes = 0;
        let mut wake = Wake::new();
        for parked in self.parked.drain(..) {
            if !parked.request.is_immediate() {
                wake.extend(window.skip(parked.cmd_sn));
            }
        }
        wake
    }

    /// A request that was refused still uses its number up; else every later one would wait for it.
    pub fn count_as_received(&mut self, io: &mut Io, bhs: &Bhs) {
        if !bhs.is_immediate() {
            self.skip(io, cmd_sn(bhs));
        }
    }

    /// As [`FullFeature::count_as_received`] for a command that never came.
    pub fn skip(&mut self, io: &mut Io, cmd_sn: u32) {
        let wake = self.session.window.skip(cmd_sn);
        self.wake(io, wake);
    }

    /// The parked command with this tag is taken back: it has not begun.
    pub fn unpark_task(&mut self, task: TaskId) -> bool {
        let place = self
            .parked
            .iter()
            .position(|parked| matches!(parked.request, Request::Command(id) if id == task));
        let Some(parked) = place.and_then(|place| self.parked.remove(place)) else {
            return false;
        };
        self.session.window.unpark(parked.cmd_sn, self.key);
        true
    }
}

/// It concerns one task, which has had its turn.
fn is_reassign(bhs: &Bhs) -> bool {
    bhs.flags & 0x7f == TaskFunction::TaskReassign.wire()
}

/// CmdSN is in the same place in every request that has one.
pub(super) fn cmd_sn(bhs: &Bhs) -> u32 {
    NopOut::from_bhs(bhs).cmd_sn.get()
}
