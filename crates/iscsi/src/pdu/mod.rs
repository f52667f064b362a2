//! PDUs on the wire (RFC 7143, section 11): headers as byte-exact structs, framing, digests.
//!
//! A PDU is a basic header segment of 48 bytes, additional header segments, a header digest, a data segment padded to four
//! bytes, a data digest. [`Decoder`] cuts a byte stream into that without copying data; [`encode`] writes it.

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

/// Bytes of a basic header segment.
pub const BHS_LENGTH: usize = 48;
/// The tag that stands for none (RFC 7143, 11.2.1.8 and the TTT's sections).
pub const NO_TAG: u32 = 0xffff_ffff;
/// The largest data segment that the 24-bit field can say.
pub const DATA_SEGMENT_MAX: u32 = 0x00ff_ffff;
