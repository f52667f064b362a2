//! Finds allocated but unwritten space of a file with FS_IOC_FIEMAP (`linux/fiemap.h`).

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Extents per call.
const EXTENTS: usize = 32;

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved_64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap` with space for extents.
#[repr(C)]
struct Map {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [Extent; EXTENTS],
}

/// `_IOWR('f', 11, struct fiemap)`.
const FS_IOC_FIEMAP: libc::Ioctl = 0xc020_660b_u32 as libc::Ioctl;
/// Allocated space that reads as zeroes.
const UNWRITTEN: u32 = 0x0800;

/// Returns the first allocated, unwritten bytes of `range`, or a part of them; `None` if there are none. Written bytes that
/// are still in the page cache count as unwritten: check `SEEK_DATA` first.
///
/// # Errors
/// When the file system does not support the call.
pub fn first_unwritten(fd: BorrowedFd<'_>, range: Range<u64>) -> io::Result<Option<Range<u64>>> {
    let mut map = Map {
        start: range.start,
        length: range.end.saturating_sub(range.start),
        flags: 0,
        mapped: 0,
        count: EXTENTS as u32,
        reserved: 0,
        extents: [Extent::default(); EXTENTS],
    };
    while map.length > 0 {
        // SAFETY: the kernel reads the header, writes its counters and at most `count` extents after it. `map` has space
        // for them; all of it lives until the call returns, in the layout that the kernel defines.
        let asked = unsafe {
            libc::ioctl(
                fd.as_raw_fd(),
                FS_IOC_FIEMAP,
                std::ptr::from_mut(&mut map).cast::<libc::c_void>(),
            )
        };
        if asked < 0 {
            return Err(io::Error::last_os_error());
        }
        let written_extents = map.extents.iter().take(map.mapped as usize);
        let mut found: Option<Range<u64>> = None;
        let mut reached = map.start;
        for extent in written_extents {
            let end = extent.logical.saturating_add(extent.length);
            reached = reached.max(end);
            let unwritten = extent.flags & UNWRITTEN != 0;
            match &mut found {
                None if unwritten => found = Some(extent.logical..end),
                Some(all) if unwritten && all.end == extent.logical => all.end = end,
                None => {}
                Some(_) => break,
            }
        }
        if let Some(all) = found {
            let inside = all.start.max(range.start)..all.end.min(range.end);
            return Ok((!inside.is_empty()).then_some(inside));
        }
        if (map.mapped as usize) < EXTENTS || reached <= map.start {
            return Ok(None);
        }
        map.start = reached;
        map.length = range.end.saturating_sub(reached);
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::fs::FallocateFlags;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn space_without_data_is_found_between_holes_and_data() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 * MIB).unwrap();
        let all = 0..64 * MIB;
        let Ok(nothing) = first_unwritten(file.as_fd(), all.clone()) else {
            // not supported by the file system (tmpfs)
            return;
        };
        assert_eq!(nothing, None);
        for at in [8 * MIB, 9 * MIB, 40 * MIB] {
            rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, at, MIB).unwrap();
        }
        rustix::io::pwrite(&file, &[7; 4096], 2 * MIB).unwrap();
        file.sync_all().unwrap();
        let first = |range| first_unwritten(file.as_fd(), range).unwrap();
        assert_eq!(first(all), Some(8 * MIB..10 * MIB));
        assert_eq!(
            first(9 * MIB + 4096..64 * MIB),
            Some(9 * MIB + 4096..10 * MIB)
        );
        assert_eq!(
            first(10 * MIB..40 * MIB + 8192),
            Some(40 * MIB..40 * MIB + 8192)
        );
        assert_eq!(first(41 * MIB..64 * MIB), None);
        assert_eq!(first(MIB..MIB), None);
    }

    #[test]
    fn unwritten_space_behind_many_written_pieces_is_found() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 * MIB).unwrap();
        for piece in 0..100 {
            rustix::io::pwrite(&file, &[7; 4096], piece * 8192).unwrap();
        }
        file.sync_all().unwrap();
        if first_unwritten(file.as_fd(), 0..64 * MIB).is_err() {
            return;
        }
        rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 32 * MIB, 4096).unwrap();
        let found = first_unwritten(file.as_fd(), 0..64 * MIB).unwrap();
        assert_eq!(found, Some(32 * MIB..32 * MIB + 4096));
    }

    #[test]
    fn a_pipe_is_refused() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(first_unwritten(reader.as_fd(), 0..4096).is_err());
    }
}
