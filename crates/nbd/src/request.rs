//! Requests of the transmission phase: headers of both forms, and the rules of each command.

use zerocopy::{FromBytes, IntoBytes};

use crate::wire::{
    CompactRequest, EXTENDED_REQUEST_MAGIC, ExtendedRequest, PAYLOAD_MAX, REQUEST_MAGIC, command,
    command_flag, transmission,
};
use crate::{ErrorCode, Style, Violation};

/// Header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Command flags.
    pub flags: u16,
    /// Command; may be unknown.
    pub command: u16,
    /// The client's identifier.
    pub cookie: u64,
    /// First byte of the range.
    pub offset: u64,
    /// Length of the range or of the payload.
    pub length: u64,
}

/// An operation that passed all checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Reads the range. `unfragmented`: the reply must be one chunk.
    Read {
        /// The flag DF.
        unfragmented: bool,
    },
    /// Writes the payload to the range.
    Write {
        /// Durable on completion.
        fua: bool,
    },
    /// Makes all completed writes durable.
    Flush,
    /// Discards the range.
    Trim {
        /// Durable on completion.
        fua: bool,
    },
    /// Zeroes the range.
    WriteZeroes {
        /// Durable on completion.
        fua: bool,
        /// The space of the range stays allocated.
        no_hole: bool,
        /// Fails if it is not faster than a write.
        fast: bool,
    },
    /// Reads the range into a cache of the server.
    Cache,
    /// Returns the extents of the range.
    BlockStatus {
        /// One extent per context, within the range.
        one: bool,
    },
    /// Ends the connection after all other requests, without a reply.
    Disconnect,
}

/// Properties of a connection that requests are checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Form of requests.
    pub style: Style,
    /// Advertised transmission flags.
    pub flags: u16,
    /// Minimum block size in bytes, a power of two.
    pub minimum_block: u32,
    /// A metadata context is selected.
    pub has_contexts: bool,
}

impl Request {
    /// Returns the length of a request's header.
    pub const fn header_length(style: Style) -> usize {
        match style {
            Style::Extended => ExtendedRequest::LENGTH,
            Style::Simple | Style::Structured => CompactRequest::LENGTH,
        }
    }

    /// Parses the header at the start of `bytes`. Returns `None` if it is incomplete.
    ///
    /// # Errors
    /// If the magic number is wrong. The next request cannot be found then.
    #[inline]
    pub fn decode(bytes: &[u8], style: Style) -> Result<Option<Request>, Violation> {
        if style == Style::Extended {
            let Ok((header, _)) = ExtendedRequest::ref_from_prefix(bytes) else {
                return Ok(None);
            };
            if header.magic != EXTENDED_REQUEST_MAGIC {
                return Err(Violation::Magic);
            }
            return Ok(Some(Request {
                flags: header.flags.get(),
                command: header.command.get(),
                cookie: header.cookie.get(),
                offset: header.offset.get(),
                length: header.length.get(),
            }));
        }
        let Ok((header, _)) = CompactRequest::ref_from_prefix(bytes) else {
            return Ok(None);
        };
        if header.magic != REQUEST_MAGIC {
            return Err(Violation::Magic);
        }
        Ok(Some(Request {
            flags: header.flags.get(),
            command: header.command.get(),
            cookie: header.cookie.get(),
            offset: header.offset.get(),
            length: header.length.get().into(),
        }))
    }

    /// Appends the header. The length of a compact request is truncated to 32 bits.
    pub fn encode(&self, style: Style, output: &mut Vec<u8>) {
        if style == Style::Extended {
            let header = ExtendedRequest {
                magic: EXTENDED_REQUEST_MAGIC.into(),
                flags: self.flags.into(),
                command: self.command.into(),
                cookie: self.cookie.into(),
                offset: self.offset.into(),
                length: self.length.into(),
            };
            return output.extend_from_slice(header.as_bytes());
        }
        let header = CompactRequest {
            magic: REQUEST_MAGIC.into(),
            flags: self.flags.into(),
            command: self.command.into(),
            cookie: self.cookie.into(),
            offset: self.offset.into(),
            length: (self.length as u32).into(),
        };
        output.extend_from_slice(header.as_bytes());
    }

    /// Returns the length of the payload that follows the header.
    ///
    /// # Errors
    /// If it exceeds [`PAYLOAD_MAX`]. Reading it would be a denial of service.
    #[inline]
    pub fn payload(&self, style: Style) -> Result<u32, Violation> {
        let has_payload = match style {
            Style::Simple | Style::Structured => self.command == command::WRITE,
            // A write without the flag also has a payload: QEMU accepts it, too.
            Style::Extended => {
                self.command == command::WRITE || self.has(command_flag::PAYLOAD_LEN)
            }
        };
        match has_payload {
            true if self.length > u64::from(PAYLOAD_MAX) => {
                Err(Violation::PayloadLength(self.length))
            }
            true => Ok(self.length as u32),
            false => Ok(0),
        }
    }

    #[inline]
    fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Returns the operation of the request on an export of `size` bytes.
    ///
    /// # Errors
    /// The error of the reply. Nothing is executed; the caller skips the payload.
    #[inline]
    pub fn check(&self, rules: &Rules, size: u64) -> Result<Action, ErrorCode> {
        let offers = |flag: u16| rules.flags & flag != 0;
        let allowed = match self.command {
            command::READ if offers(transmission::SEND_DF) => command_flag::DF,
            command::WRITE if rules.style == Style::Extended => command_flag::PAYLOAD_LEN,
            command::WRITE_ZEROES if offers(transmission::SEND_FAST_ZERO) => {
                command_flag::NO_HOLE | command_flag::FAST_ZERO
            }
            command::WRITE_ZEROES => command_flag::NO_HOLE,
            command::BLOCK_STATUS => command_flag::REQ_ONE,
            _ => 0,
        };
        // FUA is valid for all commands. Some clients set it on commands that write nothing.
        if self.flags & !(allowed | command_flag::FUA) != 0 {
            return Err(ErrorCode::Invalid);
        }
        let fua = self.has(command_flag::FUA);
        let action = match self.command {
            // Offset and length are reserved.
            command::FLUSH => return Ok(Action::Flush),
            command::DISC => return Ok(Action::Disconnect),
            command::READ => Action::Read {
                unfragmented: self.has(command_flag::DF),
            },
            command::WRITE => Action::Write { fua },
            command::TRIM if offers(transmission::SEND_TRIM) => Action::Trim { fua },
            command::CACHE => Action::Cache,
            command::WRITE_ZEROES if offers(transmission::SEND_WRITE_ZEROES) => {
                Action::WriteZeroes {
                    fua,
                    no_hole: self.has(command_flag::NO_HOLE),
                    fast: self.has(command_flag::FAST_ZERO),
                }
            }
            command::BLOCK_STATUS if rules.has_contexts && self.length > 0 => Action::BlockStatus {
                one: self.has(command_flag::REQ_ONE),
            },
            command::TRIM | command::WRITE_ZEROES if offers(transmission::READ_ONLY) => {
                return Err(ErrorCode::Perm);
            }
            _ => return Err(ErrorCode::Invalid),
        };
        self.check_range(action, rules, size)?;
        Ok(action)
    }

    #[inline]
    fn check_range(&self, action: Action, rules: &Rules, size: u64) -> Result<(), ErrorCode> {
        let (changes, beyond_end) = match action {
            Action::Write { .. } | Action::WriteZeroes { .. } => (true, ErrorCode::NoSpace),
            Action::Trim { .. } => (true, ErrorCode::Invalid),
            _ => (false, ErrorCode::Invalid),
        };
        if changes && rules.flags & transmission::READ_ONLY != 0 {
            return Err(ErrorCode::Perm);
        }
        let mask = u64::from(rules.minimum_block).wrapping_sub(1);
        if (self.offset | self.length) & mask != 0 {
            return Err(ErrorCode::Invalid);
        }
        if self.length > size || self.offset > size - self.length {
            return Err(beyond_end);
        }
        if matches!(action, Action::Read { .. }) && self.length > u64::from(PAYLOAD_MAX) {
            return Err(match rules.style {
                Style::Simple => ErrorCode::Invalid,
                Style::Structured | Style::Extended => ErrorCode::Overflow,
            });
        }
        Ok(())
    }
}
