//! Requests in flight of a packed queue, in memory that outlives this process: the region of vhost-user's `GET_INFLIGHT_FD` ("In-flight I/O
//! tracking", queue region for packed virtqueues).
//!
//! Answers overwrite a packed ring, so a chain's descriptors are copied to this region. Its entries are linked like those of a split
//! queue's table, and free entries form a list too. Each step takes effect with one store. A chain is in flight once `old_free_head` is
//! past its entries. A batch is answered once the driver sees the flags of its first descriptor. The next device undoes the stores before
//! that point and completes those after it.
//!
//! The front end can write to the region. Links, IDs and the set of chains are read once, at the takeover, and checked. The descriptors of
//! a chain are read when it is repeated, and checked like the driver's. A wrong value can only break the front end's own queue.

use std::collections::VecDeque;

use guest_memory::RingMemory;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::QueueError;
use crate::interrupted::crash_point;
use crate::layout::{AVAIL, DESCRIPTOR_SIZE, PACKED_FLAGS, PackedDescriptor, RingPosition, USED};

/// Offsets in a queue's part: features are 8 bytes of zero before the version.
const VERSION: usize = 8;
const ENTRIES: usize = 10;
const FREE_HEAD: usize = 12;
const OLD_FREE_HEAD: usize = 14;
const USED_INDEX: usize = 16;
const OLD_USED_INDEX: usize = 18;
const USED_WRAP: usize = 20;
const OLD_USED_WRAP: usize = 21;
/// After 7 bytes of padding and the alignment of the entries.
const STATES: usize = 32;
/// Offset in an entry.
const NEXT: usize = 2;
/// The only version of the layout; 0 means unused or reset.
const LAYOUT_VERSION: u16 = 1;
/// Parts of a region begin at multiples of a cache line.
const ALIGNMENT: usize = 64;
/// No entry has this number: a queue has at most 2^15.
const NONE: u16 = u16::MAX;

/// An entry: one descriptor of a chain. `last`, `count` and `counter` are valid in the first entry of a chain only.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct State {
    in_flight: u8,
    padding: u8,
    next: U16,
    last: U16,
    count: U16,
    counter: U64,
    id: U16,
    flags: U16,
    length: U32,
    address: U64,
}

const STATE_SIZE: usize = size_of::<State>();

/// One packed queue's part of an in-flight region.
pub struct PackedInflight {
    part: RingMemory,
    size: u16,
    counter: u64,
    /// Next entry of each entry. Read from the region only at the takeover.
    next: Vec<u16>,
    free_head: u16,
    free: u16,
    /// First entry of the chain in flight, by buffer ID, or [`NONE`].
    heads: Vec<u16>,
    /// Last entry and length of each chain, by first entry.
    chains: Vec<(u16, u16)>,
    /// First entries of chains answered since the last publication.
    answered: Vec<u16>,
    /// End of the last published batch.
    published_used: RingPosition,
    /// Chains that an earlier device took and never answered: first entries with buffer IDs.
    unanswered: VecDeque<(u16, u16)>,
}

impl PackedInflight {
    /// Returns the length of a queue's part for `size` entries.
    pub fn stride(size: u16) -> usize {
        (STATES + STATE_SIZE * usize::from(size)).next_multiple_of(ALIGNMENT)
    }

    /// Returns true if a request of a queue of `size` entries is unanswered.
    pub fn has_requests(part: &RingMemory, size: u16) -> bool {
        let mut states = (0..usize::from(size)).map(|entry| STATES + STATE_SIZE * entry);
        states.any(|at| part.read::<u8>(at) != 0)
    }

    /// Resets the part of a stopped queue, unless a request is in flight. The front end now has the queue's position and sends it at the
    /// next start.
    pub fn reset_unused(part: &RingMemory, size: u16) {
        if part.len() >= PackedInflight::stride(size) && !PackedInflight::has_requests(part, size) {
            part.store_release_u16(VERSION, 0);
            // The whole part: parts of the other queue type have other offsets.
            part.clear(0, PackedInflight::stride(size));
        }
    }

    /// Takes over a queue's part. `positions` are the front end's available and used positions, used only for an unused part. Also returns the
    /// actual positions.
    ///
    /// # Errors
    /// Fails if the part is too small for `size` entries, or has content that no device writes.
    pub(crate) fn new(
        part: RingMemory,
        size: u16,
        positions: [RingPosition; 2],
        ring: &RingMemory,
    ) -> Result<(PackedInflight, [RingPosition; 2]), QueueError> {
        if part.len() < PackedInflight::stride(size) || !part.is_aligned(ALIGNMENT) {
            return Err(invalid("it is too small for the queue"));
        }
        let entries = usize::from(size);
        let mut tracked = PackedInflight {
            part,
            size,
            counter: 0,
            next: (1..=size).collect(),
            free_head: 0,
            free: size,
            heads: vec![NONE; entries],
            chains: vec![(0, 0); entries],
            answered: Vec::with_capacity(entries),
            published_used: positions[1],
            unanswered: VecDeque::new(),
        };
        let positions = match tracked.word(VERSION) {
            LAYOUT_VERSION if tracked.word(ENTRIES) == size => tracked.recover(ring)?,
            // Another size: the driver has created a new queue, unrelated to the region.
            0 | LAYOUT_VERSION => {
                tracked.begin(positions[1]);
                positions
            }
            _ => return Err(invalid("its version is unknown")),
        };
        tracked.published_used = positions[1];
        Ok((tracked, positions))
    }

    fn begin(&mut self, used: RingPosition) {
        for entry in 0..self.size {
            let at = self.state(entry);
            self.part.write::<u8>(at, 0);
            self.part.write(at + NEXT, U16::new(entry + 1));
        }
        self.part.write(ENTRIES, U16::new(self.size));
        self.part.write(FREE_HEAD, U16::new(0));
        self.part.write(OLD_FREE_HEAD, U16::new(0));
        self.store_positions(used, used);
        self.part.store_release_u16(VERSION, LAYOUT_VERSION);
    }

    /// Completes or undoes the last step of the previous device. Returns the positions to continue from.
    fn recover(&mut self, ring: &RingMemory) -> Result<[RingPosition; 2], QueueError> {
        let new = (
            self.position([USED_INDEX, USED_WRAP])?,
            self.word(FREE_HEAD),
        );
        let old = (
            self.position([OLD_USED_INDEX, OLD_USED_WRAP])?,
            self.word(OLD_FREE_HEAD),
        );
        // A batch was answered if the flags of its first descriptor differ from the driver's.
        let first = DESCRIPTOR_SIZE * usize::from(old.0.index) + PACKED_FLAGS;
        let flags = ring.load_acquire_u16(first) & (AVAIL | USED);
        let was_published = new.0 != old.0 && flags != old.0.available_flags();
        let (used, free_head) = if was_published { new } else { old };
        self.part.store_release_u16(FREE_HEAD, free_head);
        self.part.store_release_u16(OLD_FREE_HEAD, free_head);
        self.store_positions(used, used);
        let claimed = self.read_free(free_head);
        let taken = self.read_taken(claimed)?;
        self.mark_ring_available(ring, used, taken);
        Ok([used.advance(taken, self.size), used])
    }

    /// Reads the links and the free list. Returns a flag for each entry that is free. Clears chains that were recorded in free entries.
    fn read_free(&mut self, head: u16) -> Vec<bool> {
        self.next = (0..self.size)
            .map(|entry| self.word(self.state(entry) + NEXT))
            .collect();
        let mut claimed = vec![false; self.next.len()];
        (self.free_head, self.free) = (head, 0);
        let mut at = head;
        while let Some(claimed) = claimed.get_mut(usize::from(at))
            && !std::mem::replace(claimed, true)
        {
            self.part.write::<u8>(self.state(at), 0);
            self.free += 1;
            at = self.next[usize::from(at)];
        }
        claimed
    }

    /// Reads the chains in flight in their original order. Returns the number of their descriptors.
    fn read_taken(&mut self, mut claimed: Vec<bool>) -> Result<u16, QueueError> {
        let mut taken = Vec::new();
        let mut descriptors = 0;
        for head in 0..self.size {
            let state: State = self.part.read(self.state(head));
            if state.in_flight != 1 {
                continue;
            }
            let (mut at, mut last) = (head, head);
            let count = state.count.get();
            if count == 0 || count > self.size - descriptors {
                return Err(invalid("its chains have more descriptors than the queue"));
            }
            for _ in 0..count {
                match claimed.get_mut(usize::from(at)) {
                    Some(claimed) if !*claimed => *claimed = true,
                    _ => return Err(invalid("its chains are not linked")),
                }
                (last, at) = (at, self.next[usize::from(at)]);
            }
            let state_of_last: State = self.part.read(self.state(last));
            let id = state_of_last.id.get();
            self.claim_id(id, head)?;
            self.chains[usize::from(head)] = (last, count);
            taken.push((state.counter.get(), head, id));
            descriptors += count;
        }
        if self.free != self.size - descriptors {
            return Err(invalid("its list of free entries is inconsistent"));
        }
        taken.sort_unstable();
        self.counter = taken
            .last()
            .map_or(0, |(counter, ..)| counter.wrapping_add(1));
        self.unanswered = taken.into_iter().map(|(_, head, id)| (head, id)).collect();
        Ok(descriptors)
    }

    /// Assigns this buffer ID to the chain that begins at `head`. Fails for a duplicate ID, because an answer names its chain by ID only.
    fn claim_id(&mut self, id: u16, head: u16) -> Result<(), QueueError> {
        match self.heads.get_mut(usize::from(id)) {
            Some(of_id) if *of_id == NONE => *of_id = head,
            Some(_) => return Err(invalid("two of its chains have the same buffer id")),
            None => return Err(invalid("a buffer id is beyond the queue")),
        }
        Ok(())
    }

    /// Marks the descriptors from the used position on as available; they belong to chains in flight. Some of an unpublished batch may be
    /// marked as used already, and the driver would take them for answers after the next batch.
    fn mark_ring_available(&self, ring: &RingMemory, used: RingPosition, descriptors: u16) {
        for ahead in 0..descriptors {
            let position = used.advance(ahead, self.size);
            let at = DESCRIPTOR_SIZE * usize::from(position.index) + PACKED_FLAGS;
            if ring.load_relaxed_u16(at) & (AVAIL | USED) != position.available_flags() {
                ring.store_release_u16(at, position.available_flags());
            }
        }
    }

    fn word(&self, offset: usize) -> u16 {
        self.part.load_relaxed_u16(offset)
    }

    fn position(&self, [index, wrap]: [usize; 2]) -> Result<RingPosition, QueueError> {
        let position = RingPosition {
            index: self.word(index),
            wrap: self.part.read::<u8>(wrap) != 0,
        };
        if position.index < self.size {
            Ok(position)
        } else {
            Err(invalid("its used index is beyond the queue"))
        }
    }

    /// Stores `used_idx` and `used_wrap_counter`, new and old: 8 bytes that must never be seen half written.
    #[inline]
    fn store_positions(&self, new: RingPosition, old: RingPosition) {
        let indices = u64::from(new.index) | u64::from(old.index) << 16;
        let wraps = u64::from(new.wrap) | u64::from(old.wrap) << 8;
        self.part
            .store_release_u64(USED_INDEX, indices | wraps << 32);
    }

    #[inline]
    fn state(&self, entry: u16) -> usize {
        STATES + STATE_SIZE * usize::from(entry)
    }

    /// Returns true if a chain must be repeated.
    #[inline]
    pub(crate) fn has_unanswered(&self) -> bool {
        !self.unanswered.is_empty()
    }

    /// Returns the next chain to repeat: first entry and buffer ID.
    pub(crate) fn next_unanswered(&mut self) -> Option<(u16, u16)> {
        self.unanswered.pop_front()
    }

    /// Returns the descriptors of a chain in flight.
    pub(crate) fn descriptors(&self, head: u16) -> impl Iterator<Item = PackedDescriptor> {
        let (_, count) = self.chains[usize::from(head)];
        let entries = std::iter::successors(Some(head), |at| Some(self.next[usize::from(*at)]));
        entries.take(usize::from(count)).map(|entry| {
            let state: State = self.part.read(self.state(entry));
            PackedDescriptor {
                address: state.address,
                length: state.length,
                id: state.id,
                flags: state.flags,
            }
        })
    }

    /// Records that a chain was popped. The driver may have changed the descriptors since; all are recorded with the `id` that the chain
    /// had when it was popped.
    ///
    /// # Errors
    /// Fails if the driver has more descriptors in flight than the queue has, or if this ID is already in flight.
    pub(crate) fn record_popped(
        &mut self,
        id: u16,
        count: u16,
        descriptor: impl Fn(u16) -> PackedDescriptor,
    ) -> Result<(), QueueError> {
        if count > self.free {
            return Err(invalid(
                "more chains are in flight than the queue has descriptors",
            ));
        }
        let head = self.free_head;
        self.claim_id(id, head)?;
        let (mut at, mut last) = (head, head);
        for nth in 0..count {
            let read = descriptor(nth);
            let next = self.next[usize::from(at)];
            let state = State {
                in_flight: 0,
                padding: 0,
                next: next.into(),
                last: U16::ZERO,
                count: count.into(),
                counter: self.counter.into(),
                id: id.into(),
                flags: read.flags,
                length: read.length,
                address: read.address,
            };
            self.part.write(self.state(at), state);
            (last, at) = (at, next);
        }
        self.counter = self.counter.wrapping_add(1);
        let first = self.state(head);
        self.part.write(first + NEXT + 2, U16::new(last));
        self.part.write::<u8>(first, 1);
        crash_point();
        self.part.store_release_u16(FREE_HEAD, at);
        crash_point();
        self.part.store_release_u16(OLD_FREE_HEAD, at);
        (self.free_head, self.free) = (at, self.free - count);
        self.chains[usize::from(head)] = (last, count);
        Ok(())
    }

    /// Records that a chain will be answered with the next batch. An ID that is not in flight has no effect.
    #[inline]
    pub(crate) fn record_pushed(&mut self, id: u16) {
        let head = std::mem::replace(&mut self.heads[usize::from(id)], NONE);
        if head != NONE {
            self.answered.push(head);
        }
    }

    /// Prepares the publication of a batch that ends at `used`.
    #[inline]
    pub(crate) fn prepare_publish(&mut self, used: RingPosition) {
        for head in &self.answered {
            let (last, count) = self.chains[usize::from(*head)];
            self.next[usize::from(last)] = self.free_head;
            let link = STATES + STATE_SIZE * usize::from(last) + NEXT;
            self.part.store_release_u16(link, self.free_head);
            (self.free_head, self.free) = (*head, self.free + count);
        }
        self.part.store_release_u16(FREE_HEAD, self.free_head);
        crash_point();
        self.store_positions(used, self.published_used);
    }

    /// Records that a batch that ends at `used` was published.
    #[inline]
    pub(crate) fn record_published(&mut self, used: RingPosition) {
        for head in self.answered.drain(..) {
            let at = STATES + STATE_SIZE * usize::from(head);
            self.part.write::<u8>(at, 0);
            crash_point();
        }
        self.part.store_release_u16(OLD_FREE_HEAD, self.free_head);
        crash_point();
        self.store_positions(used, used);
        self.published_used = used;
    }
}

fn invalid(reason: &'static str) -> QueueError {
    QueueError::Inflight { reason }
}

#[cfg(test)]
mod tests {
    use guest_memory::Mapping;

    use super::*;

    const SIZE: u16 = 16;

    fn part(region: &std::sync::Arc<Mapping>) -> RingMemory {
        RingMemory::new(region.clone(), 0, PackedInflight::stride(SIZE))
    }

    /// The driver can write to its ring between the reading and the recording of a chain.
    #[test]
    fn chain_is_noted_by_the_id_with_which_it_was_taken() {
        let (region, ring) = (Mapping::anonymous(4096), Mapping::anonymous(4096));
        let region = region.unwrap();
        let ring = RingMemory::new(ring.unwrap(), 0, DESCRIPTOR_SIZE * usize::from(SIZE));
        let begin = || PackedInflight::new(part(&region), SIZE, [RingPosition::START; 2], &ring);
        let (mut tracked, _) = begin().unwrap();
        let descriptor = |_| PackedDescriptor {
            address: 0x1000.into(),
            length: 8.into(),
            id: 5.into(),
            flags: 0.into(),
        };
        tracked.record_popped(4, 1, descriptor).unwrap();
        tracked.record_popped(6, 2, descriptor).unwrap();
        let twice = tracked.record_popped(6, 1, descriptor);
        assert!(matches!(twice, Err(QueueError::Inflight { .. })));
        let (mut tracked, _) = begin().unwrap();
        let unanswered = std::array::from_fn(|_| tracked.next_unanswered());
        assert_eq!(unanswered, [Some((0, 4)), Some((1, 6)), None]);
        // An ID that is not in flight frees nothing, and its entries are not allocated twice.
        for id in [4, 4, 9] {
            tracked.record_pushed(id);
        }
        tracked.prepare_publish(RingPosition::START);
        tracked.record_published(RingPosition::START);
        assert_eq!(tracked.free, SIZE - 2);
        tracked.record_popped(4, SIZE - 2, descriptor).unwrap();
        assert!(tracked.record_popped(7, 1, descriptor).is_err());
    }
}
