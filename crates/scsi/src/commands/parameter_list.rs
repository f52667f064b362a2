//! Refuses bits of parameter lists that are not honoured.

use crate::sense::Sense;

/// Refuses a byte with bits outside `honoured`. The error points to the first such bit, or to the first bit of its field in `fields`
/// (SPC-5, 4.4.2.4.2).
pub(super) fn check_bits(at: u16, byte: u8, honoured: u8, fields: &[u8]) -> Result<(), Sense> {
    let refused = byte & !honoured;
    if refused == 0 {
        return Ok(());
    }
    let first = |bits: u8| 7 - (bits.leading_zeros().min(7) as u8);
    let bit = first(refused);
    let field = fields.iter().find(|&field| field & 1 << bit != 0);
    Err(Sense::parameter_bit(
        at,
        field.map_or(bit, |&field| first(field)),
    ))
}

/// Refuses reserved and obsolete bytes that are not zero.
pub(super) fn check_zero(at: u16, bytes: &[u8]) -> Result<(), Sense> {
    (at..)
        .zip(bytes)
        .try_for_each(|(at, &byte)| check_bits(at, byte, 0, &[]))
}
