//! Output of a connection: one message at a time, built from all replies queued since the previous message was sent.

use std::io;

use guest_memory::IoBuffer;
use request_engine::{Buffers, SendQueue};
use uring::Message;

use crate::connection::Connection;
use crate::encryption::Encryption;
use crate::progress::Position;

/// Maximum capacity of `headers` that is kept for later replies: a reply to a block status can be much longer than others.
const KEPT_MAX: usize = 64 << 10;

/// A part of the next message, in stream order.
#[derive(Clone, Copy, Debug)]
enum Piece {
    /// Bytes of `headers`.
    Headers(usize),
    /// Bytes of a queued buffer.
    Data { buffer: usize, length: usize },
}

#[derive(Default)]
pub(crate) struct Output {
    pub queue: SendQueue,
    /// Replies, without the data of reads.
    headers: Vec<u8>,
    /// Bytes of `headers` that are in `pieces`.
    listed: usize,
    pieces: Vec<Piece>,
    /// Bytes of queued data.
    data_bytes: u64,
}

impl Output {
    /// Returns the buffer that replies are appended to.
    #[inline]
    pub fn headers(&mut self) -> &mut Vec<u8> {
        &mut self.headers
    }

    fn list_headers(&mut self) {
        if self.headers.len() > self.listed {
            self.pieces
                .push(Piece::Headers(self.headers.len() - self.listed));
            self.listed = self.headers.len();
        }
    }

    /// Appends the first `length` bytes of a buffer after the headers so far.
    #[inline]
    pub fn push_data(&mut self, buffer: IoBuffer, length: usize) {
        self.list_headers();
        let piece = Piece::Data {
            buffer: self.queue.len(),
            length,
        };
        self.pieces.push(piece);
        self.queue.keep(buffer);
        self.data_bytes += length as u64;
    }

    /// Returns the bytes that are queued or not accepted by the kernel yet.
    #[inline]
    pub fn unsent(&self) -> u64 {
        self.queue.unsent() + self.headers.len() as u64 + self.data_bytes
    }

    /// Returns the progress of the client in reading, if it has to read. Each message is a transfer. The kernel reports its end only.
    pub fn position(&self) -> Option<Position> {
        self.queue.is_sending().then_some(Position {
            number: self.queue.sent_bytes(),
            moved: 0,
            at_once: self.queue.unsent(),
        })
    }

    /// Returns the next message, if there is output and no message in flight.
    pub fn next(&mut self, buffers: &mut Buffers<Connection>) -> Option<Box<Message>> {
        if self.queue.is_sending() || self.headers.is_empty() {
            return None;
        }
        self.list_headers();
        let bytes = buffers.take_anyway(self.headers.len());
        bytes.write_whole(0, &self.headers);
        let mut message = self.queue.begin();
        let headers = message.keep(bytes);
        let mut at = 0;
        for piece in &self.pieces {
            match *piece {
                Piece::Headers(length) => {
                    message.add(headers, at, length);
                    at += length;
                }
                Piece::Data { buffer, length } => message.add(buffer, 0, length),
            }
        }
        self.clear();
        self.queue.begun(&message);
        Some(message)
    }

    /// Returns the next message as TLS records, if there is output and no message in flight.
    ///
    /// # Errors
    /// If the TLS connection has ended.
    pub fn next_encrypted(
        &mut self,
        buffers: &mut Buffers<Connection>,
        encryption: &mut Encryption,
    ) -> io::Result<Option<Box<Message>>> {
        if self.queue.is_sending() || self.headers.is_empty() {
            return Ok(None);
        }
        self.list_headers();
        let data = self.queue.take_data();
        let mut at = 0;
        for piece in &self.pieces {
            match *piece {
                Piece::Headers(length) => {
                    encryption.write(&self.headers[at..at + length])?;
                    at += length;
                }
                Piece::Data { buffer, length } => {
                    encryption.write_buffer(&data[buffer], length)?;
                }
            }
        }
        data.into_iter().for_each(|buffer| buffers.give(buffer));
        self.clear();
        let records = encryption.take_records();
        let bytes = buffers.take_anyway(records.len());
        bytes.write_whole(0, &records);
        let mut message = self.queue.begin();
        let buffer = message.keep(bytes);
        message.add(buffer, 0, records.len());
        self.queue.begun(&message);
        Ok(Some(message))
    }

    /// Removes everything that was put into a message.
    fn clear(&mut self) {
        self.pieces.clear();
        match self.headers.capacity() > KEPT_MAX {
            true => self.headers = Vec::new(),
            false => self.headers.clear(),
        }
        self.listed = 0;
        self.data_bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_long_reply_is_freed() {
        let mut output = Output::default();
        output.headers().resize(KEPT_MAX, 0);
        output.clear();
        assert!(output.headers().is_empty() && output.headers().capacity() >= KEPT_MAX);
        output.headers().resize(1 << 20, 0);
        output.clear();
        assert_eq!(output.headers().capacity(), 0);
    }
}
