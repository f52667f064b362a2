//! How an I/O fails. Callers match the few kinds; the errno survives to the log.

use std::fmt;

/// What became of an I/O.
pub type IoOutcome = Result<(), IoError>;

/// The few classes of failure that a transport tells apart on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoErrorKind {
    /// The range lies (partly) beyond the end of the disk.
    OutOfRange,
    /// A write to a read-only disk.
    ReadOnly,
    /// The disk cannot do this kind of I/O at all.
    Unsupported,
    /// The store below the disk is full (`ENOSPC`, `EDQUOT`).
    NoSpace,
    /// The store could not read the data.
    ReadMedium,
    /// The store could not write, or could not make durable what was written.
    WriteMedium,
    /// The client's memory went away under the I/O (`EFAULT`).
    ClientMemory,
    /// The disk is gone or cannot be reached.
    Offline,
    /// The disk is there, but closed to all but an operation on the whole of it.
    Closed,
    /// The I/O was cancelled. A write may have been done in part.
    Cancelled,
    /// A compare and write found other data, and wrote nothing.
    Miscompare,
    /// It took longer than the disk allows, and was cancelled. A write may have been done in part.
    TimedOut,
}

impl IoErrorKind {
    /// How many there are.
    pub const COUNT: usize = 12;

    /// All, in order.
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

    /// One word, for programs that read it.
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

/// Why a SCSI device failed an I/O: sense key, additional sense code and its qualifier (SPC-5, 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSense {
    /// The sense key.
    pub key: u8,
    /// The additional sense code.
    pub code: u8,
    /// Its qualifier.
    pub qualifier: u8,
}

/// A failed I/O: its class, the errno where the kernel gave one, the sense where the device is a SCSI device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoError {
    /// The class that decides the answer on the wire, where no sense does.
    pub kind: IoErrorKind,
    /// What the device says, for SCSI transports to pass on.
    pub sense: Option<DeviceSense>,
    /// The errno behind it, 0 where there was none.
    pub errno: i32,
    /// Bytes from the start that are known to have been transferred: the device's residual is what is missing to the length.
    pub transferred: u32,
}

// An outcome is returned in two registers.
const _: () = assert!(size_of::<IoOutcome>() <= 16);

impl IoError {
    /// A failure that no errno stands behind.
    pub const fn new(kind: IoErrorKind) -> Self {
        IoError::with_errno(kind, 0)
    }

    /// A failure with the errno behind it.
    pub const fn with_errno(kind: IoErrorKind, errno: i32) -> Self {
        IoError {
            kind,
            errno,
            sense: None,
            transferred: 0,
        }
    }

    /// A failure that a SCSI device reports, after so many bytes.
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
            IoErrorKind::Unsupported => "disk cannot do this",
            IoErrorKind::NoSpace => "no space left below the disk",
            IoErrorKind::ReadMedium => "read failed",
            IoErrorKind::WriteMedium => "write failed",
            IoErrorKind::ClientMemory => "client memory is gone",
            IoErrorKind::Offline => "disk is offline",
            IoErrorKind::Closed => "disk is being sanitized or formatted, or that failed",
            IoErrorKind::Cancelled => "cancelled",
            IoErrorKind::Miscompare => "compared data differ",
            IoErrorKind::TimedOut => "took longer than io_timeout",
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
    fn an_error_says_what_is_known_of_it() {
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
