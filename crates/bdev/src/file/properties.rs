//! Alignment, sizes and abilities of a file or block device, queried from the kernel when a disk is opened.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use block::AtomicWrites;
use rustix::fs::{AtFlags, FallocateFlags, FileType, Statx, StatxFlags, fstat, fstatvfs, statx};

use super::Alignment;
use super::bounce::PIECE_BYTES;
use crate::Space;

/// Properties in sysfs `queue/` of a block device, or of the device below a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Queue {
    pub(super) rotational: bool,
    pub(super) optimal_io_size: u32,
    pub(super) discard_granularity: u32,
    pub(super) discard_bytes_max: u64,
}

impl Queue {
    /// Reads the properties; all zero for devices outside sysfs (network and memory file systems).
    pub(super) fn of(major: u32, minor: u32) -> Queue {
        let device = format!("/sys/dev/block/{major}:{minor}");
        let read = |name: &str| -> u64 {
            // The limits of a partition are those of its disk.
            [
                format!("{device}/queue/{name}"),
                format!("{device}/../queue/{name}"),
            ]
            .iter()
            .find_map(|path| std::fs::read_to_string(path).ok()?.trim().parse().ok())
            .unwrap_or(0)
        };
        let small = |name: &str| u32::try_from(read(name)).unwrap_or(0);
        Queue {
            rotational: read("rotational") == 1,
            optimal_io_size: small("optimal_io_size"),
            discard_granularity: small("discard_granularity"),
            discard_bytes_max: read("discard_max_bytes"),
        }
    }
}

/// Returns the alignment for direct I/O, if supported. `fd` is open for direct I/O.
pub(super) fn direct_alignment(fd: BorrowedFd<'_>, logical: Option<u32>) -> Option<Alignment> {
    let queried = statx(
        fd,
        "",
        AtFlags::EMPTY_PATH,
        StatxFlags::BASIC_STATS | StatxFlags::DIOALIGN,
    );
    if let Ok(stat) = queried
        && StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::DIOALIGN)
    {
        let alignment = Alignment {
            offset: stat.stx_dio_offset_align,
            memory: stat.stx_dio_mem_align,
        };
        return (alignment.offset != 0).then_some(alignment);
    }
    // Linux before 6.1, or no report: the device's block size, or the size of a successful read.
    let proven = logical.or_else(|| [512, 4096].into_iter().find(|&size| can_read(fd, size)))?;
    Some(Alignment {
        offset: proven,
        memory: proven,
    })
}

/// Returns true if a direct read of `size` bytes at `size` succeeds.
fn can_read(fd: BorrowedFd<'_>, size: u32) -> bool {
    let size = size as usize;
    let mut memory = vec![0_u8; 2 * size];
    let skip = memory.as_ptr().align_offset(size);
    match memory.get_mut(skip..skip + size) {
        Some(aligned) => rustix::io::pread(fd, aligned, size as u64).is_ok(),
        None => false,
    }
}

/// Preferred bytes per atomic write: a page of InnoDB, two of PostgreSQL.
const ATOMIC_BYTES: u32 = 16 << 10;

/// Returns the atomic writes (`RWF_ATOMIC`) promised for direct I/O.
pub(super) fn atomic_writes(fd: BorrowedFd<'_>, block_size: u32) -> Option<AtomicWrites> {
    /// `STATX_WRITE_ATOMIC`, Linux 6.11.
    const WRITE_ATOMIC: StatxFlags = StatxFlags::from_bits_retain(0x1_0000);
    let stat = statx(fd, "", AtFlags::EMPTY_PATH, WRITE_ATOMIC).ok()?;
    if !StatxFlags::from_bits_retain(stat.stx_mask).contains(WRITE_ATOMIC) {
        return None;
    }
    let (min, max) = (
        stat.stx_atomic_write_unit_min,
        stat.stx_atomic_write_unit_max,
    );
    atomic_unit(min, max, block_size)
}

/// Returns the promise for power-of-two writes of `min` to `max` bytes at multiples of their length. SCSI's limits (alignment, granularity,
/// maximum) cannot express several lengths, and clients may merge adjacent writes: one length is promised.
fn atomic_unit(min: u32, max: u32, block_size: u32) -> Option<AtomicWrites> {
    let allowed = min.is_power_of_two() && max.is_power_of_two() && min <= max;
    let (min, max) = (min.max(block_size), max.min(PIECE_BYTES as u32));
    if !allowed || min > max {
        return None;
    }
    let unit = ATOMIC_BYTES.clamp(min, max);
    Some(AtomicWrites {
        bytes_max: unit,
        unit,
    })
}

/// Returns true if the file supports holes. Tests beyond the end, without data.
pub(super) fn can_punch(fd: impl AsFd, size: u64) -> bool {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(fd, mode, size.next_multiple_of(4096), 4096).is_ok()
}

/// Returns true if writes into allocated space never run out of space. Not on file systems that relocate writes (btrfs, bcachefs, ZFS,
/// F2FS), nor on unknown ones; on XFS only for files without shared extents.
pub(super) fn keeps_space(fd: impl AsFd) -> bool {
    const IN_PLACE: [libc::c_long; 3] = [
        libc::EXT4_SUPER_MAGIC as libc::c_long,
        libc::XFS_SUPER_MAGIC as libc::c_long,
        libc::TMPFS_MAGIC as libc::c_long,
    ];
    match rustix::fs::fstatfs(fd) {
        Ok(stat) => IN_PLACE
            .iter()
            .any(|&magic| magic as u64 == stat.f_type as u64),
        Err(_) => false,
    }
}

/// Returns the size of a block device in bytes.
pub(super) fn device_size(fd: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0))?)
}

/// Returns the space of a file; `None` for a block device. May block.
pub(super) fn space(fd: impl AsFd) -> io::Result<Option<Space>> {
    /// Unit of `st_blocks`, stat(3type).
    const BLOCK_BYTES: u64 = 512;
    let stat = fstat(&fd)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Ok(None);
    }
    let system = fstatvfs(&fd)?;
    Ok(Some(Space {
        allocated: stat.st_blocks.unsigned_abs() * BLOCK_BYTES,
        free: system.f_bavail.saturating_mul(system.f_frsize),
    }))
}

/// Returns the cached properties of a file. Unlike `fstat`, does not wait for a file system that does not answer.
pub(super) fn known(fd: impl AsFd) -> io::Result<Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    Ok(statx(fd, "", flags, StatxFlags::BASIC_STATS)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_device_has_no_properties() {
        assert_eq!(Queue::of(4095, 1_048_575), Queue::default());
    }

    #[test]
    fn atomic_writes_are_one_length_that_the_device_promises() {
        for (min, max, block_size, unit) in [
            (4096, 65536, 512, Some(16384)),
            (512, 8192, 512, Some(8192)),
            (32768, 65536, 4096, Some(32768)),
            (16384, 16384, 4096, Some(16384)),
            (512, 65536, 32768, Some(32768)),
            (512, 4096, 8192, None),
            (4 << 20, 8 << 20, 512, None),
            (0, 0, 512, None),
            (0, 4096, 512, None),
            (4096, 0, 512, None),
            (3000, 65536, 512, None),
            (65536, 4096, 512, None),
        ] {
            let expected = unit.map(|unit| AtomicWrites {
                bytes_max: unit,
                unit,
            });
            let found = atomic_unit(min, max, block_size);
            assert_eq!(found, expected, "{min} to {max}, blocks of {block_size}");
        }
    }

    #[test]
    fn file_system_without_atomic_writes_promises_none() {
        let file = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(atomic_writes(file.as_fd(), 512), None);
    }

    #[test]
    fn alignment_of_a_memory_file_is_proven_by_reading() {
        let file = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let alignment = direct_alignment(file.as_fd(), None).unwrap();
        assert_eq!((alignment.offset, alignment.memory), (512, 512));
        assert!(can_punch(&file, 100));
        assert!(keeps_space(&file));
        assert!(!keeps_space(
            std::fs::File::open("/proc/self/stat").unwrap()
        ));
    }
}
