//! QEMU's copy-on-write images (qcow2, versions 2 and 3): metadata layout and write order. The caller supplies a [`Storage`] and moves
//! the data.
//!
//! ```text
//!   Map      shared, lock-free, read by any thread: maps guest offsets to host offsets        map.rs
//!   Image    one owner: allocates, frees, checks; publishes durable state in the map          image.rs allocate.rs release.rs
//! ```
//!
//! **Write order.** A killed process or a power cut leaves at most leaked clusters:
//!
//! 1. Clusters are reserved in runs. They are zeroed and their reference counts are raised, both on stable storage, before the first one
//!    is used.
//! 2. Data copied from the backing image, a snapshot or a compressed cluster is on stable storage before a table refers to it.
//! 3. A table entry is written before data is written into the cluster. After a kill of the process, the data is therefore found. A flush
//!    of the storage makes entries and data durable together.
//! 4. A freed cluster is reused only after the entry that referred to it is gone from stable storage and all users of the old entry have
//!    finished ([`Image::release`]).
//!
//! Metadata is validated once, when it is read. A bad table fails only the I/Os that need it.
//! Tests: in each module, `tests/power_cut.rs` (states that a crash may leave), `tests/hostile.rs` (damaged images), and
//! `crates/bdev/tests/qemu_images.rs` (QEMU's own tools agree).

#![forbid(unsafe_code)]

mod allocate;
mod backing;
mod bitmaps;
mod change_snapshots;
mod check;
mod clusters;
mod compressed;
mod create;
mod data_file;
mod entry;
mod header;
mod image;
mod map;
mod overlap;
mod refcounts;
mod release;
mod repair;
mod reserve;
mod resize;
mod snapshots;
mod subclusters;
mod sync;
mod word_pair;

use std::io;

pub use bitmaps::{Bitmap, Bitmaps};
pub use check::{CheckReport, Repair};
pub use create::{CreateOptions, DataFileOptions, create};
pub use header::{Compression, Header, is_qcow2};
pub use image::{Image, OpenOptions};
pub use map::{Map, Mapping, Segment};
pub use snapshots::Snapshot;

/// The file or device that contains an image. Reads beyond its end return zeroes; writes beyond it extend it.
pub trait Storage {
    /// Fills `bytes` from `offset` on.
    ///
    /// # Errors
    /// The error of a system call.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Writes `bytes` at `offset`. The data survives a kill of the process; it survives a power cut only after [`Storage::sync`].
    ///
    /// # Errors
    /// The system's error. Any part may have been written.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes a range read as zeroes and frees its space where possible. The range may extend beyond the end.
    ///
    /// # Errors
    /// The error of a system call.
    fn zero(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Flushes all writes to stable storage.
    ///
    /// # Errors
    /// The error of a system call.
    fn sync(&self) -> io::Result<()>;

    /// Returns the size in bytes.
    ///
    /// # Errors
    /// The error of a system call.
    fn size(&self) -> io::Result<u64>;
}

/// Source of the data of unallocated clusters.
pub trait Backing {
    /// Returns the size in bytes. Beyond it, all data is zero.
    fn size(&self) -> u64;

    /// Fills `bytes` from `offset` on; the range lies within the size.
    ///
    /// # Errors
    /// The error of a system call.
    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
}

/// Reasons why an image cannot be opened, read or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The storage failed.
    #[error("{operation}: {source}")]
    Io {
        /// Operation that failed.
        operation: &'static str,
        /// Error from the system.
        source: io::Error,
    },
    /// The image uses a feature that this crate does not support.
    #[error("{0}")]
    Unsupported(String),
    /// The metadata is invalid.
    #[error("{0}")]
    Corrupt(String),
    /// A change would overwrite a structure of the image, or the image is marked as corrupt.
    #[error("{0}")]
    Overlap(String),
}

impl Error {
    /// Returns the errno for this error: EIO for an invalid image.
    pub fn errno(&self) -> i32 {
        const EIO: i32 = 5;
        match self {
            Error::Io { source, .. } => source.raw_os_error().unwrap_or(EIO),
            Error::Unsupported(_) | Error::Corrupt(_) | Error::Overlap(_) => EIO,
        }
    }
}

/// Result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Adds the name of the failed operation to an error.
fn io(operation: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io { operation, source }
}

fn corrupt<T>(reason: impl Into<String>) -> Result<T> {
    Err(Error::Corrupt(reason.into()))
}
