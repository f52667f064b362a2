//! The driver side of a virtqueue: what a guest's kernel does, for tests, hostile front ends and benchmarks.
//!
//! Owned by one thread; lays the ring out in memory that the caller shares with the device. As on the other side,
//! indices are stored and loaded once per batch, and "kick?" is a return value. Unlike the device it trusts
//! its peer: an answer to nothing is a panic, which is what a test wants. [`RawRing`] writes what no driver should.
//!
//! [`SplitRing`] and [`PackedRing`] are the rings; [`DriverQueue`] adds which descriptors are free. A load generator, whose
//! requests have descriptors for good, uses the rings alone.

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

/// Where a ring's parts lie, guest-physical: what `SET_VRING_ADDR` is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// Entries.
    pub size: u16,
    /// Packed, not split.
    pub packed: bool,
    /// Descriptor table or ring.
    pub descriptor_area: u64,
    /// Available ring or driver event suppression.
    pub driver_area: u64,
    /// Used ring or device event suppression.
    pub device_area: u64,
    /// First byte after them.
    pub end: u64,
}

impl RingLayout {
    /// The parts one after the other from `start` (rounded up), none sharing a cache line or its neighbour.
    pub fn at(start: u64, size: u16, packed: bool) -> RingLayout {
        const APART: u64 = 128;
        let [descriptors, driver, device] = area_sizes(size, packed);
        let after = |address: u64, length: usize| (address + length as u64).next_multiple_of(APART);
        let descriptor_area = start.next_multiple_of(APART);
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

    /// How a device finds this ring, at its start and without optional features.
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

/// Bytes of the three areas.
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

/// Memory for indirect tables: one for each entry of the ring, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndirectTables {
    /// Guest-physical address of the first table.
    pub address: u64,
    /// Descriptors in each table.
    pub descriptors: u16,
}

impl IndirectTables {
    /// Bytes of all tables for a ring of `size` entries.
    pub fn bytes(&self, size: u16) -> u64 {
        u64::from(size) * self.table_bytes()
    }

    fn table_bytes(&self) -> u64 {
        u64::from(self.descriptors) * DESCRIPTOR_SIZE as u64
    }
}

/// How a driver uses a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverConfig {
    /// Where the ring is.
    pub layout: RingLayout,
    /// `VIRTIO_F_EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// Memory for `add_indirect`.
    pub tables: Option<IndirectTables>,
    /// Split: index at which both rings begin (a device's `base`), so that tests need not count to 65536.
    pub start: u16,
}

impl DriverConfig {
    /// Without optional features, from index 0.
    pub fn new(layout: RingLayout) -> DriverConfig {
        DriverConfig {
            layout,
            event_idx: false,
            tables: None,
            start: 0,
        }
    }
}

/// A chain that the device has given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Its head or buffer ID, free again.
    pub id: u16,
    /// What `add` was given.
    pub token: u64,
    /// Bytes that the device says to have written.
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

    /// Writes the table of entry `id`, gives its address and bytes.
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

/// Address, length and WRITE flag of each element, and whether it is the last.
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
    /// When the ring or the indirect tables are not in the memory.
    pub fn new(config: DriverConfig, table: &MemoryTable) -> Result<DriverQueue, MemoryError> {
        let ring = if config.layout.packed {
            Ring::Packed(PackedDriver::new(&config, table)?)
        } else {
            Ring::Split(SplitDriver::new(&config, table)?)
        };
        Ok(DriverQueue { ring })
    }

    /// Adds a chain of direct descriptors: elements that the device reads, then those that it writes. Gives
    /// the head (packed: buffer ID), or nothing where the ring has no room. The device sees it after `publish`.
    ///
    /// # Panics
    /// When there is no element at all.
    #[inline]
    pub fn add(
        &mut self,
        readable: &[(u64, u32)],
        writable: &[(u64, u32)],
        token: u64,
    ) -> Option<u16> {
        each!(&mut self.ring, ring => ring.add(readable, writable, token))
    }

    /// As [`add`](Self::add), with one descriptor that refers to a table of the elements.
    ///
    /// # Panics
    /// When there are no indirect tables, no elements, or more than a table holds.
    #[inline]
    pub fn add_indirect(
        &mut self,
        readable: &[(u64, u32)],
        writable: &[(u64, u32)],
        token: u64,
    ) -> Option<u16> {
        each!(&mut self.ring, ring => ring.add_indirect(readable, writable, token))
    }

    /// Shows the device what was added since the last time; says whether it wants a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.publish())
    }

    /// Takes the next chain that the device has given back.
    ///
    /// # Panics
    /// When the device gives back what is not in flight.
    #[inline]
    pub fn pop_used(&mut self) -> Option<Used> {
        each!(&mut self.ring, ring => ring.pop_used())
    }

    /// Is there a chain to take? Cheap, for polling.
    #[inline]
    pub fn has_used(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.has_used())
    }

    /// Asks the device to notify of the next used chain; says whether there is one already.
    pub fn enable_interrupts(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.enable_interrupts())
    }

    /// Tells the device that notifications are not needed. With `event_idx` a split ring has no word for "never": a
    /// notification every 65536 chains remains.
    pub fn disable_interrupts(&mut self) {
        each!(&mut self.ring, ring => ring.disable_interrupts());
    }

    /// Descriptors that are free.
    pub fn free(&self) -> u16 {
        each!(&self.ring, ring => ring.free())
    }
}
