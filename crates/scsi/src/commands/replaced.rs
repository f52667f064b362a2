//! Commands to a unit that has replaced another one under a LUN that the initiator has seen.

use super::Context;
use super::capacity::READ_CAPACITY_16;
use crate::command::opcode::*;
use crate::known::Replaced;
use crate::plan::Plan;
use crate::response::Residual;
use crate::sense::{Sense, SenseCode};

/// Refuses commands that read or change the medium until the initiator has read the capacity: the unit that it addresses is gone.
/// Initiators treat LOGICAL UNIT NOT SUPPORTED as a permanent loss, and do not repeat the CDB.
pub(super) fn check_known(c: &Context<'_>) -> Result<(), Sense> {
    if is_harmless(c) || c.nexus.replaced(c.lun) != Some(Replaced::Unread) {
        return Ok(());
    }
    let code = SenseCode::LOGICAL_UNIT_NOT_SUPPORTED;
    Err(Sense::illegal_request(code))
}

/// Returns true for commands that only report properties of the unit.
fn is_harmless(c: &Context<'_>) -> bool {
    match c.cdb[0] {
        TEST_UNIT_READY | REQUEST_SENSE | INQUIRY | REPORT_LUNS => true,
        READ_CAPACITY_10 | MODE_SENSE_6 | MODE_SENSE_10 | LOG_SENSE => true,
        MAINTENANCE_IN | PERSISTENT_RESERVE_IN => true,
        SERVICE_ACTION_IN_16 => c.cdb[1] & 0x1f == READ_CAPACITY_16,
        _ => false,
    }
}

/// Refuses a transfer length that differs from the CDB, if the initiator may have used another block size.
pub(super) fn check_length(c: &Context<'_>, plan: Plan) -> Result<Plan, Sense> {
    let differs = match &plan {
        Plan::Io(io) if io.request.moves_data() => io.residual != Residual::None,
        Plan::NeedData(pending) => pending.wanted() != c.data_out,
        // A read that ends inside a block.
        Plan::Run(_) => matches!(c.cdb[0], READ_6 | READ_10 | READ_12 | READ_16),
        Plan::Io(_) | Plan::Done(_) => false,
    };
    let may_differ = || {
        c.nexus.may_have_attention(c.unit.id())
            && c.nexus.replaced(c.lun) == Some(Replaced::OtherBlockSize)
    };
    if differs && may_differ() {
        let code = SenseCode::INVALID_FIELD_IN_INFORMATION_UNIT;
        return Err(Sense::illegal_request(code));
    }
    Ok(plan)
}
