//! One worker's handle on a file: slots of pending I/Os, each a small state machine.
//!
//! Most I/O is one step with the I/O's own buffer. Others: a short transfer is continued, unaligned memory is bounced piece by piece, a
//! refused way of zeroing or discarding is replaced by the next, a durable I/O ends with a sync. Allocates nothing after the number of
//! slots has reached the maximum of I/Os in flight. Never blocks.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use block::{IoError, IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest, encode_extents};
use guest_memory::IoBuffer;
use uring::{Completion, Owner, Ring, RingFd};

use super::allocation::Allocation;
use super::bounce::{Bounce, BounceSlot, PIECE_BYTES};
use super::errno::{classify, is_of_device, is_refusal};
use super::syncs::Syncs;
use super::{CacheMode, Coverage, SharedFile};
use crate::admit::Limits;
use crate::blocking::StatusCalls;
use crate::slots::Slots;
use crate::turn_lock::InUse;
use crate::{Finished, IoChannel, Submission, Tag};

/// Maximum segments per read or write (Linux: `UIO_MAXIOV`).
const SEGMENTS_MAX: usize = 1024;

/// Maximum number of repetitions of an interrupted operation.
const RETRIES_MAX: u8 = 100;

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// Operation in progress on the ring for an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileStep {
    /// No operation has been started.
    Start,
    /// Transfers the I/O's own buffer.
    Whole,
    /// Transfers the rest of that buffer.
    Rest,
    /// Transfers a bounce buffer.
    Bounced,
    /// Writes zeroes.
    Zeroes,
    /// Changes the allocation.
    Allocation(Allocation),
    Sync,
}

/// Replacement for operations that were refused for the range of this I/O only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fallback {
    None,
    /// The device refused this discard; it is repeated as one of a file.
    Punching,
    /// The kernel refused this range, for example because cached pages are dirty: zeroes are written, and a discard does nothing.
    Writing,
}

struct FileSlot {
    tag: Tag,
    io: IoRequest,
    /// The write must be durable before it completes.
    durable: bool,
    step: FileStep,
    /// Bytes done, from the start of the I/O.
    done: u64,
    retries: u8,
    /// Number of the sync during [`FileStep::Sync`].
    sync: u64,
    /// The kernel refused the I/O's memory.
    bounce_all: bool,
    fallback: Fallback,
    /// Bounce buffer, only during [`FileStep::Bounced`].
    bounce: Option<BounceSlot>,
    /// Buffer of the I/O, except during [`FileStep::Whole`].
    buffer: IoBuffer,
}

pub(super) struct FileChannel {
    shared: Arc<SharedFile>,
    /// Keeps the locks.
    _in_use: InUse,
    limits: Limits,
    fd: RingFd,
    owner: Owner,
    slots: Slots<FileSlot>,
    bounce: Bounce,
    syncs: Syncs,
    status: StatusCalls,
}

impl FileChannel {
    pub(super) fn new(
        shared: Arc<SharedFile>,
        in_use: InUse,
        fd: RingFd,
        owner: Owner,
        status: Owner,
    ) -> FileChannel {
        FileChannel {
            limits: Limits::of(&shared.info, &shared.capacity),
            shared,
            _in_use: in_use,
            fd,
            owner,
            slots: Slots::default(),
            bounce: Bounce::default(),
            syncs: Syncs::default(),
            status: StatusCalls::new(status),
        }
    }

    /// lseek waits for network file systems, and everywhere for reads of extent maps.
    #[cold]
    fn block_status(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        let (shared, range) = (self.shared.clone(), io.offset..io.offset + io.length);
        let ask = move || Ok(encode_extents(range, |offset| shared.extent(offset)));
        self.status
            .submit(ring, &self.shared.calls, buffer, tag, ask)
    }

    /// Allocates a slot, with an empty buffer.
    fn occupy(&mut self, tag: Tag, io: &IoRequest, durable: bool) -> u32 {
        let index = self.slots.reuse(|| FileSlot {
            tag,
            io: *io,
            durable,
            step: FileStep::Start,
            done: 0,
            retries: 0,
            sync: 0,
            bounce_all: false,
            fallback: Fallback::None,
            bounce: None,
            buffer: IoBuffer::default(),
        });
        let slot = &mut self.slots[index];
        // Field by field: the buffer is large and already empty.
        (slot.tag, slot.io, slot.durable, slot.step) = (tag, *io, durable, FileStep::Start);
        (slot.done, slot.retries) = (0, 0);
        (slot.bounce_all, slot.fallback) = (false, Fallback::None);
        index
    }

    fn vacate(&mut self, index: u32) -> (Tag, IoBuffer) {
        self.slots.release(index);
        let slot = &mut self.slots[index];
        (slot.tag, std::mem::take(&mut slot.buffer))
    }

    /// Starts the next step of an I/O, or returns its outcome.
    fn continue_io(&mut self, ring: &mut Ring, index: u32) -> Option<IoOutcome> {
        let slot = &self.slots[index];
        if slot.done == slot.io.length && slot.io.kind != IoKind::Flush {
            let synced = matches!(slot.step, FileStep::Sync) || self.writes_durably(slot);
            if slot.durable && !synced {
                return self.sync(ring, index);
            }
            return Some(self.outcome(slot.durable));
        }
        match slot.io.kind {
            IoKind::Read | IoKind::Write => self.transfer(ring, index),
            IoKind::Flush if slot.step == FileStep::Sync => Some(self.outcome(true)),
            IoKind::Flush => self.sync(ring, index),
            IoKind::Discard => self.discard(ring, index),
            IoKind::WriteZeroes => self.zero(ring, index),
            IoKind::CompareAndWrite
            | IoKind::BlockStatus
            | IoKind::ReplaceState
            | IoKind::ScsiCommand => Some(Err(IoErrorKind::Unsupported.into())),
        }
    }

    /// Another worker may have detected a loss meanwhile.
    fn outcome(&self, durable: bool) -> IoOutcome {
        if durable {
            self.shared.durability.check()
        } else {
            Ok(())
        }
    }

    /// Returns true if a write makes its own data durable. Not through the page cache: it may fail for earlier writes, this is reported
    /// only once, and the errno does not distinguish the two.
    fn writes_durably(&self, slot: &FileSlot) -> bool {
        slot.durable && slot.io.moves_data() && self.shared.cache == CacheMode::None
    }

    fn sync(&mut self, ring: &mut Ring, index: u32) -> Option<IoOutcome> {
        let slot = &mut self.slots[index];
        slot.step = FileStep::Sync;
        slot.sync = self.syncs.begin();
        let (owner, token) = (self.owner, index.into());
        // fdatasync includes sizes and allocations needed for reading the data.
        match u32::try_from(slot.io.length) {
            Ok(length) if slot.io.moves_data() => {
                ring.fsync_range(owner, token, &self.fd, slot.io.offset, length, true);
            }
            _ => ring.fsync(owner, token, &self.fd, true),
        }
        None
    }

    fn transfer(&mut self, ring: &mut Ring, index: u32) -> Option<IoOutcome> {
        let slot = &mut self.slots[index];
        let rest = (slot.io.length - slot.done) as usize;
        let buffer = if slot.done == 0 {
            slot.step = FileStep::Whole;
            std::mem::take(&mut slot.buffer)
        } else {
            slot.step = FileStep::Rest;
            slot.buffer.slice(slot.done as usize, rest)
        };
        let atomic = slot.io.flags.has(IoFlags::ATOMIC);
        let bounced = slot.bounce_all || atomic && buffer.segments().len() > 1;
        let buffer = if !bounced && self.shared.takes(&buffer) {
            buffer
        } else {
            if slot.step == FileStep::Whole {
                slot.buffer = buffer;
            }
            slot.step = FileStep::Bounced;
            // Covers every atomic write: see `atomic_writes`.
            let length = rest.min(PIECE_BYTES);
            let (lent, bounce) = self.bounce.take(length);
            slot.bounce = Some(lent);
            if slot.io.kind == IoKind::Write {
                let piece = slot.buffer.slice(slot.done as usize, length);
                piece.copy_to(&bounce);
            }
            bounce
        };
        if self.shared.cache == CacheMode::None {
            ring.adopt(&buffer);
        }
        let slot = &self.slots[index];
        let durably = self.writes_durably(slot);
        let offset = slot.io.offset + slot.done;
        let (owner, token) = (self.owner, index.into());
        match slot.io.kind {
            IoKind::Read => ring.read(owner, token, &self.fd, offset, buffer),
            _ if atomic => ring.write_atomic(owner, token, &self.fd, offset, buffer, durably),
            _ => ring.write(owner, token, &self.fd, offset, buffer, durably),
        }
        None
    }

    fn discard(&mut self, ring: &mut Ring, index: u32) -> Option<IoOutcome> {
        let refused = &self.shared.refused;
        let may_discard_blocks =
            self.shared.block_device && !refused.has(Allocation::DiscardBlocks);
        let operation = match self.slots[index].fallback {
            Fallback::None if may_discard_blocks => Allocation::DiscardBlocks,
            Fallback::None | Fallback::Punching if !refused.has(Allocation::Punch) => {
                Allocation::Punch
            }
            // A discard is advice (virtio 1.3, 5.2.6.2; SBC-4, 4.7.3.1): without support the data stays.
            _ => return Some(Ok(())),
        };
        self.allocate(ring, index, operation)
    }

    fn zero(&mut self, ring: &mut Ring, index: u32) -> Option<IoOutcome> {
        let slot = &self.slots[index];
        let refused = &self.shared.refused;
        if slot.done == 0 && slot.fallback != Fallback::Writing {
            if slot.io.flags.has(IoFlags::UNMAP) && !refused.has(Allocation::Punch) {
                return self.allocate(ring, index, Allocation::Punch);
            }
            if !refused.has(Allocation::ZeroRange) {
                return self.allocate(ring, index, Allocation::ZeroRange);
            }
        }
        let slot = &mut self.slots[index];
        slot.step = FileStep::Zeroes;
        let length = (slot.io.length - slot.done).min(PIECE_BYTES as u64) as usize;
        let offset = slot.io.offset + slot.done;
        let zeroes = self.bounce.zeroes(length);
        ring.write(self.owner, index.into(), &self.fd, offset, zeroes, false);
        None
    }

    fn allocate(
        &mut self,
        ring: &mut Ring,
        index: u32,
        operation: Allocation,
    ) -> Option<IoOutcome> {
        let slot = &mut self.slots[index];
        slot.step = FileStep::Allocation(operation);
        let IoRequest { offset, length, .. } = slot.io;
        let (owner, token) = (self.owner, index.into());
        let flags = match operation {
            Allocation::DiscardBlocks => {
                ring.discard_blocks(owner, token, &self.fd, offset, length);
                return None;
            }
            Allocation::Punch => PUNCH,
            Allocation::ZeroRange => ZERO_RANGE,
        };
        ring.fallocate(owner, token, &self.fd, flags, offset, length);
        None
    }

    fn finish(&mut self, index: u32, outcome: IoOutcome, finished: &mut Vec<Finished>) {
        let (tag, buffer) = self.vacate(index);
        finished.push(Finished {
            tag,
            buffer,
            outcome,
        });
    }

    /// Handles the end of a sync, and completes I/Os that waited for it.
    fn synced(
        &mut self,
        ring: &mut Ring,
        index: u32,
        number: u64,
        result: Result<u32, i32>,
        finished: &mut Vec<Finished>,
    ) {
        self.syncs.end(number);
        let outcome = self
            .take_result(index, result, None)
            .or_else(|| self.continue_io(ring, index));
        match outcome {
            Some(Ok(())) if self.syncs.holds(index) => {}
            Some(outcome) => self.finish(index, outcome, finished),
            // The sync was interrupted and runs again.
            None => {}
        }
        while let Some(index) = self.syncs.release() {
            self.finish(index, self.outcome(true), finished);
        }
    }

    /// Records the result of a step; `Some` if the I/O has failed.
    fn take_result(
        &mut self,
        index: u32,
        result: Result<u32, i32>,
        buffer: Option<IoBuffer>,
    ) -> Option<IoOutcome> {
        let slot = &mut self.slots[index];
        let step = slot.step;
        let buffer = match (step, buffer) {
            (FileStep::Whole, Some(buffer)) => {
                slot.buffer = buffer;
                None
            }
            (_, buffer) => buffer,
        };
        if let Err(libc::EINTR | libc::EAGAIN) = result
            && slot.retries < RETRIES_MAX
        {
            slot.retries += 1;
            slot.step = FileStep::Start;
            self.keep(index);
            return None;
        }
        match (step, result) {
            (FileStep::Whole | FileStep::Rest, Err(libc::EINVAL))
                if !slot.bounce_all && self.shared.alignment.memory > 1 =>
            {
                slot.bounce_all = true;
            }
            (
                FileStep::Whole | FileStep::Rest | FileStep::Bounced | FileStep::Zeroes,
                Ok(moved),
            ) => {
                let counted = usable(moved, slot, self.shared.alignment.offset);
                let is_tail = counted == 0 && self.shared.is_tail(slot);
                let moved = if is_tail { moved.into() } else { counted };
                if let (FileStep::Bounced, IoKind::Read, Some(bounce)) =
                    (step, slot.io.kind, buffer.as_ref())
                {
                    let piece = slot.buffer.slice(slot.done as usize, moved as usize);
                    bounce.copy_to(&piece);
                }
                slot.done += moved;
                if is_tail {
                    slot.zero_rest();
                    self.keep(index);
                    return None;
                }
                // Continuing an atomic write would split it.
                let torn = slot.io.flags.has(IoFlags::ATOMIC) && slot.done < slot.io.length;
                let stuck = moved == 0 && slot.io.length != 0 || torn;
                self.keep(index);
                return stuck.then(|| Err(self.nothing_moved(index)));
            }
            (FileStep::Allocation(operation), Err(errno)) if is_refusal(errno) => {
                self.shared.refused.add(operation);
            }
            // Possibly only this range, beyond the end of a shrunk device.
            (FileStep::Allocation(Allocation::DiscardBlocks), Err(libc::EINVAL)) => {
                slot.fallback = Fallback::Punching;
            }
            (FileStep::Allocation(_), Err(libc::EINVAL)) => slot.fallback = Fallback::Writing,
            // Pages of the range are dirty or in write-back. The kernel does not wait for them, because the device is claimed.
            (FileStep::Allocation(_), Err(libc::EBUSY)) if self.shared.block_device => {
                slot.fallback = Fallback::Writing;
            }
            (FileStep::Allocation(_), Ok(_)) => slot.done = slot.io.length,
            (_, Ok(_)) => {}
            (_, Err(errno)) => {
                self.keep(index);
                return Some(Err(self.failed(index, errno)));
            }
        }
        None
    }

    fn keep(&mut self, index: u32) {
        if let Some(lent) = self.slots[index].bounce.take() {
            self.bounce.give_back(lent);
        }
    }

    #[cold]
    fn failed(&self, index: u32, errno: i32) -> IoError {
        let slot = &self.slots[index];
        // A durable write may have failed in its device flush, which is reported only once.
        let lost = match slot.step {
            FileStep::Sync => errno != libc::ECANCELED,
            _ => self.writes_durably(slot) && is_of_device(errno),
        };
        if lost {
            self.shared.lose(errno);
        }
        let path = self.shared.path.display();
        let error = classify(slot.io.kind, errno);
        tracing::debug!(%path, io = ?slot.io, "I/O failed: {error}");
        match slot.step {
            FileStep::Sync => IoError::with_errno(IoErrorKind::WriteMedium, errno),
            _ => error,
        }
    }

    /// Returns the error of an I/O beyond the end of a truncated file. Zeroes would be wrong data.
    #[cold]
    fn nothing_moved(&self, index: u32) -> IoError {
        let io = &self.slots[index].io;
        let path = self.shared.path.display();
        tracing::debug!(%path, ?io, "I/O failed: the file was truncated");
        match io.kind {
            IoKind::Read => IoErrorKind::ReadMedium.into(),
            _ => IoErrorKind::WriteMedium.into(),
        }
    }
}

impl SharedFile {
    /// Records a loss of durability and logs the first one.
    #[cold]
    pub(super) fn lose(&self, errno: i32) {
        if self.durability.lose(errno) {
            let path = self.path.display();
            let error = std::io::Error::from_raw_os_error(errno);
            tracing::error!(
                %path,
                "cannot make written data durable, every flush fails until the disk is opened again: {error}"
            );
        }
    }

    /// Returns true if the device promises to execute this write atomically.
    #[cold]
    fn keeps_whole(&self, io: &IoRequest) -> bool {
        let promised = self.info.atomic_writes;
        promised.is_some_and(|atomic| atomic.allow(io.offset, io.length))
    }

    /// Returns true if the kernel can transfer this memory directly.
    #[inline]
    fn takes(&self, buffer: &IoBuffer) -> bool {
        let segments = buffer.segments();
        let address = self.alignment.memory as usize - 1;
        let length = self.alignment.offset as usize - 1;
        segments.len() <= SEGMENTS_MAX
            && segments
                .iter()
                .all(|s| s.base() as usize & address == 0 && s.len() & length == 0)
    }
}

impl FileSlot {
    #[cold]
    fn zero_rest(&mut self) {
        let rest = vec![0; (self.io.length - self.done) as usize];
        self.buffer.write_at(self.done as usize, &rest);
        self.done = self.io.length;
    }
}

impl SharedFile {
    /// Returns true if the rest of a read is missing in an image's incomplete last block and reads as zeroes.
    fn is_tail(&self, slot: &FileSlot) -> bool {
        let Coverage::Container { ends_within_block } = &self.coverage else {
            return false;
        };
        ends_within_block.load(Ordering::Relaxed)
            && slot.io.kind == IoKind::Read
            && slot.io.offset + slot.io.length == self.capacity.bytes()
            && slot.io.length - slot.done <= self.unit()
    }
}

/// Returns the bytes of a transfer that count: short ones continue at multiples of the device's alignment.
fn usable(moved: u32, slot: &FileSlot, alignment: u32) -> u64 {
    let moved = u64::from(moved).min(slot.io.length - slot.done);
    if slot.done + moved == slot.io.length {
        moved
    } else {
        moved & !(u64::from(alignment) - 1)
    }
}

impl IoChannel for FileChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        if let Err(refused) = self.limits.admit(io) {
            return Submission::Done(Err(refused));
        }
        if io.flags.has(IoFlags::ATOMIC) && !self.shared.keeps_whole(io) {
            return Submission::Done(Err(IoErrorKind::Unsupported.into()));
        }
        let durable = io.modifies()
            && (io.flags.has(IoFlags::FUA) || self.shared.cache == CacheMode::Writethrough);
        if (durable || io.kind == IoKind::Flush)
            && let Err(lost) = self.shared.durability.check()
        {
            return Submission::Done(Err(lost));
        }
        if io.moves_data() {
            assert_eq!(
                buffer.len() as u64,
                io.length,
                "window and I/O have different lengths"
            );
        }
        if io.kind == IoKind::BlockStatus {
            return self.block_status(ring, io, buffer, tag);
        }
        let index = self.occupy(tag, io, durable);
        self.slots[index].buffer = std::mem::take(buffer);
        match self.continue_io(ring, index) {
            None => Submission::Pending,
            Some(outcome) => {
                *buffer = self.vacate(index).1;
                Submission::Done(outcome)
            }
        }
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        if self.status.is_of(completion.owner) {
            return self.status.complete(ring, completion.more, finished);
        }
        let index = completion.token as u32;
        let slot = &self.slots[index];
        if slot.step == FileStep::Sync {
            return self.synced(ring, index, slot.sync, completion.result, finished);
        }
        let outcome = self
            .take_result(index, completion.result, completion.buffer)
            .or_else(|| self.continue_io(ring, index));
        if let Some(outcome) = outcome {
            self.finish(index, outcome, finished);
        }
    }

    fn abort(&mut self, ring: &mut Ring, tag: Tag) {
        if let Some(index) = self.slots.find(|slot| slot.tag == tag) {
            ring.cancel(self.owner, index.into());
        }
        self.status.abort(tag);
    }

    fn close(&mut self, ring: &mut Ring) {
        self.status.close(ring);
    }

    fn in_flight(&self) -> usize {
        self.slots.len() + self.status.in_flight()
    }
}
