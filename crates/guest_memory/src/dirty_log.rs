//! Dirty log of a live migration: one bit per page of guest-physical address, in memory that the front end shares
//! (vhost-user protocol, "Migration").
//!
//! The front end clears a bit and then copies the page. A page must therefore be marked after the write, and the mark must be a
//! locked instruction: a plain load that finds the bit set could be executed before the write becomes visible.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use crate::Mapping;

/// Page size of the log: `VHOST_LOG_PAGE`.
const PAGE_BITS: u32 = 12;

/// Reason why a log is incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogFault {
    /// A page beyond the end of the log was written.
    #[error("the dirty log is too small for the guest memory")]
    TooSmall,
    /// The client truncated the file of the log.
    #[error("the file of the dirty log was truncated")]
    Truncated,
}

/// A dirty log. Shared by the workers of a session.
pub struct DirtyLog {
    mapping: Arc<Mapping>,
    /// Offset of the log in its mapping; file offsets need not be page-aligned.
    skip: usize,
    bytes: usize,
    is_too_small: AtomicBool,
}

impl DirtyLog {
    /// Mapped part of a log in bytes, enough for 128 TiB of guest addresses. A larger log would take the address space of other clients.
    pub const BYTES_MAX: u64 = 4 << 30;

    /// Maps the log of `bytes` bytes at `offset` of a file, but not more than [`DirtyLog::BYTES_MAX`].
    ///
    /// # Errors
    /// `EINVAL` if the range is empty or ends beyond the file. Otherwise as [`Mapping::shared_file`].
    pub fn map(file: BorrowedFd<'_>, offset: u64, bytes: u64) -> io::Result<DirtyLog> {
        let skip = offset & (crate::mapping::page_size(file)? as u64 - 1);
        let bytes = bytes.min(DirtyLog::BYTES_MAX);
        let length = usize::try_from(bytes.saturating_add(skip)).unwrap_or(usize::MAX);
        if bytes == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mapping = Mapping::shared_file(file, offset - skip, length)?;
        Ok(DirtyLog {
            mapping,
            skip: skip as usize,
            bytes: length - skip as usize,
            is_too_small: AtomicBool::new(false),
        })
    }

    /// Marks the pages of a guest-physical range. Must be called after the write. Every write to guest memory passes this function
    /// while a log is set.
    pub fn mark(&self, address: u64, length: u64) {
        if length == 0 {
            return;
        }
        let pages = (self.bytes as u64).saturating_mul(8);
        let last = address.saturating_add(length - 1) >> PAGE_BITS;
        if last >= pages {
            self.is_too_small.store(true, Ordering::Relaxed);
        }
        let end = pages.min(last + 1);
        let mut page = address >> PAGE_BITS;
        while page < end {
            let first = page % 8;
            let count = (8 - first).min(end - page);
            let mask = (0xff_u8 >> (8 - count)) << first;
            self.byte((page / 8) as usize)
                .fetch_or(mask, Ordering::SeqCst);
            page += count;
        }
    }

    /// Returns the reason why the log is incomplete, if it is.
    pub fn fault(&self) -> Option<LogFault> {
        if self.mapping.is_poisoned() {
            return Some(LogFault::Truncated);
        }
        let is_too_small = self.is_too_small.load(Ordering::Relaxed);
        is_too_small.then_some(LogFault::TooSmall)
    }

    fn byte(&self, index: usize) -> &AtomicU8 {
        assert!(index < self.bytes, "page outside of the dirty log");
        let at = self.mapping.checked(self.skip + index, 1);
        // SAFETY: inside of the mapping, which outlives the reference. Memory that another process writes is accessed atomically.
        unsafe { AtomicU8::from_ptr(at) }
    }
}

impl std::fmt::Debug for DirtyLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirtyLog")
            .field("bytes", &self.bytes)
            .field("fault", &self.fault())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::{GuestView, IoBuffer, MemoryTable, RegionSpec};

    fn log(offset: u64, bytes: u64) -> (DirtyLog, Arc<Mapping>, std::fs::File) {
        let (mapping, file) = Mapping::memfd("log", 8192).unwrap();
        let log = DirtyLog::map(file.as_fd(), offset, bytes).unwrap();
        (log, mapping, file)
    }

    fn bytes<const N: usize>(mapping: &Mapping, offset: usize) -> [u8; N] {
        let mut bytes = [0; N];
        mapping.read(offset, &mut bytes);
        bytes
    }

    #[test]
    fn page_n_is_bit_n_modulo_8_of_byte_n_divided_by_8() {
        let (log, mapping, _file) = log(0, 4096);
        log.mark(0, 1);
        log.mark(0x1fff, 1);
        log.mark(0x9000, 0x1000);
        assert_eq!(bytes(&mapping, 0), [0b11, 0b10, 0]);
        log.mark(0x1_0fff, 2);
        assert_eq!(bytes(&mapping, 2), [0b11, 0]);
        // Pages 30 to 49, and an empty range.
        log.mark(30 << 12, 20 << 12);
        log.mark(60 << 12, 0);
        assert_eq!(bytes(&mapping, 3), [0b1100_0000, 0xff, 0xff, 0b11, 0]);
        assert_eq!(log.fault(), None);
    }

    #[test]
    fn only_the_useful_part_of_a_log_is_mapped() {
        let file = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = std::fs::File::from(file);
        file.set_len(60 << 40).unwrap();
        let log = DirtyLog::map(file.as_fd(), 0, 60 << 40).unwrap();
        assert_eq!(log.bytes as u64, DirtyLog::BYTES_MAX);
        log.mark((128 << 40) - 1, 1);
        assert_eq!(log.fault(), None);
        log.mark(128 << 40, 1);
        assert_eq!(log.fault(), Some(LogFault::TooSmall));
    }

    #[test]
    fn log_may_begin_anywhere_in_its_file() {
        let (log, mapping, _file) = log(4096 + 100, 10);
        log.mark(79 << 12, 1);
        assert_eq!(bytes(&mapping, 4096 + 108), [0, 0x80, 0]);
        assert_eq!(log.fault(), None);
        log.mark(80 << 12, 1);
        assert_eq!(bytes(&mapping, 4096 + 108), [0, 0x80, 0]);
        assert_eq!(log.fault(), Some(LogFault::TooSmall));
    }

    #[test]
    fn range_beyond_the_log_is_marked_as_far_as_it_goes() {
        for (address, length) in [(7 << 12, 0x1001), (0x7000, u64::MAX), (0x7fff, 2)] {
            let (log, mapping, _file) = log(0, 1);
            log.mark(address, length);
            assert_eq!(bytes(&mapping, 0), [0x80, 0]);
            assert_eq!(log.fault(), Some(LogFault::TooSmall), "{address:#x}");
        }
        let (log, mapping, _file) = log(0, 1);
        log.mark(u64::MAX, u64::MAX);
        assert_eq!(bytes(&mapping, 0), [0, 0]);
        assert_eq!(log.fault(), Some(LogFault::TooSmall));
    }

    #[test]
    fn empty_and_overlong_logs_are_refused() {
        let (_mapping, file) = Mapping::memfd("log", 8192).unwrap();
        for (offset, bytes) in [(0, 0), (0, 8193), (8192, 1), (u64::MAX, 1), (1, u64::MAX)] {
            assert!(
                DirtyLog::map(file.as_fd(), offset, bytes).is_err(),
                "{offset} {bytes}"
            );
        }
    }

    #[test]
    fn truncated_log_is_a_fault() {
        crate::sigbus::install().unwrap();
        let (log, _mapping, file) = log(0, 8192);
        file.set_len(0).unwrap();
        log.mark(0x1000, 1);
        assert_eq!(log.fault(), Some(LogFault::Truncated));
    }

    #[test]
    fn writable_part_of_a_buffer_is_marked_by_guest_address() {
        let (log, mapping, _file) = log(0, 8192);
        let spec = |guest_address| RegionSpec {
            guest_address,
            size: 0x4000,
            user_address: 0,
            file_offset: 0,
        };
        let memory = || Mapping::anonymous(0x4000).unwrap();
        let table = MemoryTable::default()
            .with_mapping(spec(0x8000), memory())
            .and_then(|table| table.with_mapping(spec(0x10_0000), memory()))
            .unwrap();
        let view = GuestView::new(Arc::new(table));
        let mut buffer = IoBuffer::default();
        let mut appender = view.appender(&mut buffer);
        appender.append(0x8000, 16).unwrap();
        appender.begin_second_half();
        appender.append(0x9ffe, 4).unwrap();
        appender.append(0x10_3fff, 1).unwrap();
        appender.finish();
        // A window splits segments.
        buffer.set_window(17, 2);
        buffer.mark_writable(&log);
        // Pages 9, 10 and 0x103.
        assert_eq!(bytes(&mapping, 0), [0, 0b110, 0]);
        assert_eq!(bytes(&mapping, 0x20), [0b1000, 0]);
    }
}
