//! I/O that covers parts of the device's blocks ([`block::DiskInfo::io_alignment`]), by read-modify-write.
//!
//! ```text
//!   device   |        |        |        |        |
//!   client        |---------------|                    a write
//!            |first   |        |last    |              1. lock these blocks   2. read first and last
//!            |================|=========|              3. merge               4. write all of them
//! ```
//!
//! The range lock of the disk ([`bdev::RangeLocks`]) covers whole blocks. While it is held no other I/O of any worker touches them, so
//! a write of a neighbour is neither lost nor undone. The write of a block replaces the neighbours by the bytes that the device has:
//! a crash tears them no more than the device tears one of its own blocks. A read needs no lock. The holder of a range
//! ([`IoFlags::HOLDER`]) has the lock of the whole blocks already.
//!
//! Zeroes are merged at the edges, and the blocks between are zeroed by the device. A discard does the same if the disk promises that
//! discarded blocks read as zeroes; otherwise it leaves the edges as they are.
//!
//! Owned by the worker's handle on the disk. On disks with a larger alignment than a sector, aligned I/O costs one test in
//! [`OpenDisk::submit`]. Tests: `tests/unaligned.rs`.

use bdev::{Finished, RangeLock, Submission, Tag};
use block::{IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use uring::Ring;

use super::{Io, OpenDisk};
use crate::WorkerHandle;

/// Most bytes that one read or write of an operation moves. It bounds the memory of an operation.
const PIECE: u64 = 256 << 10;

/// The operations of one disk on one worker.
pub(crate) struct Unaligned {
    worker: WorkerHandle,
    /// Bits of offset and length that are zero in an aligned I/O.
    mask: u64,
    operations: Vec<Operation>,
    /// Tag of the operation that submits an I/O just now, and is not in `operations`.
    submitting: Option<Tag>,
    /// Number of the last operation.
    number: u64,
}

/// Next step of an operation, or the event that it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnalignedStep {
    /// Waits for the range lock.
    Lock,
    /// Begins the next part.
    Begin,
    /// Reads the first block of the part.
    ReadFirst,
    /// Reads the last block of the part.
    ReadLast,
    /// Moves the blocks of the part.
    Move,
}

/// A client's I/O.
struct Operation {
    number: u64,
    tag: Tag,
    request: IoRequest,
    /// The client's memory.
    buffer: IoBuffer,
    /// Bytes from the start of the range that are done.
    done: u64,
    step: UnalignedStep,
    /// Whole blocks of the part.
    blocks: IoBuffer,
    lock: Option<RangeLock>,
}

/// A part of the client's range.
#[derive(Clone, Copy)]
struct Part {
    start: u64,
    end: u64,
    /// The whole blocks that have it.
    first: u64,
    last: u64,
    strategy: Strategy,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Strategy {
    /// Read-modify-write through memory of whole blocks.
    Blocks,
    /// One operation of the device on whole blocks, without data.
    Device,
    /// No operation.
    Skip,
}

impl Unaligned {
    pub fn new(worker: &WorkerHandle, alignment: u32) -> Unaligned {
        Unaligned {
            worker: worker.clone(),
            mask: u64::from(alignment) - 1,
            operations: Vec::new(),
            submitting: None,
            number: 0,
        }
    }

    /// Sets the alignment of another device.
    pub fn set_alignment(&mut self, alignment: u32) {
        self.mask = u64::from(alignment) - 1;
    }

    /// Returns true if the device takes the I/O as it is.
    #[inline(always)]
    pub fn takes(&self, request: &IoRequest) -> bool {
        (request.offset | request.length) & self.mask == 0
    }

    /// Returns true if no operation is under way.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Returns true if an I/O with this tag belongs to an operation.
    pub fn has(&self, tag: Tag) -> bool {
        self.submitting == Some(tag) || self.operations.iter().any(|one| one.tag == tag)
    }

    fn take(&mut self, matches: impl Fn(&Operation) -> bool) -> Option<Operation> {
        let index = self.operations.iter().position(matches)?;
        Some(self.operations.swap_remove(index))
    }
}

impl Operation {
    /// Returns the next part of the range, for blocks of `mask + 1` bytes.
    fn part(&self, mask: u64, discard_zeroes: bool) -> Part {
        let start = self.request.offset + self.done;
        let all = self.request.offset + self.request.length;
        let first = start & !mask;
        let whole_until = all & !mask;
        let is_discard = self.request.kind == IoKind::Discard;
        let (end, strategy) = match self.request.kind {
            IoKind::Read | IoKind::Write => {
                (all.min(first + PIECE.max(mask + 1)), Strategy::Blocks)
            }
            _ if start == first && start < whole_until => (whole_until, Strategy::Device),
            _ if is_discard && !discard_zeroes => (all.min(first + mask + 1), Strategy::Skip),
            _ => (all.min(first + mask + 1), Strategy::Blocks),
        };
        Part {
            start,
            end,
            first,
            last: (end + mask) & !mask,
            strategy,
        }
    }

    /// Begins the step after the one that has ended, and returns its I/O. `None`: the part is done.
    fn next(&mut self, part: &Part, block: u64) -> Option<IoRequest> {
        let flags = self.request.flags;
        let bytes = part.last - part.first;
        if part.strategy == Strategy::Device {
            let whole = IoRequest {
                offset: part.first,
                length: bytes,
                flags: flags.with(IoFlags::HOLDER),
                ..self.request
            };
            return self.set_step(UnalignedStep::Move).then_some(whole);
        }
        if self.request.kind == IoKind::Read {
            let read = IoRequest::read(part.first, bytes).flagged(flags);
            return self.set_step(UnalignedStep::Move).then_some(read);
        }
        let read = |offset| {
            let read = IoRequest::read(offset, block).flagged(IoFlags::HOLDER);
            match flags.has(IoFlags::CLOSER) {
                true => read.flagged(IoFlags::CLOSER),
                false => read,
            }
        };
        let is_cut = part.end < part.last;
        if self.step == UnalignedStep::Begin
            && (part.start > part.first || is_cut && bytes == block)
        {
            self.step = UnalignedStep::ReadFirst;
            return Some(read(part.first));
        }
        if matches!(self.step, UnalignedStep::Begin | UnalignedStep::ReadFirst)
            && is_cut
            && bytes > block
        {
            self.step = UnalignedStep::ReadLast;
            return Some(read(part.last - block));
        }
        let write = IoRequest::write(part.first, bytes).flagged(flags.with(IoFlags::HOLDER));
        self.set_step(UnalignedStep::Move).then_some(write)
    }

    /// Sets the step. Returns false if it was the step that has just ended.
    fn set_step(&mut self, step: UnalignedStep) -> bool {
        let is_new = self.step != step;
        self.step = step;
        is_new
    }

    /// Returns the memory of the I/O of the present step.
    fn memory(&mut self, part: &Part, block: u64) -> IoBuffer {
        let bytes = part.last - part.first;
        if part.strategy == Strategy::Device {
            return IoBuffer::default();
        }
        if self.blocks.len() as u64 != bytes {
            self.blocks = IoBuffer::owned(bytes as usize);
        }
        match self.step {
            UnalignedStep::ReadFirst => self.blocks.slice(0, block as usize),
            UnalignedStep::ReadLast => self.blocks.slice((bytes - block) as usize, block as usize),
            _ => {
                if self.request.kind != IoKind::Read {
                    self.merge(part);
                }
                self.blocks.slice(0, bytes as usize)
            }
        }
    }

    /// Copies the client's data, or zeroes, into the blocks.
    fn merge(&self, part: &Part) {
        let (at, length) = (
            (part.start - part.first) as usize,
            (part.end - part.start) as usize,
        );
        match self.request.kind {
            IoKind::Write => {
                let data = self.buffer.slice(self.done as usize, length);
                data.copy_to(&self.blocks.slice(at, length));
            }
            _ => self.blocks.fill(at, length, 0),
        }
    }

    /// Ends a part: a read copies its data to the client's memory.
    fn end_part(&mut self, part: &Part) {
        let (at, length) = (
            (part.start - part.first) as usize,
            (part.end - part.start) as usize,
        );
        if self.request.kind == IoKind::Read {
            let data = self.buffer.slice(self.done as usize, length);
            self.blocks.slice(at, length).copy_to(&data);
        }
        self.done += length as u64;
        self.step = UnalignedStep::Begin;
    }
}

impl OpenDisk {
    /// Returns true if the range of the I/O lies within the device.
    fn has_range(&self, request: &IoRequest) -> bool {
        let end = request.offset.checked_add(request.length);
        end.is_some_and(|end| end <= self.disk.device().capacity().bytes())
    }

    /// Begins an I/O that the device does not take as it is.
    #[cold]
    pub(crate) fn begin_unaligned(
        &mut self,
        ring: &mut Ring,
        request: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
        handle: u32,
    ) -> Submission {
        // Nothing is locked for an I/O that the device would refuse.
        if !self.has_range(request) {
            return Submission::Done(Err(IoErrorKind::OutOfRange.into()));
        }
        if request.kind == IoKind::CompareAndWrite || request.flags.has(IoFlags::ATOMIC) {
            return Submission::Done(Err(IoErrorKind::Unsupported.into()));
        }
        self.unaligned.number += 1;
        let needs_lock = request.modifies() && !request.flags.has(IoFlags::HOLDER);
        let number = self.unaligned.number;
        let operation = Operation {
            number,
            tag,
            request: *request,
            buffer: std::mem::take(buffer),
            done: 0,
            step: match needs_lock {
                true => UnalignedStep::Lock,
                false => UnalignedStep::Begin,
            },
            blocks: IoBuffer::default(),
            lock: None,
        };
        if !needs_lock {
            return match self.advance_unaligned(ring, operation, handle) {
                None => Submission::Pending,
                Some(ended) => {
                    *buffer = ended.buffer;
                    Submission::Done(ended.outcome)
                }
            };
        }
        self.unaligned.operations.push(operation);
        let worker = self.unaligned.worker.clone();
        let granted = move |lock| {
            worker.send(move |worker| worker.unaligned_granted(handle, number, lock));
        };
        let locks = self.disk.range_locks();
        locks.acquire(request.offset, request.length, granted);
        Submission::Pending
    }

    /// Continues an operation until it waits. `Some`: it has ended.
    fn advance_unaligned(
        &mut self,
        ring: &mut Ring,
        mut operation: Operation,
        handle: u32,
    ) -> Option<Finished> {
        let discard_zeroes =
            operation.request.kind == IoKind::Discard && self.disk.info().discard_zeroes;
        let (mask, tag) = (self.unaligned.mask, operation.tag);
        while operation.done < operation.request.length {
            // The disk may have shrunk since the last part.
            if !self.has_range(&operation.request) {
                return self.end_unaligned(operation, Err(IoErrorKind::OutOfRange.into()));
            }
            let part = operation.part(mask, discard_zeroes);
            let next = match part.strategy {
                Strategy::Skip => None,
                Strategy::Blocks | Strategy::Device => operation.next(&part, mask + 1),
            };
            let Some(io) = next else {
                operation.end_part(&part);
                continue;
            };
            let mut memory = operation.memory(&part, mask + 1);
            self.unaligned.submitting = Some(tag);
            let submitted = self.submit_part(ring, &io, &mut memory, tag, handle);
            self.unaligned.submitting = None;
            match submitted {
                Submission::Pending => {
                    self.unaligned.operations.push(operation);
                    return None;
                }
                Submission::Done(Ok(())) => {}
                Submission::Done(Err(error)) => return self.end_unaligned(operation, Err(error)),
            }
        }
        self.end_unaligned(operation, Ok(()))
    }

    /// Ends an operation, and releases its lock. `None`: it has failed, and waits until the disk is resumed.
    fn end_unaligned(&mut self, operation: Operation, outcome: IoOutcome) -> Option<Finished> {
        let Operation {
            tag,
            request,
            mut buffer,
            ..
        } = operation;
        if let Err(error) = outcome
            && self.holds(error, tag)
        {
            self.hold(&request, &mut buffer, tag, error);
            return None;
        }
        Some(Finished {
            tag,
            buffer,
            outcome,
        })
    }

    /// Continues an operation whose I/O has ended. The tag has no marks. `Some`: the operation has ended.
    #[cold]
    pub(crate) fn continue_unaligned(
        &mut self,
        ring: &mut Ring,
        handle: u32,
        tag: Tag,
        outcome: IoOutcome,
    ) -> Option<Finished> {
        let operation = self.unaligned.take(|one| one.tag == tag)?;
        match outcome {
            Ok(()) => self.advance_unaligned(ring, operation, handle),
            Err(error) => self.end_unaligned(operation, Err(error)),
        }
    }

    /// Repeats the part of an operation whose I/O was deferred. The disk may have another device now.
    #[cold]
    pub(crate) fn restart_unaligned(
        &mut self,
        ring: &mut Ring,
        handle: u32,
        tag: Tag,
    ) -> Option<Finished> {
        let mut operation = self.unaligned.take(|one| one.tag == tag)?;
        operation.step = UnalignedStep::Begin;
        self.advance_unaligned(ring, operation, handle)
    }

    /// Takes the I/Os in `finished` from `before` on. Continues operations, and records the I/Os of clients, which stay in `finished`.
    #[cold]
    pub(crate) fn finish_with_unaligned(
        &mut self,
        ring: &mut Ring,
        handle: u32,
        finished: &mut Vec<Finished>,
        before: usize,
    ) {
        for mut one in finished.split_off(before) {
            one.tag = self.drain.finished(one.tag);
            let ended = match self.unaligned.has(one.tag) {
                true => self.continue_unaligned(ring, handle, one.tag, one.outcome),
                false => Some(one),
            };
            if let Some(one) = ended {
                self.record.finished(&one.outcome);
                finished.push(one);
            }
        }
    }
}

impl Io {
    /// Starts an operation whose range lock was granted.
    #[cold]
    pub(crate) fn unaligned_granted(
        &mut self,
        disk: u32,
        number: u64,
        lock: RangeLock,
        finished: &mut Vec<Finished>,
    ) {
        let Some(Some(open)) = self.disks.get_mut(disk as usize) else {
            return;
        };
        let Some(mut operation) = open.unaligned.take(|one| one.number == number) else {
            return;
        };
        (operation.lock, operation.step) = (Some(lock), UnalignedStep::Begin);
        if let Some(one) = open.advance_unaligned(&mut self.ring, operation, disk) {
            open.record.finished(&one.outcome);
            finished.push(one);
        }
        if open.is_unused() {
            self.close_unused(disk);
        }
    }
}
