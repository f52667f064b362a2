//! LOG SENSE (SPC-5, 6.8), SEND DIAGNOSTIC (6.42), and READ DEFECT DATA (SBC-4, 5.20 and 5.21) with an empty list: no physical device with
//! health data is involved.

use super::{Context, Planned, good};
use crate::command::{be16, be32};
use crate::sense::Sense;

const SUPPORTED_PAGES: u8 = 0x00;
const TEMPERATURE: u8 = 0x0d;
const INFORMATIONAL_EXCEPTIONS: u8 = 0x2f;

pub(super) fn log_sense(c: &Context<'_>) -> Planned {
    let (page, subpage) = (c.cdb[2] & 0x3f, c.cdb[3]);
    let body = match (page, subpage) {
        (SUPPORTED_PAGES, 0x00) => vec![SUPPORTED_PAGES, TEMPERATURE, INFORMATIONAL_EXCEPTIONS],
        (SUPPORTED_PAGES, 0xff) => {
            vec![
                SUPPORTED_PAGES,
                0,
                SUPPORTED_PAGES,
                0xff,
                TEMPERATURE,
                0,
                INFORMATIONAL_EXCEPTIONS,
                0,
            ]
        }
        // Temperature and reference temperature: not available.
        (TEMPERATURE, 0x00) => vec![0, 0, 0x03, 2, 0, 0xff, 0, 1, 0x03, 2, 0, 0xff],
        // No exception; temperature not available.
        (INFORMATIONAL_EXCEPTIONS, 0x00) => vec![0, 0, 0x03, 4, 0, 0, 0xff, 0],
        _ => return Err(Sense::cdb_bit(2, 5)),
    };
    let body = match page {
        SUPPORTED_PAGES => body.as_slice(), // has no parameters
        _ => from_parameter(&body, be16(c.cdb, 5)).ok_or(Sense::cdb_field(5))?,
    };
    let flags = if subpage == 0 { 0x00 } else { 0x40 }; // SPF
    let [high, low] = (body.len() as u16).to_be_bytes();
    let mut data = vec![flags | page, subpage, high, low];
    data.extend(body);
    c.data(data, be16(c.cdb, 7).into())
}

/// Returns the parameters of a page from a code on; `None` if there are none.
fn from_parameter(mut parameters: &[u8], first: u16) -> Option<&[u8]> {
    while let &[high, low, _, length, ..] = parameters {
        if u16::from_be_bytes([high, low]) >= first {
            return Some(parameters);
        }
        parameters = parameters.get(4 + usize::from(length)..)?;
    }
    None
}

pub(super) fn read_defect_data_10(c: &Context<'_>) -> Planned {
    // The requested lists and format, without defects.
    c.data(vec![0, c.cdb[2] & 0x1f, 0, 0], be16(c.cdb, 7).into())
}

pub(super) fn read_defect_data_12(c: &Context<'_>) -> Planned {
    c.data(vec![0, c.cdb[1] & 0x1f, 0, 0, 0, 0, 0, 0], be32(c.cdb, 6))
}

/// SEND DIAGNOSTIC. The default self-test passes. Other tests and diagnostic pages are not supported. PF is ignored without a page. DEVOFFL
/// and UNITOFFL permit side effects that the test does not have.
pub(super) fn send_diagnostic(_: &Context<'_>) -> Planned {
    good()
}
