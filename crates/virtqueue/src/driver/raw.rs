//! Access to single fields of a ring, for drivers that break the rules on purpose.

use guest_memory::{MemoryError, MemoryTable, RingMemory};
use zerocopy::little_endian::U16;

use super::RingLayout;
use crate::layout::{
    DESCRIPTOR_SIZE, Descriptor, INDEX, PackedDescriptor, RING, USED_ELEMENT_SIZE, UsedElement,
    available_event, used_event,
};

/// Memory of a ring. Entry numbers are taken modulo the size; other values are unchecked.
pub struct RawRing {
    size: u16,
    descriptors: RingMemory,
    driver: RingMemory,
    device: RingMemory,
}

impl RawRing {
    /// Opens a ring without changing it.
    ///
    /// # Errors
    /// Fails if the ring is not in the memory.
    pub fn new(layout: &RingLayout, table: &MemoryTable) -> Result<RawRing, MemoryError> {
        let [descriptors, driver, device] = layout.areas(table)?;
        Ok(RawRing {
            size: layout.size,
            descriptors,
            driver,
            device,
        })
    }

    fn slot(&self, index: u16) -> usize {
        usize::from(index % self.size)
    }

    /// Writes a descriptor of a split ring.
    pub fn set_descriptor(&self, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let descriptor = Descriptor {
            address: address.into(),
            length: length.into(),
            flags: flags.into(),
            next: next.into(),
        };
        self.descriptors
            .write(DESCRIPTOR_SIZE * self.slot(index), descriptor);
    }

    /// Writes a descriptor of a packed ring, with [`AVAIL`](crate::layout::AVAIL) and [`USED`](crate::layout::USED) as given.
    pub fn set_packed(&self, index: u16, address: u64, length: u32, id: u16, flags: u16) {
        let descriptor = PackedDescriptor {
            address: address.into(),
            length: length.into(),
            id: id.into(),
            flags: flags.into(),
        };
        self.descriptors
            .write(DESCRIPTOR_SIZE * self.slot(index), descriptor);
    }

    /// Reads a descriptor of a packed ring.
    pub fn packed(&self, index: u16) -> PackedDescriptor {
        self.descriptors.read(DESCRIPTOR_SIZE * self.slot(index))
    }

    /// Writes an entry of the available ring.
    pub fn set_available_entry(&self, index: u16, head: u16) {
        self.driver
            .write(RING + 2 * self.slot(index), U16::new(head));
    }

    /// Writes `idx` of the available ring.
    pub fn set_available_index(&self, index: u16) {
        self.driver.store_release_u16(INDEX, index);
    }

    /// Writes `flags` of the available ring.
    pub fn set_available_flags(&self, flags: u16) {
        self.driver.store_release_u16(0, flags);
    }

    /// Writes `used_event`.
    pub fn set_used_event(&self, index: u16) {
        self.driver.store_release_u16(used_event(self.size), index);
    }

    /// Writes the driver event suppression structure of a packed ring.
    pub fn set_driver_events(&self, position: u16, flags: u16) {
        self.driver.store_release_u16(0, position);
        self.driver.store_release_u16(2, flags);
    }

    /// Reads the device event suppression structure of a packed ring: position, flags.
    pub fn device_events(&self) -> (u16, u16) {
        (
            self.device.load_acquire_u16(0),
            self.device.load_acquire_u16(2),
        )
    }

    /// Writes `idx` of the used ring, a field of the device.
    pub fn set_used_index(&self, index: u16) {
        self.device.store_release_u16(INDEX, index);
    }

    /// Reads `idx` of the used ring.
    pub fn used_index(&self) -> u16 {
        self.device.load_acquire_u16(INDEX)
    }

    /// Reads `flags` of the used ring.
    pub fn used_flags(&self) -> u16 {
        self.device.load_acquire_u16(0)
    }

    /// Reads an element of the used ring.
    pub fn used_element(&self, index: u16) -> UsedElement {
        self.device
            .read(RING + USED_ELEMENT_SIZE * self.slot(index))
    }

    /// Reads `avail_event`.
    pub fn available_event(&self) -> u16 {
        self.device.load_acquire_u16(available_event(self.size))
    }
}
