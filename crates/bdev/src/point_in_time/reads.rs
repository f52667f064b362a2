//! A read-only device with the content of a point in time. Reads of unchanged units go to the source and are confirmed afterwards. Reads
//! of changed units go to the scratch device. A read over several pieces reads one piece after the other.

use std::io;
use std::sync::Arc;

use block::{
    Capacity, DiskInfo, Extent, IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest, decode_extents,
    encode_extents,
};
use guest_memory::IoBuffer;
use uring::{Completion, Owner, Ring};

use super::SharedPoint;
use super::tracker::Location;
use crate::admit::Limits;
use crate::slots::Slots;
use crate::{Attach, BlockDevice, Capabilities, Finished, IoChannel, Submission, Tag};

pub(super) struct PointInTimeReader {
    shared: Arc<SharedPoint>,
    info: DiskInfo,
    capacity: Arc<Capacity>,
}

impl PointInTimeReader {
    pub fn new(shared: Arc<SharedPoint>) -> PointInTimeReader {
        // The source may have grown since.
        let source = shared.source.info().resized(shared.lock().disk_bytes());
        let scratch = shared.scratch.info();
        let info = DiskInfo {
            io_alignment: source.io_alignment.max(scratch.io_alignment),
            read_only: true,
            write_cache: false,
            discard_granularity: None,
            discard_zeroes: false,
            write_zeroes: false,
            anchors: false,
            atomic_writes: None,
            compare_and_write: None,
            shared: false,
            passthrough: None,
            ..source
        };
        let capacity = Arc::new(Capacity::new(info.geometry.capacity_bytes()));
        PointInTimeReader {
            shared,
            info,
            capacity,
        }
    }
}

impl BlockDevice for PointInTimeReader {
    fn info(&self) -> DiskInfo {
        self.info.clone()
    }

    fn capacity(&self) -> &Arc<Capacity> {
        &self.capacity
    }

    fn set_size(&self, _bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn kind(&self) -> &'static str {
        "point_in_time"
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::NONE
    }

    fn attach(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        let shared = &self.shared;
        let (source, source_owners) = attach.below(|attach| shared.source.attach(attach))?;
        let scratch = shared.scratch.attach(attach)?;
        Ok(Box::new(ReadChannel {
            shared: Arc::clone(shared),
            limits: Limits::of(&self.info, &self.capacity),
            source,
            source_owners,
            scratch,
            slots: Slots::default(),
            over: Vec::new(),
        }))
    }
}

/// Maximum range of one block status, in bytes. Bounds the number of units that a worker examines.
const STATUS_SPAN_MAX: u64 = 64 << 30;

struct ReadSlot {
    tag: Tag,
    io: IoRequest,
    buffer: IoBuffer,
    /// First byte that is not read yet.
    at: u64,
    piece: Piece,
    is_aborted: bool,
}

/// Piece of a read that is in flight.
#[derive(Clone, Copy)]
struct Piece {
    location: Location,
    end: u64,
}

struct ReadChannel {
    shared: Arc<SharedPoint>,
    limits: Limits,
    /// Tags are slots, here and on `scratch`.
    source: Box<dyn IoChannel>,
    source_owners: Vec<Owner>,
    scratch: Box<dyn IoChannel>,
    slots: Slots<ReadSlot>,
    over: Vec<Finished>,
}

impl ReadSlot {
    fn end(&self) -> u64 {
        self.io.offset + self.io.length
    }
}

impl ReadChannel {
    /// Submits pieces of a read until one is pending (`None`) or the read has ended.
    fn advance(&mut self, ring: &mut Ring, index: u32) -> Option<IoOutcome> {
        loop {
            let slot = &mut self.slots[index];
            if slot.is_aborted {
                return Some(Err(IoErrorKind::Cancelled.into()));
            }
            if slot.at >= slot.end() {
                return Some(Ok(()));
            }
            let is_status = slot.io.kind == IoKind::BlockStatus;
            let until = match is_status {
                true => slot.end().min(slot.at.saturating_add(STATUS_SPAN_MAX)),
                false => slot.end(),
            };
            let located = self.shared.lock().locate(&(slot.at..until));
            let Ok((location, end)) = located else {
                return Some(Err(IoErrorKind::ReadMedium.into()));
            };
            slot.piece = Piece { location, end };
            let length = end - slot.at;
            let (io, mut window) = match is_status {
                // The scratch file does not record zeroes.
                true if location == Location::Scratch => {
                    let status = encode_extents(slot.at..end, |_| Extent::data(end));
                    slot.buffer.write_at(0, &status);
                    return Some(Ok(()));
                }
                true => {
                    let window = slot.buffer.slice(0, slot.buffer.len());
                    (IoRequest::block_status(slot.at, length), window)
                }
                false => {
                    let skip = (slot.at - slot.io.offset) as usize;
                    let window = slot.buffer.slice(skip, length as usize);
                    (IoRequest::read(slot.at, length), window)
                }
            };
            let channel = match location {
                Location::Source => &mut self.source,
                Location::Scratch => &mut self.scratch,
            };
            match channel.submit(ring, &io, &mut window, Tag(index.into())) {
                Submission::Pending => return None,
                Submission::Done(outcome) => {
                    if let Some(outcome) = self.piece_ended(index, outcome) {
                        return Some(outcome);
                    }
                }
            }
        }
    }

    /// Handles the end of a piece. Returns the outcome if it is the end of the I/O.
    fn piece_ended(&mut self, index: u32, outcome: IoOutcome) -> Option<IoOutcome> {
        let slot = &mut self.slots[index];
        if outcome.is_err() {
            return Some(outcome);
        }
        let Piece { location, end } = slot.piece;
        let valid_end = match location {
            Location::Scratch => end,
            Location::Source => {
                let Ok(valid_end) = self.shared.lock().unsettled_until(&(slot.at..end)) else {
                    return Some(Err(IoErrorKind::ReadMedium.into()));
                };
                valid_end
            }
        };
        if slot.io.kind == IoKind::BlockStatus {
            // Otherwise the status describes later data.
            if valid_end > slot.at {
                clip_status(&slot.buffer, slot.at, valid_end);
                return Some(Ok(()));
            }
            return None;
        }
        slot.at = valid_end;
        None
    }

    fn end(&mut self, index: u32, outcome: IoOutcome) -> Finished {
        self.slots.release(index);
        let slot = &mut self.slots[index];
        Finished {
            tag: slot.tag,
            buffer: std::mem::take(&mut slot.buffer),
            outcome,
        }
    }
}

/// Removes the status of bytes from `end` on.
fn clip_status(buffer: &IoBuffer, from: u64, end: u64) {
    let mut bytes = vec![0; buffer.len()];
    buffer.read_at(0, &mut bytes);
    let Some(last) = decode_extents(&bytes).last() else {
        return;
    };
    let mut known = decode_extents(&bytes);
    let status = encode_extents(from..end.min(last.end), |at| {
        let found = known.find(|extent| at < extent.end);
        found.unwrap_or(Extent::UNKNOWN)
    });
    buffer.write_at(0, &status);
}

impl IoChannel for ReadChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        if let Some(outcome) = self.limits.begin(io, buffer) {
            return Submission::Done(outcome);
        }
        if !matches!(io.kind, IoKind::Read | IoKind::BlockStatus) {
            // A flush has nothing to do.
            return Submission::Done(Ok(()));
        }
        let index = self.slots.occupy(ReadSlot {
            tag,
            io: IoRequest {
                flags: IoFlags::NONE,
                ..*io
            },
            buffer: std::mem::take(buffer),
            at: io.offset,
            piece: Piece {
                location: Location::Source,
                end: io.offset,
            },
            is_aborted: false,
        });
        match self.advance(ring, index) {
            None => Submission::Pending,
            Some(outcome) => {
                *buffer = self.end(index, outcome).buffer;
                Submission::Done(outcome)
            }
        }
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        let mut over = std::mem::take(&mut self.over);
        match self.source_owners.contains(&completion.owner) {
            true => self.source.complete(ring, completion, &mut over),
            false => self.scratch.complete(ring, completion, &mut over),
        }
        for one in over.drain(..) {
            let index = one.tag.0 as u32;
            let ended = self.piece_ended(index, one.outcome);
            if let Some(outcome) = ended.or_else(|| self.advance(ring, index)) {
                finished.push(self.end(index, outcome));
            }
        }
        self.over = over;
    }

    fn abort(&mut self, ring: &mut Ring, tag: Tag) {
        // A free slot has an empty buffer.
        let named = |slot: &ReadSlot| slot.tag == tag && !slot.buffer.is_empty();
        if let Some(index) = self.slots.all().iter().position(named) {
            self.slots.all_mut()[index].is_aborted = true;
            self.source.abort(ring, Tag(index as u64));
            self.scratch.abort(ring, Tag(index as u64));
        }
    }

    fn close(&mut self, ring: &mut Ring) {
        self.source.close(ring);
        self.scratch.close(ring);
    }

    fn is_closed(&self) -> bool {
        self.in_flight() == 0 && self.source.is_closed() && self.scratch.is_closed()
    }

    fn in_flight(&self) -> usize {
        self.slots.len()
    }
}
