//! Output queue of a connection: headers and small data as bytes, command data as references into the caller's buffers.

/// One piece of output, in stream order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Literal bytes.
    Bytes(&'a [u8]),
    /// Bytes of a buffer passed to `data_in`, which must stay valid until they are sent.
    Data {
        /// The caller's identifier of the buffer.
        buffer: u64,
        /// Offset of the first byte.
        offset: u32,
        /// Length in bytes.
        length: u32,
    },
}

#[derive(Clone, Copy, Debug)]
enum Entry {
    Bytes {
        start: usize,
        end: usize,
    },
    Data {
        buffer: u64,
        offset: u32,
        length: u32,
    },
}

/// A queue of pieces. Swap it for an empty one to send it while the connection continues. [`Outgoing::clear`] retains the
/// memory.
#[derive(Debug, Default)]
pub struct Outgoing {
    bytes: Vec<u8>,
    entries: Vec<Entry>,
    length: u64,
}

impl Outgoing {
    /// Returns true if the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the total number of bytes.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Returns the number of pieces.
    pub fn pieces_len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the pieces in order.
    pub fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        self.entries.iter().map(|entry| match *entry {
            Entry::Bytes { start, end } => Piece::Bytes(&self.bytes[start..end]),
            Entry::Data {
                buffer,
                offset,
                length,
            } => Piece::Data {
                buffer,
                offset,
                length,
            },
        })
    }

    /// Removes all pieces.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.entries.clear();
        self.length = 0;
    }

    /// Appends the bytes that `write` appends to its argument.
    pub(crate) fn bytes(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let start = self.bytes.len();
        write(&mut self.bytes);
        let end = self.bytes.len();
        self.length += (end - start) as u64;
        match self.entries.last_mut() {
            _ if start == end => {}
            Some(Entry::Bytes { end: last, .. }) => *last = end,
            _ => self.entries.push(Entry::Bytes { start, end }),
        }
    }

    pub(crate) fn data(&mut self, buffer: u64, offset: u32, length: u32) {
        self.length += u64::from(length);
        self.entries.push(Entry::Data {
            buffer,
            offset,
            length,
        });
    }
}
