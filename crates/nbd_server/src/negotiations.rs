//! Clients in the handshake. The accepting thread owns them, reads and writes without blocking, and hands over those that have opened an
//! export. A silent client is closed after the handshake time, or when too many others wait.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use nbd::Violation;
use nbd::handshake::{Handshake, Session, Step, greeting};

use crate::export::Export;
use crate::listeners::{Listener, Stream};
use crate::shared::{Admitted, ListenerExports, SharedServer};

/// Bytes read at once: more than any option of a usual client.
const READ_BYTES: usize = 8 << 10;
/// Queued output above which no further option is parsed. The reply to one option may exceed it.
const OUTPUT_MAX: usize = 64 << 10;
/// Rounds of reading, parsing and sending for one client before it is the turn of others.
const ROUNDS_MAX: usize = 16;
/// Interval of attempts to send output that the socket did not accept.
const RETRY: Duration = Duration::from_millis(10);

/// A client in the handshake.
struct Negotiation {
    stream: Stream,
    listener: Arc<Listener>,
    client: String,
    admitted: Admitted,
    handshake: Handshake,
    input: Vec<u8>,
    output: Vec<u8>,
    /// All complete options of the input were answered.
    needs_input: bool,
    end: Option<End>,
    /// Time of the accept.
    since: Duration,
}

/// Last step of a handshake, which follows the output.
enum End {
    Open(Box<Session<Arc<Export>>>),
    Close,
}

/// A client that has opened an export.
pub(crate) struct Opened {
    pub stream: Stream,
    pub client: String,
    pub admitted: Admitted,
    pub session: Box<Session<Arc<Export>>>,
    /// Bytes after the handshake.
    pub input: Vec<u8>,
}

enum Progress {
    /// Waits for input, or for room in the socket.
    Waiting(Negotiation),
    Open(Opened),
    Closed,
    Violated(String, Violation),
}

/// All clients in the handshake, oldest first.
#[derive(Default)]
pub(crate) struct Negotiations {
    waiting: VecDeque<Negotiation>,
}

impl Negotiations {
    /// Adds a client. Above the limit, closes the oldest.
    pub fn add(
        &mut self,
        stream: Stream,
        listener: Arc<Listener>,
        client: String,
        admitted: Admitted,
        now: Duration,
        most: usize,
    ) {
        if stream.set_nonblocking(true).is_err() {
            return;
        }
        self.waiting.push_back(Negotiation {
            stream,
            listener,
            client,
            admitted,
            handshake: Handshake::new(),
            input: Vec::new(),
            output: greeting(),
            needs_input: true,
            end: None,
            since: now,
        });
        if self.waiting.len() > most.max(1)
            && let Some(oldest) = self.waiting.pop_front()
        {
            tracing::debug!(
                client = oldest.client,
                "NBD client closed: too many handshakes"
            );
        }
    }

    /// Returns the sockets to wait for.
    pub fn sockets(&self) -> Vec<BorrowedFd<'_>> {
        let idle = self.waiting.iter().filter(|one| one.is_idle());
        idle.map(|one| one.stream.as_fd()).collect()
    }

    /// Returns the maximum time to wait for the sockets; `None`: no limit.
    pub fn patience(&self, now: Duration, handshake_time: Duration) -> Option<Duration> {
        let oldest = self.waiting.front()?;
        let left = handshake_time.saturating_sub(now.saturating_sub(oldest.since));
        match self.waiting.iter().all(Negotiation::is_idle) {
            true => Some(left),
            false => Some(left.min(RETRY)),
        }
    }

    /// Continues all handshakes as far as possible without waiting. Returns the clients that have opened an export.
    pub fn advance(&mut self, shared: &SharedServer, now: Duration) -> Vec<Opened> {
        let mut opened = Vec::new();
        for one in std::mem::take(&mut self.waiting) {
            if now.saturating_sub(one.since) >= shared.limits.handshake_time {
                tracing::debug!(
                    client = one.client,
                    "NBD client closed: handshake timed out"
                );
                continue;
            }
            match one.advance(shared) {
                Progress::Waiting(one) => self.waiting.push_back(one),
                Progress::Open(one) => opened.push(one),
                Progress::Closed => {}
                Progress::Violated(client, violation) => shared.violated(&client, &violation),
            }
        }
        opened
    }
}

impl Negotiation {
    fn advance(mut self, shared: &SharedServer) -> Progress {
        for _ in 0..ROUNDS_MAX {
            if !self.send() {
                return Progress::Closed;
            }
            if !self.output.is_empty() {
                break;
            }
            match self.end.take() {
                None => {}
                Some(End::Close) => return Progress::Closed,
                Some(End::Open(session)) => {
                    return Progress::Open(Opened {
                        stream: self.stream,
                        client: self.client,
                        admitted: self.admitted,
                        session,
                        input: self.input,
                    });
                }
            }
            if self.needs_input {
                match self.read() {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(_) => return Progress::Closed,
                }
            }
            if let Err(violation) = self.parse(shared) {
                return Progress::Violated(self.client, violation);
            }
        }
        Progress::Waiting(self)
    }

    /// Returns true if the client has to send something first.
    fn is_idle(&self) -> bool {
        self.output.is_empty() && self.needs_input
    }

    /// Reads available bytes. Returns false if there are none.
    fn read(&mut self) -> io::Result<bool> {
        let mut bytes = [0; READ_BYTES];
        match self.stream.read(&mut bytes) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(length) => {
                self.input.extend_from_slice(&bytes[..length]);
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Parses input until the handshake ends, more input is needed, or enough output is queued.
    fn parse(&mut self, shared: &SharedServer) -> Result<(), Violation> {
        let exports = ListenerExports {
            shared,
            address: &self.listener.address,
        };
        let mut used = 0;
        self.needs_input = false;
        while self.end.is_none() && !self.needs_input && self.output.len() <= OUTPUT_MAX {
            let rest = &self.input[used..];
            let (length, step) = self.handshake.receive(rest, &exports, &mut self.output);
            used += length;
            match step {
                Step::More => self.needs_input = true,
                Step::Answered => {}
                Step::Transmission(session) => self.end = Some(End::Open(session)),
                Step::Aborted => self.end = Some(End::Close),
                Step::Violated(violation) => return Err(violation),
            }
        }
        self.input.drain(..used);
        Ok(())
    }

    /// Sends output as far as the socket accepts it. Returns false if the client is gone.
    fn send(&mut self) -> bool {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(0) => return false,
                Ok(length) => drop(self.output.drain(..length)),
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return true,
                    ErrorKind::Interrupted => {}
                    _ => return false,
                },
            }
        }
        true
    }
}
