//! Passes of SANITIZE and FORMAT UNIT over every block. No other I/O reaches the disk meanwhile, through any export.
//!
//! The operation continues after an abort of its command, a loss of its nexus, and a restart.

use std::sync::Arc;

use block::{IoFlags, IoOutcome, IoRequest};

use crate::logical_unit::LogicalUnit;
use crate::plan::{Plan, PlanStep, Program, Run, SCRATCH_MAX};
use crate::response::Response;
use crate::sanitizing::{Pass, SavedOperation};
use crate::sense::{Sense, SenseCode, SenseKey};
use crate::unit_state::{Operation, Progress};

/// Returns the pass after which every block reads as zeroes.
pub(super) fn erasing_pass(unit: &LogicalUnit) -> Pass {
    let state = unit.state();
    if state.info.discard_granularity.is_some() && state.info.discard_zeroes {
        Pass::Discard
    } else if state.info.write_zeroes {
        Pass::WriteZeroes
    } else {
        Pass::Write(vec![0; state.info.geometry.block_size() as usize])
    }
}

pub(super) fn pattern_block(pattern: &[u8], block_size: usize) -> Vec<u8> {
    pattern.iter().copied().cycle().take(block_size).collect()
}

/// Starts an operation, unless another one prevents it. Its state is saved first.
pub(super) fn plan(
    unit: Arc<LogicalUnit>,
    saved_operation: SavedOperation,
    immediate: bool,
) -> Plan {
    {
        let mut state = unit.state();
        if let Some(sense) = state.operation_sense()
            && !state.progress.is_repaired_by(saved_operation.operation)
        {
            return Plan::Done(sense.into());
        }
        if let Err(sense) = state.save_operation(unit.directory().store(), Some(&saved_operation)) {
            return Plan::Done(sense.into());
        }
        state.sanitize_may_exit = saved_operation.may_exit;
        unit.set_progress(&mut state, Progress::Running(saved_operation.operation, 0));
    }
    Plan::Run(Overwriting::run(
        unit,
        saved_operation,
        immediate,
        Stage::Begin,
    ))
}

/// Continues an operation that a restart interrupted.
pub(crate) fn resume(unit: Arc<LogicalUnit>, saved_operation: SavedOperation) -> Box<Run> {
    Overwriting::run(unit, saved_operation, true, Stage::Run)
}

struct Overwriting {
    unit: Arc<LogicalUnit>,
    saved_operation: SavedOperation,
    offset: u64,
    piece: u64,
    immediate: bool,
    stage: Stage,
}

#[derive(PartialEq, Eq)]
enum Stage {
    Begin,
    Run,
    Flush,
    Finished,
}

/// Maximum length of a request without data, in bytes; limited so that progress is visible.
const PIECE_WITHOUT_DATA: u64 = 256 << 20;

impl Overwriting {
    fn run(
        unit: Arc<LogicalUnit>,
        saved_operation: SavedOperation,
        immediate: bool,
        stage: Stage,
    ) -> Box<Run> {
        let capacity = usize::try_from(unit.geometry().capacity_bytes());
        let overwriting = Overwriting {
            unit,
            saved_operation,
            offset: 0,
            piece: 0,
            immediate,
            stage,
        };
        Run::background(
            overwriting,
            SCRATCH_MAX.min(capacity.unwrap_or(SCRATCH_MAX)),
        )
    }

    fn set(&mut self, progress: Progress) {
        let mut state = self.unit.state();
        self.unit.set_progress(&mut state, progress);
    }

    /// Saves the state of the operation. A store error is logged by the store, and the operation continues.
    fn save(&self, saved_operation: Option<&SavedOperation>) -> Result<(), Sense> {
        let mut state = self.unit.state();
        state.save_operation(self.unit.directory().store(), saved_operation)
    }

    fn end(&mut self, progress: Progress, response: Response) -> PlanStep {
        self.stage = Stage::Finished;
        self.saved_operation.failed = progress != Progress::Idle;
        let saved =
            self.save(Some(&self.saved_operation).filter(|saved_operation| saved_operation.failed));
        self.set(progress);
        let response = match saved {
            Err(sense) if progress == Progress::Idle => sense.into(),
            _ => response,
        };
        if self.immediate {
            PlanStep::End
        } else {
            PlanStep::Done(response)
        }
    }

    fn fill(&self, scratch: &mut [u8]) {
        if let Some(Pass::Write(block)) = self.saved_operation.passes.get(self.saved_operation.pass)
        {
            for chunk in scratch.chunks_exact_mut(block.len().max(1)) {
                chunk.copy_from_slice(block);
            }
        }
    }

    /// Returns the next request; `None` after all passes.
    fn request(&mut self, scratch: &mut [u8]) -> Option<IoRequest> {
        let capacity = self.unit.geometry().capacity_bytes();
        if self.offset >= capacity {
            self.offset = 0;
            self.saved_operation.pass += 1;
            // An unsaved pass is repeated after a restart.
            self.save(Some(&self.saved_operation)).ok();
            self.fill(scratch);
        }
        let left = capacity - self.offset;
        let flags = IoFlags::UNMAP;
        let (request, piece) = match self.saved_operation.passes.get(self.saved_operation.pass)? {
            Pass::Write(_) => {
                let piece = left.min(scratch.len() as u64);
                (IoRequest::write(self.offset, piece), piece)
            }
            Pass::WriteZeroes => {
                let piece = left.min(PIECE_WITHOUT_DATA);
                (
                    IoRequest::write_zeroes(self.offset, piece).flagged(flags),
                    piece,
                )
            }
            Pass::Discard => {
                let piece = left.min(PIECE_WITHOUT_DATA);
                (IoRequest::discard(self.offset, piece), piece)
            }
        };
        self.piece = piece;
        (piece > 0).then_some(request)
    }

    fn progress(&self) -> u16 {
        let capacity = u128::from(self.unit.geometry().capacity_bytes()).max(1);
        let done = capacity * self.saved_operation.pass as u128 + u128::from(self.offset);
        let total = capacity * self.saved_operation.passes.len().max(1) as u128;
        (done * 65536 / total).min(65535) as u16
    }
}

impl Program for Overwriting {
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> PlanStep {
        if let Some(Err(error)) = last {
            let code = match self.saved_operation.operation {
                Operation::Sanitize => Sense::of_io_error(error).code,
                Operation::Format => SenseCode::FORMAT_COMMAND_FAILED,
            };
            let failed = Progress::Failed(self.saved_operation.operation);
            return self.end(failed, Sense::new(SenseKey::MediumError, code).into());
        }
        match self.stage {
            Stage::Begin => {
                self.stage = Stage::Run;
                if self.immediate {
                    return PlanStep::Answer(Response::good());
                }
                self.fill(scratch);
            }
            Stage::Run => {
                if last.is_some() {
                    self.offset += self.piece;
                    self.set(Progress::Running(
                        self.saved_operation.operation,
                        self.progress(),
                    ));
                } else {
                    self.fill(scratch);
                }
            }
            Stage::Flush | Stage::Finished => return self.end(Progress::Idle, Response::good()),
        }
        let disk = self.unit.disk();
        match self.request(scratch) {
            Some(request) => {
                let used = if request.moves_data() {
                    self.piece as usize
                } else {
                    0
                };
                PlanStep::Io {
                    disk,
                    request: request.flagged(IoFlags::CLOSER),
                    scratch: 0..used,
                }
            }
            None => {
                self.stage = Stage::Flush;
                PlanStep::Io {
                    disk,
                    request: IoRequest::flush().flagged(IoFlags::CLOSER),
                    scratch: 0..0,
                }
            }
        }
    }
}

impl Drop for Overwriting {
    fn drop(&mut self) {
        if self.stage != Stage::Finished {
            self.set(Progress::Failed(self.saved_operation.operation));
        }
    }
}
