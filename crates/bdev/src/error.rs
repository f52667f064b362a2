//! Errors of opening and resizing disks, with value and remedy.

use std::io;
use std::path::PathBuf;

/// Errors of opening or creating a disk.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Invalid block size.
    #[error("block size {found} is not allowed: it must be 512, 1024, 2048 or 4096 bytes")]
    BlockSize {
        /// Requested size in bytes.
        found: u32,
    },
    /// The size is 0, not a multiple of the block size, or 2^63 bytes and more.
    #[error(
        "size {found} bytes is not allowed: it must be a multiple of the block size, {block_size} bytes, not 0, and below 2^63"
    )]
    Size {
        /// Requested size in bytes.
        found: u64,
        /// Block size of the disk in bytes.
        block_size: u32,
    },
    /// The kernel refused the address space of a RAM disk.
    #[error(
        "cannot reserve {size} bytes of address space for a RAM disk: {source}; hint: choose a smaller size"
    )]
    Memory {
        /// Requested size in bytes.
        size: u64,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The retained memory of a RAM disk has another size or block size than its configuration.
    #[error(
        "its retained memory has {size} bytes in blocks of {block_size} bytes, unlike its configuration; hint: configure that size and block size, or remove the disk and add it again"
    )]
    RetainedMemory {
        /// Size of the disk in bytes.
        size: u64,
        /// Block size in bytes.
        block_size: u32,
    },
    /// The serial number does not fit into `GET_ID` and the unit serial number page.
    #[error("serial {found:?} is not allowed: at most 20 printable ASCII characters")]
    Serial {
        /// Requested serial number.
        found: String,
    },
    /// Invalid physical block size, or smaller than the logical block size.
    #[error(
        "physical block size {found} is not allowed: it must be a power of two from the block size, {block_size} bytes, to 65536"
    )]
    PhysicalBlockSize {
        /// Requested size in bytes.
        found: u32,
        /// Logical block size of the disk in bytes.
        block_size: u32,
    },
    /// Invalid NAA identifier of 64 bits.
    #[error("wwn {found:016x} is not allowed: its first digit must be 2, 3 or 5")]
    Wwn {
        /// Requested identifier.
        found: u64,
    },
    /// Error of a Ceph cluster or one of its images.
    #[error(transparent)]
    Rbd(#[from] librbd::Error),
    /// Error of an image of a Ceph cluster.
    #[error("rbd image {image}: {reason}")]
    Image {
        /// Name of the image.
        image: String,
        /// Reason and remedy.
        reason: String,
    },
    /// Error of a logical unit of an iSCSI target.
    #[error("{unit}: {reason}")]
    Unit {
        /// Address of the unit.
        unit: String,
        /// Reason and remedy.
        reason: String,
    },
    /// Error of an export of an NBD server.
    #[error("{export}: {reason}")]
    Export {
        /// Address of the export.
        export: String,
        /// Reason and remedy.
        reason: String,
    },
    /// Error of a SCSI device of this machine.
    #[error("{}: {reason}", path.display())]
    ScsiDevice {
        /// Path of the device.
        path: std::path::PathBuf,
        /// Reason and remedy.
        reason: String,
    },
    /// Error of a file.
    #[error("{}: {reason}", path.display())]
    File {
        /// Path of the file or block device.
        path: PathBuf,
        /// Reason and remedy.
        reason: String,
    },
}

/// Errors of changing the size of a disk.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// The size is 0, or not a multiple of the block size.
    #[error("{0}")]
    Size(OpenError),
    /// The system refused.
    #[error("cannot change the size to {size} bytes: {source}")]
    System {
        /// Requested size in bytes.
        size: u64,
        /// Error of the system.
        source: io::Error,
    },
    /// The present size of a remote device could not be read.
    #[error("cannot read the size: {0}")]
    Unread(#[source] io::Error),
    /// Changes in flight did not end in time.
    #[error("changes beyond the new end are still in flight after {seconds} s")]
    Busy {
        /// Time waited, in seconds.
        seconds: u64,
    },
}

/// Checks that every transport supports this block size.
pub(crate) fn check_block_size(found: u32) -> Result<u32, OpenError> {
    match found {
        512 | 1024 | 2048 | 4096 => Ok(found),
        _ => Err(OpenError::BlockSize { found }),
    }
}

/// Maximum size of a disk in bytes.
pub(crate) const SIZE_MAX: u64 = i64::MAX as u64;

/// Checks that a size consists of whole blocks, is not 0 and has no more than 63 bits. Offsets of files are signed.
pub(crate) fn check_size(found: u64, block_size: u32) -> Result<u64, OpenError> {
    let is_valid = (1..=SIZE_MAX).contains(&found);
    if !is_valid || !found.is_multiple_of(u64::from(block_size)) {
        return Err(OpenError::Size { found, block_size });
    }
    Ok(found)
}

/// Checks that physical blocks of this size consist of whole logical blocks.
pub(crate) fn check_physical_block_size(found: u32, block_size: u32) -> Result<u32, OpenError> {
    if found.is_power_of_two() && (block_size..=65536).contains(&found) {
        return Ok(found);
    }
    Err(OpenError::PhysicalBlockSize { found, block_size })
}

/// Checks for an eight-byte NAA identifier: IEEE extended, locally assigned or IEEE registered (SPC-5, 7.7.6.6).
pub(crate) fn check_naa(found: u64) -> Result<u64, OpenError> {
    match found >> 60 {
        2 | 3 | 5 => Ok(found),
        _ => Err(OpenError::Wwn { found }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_63_bits() {
        assert_eq!(
            check_size(0x7fff_ffff_ffff_fe00, 512).ok(),
            Some(0x7fff_ffff_ffff_fe00)
        );
        for size in [0, 513, 0x8000_0000_0000_0000, 0xffff_ffff_ffff_fe00] {
            assert!(check_size(size, 512).is_err(), "{size}");
        }
    }
}
