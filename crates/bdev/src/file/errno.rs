//! Maps an errno to an I/O error, for all I/O on files.

use block::{IoError, IoErrorKind, IoKind};

pub(crate) fn classify(kind: IoKind, errno: i32) -> IoError {
    let class = match errno {
        // A limit on the file's size is reported to clients as a full store.
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => IoErrorKind::NoSpace,
        libc::EFAULT => IoErrorKind::ClientMemory,
        libc::EROFS | libc::EPERM | libc::EACCES | libc::EBADF if kind != IoKind::Read => {
            IoErrorKind::ReadOnly
        }
        libc::EOPNOTSUPP | libc::ENOSYS => IoErrorKind::Unsupported,
        libc::ENODEV | libc::ENXIO | libc::ENOMEDIUM | libc::ESHUTDOWN | libc::ESTALE => {
            IoErrorKind::Offline
        }
        libc::ECANCELED => IoErrorKind::Cancelled,
        _ if kind == IoKind::Read => IoErrorKind::ReadMedium,
        _ => IoErrorKind::WriteMedium,
    };
    IoError::with_errno(class, errno)
}

/// Returns true if the kernel does not support the operation on this file, so that another operation must be tried. EINVAL does not
/// count, because the range may be the cause.
pub(crate) fn is_refusal(errno: i32) -> bool {
    matches!(
        errno,
        libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV | libc::ENOTTY
    )
}

/// Returns true if a block device may be the cause: Linux's errnos for request statuses, except for memory, unsupported operations and
/// space.
pub(crate) fn is_of_device(errno: i32) -> bool {
    matches!(
        errno,
        libc::EIO
            | libc::ETIMEDOUT
            | libc::ENOLINK
            | libc::EREMOTEIO
            | libc::EBADE
            | libc::ENODATA
            | libc::EILSEQ
            | libc::ENODEV
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_error_does_not_disable_an_operation() {
        assert!(is_refusal(libc::EOPNOTSUPP) && is_refusal(libc::ENOTTY));
        assert!(!is_refusal(libc::EINVAL) && !is_refusal(libc::EBUSY));
    }

    #[test]
    fn errno_decides_the_class_and_survives() {
        use IoErrorKind as K;
        for (kind, errno, class) in [
            (IoKind::Read, libc::EIO, K::ReadMedium),
            (IoKind::Write, libc::EIO, K::WriteMedium),
            (IoKind::Flush, libc::EIO, K::WriteMedium),
            (IoKind::Write, libc::ENOSPC, K::NoSpace),
            (IoKind::Write, libc::EDQUOT, K::NoSpace),
            (IoKind::WriteZeroes, libc::ENOSPC, K::NoSpace),
            (IoKind::Read, libc::EFAULT, K::ClientMemory),
            (IoKind::Write, libc::EROFS, K::ReadOnly),
            (IoKind::Read, libc::EBADF, K::ReadMedium),
            (IoKind::Discard, libc::EOPNOTSUPP, K::Unsupported),
            (IoKind::Read, libc::ENXIO, K::Offline),
            (IoKind::Read, libc::ECANCELED, K::Cancelled),
        ] {
            let expected = IoError::with_errno(class, errno);
            assert_eq!(classify(kind, errno), expected, "{kind:?} {errno}");
        }
    }
}
