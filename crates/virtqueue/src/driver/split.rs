//! Chains and free descriptors of a split ring (virtio 1.3, 2.7.13 and 2.7.14).

use guest_memory::{MemoryError, MemoryTable};

use super::{DriverConfig, SplitRing, Tables, Used, elements};
use crate::layout::{Descriptor, INDIRECT, NEXT};

/// The driver's state of a descriptor, in memory that the device cannot write.
#[derive(Clone, Copy, Default)]
struct Entry {
    token: u64,
    /// Next free descriptor, or next one of the chain.
    next: u16,
    /// Last descriptor of the chain, for a head in flight.
    last: u16,
    /// Number of the chain's descriptors in the ring, for a head in flight; else 0.
    count: u16,
}

pub struct SplitDriver {
    ring: SplitRing,
    tables: Option<Tables>,
    entries: Box<[Entry]>,
    first_free: u16,
    free: u16,
}

impl SplitDriver {
    pub fn new(config: &DriverConfig, table: &MemoryTable) -> Result<SplitDriver, MemoryError> {
        let entry = |i| Entry {
            next: i + 1,
            ..Entry::default()
        };
        Ok(SplitDriver {
            ring: SplitRing::new(&config.layout, table, config.event_idx, config.start)?,
            tables: Tables::resolve(config, table)?,
            entries: (0..config.layout.size).map(entry).collect(),
            first_free: 0,
            free: config.layout.size,
        })
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
            let (flags, link) = if last {
                (flags, 0)
            } else {
                (flags | NEXT, next)
            };
            self.ring.write_descriptor(at, address, length, flags, link);
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
        self.ring
            .write_descriptor(head, address, length, INDIRECT, 0);
        self.make_available(head, head, 1, token);
        Some(head)
    }

    fn make_available(&mut self, head: u16, last: u16, count: u16, token: u64) {
        self.first_free = self.entries[usize::from(last)].next;
        self.free -= count;
        let entry = &mut self.entries[usize::from(head)];
        (entry.token, entry.last, entry.count) = (token, last, count);
        self.ring.offer(head);
    }

    pub fn publish(&mut self) -> bool {
        self.ring.publish()
    }

    pub fn has_used(&mut self) -> bool {
        self.ring.has_used()
    }

    pub fn pop_used(&mut self) -> Option<Used> {
        let (id, written) = self.ring.pop_used()?;
        assert!((id as usize) < self.entries.len(), "device used head {id}");
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
            written,
        })
    }

    pub fn enable_interrupts(&mut self) -> bool {
        self.ring.enable_interrupts()
    }

    pub fn disable_interrupts(&mut self) {
        self.ring.disable_interrupts();
    }

    pub fn free(&self) -> u16 {
        self.free
    }
}
