//! Control-plane interface of a device, used by front ends. Nothing here is on the request path.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use guest_memory::{DirtyLog, MemoryTable, RingMemory};
use latency::Labels;
use reactor::{Io, Source, SourceId};
use virtqueue::{QueueConfig, QueueError};

/// Callback on the worker's thread, called once when a queue ends because of its driver or front end. Arguments: kind and description.
pub type OnBroken = Arc<dyn Fn(Breach, &str) + Send + Sync>;

/// Kind of rule violation that ended a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breach {
    /// The driver violated the rules of the ring or of the device type.
    Rules,
    /// The front end made the memory, the dirty log or a descriptor of the queue unusable.
    FrontEnd,
    /// A descriptor of the front end blocked the worker and all its other sources.
    Blocked,
}

/// Refused write to the configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// First byte of the access.
    pub offset: u32,
    /// Length of the access in bytes.
    pub length: usize,
}

impl std::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "configuration space cannot be written at offset {} length {}",
            self.offset, self.length
        )
    }
}

impl std::error::Error for ConfigError {}

/// Parameters of a new queue.
pub struct QueueSetup {
    /// Index in the device.
    pub index: u16,
    /// Negotiated feature bits.
    pub features: u64,
    /// Ring addresses, size and layout.
    pub config: QueueConfig,
    /// Guest memory.
    pub memory: Arc<MemoryTable>,
    /// In-flight region, which outlives this daemon.
    pub inflight: Option<RingMemory>,
    /// Dirty log, during a live migration.
    pub log: Option<LogSetup>,
    /// Kick eventfd: readable when the driver kicks.
    pub kick: Option<OwnedFd>,
    /// Call eventfd: written to interrupt the driver.
    pub call: Option<OwnedFd>,
    /// Error eventfd: written when the queue ends because of the driver.
    pub error: Option<OwnedFd>,
    /// False: no chains are popped.
    pub enabled: bool,
    /// Called when the queue ends because of the driver.
    pub on_broken: OnBroken,
    /// Labels of the statistics. The code that places the queue sets `worker`.
    pub labels: Labels,
}

/// Dirty log of a queue.
#[derive(Debug)]
pub struct LogSetup {
    /// Marked pages.
    pub pages: Arc<DirtyLog>,
    /// Guest-physical address at which writes to the used ring are marked. `None`: they are not marked.
    pub ring: Option<u64>,
    /// Eventfd that is written after pages were marked.
    pub call: Option<OwnedFd>,
}

/// A change to a running queue.
pub enum QueueChange {
    /// Replaces the guest memory. Requests in flight continue to use the old memory.
    Memory(Arc<MemoryTable>),
    /// Replaces the call eventfd.
    Call(Option<OwnedFd>),
    /// Replaces the kick eventfd. The worker must watch the new one.
    Kick(Option<OwnedFd>),
    /// Replaces the error eventfd.
    Error(Option<OwnedFd>),
    /// Enables or disables popping of chains.
    Enabled(bool),
    /// Replaces or removes the dirty log.
    Log(Option<LogSetup>),
}

/// Control-plane access to a queue that a worker owns.
pub trait QueueControl {
    /// Applies a change.
    ///
    /// # Errors
    /// Fails if the ring is outside of the new guest memory. The queue has then ended.
    fn change(&mut self, change: QueueChange) -> Result<(), QueueError>;

    /// Announces a stop after the front end has left. From now on, failed requests of a queue with an in-flight region stay unanswered, and
    /// the next device repeats them.
    fn retain_failed(&mut self);

    /// Returns the position in the ring, in the format of `GET_VRING_BASE`.
    fn base(&self) -> u32;

    /// Returns true if no request is unanswered and no chain waits to be popped.
    fn is_idle(&self) -> bool;
}

/// A queue that was built on its worker.
pub struct BuiltQueue {
    /// The queue as an event source of the worker.
    pub source: Box<dyn Source>,
    /// Returns the control-plane interface of `source`.
    pub control: fn(&mut dyn Source) -> Option<&mut dyn QueueControl>,
}

/// Builds a queue. Runs on the worker that will own it.
pub type QueueMaker = Box<dyn FnOnce(&mut Io, SourceId) -> Result<BuiltQueue, String> + Send>;

/// The part of a device that its queues share; one per export. One front end at a time configures it.
pub trait VirtioDevice: Send + Sync + 'static {
    /// Returns the export's name.
    fn name(&self) -> &str;

    /// Returns the feature bits of the device type, without those of the transport and the rings.
    fn features(&self) -> u64;

    /// Returns the feature bits that the type offers with any disk or option. A driver may have accepted one that the device no longer
    /// offers.
    fn known_features(&self) -> u64 {
        self.features()
    }

    /// Returns the number of queues that a driver may use.
    fn queue_count(&self) -> u16;

    /// Returns the number of queues that a driver with these features may use: more than [`VirtioDevice::queue_count`] if the device had
    /// more when the driver accepted the features.
    fn queue_limit(&self, features: u64) -> u16 {
        let _ = features;
        self.queue_count()
    }

    /// Returns the whole configuration space.
    fn config(&self) -> Vec<u8>;

    /// Handles a driver's write to the configuration space.
    ///
    /// # Errors
    /// Fails if the field is not writable.
    fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), ConfigError>;

    /// Returns true if the type supports packed rings.
    fn packed(&self) -> bool;

    /// Drops all state of the connection. Called when a front end connects or leaves, and when the driver resets the device.
    fn reset(&self);

    /// Called after a reset by the driver, or after it has stopped its rings and disconnected. Not called for a mere disconnection: the
    /// guest may continue on another connection.
    fn forget_driver(&self) {}

    /// Drops driver writes to the configuration space after the driver has left. A reset keeps them: QEMU shows the next driver the old
    /// values without reading them again.
    fn forget_config(&self) {}

    /// Returns true if the driver has disabled the write cache. QEMU does not transfer this in a migration.
    fn is_write_cache_disabled(&self) -> bool {
        false
    }

    /// Returns true if the disk differs from that of the last driver, and the driver cannot be notified.
    fn is_replaced(&self) -> bool {
        false
    }

    /// Records that a driver starts a queue for the current disk. May block.
    fn driver_started(&self) {}

    /// Records that a driver resumes a queue of a replaced disk, and still addresses the old disk. May block.
    fn driver_resumes(&self) {}

    /// Returns true if queue `index` moves data. Other queues run on the first worker of the export or the pool.
    fn carries_data(&self, _index: u16) -> bool {
        true
    }

    /// Returns the function that builds queue `setup.index` on `worker`.
    fn queue(&self, setup: QueueSetup, worker: &reactor::WorkerHandle) -> QueueMaker;

    /// Called when a queue made by [`VirtioDevice::queue`] has stopped. The device forgets its place.
    fn queue_stopped(&self, index: u16);

    /// Waits until locks that end with the last use of the device's disks are released, for a limited time. Called when a queue has stopped
    /// that the front end may start in another daemon. Returns at once while other queues run.
    fn wait_for_release(&self);

    /// Stores the place of queue `index`. The device needs it for task management and events.
    fn queue_placed(&self, index: u16, worker: &reactor::WorkerHandle, source: SourceId);
}
