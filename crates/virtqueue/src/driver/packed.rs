//! The driver side of a packed ring: clause 2.8.21 and 2.8.22.

use std::sync::atomic::{Ordering, fence};

use guest_memory::{MemoryError, MemoryTable, RingMemory};

use super::{DriverConfig, Tables, Used, elements};
use crate::layout::{
    AVAIL, DESCRIPTOR_SIZE, Descriptor, EVENTS_DESCRIPTOR, EVENTS_DISABLE, EVENTS_ENABLE, INDIRECT,
    NEXT, PACKED_FLAGS, PackedDescriptor, Place, USED, WRITE,
};

/// What the driver knows of a buffer ID.
#[derive(Clone, Copy, Default)]
struct Entry {
    token: u64,
    /// Descriptors in the ring while in flight; else 0.
    count: u16,
}

pub struct PackedDriver {
    descriptors: RingMemory,
    driver_events: RingMemory,
    device_events: RingMemory,
    tables: Option<Tables>,
    entries: Box<[Entry]>,
    free_ids: Vec<u16>,
    size: u16,
    event_idx: bool,
    free: u16,
    next_available: Place,
    /// Where the batch that is not yet published begins.
    published_available: Place,
    /// Flags of its first descriptor, held back: the device stops there.
    held_flags: Option<u16>,
    next_used: Place,
}

impl PackedDriver {
    pub fn new(config: &DriverConfig, table: &MemoryTable) -> Result<PackedDriver, MemoryError> {
        let [descriptors, driver_events, device_events] = config.layout.areas(table)?;
        for area in [&descriptors, &driver_events, &device_events] {
            (0..area.len()).for_each(|at| area.write(at, 0u8));
        }
        let size = config.layout.size;
        Ok(PackedDriver {
            descriptors,
            driver_events,
            device_events,
            tables: Tables::resolve(config, table)?,
            entries: vec![Entry::default(); usize::from(size)].into(),
            free_ids: (0..size).rev().collect(),
            size,
            event_idx: config.event_idx,
            free: size,
            next_available: Place::START,
            published_available: Place::START,
            held_flags: None,
            next_used: Place::START,
        })
    }

    fn offset(place: Place) -> usize {
        DESCRIPTOR_SIZE * usize::from(place.index)
    }

    pub fn add(
        &mut self,
        readable: &[(u64, u32)],
        writable: &[(u64, u32)],
        token: u64,
    ) -> Option<u16> {
        let count = readable.len() + writable.len();
        assert!(count > 0, "chain without elements");
        if count > usize::from(self.free) {
            return None;
        }
        // There are as many IDs as descriptors.
        let id = self.free_ids.pop()?;
        let mut first = None;
        for (address, length, flags, last) in elements(readable, writable) {
            let flags = if last { flags } else { flags | NEXT };
            self.write_descriptor((address, length, flags), id, &mut first);
        }
        self.make_available(id, count as u16, token, first);
        Some(id)
    }

    pub fn add_indirect(
        &mut self,
        readable: &[(u64, u32)],
        writable: &[(u64, u32)],
        token: u64,
    ) -> Option<u16> {
        if self.free == 0 {
            return None;
        }
        let id = self.free_ids.pop()?;
        let tables = self.tables.as_ref().expect("a driver with indirect tables");
        // A packed descriptor's ID lies where a split one's flags do, and its flags where that one's `next` does.
        let chain = elements(readable, writable).map(|(address, length, flags, _)| Descriptor {
            address: address.into(),
            length: length.into(),
            flags: 0.into(),
            next: flags.into(),
        });
        let (address, length) = tables.fill(id, chain);
        assert!(length > 0, "chain without elements");
        let mut first = None;
        self.write_descriptor((address, length, INDIRECT), id, &mut first);
        self.make_available(id, 1, token, first);
        Some(id)
    }

    /// Writes the next descriptor; all but the first of a chain get their flags at once.
    fn write_descriptor(
        &mut self,
        (address, length, flags): (u64, u32, u16),
        id: u16,
        first: &mut Option<(Place, u16)>,
    ) {
        let place = self.next_available;
        let flags = flags | place.available_flags();
        // Not available yet, as the opposite of what would make it so.
        let unavailable = if place.wrap { 0 } else { AVAIL | USED };
        let descriptor = PackedDescriptor {
            address: address.into(),
            length: length.into(),
            id: id.into(),
            flags: if first.is_some() { flags } else { unavailable }.into(),
        };
        self.descriptors.write(Self::offset(place), descriptor);
        first.get_or_insert((place, flags));
        self.next_available = place.advance(1, self.size);
    }

    fn make_available(&mut self, id: u16, count: u16, token: u64, first: Option<(Place, u16)>) {
        self.entries[usize::from(id)] = Entry { token, count };
        self.free -= count;
        let Some((place, flags)) = first else { return };
        if self.held_flags.is_none() {
            self.held_flags = Some(flags);
        } else {
            let at = Self::offset(place) + PACKED_FLAGS;
            self.descriptors.store_release_u16(at, flags);
        }
    }

    pub fn publish(&mut self) -> bool {
        let Some(flags) = self.held_flags.take() else {
            return false;
        };
        let (old, new) = (self.published_available, self.next_available);
        let at = Self::offset(old) + PACKED_FLAGS;
        self.descriptors.store_release_u16(at, flags);
        self.published_available = new;
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

    pub fn has_used(&self) -> bool {
        let at = Self::offset(self.next_used) + PACKED_FLAGS;
        let flags = self.descriptors.load_acquire_u16(at);
        flags & (AVAIL | USED) == self.next_used.used_flags()
    }

    pub fn pop_used(&mut self) -> Option<Used> {
        if self.free == self.size || !self.has_used() {
            return None;
        }
        let used: PackedDescriptor = self.descriptors.read(Self::offset(self.next_used));
        let id = used.id.get();
        let entry = self.entries.get_mut(usize::from(id));
        let entry = entry.unwrap_or_else(|| panic!("device used buffer {id}"));
        assert!(entry.count > 0, "device used buffer {id}, not in flight");
        let Entry { token, count } = std::mem::take(entry);
        self.free_ids.push(id);
        self.free += count;
        self.next_used = self.next_used.advance(count, self.size);
        // The length is reserved where nothing was written.
        let wrote = used.flags.get() & WRITE != 0;
        Some(Used {
            id,
            token,
            written: if wrote { used.length.get() } else { 0 },
        })
    }

    pub fn enable_interrupts(&mut self) -> bool {
        let flags = if self.event_idx {
            let place = self.next_used.to_bits();
            self.driver_events.store_release_u16(0, place);
            EVENTS_DESCRIPTOR
        } else {
            EVENTS_ENABLE
        };
        self.driver_events.store_release_u16(2, flags);
        fence(Ordering::SeqCst);
        self.free != self.size && self.has_used()
    }

    pub fn disable_interrupts(&mut self) {
        self.driver_events.store_release_u16(2, EVENTS_DISABLE);
    }

    pub fn free(&self) -> u16 {
        self.free
    }
}
