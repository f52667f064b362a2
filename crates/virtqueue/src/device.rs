//! The device side of a queue, split or packed.
//!
//! Owned by one worker. Each iteration calls `pop` until it returns false or the batch is full, `push` for each answer, and `publish` once,
//! and interrupts the driver if `publish` returns true. Before sleeping it calls `enable_notifications`.

use std::sync::Arc;

use guest_memory::{DirtyLog, GuestView, MemoryTable, RingMemory};

use crate::config::Areas;
use crate::packed::PackedQueue;
use crate::ring_log::RingLog;
use crate::split::SplitQueue;
use crate::{Chain, PopError, QueueConfig, QueueError};

/// A ring that resumes at another position than the front end's base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// Base from the front end.
    pub base: u32,
    /// Used index, or used position of a packed ring.
    pub used: u32,
    /// Number of requests that will be repeated.
    pub repeated: u16,
    /// Number of unanswered requests that were overwritten in the ring.
    pub lost: u16,
}

/// The device side of a virtqueue.
pub struct DeviceQueue {
    config: QueueConfig,
    ring: Ring,
    log: Option<Box<RingLog>>,
}

#[expect(
    clippy::large_enum_variant,
    reason = "one per queue, and the split ring's state is used by each request"
)]
enum Ring {
    Split(SplitQueue),
    Packed(PackedQueue),
}

macro_rules! each {
    ($queue:expr, $ring:ident => $call:expr) => {
        match $queue {
            Ring::Split($ring) => $call,
            Ring::Packed($ring) => $call,
        }
    };
}

impl DeviceQueue {
    /// Creates a queue in guest memory. A split queue continues at the used index in the ring.
    ///
    /// # Errors
    /// Fails if size, alignment or base is invalid, or if an area is not within one memory region.
    pub fn new(config: QueueConfig, table: &MemoryTable) -> Result<DeviceQueue, QueueError> {
        let ring = if config.packed {
            Ring::Packed(PackedQueue::new(&config, table)?)
        } else {
            Ring::Split(SplitQueue::new(&config, table)?)
        };
        Ok(DeviceQueue {
            config,
            ring,
            log: None,
        })
    }

    /// Records requests in flight in `part`, which outlives this process, and repeats those that an earlier device left unanswered there.
    /// Must be called before the first pop.
    ///
    /// # Errors
    /// Fails if `part` cannot be used.
    pub fn track(&mut self, part: RingMemory) -> Result<(), QueueError> {
        each!(&mut self.ring, ring => ring.track(part))
    }

    /// Resumes a ring without an in-flight region. If the base is not the used index, continues with the requests that are unanswered
    /// according to the ring, and returns positions and counts. Must be called before the first pop.
    ///
    /// Such a front end cannot identify the unanswered requests: after a restart of the back end, Cloud Hypervisor sends the available
    /// index, others send 0. DPDK and SPDK also continue at the used index; QEMU's library does so for devices that answer in order.
    pub fn resume(&mut self) -> Option<Resumed> {
        each!(&mut self.ring, ring => ring.resume())
    }

    /// Resolves the ring in a changed memory table. The queue's state is unchanged.
    ///
    /// # Errors
    /// Fails if an area is missing; the queue then still uses the old memory.
    pub fn set_memory(&mut self, table: &MemoryTable) -> Result<(), QueueError> {
        let areas = Areas::resolve(&self.config, table)?;
        each!(&mut self.ring, ring => ring.set_areas(areas));
        Ok(())
    }

    /// Sets the dirty log of writes to the ring, with the address at which they are marked (`log_guest_addr`). Marks the ring once,
    /// because the device may have written to it since the front end began to log.
    pub fn set_log(&mut self, log: Option<(Arc<DirtyLog>, u64)>) {
        self.log = log.map(|(pages, address)| Box::new(RingLog::new(&self.config, pages, address)));
        self.mark_ring();
    }

    /// Marks the ring after a write, while a log is set.
    #[inline(always)]
    fn mark_ring(&self) {
        if let Some(log) = &self.log {
            log.mark();
        }
    }

    /// Returns the parameters of the queue; `base` is its start position.
    pub fn config(&self) -> &QueueConfig {
        &self.config
    }

    /// Returns the number of entries. IDs are smaller.
    pub fn size(&self) -> u16 {
        self.config.size
    }

    /// Returns true if a driver error has ended the queue.
    pub fn is_broken(&self) -> bool {
        each!(&self.ring, ring => ring.is_broken())
    }

    /// Returns true if the client has truncated the file of the ring.
    pub fn is_poisoned(&self) -> bool {
        each!(&self.ring, ring => ring.is_poisoned())
    }

    /// Returns a nonzero number if chains wait. Packed rings return at most 1. Cheap, for polling.
    #[inline]
    pub fn available(&self) -> u16 {
        each!(&self.ring, ring => ring.available())
    }

    /// Returns the number of waiting chains. A split ring returns the known ones, or if there are none, the driver's index; a packed ring
    /// counts them.
    #[inline]
    pub fn waiting(&self) -> u16 {
        match &self.ring {
            Ring::Split(ring) => ring.available(),
            Ring::Packed(ring) => ring.waiting(),
        }
    }

    /// Prefetches the presumed memory of the first waiting chain, from the last chain's position. A wrong guess has no effect.
    #[inline(always)]
    pub fn prefetch_next(&self, view: &GuestView) {
        if let Ring::Split(ring) = &self.ring {
            ring.prefetch_next(view);
        }
    }

    /// Pops the next chain, if there is one. Overwrites `chain` and reuses its heap allocation.
    ///
    /// # Errors
    /// An error of the ring, reported once: the queue is then broken, and later calls return `Ok(false)`. Or a request that cannot be
    /// served; the queue continues after it.
    #[inline(always)]
    pub fn pop(&mut self, view: &GuestView, chain: &mut Chain) -> Result<bool, PopError> {
        match &mut self.ring {
            Ring::Split(ring) => ring.pop(view, chain),
            Ring::Packed(ring) => ring.pop(view, chain),
        }
    }

    /// Returns a chain, with the number of bytes written to it. The driver sees it after [`publish`](Self::publish).
    ///
    /// `id` and `descriptors` are those of the popped [`Chain`]. Each chain is pushed once, in any order.
    #[inline(always)]
    pub fn push(&mut self, id: u16, descriptors: u16, written: u32) {
        match &mut self.ring {
            Ring::Split(ring) => ring.push(id, written),
            Ring::Packed(ring) => ring.push(id, descriptors, written),
        }
    }

    /// Makes all pushed chains visible to the driver. Returns true if it wants a notification.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let wanted = each!(&mut self.ring, ring => ring.publish());
        self.mark_ring();
        wanted
    }

    /// Like `publish`, without the barrier and check of the driver's event suppression. The caller must call
    /// [`check_suppression`](Self::check_suppression) soon, and before the next publication if
    /// [`must_check_suppression`](Self::must_check_suppression) returns true.
    #[inline]
    pub fn publish_unchecked(&mut self) {
        each!(&mut self.ring, ring => ring.publish_unchecked());
        self.mark_ring();
    }

    /// Returns true if chains were published without a check.
    #[inline(always)]
    pub fn is_unchecked(&self) -> bool {
        each!(&self.ring, ring => ring.is_unchecked())
    }

    /// Returns true if a check must precede the next publication.
    #[inline(always)]
    pub fn must_check_suppression(&self) -> bool {
        each!(&self.ring, ring => ring.must_check_suppression())
    }

    /// Returns true if the driver wants a notification for the chains published without a check.
    #[inline]
    pub fn check_suppression(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.check_suppression())
    }

    /// Enables the driver's notifications. Returns true if a chain has become available meanwhile; the caller must then pop instead of
    /// sleep.
    pub fn enable_notifications(&mut self) -> bool {
        let available = each!(&mut self.ring, ring => ring.enable_notifications());
        self.mark_ring();
        available
    }

    /// Disables the driver's notifications. The driver may still send some.
    pub fn disable_notifications(&mut self) {
        each!(&mut self.ring, ring => ring.disable_notifications());
        self.mark_ring();
    }

    /// Returns the start position for a successor of this queue, as in vhost-user's `GET_VRING_BASE`.
    pub fn base(&self) -> u32 {
        each!(&self.ring, ring => ring.base())
    }
}

impl std::fmt::Debug for DeviceQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceQueue")
            .field("config", &self.config)
            .field("base", &self.base())
            .field("broken", &self.is_broken())
            .finish_non_exhaustive()
    }
}
