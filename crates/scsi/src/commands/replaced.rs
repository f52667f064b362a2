//! Commands to a unit that has replaced another one under the LUN by which the initiator knows that.

use super::Context;
use super::capacity::READ_CAPACITY_16;
use crate::command::opcode::*;
use crate::known::Replaced;
use crate::plan::Plan;
use crate::response::Residual;
use crate::sense::{Sense, SenseCode};

/// Refuses what reads or changes the medium until the initiator has read the capacity: to it, the unit that it means is gone.
/// Initiators take LOGICAL UNIT NOT SUPPORTED for a loss that lasts, and do not send the same CDB again.
pub(super) fn check_known(c: &Context<'_>) -> Result<(), Sense> {
    if is_harmless(c) || c.nexus.replaced(c.lun) != Some(Replaced::Unread) {
        return Ok(());
    }
    let code = SenseCode::LOGICAL_UNIT_NOT_SUPPORTED;
    Err(Sense::illegal_request(code))
}

/// Tells of the unit what an initiator has to learn.
fn is_harmless(c: &Context<'_>) -> bool {
    match c.cdb[0] {
        TEST_UNIT_READY | REQUEST_SENSE | INQUIRY | REPORT_LUNS => true,
        READ_CAPACITY_10 | MODE_SENSE_6 | MODE_SENSE_10 | LOG_SENSE => true,
        MAINTENANCE_IN | PERSISTENT_RESERVE_IN => true,
        SERVICE_ACTION_IN_16 => c.cdb[1] & 0x1f == READ_CAPACITY_16,
        _ => false,
    }
}

/// Refuses a transfer of another length than the CDB says, where the initiator may have counted in blocks of another size.
pub(super) fn check_length(c: &Context<'_>, plan: Plan) -> Result<Plan, Sense> {
    let differs = match &plan {
        Plan::Io(io) if io.request.moves_data() => io.residual != Residual::None,
        Plan::NeedData(pending) => pending.wanted() != c.data_out,
        // a read that ends inside a block
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
