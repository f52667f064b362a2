//! What to do about a command: answer, one I/O, ask for data, or run a small program of I/Os.
//!
//! The core does no I/O. Whoever called [`TargetView::begin`](crate::TargetView::begin) carries the plan
//! out. [`Plan::Done`] without data and [`Plan::Io`] are made without an allocation.

use std::ops::Range;

use block::{IoError, IoOutcome, IoRequest};

use crate::commands::TRANSFER_MAX;
use crate::logical_unit::{DiskId, UnitId};
use crate::response::{Residual, Response, Status};
use crate::sense::Sense;

/// What to do about a command.
#[derive(Debug)]
pub enum Plan {
    /// Answer now.
    Done(Response),
    /// One I/O between the disk and the initiator's own buffer, or without data; then
    /// [`DirectIo::finish`] gives the answer.
    Io(DirectIo),
    /// Bring the data-out into memory, then go on with [`Pending::with_data`].
    NeedData(Pending),
    /// Several I/Os on scratch memory.
    Run(Box<Run>),
}

/// One I/O straight between the disk and the initiator's buffer.
///
/// `request.length` bytes move, from or to the start of the buffer; the buffer is never shorter. A
/// command that asks for more than the buffer holds moves the whole blocks that fit and tells the rest
/// as overflow, as other targets do; a read whose buffer ends inside a block becomes a [`Run`].
#[derive(Clone, Copy, Debug)]
pub struct DirectIo {
    /// Where.
    pub disk: DiskId,
    /// What; checked against the disk.
    pub request: IoRequest,
    /// No other read or write may overlap the range while this one runs (WRITE ATOMIC).
    pub exclusive: bool,
    /// What the answer says of the transfer when the I/O succeeds.
    pub residual: Residual,
    pub(crate) success: Status,
    pub(crate) expected: u64,
    pub(crate) descriptor_sense: bool,
}

impl DirectIo {
    /// The status when the I/O succeeds; the answer then has no data and no sense.
    #[inline]
    pub fn success(&self) -> Status {
        self.success
    }

    /// The answer, once the I/O has ended.
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

/// The answer to a transfer of which the initiator expects so many bytes, when its I/O has failed.
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

/// A [`DirectIo`] of which nothing is remarkable: its buffer is as long as its transfer, and its success is GOOD.
#[derive(Clone, Copy, Debug)]
pub struct PlainIo {
    /// What; checked against the disk.
    pub request: IoRequest,
    /// How it ends.
    pub end: PlainEnd,
}

/// What the answer to a [`PlainIo`] is made of.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlainEnd {
    /// Bytes; a transfer is far below 4 GiB.
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

    /// With the disk that it is for.
    #[inline(always)]
    pub(crate) fn on(self, disk: DiskId) -> DirectIo {
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
    /// The answer, once the I/O has ended.
    pub fn finish(&self, outcome: IoOutcome) -> Response {
        match outcome {
            Ok(()) => Response::good(),
            Err(error) => failed(error, self.expected.into(), self.descriptor_sense),
        }
    }
}

/// What is common to everything that answers a command later.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answering {
    /// Data-in bytes that the initiator has room for.
    pub expected_in: u64,
    /// Data-out bytes that the initiator offers.
    pub expected_out: u64,
    /// Data-out bytes that the CDB asks for.
    pub wanted_out: u64,
    /// Sense in descriptor format.
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

    /// A command that goes on working with its data-out.
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

    /// How many bytes from the start of the data-out are needed: at most [`DATA_OUT_MAX`].
    pub fn length(&self) -> usize {
        self.length
    }

    pub(crate) fn wanted(&self) -> u64 {
        self.answering.wanted_out
    }

    /// Goes on with the data, of which there must be [`Pending::length`] bytes.
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
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Several I/Os on scratch memory that the caller owns.
///
/// The caller holds `scratch_length` bytes, aligned to 4,096, for the whole run. It calls [`Run::next`]
/// with `None`, carries out the I/O that comes back and calls again with its outcome, until [`Step::Done`]
/// or [`Step::End`]. A run may be dropped between two steps: that aborts the command, unless it
/// `survives_abort`.
pub struct Run {
    program: Box<dyn Program>,
    answering: Answering,
    /// Scratch memory that the run needs, in bytes; at most [`SCRATCH_MAX`], or the buffer of a command that is passed through; may
    /// be 0.
    pub scratch_length: usize,
    /// The range that has to be held exclusively from before the first step until the end.
    pub exclusive: Option<Exclusive>,
    /// Goes on to its end even if its command is aborted or its nexus is lost (SANITIZE).
    pub survives_abort: bool,
}

/// The next thing to do for a [`Run`].
#[derive(Debug)]
pub enum Step {
    /// Do an I/O; data moves between the disk and this part of the scratch memory.
    Io {
        /// Which disk: not always the one that the command was sent to.
        disk: DiskId,
        /// What to do.
        request: IoRequest,
        /// Where the data is, empty for requests that move none; as long as the request.
        scratch: Range<usize>,
    },
    /// The answer; the run is over.
    Done(Response),
    /// The answer; the run goes on in the background: call [`Run::next`] again with `None`.
    Answer(Response),
    /// The run, answered before, is over.
    End,
}

/// A command made of several I/Os.
pub(crate) trait Program: Send {
    /// The next step, given the outcome of the I/O that the step before asked for.
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> Step;

    /// Does it write to a unit, other than the one that its command was sent to?
    fn writes_to(&self, _unit: UnitId) -> bool {
        false
    }
}

/// Most scratch memory that a [`Run`] needs, unless it passes a command through.
pub const SCRATCH_MAX: usize = 1 << 20;

/// Most data-out that a [`Pending`] asks for: the longest transfer, of a command that works with its data.
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

    /// A program that no abort stops.
    pub(crate) fn background(program: impl Program + 'static, scratch_length: usize) -> Box<Run> {
        let mut run = Run::boxed(program, scratch_length, None);
        run.survives_abort = true;
        run
    }

    /// Does it write to this unit, other than the one that its command was sent to?
    pub fn writes_to(&self, unit: UnitId) -> bool {
        self.program.writes_to(unit)
    }

    /// The next step; `last` is the outcome of the I/O that the step before asked for.
    pub fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> Step {
        if scratch.len() < self.scratch_length {
            return Step::Done(self.answering.finish(Response::aborted()));
        }
        match self.program.next(last, scratch) {
            Step::Done(response) => Step::Done(self.answering.finish(response)),
            Step::Answer(response) => Step::Answer(self.answering.finish(response)),
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
