//! The layer `copy_before_write`: clients' I/O passes to the source. A write to an unsettled unit waits until the old data are saved.
//!
//! I/O of clients keeps its tags. Copies use channels of their own, so that the tags do not collide. A write over several pieces saves one
//! piece after the other. Settled units cost one check per write.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use block::{IoErrorKind, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use uring::{Completion, Owner, Ring};

use super::tracker::{Claim, PointInTimeError};
use super::{SharedPoint, Waiter, wake};
use crate::slots::Slots;
use crate::watched_inbox::WatchedInbox;
use crate::{Attach, BlockDevice, Finished, IoChannel, Layer, Submission, TARGET_PATIENCE, Tag};

/// Interval at which a channel checks the duration of its copies.
const TICK: Duration = Duration::from_millis(100);
const TICKS_MAX: u32 = (TARGET_PATIENCE.as_millis() / TICK.as_millis()) as u32;
/// Tokens of the inbox and of the timer.
const WOKEN: u64 = 0;
const TIMER: u64 = 1;
/// Bytes that are compared with zeroes at a time.
const COMPARED: usize = 4096;
/// Maximum number of copies of one write in sequence. Copies may complete at once, and other requests of the worker wait meanwhile.
const COPIES_MAX: u32 = 16;

pub(super) struct CopyBeforeWrite {
    shared: Arc<SharedPoint>,
}

impl CopyBeforeWrite {
    pub fn new(shared: Arc<SharedPoint>) -> CopyBeforeWrite {
        CopyBeforeWrite { shared }
    }
}

impl Layer for CopyBeforeWrite {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.shared.source
    }

    fn layer_kind(&self) -> &'static str {
        "copy_before_write"
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        let shared = &self.shared;
        let (source, source_owners) = attach.below(|attach| shared.source.attach(attach))?;
        let (old, old_owners) = attach.below(|attach| shared.source.attach(attach))?;
        let scratch = shared.scratch.attach(attach)?;
        let owner = attach.owner();
        let inbox = WatchedInbox::new(attach.ring(), owner, WOKEN)?;
        Ok(Box::new(WriteChannel {
            shared: Arc::clone(shared),
            source,
            source_owners,
            old,
            old_owners,
            scratch,
            owner,
            inbox,
            is_ticking: false,
            detached: 0,
            closes_later: false,
            slots: Slots::default(),
            over: Vec::new(),
        }))
    }
}

/// A client's write that has not been submitted to the source.
struct ClientWrite {
    io: IoRequest,
    buffer: IoBuffer,
    tag: Tag,
    is_aborted: bool,
}

/// A copy in flight.
struct CopyOfOld {
    range: Range<u64>,
    buffer: IoBuffer,
    /// Ticks since its start.
    ticks: u32,
}

#[derive(Default)]
struct WriteSlot {
    /// `None` if the client does not wait any more.
    write: Option<ClientWrite>,
    /// `None` while another slot copies.
    copy: Option<CopyOfOld>,
}

struct WriteChannel {
    shared: Arc<SharedPoint>,
    /// I/O of clients, with their tags.
    source: Box<dyn IoChannel>,
    source_owners: Vec<Owner>,
    /// Reads of old data. Tags are slots here and on `scratch`.
    old: Box<dyn IoChannel>,
    old_owners: Vec<Owner>,
    scratch: Box<dyn IoChannel>,
    /// Owner of the inbox and of the timer.
    owner: Owner,
    inbox: WatchedInbox<()>,
    is_ticking: bool,
    /// Number of slots with a copy in flight and without a waiting client.
    detached: usize,
    /// The channel closes, and the channels of copies follow when no copy is detached.
    closes_later: bool,
    slots: Slots<WriteSlot>,
    over: Vec<Finished>,
}

fn is_zero(buffer: &IoBuffer) -> bool {
    let (mut bytes, mut at) = ([0; COMPARED], 0);
    while at < buffer.len() {
        let part = COMPARED.min(buffer.len() - at);
        buffer.read_at(at, &mut bytes[..part]);
        if bytes[..part] != [0; COMPARED][..part] {
            return false;
        }
        at += part;
    }
    true
}

impl WriteChannel {
    fn occupy(&mut self, write: ClientWrite) -> u32 {
        self.slots.occupy(WriteSlot {
            write: Some(write),
            copy: None,
        })
    }

    /// Continues a slot without a copy in flight. Returns the write if it has ended; it was submitted or waits otherwise.
    fn advance(&mut self, ring: &mut Ring, index: u32) -> Option<Finished> {
        let mut copies = 0;
        loop {
            let slot = &mut self.slots[index];
            if slot.copy.is_some() {
                return None;
            }
            // `None`: the slot is free, or its client has stopped waiting.
            let write = slot.write.as_ref()?;
            if write.is_aborted {
                return self.finish(index, Err(IoErrorKind::Cancelled.into()));
            }
            let range = write.io.offset..write.io.offset.saturating_add(write.io.length);
            if copies == COPIES_MAX {
                self.inbox.inbox().put(index.into(), ());
                return None;
            }
            let waiter = || Waiter {
                inbox: Arc::clone(self.inbox.inbox()),
                slot: index.into(),
            };
            let claim = self.shared.lock().claim(&range, waiter);
            match claim {
                Claim::Wait => return None,
                Claim::Settled => return self.start_write(ring, index),
                Claim::Copy(range) => self.start_copy(ring, index, range),
            }
            copies += 1;
        }
    }

    /// Frees a slot without a copy in flight and returns the end of its write.
    fn finish(&mut self, index: u32, outcome: IoOutcome) -> Option<Finished> {
        let write = self.slots[index].write.take()?;
        self.slots.release(index);
        Some(Finished {
            tag: write.tag,
            buffer: write.buffer,
            outcome,
        })
    }

    /// Submits the client's write to the source. The slot becomes free, unless its copy is still in flight.
    fn start_write(&mut self, ring: &mut Ring, index: u32) -> Option<Finished> {
        let slot = &mut self.slots[index];
        let mut write = slot.write.take()?;
        match slot.copy {
            None => self.slots.release(index),
            Some(_) => self.detached += 1,
        }
        let outcome = match write.is_aborted {
            true => Err(IoErrorKind::Cancelled.into()),
            false => {
                let ClientWrite {
                    io, buffer, tag, ..
                } = &mut write;
                match self.source.submit(ring, io, buffer, *tag) {
                    Submission::Pending => return None,
                    Submission::Done(outcome) => outcome,
                }
            }
        };
        Some(Finished {
            tag: write.tag,
            buffer: write.buffer,
            outcome,
        })
    }

    /// Reads old data, then saves them. Both may complete at once.
    fn start_copy(&mut self, ring: &mut Ring, index: u32, range: Range<u64>) {
        let length = range.end - range.start;
        let buffer = IoBuffer::owned(length as usize);
        let mut window = buffer.slice(0, buffer.len());
        let io = IoRequest::read(range.start, length);
        self.slots[index].copy = Some(CopyOfOld {
            range,
            buffer,
            ticks: 0,
        });
        match self.old.submit(ring, &io, &mut window, Tag(index.into())) {
            Submission::Pending => self.tick_later(ring),
            Submission::Done(outcome) => self.old_read(ring, index, outcome),
        }
    }

    /// Handles the end of a read of old data.
    fn old_read(&mut self, ring: &mut Ring, index: u32, outcome: IoOutcome) {
        let Some(copy) = &self.slots[index].copy else {
            return;
        };
        if let Err(error) = outcome {
            return self.copy_failed(index, PointInTimeError::Source(error));
        }
        // The scratch device reads as zeroes where nothing was written.
        if is_zero(&copy.buffer) {
            return self.saved(index, Ok(()));
        }
        let length = copy.buffer.len();
        let io = IoRequest::write(copy.range.start, length as u64);
        let reserved = self.shared.lock().reserve(length as u64);
        if let Err(error) = reserved {
            return self.copy_failed(index, error);
        }
        let mut window = copy.buffer.slice(0, length);
        match self
            .scratch
            .submit(ring, &io, &mut window, Tag(index.into()))
        {
            Submission::Pending => self.tick_later(ring),
            Submission::Done(outcome) => self.saved(index, outcome),
        }
    }

    /// Handles the end of a copy.
    fn saved(&mut self, index: u32, outcome: IoOutcome) {
        if let Err(error) = outcome {
            return self.copy_failed(index, PointInTimeError::Scratch(error));
        }
        if let Some(copy) = self.slots[index].copy.take() {
            let waiting = self.shared.lock().copied(&copy.range);
            wake(waiting);
        }
        self.free_detached(index);
    }

    #[cold]
    fn copy_failed(&mut self, index: u32, error: PointInTimeError) {
        self.slots[index].copy = None;
        self.shared.fail(error);
        self.free_detached(index);
    }

    /// Frees a slot at the end of its copy if no client waits for it.
    fn free_detached(&mut self, index: u32) {
        if self.slots[index].write.is_none() {
            self.detached -= 1;
            self.slots.release(index);
        }
    }

    fn close_copies(&mut self, ring: &mut Ring) {
        self.old.close(ring);
        self.scratch.close(ring);
    }

    fn tick_later(&mut self, ring: &mut Ring) {
        if !self.is_ticking {
            self.is_ticking = true;
            ring.timer(self.owner, TIMER, TICK);
        }
    }

    /// Ends the point in time if a copy takes too long. Clients then stop waiting for copies.
    #[cold]
    fn tick(&mut self, ring: &mut Ring, finished: &mut Vec<Finished>) {
        self.is_ticking = false;
        let copies = self
            .slots
            .all_mut()
            .iter_mut()
            .filter_map(|slot| slot.copy.as_mut());
        let (mut is_waiting, mut is_late) = (false, false);
        for copy in copies {
            copy.ticks += 1;
            is_waiting = true;
            is_late |= copy.ticks >= TICKS_MAX;
        }
        if is_late {
            self.shared.fail(PointInTimeError::TimedOut);
        }
        if self.shared.lock().failure().is_some() {
            for index in 0..self.slots.all().len() as u32 {
                if self.slots[index].copy.is_some() {
                    finished.extend(self.start_write(ring, index));
                }
            }
        }
        if is_waiting {
            self.tick_later(ring);
        }
    }

    /// Continues the writes that waited for copies of other writes.
    fn resume(&mut self, ring: &mut Ring, more: bool, finished: &mut Vec<Finished>) {
        let mut woken = self.inbox.take(ring, more);
        for (index, ()) in woken.drain(..) {
            finished.extend(self.advance(ring, index as u32));
        }
        self.inbox.reuse(woken);
    }
}

impl IoChannel for WriteChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        let range = io.offset..io.offset.saturating_add(io.length);
        let changes = io.modifies() && io.touches_data();
        if !changes || self.shared.settled.covers(&range) {
            return self.source.submit(ring, io, buffer, tag);
        }
        let index = self.occupy(ClientWrite {
            io: *io,
            buffer: std::mem::take(buffer),
            tag,
            is_aborted: false,
        });
        match self.advance(ring, index) {
            None => Submission::Pending,
            Some(finished) => {
                *buffer = finished.buffer;
                Submission::Done(finished.outcome)
            }
        }
    }

    fn wants_prefetch(&self) -> bool {
        self.source.wants_prefetch()
    }

    fn prefetch(&self, io: &IoRequest, soon: crate::Prefetch) {
        self.source.prefetch(io, soon);
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        let owner = completion.owner;
        if owner == self.owner {
            if completion.token == TIMER {
                return self.tick(ring, finished);
            }
            return self.resume(ring, completion.more, finished);
        }
        if self.source_owners.contains(&owner) {
            return self.source.complete(ring, completion, finished);
        }
        let mut over = std::mem::take(&mut self.over);
        let is_old = self.old_owners.contains(&owner);
        match is_old {
            true => self.old.complete(ring, completion, &mut over),
            false => self.scratch.complete(ring, completion, &mut over),
        }
        for one in over.drain(..) {
            let index = one.tag.0 as u32;
            match is_old {
                true => self.old_read(ring, index, one.outcome),
                false => self.saved(index, one.outcome),
            }
            finished.extend(self.advance(ring, index));
        }
        self.over = over;
        if self.closes_later && self.detached == 0 {
            self.closes_later = false;
            self.close_copies(ring);
        }
    }

    /// A waiting write ends soon. Its copy continues: without it, the point in time would be lost.
    fn abort(&mut self, ring: &mut Ring, tag: Tag) {
        let mut slots = self.slots.all_mut().iter_mut().zip(0u64..);
        let found = slots.find_map(|(slot, index)| {
            let write = slot.write.as_mut().filter(|write| write.tag == tag)?;
            write.is_aborted = true;
            Some(index)
        });
        match found {
            Some(index) => self.inbox.inbox().put(index, ()),
            None => self.source.abort(ring, tag),
        }
    }

    fn close(&mut self, ring: &mut Ring) {
        self.inbox.close(ring);
        if self.is_ticking {
            ring.cancel(self.owner, TIMER);
        }
        self.source.close(ring);
        if self.detached == 0 {
            return self.close_copies(ring);
        }
        self.closes_later = true;
        let slots = self.slots.all().iter().zip(0u64..);
        for (_, index) in slots.filter(|(slot, _)| slot.copy.is_some()) {
            self.old.abort(ring, Tag(index));
            self.scratch.abort(ring, Tag(index));
        }
    }

    fn is_closed(&self) -> bool {
        self.slots.len() == 0
            && !self.is_ticking
            && !self.closes_later
            && self.source.is_closed()
            && self.old.is_closed()
            && self.scratch.is_closed()
    }

    /// Detached copies are not counted, because no end is reported for them.
    fn in_flight(&self) -> usize {
        self.source.in_flight() + self.slots.len() - self.detached
    }
}
