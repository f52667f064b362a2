//! Why a disk could not be opened: what was tried, with which value, and what to do.

use std::io;
use std::path::PathBuf;

/// A disk that could not be opened or created.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Not a block size.
    #[error("block size {found} is not allowed: it must be 512, 1024, 2048 or 4096 bytes")]
    BlockSize {
        /// What was asked for.
        found: u32,
    },
    /// No room for a single block, or a part of a block at the end.
    #[error(
        "size {found} bytes is not allowed: it must be a multiple of the block size, {block_size} bytes, and not 0"
    )]
    Size {
        /// What was asked for.
        found: u64,
        /// The disk's block size.
        block_size: u32,
    },
    /// The RAM disk's address space was refused.
    #[error(
        "cannot reserve {size} bytes of address space for a RAM disk: {source}; hint: choose a smaller size"
    )]
    Memory {
        /// What was asked for.
        size: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// The memory of a RAM disk that was kept has another shape than requested.
    #[error(
        "its memory was kept with {size} bytes in blocks of {block_size} bytes; hint: configure it so, or remove the disk and add it anew"
    )]
    Kept {
        /// Bytes of the disk.
        size: u64,
        /// Bytes of a block.
        block_size: u32,
    },
    /// A serial that does not fit into `GET_ID` and the unit serial number page.
    #[error("serial {found:?} is not allowed: at most 20 printable ASCII characters")]
    Serial {
        /// What was asked for.
        found: String,
    },
    /// Not a physical block size, or one below the logical block size.
    #[error(
        "physical block size {found} is not allowed: it must be a power of two from the block size, {block_size} bytes, to 65536"
    )]
    PhysicalBlockSize {
        /// What was asked for.
        found: u32,
        /// The disk's logical block size.
        block_size: u32,
    },
    /// Not an NAA identifier of 64 bits.
    #[error("wwn {found:016x} is not allowed: its first digit must be 2, 3 or 5")]
    Wwn {
        /// What was asked for.
        found: u64,
    },
    /// Something about a Ceph cluster or an image of it.
    #[error(transparent)]
    Rbd(#[from] librbd::Error),
    /// Something about an image of a Ceph cluster.
    #[error("rbd image {image}: {what}")]
    Image {
        /// The image.
        image: String,
        /// What is wrong with it and what to do.
        what: String,
    },
    /// Something about a logical unit of an iSCSI target.
    #[error("{unit}: {what}")]
    Unit {
        /// Its address.
        unit: String,
        /// What is wrong with it and what to do.
        what: String,
    },
    /// Something about a SCSI device of this machine.
    #[error("{}: {what}", path.display())]
    ScsiDevice {
        /// The device.
        path: std::path::PathBuf,
        /// What is wrong with it and what to do.
        what: String,
    },
    /// Something about a file.
    #[error("{}: {what}", path.display())]
    File {
        /// The file or block device.
        path: PathBuf,
        /// What is wrong with it and what to do.
        what: String,
    },
}

/// A disk whose size was not changed.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// No room for a single block, or a part of a block at the end.
    #[error("{0}")]
    Size(OpenError),
    /// The system refused.
    #[error("cannot change the size to {size} bytes: {source}")]
    System {
        /// What was asked for.
        size: u64,
        /// What it said.
        source: io::Error,
    },
    /// Changes that had begun did not end in time.
    #[error("changes beyond the new end are still in flight after {seconds} s")]
    Busy {
        /// How long they were waited for.
        seconds: u64,
    },
}

/// Is it a block size that every transport can serve?
pub(crate) fn check_block_size(found: u32) -> Result<u32, OpenError> {
    match found {
        512 | 1024 | 2048 | 4096 => Ok(found),
        _ => Err(OpenError::BlockSize { found }),
    }
}

/// Is it made of whole blocks, and not empty?
pub(crate) fn check_size(found: u64, block_size: u32) -> Result<u64, OpenError> {
    if found == 0 || !found.is_multiple_of(u64::from(block_size)) {
        return Err(OpenError::Size { found, block_size });
    }
    Ok(found)
}

/// Can physical blocks of this size be made of the logical ones?
pub(crate) fn check_physical_block_size(found: u32, block_size: u32) -> Result<u32, OpenError> {
    if found.is_power_of_two() && (block_size..=65536).contains(&found) {
        return Ok(found);
    }
    Err(OpenError::PhysicalBlockSize { found, block_size })
}

/// Is it an NAA identifier of eight bytes: IEEE extended, locally assigned or IEEE registered (SPC-5, 7.7.6.6)?
pub(crate) fn check_naa(found: u64) -> Result<u64, OpenError> {
    match found >> 60 {
        2 | 3 | 5 => Ok(found),
        _ => Err(OpenError::Wwn { found }),
    }
}
