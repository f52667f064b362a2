//! Parses replies of a server.

use zerocopy::FromBytes;

use crate::fields::FieldReader;
use crate::reply::Descriptor;
use crate::wire::{
    EXTENDED_REPLY_MAGIC, ExtendedReply, PAYLOAD_MAX, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC,
    SimpleReply, StructuredReply, chunk,
};
use crate::{ErrorCode, Style, Violation};

/// Maximum payload of a chunk: data and its offset.
const CHUNK_MAX: u64 = PAYLOAD_MAX as u64 + 8;

/// Header of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Cookie of the request.
    pub cookie: u64,
    /// Type of the chunk.
    pub kind: u16,
    /// The reply ends with this chunk.
    pub is_last: bool,
    /// Length of the payload in bytes.
    pub length: u32,
}

/// Header of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Simple reply. The data of a successful read follow.
    Simple {
        /// Cookie of the request.
        cookie: u64,
        /// Error of the request.
        error: Option<ErrorCode>,
    },
    /// Chunk of a structured or extended reply. Its payload follows.
    Chunk(Chunk),
}

/// Parses the header at the start of `bytes`. Returns it with its length, or `None` if it is incomplete.
///
/// # Errors
/// If the stream cannot be parsed any more.
#[inline]
pub fn decode(bytes: &[u8], style: Style) -> Result<Option<(Reply, usize)>, Violation> {
    let Some(magic) = FieldReader(bytes).u32() else {
        return Ok(None);
    };
    let (cookie, kind, flags, length, used) = match (magic, style) {
        (SIMPLE_REPLY_MAGIC, Style::Simple | Style::Structured) => {
            let Ok((header, _)) = SimpleReply::ref_from_prefix(bytes) else {
                return Ok(None);
            };
            let error = header.error.get();
            let error = (error != 0).then(|| ErrorCode::from_value(error));
            let cookie = header.cookie.get();
            return Ok(Some((Reply::Simple { cookie, error }, SimpleReply::LENGTH)));
        }
        (STRUCTURED_REPLY_MAGIC, Style::Structured) => {
            let Ok((header, _)) = StructuredReply::ref_from_prefix(bytes) else {
                return Ok(None);
            };
            let length = u64::from(header.length.get());
            let (kind, flags) = (header.kind.get(), header.flags.get());
            (
                header.cookie.get(),
                kind,
                flags,
                length,
                StructuredReply::LENGTH,
            )
        }
        (EXTENDED_REPLY_MAGIC, Style::Extended) => {
            let Ok((header, _)) = ExtendedReply::ref_from_prefix(bytes) else {
                return Ok(None);
            };
            let (kind, flags) = (header.kind.get(), header.flags.get());
            let length = header.length.get();
            (
                header.cookie.get(),
                kind,
                flags,
                length,
                ExtendedReply::LENGTH,
            )
        }
        _ => return Err(Violation::Magic),
    };
    if length > CHUNK_MAX {
        return Err(Violation::PayloadLength(length));
    }
    let chunk = Chunk {
        cookie,
        kind,
        is_last: flags & chunk::DONE != 0,
        length: length as u32,
    };
    Ok(Some((Reply::Chunk(chunk), used)))
}

/// Payload of a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// The request has ended.
    None,
    /// Data from this offset.
    Data {
        /// First byte.
        offset: u64,
        /// The data.
        data: &'a [u8],
    },
    /// Zeroes from this offset.
    Hole {
        /// First byte.
        offset: u64,
        /// Length in bytes, not 0.
        length: u32,
    },
    /// Extents of a metadata context.
    BlockStatus {
        /// ID of the context.
        context: u32,
        /// The extents, consecutive from the offset of the request.
        descriptors: Vec<Descriptor>,
    },
    /// The request has failed.
    Error {
        /// The error.
        code: ErrorCode,
        /// Message for humans.
        message: &'a str,
    },
}

/// Parses the whole payload of a chunk.
///
/// # Errors
/// If it breaks a rule, after which the connection must end.
pub fn content(kind: u16, payload: &[u8]) -> Result<Content<'_>, Violation> {
    content_up_to(kind, payload, usize::MAX)
}

/// Parses the payload of a chunk, with the first `extents_max` extents of a status.
///
/// # Errors
/// As [`content`].
pub(super) fn content_up_to(
    kind: u16,
    payload: &[u8],
    extents_max: usize,
) -> Result<Content<'_>, Violation> {
    let malformed = Violation::Reply("malformed chunk");
    let mut fields = FieldReader(payload);
    let parsed = match kind {
        chunk::NONE => Some(Content::None),
        chunk::OFFSET_DATA => fields.u64().and_then(|offset| {
            let data = std::mem::take(&mut fields.0);
            (!data.is_empty()).then_some(Content::Data { offset, data })
        }),
        chunk::OFFSET_HOLE => {
            let hole = fields.u64().zip(fields.u32()).filter(|hole| hole.1 > 0);
            hole.map(|(offset, length)| Content::Hole { offset, length })
        }
        chunk::BLOCK_STATUS => block_status(&mut fields, false, extents_max),
        chunk::BLOCK_STATUS_EXT => block_status(&mut fields, true, extents_max),
        _ if kind & chunk::ERROR_BIT != 0 => {
            let error = error(&mut fields);
            // Fields of other errors follow the message.
            fields.0 = &[];
            error
        }
        _ => return Err(Violation::Reply("unknown type of chunk")),
    };
    parsed.filter(|_| fields.is_empty()).ok_or(malformed)
}

/// Parses the first `most` extents of a status. `is_extended`: with a count, and entries of 128 bits.
fn block_status<'a>(
    fields: &mut FieldReader<'a>,
    is_extended: bool,
    most: usize,
) -> Option<Content<'a>> {
    let context = fields.u32()?;
    let (count, entry_bytes) = match is_extended {
        true => (fields.u32()? as usize, 16),
        false => (fields.0.len() / 8, 8),
    };
    let parsed = count.min(most);
    let mut descriptors = Vec::with_capacity(parsed.min(fields.0.len() / entry_bytes));
    for _ in 0..parsed {
        let (length, flags) = match is_extended {
            // All contexts with a meaning for this client have 32 flags.
            true => (fields.u64()?, fields.u64()? as u32),
            false => (fields.u32()?.into(), fields.u32()?),
        };
        if length == 0 {
            return None;
        }
        descriptors.push(Descriptor { length, flags });
    }
    fields.bytes((count - parsed).checked_mul(entry_bytes)?)?;
    (!descriptors.is_empty()).then_some(Content::BlockStatus {
        context,
        descriptors,
    })
}

fn error<'a>(fields: &mut FieldReader<'a>) -> Option<Content<'a>> {
    let code = fields.u32().filter(|code| *code != 0)?;
    let length = fields.u16()?;
    let message = fields.bytes(length.into())?;
    Some(Content::Error {
        code: ErrorCode::from_value(code),
        message: str::from_utf8(message).unwrap_or_default(),
    })
}
