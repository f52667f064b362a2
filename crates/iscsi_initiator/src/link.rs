//! One TCP connection of a session: a socket that never blocks, and what it has not taken yet.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::address::Portal;

/// What is received at a time.
pub const RECEIVE_BYTES: usize = 256 << 10;

/// Above what the commands of most sessions have in flight.
const UNSENT_MAX: usize = 64 << 20;

pub struct Link {
    pub stream: TcpStream,
    /// When bytes last came.
    pub heard: Instant,
    /// When a ping was sent that nothing has come after.
    pub pinged: Option<Instant>,
    /// Commands in flight on it.
    pub commands: usize,
    /// It is lost, and nothing moves on it.
    pub is_lost: bool,
    out: Vec<u8>,
    sent: usize,
}

impl Link {
    /// Connects to the first address of the portal that answers.
    pub fn connect(portal: &Portal, timeout: Duration) -> io::Result<Link> {
        let mut last = None;
        for address in portal.addresses()? {
            match TcpStream::connect_timeout(&address, timeout) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    stream.set_nonblocking(true)?;
                    return Ok(Link {
                        stream,
                        heard: Instant::now(),
                        pinged: None,
                        commands: 0,
                        is_lost: false,
                        out: Vec::new(),
                        sent: 0,
                    });
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| ErrorKind::NotFound.into()))
    }

    /// Takes over what is to be sent, and sends as much as the socket takes.
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

    /// Has the socket not taken everything?
    pub fn is_sending(&self) -> bool {
        self.sent < self.out.len()
    }

    /// Is so much unsent that a target has to read before it is read from? What it sends may ask for more to be sent.
    pub fn is_full(&self) -> bool {
        self.out.len() - self.sent > UNSENT_MAX
    }

    /// Receives what is there: bytes, 0 at the end of the connection, `None` where nothing is there.
    pub fn receive(&mut self, into: &mut [u8]) -> io::Result<Option<usize>> {
        match (&self.stream).read(into) {
            Ok(bytes) => {
                (self.heard, self.pinged) = (Instant::now(), None);
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
