//! One connection on a ring: requests are sent as few messages, and one receive is in flight.
//!
//! The link moves bytes; [`Transmission`] checks them. While the kernel has a message, further requests are collected for the next one.

use std::io;

use guest_memory::IoBuffer;
use nbd::client::Transmission;
use nbd::request::Request;
use nbd::wire::command;
use tls::Decrypted;
use uring::{Message, Owner, Receive, Ring, RingFd};

use super::connector::Connection;
use super::encryption::Encryption;
use super::{allocation_of, payload_max};

/// Tokens of operations on the ring.
pub(super) mod token {
    pub const RECEIVE: u64 = 0;
    pub const RECEIVE_DATA: u64 = 1;
    pub const SEND: u64 = 2;
}

/// Growth of the export since the handshake of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Growth {
    None,
    /// Another connection replaces this one when no request is in flight.
    Outgrown,
    /// The same, after a flush of the writes of this connection, which may have failed.
    Flushed,
}

/// Reason for the end of a connection that the disk does not need any more.
pub(super) const CLOSED: &str = "closed";
/// Size of the receive buffer: the replies to 32 reads of 4 KiB.
const RECEIVE_BYTES: usize = 160 << 10;
/// Minimum rest of a read's data for a receive into the memory of the read.
const DIRECT_BYTES_MIN: u64 = 32 << 10;
/// Size up to which a socket usually takes a message at once.
const QUIET_BYTES_MAX: u64 = 64 << 10;
/// Maximum bytes of a message and of a receive into the memory of a read, unless one request is longer: their ends are the progress of a slow
/// connection.
const PIECE_BYTES_MAX: u64 = 1 << 20;
/// Minimum memory for headers in bytes.
const HEADER_BYTES_MIN: usize = 4096;

/// A part of the next message, in stream order.
#[derive(Clone, Copy, Debug)]
enum Piece {
    /// Bytes of `headers`.
    Headers(usize),
    /// The next queued buffer.
    Data,
}

/// Queued requests, and the message in flight.
#[derive(Default)]
struct Outgoing {
    /// Headers of requests.
    headers: Vec<u8>,
    /// Bytes of `headers` that are in `pieces`.
    listed: usize,
    pieces: Vec<Piece>,
    /// Payloads of writes, and their length in bytes.
    data: Vec<IoBuffer>,
    data_bytes: u64,
    /// Reusable memory for headers, and reusable empty buffers.
    header_memory: IoBuffer,
    shells: Vec<IoBuffer>,
    /// Reusable message.
    message: Option<Box<Message>>,
    /// The kernel has a message.
    is_sending: bool,
}

pub(super) struct Link {
    socket: RingFd,
    owner: Owner,
    /// State of TLS; `None`: the connection is not encrypted.
    encryption: Option<Encryption>,
    pub transmission: Transmission,
    /// Maximum length of a read or write in bytes.
    pub payload_max: u32,
    /// Size of the export at the handshake. Many servers keep it for the life of the connection.
    pub size: u64,
    pub growth: Growth,
    outgoing: Outgoing,
    /// `None` while the kernel has it.
    pub input: Option<IoBuffer>,
    is_receiving: bool,
    /// A request has succeeded over this connection.
    pub is_fruitful: bool,
    /// Reason for the end of the connection. Nothing more is sent or received.
    pub closing: Option<String>,
}

impl Outgoing {
    /// Adds the payload of a request after its header.
    fn add_payload(&mut self, buffer: &IoBuffer, at: usize, length: usize) {
        let mut shell = self.shells.pop().unwrap_or_default();
        buffer.slice_into(at, length, &mut shell);
        self.list_headers();
        self.pieces.push(Piece::Data);
        self.data.push(shell);
        self.data_bytes += length as u64;
    }

    fn list_headers(&mut self) {
        if self.headers.len() > self.listed {
            let length = self.headers.len() - self.listed;
            self.pieces.push(Piece::Headers(length));
            self.listed = self.headers.len();
        }
    }

    /// Replaces headers and payloads by TLS records.
    fn encrypt(&mut self, encryption: &mut Encryption) -> io::Result<()> {
        let result = self.records(encryption);
        let result = result.map(|records| self.headers = records);
        self.pieces.clear();
        self.pieces.push(Piece::Headers(self.headers.len()));
        while let Some(payload) = self.data.pop() {
            self.reuse(payload);
        }
        result
    }

    fn records(&self, encryption: &mut Encryption) -> io::Result<Vec<u8>> {
        let mut at = 0;
        let mut data = self.data.iter();
        for piece in &self.pieces {
            match *piece {
                Piece::Headers(length) => {
                    encryption.write(&self.headers[at..at + length])?;
                    at += length;
                }
                Piece::Data => {
                    let Some(payload) = data.next() else { continue };
                    encryption.write_buffer(payload)?;
                }
            }
        }
        Ok(encryption.take_records())
    }

    /// Returns the message of all queued requests.
    fn take_message(&mut self) -> Box<Message> {
        let mut memory = std::mem::take(&mut self.header_memory);
        if memory.total_len() < self.headers.len() {
            let length = self.headers.len().next_power_of_two();
            memory = IoBuffer::owned(length.max(HEADER_BYTES_MIN));
        }
        memory.write_whole(0, &self.headers);
        let mut message = self.message.take().unwrap_or_default();
        let headers = message.keep(memory);
        let mut at = 0;
        let mut data = self.data.drain(..);
        for piece in self.pieces.drain(..) {
            match piece {
                Piece::Headers(length) => {
                    message.add(headers, at, length);
                    at += length;
                }
                Piece::Data => {
                    let Some(payload) = data.next() else { continue };
                    let length = payload.len();
                    let number = message.keep(payload);
                    message.add(number, 0, length);
                }
            }
        }
        drop(data);
        self.headers.clear();
        self.listed = 0;
        self.data_bytes = 0;
        message
    }

    /// Keeps memory and buffers of a message that was sent, without references to the client's memory.
    fn recycle(&mut self, mut message: Box<Message>) {
        self.is_sending = false;
        let mut buffers = message.take_buffers();
        self.header_memory = buffers.next().unwrap_or_default();
        for buffer in buffers {
            self.reuse(buffer);
        }
        self.message = Some(message);
    }

    fn reuse(&mut self, mut buffer: IoBuffer) {
        buffer.clear();
        self.shells.push(buffer);
    }
}

impl Link {
    /// Creates the link of an open export. `alignment`: that of requests.
    pub fn new(ring: &mut Ring, owner: Owner, connection: Connection, alignment: u32) -> Link {
        let Connection {
            socket,
            session,
            early,
            tls,
        } = connection;
        let input = IoBuffer::owned(RECEIVE_BYTES.max(early.len()));
        input.write_whole(0, &early);
        Link {
            socket: ring.register(socket),
            owner,
            encryption: tls.map(|session| Encryption::new(session, RECEIVE_BYTES)),
            transmission: Transmission::new(session.style, allocation_of(&session)),
            payload_max: payload_max(&session, alignment),
            size: session.size,
            growth: Growth::None,
            outgoing: Outgoing::default(),
            input: Some(input),
            is_receiving: false,
            is_fruitful: false,
            closing: None,
        }
    }

    /// Queues a request. `payload`: buffer of a write, and the position of the request's data in it.
    pub fn request(&mut self, slot: u32, request: Request, payload: Option<(&IoBuffer, u64)>) {
        let length = request.length as usize;
        let headers = &mut self.outgoing.headers;
        self.transmission.begin(slot, request, headers);
        if let Some((buffer, at)) = payload {
            self.outgoing.add_payload(buffer, at as usize, length);
        }
    }

    /// Returns true if the next message can take another request.
    pub fn has_room(&self) -> bool {
        self.outgoing.data_bytes < PIECE_BYTES_MAX
    }

    /// Builds a message of all queued requests.
    fn next_message(&mut self) -> Box<Message> {
        self.outgoing.list_headers();
        if let Some(encryption) = &mut self.encryption
            && let Err(error) = self.outgoing.encrypt(encryption)
        {
            self.close(&format!("TLS failed: {error}"));
        }
        self.outgoing.take_message()
    }

    /// Sends queued requests, unless a message is in flight.
    pub fn send(&mut self, ring: &mut Ring) {
        if self.outgoing.is_sending || self.outgoing.headers.is_empty() || self.closing.is_some() {
            return;
        }
        let message = self.next_message();
        self.outgoing.is_sending = true;
        match message.left() <= QUIET_BYTES_MAX {
            true => ring.send_quietly(self.owner, token::SEND, &self.socket, message),
            false => ring.send(self.owner, token::SEND, &self.socket, message),
        }
    }

    /// Handles the end of a send.
    pub fn sent(&mut self, ring: &mut Ring, mut message: Box<Message>, result: Result<u32, i32>) {
        match result {
            Ok(bytes) => message.sent(bytes),
            // Interrupted, or no room at the moment.
            Err(libc::EINTR | libc::EAGAIN) => {}
            Err(errno) => self.close(&std::io::Error::from_raw_os_error(errno).to_string()),
        }
        if message.left() > 0 && self.closing.is_none() {
            return ring.send(self.owner, token::SEND, &self.socket, message);
        }
        self.outgoing.recycle(message);
    }

    /// Starts the next receive. `whole`: memory for data of a read that must arrive next, if it is one segment.
    pub fn receive(&mut self, ring: &mut Ring, whole: Option<(&IoBuffer, u64)>) {
        if self.is_receiving || self.closing.is_some() {
            return;
        }
        // Records are received into the own buffer only.
        let whole = whole.filter(|_| self.encryption.is_none());
        if let Some(encryption) = &mut self.encryption {
            encryption.before_receive(&mut self.input);
        }
        if let (Some((buffer, at)), Some((_, _, left))) = (whole, self.transmission.expected_data())
            && left >= DIRECT_BYTES_MIN
        {
            let part = buffer.slice(at as usize, left.min(PIECE_BYTES_MAX) as usize);
            if part.segments().len() == 1 {
                self.is_receiving = true;
                let (socket, how) = (&self.socket, Receive::Whole);
                return ring.receive(self.owner, token::RECEIVE_DATA, socket, part, how);
            }
        }
        let Some(buffer) = self.input.take() else {
            return;
        };
        self.is_receiving = true;
        let how = match self.transmission.in_flight() {
            0 | 1 => Receive::Later,
            _ => Receive::Some,
        };
        ring.receive(self.owner, token::RECEIVE, &self.socket, buffer, how);
    }

    /// Handles the end of a receive. Returns the number of bytes.
    pub fn received(&mut self, result: Result<u32, i32>) -> usize {
        self.is_receiving = false;
        match result {
            Ok(0) => self.close("the server has closed the connection"),
            Ok(bytes) => return bytes as usize,
            Err(libc::EINTR | libc::EAGAIN) => {}
            Err(errno) => self.close(&std::io::Error::from_raw_os_error(errno).to_string()),
        }
        0
    }

    /// Decrypts the first `bytes` bytes of the input. Returns the number of plain bytes.
    pub fn decrypt(&mut self, bytes: usize) -> usize {
        let Some(encryption) = &mut self.encryption else {
            return bytes;
        };
        match encryption.decrypt(&mut self.input, bytes) {
            Ok(Decrypted::Bytes(bytes)) => return bytes,
            Ok(Decrypted::Closed) => self.close("the server has closed the connection"),
            Err(error) => self.close(&format!("TLS failed: {error}")),
        }
        0
    }

    /// Ends the connection. It is closed when no operation is left.
    pub fn close(&mut self, reason: &str) {
        if self.closing.is_none() {
            self.closing = Some(reason.to_owned());
            self.socket.shut_down();
        }
    }

    /// Ends an idle connection as the protocol requires: with `NBD_CMD_DISC`.
    pub fn disconnect(&mut self) {
        if self.closing.is_none() && !self.outgoing.is_sending && self.transmission.in_flight() == 0
        {
            let request = Request {
                flags: 0,
                command: command::DISC,
                cookie: 0,
                offset: 0,
                length: 0,
            };
            request.encode(self.transmission.style(), &mut self.outgoing.headers);
            let mut message = self.next_message();
            // A server that does not accept the request detects the end of the connection.
            self.socket.send_now(&mut message).ok();
        }
        self.close(CLOSED);
    }

    /// Returns true if the connection has ended and the kernel uses no memory for it.
    pub fn is_closed(&self) -> bool {
        self.closing.is_some() && !self.outgoing.is_sending && !self.is_receiving
    }
}
