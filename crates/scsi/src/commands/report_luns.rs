//! REPORT LUNS (SPC-5, 6.33): supported by every logical unit, including a missing one.

use super::{Context, Planned};
use crate::command::{Cdb, be32};
use crate::lun::Lun;
use crate::nexus::Nexus;
use crate::plan::Plan;
use crate::response::Response;
use crate::sense::Sense;
use crate::target::{LunMap, Target};

pub(super) fn report_luns(c: &Context<'_>) -> Planned {
    Ok(Plan::Done(current(c.view.target(), c.nexus, c.cdb)?))
}

/// Returns the present list, and removes the unit attention that announced it. The worker's view may have an older map.
pub(super) fn current(target: &Target, nexus: &Nexus, cdb: &Cdb) -> Result<Response, Sense> {
    target.report_luns(nexus, |map| report(map, cdb))
}

/// Returns the list selected by SELECT REPORT. No unit here is administrative or part of a conglomerate.
fn report(map: &LunMap, cdb: &Cdb) -> Result<Response, Sense> {
    let units = map.iter().map(|(number, _)| Lun::unit(number));
    let luns: Vec<Lun> = match cdb[2] {
        0x00 => units.collect(),
        0x01 => vec![Lun::REPORT_LUNS],
        0x02 => units.chain([Lun::REPORT_LUNS]).collect(),
        0x10..=0x12 => Vec::new(),
        _ => return Err(Sense::cdb_field(2)),
    };
    let mut data = Vec::with_capacity(8 + 8 * luns.len());
    data.extend(((8 * luns.len()) as u32).to_be_bytes());
    data.extend([0; 4]);
    data.extend(luns.iter().flat_map(|lun| lun.0));
    Ok(Response::data(data, be32(cdb, 6) as usize))
}
