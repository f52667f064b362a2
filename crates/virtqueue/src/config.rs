//! Addresses and negotiated parameters of a queue.

use guest_memory::{MemoryTable, RingMemory};

use crate::QueueError;
use crate::layout::{self, RingPosition};

/// [`QueueConfig::base`] of a new packed ring: both positions at descriptor 0, both wrap counters 1.
pub const PACKED_START: u32 = 0x8000_8000;

/// Number of data elements that a chain in an indirect table may have in a queue of any size. The kernel accepts as many in one read or
/// write (`UIO_MAXIOV`). The largest queue that front ends create has as many direct descriptors.
const TABLE_DATA_ELEMENTS: u16 = 1024;
/// Header and status of a request.
const TABLE_HEADER_AND_STATUS: u16 = 2;

/// Parameters of a queue, from the front end's messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// Number of entries: 1..=32768, a power of two for split rings.
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
    /// Start position, as in vhost-user's `SET_VRING_BASE`. Split: next available index. Packed: available position in the lower and used
    /// position in the upper 16 bits, each with its wrap counter as the top bit.
    pub base: u32,
    /// Maximum bytes of a chain.
    pub max_chain_bytes: u32,
    /// Maximum descriptors of a chain in an indirect table; direct chains have at most `size`. The standard limits both to `size`
    /// (2.7.5.3.1), but drivers create longer tables and all other devices accept them.
    pub max_chain_descriptors: u16,
}

impl QueueConfig {
    /// Returns the parameters of a new split queue without optional features.
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
            max_chain_descriptors: size
                .max(TABLE_DATA_ELEMENTS)
                .saturating_add(TABLE_HEADER_AND_STATUS),
        }
    }

    /// Returns the parameters of a new packed queue without optional features.
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
        let [available, used] = self.packed_positions();
        if self.packed && (available.index >= size || used.index >= size) {
            return Err(QueueError::Base {
                base: self.base,
                size,
            });
        }
        Ok(())
    }

    /// Returns available and used position of a packed ring's base.
    pub(crate) fn packed_positions(&self) -> [RingPosition; 2] {
        [
            RingPosition::from_bits(self.base as u16),
            RingPosition::from_bits((self.base >> 16) as u16),
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
    /// Resolves the areas, with the sizes and alignments of clause 2.7 or 2.8.
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
            // Both must be aligned: a region may start anywhere in its file, so guest and host alignment are independent.
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
