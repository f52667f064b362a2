//! GET LBA STATUS (SBC-4, 5.6).
//!
//! Nothing below tells which blocks are mapped, so a range that reads as zeroes is reported as deallocated:
//! with LBPRZ an initiator cannot tell the two apart. The scan goes on until the list is full, the unit
//! ends or the limit is reached.

use disk::{IoOutcome, IoRequest};

use super::{Context, Planned};
use crate::command::{be32, be64};
use crate::logical_unit::DiskId;
use crate::plan::{Program, Run, SCRATCH_MAX, Step};
use crate::response::Response;
use crate::sense::{Sense, SenseCode};

/// Service action of SERVICE ACTION IN(16).
pub(super) const GET_LBA_STATUS: u8 = 0x12;

/// Most bytes that are read for each extent that the initiator has room for.
const SCAN_MAX: u64 = 256 << 20;

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
        list.extents.push(Extent {
            lba,
            blocks: geometry.capacity().0 - lba,
            deallocated: false,
        });
        return Ok(crate::plan::Plan::Done(list.response()));
    }
    let shift = geometry.block_shift();
    let unit = u64::from(physical.max(geometry.block_size()));
    let offset = lba << shift;
    let scan = match list.most {
        1 => SCAN_MAX_SINGLE,
        most => SCAN_MAX * most as u64,
    };
    let end = geometry.capacity_bytes().min(offset.saturating_add(scan));
    let scan = Scan {
        disk: c.unit.disk(),
        shift,
        unit,
        offset,
        end,
        list,
    };
    Ok(Run::plan(scan, SCRATCH_MAX.min((end - offset) as usize)))
}

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
    fn push(&mut self, lba: u64, blocks: u64, deallocated: bool) -> bool {
        let full = self.extents.len() == self.most;
        match self.extents.last_mut() {
            Some(last) if last.deallocated == deallocated => last.blocks += blocks,
            _ if full => return false,
            _ => self.extents.push(Extent {
                lba,
                blocks,
                deallocated,
            }),
        }
        true
    }

    fn response(&self) -> Response {
        let mut data = (16 * self.extents.len() as u32 + 4).to_be_bytes().to_vec();
        data.extend([0; 4]);
        for extent in &self.extents {
            data.extend(extent.lba.to_be_bytes());
            data.extend(
                u32::try_from(extent.blocks)
                    .unwrap_or(u32::MAX)
                    .to_be_bytes(),
            );
            data.extend([u8::from(extent.deallocated), 0, 0, 0]);
        }
        Response::data(data, self.allocation_length)
    }
}

struct Scan {
    disk: DiskId,
    shift: u32,
    unit: u64,
    offset: u64,
    end: u64,
    list: List,
}

impl Scan {
    fn piece(&self) -> u64 {
        // pieces end at multiples of the scratch size, so that units are not cut
        let to_boundary = SCRATCH_MAX as u64 - self.offset % SCRATCH_MAX as u64;
        to_boundary.min(self.end - self.offset)
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
        let piece = self.piece();
        if piece == 0 {
            return Step::Done(self.list.response());
        }
        let request = IoRequest::read(self.offset, piece);
        Step::Io {
            disk: self.disk,
            request,
            scratch: 0..piece as usize,
        }
    }
}
