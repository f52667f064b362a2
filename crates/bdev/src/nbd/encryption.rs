//! TLS of a connection: copies records from and to the memory of its link. Connections without TLS have none.

use std::io;

use guest_memory::IoBuffer;
use tls::{Decrypted, RECORD_BYTES, Session};

pub(super) struct Encryption {
    session: Session,
    /// Size of the buffer for plain text: the bytes of a receive, and an incomplete record before it.
    plain_bytes: usize,
    /// Buffer for plain text, while the link's input has records, or the other way round.
    other: Option<IoBuffer>,
    has_plain: bool,
    scratch: Vec<u8>,
}

impl Encryption {
    /// Takes over a TLS session for receives of `bytes`.
    pub fn new(session: Session, bytes: usize) -> Encryption {
        Encryption {
            session,
            plain_bytes: bytes + 2 * RECORD_BYTES,
            other: None,
            has_plain: false,
            scratch: vec![0; RECORD_BYTES],
        }
    }

    /// Encrypts bytes.
    ///
    /// # Errors
    /// If the TLS session has ended.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.session.write(bytes)
    }

    /// Encrypts the window of a buffer.
    ///
    /// # Errors
    /// If the TLS session has ended.
    pub fn write_buffer(&mut self, buffer: &IoBuffer) -> io::Result<()> {
        let length = buffer.len();
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

    /// Replaces the first `length` bytes of `input`, which are records, by their plain text.
    ///
    /// # Errors
    /// If the server violates the protocol of TLS.
    pub fn decrypt(
        &mut self,
        input: &mut Option<IoBuffer>,
        length: usize,
    ) -> io::Result<Decrypted> {
        let Some(mut records) = input.take() else {
            return Ok(Decrypted::Bytes(0));
        };
        let size = self.plain_bytes;
        let plain = self.other.take().unwrap_or_else(|| IoBuffer::owned(size));
        let received = records.owned_bytes().and_then(|all| all.get(..length));
        let result = self
            .session
            .decrypt(received.unwrap_or_default(), |at, piece| {
                if piece.len() > size.saturating_sub(at) {
                    return Err(io::Error::other("more plain text than records"));
                }
                plain.write_whole(at, piece);
                Ok(())
            });
        self.other = Some(records);
        self.has_plain = true;
        *input = Some(plain);
        result
    }

    /// Prepares the input for the next receive of records.
    pub fn before_receive(&mut self, input: &mut Option<IoBuffer>) {
        if std::mem::take(&mut self.has_plain) {
            std::mem::swap(input, &mut self.other);
        }
    }
}
