//! Errors of requests, and violations of the protocol.

use std::fmt;

/// Error of a request on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ErrorCode {
    /// Operation not permitted: a change of a read-only export.
    Perm = 1,
    /// Input/output error.
    Io = 5,
    /// Cannot allocate memory.
    NoMemory = 12,
    /// Invalid argument.
    Invalid = 22,
    /// No space left on device, or a write beyond the end.
    NoSpace = 28,
    /// Value too large.
    Overflow = 75,
    /// Operation not supported: a fast zero that would not be fast.
    NotSupported = 95,
    /// The server is shutting down.
    Shutdown = 108,
}

impl ErrorCode {
    /// All codes.
    pub const ALL: [ErrorCode; 8] = [
        ErrorCode::Perm,
        ErrorCode::Io,
        ErrorCode::NoMemory,
        ErrorCode::Invalid,
        ErrorCode::NoSpace,
        ErrorCode::Overflow,
        ErrorCode::NotSupported,
        ErrorCode::Shutdown,
    ];

    /// Returns the value on the wire.
    pub const fn value(self) -> u32 {
        self as u32
    }

    /// Returns the error with this value. Other values mean [`ErrorCode::Invalid`], as the protocol requires.
    pub fn from_value(value: u32) -> ErrorCode {
        let known = ErrorCode::ALL.iter().find(|code| code.value() == value);
        known.copied().unwrap_or(ErrorCode::Invalid)
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ErrorCode::Perm => "operation not permitted",
            ErrorCode::Io => "input/output error",
            ErrorCode::NoMemory => "out of memory",
            ErrorCode::Invalid => "invalid argument",
            ErrorCode::NoSpace => "no space left on device",
            ErrorCode::Overflow => "value too large",
            ErrorCode::NotSupported => "operation not supported",
            ErrorCode::Shutdown => "server is shutting down",
        })
    }
}

impl std::error::Error for ErrorCode {}

/// Input after which the connection must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The client flags have unknown bits.
    ClientFlags(u32),
    /// A header does not start with its magic number.
    Magic,
    /// The data of an option is longer than any server must read.
    OptionLength(u32),
    /// `NBD_OPT_EXPORT_NAME` names an export that does not exist, or follows extended headers.
    ExportName,
    /// `NBD_OPT_EXPORT_NAME` before TLS, at a server that requires TLS.
    TlsRequired,
    /// Unencrypted bytes follow `NBD_OPT_STARTTLS`.
    BytesBeforeTls,
    /// Encrypted bytes are malformed.
    TlsRecord,
    /// The payload of a request or reply exceeds the limit.
    PayloadLength(u64),
    /// The peer's reply breaks a rule; the text names it.
    Reply(&'static str),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Violation::ClientFlags(flags) => write!(f, "unknown client flags {flags:#x}"),
            Violation::Magic => f.write_str("wrong magic number"),
            Violation::OptionLength(length) => write!(f, "option of {length} bytes"),
            Violation::ExportName => f.write_str("no export of this name"),
            Violation::TlsRequired => f.write_str("TLS is required"),
            Violation::BytesBeforeTls => f.write_str("unencrypted bytes after NBD_OPT_STARTTLS"),
            Violation::TlsRecord => f.write_str("malformed TLS record"),
            Violation::PayloadLength(length) => write!(f, "payload of {length} bytes"),
            Violation::Reply(rule) => f.write_str(rule),
        }
    }
}

impl std::error::Error for Violation {}
