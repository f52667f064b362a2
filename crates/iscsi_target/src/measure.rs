//! Measurements of commands: stamps of solicited data, counters, and complete records of the slowest commands.

use latency::{Clock, Operation, PartCounts, SlowRequest, Stage, Stamp, Stamps, UnitAddress};
use reactor::Io;
use scsi::{Lun, LunAddress, Response, Status};

use crate::connection::Connection;

/// Maximum number of slow candidates per iteration.
const SLOW_MAX: usize = 64;

impl Connection {
    /// Records the arrival of a command after its solicited data is complete and its I/O is submitted.
    pub(crate) fn data_came(&mut self, index: u32, submitted: Stamp) {
        let slot = self.slots.get(index);
        slot.asked = false;
        for (stage, stamp) in [
            (Stage::Awaited, slot.awaited),
            (Stage::Received, slot.received),
            (Stage::Submitted, submitted),
        ] {
            let before = slot.stamps.at(Stage::Parsed);
            slot.stamps.mark(stage, stamp.max(before));
        }
        let (operation, stamps, part) = (slot.operation, slot.stamps, slot.part);
        if let Some(timeline) = &mut self.timeline {
            timeline.select(part);
            timeline.record_arrival(operation.unwrap_or(Operation::Other), &stamps);
        }
    }

    /// Counts the commands of one batch and one disk that were submitted. Synchronous ones had completed by `reaped`.
    #[inline]
    pub(crate) fn count_submitted(&mut self, counts: &PartCounts, stamps: &Stamps, reaped: Stamp) {
        let Some(timeline) = &mut self.timeline else {
            return;
        };
        if counts.pending != [0; Operation::COUNT] {
            timeline.select(counts.part);
            timeline.record_arrivals(&counts.pending, stamps);
        }
        if counts.at_once != [0; Operation::COUNT] {
            let mut stamps = *stamps;
            stamps.mark(Stage::Reaped, reaped);
            self.iterations.push((stamps, counts.at_once, counts.part));
        }
    }

    /// Records the arrival of data for a command; `whole`: no more data is outstanding.
    pub(crate) fn data_arrived(&mut self, index: u32, whole: bool) {
        let (at, id) = (self.heard, probes::id(self.probed, index));
        let slot = self.slots.get(index);
        if !slot.asked {
            return;
        }
        if slot.awaited == Stamp::default() {
            slot.awaited = at;
            probes::awaited(id);
        }
        slot.received = at;
        if whole {
            probes::received(id);
        }
    }

    /// Returns the time, or the default stamp if nothing is recorded.
    pub(crate) fn stamp(&self, io: &Io) -> Stamp {
        match &self.timeline {
            Some(timeline) if timeline.is_recording() => io.now(),
            _ => Stamp::default(),
        }
    }

    /// Counts a command that is being answered.
    pub(crate) fn count(&mut self, index: u32, response: &Response) {
        let Some(timeline) = &mut self.timeline else {
            return;
        };
        let slot = self.slots.get(index);
        let operation = slot.operation.unwrap_or(Operation::Other);
        let good = matches!(response.status, Status::Good | Status::ConditionMet);
        timeline.select(slot.part);
        timeline.count(operation, u64::from(slot.bytes), good);
        let (noticed, submitted) = (
            slot.stamps.at(Stage::Noticed),
            slot.stamps.at(Stage::Submitted),
        );
        if slot.pended {
            timeline.note_reaped(operation, noticed, submitted);
        }
        let id = probes::id(self.probed, index);
        probes::answered(|| std::iter::once((id, good)));
        probes::notified(|| std::iter::once(id));
        // The slot is about to be released. The factor covers the time until the response is sent.
        let latest = self.reaped.max(submitted);
        if timeline.may_be_slow(2 * latest.since(noticed)) && self.slow.len() < SLOW_MAX {
            let mut stamps = slot.stamps;
            stamps.mark(Stage::Reaped, latest);
            let task = slot.iscsi.and_then(|task| self.iscsi.command(task));
            self.slow.push(SlowRequest {
                operation,
                tag: task.map_or(0, |command| u64::from(command.itt)),
                unit: task.and_then(|command| {
                    let LunAddress::Unit(lun) = Lun(command.lun).address() else {
                        return None;
                    };
                    Some(UnitAddress { target: 0, lun })
                }),
                offset: slot.offset,
                length: u64::from(slot.bytes),
                stamps,
            });
        }
    }

    /// Hop 7: records the measurements of this iteration.
    pub(crate) fn record(&mut self, clock: &Clock, answered: Stamp, notified: Stamp) {
        let Some(timeline) = &mut self.timeline else {
            return;
        };
        for (mut stamps, counts, part) in self.iterations.drain(..) {
            timeline.select(part);
            stamps.mark(Stage::Answered, answered);
            stamps.mark(Stage::Notified, notified);
            timeline.record_iteration(&counts, &stamps);
        }
        // Without a completion in this iteration, the I/Os have completed synchronously.
        if self.reaped == Stamp::default() {
            self.reaped = answered;
        }
        timeline.record_answered(self.reaped, answered);
        timeline.record_notified(notified);
        if timeline.take_slow_seen() {
            for slow in &mut self.slow {
                slow.stamps.mark(Stage::Answered, answered);
                slow.stamps.mark(Stage::Notified, notified);
                timeline.keep_slow(clock, *slow);
            }
        }
        self.slow.clear();
        self.reaped = Stamp::default();
        let in_flight = self.slots.busy() as u64;
        timeline.counters().in_flight.set(in_flight);
    }
}
