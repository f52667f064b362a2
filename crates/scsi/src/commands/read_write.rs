//! READ, WRITE and SYNCHRONIZE CACHE (SBC-4, 5.10 to 5.45): the commands of the request path.
//!
//! None of these allocates or locks, except for a read with a buffer that ends inside a block.

use std::mem;

use block::{AtomicWrites, IoFlags, IoOutcome, IoRequest};

use super::{Context, Planned, good};
use crate::command::{be16, be24, be32, be64};
use crate::logical_unit::{DiskId, Word};
use crate::plan::{DirectIo, Plan, PlanStep, Program, Run, SCRATCH_MAX};
use crate::response::{Residual, Response, Status};
use crate::sense::{Sense, SenseCode};

/// Maximum transfer length of one command in bytes, for the block limits page.
pub const TRANSFER_MAX: u64 = 32 << 20;

/// FUA and FUA_NV: data on the medium is in non-volatile memory.
const FUA: u8 = 0x08 | 0x02;

#[inline]
pub(super) fn read_6(c: &Context<'_>) -> Planned {
    let (lba, blocks) = range_6(c);
    read(c, lba, blocks, 4)
}

#[inline]
pub(super) fn read_10(c: &Context<'_>) -> Planned {
    read(c, be32(c.cdb, 2).into(), be16(c.cdb, 7).into(), 7)
}

#[inline]
pub(super) fn read_12(c: &Context<'_>) -> Planned {
    read(c, be32(c.cdb, 2).into(), be32(c.cdb, 6).into(), 6)
}

#[inline]
pub(super) fn read_16(c: &Context<'_>) -> Planned {
    read(c, be64(c.cdb, 2), be32(c.cdb, 10).into(), 10)
}

#[inline]
pub(super) fn write_6(c: &Context<'_>) -> Planned {
    let (lba, blocks) = range_6(c);
    write(c, lba, blocks, 0, 4)
}

#[inline]
pub(super) fn write_10(c: &Context<'_>) -> Planned {
    write(c, be32(c.cdb, 2).into(), be16(c.cdb, 7).into(), c.cdb[1], 7)
}

#[inline]
pub(super) fn write_12(c: &Context<'_>) -> Planned {
    write(c, be32(c.cdb, 2).into(), be32(c.cdb, 6).into(), c.cdb[1], 6)
}

#[inline]
pub(super) fn write_16(c: &Context<'_>) -> Planned {
    write(c, be64(c.cdb, 2), be32(c.cdb, 10).into(), c.cdb[1], 10)
}

/// Returns LBA and length: 21 bits of LBA; a transfer length of 0 means 256 blocks (SBC-4, 5.14).
fn range_6(c: &Context<'_>) -> (u64, u64) {
    let lba = be24(c.cdb, 1) & 0x1f_ffff;
    let blocks = if c.cdb[4] == 0 { 256 } else { c.cdb[4].into() };
    (lba.into(), blocks)
}

#[inline]
fn read(c: &Context<'_>, lba: u64, blocks: u64, length_at: u16) -> Planned {
    let (offset, length) = c.range(lba, blocks)?;
    if length > TRANSFER_MAX {
        return Err(Sense::cdb_field(length_at));
    }
    if length == 0 || c.data_in < length {
        return read_short(c, offset, length);
    }
    Ok(direct(
        c,
        IoRequest::read(offset, length),
        length,
        c.data_in,
    ))
}

/// Returns the atomic writes of the unit's disk; `None` if the unit does not support WRITE ATOMIC.
pub(super) fn atomic_writes(c: &Context<'_>) -> Option<AtomicWrites> {
    c.unit.state().info.atomic_writes
}

/// WRITE ATOMIC(16): a write that is executed and visible as a whole, within the limits of the block limits page.
pub(super) fn write_atomic_16(c: &Context<'_>) -> Planned {
    let Some(atomic) = atomic_writes(c) else {
        return Err(Sense::illegal_request(SenseCode::INVALID_OPCODE));
    };
    let (lba, blocks) = (be64(c.cdb, 2), u64::from(be16(c.cdb, 12)));
    let plan = write(c, lba, blocks, c.cdb[1], 12)?;
    let shift = c.unit.geometry().block_shift();
    if !lba.is_multiple_of(u64::from(atomic.unit >> shift).max(1)) {
        return Err(Sense::cdb_field(2));
    }
    // The range has been checked: neither product overflows.
    let wanted = blocks << shift;
    if !atomic.allow(lba << shift, wanted) {
        return Err(Sense::cdb_field(12));
    }
    if c.data_out < wanted {
        return Ok(Plan::Done(too_short(wanted, c.data_out)));
    }
    Ok(match plan {
        Plan::Io(io) => Plan::Io(DirectIo {
            exclusive: true,
            request: io.request.flagged(IoFlags::ATOMIC),
            ..io
        }),
        plan => plan,
    })
}

/// Returns FUA if byte 1 requests it or the cache is disabled.
#[inline]
pub(super) fn force_unit_access(c: &Context<'_>) -> IoFlags {
    if c.cdb[1] & FUA != 0 || c.word.has(Word::WRITE_THROUGH) {
        IoFlags::FUA
    } else {
        IoFlags::NONE
    }
}

/// PRE-FETCH(10). Checks the range only. GOOD means that the blocks did not all fit into the cache (SBC-4, 5.7).
pub(super) fn pre_fetch_10(c: &Context<'_>) -> Planned {
    c.range(be32(c.cdb, 2).into(), be16(c.cdb, 7).into())?;
    good()
}

pub(super) fn pre_fetch_16(c: &Context<'_>) -> Planned {
    c.range(be64(c.cdb, 2), be32(c.cdb, 10).into())?;
    good()
}

#[inline]
fn write(c: &Context<'_>, lba: u64, blocks: u64, byte1: u8, length_at: u16) -> Planned {
    c.check_writable()?;
    let (offset, length) = c.range(lba, blocks)?;
    if length > TRANSFER_MAX {
        return Err(Sense::cdb_field(length_at));
    }
    let fits = match write_length(c, length) {
        Ok(fits) => fits,
        Err(response) => return Ok(Plan::Done(response)),
    };
    let mut request = IoRequest::write(offset, fits);
    if byte1 & FUA != 0 || c.word.has(Word::WRITE_THROUGH) {
        request = request.flagged(IoFlags::FUA);
    }
    Ok(direct(c, request, length, c.data_out))
}

/// Returns the length of a write, or the response if there is nothing to write.
///
/// Shorter data-out of whole blocks is written, and the rest is reported as overflow. Data-out that ends inside a block is refused: a
/// partial block must be an error.
#[inline]
pub(super) fn write_length(c: &Context<'_>, length: u64) -> Result<u64, Response> {
    if length > 0 && c.data_out >= length {
        return Ok(length);
    }
    let residual = Residual::between(length, c.data_out);
    if length == 0 || c.data_out == 0 {
        return Err(Response {
            residual,
            ..Response::good()
        });
    }
    if whole_blocks(c, c.data_out) != c.data_out {
        return Err(too_short(length, c.data_out));
    }
    Ok(c.data_out)
}

/// Returns the refusal of data-out that is too short to be written.
fn too_short(wanted: u64, came: u64) -> Response {
    let sense = Sense::illegal_request(SenseCode::INVALID_FIELD_IN_INFORMATION_UNIT);
    Response {
        residual: Residual::between(wanted, came),
        ..Response::check(sense)
    }
}

#[inline]
fn direct(c: &Context<'_>, request: IoRequest, wanted: u64, expected: u64) -> Plan {
    Plan::Io(DirectIo {
        disk: c.unit.disk(),
        request,
        exclusive: false,
        residual: Residual::between(wanted, expected),
        success: Status::Good,
        expected,
        descriptor_sense: c.word.has(Word::DESCRIPTOR_SENSE),
    })
}

fn whole_blocks(c: &Context<'_>, bytes: u64) -> u64 {
    bytes & !(u64::from(c.unit.geometry().block_size()) - 1)
}

/// Plans a read of no blocks, or one with a buffer shorter than the CDB's length.
#[cold]
fn read_short(c: &Context<'_>, offset: u64, length: u64) -> Planned {
    let fits = length.min(c.data_in);
    let residual = Residual::between(length, c.data_in);
    if fits == 0 {
        return Ok(Plan::Done(Response {
            residual,
            ..Response::good()
        }));
    }
    if whole_blocks(c, fits) == fits {
        return Ok(direct(c, IoRequest::read(offset, fits), length, c.data_in));
    }
    let block_size = u64::from(c.unit.geometry().block_size());
    let reading = fits.next_multiple_of(block_size);
    let scratch_length = reading.min(SCRATCH_MAX as u64);
    let program = ReadPart {
        disk: c.unit.disk(),
        offset,
        left: reading,
        fits: fits as usize,
        residual,
        data: Vec::new(),
    };
    Ok(Run::plan(program, scratch_length as usize))
}

/// Reads whole blocks into scratch memory and returns the part that fits the initiator's buffer.
struct ReadPart {
    disk: DiskId,
    offset: u64,
    left: u64,
    fits: usize,
    residual: Residual,
    data: Vec<u8>,
}

impl Program for ReadPart {
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> PlanStep {
        let length = self.left.min(SCRATCH_MAX as u64);
        match last {
            None => {}
            Some(Err(error)) => return PlanStep::Done(Sense::of_io_error(error).into()),
            Some(Ok(())) => {
                self.data
                    .extend_from_slice(scratch.get(..length as usize).unwrap_or_default());
                self.offset += length;
                self.left -= length;
            }
        }
        if self.left == 0 {
            let residual = self.residual;
            let data = mem::take(&mut self.data);
            return PlanStep::Done(Response {
                residual,
                ..Response::data(data, self.fits)
            });
        }
        let length = self.left.min(SCRATCH_MAX as u64);
        let request = IoRequest::read(self.offset, length);
        PlanStep::Io {
            disk: self.disk,
            request,
            scratch: 0..length as usize,
        }
    }
}

pub(super) fn synchronize_cache_10(c: &Context<'_>) -> Planned {
    synchronize_cache(c, be32(c.cdb, 2).into(), be16(c.cdb, 7).into())
}

pub(super) fn synchronize_cache_16(c: &Context<'_>) -> Planned {
    synchronize_cache(c, be64(c.cdb, 2), be32(c.cdb, 10).into())
}

/// Flushes the whole cache, for any range, and ignores IMMED: both are allowed (SBC-4, 5.37), and GOOD then means that the data are
/// durable.
fn synchronize_cache(c: &Context<'_>, lba: u64, blocks: u64) -> Planned {
    c.range(lba, blocks)?;
    if c.unit.geometry().capacity().0 == 0 {
        return good();
    }
    Ok(direct(c, IoRequest::flush(), 0, 0))
}
