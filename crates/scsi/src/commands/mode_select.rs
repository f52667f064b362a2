//! MODE SELECT (SPC-5, 6.12 and 6.13): applies a whole list or nothing.

use std::sync::Arc;

use block::IoRequest;

use super::parameter_list::{check_bits, check_zero};
use super::{Context, Planned, good, without_data};
use crate::command::be16;
use crate::logical_unit::LogicalUnit;
use crate::mode::SelectError;
use crate::nexus::Nexus;
use crate::plan::{Pending, Plan};
use crate::response::Response;
use crate::sense::{Sense, SenseCode};

/// Differences between the two forms of the parameter list header.
#[derive(Clone, Copy)]
struct Header {
    length: usize,
    /// Offset of the block descriptor length, the last field.
    descriptor_length_at: usize,
}

pub(super) fn mode_select_6(c: &Context<'_>) -> Planned {
    mode_select(
        c,
        c.cdb[4].into(),
        Header {
            length: 4,
            descriptor_length_at: 3,
        },
    )
}

pub(super) fn mode_select_10(c: &Context<'_>) -> Planned {
    mode_select(
        c,
        be16(c.cdb, 7).into(),
        Header {
            length: 8,
            descriptor_length_at: 6,
        },
    )
}

fn mode_select(c: &Context<'_>, length: usize, header: Header) -> Planned {
    if c.cdb[1] & 0x10 == 0 {
        return Err(Sense::cdb_bit(1, 4)); // PF
    }
    let save = c.cdb[1] & 0x01 != 0;
    if length == 0 {
        return good();
    }
    let (unit, nexus) = (Arc::clone(c.unit), Arc::clone(c.nexus));
    Ok(Pending::plan(
        length as u64,
        c.data_out,
        move |list: &[u8]| {
            if list.len() < length {
                let code = SenseCode::PARAMETER_LIST_LENGTH_ERROR;
                return Plan::Done(Sense::illegal_request(code).into());
            }
            select(&unit, &nexus, list, header, save)
                .unwrap_or_else(|sense| Plan::Done(sense.into()))
        },
    ))
}

fn select(unit: &LogicalUnit, nexus: &Nexus, list: &[u8], header: Header, save: bool) -> Planned {
    let length_error = Sense::illegal_request(SenseCode::PARAMETER_LIST_LENGTH_ERROR);
    let (head, rest) = list.split_at_checked(header.length).ok_or(length_error)?;
    // MODE DATA LENGTH, WP and DPOFUA are ignored: initiators return the values of MODE SENSE.
    let medium_type_at = if header.length == 8 { 2 } else { 1 };
    check_zero(medium_type_at, &head[usize::from(medium_type_at)..][..1])?;
    if let &[_, _, _, _, long, reserved, ..] = head {
        check_bits(4, long, 0x01, &[])?; // LONGLBA
        check_zero(5, &[reserved])?;
    }
    let long = header.length == 8 && head.get(4).is_some_and(|byte| byte & 0x01 != 0);
    let descriptors = head.get(header.descriptor_length_at..).unwrap_or_default();
    let descriptors = descriptors
        .iter()
        .fold(0, |length, &byte| length << 8 | usize::from(byte));
    let (descriptors, pages) = rest.split_at_checked(descriptors).ok_or(length_error)?;
    check_descriptor(unit, descriptors, long)
        .map_err(|at| Sense::parameter_field((header.length + at) as u16))?;

    let mut state = unit.state();
    let mut modes = state.modes.clone();
    let mut rest = pages;
    while !rest.is_empty() {
        let at = list.len() - rest.len();
        rest = modes.select(rest, save).map_err(|error| match error {
            SelectError::Truncated => length_error,
            SelectError::Field(byte) => Sense::parameter_field((at + byte) as u16),
        })?;
    }
    let changed = modes.differ(&state.modes);
    let cache_goes_off = state.modes.write_cache() && !modes.write_cache();
    let before = std::mem::replace(&mut state.modes, modes);
    if save && let Err(sense) = state.save_modes(unit.directory().store()) {
        // A refused command changes nothing.
        state.modes = before;
        return Err(sense);
    }
    if changed {
        state.attention_all(unit.id(), SenseCode::MODE_PARAMETERS_CHANGED, Some(nexus));
    }
    unit.refresh_word(&state);
    let descriptor_sense = state.modes.descriptor_sense();
    if cache_goes_off {
        // Earlier writes must be as durable as later ones.
        return Ok(without_data(
            unit.disk(),
            IoRequest::flush(),
            descriptor_sense,
        ));
    }
    Ok(Plan::Done(Response::good()))
}

/// Checks that the block descriptor has the current values. Returns the offset of the invalid byte.
fn check_descriptor(unit: &LogicalUnit, descriptor: &[u8], long: bool) -> Result<(), usize> {
    let geometry = unit.geometry();
    let (blocks, size) = match (descriptor, long) {
        ([], _) => return Ok(()),
        (&[.., reserved, _, _, _], false) if descriptor.len() == 8 && reserved != 0 => {
            return Err(4);
        }
        (&[a, b, c, d, _, e, f, g], false) => {
            let blocks = u32::from_be_bytes([a, b, c, d]);
            let blocks = if blocks == u32::MAX { 0 } else { blocks };
            (blocks.into(), u32::from_be_bytes([0, e, f, g]))
        }
        (&[_, _, _, _, _, _, _, _, a, b, c, d, ..], true) if [a, b, c, d] != [0; 4] => {
            return Err(8);
        }
        (&[a, b, c, d, e, f, g, h, _, _, _, _, i, j, k, l], true) => {
            let blocks = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
            let blocks = if blocks == u64::MAX { 0 } else { blocks };
            (blocks, u32::from_be_bytes([i, j, k, l]))
        }
        _ => return Err(0),
    };
    if blocks != 0 && blocks != geometry.capacity().0 {
        return Err(0);
    }
    if size != geometry.block_size() {
        return Err(if long { 12 } else { 5 });
    }
    Ok(())
}
