//! START STOP UNIT (SBC-4, 5.36).

use super::{Context, Planned, good};
use crate::sense::Sense;

pub(super) fn start_stop_unit(c: &Context<'_>) -> Planned {
    let power_condition = c.cdb[4] >> 4;
    if power_condition != 0 {
        return Err(Sense::cdb_bit(4, 7));
    }
    let load_or_eject = c.cdb[4] & 0x02 != 0;
    if load_or_eject && !c.unit.removable() {
        return Err(Sense::cdb_bit(4, 1));
    }
    good()
}
