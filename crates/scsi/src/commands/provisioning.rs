//! UNMAP and WRITE SAME (SBC-4, 5.38, 5.53 and 5.54).
//!
//! With ANCHOR, blocks read as zeroes like unmapped ones, but keep or allocate the space for a later write (4.7.4.4): zeroes are written
//! without unmapping. Supported for disks with anchored blocks in GET LBA STATUS.

use block::{Blocks, Geometry, IoFlags, IoOutcome, IoRequest, Lba};

use super::parameter_list::check_zero;
use super::{Context, Planned, good, without_data};
use crate::command::{be16, be32, be64};
use crate::logical_unit::{DiskId, Word};
use crate::plan::{Pending, Plan, PlanStep, Program, Run, SCRATCH_MAX};
use crate::response::Response;
use crate::sense::{Sense, SenseCode};

/// Maximum number of descriptors of one UNMAP, for the block limits page.
pub(super) const UNMAP_DESCRIPTORS_MAX: usize = 256;

/// Maximum number of blocks of one WRITE SAME, for the block limits page: 512 MiB of 512-byte blocks, and 32,768 larger ones. Initiators
/// assume that a maximum above 65,535 also applies to their writes.
pub(super) const fn write_same_blocks_max(block_shift: u32) -> u64 {
    if block_shift == 9 { 0x10_0000 } else { 0x8000 }
}

pub(super) fn may_unmap(c: &Context<'_>) -> bool {
    c.unit.state().info.discard_granularity.is_some()
}

pub(super) fn unmap(c: &Context<'_>) -> Planned {
    if !may_unmap(c) {
        return Err(Sense::illegal_request(SenseCode::INVALID_OPCODE));
    }
    let anchor = c.cdb[1] & 0x01 != 0;
    if anchor && !c.unit.state().info.anchors {
        return Err(Sense::cdb_bit(1, 0));
    }
    c.check_writable()?;
    let length = be16(c.cdb, 7);
    if length == 0 {
        return good();
    }
    let unit = std::sync::Arc::clone(c.unit);
    // Zeroes are written data; a discarded range has none.
    let flags = match anchor && c.word.has(Word::WRITE_THROUGH) {
        true => IoFlags::FUA,
        false => IoFlags::NONE,
    };
    let descriptor_sense = c.word.has(Word::DESCRIPTOR_SENSE);
    Ok(Pending::plan(
        length.into(),
        c.data_out,
        move |list: &[u8]| match unmap_ranges(unit.geometry(), usize::from(length), list)
            .or_else(|_| unmap_ranges(unit.geometry_of_refused(), usize::from(length), list))
        {
            Ok(ranges) => {
                let unmap = Unmap {
                    disk: unit.disk(),
                    anchor,
                    flags,
                    ranges: ranges.into_iter(),
                };
                unmap.plan(descriptor_sense)
            }
            Err(sense) => Plan::Done(Response::check(sense)),
        },
    ))
}

/// Parses the byte ranges of a parameter list (SBC-4, 5.38.2). Nothing is unmapped unless the whole list is valid.
fn unmap_ranges(geometry: Geometry, length: usize, list: &[u8]) -> Result<Vec<(u64, u64)>, Sense> {
    let too_short = Sense::illegal_request(SenseCode::PARAMETER_LIST_LENGTH_ERROR);
    if list.len() < length {
        return Err(too_short);
    }
    let Some((header, rest)) = list.split_first_chunk::<8>() else {
        return Err(too_short);
    };
    check_zero(4, &header[4..])?;
    let described = usize::from(u16::from_be_bytes([header[2], header[3]])).min(rest.len());
    // A truncated descriptor is ignored.
    let (descriptors, _) = rest.get(..described).unwrap_or_default().as_chunks::<16>();
    if descriptors.len() > UNMAP_DESCRIPTORS_MAX {
        return Err(Sense::parameter_field(2));
    }
    let mut ranges = Vec::with_capacity(descriptors.len());
    for (at, descriptor) in descriptors.iter().enumerate() {
        check_zero((8 + 16 * at + 12) as u16, &descriptor[12..])?;
        let (lba, blocks) = (be64(descriptor, 0), be32(descriptor, 8));
        let range = geometry.check(Lba(lba), Blocks(blocks.into()));
        let range = range.map_err(|_| Sense::illegal_request(SenseCode::LBA_OUT_OF_RANGE))?;
        if range.1 > 0 {
            ranges.push(range);
        }
    }
    Ok(ranges)
}

/// Discards ranges, or with `anchor` zeroes them and keeps their space.
struct Unmap {
    disk: DiskId,
    anchor: bool,
    flags: IoFlags,
    ranges: std::vec::IntoIter<(u64, u64)>,
}

impl Unmap {
    fn plan(self, descriptor_sense: bool) -> Plan {
        match *self.ranges.as_slice() {
            [] => Plan::Done(Response::good()),
            [range] => without_data(self.disk, self.request(range), descriptor_sense),
            _ => Run::plan(self, 0),
        }
    }

    fn request(&self, (offset, length): (u64, u64)) -> IoRequest {
        let request = match self.anchor {
            true => IoRequest::write_zeroes(offset, length),
            false => IoRequest::discard(offset, length),
        };
        request.flagged(self.flags)
    }
}

impl Program for Unmap {
    fn next(&mut self, last: Option<IoOutcome>, _scratch: &mut [u8]) -> PlanStep {
        if let Some(Err(error)) = last {
            return PlanStep::Done(Sense::of_io_error(error).into());
        }
        match self.ranges.next() {
            Some(range) => PlanStep::Io {
                disk: self.disk,
                request: self.request(range),
                scratch: 0..0,
            },
            None => PlanStep::Done(Response::good()),
        }
    }
}

pub(super) fn write_same_10(c: &Context<'_>) -> Planned {
    write_same(c, be32(c.cdb, 2).into(), be16(c.cdb, 7).into(), false, 7)
}

pub(super) fn write_same_16(c: &Context<'_>) -> Planned {
    let no_data_out = c.cdb[1] & 0x01 != 0;
    write_same(c, be64(c.cdb, 2), be32(c.cdb, 10).into(), no_data_out, 10)
}

fn write_same(
    c: &Context<'_>,
    lba: u64,
    blocks: u64,
    no_data_out: bool,
    length_at: u16,
) -> Planned {
    let unmap = c.cdb[1] & 0x08 != 0;
    let anchor = c.cdb[1] & 0x10 != 0;
    let (may_unmap, may_anchor, may_zero) = {
        let state = c.unit.state();
        let info = &state.info;
        (
            info.discard_granularity.is_some(),
            info.anchors,
            info.write_zeroes,
        )
    };
    if anchor && !(unmap && may_anchor) {
        return Err(Sense::cdb_bit(1, 4));
    }
    if unmap && !may_unmap {
        return Err(Sense::cdb_bit(1, 3));
    }
    c.check_writable()?;
    let geometry = c.unit.geometry();
    // Zero blocks mean all blocks to the end (WSNZ is 0).
    let blocks = match blocks {
        0 if lba >= geometry.capacity().0 => {
            return Err(Sense::illegal_request(SenseCode::LBA_OUT_OF_RANGE));
        }
        0 => geometry.capacity().0 - lba,
        blocks => blocks,
    };
    let (offset, length) = c.range(lba, blocks)?;
    if blocks > write_same_blocks_max(geometry.block_shift()) {
        return Err(Sense::cdb_field(length_at));
    }
    let fill = Filling {
        disk: c.unit.disk(),
        offset,
        length,
        unmap,
        anchor,
        may_zero,
        force: c.word.has(Word::WRITE_THROUGH),
        descriptor_sense: c.word.has(Word::DESCRIPTOR_SENSE),
    };
    let block_size = u64::from(geometry.block_size());
    if no_data_out {
        return Ok(fill.with(&[0]));
    }
    if c.data_out != block_size {
        return Err(Sense::illegal_request(SenseCode::INVALID_FIELD_IN_CDB));
    }
    Ok(Pending::plan(
        block_size,
        c.data_out,
        move |block: &[u8]| fill.with(block),
    ))
}

/// A range to be filled with a block.
pub(super) struct Filling {
    pub disk: DiskId,
    pub offset: u64,
    pub length: u64,
    /// A zero block may be written by deallocating the space.
    pub unmap: bool,
    /// With `unmap`: the blocks become zeroes, and the space is kept or allocated.
    pub anchor: bool,
    /// The disk can write zeroes without data-out.
    pub may_zero: bool,
    pub force: bool,
    pub descriptor_sense: bool,
}

impl Filling {
    /// Plans the write. Zeroes are one I/O if the disk supports that; other patterns are written in pieces. With UNMAP the pattern is
    /// ignored, as in other targets: initiators send zeroes. SBC-4, 4.7.3.4.4, requires that another pattern be written; libiscsi's suite
    /// (WriteSame10.UnmapUntilEnd) sends one and expects zeroes.
    pub fn with(self, pattern: &[u8]) -> Plan {
        let pattern = if self.unmap { &[0] } else { pattern };
        let mut flags = if self.force {
            IoFlags::FUA
        } else {
            IoFlags::NONE
        };
        if self.may_zero && pattern.iter().all(|&byte| byte == 0) {
            if self.unmap && !self.anchor {
                flags = flags.with(IoFlags::UNMAP);
            }
            let request = IoRequest::write_zeroes(self.offset, self.length).flagged(flags);
            return without_data(self.disk, request, self.descriptor_sense);
        }
        let fill = Fill {
            disk: self.disk,
            offset: self.offset,
            left: self.length,
            flags,
            pattern: pattern.to_vec(),
        };
        Run::plan(fill, self.length.min(SCRATCH_MAX as u64) as usize)
    }
}

/// Writes a pattern over a range, one piece of scratch memory at a time.
pub(super) struct Fill {
    pub disk: DiskId,
    pub offset: u64,
    pub left: u64,
    pub flags: IoFlags,
    /// As long as a block, or one byte.
    pub pattern: Vec<u8>,
}

impl Program for Fill {
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> PlanStep {
        let piece = self.left.min(SCRATCH_MAX as u64);
        match last {
            None => {
                for chunk in scratch.chunks_mut(self.pattern.len().max(1)) {
                    if let Some(pattern) = self.pattern.get(..chunk.len()) {
                        chunk.copy_from_slice(pattern);
                    }
                }
            }
            Some(Err(error)) => return PlanStep::Done(Sense::of_io_error(error).into()),
            Some(Ok(())) => {
                self.offset += piece;
                self.left -= piece;
            }
        }
        let piece = self.left.min(SCRATCH_MAX as u64);
        if piece == 0 {
            return PlanStep::Done(Response::good());
        }
        let request = IoRequest::write(self.offset, piece).flagged(self.flags);
        PlanStep::Io {
            disk: self.disk,
            request,
            scratch: 0..piece as usize,
        }
    }
}
