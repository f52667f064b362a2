//! One command from its plan to its response. A task states its next need; [`execute`](crate::execute()) serves it.
//!
//! Each state of a command is one variant of [`Stage`], which owns the data of that state:
//!
//! ```text
//!   Idle -> start -> Direct -> (I/O) -> resume ------------> Answer | Good -> take_response -> Idle
//!                 -> Locking -> grant -> Direct | Run
//!                 -> DataOut -> with_data -> any of these
//!                 -> Run -> (I/O) -> resume -> Run -> ... -> Answer
//!                                                        -> Run (answered) -> continue_detached -> Run -> ... -> Finished
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
#[derive(Debug)]
pub(crate) enum Need {
    /// None, or it is being served.
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
    /// Transmission of the response; the task then runs without its initiator: [`Task::continue_detached`].
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
/// Transports box it in the slots of their commands and use it again for the next command, so that slots are small and a command of one I/O
/// allocates nothing.
#[derive(Default)]
pub struct Task {
    stage: Stage,
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

/// Stage of a command.
#[derive(Default)]
enum Stage {
    /// No command.
    #[default]
    Idle,
    /// Before the lock of the plan's range. `requested`: the lock was requested.
    Locking { plan: Box<Plan>, requested: bool },
    /// Before the arrival of data-out that the core needs.
    DataOut(Pending),
    /// One I/O on the initiator's buffer. `submitted`: it was taken for submission. A locked range is held until the I/O has ended.
    Direct {
        io: DirectIo,
        submitted: bool,
        lock: Option<RangeLock>,
    },
    /// A plain I/O that the fast path of the transport has submitted.
    Plain(PlainEnd),
    /// Several I/Os on scratch memory.
    Run(Box<Running>),
    /// End of a direct I/O without data or sense.
    Good(Status, Residual),
    /// Complete response. `announced`: the transport was asked to send it.
    Answer { response: Response, announced: bool },
    /// The task was answered before, and has ended.
    Finished,
}

/// A program of several I/Os.
struct Running {
    run: Box<Run>,
    scratch: Vec<u8>,
    /// Locked range, held while the program runs.
    lock: Option<RangeLock>,
    stage: RunStage,
}

/// Stage of a program.
enum RunStage {
    /// Before this I/O on a part of the scratch memory.
    Next(DiskId, IoRequest, Range<usize>),
    /// I/O in flight. A read has its destination in scratch memory.
    InFlight(Option<Range<usize>>),
    /// Before the transmission of this response; the program continues afterwards.
    Answer(Response),
    /// The response is being sent.
    Answered(Response),
    /// Between two steps, without a need.
    Between,
}

impl Stage {
    #[inline(always)]
    fn answer(response: Response) -> Stage {
        Stage::Answer {
            response,
            announced: false,
        }
    }
}

/// Returns the disk, the offset and the length of the range that a plan must lock.
fn range_to_lock(plan: &Plan) -> Option<(DiskId, u64, u64)> {
    match plan {
        Plan::Io(io) if io.exclusive => Some((io.disk, io.request.offset, io.request.length)),
        Plan::Run(run) => run.exclusive.map(|e| (e.disk, e.offset, e.length)),
        _ => None,
    }
}

/// Marks an I/O of the lock holder, which passes the lock on its own range.
#[inline(always)]
fn as_holder(lock: Option<&RangeLock>, request: IoRequest) -> IoRequest {
    match lock {
        None => request,
        Some(_) => request.flagged(IoFlags::HOLDER),
    }
}

impl Task {
    /// Starts a plan and discards the state of an earlier task.
    #[inline]
    pub fn start(&mut self, plan: Plan) {
        match plan {
            Plan::Io(io) if !io.exclusive => self.start_direct(io, None),
            other => self.start_slowly(other, None),
        }
    }

    #[inline(always)]
    fn start_direct(&mut self, mut io: DirectIo, lock: Option<RangeLock>) {
        io.request = as_holder(lock.as_ref(), io.request);
        self.stage = Stage::Direct {
            io,
            submitted: false,
            lock,
        };
    }

    /// Takes over a plain I/O in flight from the fast path of the transport.
    pub fn take_over_plain(&mut self, end: PlainEnd) {
        self.stage = Stage::Plain(end);
    }

    /// Takes over the response of a successful plain I/O, which is about to be sent.
    pub fn take_over_good(&mut self) {
        self.stage = Stage::Answer {
            response: Response::good(),
            announced: true,
        };
    }

    /// Returns true if there is no task and no state of an earlier one.
    pub fn is_idle(&self) -> bool {
        matches!(self.stage, Stage::Idle)
    }

    /// Returns true if the task has a need for [`execute`](crate::execute()).
    #[inline]
    pub fn is_ready(&self) -> bool {
        match &self.stage {
            Stage::Direct { submitted, .. } => !submitted,
            Stage::Answer { announced, .. } => !announced,
            Stage::Locking { requested, .. } => !requested,
            Stage::Run(running) => {
                matches!(running.stage, RunStage::Next(..) | RunStage::Answer(_))
            }
            Stage::DataOut(_) | Stage::Finished => true,
            Stage::Idle | Stage::Plain(_) | Stage::Good(..) => false,
        }
    }

    /// Returns the next need if it is an I/O on the initiator's own buffer.
    #[inline]
    pub fn next_io(&self) -> Option<(DiskId, IoRequest)> {
        match &self.stage {
            Stage::Direct {
                io,
                submitted: false,
                ..
            } => Some((io.disk, io.request)),
            _ => None,
        }
    }

    /// Returns the next need, and marks it as being served.
    #[inline]
    pub(crate) fn take_need(&mut self) -> Need {
        match &mut self.stage {
            Stage::Direct { io, submitted, .. } if !*submitted => {
                *submitted = true;
                Need::Data(io.disk, io.request)
            }
            Stage::Answer { announced, .. } if !*announced => {
                *announced = true;
                Need::Answer
            }
            _ => self.take_rare_need(),
        }
    }

    #[inline(never)]
    fn take_rare_need(&mut self) -> Need {
        match &mut self.stage {
            Stage::Locking { plan, requested } if !*requested => match range_to_lock(plan) {
                Some((disk, offset, length)) => {
                    *requested = true;
                    Need::Range(disk, offset, length)
                }
                None => Need::Nothing,
            },
            Stage::DataOut(pending) => Need::DataOut(pending.length()),
            Stage::Run(running) => running.take_need(),
            Stage::Finished => {
                self.stage = Stage::Idle;
                Need::Finished
            }
            _ => Need::Nothing,
        }
    }

    /// Returns a need that cannot be served now: [`Task::take_need`] returns it again.
    pub(crate) fn return_need(&mut self, need: Need) {
        match (&mut self.stage, need) {
            (Stage::Direct { submitted, .. }, Need::Data(..)) => *submitted = false,
            (Stage::Locking { requested, .. }, Need::Range(..)) => *requested = false,
            (Stage::Run(running), Need::Scratch(disk, request, part)) => {
                running.stage = RunStage::Next(disk, request, part);
            }
            // Data-out is needed until it is passed to the core. The transport waits for nothing else.
            _ => {}
        }
    }

    /// Ends a task of one I/O after its success, so that it can be answered: the fast path of [`Task::resume`]. Returns false for another
    /// kind of task.
    #[inline(always)]
    #[must_use]
    pub fn end_direct(&mut self) -> bool {
        let Stage::Direct { io, lock: None, .. } = &self.stage else {
            return false;
        };
        self.stage = Stage::Good(io.success(), io.residual);
        true
    }

    /// Starts a plan, under the lock of its range if it needs one.
    fn start_slowly(&mut self, plan: Plan, lock: Option<RangeLock>) {
        if lock.is_none() && range_to_lock(&plan).is_some() {
            self.stage = Stage::Locking {
                plan: Box::new(plan),
                requested: false,
            };
            return;
        }
        match plan {
            Plan::Io(io) => self.start_direct(io, lock),
            Plan::Done(response) => self.stage = Stage::answer(response),
            Plan::NeedData(pending) => self.stage = Stage::DataOut(pending),
            Plan::Run(run) => {
                let scratch = vec![0; run.scratch_length];
                let running = Running {
                    run,
                    scratch,
                    lock,
                    stage: RunStage::Between,
                };
                self.advance(Box::new(running), None);
            }
        }
    }

    /// Returns the bytes of data-out that must arrive before the range is locked. Otherwise a slow initiator blocks all other writers to
    /// the range.
    pub fn data_before_range(&self) -> usize {
        match &self.stage {
            Stage::Locking { plan, .. } => match &**plan {
                Plan::Io(io) if io.request.kind == IoKind::Write => io.request.length as usize,
                _ => 0,
            },
            _ => 0,
        }
    }

    /// Resumes the command after a wait. A range is held until the task ends.
    pub fn grant(&mut self, granted: Granted) {
        match (granted, &mut self.stage) {
            (Granted::Start(ticket), _) => self.claims.ticket = ticket,
            (Granted::Range(lock), _) => match std::mem::take(&mut self.stage) {
                Stage::Locking { plan, .. } => self.start_slowly(*plan, Some(lock)),
                _ => self.stage = Stage::answer(Response::aborted()),
            },
            (Granted::Aborted, stage) => {
                self.claims.aborting = None;
                match stage {
                    Stage::Answer { announced, .. } => *announced = false,
                    _ => self.stage = Stage::answer(Response::aborted()),
                }
            }
        }
    }

    /// Resumes the task with the data-out that it needed.
    pub(crate) fn with_data(&mut self, data: Vec<u8>) {
        match std::mem::take(&mut self.stage) {
            Stage::DataOut(pending) => self.start_slowly(pending.with_data(data), None),
            _ => self.stage = Stage::answer(Response::aborted()),
        }
    }

    /// Resumes the task after an I/O. `scratch`: buffer of the I/O, if it was not the initiator's.
    #[inline]
    pub fn resume(&mut self, outcome: IoOutcome, scratch: Option<IoBuffer>) {
        match &self.stage {
            // A locked range is released here.
            Stage::Direct { io, .. } => self.stage = Stage::answer(io.finish(outcome)),
            _ => self.resume_slowly(outcome, scratch),
        }
    }

    #[inline(never)]
    fn resume_slowly(&mut self, outcome: IoOutcome, scratch: Option<IoBuffer>) {
        match std::mem::take(&mut self.stage) {
            Stage::Plain(end) => self.stage = Stage::answer(end.finish(outcome)),
            Stage::Run(mut running) => {
                if let (RunStage::InFlight(Some(range)), Some(buffer)) = (&running.stage, scratch)
                    && let Some(into) = running.scratch.get_mut(range.clone())
                    && outcome.is_ok()
                {
                    buffer.read_at(0, into);
                }
                self.advance(running, Some(outcome));
            }
            _ => self.stage = Stage::answer(Response::aborted()),
        }
    }

    /// Continues a task without its initiator, after its response was sent.
    pub fn continue_detached(&mut self) {
        match std::mem::take(&mut self.stage) {
            Stage::Run(running) => self.advance(running, None),
            _ => self.stage = Stage::Finished,
        }
    }

    /// Detaches the running operation so that it can run elsewhere. Holds on the command's end, and its resources, stay.
    pub fn detach(&mut self) -> Task {
        Task {
            stage: std::mem::take(&mut self.stage),
            claims: Claims::default(),
        }
    }

    /// Keeps a clone of `hold` until the command has ended.
    pub fn hold(&mut self, hold: &Hold) {
        self.claims.waits.push(hold.clone());
    }

    /// Returns true if the task itself aborts this scope.
    pub(crate) fn aborts(&self, scope: &Arc<AbortScope>) -> bool {
        let own = self.claims.aborting.as_ref();
        own.is_some_and(|own| Arc::ptr_eq(own, scope))
    }

    /// Marks the task as waiting for the end of the tasks in this scope, which it aborts.
    pub(crate) fn set_aborting(&mut self, scope: &Arc<AbortScope>) {
        self.claims.aborting = Some(Arc::clone(scope));
    }

    /// Ends the command: frees its memory, and returns its place among the tasks and the holds on its end.
    pub fn end(&mut self) -> (Option<Ticket>, Vec<Hold>) {
        let claims = &mut self.claims;
        claims.aborting = None;
        claims.held.release();
        (claims.ticket.take(), std::mem::take(&mut claims.waits))
    }

    /// Reserves memory for `length` bytes of data-out. Returns false if there is none.
    pub(crate) fn may_take_data(&mut self, memory: &Arc<WorkMemory>, length: usize) -> bool {
        // Data-out arrives in memory that the transport counts; this counts the copy for processing.
        self.claims.held.extend(memory, length)
    }

    /// Returns true if there is memory for the task's scratch buffer, or it has been counted already. Tasks that survive an abort are never
    /// refused. `data_in`: size of the client's data-in buffer, in bytes.
    pub(crate) fn may_work(&mut self, memory: &Arc<WorkMemory>, data_in: u32) -> bool {
        match &self.stage {
            Stage::Run(running) if !running.run.survives_abort => {
                let scratch = running.scratch.len();
                self.claims.held.take_for_work(memory, scratch, data_in)
            }
            _ => true,
        }
    }

    /// Ends the task before its first I/O, for lack of memory (SAM-5, 5.3.1). `expected`: bytes to be transferred.
    #[cold]
    pub(crate) fn end_without_memory(&mut self, expected: u32) {
        self.stage = Stage::answer(Response {
            residual: Residual::between(0, expected.into()),
            ..Response::status(Status::TaskSetFull)
        });
    }

    /// Takes the scope to abort, on all workers, before the response may be sent (PREEMPT AND ABORT).
    pub(crate) fn take_abort(&mut self) -> Option<Box<AbortScope>> {
        match &mut self.stage {
            Stage::Answer { response, .. } => response.abort.take(),
            _ => None,
        }
    }

    fn running(&self) -> Option<&Run> {
        match &self.stage {
            Stage::Run(running) => Some(&running.run),
            _ => None,
        }
    }

    /// Returns true if the task continues when its command is aborted or its initiator leaves (SANITIZE).
    pub fn survives_abort(&self) -> bool {
        self.running().is_some_and(|run| run.survives_abort)
    }

    /// Returns true if the task writes to this unit and its command was sent to another.
    pub fn writes_to(&self, unit: UnitId) -> bool {
        self.running().is_some_and(|run| run.writes_to(unit))
    }

    /// Ends the task in its current state. The memory of an I/O in flight must stay until the I/O has ended.
    #[inline]
    pub fn abandon(&mut self) {
        self.stage = Stage::Idle;
    }

    /// Takes the response, after a step has announced it.
    #[inline]
    pub fn take_response(&mut self) -> Response {
        match &mut self.stage {
            Stage::Run(running) => running.take_response(),
            _ => match std::mem::take(&mut self.stage) {
                Stage::Answer { response, .. } => response,
                Stage::Good(status, residual) => Response {
                    residual,
                    ..Response::status(status)
                },
                _ => Response::aborted(),
            },
        }
    }

    /// Takes status and residual of a response without data or sense: the fast path of [`Task::take_response`].
    #[inline(always)]
    pub fn take_plain(&mut self) -> Option<(Status, Residual)> {
        let Stage::Good(status, residual) = self.stage else {
            return None;
        };
        self.stage = Stage::Idle;
        Some((status, residual))
    }

    fn advance(&mut self, mut running: Box<Running>, outcome: Option<IoOutcome>) {
        self.stage = match running.run.next(outcome, &mut running.scratch) {
            PlanStep::Done(response) => Stage::answer(response),
            PlanStep::End => Stage::Finished,
            PlanStep::Answer(response) => {
                running.stage = RunStage::Answer(response);
                Stage::Run(running)
            }
            PlanStep::Io {
                disk,
                request,
                scratch,
            } => {
                let request = as_holder(running.lock.as_ref(), request);
                running.stage = RunStage::Next(disk, request, scratch);
                Stage::Run(running)
            }
        };
    }

    /// Returns a buffer for an I/O on a part of the scratch memory, filled if the I/O writes.
    pub(crate) fn scratch(&mut self, kind: IoKind, part: Range<usize>) -> Box<IoBuffer> {
        let buffer = IoBuffer::owned(part.len());
        if let Stage::Run(running) = &mut self.stage {
            running.fill(&buffer, kind, part);
        }
        Box::new(buffer)
    }
}

impl Running {
    fn take_need(&mut self) -> Need {
        match std::mem::replace(&mut self.stage, RunStage::Between) {
            RunStage::Next(disk, request, part) => {
                self.stage = RunStage::InFlight(None);
                Need::Scratch(disk, request, part)
            }
            RunStage::Answer(response) => {
                self.stage = RunStage::Answered(response);
                Need::AnswerAndDetach
            }
            other => {
                self.stage = other;
                Need::Nothing
            }
        }
    }

    fn take_response(&mut self) -> Response {
        match std::mem::replace(&mut self.stage, RunStage::Between) {
            RunStage::Answered(response) => response,
            other => {
                self.stage = other;
                Response::aborted()
            }
        }
    }

    /// Fills the buffer of an I/O on this part of the scratch memory, and notes the destination of a read.
    fn fill(&mut self, buffer: &IoBuffer, kind: IoKind, part: Range<usize>) {
        match (kind, self.scratch.get(part.clone())) {
            (IoKind::Read | IoKind::BlockStatus, _) => self.stage = RunStage::InFlight(Some(part)),
            // Response and data-in are returned in the same memory.
            (IoKind::ScsiCommand, Some(data)) => {
                buffer.write_at(0, data);
                self.stage = RunStage::InFlight(Some(part));
            }
            (IoKind::Write | IoKind::CompareAndWrite | IoKind::ReplaceState, Some(data)) => {
                buffer.write_at(0, data);
            }
            _ => {}
        }
    }
}
