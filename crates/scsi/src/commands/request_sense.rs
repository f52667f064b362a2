//! REQUEST SENSE (SPC-5, 6.39): returns a pending unit attention, or the state of a background operation, as data.

use super::{Context, Planned};
use crate::sense::{Sense, SenseCode, SenseKey};

pub(super) fn request_sense(c: &Context<'_>) -> Planned {
    let sense = match c.nexus.pop_attention(c.unit.id()) {
        Some(code) => Sense::new(SenseKey::UnitAttention, code),
        None => {
            let none = Sense::new(SenseKey::NoSense, SenseCode::NONE);
            c.unit.state().operation_sense().unwrap_or(none)
        }
    };
    let sense = Sense {
        descriptor_format: descriptor_format(c.cdb[1]),
        ..sense
    };
    c.data(sense.encode().to_vec(), c.cdb[4].into())
}

/// Returns DESC of byte 1.
pub(super) fn descriptor_format(byte1: u8) -> bool {
    byte1 & 0x01 != 0
}
