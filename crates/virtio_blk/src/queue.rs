//! Executes the I/Os of a request and writes its status.
//!
//! Owned by one worker. The cache mode costs one relaxed load per write: if the driver has turned write-back off, or cannot
//! flush, every write is durable before it is answered (virtio 1.3, 5.2.6.2).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bdev::Disk;
use block::{DiskInfo, IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use latency::Operation;
use reactor::{DiskHandle, Io, Tag};
use virtio_device::{Answer, Job, Malformed, ParsedRequest, Protocol, Request, Step};
use virtqueue::{Chain, ResponseSpace};

use crate::config::PIECE;
use crate::request::{
    self, HEADER_SIZE, ID_SIZE, Limits, RANGE_SIZE, RangeKind, S_IOERR, S_OK, S_UNSUPP, Transfer,
};

/// The virtio-blk part of a queue.
pub(crate) struct BlkQueue {
    disk: DiskHandle,
    /// The exported disk, for its present size.
    exported: Arc<Disk>,
    info: Arc<DiskInfo>,
    limits: Limits,
    writethrough: Arc<AtomicBool>,
}

/// State of a request until it is answered.
#[derive(Default)]
pub(crate) struct Pending {
    status: u8,
    /// Bytes of data written to the driver's memory on success.
    data_in: u32,
    /// I/Os after the current one.
    rest: Option<Rest>,
}

/// Remaining work of a request.
#[derive(Clone, Copy)]
enum Rest {
    /// Discard and write-zeroes.
    Ranges(Ranges),
    /// Bytes after the current piece of a transfer too long for one I/O. One piece runs at a time, so that an error ends
    /// the transfer with nothing in flight.
    Pieces(u32),
}

#[derive(Clone, Copy)]
struct Ranges {
    kind: RangeKind,
    next: u32,
    count: u32,
    /// The final flush of the request in write-through mode was submitted.
    flushed: bool,
}

/// Stored in the third cache line of a request slot.
const _: () = assert!(size_of::<Pending>() <= 20);

impl BlkQueue {
    pub(crate) fn new(
        disk: DiskHandle,
        exported: Arc<Disk>,
        writethrough: Arc<AtomicBool>,
    ) -> BlkQueue {
        let info = exported.info();
        BlkQueue {
            disk,
            exported,
            limits: Limits::of(&info),
            info,
            writethrough,
        }
    }

    /// Sets the disk's properties.
    pub(crate) fn set_info(&mut self, info: Arc<DiskInfo>) {
        self.limits = Limits::of(&info);
        self.info = info;
    }

    /// Adopts the disk's present properties. Returns true if they have changed: the driver may have read a new capacity from the
    /// configuration space before the message about it has arrived here.
    #[cold]
    fn adopt_present_info(&mut self) -> bool {
        let present = self.exported.info();
        let has_changed = !Arc::ptr_eq(&present, &self.info);
        if has_changed {
            self.set_info(present);
        }
        has_changed
    }

    /// Returns the disk's properties for a range beyond the end, if another daemon may have enlarged the disk. The device then checks it.
    #[cold]
    fn unbounded_info(&self) -> Option<DiskInfo> {
        (!self.exported.is_size_known()).then(|| DiskInfo {
            geometry: self.info.geometry.unbounded(),
            ..(*self.info).clone()
        })
    }

    #[inline]
    fn is_writethrough(&self) -> bool {
        self.writethrough.load(Ordering::Relaxed)
    }

    /// Returns the next step of a request with several I/Os.
    #[inline(never)]
    fn next_io(&mut self, request: &mut Request<Pending>) -> Step {
        match request.state.rest {
            Some(Rest::Ranges(ranges)) => self.next_range(request, ranges),
            Some(Rest::Pieces(rest)) => next_piece(request, rest),
            None => Step::Answer,
        }
    }

    /// Returns the next step of a discard or write-zeroes request.
    fn next_range(&mut self, request: &mut Request<Pending>, mut ranges: Ranges) -> Step {
        let pending = &mut request.state;
        while ranges.next < ranges.count {
            let mut bytes = [0; RANGE_SIZE];
            // Read once, checked, used: the driver may change it in the meantime.
            let at = HEADER_SIZE + ranges.next as usize * RANGE_SIZE;
            request.chain.buffer.read_whole(at, &mut bytes);
            ranges.next += 1;
            pending.rest = Some(Rest::Ranges(ranges));
            let mut parsed = request::parse_range(ranges.kind, &bytes, &self.info);
            if parsed.is_err() && self.adopt_present_info() {
                parsed = request::parse_range(ranges.kind, &bytes, &self.info);
            }
            if parsed.is_err()
                && let Some(info) = self.unbounded_info()
            {
                parsed = request::parse_range(ranges.kind, &bytes, &info);
            }
            match parsed {
                Ok(Some(io)) => return self.data(request, io),
                Ok(None) => {}
                Err(status) => {
                    pending.status = status;
                    return Step::Answer;
                }
            }
        }
        if self.is_writethrough() && !ranges.flushed {
            ranges.flushed = true;
            pending.rest = Some(Rest::Ranges(ranges));
            return self.data(request, IoRequest::flush());
        }
        Step::Answer
    }

    #[inline(always)]
    fn data(&self, request: &mut Request<Pending>, io: IoRequest) -> Step {
        let disk = self.disk;
        request.job = Job { disk, io };
        Step::Data
    }

    #[inline(always)]
    fn begin_transfer(
        &self,
        request: &mut Request<Pending>,
        (way, offset, length): (Transfer, u64, u32),
    ) -> ParsedRequest {
        let chain = &mut request.chain;
        let (io, operation) = match way {
            Transfer::In => {
                let start = chain.readable as usize;
                chain.buffer.set_window(start, length as usize);
                request.state.data_in = length;
                let io = IoRequest::read(offset, length.into());
                (io, Operation::Read)
            }
            Transfer::Out => {
                chain.buffer.set_window(HEADER_SIZE, length as usize);
                let mut io = IoRequest::write(offset, length.into());
                if self.is_writethrough() {
                    io = io.flagged(IoFlags::FUA);
                }
                (io, Operation::Write)
            }
        };
        ParsedRequest {
            step: self.data(request, io),
            operation,
            bytes: length,
        }
    }

    /// Starts a request that is not a plain read or write, or has a fragmented header. The header is read again, and only
    /// this copy is used.
    #[inline(never)]
    fn begin_unusual(
        &mut self,
        request: &mut Request<Pending>,
        readable: u32,
        writable: u32,
    ) -> ParsedRequest {
        let header = request.chain.buffer.front::<HEADER_SIZE>();
        if let Some(transfer) = request::parse_plain(&header, readable, writable, &self.limits) {
            return self.begin_transfer(request, transfer);
        }
        let mut parsed = request::parse(&header, readable, writable, &self.info);
        if parsed.is_err() && self.adopt_present_info() {
            if let Some(transfer) = request::parse_plain(&header, readable, writable, &self.limits)
            {
                return self.begin_transfer(request, transfer);
            }
            parsed = request::parse(&header, readable, writable, &self.info);
        }
        if parsed.is_err()
            && let Some(info) = self.unbounded_info()
        {
            parsed = request::parse(&header, readable, writable, &info);
        }
        let parsed = match parsed {
            Ok(parsed) => parsed,
            Err(status) => {
                request.state.status = status;
                return ParsedRequest {
                    step: Step::Answer,
                    operation: Operation::Other,
                    bytes: 0,
                };
            }
        };
        let operation = operation(&parsed);
        let step = match parsed {
            request::Request::Io(io) if io.moves_data() => {
                return self.parse_long(request, io);
            }
            request::Request::Io(io) => self.data(request, io),
            request::Request::Nothing(_) => Step::Answer,
            request::Request::Ranges { kind, count } => {
                let ranges = Ranges {
                    kind,
                    next: 0,
                    count,
                    flushed: false,
                };
                request.chain.buffer.set_window(HEADER_SIZE, 0);
                self.next_range(request, ranges)
            }
            request::Request::GetId => {
                request.state.data_in = self.get_id(&request.chain, writable);
                Step::Answer
            }
        };
        ParsedRequest {
            step,
            operation,
            bytes: 0,
        }
    }

    /// Starts a transfer that exceeds one I/O with its first piece.
    #[cold]
    fn parse_long(&self, request: &mut Request<Pending>, io: IoRequest) -> ParsedRequest {
        // At most the length of the chain, which is a u32.
        let length = io.length as u32;
        let piece = length.min(PIECE);
        let way = match io.kind {
            IoKind::Read => Transfer::In,
            _ => Transfer::Out,
        };
        let start = self.begin_transfer(request, (way, io.offset, piece));
        let pending = &mut request.state;
        if way == Transfer::In {
            pending.data_in = length;
        }
        pending.rest = Some(Rest::Pieces(length - piece));
        ParsedRequest {
            bytes: length,
            ..start
        }
    }

    fn get_id(&self, chain: &Chain, room: u32) -> u32 {
        let mut id = [0; ID_SIZE];
        for (to, from) in id.iter_mut().zip(self.info.serial.bytes()) {
            *to = from;
        }
        let length = ID_SIZE.min(room as usize);
        chain
            .buffer
            .write_whole(chain.readable as usize, &id[..length]);
        length as u32
    }
}

/// Returns the next step of a long transfer.
fn next_piece(request: &mut Request<Pending>, rest: u32) -> Step {
    if rest == 0 {
        return Step::Answer;
    }
    let Request { job, chain, state } = request;
    // The rest is at the end of the data: before the status, or at the end of the chain's readable part.
    let end = match job.io.kind {
        IoKind::Read => chain.buffer.total_len() - 1,
        _ => chain.readable as usize,
    };
    let piece = rest.min(PIECE);
    chain.buffer.set_window(end - rest as usize, piece as usize);
    job.io.offset += job.io.length;
    job.io.length = piece.into();
    state.rest = Some(Rest::Pieces(rest - piece));
    Step::Data
}

fn operation(request: &request::Request) -> Operation {
    use request::Request;
    match request {
        Request::Io(io) => match io.kind {
            IoKind::Read => Operation::Read,
            IoKind::Write | IoKind::CompareAndWrite => Operation::Write,
            IoKind::Flush => Operation::Flush,
            IoKind::BlockStatus => Operation::Other,
            IoKind::Discard | IoKind::WriteZeroes => Operation::Discard,
            IoKind::ReplaceState | IoKind::ScsiCommand => Operation::Other,
        },
        Request::Nothing(Transfer::In) => Operation::Read,
        Request::Nothing(Transfer::Out) => Operation::Write,
        Request::Ranges { .. } => Operation::Discard,
        Request::GetId => Operation::Other,
    }
}

/// The only mapping from a failed I/O to a status.
fn status_of(outcome: IoOutcome) -> u8 {
    match outcome {
        Ok(()) => S_OK,
        Err(error) => match error.kind {
            IoErrorKind::Unsupported => S_UNSUPP,
            IoErrorKind::OutOfRange
            | IoErrorKind::ReadOnly
            | IoErrorKind::NoSpace
            | IoErrorKind::ReadMedium
            | IoErrorKind::WriteMedium
            | IoErrorKind::ClientMemory
            | IoErrorKind::Offline
            | IoErrorKind::Closed
            | IoErrorKind::Cancelled
            | IoErrorKind::Miscompare
            | IoErrorKind::TimedOut => S_IOERR,
        },
    }
}

impl Protocol for BlkQueue {
    type State = Pending;

    #[inline(always)]
    fn parse(
        &mut self,
        _io: &mut Io,
        request: &mut Request<Pending>,
        _tag: Tag,
    ) -> Result<ParsedRequest, Malformed> {
        let chain = &mut request.chain;
        if (chain.readable as usize) < HEADER_SIZE {
            return Err(Malformed("incomplete request header"));
        }
        if chain.writable == 0 {
            return Err(Malformed("no room for the status"));
        }
        let readable = chain.readable - HEADER_SIZE as u32;
        let writable = chain.writable - 1;
        chain.buffer.prefetch_last();
        let header = chain.buffer.contiguous_front::<HEADER_SIZE>();
        request.state = Pending::default();
        match header
            .and_then(|header| request::parse_plain(&header, readable, writable, &self.limits))
        {
            Some(transfer) => Ok(self.begin_transfer(request, transfer)),
            None => Ok(self.begin_unusual(request, readable, writable)),
        }
    }

    fn resume(
        &mut self,
        io: &mut Io,
        request: &mut Request<Pending>,
        outcome: IoOutcome,
        _scratch: Option<IoBuffer>,
    ) -> Step {
        self.resume_data(io, request, outcome)
    }

    #[inline(always)]
    fn resume_data(
        &mut self,
        _io: &mut Io,
        request: &mut Request<Pending>,
        outcome: IoOutcome,
    ) -> Step {
        let status = status_of(outcome);
        request.state.status = status;
        if request.state.rest.is_none() || status != S_OK {
            return Step::Answer;
        }
        self.next_io(request)
    }

    #[inline(always)]
    fn answer(&mut self, request: &mut Request<Pending>) -> Answer {
        // The status is the last byte of the chain, independent of descriptor boundaries.
        let Pending {
            status, data_in, ..
        } = request.state;
        request.chain.buffer.write_last(status);
        let good = status == S_OK;
        Answer {
            written: if good { data_in + 1 } else { 1 },
            good,
        }
    }

    fn refuse(&mut self, request: &mut Request<Pending>, space: ResponseSpace) -> u32 {
        if space.last {
            request.chain.buffer.write_last(S_IOERR);
        }
        u32::from(space.last)
    }

    fn close(&mut self, io: &mut Io) {
        io.close(self.disk);
    }
}
