//! GET LBA STATUS (SBC-4, 5.6).
//!
//! Holes are reported as deallocated, and space without data as anchored, according to the disk's extents; the rest is read. Data blocks
//! that read as zeroes are anchored too: they have space, and an initiator cannot distinguish the two (LBPRZ). On a disk without permanent
//! holes, which anchors nothing, they are deallocated. The scan ends when the list is full, at the end of the unit, or at a limit of reads
//! or requests. The disk reports extents through [`IoRequest::block_status`]; without support for it, all blocks may have data.

use std::collections::VecDeque;

use block::{
    Allocation, Extent, IoError, IoErrorKind, IoOutcome, IoRequest, STATUS_BYTES, decode_extents,
};

use super::{Context, Planned};
use crate::command::{be32, be64};
use crate::logical_unit::DiskId;
use crate::plan::{PlanStep, Program, Run, SCRATCH_MAX};
use crate::response::Response;
use crate::sense::{Sense, SenseCode};

/// Service action of SERVICE ACTION IN(16).
pub(super) const GET_LBA_STATUS: u8 = 0x12;

/// Maximum number of bytes that are read for a list of any length.
const SCAN_MAX: u64 = 4 << 30;

/// Maximum number of bytes that are read for a list of one descriptor: the initiator asks about a block, not about the map.
const SCAN_MAX_SINGLE: u64 = 4 << 20;

/// Maximum number of extent requests to the disk.
const STATUSES_MAX: u32 = 32;

pub(super) fn get_lba_status(c: &Context<'_>) -> Planned {
    let lba = be64(c.cdb, 2);
    let geometry = c.unit.geometry();
    if lba >= geometry.capacity().0 {
        return Err(Sense::illegal_request(SenseCode::LBA_OUT_OF_RANGE));
    }
    let allocation_length = be32(c.cdb, 10);
    let (provisioned, anchors, physical) = {
        let state = c.unit.state();
        let info = &state.info;
        (
            info.discard_granularity.is_some() && info.discard_zeroes,
            info.anchors,
            info.physical_block_size,
        )
    };
    let mut list = List {
        most: (allocation_length.saturating_sub(8) / 16).clamp(1, 4096) as usize,
        descriptors: Vec::new(),
        allocation_length: allocation_length as usize,
    };
    if !provisioned {
        list.push(lba, geometry.capacity().0 - lba, Provisioning::Mapped);
        return Ok(crate::plan::Plan::Done(list.response()));
    }
    let shift = geometry.block_shift();
    let unit = u64::from(physical.max(geometry.block_size()));
    let offset = lba << shift;
    let end = geometry.capacity_bytes();
    let scan = Scan {
        disk: c.unit.disk(),
        shift,
        unit,
        anchors,
        offset,
        end,
        extents: VecDeque::new(),
        statuses_left: STATUSES_MAX,
        left: match list.most {
            1 => SCAN_MAX_SINGLE,
            _ => SCAN_MAX,
        },
        doing: Doing::Nothing,
        zeroes: Provisioning::Deallocated,
        list,
    };
    let scratch = usize::try_from(end - offset).unwrap_or(SCRATCH_MAX);
    let scratch = scratch.clamp(STATUS_BYTES, SCRATCH_MAX);
    Ok(Run::plan(scan, scratch))
}

/// Maximum number of blocks of one descriptor: the limit of its field, in whole physical blocks of any size.
const EXTENT_MAX: u64 = 0xffff_ff80;

/// PROVISIONING STATUS field (SBC-4, table 68).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Provisioning {
    Mapped = 0,
    Deallocated = 1,
    Anchored = 2,
}

struct Descriptor {
    lba: u64,
    blocks: u64,
    provisioning: Provisioning,
}

struct List {
    most: usize,
    descriptors: Vec<Descriptor>,
    allocation_length: usize,
}

impl List {
    /// Adds blocks after the last ones. Returns false if they need a descriptor beyond the limit.
    fn push(&mut self, mut lba: u64, mut blocks: u64, provisioning: Provisioning) -> bool {
        while blocks > 0 {
            let room = match self.descriptors.last() {
                Some(last) if last.provisioning == provisioning => EXTENT_MAX - last.blocks,
                _ => 0,
            };
            if room == 0 {
                if self.descriptors.len() == self.most {
                    return false;
                }
                self.descriptors.push(Descriptor {
                    lba,
                    blocks: 0,
                    provisioning,
                });
                continue;
            }
            let fits = blocks.min(room);
            if let Some(last) = self.descriptors.last_mut() {
                last.blocks += fits;
            }
            (lba, blocks) = (lba + fits, blocks - fits);
        }
        true
    }

    fn response(&self) -> Response {
        let mut data = (16 * self.descriptors.len() as u32 + 4)
            .to_be_bytes()
            .to_vec();
        data.extend([0; 4]);
        for descriptor in &self.descriptors {
            data.extend(descriptor.lba.to_be_bytes());
            data.extend((descriptor.blocks as u32).to_be_bytes());
            data.extend([descriptor.provisioning as u8, 0, 0, 0]);
        }
        Response::data(data, self.allocation_length)
    }
}

struct Scan {
    disk: DiskId,
    shift: u32,
    unit: u64,
    anchors: bool,
    offset: u64,
    end: u64,
    /// Extents from the disk for the following range, in order.
    extents: VecDeque<Extent>,
    /// Remaining extent requests.
    statuses_left: u32,
    /// Remaining bytes to read.
    left: u64,
    doing: Doing,
    /// Status of zero units in the data that are read.
    zeroes: Provisioning,
    list: List,
}

/// Next operation of a scan.
#[derive(Clone, Copy)]
enum Doing {
    Nothing,
    Status,
    /// Reads this number of bytes.
    Read(u64),
}

impl Scan {
    /// Returns the next read in a range up to `end`.
    fn piece(&self, end: u64) -> Doing {
        // Pieces end at multiples of the scratch size, so that units are not split.
        let to_boundary = SCRATCH_MAX as u64 - self.offset % SCRATCH_MAX as u64;
        Doing::Read(to_boundary.min(end.min(self.end) - self.offset))
    }

    /// Returns the extent at the offset, if the disk has reported it.
    fn extent(&mut self) -> Option<Extent> {
        while self.extents.front()?.end <= self.offset {
            self.extents.pop_front();
        }
        self.extents.front().copied()
    }

    /// Adds blocks that need no read, and returns the next operation: nothing at the end of the scan.
    fn skip(&mut self) -> Doing {
        while self.offset < self.end {
            let Some(extent) = self.extent() else {
                return match self.statuses_left {
                    0 => Doing::Nothing,
                    _ => Doing::Status,
                };
            };
            let is_data = extent.allocation == Allocation::Data;
            if is_data && !self.anchors {
                self.zeroes = Provisioning::Deallocated;
                return self.piece(self.end);
            }
            // The unit at the end of the disk may be partial.
            let whole = match extent.end {
                end if end < self.end => end - end % self.unit,
                _ => self.end,
            };
            if whole <= self.offset {
                // The unit is partly a hole.
                self.zeroes = Provisioning::Deallocated;
                return self.piece(self.offset + self.unit - self.offset % self.unit);
            }
            let provisioning = match extent.allocation {
                Allocation::Hole => Provisioning::Deallocated,
                Allocation::Reserved if !self.anchors => Provisioning::Deallocated,
                Allocation::Reserved => Provisioning::Anchored,
                Allocation::Data => {
                    self.zeroes = Provisioning::Anchored;
                    return self.piece(whole);
                }
            };
            let blocks = (whole - self.offset) >> self.shift;
            if !self
                .list
                .push(self.offset >> self.shift, blocks, provisioning)
            {
                return Doing::Nothing;
            }
            self.offset = whole;
        }
        Doing::Nothing
    }

    /// Adds the extents that the disk reports. If it does not support them, all blocks may have data.
    fn take_status(&mut self, outcome: IoOutcome, status_data: &[u8]) -> Result<(), IoError> {
        match outcome {
            Ok(()) => self.extents.extend(decode_extents(status_data)),
            Err(error)
                if !matches!(
                    error.kind,
                    IoErrorKind::Unsupported | IoErrorKind::ReadMedium
                ) =>
            {
                return Err(error);
            }
            Err(_) => {}
        }
        if self.extent().is_none() {
            self.extents.push_back(Extent::UNKNOWN);
        }
        Ok(())
    }

    /// Adds blocks that were read. Returns false if the list is full.
    fn enter(&mut self, read: &[u8]) -> bool {
        let mut rest = read;
        while !rest.is_empty() {
            let to_boundary = self.unit - self.offset % self.unit;
            let length = to_boundary.min(rest.len() as u64);
            let (unit, after) = rest.split_at(length as usize);
            let provisioning = match is_zero(unit) {
                true => self.zeroes,
                false => Provisioning::Mapped,
            };
            let blocks = length >> self.shift;
            if !self
                .list
                .push(self.offset >> self.shift, blocks, provisioning)
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
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> PlanStep {
        let taken = match (self.doing, last) {
            (Doing::Status, Some(outcome)) => {
                let status_data = scratch.get(..STATUS_BYTES).unwrap_or_default();
                self.take_status(outcome, status_data)
            }
            (Doing::Read(bytes), Some(Ok(()))) => {
                let read = scratch.get(..bytes as usize).unwrap_or_default();
                if !self.enter(read) {
                    return PlanStep::Done(self.list.response());
                }
                Ok(())
            }
            (_, Some(outcome)) => outcome,
            (_, None) => Ok(()),
        };
        if let Err(error) = taken {
            return PlanStep::Done(Sense::of_io_error(error).into());
        }
        self.doing = self.skip();
        let (request, scratch) = match self.doing {
            Doing::Status => {
                self.statuses_left -= 1;
                let rest = self.end - self.offset;
                (IoRequest::block_status(self.offset, rest), STATUS_BYTES)
            }
            Doing::Read(bytes) if self.left > 0 => {
                self.left = self.left.saturating_sub(bytes);
                (IoRequest::read(self.offset, bytes), bytes as usize)
            }
            Doing::Read(_) | Doing::Nothing => return PlanStep::Done(self.list.response()),
        };
        PlanStep::Io {
            disk: self.disk,
            request,
            scratch: 0..scratch,
        }
    }
}
