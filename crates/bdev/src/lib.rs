//! Block devices: the I/O of disks, one file or folder each, behind two traits and independent of transports.
//!
//! ```text
//!   Disk --- Arc<dyn BlockDevice> --- attach() -> Box<dyn IoChannel>    one per worker, !Send, no locks
//!   name     null ram file nbd ...    on the      submit(I/O, buffer, tag)  ->  Done | Pending
//!   serial   faulty delay             worker      complete(ring completion) ->  Finished { tag, buffer, outcome }
//!            capabilities()                       close()                   ->  drains; closed when nothing is in flight
//! ```
//!
//! All workers share a block device. Each attaches its own channel and passes it the completions of the channel's [`uring::Owner`]s. A
//! layer (`delay`, `faulty`) is a block device over another, to any depth. Every I/O passes `admit` first: range, read-only and similar
//! rules are the same everywhere. Tests: in each module, and `tests/` against a model.

#![forbid(unsafe_code)]

mod admit;
mod attach;
mod blocking;
mod blocking_io;
mod bucket;
mod capabilities;
pub mod checked_text;
mod closing;
mod conditions;
mod delay;
mod dirty_bitmap;
mod discard;
mod disk_object;
mod error;
mod faulty;
mod file;
mod image;
mod inbox;
mod iscsi;
mod layer;
mod medium;
mod mirror;
mod nbd;
mod network_medium;
mod null;
mod on_error;
mod point_in_time;
mod ram;
mod range_lock;
mod rbd;
mod remote_state;
mod replacement;
mod retained_memory;
mod scratch;
mod scsi;
mod scsi_generic;
mod shared_state;
mod slots;
mod state;
mod sync;
mod throttle;
mod turn_lock;
mod watched_inbox;

use std::io;
use std::sync::Arc;

pub use ::block::PassedReservations;
use ::block::{Capacity, DiskInfo, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use uring::{Completion, Ring};

pub use attach::{Attach, LockWaits, Wake};
pub use blocking_io::BlockingIo;
pub use capabilities::{
    Capabilities, CopiedUp, ImageDevice, LocalFiles, Lockable, OnTurn, RemoteDevice, Removable,
    Space, Turn, TurnDevice, release_deadline,
};
pub use closing::{flush_before_close, needs_flush_before_close};
pub use conditions::{Condition, Conditions};
pub use delay::{Delay, DelayTime};
pub use dirty_bitmap::{DirtyBitmap, FrozenBitmap, Recorder, RecorderView};
pub use discard::{DiscardMode, with_discard};
pub use disk_object::{Disk, DiskOptions, Shrinking};
pub use error::{OpenError, ResizeError};
pub use faulty::{Fault, FaultAction, FaultPlan, Faulty};
pub use file::{
    CacheMode, Container, File, FileLock, FileOptions, ImageFormat, LockedUse, open_locked,
    sync_folder,
};
#[cfg(feature = "simulated")]
pub use image::stepped;
pub use image::{
    BackingFormat, BackingImage, BackingName, CHAIN_MAX, CheckNamed, Committable, Image,
    ImageOptions, NamedFiles, STACK_BYTES, backing_named, backing_of, backing_path_of,
    data_file_of, identity_of, is_remote, open_remote, open_tables,
};
pub use iscsi::IscsiOptions;
pub use layer::Layer;
pub use librbd::{ClusterConfig, ImageName};
pub use medium::{IdentityRecord, Medium, Stamp};
pub use mirror::{Mirror, MirrorProgress, TARGET_PATIENCE};
pub use nbd::{Nbd, NbdOptions};
pub use null::{Null, NullOptions};
pub use on_error::{ErrorPolicy, OnError};
pub use point_in_time::{PointInTime, PointInTimeError};
pub use ram::{Ram, RamOptions};
pub use range_lock::{Admission, Barrier, Membership, Participant, RangeLock, RangeLocks};
pub use rbd::{Member, Rbd, RbdLock, RbdOptions, SharedRecord};
pub use replacement::BrokenPromise;
pub use retained_memory::{DescriptorStore, set_descriptor_store};
pub use scratch::create_scratch;
pub use scsi::ScsiDisk;
pub use scsi_generic::ScsiGenericOptions;
pub use shared_state::{
    STATE_MAX, STATE_VERSION_LENGTH, SharedState, StateMembership, StateObserver,
};
pub use state::{AttachFailure, DiskEvent, DiskState, StateCell, WaitingIo};
pub use throttle::{Moment, RateLimits, Throttle};
/// Protocols of devices, for configuration and inspection.
pub use {iscsi_initiator, librbd, qcow2};

/// Identifier that the submitter gives to an I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tag(pub u64);

/// Result of the submission of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Submission {
    /// The I/O completed synchronously. The buffer was not taken.
    Done(IoOutcome),
    /// The channel took the buffer and returns it in a [`Finished`] with the same tag.
    Pending,
}

/// Distance of an announced I/O from the next submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefetch {
    /// The next I/O.
    Next,
    /// The I/O at a distance of [`PREFETCH_DISTANCE`].
    Later,
}

/// Prefetch distance in I/Os. Address translation of an I/O's memory takes longest: in a virtual machine longer than an I/O of 4 KiB.
pub const PREFETCH_DISTANCE: usize = 3;

/// The end of an I/O that was pending.
#[derive(Debug)]
pub struct Finished {
    /// Tag given by the submitter.
    pub tag: Tag,
    /// The submitted buffer, with its window unchanged.
    pub buffer: IoBuffer,
    /// Result of the I/O.
    pub outcome: IoOutcome,
}

/// One worker's handle on a disk. Dropped when closed, or with the ring.
pub trait IoChannel {
    /// Starts an I/O. The buffer's window has exactly [`IoRequest::buffer_length`] bytes; if 0, the buffer is held but not accessed.
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission;

    /// Returns true if announcements by [`IoChannel::prefetch`] are useful.
    fn wants_prefetch(&self) -> bool {
        false
    }

    /// Announces an I/O that probably follows soon, for prefetching.
    fn prefetch(&self, io: &IoRequest, soon: Prefetch) {
        let _ = (io, soon);
    }

    /// Points the buffer at the disk's memory instead of copying. The buffer shows later changes too. Returns false if the data must be
    /// read, or may not be.
    #[inline]
    fn borrow(&self, io: &IoRequest, buffer: &mut IoBuffer) -> bool {
        let _ = (io, buffer);
        false
    }

    /// Returns true while a buffer points at the disk's memory after [`IoChannel::borrow`].
    fn is_borrowed(&self) -> bool {
        false
    }

    /// Handles a completion of this handle's owners. Appends finished I/Os; may submit more.
    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>);

    /// Asks for a pending I/O to end soon. Best effort: it ends with [`IoErrorKind::Cancelled`](block::IoErrorKind), with its outcome so
    /// far, or unaffected.
    fn abort(&mut self, ring: &mut Ring, tag: Tag) {
        let _ = (ring, tag);
    }

    /// Begins to close the handle, without pending I/O: ends its other operations on the ring, such as watches. It receives completions
    /// until [`IoChannel::is_closed`].
    fn close(&mut self, ring: &mut Ring) {
        let _ = ring;
    }

    /// Returns true if all completions of its owners were received: they may be reused.
    fn is_closed(&self) -> bool {
        self.in_flight() == 0
    }

    /// Returns the number of pending I/Os. Each of them ends with a [`Finished`]: range locks count on it.
    fn in_flight(&self) -> usize;
}

/// Block device of a disk, shared by all workers. Operations that only some devices have are in [`Capabilities`].
pub trait BlockDevice: Send + Sync {
    /// Returns geometry and abilities. [`Disk::info`] adds the identity.
    fn info(&self) -> DiskInfo;

    /// Returns the current size, which every I/O reads.
    fn capacity(&self) -> &Arc<Capacity>;

    /// Allocates space before [`BlockDevice::capacity`] grows to `bytes`; releases space after it has shrunk, with no change beyond in
    /// flight. See [`Disk::resize`].
    ///
    /// # Errors
    /// The system refuses; the size is unchanged.
    fn set_size(&self, bytes: u64) -> io::Result<()>;

    /// Returns the name in configuration and metrics: `ram`, `file`, ...
    fn kind(&self) -> &'static str;

    /// Returns the device below a layer.
    fn below(&self) -> Option<&dyn BlockDevice> {
        None
    }

    /// Returns the capabilities beyond I/O. They do not change while the device is open.
    fn capabilities(&self) -> Capabilities<'_>;

    /// Attaches a worker. Must not block.
    ///
    /// # Errors
    /// The kernel has no descriptor (or similar) left. Nothing begun on the ring remains.
    fn attach(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>>;
}

impl std::fmt::Debug for dyn BlockDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockDevice")
            .field("kind", &self.kind())
            .field("info", &self.info())
            .finish()
    }
}
