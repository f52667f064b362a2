//! One command from its plan to its response.
//!
//! ```text
//!   start -> Data | Scratch -> (I/O) -> resume -> ... -> Answer          the response is then in `response`
//!         -> NeedData -> (data-out copied) -> with_data -> ...
//!         -> Acquire -> (range granted) -> granted -> ...
//!                                     ... -> AnswerAndGoOn -> (answered) -> go_on -> ... -> Over
//! ```

use bdev::RangeLock;
use block::{IoFlags, IoKind, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use scsi::{
    AbortScope, DirectIo, DiskId, Pending, PlainEnd, Plan, Residual, Response, Run, Status, Step,
    UnitId,
};

/// What the transport has to do next.
#[derive(Debug)]
pub enum TaskStep {
    /// An I/O on the initiator's own buffer, from its start; then [`Task::resume`].
    Data(DiskId, IoRequest),
    /// An I/O on this memory; then [`Task::resume`] with it.
    Scratch(DiskId, IoRequest, Box<IoBuffer>),
    /// Copy so many bytes from the start of the data-out; then [`Task::with_data`].
    NeedData(usize),
    /// Acquire a range of a disk's gate: offset and length in bytes; then [`Task::granted`].
    Acquire(DiskId, u64, u64),
    /// The response is there.
    Answer,
    /// The response is there, and the task goes on without its initiator: [`Task::go_on`].
    AnswerAndGoOn,
    /// A task that was answered before has ended.
    Over,
}

/// A command under way.
///
/// What a plain READ or WRITE needs lies here, beside what its owner keeps of it: a line of the cache. What others need lies apart, so
/// that owners who keep many tasks keep them close together.
#[derive(Debug, Default)]
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
#[derive(Debug, Default)]
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
    reading: Option<std::ops::Range<usize>>,
}

impl Task {
    /// Begins with a plan, forgetting what was before.
    #[inline]
    pub fn start(&mut self, plan: Plan) -> TaskStep {
        match plan {
            Plan::Io(io) if !io.exclusive => {
                self.start_direct(io);
                TaskStep::Data(io.disk, io.request)
            }
            other => {
                self.forget();
                self.start_slowly(other)
            }
        }
    }

    /// Begins with a plan that is one I/O, which is not exclusive; its step is [`TaskStep::Data`].
    #[inline(always)]
    pub fn start_direct(&mut self, io: DirectIo) {
        self.forget();
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
    }

    #[inline(always)]
    fn forget(&mut self) {
        self.quick = Quick::No;
        (self.general.direct, self.general.plain) = (None, None);
        if self.general.response.is_some() || !matches!(self.general.doing, Doing::Nothing) {
            self.forget_the_rest();
        }
    }

    #[cold]
    fn forget_the_rest(&mut self) {
        self.general.response = None;
        self.general.doing = Doing::Nothing;
    }

    /// The I/O of a task that is one has succeeded: the short way of [`Task::resume`], whose step is
    /// [`TaskStep::Answer`]. False: it is another kind of task.
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

    fn start_slowly(&mut self, plan: Plan) -> TaskStep {
        let range = match &plan {
            Plan::Io(io) if io.exclusive => Some((io.disk, io.request.offset, io.request.length)),
            Plan::Run(run) => run.exclusive.map(|e| (e.disk, e.offset, e.length)),
            _ => None,
        };
        if let (Some((disk, offset, length)), None) = (range, &self.general.lease) {
            self.general.doing = Doing::Acquiring(Box::new(plan));
            return TaskStep::Acquire(disk, offset, length);
        }
        match plan {
            Plan::Io(io) => {
                self.general.direct = Some(io);
                TaskStep::Data(io.disk, io.request)
            }
            Plan::Done(response) => self.answer(response),
            Plan::NeedData(pending) => {
                let length = pending.length();
                self.general.doing = Doing::Waiting(pending);
                TaskStep::NeedData(length)
            }
            Plan::Run(run) => {
                let scratch = vec![0; run.scratch_length];
                let running = Running {
                    run,
                    scratch,
                    reading: None,
                };
                self.advance(Box::new(running), None)
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

    /// Goes on with the range that [`TaskStep::Acquire`] asked for; it is held until the task ends.
    pub fn granted(&mut self, lease: RangeLock) -> TaskStep {
        match std::mem::take(&mut self.general.doing) {
            Doing::Acquiring(plan) => {
                self.general.lease = Some(lease);
                let step = self.start_slowly(*plan);
                self.as_holder(step)
            }
            _ => self.answer(Response::aborted()),
        }
    }

    /// The holder's own I/Os pass the gate.
    fn as_holder(&self, step: TaskStep) -> TaskStep {
        if self.general.lease.is_none() {
            return step;
        }
        match step {
            TaskStep::Data(disk, io) => TaskStep::Data(disk, io.flagged(IoFlags::HOLDER)),
            TaskStep::Scratch(disk, io, buffer) => {
                TaskStep::Scratch(disk, io.flagged(IoFlags::HOLDER), buffer)
            }
            other => other,
        }
    }

    /// Goes on with the data-out that [`TaskStep::NeedData`] asked for.
    pub fn with_data(&mut self, data: Vec<u8>) -> TaskStep {
        match std::mem::take(&mut self.general.doing) {
            Doing::Waiting(pending) => self.start_slowly(pending.with_data(data)),
            _ => self.answer(Response::aborted()),
        }
    }

    /// Goes on after an I/O; `scratch` is the memory of a [`TaskStep::Scratch`].
    #[inline]
    pub fn resume(&mut self, outcome: IoOutcome, scratch: Option<IoBuffer>) -> TaskStep {
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
                let step = self.advance(running, Some(outcome));
                self.as_holder(step)
            }
            Doing::Nothing | Doing::Waiting(_) | Doing::Acquiring(_) => {
                self.answer(Response::aborted())
            }
        }
    }

    /// Goes on after [`TaskStep::AnswerAndGoOn`].
    pub fn go_on(&mut self) -> TaskStep {
        match std::mem::take(&mut self.general.doing) {
            Doing::Running(running) => {
                let step = self.advance(running, None);
                self.as_holder(step)
            }
            _ => TaskStep::Over,
        }
    }

    /// What has to be aborted, on all workers, before the response may leave (PREEMPT AND ABORT).
    pub fn take_abort(&mut self) -> Option<Box<AbortScope>> {
        self.general.response.as_mut()?.abort.take()
    }

    /// Does the task go on when its command is aborted or its initiator leaves (SANITIZE)?
    pub fn survives_abort(&self) -> bool {
        matches!(&self.general.doing, Doing::Running(running) if running.run.survives_abort)
    }

    /// Bytes of memory of its own that it works on.
    pub fn scratch_length(&self) -> usize {
        match &self.general.doing {
            Doing::Running(running) => running.scratch.len(),
            _ => 0,
        }
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

    /// Status and residual of a response that is nothing more: the short way of [`Task::take_response`].
    #[inline(always)]
    pub fn take_plain(&mut self) -> Option<(Status, Residual)> {
        self.general.plain.take()
    }

    #[inline]
    fn answer(&mut self, response: Response) -> TaskStep {
        if self.general.lease.is_some() {
            self.general.lease = None;
        }
        self.general.response = Some(response);
        TaskStep::Answer
    }

    fn advance(&mut self, mut running: Box<Running>, outcome: Option<IoOutcome>) -> TaskStep {
        match running.run.next(outcome, &mut running.scratch) {
            Step::Done(response) => self.answer(response),
            Step::End => TaskStep::Over,
            Step::Answer(response) => {
                self.general.doing = Doing::Running(running);
                self.general.response = Some(response);
                TaskStep::AnswerAndGoOn
            }
            Step::Io {
                disk,
                request,
                scratch,
            } => {
                let buffer = IoBuffer::owned(scratch.len());
                match (request.kind, running.scratch.get(scratch.clone())) {
                    (IoKind::Read, _) => running.reading = Some(scratch),
                    (IoKind::Write | IoKind::CompareAndWrite, Some(data)) => {
                        buffer.write_at(0, data);
                    }
                    _ => {}
                }
                self.general.doing = Doing::Running(running);
                TaskStep::Scratch(disk, request, Box::new(buffer))
            }
        }
    }
}
