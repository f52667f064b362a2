//! Measurements of requests: per disk if there are several, and complete records of the slowest requests.
//!
//! While all requests in flight address one disk, this code is not called, and a request costs one comparison with its predecessor
//! (`Protocol::disk_changed`). Otherwise each slot stores its partition. Tests: `crates/vhost_user/tests/scsi.rs`.

use latency::{DiskNumber, Part, SlowRequest, Stage, Stamps};
use reactor::Io;

use super::Queue;
use crate::protocol::Protocol;

/// Assignment of requests to the partitions of their disks.
#[derive(Default)]
pub(super) struct Sorting {
    /// Requests in flight address several disks.
    pub(super) is_mixed: bool,
    /// Partition of all measurements, unless `is_mixed` is set.
    pub(super) part: Part,
    /// Number of batches sorted by disk (wraps).
    batches_sorted: u8,
}

impl<P: Protocol> Queue<P> {
    /// Assigns each request of the batch to the partition of its disk. Called when the batch may address another disk than the requests in
    /// flight.
    #[inline(never)]
    pub(super) fn sort_by_disk(&mut self) {
        let others = self.slots.in_flight() > self.batch.slots.len();
        if others && !self.sorting.is_mixed {
            let before = self.sorting.part;
            self.slots.active().for_each(|(_, slot)| slot.part = before);
        }
        let (mut first, mut alike, mut again) = (None, true, false);
        for index in &self.batch.slots {
            let slot = self.slots.get(*index);
            let disk = self.protocol.disk_number(&slot.request);
            let name = || self.protocol.disk_name(disk);
            slot.part = self
                .measurement
                .timeline
                .part_of(disk, slot.operation, name);
            // Its first I/O will allocate a partition.
            again |= slot.part == Part::REST && disk != DiskNumber::NONE;
            alike &= *first.get_or_insert(slot.part) == slot.part;
        }
        let part = first.unwrap_or(self.sorting.part);
        let mut is_uniform = !others || (!self.sorting.is_mixed && part == self.sorting.part);
        self.sorting.batches_sorted = self.sorting.batches_sorted.wrapping_add(1);
        if !is_uniform && alike && self.sorting.batches_sorted.is_multiple_of(16) {
            is_uniform = self.slots.active().all(|(_, slot)| slot.part == part);
        }
        self.sorting.is_mixed = !(alike && is_uniform);
        if again || self.sorting.is_mixed {
            self.protocol.forget_disk();
        }
        if !self.sorting.is_mixed {
            self.sorting.part = part;
            self.measurement.timeline.select(part);
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

    /// Notes the requests that were just answered. Their slots still hold the data.
    #[cold]
    pub(super) fn describe_answered(&mut self) {
        for index in &self.batch.done {
            let slot = self.slots.get(*index);
            let mut stamps = Stamps::default();
            if slot.was_pending {
                for (stage, stamp) in [
                    (Stage::Noticed, slot.noticed),
                    (Stage::Popped, slot.popped),
                    (Stage::Parsed, slot.parsed),
                    (Stage::Submitted, slot.submitted),
                    (Stage::Reaped, self.measurement.reaped),
                ] {
                    stamps.mark(stage, stamp);
                }
            } else {
                stamps = self.measurement.shared_stamps();
            }
            let request = SlowRequest {
                operation: slot.operation,
                tag: u64::from(slot.request.chain.id),
                unit: self.protocol.unit(&slot.request),
                offset: slot.offset,
                length: u64::from(slot.bytes),
                stamps,
            };
            self.measurement.note_slow(request);
        }
    }
}
