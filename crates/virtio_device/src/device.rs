//! A device as a front end's control plane sees it. Nothing here is on a request's way.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use guest_memory::{MemoryTable, RingMemory};
use latency::Labels;
use reactor::{Io, Source, SourceId};
use virtqueue::{QueueConfig, QueueError};

/// Told once, from the worker's thread, when a queue ends because of its driver or front end: how, and in words.
pub type OnBroken = Arc<dyn Fn(Breach, &str) + Send + Sync>;

/// How a queue was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breach {
    /// Rules of the ring or the device were broken.
    Rules,
    /// The worker was made to wait for a descriptor of the front end's, and everybody else that it serves with it.
    HeldUp,
}

/// A front end's access to the configuration space was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// First byte of the access.
    pub offset: u32,
    /// Bytes of the access.
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

/// All that a queue is made from.
pub struct QueueSetup {
    /// The queue's index in its device.
    pub index: u16,
    /// Features that driver and device agreed on.
    pub features: u64,
    /// Where the ring lies and how it works.
    pub config: QueueConfig,
    /// The client's memory.
    pub memory: Arc<MemoryTable>,
    /// Where what is in flight is kept for the daemon after this one.
    pub inflight: Option<RingMemory>,
    /// Readable when the driver kicks.
    pub kick: Option<OwnedFd>,
    /// Written to interrupt the driver.
    pub call: Option<OwnedFd>,
    /// Written when the queue ends because of the driver.
    pub error: Option<OwnedFd>,
    /// Requests are taken only while this is so.
    pub enabled: bool,
    /// Who is told that the queue ended because of the driver.
    pub on_broken: OnBroken,
    /// Names for statistics; `worker` is filled in by whoever places the queue.
    pub labels: Labels,
}

/// A change to a running queue.
pub enum QueueChange {
    /// The client's memory is another from now on; what is in flight keeps the old.
    Memory(Arc<MemoryTable>),
    /// Another interrupt.
    Call(Option<OwnedFd>),
    /// Another kick; the worker must watch it.
    Kick(Option<OwnedFd>),
    /// Another error notification.
    Error(Option<OwnedFd>),
    /// Take requests, or do not.
    Enabled(bool),
}

/// How the control plane reaches a queue inside of its worker.
pub trait QueueControl {
    /// Applies a change.
    ///
    /// # Errors
    /// When the ring is not in the client's new memory; the queue has then ended.
    fn change(&mut self, change: QueueChange) -> Result<(), QueueError>;

    /// The queue is about to be stopped and its front end is gone: requests that fail from now on are left unanswered where an
    /// in-flight region tells the next device of them, which carries them out again.
    fn leave_failed(&mut self);

    /// Where the ring stands, as `GET_VRING_BASE` answers it.
    fn base(&self) -> u32;
}

/// A queue, made on its worker.
pub struct BuiltQueue {
    /// What the worker owns.
    pub source: Box<dyn Source>,
    /// The same object, as the control plane sees it.
    pub control: fn(&mut dyn Source) -> Option<&mut dyn QueueControl>,
}

/// Makes a queue; runs on the worker that will own it.
pub type QueueMaker = Box<dyn FnOnce(&mut Io, SourceId) -> Result<BuiltQueue, String> + Send>;

/// A device: one export's shared half. One front end at a time configures it.
pub trait VirtioDevice: Send + Sync + 'static {
    /// The export's name.
    fn name(&self) -> &str;

    /// The device type's own feature bits; those of the transport and the rings are not its business.
    fn features(&self) -> u64;

    /// Feature bits that the type offers with some disk or option. A driver may have accepted them before the device lost them.
    fn known_features(&self) -> u64 {
        self.features()
    }

    /// Queues that a driver may use.
    fn queue_count(&self) -> u16;

    /// Queues that a driver with these features may use: more than [`VirtioDevice::queue_count`] if it accepted the features
    /// when the device had more.
    fn queue_limit(&self, features: u64) -> u16 {
        let _ = features;
        self.queue_count()
    }

    /// The whole configuration space.
    fn config(&self) -> Vec<u8>;

    /// The driver writes to the configuration space.
    ///
    /// # Errors
    /// When the field is not writable.
    fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), ConfigError>;

    /// Does the type work with packed rings?
    fn packed(&self) -> bool;

    /// A front end has connected or left, or the driver has reset the device: what belongs to a connection ends.
    fn reset(&self);

    /// The driver has reset the device, or has stopped its rings and left. After the mere end of a connection it has not, for the
    /// guest may go on with another.
    fn forget_driver(&self) {}

    /// It has left: what was written to the configuration space does not hold for the next driver. After a reset it does: QEMU
    /// shows that driver what the one before it wrote, and does not ask.
    fn forget_config(&self) {}

    /// Is the disk another one than that of the last driver, which has no way to hear of it?
    fn is_replaced(&self) -> bool {
        false
    }

    /// A driver starts a queue and knows the disk. May block.
    fn driver_started(&self) {}

    /// A driver resumes a queue of a replaced disk: it still means the disk before. May block.
    fn driver_resumes(&self) {}

    /// Does queue `index` move data? One that does not is placed where it disturbs nobody.
    fn carries_data(&self, _index: u16) -> bool {
        true
    }

    /// What makes queue `setup.index`, on the worker `worker`.
    fn queue(&self, setup: QueueSetup, worker: &reactor::WorkerHandle) -> QueueMaker;

    /// A queue that [`VirtioDevice::queue`] made has stopped; the device forgets its place.
    fn queue_stopped(&self, index: u16);

    /// Where queue `index` runs now: the device may need to reach it (task management, events).
    fn queue_placed(&self, index: u16, worker: &reactor::WorkerHandle, source: SourceId);
}
