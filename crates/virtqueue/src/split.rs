//! The device side of a split ring: clause 2.7.
//!
//! The available index is loaded once per batch, each available entry and descriptor once. The used index is stored once per batch. Data
//! for the next pops is prefetched, because the driver wrote it on another core.

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};

use guest_memory::{GuestView, MemoryTable, RingEntries, RingMemory};
use zerocopy::little_endian::U16;

use crate::chain::{Collector, FastPath, Limits, Table, Visitor};
use crate::config;
use crate::interrupted::crash_point;
use crate::layout::{
    Descriptor, INDEX, INDIRECT, NEXT, NO_INTERRUPT, NO_NOTIFY, RING, USED_ELEMENT_SIZE,
    UsedElement, available_event, passes_event, used_event,
};
use crate::refusal::{Survey, WalkError};
use crate::unanswered::Rings;
use crate::{Chain, Inflight, PopError, QueueConfig, QueueError, Resumed};

/// Number of available entries copied at a time, with prefetch of their descriptors. Distance, in chains, of the prefetch of the memory
/// that a first descriptor refers to.
const HEADS_COPIED: u16 = 128;
const ELEMENT_PREFETCH_DISTANCE: u16 = 4;
/// Number of answers collected before they are written to the ring.
const ANSWERS_MAX: usize = 128;

/// Number of answers published without a check after which a check is required.
const UNCHECKED_MAX: u16 = 1 << 12;

/// Used elements in a cache line.
const ELEMENTS_IN_LINE: usize = 64 / USED_ELEMENT_SIZE;

/// Memory of the ring: whole areas for single fields, and entry arrays, which need no bounds check.
struct Areas {
    descriptors: RingEntries<Descriptor>,
    available: RingMemory,
    heads: RingEntries<U16>,
    used: RingMemory,
    elements: RingEntries<UsedElement>,
}

impl Areas {
    fn new(areas: config::Areas, size: u16) -> Areas {
        let size = usize::from(size);
        Areas {
            descriptors: areas.descriptors.entries(0, size),
            heads: areas.driver.entries(RING, size),
            available: areas.driver,
            elements: areas.device.entries(RING, size),
            used: areas.device,
        }
    }
}

/// The available ring, as far as it is read.
struct Available {
    /// Next entry to pop.
    next: u16,
    /// The driver's index when last read.
    known: u16,
    /// Heads from the next entry to pop up to `copied`, indexed modulo the array size. Copied because the driver continues to write to
    /// their cache lines.
    heads: [u16; HEADS_COPIED as usize],
    copied: u16,
    /// Head and table address of the last chain. With few requests in flight, the next chain usually has the same.
    last: (u16, u64),
}

/// The used ring, as far as it is written.
struct Used {
    /// Next element to push.
    next: u16,
    /// The last `collected` elements, written to the ring together. The driver reads earlier elements in the same cache lines meanwhile.
    answers: [UsedElement; ANSWERS_MAX],
    collected: usize,
    /// The last elements differed from the previous content of the ring.
    elements_changed: bool,
    /// Published index.
    published: u16,
    /// Published index at the last check of the driver's event suppression.
    checked: u16,
    /// The driver's event suppression was checked since the queue was created. With VIRTIO_F_EVENT_IDX, the first answer always
    /// notifies, on behalf of an earlier device.
    signalled: bool,
}

pub struct SplitQueue {
    areas: Areas,
    size: u16,
    event_idx: bool,
    broken: bool,
    limits: Limits,
    available: Available,
    used: Used,
    /// In-flight region, which outlives this process.
    inflight: Option<Box<Inflight>>,
    /// Heads that an earlier device has popped and not answered.
    unanswered: VecDeque<u16>,
}

impl SplitQueue {
    pub fn new(config: &QueueConfig, table: &MemoryTable) -> Result<SplitQueue, QueueError> {
        let areas = config::Areas::resolve(config, table)?;
        let used = areas.device.load_acquire_u16(INDEX);
        let base = config.base as u16;
        Ok(SplitQueue {
            areas: Areas::new(areas, config.size),
            size: config.size,
            event_idx: config.event_idx,
            broken: false,
            limits: Limits::new(config),
            available: Available {
                next: base,
                known: base,
                heads: [0; HEADS_COPIED as usize],
                copied: base,
                last: (0, 0),
            },
            used: Used {
                next: used,
                answers: [UsedElement::default(); ANSWERS_MAX],
                collected: 0,
                elements_changed: true,
                published: used,
                checked: used,
                signalled: false,
            },
            inflight: None,
            unanswered: VecDeque::new(),
        })
    }

    /// Continues at the position in the in-flight region, regardless of the front end's base.
    pub fn track(&mut self, part: RingMemory) -> Result<(), QueueError> {
        let mut inflight = Inflight::new(part, self.size, self.used.next)?;
        self.unanswered = inflight.take_unanswered();
        self.continue_at(self.used.next.wrapping_add(self.unanswered.len() as u16));
        self.inflight = Some(Box::new(inflight));
        Ok(())
    }

    /// See [`DeviceQueue::resume`](crate::DeviceQueue::resume). Does nothing for a correct front end: the previous device answered all
    /// requests before it reported its base, so the base is the used index.
    pub fn resume(&mut self) -> Option<Resumed> {
        if self.available.next == self.used.next {
            return None;
        }
        let rings = Rings {
            size: self.size,
            available_index: self.areas.available.load_acquire_u16(INDEX),
            used_index: self.used.next,
            available: |at| self.areas.heads.read(at).get(),
            used: |at| self.areas.elements.read(at).id.get(),
        };
        // `None`: the ring's own indices are not consistent either.
        let unanswered = rings.unanswered()?;
        let (base, used) = (self.base(), u32::from(self.used.next));
        let count = rings.available_index.wrapping_sub(rings.used_index);
        self.continue_at(rings.available_index);
        self.unanswered = unanswered.into();
        Some(Resumed {
            base,
            used,
            repeated: self.unanswered.len() as u16,
            lost: count - self.unanswered.len() as u16,
        })
    }

    fn continue_at(&mut self, index: u16) {
        self.available.next = index;
        self.available.known = index;
        self.available.copied = index;
    }

    pub fn set_areas(&mut self, areas: config::Areas) {
        self.areas = Areas::new(areas, self.size);
    }

    pub fn is_poisoned(&self) -> bool {
        self.areas.descriptors.is_poisoned()
            || self.areas.available.is_poisoned()
            || self.areas.used.is_poisoned()
    }

    pub fn is_broken(&self) -> bool {
        self.broken
    }

    pub fn base(&self) -> u32 {
        let unanswered = match self.inflight {
            Some(_) => self.unanswered.len() as u16,
            // The unanswered requests need not be the last ones. The next device finds them in the ring, like this one.
            None => 0,
        };
        u32::from(self.available.next.wrapping_sub(unanswered))
    }

    /// Returns the number of waiting entries, up to the known index or, if none are known, the driver's index.
    #[inline]
    pub fn available(&self) -> u16 {
        let known = self.available.known.wrapping_sub(self.available.next);
        if known != 0 || self.broken {
            return known;
        }
        self.areas
            .available
            .load_acquire_u16(INDEX)
            .wrapping_sub(self.available.next)
            .saturating_add(self.unanswered.len() as u16)
    }

    /// Starts the loads of dependent data from another core in parallel, at presumed addresses.
    #[inline(always)]
    pub fn prefetch_next(&self, view: &GuestView) {
        self.areas.heads.prefetch(self.available.next);
        self.areas.descriptors.prefetch(self.available.last.0);
        view.prefetch(self.available.last.1);
    }

    #[inline(always)]
    pub fn pop(&mut self, view: &GuestView, chain: &mut Chain) -> Result<bool, PopError> {
        if !self.unanswered.is_empty()
            && let Some(head) = self.take_unanswered()
        {
            return self.read_general(head, view, chain);
        }
        if self.available.next == self.available.copied && !self.copy_heads(view)? {
            return Ok(false);
        }
        let at = self.available.next;
        self.available.next = at.wrapping_add(1);
        self.prefetch_ahead(view, at);
        let head = self.head(at);
        if !self.read_fast(head, view, chain) {
            let read = self.read_general(head, view, chain);
            if !self.broken {
                self.record_popped(head);
            }
            return read;
        }
        self.record_popped(head);
        Ok(true)
    }

    #[inline(always)]
    fn record_popped(&mut self, head: u16) {
        if let Some(inflight) = &mut self.inflight {
            inflight.record_popped(head);
        }
    }

    /// Returns a request that an earlier device has popped and not answered.
    #[cold]
    fn take_unanswered(&mut self) -> Option<u16> {
        if self.broken {
            return None;
        }
        self.unanswered.pop_front()
    }

    /// Returns a copied head.
    #[inline(always)]
    fn head(&self, at: u16) -> u16 {
        self.available.heads[usize::from(at % HEADS_COPIED)]
    }

    /// Copies the next entries. Loads the driver's index if no entry is known.
    #[inline(never)]
    fn copy_heads(&mut self, view: &GuestView) -> Result<bool, PopError> {
        if self.broken {
            return Ok(false);
        }
        if self.available.known == self.available.next {
            self.load_index()?;
        }
        let ahead = self.available.known.wrapping_sub(self.available.next);
        let count = ahead.min(HEADS_COPIED);
        for i in 0..count {
            let at = self.available.next.wrapping_add(i);
            let head = self.areas.heads.read(at).get();
            self.available.heads[usize::from(at % HEADS_COPIED)] = head;
            self.areas.descriptors.prefetch(head);
        }
        self.available.copied = self.available.next.wrapping_add(count);
        if count < ELEMENT_PREFETCH_DISTANCE {
            self.prefetch_used(count);
        }
        // The first one is read immediately; `prefetch_ahead` handles those after the next ones.
        for i in 1..count.min(ELEMENT_PREFETCH_DISTANCE) {
            self.prefetch_element(view, self.available.next.wrapping_add(i));
        }
        Ok(count != 0)
    }

    fn load_index(&mut self) -> Result<(), PopError> {
        let index = self.areas.available.load_acquire_u16(INDEX);
        let ahead = index.wrapping_sub(self.available.next);
        if ahead > self.size {
            return Err(self.fail(QueueError::AvailableIndex {
                index,
                expected: self.available.next,
                ahead,
                size: self.size,
            }));
        }
        self.available.known = index;
        Ok(())
    }

    /// Prefetches the cache lines of the next `answers` used elements.
    #[inline(always)]
    fn prefetch_used(&self, answers: u16) {
        for i in (0..answers).step_by(ELEMENTS_IN_LINE) {
            let index = self.used.next.wrapping_add(i);
            if self.used.elements_changed {
                self.areas.elements.prefetch_to_write(index);
            } else {
                self.areas.elements.prefetch(index);
            }
        }
    }

    #[inline(always)]
    fn prefetch_ahead(&self, view: &GuestView, at: u16) {
        if self.available.copied.wrapping_sub(at) > ELEMENT_PREFETCH_DISTANCE {
            self.prefetch_element(view, at.wrapping_add(ELEMENT_PREFETCH_DISTANCE));
        }
    }

    /// Prefetches the memory that the first descriptor refers to: a request header or an indirect table.
    #[inline(always)]
    fn prefetch_element(&self, view: &GuestView, at: u16) {
        let head = self.head(at);
        let first = self.areas.descriptors.read(head);
        view.prefetch(first.address.get());
    }

    #[cold]
    fn fail(&mut self, error: QueueError) -> PopError {
        self.broken = true;
        self.available.known = self.available.next;
        self.available.copied = self.available.next;
        PopError::Queue(error)
    }

    /// Fast path: see [`FastPath`].
    #[inline(always)]
    fn read_fast(&mut self, head: u16, view: &GuestView, chain: &mut Chain) -> bool {
        if head >= self.size {
            return false;
        }
        let descriptor = self.areas.descriptors.read(head);
        if descriptor.flags.get() & (INDIRECT | NEXT) != INDIRECT {
            return self.read_direct(head, descriptor, view, chain);
        }
        let fast_path = FastPath::new(view, &mut chain.buffer, self.limits);
        let (address, length) = (descriptor.address.get(), descriptor.length.get());
        let Some((readable, writable)) = fast_path.indirect(address, length, Table::Linked) else {
            return false;
        };
        self.available.last = (head, address);
        (chain.id, chain.descriptors) = (head, 1);
        (chain.readable, chain.writable) = (readable, writable);
        true
    }

    /// Fast path for a chain of direct descriptors: see [`FastPath`].
    #[inline(never)]
    fn read_direct(
        &self,
        head: u16,
        first: Descriptor,
        view: &GuestView,
        chain: &mut Chain,
    ) -> bool {
        let fast_path = FastPath::new(view, &mut chain.buffer, self.limits);
        let read = fast_path.direct(first, self.size, |next| {
            (next < self.size).then(|| self.areas.descriptors.read(next))
        });
        let Some((readable, writable, descriptors)) = read else {
            return false;
        };
        (chain.id, chain.descriptors) = (head, descriptors);
        (chain.readable, chain.writable) = (readable, writable);
        true
    }

    /// Reads any chain. Prepares the response space of a request that cannot be served: see [`crate::Refusal`].
    #[inline(never)]
    fn read_general(
        &mut self,
        head: u16,
        view: &GuestView,
        chain: &mut Chain,
    ) -> Result<bool, PopError> {
        let error = match self.read_chain(head, view, chain) {
            Ok(()) => return Ok(true),
            Err(WalkError::Ring(error)) => return Err(self.fail(error)),
            Err(WalkError::Request(error)) => error,
        };
        chain.id = head;
        let mut survey = Survey::new(view, chain, self.limits);
        match self.walk(head, &mut survey) {
            Ok(descriptors) => {
                let refusal = survey.finish(error);
                chain.descriptors = descriptors;
                Err(PopError::Request(refusal))
            }
            Err(error) => Err(self.fail(error.into_error())),
        }
    }

    fn read_chain(&self, head: u16, view: &GuestView, chain: &mut Chain) -> Result<(), WalkError> {
        let mut collector = Collector::new(view, &mut chain.buffer, self.limits, head);
        let descriptors = self.walk(head, &mut collector)?;
        (chain.readable, chain.writable) = collector.finish()?;
        (chain.id, chain.descriptors) = (head, descriptors);
        Ok(())
    }

    /// Passes the chain's descriptors to `visitor`. Returns their number in the ring.
    fn walk(&self, head: u16, visitor: &mut impl Visitor) -> Result<u16, WalkError> {
        let size = self.size;
        if head >= size {
            return Err(WalkError::Ring(QueueError::Head { head, size }));
        }
        let mut descriptors = 1;
        let mut descriptor = self.areas.descriptors.read(head);
        loop {
            let (address, length) = (descriptor.address.get(), descriptor.length.get());
            let flags = descriptor.flags.get();
            if flags & INDIRECT != 0 {
                // Direct descriptors may precede, but not follow.
                visitor.table(address, length, descriptors - 1, flags & NEXT != 0)?;
                return Ok(descriptors);
            }
            visitor.element(address, length, flags)?;
            if flags & NEXT == 0 {
                return Ok(descriptors);
            }
            let next = descriptor.next.get();
            if next >= size {
                let length = u32::from(size);
                return Err(WalkError::Ring(QueueError::Next { next, length }));
            }
            if descriptors == size {
                let limit = size;
                let error = QueueError::TooManyDescriptors { head, limit };
                return Err(WalkError::Ring(error));
            }
            descriptors += 1;
            descriptor = self.areas.descriptors.read(next);
        }
    }

    #[inline(always)]
    pub fn push(&mut self, id: u16, written: u32) {
        let element = UsedElement {
            id: u32::from(id).into(),
            length: written.into(),
        };
        if let Some(inflight) = &mut self.inflight {
            inflight.record_pushed(id);
        }
        if self.used.collected == 0 {
            let answers = self.available.next.wrapping_sub(self.used.next);
            if answers >= ELEMENT_PREFETCH_DISTANCE {
                self.prefetch_used(answers.min(ANSWERS_MAX as u16));
            }
        } else if self.used.collected >= self.used.answers.len() {
            self.write_elements();
        }
        self.used.answers[self.used.collected] = element;
        self.used.collected += 1;
        self.used.next = self.used.next.wrapping_add(1);
    }

    /// Writes the collected elements to the ring. An invalid driver may cause more of them than the ring has entries.
    fn write_elements(&mut self) {
        let mut at = self.used.next.wrapping_sub(self.used.collected as u16);
        self.used.elements_changed = false;
        for answers in self.used.answers[..self.used.collected].chunks(usize::from(self.size)) {
            self.used.elements_changed |= self.areas.elements.update(at, answers);
            at = at.wrapping_add(answers.len() as u16);
        }
        self.used.collected = 0;
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.used.published == self.used.next {
            return self.check_suppression();
        }
        self.write_elements();
        crash_point();
        // The store must be visible before flags or used_event are read, or both sides could miss each other.
        self.areas.used.store_ordered_u16(INDEX, self.used.next);
        self.record_published();
        self.wants_interrupt()
    }

    #[inline]
    pub fn publish_unchecked(&mut self) {
        if self.used.published != self.used.next {
            self.write_elements();
            self.areas.used.store_release_u16(INDEX, self.used.next);
            self.record_published();
        }
    }

    #[inline(always)]
    fn record_published(&mut self) {
        self.used.published = self.used.next;
        crash_point();
        if let Some(inflight) = &mut self.inflight {
            inflight.record_published(self.used.next);
        }
    }

    #[inline(always)]
    pub fn is_unchecked(&self) -> bool {
        self.used.checked != self.used.published
    }

    /// Together with a full ring, the unchecked answers must be fewer than the 65536 indices.
    #[inline(always)]
    pub fn must_check_suppression(&self) -> bool {
        self.used.published.wrapping_sub(self.used.checked) >= UNCHECKED_MAX
    }

    #[inline]
    pub fn check_suppression(&mut self) -> bool {
        if !self.is_unchecked() {
            return false;
        }
        // Same barrier as in `publish`. The index has usually reached the driver by now, so the barrier does not wait.
        fence(Ordering::SeqCst);
        self.wants_interrupt()
    }

    #[inline(always)]
    fn wants_interrupt(&mut self) -> bool {
        let new = self.used.published;
        let old = std::mem::replace(&mut self.used.checked, new);
        let first = !std::mem::replace(&mut self.used.signalled, true);
        let available = &self.areas.available;
        if self.event_idx {
            let event = available.load_ordered_u16(used_event(self.size));
            first || passes_event(event, old, new)
        } else {
            available.load_ordered_u16(0) & NO_INTERRUPT == 0
        }
    }

    pub fn enable_notifications(&mut self) -> bool {
        if self.event_idx {
            self.areas
                .used
                .store_release_u16(available_event(self.size), self.available.next);
        } else {
            self.areas.used.store_release_u16(0, 0);
        }
        // Either the driver sees the request for a kick, or this side sees the chain that it has made available.
        fence(Ordering::SeqCst);
        self.available() != 0
    }

    pub fn disable_notifications(&mut self) {
        if self.event_idx {
            // An event before the last popped entry is not passed again. The event from `enable_notifications` would be passed by the next
            // request.
            let behind = self.available.next.wrapping_sub(1);
            let offset = available_event(self.size);
            self.areas.used.store_release_u16(offset, behind);
        } else {
            self.areas.used.store_release_u16(0, NO_NOTIFY);
        }
    }
}
