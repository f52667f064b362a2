//! Where a queue lies and what was negotiated for it: all that a device queue needs to be made.

use guest_memory::{MemoryTable, RingMemory};

use crate::QueueError;
use crate::layout::{self, Place};

/// [`QueueConfig::base`] of a new packed ring: both places at descriptor 0, both wrap counters 1.
pub const PACKED_START: u32 = 0x8000_8000;

/// Elements of data that a chain through an indirect table may have in a queue of any size: as many as the kernel takes in
/// one read or write (`UIO_MAXIOV`), and as direct descriptors have in the largest queue that front ends make.
const TABLE_DATA: u16 = 1024;
/// A request's header and its status, beside them.
const TABLE_REST: u16 = 2;

/// Description of a queue, from the front end's messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// Entries: 1..=32768, for a split ring a power of two.
    pub size: u16,
    /// Guest-physical address of the descriptor table (packed: descriptor ring).
    pub descriptor_area: u64,
    /// Guest-physical address of the available ring (packed: driver event suppression).
    pub driver_area: u64,
    /// Guest-physical address of the used ring (packed: device event suppression).
    pub device_area: u64,
    /// `VIRTIO_F_RING_PACKED` was negotiated.
    pub packed: bool,
    /// `VIRTIO_F_EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// Where to start, as in vhost-user's `SET_VRING_BASE`. Split: the next available index. Packed: available
    /// place in the lower, used place in the upper 16 bits, each with its wrap counter on top.
    pub base: u32,
    /// The most bytes in one chain.
    pub max_chain_bytes: u32,
    /// The most descriptors in one chain through an indirect table; direct ones have at most `size`. The standard allows
    /// `size` there, too (2.7.5.3.1), but drivers make longer tables and every other device serves them.
    pub max_chain_descriptors: u16,
}

impl QueueConfig {
    /// A split queue at its start, without optional features.
    pub fn split(size: u16, descriptor_area: u64, driver_area: u64, device_area: u64) -> Self {
        QueueConfig {
            size,
            descriptor_area,
            driver_area,
            device_area,
            packed: false,
            event_idx: false,
            base: 0,
            max_chain_bytes: u32::MAX,
            max_chain_descriptors: size.max(TABLE_DATA).saturating_add(TABLE_REST),
        }
    }

    /// A packed queue at its start, without optional features.
    pub fn packed(size: u16, descriptor_area: u64, driver_area: u64, device_area: u64) -> Self {
        QueueConfig {
            packed: true,
            base: PACKED_START,
            ..QueueConfig::split(size, descriptor_area, driver_area, device_area)
        }
    }

    pub(crate) fn check(&self) -> Result<(), QueueError> {
        let size = self.size;
        let allowed = if self.packed {
            "1 to 32768"
        } else {
            "a power of two up to 32768"
        };
        let fits = size <= layout::MAX_SIZE && (self.packed || size.is_power_of_two());
        if size == 0 || !fits {
            return Err(QueueError::Size { size, allowed });
        }
        let [available, used] = self.packed_places();
        if self.packed && (available.index >= size || used.index >= size) {
            return Err(QueueError::Base {
                base: self.base,
                size,
            });
        }
        Ok(())
    }

    /// Available and used place of a packed ring's base.
    pub(crate) fn packed_places(&self) -> [Place; 2] {
        [
            Place::from_bits(self.base as u16),
            Place::from_bits((self.base >> 16) as u16),
        ]
    }
}

/// The three areas, resolved.
pub(crate) struct Areas {
    pub descriptors: RingMemory,
    pub driver: RingMemory,
    pub device: RingMemory,
}

impl Areas {
    /// Looks the areas up, with the sizes and alignments of clause 2.7 or 2.8.
    pub fn resolve(config: &QueueConfig, table: &MemoryTable) -> Result<Areas, QueueError> {
        config.check()?;
        let size = config.size;
        let area = |part, address: u64, length: usize, alignment: usize| {
            let memory =
                table
                    .ring(address, length as u64)
                    .map_err(|_| QueueError::RingNotMapped {
                        part,
                        address,
                        length: length as u64,
                    })?;
            // Both must hold: a region may start anywhere in its file, so a guest's alignment says nothing of ours.
            if !address.is_multiple_of(alignment as u64) || !memory.is_aligned(alignment) {
                return Err(QueueError::Unaligned {
                    part,
                    address,
                    alignment,
                });
            }
            Ok(memory)
        };
        let descriptors = layout::descriptor_area_size(size);
        if config.packed {
            let events = layout::EVENT_SUPPRESSION_SIZE;
            return Ok(Areas {
                descriptors: area("descriptor ring", config.descriptor_area, descriptors, 16)?,
                driver: area("driver event suppression", config.driver_area, events, 4)?,
                device: area("device event suppression", config.device_area, events, 4)?,
            });
        }
        let available = layout::available_ring_size(size);
        let used = layout::used_ring_size(size);
        Ok(Areas {
            descriptors: area("descriptor table", config.descriptor_area, descriptors, 16)?,
            driver: area("available ring", config.driver_area, available, 2)?,
            device: area("used ring", config.device_area, used, 4)?,
        })
    }
}
