//! QEMU's copy-on-write images (qcow2, versions 2 and 3): what lies where, and what has to be written in which order. Whoever serves an
//! image gives it a [`Storage`]; data are moved by whoever asks.
//!
//! ```text
//!   Map      shared, read by any thread without a lock: where is the data of an offset?       map.rs
//!   Image    one owner: allocates, frees, checks; publishes in the map what is on storage      image.rs allocate.rs release.rs
//! ```
//!
//! **Order**, by which neither a killed process nor a power cut leaves more than clusters that nobody uses:
//!
//! 1. Clusters are reserved in runs: they are made to read as zeroes, their reference counts are raised, and both are on stable storage
//!    before the first of them is used.
//! 2. What a cluster keeps of the backing image, of a snapshot or of compressed data is on stable storage before a table refers to it.
//! 3. A table's entry is written before data are written into the cluster. So these are found again when the process is killed; a flush of the storage makes entries and data durable together.
//! 4. A cluster that is given up is used again only after the entry that referred to it is gone from stable storage, and after everybody
//!    who may still be at it has finished ([`Image::release`]).
//!
//! All that an image says is checked when it is read, once: a bad table fails the I/Os that need it, and nothing else.
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

use std::io;

pub use bitmaps::{Bitmap, Bitmaps};
pub use check::{CheckReport, Repair};
pub use create::{CreateOptions, DataFileOptions, create};
pub use header::{Compression, Header, is_qcow2};
pub use image::{Image, OpenOptions};
pub use map::{Map, Mapping, Segment};
pub use snapshots::Snapshot;

/// What an image lies in. Reads beyond its end bring zeroes; writes beyond it make it longer.
pub trait Storage {
    /// Fills `bytes` from `offset` on.
    ///
    /// # Errors
    /// What the system says.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Puts `bytes` at `offset`. A killed process loses nothing of it; a power cut may, until [`Storage::sync`].
    ///
    /// # Errors
    /// What the system says; any part may have been written then.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes a range read as zeroes, giving its space back where that is possible. It may reach beyond the end.
    ///
    /// # Errors
    /// What the system says.
    fn zero(&self, offset: u64, length: u64) -> io::Result<()>;

    /// All that was written is on stable storage afterwards.
    ///
    /// # Errors
    /// What the system says.
    fn sync(&self) -> io::Result<()>;

    /// Bytes that it has.
    ///
    /// # Errors
    /// What the system says.
    fn size(&self) -> io::Result<u64>;
}

/// What an image reads as where it has nothing of its own.
pub trait Backing {
    /// Bytes that it has; beyond them all is zero.
    fn size(&self) -> u64;

    /// Fills `bytes` from `offset` on; the range lies within its size.
    ///
    /// # Errors
    /// What the system says.
    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
}

/// Why an image cannot be opened, read or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The storage failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// It has what this code does not do.
    #[error("{0}")]
    Unsupported(String),
    /// It says what cannot be true.
    #[error("{0}")]
    Corrupt(String),
    /// A change would overwrite a structure of the image, or the image is marked as corrupt.
    #[error("{0}")]
    Overlap(String),
}

impl Error {
    /// The system's number for it: EIO for an image that is wrong.
    pub fn errno(&self) -> i32 {
        const EIO: i32 = 5;
        match self {
            Error::Io { source, .. } => source.raw_os_error().unwrap_or(EIO),
            Error::Unsupported(_) | Error::Corrupt(_) | Error::Overlap(_) => EIO,
        }
    }
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Names what was tried.
fn io(what: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io { what, source }
}

fn corrupt<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::Corrupt(what.into()))
}
