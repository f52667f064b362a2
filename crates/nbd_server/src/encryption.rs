//! TLS of a connection in the transmission phase: copies records from and to the buffers of the connection. Owned by its worker.
//!
//! Connections without TLS have none. Memory per connection: two buffers for received bytes, one incomplete record, and the records of
//! one message.

use std::io;

use guest_memory::IoBuffer;
use request_engine::Receiver;
use tls::{Decrypted, RECORD_BYTES, Session};

/// Bytes of plain text that one receive can complete: those of the receive, and an incomplete record before it.
const PLAIN_BYTES: usize = 96 << 10;

pub(crate) struct Encryption {
    session: Session,
    /// Buffer for plain text, while the receiver has the one for records.
    plain: Option<IoBuffer>,
    /// Buffer for records, while the receiver has the one for plain text.
    records: Option<IoBuffer>,
    scratch: Vec<u8>,
}

impl From<Session> for Encryption {
    fn from(session: Session) -> Encryption {
        Encryption {
            session,
            plain: None,
            records: None,
            scratch: Vec::new(),
        }
    }
}

impl Encryption {
    /// Encrypts bytes.
    ///
    /// # Errors
    /// If the TLS connection has ended.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.session.write(bytes)
    }

    /// Encrypts the first `length` bytes of a buffer.
    ///
    /// # Errors
    /// If the TLS connection has ended.
    pub fn write_buffer(&mut self, buffer: &IoBuffer, length: usize) -> io::Result<()> {
        if self.scratch.len() < RECORD_BYTES {
            self.scratch.resize(RECORD_BYTES, 0);
        }
        for at in (0..length).step_by(RECORD_BYTES) {
            let piece = &mut self.scratch[..RECORD_BYTES.min(length - at)];
            buffer.read_whole(at, piece);
            self.session.write(piece)?;
        }
        Ok(())
    }

    /// Returns all records that wait to be sent.
    pub fn take_records(&mut self) -> Vec<u8> {
        self.session.take_records()
    }

    /// Replaces the records of a receive by their plain text.
    ///
    /// # Errors
    /// If the client violates the protocol of TLS.
    pub fn decrypt(&mut self, receiver: &mut Receiver, length: usize) -> io::Result<Decrypted> {
        let Some(records) = receiver.buffer.take() else {
            return Ok(Decrypted::Bytes(0));
        };
        let plain = self.plain.take();
        let plain = plain.unwrap_or_else(|| IoBuffer::owned(PLAIN_BYTES));
        if self.scratch.len() < length {
            self.scratch.resize(length, 0);
        }
        let received = &mut self.scratch[..length];
        records.read_whole(0, received);
        let result = self.session.decrypt(received, |at, piece| {
            if piece.len() > PLAIN_BYTES.saturating_sub(at) {
                return Err(io::Error::other("more plain text than records"));
            }
            plain.write_whole(at, piece);
            Ok(())
        });
        self.records = Some(records);
        receiver.buffer = Some(plain);
        result
    }

    /// Prepares the receiver for the next receive of records.
    pub fn before_receive(&mut self, receiver: &mut Receiver) {
        if let Some(plain) = receiver
            .buffer
            .take_if(|kept| kept.total_len() == PLAIN_BYTES)
        {
            self.plain = Some(plain);
            receiver.buffer = self.records.take();
        }
    }
}
