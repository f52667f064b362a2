//! Slots in a packed ring: descriptors are written for each request; the slot number is the buffer ID.

use guest_memory::{MemoryError, MemoryTable};
use virtqueue::driver::{PackedRing, RingLayout};
use virtqueue::layout::{DESCRIPTOR_SIZE, INDIRECT, NEXT, WRITE};

use super::queue::Chain;

pub struct PackedSlots {
    pub ring: PackedRing,
    /// Number of ring descriptors of each slot's request.
    counts: Box<[u16]>,
}

impl PackedSlots {
    pub fn new(
        layout: &RingLayout,
        table: &MemoryTable,
        event_idx: bool,
        slots: u16,
    ) -> Result<PackedSlots, MemoryError> {
        Ok(PackedSlots {
            ring: PackedRing::new(layout, table, event_idx)?,
            counts: vec![1; usize::from(slots)].into(),
        })
    }

    /// Writes a slot's request into the ring. There is always room: each slot is in flight at most once, and the ring has room for all
    /// slots.
    #[inline]
    pub fn offer(&mut self, slot: u16, chain: &Chain<'_>) {
        let head = match *chain {
            Chain::Table(address, count) => {
                let bytes = (count * DESCRIPTOR_SIZE) as u32;
                self.counts[usize::from(slot)] = 1;
                self.ring.begin(slot, address, bytes, INDIRECT)
            }
            Chain::Parts([(address, length, device_writes), rest @ ..]) => {
                self.counts[usize::from(slot)] = 1 + rest.len() as u16;
                let more = |is_last| if is_last { 0 } else { NEXT };
                let direction = |device_writes| if device_writes { WRITE } else { 0 };
                let flags = more(rest.is_empty()) | direction(*device_writes);
                let head = self.ring.begin(slot, *address, *length, flags);
                for (index, &(address, length, device_writes)) in rest.iter().enumerate() {
                    let flags = more(index + 1 == rest.len()) | direction(device_writes);
                    self.ring.extend(slot, address, length, flags);
                }
                head
            }
            Chain::Parts([]) => return,
        };
        self.ring.offer(head);
    }

    /// Returns the next completed slot as reported by the device. An invalid slot number does not advance the ring; it ends the run.
    #[inline]
    pub fn pop(&mut self) -> Option<u32> {
        let (slot, _) = self.ring.peek_used()?;
        if let Some(count) = self.counts.get(usize::from(slot)) {
            self.ring.advance(*count);
        }
        Some(slot.into())
    }
}
