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

/// A failed I/O: its class and, where the kernel gave one, the errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoError {
    /// The class that decides the answer on the wire.
    pub kind: IoErrorKind,
    /// The errno behind it, 0 where there was none.
    pub errno: i32,
}

impl IoError {
    /// A failure that no errno stands behind.
    pub const fn new(kind: IoErrorKind) -> Self {
        IoError { kind, errno: 0 }
    }

    /// A failure with the errno behind it.
    pub const fn with_errno(kind: IoErrorKind, errno: i32) -> Self {
        IoError { kind, errno }
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
        match self.errno {
            0 => write!(f, "{}", self.kind),
            errno => {
                let os = std::io::Error::from_raw_os_error(errno);
                write!(f, "{}: {os}", self.kind)
            }
        }
    }
}

impl std::error::Error for IoError {}
