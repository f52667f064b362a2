//! SANITIZE (SBC-4, 5.30): overwrites or erases the whole medium. No other I/O reaches it meanwhile, through any transport.
//!
//! After a failure the unit stays failed until a sanitize operation succeeds or EXIT FAILURE MODE is accepted. `overwriting` executes the
//! passes.

use std::sync::Arc;

use super::overwriting::{erasing_pass, pattern_block, plan};
use super::parameter_list::check_bits;
use super::{Context, Planned, good};
use crate::command::be16;
use crate::plan::{Pending, Plan};
use crate::sanitizing::{Pass, SavedOperation};
use crate::sense::{Sense, SenseCode};
use crate::unit_state::{Operation, Progress};

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
    let saved = move |passes| SavedOperation {
        operation: Operation::Sanitize,
        failed: false,
        may_exit: unrestricted_exit,
        pass: 0,
        passes,
    };
    if action != OVERWRITE {
        let pass = erasing_pass(&unit);
        return Ok(plan(unit, saved(vec![pass]), immediate));
    }
    Ok(Pending::plan(
        length as u64,
        c.data_out,
        move |list: &[u8]| match overwriting_passes(list, length, block_size) {
            Ok(passes) => plan(unit, saved(passes), immediate),
            Err(sense) => Plan::Done(sense.into()),
        },
    ))
}

fn exit_failure_mode(c: &Context<'_>) -> Planned {
    let mut state = c.unit.state();
    match state.progress {
        Progress::Running(..) | Progress::Idle => {}
        Progress::Failed(Operation::Sanitize) if state.sanitize_may_exit => {
            state.save_operation(c.unit.directory().store(), None)?;
            c.unit.set_progress(&mut state, Progress::Idle);
        }
        Progress::Failed(_) => return Err(Sense::cdb_bit(1, 4)),
    }
    good()
}

/// Returns the passes of an overwrite parameter list (SBC-4, 5.30.2.2).
fn overwriting_passes(list: &[u8], length: usize, block_size: usize) -> Result<Vec<Pass>, Sense> {
    let Some((&[flags, reserved, high, low], pattern)) = list.split_first_chunk::<4>() else {
        return Err(Sense::illegal_request(
            SenseCode::PARAMETER_LIST_LENGTH_ERROR,
        ));
    };
    if list.len() < length {
        return Err(Sense::illegal_request(
            SenseCode::PARAMETER_LIST_LENGTH_ERROR,
        ));
    }
    // TEST 00b; INVERT and OVERWRITE COUNT.
    check_bits(0, flags, 0x9f, &[0x60])?;
    check_bits(1, reserved, 0, &[])?;
    let (invert, count) = (flags & 0x80 != 0, flags & 0x1f);
    if count == 0 {
        return Err(Sense::parameter_bit(0, 4));
    }
    let pattern_length = usize::from(u16::from_be_bytes([high, low]));
    if pattern_length == 0 || pattern_length > block_size || pattern_length != pattern.len() {
        return Err(Sense::parameter_field(2));
    }
    let block = pattern_block(pattern, block_size);
    let passes = (0..count).map(|pass| {
        let inverted = invert && pass % 2 == 1;
        let block = block
            .iter()
            .map(|&byte| if inverted { !byte } else { byte });
        Pass::Write(block.collect())
    });
    Ok(passes.collect())
}
