//! Input of a connection: passes bytes to the protocol and write data to its buffers.
//!
//! One receive is in flight at a time: into the connection's own buffer, or, for the rest of a data segment without digest, directly into
//! the buffer of its command. While too much output is queued, nothing is received or parsed.

use std::time::Duration;

use iscsi::pdu::LoginStatus;
use iscsi::target::{CloseReason, Placement, Received, Step};
use latency::{Clock, Stamp};
use reactor::{Io, RateLimit};
use request_engine::{
    BatchTransport, Buffers, Receiver, StreamParts, StreamTransport, Transport, token,
};
use uring::{Completion, Receive};

use crate::connection::Connection;
use crate::refused_logins::RefusedLogin;
use crate::slots::SlotId;

static LOGIN_LOG: RateLimit = RateLimit::new(Duration::from_secs(1));

/// Receive size before login: a header and the text of a Login Request.
const LOGIN_BYTES: usize = 8 << 10;
const RECEIVE_BYTES: usize = 64 << 10;
/// Size of the window through which the protocol sees the stream. Write data bypasses it.
const WINDOW_BYTES: usize = 2048;
/// Size of the window after data.
const WINDOW_BYTES_MIN: usize = 256;
/// Minimum rest of a data segment for a direct receive.
const DIRECT_BYTES_MIN: u32 = 4096;

pub(crate) struct Input {
    pub receiver: Receiver,
    window: Vec<u8>,
    /// Size of the next window. Data is usually followed by a single header.
    window_bytes: usize,
    /// Copy of data for the digest.
    seen: Vec<u8>,
    /// Slot and data offset of the direct receive in flight.
    direct: Option<(SlotId, u32)>,
    /// Unparsed input waits until queued output was sent. Its responses may be many times as long.
    waits_for_output: bool,
}

impl Input {
    pub fn new() -> Input {
        Input {
            receiver: Receiver::new(LOGIN_BYTES, &[]),
            window: Vec::new(),
            window_bytes: WINDOW_BYTES,
            seen: Vec::new(),
            direct: None,
            waits_for_output: false,
        }
    }

    /// Enlarges the buffer for the full feature phase.
    pub fn enlarge(&mut self) {
        self.receiver.size = RECEIVE_BYTES;
    }
}

impl StreamTransport for Connection {
    type Memory = Buffers<Connection>;

    const CLIENT: &'static str = "initiator";

    #[inline]
    fn parts(&mut self) -> StreamParts<'_, Buffers<Connection>> {
        StreamParts {
            link: &mut self.link,
            receiver: &mut self.input.receiver,
            queue: &mut self.output.queue,
            memory: &mut self.memory.buffers,
        }
    }

    fn is_ended(&self) -> bool {
        self.lifecycle.is_ended()
    }

    fn drops_input(&self) -> bool {
        self.is_over()
    }

    fn may_receive(&mut self) -> bool {
        let is_idle = self.input.receiver.unparsed() == 0 && self.input.direct.is_none();
        !self.is_over() && !self.login.waits && is_idle && self.has_output_room()
    }

    #[inline]
    fn moved(&mut self) {
        self.link.moved = self.shared.seconds();
    }

    fn part_sent(&mut self) {
        self.output.settle();
        self.output_left();
    }

    fn end(&mut self, io: &mut Io, reason: &str) {
        Connection::end(self, io, reason);
    }
}

impl Connection {
    fn has_output_room(&mut self) -> bool {
        let queued = self.output.queue.unsent() + self.iscsi.outgoing().len();
        queued <= self.shared().limits.output_bytes
    }

    /// Continues parsing that waited for output. Uses a message to the worker: its next iteration sends the responses.
    #[inline]
    pub(crate) fn output_left(&mut self) {
        if self.input.waits_for_output && self.has_output_room() {
            self.input.waits_for_output = false;
            self.handle.send(Connection::resume_parsing);
        }
    }

    /// Handles the end of a direct receive.
    pub(crate) fn received_data(&mut self, io: &mut Io, completion: Completion, noticed: Stamp) {
        let Some((slot, offset)) = self.input.direct.take() else {
            return;
        };
        let came = matches!(completion.result, Ok(bytes) if bytes > 0);
        if came && self.slots.current(slot).is_some() {
            self.data_arrived(slot.index, false);
        }
        let slot = self.slots.current(slot);
        let bytes = match completion.result {
            Ok(bytes) => bytes as usize,
            Err(_) => 0,
        };
        if let Some(slot) = slot {
            slot.receiving = false;
            // The command may have got a larger buffer meanwhile.
            if let (Some(buffer), Some(came)) = (&slot.buffer, &completion.buffer)
                && bytes > 0
            {
                let into = buffer.slice(offset as usize, bytes);
                if into.segments().first().map(|s| s.base())
                    != came.segments().first().map(|s| s.base())
                {
                    came.slice(0, bytes).copy_to(&into);
                }
            }
        }
        if self.is_over() {
            return;
        }
        if let Some(bytes) = self.bytes_received(io, completion.result) {
            self.iscsi.data_stored_by_kernel(bytes);
        }
        if !self.is_over() {
            self.take_in(io, noticed);
        }
    }

    /// Continues parsing after another connection of the session has unblocked it.
    pub(crate) fn resume_parsing(&mut self, io: &mut Io) {
        if !self.is_over() {
            let now = io.now();
            self.take_in(io, now);
        }
    }

    pub(crate) fn consume(&mut self, io: &mut Io) {
        let mut window = std::mem::take(&mut self.input.window);
        while self.consume_window(io, &mut window) {
            if !self.has_output_room() {
                self.input.waits_for_output = true;
                break;
            }
        }
        self.input.window = window;
        self.lift_fences();
    }

    /// Parses one window. Returns false if nothing more can be done now.
    fn consume_window(&mut self, io: &mut Io, window: &mut Vec<u8>) -> bool {
        let most = std::mem::replace(&mut self.input.window_bytes, WINDOW_BYTES);
        let length = most.min(self.input.receiver.unparsed());
        window.resize(length, 0);
        if let (Some(buffer), true) = (&self.input.receiver.buffer, length > 0) {
            buffer.read_whole(self.input.receiver.from, window);
        }
        let mut at = 0;
        loop {
            if self.is_over() || self.login.waits {
                return false;
            }
            let Received { used, step } = self.iscsi.receive(&window[at..]);
            at += used;
            self.input.receiver.from += used;
            match step {
                Step::More => return self.input.receiver.unparsed() > 0,
                Step::Data(placement) => return self.store_data(io, placement),
                Step::Command(task) => {
                    self.input.receiver.count_request();
                    self.begin(task);
                }
                Step::DataComplete(task) => {
                    if let Some(slot) = self.slots.find(task) {
                        self.data_arrived(slot.index, true);
                        self.schedule.batch.push(slot);
                    }
                }
                Step::Abandoned(task) => {
                    if let Some(slot) = self.slots.find(task) {
                        self.abort_slot(io, slot.index, None);
                    }
                }
                Step::TaskManagement(request) => {
                    // The function applies to all earlier commands.
                    self.submit_batch(io, None);
                    self.manage(io, &request);
                }
                Step::LoggedIn(login) => self.logged_in(io, &login),
                Step::Wake(cid) => {
                    if let Some(key) = self.iscsi.key() {
                        self.shared().wake(key.tsih, cid);
                    }
                }
                Step::Forgotten(itt) => {
                    if let Some(key) = self.iscsi.key() {
                        drop(self.shared().retained.take(key.tsih, itt));
                    }
                }
                Step::Logout(logout) => {
                    self.submit_batch(io, None);
                    self.log_out(io, logout);
                }
                Step::Close(reason) => {
                    self.submit_batch(io, None);
                    tracing::debug!(?reason, "closing connection");
                    if let CloseReason::LoginFailed(status) = reason {
                        self.log_refusal(status);
                    }
                    self.lifecycle.close();
                }
            }
        }
    }

    fn log_refusal(&self, status: LoginStatus) {
        let visitor = self.iscsi.visitor();
        let chap = self.iscsi.chap_failure();
        let target = visitor.target_name.as_deref();
        let target = target.map(|name| self.shared().configured_name(name));
        self.shared().refused_logins.add(RefusedLogin {
            target: target.clone(),
            initiator: visitor.initiator_name.clone(),
            address: visitor.address.clone(),
            reason: match &chap {
                Some((_, reason)) => format!("CHAP: {reason}"),
                None => status.to_string(),
            },
            count: 1,
            at: Clock::shared().elapsed(),
        });
        if let Some(suppressed) = LOGIN_LOG.pass() {
            if let Some((user, reason)) = chap {
                tracing::warn!(
                    target = target.as_deref().unwrap_or("(none)"),
                    initiator = visitor.initiator_name,
                    address = visitor.address,
                    user = user.unwrap_or("(none)"),
                    suppressed,
                    "login refused: CHAP: {reason}"
                );
                return;
            }
            tracing::warn!(
                target = target.as_deref().unwrap_or("(none)"),
                initiator = visitor.initiator_name,
                address = visitor.address,
                suppressed,
                "login refused: {status}"
            );
        }
    }

    /// Stores write data: copies received bytes and starts a direct receive for the rest. Returns false if the rest must arrive first.
    fn store_data(&mut self, io: &mut Io, placement: Placement) -> bool {
        let Placement {
            task,
            offset,
            length,
        } = placement;
        let here = (length as usize).min(self.input.receiver.unparsed());
        let digest = self.iscsi.digests().data;
        if here == 0 {
            if self.input.direct.is_none()
                && !self.input.receiver.is_receiving()
                && !digest
                && length >= DIRECT_BYTES_MIN
            {
                self.receive_data(io, placement);
            }
            return false;
        }
        let slot = self.slot_of(task);
        self.data_arrived(slot, false);
        let from = self.input.receiver.from;
        if let Some(came) = self.input.receiver.buffer.take() {
            let into = self.buffer_for(slot, offset as usize + here);
            came.copy_part(from, into, offset as usize, here);
            if digest {
                self.input.seen.resize(here, 0);
                came.read_whole(from, &mut self.input.seen);
                self.iscsi.data_stored(&self.input.seen);
            } else {
                self.iscsi.data_stored_by_kernel(here);
            }
            self.input.receiver.buffer = Some(came);
        }
        self.input.receiver.from += here;
        self.input.window_bytes = WINDOW_BYTES_MIN;
        true
    }

    fn receive_data(&mut self, io: &mut Io, placement: Placement) {
        let slot = self.slot_of(placement.task);
        let (offset, length) = (placement.offset as usize, placement.length as usize);
        let into = self.buffer_for(slot, offset + length).slice(offset, length);
        self.slots.get(slot).receiving = true;
        self.input.direct = Some((self.slots.id(slot), placement.offset));
        self.link
            .receive(io, token::RECEIVE_DATA, into, Receive::Whole);
    }
}
