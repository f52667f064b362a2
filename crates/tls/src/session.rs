//! TLS of one connection, between the bytes of its socket and plain text. Owned by the thread of the connection.

use std::io::{self, Read, Write};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

/// Maximum bytes of plain text in a record, to encrypt at a time.
pub const RECORD_BYTES: usize = 16 << 10;

/// TLS state of either side.
#[derive(Debug)]
pub struct Session(Box<Connection>);

/// Result of received records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decrypted {
    /// Number of plain bytes.
    Bytes(usize),
    /// The peer has closed the connection.
    Closed,
}

fn failed(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl Session {
    /// Begins the handshake of a server.
    ///
    /// # Errors
    /// If the configuration is unusable.
    pub fn server(config: Arc<ServerConfig>) -> io::Result<Session> {
        let connection = ServerConnection::new(config).map_err(failed)?;
        Ok(Session::new(connection.into()))
    }

    /// Begins the handshake of a client.
    ///
    /// # Errors
    /// If the configuration is unusable.
    pub fn client(config: Arc<ClientConfig>, name: ServerName<'static>) -> io::Result<Session> {
        let connection = ClientConnection::new(config, name).map_err(failed)?;
        Ok(Session::new(connection.into()))
    }

    fn new(mut connection: Connection) -> Session {
        // Callers limit their output.
        connection.set_buffer_limit(None);
        Session(Box::new(connection))
    }

    /// Returns true during the handshake.
    pub fn is_handshaking(&self) -> bool {
        self.0.is_handshaking()
    }

    /// Returns true if records wait to be sent.
    pub fn has_records(&self) -> bool {
        self.0.wants_write()
    }

    /// Reads records from a socket and appends their plain text to `input`. Returns false if there is no further record at the moment.
    ///
    /// # Errors
    /// If the socket has ended, or with the kind `InvalidData` if TLS failed. An alert may wait to be sent.
    pub fn read(&mut self, socket: &mut impl Read, input: &mut Vec<u8>) -> io::Result<bool> {
        match self.0.read_tls(socket) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {}
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => return Ok(false),
                _ => return Err(error),
            },
        }
        let state = self.0.process_new_packets().map_err(failed)?;
        let before = input.len();
        input.resize(before + state.plaintext_bytes_to_read(), 0);
        self.0.reader().read_exact(&mut input[before..])?;
        Ok(true)
    }

    /// Decrypts records that were received, and passes each piece of plain text with its offset to `take`.
    ///
    /// # Errors
    /// If the peer violates the protocol of TLS.
    pub fn decrypt(
        &mut self,
        mut records: &[u8],
        mut take: impl FnMut(usize, &[u8]) -> io::Result<()>,
    ) -> io::Result<Decrypted> {
        let mut piece = [0; RECORD_BYTES];
        let mut total = 0;
        while !records.is_empty() {
            if self.0.read_tls(&mut records)? == 0 {
                break;
            }
            let state = self.0.process_new_packets().map_err(failed)?;
            let mut left = state.plaintext_bytes_to_read();
            while left > 0 {
                let piece = &mut piece[..left.min(RECORD_BYTES)];
                self.0.reader().read_exact(piece)?;
                take(total, piece)?;
                total += piece.len();
                left -= piece.len();
            }
            if state.peer_has_closed() && total == 0 {
                return Ok(Decrypted::Closed);
            }
        }
        Ok(Decrypted::Bytes(total))
    }

    /// Encrypts bytes.
    ///
    /// # Errors
    /// If the TLS connection has ended.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.writer().write_all(bytes)
    }

    /// Sends records as far as a socket accepts them.
    ///
    /// # Errors
    /// If the socket has ended.
    pub fn send(&mut self, socket: &mut impl Write) -> io::Result<()> {
        while self.0.wants_write() {
            match self.0.write_tls(socket) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(()),
                    io::ErrorKind::Interrupted => {}
                    _ => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// Returns all records that wait to be sent.
    pub fn take_records(&mut self) -> Vec<u8> {
        let mut records = Vec::new();
        while self.0.wants_write() && self.0.write_tls(&mut records).is_ok() {}
        records
    }
}
