//! START STOP UNIT and PREVENT ALLOW MEDIUM REMOVAL (SBC-4, 5.36 and 5.8).
//!
//! Only a removable unit can lose its medium. A stop without ejection has no effect: there is no spindle.

use block::IoRequest;

use super::{Context, Planned, good, without_data};
use crate::logical_unit::Word;
use crate::sense::{Sense, SenseCode};

pub(super) fn start_stop_unit(c: &Context<'_>) -> Planned {
    let power_condition = c.cdb[4] >> 4;
    let [start, load_or_eject, no_flush] = [0x01, 0x02, 0x04].map(|bit| c.cdb[4] & bit != 0);
    if power_condition != 0 {
        return good(); // START and LOEJ are ignored then
    }
    if load_or_eject {
        if !c.unit.removable() {
            return Err(Sense::cdb_bit(4, 1));
        }
        change_medium(c, start)?;
    }
    if start || no_flush {
        return good();
    }
    let descriptor_sense = c.word.has(Word::DESCRIPTOR_SENSE);
    Ok(without_data(
        c.unit.disk(),
        IoRequest::flush(),
        descriptor_sense,
    ))
}

fn change_medium(c: &Context<'_>, load: bool) -> Result<(), Sense> {
    let mut state = c.unit.state();
    if !state.medium.prevented_by.is_empty() || state.medium.holds > 0 {
        return Err(Sense::illegal_request(SenseCode::MEDIUM_REMOVAL_PREVENTED));
    }
    c.unit.set_loaded(&mut state, load, Some(c.nexus));
    Ok(())
}

pub(super) fn prevent_allow(c: &Context<'_>) -> Planned {
    let mut state = c.unit.state();
    let nexus = c.nexus.id();
    match c.cdb[4] & 0x01 != 0 {
        false => state
            .medium
            .prevented_by
            .retain(|preventing| *preventing != nexus),
        true if state.medium.prevented_by.contains(&nexus) => {}
        true => state.medium.prevented_by.push(nexus),
    }
    good()
}
