//! Requests to a virtio-scsi device (virtio 1.3, 5.6.6.1), many in flight.

use std::time::Duration;

use crate::layout::Layout;
use crate::memory::Area;
use crate::queue::{Queue, QueueOptions};
use crate::session::FrontEnd;
use crate::{Error, Result};

/// lun, id, task_attr, prio, crn, cdb.
const REQUEST: usize = 8 + 8 + 3 + 32;
/// sense_len, residual, status_qualifier, status, response, sense.
const RESPONSE: usize = 4 + 4 + 2 + 1 + 1 + 96;
const PAGE: usize = 4096;
const SMALL: usize = 192;
const SMALL_RESPONSE: usize = 64;
const LIMIT: Duration = Duration::from_secs(30);

/// Task attributes (5.6.6.1).
pub mod attribute {
    #![allow(missing_docs)]
    pub const SIMPLE: u8 = 0;
    pub const ORDERED: u8 = 1;
    pub const HEAD_OF_QUEUE: u8 = 2;
    pub const ACA: u8 = 3;
}

/// A request to a logical unit.
#[derive(Clone, Copy, Debug)]
pub struct ScsiRequest<'a> {
    /// Target number.
    pub target: u8,
    /// Logical unit number.
    pub lun: u16,
    /// Command tag.
    pub tag: u64,
    /// CDB, up to 32 bytes.
    pub cdb: &'a [u8],
}

/// A completed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScsiDone {
    /// Slot to release.
    pub slot: u16,
    /// virtio-scsi response; `VIRTIO_SCSI_S_OK` is 0.
    pub response: u8,
    /// SCSI status.
    pub status: u8,
    /// Number of bytes that were not transferred.
    pub residual: u32,
    /// Sense data.
    pub sense: Vec<u8>,
    /// Number of bytes written according to the device.
    pub written: u32,
}

/// A request queue of a virtio-scsi device.
pub struct ScsiQueue {
    queue: Queue,
    layout: Layout,
    small: Area,
    /// Per slot: a page that ends with the request, data-out, a page that ends with the response, data-in.
    large: Area,
    slot_bytes: usize,
    responses: Vec<Area>,
    attribute: u8,
    free: Vec<u16>,
    readable: Vec<(u64, u32)>,
    writable: Vec<(u64, u32)>,
}

impl ScsiQueue {
    /// Starts queue `index` (the first request queue is 2) with `depth` slots for requests of up to `max_io` bytes.
    pub fn start(
        front_end: &mut FrontEnd,
        index: u16,
        options: &QueueOptions,
        depth: u16,
        max_io: usize,
        layout: Layout,
    ) -> Result<ScsiQueue> {
        let queue = front_end.start_queue(index, options)?;
        let slot_bytes = PAGE + max_io.next_multiple_of(PAGE);
        let small = front_end.allocate(SMALL * usize::from(depth), 64)?;
        let large = front_end.allocate(2 * slot_bytes * usize::from(depth), PAGE as u64)?;
        Ok(ScsiQueue {
            queue,
            layout,
            responses: vec![small.part(0, 0); usize::from(depth)],
            small,
            large,
            slot_bytes,
            attribute: attribute::SIMPLE,
            free: (0..depth).rev().collect(),
            readable: Vec::new(),
            writable: Vec::new(),
        })
    }

    /// Returns the underlying queue.
    pub fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }

    /// Sets the task attribute of further requests.
    pub fn set_attribute(&mut self, attribute: u8) {
        self.attribute = attribute;
    }

    /// Returns a slot's request header in guest memory, unless headers and data are contiguous.
    pub fn header(&self, slot: u16) -> Area {
        self.small.part(usize::from(slot) * SMALL, REQUEST)
    }

    /// Takes a free slot.
    pub fn take(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Releases a slot.
    pub fn release(&mut self, slot: u16) {
        self.free.push(slot);
    }

    /// Returns the data-out area of a slot.
    pub fn data_out(&self, slot: u16) -> Area {
        self.large.part(
            usize::from(slot) * 2 * self.slot_bytes + PAGE,
            self.slot_bytes - PAGE,
        )
    }

    /// Returns the data-in area of a slot.
    pub fn data_in(&self, slot: u16) -> Area {
        let at = (usize::from(slot) * 2 + 1) * self.slot_bytes + PAGE;
        self.large.part(at, self.slot_bytes - PAGE)
    }

    /// Adds a request that transfers `out` bytes to the device and `into` bytes from it. Returns false if the ring has no room.
    pub fn submit(
        &mut self,
        slot: u16,
        command: &ScsiRequest<'_>,
        out: usize,
        into: usize,
    ) -> bool {
        let (data_out, data_in) = (self.data_out(slot), self.data_in(slot));
        let (request, response) = if self.layout.is_contiguous() {
            let first = usize::from(slot) * 2 * self.slot_bytes + PAGE;
            (
                self.large.part(first - REQUEST, REQUEST),
                self.large
                    .part(first + self.slot_bytes - RESPONSE, RESPONSE),
            )
        } else {
            let at = usize::from(slot) * SMALL;
            (
                self.header(slot),
                self.small.part(at + SMALL_RESPONSE, RESPONSE),
            )
        };
        let mut bytes = [0; REQUEST];
        // 5.6.6.1: 1, target, then a single-level LUN.
        let lun = command.lun.to_be_bytes();
        bytes[..4].copy_from_slice(&[1, command.target, lun[0] | 0x40, lun[1]]);
        bytes[8..16].copy_from_slice(&command.tag.to_le_bytes());
        let cdb = command.cdb.len().min(32);
        bytes[16] = self.attribute;
        bytes[19..19 + cdb].copy_from_slice(&command.cdb[..cdb]);
        request.write(0, &bytes);
        response.write(0, &[0xff; RESPONSE]);
        self.readable.clear();
        let parts = [request.element(), data_out.part(0, out).element()];
        self.layout.split(&parts, &mut self.readable);
        self.writable.clear();
        let parts = [response.element(), data_in.part(0, into).element()];
        self.layout.split(&parts, &mut self.writable);
        self.responses[usize::from(slot)] = response;
        self.queue
            .add(&self.readable, &self.writable, u64::from(slot))
    }

    /// Makes submitted requests visible to the device.
    pub fn publish(&mut self) {
        self.queue.publish();
    }

    /// Returns a completed request.
    pub fn reap(&mut self) -> Option<ScsiDone> {
        let used = self.queue.pop_used()?;
        let slot = used.token as u16;
        let mut bytes = [0; RESPONSE];
        self.responses[usize::from(slot)].read(0, &mut bytes);
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let sense = bytes[12..].get(..word(0) as usize).unwrap_or(&bytes[12..]);
        Some(ScsiDone {
            slot,
            response: bytes[11],
            status: bytes[10],
            residual: word(4),
            sense: sense.to_vec(),
            written: used.written,
        })
    }

    /// Waits for a completed request.
    pub fn wait(&mut self) -> Result<ScsiDone> {
        loop {
            if let Some(done) = self.reap() {
                return Ok(done);
            }
            self.queue.wait(LIMIT)?;
        }
    }

    /// Runs one command, with no other command in flight.
    pub fn run(
        &mut self,
        command: &ScsiRequest<'_>,
        out: &[u8],
        into: &mut [u8],
    ) -> Result<ScsiDone> {
        let Some(slot) = self.take() else {
            return Err(Error::Wrong("all slots are taken".into()));
        };
        self.data_out(slot).write(0, out);
        // Bytes that the device does not write keep their value.
        self.data_in(slot).write(0, into);
        if !self.submit(slot, command, out.len(), into.len()) {
            return Err(Error::Wrong("the ring has no room".into()));
        }
        self.publish();
        let done = self.wait()?;
        self.data_in(slot).read(0, into);
        self.release(slot);
        Ok(done)
    }
}
