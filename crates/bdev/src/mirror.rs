//! `mirror`: a layer under a disk during a copy to another device. Writes to the copied part go to both devices: the copy never falls
//! behind, and is complete at the end, regardless of client writes.
//!
//! ```text
//!   0 ............ copied ............................. end
//!   writes go to   │ writes go to the source alone:
//!   both devices   │ they are copied when it is their turn
//! ```
//!
//! The copying thread holds the range ([`crate::RangeLocks`]) until [`MirrorProgress::advance`]: no write is in flight there. A write that
//! fails on the target, or that it does not answer within [`TARGET_PATIENCE`], ends the mirror without an error for clients: the source
//! alone answers from then on. I/O on the target uses its slot and memory until it ends; such I/O is **detached**. Concurrent writes of one range may end in either
//! order on each device, as on RAID 1. Tests: here, and `tests/mirror.rs`.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use block::{
    CompareAndWrite, DiskInfo, IoError, IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest,
};
use guest_memory::IoBuffer;
use uring::{Completion, Owner, Ring};

use crate::slots::Slots;
use crate::{Attach, BlockDevice, Finished, IoChannel, Layer, Submission, Tag};

/// Maximum time that a client's write waits for the target.
pub const TARGET_PATIENCE: Duration = Duration::from_secs(20);
/// Interval at which a channel checks its target's I/Os.
const TICK: Duration = Duration::from_millis(100);
/// ETIMEDOUT
const TIMED_OUT: i32 = 110;
const TICKS_MAX: u32 = (TARGET_PATIENCE.as_millis() / TICK.as_millis()) as u32;

/// Progress of the copy, and whether it is still valid.
#[derive(Debug, Default)]
pub struct MirrorProgress {
    copied: AtomicU64,
    /// I/Os in flight on the target after their clients were answered.
    detached: AtomicU64,
    has_failed: AtomicBool,
    error: Mutex<Option<IoError>>,
}

impl MirrorProgress {
    /// Returns the number of bytes from the start that are equal on both devices.
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Acquire)
    }

    /// Records that the target is complete up to `end`. The caller holds the new part.
    pub fn advance(&self, end: u64) {
        self.copied.store(end, Ordering::Release);
    }

    /// Returns the error that has made the copy invalid.
    pub fn error(&self) -> Option<IoError> {
        *self.error.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of unfinished I/Os on the target with answered clients.
    pub fn detached(&self) -> u64 {
        self.detached.load(Ordering::Acquire)
    }

    /// Ends the mirror; writes that wait only for the target are answered soon.
    pub fn abandon(&self) {
        self.fail(IoErrorKind::Cancelled.into());
    }

    #[cold]
    fn fail(&self, error: IoError) {
        let mut first = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(error);
        self.has_failed.store(true, Ordering::Release);
    }

    /// Returns true if a change at this offset also goes to the target.
    fn reaches(&self, offset: u64) -> bool {
        offset < self.copied() && !self.has_failed.load(Ordering::Acquire)
    }

    fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }
}

/// The layer `mirror`.
pub struct Mirror {
    source: Arc<dyn BlockDevice>,
    target: Arc<dyn BlockDevice>,
    progress: Arc<MirrorProgress>,
    /// The source promises zeroes in discarded blocks, which the target must keep.
    discard_zeroes: bool,
    /// [`DiskInfo::io_alignment`] of the target.
    target_alignment: u32,
}

impl Mirror {
    /// Creates a mirror of `source` on `target`, of the same size.
    pub fn new(source: Arc<dyn BlockDevice>, target: Arc<dyn BlockDevice>) -> Mirror {
        Mirror {
            discard_zeroes: source.info().discard_zeroes,
            target_alignment: target.info().io_alignment,
            source,
            target,
            progress: Arc::default(),
        }
    }

    /// Returns the progress.
    pub fn progress(&self) -> &Arc<MirrorProgress> {
        &self.progress
    }
}

impl Layer for Mirror {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.source
    }

    fn layer_kind(&self) -> &'static str {
        "mirror"
    }

    /// Atomic operations of one device are not atomic on two. The holder of a range emulates compare and write.
    fn layer_info(&self, inner: DiskInfo) -> DiskInfo {
        DiskInfo {
            atomic_writes: None,
            anchors: false,
            compare_and_write: inner.compare_and_write.map(|_| CompareAndWrite::Emulated),
            io_alignment: inner.io_alignment.max(self.target_alignment),
            ..inner
        }
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        let owner = attach.owner();
        let (source, source_owners) = attach.below(|attach| self.source.attach(attach))?;
        let target = self.target.attach(attach)?;
        Ok(Box::new(MirrorChannel {
            source,
            source_owners,
            target,
            owner,
            is_ticking: false,
            detached: 0,
            target_closes_later: false,
            progress: Arc::clone(&self.progress),
            discard_zeroes: self.discard_zeroes,
            slots: Slots::default(),
            over: Vec::new(),
        }))
    }
}

struct MirrorSlot {
    tag: Tag,
    /// Buffer returned by the source with its answer.
    buffer: IoBuffer,
    outcome: IoOutcome,
    /// Number of devices that have not answered.
    missing: u8,
    target: OnTarget,
}

/// I/O of a slot on the target.
#[derive(Clone, Copy, PartialEq)]
enum OnTarget {
    /// No write to the target, or it has ended.
    None,
    /// The write is in flight. The number counts ticks since its submission.
    InFlight(u32),
    /// The write is in flight, and the client has its response.
    Detached,
}

struct MirrorChannel {
    source: Box<dyn IoChannel>,
    source_owners: Vec<Owner>,
    target: Box<dyn IoChannel>,
    /// Owner of the timer.
    owner: Owner,
    is_ticking: bool,
    /// Number of slots in [`OnTarget::Detached`].
    detached: usize,
    /// The channel closes, and the target follows when no I/O is detached.
    target_closes_later: bool,
    progress: Arc<MirrorProgress>,
    discard_zeroes: bool,
    slots: Slots<MirrorSlot>,
    over: Vec<Finished>,
}

impl MirrorChannel {
    fn occupy(&mut self, tag: Tag) -> u32 {
        let slot = MirrorSlot {
            tag,
            buffer: IoBuffer::default(),
            outcome: Ok(()),
            missing: 0,
            target: OnTarget::None,
        };
        self.slots.occupy(slot)
    }

    /// Returns the target's I/O for a change of the source. Durability is not needed before the end.
    fn mirrored(&self, io: &IoRequest) -> Option<IoRequest> {
        if !io.modifies() || !self.progress.reaches(io.offset) {
            return None;
        }
        let flags = match io.flags.has(IoFlags::UNMAP) {
            true => IoFlags::UNMAP,
            false => IoFlags::NONE,
        };
        match io.kind {
            IoKind::Write => Some(IoRequest::write(io.offset, io.length)),
            IoKind::WriteZeroes => {
                Some(IoRequest::write_zeroes(io.offset, io.length).flagged(flags))
            }
            IoKind::Discard if self.discard_zeroes => {
                Some(IoRequest::write_zeroes(io.offset, io.length).flagged(IoFlags::UNMAP))
            }
            // The content may be undefined afterwards.
            IoKind::Discard => None,
            _ => None,
        }
    }

    fn submit_target(&mut self, ring: &mut Ring, io: &IoRequest, mut buffer: IoBuffer, index: u32) {
        let submitted = self.target.submit(ring, io, &mut buffer, Tag(index.into()));
        match submitted {
            Submission::Pending => {
                let slot = &mut self.slots[index];
                slot.missing += 1;
                slot.target = OnTarget::InFlight(0);
                self.tick_later(ring);
            }
            Submission::Done(Ok(())) => {}
            Submission::Done(Err(error)) => self.progress.fail(error),
        }
    }

    /// Records one device's answer; returns the I/O if its client is answered now.
    fn answered(&mut self, index: u32) -> Option<Finished> {
        let slot = &mut self.slots[index];
        slot.missing -= 1;
        if slot.missing > 0 {
            return self.detach(index);
        }
        self.slots.release(index);
        let slot = &mut self.slots[index];
        if slot.target == OnTarget::Detached {
            self.detached -= 1;
            self.progress.detached.fetch_sub(1, Ordering::Release);
            return None;
        }
        Some(Finished {
            tag: slot.tag,
            buffer: std::mem::take(&mut slot.buffer),
            outcome: slot.outcome,
        })
    }

    /// Answers a client without the target if only that is missing and the mirror has failed.
    fn detach(&mut self, index: u32) -> Option<Finished> {
        let slot = &mut self.slots[index];
        let is_in_flight = matches!(slot.target, OnTarget::InFlight(_));
        if !is_in_flight || slot.missing != 1 || !self.progress.has_failed() {
            return None;
        }
        slot.target = OnTarget::Detached;
        self.detached += 1;
        self.progress.detached.fetch_add(1, Ordering::Release);
        Some(Finished {
            tag: slot.tag,
            buffer: std::mem::take(&mut slot.buffer),
            outcome: slot.outcome,
        })
    }

    fn tick_later(&mut self, ring: &mut Ring) {
        if !self.is_ticking {
            self.is_ticking = true;
            ring.timer(self.owner, 0, TICK);
        }
    }

    /// Fails the mirror if the target takes too long, and answers clients without it.
    #[cold]
    fn tick(&mut self, ring: &mut Ring, finished: &mut Vec<Finished>) {
        self.is_ticking = false;
        let mut is_waiting = false;
        for slot in self.slots.all_mut() {
            let OnTarget::InFlight(ticks) = &mut slot.target else {
                continue;
            };
            is_waiting = true;
            *ticks += 1;
            if *ticks >= TICKS_MAX {
                let error = IoError::with_errno(IoErrorKind::WriteMedium, TIMED_OUT);
                self.progress.fail(error);
            }
        }
        if self.progress.has_failed() {
            for index in 0..self.slots.all().len() as u32 {
                finished.extend(self.detach(index));
            }
        }
        if is_waiting {
            self.tick_later(ring);
        }
    }
}

impl IoChannel for MirrorChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        if io.flags.has(IoFlags::ATOMIC) || io.kind == IoKind::CompareAndWrite {
            return Submission::Done(Err(IoErrorKind::Unsupported.into()));
        }
        let index = self.occupy(tag);
        if let Some(mirrored) = self.mirrored(io) {
            let bytes = match mirrored.moves_data() {
                true => buffer.slice(0, io.length as usize),
                false => IoBuffer::default(),
            };
            self.submit_target(ring, &mirrored, bytes, index);
        }
        let submitted = self.source.submit(ring, io, buffer, Tag(index.into()));
        let slot = &mut self.slots[index];
        match submitted {
            Submission::Pending => {
                slot.missing += 1;
                Submission::Pending
            }
            // The target still has the memory.
            Submission::Done(outcome) if slot.missing > 0 => {
                slot.outcome = outcome;
                slot.buffer = std::mem::take(buffer);
                Submission::Pending
            }
            done @ Submission::Done(_) => {
                self.slots.release(index);
                done
            }
        }
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        if completion.owner == self.owner {
            return self.tick(ring, finished);
        }
        let is_source = self.source_owners.contains(&completion.owner);
        let mut over = std::mem::take(&mut self.over);
        match is_source {
            true => self.source.complete(ring, completion, &mut over),
            false => self.target.complete(ring, completion, &mut over),
        }
        for one in over.drain(..) {
            let index = one.tag.0 as u32;
            if !is_source
                && let slot = &mut self.slots[index]
                && slot.target != OnTarget::Detached
            {
                slot.target = OnTarget::None;
            }
            match (is_source, one.outcome) {
                (true, outcome) => {
                    let slot = &mut self.slots[index];
                    (slot.buffer, slot.outcome) = (one.buffer, outcome);
                }
                (false, Err(error)) => self.progress.fail(error),
                (false, Ok(())) => {}
            }
            finished.extend(self.answered(index));
        }
        self.over = over;
        if self.target_closes_later && self.detached == 0 {
            self.target_closes_later = false;
            self.target.close(ring);
        }
    }

    fn abort(&mut self, ring: &mut Ring, tag: Tag) {
        let named = |slot: &MirrorSlot| {
            slot.tag == tag && slot.missing > 0 && slot.target != OnTarget::Detached
        };
        if let Some(index) = self.slots.find(named) {
            self.source.abort(ring, Tag(index.into()));
            self.target.abort(ring, Tag(index.into()));
        }
    }

    fn close(&mut self, ring: &mut Ring) {
        if self.is_ticking {
            ring.cancel(self.owner, 0);
        }
        self.source.close(ring);
        if self.detached == 0 {
            return self.target.close(ring);
        }
        self.target_closes_later = true;
        let slots = self.slots.all().iter().zip(0u64..);
        for (_, index) in slots.filter(|(slot, _)| slot.target == OnTarget::Detached) {
            self.target.abort(ring, Tag(index));
        }
    }

    fn is_closed(&self) -> bool {
        self.slots.len() == 0
            && !self.is_ticking
            && !self.target_closes_later
            && self.source.is_closed()
            && self.target.is_closed()
    }

    /// Clients do not wait for detached I/Os, and no end is reported for them: range locks must not wait for them either.
    fn in_flight(&self) -> usize {
        self.slots.len() - self.detached
    }
}
