//! Measurements of requests: per disk if there are several, and complete records of the slowest requests.
//!
//! While all requests in flight address one disk, this code is not called, and a request costs one comparison with its predecessor
//! (`Protocol::disk_changed`). Otherwise each slot stores its partition. Tests: `crates/vhost_user/tests/scsi.rs`.

use latency::{DiskNumber, Part, SlowRequest, Stage, Stamp, Stamps};
use reactor::Io;
use request_engine::Measurement;

use super::Queue;
use crate::protocol::Protocol;

/// Measurements of a queue.
pub(super) struct QueueMeasurement {
    pub(super) requests: Measurement,
    /// Requests in flight address several disks.
    pub(super) is_mixed: bool,
    /// Partition of all measurements, unless `is_mixed` is set.
    pub(super) part: Part,
    /// Number of batches sorted by disk (wraps).
    batches_sorted: u8,
    /// Start of the last iteration that had requests.
    pub(super) noticed: Stamp,
}

impl QueueMeasurement {
    pub(super) fn new(requests: Measurement) -> QueueMeasurement {
        QueueMeasurement {
            requests,
            is_mixed: false,
            part: Part::REST,
            batches_sorted: 0,
            noticed: Stamp::default(),
        }
    }
}

impl<P: Protocol> Queue<P> {
    /// Assigns each request of the batch to the partition of its disk. Called when the batch may address another disk than the requests in
    /// flight.
    #[inline(never)]
    pub(super) fn sort_by_disk(&mut self) {
        let others = self.slots.in_flight() > self.batch.slots.len();
        if others && !self.measurement.is_mixed {
            let before = self.measurement.part;
            self.slots.active().for_each(|(_, slot)| slot.part = before);
        }
        let (mut first, mut alike, mut again) = (None, true, false);
        for index in &self.batch.slots {
            let slot = self.slots.get(*index);
            let disk = self.protocol.disk_number(&slot.request);
            let name = || self.protocol.disk_name(disk);
            slot.part = self
                .measurement
                .requests
                .timeline
                .part_of(disk, slot.operation, name);
            // Its first I/O will allocate a partition.
            again |= slot.part == Part::REST && disk != DiskNumber::NONE;
            alike &= *first.get_or_insert(slot.part) == slot.part;
        }
        let part = first.unwrap_or(self.measurement.part);
        let mut is_uniform =
            !others || (!self.measurement.is_mixed && part == self.measurement.part);
        self.measurement.batches_sorted = self.measurement.batches_sorted.wrapping_add(1);
        if !is_uniform && alike && self.measurement.batches_sorted.is_multiple_of(16) {
            is_uniform = self.slots.active().all(|(_, slot)| slot.part == part);
        }
        self.measurement.is_mixed = !(alike && is_uniform);
        if again || self.measurement.is_mixed {
            self.protocol.forget_disk();
        }
        if !self.measurement.is_mixed {
            self.measurement.part = part;
            self.measurement.requests.timeline.select(part);
        }
    }

    #[inline(never)]
    pub(super) fn submit_mixed(&mut self, io: &mut Io, stamps: Stamps) {
        self.submit_batch::<true>(io, stamps);
    }

    #[inline(never)]
    pub(super) fn answer_mixed(&mut self) {
        self.answer_done::<true, false>();
    }

    /// Records the slow requests among those just answered. Their slots still hold the data.
    #[cold]
    pub(super) fn record_slow(&mut self, io: &Io, answered: Stamp, notified: Stamp) {
        for index in &self.batch.done {
            let slot = self.slots.get(*index);
            let mut stamps = Stamps::default();
            if slot.was_pending {
                for (stage, stamp) in [
                    (Stage::Noticed, slot.noticed),
                    (Stage::Popped, slot.popped),
                    (Stage::Parsed, slot.parsed),
                    (Stage::Submitted, slot.submitted),
                    (Stage::Reaped, self.measurement.requests.reaped),
                ] {
                    stamps.mark(stage, stamp);
                }
            } else {
                stamps = self.measurement.requests.shared_stamps();
            }
            let request = SlowRequest {
                operation: slot.operation,
                tag: u64::from(slot.request.chain.id),
                unit: self.protocol.unit(&slot.request),
                offset: slot.offset,
                length: u64::from(slot.bytes),
                stamps,
            };
            self.measurement
                .requests
                .record_slow(io.clock(), request, answered, notified);
        }
    }
}
