//! MODE SENSE (SPC-5, 6.14 and 6.15).

use super::{Context, Planned};
use crate::command::be16;
use crate::logical_unit::Word;
use crate::mode::{PageControl, page};
use crate::sense::Sense;

pub(super) fn mode_sense_6(c: &Context<'_>) -> Planned {
    let body = pages(c)?;
    let descriptor = block_descriptor(c, false);
    let length = 3 + descriptor.len() + body.len();
    let mut data = vec![length as u8, 0, device_specific(c), descriptor.len() as u8];
    data.extend(descriptor);
    data.extend(body);
    c.data(data, c.cdb[4].into())
}

pub(super) fn mode_sense_10(c: &Context<'_>) -> Planned {
    let body = pages(c)?;
    let long = c.cdb[1] & 0x10 != 0;
    let descriptor = block_descriptor(c, long);
    let [high, low] = ((6 + descriptor.len() + body.len()) as u16).to_be_bytes();
    let long_lba = u8::from(long && !descriptor.is_empty());
    let mut data = vec![
        high,
        low,
        0,
        device_specific(c),
        long_lba,
        0,
        0,
        descriptor.len() as u8,
    ];
    data.extend(descriptor);
    data.extend(body);
    c.data(data, be16(c.cdb, 7).into())
}

/// Returns WP and DPOFUA (SBC-4, 6.5.1).
fn device_specific(c: &Context<'_>) -> u8 {
    let protected = if c.word.has(Word::WRITE_PROTECTED) {
        0x80
    } else {
        0x00
    };
    0x10 | protected
}

/// Returns one descriptor of the whole unit; empty if DBD is set.
fn block_descriptor(c: &Context<'_>, long: bool) -> Vec<u8> {
    if c.cdb[1] & 0x08 != 0 {
        return Vec::new();
    }
    let geometry = c.unit.geometry();
    let blocks = geometry.capacity().0;
    let block_size = geometry.block_size().to_be_bytes();
    let mut descriptor = Vec::with_capacity(16);
    if long {
        descriptor.extend(blocks.to_be_bytes());
        descriptor.extend([0; 4]);
    } else {
        descriptor.extend(u32::try_from(blocks).unwrap_or(u32::MAX).to_be_bytes());
    }
    descriptor.extend(block_size);
    descriptor
}

fn pages(c: &Context<'_>) -> Result<Vec<u8>, Sense> {
    let control = match c.cdb[2] >> 6 {
        0b00 => PageControl::Current,
        0b01 => PageControl::Changeable,
        0b10 => PageControl::Default,
        _ => PageControl::Saved,
    };
    let (code, subpage) = (c.cdb[2] & 0x3f, c.cdb[3]);
    if !matches!(subpage, 0x00 | 0xff) {
        return Err(Sense::cdb_field(3));
    }
    let state = c.unit.state();
    if code == page::ALL {
        return Ok(state
            .modes
            .all()
            .iter()
            .flat_map(|page| page.values(control))
            .collect());
    }
    match state.modes.page(code) {
        Some(page) => Ok(page.values(control)),
        None => Err(Sense::cdb_bit(2, 5)),
    }
}
