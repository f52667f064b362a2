//! One TCP connection of a session: a non-blocking socket and its unsent data.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use iscsi::address::Portal;

/// Size of the receive buffer in bytes.
pub const RECEIVE_BYTES: usize = 256 << 10;

/// Limit on unsent bytes, above the data in flight of most sessions.
const UNSENT_MAX: usize = 64 << 20;

pub struct Link {
    pub stream: TcpStream,
    /// Time of the last received bytes.
    pub last_received: Instant,
    /// Time of a ping without any later reception.
    pub pinged: Option<Instant>,
    /// Number of commands in flight.
    pub commands: usize,
    /// The connection is lost and unused.
    pub is_lost: bool,
    out: Vec<u8>,
    sent: usize,
}

/// Connects to the first address of a host that accepts.
///
/// # Errors
/// The host has no address, or the error of the last address.
pub fn connect_tcp(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let found: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
    let mut last = io::Error::new(ErrorKind::NotFound, format!("{host} has no address"));
    for address in found {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

impl Link {
    /// Connects to the first address of the portal that accepts.
    pub fn connect(portal: &Portal, timeout: Duration) -> io::Result<Link> {
        let stream = connect_tcp(portal.host(), portal.port(), timeout)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Link {
            stream,
            last_received: Instant::now(),
            pinged: None,
            commands: 0,
            is_lost: false,
            out: Vec::new(),
            sent: 0,
        })
    }

    /// Takes the data to send, and sends as much as the socket accepts.
    pub fn send(&mut self, more: &mut Vec<u8>) -> io::Result<()> {
        if self.out.is_empty() {
            std::mem::swap(&mut self.out, more);
        } else {
            self.out.append(more);
        }
        while self.sent < self.out.len() {
            match (&self.stream).write(&self.out[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(bytes) => self.sent += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.out.clear();
        self.sent = 0;
        Ok(())
    }

    /// Returns true if unsent data is left.
    pub fn is_sending(&self) -> bool {
        self.sent < self.out.len()
    }

    /// Returns true if reception must pause, because too much data is unsent and received PDUs may request more.
    pub fn is_full(&self) -> bool {
        self.out.len() - self.sent > UNSENT_MAX
    }

    /// Receives available bytes: their number, 0 at the end of the connection, `None` if none are available.
    pub fn receive(&mut self, into: &mut [u8]) -> io::Result<Option<usize>> {
        match (&self.stream).read(into) {
            Ok(bytes) => {
                (self.last_received, self.pinged) = (Instant::now(), None);
                Ok(Some(bytes))
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
