//! I/O of one worker on an image. Reads and overwrites of allocated clusters go directly to the file, all other I/O to the owner of the
//! image or to the backing image.
//!
//! An I/O is split into pieces with one mapping each; nearly always one piece.

mod attach;

use std::sync::Arc;
use std::sync::mpsc::Sender;

use block::{
    EXTENTS_MAX, Extent, IoError, IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest, STATUS_BYTES,
    encode_extents, move_extents_below,
};
use guest_memory::IoBuffer;
use qcow2::{Map, Mapping, Segment};
use uring::{Completion, Owner, Ring};

use super::SharedImage;
use super::backing_link::BackingUser;
use super::owner::{Answer, Command, Request};
use super::readers::Reader;
use crate::admit::Limits;
use crate::slots::Slots;
use crate::watched_inbox::WatchedInbox;
use crate::{Finished, IoChannel, Submission, Tag};

/// Maximum number of clusters that one command makes writable.
const PREPARED_MAX: u64 = 512;

/// Maximum number of clusters that one block status I/O examines in loaded tables.
const STATUS_CLUSTERS_MAX: u64 = 4096;

/// The event that an I/O waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waits {
    /// None: the slot is free or in progress.
    Nothing,
    /// File I/O of `bytes`; `whole`: with the I/O's own buffer.
    File { whole: bool, bytes: u64 },
    /// Completion of the backing image; fields as in `File`.
    Backing { whole: bool, bytes: u64 },
    /// Flush of the tables; a flush of the external data file follows.
    Tables,
    /// Flush of the data, which completes the I/O.
    Durable,
    /// Answer to command `token`; `bytes` more are done afterwards.
    Answer { token: u64, bytes: u64 },
    /// Answer to [`Command::BeginTurn`] `token`. The I/O lies beyond the end that was known before.
    Size { token: u64 },
}

struct ImageSlot {
    tag: Tag,
    io: IoRequest,
    /// Empty while the file or the backing image has it.
    buffer: IoBuffer,
    /// Bytes done, from the start of the I/O.
    done: u64,
    waits: Waits,
    /// Zeroing of clusters was to be cancelled. The I/O ends after the command in progress.
    is_aborted: bool,
    generation: u64,
}

/// Result of one step of an I/O.
enum Next {
    /// The I/O waits for an event.
    Waits(Waits),
    /// This many more bytes are done.
    Done(u64),
    Failed(IoError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BackingState {
    /// The image names the backing image.
    InUse,
    /// The image has left the backing image. I/O may be in flight there.
    Detached,
    /// The channel is being closed.
    Closing,
}

/// Channel to the backing image.
struct BackingChannel {
    channel: Box<dyn IoChannel>,
    state: BackingState,
    _user: Arc<BackingUser>,
}

/// Channels of the files of an image.
struct Files {
    /// Channel of the file that stores the data.
    data: Box<dyn IoChannel>,
    data_owners: Vec<Owner>,
    /// Channel of the table file, for flushes, if the data is in another file.
    tables: Option<(Box<dyn IoChannel>, Vec<Owner>)>,
}

/// Commands to the owner of the image, and its answers.
struct OwnerLink {
    requests: Sender<Request>,
    next_token: u64,
    inbox: WatchedInbox<Answer>,
    /// Owner of the watch on the inbox.
    owner: Owner,
}

impl OwnerLink {
    /// Sends a command. Returns the token of its answer.
    fn send(&mut self, command: Command) -> Result<u64, IoError> {
        self.next_token += 1;
        let request = Request::Worker {
            command,
            token: self.next_token,
            inbox: Arc::clone(self.inbox.inbox()),
        };
        match self.requests.send(request) {
            Ok(()) => Ok(self.next_token),
            // The owner thread has ended; that defect is already logged.
            Err(_) => Err(IoErrorKind::Offline.into()),
        }
    }
}

pub(super) struct ImageChannel {
    shared: Arc<SharedImage>,
    map: Arc<Map>,
    map_number: u64,
    limits: Limits,
    reader: Reader,
    files: Files,
    backing: Option<BackingChannel>,
    /// Bytes from the start that the backing image covers; 0 once the image has left it.
    covered: u64,
    image_owner: OwnerLink,
    slots: Slots<ImageSlot>,
    finished_below: Vec<Finished>,
    /// Dropped last, when the channels of the files are closed.
    _closed: ClosedNotice,
}

/// Notifies the owner of a closed channel.
struct ClosedNotice(Sender<Request>);

impl Drop for ClosedNotice {
    fn drop(&mut self) {
        // The owner thread may have ended.
        self.0.send(Request::Closed).ok();
    }
}

impl ImageChannel {
    fn occupy(&mut self, tag: Tag, io: &IoRequest, generation: u64) -> u32 {
        let index = self.slots.reuse(|| ImageSlot {
            tag,
            io: *io,
            buffer: IoBuffer::default(),
            done: 0,
            waits: Waits::Nothing,
            is_aborted: false,
            generation,
        });
        let slot = &mut self.slots[index];
        (slot.tag, slot.io, slot.generation) = (tag, *io, generation);
        (slot.done, slot.waits, slot.is_aborted) = (0, Waits::Nothing, false);
        index
    }

    fn vacate(&mut self, index: u32) -> (Tag, IoBuffer) {
        self.slots.release(index);
        let slot = &mut self.slots[index];
        slot.waits = Waits::Nothing;
        self.reader.end(slot.generation);
        (slot.tag, std::mem::take(&mut slot.buffer))
    }

    fn refresh_map(&mut self) {
        if self.shared.map.number() != self.map_number {
            (self.map_number, self.map) = self.shared.map.current();
        }
    }

    /// Advances an I/O until it waits; `Some` if it has ended.
    fn advance(&mut self, ring: &mut Ring, index: u32) -> Option<IoOutcome> {
        loop {
            let slot = &self.slots[index];
            let io = slot.io;
            let left = io.length - slot.done;
            let next = match io.kind {
                IoKind::Flush => self.make_durable(ring, index),
                _ if left == 0 && self.shared.is_durable(&io) => self.make_durable(ring, index),
                _ if left == 0 => return Some(Ok(())),
                IoKind::Read => self.read(ring, index, left),
                IoKind::Write => self.write(ring, index, left),
                IoKind::Discard | IoKind::WriteZeroes => self.zero(ring, index, left),
                IoKind::BlockStatus => self.block_status(ring, index),
                IoKind::CompareAndWrite | IoKind::ReplaceState | IoKind::ScsiCommand => {
                    Next::Failed(IoErrorKind::Unsupported.into())
                }
            };
            match next {
                Next::Waits(waits) => {
                    self.slots[index].waits = waits;
                    return None;
                }
                Next::Done(bytes) => self.slots[index].done += bytes,
                Next::Failed(error) => return Some(Err(error)),
            }
            // A flush that completed synchronously.
            if matches!(io.kind, IoKind::Flush) || left == 0 {
                return Some(Ok(()));
            }
        }
    }

    fn segment(&self, index: u32, left: u64) -> (u64, Segment) {
        let slot = &self.slots[index];
        let at = slot.io.offset + slot.done;
        (at, self.map.segment(at, left))
    }

    fn read(&mut self, ring: &mut Ring, index: u32, left: u64) -> Next {
        let (at, Segment { mapping, length }) = self.segment(index, left);
        match mapping {
            Mapping::Data { host, .. } => {
                self.move_data(ring, index, IoRequest::read(host, length))
            }
            Mapping::Unallocated if at < self.covered => {
                let length = length.min(self.covered - at);
                self.read_backing(ring, index, IoRequest::read(at, length))
            }
            Mapping::Unallocated | Mapping::Zero => {
                let slot = &self.slots[index];
                slot.buffer.fill(slot.done as usize, length as usize, 0);
                Next::Done(length)
            }
            Mapping::NotLoaded => self.send(Command::Load(at), 0),
            Mapping::Compressed => self.send(Command::ReadCompressed(at), length),
            Mapping::Bad => Next::Failed(self.damaged_entry(at)),
        }
    }

    fn write(&mut self, ring: &mut Ring, index: u32, left: u64) -> Next {
        let (at, Segment { mapping, length }) = self.segment(index, left);
        match mapping {
            Mapping::Data {
                host,
                writable: true,
            } => self.move_data(ring, index, IoRequest::write(host, length)),
            _ => self.prepare(at, left),
        }
    }

    /// Asks the owner to make clusters from `at` on writable.
    fn prepare(&mut self, at: u64, length: u64) -> Next {
        let bits = self.map.cluster_bytes().trailing_zeros();
        let (first, last) = (at >> bits, (at + length - 1) >> bits);
        let clusters = first..=last.min(first + PREPARED_MAX - 1);
        let offsets = clusters.map(|cluster| cluster << bits).collect();
        self.send(Command::PrepareWrite(offsets), 0)
    }

    /// Zeroes whole clusters in the tables if their space may be released or they have none, and parts of clusters in the file.
    fn zero(&mut self, ring: &mut Ring, index: u32, left: u64) -> Next {
        let (at, Segment { mapping, length }) = self.segment(index, left);
        let cluster = self.map.cluster_bytes();
        let io = self.slots[index].io;
        let gives_back = io.kind == IoKind::Discard || io.flags.has(IoFlags::UNMAP);
        let is_covered = at < self.covered;
        // The last cluster of a disk may be partial.
        let reaches_end = at + left >= self.map.size();
        let whole = match (at.is_multiple_of(cluster), reaches_end) {
            (true, true) => left,
            (true, false) => left / cluster * cluster,
            (false, _) => 0,
        };
        if whole > 0 && gives_back && (!is_covered || self.shared.can_zero) {
            return self.send(
                Command::Zero {
                    offset: at,
                    length: whole,
                },
                whole,
            );
        }
        // Up to the end of a cluster that is not zeroed as a whole.
        let length = match whole {
            0 => length.min(cluster - at % cluster),
            whole => length.min(whole),
        };
        match mapping {
            Mapping::Data {
                host,
                writable: true,
            } => {
                let unmap = if gives_back {
                    IoFlags::UNMAP
                } else {
                    IoFlags::NONE
                };
                let zeroes = IoRequest::write_zeroes(host, length).flagged(unmap);
                self.move_data(ring, index, zeroes)
            }
            Mapping::Zero => Next::Done(length),
            Mapping::Unallocated if !is_covered => {
                // `at` lies beyond the backing image, where unallocated clusters read as zeroes.
                Next::Done(length)
            }
            Mapping::NotLoaded => self.send(Command::Load(at), 0),
            Mapping::Unallocated if whole > 0 && self.shared.can_zero => {
                let end = (at + length).next_multiple_of(cluster).min(at + whole);
                let length = end - at;
                self.send(Command::Zero { offset: at, length }, length)
            }
            _ => self.prepare(at, length),
        }
    }

    /// Submits a piece to the file, with the I/O's own buffer if it is the whole I/O.
    fn move_data(&mut self, ring: &mut Ring, index: u32, io: IoRequest) -> Next {
        let slot = &mut self.slots[index];
        let (mut buffer, whole) = take_piece(slot, &io);
        let bytes = io.length;
        let file = &mut self.files.data;
        match file.submit(ring, &io, &mut buffer, Tag(index.into())) {
            Submission::Pending => Next::Waits(Waits::File { whole, bytes }),
            Submission::Done(outcome) => {
                let slot = &mut self.slots[index];
                piece_done(slot, buffer, whole, outcome, bytes)
            }
        }
    }

    /// Lists extents up to the first part without loaded tables. A range that begins in the backing image is passed to it.
    #[cold]
    fn block_status(&mut self, ring: &mut Ring, index: u32) -> Next {
        let io = self.slots[index].io;
        let covered = self.covered;
        // Bounds the number of entries that a worker examines.
        let length = match self.map.absent_bytes(io.offset) {
            0 => io
                .length
                .min(self.map.cluster_bytes() * STATUS_CLUSTERS_MAX),
            _ => io.length,
        };
        let first = self.map.segment(io.offset, length);
        match first.mapping {
            Mapping::NotLoaded => return self.send(Command::Load(io.offset), 0),
            Mapping::Unallocated if io.offset < covered => {
                let length = first.length.min(covered - io.offset);
                return self.status_below(ring, index, io.offset, length);
            }
            _ => {}
        }
        let (map, end) = (&self.map, io.offset + length);
        let mut known = io.offset + first.length;
        for _ in 1..EXTENTS_MAX {
            if known >= end {
                break;
            }
            let next = map.segment(known, end - known);
            match next.mapping {
                Mapping::NotLoaded => break,
                Mapping::Unallocated if known < covered => break,
                _ => known += next.length,
            }
        }
        let extents = encode_extents(io.offset..known.min(end), |at| {
            let segment = map.segment(at, end - at);
            let end = at + segment.length;
            match segment.mapping {
                Mapping::Zero => Extent::zeroes(end),
                Mapping::Unallocated => Extent::hole(end),
                Mapping::Bad | Mapping::NotLoaded => Extent::UNKNOWN,
                Mapping::Data { .. } | Mapping::Compressed => Extent::data(end),
            }
        });
        self.slots[index].buffer.write_at(0, &extents);
        Next::Done(io.length)
    }

    #[cold]
    fn status_below(&mut self, ring: &mut Ring, index: u32, at: u64, length: u64) -> Next {
        let Some(backing) = &mut self.backing else {
            return Next::Failed(IoErrorKind::ReadMedium.into());
        };
        let slot = &mut self.slots[index];
        let mut buffer = std::mem::take(&mut slot.buffer);
        let bytes = slot.io.length;
        let below = IoRequest::block_status(at, length);
        match backing
            .channel
            .submit(ring, &below, &mut buffer, Tag(index.into()))
        {
            Submission::Pending => Next::Waits(Waits::Backing { whole: true, bytes }),
            Submission::Done(outcome) => piece_done(slot, buffer, true, outcome, bytes),
        }
    }

    #[cold]
    fn read_backing(&mut self, ring: &mut Ring, index: u32, io: IoRequest) -> Next {
        let Some(backing) = &mut self.backing else {
            return Next::Failed(IoErrorKind::ReadMedium.into());
        };
        let slot = &mut self.slots[index];
        let (mut buffer, whole) = take_piece(slot, &io);
        let bytes = io.length;
        match backing
            .channel
            .submit(ring, &io, &mut buffer, Tag(index.into()))
        {
            Submission::Pending => Next::Waits(Waits::Backing { whole, bytes }),
            Submission::Done(outcome) => {
                let slot = &mut self.slots[index];
                piece_done(slot, buffer, whole, outcome, bytes)
            }
        }
    }

    /// Makes completed I/O durable. One flush of each file suffices, because tables are written before the I/O that needs them completes.
    fn make_durable(&mut self, ring: &mut Ring, index: u32) -> Next {
        let Some((tables, _)) = &mut self.files.tables else {
            return self.flush_data(ring, index);
        };
        let mut none = IoBuffer::default();
        let flush = IoRequest::flush();
        match tables.submit(ring, &flush, &mut none, Tag(index.into())) {
            Submission::Pending => Next::Waits(Waits::Tables),
            Submission::Done(Ok(())) => self.flush_data(ring, index),
            Submission::Done(Err(error)) => Next::Failed(error),
        }
    }

    fn flush_data(&mut self, ring: &mut Ring, index: u32) -> Next {
        let mut none = IoBuffer::default();
        let flush = IoRequest::flush();
        let file = &mut self.files.data;
        match file.submit(ring, &flush, &mut none, Tag(index.into())) {
            Submission::Pending => Next::Waits(Waits::Durable),
            Submission::Done(Ok(())) => Next::Done(0),
            Submission::Done(Err(error)) => Next::Failed(error),
        }
    }

    #[cold]
    fn send(&mut self, command: Command, bytes: u64) -> Next {
        match self.image_owner.send(command) {
            Ok(token) => Next::Waits(Waits::Answer { token, bytes }),
            Err(error) => Next::Failed(error),
        }
    }

    /// Starts an I/O beyond the known end of an image that another daemon may have enlarged. It waits until the owner has read the header.
    #[cold]
    fn ask_for_size(&mut self, io: &IoRequest, buffer: &mut IoBuffer, tag: Tag) -> Submission {
        let token = match self.image_owner.send(Command::BeginTurn) {
            Ok(token) => token,
            Err(error) => return Submission::Done(Err(error)),
        };
        let generation = self.reader.begin(&self.shared.readers);
        let index = self.occupy(tag, io, generation);
        self.slots[index].buffer = std::mem::take(buffer);
        self.slots[index].waits = Waits::Size { token };
        Submission::Pending
    }

    /// Continues an I/O after [`ImageChannel::ask_for_size`].
    #[cold]
    fn size_known(&mut self, ring: &mut Ring, index: u32) -> Option<IoOutcome> {
        let slot = &mut self.slots[index];
        slot.waits = Waits::Nothing;
        match self.limits.begin(&slot.io, &slot.buffer) {
            Some(outcome) => Some(outcome),
            None => self.advance(ring, index),
        }
    }

    #[cold]
    fn damaged_entry(&self, at: u64) -> IoError {
        self.shared
            .report_corruption(&format!("the table entry of offset {at} is damaged"));
        IoError::with_errno(IoErrorKind::ReadMedium, libc::EIO)
    }

    /// Continues I/O after a part below has ended.
    fn continue_io(&mut self, ring: &mut Ring, finished: &mut Vec<Finished>) {
        self.refresh_map();
        let mut below = std::mem::take(&mut self.finished_below);
        for one in below.drain(..) {
            let index = one.tag.0 as u32;
            let slot = &mut self.slots[index];
            let outcome = match slot.waits {
                Waits::Durable => Some(one.outcome),
                Waits::Tables => match one.outcome.map(|()| self.flush_data(ring, index)) {
                    Ok(Next::Waits(waits)) => {
                        self.slots[index].waits = waits;
                        None
                    }
                    Ok(Next::Done(_)) => Some(Ok(())),
                    Ok(Next::Failed(error)) | Err(error) => Some(Err(error)),
                },
                Waits::File { whole, bytes } | Waits::Backing { whole, bytes } => {
                    match piece_done(slot, one.buffer, whole, one.outcome, bytes) {
                        Next::Done(bytes) => {
                            slot.done += bytes;
                            self.advance(ring, index)
                        }
                        Next::Failed(error) => Some(Err(error)),
                        Next::Waits(_) => None,
                    }
                }
                Waits::Nothing | Waits::Answer { .. } | Waits::Size { .. } => None,
            };
            self.finish(index, outcome, finished);
        }
        self.finished_below = below;
    }

    fn finish(&mut self, index: u32, outcome: Option<IoOutcome>, finished: &mut Vec<Finished>) {
        if let Some(outcome) = outcome {
            let (tag, buffer) = self.vacate(index);
            finished.push(Finished {
                tag,
                buffer,
                outcome,
            });
        }
    }

    #[cold]
    fn on_notification(&mut self, ring: &mut Ring, more: bool, finished: &mut Vec<Finished>) {
        let mut answers = self.image_owner.inbox.take(ring, more);
        self.refresh_map();
        self.detach_backing(ring);
        for (number, answer) in answers.drain(..) {
            let waits = |slot: &ImageSlot| matches!(slot.waits, Waits::Answer { token, .. } | Waits::Size { token } if token == number);
            let Some(index) = self.slots.find(waits) else {
                continue;
            };
            let outcome = match answer {
                Ok(_) if matches!(self.slots[index].waits, Waits::Size { .. }) => {
                    self.size_known(ring, index)
                }
                Ok(bytes) => {
                    self.take_answer(index, &bytes);
                    match self.ends_early(index) {
                        true => Some(Err(IoErrorKind::Cancelled.into())),
                        false => self.advance(ring, index),
                    }
                }
                Err(error) => Some(Err(error)),
            };
            self.finish(index, outcome, finished);
        }
        self.image_owner.inbox.reuse(answers);
    }

    /// Follows an image that has left its backing image: unallocated clusters read as zeroes, and the channel to the backing image is
    /// closed.
    #[cold]
    fn detach_backing(&mut self, ring: &mut Ring) {
        if let Some(backing) = &mut self.backing
            && backing.state == BackingState::InUse
            && self.shared.backing.is_left()
        {
            backing.state = BackingState::Detached;
            self.covered = 0;
            self.close_detached_backing(ring);
        }
    }

    /// Closes the channel to a backing image that the image has left, when its I/O has ended.
    fn close_detached_backing(&mut self, ring: &mut Ring) {
        let Some(backing) = &mut self.backing else {
            return;
        };
        if backing.state == BackingState::Detached && backing.channel.in_flight() == 0 {
            backing.state = BackingState::Closing;
            backing.channel.close(ring);
        }
        if backing.state == BackingState::Closing && backing.channel.is_closed() {
            self.backing = None;
        }
    }

    fn take_answer(&mut self, index: u32, content: &[u8]) {
        let slot = &mut self.slots[index];
        let Waits::Answer { bytes, .. } = slot.waits else {
            return;
        };
        match slot.io.kind {
            // Copies the requested part of a compressed cluster.
            IoKind::Read if bytes > 0 => {
                let at = (slot.io.offset + slot.done) % self.map.cluster_bytes();
                let part = &content[at as usize..(at + bytes) as usize];
                slot.buffer.write_at(slot.done as usize, part);
            }
            _ => {}
        }
        slot.done += bytes;
    }

    /// Returns true if an aborted I/O has more to do. It must not start that: nothing aborts it again.
    fn ends_early(&self, index: u32) -> bool {
        let slot = &self.slots[index];
        slot.is_aborted && (slot.done < slot.io.length || self.shared.is_durable(&slot.io))
    }
}

/// Returns the buffer of a piece: the I/O's own if it is the whole I/O.
fn take_piece(slot: &mut ImageSlot, io: &IoRequest) -> (IoBuffer, bool) {
    if !io.moves_data() {
        return (IoBuffer::default(), false);
    }
    if io.length == slot.io.length {
        return (std::mem::take(&mut slot.buffer), true);
    }
    let part = slot.buffer.slice(slot.done as usize, io.length as usize);
    (part, false)
}

fn piece_done(
    slot: &mut ImageSlot,
    buffer: IoBuffer,
    whole: bool,
    outcome: IoOutcome,
    bytes: u64,
) -> Next {
    if whole {
        slot.buffer = buffer;
    }
    if slot.io.kind == IoKind::BlockStatus && outcome.is_ok() {
        move_status_below(&slot.buffer);
    }
    match outcome {
        Ok(()) => Next::Done(bytes),
        Err(error) => Next::Failed(error),
    }
}

/// Converts the extents that a backing image has found.
#[cold]
fn move_status_below(buffer: &IoBuffer) {
    let mut bytes = [0; STATUS_BYTES];
    buffer.read_at(0, &mut bytes);
    move_extents_below(&mut bytes);
    buffer.write_at(0, &bytes);
}

impl IoChannel for ImageChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        if let Some(outcome) = self.limits.begin(io, buffer) {
            return match outcome {
                Err(error) if error.kind == IoErrorKind::OutOfRange && self.shared.is_unread() => {
                    self.ask_for_size(io, buffer, tag)
                }
                outcome => Submission::Done(outcome),
            };
        }
        // Must precede reading the map.
        let generation = self.reader.begin(&self.shared.readers);
        self.refresh_map();
        let index = self.occupy(tag, io, generation);
        self.slots[index].buffer = std::mem::take(buffer);
        match self.advance(ring, index) {
            None => Submission::Pending,
            Some(outcome) => {
                *buffer = self.vacate(index).1;
                Submission::Done(outcome)
            }
        }
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        if completion.owner == self.image_owner.owner {
            return self.on_notification(ring, completion.more, finished);
        }
        let below = &mut self.finished_below;
        let is_of = |owners: &[Owner]| owners.contains(&completion.owner);
        let Files {
            data,
            data_owners,
            tables,
        } = &mut self.files;
        match (tables, &mut self.backing) {
            (None, None) => data.complete(ring, completion, below),
            _ if is_of(data_owners) => data.complete(ring, completion, below),
            (Some((tables, owners)), _) if is_of(owners) => {
                tables.complete(ring, completion, below);
            }
            (_, Some(backing)) => {
                backing.channel.complete(ring, completion, below);
                self.close_detached_backing(ring);
            }
            (Some(_), None) => {}
        }
        if !self.finished_below.is_empty() {
            self.continue_io(ring, finished);
        }
    }

    /// Cancels I/O that waits for the owner at once; a later answer is dropped. Zeroing of clusters is cancelled when the owner has answered:
    /// it could execute it after the end of the I/O, over later writes.
    fn abort(&mut self, ring: &mut Ring, tag: Tag) {
        let named = |slot: &ImageSlot| slot.tag == tag && slot.waits != Waits::Nothing;
        let Some(index) = self.slots.find(named) else {
            return;
        };
        let below = Tag(index.into());
        match self.slots[index].waits {
            Waits::File { .. } | Waits::Durable => self.files.data.abort(ring, below),
            Waits::Tables => {
                if let Some((tables, _)) = &mut self.files.tables {
                    tables.abort(ring, below);
                }
            }
            Waits::Backing { .. } => {
                if let Some(backing) = &mut self.backing {
                    backing.channel.abort(ring, below);
                }
            }
            Waits::Answer { bytes, .. } if bytes > 0 && self.slots[index].io.modifies() => {
                self.slots[index].is_aborted = true;
            }
            Waits::Answer { token, .. } | Waits::Size { token } => {
                let inbox = self.image_owner.inbox.inbox();
                inbox.put(token, Err(IoErrorKind::Cancelled.into()));
            }
            Waits::Nothing => {}
        }
    }

    fn close(&mut self, ring: &mut Ring) {
        self.files.data.close(ring);
        if let Some((tables, _)) = &mut self.files.tables {
            tables.close(ring);
        }
        if let Some(backing) = &mut self.backing
            && backing.state != BackingState::Closing
        {
            backing.state = BackingState::Closing;
            backing.channel.close(ring);
        }
        self.image_owner.inbox.close(ring);
    }

    fn is_closed(&self) -> bool {
        let is_backing_closed = self
            .backing
            .as_ref()
            .is_none_or(|backing| backing.channel.is_closed());
        let files = &self.files;
        let are_tables_closed = files
            .tables
            .as_ref()
            .is_none_or(|(tables, _)| tables.is_closed());
        self.in_flight() == 0 && files.data.is_closed() && are_tables_closed && is_backing_closed
    }

    fn in_flight(&self) -> usize {
        self.slots.len()
    }
}
