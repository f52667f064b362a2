//! I/O errors. Callers match a few kinds; the errno is preserved for the log.

use std::fmt;

/// Outcome of an I/O.
pub type IoOutcome = Result<(), IoError>;

/// Classes of failure that a transport distinguishes on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoErrorKind {
    /// The range is partly or completely beyond the end of the disk.
    OutOfRange,
    /// A write to a read-only disk.
    ReadOnly,
    /// The disk does not support this kind of I/O.
    Unsupported,
    /// The underlying storage is full (`ENOSPC`, `EDQUOT`).
    NoSpace,
    /// The storage could not read the data.
    ReadMedium,
    /// The storage could not write data or make it durable.
    WriteMedium,
    /// The client's memory disappeared during the I/O (`EFAULT`).
    ClientMemory,
    /// The disk is removed or unreachable.
    Offline,
    /// The disk is closed to all I/O except that of an operation on the whole disk.
    Closed,
    /// The I/O was cancelled. A write may be partly done.
    Cancelled,
    /// A compare and write found other data and wrote nothing.
    Miscompare,
    /// The I/O exceeded the disk's timeout and was cancelled. A write may be partly done.
    TimedOut,
}

impl IoErrorKind {
    /// Number of kinds.
    pub const COUNT: usize = 12;

    /// All kinds, in order.
    pub const ALL: [IoErrorKind; IoErrorKind::COUNT] = [
        IoErrorKind::OutOfRange,
        IoErrorKind::ReadOnly,
        IoErrorKind::Unsupported,
        IoErrorKind::NoSpace,
        IoErrorKind::ReadMedium,
        IoErrorKind::WriteMedium,
        IoErrorKind::ClientMemory,
        IoErrorKind::Offline,
        IoErrorKind::Closed,
        IoErrorKind::Cancelled,
        IoErrorKind::Miscompare,
        IoErrorKind::TimedOut,
    ];

    /// Returns a machine-readable word.
    pub const fn word(self) -> &'static str {
        match self {
            IoErrorKind::OutOfRange => "out_of_range",
            IoErrorKind::ReadOnly => "read_only",
            IoErrorKind::Unsupported => "unsupported",
            IoErrorKind::NoSpace => "no_space",
            IoErrorKind::ReadMedium => "read_medium",
            IoErrorKind::WriteMedium => "write_medium",
            IoErrorKind::ClientMemory => "client_memory",
            IoErrorKind::Offline => "offline",
            IoErrorKind::Closed => "closed",
            IoErrorKind::Cancelled => "cancelled",
            IoErrorKind::Miscompare => "miscompare",
            IoErrorKind::TimedOut => "timed_out",
        }
    }
}

/// Sense of a failed I/O of a SCSI device: sense key, additional sense code and qualifier (SPC-5, 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSense {
    /// The sense key.
    pub key: u8,
    /// The additional sense code.
    pub code: u8,
    /// The additional sense code qualifier.
    pub qualifier: u8,
}

/// A failed I/O: class, errno if the kernel returned one, sense if the device is a SCSI device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoError {
    /// Class that selects the wire status if there is no sense.
    pub kind: IoErrorKind,
    /// Sense of the device, passed on by SCSI transports.
    pub sense: Option<DeviceSense>,
    /// Underlying errno; 0 if there is none.
    pub errno: i32,
    /// Bytes from the start that were transferred; the device's residual is the rest of the length.
    pub transferred: u32,
}

// An outcome is returned in two registers.
const _: () = assert!(size_of::<IoOutcome>() <= 16);

impl IoError {
    /// Creates an error without an errno.
    pub const fn new(kind: IoErrorKind) -> Self {
        IoError::with_errno(kind, 0)
    }

    /// Creates an error with an errno.
    pub const fn with_errno(kind: IoErrorKind, errno: i32) -> Self {
        IoError {
            kind,
            errno,
            sense: None,
            transferred: 0,
        }
    }

    /// Creates an error reported by a SCSI device after `transferred` bytes.
    pub const fn with_sense(kind: IoErrorKind, sense: DeviceSense, transferred: u32) -> Self {
        IoError {
            sense: Some(sense),
            transferred,
            ..IoError::new(kind)
        }
    }
}

impl From<IoErrorKind> for IoError {
    fn from(kind: IoErrorKind) -> Self {
        IoError::new(kind)
    }
}

impl fmt::Display for IoErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IoErrorKind::OutOfRange => "range beyond the end of the disk",
            IoErrorKind::ReadOnly => "disk is read-only",
            IoErrorKind::Unsupported => "operation not supported by the disk",
            IoErrorKind::NoSpace => "no space left on the device of the disk",
            IoErrorKind::ReadMedium => "read failed",
            IoErrorKind::WriteMedium => "write failed",
            IoErrorKind::ClientMemory => "client memory is no longer mapped",
            IoErrorKind::Offline => "disk is offline",
            IoErrorKind::Closed => {
                "disk is being sanitized or formatted, or that operation has failed"
            }
            IoErrorKind::Cancelled => "cancelled",
            IoErrorKind::Miscompare => "compared data differ",
            IoErrorKind::TimedOut => "I/O took longer than io_timeout",
        })
    }
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)?;
        if let Some(DeviceSense {
            key,
            code,
            qualifier,
        }) = self.sense
        {
            write!(f, ": sense key {key:x}h, code {code:02x}h/{qualifier:02x}h")?;
        }
        match self.errno {
            0 => Ok(()),
            errno => write!(f, ": {}", std::io::Error::from_raw_os_error(errno)),
        }
    }
}

impl std::error::Error for IoError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_text_has_kind_and_errno() {
        let sense = DeviceSense {
            key: 3,
            code: 0x11,
            qualifier: 0,
        };
        for (error, text) in [
            (IoErrorKind::Offline.into(), "disk is offline"),
            (
                IoError::with_errno(IoErrorKind::ReadMedium, 5),
                "read failed: Input/output error (os error 5)",
            ),
            (
                IoError::with_sense(IoErrorKind::ReadMedium, sense, 512),
                "read failed: sense key 3h, code 11h/00h",
            ),
        ] {
            assert_eq!(error.to_string(), text);
        }
    }
}
