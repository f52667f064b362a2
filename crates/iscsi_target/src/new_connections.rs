//! Accepted connections without a worker. While an export has a worker placement, the target name in the first Login request decides the
//! worker of a connection. The accepting thread therefore waits for that request and reads it.
//!
//! Owned by the accepting thread, which does not block on any connection. A silent connection is closed after the login time, or when too
//! many others wait.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use iscsi::login::{FIRST_BYTES_MAX, FirstTarget, first_target};

/// Interval of checks for the rest of a partial request.
const REST: Duration = Duration::from_millis(10);

struct Arrival {
    stream: TcpStream,
    peer: SocketAddr,
    /// Time of the accept.
    since: Duration,
    /// A partial request is there. The socket stays readable, so it cannot be waited for.
    is_partial: bool,
}

/// A connection that can be placed.
pub(crate) struct Arrived {
    pub stream: TcpStream,
    pub peer: SocketAddr,
    /// Target name in the request, if any.
    pub target: Option<String>,
}

enum Peeked {
    Waits { is_partial: bool },
    Names(Option<String>),
    Closed,
}

/// Waiting connections, oldest first.
#[derive(Default)]
pub(crate) struct NewConnections {
    waiting: VecDeque<Arrival>,
}

impl NewConnections {
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Adds a connection. Above `most`, closes the oldest.
    pub fn add(&mut self, stream: TcpStream, peer: SocketAddr, now: Duration, most: usize) {
        if stream.set_nonblocking(true).is_err() {
            return;
        }
        self.waiting.push_back(Arrival {
            stream,
            peer,
            since: now,
            is_partial: false,
        });
        if self.waiting.len() > most.max(1) {
            self.waiting.pop_front();
        }
    }

    /// Returns the sockets to wait for.
    pub fn sockets(&self) -> Vec<BorrowedFd<'_>> {
        let quiet = self.waiting.iter().filter(|one| !one.is_partial);
        quiet.map(|one| one.stream.as_fd()).collect()
    }

    /// Returns the maximum time to wait for the sockets, or `None` if no connection waits.
    pub fn patience(&self, now: Duration, login_time: Duration) -> Option<Duration> {
        let oldest = self.waiting.front()?;
        let left = login_time.saturating_sub(now.saturating_sub(oldest.since));
        match self.waiting.iter().any(|one| one.is_partial) {
            true => Some(left.min(REST)),
            false => Some(left),
        }
    }

    /// Removes and returns connections with a complete request. Closes those that are disconnected or too slow.
    pub fn take(&mut self, now: Duration, login_time: Duration) -> Vec<Arrived> {
        let mut arrived = Vec::new();
        let mut bytes = Vec::new();
        for mut one in std::mem::take(&mut self.waiting) {
            if now.saturating_sub(one.since) >= login_time {
                continue;
            }
            bytes.resize(FIRST_BYTES_MAX, 0);
            match peek(&one.stream, &mut bytes) {
                Peeked::Closed => {}
                Peeked::Waits { is_partial } => {
                    one.is_partial = is_partial;
                    self.waiting.push_back(one);
                }
                // Workers need a blocking socket: the kernel waits for them.
                Peeked::Names(target) if one.stream.set_nonblocking(false).is_ok() => {
                    arrived.push(Arrived {
                        stream: one.stream,
                        peer: one.peer,
                        target,
                    });
                }
                Peeked::Names(_) => {}
            }
        }
        arrived
    }
}

/// Parses a connection's input without consuming it.
fn peek(stream: &TcpStream, bytes: &mut [u8]) -> Peeked {
    let length = match stream.peek(bytes) {
        Ok(0) => return Peeked::Closed,
        Ok(length) => length,
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            return Peeked::Waits { is_partial: false };
        }
        Err(_) => return Peeked::Closed,
    };
    match first_target(&bytes[..length]) {
        FirstTarget::Incomplete => Peeked::Waits { is_partial: true },
        FirstTarget::Named(name) => Peeked::Names(Some(name.to_owned())),
        FirstTarget::None => Peeked::Names(None),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    const NOW: Duration = Duration::from_secs(7);
    const LONG: Duration = Duration::from_secs(3600);

    fn connected() -> (TcpStream, TcpStream, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, peer) = listener.accept().unwrap();
        (client, server, peer)
    }

    fn login(target: &str) -> Vec<u8> {
        let text = format!("TargetName={target}\0");
        let mut bytes = vec![0; 48];
        bytes[0] = 0x43;
        bytes[7] = text.len() as u8;
        bytes.extend_from_slice(text.as_bytes());
        bytes
    }

    fn take_one(arrivals: &mut NewConnections) -> Arrived {
        loop {
            if let Some(one) = arrivals.take(NOW, LONG).pop() {
                return one;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn connection_is_placed_by_its_whole_login_request() {
        let (mut client, server, peer) = connected();
        let mut arrivals = NewConnections::default();
        arrivals.add(server, peer, NOW, 8);
        assert!(arrivals.take(NOW, LONG).is_empty());
        assert_eq!(arrivals.sockets().len(), 1);
        let bytes = login("iqn.2026-11.org.example:t0");
        client.write_all(&bytes[..50]).unwrap();
        while arrivals.sockets().len() == 1 {
            assert!(arrivals.take(NOW, LONG).is_empty());
        }
        assert_eq!(arrivals.patience(NOW, LONG), Some(REST));
        client.write_all(&bytes[50..]).unwrap();
        let mut one = take_one(&mut arrivals);
        assert_eq!(one.target.as_deref(), Some("iqn.2026-11.org.example:t0"));
        let mut read = vec![0; bytes.len()];
        one.stream.read_exact(&mut read).unwrap();
        assert_eq!(read, bytes);
        assert_eq!(arrivals.patience(NOW, LONG), None);
    }

    #[test]
    fn silent_connections_are_closed() {
        let mut arrivals = NewConnections::default();
        let kept: Vec<_> = (0..3)
            .map(|_| {
                let (client, server, peer) = connected();
                arrivals.add(server, peer, NOW, 2);
                client
            })
            .collect();
        assert_eq!(arrivals.len(), 2);
        drop(kept);
        while arrivals.len() > 0 {
            assert!(arrivals.take(NOW, LONG).is_empty());
        }
        let (_client, server, peer) = connected();
        arrivals.add(server, peer, NOW, 2);
        assert!(arrivals.take(NOW + LONG, LONG).is_empty());
        assert_eq!(arrivals.len(), 0);
    }
}
