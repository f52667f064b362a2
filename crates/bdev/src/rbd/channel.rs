//! I/O of one worker on an image, over a channel of `librbd`.
//!
//! Most I/O is one step. A buffer with too many segments for librbd is moved in pieces; a durable write ends with a flush if librbd has a
//! cache. Never blocks. Allocates nothing of its own after the number of slots has reached the maximum of I/Os in flight.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use block::{Extent, IoError, IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest, encode_extents};
use guest_memory::IoBuffer;
use librbd::{Piece, SEGMENTS_MAX};
use uring::{Completion, Owner, Ring, RingFd, WatchId};

use super::SharedRbd;
use super::errno::classify;
use super::reopening::LossReason;
use crate::admit::Limits;
use crate::blocking::StatusCalls;
use crate::slots::Slots;
use crate::turn_lock::InUse;
use crate::{Attach, Finished, IoChannel, Submission, Tag};

struct RbdSlot {
    tag: Tag,
    io: IoRequest,
    /// Bytes moved, from the start of the I/O.
    done: u64,
    /// The final flush of a durable write is in progress.
    flushing: bool,
    /// Number of the flush in progress.
    flush: u64,
    /// The complete buffer, while a piece of it is moved.
    whole: Option<IoBuffer>,
}

pub(super) struct RbdChannel {
    shared: Arc<SharedRbd>,
    limits: Limits,
    channel: librbd::Channel,
    /// Generation of the channel's image.
    generation: u64,
    owner: Owner,
    wake: RingFd,
    /// Watch on the channel's eventfd; `None` once the handle closes.
    watch: Option<WatchId>,
    slots: Slots<RbdSlot>,
    over: Vec<librbd::Finished>,
    status: StatusCalls,
    /// Replacements of the shared state in progress, and ended ones.
    replacing: usize,
    replaced: Arc<Mutex<Vec<Replaced>>>,
    /// Ends after the I/O of the channel.
    _in_use: InUse,
}

/// Maximum bytes that one block status I/O examines: without an object map, librbd queries each object.
const STATUS_RANGE_MAX: u64 = 4 << 30;

/// Slot and result of a replacement.
type Replaced = (u32, Result<u64, i32>);

impl RbdChannel {
    pub(super) fn new(shared: Arc<SharedRbd>, attach: &mut Attach<'_>) -> io::Result<RbdChannel> {
        let in_use = attach.begin_use(shared.clone())?;
        // Read first: if the image is replaced meanwhile, the channel replaces it again.
        let mut generation = shared.generation();
        if shared.is_closed() {
            // No current image: the channel switches to the next one.
            generation = generation.wrapping_sub(1);
        }
        let channel = librbd::Channel::new(&shared.image())?;
        let wake = RingFd::from(channel.wake_fd()?);
        let owner = attach.owner();
        let watch = attach.ring().watch(owner, 0, &wake);
        Ok(RbdChannel {
            limits: Limits::of(&shared.info, &shared.size.capacity),
            shared,
            channel,
            generation,
            owner,
            wake,
            watch: Some(watch),
            slots: Slots::default(),
            over: Vec::new(),
            status: StatusCalls::new(attach.owner()),
            replacing: 0,
            replaced: Arc::default(),
            _in_use: in_use,
        })
    }

    /// Lists the ranges with data, on another thread: the librbd call blocks, also while the cluster is away.
    #[cold]
    fn block_status(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        let (shared, generation) = (Arc::clone(&self.shared), self.generation);
        let (offset, length) = (io.offset, io.length.min(STATUS_RANGE_MAX));
        let ask = move || {
            let pieces = shared.image().allocated(offset, length).map_err(|error| {
                let errno = error.errno();
                if let Some(lost) = LossReason::of_errno(errno) {
                    shared.lose(generation, lost);
                }
                classify(IoKind::BlockStatus, errno)
            })?;
            let data = data_ranges(&pieces);
            Ok(encode_extents(offset..offset + length, |from| {
                extent_at(&data, from)
            }))
        };
        self.status
            .submit(ring, &self.shared.calls, buffer, tag, ask)
    }

    /// Switches to the reopened image. Returns false while it is closed, or I/O on the old one is in flight.
    #[cold]
    fn change_image(&mut self) -> bool {
        // Excludes replacements of the shared state, which librbd does not execute.
        if self.shared.is_closed() || self.channel.in_flight() > 0 {
            return false;
        }
        // Read first: if the image is lost meanwhile, the channel checks it again.
        self.generation = self.shared.generation();
        self.channel.set_image(&self.shared.image());
        true
    }

    #[cold]
    fn failed(&self, kind: IoKind, errno: i32) -> IoError {
        if let Some(lost) = LossReason::of_errno(errno) {
            self.shared.lose(self.generation, lost);
        }
        classify(kind, errno)
    }

    fn occupy(&mut self, tag: Tag, io: &IoRequest) -> u32 {
        self.slots.occupy(RbdSlot {
            tag,
            io: *io,
            done: 0,
            flushing: false,
            flush: 0,
            whole: None,
        })
    }

    /// Submits the next step of an I/O. After an error the buffer was not taken.
    fn start(&mut self, index: u32, buffer: &mut IoBuffer) -> Result<(), i32> {
        let token = u64::from(index);
        let slot = &mut self.slots[index];
        let IoRequest {
            kind,
            flags,
            offset,
            length,
        } = slot.io;
        let channel = &mut self.channel;
        if slot.flushing || kind == IoKind::Flush {
            slot.flush = self.shared.cached.begin_flush();
            return channel.flush(buffer, token);
        }
        match kind {
            IoKind::Read | IoKind::Write => {
                let mut piece;
                let moved = if slot.done == 0 && buffer.segments().len() <= SEGMENTS_MAX {
                    &mut *buffer
                } else {
                    piece = next_piece(buffer, slot.done);
                    slot.whole = Some(std::mem::take(buffer));
                    &mut piece
                };
                let at = offset + slot.done;
                let started = match kind {
                    IoKind::Read => channel.read(at, moved, token),
                    _ => channel.write(at, moved, token),
                };
                if started.is_err()
                    && let Some(whole) = slot.whole.take()
                {
                    *buffer = whole;
                }
                started
            }
            IoKind::CompareAndWrite => channel.compare_and_write(offset, buffer, token),
            IoKind::Discard => channel.discard(offset, length, buffer, token),
            IoKind::WriteZeroes => {
                let allocate = !flags.has(IoFlags::UNMAP);
                channel.write_zeroes(offset, length, allocate, buffer, token)
            }
            IoKind::Flush | IoKind::BlockStatus | IoKind::ReplaceState | IoKind::ScsiCommand => {
                Err(libc::EOPNOTSUPP)
            }
        }
    }

    /// Replaces the state that daemons share, on a thread that wakes this worker at the end.
    #[cold]
    fn replace_state(&mut self, io: &IoRequest, buffer: &mut IoBuffer, tag: Tag) -> Submission {
        let Some(peers) = self.shared.peers() else {
            return Submission::Done(Err(IoErrorKind::Unsupported.into()));
        };
        let mut bytes = vec![0; buffer.len()];
        buffer.read_at(0, &mut bytes);
        let index = self.occupy(tag, io);
        self.slots[index].whole = Some(std::mem::take(buffer));
        self.replacing += 1;
        let (replaced, waker) = (Arc::clone(&self.replaced), self.channel.waker());
        let done = move |result| {
            let mut replaced = replaced.lock().unwrap_or_else(PoisonError::into_inner);
            replaced.push((index, result));
            drop(replaced);
            waker.wake();
        };
        peers.replace(bytes, Box::new(done));
        Submission::Pending
    }

    #[cold]
    fn reap_replaced(&mut self, finished: &mut Vec<Finished>) {
        let replaced = {
            let mut replaced = self.replaced.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *replaced)
        };
        for (index, result) in replaced {
            self.replacing -= 1;
            self.slots.release(index);
            let slot = &mut self.slots[index];
            let outcome = result.map(drop);
            finished.push(Finished {
                tag: slot.tag,
                buffer: slot.whole.take().unwrap_or_default(),
                outcome: outcome.map_err(|errno| classify(IoKind::ReplaceState, errno)),
            });
        }
    }

    /// Handles the end of a step: starts the next one or returns the outcome.
    fn continue_io(
        &mut self,
        index: u32,
        result: Result<u64, i32>,
        buffer: &mut IoBuffer,
    ) -> Option<IoOutcome> {
        let slot = &mut self.slots[index];
        let kind = slot.io.kind;
        let moved = buffer.len() as u64;
        if let Some(whole) = slot.whole.take() {
            *buffer = whole;
        }
        match result {
            Err(errno) => return Some(Err(self.failed(kind, errno))),
            Ok(_) if slot.flushing || kind == IoKind::Flush => {
                self.shared.cached.end_flush(slot.flush);
                return Some(self.shared.cached.durability.check());
            }
            // The image was shrunk; zeroes would be wrong data.
            Ok(read) if kind == IoKind::Read && read < moved => {
                return Some(Err(IoErrorKind::OutOfRange.into()));
            }
            Ok(_) if slot.io.moves_data() => slot.done += moved,
            Ok(_) => slot.done = slot.io.length,
        }
        if slot.done == slot.io.length {
            let is_cached = slot.io.modifies() && self.shared.settings.write_cache;
            if !(is_cached && slot.io.flags.has(IoFlags::FUA)) {
                if is_cached {
                    self.shared.acknowledge(self.generation);
                }
                return Some(Ok(()));
            }
            slot.flushing = true;
        }
        let started = self.start(index, buffer);
        started.err().map(|errno| Err(self.failed(kind, errno)))
    }
}

/// Merges the pieces with data into ranges, sorted and without overlaps. Data wins where pieces overlap.
fn data_ranges(pieces: &[Piece]) -> Vec<Range<u64>> {
    let with_data = pieces.iter().filter(|piece| piece.exists);
    let mut found: Vec<Range<u64>> = with_data
        .map(|piece| piece.offset..piece.offset.saturating_add(piece.length))
        .collect();
    found.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in found {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// Returns the extent at a byte, given the ranges with data.
fn extent_at(data: &[Range<u64>], offset: u64) -> Extent {
    let at = data.partition_point(|range| range.end <= offset);
    match data.get(at) {
        Some(range) if range.start <= offset => Extent::data(range.end),
        next => Extent::hole(next.map_or(u64::MAX, |range| range.start)),
    }
}

/// Returns the part of the buffer from `done` on that librbd takes at once.
fn next_piece(buffer: &IoBuffer, done: u64) -> IoBuffer {
    let done = done as usize;
    let (mut passed, mut length, mut count) = (0, 0, 0);
    for segment in buffer.segments() {
        passed += segment.len();
        if passed > done && count < SEGMENTS_MAX {
            count += 1;
            length = passed - done;
        }
    }
    buffer.slice(done, length)
}

impl IoChannel for RbdChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        if io.kind == IoKind::ReplaceState {
            return self.replace_state(io, buffer, tag);
        }
        if let Some(outcome) = self.limits.begin(io, buffer) {
            return Submission::Done(outcome);
        }
        if self.generation != self.shared.generation() && !self.change_image() {
            return Submission::Done(Err(IoErrorKind::Offline.into()));
        }
        if io.kind == IoKind::BlockStatus {
            return self.block_status(ring, io, buffer, tag);
        }
        let is_durable = io.modifies() && io.flags.has(IoFlags::FUA);
        if (is_durable || io.kind == IoKind::Flush)
            && let Err(lost) = self.shared.cached.durability.check()
        {
            return Submission::Done(Err(lost));
        }
        let index = self.occupy(tag, io);
        match self.start(index, buffer) {
            Ok(()) => Submission::Pending,
            Err(errno) => {
                self.slots.release(index);
                Submission::Done(Err(self.failed(io.kind, errno)))
            }
        }
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        if self.status.is_of(completion.owner) {
            return self.status.complete(ring, completion.more, finished);
        }
        if !completion.more && self.watch.is_some() {
            // The kernel has ended the watch, possibly for lack of memory.
            self.watch = Some(ring.watch(self.owner, 0, &self.wake));
        }
        let mut over = std::mem::take(&mut self.over);
        self.channel.reap(|one| over.push(one));
        for mut one in over.drain(..) {
            let index = one.token as u32;
            if let Some(outcome) = self.continue_io(index, one.result, &mut one.buffer) {
                self.slots.release(index);
                finished.push(Finished {
                    tag: self.slots[index].tag,
                    buffer: one.buffer,
                    outcome,
                });
            }
        }
        self.over = over;
        if self.replacing > 0 {
            self.reap_replaced(finished);
        }
    }

    fn close(&mut self, ring: &mut Ring) {
        if let Some(watch) = self.watch.take() {
            ring.unwatch(watch);
        }
        self.status.close(ring);
    }

    fn abort(&mut self, _ring: &mut Ring, tag: Tag) {
        self.status.abort(tag);
    }

    fn in_flight(&self) -> usize {
        self.slots.len() + self.status.in_flight()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_between_data_extents_is_a_hole() {
        let piece = |offset, length, exists| Piece {
            offset,
            length,
            exists,
        };
        let pieces = [piece(10, 10, true), piece(20, 5, true), piece(40, 5, false)];
        for (offset, extent) in [
            (0, Extent::hole(10)),
            (10, Extent::data(25)),
            (24, Extent::data(25)),
            (25, Extent::hole(u64::MAX)),
            (42, Extent::hole(u64::MAX)),
        ] {
            let found = extent_at(&data_ranges(&pieces), offset);
            assert_eq!(found, extent, "{offset}");
        }
        assert_eq!(extent_at(&data_ranges(&[]), 7), Extent::hole(u64::MAX));
    }

    #[test]
    fn overlapping_extents_are_data_if_any_has_data() {
        let piece = |offset, length, exists| Piece {
            offset,
            length,
            exists,
        };
        // A long piece, a short one and a hole in it, and a piece that ends beyond 64 bits.
        let pieces = [
            piece(0, 100, true),
            piece(10, 10, true),
            piece(50, 10, false),
            piece(u64::MAX - 4, 100, true),
        ];
        let data = data_ranges(&pieces);
        for offset in [0, 15, 20, 55, 99] {
            assert_eq!(extent_at(&data, offset), Extent::data(100), "{offset}");
        }
        assert_eq!(extent_at(&data, 100), Extent::hole(u64::MAX - 4));
    }

    #[test]
    fn pieces_of_a_segmented_buffer_cover_it() {
        const SEGMENTS: usize = 2500;
        let memory = guest_memory::Mapping::anonymous(16 * SEGMENTS).unwrap();
        let mut whole = IoBuffer::of_mapping(&memory, 0, 16 * SEGMENTS);
        for segment in 0..SEGMENTS {
            whole.set_window(16 * segment, 16);
        }
        whole.set_window(0, 16 * SEGMENTS);
        assert_eq!(whole.segments().len(), SEGMENTS);
        let (mut done, mut pieces) = (0, Vec::new());
        while done < whole.len() as u64 {
            let piece = next_piece(&whole, done);
            assert!(piece.segments().len() <= SEGMENTS_MAX);
            assert_eq!(
                piece.segments()[0].base(),
                whole.slice(done as usize, 1).segments()[0].base()
            );
            done += piece.len() as u64;
            pieces.push(piece.len() / 16);
        }
        assert_eq!(pieces, [1024, 1024, 452]);
        assert_eq!(next_piece(&whole, 8).len(), 16 * 1024 - 8);
    }
}
