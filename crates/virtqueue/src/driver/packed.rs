//! Chains and free buffer IDs of a packed ring (virtio 1.3, 2.8.21 and 2.8.22).

use guest_memory::{MemoryError, MemoryTable};

use super::{DriverConfig, Head, PackedRing, Tables, Used, elements};
use crate::layout::{Descriptor, INDIRECT, NEXT};

/// The driver's state of a buffer ID.
#[derive(Clone, Copy, Default)]
struct Entry {
    token: u64,
    /// Number of descriptors in the ring while in flight, else 0.
    count: u16,
}

pub struct PackedDriver {
    ring: PackedRing,
    tables: Option<Tables>,
    entries: Box<[Entry]>,
    free_ids: Vec<u16>,
    size: u16,
    free: u16,
}

impl PackedDriver {
    pub fn new(config: &DriverConfig, table: &MemoryTable) -> Result<PackedDriver, MemoryError> {
        let size = config.layout.size;
        Ok(PackedDriver {
            ring: PackedRing::new(&config.layout, table, config.event_idx)?,
            tables: Tables::resolve(config, table)?,
            entries: vec![Entry::default(); usize::from(size)].into(),
            free_ids: (0..size).rev().collect(),
            size,
            free: size,
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
        // There are as many IDs as descriptors.
        let id = self.free_ids.pop()?;
        let mut head = None;
        for (address, length, flags, last) in elements(readable, writable) {
            let flags = if last { flags } else { flags | NEXT };
            match head {
                None => head = Some(self.ring.begin(id, address, length, flags)),
                Some(_) => self.ring.extend(id, address, length, flags),
            }
        }
        self.make_available(id, count as u16, token, head?);
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
        // A packed descriptor has the ID in the place of a split one's flags, and the flags in the place of its `next`.
        let chain = elements(readable, writable).map(|(address, length, flags, _)| Descriptor {
            address: address.into(),
            length: length.into(),
            flags: 0.into(),
            next: flags.into(),
        });
        let (address, length) = tables.fill(id, chain);
        assert!(length > 0, "chain without elements");
        let head = self.ring.begin(id, address, length, INDIRECT);
        self.make_available(id, 1, token, head);
        Some(id)
    }

    fn make_available(&mut self, id: u16, count: u16, token: u64, head: Head) {
        self.entries[usize::from(id)] = Entry { token, count };
        self.free -= count;
        self.ring.offer(head);
    }

    pub fn publish(&mut self) -> bool {
        self.ring.publish()
    }

    pub fn has_used(&self) -> bool {
        self.ring.has_used()
    }

    pub fn pop_used(&mut self) -> Option<Used> {
        if self.free == self.size {
            return None;
        }
        let (id, written) = self.ring.peek_used()?;
        let entry = self.entries.get_mut(usize::from(id));
        let entry = entry.unwrap_or_else(|| panic!("device used buffer {id}"));
        assert!(entry.count > 0, "device used buffer {id}, not in flight");
        let Entry { token, count } = std::mem::take(entry);
        self.free_ids.push(id);
        self.free += count;
        self.ring.advance(count);
        Some(Used { id, token, written })
    }

    pub fn enable_interrupts(&mut self) -> bool {
        self.ring.enable_interrupts() && self.free != self.size
    }

    pub fn disable_interrupts(&mut self) {
        self.ring.disable_interrupts();
    }

    pub fn free(&self) -> u16 {
        self.free
    }
}
