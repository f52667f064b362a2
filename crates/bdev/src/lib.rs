//! Block devices: what does a disk's I/O, one file each, behind two traits. They do not know who asks.
//!
//! ```text
//!   Disk --- Arc<dyn BlockDevice> --- attach() -> Box<dyn IoChannel>    one per worker, !Send, no locks
//!   name     null ram file rbd        on the      submit(I/O, buffer, tag)  ->  Done | Pending
//!   serial   faulty delay             worker      complete(ring completion) ->  Finished { tag, buffer, outcome }
//!                                                 close()                   ->  drains; closed when nothing is in flight
//! ```
//!
//! A block device is shared by all workers; each worker attaches a channel of its own and gives it the completions of the
//! channel's [`uring::Owner`]s. A layer (`delay`, `faulty`) is a block device that stands on another, to any depth. Every I/O
//! passes [`admit`] first, so that range, read-only and the like mean the same everywhere. Tests: in each module, and `tests/`
//! against a model.

#![forbid(unsafe_code)]

mod admit;
mod attach;
mod blocking;
mod blocking_io;
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
mod kept_memory;
mod layer;
mod medium;
mod mirror;
mod network_medium;
mod null;
mod on_error;
mod ram;
mod range_lock;
mod rbd;
mod replacement;
mod scsi;
mod scsi_generic;
mod shared_state;
mod state;
mod throttle;

use std::io;
use std::sync::Arc;

pub use ::block::PassedReservations;
use ::block::{Capacity, DiskInfo, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use uring::{Completion, Ring};

pub use attach::Attach;
pub use blocking_io::BlockingIo;
pub use conditions::{Condition, Conditions};
pub use delay::{Delay, DelayTime};
pub use dirty_bitmap::{DirtyBitmap, Recorder, RecorderView};
pub use discard::DiscardMode;
pub use disk_object::{Disk, DiskOptions, Shrinking};
pub use error::{OpenError, ResizeError};
pub use faulty::{Fault, FaultAction, FaultPlan, Faulty};
pub use file::{CacheMode, Container, File, FileOptions, ImageFormat, sync_folder};
#[cfg(feature = "simulated")]
pub use image::stepped;
pub use image::{
    BackingFormat, BackingImage, BackingName, CHAIN_MAX, Committable, Image, ImageOptions,
    NamedFiles, STACK_BYTES, backing_named, backing_of, backing_path_of, data_file_of, is_remote,
    open_remote, open_tables,
};
pub use iscsi::IscsiOptions;
pub use kept_memory::{DescriptorStore, set_descriptor_store};
pub use layer::Layer;
pub use librbd::{ClusterConfig, ImageName};
pub use medium::{IdentityRecord, Medium, Stamp};
pub use mirror::{Mirror, MirrorProgress, TARGET_PATIENCE};
pub use null::{Null, NullOptions};
pub use on_error::{ErrorPolicy, OnError};
pub use ram::{Ram, RamOptions};
pub use range_lock::{Admission, Barrier, Membership, Participant, RangeLock, RangeLocks};
pub use rbd::{Member, Rbd, RbdLock, RbdOptions, SharedRecord};
pub use replacement::BrokenPromise;
pub use scsi::ScsiDisk;
pub use scsi_generic::ScsiGenericOptions;
pub use shared_state::{
    STATE_MAX, STATE_VERSION_LENGTH, SharedState, StateMembership, StateObserver,
};
pub use state::{DiskState, StateCell, WaitingIo};
pub use throttle::{Moment, RateLimits, Throttle};
/// Protocols of devices, for whoever describes them or looks at what they serve.
pub use {iscsi_initiator, librbd, qcow2};

/// What the submitter calls its I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tag(pub u64);

/// What became of an I/O when it was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Submission {
    /// It is over. The buffer was left where it was.
    Done(IoOutcome),
    /// The backend has taken the buffer, and gives it back in a [`Finished`] with the same tag.
    Pending,
}

/// How soon an I/O comes that a backend is told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefetch {
    /// After the one that is about to be submitted.
    Next,
    /// [`PREFETCH_DISTANCE`] after the one that is about to be submitted.
    Later,
}

/// How many I/Os before it is submitted a backend is told of one for the first time. What takes longest to find out is where
/// its memory is: longer than an I/O of 4 KiB takes, in a virtual machine.
pub const PREFETCH_DISTANCE: usize = 3;

/// An I/O that was pending and is over.
#[derive(Debug)]
pub struct Finished {
    /// What the submitter called it.
    pub tag: Tag,
    /// The buffer that was submitted, with its window as it was.
    pub buffer: IoBuffer,
    /// How it ended.
    pub outcome: IoOutcome,
}

/// One worker's handle on a disk. Dropped once it has closed, or with the ring.
pub trait IoChannel {
    /// Starts an I/O. The buffer's window has just [`IoRequest::buffer_length`] bytes; where that is 0 the buffer is not
    /// touched, only kept.
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission;

    /// Is it worth telling what comes next, by [`IoChannel::prefetch`]?
    fn wants_prefetch(&self) -> bool {
        false
    }

    /// This I/O comes soon, as a rule: time to fetch what it begins with.
    fn prefetch(&self, io: &IoRequest, soon: Prefetch) {
        let _ = (io, soon);
    }

    /// Where a disk's content lies in memory: points the buffer at what a read would bring, and nothing needs to be
    /// copied. Whoever looks sees later changes too. False: it has to be read, or may not be.
    #[inline]
    fn borrow(&self, io: &IoRequest, buffer: &mut IoBuffer) -> bool {
        let _ = (io, buffer);
        false
    }

    /// Does a buffer still lie in the disk's memory, to which [`IoChannel::borrow`] has pointed it?
    fn is_borrowed(&self) -> bool {
        false
    }

    /// Takes a completion of one of this handle's owners; appends what is over, and may submit what remains to be done.
    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>);

    /// Asks for an I/O that is pending to end soon. Best effort: it is finished as any other, with
    /// [`IoErrorKind::Cancelled`](block::IoErrorKind) or with the outcome that it had by then, or goes on as if nothing was said.
    fn abort(&mut self, ring: &mut Ring, tag: Tag) {
        let _ = (ring, tag);
    }

    /// Begins to close the handle, once no I/O is pending: ends what it has running on the ring besides I/O, such as watches.
    /// Completions are given to it until [`IoChannel::is_closed`].
    fn close(&mut self, ring: &mut Ring) {
        let _ = ring;
    }

    /// Has the last completion of each of its owners been read, so that they may be given to others?
    fn is_closed(&self) -> bool {
        self.in_flight() == 0
    }

    /// I/Os that are pending.
    fn in_flight(&self) -> usize;
}

/// Progress of [`BlockDevice::copy_up`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopiedUp {
    /// Offset to continue at. `u64::MAX`: the device below has no data beyond it.
    pub end: u64,
    /// Bytes that were copied.
    pub bytes: u64,
}

/// A disk's block device. Shared by all workers.
pub trait BlockDevice: Send + Sync {
    /// Shape and abilities; who the disk is, is not known here: [`Disk::info`] fills it in.
    fn info(&self) -> DiskInfo;

    /// How large it is now: read with every I/O.
    fn capacity(&self) -> &Arc<Capacity>;

    /// Makes room for a disk that grows to `bytes`, before [`BlockDevice::capacity`] says so; or gives back what is beyond
    /// `bytes` after it has said so, when no change beyond is in flight. See [`Disk::resize`].
    ///
    /// # Errors
    /// What the system says; no changes then.
    fn set_size(&self, bytes: u64) -> io::Result<()>;

    /// Has `changed` called after the disk's size was changed by others, which [`BlockDevice::capacity`] says by then, and after a device
    /// that was unavailable is ready again. On any thread but a worker's; must be quick.
    fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
        drop(changed);
    }

    /// How large what it lies in is now, for a block device that has to be asked whether others have changed that. May block.
    ///
    /// # Errors
    /// What the system says.
    fn found_size(&self) -> io::Result<Option<u64>> {
        Ok(None)
    }

    /// Checks that no other program has truncated, removed or replaced its files since they were opened. May block.
    ///
    /// # Errors
    /// What has changed, with the path and the size of the file; or the system's.
    fn check_file(&self) -> io::Result<()> {
        Ok(())
    }

    /// Removes what was made for it when it was opened: there is to be no such disk after all, and it was never used.
    fn remove_if_created(&self) {}

    /// The disk was removed: what was kept for when it is opened again is not needed. True: nobody sees its content any more.
    fn forget(&self) -> bool {
        self.medium().is_none()
    }

    /// It becomes what another device stands on: nobody writes to it any more, and others may read what it lies in. No write is in flight.
    ///
    /// # Errors
    /// What the system says. It is still only read then, but others are kept out as before.
    fn give_up_writing(&self) -> io::Result<()> {
        Ok(())
    }

    /// Copies data of the device below into this one, for a device that stores only what differs from that. Passes over own data and
    /// holes from `offset` on, and then copies about `length` bytes. The work of one call is bounded. May block.
    ///
    /// # Errors
    /// What the system says; a part may have been copied by then.
    fn copy_up(&self, offset: u64, length: u64) -> io::Result<CopiedUp> {
        let _ = (offset, length);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Needs the device below it no more when it is opened again: all of it is its own.
    ///
    /// # Errors
    /// What the system says; it needs it as before then.
    fn leave_backing(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Keeps others out no more: this process is about to open what it lies in another time. Nothing is written by it from then on, unless
    /// it takes its locks again.
    ///
    /// # Errors
    /// What the system says.
    fn release_locks(&self) -> io::Result<()> {
        Ok(())
    }

    /// Keeps others out again, as before [`BlockDevice::release_locks`].
    ///
    /// # Errors
    /// What the system says, or that somebody else has it by now.
    fn take_locks(&self) -> io::Result<()> {
        Ok(())
    }

    /// Opens what it is anew, over a device below that can be written: what it has itself can go there. No I/O is in flight, and none is
    /// given to this one any more, unless that fails.
    ///
    /// # Errors
    /// Why not: it is as before then.
    fn reopen_to_commit(&self) -> Result<Committable, OpenError> {
        Err(OpenError::File {
            path: std::path::PathBuf::new(),
            what: "it is no image that stands on another".to_owned(),
        })
    }

    /// What of a range it has itself, in pieces from the first byte on: the end of each, and whether it is its own.
    ///
    /// # Errors
    /// What the system says.
    fn own_pieces(&self, offset: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        Ok(vec![(offset + length, true)])
    }

    /// What its content lies in, which its identity is kept with; `None`: content and identity end with the process.
    fn medium(&self) -> Option<&dyn Medium> {
        None
    }

    /// Whether it can be reached, for a device that comes back by itself.
    fn state(&self) -> DiskState {
        DiskState::Ready
    }

    /// Its name in configuration and metrics: `ram`, `file`, ...
    fn kind(&self) -> &'static str;

    /// The device that it stands on, if it is a layer.
    fn below(&self) -> Option<&dyn BlockDevice> {
        None
    }

    /// State that it keeps for all daemons that serve its content; a layer does not pass on what the device below it has.
    fn shared_state(&self) -> Option<&dyn SharedState> {
        None
    }

    /// Attaches a worker, which gets a handle of its own. Must not block.
    ///
    /// # Errors
    /// When the kernel has no descriptor (or the like) left for it. Nothing that was begun on the ring is left then.
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
