//! Plans for commands: a response, one I/O, a request for data-out, or a program of I/Os.
//!
//! The core does no I/O. The caller of [`TargetView::begin`](crate::TargetView::begin) executes the plan. [`Plan::Done`] without data and
//! [`Plan::Io`] are created without an allocation.

use std::ops::Range;

use block::{IoError, IoOutcome, IoRequest};

use crate::commands::TRANSFER_MAX;
use crate::logical_unit::{DiskId, UnitId};
use crate::response::{Residual, Response, Status};
use crate::sense::Sense;

/// Execution of a command.
#[derive(Debug)]
pub enum Plan {
    /// Respond now.
    Done(Response),
    /// One I/O between the disk and the initiator's own buffer, or without data. [`DirectIo::finish`] then returns the response.
    Io(DirectIo),
    /// Copy the data-out into memory, then call [`Pending::with_data`].
    NeedData(Pending),
    /// Several I/Os on scratch memory.
    Run(Box<Run>),
}

/// One I/O directly between the disk and the initiator's buffer.
///
/// Transfers `request.length` bytes at the start of the buffer, which is never shorter. If the command's transfer is longer than the
/// buffer, the whole blocks that fit are transferred and the rest is reported as overflow, as other targets do. A read with a buffer that
/// ends inside a block becomes a [`Run`].
#[derive(Clone, Copy, Debug)]
pub struct DirectIo {
    /// Disk of the I/O.
    pub disk: DiskId,
    /// The I/O, within the limits of the disk.
    pub request: IoRequest,
    /// The range is locked: no other read or write may overlap it during the I/O (WRITE ATOMIC).
    pub exclusive: bool,
    /// Residual in the response if the I/O succeeds.
    pub residual: Residual,
    pub(crate) success: Status,
    pub(crate) expected: u64,
    pub(crate) descriptor_sense: bool,
}

impl DirectIo {
    /// Returns the status if the I/O succeeds; the response then has no data and no sense.
    #[inline]
    pub fn success(&self) -> Status {
        self.success
    }

    /// Returns the response after the end of the I/O.
    #[inline]
    pub fn finish(&self, outcome: IoOutcome) -> Response {
        match outcome {
            Ok(()) => Response {
                residual: self.residual,
                ..Response::status(self.success)
            },
            Err(error) => self.failed(error),
        }
    }

    #[cold]
    fn failed(&self, error: IoError) -> Response {
        failed(error, self.expected, self.descriptor_sense)
    }
}

/// Returns the response to a failed I/O. `expected`: bytes that the initiator expects.
fn failed(error: IoError, expected: u64, descriptor_sense: bool) -> Response {
    let sense = Sense {
        descriptor_format: descriptor_sense,
        ..Sense::of_io_error(error)
    };
    Response {
        residual: Residual::between(error.transferred.into(), expected),
        ..Response::check(sense)
    }
}

/// A [`DirectIo`] in the usual case: the buffer is as long as the transfer, and the status on success is GOOD.
#[derive(Clone, Copy, Debug)]
pub struct PlainIo {
    /// The I/O, within the limits of the disk.
    pub request: IoRequest,
    /// Parameters of the response.
    pub end: PlainEnd,
}

/// Parameters of the response to a [`PlainIo`].
#[derive(Clone, Copy, Debug, Default)]
pub struct PlainEnd {
    /// Expected transfer length in bytes, which is far below 4 GiB.
    expected: u32,
    descriptor_sense: bool,
}

impl PlainIo {
    #[inline(always)]
    pub(crate) fn new(request: IoRequest, descriptor_sense: bool) -> PlainIo {
        let end = PlainEnd {
            expected: request.length as u32,
            descriptor_sense,
        };
        PlainIo { request, end }
    }

    /// Returns the general form of the I/O on this disk.
    #[inline(always)]
    pub fn on(self, disk: DiskId) -> DirectIo {
        DirectIo {
            disk,
            request: self.request,
            exclusive: false,
            residual: Residual::None,
            success: Status::Good,
            expected: self.request.length,
            descriptor_sense: self.end.descriptor_sense,
        }
    }
}

impl PlainEnd {
    /// Returns the response after the end of the I/O.
    pub fn finish(&self, outcome: IoOutcome) -> Response {
        match outcome {
            Ok(()) => Response::good(),
            Err(error) => failed(error, self.expected.into(), self.descriptor_sense),
        }
    }
}

/// Common parameters of delayed responses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answering {
    /// Size of the initiator's data-in buffer, in bytes.
    pub expected_in: u64,
    /// Length of the initiator's data-out, in bytes.
    pub expected_out: u64,
    /// Length of the data-out according to the CDB, in bytes.
    pub wanted_out: u64,
    /// Sense data is in descriptor format.
    pub descriptor_sense: bool,
}

impl Answering {
    pub(crate) fn finish(&self, response: Response) -> Response {
        let mut response = response.fit(self.wanted_out, self.expected_in, self.expected_out);
        if let Some(sense) = &mut response.sense {
            sense.descriptor_format = self.descriptor_sense;
        }
        response
    }

    pub(crate) fn finish_plan(&self, plan: Plan) -> Plan {
        match plan {
            Plan::Done(response) => Plan::Done(self.finish(response)),
            Plan::Io(mut io) => {
                if !io.request.moves_data() {
                    io.residual =
                        Residual::between(self.wanted_out, self.expected_in.max(self.expected_out));
                }
                Plan::Io(io)
            }
            Plan::NeedData(mut pending) => {
                pending.answering = Answering {
                    wanted_out: pending.answering.wanted_out.max(self.wanted_out),
                    ..*self
                };
                Plan::NeedData(pending)
            }
            Plan::Run(mut run) => {
                run.answering = *self;
                Plan::Run(run)
            }
        }
    }
}

type Resume = Box<dyn FnOnce(Vec<u8>) -> Plan + Send>;

/// A command that waits for its data-out.
pub struct Pending {
    length: usize,
    resume: Resume,
    answering: Answering,
}

impl Pending {
    pub(crate) fn plan(
        wanted: u64,
        available: u64,
        resume: impl FnOnce(&[u8]) -> Plan + Send + 'static,
    ) -> Plan {
        Pending::keeping(wanted, available, move |data| resume(&data))
    }

    /// Creates a plan that takes ownership of the data-out.
    pub(crate) fn keeping(
        wanted: u64,
        available: u64,
        resume: impl FnOnce(Vec<u8>) -> Plan + Send + 'static,
    ) -> Plan {
        let length = usize::try_from(wanted.min(available)).unwrap_or(0);
        let answering = Answering {
            expected_in: 0,
            expected_out: 0,
            wanted_out: wanted,
            descriptor_sense: false,
        };
        Plan::NeedData(Pending {
            length,
            resume: Box::new(resume),
            answering,
        })
    }

    /// Returns the required length from the start of the data-out, in bytes: at most [`DATA_OUT_MAX`].
    pub fn length(&self) -> usize {
        self.length
    }

    pub(crate) fn wanted(&self) -> u64 {
        self.answering.wanted_out
    }

    /// Continues the command with its data-out, at least [`Pending::length`] bytes.
    pub fn with_data(self, mut data: Vec<u8>) -> Plan {
        if data.len() < self.length {
            return Plan::Done(self.answering.finish(Response::aborted()));
        }
        data.truncate(self.length);
        self.answering.finish_plan((self.resume)(data))
    }
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending")
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

/// A range of a disk that no other read or write may overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exclusive {
    /// The disk.
    pub disk: DiskId,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Several I/Os on scratch memory of the caller.
///
/// The caller provides `scratch_length` bytes, aligned to 4,096, for the whole run. It calls [`Run::next`] with `None`, executes the
/// returned I/O, and calls it again with the outcome, until [`PlanStep::Done`] or [`PlanStep::End`]. Dropping a run between two steps aborts the
/// command, unless it `survives_abort`.
pub struct Run {
    program: Box<dyn Program>,
    answering: Answering,
    /// Required scratch memory in bytes; may be 0. At most [`SCRATCH_MAX`], or the buffer of a pass-through command.
    pub scratch_length: usize,
    /// Range to be locked from before the first step until the end.
    pub exclusive: Option<Exclusive>,
    /// Runs to its end even if its command is aborted or its nexus is lost (SANITIZE).
    pub survives_abort: bool,
}

/// Next step of a [`Run`].
#[derive(Debug)]
pub enum PlanStep {
    /// Execute an I/O between the disk and this part of the scratch memory.
    Io {
        /// Disk of the I/O, which may differ from that of the command's unit.
        disk: DiskId,
        /// The I/O.
        request: IoRequest,
        /// Location of the data, as long as the request; empty for requests without data.
        scratch: Range<usize>,
    },
    /// Send the response; the run has ended.
    Done(Response),
    /// Send the response. The run continues in the background: call [`Run::next`] again with `None`.
    Answer(Response),
    /// The run has ended; its response was sent before.
    End,
}

/// A command that consists of several I/Os.
pub(crate) trait Program: Send {
    /// Returns the next step. `last`: outcome of the I/O of the previous step.
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> PlanStep;

    /// Returns true if the program writes to this unit and the command was sent to another.
    fn writes_to(&self, _unit: UnitId) -> bool {
        false
    }
}

/// Maximum scratch memory of a [`Run`] in bytes, except for pass-through commands.
pub const SCRATCH_MAX: usize = 1 << 20;

/// Maximum data-out of a [`Pending`] in bytes: the longest transfer of a command that processes its data.
pub const DATA_OUT_MAX: usize = TRANSFER_MAX as usize;

impl Run {
    pub(crate) fn plan(program: impl Program + 'static, scratch_length: usize) -> Plan {
        Run::exclusive(program, scratch_length, None)
    }

    pub(crate) fn exclusive(
        program: impl Program + 'static,
        scratch_length: usize,
        exclusive: Option<Exclusive>,
    ) -> Plan {
        Plan::Run(Run::boxed(program, scratch_length, exclusive))
    }

    fn boxed(
        program: impl Program + 'static,
        scratch_length: usize,
        exclusive: Option<Exclusive>,
    ) -> Box<Run> {
        let answering = Answering {
            expected_in: 0,
            expected_out: 0,
            wanted_out: 0,
            descriptor_sense: false,
        };
        let program = Box::new(program);
        Box::new(Run {
            program,
            answering,
            scratch_length,
            exclusive,
            survives_abort: false,
        })
    }

    /// Creates a run that continues after an abort.
    pub(crate) fn background(program: impl Program + 'static, scratch_length: usize) -> Box<Run> {
        let mut run = Run::boxed(program, scratch_length, None);
        run.survives_abort = true;
        run
    }

    /// Returns true if the run writes to this unit and its command was sent to another.
    pub fn writes_to(&self, unit: UnitId) -> bool {
        self.program.writes_to(unit)
    }

    /// Returns the next step. `last`: outcome of the I/O of the previous step.
    pub fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> PlanStep {
        if scratch.len() < self.scratch_length {
            return PlanStep::Done(self.answering.finish(Response::aborted()));
        }
        match self.program.next(last, scratch) {
            PlanStep::Done(response) => PlanStep::Done(self.answering.finish(response)),
            PlanStep::Answer(response) => PlanStep::Answer(self.answering.finish(response)),
            step => step,
        }
    }
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Run")
            .field("scratch_length", &self.scratch_length)
            .field("exclusive", &self.exclusive)
            .finish_non_exhaustive()
    }
}
