//! The driver's side of a packed ring (virtio 1.3, 2.8): descriptors are written anew for each request, in the ring's order.

use std::sync::atomic::{Ordering, fence};

use anyhow::Result;
use guest_memory::{MemoryTable, RingMemory};
use virtqueue::driver::RingLayout;
use virtqueue::layout::{
    AVAIL, DESCRIPTOR_SIZE, EVENT_SUPPRESSION_SIZE, EVENTS_DESCRIPTOR, EVENTS_DISABLE,
    EVENTS_ENABLE, INDIRECT, NEXT, PACKED_FLAGS, PackedDescriptor, Place, USED, WRITE,
    descriptor_area_size,
};

use super::queue::Chain;

pub struct PackedRing {
    size: u16,
    event_idx: bool,
    descriptors: RingMemory,
    driver_events: RingMemory,
    device_events: RingMemory,
    /// Descriptors in the ring of each slot's request; the slot is the buffer ID.
    counts: Box<[u16]>,
    next_available: Place,
    published: Place,
    /// Flags of the first descriptor since `published`, held back: the device stops there.
    held: Option<u16>,
    next_used: Place,
}

fn offset(place: Place) -> usize {
    DESCRIPTOR_SIZE * usize::from(place.index)
}

impl PackedRing {
    pub fn new(
        layout: &RingLayout,
        table: &MemoryTable,
        event_idx: bool,
        slots: u16,
    ) -> Result<PackedRing> {
        let area = |address, bytes: usize| table.ring(address, bytes as u64);
        Ok(PackedRing {
            size: layout.size,
            event_idx,
            descriptors: area(layout.descriptor_area, descriptor_area_size(layout.size))?,
            driver_events: area(layout.driver_area, EVENT_SUPPRESSION_SIZE)?,
            device_events: area(layout.device_area, EVENT_SUPPRESSION_SIZE)?,
            counts: vec![1; usize::from(slots)].into(),
            next_available: Place::START,
            published: Place::START,
            held: None,
            next_used: Place::START,
        })
    }

    /// Writes a slot's request into the ring. There is room: a slot is in flight once, and the ring has room for all.
    #[inline]
    pub fn offer(&mut self, slot: u16, chain: &Chain<'_>) {
        let first = self.next_available;
        let first_flags = match chain {
            Chain::Table(address, count) => {
                let bytes = (count * DESCRIPTOR_SIZE) as u32;
                self.counts[usize::from(slot)] = 1;
                self.put(slot, *address, bytes, INDIRECT, true)
            }
            Chain::Parts(parts) => {
                self.counts[usize::from(slot)] = parts.len() as u16;
                let mut held = 0;
                for (index, &(address, length, device_writes)) in parts.iter().enumerate() {
                    let more = if index + 1 == parts.len() { 0 } else { NEXT };
                    let flags = more | if device_writes { WRITE } else { 0 };
                    let flags = self.put(slot, address, length, flags, index == 0);
                    if index == 0 {
                        held = flags;
                    }
                }
                held
            }
        };
        if self.held.is_none() {
            self.held = Some(first_flags);
        } else {
            let at = offset(first) + PACKED_FLAGS;
            self.descriptors.store_release_u16(at, first_flags);
        }
    }

    /// Writes the next descriptor and gives its flags; a chain's first one is not made available by this.
    #[inline]
    fn put(&mut self, slot: u16, address: u64, length: u32, flags: u16, first: bool) -> u16 {
        let place = self.next_available;
        let flags = flags | place.available_flags();
        let unavailable = if place.wrap { 0 } else { AVAIL | USED };
        let descriptor = PackedDescriptor {
            address: address.into(),
            length: length.into(),
            id: slot.into(),
            flags: if first { unavailable } else { flags }.into(),
        };
        self.descriptors.write(offset(place), descriptor);
        self.next_available = place.advance(1, self.size);
        flags
    }

    /// Makes available what was held back; says whether the device wants a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let Some(flags) = self.held.take() else {
            return false;
        };
        let (old, new) = (self.published, self.next_available);
        let at = offset(old) + PACKED_FLAGS;
        self.descriptors.store_release_u16(at, flags);
        self.published = new;
        fence(Ordering::SeqCst);
        let events = self.device_events.load_acquire_u32(0);
        match (events >> 16) as u16 & 3 {
            EVENTS_DISABLE => false,
            EVENTS_DESCRIPTOR if self.event_idx => {
                new.passes_event(Place::from_bits(events as u16), old, self.size)
            }
            _ => true,
        }
    }

    /// Has anything come back?
    #[inline]
    pub fn has_used(&self) -> bool {
        let at = offset(self.next_used) + PACKED_FLAGS;
        let flags = self.descriptors.load_acquire_u16(at);
        flags & (AVAIL | USED) == self.next_used.used_flags()
    }

    /// The next slot that has come back. One that is not known moves nothing: it ends the run.
    #[inline]
    pub fn pop(&mut self) -> Option<u32> {
        if !self.has_used() {
            return None;
        }
        let used: PackedDescriptor = self.descriptors.read(offset(self.next_used));
        let slot = used.id.get();
        if let Some(count) = self.counts.get(usize::from(slot)) {
            self.next_used = self.next_used.advance(*count, self.size);
        }
        Some(slot.into())
    }

    /// Asks for an interrupt; is there something already?
    pub fn arm(&mut self) -> bool {
        let mut flags = EVENTS_ENABLE;
        if self.event_idx {
            let place = self.next_used.to_bits();
            self.driver_events.store_release_u16(0, place);
            flags = EVENTS_DESCRIPTOR;
        }
        self.driver_events.store_release_u16(2, flags);
        fence(Ordering::SeqCst);
        self.has_used()
    }

    /// Wants no interrupt for now.
    pub fn disarm(&mut self) {
        self.driver_events.store_release_u16(2, EVENTS_DISABLE);
    }
}
