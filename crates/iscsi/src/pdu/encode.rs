//! Encodes complete PDUs into a byte buffer.

use super::{Bhs, crc32c};

/// Enabled digests of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digests {
    /// A CRC32C after the header segments.
    pub header: bool,
    /// A CRC32C after the data segment.
    pub data: bool,
}

/// Returns the number of padding bytes after a data segment of `length` bytes.
pub const fn padding(length: usize) -> usize {
    length.wrapping_neg() & 3
}

/// Appends a PDU. Sets both length fields of `header`. The length of `ahs` must be a multiple of four.
///
/// # Panics
/// If `ahs` or `data` exceed the range of their length fields. Only locally built PDUs are encoded.
pub fn encode(out: &mut Vec<u8>, mut header: Bhs, ahs: &[u8], data: &[u8], digests: Digests) {
    assert!(
        ahs.len().is_multiple_of(4) && ahs.len() <= 1020,
        "additional headers of {} bytes",
        ahs.len()
    );
    header.lengths.ahs_words = (ahs.len() / 4) as u8;
    header.lengths.set_data(data.len());
    encode_header(out, &header, ahs, digests);
    if !data.is_empty() {
        out.extend_from_slice(data);
        encode_trailer(out, data, digests);
    }
}

/// Appends the padding of a data segment of this length, without a digest.
pub(crate) fn encode_padding(out: &mut Vec<u8>, length: usize) {
    out.extend_from_slice(&[0; 3][..padding(length)]);
}

/// Appends a header (lengths already set) and its digest.
pub(crate) fn encode_header(out: &mut Vec<u8>, header: &Bhs, ahs: &[u8], digests: Digests) {
    let start = out.len();
    out.extend_from_slice(header.bytes());
    out.extend_from_slice(ahs);
    if digests.header {
        let crc = crc32c(&out[start..]);
        out.extend_from_slice(&crc.to_le_bytes());
    }
}

/// Appends the padding and the digest of a data segment.
pub(crate) fn encode_trailer(out: &mut Vec<u8>, data: &[u8], digests: Digests) {
    let pad = &[0; 3][..padding(data.len())];
    out.extend_from_slice(pad);
    if digests.data {
        // The digest covers the padding (RFC 7143, 11.2.3).
        let crc = if pad.is_empty() {
            crc32c(data)
        } else {
            let mut crc = super::Crc32c::new();
            crc.update(data);
            crc.update(pad);
            crc.value()
        };
        out.extend_from_slice(&crc.to_le_bytes());
    }
}
