//! I/O of one user of an export: requests in flight on the connection, and I/O that waits for one.
//!
//! An I/O above the server's maximum payload is executed in consecutive steps. Never blocks. Allocates nothing after the number of slots has
//! reached the maximum of I/Os in flight, except for block status and large direct receives.
//!
//! Requests of a lost connection are sent again over the next one. The server may still execute the first copy of a write: the protocol has
//! no fence, as for all its clients. A flush over the next connection covers writes that were acknowledged before only if the server
//! announces `CAN_MULTI_CONN`. Otherwise the disk fails all flushes from then on, because nothing proves that those writes survived.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use block::{IoError, IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use latency::Clock;
use nbd::ErrorCode;
use nbd::client::Event;
use nbd::request::Request;
use nbd::wire::{command, command_flag, transmission};
use uring::{Completion, Owner, Ring};

use super::connector::Connection;
use super::link::{self, Growth, Link};
use super::{Core, Export, extents};
use crate::admit::Limits;
use crate::slots::Slots;
use crate::watched_inbox::WatchedInbox;
use crate::{Attach, Finished, IoChannel, Submission, Tag};

/// Tokens of operations on the ring, after those of the link.
mod token {
    pub const MAILBOX: u64 = 3;
    pub const RESPONSE_TIMER: u64 = 4;
    pub const EXPIRY_TIMER: u64 = 5;
    pub const CANCELLED: u64 = 6;
}

/// Maximum length of one request that has no payload, in bytes: a multiple of every block size, below 2^32.
const PLAIN_MAX: u64 = 1 << 30;
/// Minimum rate of a long request or reply, in bytes per second.
const RATE_MIN: u64 = 16 << 10;
/// After this many lost connections, a request in flight in each of them is regarded as the cause.
const LOSSES_MAX: u32 = 64;

/// Life of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Free,
    /// Waits for a connection, or for its turn.
    Waiting,
    /// A request of the I/O is in flight.
    Sent,
}

struct NbdSlot {
    stage: Stage,
    /// `None`: a flush that the channel has begun. Its end is not reported.
    tag: Option<Tag>,
    io: IoRequest,
    buffer: IoBuffer,
    /// Number of the submission, for the order after a loss.
    order: u64,
    /// Bytes done, from the start of the I/O.
    done: u64,
    /// Bytes of the step in flight.
    step: u64,
    /// The final flush of a durable write is due.
    is_flushing: bool,
    /// For a flush: writes acknowledged before it was sent.
    covers: u64,
    /// Number of lost connections without progress of the I/O.
    losses: u32,
    is_cancelled: bool,
}

/// Work of the server, for the detection of a server that hangs or sends a few bytes at a time.
#[derive(Clone, Copy, Debug, Default)]
struct ServerProgress {
    /// Whole replies.
    replies: u64,
    /// Bytes sent and received.
    bytes: u64,
}

impl ServerProgress {
    fn moved(&mut self, result: Result<u32, i32>) {
        self.bytes += u64::from(result.unwrap_or(0));
    }

    /// Returns true if the server has sent a whole reply since `before`, or moves the bytes of a long request at the rate of a slow network.
    fn is_enough_since(&self, before: ServerProgress, time: Duration) -> bool {
        let bytes = u128::from(self.bytes - before.bytes);
        self.replies != before.replies || bytes * 1000 >= u128::from(RATE_MIN) * time.as_millis()
    }
}

/// Time without a server that answers.
struct Outage {
    /// Time of the first loss of the connection since the last answer to a request. A server that accepts connections and then hangs or
    /// closes at each request is as unavailable as one that accepts none.
    since: Option<Duration>,
    /// I/O no longer waits for a connection.
    is_expired: bool,
    has_timer: bool,
}

impl Outage {
    /// Creates the state before the first connection.
    fn new() -> Outage {
        Outage {
            since: Some(Clock::shared().elapsed()),
            is_expired: false,
            has_timer: false,
        }
    }

    /// Returns the time left until waiting I/O fails. `None` while the server answers, or without a limit.
    fn time_left(&self, limit: Duration) -> Option<Duration> {
        let end = self.since? + limit;
        (!limit.is_zero()).then(|| end.saturating_sub(Clock::shared().elapsed()))
    }
}

/// Numbers of changes that need a flush to be durable.
#[derive(Default)]
struct AcknowledgedChanges {
    all: u64,
    /// Those that a flush has covered.
    flushed: u64,
}

impl AcknowledgedChanges {
    /// Treats all changes as flushed. Returns true if some were not.
    fn forget(&mut self) -> bool {
        self.all > std::mem::replace(&mut self.flushed, self.all)
    }
}

pub(super) struct NbdChannel {
    export: Arc<Export>,
    limits: Limits,
    owner: Owner,
    /// Connections from the connector. Closed once the channel closes.
    mailbox: WatchedInbox<Connection>,
    link: Option<Box<Link>>,
    slots: Slots<NbdSlot>,
    /// Slots that wait to be sent, the next one first.
    waiting: VecDeque<u32>,
    next_order: u64,
    outage: Outage,
    /// Value of `progress` when the running response timer was started.
    response_timer: Option<ServerProgress>,
    progress: ServerProgress,
    /// Operations of the channel on the ring, besides those of the link.
    operations: usize,
    changes: AcknowledgedChanges,
    /// Maximum range of the next block status request, in bytes.
    status_span: u64,
    /// Slots that ended with the last receive.
    ended: Vec<(u32, Result<(), ErrorCode>)>,
}

impl NbdChannel {
    pub fn new(export: Arc<Export>, attach: &mut Attach<'_>) -> io::Result<NbdChannel> {
        let owner = attach.owner();
        let mailbox = WatchedInbox::new(attach.ring(), owner, token::MAILBOX)?;
        export.connector.request(mailbox.inbox(), false);
        let mut channel = NbdChannel {
            limits: Limits::of(&export.core.info, &export.core.capacity),
            export,
            owner,
            mailbox,
            link: None,
            slots: Slots::default(),
            waiting: VecDeque::new(),
            next_order: 0,
            outage: Outage::new(),
            response_timer: None,
            progress: ServerProgress::default(),
            operations: 0,
            changes: AcknowledgedChanges::default(),
            status_span: extents::RANGE_MAX,
            ended: Vec::new(),
        };
        channel.start_expiry(attach.ring());
        Ok(channel)
    }

    fn core(&self) -> &Core {
        &self.export.core
    }

    fn occupy(&mut self, tag: Option<Tag>, io: &IoRequest, buffer: &mut IoBuffer) -> u32 {
        self.next_order += 1;
        let slot = NbdSlot {
            stage: Stage::Waiting,
            tag,
            io: *io,
            buffer: std::mem::take(buffer),
            order: self.next_order,
            done: 0,
            step: 0,
            is_flushing: false,
            covers: 0,
            losses: 0,
            is_cancelled: false,
        };
        self.slots.occupy(slot)
    }

    fn finish(&mut self, index: u32, outcome: IoOutcome, finished: &mut Vec<Finished>) {
        let slot = &mut self.slots[index];
        slot.stage = Stage::Free;
        let buffer = std::mem::take(&mut slot.buffer);
        finished.extend(slot.tag.map(|tag| Finished {
            tag,
            buffer,
            outcome,
        }));
        self.slots.release(index);
    }

    /// Queues requests of waiting I/Os, as far as the queue depth permits, and sends them.
    fn pump(&mut self, ring: &mut Ring) {
        let Some(link) = self.link.as_deref_mut() else {
            return;
        };
        if link.closing.is_some() {
            return;
        }
        let core = &self.export.core;
        while link.growth == Growth::None
            && link.transmission.in_flight() < core.options.queue_depth
            && link.has_room()
            && let Some(index) = self.waiting.front().copied()
        {
            let slot = &mut self.slots[index];
            let (request, has_payload) =
                next_request(core, slot, link.payload_max, self.status_span);
            if request.offset + request.length > link.size {
                link.growth = Growth::Outgrown;
                break;
            }
            self.waiting.pop_front();
            slot.stage = Stage::Sent;
            slot.step = request.length;
            slot.covers = self.changes.all;
            let payload = has_payload.then_some((&slot.buffer, slot.done));
            link.request(index, request, payload);
        }
        link.send(ring);
        if link.growth != Growth::None && link.transmission.in_flight() == 0 {
            self.leave_outgrown(ring);
        }
        let Some(link) = self.link.as_deref_mut() else {
            return;
        };
        let limit = self.export.core.options.response_timeout;
        let is_owed = link.transmission.in_flight() > 0;
        if is_owed && self.response_timer.is_none() && !limit.is_zero() {
            self.response_timer = Some(self.progress);
            self.operations += 1;
            ring.timer(self.owner, token::RESPONSE_TIMER, limit);
        }
    }

    /// Ends a connection that does not show the present size of the export. Without `CAN_MULTI_CONN`, acknowledged writes are flushed
    /// first: a flush over the next connection does not cover them.
    fn leave_outgrown(&mut self, ring: &mut Ring) {
        let has_unflushed = self.changes.all > self.changes.flushed;
        let must_flush = has_unflushed && !self.core().promises.has_multi_conn();
        let has_flush = self.core().promises.has(transmission::SEND_FLUSH);
        let Some(link) = self.link.as_deref_mut() else {
            return;
        };
        if !must_flush || !has_flush || link.growth == Growth::Flushed {
            return link.disconnect();
        }
        link.growth = Growth::Flushed;
        let index = self.occupy(None, &IoRequest::flush(), &mut IoBuffer::default());
        let slot = &mut self.slots[index];
        slot.stage = Stage::Sent;
        slot.covers = self.changes.all;
        if let Some(link) = self.link.as_deref_mut() {
            let (request, _) = next_request(&self.export.core, slot, 0, 0);
            link.request(index, request, None);
            link.send(ring);
        }
    }

    fn receive(&mut self, ring: &mut Ring) {
        let Some(link) = self.link.as_deref_mut() else {
            return;
        };
        let expected = link.transmission.expected_data();
        let whole = expected.map(|(slot, at, _)| {
            let slot = &self.slots[slot];
            (&slot.buffer, slot.done + at)
        });
        link.receive(ring, whole);
    }

    /// Takes in `bytes` bytes of the receive buffer.
    fn take_in(&mut self, ring: &mut Ring, bytes: usize, finished: &mut Vec<Finished>) {
        let Some(link) = self.link.as_deref_mut() else {
            return;
        };
        let mut input = link.input.take();
        let received = input.as_mut().and_then(IoBuffer::owned_bytes);
        let mut rest: &[u8] = received
            .and_then(|all| all.get(..bytes))
            .unwrap_or_default();
        while link.closing.is_none() {
            match link.transmission.next(&mut rest) {
                Ok(Event::More) => break,
                Ok(Event::Data { slot, at, length }) => {
                    let slot = &self.slots[slot];
                    let (data, others) = rest.split_at(length);
                    slot.buffer.write_at((slot.done + at) as usize, data);
                    rest = others;
                }
                Ok(Event::Zeroes { slot, at, length }) => {
                    let slot = &self.slots[slot];
                    slot.buffer
                        .fill((slot.done + at) as usize, length as usize, 0);
                }
                Ok(Event::Status { slot, descriptors }) => {
                    let slot = &self.slots[slot];
                    let start = requested(&self.export.core, &slot.io, self.status_span).start;
                    let status = extents::answer(&slot.io, start, &descriptors);
                    self.status_span = extents::next_span(self.status_span, descriptors.len());
                    slot.buffer.write_at(0, &status);
                }
                // The request is sent again over the next connection.
                Ok(Event::Done {
                    result: Err(ErrorCode::Shutdown),
                    ..
                }) => link.close("the server is shutting down"),
                Ok(Event::Done { slot, result }) => self.ended.push((slot, result)),
                Err(violation) => {
                    link.close(&format!("the server violates the protocol: {violation}"));
                }
            }
        }
        link.input = input;
        let mut ended = std::mem::take(&mut self.ended);
        for (index, result) in ended.drain(..) {
            self.step_ended(index, result, finished);
        }
        self.ended = ended;
        self.pump(ring);
        self.receive(ring);
    }

    /// Handles the result of a step: finishes the I/O, or queues the next step before other I/O.
    fn step_ended(
        &mut self,
        index: u32,
        result: Result<(), ErrorCode>,
        finished: &mut Vec<Finished>,
    ) {
        self.outage.since = None;
        self.progress.replies += 1;
        let core = &self.export.core;
        let slot = &mut self.slots[index];
        let io = slot.io;
        if let Err(code) = result {
            let error = error_of(io.kind, code);
            return self.finish(index, Err(error), finished);
        }
        if let Some(link) = self.link.as_deref_mut() {
            link.is_fruitful = true;
        }
        if slot.is_flushing || io.kind == IoKind::Flush {
            self.changes.flushed = self.changes.flushed.max(slot.covers);
            return self.finish(index, Ok(()), finished);
        }
        slot.done += slot.step;
        if keeps_steps(core, &io) {
            slot.losses = 0;
        }
        // One request describes as many extents as fit.
        if slot.done < io.length && io.kind != IoKind::BlockStatus {
            slot.stage = Stage::Waiting;
            return self.waiting.push_front(index);
        }
        if is_durable(core, &io) && !has_fua_flag(core, &io) {
            slot.is_flushing = true;
            slot.stage = Stage::Waiting;
            return self.waiting.push_front(index);
        }
        if io.modifies() && !is_durable(core, &io) {
            self.changes.all += 1;
        }
        self.finish(index, Ok(()), finished);
    }

    /// Handles connections from the connector.
    fn connected(&mut self, ring: &mut Ring, more: bool, finished: &mut Vec<Finished>) {
        let mut connections = self.mailbox.take(ring, more);
        for (_, connection) in connections.drain(..) {
            if self.link.is_some() || self.mailbox.is_closed() {
                continue;
            }
            let early = connection.early.len();
            let alignment = self.core().info.io_alignment;
            self.outage.is_expired = false;
            if self.waiting.is_empty() {
                // No I/O will show whether the server answers, so that a later loss begins another outage.
                self.outage.since = None;
            }
            self.link = Some(Box::new(Link::new(ring, self.owner, connection, alignment)));
            self.take_in(ring, early, finished);
        }
        self.mailbox.reuse(connections);
    }

    /// Handles the end of the connection after its last operation: I/O waits for the next one.
    fn reconnect_if_closed(&mut self, ring: &mut Ring, finished: &mut Vec<Finished>) {
        let Some(link) = self.link.take_if(|link| link.is_closed()) else {
            return;
        };
        for slot in self.slots.all_mut() {
            // Steps that were acknowledged may be lost, and are repeated.
            if !keeps_steps(&self.export.core, &slot.io) {
                slot.done = 0;
                slot.is_flushing = false;
            }
        }
        let mut sent: Vec<u32> = (0..self.slots.all().len() as u32)
            .filter(|index| self.slots[*index].stage == Stage::Sent)
            .collect();
        if sent.is_empty() && self.waiting.is_empty() {
            self.outage.since = None;
        }
        sent.sort_unstable_by_key(|index| std::cmp::Reverse(self.slots[*index].order));
        for index in sent {
            let slot = &mut self.slots[index];
            slot.losses += 1;
            if slot.is_cancelled || slot.tag.is_none() {
                self.finish(index, Err(IoErrorKind::Cancelled.into()), finished);
            } else if slot.losses >= LOSSES_MAX {
                self.finish(index, Err(IoErrorKind::Offline.into()), finished);
            } else {
                slot.stage = Stage::Waiting;
                self.waiting.push_front(index);
            }
        }
        if self.mailbox.is_closed() {
            return;
        }
        self.lose_unflushed(finished);
        let reason = link.closing.as_deref().unwrap_or_default();
        let is_replaced = link.growth != Growth::None && reason == link::CLOSED;
        if !is_replaced {
            self.export.connector.lost(&self.export.core, reason);
        }
        self.outage
            .since
            .get_or_insert_with(|| Clock::shared().elapsed());
        let is_again = !link.is_fruitful && !is_replaced;
        let mailbox = self.mailbox.inbox();
        self.export.connector.request(mailbox, is_again);
        self.start_expiry(ring);
    }

    /// Fails flushes if acknowledged writes of the lost connection may be lost.
    fn lose_unflushed(&mut self, finished: &mut Vec<Finished>) {
        let core = &self.export.core;
        let has_unflushed = self.changes.forget();
        if has_unflushed && !core.promises.has_multi_conn() && core.durability.lose(libc::EIO) {
            tracing::error!(
                export = %core.options.address,
                "writes before the loss of the connection may not be durable, all flushes fail from now on; hint: check the data, then remove the disk and add it again. A server with MULTI_CONN has no such loss"
            );
        }
        if let Err(error) = core.durability.check() {
            self.end_waiting(finished, |slot| {
                (slot.io.kind == IoKind::Flush).then_some(error)
            });
        }
    }

    /// Ends waiting I/Os with the error that `error` returns for them. `None` leaves an I/O waiting.
    fn end_waiting(
        &mut self,
        finished: &mut Vec<Finished>,
        error: impl Fn(&NbdSlot) -> Option<IoError>,
    ) {
        for _ in 0..self.waiting.len() {
            let Some(index) = self.waiting.pop_front() else {
                break;
            };
            match error(&self.slots[index]) {
                Some(error) => self.finish(index, Err(error), finished),
                None => self.waiting.push_back(index),
            }
        }
    }

    fn start_expiry(&mut self, ring: &mut Ring) {
        let left = self.time_left();
        if let Some(left) = left.filter(|_| !self.outage.has_timer) {
            self.set_expiry(ring, left);
        }
    }

    fn time_left(&self) -> Option<Duration> {
        let limit = self.core().options.replacement_timeout;
        self.outage.time_left(limit)
    }

    fn set_expiry(&mut self, ring: &mut Ring, after: Duration) {
        self.outage.has_timer = true;
        self.operations += 1;
        ring.timer(self.owner, token::EXPIRY_TIMER, after);
    }

    fn expire(&mut self, ring: &mut Ring, finished: &mut Vec<Finished>) {
        self.outage.has_timer = false;
        if self.link.is_some() || self.mailbox.is_closed() {
            return;
        }
        match self.time_left() {
            None => return,
            Some(left) if !left.is_zero() => return self.set_expiry(ring, left),
            Some(_) => {}
        }
        self.outage.is_expired = true;
        self.end_waiting(finished, |_| Some(IoErrorKind::Offline.into()));
    }

    fn response_time_is_over(&mut self, ring: &mut Ring) {
        let before = self.response_timer.take().unwrap_or_default();
        let Some(link) = self.link.as_deref_mut() else {
            return;
        };
        let limit = self.export.core.options.response_timeout;
        if !self.progress.is_enough_since(before, limit) && link.transmission.in_flight() > 0 {
            let limit = limit.as_secs();
            link.close(&format!("no whole reply from the server for {limit} s"));
        }
        self.pump(ring);
    }
}

/// Returns true if the I/O is a change that must be durable when it completes.
fn is_durable(core: &Core, io: &IoRequest) -> bool {
    io.modifies() && (io.flags.has(IoFlags::FUA) || !core.info.write_cache)
}

/// Returns true if a durable change is sent with the flag FUA. Otherwise a flush follows.
fn has_fua_flag(core: &Core, io: &IoRequest) -> bool {
    is_durable(core, io) && core.promises.has(transmission::SEND_FUA)
}

fn requested(core: &Core, io: &IoRequest, span: u64) -> std::ops::Range<u64> {
    let alignment = core.info.io_alignment.into();
    extents::requested(io, span, alignment, core.capacity.bytes())
}

/// Returns the request of an I/O's next step, and whether it has a payload. `span`: the maximum range of a block status.
fn next_request(core: &Core, slot: &NbdSlot, payload_max: u32, span: u64) -> (Request, bool) {
    let io = &slot.io;
    let left = io.length - slot.done.min(io.length);
    let fua = match has_fua_flag(core, io) {
        true => command_flag::FUA,
        false => 0,
    };
    let (command, flags, length) = match io.kind {
        _ if slot.is_flushing => (command::FLUSH, 0, 0),
        IoKind::Read => (command::READ, 0, left.min(payload_max.into())),
        IoKind::Write => (command::WRITE, fua, left.min(payload_max.into())),
        IoKind::Discard => (command::TRIM, fua, left.min(PLAIN_MAX)),
        IoKind::WriteZeroes => {
            let no_hole = match io.flags.has(IoFlags::UNMAP) {
                true => 0,
                false => command_flag::NO_HOLE,
            };
            (command::WRITE_ZEROES, fua | no_hole, left.min(PLAIN_MAX))
        }
        IoKind::BlockStatus => {
            let range = requested(core, io, span);
            let length = range.end - range.start;
            (command::BLOCK_STATUS, 0, length)
        }
        IoKind::Flush | IoKind::CompareAndWrite | IoKind::ReplaceState | IoKind::ScsiCommand => {
            (command::FLUSH, 0, 0)
        }
    };
    let offset = match command {
        command::FLUSH => 0,
        command::BLOCK_STATUS => requested(core, io, span).start,
        _ => io.offset + slot.done,
    };
    let request = Request {
        flags,
        command,
        cookie: 0,
        offset,
        length,
    };
    (request, command == command::WRITE)
}

/// Returns true if acknowledged steps of an I/O are not repeated after the loss of the connection. With `CAN_MULTI_CONN`, steps of a change
/// that need not be durable are like acknowledged changes: a later flush covers them, unless the server has lost its volatile cache, which
/// the protocol does not report. A durable change without FUA is repeated, because it is not acknowledged before its flush.
fn keeps_steps(core: &Core, io: &IoRequest) -> bool {
    let is_covered = core.promises.has_multi_conn() && !is_durable(core, io);
    !io.modifies() || has_fua_flag(core, io) || is_covered
}

/// Classifies an error of the server.
#[cold]
fn error_of(kind: IoKind, code: ErrorCode) -> IoError {
    let errno = code.value() as i32;
    let class = match code {
        ErrorCode::NoSpace => IoErrorKind::NoSpace,
        ErrorCode::Perm => IoErrorKind::ReadOnly,
        ErrorCode::NotSupported => IoErrorKind::Unsupported,
        _ if matches!(kind, IoKind::Read | IoKind::BlockStatus) => IoErrorKind::ReadMedium,
        _ => IoErrorKind::WriteMedium,
    };
    IoError::with_errno(class, errno)
}

impl IoChannel for NbdChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        if let Some(outcome) = self.limits.begin(io, buffer) {
            return Submission::Done(outcome);
        }
        let core = &self.export.core;
        match io.kind {
            // Nothing is in a cache.
            IoKind::Flush if core.info.read_only || !core.info.write_cache => {
                return Submission::Done(Ok(()));
            }
            IoKind::Flush => {
                if let Err(lost) = core.durability.check() {
                    return Submission::Done(Err(lost));
                }
            }
            IoKind::BlockStatus if !core.promises.has_allocation => {
                buffer.write_at(0, &extents::answer(io, io.offset, &[]));
                return Submission::Done(Ok(()));
            }
            _ => {}
        }
        if self.outage.is_expired {
            // A new connection may have arrived in this iteration. Without requests in flight, no I/O ends with it.
            self.connected(ring, true, &mut Vec::new());
        }
        if self.outage.is_expired {
            return Submission::Done(Err(IoErrorKind::Offline.into()));
        }
        let index = self.occupy(Some(tag), io, buffer);
        self.waiting.push_back(index);
        self.pump(ring);
        Submission::Pending
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        match completion.token {
            token::MAILBOX => self.connected(ring, completion.more, finished),
            token::RESPONSE_TIMER => {
                self.operations -= 1;
                self.response_time_is_over(ring);
            }
            token::EXPIRY_TIMER => {
                self.operations -= 1;
                self.expire(ring, finished);
            }
            token::CANCELLED => {
                self.operations -= 1;
                self.end_waiting(finished, |slot| {
                    slot.is_cancelled.then(|| IoErrorKind::Cancelled.into())
                });
            }
            link::token::SEND => {
                self.progress.moved(completion.result);
                if let (Some(link), Some(message)) = (self.link.as_deref_mut(), completion.message)
                {
                    link.sent(ring, message, completion.result);
                }
                self.pump(ring);
            }
            link::token::RECEIVE => {
                self.progress.moved(completion.result);
                let Some(link) = self.link.as_deref_mut() else {
                    return;
                };
                link.input = completion.buffer;
                let bytes = link.received(completion.result);
                let bytes = link.decrypt(bytes);
                self.take_in(ring, bytes, finished);
            }
            _ => {
                self.progress.moved(completion.result);
                let Some(link) = self.link.as_deref_mut() else {
                    return;
                };
                let bytes = link.received(completion.result);
                link.transmission.received(bytes as u64);
                self.take_in(ring, 0, finished);
            }
        }
        self.reconnect_if_closed(ring, finished);
    }

    fn abort(&mut self, ring: &mut Ring, tag: Tag) {
        let found = self
            .slots
            .all_mut()
            .iter_mut()
            .find(|slot| slot.stage != Stage::Free && slot.tag == Some(tag));
        let Some(slot) = found else { return };
        slot.is_cancelled = true;
        match (slot.stage, self.link.as_deref_mut()) {
            // The protocol cannot cancel a request. The end of the connection does, and other requests are sent again.
            (Stage::Sent, Some(link)) => link.close("a request that did not end was cancelled"),
            _ => {
                self.operations += 1;
                ring.nop(self.owner, token::CANCELLED);
            }
        }
    }

    fn close(&mut self, ring: &mut Ring) {
        self.mailbox.close(ring);
        if let Some(link) = self.link.as_deref_mut() {
            link.disconnect();
        }
        ring.cancel(self.owner, token::RESPONSE_TIMER);
        ring.cancel(self.owner, token::EXPIRY_TIMER);
    }

    fn is_closed(&self) -> bool {
        let link = self.link.as_deref();
        self.in_flight() == 0 && self.operations == 0 && link.is_none_or(Link::is_closed)
    }

    fn in_flight(&self) -> usize {
        self.slots.len()
    }
}
