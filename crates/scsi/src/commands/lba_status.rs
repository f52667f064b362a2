//! GET LBA STATUS (SBC-4, 5.6).
//!
//! Holes are deallocated and space without data is anchored, as the disk knows them; the rest is read. What reads as
//! zeroes there is anchored too, for it has its space and an initiator cannot tell the two apart (LBPRZ); of a disk that
//! does not know its holes for good, which anchors nothing, it counts as deallocated. The scan goes on until the list is
//! full, the unit ends or enough was read or asked for. The disk tells its extents by [`IoRequest::block_status`]; one that
//! cannot may have data everywhere.

use std::collections::VecDeque;

use block::{
    Allocation, Extent, IoError, IoErrorKind, IoOutcome, IoRequest, STATUS_BYTES, decode_extents,
};

use super::{Context, Planned};
use crate::command::{be32, be64};
use crate::logical_unit::DiskId;
use crate::plan::{Program, Run, SCRATCH_MAX, Step};
use crate::response::Response;
use crate::sense::{Sense, SenseCode};

/// Service action of SERVICE ACTION IN(16).
pub(super) const GET_LBA_STATUS: u8 = 0x12;

/// Most bytes that are read for a list of any length.
const SCAN_MAX: u64 = 4 << 30;

/// The same where there is room for a single one: the question is about a block, not about the map.
const SCAN_MAX_SINGLE: u64 = 4 << 20;

/// How often the disk is asked for extents.
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

/// Most blocks of one descriptor: what its field holds, and whole physical blocks of any size.
const EXTENT_MAX: u64 = 0xffff_ff80;

/// The provisioning status field (SBC-4, table 68).
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
    /// Adds blocks that follow the last ones; false when they begin a descriptor too many.
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
    /// What the disk has told of what follows, in order.
    extents: VecDeque<Extent>,
    /// How often it may still be asked.
    statuses_left: u32,
    /// Bytes that may still be read.
    left: u64,
    doing: Doing,
    /// What units of zeroes are among what is read.
    zeroes: Provisioning,
    list: List,
}

/// What a scan needs next, and does then.
#[derive(Clone, Copy)]
enum Doing {
    Nothing,
    /// Asks for extents.
    Status,
    /// Reads so many bytes.
    Read(u64),
}

impl Scan {
    /// What must be read next of what reaches to `end`.
    fn piece(&self, end: u64) -> Doing {
        // pieces end at multiples of the scratch size, so that units are not cut
        let to_boundary = SCRATCH_MAX as u64 - self.offset % SCRATCH_MAX as u64;
        Doing::Read(to_boundary.min(end.min(self.end) - self.offset))
    }

    /// The extent that lies at the offset, if the disk has told of it.
    fn extent(&mut self) -> Option<Extent> {
        while self.extents.front()?.end <= self.offset {
            self.extents.pop_front();
        }
        self.extents.front().copied()
    }

    /// Enters what can be told without reading, then says what is next: nothing when the scan is over.
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
            // where the disk ends there is no rest of a unit
            let whole = match extent.end {
                end if end < self.end => end - end % self.unit,
                _ => self.end,
            };
            if whole <= self.offset {
                // Not all of the unit has space.
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

    /// Takes what the disk tells of its extents. One that does not tell may have data.
    fn take_status(&mut self, outcome: IoOutcome, told: &[u8]) -> Result<(), IoError> {
        match outcome {
            Ok(()) => self.extents.extend(decode_extents(told)),
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

    /// Enters what was read; false when the list is full.
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
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> Step {
        let taken = match (self.doing, last) {
            (Doing::Status, Some(outcome)) => {
                let told = scratch.get(..STATUS_BYTES).unwrap_or_default();
                self.take_status(outcome, told)
            }
            (Doing::Read(bytes), Some(Ok(()))) => {
                let read = scratch.get(..bytes as usize).unwrap_or_default();
                if !self.enter(read) {
                    return Step::Done(self.list.response());
                }
                Ok(())
            }
            (_, Some(outcome)) => outcome,
            (_, None) => Ok(()),
        };
        if let Err(error) = taken {
            return Step::Done(Sense::of_io_error(error).into());
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
            Doing::Read(_) | Doing::Nothing => return Step::Done(self.list.response()),
        };
        Step::Io {
            disk: self.disk,
            request,
            scratch: 0..scratch,
        }
    }
}
