//! Slots in a split ring: each slot has fixed descriptors; only heads are published.

use guest_memory::{MemoryError, MemoryTable};
use virtqueue::driver::{RingLayout, SplitRing};
use virtqueue::layout::{DESCRIPTOR_SIZE, INDIRECT, NEXT, WRITE};

use super::queue::{Chain, PARTS};

pub struct SplitSlots {
    pub ring: SplitRing,
    /// Number of ring descriptors per slot.
    stride: u16,
}

impl SplitSlots {
    pub fn new(
        layout: &RingLayout,
        table: &MemoryTable,
        event_idx: bool,
        indirect: bool,
    ) -> Result<SplitSlots, MemoryError> {
        Ok(SplitSlots {
            ring: SplitRing::new(layout, table, event_idx, 0)?,
            stride: if indirect { 1 } else { PARTS as u16 },
        })
    }

    /// Writes a slot's descriptors.
    pub fn describe(&self, slot: u16, chain: &Chain<'_>) {
        let first = slot * self.stride;
        match chain {
            Chain::Table(address, count) => {
                let bytes = (count * DESCRIPTOR_SIZE) as u32;
                self.ring
                    .write_descriptor(first, *address, bytes, INDIRECT, 0);
            }
            Chain::Parts(parts) => {
                for (&(address, length, device_writes), index) in parts.iter().zip(first..) {
                    let last = usize::from(index - first) + 1 == parts.len();
                    let (next, more) = if last { (0, 0) } else { (index + 1, NEXT) };
                    let flags = more | if device_writes { WRITE } else { 0 };
                    self.ring
                        .write_descriptor(index, address, length, flags, next);
                }
            }
        }
    }

    /// Makes a slot's request available.
    #[inline]
    pub fn offer(&mut self, slot: u16) {
        self.ring.offer(slot * self.stride);
    }

    /// Returns the next completed slot as reported by the device.
    #[inline]
    pub fn pop(&mut self) -> Option<u32> {
        let (head, _) = self.ring.pop_used()?;
        Some(head / u32::from(self.stride))
    }
}
