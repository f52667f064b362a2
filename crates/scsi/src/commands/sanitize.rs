//! SANITIZE (SBC-4, 5.30): the whole medium is overwritten or erased, and nothing else goes on meanwhile, through no door.
//!
//! The operation goes on when its command is aborted or its nexus lost, and after a restart. One that cannot end leaves
//! the unit failed until a sanitize operation succeeds or EXIT FAILURE MODE is accepted.

use std::sync::Arc;

use disk::{IoFlags, IoOutcome, IoRequest};

use super::{Context, Planned, good};
use crate::command::be16;
use crate::logical_unit::LogicalUnit;
use crate::plan::{Pending, Plan, Program, Run, SCRATCH_MAX, Step};
use crate::response::Response;
use crate::sanitizing::{Kept, Pass};
use crate::sense::{Sense, SenseCode, SenseKey};
use crate::unit_state::Sanitize;

const OVERWRITE: u8 = 0x01;
const BLOCK_ERASE: u8 = 0x02;
const CRYPTOGRAPHIC_ERASE: u8 = 0x03;
const EXIT_FAILURE_MODE: u8 = 0x1f;

pub(super) fn sanitize(c: &Context<'_>) -> Planned {
    let action = c.cdb[1] & 0x1f;
    if !matches!(
        action,
        OVERWRITE | BLOCK_ERASE | CRYPTOGRAPHIC_ERASE | EXIT_FAILURE_MODE
    ) {
        return Err(Sense::cdb_bit(1, 4));
    }
    let (immediate, unrestricted_exit) = (c.cdb[1] & 0x80 != 0, c.cdb[1] & 0x20 != 0);
    let length = usize::from(be16(c.cdb, 7));
    let block_size = c.unit.geometry().block_size() as usize;
    match action {
        OVERWRITE if !(5..=block_size + 4).contains(&length) => return Err(Sense::cdb_field(7)),
        _ => {}
    }
    if action == EXIT_FAILURE_MODE {
        return exit_failure_mode(c);
    }
    c.check_writable()?;
    let unit = Arc::clone(c.unit);
    if action != OVERWRITE {
        let pass = erasing_pass(&unit);
        return Ok(Operation::plan(
            unit,
            vec![pass],
            immediate,
            unrestricted_exit,
        ));
    }
    Ok(Pending::plan(
        length as u64,
        c.data_out,
        move |list: &[u8]| match overwriting_passes(list, length, block_size) {
            Ok(passes) => Operation::plan(unit, passes, immediate, unrestricted_exit),
            Err(sense) => Plan::Done(sense.into()),
        },
    ))
}

fn exit_failure_mode(c: &Context<'_>) -> Planned {
    let mut state = c.unit.state();
    match state.sanitize {
        Sanitize::Running(_) | Sanitize::Idle => {}
        Sanitize::Failed if state.sanitize_may_exit => {
            state.save_sanitize(c.unit.directory().store(), None)?;
            c.unit.set_sanitize(&mut state, Sanitize::Idle);
        }
        Sanitize::Failed => return Err(Sense::cdb_bit(1, 4)),
    }
    good()
}

fn erasing_pass(unit: &LogicalUnit) -> Pass {
    let state = unit.state();
    if state.info.discard_granularity.is_some() && state.info.discard_zeroes {
        Pass::Discard
    } else if state.info.write_zeroes {
        Pass::WriteZeroes
    } else {
        Pass::Write(vec![0; state.info.geometry.block_size() as usize])
    }
}

/// The passes that an overwrite parameter list asks for (SBC-4, 5.30.2.2).
fn overwriting_passes(list: &[u8], length: usize, block_size: usize) -> Result<Vec<Pass>, Sense> {
    let Some((&[flags, _, high, low], pattern)) = list.split_first_chunk::<4>() else {
        return Err(Sense::illegal_request(
            SenseCode::PARAMETER_LIST_LENGTH_ERROR,
        ));
    };
    if list.len() < length {
        return Err(Sense::illegal_request(
            SenseCode::PARAMETER_LIST_LENGTH_ERROR,
        ));
    }
    let (invert, count) = (flags & 0x80 != 0, flags & 0x1f);
    if count == 0 {
        return Err(Sense::parameter_field(0));
    }
    let pattern_length = usize::from(u16::from_be_bytes([high, low]));
    if pattern_length == 0 || pattern_length > block_size || pattern_length != pattern.len() {
        return Err(Sense::parameter_field(2));
    }
    let block: Vec<u8> = pattern.iter().copied().cycle().take(block_size).collect();
    let passes = (0..count).map(|pass| {
        let inverted = invert && pass % 2 == 1;
        let block = block
            .iter()
            .map(|&byte| if inverted { !byte } else { byte });
        Pass::Write(block.collect())
    });
    Ok(passes.collect())
}

/// Goes on with an operation that a restart interrupted.
pub(crate) fn resume(unit: Arc<LogicalUnit>, kept: Kept) -> Box<Run> {
    Operation::run(unit, kept, true, Stage::Run)
}

struct Operation {
    unit: Arc<LogicalUnit>,
    kept: Kept,
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
    Over,
}

/// Without data to be sent, this much at a time: progress has to be seen.
const PIECE_WITHOUT_DATA: u64 = 256 << 20;

impl Operation {
    fn plan(
        unit: Arc<LogicalUnit>,
        passes: Vec<Pass>,
        immediate: bool,
        unrestricted_exit: bool,
    ) -> Plan {
        let kept = Kept {
            failed: false,
            may_exit: unrestricted_exit,
            pass: 0,
            passes,
        };
        {
            let mut state = unit.state();
            if let Some(sense) = state
                .sanitize_sense()
                .filter(|_| state.sanitize != Sanitize::Failed)
            {
                return Plan::Done(sense.into());
            }
            if let Err(sense) = state.save_sanitize(unit.directory().store(), Some(&kept)) {
                return Plan::Done(sense.into());
            }
            state.sanitize_may_exit = unrestricted_exit;
            unit.set_sanitize(&mut state, Sanitize::Running(0));
        }
        Plan::Run(Operation::run(unit, kept, immediate, Stage::Begin))
    }

    fn run(unit: Arc<LogicalUnit>, kept: Kept, immediate: bool, stage: Stage) -> Box<Run> {
        let capacity = usize::try_from(unit.geometry().capacity_bytes());
        let operation = Operation {
            unit,
            kept,
            offset: 0,
            piece: 0,
            immediate,
            stage,
        };
        Run::background(operation, SCRATCH_MAX.min(capacity.unwrap_or(SCRATCH_MAX)))
    }

    fn set(&mut self, sanitize: Sanitize) {
        let mut state = self.unit.state();
        self.unit.set_sanitize(&mut state, sanitize);
    }

    /// What is kept from now on; a store that fails has said so, and the operation goes on.
    fn save(&self, kept: Option<&Kept>) -> Result<(), Sense> {
        let state = self.unit.state();
        state.save_sanitize(self.unit.directory().store(), kept)
    }

    fn end(&mut self, sanitize: Sanitize, response: Response) -> Step {
        self.stage = Stage::Over;
        self.kept.failed = sanitize == Sanitize::Failed;
        let saved = self.save(Some(&self.kept).filter(|kept| kept.failed));
        self.set(sanitize);
        let response = match saved {
            Err(sense) if sanitize == Sanitize::Idle => sense.into(),
            _ => response,
        };
        if self.immediate {
            Step::End
        } else {
            Step::Done(response)
        }
    }

    fn fill(&self, scratch: &mut [u8]) {
        if let Some(Pass::Write(block)) = self.kept.passes.get(self.kept.pass) {
            for chunk in scratch.chunks_exact_mut(block.len().max(1)) {
                chunk.copy_from_slice(block);
            }
        }
    }

    /// The next piece, or none when all passes are through.
    fn request(&mut self, scratch: &mut [u8]) -> Option<IoRequest> {
        let capacity = self.unit.geometry().capacity_bytes();
        if self.offset >= capacity {
            self.offset = 0;
            self.kept.pass += 1;
            // what could not be kept is done once more after a restart
            self.save(Some(&self.kept)).ok();
            self.fill(scratch);
        }
        let left = capacity - self.offset;
        let flags = IoFlags::UNMAP;
        let (request, piece) = match self.kept.passes.get(self.kept.pass)? {
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
        let done = capacity * self.kept.pass as u128 + u128::from(self.offset);
        let total = capacity * self.kept.passes.len().max(1) as u128;
        (done * 65536 / total).min(65535) as u16
    }
}

impl Program for Operation {
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> Step {
        if let Some(Err(error)) = last {
            let sense = Sense {
                key: SenseKey::MediumError,
                ..Sense::of_io_error(error.kind)
            };
            return self.end(Sanitize::Failed, sense.into());
        }
        match self.stage {
            Stage::Begin => {
                self.stage = Stage::Run;
                if self.immediate {
                    return Step::Answer(Response::good());
                }
                self.fill(scratch);
            }
            Stage::Run => {
                if last.is_some() {
                    self.offset += self.piece;
                    self.set(Sanitize::Running(self.progress()));
                } else {
                    self.fill(scratch);
                }
            }
            Stage::Flush | Stage::Over => return self.end(Sanitize::Idle, Response::good()),
        }
        let disk = self.unit.disk();
        match self.request(scratch) {
            Some(request) => {
                let used = if request.moves_data() {
                    self.piece as usize
                } else {
                    0
                };
                Step::Io {
                    disk,
                    request: request.flagged(IoFlags::CLOSER),
                    scratch: 0..used,
                }
            }
            None => {
                self.stage = Stage::Flush;
                Step::Io {
                    disk,
                    request: IoRequest::flush().flagged(IoFlags::CLOSER),
                    scratch: 0..0,
                }
            }
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if self.stage != Stage::Over {
            self.set(Sanitize::Failed);
        }
    }
}
