//! What commands leave behind for the tables: stamps of data that had to be asked for, counters, the slowest whole.

use latency::{Clock, Operation, PartCounts, SlowRequest, Stage, Stamp, Stamps, UnitAddress};
use reactor::Io;
use scsi::{Lun, LunAddress, Response, Status};

use crate::connection::Connection;

/// Most commands of one iteration that are looked at as possibly slow.
const SLOW_MAX: usize = 64;

impl Connection {
    /// All the data that a command's client was asked for is there, and its I/O has been submitted.
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

    /// Commands of one batch and one disk have been given to it; those that ended at once have by `reaped`.
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

    /// Data has come for a command; `whole`: nothing more of it is waited for.
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

    /// The time, where anybody wants to know it.
    pub(crate) fn stamp(&self, io: &Io) -> Stamp {
        match &self.timeline {
            Some(timeline) if timeline.is_recording() => io.now(),
            _ => Stamp::default(),
        }
    }

    /// A command is being answered.
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
        // Its slot is about to go. Only what is answered and sent makes it as slow as that.
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

    /// Hop 7 is over: what this iteration measured.
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
        // Without a completion in this iteration the I/Os have ended at once, just now.
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
