//! The driver side of a split ring: clause 2.7.13 and 2.7.14.

use std::sync::atomic::{Ordering, fence};

use guest_memory::{MemoryError, MemoryTable, RingMemory};
use zerocopy::little_endian::U16;

use super::{DriverConfig, Tables, Used, elements};
use crate::layout::{
    DESCRIPTOR_SIZE, Descriptor, INDEX, INDIRECT, NEXT, NO_INTERRUPT, NO_NOTIFY, RING,
    USED_ELEMENT_SIZE, UsedElement, available_event, passes_event, used_event,
};

/// What the driver knows of a descriptor; the device cannot write to it.
#[derive(Clone, Copy, Default)]
struct Entry {
    token: u64,
    /// The next free one, or the next of the same chain.
    next: u16,
    /// For a head in flight: the chain's last descriptor.
    last: u16,
    /// For a head in flight: descriptors in the ring; else 0.
    count: u16,
}

pub struct SplitDriver {
    descriptors: RingMemory,
    available: RingMemory,
    used: RingMemory,
    tables: Option<Tables>,
    entries: Box<[Entry]>,
    size: u16,
    event_idx: bool,
    first_free: u16,
    free: u16,
    next_available: u16,
    published_available: u16,
    next_used: u16,
    known_used: u16,
}

impl SplitDriver {
    pub fn new(config: &DriverConfig, table: &MemoryTable) -> Result<SplitDriver, MemoryError> {
        let [descriptors, available, used] = config.layout.areas(table)?;
        for area in [&descriptors, &available, &used] {
            (0..area.len()).for_each(|at| area.write(at, 0u8));
        }
        available.store_release_u16(INDEX, config.start);
        used.store_release_u16(INDEX, config.start);
        available.store_release_u16(used_event(config.layout.size), config.start);
        used.store_release_u16(available_event(config.layout.size), config.start);
        let entry = |i| Entry {
            next: i + 1,
            ..Entry::default()
        };
        Ok(SplitDriver {
            descriptors,
            available,
            used,
            tables: Tables::resolve(config, table)?,
            entries: (0..config.layout.size).map(entry).collect(),
            size: config.layout.size,
            event_idx: config.event_idx,
            first_free: 0,
            free: config.layout.size,
            next_available: config.start,
            published_available: config.start,
            next_used: config.start,
            known_used: config.start,
        })
    }

    fn slot(&self, index: u16) -> usize {
        usize::from(index & (self.size - 1))
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
        let head = self.first_free;
        let (mut at, mut tail) = (head, head);
        for (address, length, flags, last) in elements(readable, writable) {
            let next = self.entries[usize::from(at)].next;
            let link = if last {
                (flags, 0)
            } else {
                (flags | NEXT, next)
            };
            self.write_descriptor(at, address, length, link);
            (tail, at) = (at, next);
        }
        self.make_available(head, tail, count as u16, token);
        Some(head)
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
        let head = self.first_free;
        let tables = self.tables.as_ref().expect("a driver with indirect tables");
        let chain = elements(readable, writable).zip(1u16..);
        let chain = chain.map(|((address, length, flags, last), next)| Descriptor {
            address: address.into(),
            length: length.into(),
            flags: if last { flags } else { flags | NEXT }.into(),
            next: if last { 0 } else { next }.into(),
        });
        let (address, length) = tables.fill(head, chain);
        assert!(length > 0, "chain without elements");
        self.write_descriptor(head, address, length, (INDIRECT, 0));
        self.make_available(head, head, 1, token);
        Some(head)
    }

    fn write_descriptor(&self, at: u16, address: u64, length: u32, (flags, next): (u16, u16)) {
        let descriptor = Descriptor {
            address: address.into(),
            length: length.into(),
            flags: flags.into(),
            next: next.into(),
        };
        self.descriptors
            .write(DESCRIPTOR_SIZE * usize::from(at), descriptor);
    }

    fn make_available(&mut self, head: u16, last: u16, count: u16, token: u64) {
        self.first_free = self.entries[usize::from(last)].next;
        self.free -= count;
        let entry = &mut self.entries[usize::from(head)];
        (entry.token, entry.last, entry.count) = (token, last, count);
        let slot = self.slot(self.next_available);
        self.available.write(RING + 2 * slot, U16::new(head));
        self.next_available = self.next_available.wrapping_add(1);
    }

    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published_available, self.next_available);
        if old == new {
            return false;
        }
        self.available.store_release_u16(INDEX, new);
        self.published_available = new;
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = self.used.load_relaxed_u16(available_event(self.size));
            passes_event(event, old, new)
        } else {
            self.used.load_relaxed_u16(0) & NO_NOTIFY == 0
        }
    }

    pub fn has_used(&self) -> bool {
        self.next_used != self.known_used || self.used.load_acquire_u16(INDEX) != self.next_used
    }

    pub fn pop_used(&mut self) -> Option<Used> {
        if self.next_used == self.known_used {
            self.known_used = self.used.load_acquire_u16(INDEX);
            if self.next_used == self.known_used {
                return None;
            }
        }
        let slot = self.slot(self.next_used);
        let element: UsedElement = self.used.read(RING + USED_ELEMENT_SIZE * slot);
        self.next_used = self.next_used.wrapping_add(1);
        let id = element.id.get();
        assert!(id < u32::from(self.size), "device used head {id}");
        let head = id as u16;
        let entry = self.entries[usize::from(head)];
        assert!(entry.count > 0, "device used head {head}, not in flight");
        self.entries[usize::from(head)].count = 0;
        self.entries[usize::from(entry.last)].next = self.first_free;
        self.first_free = head;
        self.free += entry.count;
        Some(Used {
            id: head,
            token: entry.token,
            written: element.length.get(),
        })
    }

    pub fn enable_interrupts(&mut self) -> bool {
        if self.event_idx {
            self.available
                .store_release_u16(used_event(self.size), self.next_used);
        } else {
            self.available.store_release_u16(0, 0);
        }
        fence(Ordering::SeqCst);
        self.has_used()
    }

    pub fn disable_interrupts(&mut self) {
        if !self.event_idx {
            self.available.store_release_u16(0, NO_INTERRUPT);
        }
    }

    pub fn free(&self) -> u16 {
        self.free
    }
}
