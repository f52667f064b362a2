//! Additional header segments (RFC 7143, 11.2.2): extended CDB and bidirectional read length.

use smallvec::SmallVec;

/// Length of the longest CDB in SPC-5, in bytes. The PDU format allows more.
const CDB_MAX: usize = 260;

const TYPE_EXTENDED_CDB: u8 = 1;
const TYPE_BIDIRECTIONAL_READ_LENGTH: u8 = 2;

/// Contents of the additional header segments of a SCSI Command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdditionalHeaders {
    /// CDB bytes after the first 16; empty for short CDBs.
    pub extended_cdb: SmallVec<[u8; 16]>,
    /// Expected bidirectional read data length in bytes.
    pub bidirectional_read_length: Option<u32>,
}

/// A malformed additional header segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AhsError {
    /// The declared length exceeds the remaining bytes.
    #[error("additional header segment of {length} bytes, {left} left")]
    TooLong {
        /// Declared length in bytes, including the header.
        length: usize,
        /// Remaining bytes.
        left: usize,
    },
    /// The length is invalid for the type.
    #[error("additional header segment of type {kind} with length {length}")]
    BadLength {
        /// AHSType.
        kind: u8,
        /// AHSLength.
        length: usize,
    },
    /// A repeated or unknown type.
    #[error("additional header segment of type {0} unknown or repeated")]
    BadType(u8),
}

/// Parses all segments. The length of `bytes` is a multiple of four.
pub fn additional_headers(mut bytes: &[u8]) -> Result<AdditionalHeaders, AhsError> {
    let mut found = AdditionalHeaders::default();
    while let Some((head, body)) = bytes.split_first_chunk::<4>() {
        let length = usize::from(u16::from_be_bytes([head[0], head[1]]));
        let kind = head[2] & 0x3f;
        // AHSLength counts the bytes after the type, including the one in `head`.
        let Some(follows) = length.checked_sub(1) else {
            return Err(AhsError::BadLength { kind, length });
        };
        let padded = follows.next_multiple_of(4);
        let (content, rest) = match (body.get(..follows), body.get(padded..)) {
            (Some(content), Some(rest)) => (content, rest),
            _ => {
                return Err(AhsError::TooLong {
                    length: 4 + padded,
                    left: bytes.len(),
                });
            }
        };
        match kind {
            TYPE_EXTENDED_CDB if !found.extended_cdb.is_empty() => {
                return Err(AhsError::BadType(kind));
            }
            TYPE_EXTENDED_CDB if follows == 0 || follows > CDB_MAX - 16 => {
                return Err(AhsError::BadLength { kind, length });
            }
            TYPE_EXTENDED_CDB => found.extended_cdb = SmallVec::from_slice(content),
            TYPE_BIDIRECTIONAL_READ_LENGTH if found.bidirectional_read_length.is_some() => {
                return Err(AhsError::BadType(kind));
            }
            TYPE_BIDIRECTIONAL_READ_LENGTH => {
                let Ok(value) = <[u8; 4]>::try_from(content) else {
                    return Err(AhsError::BadLength { kind, length });
                };
                found.bidirectional_read_length = Some(u32::from_be_bytes(value));
            }
            _ => return Err(AhsError::BadType(kind)),
        }
        bytes = rest;
    }
    Ok(found)
}

impl AdditionalHeaders {
    /// Encodes the segments; the result is a multiple of four bytes.
    ///
    /// # Panics
    /// If the CDB is longer than SPC allows. Only locally built CDBs are encoded.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        if !self.extended_cdb.is_empty() {
            assert!(
                self.extended_cdb.len() <= CDB_MAX - 16,
                "CDB of {} bytes",
                16 + self.extended_cdb.len()
            );
            let length = (self.extended_cdb.len() + 1) as u16;
            bytes.extend_from_slice(&length.to_be_bytes());
            bytes.extend_from_slice(&[TYPE_EXTENDED_CDB, 0]);
            bytes.extend_from_slice(&self.extended_cdb);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        if let Some(length) = self.bidirectional_read_length {
            bytes.extend_from_slice(&[0, 5, TYPE_BIDIRECTIONAL_READ_LENGTH, 0]);
            bytes.extend_from_slice(&length.to_be_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extended_cdb_of_32_bytes_has_ahs_length_17() {
        let mut bytes = vec![0x00, 0x11, 0x01, 0x00];
        bytes.extend(0..16);
        let found = additional_headers(&bytes).unwrap();
        assert_eq!(found.extended_cdb.as_slice(), (0..16).collect::<Vec<u8>>());
        assert_eq!(found.to_bytes(), bytes);
    }

    #[test]
    fn bidirectional_read_length_has_ahs_length_5() {
        let bytes = [0x00, 0x05, 0x02, 0x00, 0x00, 0x01, 0x00, 0x00];
        let found = additional_headers(&bytes).unwrap();
        assert_eq!(found.bidirectional_read_length, Some(65536));
        assert_eq!(found.to_bytes(), bytes);
    }

    #[test]
    fn segment_of_length_zero_is_refused() {
        assert_eq!(
            additional_headers(&[0, 0, 1, 0]),
            Err(AhsError::BadLength { kind: 1, length: 0 })
        );
        assert_eq!(
            additional_headers(&[0, 1, 1, 0]),
            Err(AhsError::BadLength { kind: 1, length: 1 })
        );
    }

    #[test]
    fn segment_that_runs_over_the_end_is_refused() {
        assert!(matches!(
            additional_headers(&[0xff, 0xff, 1, 0]),
            Err(AhsError::TooLong { .. })
        ));
        assert!(matches!(
            additional_headers(&[0, 6, 1, 0, 1, 2, 3, 4]),
            Err(AhsError::TooLong { .. })
        ));
    }
}
