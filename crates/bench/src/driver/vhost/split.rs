//! The driver's side of a split ring (virtio 1.3, 2.7): a slot has its descriptors for good, only heads travel.

use std::sync::atomic::{Ordering, fence};

use anyhow::Result;
use guest_memory::{MemoryTable, RingMemory};
use virtqueue::driver::RingLayout;
use virtqueue::layout::{
    DESCRIPTOR_SIZE, Descriptor, INDEX, INDIRECT, NEXT, NO_INTERRUPT, NO_NOTIFY, RING,
    USED_ELEMENT_SIZE, UsedElement, WRITE, available_event, available_ring_size,
    descriptor_area_size, passes_event, used_event, used_ring_size,
};
use zerocopy::little_endian::U16;

use super::queue::{Chain, PARTS};

pub struct SplitRing {
    size: u16,
    event_idx: bool,
    /// Descriptors of a slot.
    stride: u16,
    descriptors: RingMemory,
    available: RingMemory,
    used: RingMemory,
    next_available: u16,
    published: u16,
    next_used: u16,
    /// Up to here the device has given back what is in the used ring.
    seen: u16,
}

impl SplitRing {
    pub fn new(
        layout: &RingLayout,
        table: &MemoryTable,
        event_idx: bool,
        indirect: bool,
    ) -> Result<SplitRing> {
        let size = layout.size;
        let area = |address, bytes: usize| table.ring(address, bytes as u64);
        Ok(SplitRing {
            size,
            event_idx,
            stride: if indirect { 1 } else { PARTS as u16 },
            descriptors: area(layout.descriptor_area, descriptor_area_size(size))?,
            available: area(layout.driver_area, available_ring_size(size))?,
            used: area(layout.device_area, used_ring_size(size))?,
            next_available: 0,
            published: 0,
            next_used: 0,
            seen: 0,
        })
    }

    /// Writes a slot's descriptors.
    pub fn describe(&self, slot: u16, chain: &Chain<'_>) {
        let first = slot * self.stride;
        let write = |index: u16, address: u64, length: u32, flags: u16, next: u16| {
            let descriptor = Descriptor {
                address: address.into(),
                length: length.into(),
                flags: flags.into(),
                next: next.into(),
            };
            let at = usize::from(index) * DESCRIPTOR_SIZE;
            self.descriptors.write(at, descriptor);
        };
        match chain {
            Chain::Table(address, count) => {
                let bytes = (count * DESCRIPTOR_SIZE) as u32;
                write(first, *address, bytes, INDIRECT, 0);
            }
            Chain::Parts(parts) => {
                for (&(address, length, device_writes), index) in parts.iter().zip(first..) {
                    let last = usize::from(index - first) + 1 == parts.len();
                    let (next, more) = if last { (0, 0) } else { (index + 1, NEXT) };
                    let direction = if device_writes { WRITE } else { 0 };
                    write(index, address, length, more | direction, next);
                }
            }
        }
    }

    /// Puts a slot's head into the available ring.
    #[inline]
    pub fn offer(&mut self, slot: u16) {
        let place = usize::from(self.next_available & (self.size - 1));
        let head = slot * self.stride;
        self.available.write(RING + 2 * place, U16::new(head));
        self.next_available = self.next_available.wrapping_add(1);
    }

    /// One store of the index; says whether the device wants a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.next_available);
        if old == new {
            return false;
        }
        self.available.store_release_u16(INDEX, new);
        self.published = new;
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = self.used.load_relaxed_u16(available_event(self.size));
            passes_event(event, old, new)
        } else {
            self.used.load_relaxed_u16(0) & NO_NOTIFY == 0
        }
    }

    /// Has anything come back? The index is read once per batch.
    #[inline]
    pub fn has_used(&mut self) -> bool {
        if self.next_used == self.seen {
            self.seen = self.used.load_acquire_u16(INDEX);
        }
        self.next_used != self.seen
    }

    /// The next head that has come back, as a slot.
    #[inline]
    pub fn pop(&mut self) -> Option<u32> {
        if !self.has_used() {
            return None;
        }
        let place = usize::from(self.next_used & (self.size - 1));
        let element: UsedElement = self.used.read(RING + USED_ELEMENT_SIZE * place);
        self.next_used = self.next_used.wrapping_add(1);
        Some(element.id.get() / u32::from(self.stride))
    }

    /// Asks for an interrupt; is there something already?
    pub fn arm(&mut self) -> bool {
        if self.event_idx {
            let place = used_event(self.size);
            self.available.store_release_u16(place, self.next_used);
        } else {
            self.available.store_release_u16(0, 0);
        }
        fence(Ordering::SeqCst);
        self.used.load_acquire_u16(INDEX) != self.next_used
    }

    /// Wants no interrupt for now: an index that was passed asks for none.
    pub fn disarm(&mut self) {
        if !self.event_idx {
            self.available.store_release_u16(0, NO_INTERRUPT);
        }
    }

    /// Never wants one, as far as a split ring has a word for it.
    pub fn never_interrupt(&mut self) {
        self.available.store_release_u16(0, NO_INTERRUPT);
        self.available
            .store_release_u16(used_event(self.size), u16::MAX);
    }
}
