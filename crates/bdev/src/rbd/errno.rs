//! Maps an errno of librbd to an I/O error.

use block::{IoError, IoErrorKind, IoKind};

pub(super) fn classify(kind: IoKind, errno: i32) -> IoError {
    let class = match errno {
        // An exhausted pool quota counts as a full store.
        libc::ENOSPC | libc::EDQUOT => IoErrorKind::NoSpace,
        // Blocklisted client; removed image, pool or snapshot; `rados_osd_op_timeout`, if set.
        libc::ESHUTDOWN
        | libc::ENOENT
        | libc::ENODEV
        | libc::ENXIO
        | libc::ESTALE
        | libc::ENOTCONN
        | libc::ETIMEDOUT => IoErrorKind::Offline,
        // Another client took the exclusive lock, or capabilities do not suffice.
        libc::EROFS | libc::EPERM | libc::EACCES if kind != IoKind::Read => IoErrorKind::ReadOnly,
        // A range beyond the end: the image was shrunk.
        libc::EINVAL => IoErrorKind::OutOfRange,
        libc::EOPNOTSUPP | libc::ENOSYS => IoErrorKind::Unsupported,
        // A compare and write with a failed comparison.
        libc::EILSEQ if matches!(kind, IoKind::CompareAndWrite | IoKind::ReplaceState) => {
            IoErrorKind::Miscompare
        }
        libc::ECANCELED => IoErrorKind::Cancelled,
        _ if matches!(kind, IoKind::Read | IoKind::BlockStatus) => IoErrorKind::ReadMedium,
        _ => IoErrorKind::WriteMedium,
    };
    IoError::with_errno(class, errno)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errno_decides_the_class_and_survives() {
        use IoErrorKind as K;
        for (kind, errno, class) in [
            (IoKind::Write, 28, K::NoSpace),
            (IoKind::Write, 122, K::NoSpace),
            (IoKind::Read, 108, K::Offline),
            (IoKind::Write, 108, K::Offline),
            (IoKind::Read, 2, K::Offline),
            (IoKind::Write, 30, K::ReadOnly),
            (IoKind::Read, 1, K::ReadMedium),
            (IoKind::Write, 22, K::OutOfRange),
            (IoKind::WriteZeroes, 95, K::Unsupported),
            (IoKind::Read, 5, K::ReadMedium),
            (IoKind::Flush, 5, K::WriteMedium),
            (IoKind::CompareAndWrite, 84, K::Miscompare),
            (IoKind::Write, 84, K::WriteMedium),
        ] {
            let expected = IoError::with_errno(class, errno);
            assert_eq!(classify(kind, errno), expected, "{kind:?} {errno}");
        }
    }
}
