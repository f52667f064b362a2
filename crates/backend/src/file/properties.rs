//! What the kernel says of a file or block device: alignment, sizes, abilities. Asked once, while a disk is opened.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{AtFlags, FallocateFlags, StatxFlags, statx};

use super::Alignment;

/// What `queue/` in sysfs says of a block device, or of the device below a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Queue {
    pub(super) rotational: bool,
    pub(super) optimal_io_size: u32,
    pub(super) discard_granularity: u32,
    pub(super) discard_bytes_max: u64,
}

impl Queue {
    /// Nothing is known of devices that are not in sysfs (network and memory file systems): all zero.
    pub(super) fn of(major: u32, minor: u32) -> Queue {
        let device = format!("/sys/dev/block/{major}:{minor}");
        let read = |name: &str| -> u64 {
            // A partition's limits are its disk's.
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

/// What direct I/O demands here; `None`: there is no direct I/O. `fd` is open for it.
pub(super) fn direct_alignment(fd: BorrowedFd<'_>, logical: Option<u32>) -> Option<Alignment> {
    let asked = statx(
        fd,
        "",
        AtFlags::EMPTY_PATH,
        StatxFlags::BASIC_STATS | StatxFlags::DIOALIGN,
    );
    if let Ok(told) = asked
        && StatxFlags::from_bits_retain(told.stx_mask).contains(StatxFlags::DIOALIGN)
    {
        let alignment = Alignment {
            offset: told.stx_dio_offset_align,
            memory: told.stx_dio_mem_align,
        };
        return (alignment.offset != 0).then_some(alignment);
    }
    // Linux before 6.1, or a file system that does not tell: a device's block size, or what a read proves.
    let proven = logical.or_else(|| [512, 4096].into_iter().find(|&size| can_read(fd, size)))?;
    Some(Alignment {
        offset: proven,
        memory: proven,
    })
}

/// Does a direct read of `size` bytes at `size` work?
fn can_read(fd: BorrowedFd<'_>, size: u32) -> bool {
    let size = size as usize;
    let mut memory = vec![0_u8; 2 * size];
    let skip = memory.as_ptr().align_offset(size);
    match memory.get_mut(skip..skip + size) {
        Some(aligned) => rustix::io::pread(fd, aligned, size as u64).is_ok(),
        None => false,
    }
}

/// Can holes be punched into this file? Asked beyond its end, where there is nothing to lose.
pub(super) fn can_punch(fd: impl AsFd, size: u64) -> bool {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(fd, mode, size.next_multiple_of(4096), 4096).is_ok()
}

/// Does a write into space that the file has always find that space? Not where files are written elsewhere each time
/// (btrfs, bcachefs, ZFS, F2FS), and nothing is known of others. Of XFS it is true of files that share nothing.
pub(super) fn keeps_space(fd: impl AsFd) -> bool {
    const IN_PLACE: [libc::c_long; 3] = [
        libc::EXT4_SUPER_MAGIC as libc::c_long,
        libc::XFS_SUPER_MAGIC as libc::c_long,
        libc::TMPFS_MAGIC as libc::c_long,
    ];
    match rustix::fs::fstatfs(fd) {
        Ok(told) => IN_PLACE
            .iter()
            .any(|&magic| magic as u64 == told.f_type as u64),
        Err(_) => false,
    }
}

/// Bytes of a block device.
pub(super) fn device_size(fd: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_device_has_no_properties() {
        assert_eq!(Queue::of(4095, 1_048_575), Queue::default());
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
