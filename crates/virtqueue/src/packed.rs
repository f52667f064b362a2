//! The device side of a packed ring: clause 2.8.
//!
//! Descriptors are read once, when their chain is popped. With an in-flight region, they are copied there a moment later, and checked again
//! before they are used from there. Used descriptors are written when pushed, except for the flags of a batch's first one, which are
//! written last. The driver checks one descriptor at a time, so it sees nothing of the batch before that.

use std::sync::atomic::{Ordering, fence};

use guest_memory::{GuestView, MemoryTable, RingMemory};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{Immutable, IntoBytes, KnownLayout};

use crate::chain::{Collector, FastPath, Limits, Table, Visitor};
use crate::config::Areas;
use crate::interrupted::crash_point;
use crate::layout::{
    AVAIL, DESCRIPTOR_SIZE, EVENTS_DESCRIPTOR, EVENTS_DISABLE, EVENTS_ENABLE, INDIRECT, NEXT,
    PACKED_FLAGS, PackedDescriptor, RingPosition, USED, WRITE,
};
use crate::packed_inflight::PackedInflight;
use crate::refusal::{Refusal, Survey, WalkError};
use crate::{Chain, PopError, QueueConfig, QueueError, Resumed};

/// Prefetch distance in the ring, in descriptors: four fill a cache line.
const DESCRIPTOR_PREFETCH_DISTANCE: usize = 8;
/// Maximum number of descriptors read to count waiting chains.
const COUNTED_MAX: u16 = 256;

/// Length and ID of a used descriptor, written before its flags.
#[derive(IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct UsedWords {
    length: U32,
    id: U16,
}

/// Offset of the length in a packed descriptor.
const USED_WORDS: usize = 8;

pub struct PackedQueue {
    descriptors: RingMemory,
    driver_events: RingMemory,
    device_events: RingMemory,
    size: u16,
    event_idx: bool,
    broken: bool,
    /// With `event_idx`, the first answer always requests a notification, as in a split queue.
    signalled: bool,
    limits: Limits,
    /// Next descriptor to pop.
    next_available: RingPosition,
    /// Next descriptor to write.
    next_used: RingPosition,
    /// Start of the unpublished batch.
    published_used: RingPosition,
    /// Start of the published answers without a check of the driver's event suppression.
    checked_used: RingPosition,
    /// Flags of the batch's first used descriptor, stored at publication. `None`: the batch is empty.
    first_flags: Option<u16>,
    /// In-flight region, which outlives this process.
    inflight: Option<Box<PackedInflight>>,
}

impl PackedQueue {
    pub fn new(config: &QueueConfig, table: &MemoryTable) -> Result<PackedQueue, QueueError> {
        let areas = Areas::resolve(config, table)?;
        let [next_available, next_used] = config.packed_positions();
        Ok(PackedQueue {
            descriptors: areas.descriptors,
            driver_events: areas.driver,
            device_events: areas.device,
            size: config.size,
            event_idx: config.event_idx,
            broken: false,
            signalled: false,
            limits: Limits::new(config),
            next_available,
            next_used,
            published_used: next_used,
            checked_used: next_used,
            first_flags: None,
            inflight: None,
        })
    }

    /// Continues at the position in the in-flight region, regardless of the front end's base.
    pub fn track(&mut self, part: RingMemory) -> Result<(), QueueError> {
        let positions = [self.next_available, self.next_used];
        let (inflight, [available, used]) =
            PackedInflight::new(part, self.size, positions, &self.descriptors)?;
        (self.next_available, self.next_used) = (available, used);
        self.published_used = used;
        self.inflight = Some(Box::new(inflight));
        Ok(())
    }

    /// See [`DeviceQueue::resume`](crate::DeviceQueue::resume). The number of descriptors from the used to the available position equals
    /// the number of unanswered ones. They are unchanged since the driver wrote them. After out-of-order answers they are not all of the
    /// unanswered requests: descriptors overwritten by used ones are lost, and only an in-flight region preserves them.
    pub fn resume(&mut self) -> Option<Resumed> {
        let (mut position, mut repeated) = (self.next_used, 0);
        for _ in 0..self.size {
            if position == self.next_available {
                break;
            }
            let at = Self::offset(position.index) + PACKED_FLAGS;
            let flags = self.descriptors.load_acquire_u16(at);
            if flags & (AVAIL | USED) != position.available_flags() {
                // The positions are wrong.
                return None;
            }
            repeated += u16::from(flags & NEXT == 0);
            position = position.advance(1, self.size);
        }
        if position != self.next_available || position == self.next_used {
            return None;
        }
        let base = self.base();
        self.next_available = self.next_used;
        Some(Resumed {
            base,
            used: u32::from(self.next_used.to_bits()),
            repeated,
            lost: 0,
        })
    }

    #[inline]
    fn has_unanswered(&self) -> bool {
        self.inflight
            .as_ref()
            .is_some_and(|inflight| inflight.has_unanswered())
    }

    pub fn set_areas(&mut self, areas: Areas) {
        self.descriptors = areas.descriptors;
        self.driver_events = areas.driver;
        self.device_events = areas.device;
    }

    pub fn is_poisoned(&self) -> bool {
        self.descriptors.is_poisoned()
            || self.driver_events.is_poisoned()
            || self.device_events.is_poisoned()
    }

    pub fn is_broken(&self) -> bool {
        self.broken
    }

    pub fn base(&self) -> u32 {
        u32::from(self.next_available.to_bits()) | u32::from(self.next_used.to_bits()) << 16
    }

    #[inline(always)]
    fn offset(index: u16) -> usize {
        DESCRIPTOR_SIZE * usize::from(index)
    }

    #[inline]
    fn is_available(&self, position: RingPosition) -> bool {
        let flags = self
            .descriptors
            .load_acquire_u16(Self::offset(position.index) + PACKED_FLAGS);
        flags & (AVAIL | USED) == position.available_flags()
    }

    #[inline]
    pub fn available(&self) -> u16 {
        u16::from(!self.broken && (self.is_available(self.next_available) || self.has_unanswered()))
    }

    /// Counts the available chains in a limited number of descriptors.
    #[inline]
    pub fn waiting(&self) -> u16 {
        if self.available() == 0 {
            return 0;
        }
        let (mut chains, mut position) = (0, self.next_available);
        for _ in 0..self.size.min(COUNTED_MAX) {
            let at = Self::offset(position.index) + PACKED_FLAGS;
            let flags = self.descriptors.load_relaxed_u16(at);
            if flags & (AVAIL | USED) != position.available_flags() {
                break;
            }
            chains += u16::from(flags & NEXT == 0);
            position = position.advance(1, self.size);
        }
        chains.max(1)
    }

    #[inline(never)]
    pub fn pop(&mut self, view: &GuestView, chain: &mut Chain) -> Result<bool, PopError> {
        if self.available() == 0 {
            return Ok(false);
        }
        if self.has_unanswered() {
            return self.pop_unanswered(view, chain);
        }
        let position = self.next_available;
        self.descriptors.prefetch(
            Self::offset(position.index) + DESCRIPTOR_SIZE * DESCRIPTOR_PREFETCH_DISTANCE,
        );
        let mut refusal = None;
        self.next_available = if self.read_fast(view, chain) {
            position.advance(1, self.size)
        } else {
            let read = self.read_general(view, chain);
            let (next, refused) = self.checked(read)?;
            refusal = refused;
            next
        };
        if self.inflight.is_some() {
            self.record_in_flight(position, chain)?;
        }
        match refusal {
            None => Ok(true),
            Some(refusal) => Err(PopError::Request(refusal)),
        }
    }

    /// Breaks the queue after an error of the ring.
    fn checked<T>(&mut self, read: Result<T, QueueError>) -> Result<T, PopError> {
        self.broken |= read.is_err();
        read.map_err(PopError::Queue)
    }

    /// Records that the chain at `position` is in flight.
    #[inline(never)]
    fn record_in_flight(&mut self, position: RingPosition, chain: &Chain) -> Result<(), PopError> {
        let (descriptors, size) = (&self.descriptors, self.size);
        let read = |nth| descriptors.read(Self::offset(position.advance(nth, size).index));
        let recorded = match &mut self.inflight {
            Some(inflight) => inflight.record_popped(chain.id, chain.descriptors, read),
            None => Ok(()),
        };
        self.checked(recorded)
    }

    /// Pops a chain that an earlier device has popped and not answered.
    #[cold]
    fn pop_unanswered(&mut self, view: &GuestView, chain: &mut Chain) -> Result<bool, PopError> {
        let Some(inflight) = &mut self.inflight else {
            return Ok(false);
        };
        let Some((head, id)) = inflight.next_unanswered() else {
            return Ok(false);
        };
        let walk = |visitor: &mut dyn Visitor| {
            let mut descriptors = 0;
            let mut visited = Ok(());
            for descriptor in inflight.descriptors(head) {
                descriptors += 1;
                visited = visited.and_then(|()| visit(visitor, &descriptor, descriptors));
            }
            visited.map(|()| descriptors)
        };
        let mut collector = Collector::new(view, &mut chain.buffer, self.limits, head);
        let walked = walk(&mut collector).and_then(|count| Ok((count, collector.finish()?)));
        chain.id = id;
        let error = match walked {
            Ok((descriptors, bytes)) => {
                chain.descriptors = descriptors;
                (chain.readable, chain.writable) = bytes;
                return Ok(true);
            }
            Err(error) => error,
        };
        let mut survey = Survey::new(view, chain, self.limits);
        let walked = walk(&mut survey);
        let refusal = survey.finish(error);
        chain.descriptors = self.checked(walked)?;
        Err(PopError::Request(refusal))
    }

    /// Fast path for a chain that is one indirect table: see [`FastPath`].
    #[inline(always)]
    fn read_fast(&self, view: &GuestView, chain: &mut Chain) -> bool {
        let position = self.next_available;
        let descriptor: PackedDescriptor = self.descriptors.read(Self::offset(position.index));
        let (flags, id) = (descriptor.flags.get(), descriptor.id.get());
        let wanted = position.available_flags() | INDIRECT;
        if flags & (AVAIL | USED | INDIRECT | NEXT) != wanted || id >= self.size {
            return false;
        }
        let (address, length) = (descriptor.address.get(), descriptor.length.get());
        let fast_path = FastPath::new(view, &mut chain.buffer, self.limits);
        let Some((readable, writable)) = fast_path.indirect(address, length, Table::InOrder) else {
            return false;
        };
        (chain.id, chain.descriptors) = (id, 1);
        (chain.readable, chain.writable) = (readable, writable);
        true
    }

    /// Reads any chain and returns the position after it. Also returns a [`Refusal`] if the request cannot be served.
    #[inline(never)]
    fn read_general(
        &self,
        view: &GuestView,
        chain: &mut Chain,
    ) -> Result<(RingPosition, Option<Box<Refusal>>), QueueError> {
        let error = match self.read_chain(view, chain) {
            Ok(next) => return Ok((next, None)),
            Err(WalkError::Ring(error)) => return Err(error),
            Err(WalkError::Request(error)) => error,
        };
        let mut survey = Survey::new(view, chain, self.limits);
        let walked = self.walk(&mut survey).map_err(WalkError::into_error)?;
        let refusal = survey.finish(error);
        (chain.id, chain.descriptors) = (walked.id, walked.descriptors);
        Ok((walked.next, Some(refusal)))
    }

    fn read_chain(&self, view: &GuestView, chain: &mut Chain) -> Result<RingPosition, WalkError> {
        let head = self.next_available.index;
        let mut collector = Collector::new(view, &mut chain.buffer, self.limits, head);
        let walked = self.walk(&mut collector)?;
        (chain.readable, chain.writable) = collector.finish()?;
        (chain.id, chain.descriptors) = (walked.id, walked.descriptors);
        Ok(walked.next)
    }

    /// Passes the descriptors of the next available chain to `visitor`.
    fn walk(&self, visitor: &mut dyn Visitor) -> Result<Walked, WalkError> {
        let size = self.size;
        let mut position = self.next_available;
        let head = position.index;
        let mut descriptors = 0;
        let id = loop {
            let descriptor: PackedDescriptor = self.descriptors.read(Self::offset(position.index));
            let flags = descriptor.flags.get();
            // Only the first descriptor needs an acquire load; the others became available before it.
            if flags & (AVAIL | USED) != position.available_flags() {
                return Err(WalkError::Ring(QueueError::Incomplete { head }));
            }
            if descriptors == size {
                let limit = size;
                let error = QueueError::TooManyDescriptors { head, limit };
                return Err(WalkError::Ring(error));
            }
            descriptors += 1;
            visit(visitor, &descriptor, descriptors)?;
            position = position.advance(1, size);
            if flags & NEXT == 0 {
                break descriptor.id.get();
            }
        };
        if id >= size {
            return Err(WalkError::Ring(QueueError::BufferId { id, size }));
        }
        Ok(Walked {
            id,
            descriptors,
            next: position,
        })
    }

    #[inline]
    pub fn push(&mut self, id: u16, descriptors: u16, written: u32) {
        let position = self.next_used;
        let at = Self::offset(position.index);
        let words = UsedWords {
            length: written.into(),
            id: id.into(),
        };
        self.descriptors.write(at + USED_WORDS, words);
        let write = if written == 0 { 0 } else { WRITE };
        let flags = position.used_flags() | write;
        if self.first_flags.is_none() {
            self.first_flags = Some(flags);
        } else {
            self.descriptors.store_release_u16(at + PACKED_FLAGS, flags);
        }
        self.next_used = position.advance(descriptors, self.size);
        if let Some(inflight) = &mut self.inflight {
            inflight.record_pushed(id);
        }
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        let wanted = self.check_suppression();
        self.publish_unchecked();
        self.check_suppression() || wanted
    }

    pub fn publish_unchecked(&mut self) {
        let Some(flags) = self.first_flags.take() else {
            return;
        };
        assert!(!self.must_check_suppression(), "suppression check skipped");
        let new = self.next_used;
        let at = Self::offset(self.published_used.index) + PACKED_FLAGS;
        if let Some(inflight) = &mut self.inflight {
            inflight.prepare_publish(new);
            crash_point();
            self.descriptors.store_release_u16(at, flags);
            crash_point();
            inflight.record_published(new);
        } else {
            self.descriptors.store_release_u16(at, flags);
        }
        self.published_used = new;
    }

    #[inline(always)]
    pub fn is_unchecked(&self) -> bool {
        self.checked_used != self.published_used
    }

    /// Beyond one round of the ring, a passed event could not be distinguished from a future one.
    #[inline(always)]
    pub fn must_check_suppression(&self) -> bool {
        self.is_unchecked()
    }

    #[inline]
    pub fn check_suppression(&mut self) -> bool {
        if !self.is_unchecked() {
            return false;
        }
        let new = self.published_used;
        let old = std::mem::replace(&mut self.checked_used, new);
        let first = !std::mem::replace(&mut self.signalled, true);
        fence(Ordering::SeqCst);
        // Reads both fields in one load, because the driver may be writing them.
        let events = self.driver_events.load_acquire_u32(0);
        match (events >> 16) as u16 & 3 {
            EVENTS_DISABLE => false,
            EVENTS_DESCRIPTOR if self.event_idx => {
                first || new.passes_event(RingPosition::from_bits(events as u16), old, self.size)
            }
            _ => true,
        }
    }

    pub fn enable_notifications(&mut self) -> bool {
        let flags = if self.event_idx {
            let position = self.next_available.to_bits();
            self.device_events.store_release_u16(0, position);
            EVENTS_DESCRIPTOR
        } else {
            EVENTS_ENABLE
        };
        self.device_events.store_release_u16(2, flags);
        // As in a split queue: one of the two sides sees the other's store.
        fence(Ordering::SeqCst);
        self.available() != 0
    }

    pub fn disable_notifications(&mut self) {
        self.device_events.store_release_u16(2, EVENTS_DISABLE);
    }
}

/// Result of a walk along a chain.
struct Walked {
    id: u16,
    descriptors: u16,
    /// Position after the chain.
    next: RingPosition,
}

/// Passes a descriptor, the `nth` of its chain, to `visitor`.
#[inline]
fn visit(
    visitor: &mut dyn Visitor,
    descriptor: &PackedDescriptor,
    nth: u16,
) -> Result<(), QueueError> {
    let flags = descriptor.flags.get();
    let (address, length) = (descriptor.address.get(), descriptor.length.get());
    if flags & INDIRECT == 0 {
        return visitor.element(address, length, flags);
    }
    // "each list only contains descriptors of a given type" (2.8.5).
    visitor.table(address, length, 0, flags & NEXT != 0 || nth > 1)
}
