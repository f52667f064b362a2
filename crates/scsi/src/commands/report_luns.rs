//! REPORT LUNS (SPC-5, 6.33): supported by every logical unit, including a missing one.

use super::{Context, Planned};
use crate::command::{Cdb, be32};
use crate::lun::Lun;
use crate::plan::Plan;
use crate::response::Response;
use crate::sense::{Sense, SenseCode};
use crate::target::LunMap;

pub(super) fn report_luns(c: &Context<'_>) -> Planned {
    let response = report(c.map, c.cdb)?;
    c.nexus.clear_attention_everywhere(SenseCode::LUNS_CHANGED);
    Ok(Plan::Done(response))
}

/// Returns the list selected by SELECT REPORT. No unit here is administrative or part of a conglomerate.
pub(super) fn report(map: &LunMap, cdb: &Cdb) -> Result<Response, Sense> {
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
