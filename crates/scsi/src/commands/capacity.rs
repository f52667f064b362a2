//! READ CAPACITY (SBC-4, 5.18 and 5.19).

use super::{Context, Planned};
use crate::command::{be32, be64};
use crate::sense::Sense;

/// Service action of SERVICE ACTION IN(16).
pub(super) const READ_CAPACITY_16: u8 = 0x10;

/// Checks the obsolete PMI bit and LBA. Without PMI the LBA must be zero. With PMI the last block is returned, because no block is slower
/// to reach than another.
fn check_lba(flags: u8, lba: u64) -> Result<(), Sense> {
    if flags & 0x01 == 0 && lba != 0 {
        return Err(Sense::cdb_field(2));
    }
    Ok(())
}

pub(super) fn read_capacity_10(c: &Context<'_>) -> Planned {
    check_lba(c.cdb[8], be32(c.cdb, 2).into())?;
    let geometry = c.unit.geometry();
    let last = geometry.capacity().0.saturating_sub(1);
    // FFFFFFFFh if the last LBA does not fit: the initiator then uses READ CAPACITY(16).
    let last = u32::try_from(last).unwrap_or(u32::MAX);
    let mut data = Vec::with_capacity(8);
    data.extend(last.to_be_bytes());
    data.extend(geometry.block_size().to_be_bytes());
    if c.data_in >= 8 {
        c.nexus.read_capacity(c.lun, c.unit);
    }
    c.data(data, 8)
}

pub(super) fn read_capacity_16(c: &Context<'_>) -> Planned {
    check_lba(c.cdb[14], be64(c.cdb, 2))?;
    let geometry = c.unit.geometry();
    let state = c.unit.state();
    let mut data = [0; 32];
    data[0..8].copy_from_slice(&geometry.capacity().0.saturating_sub(1).to_be_bytes());
    data[8..12].copy_from_slice(&geometry.block_size().to_be_bytes());
    let per_physical = (state.info.physical_block_size >> geometry.block_shift()).max(1);
    data[13] = per_physical.ilog2().min(15) as u8;
    if state.info.discard_granularity.is_some() {
        data[14] |= 0x80; // LBPME
        if state.info.discard_zeroes {
            data[14] |= 0x40; // LBPRZ
        }
    }
    drop(state);
    let allocated = be32(c.cdb, 10);
    if allocated >= 12 && c.data_in >= 12 {
        c.nexus.read_capacity(c.lun, c.unit);
    }
    c.data(data.into(), allocated)
}
