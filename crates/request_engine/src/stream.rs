//! The byte stream of an iSCSI or NBD connection, on the ring of its worker.
//!
//! One receive and one message are in flight at a time. Both adapt to the client. If a receive contains a single request, the client
//! probably waits for its response, which is sent at once by a system call. After several such receives the socket is watched: a watch
//! costs less than one receive per request. The responses to several requests leave in one message through the ring.
//!
//! [`StreamTransport`] has the differences between transports. Its provided methods are monomorphised for each connection type.

use std::ops::Range;
use std::os::fd::OwnedFd;

use guest_memory::IoBuffer;
use latency::Stamp;
use reactor::{Io, SourceId};
use uring::{Completion, Message, Owner, Receive, RingFd, WatchId};

use crate::{CopyProgress, SendMemory, SendQueue, Transport};

/// Tokens of a connection's operations on the ring.
pub mod token {
    /// A receive into the connection's own buffer.
    pub const RECEIVE: u64 = 0;
    /// A receive into the buffer of a request.
    pub const RECEIVE_DATA: u64 = 1;
    /// A message.
    pub const SEND: u64 = 2;
    /// The watch of the socket.
    pub const READABLE: u64 = 3;
    /// A timer.
    pub const TIMER: u64 = 4;
}

/// Size up to which a socket usually takes a message at once, unless its peer is slow. It is below the limit that stops receiving.
const QUIET_BYTES_MAX: u64 = 64 << 10;
/// Number of single requests in a row after which the socket is watched. Starting and ending a watch costs as much as it saves for a few
/// requests.
const SINGLE_MIN: u32 = 16;
/// Results of operations that are repeated: interrupted, no data or no room at the moment, and cancelled.
const INTERRUPTED: i32 = 4;
const AGAIN: i32 = 11;
const CANCELLED: i32 = 125;

/// Socket of a connection, and its operations on the worker's ring.
pub struct Link {
    /// The socket.
    pub socket: RingFd,
    /// Owner of the operations.
    pub owner: Owner,
    /// Number of operations in flight.
    pub operations: usize,
    /// The last transfer: its second, or its number.
    pub moved: u64,
}

impl Link {
    /// Registers the socket of a source.
    pub fn new(io: &mut Io, source: SourceId, socket: OwnedFd) -> Link {
        Link {
            owner: io.own(source),
            socket: io.ring().register(socket),
            operations: 0,
            moved: 0,
        }
    }

    /// Starts a receive.
    pub fn receive(&mut self, io: &mut Io, token: u64, buffer: IoBuffer, how: Receive) {
        self.operations += 1;
        io.ring()
            .receive(self.owner, token, &self.socket, buffer, how);
    }

    fn send(&mut self, io: &mut Io, message: Box<Message>) {
        self.operations += 1;
        io.ring()
            .send(self.owner, token::SEND, &self.socket, message);
    }
}

/// Receives into the connection's own buffer.
pub struct Receiver {
    /// `None` while the kernel has it.
    pub buffer: Option<IoBuffer>,
    /// Size of the buffer of the next receive.
    pub size: usize,
    /// Start of the unparsed bytes in `buffer`.
    pub from: usize,
    /// End of the received bytes in `buffer`.
    pub to: usize,
    /// A receive into `buffer` is in flight.
    is_receiving: bool,
    /// Requests completed by the last receive.
    requests: u32,
    /// Number of receives in a row that completed one request each.
    single: u32,
    /// Watch for the next request, while requests arrive one at a time.
    watch: Option<WatchId>,
}

impl Receiver {
    /// Creates a receiver with a buffer of `size` bytes and bytes that have arrived already.
    pub fn new(size: usize, early: &[u8]) -> Receiver {
        let buffer = (!early.is_empty()).then(|| {
            let buffer = IoBuffer::owned(size.max(early.len()));
            buffer.write_whole(0, early);
            buffer
        });
        Receiver {
            buffer,
            size,
            from: 0,
            to: early.len(),
            is_receiving: false,
            requests: 0,
            single: 0,
            watch: None,
        }
    }

    /// Returns the number of received bytes that were not parsed.
    #[inline]
    pub fn unparsed(&self) -> usize {
        self.to - self.from
    }

    /// Returns true if a receive into the connection's own buffer is in flight.
    #[inline]
    pub fn is_receiving(&self) -> bool {
        self.is_receiving
    }

    /// Counts a request that this receive completed.
    #[inline]
    pub fn count_request(&mut self) {
        self.requests = self.requests.saturating_add(1);
    }

    /// Returns true if the last receive completed exactly one request. Such a client probably waits for the response before it sends the
    /// next request.
    #[inline]
    pub fn received_single(&self) -> bool {
        self.requests == 1
    }

    fn take_buffer(&mut self) -> IoBuffer {
        let size = self.size;
        let kept = self.buffer.take();
        kept.filter(|buffer| buffer.total_len() == size)
            .unwrap_or_else(|| IoBuffer::owned(size))
    }

    fn receive(&mut self, io: &mut Io, link: &mut Link, may_watch: bool) {
        if self.single >= SINGLE_MIN && may_watch {
            self.watch = Some(io.ring().watch(link.owner, token::READABLE, &link.socket));
            return;
        }
        self.is_receiving = true;
        let how = match self.received_single() {
            true => Receive::Later,
            false => Receive::Some,
        };
        let buffer = self.take_buffer();
        link.receive(io, token::RECEIVE, buffer, how);
    }
}

/// Parts of a connection that its stream uses.
pub struct StreamParts<'a, M> {
    /// The socket.
    pub link: &'a mut Link,
    /// Receives.
    pub receiver: &'a mut Receiver,
    /// Queued data and the message in the kernel.
    pub queue: &'a mut SendQueue,
    /// Memory of the message.
    pub memory: &'a mut M,
}

/// A connection that receives requests and sends responses as bytes of a socket.
pub trait StreamTransport: Transport {
    /// Memory of messages.
    type Memory: SendMemory;

    /// Noun for the client in log messages.
    const CLIENT: &'static str;

    /// Returns the parts that the stream uses.
    fn parts(&mut self) -> StreamParts<'_, Self::Memory>;

    /// Returns true if nothing more is received or sent.
    fn is_ended(&self) -> bool;

    /// Returns true if received bytes are dropped.
    fn drops_input(&self) -> bool;

    /// Returns true if the next receive may start.
    fn may_receive(&mut self) -> bool;

    /// Returns true if a watch of the socket may replace the next receive.
    fn may_watch(&self) -> bool {
        true
    }

    /// Decrypts the bytes of a receive in the receiver's buffer. Returns the number of plain bytes; `None`: the connection has ended.
    #[inline(always)]
    fn decrypt(&mut self, _io: &mut Io, bytes: usize) -> Option<usize> {
        Some(bytes)
    }

    /// Starts the receive of the rest of a request into the request's buffer. Returns false if there is none.
    fn receive_directly(&mut self, _io: &mut Io) -> bool {
        false
    }

    /// Records a transfer, for the detection of silent clients.
    fn moved(&mut self);

    /// Called when a part of a message was sent.
    fn part_sent(&mut self) {}

    /// Ends the connection.
    fn end(&mut self, io: &mut Io, reason: &str);

    /// Starts the next receive or a watch of the socket, unless one is active or not allowed.
    fn receive_more(&mut self, io: &mut Io) {
        let receiver = self.parts().receiver;
        if receiver.watch.is_some() || receiver.is_receiving || !self.may_receive() {
            return;
        }
        if self.receive_directly(io) {
            return;
        }
        let may_watch = self.may_watch();
        let StreamParts { receiver, link, .. } = self.parts();
        receiver.receive(io, link, may_watch);
    }

    /// Handles the completion of one of the stream's operations. Returns the completion of other operations.
    fn stream_completed(
        &mut self,
        io: &mut Io,
        completion: Completion,
        noticed: Stamp,
    ) -> Option<Completion> {
        if completion.token == token::READABLE {
            self.readable(io, completion.more, noticed);
            return None;
        }
        let StreamParts { receiver, link, .. } = self.parts();
        link.operations -= 1;
        match completion.token {
            token::SEND => {
                if let Some(message) = completion.message {
                    self.sent(io, message, completion.result);
                }
            }
            token::RECEIVE => {
                receiver.is_receiving = false;
                receiver.buffer = completion.buffer;
                self.received(io, completion.result, noticed);
            }
            _ => return Some(completion),
        }
        None
    }

    /// Handles data on the watched socket; `more`: the watch stays active.
    fn readable(&mut self, io: &mut Io, more: bool, noticed: Stamp) {
        let receiver = self.parts().receiver;
        if !more {
            receiver.watch = None;
        }
        if receiver.is_receiving || !self.may_receive() {
            // The watch reports data once. A later receive will find it.
            return self.unwatch(io);
        }
        let StreamParts { receiver, link, .. } = self.parts();
        let buffer = receiver.take_buffer();
        let result = link.socket.receive_now(&buffer);
        let is_full = result == Ok(buffer.len() as u32);
        receiver.buffer = Some(buffer);
        self.received(io, result, noticed);
        if is_full || self.parts().receiver.single == 0 {
            self.unwatch(io);
        }
    }

    /// Ends the watch and returns to receives.
    fn unwatch(&mut self, io: &mut Io) {
        let receiver = self.parts().receiver;
        receiver.single = 0;
        if let Some(watch) = receiver.watch.take() {
            io.ring().unwatch(watch);
        }
    }

    /// Handles the result of a receive into the connection's own buffer.
    fn received(&mut self, io: &mut Io, result: Result<u32, i32>, noticed: Stamp) {
        if self.drops_input() {
            return;
        }
        if let Some(bytes) = self.bytes_received(io, result) {
            let Some(bytes) = self.decrypt(io, bytes) else {
                return;
            };
            let receiver = self.parts().receiver;
            receiver.requests = 0;
            (receiver.from, receiver.to) = (0, bytes);
            self.take_in(io, noticed);
            let receiver = self.parts().receiver;
            receiver.single = match receiver.received_single() {
                true => receiver.single.saturating_add(1),
                false => 0,
            };
        }
    }

    /// Returns the number of received bytes. Ends the connection if its stream has ended.
    fn bytes_received(&mut self, io: &mut Io, result: Result<u32, i32>) -> Option<usize> {
        match result {
            Ok(0) => self.end(io, &format!("closed by the {}", Self::CLIENT)),
            Ok(bytes) => {
                self.moved();
                return Some(bytes as usize);
            }
            Err(INTERRUPTED | AGAIN) => {}
            Err(_) => self.end(io, "connection lost"),
        }
        None
    }

    /// Hop 7: sends a message. `is_urgent`: work of other clients waits for its completion.
    fn send_message(
        &mut self,
        io: &mut Io,
        mut message: Box<Message>,
        is_urgent: bool,
        output_max: u64,
    ) {
        let StreamParts { receiver, link, .. } = self.parts();
        if is_urgent || message.left() > QUIET_BYTES_MAX.min(output_max) {
            link.send(io, message);
        } else if receiver.received_single() {
            // The client waits for this one response, so it is sent before other work.
            let result = link.socket.send_now(&mut message);
            self.sent(io, message, result);
        } else {
            link.operations += 1;
            io.ring()
                .send_quietly(link.owner, token::SEND, &link.socket, message);
        }
    }

    /// Handles the end of a send.
    fn sent(&mut self, io: &mut Io, mut message: Box<Message>, result: Result<u32, i32>) {
        let is_ended = self.is_ended();
        match result {
            Ok(bytes) if !is_ended && (bytes > 0 || message.left() == 0) => {
                self.moved();
                let parts = self.parts();
                if let Some(rest) = parts.queue.sent(message, bytes, parts.memory) {
                    parts.link.send(io, rest);
                    self.end_if_copied_too_much(io);
                }
                self.part_sent();
            }
            Err(INTERRUPTED | AGAIN | CANCELLED) if !is_ended => {
                let parts = self.parts();
                parts.queue.replace_views(&mut message, parts.memory);
                parts.link.send(io, message);
                self.end_if_copied_too_much(io);
            }
            _ => {
                let parts = self.parts();
                parts.queue.recycle(message, parts.memory);
                self.end(io, &format!("{} does not read", Self::CLIENT));
            }
        }
    }

    /// Ends a connection that made the server copy too much data.
    fn end_if_copied_too_much(&mut self, io: &mut Io) {
        if self.parts().queue.has_copied_too_much() {
            let client = Self::CLIENT;
            let reason =
                format!("{client} does not read its data while others write the same range");
            self.end(io, &reason);
        }
    }

    /// Copies unsent data in these address ranges. Returns true if a message in the kernel still points there.
    fn copy_borrowed(&mut self, io: &mut Io, held: &[Range<usize>]) -> bool {
        let parts = self.parts();
        let progress = parts.queue.copy_borrowed(held, parts.memory);
        if progress == CopyProgress::Recall {
            io.ring().cancel(parts.link.owner, token::SEND);
        }
        self.end_if_copied_too_much(io);
        progress != CopyProgress::Done
    }
}
