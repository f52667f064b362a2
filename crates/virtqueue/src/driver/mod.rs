//! The driver side of a virtqueue, like a guest kernel's: for tests, hostile front ends and benchmarks.
//!
//! Owned by one thread. Places the ring in memory that the caller shares with the device. As in the device side, indices are stored and
//! loaded once per batch, and the need for a kick is a return value. The device is trusted: an unexpected answer causes a panic, as a test
//! requires. [`RawRing`] writes arbitrary values.
//!
//! [`SplitRing`] and [`PackedRing`] are the rings; [`DriverQueue`] adds the management of free descriptors. A load generator with fixed
//! descriptors uses the rings alone.

mod packed;
mod packed_ring;
mod raw;
mod split;
mod split_ring;

use guest_memory::{MemoryError, MemoryTable, RingMemory};

pub use packed_ring::{Head, PackedRing};
pub use raw::RawRing;
pub use split_ring::SplitRing;

use crate::QueueConfig;
use crate::layout::{self, DESCRIPTOR_SIZE, Descriptor};
use packed::PackedDriver;
use split::SplitDriver;

/// Guest-physical addresses of a ring's parts, for `SET_VRING_ADDR`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// Number of entries.
    pub size: u16,
    /// Packed instead of split.
    pub packed: bool,
    /// Descriptor table or ring.
    pub descriptor_area: u64,
    /// Available ring or driver event suppression.
    pub driver_area: u64,
    /// Used ring or device event suppression.
    pub device_area: u64,
    /// First address after the parts.
    pub end: u64,
}

impl RingLayout {
    /// Places the parts one after the other from `start` (rounded up), without shared or adjacent cache lines.
    pub fn at(start: u64, size: u16, packed: bool) -> RingLayout {
        const SPACING: u64 = 128;
        let [descriptors, driver, device] = area_sizes(size, packed);
        let after =
            |address: u64, length: usize| (address + length as u64).next_multiple_of(SPACING);
        let descriptor_area = start.next_multiple_of(SPACING);
        let driver_area = after(descriptor_area, descriptors);
        let device_area = after(driver_area, driver);
        RingLayout {
            size,
            packed,
            descriptor_area,
            driver_area,
            device_area,
            end: after(device_area, device),
        }
    }

    /// Returns the device's parameters for this ring, new and without optional features.
    pub fn device_config(&self) -> QueueConfig {
        let new = if self.packed {
            QueueConfig::packed
        } else {
            QueueConfig::split
        };
        new(
            self.size,
            self.descriptor_area,
            self.driver_area,
            self.device_area,
        )
    }

    fn areas(&self, table: &MemoryTable) -> Result<[RingMemory; 3], MemoryError> {
        let [descriptors, driver, device] = area_sizes(self.size, self.packed);
        Ok([
            table.ring(self.descriptor_area, descriptors as u64)?,
            table.ring(self.driver_area, driver as u64)?,
            table.ring(self.device_area, device as u64)?,
        ])
    }

    fn zeroed_areas(&self, table: &MemoryTable) -> Result<[RingMemory; 3], MemoryError> {
        let areas = self.areas(table)?;
        for area in &areas {
            (0..area.len()).for_each(|at| area.write(at, 0u8));
        }
        Ok(areas)
    }
}

/// Returns the lengths of the three areas.
fn area_sizes(size: u16, packed: bool) -> [usize; 3] {
    let descriptors = layout::descriptor_area_size(size);
    if packed {
        let events = layout::EVENT_SUPPRESSION_SIZE;
        [descriptors, events, events]
    } else {
        let available = layout::available_ring_size(size);
        [descriptors, available, layout::used_ring_size(size)]
    }
}

/// Memory for indirect tables: consecutive, one per ring entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndirectTables {
    /// Guest-physical address of the first table.
    pub address: u64,
    /// Descriptors per table.
    pub descriptors: u16,
}

impl IndirectTables {
    /// Returns the length of all tables for a ring of `size` entries.
    pub fn bytes(&self, size: u16) -> u64 {
        u64::from(size) * self.table_bytes()
    }

    fn table_bytes(&self) -> u64 {
        u64::from(self.descriptors) * DESCRIPTOR_SIZE as u64
    }
}

/// Parameters of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverConfig {
    /// Addresses of the ring.
    pub layout: RingLayout,
    /// `VIRTIO_F_EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// Memory for `add_indirect`.
    pub tables: Option<IndirectTables>,
    /// Split: first index of both rings (the device's `base`), so that tests reach 65536 early.
    pub start: u16,
}

impl DriverConfig {
    /// Returns parameters without optional features, from index 0.
    pub fn new(layout: RingLayout) -> DriverConfig {
        DriverConfig {
            layout,
            event_idx: false,
            tables: None,
            start: 0,
        }
    }
}

/// A chain that the device has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Head or buffer ID of the chain, which is now free.
    pub id: u16,
    /// The caller's token from `add`.
    pub token: u64,
    /// Bytes written, as reported by the device.
    pub written: u32,
}

/// The indirect tables, resolved.
struct Tables {
    memory: RingMemory,
    address: u64,
    descriptors: u16,
}

impl Tables {
    fn resolve(config: &DriverConfig, table: &MemoryTable) -> Result<Option<Tables>, MemoryError> {
        let Some(tables) = config.tables else {
            return Ok(None);
        };
        Ok(Some(Tables {
            memory: table.ring(tables.address, tables.bytes(config.layout.size))?,
            address: tables.address,
            descriptors: tables.descriptors,
        }))
    }

    /// Writes the table of entry `id`. Returns its address and length.
    fn fill(&self, id: u16, elements: impl Iterator<Item = Descriptor>) -> (u64, u32) {
        let start = usize::from(id) * usize::from(self.descriptors) * DESCRIPTOR_SIZE;
        let mut count = 0;
        for descriptor in elements {
            assert!(
                count < usize::from(self.descriptors),
                "chain longer than an indirect table of {} descriptors",
                self.descriptors
            );
            self.memory
                .write(start + count * DESCRIPTOR_SIZE, descriptor);
            count += 1;
        }
        (
            self.address + start as u64,
            (count * DESCRIPTOR_SIZE) as u32,
        )
    }
}

/// Iterates over address, length and WRITE flag of each element, and whether it is the last.
fn elements<'a>(
    readable: &'a [(u64, u32)],
    writable: &'a [(u64, u32)],
) -> impl Iterator<Item = (u64, u32, u16, bool)> + 'a {
    let last = (readable.len() + writable.len()).saturating_sub(1);
    let readable = readable.iter().map(|&(a, l)| (a, l, 0));
    let writable = writable.iter().map(|&(a, l)| (a, l, layout::WRITE));
    readable
        .chain(writable)
        .enumerate()
        .map(move |(i, (a, l, flags))| (a, l, flags, i == last))
}

/// The driver side of a virtqueue.
pub struct DriverQueue {
    ring: Ring,
}

enum Ring {
    Split(SplitDriver),
    Packed(PackedDriver),
}

macro_rules! each {
    ($queue:expr, $ring:ident => $call:expr) => {
        match $queue {
            Ring::Split($ring) => $call,
            Ring::Packed($ring) => $call,
        }
    };
}

impl DriverQueue {
    /// Zeroes the ring and starts in it.
    ///
    /// # Errors
    /// Fails if the ring or the indirect tables are not in the memory.
    pub fn new(config: DriverConfig, table: &MemoryTable) -> Result<DriverQueue, MemoryError> {
        let ring = if config.layout.packed {
            Ring::Packed(PackedDriver::new(&config, table)?)
        } else {
            Ring::Split(SplitDriver::new(&config, table)?)
        };
        Ok(DriverQueue { ring })
    }

    /// Adds a chain of direct descriptors: device-readable elements, then device-writable ones. Returns the head (packed: buffer ID), or
    /// `None` if the ring is full. The device sees the chain after `publish`.
    ///
    /// # Panics
    /// If there is no element.
    #[inline]
    pub fn add(
        &mut self,
        readable: &[(u64, u32)],
        writable: &[(u64, u32)],
        token: u64,
    ) -> Option<u16> {
        each!(&mut self.ring, ring => ring.add(readable, writable, token))
    }

    /// Like [`add`](Self::add), with one descriptor that refers to a table of the elements.
    ///
    /// # Panics
    /// If there are no indirect tables, no elements, or too many for a table.
    #[inline]
    pub fn add_indirect(
        &mut self,
        readable: &[(u64, u32)],
        writable: &[(u64, u32)],
        token: u64,
    ) -> Option<u16> {
        each!(&mut self.ring, ring => ring.add_indirect(readable, writable, token))
    }

    /// Makes all added chains visible to the device. Returns true if it wants a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.publish())
    }

    /// Returns the next chain that the device has returned.
    ///
    /// # Panics
    /// If the device returns a chain that is not in flight.
    #[inline]
    pub fn pop_used(&mut self) -> Option<Used> {
        each!(&mut self.ring, ring => ring.pop_used())
    }

    /// Returns true if a used chain waits. Cheap, for polling.
    #[inline]
    pub fn has_used(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.has_used())
    }

    /// Enables an interrupt for the next used chain. Returns true if there is one already.
    pub fn enable_interrupts(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.enable_interrupts())
    }

    /// Disables interrupts. A split ring with `event_idx` cannot express this fully: one interrupt per 65536 chains remains.
    pub fn disable_interrupts(&mut self) {
        each!(&mut self.ring, ring => ring.disable_interrupts());
    }

    /// Returns the number of free descriptors.
    pub fn free(&self) -> u16 {
        each!(&self.ring, ring => ring.free())
    }
}
