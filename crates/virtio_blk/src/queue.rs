//! A request's way through its I/Os to its status.
//!
//! Owned by one worker. The cache mode is one relaxed load per write: a driver that turns write-back off, or that
//! cannot flush, gets every write durable before it is answered (virtio 1.3, 5.2.6.2).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use disk::{DiskInfo, IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use reactor::{DiskHandle, Io, Tag};
use timeline::Operation;
use virtio::{Answer, Malformed, Protocol, Start, Step};
use virtqueue::Chain;

use crate::request::{
    self, HEADER_SIZE, ID_SIZE, RANGE_SIZE, RangeKind, Request, S_IOERR, S_OK, S_UNSUPP, Transfer,
};

/// Virtio-blk's half of a queue.
pub(crate) struct BlkQueue {
    disk: DiskHandle,
    info: Arc<DiskInfo>,
    writethrough: Arc<AtomicBool>,
}

/// What a request remembers until it is answered.
#[derive(Default)]
pub(crate) struct Pending {
    status: u8,
    /// Bytes of data written to the driver's memory when it ends well.
    data_in: u32,
    /// Discard and write-zeroes: ranges that are not yet done.
    ranges: Option<Ranges>,
}

#[derive(Clone, Copy)]
struct Ranges {
    kind: RangeKind,
    next: u32,
    count: u32,
    /// In write-through mode a flush ends the request; has it been asked for?
    flushed: bool,
}

impl BlkQueue {
    pub(crate) fn new(
        disk: DiskHandle,
        info: Arc<DiskInfo>,
        writethrough: Arc<AtomicBool>,
    ) -> BlkQueue {
        BlkQueue {
            disk,
            info,
            writethrough,
        }
    }

    #[inline]
    fn is_writethrough(&self) -> bool {
        self.writethrough.load(Ordering::Relaxed)
    }

    /// The next range of a discard or write-zeroes request, or its end.
    fn next_range(&self, chain: &Chain, pending: &mut Pending) -> Step {
        let Some(mut ranges) = pending.ranges else {
            return Step::Answer;
        };
        while ranges.next < ranges.count {
            let mut bytes = [0; RANGE_SIZE];
            // Read once, checked, used: the driver may change it meanwhile.
            chain
                .buffer
                .read_whole(HEADER_SIZE + ranges.next as usize * RANGE_SIZE, &mut bytes);
            ranges.next += 1;
            pending.ranges = Some(ranges);
            match request::parse_range(ranges.kind, &bytes, &self.info) {
                Ok(Some(io)) => return Step::Data(self.disk, io),
                Ok(None) => {}
                Err(status) => {
                    pending.status = status;
                    return Step::Answer;
                }
            }
        }
        if self.is_writethrough() && !ranges.flushed {
            pending.ranges = Some(Ranges {
                flushed: true,
                ..ranges
            });
            return Step::Data(self.disk, IoRequest::flush());
        }
        Step::Answer
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

fn operation(request: &Request) -> Operation {
    match request {
        Request::Io(io) => match io.kind {
            IoKind::Read => Operation::Read,
            IoKind::Write => Operation::Write,
            IoKind::Flush => Operation::Flush,
            IoKind::Discard | IoKind::WriteZeroes => Operation::Discard,
        },
        Request::Nothing(Transfer::In) => Operation::Read,
        Request::Nothing(Transfer::Out) => Operation::Write,
        Request::Ranges { .. } => Operation::Discard,
        Request::GetId => Operation::Other,
    }
}

/// The one place where a failed I/O becomes a status.
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
            | IoErrorKind::Cancelled => S_IOERR,
        },
    }
}

impl Protocol for BlkQueue {
    type Request = Pending;

    #[inline]
    fn begin(
        &mut self,
        _io: &mut Io,
        chain: &mut Chain,
        pending: &mut Pending,
        _tag: Tag,
    ) -> Result<Start, Malformed> {
        if (chain.readable as usize) < HEADER_SIZE {
            return Err(Malformed("request has no whole header"));
        }
        if chain.writable == 0 {
            return Err(Malformed("request has no room for its status"));
        }
        let header = chain.buffer.front::<HEADER_SIZE>();
        let readable = chain.readable - HEADER_SIZE as u32;
        let writable = chain.writable - 1;
        *pending = Pending::default();
        let request = match request::parse(&header, readable, writable, &self.info) {
            Ok(request) => request,
            Err(status) => {
                pending.status = status;
                return Ok(Start {
                    step: Step::Answer,
                    operation: Operation::Other,
                    bytes: 0,
                });
            }
        };
        let operation = operation(&request);
        let mut bytes = 0;
        let step = match request {
            Request::Io(mut io) => {
                match io.kind {
                    IoKind::Read => {
                        chain
                            .buffer
                            .set_window(chain.readable as usize, writable as usize);
                        pending.data_in = writable;
                        bytes = writable;
                    }
                    IoKind::Write => {
                        chain.buffer.set_window(HEADER_SIZE, readable as usize);
                        bytes = readable;
                        if self.is_writethrough() {
                            io = io.flagged(IoFlags::FUA);
                        }
                    }
                    IoKind::Flush | IoKind::Discard | IoKind::WriteZeroes => {}
                }
                Step::Data(self.disk, io)
            }
            Request::Nothing(_) => Step::Answer,
            Request::Ranges { kind, count } => {
                pending.ranges = Some(Ranges {
                    kind,
                    next: 0,
                    count,
                    flushed: false,
                });
                chain.buffer.set_window(HEADER_SIZE, 0);
                self.next_range(chain, pending)
            }
            Request::GetId => {
                pending.data_in = self.get_id(chain, writable);
                Step::Answer
            }
        };
        Ok(Start {
            step,
            operation,
            bytes,
        })
    }

    #[inline]
    fn resume(
        &mut self,
        _io: &mut Io,
        chain: &mut Chain,
        pending: &mut Pending,
        outcome: IoOutcome,
        _scratch: Option<IoBuffer>,
    ) -> Step {
        pending.status = status_of(outcome);
        if pending.ranges.is_none() || pending.status != S_OK {
            return Step::Answer;
        }
        self.next_range(chain, pending)
    }

    #[inline]
    fn answer(&mut self, chain: &mut Chain, pending: &mut Pending) -> Answer {
        // The status is the last byte of the whole chain, wherever its descriptors end.
        chain.buffer.write_last(pending.status);
        let good = pending.status == S_OK;
        Answer {
            written: if good { pending.data_in + 1 } else { 1 },
            good,
        }
    }

    fn close(&mut self, io: &mut Io) {
        io.close(self.disk);
    }
}
