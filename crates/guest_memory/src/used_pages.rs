//! Finds pages in use in the daemon's own memory, with PAGEMAP_SCAN (Linux 6.7).
//!
//! Other pages read as zeroes. If the kernel lacks the call, all pages count as used.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_length: u64,
    pages_max: u64,
    inverted: u64,
    all_of: u64,
    any_of: u64,
    returned: u64,
}

/// `struct page_region` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610_u32 as libc::Ioctl;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
/// A zero page that was only read.
const ZERO_PAGE: u64 = 1 << 5;

/// Maximum pages per scan, which limits its duration.
const PAGES_MAX: u64 = 4096;

/// Page table interface of the kernel. Opened with the first mapping of this kind, because a confined worker cannot open
/// files.
pub(crate) fn pagemap() -> Option<&'static File> {
    static PAGEMAP: OnceLock<Option<File>> = OnceLock::new();
    let pagemap = PAGEMAP.get_or_init(|| File::open("/proc/self/pagemap").ok());
    pagemap.as_ref()
}

/// Returns the address range of the first used pages between `start` and `end`. Empty, at `end`, if there are none. More used
/// pages may follow directly.
pub(crate) fn first_used(start: u64, end: u64) -> Range<u64> {
    let Some(pagemap) = pagemap() else {
        return start..end;
    };
    let mut region = Region::default();
    let mut argument = ScanArgument {
        size: size_of::<ScanArgument>() as u64,
        start,
        end,
        regions: std::ptr::from_mut(&mut region) as u64,
        regions_length: 1,
        pages_max: PAGES_MAX,
        inverted: ZERO_PAGE,
        all_of: ZERO_PAGE,
        any_of: PRESENT | SWAPPED,
        returned: PRESENT,
        ..ScanArgument::default()
    };
    // SAFETY: the kernel reads and writes the argument and writes one region, both of the layout that it defines and both
    // alive until the call returns. It reads only page tables, for any addresses.
    let found = unsafe {
        libc::ioctl(
            pagemap.as_raw_fd(),
            PAGEMAP_SCAN,
            std::ptr::from_mut(&mut argument),
        )
    };
    match found {
        0 => end..end,
        1 if (start..end).contains(&region.start) && region.start < region.end => {
            region.start..region.end.min(end)
        }
        // not supported by the kernel
        _ => start..end,
    }
}
