//! One command from its plan to its response. A task says what it needs next; [`execute`](crate::execute) does it.
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
    AbortScope, DirectIo, DiskId, Pending, PlainEnd, Plan, Residual, Response, Run, Status, Step,
    UnitId,
};

use crate::{Held, Hold, Ticket, WorkMemory};

/// What a task needs next.
#[derive(Debug, Default)]
pub(crate) enum Need {
    /// Nothing, or what it needs is under way.
    #[default]
    Nothing,
    /// An I/O on the initiator's own buffer, from its start; then [`Task::resume`].
    Data(DiskId, IoRequest),
    /// An I/O on memory for this part of the scratch memory: [`Task::scratch`]; then [`Task::resume`] with it.
    Scratch(DiskId, IoRequest, Range<usize>),
    /// A copy of so many bytes from the start of the data-out; then [`Task::with_data`].
    DataOut(usize),
    /// A lock on a range of a disk, offset and length in bytes; then [`Task::grant`].
    Range(DiskId, u64, u64),
    /// That its response is sent.
    Answer,
    /// That its response is sent, and it goes on without its initiator: [`Task::go_on`].
    AnswerAndGoOn,
    /// Nothing any more: it was answered before, and has ended.
    Over,
}

/// What a command waited for.
#[derive(Debug)]
pub enum Granted {
    /// Its start, among the tasks of its unit; the ticket is held until it has ended.
    Start(Option<Ticket>),
    /// The lock on its range.
    Range(RangeLock),
    /// The end of the tasks that it aborts.
    Aborted,
}

/// A command under way.
///
/// What a plain READ or WRITE needs lies here, beside what its owner keeps of it: a line of the cache. What others need lies apart, so
/// that owners who keep many tasks keep them close together.
#[derive(Default)]
#[repr(C)]
pub struct Task {
    /// It is a plain I/O, or none.
    quick: Quick,
    /// What answers the plain I/O; then the rest is not used.
    end: PlainEnd,
    general: Box<General>,
}

/// What a command may be that is no plain I/O. What other READs and WRITEs need is in fields without a destructor: nothing is
/// moved or dropped on their way.
#[derive(Default)]
struct General {
    /// What it may be doing, and how it may have ended, if it is nothing of what follows.
    doing: Doing,
    response: Option<Response>,
    /// The range that is held while the task runs.
    lease: Option<RangeLock>,
    /// It is one I/O.
    direct: Option<DirectIo>,
    /// It has ended, as nearly all do: no data, no sense.
    plain: Option<(Status, Residual)>,
    next: Need,
    claims: Claims,
}

/// What a command has besides its task, until it is answered.
#[derive(Default)]
struct Claims {
    /// Its place among the others, if it is not SIMPLE.
    ticket: Option<Ticket>,
    /// Who waits for its end.
    waits: Vec<Hold>,
    /// The tasks that it waits for, which it aborts; that does not mean itself.
    aborting: Option<Arc<AbortScope>>,
    /// What it holds of its client's memory.
    held: Held,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Quick {
    #[default]
    No,
    /// Its I/O is under way.
    Io,
    /// It is GOOD.
    Good,
    /// Its I/O is under way, and somebody looks at its end: it goes the general way.
    WatchedIo,
}

#[derive(Debug, Default)]
enum Doing {
    #[default]
    Nothing,
    /// Its range has not been granted yet.
    Acquiring(Box<Plan>),
    Waiting(Pending),
    Running(Box<Running>),
}

#[derive(Debug)]
struct Running {
    run: Box<Run>,
    scratch: Vec<u8>,
    /// Where the data of a read in flight goes.
    reading: Option<Range<usize>>,
}

impl Task {
    /// Begins with a plan, forgetting what was before.
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

    /// Begins with a plain I/O, where nothing is left of an earlier task: see [`Task::is_idle`].
    #[inline(always)]
    pub fn start_plain(&mut self, end: PlainEnd) {
        (self.quick, self.end) = (Quick::Io, end);
    }

    /// The I/O of a task that is a plain one has succeeded. False: it is another kind of task.
    #[inline(always)]
    #[must_use]
    pub fn end_plain(&mut self) -> bool {
        let plain = self.quick == Quick::Io;
        if plain {
            self.quick = Quick::Good;
        }
        plain
    }

    /// From now on the task goes the general way: [`Task::end_plain`] and [`Task::take_good`] say no.
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

    /// Takes the response, if it is a plain I/O's success: GOOD and nothing else.
    #[inline(always)]
    pub fn take_good(&mut self) -> bool {
        let good = self.quick == Quick::Good;
        if good {
            self.quick = Quick::No;
        }
        good
    }

    /// Is there no task, nor anything left of one?
    pub fn is_idle(&self) -> bool {
        self.quick == Quick::No
            && self.general.direct.is_none()
            && self.general.plain.is_none()
            && matches!(self.general.doing, Doing::Nothing)
            && self.general.response.is_none()
            && self.general.lease.is_none()
            && !self.is_ready()
    }

    /// Is there something that it needs, for [`execute`](crate::execute)?
    pub fn is_ready(&self) -> bool {
        !matches!(self.general.next, Need::Nothing)
    }

    /// The I/O on its initiator's own buffer that is next.
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

    /// What it needs is not there yet.
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

    /// The I/O of a task that is one has succeeded: the fast path of [`Task::resume`], after which
    /// it is to be answered. False: it is another kind of task.
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

    /// Bytes of data that should be there before its range is acquired: else whoever is to send them holds everybody else up
    /// who wants to write there.
    pub fn data_before_range(&self) -> usize {
        match &self.general.doing {
            Doing::Acquiring(plan) => match &**plan {
                Plan::Io(io) if io.request.kind == IoKind::Write => io.request.length as usize,
                _ => 0,
            },
            _ => 0,
        }
    }

    /// Goes on with what the command waited for. A range is held until the task ends.
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

    /// The holder's own I/Os pass the lock on its range.
    #[inline(always)]
    fn as_holder(&self, request: IoRequest) -> IoRequest {
        match self.general.lease {
            None => request,
            Some(_) => request.flagged(IoFlags::HOLDER),
        }
    }

    /// Goes on with the data-out that it needed.
    pub(crate) fn with_data(&mut self, data: Vec<u8>) {
        match std::mem::take(&mut self.general.doing) {
            Doing::Waiting(pending) => self.start_slowly(pending.with_data(data)),
            _ => self.answer(Response::aborted()),
        }
    }

    /// Goes on after an I/O; `scratch` is the memory that it worked on, if that was not the initiator's buffer.
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

    /// Goes on after it was answered, without its initiator.
    pub fn go_on(&mut self) {
        match std::mem::take(&mut self.general.doing) {
            Doing::Running(running) => self.advance(running, None),
            _ => self.general.next = Need::Over,
        }
    }

    /// Takes out what is under way, to go on elsewhere. What waits for the command's end, and what it holds, stays.
    pub fn detach(&mut self) -> Task {
        let mut detached = std::mem::take(self);
        std::mem::swap(&mut detached.general.claims, &mut self.general.claims);
        detached
    }

    /// Holds on to `hold` until the command has ended.
    pub fn hold(&mut self, hold: &Hold) {
        self.general.claims.waits.push(hold.clone());
    }

    /// Is this the scope of the tasks that it aborts itself?
    pub(crate) fn aborts(&self, scope: &Arc<AbortScope>) -> bool {
        let own = self.general.claims.aborting.as_ref();
        own.is_some_and(|own| Arc::ptr_eq(own, scope))
    }

    /// It waits until the tasks of this scope, which it aborts, have ended.
    pub(crate) fn set_aborting(&mut self, scope: &Arc<AbortScope>) {
        self.general.claims.aborting = Some(Arc::clone(scope));
    }

    /// The command has ended: gives back its memory, and takes its place among the others and who waits for its end.
    pub fn end(&mut self) -> (Option<Ticket>, Vec<Hold>) {
        let claims = &mut self.general.claims;
        claims.aborting = None;
        claims.held.give_back();
        (claims.ticket.take(), std::mem::take(&mut claims.waits))
    }

    /// Is there room for so much of its data?
    pub(crate) fn may_take_data(&mut self, memory: &Arc<WorkMemory>, length: usize) -> bool {
        // It came in memory that the transport counts, and is worked with in this.
        self.general.claims.held.extend(memory, length)
    }

    /// Is there room for what it works on, or has it begun to? What no abort ends is not refused. `data_in`: what its client has
    /// room for.
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

    /// Ends without having begun to work, for want of memory (SAM-5, 5.3.1); `expected`: bytes that were to move.
    #[cold]
    pub(crate) fn end_for_want_of_memory(&mut self, expected: u32) {
        self.abandon();
        self.answer(Response {
            residual: Residual::between(0, expected.into()),
            ..Response::status(Status::TaskSetFull)
        });
    }

    /// What has to be aborted, on all workers, before the response may leave (PREEMPT AND ABORT).
    pub(crate) fn take_abort(&mut self) -> Option<Box<AbortScope>> {
        self.general.response.as_mut()?.abort.take()
    }

    /// Does the task go on when its command is aborted or its initiator leaves (SANITIZE)?
    pub fn survives_abort(&self) -> bool {
        matches!(&self.general.doing, Doing::Running(running) if running.run.survives_abort)
    }

    /// Does it write to this unit, other than the one that its command was sent to?
    pub fn writes_to(&self, unit: UnitId) -> bool {
        matches!(&self.general.doing, Doing::Running(running) if running.run.writes_to(unit))
    }

    /// Ends the task where it is; an I/O in flight has to end before its memory may go.
    pub fn abandon(&mut self) {
        self.forget();
        self.general.lease = None;
    }

    /// The response, once a step has said that it is there.
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

    /// Status and residual of a response that is nothing more: the fast path of [`Task::take_response`].
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
            Step::Done(response) => self.answer(response),
            Step::End => self.general.next = Need::Over,
            Step::Answer(response) => {
                self.general.doing = Doing::Running(running);
                self.general.response = Some(response);
                self.general.next = Need::AnswerAndGoOn;
            }
            Step::Io {
                disk,
                request,
                scratch,
            } => {
                self.general.doing = Doing::Running(running);
                self.general.next = Need::Scratch(disk, self.as_holder(request), scratch);
            }
        }
    }

    /// Memory for an I/O on a part of the scratch memory, with what it writes.
    pub(crate) fn scratch(&mut self, kind: IoKind, part: Range<usize>) -> Box<IoBuffer> {
        let buffer = IoBuffer::owned(part.len());
        if let Doing::Running(running) = &mut self.general.doing {
            match (kind, running.scratch.get(part.clone())) {
                (IoKind::Read | IoKind::BlockStatus, _) => running.reading = Some(part),
                // Its answer and its data-in come back in the same memory.
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
