//! RECEIVE COPY RESULTS (SPC-4, 6.23 to 6.28), and the third-party copy page.

use super::extended_copy::{
    BLOCK_TO_BLOCK, BLOCK_TO_BLOCK_OFFSET, DESCRIPTORS_LENGTH_MAX, IDENTIFICATION,
    SEGMENT_BYTES_MAX, SEGMENTS_MAX, TARGETS_MAX,
};
use super::{Context, Planned};
use crate::command::be32;
use crate::copy_results::{CopyResult, CopyStatus};
use crate::sense::Sense;

const COPY_STATUS: u8 = 0x00;
const OPERATING_PARAMETERS: u8 = 0x03;
const FAILED_SEGMENT_DETAILS: u8 = 0x04;
const COPY_STATUS_LID4: u8 = 0x05;

/// Supported descriptor type codes, ascending.
const TYPE_CODES: [u8; 3] = [BLOCK_TO_BLOCK, BLOCK_TO_BLOCK_OFFSET, IDENTIFICATION];

pub(super) fn receive_copy_results(c: &Context<'_>) -> Planned {
    let data = match c.cdb[1] & 0x1f {
        COPY_STATUS => copy_status(&result(c, c.cdb[2].into(), 2)?),
        OPERATING_PARAMETERS => operating_parameters(),
        FAILED_SEGMENT_DETAILS => failed_segment_details(&result(c, c.cdb[2].into(), 2)?)?,
        COPY_STATUS_LID4 => copy_status_lid4(&result(c, be32(c.cdb, 2), 2)?),
        _ => return Err(Sense::cdb_bit(1, 4)),
    };
    c.data(data, be32(c.cdb, 10))
}

fn result(c: &Context<'_>, list: u32, at: u16) -> Result<CopyResult, Sense> {
    let state = c.unit.state();
    state
        .copies
        .get(c.nexus.id(), list)
        .cloned()
        .ok_or(Sense::cdb_field(at))
}

fn status_code(result: &CopyResult) -> u8 {
    match result.status {
        CopyStatus::Running => 0x00,
        CopyStatus::Done => 0x01,
        CopyStatus::Failed => 0x02,
    }
}

/// Returns the transfer count in KiB: units code 01h.
fn kibibytes(result: &CopyResult) -> u32 {
    u32::try_from(result.bytes >> 10).unwrap_or(u32::MAX)
}

fn copy_status(result: &CopyResult) -> Vec<u8> {
    let [high, low] = result.segments.to_be_bytes();
    let mut data = vec![0, 0, 0, 8, status_code(result), high, low, 0x01];
    data.extend(kibibytes(result).to_be_bytes());
    data
}

fn copy_status_lid4(result: &CopyResult) -> Vec<u8> {
    let sense = &result.sense;
    let mut data = (28 + sense.len() as u32).to_be_bytes().to_vec();
    let status = match result.status {
        CopyStatus::Running => 0x10,
        CopyStatus::Done => 0x01,
        CopyStatus::Failed => 0x02,
    };
    let ended = if result.status == CopyStatus::Failed {
        0x02
    } else {
        0x00
    };
    data.extend([
        0x00,
        status,
        0,
        1,
        0,
        0,
        0,
        0,
        ended,
        sense.len() as u8,
        sense.len() as u8,
        0x01,
    ]);
    data.extend(u64::from(kibibytes(result)).to_be_bytes());
    data.extend(result.segments.to_be_bytes());
    data.extend([0; 6]);
    data.extend(sense);
    data
}

fn failed_segment_details(result: &CopyResult) -> Result<Vec<u8>, Sense> {
    if result.status != CopyStatus::Failed {
        return Err(Sense::cdb_field(2));
    }
    let mut data = vec![0; 60];
    data[..4].copy_from_slice(&(56 + result.sense.len() as u32).to_be_bytes());
    data[56] = 0x02; // CHECK CONDITION
    data[58..60].copy_from_slice(&(result.sense.len() as u16).to_be_bytes());
    data.extend(&result.sense);
    Ok(data)
}

fn operating_parameters() -> Vec<u8> {
    let mut data = vec![0; 44];
    data[4] = 0x01; // SNLID: a list identifier may be left out
    data[8..10].copy_from_slice(&(TARGETS_MAX as u16).to_be_bytes());
    data[10..12].copy_from_slice(&(SEGMENTS_MAX as u16).to_be_bytes());
    data[12..16].copy_from_slice(&(DESCRIPTORS_LENGTH_MAX as u32).to_be_bytes());
    data[16..20].copy_from_slice(&(SEGMENT_BYTES_MAX as u32).to_be_bytes());
    data[34..36].copy_from_slice(&64u16.to_be_bytes()); // total concurrent copies
    data[36] = 64; // maximum concurrent copies
    data[37] = 9; // granularity of data segments: 512 bytes
    data[43] = TYPE_CODES.len() as u8;
    data.extend(TYPE_CODES);
    let available = data.len() as u32 - 4;
    data[..4].copy_from_slice(&available.to_be_bytes());
    data
}

/// Returns the third-party copy page (SPC-4, 7.8.17).
pub(super) fn third_party_copy_page() -> Vec<u8> {
    let mut page = Vec::new();
    // Supported commands: EXTENDED COPY 00h and 01h, RECEIVE COPY RESULTS 00h, 03h, 04h and 05h.
    let commands = [0x83, 2, 0x00, 0x01, 0x84, 4, 0x00, 0x03, 0x04, 0x05];
    let mut body = vec![commands.len() as u8];
    body.extend(commands);
    descriptor(&mut page, 0x0001, body);
    // Parameter data.
    let mut body = vec![0; 28];
    body[4..6].copy_from_slice(&(TARGETS_MAX as u16).to_be_bytes());
    body[6..8].copy_from_slice(&(SEGMENTS_MAX as u16).to_be_bytes());
    body[8..12].copy_from_slice(&(DESCRIPTORS_LENGTH_MAX as u32).to_be_bytes());
    descriptor(&mut page, 0x0004, body);
    // Supported descriptors.
    let mut body = vec![TYPE_CODES.len() as u8];
    body.extend(TYPE_CODES);
    descriptor(&mut page, 0x0008, body);
    // Supported CSCD descriptor identifiers: only those in the list.
    descriptor(&mut page, 0x000c, vec![0, 0]);
    // General copy operations.
    let mut body = vec![0; 32];
    body[..4].copy_from_slice(&64u32.to_be_bytes());
    body[4..8].copy_from_slice(&64u32.to_be_bytes());
    body[8..12].copy_from_slice(&(SEGMENT_BYTES_MAX as u32).to_be_bytes());
    body[12] = 9;
    descriptor(&mut page, 0x8001, body);
    page
}

/// Adds a descriptor: type, length, body padded to a multiple of four.
fn descriptor(page: &mut Vec<u8>, kind: u16, mut body: Vec<u8>) {
    body.resize(body.len().next_multiple_of(4), 0);
    page.extend(kind.to_be_bytes());
    page.extend((body.len() as u16).to_be_bytes());
    page.extend(body);
}
