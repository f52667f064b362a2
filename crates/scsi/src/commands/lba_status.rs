//! GET LBA STATUS (SBC-4, 5.6).
//!
//! A range that reads as zeroes is reported as deallocated: with LBPRZ an initiator cannot tell the two apart. Holes
//! that the disk knows are taken as they are, the rest is read. The scan goes on until the list is full, the unit ends or
//! enough was read.

use std::sync::Arc;

use disk::{IoOutcome, IoRequest};

use super::{Context, Planned};
use crate::command::{be32, be64};
use crate::logical_unit::{DiskId, Medium};
use crate::plan::{Program, Run, SCRATCH_MAX, Step};
use crate::response::Response;
use crate::sense::{Sense, SenseCode};

/// Service action of SERVICE ACTION IN(16).
pub(super) const GET_LBA_STATUS: u8 = 0x12;

/// Most bytes that are read for a list of any length.
const SCAN_MAX: u64 = 4 << 30;

/// The same where there is room for a single one: the question is about a block, not about the map.
const SCAN_MAX_SINGLE: u64 = 4 << 20;

pub(super) fn get_lba_status(c: &Context<'_>) -> Planned {
    let lba = be64(c.cdb, 2);
    let geometry = c.unit.geometry();
    if lba >= geometry.capacity().0 {
        return Err(Sense::illegal_request(SenseCode::LBA_OUT_OF_RANGE));
    }
    let allocation_length = be32(c.cdb, 10);
    let (provisioned, physical) = {
        let state = c.unit.state();
        let info = &state.info;
        (
            info.discard_granularity.is_some() && info.discard_zeroes,
            info.physical_block_size,
        )
    };
    let mut list = List {
        most: (allocation_length.saturating_sub(8) / 16).clamp(1, 4096) as usize,
        extents: Vec::new(),
        allocation_length: allocation_length as usize,
    };
    if !provisioned {
        list.push(lba, geometry.capacity().0 - lba, false);
        return Ok(crate::plan::Plan::Done(list.response()));
    }
    let shift = geometry.block_shift();
    let unit = u64::from(physical.max(geometry.block_size()));
    let offset = lba << shift;
    let end = geometry.capacity_bytes();
    let scan = Scan {
        disk: c.unit.disk(),
        medium: c.unit.medium().cloned(),
        shift,
        unit,
        offset,
        end,
        left: match list.most {
            1 => SCAN_MAX_SINGLE,
            _ => SCAN_MAX,
        },
        list,
    };
    let scratch = usize::try_from(end - offset).unwrap_or(SCRATCH_MAX);
    Ok(Run::plan(scan, SCRATCH_MAX.min(scratch)))
}

/// Most blocks of one descriptor: what its field holds, and whole physical blocks of any size.
const EXTENT_MAX: u64 = 0xffff_ff80;

struct Extent {
    lba: u64,
    blocks: u64,
    deallocated: bool,
}

struct List {
    most: usize,
    extents: Vec<Extent>,
    allocation_length: usize,
}

impl List {
    /// Adds blocks that follow the last ones; false when they begin an extent too many.
    fn push(&mut self, mut lba: u64, mut blocks: u64, deallocated: bool) -> bool {
        while blocks > 0 {
            let room = match self.extents.last() {
                Some(last) if last.deallocated == deallocated => EXTENT_MAX - last.blocks,
                _ => 0,
            };
            if room == 0 {
                if self.extents.len() == self.most {
                    return false;
                }
                self.extents.push(Extent {
                    lba,
                    blocks: 0,
                    deallocated,
                });
                continue;
            }
            let fits = blocks.min(room);
            if let Some(last) = self.extents.last_mut() {
                last.blocks += fits;
            }
            (lba, blocks) = (lba + fits, blocks - fits);
        }
        true
    }

    fn response(&self) -> Response {
        let mut data = (16 * self.extents.len() as u32 + 4).to_be_bytes().to_vec();
        data.extend([0; 4]);
        for extent in &self.extents {
            data.extend(extent.lba.to_be_bytes());
            data.extend((extent.blocks as u32).to_be_bytes());
            data.extend([u8::from(extent.deallocated), 0, 0, 0]);
        }
        Response::data(data, self.allocation_length)
    }
}

struct Scan {
    disk: DiskId,
    medium: Option<Arc<dyn Medium>>,
    shift: u32,
    unit: u64,
    offset: u64,
    end: u64,
    /// Bytes that may still be read.
    left: u64,
    list: List,
}

impl Scan {
    fn piece(&self) -> u64 {
        // pieces end at multiples of the scratch size, so that units are not cut
        let to_boundary = SCRATCH_MAX as u64 - self.offset % SCRATCH_MAX as u64;
        to_boundary.min(self.end - self.offset)
    }

    /// Enters what is known to be a hole without reading; false when the list is full.
    fn skip(&mut self) -> bool {
        let Some(medium) = &self.medium else {
            return true;
        };
        let data = medium.next_data(self.offset).min(self.end);
        // where the disk ends there is no rest of a unit
        let whole = if data < self.end {
            data - data % self.unit
        } else {
            data
        };
        let Some(length) = whole.checked_sub(self.offset).filter(|&length| length > 0) else {
            return true;
        };
        let entered = self
            .list
            .push(self.offset >> self.shift, length >> self.shift, true);
        self.offset = whole;
        entered
    }

    /// Enters what was read; false when the list is full.
    fn enter(&mut self, read: &[u8]) -> bool {
        let mut rest = read;
        while !rest.is_empty() {
            let to_boundary = self.unit - self.offset % self.unit;
            let length = to_boundary.min(rest.len() as u64);
            let (unit, after) = rest.split_at(length as usize);
            let deallocated = is_zero(unit);
            if !self
                .list
                .push(self.offset >> self.shift, length >> self.shift, deallocated)
            {
                return false;
            }
            self.offset += length;
            rest = after;
        }
        true
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    static ZEROES: [u8; 4096] = [0; 4096];
    bytes
        .chunks(ZEROES.len())
        .all(|chunk| ZEROES.starts_with(chunk))
}

impl Program for Scan {
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> Step {
        match last {
            None => {}
            Some(Err(error)) => return Step::Done(Sense::of_io_error(error.kind).into()),
            Some(Ok(())) => {
                let piece = self.piece() as usize;
                if !self.enter(scratch.get(..piece).unwrap_or_default()) {
                    return Step::Done(self.list.response());
                }
            }
        }
        if !self.skip() {
            return Step::Done(self.list.response());
        }
        let piece = self.piece();
        if piece == 0 || self.left == 0 {
            return Step::Done(self.list.response());
        }
        self.left = self.left.saturating_sub(piece);
        let request = IoRequest::read(self.offset, piece);
        Step::Io {
            disk: self.disk,
            request,
            scratch: 0..piece as usize,
        }
    }
}
