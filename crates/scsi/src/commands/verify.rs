//! VERIFY (SBC-4, 5.40 to 5.42): reads the medium, and compares it if BYTCHK requests that.

use std::sync::Arc;

use block::{IoOutcome, IoRequest};

use super::{Context, Planned, good};
use crate::command::{be16, be32, be64};
use crate::logical_unit::DiskId;
use crate::plan::{DATA_OUT_MAX, Pending, Plan, PlanStep, Program, Run, SCRATCH_MAX};
use crate::sense::{Sense, SenseCode, SenseKey};

pub(super) fn verify_10(c: &Context<'_>) -> Planned {
    verify(c, be32(c.cdb, 2).into(), be16(c.cdb, 7).into(), 7)
}

pub(super) fn verify_12(c: &Context<'_>) -> Planned {
    verify(c, be32(c.cdb, 2).into(), be32(c.cdb, 6).into(), 6)
}

pub(super) fn verify_16(c: &Context<'_>) -> Planned {
    verify(c, be64(c.cdb, 2), be32(c.cdb, 10).into(), 10)
}

fn verify(c: &Context<'_>, lba: u64, blocks: u64, length_at: u16) -> Planned {
    let (offset, length) = c.range(lba, blocks)?;
    let block_size = u64::from(c.unit.geometry().block_size());
    let data = match (c.cdb[1] >> 1) & 0b11 {
        0b00 => 0,
        0b01 => length,
        0b11 => block_size,
        _ => return Err(Sense::cdb_bit(1, 2)),
    };
    if length == 0 {
        return good();
    }
    if data > DATA_OUT_MAX as u64 {
        return Err(Sense::cdb_field(length_at));
    }
    let disk = c.unit.disk();
    if data == 0 {
        return Ok(Verify::plan(disk, offset, length, Arc::default()));
    }
    let repeats = data < length;
    Ok(Pending::keeping(data, c.data_out, move |mut data| {
        // If the data-out is too short, the whole blocks are compared and the rest is reported as overflow.
        let whole = data.len() as u64 / block_size * block_size;
        data.truncate(whole as usize);
        let length = if repeats && whole > 0 {
            length
        } else {
            length.min(whole)
        };
        Verify::plan(disk, offset, length, Arc::new(data))
    }))
}

/// Reads a range in pieces and compares it with the data, which repeat if they are shorter.
pub(super) struct Verify {
    disk: DiskId,
    offset: u64,
    length: u64,
    done: u64,
    data: Arc<Vec<u8>>,
}

impl Verify {
    pub fn new(disk: DiskId, offset: u64, length: u64, data: Arc<Vec<u8>>) -> Verify {
        Verify {
            disk,
            offset,
            length,
            done: 0,
            data,
        }
    }

    fn plan(disk: DiskId, offset: u64, length: u64, data: Arc<Vec<u8>>) -> Plan {
        let verify = Verify::new(disk, offset, length, data);
        Run::plan(verify, length.min(SCRATCH_MAX as u64) as usize)
    }

    fn piece(&self) -> u64 {
        (self.length - self.done).min(SCRATCH_MAX as u64)
    }

    /// Returns true if the piece equals the data. Pieces begin at multiples of every block size.
    fn same(&self, read: &[u8]) -> bool {
        if self.data.is_empty() {
            return true;
        }
        let length = self.data.len() as u64;
        let start = (self.done % length) as usize;
        let expected = self.data.iter().cycle().skip(start);
        if let Some(expected) = self.data.get(start..start + read.len()) {
            return expected == read;
        }
        read.iter().zip(expected).all(|(a, b)| a == b)
    }
}

impl Program for Verify {
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> PlanStep {
        match last {
            None => {}
            Some(Err(error)) => return PlanStep::Done(Sense::of_io_error(error).into()),
            Some(Ok(())) => {
                let piece = self.piece();
                if !self.same(scratch.get(..piece as usize).unwrap_or_default()) {
                    let code = SenseCode::MISCOMPARE_DURING_VERIFY;
                    return PlanStep::Done(Sense::new(SenseKey::Miscompare, code).into());
                }
                self.done += piece;
            }
        }
        let piece = self.piece();
        if piece == 0 {
            return PlanStep::Done(crate::response::Response::good());
        }
        let request = IoRequest::read(self.offset + self.done, piece);
        PlanStep::Io {
            disk: self.disk,
            request,
            scratch: 0..piece as usize,
        }
    }
}
