//! The driver side of a packed ring (virtio 1.3, 2.8): descriptors in ring order, availability flags, notifications. The caller manages the
//! buffer IDs and the number of descriptors of each.

use std::sync::atomic::{Ordering, fence};

use guest_memory::{MemoryError, MemoryTable, RingMemory};

use super::RingLayout;
use crate::layout::{
    AVAIL, DESCRIPTOR_SIZE, EVENTS_DESCRIPTOR, EVENTS_DISABLE, EVENTS_ENABLE, PACKED_FLAGS,
    PackedDescriptor, RingPosition, USED, WRITE,
};

/// The driver side of a packed ring.
pub struct PackedRing {
    descriptors: RingMemory,
    driver_events: RingMemory,
    device_events: RingMemory,
    size: u16,
    event_idx: bool,
    next_available: RingPosition,
    /// Start of the unpublished batch.
    published: RingPosition,
    /// Flags of the batch's first descriptor, stored last: the device stops there.
    first_flags: Option<u16>,
    next_used: RingPosition,
}

/// The first descriptor of an unfinished chain: its position, and the flags that will make it available.
#[derive(Clone, Copy)]
pub struct Head {
    position: RingPosition,
    flags: u16,
}

fn offset(position: RingPosition) -> usize {
    DESCRIPTOR_SIZE * usize::from(position.index)
}

impl PackedRing {
    /// Zeroes the ring and starts in it.
    ///
    /// # Errors
    /// Fails if the ring is not in the memory.
    pub fn new(
        layout: &RingLayout,
        table: &MemoryTable,
        event_idx: bool,
    ) -> Result<PackedRing, MemoryError> {
        let [descriptors, driver_events, device_events] = layout.zeroed_areas(table)?;
        Ok(PackedRing {
            descriptors,
            driver_events,
            device_events,
            size: layout.size,
            event_idx,
            next_available: RingPosition::START,
            published: RingPosition::START,
            first_flags: None,
            next_used: RingPosition::START,
        })
    }

    /// Writes the first descriptor of a chain. [`offer`](Self::offer) makes it available after the rest was written.
    #[inline]
    pub fn begin(&mut self, id: u16, address: u64, length: u32, flags: u16) -> Head {
        let position = self.next_available;
        let flags = flags | position.available_flags();
        // The opposite of the available flags.
        let unavailable = if position.wrap { 0 } else { AVAIL | USED };
        self.write(id, address, length, unavailable);
        Head { position, flags }
    }

    /// Writes another descriptor of the chain.
    #[inline]
    pub fn extend(&mut self, id: u16, address: u64, length: u32, flags: u16) {
        let flags = flags | self.next_available.available_flags();
        self.write(id, address, length, flags);
    }

    #[inline]
    fn write(&mut self, id: u16, address: u64, length: u32, flags: u16) {
        let position = self.next_available;
        let descriptor = PackedDescriptor {
            address: address.into(),
            length: length.into(),
            id: id.into(),
            flags: flags.into(),
        };
        self.descriptors.write(offset(position), descriptor);
        self.next_available = position.advance(1, self.size);
    }

    /// Makes a chain available; the first of a batch only with [`publish`](Self::publish).
    #[inline]
    pub fn offer(&mut self, head: Head) {
        if self.first_flags.is_none() {
            self.first_flags = Some(head.flags);
        } else {
            let at = offset(head.position) + PACKED_FLAGS;
            self.descriptors.store_release_u16(at, head.flags);
        }
    }

    /// Makes all offered chains visible to the device. Returns true if it wants a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let Some(flags) = self.first_flags.take() else {
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
                new.passes_event(RingPosition::from_bits(events as u16), old, self.size)
            }
            _ => true,
        }
    }

    /// Returns true if a used chain waits. Meaningless while no chain is in flight.
    #[inline]
    pub fn has_used(&self) -> bool {
        let at = offset(self.next_used) + PACKED_FLAGS;
        let flags = self.descriptors.load_acquire_u16(at);
        flags & (AVAIL | USED) == self.next_used.used_flags()
    }

    /// Returns the next used chain: buffer ID as written by the device, unchecked, and the bytes written. Returns the same chain until
    /// [`advance`](Self::advance).
    #[inline]
    pub fn peek_used(&self) -> Option<(u16, u32)> {
        if !self.has_used() {
            return None;
        }
        let used: PackedDescriptor = self.descriptors.read(offset(self.next_used));
        // The length is reserved unless WRITE is set.
        let wrote = used.flags.get() & WRITE != 0;
        let written = if wrote { used.length.get() } else { 0 };
        Some((used.id.get(), written))
    }

    /// Moves past a chain of `count` descriptors.
    #[inline]
    pub fn advance(&mut self, count: u16) {
        self.next_used = self.next_used.advance(count, self.size);
    }

    /// Enables an interrupt for the next used chain. Returns true if there is one already.
    pub fn enable_interrupts(&mut self) -> bool {
        let flags = if self.event_idx {
            let position = self.next_used.to_bits();
            self.driver_events.store_release_u16(0, position);
            EVENTS_DESCRIPTOR
        } else {
            EVENTS_ENABLE
        };
        self.driver_events.store_release_u16(2, flags);
        fence(Ordering::SeqCst);
        self.has_used()
    }

    /// Disables interrupts.
    pub fn disable_interrupts(&mut self) {
        self.driver_events.store_release_u16(2, EVENTS_DISABLE);
    }
}
