//! Reads fields of a variable-length message.

use crate::wire::STRING_MAX;

/// The unread rest of a message. Every method returns `None` if the rest is too short.
pub(crate) struct FieldReader<'a>(pub &'a [u8]);

impl<'a> FieldReader<'a> {
    pub fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*bytes)
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// Reads a length of 32 bits and a string of that length.
    pub fn counted_string(&mut self) -> Option<&'a str> {
        let length = self.u32()? as usize;
        string(self.bytes(length)?)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Returns the bytes as a string of the protocol: UTF-8 without NUL, at most [`STRING_MAX`] bytes.
pub(crate) fn string(bytes: &[u8]) -> Option<&str> {
    let text = str::from_utf8(bytes).ok()?;
    (text.len() <= STRING_MAX && !text.contains('\0')).then_some(text)
}
