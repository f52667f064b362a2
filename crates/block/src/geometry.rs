//! A disk's geometry, and the range check of all transports. Plain SCSI commands use a faster yes/no version; a test checks
//! that both agree.

use std::fmt;

use crate::{Identity, SECTOR_BYTES};

/// A logical block address, in the disk's logical blocks (SBC-4, 3.1.59).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lba(pub u64);

/// A number of logical blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Blocks(pub u64);

/// Logical block size and capacity, the inputs of a range check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    block_shift: u8,
    capacity: Blocks,
}

/// A range outside the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeError {
    /// Start or end is beyond the last block.
    Beyond {
        /// First requested block.
        lba: Lba,
        /// Number of requested blocks.
        blocks: Blocks,
        /// Number of blocks of the disk.
        capacity: Blocks,
    },
    /// Offset or length is not a multiple of the block size.
    Unaligned {
        /// First requested byte.
        offset: u64,
        /// Number of requested bytes.
        length: u64,
        /// The disk's block size in bytes.
        block_size: u32,
    },
}

impl fmt::Display for RangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RangeError::Beyond {
                lba,
                blocks,
                capacity,
            } => write!(
                f,
                "range past end of disk: lba {} + {} blocks > {} blocks",
                lba.0, blocks.0, capacity.0
            ),
            RangeError::Unaligned {
                offset,
                length,
                block_size,
            } => write!(
                f,
                "range not made of whole blocks: offset {offset} length {length}, blocks of {block_size} bytes"
            ),
        }
    }
}

impl std::error::Error for RangeError {}

impl Geometry {
    /// Creates a geometry of `capacity_bytes`, rounded down to whole blocks of `block_size` bytes.
    ///
    /// # Panics
    /// If `block_size` is not a power of two between 512 and 65,536. The configuration is checked before.
    pub fn new(block_size: u32, capacity_bytes: u64) -> Self {
        assert!(
            block_size.is_power_of_two() && (512..=65536).contains(&block_size),
            "block size {block_size} is not a power of two from 512 to 65536"
        );
        let block_shift = block_size.trailing_zeros() as u8;
        Geometry {
            block_shift,
            capacity: Blocks(capacity_bytes >> block_shift),
        }
    }

    /// Returns the geometry with another capacity, rounded down to whole blocks.
    #[must_use]
    pub const fn resized(self, capacity_bytes: u64) -> Self {
        Geometry {
            block_shift: self.block_shift,
            capacity: Blocks(capacity_bytes >> self.block_shift),
        }
    }

    /// Returns the geometry without an end, for ranges that only the device can check.
    #[must_use]
    pub const fn unbounded(self) -> Self {
        // A range of maximum length at the end does not overflow.
        self.resized(1 << 62)
    }

    /// Returns the logical block size in bytes.
    pub const fn block_size(&self) -> u32 {
        1 << self.block_shift
    }

    /// Returns log2 of the logical block size in bytes.
    pub const fn block_shift(&self) -> u32 {
        self.block_shift as u32
    }

    /// Returns the number of logical blocks.
    pub const fn capacity(&self) -> Blocks {
        self.capacity
    }

    /// Returns the size in bytes; cannot overflow, because it was computed from bytes.
    pub const fn capacity_bytes(&self) -> u64 {
        self.capacity.0 << self.block_shift
    }

    /// Checks a range of blocks and converts it to bytes. Checks by subtraction, so that nothing overflows.
    pub const fn check(&self, lba: Lba, blocks: Blocks) -> Result<(u64, u64), RangeError> {
        let capacity = self.capacity;
        if blocks.0 > capacity.0 || lba.0 > capacity.0 - blocks.0 {
            return Err(RangeError::Beyond {
                lba,
                blocks,
                capacity,
            });
        }
        Ok((lba.0 << self.block_shift, blocks.0 << self.block_shift))
    }

    /// Checks a range of 512-byte sectors and converts it to bytes. Sectors are the unit of virtio-blk for every block size
    /// of the disk (virtio 1.3, 5.2.4).
    pub const fn check_sectors(&self, sector: u64, length: u64) -> Result<(u64, u64), RangeError> {
        let capacity_sectors = self.capacity.0 << (self.block_shift - 9);
        let block_size = self.block_size();
        if sector > capacity_sectors || length > (capacity_sectors - sector) << 9 {
            return Err(RangeError::Beyond {
                lba: Lba(sector >> (self.block_shift - 9)),
                blocks: Blocks(length.div_ceil(block_size as u64)),
                capacity: self.capacity,
            });
        }
        let offset = sector << 9;
        if length & (SECTOR_BYTES as u64 - 1) != 0 {
            return Err(RangeError::Unaligned {
                offset,
                length,
                block_size: SECTOR_BYTES,
            });
        }
        Ok((offset, length))
    }
}

/// Atomic writes: visible as a whole or not at all, including after an error or a power failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicWrites {
    /// Maximum length in bytes.
    pub bytes_max: u32,
    /// Offset and length in bytes must be multiples of this; at least a logical block.
    pub unit: u32,
}

impl AtomicWrites {
    /// Returns true if a write of `length` bytes at `offset` can be atomic.
    pub const fn allow(&self, offset: u64, length: u64) -> bool {
        let unit = self.unit as u64;
        length <= self.bytes_max as u64
            && length.is_multiple_of(unit)
            && offset.is_multiple_of(unit)
    }
}

/// The component that executes compare and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompareAndWrite {
    /// The user of the device, which reads, compares and writes under the range's lock. Requires that nothing but this
    /// daemon writes to the device.
    Emulated,
    /// The device, atomically for all hosts that share it, if the range crosses no multiple of `boundary` bytes.
    Device {
        /// Boundary in bytes.
        boundary: u64,
    },
}

impl CompareAndWrite {
    /// Returns true if the device executes a compare and write of `length` bytes at `offset`.
    pub const fn is_done_by_device(&self, offset: u64, length: u64) -> bool {
        match self {
            CompareAndWrite::Emulated => false,
            CompareAndWrite::Device { boundary } => length <= *boundary - offset % *boundary,
        }
    }
}

/// Reservations on a SCSI device that many clients use through one I_T nexus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PassedReservations {
    /// Reservation commands are refused.
    #[default]
    Refuse,
    /// Reservations hold between clients of this daemon; the device and other hosts do not see them.
    Emulate,
    /// Reservations of the device, which hold between hosts. All clients of this daemon are one registrant.
    Forward,
}

/// A SCSI device that accepts commands from clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passthrough {
    /// Peripheral device type (SPC-5, 6.7.2).
    pub device_type: u8,
    /// Handling of reservation commands.
    pub reservations: PassedReservations,
    /// Commands that may change medium or settings are refused to clients, even if the device allows them.
    pub read_only: bool,
}

/// Properties of a disk that transports report to their clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskInfo {
    /// Logical block size and capacity.
    pub geometry: Geometry,
    /// Physical block size in bytes; aligned writes of this size need no read-modify-write.
    pub physical_block_size: u32,
    /// Required alignment of offset and length of every I/O to the device, in bytes, a power of two. It exceeds a logical
    /// block if the device has larger blocks than the disk. It is smaller if the device accepts parts of a logical block.
    /// Workers execute other I/Os by read-modify-write.
    pub io_alignment: u32,
    /// Optimal I/O size in bytes; 0 if unspecified.
    pub optimal_io_size: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// Written data may be in a volatile cache until a flush.
    pub write_cache: bool,
    /// Granularity of the space freed by discard, in bytes; `None` if the backend does not support discard.
    pub discard_granularity: Option<u32>,
    /// Discarded ranges read as zeroes.
    pub discard_zeroes: bool,
    /// The backend can write zeroes without a data transfer.
    pub write_zeroes: bool,
    /// Zeroes written without [`IoFlags::UNMAP`](crate::IoFlags::UNMAP) allocate space for later writes, and the backend
    /// permanently distinguishes such space from holes (SBC-4, 4.7.4: anchored LBAs).
    pub anchors: bool,
    /// Supported writes with [`IoFlags::ATOMIC`](crate::IoFlags::ATOMIC); `None` if unsupported.
    pub atomic_writes: Option<AtomicWrites>,
    /// Executor of compare and write; `None` if it is impossible because other hosts write to the device.
    pub compare_and_write: Option<CompareAndWrite>,
    /// Other hosts write to the medium without this daemon; its reservations and range locks do not apply to them.
    pub shared: bool,
    /// Rotational medium: seeks cost more than transfers.
    pub rotational: bool,
    /// The device is a SCSI device that accepts [`IoKind::ScsiCommand`](crate::IoKind::ScsiCommand).
    pub passthrough: Option<Passthrough>,
    /// Identity, independent of the name; the key of state that survives a restart.
    pub identity: Identity,
    /// Value of `GET_ID` and the unit serial number page: at most 20 bytes of ASCII, not necessarily unique.
    pub serial: String,
    /// NAA identifier of 64 bits (SPC-5, 7.7.6.6), the same for every export of the disk.
    pub naa: u64,
}

impl DiskInfo {
    /// Returns the properties with another capacity, rounded down to whole blocks.
    #[must_use]
    pub fn resized(&self, capacity_bytes: u64) -> DiskInfo {
        DiskInfo {
            geometry: self.geometry.resized(capacity_bytes),
            ..self.clone()
        }
    }

    /// Returns the vendor-specific part of a T10 vendor ID designator. It identifies the disk uniquely, like the NAA
    /// identifier. If the configuration sets an identifier, both use it, so that two daemons can export one disk.
    pub fn vendor_specific_identifier(&self) -> String {
        if self.naa == self.identity.naa() {
            self.identity.digits()
        } else {
            format!("{:016x}", self.naa)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_up_to_the_last_block_is_inside() {
        let g = Geometry::new(4096, 1 << 20);
        assert_eq!(g.check(Lba(0), Blocks(256)), Ok((0, 1 << 20)));
        assert_eq!(g.check(Lba(255), Blocks(1)), Ok((255 << 12, 4096)));
        assert_eq!(g.check(Lba(256), Blocks(0)), Ok((1 << 20, 0)));
    }

    #[test]
    fn range_past_the_end_is_refused_and_cannot_overflow() {
        let g = Geometry::new(512, 1 << 20);
        for (lba, blocks) in [
            (2048, 1),
            (2047, 2),
            (u64::MAX, 1),
            (1, u64::MAX),
            (u64::MAX, u64::MAX),
        ] {
            assert!(g.check(Lba(lba), Blocks(blocks)).is_err(), "{lba}+{blocks}");
        }
        assert!(g.check_sectors(u64::MAX, 512).is_err());
        assert!(g.check_sectors(0, u64::MAX).is_err());
    }

    #[test]
    fn sectors_have_512_bytes_for_every_block_size() {
        let g = Geometry::new(4096, 1 << 20);
        assert_eq!(g.check_sectors(1, 4096), Ok((512, 4096)));
        assert_eq!(g.check_sectors(0, 512), Ok((0, 512)));
        assert!(matches!(
            g.check_sectors(0, 513),
            Err(RangeError::Unaligned { .. })
        ));
        assert_eq!(g.check_sectors(8, 4096), Ok((4096, 4096)));
        assert!(matches!(
            g.check_sectors(2048, 4096),
            Err(RangeError::Beyond { .. })
        ));
    }

    #[test]
    fn atomic_write_is_made_of_whole_units_and_not_too_long() {
        let atomic = AtomicWrites {
            bytes_max: 65536,
            unit: 16384,
        };
        assert!(atomic.allow(16384, 32768) && atomic.allow(0, 65536));
        for (offset, length) in [(8192, 16384), (0, 8192), (0, 81920), (u64::MAX, u64::MAX)] {
            assert!(!atomic.allow(offset, length), "{offset} {length}");
        }
    }

    #[test]
    fn device_compares_and_writes_within_its_boundaries() {
        let device = CompareAndWrite::Device { boundary: 4096 };
        assert!(device.is_done_by_device(0, 4096) && device.is_done_by_device(7680, 512));
        assert!(!device.is_done_by_device(7680, 1024) && !device.is_done_by_device(0, 8192));
        assert!(!CompareAndWrite::Emulated.is_done_by_device(0, 512));
    }

    #[test]
    fn capacity_is_whole_blocks() {
        assert_eq!(Geometry::new(4096, 10_000).capacity(), Blocks(2));
        let resized = Geometry::new(4096, 10_000).resized(20_000);
        assert_eq!(resized, Geometry::new(4096, 20_000));
        assert_eq!(
            Geometry::new(512, u64::MAX).capacity_bytes(),
            u64::MAX - 511
        );
    }

    #[test]
    fn error_text_gives_values_with_units() {
        let e = Geometry::new(512, 4100 * 512)
            .check(Lba(4096), Blocks(8))
            .unwrap_err();
        assert_eq!(
            e.to_string(),
            "range past end of disk: lba 4096 + 8 blocks > 4100 blocks"
        );
    }
}
