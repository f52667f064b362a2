//! Begins requests, executes their I/Os on the disk, and queues their replies.

use bdev::{FrozenBitmap, Submission};
use block::{Allocation, IoErrorKind, IoFlags, IoOutcome, IoRequest, STATUS_BYTES, decode_extents};
use guest_memory::IoBuffer;
use latency::{Operation, Part, Stamps};
use nbd::reply::{self, Descriptor, ReplyTo};
use nbd::request::{Action, Request};
use nbd::wire::{DIRTY, PAYLOAD_MAX, allocation, command};
use nbd::{ErrorCode, Violation};
use reactor::{Io, Job, Tag};
use request_engine::{BatchTransport, Pace, Submitted, buffer_size};

use crate::connection::Connection;
use crate::export::ALLOCATION_ID;
use crate::slots::{Slot, Stage, Values};

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
        command::BLOCK_STATUS => STATUS_BYTES,
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

    /// Returns true if a flush must follow the I/Os of the range.
    fn needs_flush(&self) -> bool {
        matches!(
            self.values.action,
            Action::Trim { fua: true } | Action::WriteZeroes { fua: true, .. }
        )
    }

    /// Continues after an I/O.
    fn io_ended(&mut self, outcome: IoOutcome) {
        let action = self.values.action;
        self.stage = match outcome {
            Err(error) => Stage::Done(Err(code_of(error.kind, action))),
            Ok(()) if self.stage == Stage::Flushing => Stage::Done(Ok(())),
            Ok(()) => {
                let left = self.values.length - self.covered;
                self.covered += match action {
                    Action::Trim { .. } | Action::WriteZeroes { .. } => left.min(PART_BYTES),
                    _ => left,
                };
                match self.covered < self.values.length {
                    true => Stage::Ready,
                    false if self.needs_flush() => Stage::Flushing,
                    false => Stage::Done(Ok(())),
                }
            }
        };
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
    pub(crate) fn has_resources_or_waits(&mut self, request: &Request) -> bool {
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
                    Action::BlockStatus { .. } => self.buffers.reserve(STATUS_BYTES),
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
                }
                Stage::Flushing => {
                    let mut none = self.buffers.take_shell();
                    let tag = self.tag(index);
                    match io.submit(self.disk.handle, &IoRequest::flush(), &mut none, tag) {
                        Submission::Pending => return,
                        Submission::Done(outcome) => {
                            self.buffers.give_shell(none);
                            self.slots.get(index).io_ended(outcome);
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
        let slot = self.slots.get(index);
        let request = slot.next_io();
        let mut part = self.buffers.take_shell();
        match slot.values.action {
            Action::Read { .. } => {
                if io.borrow(self.disk.handle, &request, &mut part) {
                    self.buffers.give_reserved(request.length as usize);
                    slot.buffer = Some(part);
                    slot.io_ended(Ok(()));
                    return true;
                }
                let buffer = self.buffers.take_reserved(request.length as usize);
                buffer.slice_into(0, request.length as usize, &mut part);
                slot.buffer = Some(buffer);
            }
            Action::BlockStatus { .. } => {
                let buffer = self.buffers.take_reserved(STATUS_BYTES);
                buffer.slice_into(0, STATUS_BYTES, &mut part);
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
                self.slots.get(index).io_ended(outcome);
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
        let slot = self.slots.get(index);
        slot.io_ended(outcome);
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

    /// Hop 6: queues the replies of all finished requests.
    pub(crate) fn answer_all(&mut self) {
        let mut done = std::mem::take(&mut self.schedule.done);
        for index in done.drain(..) {
            self.answer(index);
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
                self.answer_status(to, length, one, &buffer);
                self.buffers.give(buffer);
            }
            (Ok(()), _, buffer) => {
                reply::done(self.output.headers(), style, to);
                buffer.into_iter().for_each(|one| self.buffers.give(one));
            }
        }
    }

    fn answer_status(&mut self, to: ReplyTo, length: u64, one: bool, buffer: &IoBuffer) {
        let mut bytes = [0; STATUS_BYTES];
        buffer.read_whole(0, &mut bytes);
        let dirty = self.peer.export.options.dirty.as_ref();
        let unit = self.peer.rules.minimum_block;
        let contexts = self.peer.contexts.iter().enumerate();
        for (at, context) in contexts {
            let is_last = at + 1 == self.peer.contexts.len();
            let output = self.output.headers();
            let style = self.peer.rules.style;
            let mut descriptors = match (*context, dirty) {
                (ALLOCATION_ID, _) | (_, None) => {
                    extents(to.offset, length, unit.max(1).into(), &bytes)
                }
                (_, Some(dirty)) => dirty_extents(to.offset, length, &dirty.bits),
            };
            if one {
                descriptors.truncate(1);
            }
            reply::block_status(output, style, to, *context, &descriptors, unit, is_last);
        }
    }
}

/// Maximum number of extents of a dirty bitmap in one reply. Clients ask again for the rest.
const DIRTY_EXTENTS_MAX: usize = 1024;
/// Maximum range of a dirty bitmap in one reply, in bytes. Bounds the number of bits that a worker examines.
const DIRTY_SPAN_MAX: u64 = 64 << 30;

/// Returns the extents of a dirty bitmap.
fn dirty_extents(offset: u64, length: u64, bits: &FrozenBitmap) -> Vec<Descriptor> {
    let end = offset + length.min(DIRTY_SPAN_MAX);
    let (mut at, mut descriptors) = (offset, Vec::new());
    while at < end && descriptors.len() < DIRTY_EXTENTS_MAX {
        let (until, is_dirty) = bits.piece(at, end);
        descriptors.push(Descriptor {
            length: until - at,
            flags: if is_dirty { DIRTY } else { 0 },
        });
        at = until;
    }
    descriptors
}

/// Converts the extents of a block status I/O to those of `base:allocation`, with whole blocks of `block` bytes. A block with pieces of
/// several extents has the flags that all of them have: it is data if one of them is.
fn extents(offset: u64, length: u64, block: u64, bytes: &[u8]) -> Vec<Descriptor> {
    let end = offset + length;
    let mut at = offset;
    let mut whole = Descriptors {
        at: offset,
        list: Vec::new(),
    };
    // Flags of the pieces of the block that begins at `whole.at`, if it has some.
    let mut pieces: Option<u32> = None;
    for extent in decode_extents(bytes) {
        let until = extent.end.min(end);
        if until <= at {
            break;
        }
        at = until;
        let flags = match extent.allocation {
            Allocation::Hole => allocation::HOLE | allocation::ZERO,
            Allocation::Reserved => allocation::ZERO,
            Allocation::Data => 0,
        };
        if let Some(of_pieces) = &mut pieces {
            *of_pieces &= flags;
            let block_end = whole.at.saturating_add(block).min(end);
            if until < block_end {
                continue;
            }
            whole.push(block_end, *of_pieces);
        }
        let last = if until == end {
            end
        } else {
            until - until % block
        };
        whole.push(last, flags);
        pieces = (until > whole.at).then_some(flags);
    }
    if whole.list.is_empty() {
        // The standard allows the status "data" for every range.
        whole.push(end, 0);
    }
    whole.list
}

/// Adjacent extents, up to `at`.
struct Descriptors {
    at: u64,
    list: Vec<Descriptor>,
}

impl Descriptors {
    /// Adds an extent, unless it is empty. Extents with equal flags are merged.
    fn push(&mut self, end: u64, flags: u32) {
        let length = end.saturating_sub(self.at);
        if length == 0 {
            return;
        }
        self.at = end;
        match self.list.last_mut() {
            Some(last) if last.flags == flags => last.length += length,
            _ => self.list.push(Descriptor { length, flags }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Extent, encode_extents};

    #[test]
    fn extents_are_clipped_and_merged() {
        let of = |at: u64| match at {
            0..4096 => Extent::hole(4096),
            4096..8192 => Extent::data(8192),
            _ => Extent::reserved(u64::MAX),
        };
        let bytes = encode_extents(1024..65536, of);
        let found = extents(1024, 64512, 512, &bytes);
        let expected = [(3072, 3), (4096, 0), (57344, 2)];
        let expected = expected.map(|(length, flags)| Descriptor { length, flags });
        assert_eq!(found, expected);
        let unknown = extents(512, 1024, 512, &[0; STATUS_BYTES]);
        assert_eq!(
            unknown,
            [Descriptor {
                length: 1024,
                flags: 0
            }]
        );
    }

    /// Returns the flags that all bytes of a block have.
    fn flags_of_block(of: &impl Fn(u64) -> Extent, range: std::ops::Range<u64>) -> u32 {
        range.fold(3, |flags, at| {
            flags
                & match of(at).allocation {
                    Allocation::Hole => 3,
                    Allocation::Reserved => 2,
                    Allocation::Data => 0,
                }
        })
    }

    #[test]
    fn blocks_with_pieces_of_several_extents_have_common_flags() {
        const BLOCK: u64 = 512;
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..2000 {
            // Extents with byte-granular ends, as an NBD server may report them.
            let mut ends = Vec::new();
            let mut at = 0;
            while at < 8192 {
                at += random.u64(1..1500);
                ends.push((at, random.u8(0..3)));
            }
            let of = |at: u64| {
                let (end, kind) = ends[ends.partition_point(|(end, _)| *end <= at)];
                match kind {
                    0 => Extent::hole(end),
                    1 => Extent::reserved(end),
                    _ => Extent::data(end),
                }
            };
            let bytes = encode_extents(1024..8192, of);
            let found = extents(1024, 7168, BLOCK, &bytes);
            let mut at = 1024;
            for one in &found {
                assert_eq!(one.length % BLOCK, 0);
                for block in (at..at + one.length).step_by(BLOCK as usize) {
                    let flags = flags_of_block(&of, block..block + BLOCK);
                    assert_eq!(one.flags, flags, "{ends:?} {found:?}");
                }
                at += one.length;
            }
            assert!(at <= 8192);
        }
    }
}
