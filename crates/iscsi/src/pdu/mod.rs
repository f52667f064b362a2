//! PDUs on the wire (RFC 7143, section 11): headers as byte-exact structs, framing, digests.
//!
//! A PDU consists of a basic header segment of 48 bytes, additional header segments, a header digest, a data segment padded
//! to four bytes, and a data digest. [`Decoder`] splits a byte stream into these parts without copying data. [`encode()`]
//! writes a PDU.

mod additional;
mod codes;
mod decoder;
mod digest;
pub(crate) mod encode;
mod headers;

pub use additional::{AdditionalHeaders, AhsError, additional_headers};
pub use codes::*;
pub use decoder::{Decoder, FormatError, Progress};
pub use digest::{Crc32c, crc32c};
pub use encode::{Digests, encode, padding};
pub use headers::*;

/// Length of a basic header segment in bytes.
pub const BHS_LENGTH: usize = 48;
/// The reserved tag for "no task" (RFC 7143, 11.2.1.8 and the sections on the TTT).
pub const NO_TAG: u32 = 0xffff_ffff;
/// Maximum length of a data segment, limited by the 24-bit field.
pub const DATA_SEGMENT_MAX: u32 = 0x00ff_ffff;
