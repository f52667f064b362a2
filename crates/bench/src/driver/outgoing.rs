//! Bytes that a driver sends on a byte stream: encoded headers, and data of its slots, which is not copied.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Write};

use anyhow::{Context, Result};

/// Maximum number of segments per send.
const PIECES_MAX: usize = 128;

/// A segment to send.
enum Piece {
    /// Bytes of `headers` up to this offset.
    Headers(usize),
    /// Bytes of a slot's data.
    Data { slot: u16, from: u32, to: u32 },
}

/// Segments that were not sent yet.
#[derive(Default)]
pub struct Outgoing {
    headers: Vec<u8>,
    headers_sent: usize,
    pieces: VecDeque<Piece>,
}

impl Outgoing {
    /// Returns true if everything was sent.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Appends headers with a function that only appends bytes.
    #[inline]
    pub fn headers(&mut self, append: impl FnOnce(&mut Vec<u8>)) {
        append(&mut self.headers);
        match self.pieces.back_mut() {
            Some(Piece::Headers(end)) => *end = self.headers.len(),
            _ => self.pieces.push_back(Piece::Headers(self.headers.len())),
        }
    }

    /// Appends bytes `from` to `to` of a slot's data.
    #[inline]
    pub fn data(&mut self, slot: u16, from: u32, to: u32) {
        self.pieces.push_back(Piece::Data { slot, from, to });
    }

    /// Sends segments until the stream blocks. `data` returns the data of a slot.
    pub fn send<'a>(
        &mut self,
        mut stream: impl Write,
        data: impl Fn(u16) -> &'a [u8],
    ) -> Result<()> {
        while !self.pieces.is_empty() {
            let mut slices = [IoSlice::new(&[]); PIECES_MAX];
            let mut start = self.headers_sent;
            for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
                *slice = IoSlice::new(match *piece {
                    Piece::Headers(end) => {
                        let bytes = &self.headers[start..end];
                        start = end;
                        bytes
                    }
                    Piece::Data { slot, from, to } => &data(slot)[from as usize..to as usize],
                });
            }
            let used = self.pieces.len().min(PIECES_MAX);
            match stream.write_vectored(&slices[..used]) {
                Ok(bytes) => self.sent(bytes),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("the server accepts no more data"),
            }
        }
        Ok(())
    }

    fn sent(&mut self, mut bytes: usize) {
        while let Some(piece) = self.pieces.front_mut() {
            let left = match piece {
                Piece::Headers(end) => {
                    let here = bytes.min(*end - self.headers_sent);
                    self.headers_sent += here;
                    bytes -= here;
                    *end - self.headers_sent
                }
                Piece::Data { from, to, .. } => {
                    let here = bytes.min((*to - *from) as usize);
                    *from += here as u32;
                    bytes -= here;
                    (*to - *from) as usize
                }
            };
            if left > 0 {
                return;
            }
            self.pieces.pop_front();
        }
        self.headers.clear();
        self.headers_sent = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Accepts at most three bytes per call, and blocks at every second call.
    struct Dripping(Vec<u8>, bool);

    impl Write for &mut Dripping {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.1 = !self.1;
            if !self.1 {
                return Err(ErrorKind::WouldBlock.into());
            }
            let here = bytes.len().min(3);
            self.0.extend_from_slice(&bytes[..here]);
            Ok(here)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn segments_arrive_whole_and_in_order_through_a_dripping_stream() {
        let data = [b"abcdefgh".to_vec(), b"ABCDEFGH".to_vec()];
        let mut outgoing = Outgoing::default();
        outgoing.headers(|bytes| bytes.extend_from_slice(b"12345"));
        outgoing.headers(|bytes| bytes.extend_from_slice(b"67"));
        outgoing.data(1, 2, 8);
        outgoing.headers(|bytes| bytes.extend_from_slice(b"89"));
        outgoing.data(0, 0, 4);
        let mut stream = Dripping(Vec::new(), false);
        while !outgoing.is_empty() {
            outgoing
                .send(&mut stream, |slot| &data[usize::from(slot)])
                .unwrap();
        }
        assert_eq!(stream.0, b"1234567CDEFGH89abcd");
    }
}
