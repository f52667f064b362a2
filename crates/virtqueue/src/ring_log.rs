//! Marks the device's writes to a ring in a dirty log.
//!
//! Each publication marks all memory of the ring that a device writes, which is at most five pages. An exact range would save few pages
//! and depend on every place that writes.

use std::sync::Arc;

use guest_memory::DirtyLog;

use crate::QueueConfig;
use crate::layout;

/// Dirty log of a ring.
pub(crate) struct RingLog {
    pages: Arc<DirtyLog>,
    /// Guest-physical addresses and lengths.
    areas: Vec<(u64, u64)>,
}

impl RingLog {
    /// Creates the log of a ring. `address` is `log_guest_addr` of SET_VRING_ADDR: the used ring, or the device event suppression area
    /// of a packed ring. QEMU sends no log address for the descriptors of a packed ring.
    pub fn new(config: &QueueConfig, pages: Arc<DirtyLog>, address: u64) -> RingLog {
        let areas = match config.packed {
            false => vec![(address, layout::used_ring_size(config.size) as u64)],
            true => {
                let descriptors = layout::descriptor_area_size(config.size) as u64;
                let events = layout::EVENT_SUPPRESSION_SIZE as u64;
                vec![
                    (config.descriptor_area, descriptors),
                    (config.device_area, events),
                    (address, events),
                ]
            }
        };
        RingLog { pages, areas }
    }

    /// Marks the ring. Must be called after the writes.
    pub fn mark(&self) {
        for (address, length) in &self.areas {
            self.pages.mark(*address, *length);
        }
    }
}
