//! Clients in the handshake. The accepting thread owns them, reads and writes without blocking, and hands over those that have opened an
//! export. A silent client is closed after the handshake time, or when too many others wait.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use nbd::Violation;
use nbd::handshake::{Handshake, Session, Step, Tls, greeting};
use reactor::PeerRateLimit;

use crate::export::Export;
use crate::listeners::{Listener, Stream};
use crate::shared::{Admitted, ListenerExports, SharedServer, peer_log};

/// Bytes read at once: more than any option of a usual client.
const READ_BYTES: usize = 8 << 10;
/// Queued output above which no further option is parsed. The reply to one option may exceed it.
const OUTPUT_MAX: usize = 64 << 10;
/// Rounds of reading, parsing and sending for one client before it is the turn of others.
const ROUNDS_MAX: usize = 16;
/// Limit of log lines about failed TLS handshakes.
static TLS_LOG: PeerRateLimit = peer_log();
/// Interval of attempts to send output that the socket did not accept.
const RETRY: Duration = Duration::from_millis(10);

/// A client in the handshake.
struct Negotiation {
    stream: Stream,
    listener: Arc<Listener>,
    client: String,
    admitted: Admitted,
    /// State of TLS after `NBD_OPT_STARTTLS`. `output` and `input` are plain text.
    encryption: Option<tls::Session>,
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
    StartTls,
    Close,
}

/// A client that has opened an export.
pub(crate) struct Opened {
    pub stream: Stream,
    pub client: String,
    pub admitted: Admitted,
    pub encryption: Option<tls::Session>,
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
    /// The TLS handshake failed: client and reason.
    NotEncrypted(String, String),
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
        shared: &SharedServer,
    ) {
        if stream.set_nonblocking(true).is_err() {
            return;
        }
        let tls = match shared.requires_tls(&listener.address) {
            true => Tls::Required,
            false => Tls::Refused,
        };
        self.waiting.push_back(Negotiation {
            stream,
            listener,
            client,
            admitted,
            encryption: None,
            handshake: Handshake::new(tls),
            input: Vec::new(),
            output: greeting(),
            needs_input: true,
            end: None,
            since: now,
        });
        if self.waiting.len() > shared.limits.half_open.max(1)
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
                Progress::NotEncrypted(client, reason) => {
                    if let Some(suppressed) = TLS_LOG.pass(&client) {
                        tracing::warn!(
                            client,
                            suppressed,
                            "NBD client disconnected: TLS failed, {reason}"
                        );
                    }
                }
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
            if self.has_output() {
                break;
            }
            match self.end.take() {
                None => {}
                Some(End::Close) => return Progress::Closed,
                Some(End::StartTls) => match shared.tls.get().map(tls::Session::server) {
                    Some(Ok(encryption)) => self.encryption = Some(encryption),
                    // A reload has removed the certificate.
                    Some(Err(_)) | None => return Progress::Closed,
                },
                Some(End::Open(session)) => {
                    return Progress::Open(Opened {
                        stream: self.stream,
                        client: self.client,
                        admitted: self.admitted,
                        encryption: self.encryption,
                        session,
                        input: self.input,
                    });
                }
            }
            if self.needs_input {
                match self.read() {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) if error.kind() == ErrorKind::InvalidData => {
                        // The alert is informative for the client.
                        self.send();
                        return Progress::NotEncrypted(self.client, error.to_string());
                    }
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
        !self.has_output() && self.needs_input
    }

    fn has_output(&self) -> bool {
        let encryption = self.encryption.as_ref();
        !self.output.is_empty() || encryption.is_some_and(tls::Session::has_records)
    }

    /// Reads available bytes. Returns false if there are none.
    fn read(&mut self) -> io::Result<bool> {
        if let Some(encryption) = &mut self.encryption {
            return encryption.read(&mut self.stream, &mut self.input);
        }
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
            is_encrypted: self.encryption.is_some(),
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
                Step::StartTls => self.end = Some(End::StartTls),
                Step::Violated(violation) => return Err(violation),
            }
        }
        self.input.drain(..used);
        Ok(())
    }

    /// Sends output as far as the socket accepts it. Returns false if the client is gone.
    fn send(&mut self) -> bool {
        if let Some(encryption) = &mut self.encryption {
            let written = encryption.write(&self.output);
            self.output.clear();
            let sent = written.and_then(|()| encryption.send(&mut self.stream));
            return sent.is_ok();
        }
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
