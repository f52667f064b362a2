//! The full feature phase: dispatches PDUs by opcode and orders them by CmdSN.
//!
//! A request with a CmdSN is executed in its turn. In-order requests on one connection cost one compare-and-swap. Early
//! requests are parked here, bounded by the window and by [`Limits::parked_bytes`].

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;

use super::data_out::Rules;
use super::outgoing::Outgoing;
use super::retransmission::RetransmissionBuffer;
use super::steps::{CloseReason, Logout, Step, Tags};
use super::tasks::{TaskId, TaskTable};
use super::text_exchange::TextExchange;
use crate::Limits;
use crate::login::{LoggedIn, TargetPolicy, Visitor};
use crate::negotiation::Responder;
use crate::pdu::{Bhs, Digests, NopOut, Opcode, RejectReason, TaskFunction};
use crate::serial::before;
use crate::session::{ConnectionKey, Session, Turn, Wake};

/// Output of a connection: PDUs and steps.
#[derive(Debug)]
pub(super) struct Io {
    pub out: Outgoing,
    pub steps: VecDeque<Step>,
}

/// Destination of the data segment of the current PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// The write data of a task, from this offset on.
    TaskBuffer { task: TaskId, offset: u32 },
    /// The buffer for control PDUs.
    Inline,
    /// The data is discarded.
    Discard,
}

/// Result of a header: the action at the end of the PDU.
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

/// State of a connection in the full feature phase.
pub(super) struct FullFeature {
    pub session: Arc<Session>,
    pub key: ConnectionKey,
    pub peer: Peer,
    pub responder: Responder,
    pub rules: Rules,
    pub tasks: TaskTable,
    pub numbers: Numbers,
    pub text: TextExchange,
    pub unanswered: Unanswered,
    pub immediate_commands: u32,
    pub limits: Limits,
    pub closing: Option<CloseReason>,
    /// Retransmission store, at error recovery level 1 and above.
    pub retransmission: Option<Box<RetransmissionBuffer>>,
    current: Verdict,
    parking: Parking,
}

/// The initiator, and the policy that decides about its requests.
pub(super) struct Peer {
    pub visitor: Visitor,
    pub policy: Arc<dyn TargetPolicy>,
}

/// Numbers of the next response and the next transfer.
pub(super) struct Numbers {
    pub stat_sn: u32,
    pub next_ttt: u32,
}

/// Requests other than commands without a response.
#[derive(Default)]
pub(super) struct Unanswered {
    /// Pings of the target, without an answer of the initiator.
    pub pings: Tags,
    /// Task management functions.
    pub functions: Tags,
    pub logouts: SmallVec<[Logout; 1]>,
}

/// Requests that wait for their turn, by CmdSN.
#[derive(Default)]
struct Parking {
    requests: VecDeque<Parked>,
    /// Memory of the requests.
    bytes: usize,
    /// This connection executes the next request of the session in the order of CmdSN. The other connections wait.
    holds_turn: bool,
}

impl std::fmt::Debug for FullFeature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FullFeature")
            .field("key", &self.key)
            .field("tasks", &self.tasks)
            .field("parked", &self.parking.requests.len())
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
            requests_again: parameters.error_recovery_level > 0,
        };
        let stores_responses = parameters.error_recovery_level > 0;
        // One extra slot for a command with a used CmdSN.
        let window = logged_in.session.window.size();
        let slots = window as usize + limits.immediate_commands as usize + 1;
        FullFeature {
            session: logged_in.session.clone(),
            key: logged_in.connection,
            peer: Peer {
                visitor: logged_in.visitor.clone(),
                policy,
            },
            responder: logged_in.responder.clone(),
            rules,
            tasks: TaskTable::new(slots, random | 1),
            numbers: Numbers {
                stat_sn: logged_in.stat_sn,
                next_ttt: random as u32 >> 8,
            },
            text: TextExchange::new(limits.text_bytes),
            unanswered: Unanswered::default(),
            immediate_commands: 0,
            limits: limits.clone(),
            closing: None,
            retransmission: stores_responses.then(Box::default),
            current: Verdict::Ignore,
            parking: Parking::default(),
        }
    }

    pub fn digests(&self) -> Digests {
        self.responder.connection.digests
    }

    /// Returns the initiator's MaxRecvDataSegmentLength in bytes.
    pub fn max_send(&self) -> usize {
        self.responder.connection.peer_max_recv as usize
    }

    pub fn take_closing(&mut self) -> Option<CloseReason> {
        self.closing.take()
    }

    /// Processes a header and returns the destination of its data segment.
    pub fn header(&mut self, io: &mut Io, bhs: &Bhs, ahs: &[u8], length: u32) -> Destination {
        if self.retransmission.is_some() {
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
            // A target opcode, or a second login (11.12).
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
            Destination::TaskBuffer { .. } if length == 0 => Destination::Discard,
            other => other,
        }
    }

    /// Ends the current PDU.
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
            // A task management function applies to earlier commands, which may still be in transit on other connections.
            let early = before(self.session.window.next_turn(), cmd_sn);
            let waits = kind == Some(Opcode::TaskManagementRequest)
                && early
                && self.session.is_shared()
                && !is_reassign(bhs);
            if !waits {
                return self.control(io, bhs, data);
            }
            let waiting = self.parking.requests.iter();
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
                self.parking.holds_turn = true;
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

    /// Ends a command PDU: takes its turn, or parks it.
    pub fn take_turn(&mut self, io: &mut Io, task: TaskId, cmd_sn: u32) {
        match self.session.window.claim(cmd_sn) {
            Turn::Claimed => {
                self.parking.holds_turn = true;
                self.deliver(io, task);
            }
            Turn::Early => self.park(io, cmd_sn, Request::Command(task)),
            Turn::Stale | Turn::Outside => self.forget_task(io, task),
        }
    }

    fn park(&mut self, io: &mut Io, cmd_sn: u32, request: Request) {
        let bytes = request.bytes();
        if self.parking.bytes + bytes > self.limits.parked_bytes {
            self.closing = Some(CloseReason::LimitExceeded(
                "requests that wait for their CmdSN",
            ));
            return;
        }
        if request.is_immediate() {
            self.session.window.listen(cmd_sn, self.key);
        } else if !self.session.window.park(cmd_sn, self.key) {
            // The CmdSN is already used; the command is dropped.
            if let Request::Command(task) = request {
                self.forget_task(io, task);
            }
            return;
        }
        self.parking.bytes += bytes;
        let place = self
            .parking
            .requests
            .partition_point(|other| before(other.cmd_sn, cmd_sn));
        self.parking
            .requests
            .insert(place, Parked { cmd_sn, request });
        // The turn may have arrived between the check and the registration. `end_turn` checks again before any other
        // action.
    }

    /// Releases the turn, and takes the next one if its request is parked here.
    pub fn end_turn(&mut self, io: &mut Io) {
        self.release(io);
        while let Some(first) = self.parking.requests.front() {
            let cmd_sn = first.cmd_sn;
            if first.request.is_immediate() {
                if before(self.session.window.next_turn(), cmd_sn) {
                    return;
                }
            } else {
                match self.session.window.claim(cmd_sn) {
                    Turn::Claimed => {
                        self.session.window.unpark(cmd_sn, self.key);
                        self.parking.holds_turn = true;
                    }
                    Turn::Early => return,
                    Turn::Stale | Turn::Outside => self.session.window.unpark(cmd_sn, self.key),
                }
            }
            let Some(parked) = self.parking.requests.pop_front() else {
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
        self.parking.bytes -= parked.request.bytes();
        match parked.request {
            Request::Command(task) if self.parking.holds_turn => self.deliver(io, task),
            Request::Command(task) => self.forget_task(io, task),
            Request::Control { bhs, data } => {
                if self.parking.holds_turn {
                    self.session.window.finished();
                }
                if self.parking.holds_turn || bhs.is_immediate() {
                    self.control(io, &bhs, &data);
                }
            }
        }
    }

    fn release(&mut self, io: &mut Io) {
        if std::mem::take(&mut self.parking.holds_turn) {
            let wake = self.session.window.release();
            self.wake(io, wake);
        }
    }

    pub fn wake(&mut self, io: &mut Io, connections: Wake) {
        // Requests parked here are checked by `end_turn`.
        let others = connections.into_iter().filter(|cid| *cid != self.key.cid);
        io.steps.extend(others.map(Step::Wake));
    }

    /// Leaves the session: releases a held turn, skips commands that will never be delivered, and returns their window
    /// slots. Returns the connections that must check their parked requests.
    pub fn leave_session(&mut self) -> Wake {
        let mut wake = Wake::new();
        if std::mem::take(&mut self.parking.holds_turn) {
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

    /// As [`FullFeature::leave_session`] for a session that survives the connection: delivered tasks wait for reassignment. The
    /// initiator sends undelivered commands again, so their numbers are not skipped.
    pub fn leave_session_for_recovery(&mut self) -> Wake {
        let mut wake = Wake::new();
        if std::mem::take(&mut self.parking.holds_turn) {
            wake.extend(self.session.window.release());
        }
        self.session.window.forget(self.key);
        self.parking.requests.clear();
        self.parking.bytes = 0;
        self.detach_all_tasks();
        wake
    }

    /// Drops the parked requests and skips their numbers. Returns the connections that must check their parked requests.
    pub fn abandon_parked(&mut self) -> Wake {
        let window = &self.session.window;
        window.forget(self.key);
        self.parking.bytes = 0;
        let mut wake = Wake::new();
        for parked in self.parking.requests.drain(..) {
            if !parked.request.is_immediate() {
                wake.extend(window.skip(parked.cmd_sn));
            }
        }
        wake
    }

    /// Consumes the CmdSN of a refused request; otherwise all later requests would wait for it.
    pub fn count_as_received(&mut self, io: &mut Io, bhs: &Bhs) {
        if !bhs.is_immediate() {
            self.skip(io, cmd_sn(bhs));
        }
    }

    /// As [`FullFeature::count_as_received`], for a command that was never received.
    pub fn skip(&mut self, io: &mut Io, cmd_sn: u32) {
        let wake = self.session.window.skip(cmd_sn);
        self.wake(io, wake);
    }

    /// Removes a parked command. Returns true if it was parked.
    pub fn unpark_task(&mut self, task: TaskId) -> bool {
        let place = self
            .parking
            .requests
            .iter()
            .position(|parked| matches!(parked.request, Request::Command(id) if id == task));
        let Some(parked) = place.and_then(|place| self.parking.requests.remove(place)) else {
            return false;
        };
        self.session.window.unpark(parked.cmd_sn, self.key);
        true
    }
}

/// Returns true for TASK REASSIGN, which concerns one delivered task.
fn is_reassign(bhs: &Bhs) -> bool {
    bhs.flags & 0x7f == TaskFunction::TaskReassign.wire()
}

/// CmdSN has the same offset in all requests that have one.
pub(super) fn cmd_sn(bhs: &Bhs) -> u32 {
    NopOut::from_bhs(bhs).cmd_sn.get()
}
