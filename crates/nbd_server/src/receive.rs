//! Input of a connection: splits the stream into requests and stores the payloads of writes.
//!
//! One receive is in flight at a time: into the connection's own buffer, or, for the rest of a long payload, directly into the buffer of its
//! request. While too much output is queued, or a request waits for memory or a slot, nothing is received or parsed.

use guest_memory::IoBuffer;
use latency::{Stage as Hop, Stamp, Stamps};
use nbd::request::Request;
use nbd::{Style, Violation};
use reactor::Io;
use uring::{Completion, Receive, WatchId};

use crate::connection::{Connection, token};
use crate::slots::Stage;

const RECEIVE_BYTES: usize = 64 << 10;
/// Length of the longest header.
const HEADER_MAX: usize = Request::header_length(Style::Extended);
/// Number of single requests in a row after which the socket is watched. Starting and ending a watch costs as much as it saves for a few
/// requests.
const SINGLE_MIN: u32 = 16;
/// Minimum rest of a payload for a direct receive.
const DIRECT_BYTES_MIN: usize = 4096;

/// Payload that is being received.
#[derive(Clone, Copy, Debug)]
struct Payload {
    slot: u32,
    received: usize,
    left: usize,
}

pub(crate) struct Input {
    /// `None` while the kernel has it.
    buffer: Option<IoBuffer>,
    /// Range of unparsed bytes in `buffer`.
    from: usize,
    to: usize,
    /// Received part of an incomplete header.
    header: [u8; HEADER_MAX],
    header_length: usize,
    /// Bytes of a refused payload that are still to come.
    skipped: usize,
    payload: Option<Payload>,
    /// Request that waits for memory or a slot.
    waiting: Option<Request>,
    /// A receive into `buffer` is in flight.
    receiving: bool,
    /// A receive into the buffer of the payload's request is in flight.
    direct: bool,
    /// Requests completed by the last receive.
    requests: u32,
    /// Number of receives in a row that completed one request each.
    single: u32,
    /// Watch for the next request, while requests arrive one at a time.
    watch: Option<WatchId>,
}

impl Input {
    /// Creates the state with bytes that have arrived already.
    pub fn new(early: &[u8]) -> Input {
        let buffer = IoBuffer::owned(RECEIVE_BYTES.max(early.len()));
        buffer.write_whole(0, early);
        Input {
            buffer: Some(buffer),
            from: 0,
            to: early.len(),
            header: [0; HEADER_MAX],
            header_length: 0,
            skipped: 0,
            payload: None,
            waiting: None,
            receiving: false,
            direct: false,
            requests: 0,
            single: 0,
            watch: None,
        }
    }

    /// Returns true if the last receive completed exactly one request. Such a client probably waits for the reply before it sends the next
    /// request.
    pub fn asks_singly(&self) -> bool {
        self.requests == 1
    }

    /// Returns true if a request has arrived in part.
    pub fn is_within_request(&self) -> bool {
        self.header_length > 0 || self.skipped > 0 || self.payload.is_some()
    }

    /// Returns true if the kernel receives into the buffer of this slot.
    pub fn receives_into(&self, slot: u32) -> bool {
        self.direct && self.payload.is_some_and(|payload| payload.slot == slot)
    }

    /// Returns true if received bytes or a request wait to be parsed.
    fn has_unparsed(&self) -> bool {
        self.from < self.to || self.waiting.is_some()
    }
}

impl Connection {
    /// Processes the bytes that arrived during the handshake.
    pub(crate) fn start(&mut self, io: &mut Io) {
        let now = io.now();
        self.take_in(io, now);
    }

    /// Starts the next receive or a watch of the socket, unless one is active or not allowed.
    pub(crate) fn receive_more(&mut self, io: &mut Io) {
        if self.input.watch.is_some() || !self.may_receive() {
            return;
        }
        if let Some(payload) = self.input.payload
            && payload.left >= DIRECT_BYTES_MIN
            && let Some(buffer) = &self.slots.get(payload.slot).buffer
        {
            let rest = buffer.slice(payload.received, payload.left);
            self.input.direct = true;
            self.operations += 1;
            let (owner, socket) = (self.owner, &self.socket);
            return io
                .ring()
                .receive(owner, token::RECEIVE_DATA, socket, rest, Receive::Whole);
        }
        if self.input.single >= SINGLE_MIN && !self.input.is_within_request() {
            let watch = io.ring().watch(self.owner, token::READABLE, &self.socket);
            self.input.watch = Some(watch);
            return;
        }
        let Some(buffer) = self.input.buffer.take() else {
            return;
        };
        self.input.receiving = true;
        self.operations += 1;
        let how = match self.input.asks_singly() {
            true => Receive::Later,
            false => Receive::Some,
        };
        io.ring()
            .receive(self.owner, token::RECEIVE, &self.socket, buffer, how);
    }

    fn may_receive(&self) -> bool {
        let is_receiving = self.input.receiving || self.input.direct;
        !self.is_over() && !is_receiving && !self.input.has_unparsed() && self.has_output_room()
    }

    pub(crate) fn has_output_room(&self) -> bool {
        self.output.unsent() <= self.shared.limits.output_bytes
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

    /// Returns true if the next request can begin.
    fn may_begin(&self) -> bool {
        let can_begin = self
            .input
            .waiting
            .is_none_or(|request| self.has_resources(&request));
        can_begin && self.has_output_room()
    }

    pub(crate) fn received(&mut self, io: &mut Io, completion: Completion, noticed: Stamp) {
        self.input.receiving = false;
        self.input.buffer = completion.buffer;
        self.came(io, completion.result, noticed);
    }

    pub(crate) fn received_data(&mut self, io: &mut Io, completion: &Completion, noticed: Stamp) {
        self.input.direct = false;
        if self.ended {
            return;
        }
        match completion.result {
            Ok(0) => self.end(io, "closed by the client"),
            Ok(bytes) => {
                self.moved = self.moved.wrapping_add(1);
                if let Some(payload) = &mut self.input.payload {
                    payload.received += bytes as usize;
                    payload.left -= bytes as usize;
                }
                self.take_in(io, noticed);
            }
            Err(4 | 11) => {}
            Err(_) => self.end(io, "connection lost"),
        }
    }

    /// Handles data on the watched socket; `more`: the watch stays active.
    pub(crate) fn readable(&mut self, io: &mut Io, more: bool, noticed: Stamp) {
        if !more {
            self.input.watch = None;
        }
        if !self.may_receive() {
            // The watch reports data once. A later receive will find it.
            return self.unwatch(io);
        }
        let Some(buffer) = self.input.buffer.take() else {
            return self.unwatch(io);
        };
        let result = self.socket.receive_now(&buffer);
        let full = result == Ok(buffer.len() as u32);
        self.input.buffer = Some(buffer);
        self.came(io, result, noticed);
        if full || self.input.single == 0 {
            self.unwatch(io);
        }
    }

    /// Ends the watch and returns to receives.
    pub(crate) fn unwatch(&mut self, io: &mut Io) {
        self.input.single = 0;
        if let Some(watch) = self.input.watch.take() {
            io.ring().unwatch(watch);
        }
    }

    fn came(&mut self, io: &mut Io, result: Result<u32, i32>, noticed: Stamp) {
        if self.ended {
            return;
        }
        match result {
            Ok(0) => self.end(io, "closed by the client"),
            Ok(bytes) => {
                self.moved = self.moved.wrapping_add(1);
                self.input.requests = 0;
                (self.input.from, self.input.to) = (0, bytes as usize);
                self.take_in(io, noticed);
                self.input.single = match self.input.asks_singly() {
                    true => self.input.single.saturating_add(1),
                    false => 0,
                };
            }
            // Interrupted, or no bytes.
            Err(4 | 11) => {}
            Err(_) => self.end(io, "connection lost"),
        }
    }

    /// Hops 2 to 5 for received bytes.
    fn take_in(&mut self, io: &mut Io, noticed: Stamp) {
        if self.is_over() {
            return;
        }
        let mut stamps = Stamps::noticed(noticed);
        stamps.mark(Hop::Popped, self.measurement.stamp(io));
        let parsed = self.parse();
        stamps.mark(Hop::Parsed, self.measurement.stamp(io));
        self.submit_batch(io, stamps);
        if let Err(violation) = parsed {
            self.shared.violated(&self.client, &violation);
            self.end(io, "protocol violation");
        }
    }

    /// Parses received bytes until they are used or the next request must wait.
    fn parse(&mut self) -> Result<(), Violation> {
        while !self.leaving {
            let input = &mut self.input;
            let available = input.to - input.from;
            if input.skipped > 0 {
                let here = input.skipped.min(available);
                input.skipped -= here;
                input.from += here;
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
                Some(request) => request,
                None => match self.next_request()? {
                    Some(request) => request,
                    None => return Ok(()),
                },
            };
            if !self.has_resources(&request) {
                self.input.waiting = Some(request);
                return Ok(());
            }
            self.input.requests = self.input.requests.saturating_add(1);
            self.begin(&request)?;
        }
        Ok(())
    }

    /// Parses the next header once it is complete.
    fn next_request(&mut self) -> Result<Option<Request>, Violation> {
        let input = &mut self.input;
        let length = Request::header_length(self.rules.style);
        let here = (length - input.header_length).min(input.to - input.from);
        if let (Some(buffer), true) = (&input.buffer, here > 0) {
            let into = &mut input.header[input.header_length..][..here];
            buffer.read_whole(input.from, into);
        }
        input.from += here;
        input.header_length += here;
        if input.header_length < length {
            return Ok(None);
        }
        input.header_length = 0;
        Request::decode(&input.header[..length], self.rules.style)
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
    }

    /// Copies received bytes of the payload. Returns false if the rest has not arrived.
    fn store_payload(&mut self) -> bool {
        let Some(mut payload) = self.input.payload.take() else {
            return true;
        };
        let here = payload.left.min(self.input.to - self.input.from);
        if let (Some(from), Some(into)) = (&self.input.buffer, &self.slots.get(payload.slot).buffer)
            && here > 0
        {
            from.copy_part(self.input.from, into, payload.received, here);
        }
        self.input.from += here;
        payload.received += here;
        payload.left -= here;
        if payload.left > 0 {
            self.input.payload = Some(payload);
            return false;
        }
        self.slots.get(payload.slot).stage = Stage::Ready;
        self.batch.push(payload.slot);
        true
    }
}
