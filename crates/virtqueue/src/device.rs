//! A queue as a device sees it, split or packed.
//!
//! One worker owns it. An iteration: `pop` until it returns false or the batch is full; `push` each answer;
//! `publish` once, and signal the driver if it says so. Before sleeping: `enable_notifications`.

use guest_memory::{GuestView, MemoryTable, RingMemory};

use crate::config::Areas;
use crate::packed::PackedQueue;
use crate::split::SplitQueue;
use crate::{Chain, PopError, QueueConfig, QueueError};

/// A ring that goes on elsewhere than the front end said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// Where the front end had it start.
    pub base: u32,
    /// The used index, or the used place of a packed ring.
    pub used: u32,
    /// Requests that are taken again.
    pub again: u16,
    /// Unanswered requests of which nothing is left in the ring.
    pub lost: u16,
}

/// The device side of a virtqueue.
pub struct DeviceQueue {
    config: QueueConfig,
    ring: Ring,
}

#[expect(
    clippy::large_enum_variant,
    reason = "one of them per queue, and what is kept of a split ring is used with each request"
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
    /// A queue in a client's memory. A split queue goes on at the used index that it finds in the ring.
    ///
    /// # Errors
    /// When size, alignment or base are not allowed, or an area is not in one region of the memory.
    pub fn new(config: QueueConfig, table: &MemoryTable) -> Result<DeviceQueue, QueueError> {
        let ring = if config.packed {
            Ring::Packed(PackedQueue::new(&config, table)?)
        } else {
            Ring::Split(SplitQueue::new(&config, table)?)
        };
        Ok(DeviceQueue { config, ring })
    }

    /// Keeps track of what is in flight in `part`, which outlives this process, and takes again what an earlier device
    /// left unanswered there. Before the first pop.
    ///
    /// # Errors
    /// When `part` cannot be used.
    pub fn track(&mut self, part: RingMemory) -> Result<(), QueueError> {
        each!(&mut self.ring, ring => ring.track(part))
    }

    /// For a ring without an in-flight region, before the first pop: where its base is not the used index, goes on with what the
    /// ring itself says is unanswered, and says so.
    ///
    /// The front end does not know then what is unanswered: Cloud Hypervisor gives the available index when a back end has been
    /// restarted, others 0. DPDK and SPDK go on at the used index too; QEMU's library does so for devices that answer in order.
    pub fn resume(&mut self) -> Option<Resumed> {
        each!(&mut self.ring, ring => ring.resume())
    }

    /// Finds the ring again in a changed memory table; the queue's state stays.
    ///
    /// # Errors
    /// When an area is gone; the queue then still uses the old memory.
    pub fn set_memory(&mut self, table: &MemoryTable) -> Result<(), QueueError> {
        let areas = Areas::resolve(&self.config, table)?;
        each!(&mut self.ring, ring => ring.set_areas(areas));
        Ok(())
    }

    /// What the queue was made with; `base` is where it started.
    pub fn config(&self) -> &QueueConfig {
        &self.config
    }

    /// Entries in the queue: ids are below it.
    pub fn size(&self) -> u16 {
        self.config.size
    }

    /// Has the driver made a mistake that ended the queue?
    pub fn is_broken(&self) -> bool {
        each!(&self.ring, ring => ring.is_broken())
    }

    /// Has the client truncated the file that the ring lies in?
    pub fn is_poisoned(&self) -> bool {
        each!(&self.ring, ring => ring.is_poisoned())
    }

    /// Do chains wait? At least 1 when there are any; a packed ring does not count further. Cheap, for polling.
    #[inline]
    pub fn available(&self) -> u16 {
        each!(&self.ring, ring => ring.available())
    }

    /// How many chains wait, as far as is known or, where none are known, as the driver says: a packed ring counts them.
    #[inline]
    pub fn waiting(&self) -> u16 {
        match &self.ring {
            Ring::Split(ring) => ring.available(),
            Ring::Packed(ring) => ring.waiting(),
        }
    }

    /// Chains wait: fetches what is read of the first one, where that of the last one lay. A guess that is wrong changes nothing.
    #[inline(always)]
    pub fn guess(&self, view: &GuestView) {
        if let Ring::Split(ring) = &self.ring {
            ring.guess(view);
        }
    }

    /// Takes the next chain, if there is one. `chain` is overwritten; its heap space is used again.
    ///
    /// # Errors
    /// A mistake of the ring's, once: the queue is broken then, and later calls give `Ok(false)`. Or a request that cannot be
    /// served: the queue goes on behind it.
    #[inline(always)]
    pub fn pop(&mut self, view: &GuestView, chain: &mut Chain) -> Result<bool, PopError> {
        match &mut self.ring {
            Ring::Split(ring) => ring.pop(view, chain),
            Ring::Packed(ring) => ring.pop(view, chain),
        }
    }

    /// Gives a chain back, with the number of bytes written to it. The driver sees it after [`publish`](Self::publish).
    ///
    /// `id` and `descriptors` are those of the popped [`Chain`], each used once, in any order.
    #[inline(always)]
    pub fn push(&mut self, id: u16, descriptors: u16, written: u32) {
        match &mut self.ring {
            Ring::Split(ring) => ring.push(id, written),
            Ring::Packed(ring) => ring.push(id, descriptors, written),
        }
    }

    /// Shows the driver all chains pushed since the last time; says whether it wants a notification.
    #[inline]
    pub fn publish(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.publish())
    }

    /// Shows the driver the same without waiting until it can be asked whether it wants a notification: [`ask`](Self::ask) has
    /// to be called soon, and before more is published where [`must_ask`](Self::must_ask) says so.
    #[inline]
    pub fn publish_unasked(&mut self) {
        each!(&mut self.ring, ring => ring.publish_unasked());
    }

    /// Has the driver been shown chains without having been asked?
    #[inline(always)]
    pub fn is_unasked(&self) -> bool {
        each!(&self.ring, ring => ring.is_unasked())
    }

    /// Has it been shown so many that it has to be asked before it is shown more?
    #[inline(always)]
    pub fn must_ask(&self) -> bool {
        each!(&self.ring, ring => ring.must_ask())
    }

    /// Does the driver want a notification of what it was shown unasked?
    #[inline]
    pub fn ask(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.ask())
    }

    /// Asks the driver to notify when it makes the next chain available; says whether it has done so meanwhile, and
    /// then the caller goes on popping instead of sleeping.
    pub fn enable_notifications(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.enable_notifications())
    }

    /// Tells the driver that notifications are not needed. It may notify all the same.
    pub fn disable_notifications(&mut self) {
        each!(&mut self.ring, ring => ring.disable_notifications());
    }

    /// Where a queue that is made anew has to go on, as in vhost-user's `GET_VRING_BASE`.
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
