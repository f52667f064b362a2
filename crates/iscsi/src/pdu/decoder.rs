//! Splits a byte stream into PDUs. The decoder buffers one header and nothing more. The caller places data segments and
//! passes their bytes to the digest.
//!
//! Call `push` until [`Progress::Header`], then `take_data` for each piece of the data segment, then `push` until
//! [`Progress::End`].

use zerocopy::FromBytes;

use super::{BHS_LENGTH, Bhs, Crc32c, Digests, crc32c, padding};

const HEADER_MAX: usize = BHS_LENGTH + 1020 + 4;

/// A framing error. The rest of the stream is unusable, so the connection must be dropped (RFC 7143, 7.6 and 7.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The additional header segments exceed the limit.
    #[error("additional headers of {length} bytes > {limit} bytes")]
    AdditionalHeadersTooLong {
        /// Bytes in the PDU.
        length: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// The data segment exceeds the declared limit.
    #[error("data segment of {length} bytes > {limit} bytes")]
    DataSegmentTooLong {
        /// Bytes in the PDU.
        length: u32,
        /// Bytes allowed.
        limit: u32,
    },
    /// Header digest mismatch: no header field is trustworthy, including the lengths.
    #[error("header digest {received:#010x}, computed {computed:#010x}")]
    HeaderDigest {
        /// Digest in the PDU.
        received: u32,
        /// Digest computed over the header.
        computed: u32,
    },
}

/// Progress in the current PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All input was consumed; at least this many more bytes are needed.
    NeedMore(usize),
    /// The header is complete; see [`Decoder::bhs`]. The data segment follows, if there is one.
    Header,
    /// This many bytes of the data segment are pending for [`Decoder::take_data`].
    Data(u32),
    /// The PDU is complete.
    End {
        /// The data digest matches or is disabled.
        digest_ok: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Header,
    Data,
    Trailer,
}

/// Framing state of one direction of a connection.
#[derive(Debug)]
pub struct Decoder {
    header: Box<[u8; HEADER_MAX]>,
    filled: usize,
    phase: Phase,
    data_left: u32,
    trailer: [u8; 8],
    trailer_filled: usize,
    digests: Digests,
    crc: Crc32c,
    ahs_limit: usize,
    data_limit: u32,
}

impl Decoder {
    /// Creates a decoder without digests. `ahs_limit` and `data_limit` are the maximum lengths, in bytes, of the additional
    /// header segments and the data segment.
    pub fn new(ahs_limit: usize, data_limit: u32) -> Self {
        Decoder {
            header: Box::new([0; HEADER_MAX]),
            filled: 0,
            phase: Phase::Header,
            data_left: 0,
            trailer: [0; 8],
            trailer_filled: 0,
            digests: Digests::default(),
            crc: Crc32c::new(),
            ahs_limit,
            data_limit,
        }
    }

    /// Enables or disables digests from the next header on.
    pub fn set_digests(&mut self, digests: Digests) {
        self.digests = digests;
    }

    /// Sets the maximum length of a data segment from the next header on.
    pub fn set_data_limit(&mut self, bytes: u32) {
        self.data_limit = bytes;
    }

    /// Returns the current header; valid from [`Progress::Header`] to [`Progress::End`].
    pub fn bhs(&self) -> Bhs {
        match Bhs::read_from_prefix(&self.header[..]) {
            Ok((bhs, _)) => bhs,
            Err(_) => unreachable!("the buffer is longer than a header"),
        }
    }

    /// Returns the current additional header segments.
    pub fn ahs(&self) -> &[u8] {
        let length = self.bhs().lengths.ahs();
        self.header
            .get(BHS_LENGTH..BHS_LENGTH + length)
            .unwrap_or_default()
    }

    /// Returns the number of pending bytes of the data segment.
    pub fn data_left(&self) -> u32 {
        self.data_left
    }

    /// Returns true if the stream is between two PDUs.
    pub fn is_idle(&self) -> bool {
        self.phase == Phase::Header && self.filled == 0
    }

    /// Consumes bytes of the stream. Returns the number of consumed bytes and the progress.
    pub fn push(&mut self, input: &[u8]) -> Result<(usize, Progress), FormatError> {
        match self.phase {
            Phase::Header => self.push_header(input),
            Phase::Data if self.data_left > 0 => Ok((0, Progress::Data(self.data_left))),
            Phase::Data => {
                self.phase = Phase::Trailer;
                self.trailer_filled = 0;
                Ok(self.push_trailer(input))
            }
            Phase::Trailer => Ok(self.push_trailer(input)),
        }
    }

    /// Adds a piece of the data segment to the digest. The caller stores the bytes.
    ///
    /// # Panics
    /// If the piece is longer than the rest of the segment. That is a bug of the caller, never a fault of the peer.
    pub fn take_data(&mut self, piece: &[u8]) {
        if self.digests.data {
            self.crc.update(piece);
        }
        self.take_unseen(piece.len());
    }

    /// Skips `length` bytes that were received in place. Requires that the data digest is disabled.
    ///
    /// # Panics
    /// If `length` exceeds the rest of the segment.
    pub fn take_unseen(&mut self, length: usize) {
        assert!(
            length <= self.data_left as usize,
            "{length} bytes taken, {} left",
            self.data_left
        );
        self.data_left -= length as u32;
    }

    fn push_header(&mut self, input: &[u8]) -> Result<(usize, Progress), FormatError> {
        let mut used = self.fill(input, BHS_LENGTH);
        if self.filled < BHS_LENGTH {
            return Ok((used, Progress::NeedMore(BHS_LENGTH - self.filled)));
        }
        let lengths = self.bhs().lengths;
        let (ahs, data) = (lengths.ahs(), lengths.data());
        if ahs > self.ahs_limit {
            return Err(FormatError::AdditionalHeadersTooLong {
                length: ahs,
                limit: self.ahs_limit,
            });
        }
        let covered = BHS_LENGTH + ahs;
        let whole = covered + if self.digests.header { 4 } else { 0 };
        used += self.fill(&input[used..], whole);
        if self.filled < whole {
            return Ok((used, Progress::NeedMore(whole - self.filled)));
        }
        if self.digests.header {
            let mut wire = [0; 4];
            wire.copy_from_slice(&self.header[covered..whole]);
            let (received, computed) = (u32::from_le_bytes(wire), crc32c(&self.header[..covered]));
            if received != computed {
                return Err(FormatError::HeaderDigest { received, computed });
            }
        }
        // Checked after the digest, because a corrupt header may have a corrupt length.
        if data > self.data_limit {
            return Err(FormatError::DataSegmentTooLong {
                length: data,
                limit: self.data_limit,
            });
        }
        self.filled = 0;
        self.data_left = data;
        self.phase = Phase::Data;
        if self.digests.data {
            self.crc.reset();
        }
        Ok((used, Progress::Header))
    }

    fn fill(&mut self, input: &[u8], until: usize) -> usize {
        let take = until.saturating_sub(self.filled).min(input.len());
        self.header[self.filled..self.filled + take].copy_from_slice(&input[..take]);
        self.filled += take;
        take
    }

    fn push_trailer(&mut self, input: &[u8]) -> (usize, Progress) {
        let length = self.bhs().lengths.data() as usize;
        let pad = padding(length);
        let digest = self.digests.data && length > 0;
        let whole = pad + if digest { 4 } else { 0 };
        let take = whole.saturating_sub(self.trailer_filled).min(input.len());
        self.trailer[self.trailer_filled..self.trailer_filled + take]
            .copy_from_slice(&input[..take]);
        self.trailer_filled += take;
        if self.trailer_filled < whole {
            return (take, Progress::NeedMore(whole - self.trailer_filled));
        }
        let mut digest_ok = true;
        if digest {
            self.crc.update(&self.trailer[..pad]);
            let mut wire = [0; 4];
            wire.copy_from_slice(&self.trailer[pad..whole]);
            digest_ok = u32::from_le_bytes(wire) == self.crc.value();
        }
        self.phase = Phase::Header;
        (take, Progress::End { digest_ok })
    }
}
