//! Input of a connection: splits the stream into requests and stores the payloads of writes.
//!
//! One receive is in flight at a time: into the connection's own buffer, or, for the rest of a long payload, directly into the buffer of its
//! request. While too much output is queued, or a request waits for memory or a slot, nothing is received or parsed.

use latency::Stamp;
use nbd::request::Request;
use nbd::{Style, Violation};
use reactor::Io;
use request_engine::{Buffers, Receiver, StreamParts, StreamTransport, Transport, token};
use tls::Decrypted;
use uring::{Completion, Receive};

use crate::connection::Connection;
use crate::progress::Position;
use crate::requests::memory_of;
use crate::slots::Stage;

const RECEIVE_BYTES: usize = 64 << 10;
/// Length of the longest header.
const HEADER_MAX: usize = Request::header_length(Style::Extended);
/// Minimum rest of a payload for a direct receive.
const DIRECT_BYTES_MIN: usize = 4096;
/// Maximum of a direct receive: their ends are the progress of a slow client.
const DIRECT_BYTES_MAX: usize = 1 << 20;

/// Payload that is being received.
#[derive(Clone, Copy, Debug)]
struct Payload {
    slot: u32,
    received: usize,
    left: usize,
}

pub(crate) struct Input {
    pub receiver: Receiver,
    /// Received part of an incomplete header.
    header: [u8; HEADER_MAX],
    header_length: usize,
    /// Number of headers that were completed.
    headers: u64,
    /// Bytes of a refused payload that are still to come, and those that have come.
    skipped: usize,
    skipped_so_far: u64,
    payload: Option<Payload>,
    /// Request that waits for memory or a slot.
    waiting: Option<Request>,
    /// Memory reserved for the waiting request, in bytes.
    reserved: Option<usize>,
    /// A receive into the buffer of the payload's request is in flight.
    direct: bool,
    /// The client has broken the protocol: the connection ends when the earlier requests are submitted.
    pub violation: Option<Violation>,
}

impl Input {
    /// Creates the state with bytes that have arrived already.
    pub fn new(early: &[u8]) -> Input {
        Input {
            receiver: Receiver::new(RECEIVE_BYTES, early),
            header: [0; HEADER_MAX],
            header_length: 0,
            headers: 0,
            skipped: 0,
            skipped_so_far: 0,
            payload: None,
            waiting: None,
            reserved: None,
            direct: false,
            violation: None,
        }
    }

    /// Returns true if a request has arrived in part.
    pub fn is_within_request(&self) -> bool {
        self.header_length > 0 || self.skipped > 0 || self.payload.is_some()
    }

    /// Returns the progress of the client in sending a request, if one has arrived in part.
    pub fn position(&self) -> Option<Position> {
        self.is_within_request().then_some(Position {
            // A header that has arrived in part belongs to the next request.
            number: 2 * self.headers + u64::from(self.header_length > 0),
            moved: match self.payload {
                Some(payload) => payload.received as u64,
                None => self.skipped_so_far,
            },
            at_once: 0,
        })
    }

    /// Returns true if the kernel receives into the buffer of this slot.
    pub fn receives_into(&self, slot: u32) -> bool {
        self.direct && self.payload.is_some_and(|payload| payload.slot == slot)
    }

    /// Returns true if a request waits for memory or a slot.
    pub fn waits_for_memory(&self) -> bool {
        self.waiting.is_some() && self.reserved.is_none()
    }

    /// Returns true if received bytes or a request wait to be parsed.
    fn has_unparsed(&self) -> bool {
        self.receiver.unparsed() > 0 || self.waiting.is_some()
    }
}

impl StreamTransport for Connection {
    type Memory = Buffers<Connection>;

    const CLIENT: &'static str = "client";

    #[inline]
    fn parts(&mut self) -> StreamParts<'_, Buffers<Connection>> {
        StreamParts {
            link: &mut self.link,
            receiver: &mut self.input.receiver,
            queue: &mut self.output.queue,
            memory: &mut self.buffers,
        }
    }

    fn is_ended(&self) -> bool {
        self.lifecycle.is_ended()
    }

    fn drops_input(&self) -> bool {
        self.lifecycle.is_ended()
    }

    fn may_receive(&mut self) -> bool {
        let is_idle = !self.input.has_unparsed() && !self.input.direct;
        !self.is_over() && is_idle && self.has_output_room()
    }

    fn may_watch(&self) -> bool {
        !self.input.is_within_request() && self.encryption.is_none()
    }

    fn decrypt(&mut self, io: &mut Io, bytes: usize) -> Option<usize> {
        let Some(encryption) = &mut self.encryption else {
            return Some(bytes);
        };
        match encryption.decrypt(&mut self.input.receiver, bytes) {
            Ok(Decrypted::Bytes(bytes)) => return Some(bytes),
            Ok(Decrypted::Closed) => self.end(io, "closed by the client"),
            Err(error) => {
                self.violated(&Violation::TlsRecord);
                self.end(io, &format!("TLS failed, {error}"));
            }
        }
        None
    }

    fn receive_directly(&mut self, io: &mut Io) -> bool {
        if let Some(encryption) = &mut self.encryption {
            encryption.before_receive(&mut self.input.receiver);
            return false;
        }
        let Some(payload) = self.input.payload else {
            return false;
        };
        let Some(buffer) = &self.slots.get(payload.slot).buffer else {
            return false;
        };
        if payload.left < DIRECT_BYTES_MIN {
            return false;
        }
        let rest = buffer.slice(payload.received, payload.left.min(DIRECT_BYTES_MAX));
        self.input.direct = true;
        self.link
            .receive(io, token::RECEIVE_DATA, rest, Receive::Whole);
        true
    }

    fn moved(&mut self) {}

    fn end(&mut self, io: &mut Io, reason: &str) {
        Connection::end(self, io, reason);
    }
}

impl Connection {
    /// Processes the bytes that arrived during the handshake.
    pub(crate) fn start(&mut self, io: &mut Io) {
        let now = io.now();
        self.take_in(io, now);
    }

    pub(crate) fn has_output_room(&self) -> bool {
        self.output.unsent() <= self.peer.shared.limits.output_bytes
    }

    /// Continues parsing that waited for output, memory or a slot. Uses a message to the worker, so that other sources run in between.
    pub(crate) fn continue_parsing(&mut self) {
        if !self.is_over() && self.input.has_unparsed() && self.may_begin() {
            self.handle.send(|connection, io| {
                let now = io.now();
                connection.take_in(io, now);
            });
        }
    }

    /// Returns true if the next request can begin. Memory for a waiting request is then reserved.
    fn may_begin(&mut self) -> bool {
        if !self.has_output_room() {
            self.buffers.give_up();
            return false;
        }
        let Some(request) = self.input.waiting.filter(|_| self.input.reserved.is_none()) else {
            return true;
        };
        let can_begin = self.await_resources(&request);
        if can_begin {
            let length = memory_of(&request);
            self.buffers.reserve(length);
            self.input.reserved = Some(length);
        }
        can_begin
    }

    pub(crate) fn received_data(&mut self, io: &mut Io, completion: &Completion, noticed: Stamp) {
        self.input.direct = false;
        if self.lifecycle.is_ended() {
            return;
        }
        let Some(bytes) = self.bytes_received(io, completion.result) else {
            return;
        };
        if let Some(payload) = &mut self.input.payload {
            payload.received += bytes;
            payload.left -= bytes;
        }
        self.take_in(io, noticed);
    }

    /// Parses received bytes until they are used or the next request must wait.
    pub(crate) fn parse_requests(&mut self) -> Result<(), Violation> {
        while !self.lifecycle.is_leaving() {
            let input = &mut self.input;
            let available = input.receiver.unparsed();
            if input.skipped > 0 {
                let here = input.skipped.min(available);
                input.skipped -= here;
                input.skipped_so_far += here as u64;
                input.receiver.from += here;
                if input.skipped > 0 {
                    return Ok(());
                }
            }
            if input.payload.is_some() {
                if !self.store_payload() {
                    return Ok(());
                }
                continue;
            }
            if !self.has_output_room() {
                return Ok(());
            }
            let request = match self.input.waiting.take() {
                Some(request) => {
                    if let Some(length) = self.input.reserved.take() {
                        self.buffers.give_reserved(length);
                    }
                    request
                }
                None => match self.next_request()? {
                    Some(request) => request,
                    None => return Ok(()),
                },
            };
            if !self.await_resources(&request) {
                self.input.waiting = Some(request);
                return Ok(());
            }
            self.input.receiver.count_request();
            self.begin(&request)?;
        }
        Ok(())
    }

    /// Parses the next header once it is complete.
    fn next_request(&mut self) -> Result<Option<Request>, Violation> {
        let input = &mut self.input;
        let length = Request::header_length(self.peer.rules.style);
        let here = (length - input.header_length).min(input.receiver.unparsed());
        if let (Some(buffer), true) = (&input.receiver.buffer, here > 0) {
            let into = &mut input.header[input.header_length..][..here];
            buffer.read_whole(input.receiver.from, into);
        }
        input.receiver.from += here;
        input.header_length += here;
        if input.header_length < length {
            return Ok(None);
        }
        input.header_length = 0;
        input.headers += 1;
        Request::decode(&input.header[..length], self.peer.rules.style)
    }

    /// Expects the payload of a request in this slot.
    pub(crate) fn expect_payload(&mut self, slot: u32, length: usize) {
        self.input.payload = Some(Payload {
            slot,
            received: 0,
            left: length,
        });
    }

    /// Skips the payload of a refused request.
    pub(crate) fn skip_payload(&mut self, length: u32) {
        self.input.skipped = length as usize;
        self.input.skipped_so_far = 0;
    }

    /// Copies received bytes of the payload. Returns false if the rest has not arrived.
    fn store_payload(&mut self) -> bool {
        let Some(mut payload) = self.input.payload.take() else {
            return true;
        };
        let here = payload.left.min(self.input.receiver.unparsed());
        if let (Some(from), Some(into)) = (
            &self.input.receiver.buffer,
            &self.slots.get(payload.slot).buffer,
        ) && here > 0
        {
            from.copy_part(self.input.receiver.from, into, payload.received, here);
        }
        self.input.receiver.from += here;
        payload.received += here;
        payload.left -= here;
        if payload.left > 0 {
            self.input.payload = Some(payload);
            return false;
        }
        self.slots.get(payload.slot).stage = Stage::Ready;
        self.schedule.batch.push(payload.slot);
        true
    }
}
