//! Begins requests, executes their I/Os on the disk, and queues their replies.

use bdev::Submission;
use block::{Extent, IoErrorKind, IoFlags, IoOutcome, IoRequest, STATUS_BYTES};
use guest_memory::IoBuffer;
use latency::{Operation, Part, Stamps};
use nbd::reply::{self, ContextStatus, ReplyTo};
use nbd::request::{Action, Request};
use nbd::wire::{PAYLOAD_MAX, command, command_flag};
use nbd::{ErrorCode, Violation};
use reactor::{Io, Job, Tag};
use request_engine::{BatchTransport, Pace, Submitted, buffer_size};

use crate::connection::Connection;
use crate::export::Context;
use crate::slots::{Slot, Stage, Values};
use crate::status::{self, Range};

/// Resources for the next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resources {
    Available,
    /// The connection has reached its own limits.
    None,
    /// The memory is in use by other connections.
    MemoryOfOthers,
}

/// Maximum length of one I/O without data. Longer ranges are executed in parts.
const PART_BYTES: u64 = 1 << 30;

fn operation_of(action: Action) -> Operation {
    match action {
        Action::Read { .. } => Operation::Read,
        Action::Write { .. } => Operation::Write,
        Action::Flush => Operation::Flush,
        Action::Trim { .. } | Action::WriteZeroes { .. } => Operation::Discard,
        Action::Cache | Action::BlockStatus { .. } | Action::Disconnect => Operation::Other,
    }
}

/// Returns the memory for the data of a request, in bytes.
#[inline]
pub(crate) fn memory_of(request: &Request) -> usize {
    match request.command {
        // Requests with a longer one are refused and need no memory.
        command::READ | command::WRITE => usize::try_from(request.length)
            .ok()
            .filter(|length| *length <= PAYLOAD_MAX as usize)
            .unwrap_or(0),
        command::BLOCK_STATUS => {
            let one = request.flags & command_flag::REQ_ONE != 0;
            status::memory(request.length, one)
        }
        _ => 0,
    }
}

/// Returns the error on the wire of a failed I/O.
fn code_of(kind: IoErrorKind, action: Action) -> ErrorCode {
    match (kind, action) {
        (IoErrorKind::OutOfRange, Action::Write { .. } | Action::WriteZeroes { .. })
        | (IoErrorKind::NoSpace, _) => ErrorCode::NoSpace,
        (IoErrorKind::OutOfRange | IoErrorKind::Unsupported, _) => ErrorCode::Invalid,
        (IoErrorKind::ReadOnly, _) => ErrorCode::Perm,
        (
            IoErrorKind::ReadMedium
            | IoErrorKind::WriteMedium
            | IoErrorKind::ClientMemory
            | IoErrorKind::Offline
            | IoErrorKind::Closed
            | IoErrorKind::Cancelled
            | IoErrorKind::Miscompare
            | IoErrorKind::TimedOut,
            _,
        ) => ErrorCode::Io,
    }
}

/// Message for humans in an error reply.
fn message_of(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::Perm => "the export is read-only",
        ErrorCode::Io => "the disk failed; see the server's log",
        ErrorCode::NoMemory => "out of memory",
        ErrorCode::Invalid => {
            "unknown command or flag, or a range that is unaligned or outside of the export"
        }
        ErrorCode::NoSpace => "no space left, or a range outside of the export",
        ErrorCode::Overflow => "the request is too long",
        ErrorCode::NotSupported => "zeroing would not be faster than writing",
        ErrorCode::Shutdown => "the server is shutting down",
    }
}

impl Slot {
    /// Returns the next I/O of the request on the disk.
    fn next_io(&self) -> IoRequest {
        let Values {
            action, to, length, ..
        } = self.values;
        let offset = to.offset + self.covered;
        let left = length - self.covered;
        let part = left.min(PART_BYTES);
        match action {
            _ if self.stage == Stage::Flushing => IoRequest::flush(),
            Action::Read { .. } => IoRequest::read(offset, left),
            Action::Write { fua: true } => IoRequest::write(offset, left).flagged(IoFlags::FUA),
            Action::Write { fua: false } => IoRequest::write(offset, left),
            Action::Trim { .. } => IoRequest::discard(offset, part),
            Action::WriteZeroes { no_hole: true, .. } => IoRequest::write_zeroes(offset, part),
            Action::WriteZeroes { .. } => {
                IoRequest::write_zeroes(offset, part).flagged(IoFlags::UNMAP)
            }
            Action::BlockStatus { .. } => IoRequest::block_status(offset, left),
            Action::Flush | Action::Cache | Action::Disconnect => IoRequest::flush(),
        }
    }

    /// Returns true if the next I/O of a block status can be submitted.
    fn continues_status(&self) -> bool {
        self.stage == Stage::Ready && matches!(self.values.action, Action::BlockStatus { .. })
    }

    /// Returns true if a flush must follow the I/Os of the range.
    fn needs_flush(&self) -> bool {
        matches!(
            self.values.action,
            Action::Trim { fua: true } | Action::WriteZeroes { fua: true, .. }
        )
    }

    /// Continues after an I/O. `block`: the minimum block size of the export.
    fn io_ended(&mut self, outcome: IoOutcome, block: u32) {
        let action = self.values.action;
        self.stage = match outcome {
            Err(error) => Stage::Done(Err(code_of(error.kind, action))),
            Ok(()) if self.stage == Stage::Flushing => Stage::Done(Ok(())),
            Ok(()) => {
                let left = self.values.length - self.covered;
                match action {
                    Action::BlockStatus { one } => return self.status_ended(one, block),
                    Action::Trim { .. } | Action::WriteZeroes { .. } => {
                        self.covered += left.min(PART_BYTES);
                    }
                    _ => self.covered += left,
                }
                match self.covered < self.values.length {
                    true => Stage::Ready,
                    false if self.needs_flush() => Stage::Flushing,
                    false => Stage::Done(Ok(())),
                }
            }
        };
    }

    /// Continues after an I/O of a block status. The next one begins at the end of the last extent, if there is memory for its extents and the
    /// request has not had too many I/Os.
    fn status_ended(&mut self, one: bool, block: u32) {
        self.stage = Stage::Done(Ok(()));
        let Values { to, length, .. } = self.values;
        let found = self.buffer.as_ref();
        let found = found.and_then(|buffer| status::found(buffer, self.extents));
        let Some((count, end)) = found else {
            return;
        };
        self.extents += count;
        self.ios += 1;
        let covered = end.saturating_sub(to.offset).min(length);
        let has_room = status::has_memory(self.extents, status::memory(length, one))
            && self.ios < status::IOS_MAX;
        // An I/O begins at a whole block.
        let is_whole = covered.is_multiple_of(block.max(1).into());
        let can_continue = covered > self.covered && is_whole;
        if can_continue && covered < length && !one && has_room {
            self.covered = covered;
            self.stage = Stage::Ready;
        }
    }
}

impl BatchTransport for Connection {
    type Request = u32;

    fn batch(&mut self) -> &mut Vec<u32> {
        &mut self.schedule.batch
    }

    fn next_job(&mut self, _io: &mut Io, index: u32) -> Option<Job> {
        let io = self.slots.get(index).next_io();
        let disk = self.disk.handle;
        io.moves_data().then_some(Job { disk, io })
    }

    fn submit_one(&mut self, io: &mut Io, index: u32, stamps: &Stamps) -> Option<Submitted> {
        let slot = self.slots.get(index);
        slot.stamps = *stamps;
        if matches!(slot.values.action, Action::BlockStatus { .. })
            && std::mem::replace(&mut self.schedule.has_examined, true)
        {
            self.rest(index);
            return None;
        }
        self.advance(io, index);
        let slot = self.slots.get(index);
        let is_done = matches!(slot.stage, Stage::Done(_));
        slot.pended = !is_done;
        Some(Submitted {
            slot: index,
            operation: slot.values.operation,
            part: Part::default(),
            is_counted: true,
            is_done,
        })
    }
}

impl Connection {
    /// Returns whether there is a slot and memory for a request.
    #[inline]
    fn resources(&mut self, request: &Request) -> Resources {
        let length = memory_of(request);
        let limits = &self.peer.shared.limits;
        if self.slots.busy() >= limits.requests {
            return Resources::None;
        }
        if length == 0 {
            return Resources::Available;
        }
        let used = self.buffers.in_use();
        // The reply to a block status is as long as its memory, for each context. A request in flight continues the connection.
        if request.command == command::BLOCK_STATUS && self.slots.busy() > 0 {
            let replies = length.saturating_mul(self.peer.contexts.len());
            if (used + replies) as u64 + self.output.unsent() > limits.output_bytes {
                return Resources::None;
            }
        }
        let is_allowed = used == 0 || used + buffer_size(length) <= limits.data_bytes;
        match (is_allowed, is_allowed && self.buffers.has(length)) {
            (_, true) => Resources::Available,
            (true, false) => Resources::MemoryOfOthers,
            (false, false) => Resources::None,
        }
    }

    /// Returns true if there is a slot and memory for a request. Otherwise an end of an own request, or memory that others return,
    /// continues the connection.
    #[inline]
    pub(crate) fn await_resources(&mut self, request: &Request) -> bool {
        match self.resources(request) {
            Resources::Available => true,
            Resources::None => false,
            Resources::MemoryOfOthers => self.wait_for_memory(request),
        }
    }

    #[cold]
    fn wait_for_memory(&mut self, request: &Request) -> bool {
        self.buffers.wait(&self.handle);
        // Memory may have been returned just before.
        if self.resources(request) == Resources::Available {
            return true;
        }
        self.peer.shared.reclaim_memory();
        false
    }

    /// Begins a request: checks it, and takes a slot. A request that fails the checks is answered at once.
    pub(crate) fn begin(&mut self, request: &Request) -> Result<(), Violation> {
        let payload = request.payload(self.peer.rules.style)?;
        let to = ReplyTo {
            cookie: request.cookie,
            offset: request.offset,
        };
        let action = match self.check(request) {
            Ok(action) => action,
            Err(code) => {
                self.skip_payload(payload);
                self.refuse(to, code);
                return Ok(());
            }
        };
        let values = Values {
            action,
            to,
            length: request.length,
            operation: operation_of(action),
        };
        match action {
            Action::Disconnect => {
                self.lifecycle.leave();
                return Ok(());
            }
            Action::WriteZeroes {
                no_hole: true,
                fast: true,
                ..
            } => {
                self.refuse(to, ErrorCode::NotSupported);
                return Ok(());
            }
            // A hint. The disk has no cache that it could fill.
            Action::Cache => {
                self.answer_at_once(values);
                return Ok(());
            }
            Action::Flush | Action::BlockStatus { .. } => {}
            _ if request.length == 0 => {
                self.answer_at_once(values);
                return Ok(());
            }
            _ => {}
        }
        let index = match action {
            Action::Write { .. } => {
                let index = self.slots.take(values, Stage::Receiving);
                let buffer = self.buffers.take_anyway(payload as usize);
                self.slots.get(index).buffer = Some(buffer);
                self.expect_payload(index, payload as usize);
                index
            }
            _ => {
                match action {
                    Action::Read { .. } => self.buffers.reserve(request.length as usize),
                    Action::BlockStatus { one } => {
                        self.buffers.reserve(status::memory(request.length, one));
                    }
                    _ => {}
                }
                let index = self.slots.take(values, Stage::Ready);
                self.schedule.batch.push(index);
                index
            }
        };
        let id = self.measurement.probe_id(index);
        let parsed = probes::Parsed {
            id,
            operation: values.operation as u64,
            offset: request.offset,
            length: request.length,
        };
        let worker = self.handle.worker.index();
        probes::popped(worker, || std::iter::once((id, request.cookie)));
        probes::parsed(|| std::iter::once(parsed));
        Ok(())
    }

    /// Checks a request against the present size of the disk.
    fn check(&mut self, request: &Request) -> Result<Action, ErrorCode> {
        let checked = request.check(&self.peer.rules, self.disk.capacity.bytes());
        if checked.is_ok() {
            return checked;
        }
        // The disk may have got another device, for example by a mirror job.
        self.disk.capacity = self.peer.export.disk.device().capacity().clone();
        let end = match self.peer.export.disk.is_size_known() {
            true => self.disk.capacity.bytes(),
            // Another daemon may have enlarged the disk. The device checks the range.
            false => u64::MAX,
        };
        request.check(&self.peer.rules, end)
    }

    /// Queues an error reply for a request without a slot.
    fn refuse(&mut self, to: ReplyTo, code: ErrorCode) {
        let output = self.output.headers();
        reply::error(output, self.peer.rules.style, to, code, message_of(code));
        self.measurement.answered(Operation::Other, 0, false, None);
    }

    /// Queues the reply of a request that needs no I/O.
    fn answer_at_once(&mut self, values: Values) {
        match values.action {
            Action::Read { .. } => {
                reply::data_header(self.output.headers(), self.peer.rules.style, values.to, 0);
            }
            _ => reply::done(self.output.headers(), self.peer.rules.style, values.to),
        }
        self.measurement.answered(values.operation, 0, true, None);
    }

    /// Executes I/Os of a request until one is pending or the request is done.
    fn advance(&mut self, io: &mut Io, index: u32) {
        let mut pace = Pace::default();
        while !pace.is_exhausted() {
            let slot = self.slots.get(index);
            match slot.stage {
                Stage::Ready => {
                    if !self.submit_next(io, index) {
                        return;
                    }
                    if self.slots.get(index).continues_status() {
                        break;
                    }
                }
                Stage::Flushing => {
                    let mut none = self.buffers.take_shell();
                    let tag = self.tag(index);
                    match io.submit(self.disk.handle, &IoRequest::flush(), &mut none, tag) {
                        Submission::Pending => return,
                        Submission::Done(outcome) => {
                            self.buffers.give_shell(none);
                            self.slots.get(index).io_ended(outcome, 1);
                        }
                    }
                }
                Stage::Done(_) => return self.schedule.done.push(index),
                Stage::Free | Stage::Receiving | Stage::Submitted => return,
            }
            pace.count(0, true);
        }
        self.handle
            .send(move |connection, io| connection.resume(io, index));
    }

    /// Defers a block status to a later iteration: the disk examines many extents for each of them.
    fn rest(&mut self, index: u32) {
        self.schedule.resting.push(index);
        if self.schedule.resting.len() == 1 {
            self.handle.send(|connection, io| {
                let resting = std::mem::take(&mut connection.schedule.resting);
                connection.schedule.batch.extend(resting);
                connection.schedule.has_examined = false;
                connection.submit_batch(io, None);
            });
        }
    }

    /// Continues a request that has yielded to other work.
    fn resume(&mut self, io: &mut Io, index: u32) {
        if self.slots.get(index).continues_status()
            && std::mem::replace(&mut self.schedule.has_examined, true)
        {
            return self
                .handle
                .send(move |connection, io| connection.resume(io, index));
        }
        self.advance(io, index);
    }

    fn tag(&self, index: u32) -> Tag {
        Tag {
            source: self.handle.source,
            slot: index,
        }
    }

    /// Submits the next I/O of a request. Returns false if it is pending.
    fn submit_next(&mut self, io: &mut Io, index: u32) -> bool {
        let block = self.peer.rules.minimum_block;
        let slot = self.slots.get(index);
        let request = slot.next_io();
        let mut part = self.buffers.take_shell();
        match slot.values.action {
            Action::Read { .. } => {
                if io.borrow(self.disk.handle, &request, &mut part) {
                    self.buffers.give_reserved(request.length as usize);
                    slot.buffer = Some(part);
                    slot.io_ended(Ok(()), block);
                    return true;
                }
                let buffer = self.buffers.take_reserved(request.length as usize);
                buffer.slice_into(0, request.length as usize, &mut part);
                slot.buffer = Some(buffer);
            }
            Action::BlockStatus { one } => {
                let memory = status::memory(slot.values.length, one);
                let reserved = slot.buffer.take();
                let buffer = reserved.unwrap_or_else(|| self.buffers.take_reserved(memory));
                buffer.slice_into(status::bytes(slot.extents), STATUS_BYTES, &mut part);
                slot.buffer = Some(buffer);
            }
            Action::Write { .. } => {
                if let Some(buffer) = &slot.buffer {
                    buffer.slice_into(0, request.length as usize, &mut part);
                }
            }
            _ => {}
        }
        slot.stage = Stage::Submitted;
        let tag = self.tag(index);
        match io.submit(self.disk.handle, &request, &mut part, tag) {
            Submission::Pending => false,
            Submission::Done(outcome) => {
                self.buffers.give_shell(part);
                self.slots.get(index).io_ended(outcome, block);
                true
            }
        }
    }

    /// Handles the end of a pending I/O.
    pub(crate) fn io_done(
        &mut self,
        io: &mut Io,
        index: u32,
        buffer: IoBuffer,
        outcome: IoOutcome,
    ) {
        let id = self.measurement.probe_id(index);
        probes::reaped(|| std::iter::once(id));
        self.buffers.give_shell(buffer);
        let block = self.peer.rules.minimum_block;
        self.slots.get(index).io_ended(outcome, block);
        if self.lifecycle.is_ended() {
            return self.release(index);
        }
        self.advance(io, index);
    }

    /// Releases the slot of a request.
    pub(crate) fn release(&mut self, index: u32) {
        let receives = self.input.receives_into(index);
        if let Some(buffer) = self.slots.free(index) {
            match receives {
                true => self.buffers.lose(&buffer),
                false => self.buffers.give(buffer),
            }
        }
    }

    /// Hop 6: queues the replies of finished requests. A reply with many extents defers the others to the next iteration.
    pub(crate) fn answer_all(&mut self) {
        let mut done = std::mem::take(&mut self.schedule.done);
        let (mut count, mut extents) = (0, 0);
        while count < done.len() && extents < status::EXTENTS_PER_ITERATION {
            extents += self.slots.get(done[count]).extents;
            self.answer(done[count]);
            count += 1;
        }
        done.drain(..count);
        if !done.is_empty() {
            self.handle.send(|_, _| {});
        }
        self.schedule.done = done;
    }

    fn answer(&mut self, index: u32) {
        let style = self.peer.rules.style;
        let slot = self.slots.get(index);
        let Stage::Done(result) = slot.stage else {
            return;
        };
        let Values {
            action, to, length, ..
        } = slot.values;
        let extents = slot.extents;
        self.count(index, result.is_ok());
        let buffer = self.slots.free(index);
        match (result, action, buffer) {
            (Err(code), _, buffer) => {
                reply::error(self.output.headers(), style, to, code, message_of(code));
                buffer.into_iter().for_each(|one| self.buffers.give(one));
            }
            (Ok(()), Action::Read { .. }, Some(buffer)) => {
                reply::data_header(self.output.headers(), style, to, length as u32);
                self.output.push_data(buffer, length as usize);
            }
            (Ok(()), Action::BlockStatus { one }, Some(buffer)) => {
                self.answer_status((to, length), one, &status::all(&buffer, extents));
                self.buffers.give(buffer);
            }
            (Ok(()), _, buffer) => {
                reply::done(self.output.headers(), style, to);
                buffer.into_iter().for_each(|one| self.buffers.give(one));
            }
        }
    }

    fn answer_status(&mut self, (to, length): (ReplyTo, u64), one: bool, extents: &[Extent]) {
        let dirty = self.peer.export.options.dirty.as_ref();
        let unit = self.peer.rules.minimum_block;
        let range = Range {
            offset: to.offset,
            length,
            block: unit.max(1).into(),
        };
        let of_context = |context: &u32| {
            let mut descriptors = match (Context::of(*context), dirty) {
                (Context::Dirty, Some(dirty)) => status::dirty(&range, &dirty.bits, one),
                (Context::Depth, _) => status::depth(&range, extents),
                (Context::Allocation | Context::Dirty, _) => status::allocation(&range, extents),
            };
            if one {
                descriptors.truncate(1);
            }
            ContextStatus {
                context: *context,
                descriptors,
            }
        };
        let contexts: Vec<ContextStatus> = self.peer.contexts.iter().map(of_context).collect();
        let style = self.peer.rules.style;
        reply::block_status(self.output.headers(), style, to, &contexts, unit);
    }
}

#[cfg(test)]
mod tests {
    use block::encode_extents;

    use super::*;
    use crate::slots::Slots;

    #[test]
    fn a_status_ends_after_a_number_of_ios() {
        let values = Values {
            action: Action::BlockStatus { one: false },
            to: ReplyTo {
                cookie: 1,
                offset: 0,
            },
            length: 64 << 30,
            operation: Operation::Other,
        };
        let mut slots = Slots::default();
        let index = slots.take(values, Stage::Ready);
        let slot = slots.get(index);
        let memory = status::memory(values.length, false);
        slot.buffer = Some(IoBuffer::owned(memory));
        for number in 1..=status::IOS_MAX {
            assert_eq!(slot.stage, Stage::Ready, "before I/O {number}");
            let at = slot.covered;
            let found = encode_extents(at..at + 4096, |_| Extent::data(at + 4096));
            let buffer = slot.buffer.as_ref().unwrap();
            buffer.write_at(status::bytes(slot.extents), &found);
            slot.io_ended(Ok(()), 512);
        }
        assert_eq!(slot.stage, Stage::Done(Ok(())));
        assert_eq!(slot.extents, status::IOS_MAX as usize);
    }
}
