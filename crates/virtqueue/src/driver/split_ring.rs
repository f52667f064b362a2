//! The driver side of a split ring (virtio 1.3, 2.7): descriptors, available and used ring, notifications. The caller manages the free
//! descriptors.

use std::sync::atomic::{Ordering, fence};

use guest_memory::{MemoryError, MemoryTable, RingMemory};
use zerocopy::little_endian::U16;

use super::RingLayout;
use crate::layout::{
    DESCRIPTOR_SIZE, Descriptor, INDEX, NO_INTERRUPT, NO_NOTIFY, RING, USED_ELEMENT_SIZE,
    UsedElement, available_event, passes_event, used_event,
};

/// The driver side of a split ring.
pub struct SplitRing {
    descriptors: RingMemory,
    available: RingMemory,
    used: RingMemory,
    size: u16,
    event_idx: bool,
    next_available: u16,
    published: u16,
    next_used: u16,
    /// Used index when last read.
    seen: u16,
}

impl SplitRing {
    /// Zeroes the ring and starts at index `start`.
    ///
    /// # Errors
    /// Fails if the ring is not in the memory.
    pub fn new(
        layout: &RingLayout,
        table: &MemoryTable,
        event_idx: bool,
        start: u16,
    ) -> Result<SplitRing, MemoryError> {
        let [descriptors, available, used] = layout.zeroed_areas(table)?;
        available.store_release_u16(INDEX, start);
        used.store_release_u16(INDEX, start);
        available.store_release_u16(used_event(layout.size), start);
        used.store_release_u16(available_event(layout.size), start);
        Ok(SplitRing {
            descriptors,
            available,
            used,
            size: layout.size,
            event_idx,
            next_available: start,
            published: start,
            next_used: start,
            seen: start,
        })
    }

    /// Writes descriptor `index`.
    #[inline]
    pub fn write_descriptor(&self, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let descriptor = Descriptor {
            address: address.into(),
            length: length.into(),
            flags: flags.into(),
            next: next.into(),
        };
        self.descriptors
            .write(DESCRIPTOR_SIZE * usize::from(index), descriptor);
    }

    /// Puts the head of a chain into the available ring; the device sees it after [`publish`](Self::publish).
    #[inline]
    pub fn offer(&mut self, head: u16) {
        let index = usize::from(self.next_available & (self.size - 1));
        self.available.write(RING + 2 * index, U16::new(head));
        self.next_available = self.next_available.wrapping_add(1);
    }

    /// Makes all offered chains visible to the device with one store of the index. Returns true if it wants a kick.
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

    /// Returns true if a used chain waits. Reads the device's index once per batch.
    #[inline]
    pub fn has_used(&mut self) -> bool {
        if self.next_used == self.seen {
            self.seen = self.used.load_acquire_u16(INDEX);
        }
        self.next_used != self.seen
    }

    /// Returns the next used chain: head as written by the device, unchecked, and the bytes written.
    #[inline]
    pub fn pop_used(&mut self) -> Option<(u32, u32)> {
        if !self.has_used() {
            return None;
        }
        let index = usize::from(self.next_used & (self.size - 1));
        let element: UsedElement = self.used.read(RING + USED_ELEMENT_SIZE * index);
        self.next_used = self.next_used.wrapping_add(1);
        Some((element.id.get(), element.length.get()))
    }

    /// Enables an interrupt for the next used chain. Returns true if there is one already.
    pub fn enable_interrupts(&mut self) -> bool {
        if self.event_idx {
            let offset = used_event(self.size);
            self.available.store_release_u16(offset, self.next_used);
        } else {
            self.available.store_release_u16(0, 0);
        }
        fence(Ordering::SeqCst);
        self.has_used()
    }

    /// Disables interrupts. With `event_idx`, the old event index is already passed and requests none.
    pub fn disable_interrupts(&mut self) {
        if !self.event_idx {
            self.available.store_release_u16(0, NO_INTERRUPT);
        }
    }

    /// Disables interrupts as far as a split ring can: with `event_idx`, one per 65536 chains remains.
    pub fn never_interrupt(&mut self) {
        self.available.store_release_u16(0, NO_INTERRUPT);
        self.available
            .store_release_u16(used_event(self.size), u16::MAX);
    }
}
