//! Transmission phase of a client: requests in flight, and the bytes of their replies.
//!
//! The caller numbers requests with slots, sends the encoded headers and payloads, and passes received bytes. Every reply is checked against
//! its request: data that is outside of the range, arrives twice or is missing is a violation.

use crate::client::reply::content_up_to;
use crate::client::{Chunk, Content, Reply, decode};
use crate::reply::Descriptor;
use crate::request::Request;
use crate::wire::{
    EXTENDED_REPLY_MAGIC, ExtendedReply, STRUCTURED_REPLY_MAGIC, SimpleReply, StructuredReply,
    chunk, command, command_flag,
};
use crate::{ErrorCode, Style, Violation};

/// Length of the longest header.
const HEADER_MAX: usize = ExtendedReply::LENGTH;
/// Length of the magic number, which determines the length of a header.
const MAGIC_BYTES: usize = 4;
/// Length of the offset at the start of a data chunk.
const OFFSET_BYTES: usize = 8;
/// Maximum number of separate ranges of a read's data, against hostile servers.
const ISLANDS_MAX: usize = 256;
/// Maximum number of extents taken from a status, against hostile servers: callers need far fewer, and parsing takes time.
const EXTENTS_MAX: usize = 4096;
/// Payload memory that stays allocated between replies, in bytes.
const PAYLOAD_KEPT: usize = 64 << 10;

/// Part of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// All bytes were used; more are needed.
    More,
    /// The next `length` of the given bytes are data of a read. The caller removes them.
    Data {
        /// Slot of the read.
        slot: u32,
        /// Position in the read's data.
        at: u64,
        /// Number of bytes.
        length: usize,
    },
    /// A part of a read's data is zeroes.
    Zeroes {
        /// Slot of the read.
        slot: u32,
        /// Position in the read's data.
        at: u64,
        /// Number of bytes.
        length: u64,
    },
    /// Extents of the selected context, consecutive from the offset of the request.
    Status {
        /// Slot of the request.
        slot: u32,
        /// The first 4096 extents.
        descriptors: Vec<Descriptor>,
    },
    /// The request has ended.
    Done {
        /// Slot of the request.
        slot: u32,
        /// Result of the request.
        result: Result<(), ErrorCode>,
    },
}

/// Reply that a request in flight expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// The slot is free.
    Nothing,
    /// A result without data.
    Result,
    /// Data of this range.
    Data { offset: u64, length: u64 },
    /// Extents.
    Status { is_complete: bool },
}

#[derive(Debug)]
struct Slot {
    /// Number of requests that the slot has had, in the upper half of the cookie.
    generation: u32,
    expected: Expected,
    error: Option<ErrorCode>,
    /// Received bytes from the start of the range.
    covered: u64,
    /// Received ranges beyond, sorted, without overlaps.
    islands: Vec<(u64, u64)>,
}

impl Slot {
    /// Records the arrival of `length` bytes at this position.
    fn cover(&mut self, at: u64, length: u64) -> Result<(), Violation> {
        let end = at + length;
        if at < self.covered {
            return Err(Violation::Reply("data of a read was sent twice"));
        }
        if at > self.covered {
            let index = self.islands.partition_point(|island| island.0 < at);
            let overlaps = |island: Option<&(u64, u64)>| {
                island.is_some_and(|island| island.0 < end && at < island.1)
            };
            let before = index
                .checked_sub(1)
                .and_then(|index| self.islands.get(index));
            if overlaps(before) || overlaps(self.islands.get(index)) {
                return Err(Violation::Reply("data of a read was sent twice"));
            }
            if self.islands.len() >= ISLANDS_MAX {
                return Err(Violation::Reply("too many fragments of a read"));
            }
            self.islands.insert(index, (at, end));
            return Ok(());
        }
        if self.islands.first().is_some_and(|island| island.0 < end) {
            return Err(Violation::Reply("data of a read was sent twice"));
        }
        self.covered = end;
        let adjacent = self.islands.iter().take_while(|island| {
            let is_adjacent = island.0 == self.covered;
            if is_adjacent {
                self.covered = island.1;
            }
            is_adjacent
        });
        let adjacent = adjacent.count();
        self.islands.drain(..adjacent);
        Ok(())
    }
}

/// Bytes that are expected next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Header,
    /// Offset of a data chunk with `left` bytes of data.
    Offset {
        slot: u32,
        left: u64,
        is_last: bool,
    },
    /// Data of a read.
    Data {
        slot: u32,
        at: u64,
        left: u64,
        is_last: bool,
    },
    /// Payload of any other chunk.
    Payload(Chunk),
    /// The connection has ended with this violation.
    Violated(Violation),
}

/// State of the transmission phase.
#[derive(Debug)]
pub struct Transmission {
    style: Style,
    /// ID of the selected metadata context.
    context: Option<u32>,
    slots: Vec<Slot>,
    in_flight: usize,
    state: State,
    /// Received part of an incomplete header or offset.
    staged: [u8; HEADER_MAX],
    staged_length: usize,
    /// Received part of a payload.
    payload: Vec<u8>,
}

impl Transmission {
    /// Creates the state after the handshake. `context`: ID of the selected metadata context.
    pub fn new(style: Style, context: Option<u32>) -> Transmission {
        Transmission {
            style,
            context,
            slots: Vec::new(),
            in_flight: 0,
            state: State::Header,
            staged: [0; HEADER_MAX],
            staged_length: 0,
            payload: Vec::new(),
        }
    }

    /// Returns the form of requests.
    pub fn style(&self) -> Style {
        self.style
    }

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Begins a request and appends its header. The payload of a write must follow. The cookie is chosen here.
    ///
    /// # Panics
    /// When the slot has a request.
    pub fn begin(&mut self, slot: u32, request: Request, output: &mut Vec<u8>) {
        let index = slot as usize;
        while self.slots.len() <= index {
            self.slots.push(Slot {
                generation: 0,
                expected: Expected::Nothing,
                error: None,
                covered: 0,
                islands: Vec::new(),
            });
        }
        let state = &mut self.slots[index];
        assert!(state.expected == Expected::Nothing, "slot is in use");
        state.generation = state.generation.wrapping_add(1);
        state.error = None;
        state.covered = 0;
        state.islands.clear();
        state.expected = match request.command {
            command::READ => Expected::Data {
                offset: request.offset,
                length: request.length,
            },
            command::BLOCK_STATUS => Expected::Status { is_complete: false },
            _ => Expected::Result,
        };
        let carries_payload = request.command == command::WRITE && self.style == Style::Extended;
        let payload = if carries_payload {
            command_flag::PAYLOAD_LEN
        } else {
            0
        };
        let request = Request {
            flags: request.flags | payload,
            cookie: u64::from(state.generation) << 32 | u64::from(slot),
            ..request
        };
        self.in_flight += 1;
        request.encode(self.style, output);
    }

    /// Parses the next part of a reply from the start of `bytes`, and removes it, except data.
    ///
    /// # Errors
    /// The server breaks a rule. The connection must end.
    pub fn next(&mut self, bytes: &mut &[u8]) -> Result<Event, Violation> {
        let event = self.step(bytes);
        if let Err(violation) = &event {
            self.state = State::Violated(*violation);
        }
        event
    }

    fn step(&mut self, bytes: &mut &[u8]) -> Result<Event, Violation> {
        loop {
            let event = match self.state {
                State::Violated(violation) => return Err(violation),
                State::Data {
                    slot,
                    left: 0,
                    is_last,
                    ..
                } => self.end_chunk(slot, is_last)?,
                State::Data { slot, at, left, .. } => {
                    let length = left.min(bytes.len() as u64);
                    if length == 0 {
                        return Ok(Event::More);
                    }
                    self.received(length);
                    let length = length as usize;
                    return Ok(Event::Data { slot, at, length });
                }
                State::Header => match self.header(bytes)? {
                    Some(reply) => self.begin_reply(reply)?,
                    None => return Ok(Event::More),
                },
                State::Offset {
                    slot,
                    left,
                    is_last,
                } => {
                    if !self.stage(bytes, OFFSET_BYTES) {
                        return Ok(Event::More);
                    }
                    self.begin_data(slot, left, is_last)?;
                    None
                }
                State::Payload(chunk) => {
                    let missing = chunk.length as usize - self.payload.len();
                    let here = missing.min(bytes.len());
                    self.payload.extend_from_slice(&bytes[..here]);
                    *bytes = &bytes[here..];
                    if here < missing {
                        return Ok(Event::More);
                    }
                    self.end_payload(chunk)?
                }
            };
            if let Some(event) = event {
                return Ok(event);
            }
        }
    }

    /// Returns the data that must arrive next: slot, position in the read's data, and number of bytes.
    pub fn expected_data(&self) -> Option<(u32, u64, u64)> {
        match self.state {
            State::Data { slot, at, left, .. } if left > 0 => Some((slot, at, left)),
            _ => None,
        }
    }

    /// Records data that was received directly into the memory of the read, at most as much as [`Transmission::expected_data`] returned.
    pub fn received(&mut self, bytes: u64) {
        if let State::Data { at, left, .. } = &mut self.state {
            *at += bytes;
            *left -= bytes;
        }
    }

    /// Copies bytes until `length` of them are staged. Returns true if they are.
    fn stage(&mut self, bytes: &mut &[u8], length: usize) -> bool {
        let here = length.saturating_sub(self.staged_length).min(bytes.len());
        let (staged, rest) = bytes.split_at(here);
        self.staged[self.staged_length..][..here].copy_from_slice(staged);
        *bytes = rest;
        self.staged_length += here;
        let is_complete = self.staged_length >= length;
        if is_complete {
            self.staged_length = 0;
        }
        is_complete
    }

    fn header(&mut self, bytes: &mut &[u8]) -> Result<Option<Reply>, Violation> {
        if self.staged_length < MAGIC_BYTES {
            if !self.stage(bytes, MAGIC_BYTES) {
                return Ok(None);
            }
            self.staged_length = MAGIC_BYTES;
        }
        let [a, b, c, d, ..] = self.staged;
        let length = match u32::from_be_bytes([a, b, c, d]) {
            STRUCTURED_REPLY_MAGIC => StructuredReply::LENGTH,
            EXTENDED_REPLY_MAGIC => ExtendedReply::LENGTH,
            _ => SimpleReply::LENGTH,
        };
        if !self.stage(bytes, length) {
            return Ok(None);
        }
        let decoded = decode(&self.staged[..length], self.style)?;
        Ok(decoded.map(|(reply, _)| reply))
    }

    /// Returns the slot of a request in flight.
    fn slot_of(&self, cookie: u64) -> Result<u32, Violation> {
        let index = cookie as u32;
        let slot = self.slots.get(index as usize);
        let is_in_flight = slot.is_some_and(|slot| {
            slot.expected != Expected::Nothing && u64::from(slot.generation) == cookie >> 32
        });
        match is_in_flight {
            true => Ok(index),
            false => Err(Violation::Reply("reply without a request")),
        }
    }

    fn begin_reply(&mut self, reply: Reply) -> Result<Option<Event>, Violation> {
        match reply {
            Reply::Simple { cookie, error } => {
                let slot = self.slot_of(cookie)?;
                let state = &mut self.slots[slot as usize];
                state.error = error;
                match state.expected {
                    Expected::Result | Expected::Nothing => self.finish(slot).map(Some),
                    _ if self.style != Style::Simple => {
                        Err(Violation::Reply("simple reply to a read"))
                    }
                    Expected::Data { length, .. } if error.is_none() => {
                        state.cover(0, length)?;
                        self.state = State::Data {
                            slot,
                            at: 0,
                            left: length,
                            is_last: true,
                        };
                        Ok(None)
                    }
                    Expected::Data { .. } | Expected::Status { .. } => self.finish(slot).map(Some),
                }
            }
            Reply::Chunk(chunk) => {
                let slot = self.slot_of(chunk.cookie)?;
                let length = u64::from(chunk.length);
                if chunk.kind == chunk::OFFSET_DATA {
                    let left = length
                        .checked_sub(OFFSET_BYTES as u64)
                        .filter(|left| *left > 0);
                    let left = left.ok_or(Violation::Reply("malformed chunk"))?;
                    self.state = State::Offset {
                        slot,
                        left,
                        is_last: chunk.is_last,
                    };
                    return Ok(None);
                }
                if chunk.kind == chunk::NONE && !chunk.is_last {
                    return Err(Violation::Reply("empty chunk that is not the last"));
                }
                self.payload.clear();
                self.state = State::Payload(chunk);
                Ok(None)
            }
        }
    }

    /// Returns the position of a part of a read's data, after checking that the range contains it.
    fn position(&mut self, slot: u32, offset: u64, bytes: u64) -> Result<u64, Violation> {
        let state = &mut self.slots[slot as usize];
        let Expected::Data {
            offset: first,
            length,
        } = state.expected
        else {
            return Err(Violation::Reply("data for a request that is no read"));
        };
        let at = offset.checked_sub(first);
        let at = at.filter(|at| bytes <= length && *at <= length - bytes);
        let at = at.ok_or(Violation::Reply("data outside of the read's range"))?;
        state.cover(at, bytes)?;
        Ok(at)
    }

    fn begin_data(&mut self, slot: u32, left: u64, is_last: bool) -> Result<(), Violation> {
        let [a, b, c, d, e, f, g, h, ..] = self.staged;
        let offset = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        let at = self.position(slot, offset, left)?;
        self.state = State::Data {
            slot,
            at,
            left,
            is_last,
        };
        Ok(())
    }

    fn end_payload(&mut self, chunk: Chunk) -> Result<Option<Event>, Violation> {
        let slot = self.slot_of(chunk.cookie)?;
        let is_extended = chunk.kind == chunk::BLOCK_STATUS_EXT;
        let is_status = is_extended || chunk.kind == chunk::BLOCK_STATUS;
        if is_status && is_extended != (self.style == Style::Extended) {
            return Err(Violation::Reply("status in the form of another style"));
        }
        let payload = std::mem::take(&mut self.payload);
        let event = match content_up_to(chunk.kind, &payload, EXTENTS_MAX)? {
            Content::None | Content::Data { .. } => None,
            Content::Error { code, .. } => {
                self.slots[slot as usize].error.get_or_insert(code);
                None
            }
            Content::Hole { offset, length } => {
                let length = length.into();
                let at = self.position(slot, offset, length)?;
                Some(Event::Zeroes { slot, at, length })
            }
            Content::BlockStatus {
                context,
                descriptors,
            } => {
                let expected = &mut self.slots[slot as usize].expected;
                let is_expected = *expected == Expected::Status { is_complete: false };
                if !is_expected || self.context != Some(context) {
                    return Err(Violation::Reply("status that was not requested"));
                }
                *expected = Expected::Status { is_complete: true };
                Some(Event::Status { slot, descriptors })
            }
        };
        if payload.capacity() <= PAYLOAD_KEPT {
            self.payload = payload;
        }
        // The end follows in the next step.
        match event {
            Some(event) => {
                self.state = State::Data {
                    slot,
                    at: 0,
                    left: 0,
                    is_last: chunk.is_last,
                };
                Ok(Some(event))
            }
            None => self.end_chunk(slot, chunk.is_last),
        }
    }

    fn end_chunk(&mut self, slot: u32, is_last: bool) -> Result<Option<Event>, Violation> {
        self.state = State::Header;
        match is_last {
            true => self.finish(slot).map(Some),
            false => Ok(None),
        }
    }

    fn finish(&mut self, slot: u32) -> Result<Event, Violation> {
        let state = &mut self.slots[slot as usize];
        let result = match (state.error, state.expected) {
            (Some(error), _) => Err(error),
            (None, Expected::Data { length, .. }) if state.covered < length => {
                return Err(Violation::Reply("data of a read is missing"));
            }
            // The caller would use the previous content of its buffer as extents.
            (None, Expected::Status { is_complete: false }) => {
                return Err(Violation::Reply("status is missing"));
            }
            (None, _) => Ok(()),
        };
        state.expected = Expected::Nothing;
        self.in_flight -= 1;
        Ok(Event::Done { slot, result })
    }
}
