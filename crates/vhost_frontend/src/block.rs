//! Requests to a virtio-blk device (virtio 1.3, 5.2.6), many in flight.
//!
//! A request uses the memory of a slot: take a slot, fill its data, submit, publish, reap, release.

use std::time::Duration;

use crate::layout::Layout;
use crate::memory::Area;
use crate::queue::{Queue, QueueOptions};
use crate::session::FrontEnd;
use crate::{Error, Result};

/// Request types.
pub mod kind {
    #![allow(missing_docs)]
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
}

/// Request status values.
pub mod status {
    #![allow(missing_docs)]
    pub const OK: u8 = 0;
    pub const IOERR: u8 = 1;
    pub const UNSUPP: u8 = 2;
    /// Initial value, written by the front end: the device has written no status.
    pub const NONE: u8 = 0xff;
}

const HEADER: usize = 16;
const PAGE: usize = 4096;
/// Size of the separate area for a header and a status, and the offset of the status.
const SMALL: usize = 64;
const SMALL_STATUS: usize = 32;
/// Timeout of the blocking calls.
const LIMIT: Duration = Duration::from_secs(30);

/// One range of a discard or write-zeroes request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First sector of 512 bytes.
    pub sector: u64,
    /// Number of sectors.
    pub sectors: u32,
    /// Bit 0: unmap.
    pub flags: u32,
}

impl Range {
    /// Returns the wire format.
    pub fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.sector.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.sectors.to_le_bytes());
        bytes[12..].copy_from_slice(&self.flags.to_le_bytes());
        bytes
    }
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkDone {
    /// Slot to release.
    pub slot: u16,
    /// Status.
    pub status: u8,
    /// Number of bytes written according to the device.
    pub written: u32,
}

/// A queue of a virtio-blk device.
pub struct BlkQueue {
    queue: Queue,
    layout: Layout,
    /// Headers and statuses of requests in the default element layout.
    small: Area,
    /// Per slot: a page that ends with the header, then the data with room for a status after it.
    large: Area,
    stride: usize,
    /// Status of each slot in guest memory.
    statuses: Vec<Area>,
    free: Vec<u16>,
    depth: u16,
    readable: Vec<(u64, u32)>,
    writable: Vec<(u64, u32)>,
}

impl BlkQueue {
    /// Starts queue `index` with `depth` slots for requests of up to `max_io` bytes.
    pub fn start(
        front_end: &mut FrontEnd,
        index: u16,
        options: &QueueOptions,
        depth: u16,
        max_io: usize,
        layout: Layout,
    ) -> Result<BlkQueue> {
        let queue = front_end.start_queue(index, options)?;
        BlkQueue::with_queue(front_end, queue, depth, max_io, layout)
    }

    /// Uses an existing queue, otherwise like [`BlkQueue::start`].
    pub fn with_queue(
        front_end: &mut FrontEnd,
        queue: Queue,
        depth: u16,
        max_io: usize,
        layout: Layout,
    ) -> Result<BlkQueue> {
        let stride = PAGE + (max_io + 1).next_multiple_of(PAGE);
        let small = front_end.allocate(SMALL * usize::from(depth), SMALL as u64)?;
        let large = front_end.allocate(stride * usize::from(depth), PAGE as u64)?;
        Ok(BlkQueue {
            queue,
            layout,
            statuses: vec![small.part(0, 0); usize::from(depth)],
            small,
            large,
            stride,
            free: (0..depth).rev().collect(),
            depth,
            readable: Vec::new(),
            writable: Vec::new(),
        })
    }

    /// Returns the underlying queue.
    pub fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }

    /// Sets the descriptor layout of further requests.
    pub fn set_layout(&mut self, layout: Layout) {
        self.layout = layout;
    }

    /// Returns the number of slots.
    pub fn depth(&self) -> u16 {
        self.depth
    }

    /// Returns the number of requests that are in flight or taken.
    pub fn in_flight(&self) -> u16 {
        self.depth - self.free.len() as u16
    }

    /// Takes a free slot.
    #[inline]
    pub fn take(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Releases a slot.
    #[inline]
    pub fn release(&mut self, slot: u16) {
        self.free.push(slot);
    }

    /// Returns the data area of a slot.
    pub fn data(&self, slot: u16) -> Area {
        let at = usize::from(slot) * self.stride + PAGE;
        self.large.part(at, self.stride - PAGE)
    }

    /// Returns a slot's request header in guest memory, unless headers and data are contiguous.
    pub fn header(&self, slot: u16) -> Area {
        self.small.part(usize::from(slot) * SMALL, HEADER)
    }

    /// Adds a request: the device reads `out` bytes of the slot's data and writes `into` bytes. Returns false if the ring has no room;
    /// the slot stays taken.
    pub fn submit(&mut self, slot: u16, kind: u32, sector: u64, out: usize, into: usize) -> bool {
        let data = usize::from(slot) * self.stride + PAGE;
        let (header, status) = if self.layout.is_contiguous() {
            (
                self.large.part(data - HEADER, HEADER),
                self.large.part(data + out.max(into), 1),
            )
        } else {
            let small = usize::from(slot) * SMALL;
            (self.header(slot), self.small.part(small + SMALL_STATUS, 1))
        };
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        header.write(0, &bytes);
        status.write(0, &[status::NONE]);
        let address = self.large.address + data as u64;
        let layout = self.layout;
        self.readable.clear();
        layout.split(
            &[header.element(), (address, out as u32)],
            &mut self.readable,
        );
        self.writable.clear();
        layout.split(
            &[(address, into as u32), status.element()],
            &mut self.writable,
        );
        self.statuses[usize::from(slot)] = status;
        self.queue
            .add(&self.readable, &self.writable, u64::from(slot))
    }

    /// Makes submitted requests visible to the device.
    #[inline]
    pub fn publish(&mut self) {
        self.queue.publish();
    }

    /// Returns a completed request.
    pub fn reap(&mut self) -> Option<BlkDone> {
        let used = self.queue.pop_used()?;
        let slot = used.token as u16;
        let mut status = [0];
        self.statuses[usize::from(slot)].read(0, &mut status);
        Some(BlkDone {
            slot,
            status: status[0],
            written: used.written,
        })
    }

    /// Waits for a completed request.
    pub fn wait(&mut self) -> Result<BlkDone> {
        self.wait_for(LIMIT)
    }

    /// Waits up to `limit` for a completed request.
    pub fn wait_for(&mut self, limit: Duration) -> Result<BlkDone> {
        loop {
            if let Some(done) = self.reap() {
                return Ok(done);
            }
            self.queue.wait(limit)?;
        }
    }

    /// Runs one request, with no other request in flight.
    fn run_request(
        &mut self,
        kind: u32,
        sector: u64,
        out: &[u8],
        into: &mut [u8],
    ) -> Result<BlkDone> {
        let Some(slot) = self.take() else {
            return Err(Error::Wrong("all slots are taken".into()));
        };
        let data = self.data(slot);
        // Bytes that the device does not write keep their value; a request transfers data in one direction only.
        data.write(0, into);
        data.write(0, out);
        if !self.submit(slot, kind, sector, out.len(), into.len()) {
            return Err(Error::Wrong("the ring has no room".into()));
        }
        self.publish();
        let done = self.wait()?;
        if done.slot != slot {
            return Err(Error::Wrong("another request completed".into()));
        }
        data.read(0, into);
        self.release(slot);
        let right = 1 + if done.status == status::OK {
            into.len()
        } else {
            0
        };
        if done.written as usize != right {
            return Err(Error::Wrong(format!(
                "kind {kind} status {}: {} bytes written, not {right}",
                done.status, done.written
            )));
        }
        Ok(done)
    }

    /// Reads from a byte offset. Returns the status.
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<u8> {
        Ok(self.run_request(kind::IN, offset >> 9, &[], into)?.status)
    }

    /// Writes to a byte offset. Returns the status.
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Result<u8> {
        Ok(self
            .run_request(kind::OUT, offset >> 9, from, &mut [])?
            .status)
    }

    /// Flushes all written data. Returns the status.
    pub fn flush(&mut self) -> Result<u8> {
        Ok(self.run_request(kind::FLUSH, 0, &[], &mut [])?.status)
    }

    /// Discards ranges. Returns the status.
    pub fn discard(&mut self, ranges: &[Range]) -> Result<u8> {
        self.ranges(kind::DISCARD, ranges)
    }

    /// Writes zeroes to ranges. Returns the status.
    pub fn write_zeroes(&mut self, ranges: &[Range]) -> Result<u8> {
        self.ranges(kind::WRITE_ZEROES, ranges)
    }

    fn ranges(&mut self, kind: u32, ranges: &[Range]) -> Result<u8> {
        let bytes: Vec<u8> = ranges.iter().flat_map(Range::bytes).collect();
        Ok(self.run_request(kind, 0, &bytes, &mut [])?.status)
    }

    /// Requests the serial number. Returns it with the status.
    pub fn get_id(&mut self) -> Result<(u8, [u8; 20])> {
        let mut id = [0; 20];
        let done = self.run_request(kind::GET_ID, 0, &[], &mut id)?;
        Ok((done.status, id))
    }
}
