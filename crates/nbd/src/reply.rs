//! Replies of a server. Each function appends a complete message, or the part of a message before its data.

use zerocopy::IntoBytes;

use crate::wire::{
    EXTENDED_REPLY_MAGIC, ExtendedReply, SIMPLE_REPLY_MAGIC, STRING_MAX, STRUCTURED_REPLY_MAGIC,
    SimpleReply, StructuredReply, chunk,
};
use crate::{ErrorCode, Style};

/// Maximum length of a reply to a read before its data.
pub const READ_HEADER_MAX: usize = ExtendedReply::LENGTH + 8;

/// Identity of a request in its replies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplyTo {
    /// Cookie of the request.
    pub cookie: u64,
    /// Offset of the request.
    pub offset: u64,
}

/// A range with one state in a metadata context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Length in bytes, not 0.
    pub length: u64,
    /// Flags as the context defines them.
    pub flags: u32,
}

#[inline]
fn simple(output: &mut Vec<u8>, to: ReplyTo, error: u32) {
    let header = SimpleReply {
        magic: SIMPLE_REPLY_MAGIC.into(),
        error: error.into(),
        cookie: to.cookie.into(),
    };
    output.extend_from_slice(header.as_bytes());
}

/// Appends the header of a chunk with a payload of `length` bytes.
#[inline]
fn chunk(output: &mut Vec<u8>, style: Style, to: ReplyTo, kind: u16, flags: u16, length: u32) {
    if style == Style::Extended {
        let header = ExtendedReply {
            magic: EXTENDED_REPLY_MAGIC.into(),
            flags: flags.into(),
            kind: kind.into(),
            cookie: to.cookie.into(),
            offset: to.offset.into(),
            length: u64::from(length).into(),
        };
        return output.extend_from_slice(header.as_bytes());
    }
    let header = StructuredReply {
        magic: STRUCTURED_REPLY_MAGIC.into(),
        flags: flags.into(),
        kind: kind.into(),
        cookie: to.cookie.into(),
        length: length.into(),
    };
    output.extend_from_slice(header.as_bytes());
}

/// Appends the reply of a successful request without data.
#[inline]
pub fn done(output: &mut Vec<u8>, style: Style, to: ReplyTo) {
    match style {
        Style::Simple => simple(output, to, 0),
        Style::Structured | Style::Extended => {
            chunk(output, style, to, chunk::NONE, chunk::DONE, 0);
        }
    }
}

/// Appends the reply of a failed request. Simple replies do not contain the message.
pub fn error(output: &mut Vec<u8>, style: Style, to: ReplyTo, code: ErrorCode, message: &str) {
    if style == Style::Simple {
        return simple(output, to, code.value());
    }
    let message = match message.len() {
        0..=STRING_MAX => message.as_bytes(),
        _ => &[],
    };
    let length = 6 + message.len() as u32;
    chunk(output, style, to, chunk::ERROR, chunk::DONE, length);
    output.extend_from_slice(&code.value().to_be_bytes());
    output.extend_from_slice(&(message.len() as u16).to_be_bytes());
    output.extend_from_slice(message);
}

/// Appends the part of a read's reply before its data. `length` bytes of data must follow, in full.
#[inline]
pub fn data_header(output: &mut Vec<u8>, style: Style, to: ReplyTo, length: u32) {
    match style {
        Style::Simple => simple(output, to, 0),
        // A chunk has at least one byte of data.
        Style::Structured | Style::Extended if length == 0 => done(output, style, to),
        Style::Structured | Style::Extended => {
            let kind = chunk::OFFSET_DATA;
            chunk(
                output,
                style,
                to,
                kind,
                chunk::DONE,
                length.saturating_add(8),
            );
            output.extend_from_slice(&to.offset.to_be_bytes());
        }
    }
}

/// Extents of one metadata context, consecutive from the offset of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextStatus {
    /// ID of the context.
    pub context: u32,
    /// The extents, at least one.
    pub descriptors: Vec<Descriptor>,
}

/// Appends one chunk for each metadata context. All chunks describe the same range, up to the end of the shortest status: some clients
/// advance by the length of one context. Lengths above 32 bits are reduced to a multiple of `unit` in structured replies.
///
/// # Panics
/// If a context has no descriptor, and in the style of simple replies.
pub fn block_status(
    output: &mut Vec<u8>,
    style: Style,
    to: ReplyTo,
    contexts: &[ContextStatus],
    unit: u32,
) {
    assert!(
        style > Style::Simple,
        "the handshake refuses contexts without structured replies"
    );
    let longest = match style {
        Style::Extended => u64::MAX,
        Style::Simple | Style::Structured => u64::from(u32::MAX - u32::MAX % unit.max(1)),
    };
    let lengths = contexts
        .iter()
        .map(|one| described(&one.descriptors, longest));
    let length = lengths.min().unwrap_or_default();
    assert!(length > 0, "a status has a descriptor");
    for (at, one) in contexts.iter().enumerate() {
        let descriptors = cut(&one.descriptors, length);
        let is_last = at + 1 == contexts.len();
        context_status(output, style, to, one.context, &descriptors, is_last);
    }
}

/// Returns the length of the range that a chunk can describe. Nothing may follow an extent that is longer than `longest`.
fn described(descriptors: &[Descriptor], longest: u64) -> u64 {
    let mut length: u64 = 0;
    for one in descriptors {
        length = length.saturating_add(one.length.min(longest));
        if one.length > longest {
            break;
        }
    }
    length
}

/// Returns the extents of the first `length` bytes.
fn cut(descriptors: &[Descriptor], length: u64) -> Vec<Descriptor> {
    let mut left = length;
    let kept = descriptors.iter().map_while(|one| {
        let length = one.length.min(left);
        left -= length;
        (length > 0).then_some(Descriptor { length, ..*one })
    });
    kept.collect()
}

/// Appends the chunk of one context; `is_last`: the reply ends with it.
fn context_status(
    output: &mut Vec<u8>,
    style: Style,
    to: ReplyTo,
    context: u32,
    descriptors: &[Descriptor],
    is_last: bool,
) {
    let flags = if is_last { chunk::DONE } else { 0 };
    let count = descriptors.len() as u32;
    if style == Style::Extended {
        let kind = chunk::BLOCK_STATUS_EXT;
        chunk(output, style, to, kind, flags, 8 + 16 * count);
        output.extend_from_slice(&context.to_be_bytes());
        output.extend_from_slice(&count.to_be_bytes());
        for one in descriptors {
            output.extend_from_slice(&one.length.to_be_bytes());
            output.extend_from_slice(&u64::from(one.flags).to_be_bytes());
        }
        return;
    }
    let kind = chunk::BLOCK_STATUS;
    chunk(output, style, to, kind, flags, 4 + 8 * count);
    output.extend_from_slice(&context.to_be_bytes());
    for one in descriptors {
        // Was cut to 32 bits.
        output.extend_from_slice(&(one.length as u32).to_be_bytes());
        output.extend_from_slice(&one.flags.to_be_bytes());
    }
}
