//! Block devices: the I/O of disks, one file or folder per device, behind two traits and independent of the transports.
//!
//! ```text
//!   Disk --- Arc<dyn BlockDevice> --- attach() -> Box<dyn IoChannel>    one per worker, !Send, no locks
//!   name     null ram file rbd        on the      submit(I/O, buffer, tag)  ->  Done | Pending
//!   serial   faulty delay             worker      complete(ring completion) ->  Finished { tag, buffer, outcome }
//!                                                 close()                   ->  drains; closed when nothing is in flight
//! ```
//!
//! A block device is shared by all workers. Each worker attaches its own channel and passes it the completions of the channel's
//! [`uring::Owner`]s. A layer (`delay`, `faulty`) is a block device over another one, to any depth. Every I/O passes [`admit`] first, so
//! that ranges, read-only and similar rules are the same for all devices. Tests: in each module, and `tests/` against a model.

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
    /// The backend has taken the buffer, and returns it in a [`Finished`] with the same tag.
    Pending,
}

/// Position of an announced I/O after the I/O that is about to be submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefetch {
    /// The next I/O.
    Next,
    /// The I/O at a distance of [`PREFETCH_DISTANCE`].
    Later,
}

/// Prefetch distance in I/Os. Most of the delay is the address translation of an I/O's memory: in a virtual machine it takes longer than an
/// I/O of 4 KiB.
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

/// One worker's handle on a disk. Dropped after it has closed, or with the ring.
pub trait IoChannel {
    /// Starts an I/O. The buffer's window has exactly [`IoRequest::buffer_length`] bytes. If that is 0, the buffer is not accessed, only
    /// held.
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

    /// Announces an I/O that probably comes soon, so that the first memory it needs can be fetched.
    fn prefetch(&self, io: &IoRequest, soon: Prefetch) {
        let _ = (io, soon);
    }

    /// Points the buffer at the disk's memory that a read would copy, which saves the copy. The buffer shows later changes too. Returns
    /// false if the data must be read, or may not be read.
    #[inline]
    fn borrow(&self, io: &IoRequest, buffer: &mut IoBuffer) -> bool {
        let _ = (io, buffer);
        false
    }

    /// Returns true while a buffer still points at the disk's memory because of [`IoChannel::borrow`].
    fn is_borrowed(&self) -> bool {
        false
    }

    /// Handles a completion of one of this handle's owners. Appends finished I/Os, and may submit further steps.
    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>);

    /// Asks for a pending I/O to end soon. Best effort: the I/O finishes with [`IoErrorKind::Cancelled`](block::IoErrorKind), or with the
    /// outcome that it had by then, or as if it had not been aborted.
    fn abort(&mut self, ring: &mut Ring, tag: Tag) {
        let _ = (ring, tag);
    }

    /// Begins to close the handle, once no I/O is pending: ends its other operations on the ring, such as watches. The handle receives
    /// completions until [`IoChannel::is_closed`].
    fn close(&mut self, ring: &mut Ring) {
        let _ = ring;
    }

    /// Returns true if the last completion of each of its owners was received, so that the owners may be reused.
    fn is_closed(&self) -> bool {
        self.in_flight() == 0
    }

    /// Returns the number of pending I/Os.
    fn in_flight(&self) -> usize;
}

/// Progress of [`BlockDevice::copy_up`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopiedUp {
    /// Offset at which to continue. `u64::MAX`: the device below has no data beyond it.
    pub end: u64,
    /// Number of bytes copied.
    pub bytes: u64,
}

/// Block device of a disk, shared by all workers.
pub trait BlockDevice: Send + Sync {
    /// Returns geometry and abilities. The identity is not included: [`Disk::info`] adds it.
    fn info(&self) -> DiskInfo;

    /// Returns the current size, which every I/O reads.
    fn capacity(&self) -> &Arc<Capacity>;

    /// Allocates space before [`BlockDevice::capacity`] grows to `bytes`. Releases space beyond `bytes` after the capacity has shrunk, when
    /// no change beyond is in flight. See [`Disk::resize`].
    ///
    /// # Errors
    /// The system refuses; the size is unchanged.
    fn set_size(&self, bytes: u64) -> io::Result<()>;

    /// Registers `changed`, which is called after others have changed the disk's size and [`BlockDevice::capacity`] was updated, and after
    /// an unavailable device is ready again. It is called on any thread except a worker's, and must be quick.
    fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
        drop(changed);
    }

    /// Returns the present size of the underlying object in bytes, for a device that must be queried for changes by others. May block.
    ///
    /// # Errors
    /// The system cannot report the size.
    fn found_size(&self) -> io::Result<Option<u64>> {
        Ok(None)
    }

    /// Checks that no other program has truncated, removed or replaced its files since they were opened. May block.
    ///
    /// # Errors
    /// The change, with the path and the size of the file; or the error of the system.
    fn check_file(&self) -> io::Result<()> {
        Ok(())
    }

    /// Removes files that were created when the device was opened. Called if the disk is not created after all; the device was never used.
    fn remove_if_created(&self) {}

    /// Releases resources that exist for reopening the disk, after the disk was removed. Returns true if its content is gone for all users.
    fn forget(&self) -> bool {
        self.medium().is_none()
    }

    /// Converts the device to a read-only backing device: no more writes, and other processes may read the underlying object. No write is
    /// in flight.
    ///
    /// # Errors
    /// The system refuses. The device is then read-only, but other processes stay locked out.
    fn give_up_writing(&self) -> io::Result<()> {
        Ok(())
    }

    /// Copies data of the device below into this one, for a device that stores only differences. Skips own data and holes from `offset` on,
    /// and then copies about `length` bytes. One call does a bounded amount of work. May block.
    ///
    /// # Errors
    /// The system fails; a part may have been copied by then.
    fn copy_up(&self, offset: u64, length: u64) -> io::Result<CopiedUp> {
        let _ = (offset, length);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Removes the reference to the device below, which is not needed when this device is opened again. This device must store all data
    /// itself.
    ///
    /// # Errors
    /// The system fails; the reference remains.
    fn leave_backing(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Releases the locks against other processes, because this process is about to open the underlying object again. This device writes
    /// nothing until it takes its locks again.
    ///
    /// # Errors
    /// The system refuses.
    fn release_locks(&self) -> io::Result<()> {
        Ok(())
    }

    /// Takes the locks that [`BlockDevice::release_locks`] has released.
    ///
    /// # Errors
    /// The system refuses, or another process has the lock by now.
    fn take_locks(&self) -> io::Result<()> {
        Ok(())
    }

    /// Opens the device again over a writable device below, to commit its own data there. No I/O is in flight, and this device receives no
    /// more I/O unless the call fails.
    ///
    /// # Errors
    /// The device cannot be opened; this one is unchanged.
    fn reopen_to_commit(&self) -> Result<Committable, OpenError> {
        Err(OpenError::File {
            path: std::path::PathBuf::new(),
            what: "it is no image that stands on another".to_owned(),
        })
    }

    /// Lists the pieces of a range, from the first byte on: the end of each, and whether this device stores it itself.
    ///
    /// # Errors
    /// The system fails.
    fn own_pieces(&self, offset: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        Ok(vec![(offset + length, true)])
    }

    /// Returns the medium that stores the disk's identity; `None` if content and identity end with the process.
    fn medium(&self) -> Option<&dyn Medium> {
        None
    }

    /// Returns whether the device can be reached, for a device that reconnects automatically.
    fn state(&self) -> DiskState {
        DiskState::Ready
    }

    /// Returns the name in configuration and metrics: `ram`, `file`, ...
    fn kind(&self) -> &'static str;

    /// Returns the device below, if there is one.
    fn below(&self) -> Option<&dyn BlockDevice> {
        None
    }

    /// Returns the state shared by all daemons that serve its content. A layer does not pass on that of the device below.
    fn shared_state(&self) -> Option<&dyn SharedState> {
        None
    }

    /// Attaches a worker and returns its own handle. Must not block.
    ///
    /// # Errors
    /// The kernel has no descriptor (or similar resource) left. Nothing that was begun on the ring remains.
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
