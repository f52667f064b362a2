//! Words of the block layer: what a disk is, what may be asked of it, how it answers.
//!
//! Every other crate speaks these words. No I/O, no unsafe, no allocation on a request's way.
//! Offsets and lengths of an [`IoRequest`] are bytes; whoever builds one has checked them once, at the
//! edge, with [`Geometry::check`]. Tests: at the end of each module.

#![forbid(unsafe_code)]

mod capacity;
mod error;
mod extent;
mod geometry;
mod identity;
mod request;
mod scsi_command;

/// Bytes of a sector: the smallest logical block, and the unit of virtio-blk (virtio 1.3, 5.2.4).
pub const SECTOR_BYTES: u32 = 512;

pub use capacity::Capacity;
pub use error::{DeviceSense, IoError, IoErrorKind, IoOutcome};
pub use extent::{Allocation, EXTENTS_MAX, Extent, STATUS_BYTES, decode_extents, encode_extents};
pub use geometry::{
    AtomicWrites, Blocks, CompareAndWrite, DiskInfo, Geometry, Lba, PassedReservations,
    Passthrough, RangeError,
};
pub use identity::{Identity, NoIdentity};
pub use request::{IoFlags, IoKind, IoRequest};
pub use scsi_command::{COMMAND_HEADER, SENSE_MAX, ScsiAnswer, ScsiCommand};
