//! Additional header segments (RFC 7143, 11.2.2): the rest of a long CDB, the read length of a bidirectional command.

use smallvec::SmallVec;

/// The longest CDB that SPC-5 knows is 260 bytes; a PDU's header leaves room for more.
const CDB_MAX: usize = 260;

const TYPE_EXTENDED_CDB: u8 = 1;
const TYPE_BIDIRECTIONAL_READ_LENGTH: u8 = 2;

/// What the additional header segments of a SCSI Command say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdditionalHeaders {
    /// CDB bytes after the first 16; empty for short CDBs.
    pub extended_cdb: SmallVec<[u8; 16]>,
    /// Expected bidirectional read data length in bytes.
    pub bidirectional_read_length: Option<u32>,
}

/// An additional header segment that cannot be taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AhsError {
    /// It says more bytes than there are.
    #[error("additional header segment of {length} bytes, {left} left")]
    TooLong {
        /// Bytes that it says, with its head.
        length: usize,
        /// Bytes there are.
        left: usize,
    },
    /// Length does not fit the type.
    #[error("additional header segment of type {kind} with length {length}")]
    BadLength {
        /// AHSType.
        kind: u8,
        /// AHSLength.
        length: usize,
    },
    /// A type twice, or one that nobody knows.
    #[error("additional header segment of type {0} unknown or repeated")]
    BadType(u8),
}

/// Takes the segments apart; `bytes` is all of them, a multiple of four bytes.
pub fn additional_headers(mut bytes: &[u8]) -> Result<AdditionalHeaders, AhsError> {
    let mut found = AdditionalHeaders::default();
    while let Some((head, body)) = bytes.split_first_chunk::<4>() {
        let length = usize::from(u16::from_be_bytes([head[0], head[1]]));
        let kind = head[2] & 0x3f;
        // AHSLength counts the byte after the type and what follows it: one of those is in `head`
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
    /// The segments as bytes, a multiple of four.
    ///
    /// # Panics
    /// When the CDB is longer than SPC allows: CDBs that are sent are ours.
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
