//! One command from its plan to its response. A task states its next need; [`execute`](crate::execute()) serves it.
//!
//! ```text
//!   start -> Data | Scratch -> (I/O) -> resume -> ... -> Answer          the response is then in `response`
//!         -> DataOut -> (data-out copied) -> with_data -> ...
//!         -> Range -> (range locked) -> grant -> ...
//!                                     ... -> AnswerAndGoOn -> (answered) -> go_on -> ... -> Over
//! ```

use std::ops::Range;
use std::sync::Arc;

use bdev::RangeLock;
use block::{IoFlags, IoKind, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use scsi::{
    AbortScope, DirectIo, DiskId, Pending, PlainEnd, Plan, PlanStep, Residual, Response, Run,
    Status, UnitId,
};

use crate::{Held, Hold, Ticket, WorkMemory};

/// Next need of a task.
#[derive(Debug, Default)]
pub(crate) enum Need {
    /// None, or it is being served.
    #[default]
    Nothing,
    /// An I/O on the initiator's own buffer, from its start; then [`Task::resume`].
    Data(DiskId, IoRequest),
    /// An I/O on a buffer for this part of the scratch memory: [`Task::scratch`]; then [`Task::resume`] with it.
    Scratch(DiskId, IoRequest, Range<usize>),
    /// A copy of the first bytes of data-out, length in bytes; then [`Task::with_data`].
    DataOut(usize),
    /// A lock on a range of a disk, offset and length in bytes; then [`Task::grant`].
    Range(DiskId, u64, u64),
    /// Transmission of the response.
    Answer,
    /// Transmission of the response; the task then runs without its initiator: [`Task::go_on`].
    AnswerAndDetach,
    /// The task was answered before, and has ended.
    Finished,
}

/// Event that a command waited for.
#[derive(Debug)]
pub enum Granted {
    /// Start among the tasks of its unit. The ticket is held until the task has ended.
    Start(Option<Ticket>),
    /// Lock on its range.
    Range(RangeLock),
    /// End of the tasks that it aborts.
    Aborted,
}

/// A command in progress.
///
/// The state of a plain READ or WRITE is inline, beside the owner's own state, in one cache line. The state of other commands is boxed, so
/// that owners of many tasks keep them close together.
#[derive(Default)]
#[repr(C)]
pub struct Task {
    /// Stage of a plain I/O, or `No`.
    quick: Quick,
    /// Response of the plain I/O. If it is used, `general` is not.
    end: PlainEnd,
    general: Box<General>,
}

/// State of commands outside the fast path. State of other READs and WRITEs is in fields without a destructor: nothing is moved or dropped
/// on their path.
#[derive(Default)]
struct General {
    /// State of a command that none of the following fields describes.
    doing: Doing,
    response: Option<Response>,
    /// Locked range, held while the task runs.
    lease: Option<RangeLock>,
    /// The task is one I/O.
    direct: Option<DirectIo>,
    /// The usual end of a direct I/O: no data, no sense.
    plain: Option<(Status, Residual)>,
    next: Need,
    claims: Claims,
}

/// Resources of a command beside its task, until it is answered.
#[derive(Default)]
struct Claims {
    /// Place among the other tasks, if it is not SIMPLE.
    ticket: Option<Ticket>,
    /// Holds of callers that wait for its end.
    waits: Vec<Hold>,
    /// Scope of the tasks that it aborts and waits for, without itself.
    aborting: Option<Arc<AbortScope>>,
    /// Memory that it holds of its client's budget.
    held: Held,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Quick {
    #[default]
    No,
    /// The I/O is in flight.
    Io,
    /// The I/O succeeded: status GOOD.
    Good,
    /// The I/O is in flight, and its end is handled by the general path.
    WatchedIo,
}

#[derive(Debug, Default)]
enum Doing {
    #[default]
    Nothing,
    /// The range has not been granted yet.
    Acquiring(Box<Plan>),
    Waiting(Pending),
    Running(Box<Running>),
}

#[derive(Debug)]
struct Running {
    run: Box<Run>,
    scratch: Vec<u8>,
    /// Destination of the read in flight, in scratch memory.
    reading: Option<Range<usize>>,
}

impl Task {
    /// Starts a plan and discards the state of an earlier task.
    #[inline]
    pub fn start(&mut self, plan: Plan) {
        self.forget();
        match plan {
            Plan::Io(io) if !io.exclusive => self.start_direct(io),
            other => self.start_slowly(other),
        }
    }

    #[inline(always)]
    fn start_direct(&mut self, io: DirectIo) {
        self.general.next = Need::Data(io.disk, self.as_holder(io.request));
        self.general.direct = Some(io);
    }

    /// Starts a plain I/O in a task that is idle: see [`Task::is_idle`].
    #[inline(always)]
    pub fn start_plain(&mut self, end: PlainEnd) {
        (self.quick, self.end) = (Quick::Io, end);
    }

    /// Marks the I/O of a plain task as successful. Returns false for another kind of task.
    #[inline(always)]
    #[must_use]
    pub fn end_plain(&mut self) -> bool {
        let plain = self.quick == Quick::Io;
        if plain {
            self.quick = Quick::Good;
        }
        plain
    }

    /// Selects the general path: [`Task::end_plain`] and [`Task::take_good`] return false from now on.
    pub fn watch(&mut self) {
        match self.quick {
            Quick::No | Quick::WatchedIo => {}
            Quick::Io => self.quick = Quick::WatchedIo,
            Quick::Good => {
                self.quick = Quick::No;
                self.general.response = Some(Response::good());
            }
        }
    }

    /// Takes the response of a successful plain I/O: GOOD, without anything more. Returns false if there is none.
    #[inline(always)]
    pub fn take_good(&mut self) -> bool {
        let good = self.quick == Quick::Good;
        if good {
            self.quick = Quick::No;
        }
        good
    }

    /// Returns true if there is no task and no state of an earlier one.
    pub fn is_idle(&self) -> bool {
        self.quick == Quick::No
            && self.general.direct.is_none()
            && self.general.plain.is_none()
            && matches!(self.general.doing, Doing::Nothing)
            && self.general.response.is_none()
            && self.general.lease.is_none()
            && !self.is_ready()
    }

    /// Returns true if the task has a need for [`execute`](crate::execute()).
    pub fn is_ready(&self) -> bool {
        !matches!(self.general.next, Need::Nothing)
    }

    /// Returns the next need if it is an I/O on the initiator's own buffer.
    #[inline]
    pub fn next_io(&self) -> Option<(DiskId, IoRequest)> {
        match self.general.next {
            Need::Data(disk, request) => Some((disk, request)),
            _ => None,
        }
    }

    #[inline]
    pub(crate) fn take_need(&mut self) -> Need {
        std::mem::take(&mut self.general.next)
    }

    pub(crate) fn keep_need(&mut self, need: Need) {
        self.general.next = need;
    }

    #[inline(always)]
    fn forget(&mut self) {
        self.quick = Quick::No;
        (self.general.direct, self.general.plain) = (None, None);
        let rest = self.general.response.is_some() || self.is_ready();
        if rest || !matches!(self.general.doing, Doing::Nothing) {
            self.forget_the_rest();
        }
    }

    #[cold]
    fn forget_the_rest(&mut self) {
        let General {
            response,
            doing,
            next,
            ..
        } = &mut *self.general;
        (*response, *doing, *next) = (None, Doing::Nothing, Need::Nothing);
    }

    /// Ends a task of one I/O after its success, so that it can be answered: the fast path of [`Task::resume`]. Returns false for another
    /// kind of task.
    #[inline(always)]
    #[must_use]
    pub fn end_direct(&mut self) -> bool {
        match &self.general.direct {
            Some(io) if self.general.lease.is_none() => {
                self.general.plain = Some((io.success(), io.residual));
                self.general.direct = None;
                true
            }
            _ => false,
        }
    }

    fn start_slowly(&mut self, plan: Plan) {
        let range = match &plan {
            Plan::Io(io) if io.exclusive => Some((io.disk, io.request.offset, io.request.length)),
            Plan::Run(run) => run.exclusive.map(|e| (e.disk, e.offset, e.length)),
            _ => None,
        };
        if let (Some((disk, offset, length)), None) = (range, &self.general.lease) {
            self.general.doing = Doing::Acquiring(Box::new(plan));
            self.general.next = Need::Range(disk, offset, length);
            return;
        }
        match plan {
            Plan::Io(io) => self.start_direct(io),
            Plan::Done(response) => self.answer(response),
            Plan::NeedData(pending) => {
                self.general.next = Need::DataOut(pending.length());
                self.general.doing = Doing::Waiting(pending);
            }
            Plan::Run(run) => {
                let scratch = vec![0; run.scratch_length];
                let running = Running {
                    run,
                    scratch,
                    reading: None,
                };
                self.advance(Box::new(running), None);
            }
        }
    }

    /// Returns the bytes of data-out that must arrive before the range is locked. Otherwise a slow initiator blocks all other writers to
    /// the range.
    pub fn data_before_range(&self) -> usize {
        match &self.general.doing {
            Doing::Acquiring(plan) => match &**plan {
                Plan::Io(io) if io.request.kind == IoKind::Write => io.request.length as usize,
                _ => 0,
            },
            _ => 0,
        }
    }

    /// Resumes the command after a wait. A range is held until the task ends.
    pub fn grant(&mut self, granted: Granted) {
        match granted {
            Granted::Start(ticket) => self.general.claims.ticket = ticket,
            Granted::Range(lease) => match std::mem::take(&mut self.general.doing) {
                Doing::Acquiring(plan) => {
                    self.general.lease = Some(lease);
                    self.start_slowly(*plan);
                }
                _ => self.answer(Response::aborted()),
            },
            Granted::Aborted => {
                self.general.claims.aborting = None;
                self.general.next = Need::Answer;
            }
        }
    }

    /// Marks an I/O of the lock holder, which passes the lock on its own range.
    #[inline(always)]
    fn as_holder(&self, request: IoRequest) -> IoRequest {
        match self.general.lease {
            None => request,
            Some(_) => request.flagged(IoFlags::HOLDER),
        }
    }

    /// Resumes the task with the data-out that it needed.
    pub(crate) fn with_data(&mut self, data: Vec<u8>) {
        match std::mem::take(&mut self.general.doing) {
            Doing::Waiting(pending) => self.start_slowly(pending.with_data(data)),
            _ => self.answer(Response::aborted()),
        }
    }

    /// Resumes the task after an I/O. `scratch`: buffer of the I/O, if it was not the initiator's.
    #[inline]
    pub fn resume(&mut self, outcome: IoOutcome, scratch: Option<IoBuffer>) {
        if matches!(
            std::mem::take(&mut self.quick),
            Quick::Io | Quick::WatchedIo
        ) {
            let response = self.end.finish(outcome);
            return self.answer(response);
        }
        if let Some(io) = self.general.direct.take() {
            return self.answer(io.finish(outcome));
        }
        match std::mem::take(&mut self.general.doing) {
            Doing::Running(mut running) => {
                if let (Some(range), Some(buffer)) = (running.reading.take(), scratch)
                    && let Some(into) = running.scratch.get_mut(range)
                    && outcome.is_ok()
                {
                    buffer.read_at(0, into);
                }
                self.advance(running, Some(outcome));
            }
            Doing::Nothing | Doing::Waiting(_) | Doing::Acquiring(_) => {
                self.answer(Response::aborted());
            }
        }
    }

    /// Continues a task without its initiator, after its response was sent.
    pub fn go_on(&mut self) {
        match std::mem::take(&mut self.general.doing) {
            Doing::Running(running) => self.advance(running, None),
            _ => self.general.next = Need::Finished,
        }
    }

    /// Detaches the running operation so that it can run elsewhere. Holds on the command's end, and its resources, stay.
    pub fn detach(&mut self) -> Task {
        let mut detached = std::mem::take(self);
        std::mem::swap(&mut detached.general.claims, &mut self.general.claims);
        detached
    }

    /// Keeps a clone of `hold` until the command has ended.
    pub fn hold(&mut self, hold: &Hold) {
        self.general.claims.waits.push(hold.clone());
    }

    /// Returns true if the task itself aborts this scope.
    pub(crate) fn aborts(&self, scope: &Arc<AbortScope>) -> bool {
        let own = self.general.claims.aborting.as_ref();
        own.is_some_and(|own| Arc::ptr_eq(own, scope))
    }

    /// Marks the task as waiting for the end of the tasks in this scope, which it aborts.
    pub(crate) fn set_aborting(&mut self, scope: &Arc<AbortScope>) {
        self.general.claims.aborting = Some(Arc::clone(scope));
    }

    /// Ends the command: frees its memory, and returns its place among the tasks and the holds on its end.
    pub fn end(&mut self) -> (Option<Ticket>, Vec<Hold>) {
        let claims = &mut self.general.claims;
        claims.aborting = None;
        claims.held.give_back();
        (claims.ticket.take(), std::mem::take(&mut claims.waits))
    }

    /// Reserves memory for `length` bytes of data-out. Returns false if there is none.
    pub(crate) fn may_take_data(&mut self, memory: &Arc<WorkMemory>, length: usize) -> bool {
        // Data-out arrives in memory that the transport counts; this counts the copy for processing.
        self.general.claims.held.extend(memory, length)
    }

    /// Returns true if there is memory for the task's scratch buffer, or it has been counted already. Tasks that survive an abort are never
    /// refused. `data_in`: size of the client's data-in buffer, in bytes.
    pub(crate) fn may_work(&mut self, memory: &Arc<WorkMemory>, data_in: u32) -> bool {
        let General { doing, claims, .. } = &mut *self.general;
        match doing {
            Doing::Running(running) if !running.run.survives_abort => {
                claims
                    .held
                    .take_for_work(memory, running.scratch.len(), data_in)
            }
            _ => true,
        }
    }

    /// Ends the task before its first I/O, for lack of memory (SAM-5, 5.3.1). `expected`: bytes to be transferred.
    #[cold]
    pub(crate) fn end_for_want_of_memory(&mut self, expected: u32) {
        self.abandon();
        self.answer(Response {
            residual: Residual::between(0, expected.into()),
            ..Response::status(Status::TaskSetFull)
        });
    }

    /// Takes the scope to abort, on all workers, before the response may be sent (PREEMPT AND ABORT).
    pub(crate) fn take_abort(&mut self) -> Option<Box<AbortScope>> {
        self.general.response.as_mut()?.abort.take()
    }

    /// Returns true if the task continues when its command is aborted or its initiator leaves (SANITIZE).
    pub fn survives_abort(&self) -> bool {
        matches!(&self.general.doing, Doing::Running(running) if running.run.survives_abort)
    }

    /// Returns true if the task writes to this unit and its command was sent to another.
    pub fn writes_to(&self, unit: UnitId) -> bool {
        matches!(&self.general.doing, Doing::Running(running) if running.run.writes_to(unit))
    }

    /// Ends the task in its current state. The memory of an I/O in flight must stay until the I/O has ended.
    pub fn abandon(&mut self) {
        self.forget();
        self.general.lease = None;
    }

    /// Takes the response, after a step has announced it.
    #[inline]
    pub fn take_response(&mut self) -> Response {
        if self.take_good() {
            return Response::good();
        }
        if let Some((status, residual)) = self.take_plain() {
            return Response {
                residual,
                ..Response::status(status)
            };
        }
        self.general
            .response
            .take()
            .unwrap_or_else(Response::aborted)
    }

    /// Takes status and residual of a response without data or sense: the fast path of [`Task::take_response`].
    #[inline(always)]
    pub fn take_plain(&mut self) -> Option<(Status, Residual)> {
        self.general.plain.take()
    }

    #[inline]
    fn answer(&mut self, response: Response) {
        if self.general.lease.is_some() {
            self.general.lease = None;
        }
        self.general.response = Some(response);
        self.general.next = Need::Answer;
    }

    fn advance(&mut self, mut running: Box<Running>, outcome: Option<IoOutcome>) {
        match running.run.next(outcome, &mut running.scratch) {
            PlanStep::Done(response) => self.answer(response),
            PlanStep::End => self.general.next = Need::Finished,
            PlanStep::Answer(response) => {
                self.general.doing = Doing::Running(running);
                self.general.response = Some(response);
                self.general.next = Need::AnswerAndDetach;
            }
            PlanStep::Io {
                disk,
                request,
                scratch,
            } => {
                self.general.doing = Doing::Running(running);
                self.general.next = Need::Scratch(disk, self.as_holder(request), scratch);
            }
        }
    }

    /// Returns a buffer for an I/O on a part of the scratch memory, filled if the I/O writes.
    pub(crate) fn scratch(&mut self, kind: IoKind, part: Range<usize>) -> Box<IoBuffer> {
        let buffer = IoBuffer::owned(part.len());
        if let Doing::Running(running) = &mut self.general.doing {
            match (kind, running.scratch.get(part.clone())) {
                (IoKind::Read | IoKind::BlockStatus, _) => running.reading = Some(part),
                // Response and data-in are returned in the same memory.
                (IoKind::ScsiCommand, Some(data)) => {
                    buffer.write_at(0, data);
                    running.reading = Some(part);
                }
                (IoKind::Write | IoKind::CompareAndWrite | IoKind::ReplaceState, Some(data)) => {
                    buffer.write_at(0, data)
                }
                _ => {}
            }
        }
        Box::new(buffer)
    }
}
