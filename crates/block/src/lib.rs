//! Common types of the block layer: disk properties, I/O requests, errors.
//!
//! Used by all other crates. No I/O, no unsafe code, no allocation on the request path. Offsets and lengths of an
//! [`IoRequest`] are in bytes. The transport that builds a request has checked them once with [`Geometry::check`]. Tests:
//! at the end of each module.

#![forbid(unsafe_code)]

mod backoff;
mod capacity;
mod error;
mod extent;
mod geometry;
mod identity;
mod request;
mod scsi_command;
mod settings;

/// Sector size in bytes: the smallest logical block, and the unit of virtio-blk (virtio 1.3, 5.2.4).
pub const SECTOR_BYTES: u32 = 512;

pub use backoff::Backoff;
pub use capacity::{Capacity, SizeKnowledge};
pub use error::{DeviceSense, IoError, IoErrorKind, IoOutcome};
pub use extent::{
    Allocation, EXTENT_BYTES, EXTENTS_MAX, Extent, STATUS_BYTES, decode_extents, encode_extents,
    move_extents_below,
};
pub use geometry::{
    AtomicWrites, Blocks, CompareAndWrite, DiskInfo, Geometry, Lba, PassedReservations,
    Passthrough, RangeError,
};
pub use identity::{Identity, NoIdentity};
pub use request::{IoFlags, IoKind, IoRequest};
pub use scsi_command::{COMMAND_HEADER, SENSE_MAX, ScsiAnswer, ScsiCommand};
pub use settings::{
    CacheMode, ClusterConfig, DelayTime, DiscardMode, ErrorPolicy, ExportPlacement, FileLock,
    ImageName, NamedFiles, OnError, PollLimit, PollLimits, PollMode, RbdLock,
};
