//! `BLKDISCARD`, for kernels before Linux 6.12, where io_uring cannot discard on block devices. Blocks the caller.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `_IO(0x12, 119)` of linux/fs.h.
const BLKDISCARD: libc::c_ulong = 0x1277;

/// Discards a range of a block device and waits for the end.
///
/// # Errors
/// `ENOTTY` for other files, `EOPNOTSUPP` for devices without discard, `EINVAL` for a range outside of the device or not made of whole
/// blocks.
pub fn discard_now(fd: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<()> {
    let range = [offset, length];
    // SAFETY: the kernel reads two u64 at this address, which are valid until the call returns. It keeps neither address nor descriptor.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), BLKDISCARD as _, range.as_ptr()) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_file_is_no_block_device() {
        let file = tempfile::tempfile().unwrap();
        let error = discard_now(file.as_fd(), 0, 4096).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
