//! Measurements of commands: stamps of solicited data, counters, and complete records of the slowest commands.

use latency::{Clock, Operation, SlowRequest, Stage, Stamp, UnitAddress};
use request_engine::Measurement;
use scsi::{Lun, LunAddress, Response, Status};

use crate::connection::Connection;
use crate::slots::Arrival;

/// Maximum number of slow candidates per iteration.
const SLOW_MAX: usize = 64;

/// Measurements of a connection.
pub(crate) struct CommandMeasurement {
    pub requests: Measurement,
    /// Time at which the current completion was noticed.
    pub noticed: Stamp,
    /// Candidates of this iteration for the slowest commands.
    slow: Vec<SlowRequest>,
}

impl CommandMeasurement {
    pub fn new(requests: Measurement) -> CommandMeasurement {
        CommandMeasurement {
            requests,
            noticed: Stamp::default(),
            slow: Vec::new(),
        }
    }
}

impl Connection {
    /// Records the arrival of a command after its solicited data is complete and its I/O is submitted.
    pub(crate) fn record_data_complete(&mut self, index: u32, submitted: Stamp) {
        let slot = self.slots.get(index);
        let arrival = std::mem::replace(&mut slot.arrival, Arrival::Pending);
        let Arrival::Solicited([awaited, received]) = arrival else {
            return;
        };
        for (stage, stamp) in [
            (Stage::Awaited, awaited),
            (Stage::Received, received),
            (Stage::Submitted, submitted),
        ] {
            let before = slot.stamps.at(Stage::Parsed);
            slot.stamps.mark(stage, stamp.max(before));
        }
        let (operation, stamps, part) = (slot.operation, slot.stamps, slot.part);
        let timeline = &mut self.measurement.requests.timeline;
        timeline.select(part);
        timeline.record_arrival(operation.unwrap_or(Operation::Other), &stamps);
    }

    /// Records the arrival of data for a command; `whole`: no more data is outstanding.
    pub(crate) fn data_arrived(&mut self, index: u32, whole: bool) {
        let (at, id) = (
            self.measurement.noticed,
            self.measurement.requests.probe_id(index),
        );
        let slot = self.slots.get(index);
        let Arrival::Solicited([awaited, received]) = &mut slot.arrival else {
            return;
        };
        if *awaited == Stamp::default() {
            *awaited = at;
            probes::awaited(id);
        }
        *received = at;
        if whole {
            probes::received(id);
        }
    }

    /// Counts a command that is being answered.
    pub(crate) fn count(&mut self, index: u32, response: &Response) {
        let CommandMeasurement { requests, slow, .. } = &mut self.measurement;
        let slot = self.slots.get(index);
        let operation = slot.operation.unwrap_or(Operation::Other);
        let good = matches!(response.status, Status::Good | Status::ConditionMet);
        let (noticed, submitted) = (
            slot.stamps.at(Stage::Noticed),
            slot.stamps.at(Stage::Submitted),
        );
        let pended = (slot.arrival != Arrival::New).then_some((noticed, submitted));
        requests.timeline.select(slot.part);
        requests.answered(operation, u64::from(slot.bytes), good, pended);
        let id = requests.probe_id(index);
        probes::answered(|| std::iter::once((id, good)));
        probes::notified(|| std::iter::once(id));
        // The slot is about to be released. The factor covers the time until the response is sent.
        let latest = requests.reaped.max(submitted);
        let may_be_slow = requests.timeline.may_be_slow(2 * latest.since(noticed));
        if may_be_slow && slow.len() < SLOW_MAX {
            let mut stamps = slot.stamps;
            stamps.mark(Stage::Reaped, latest);
            let task = slot.iscsi().and_then(|task| self.iscsi.command(task));
            slow.push(SlowRequest {
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
        let CommandMeasurement { requests, slow, .. } = &mut self.measurement;
        if requests.notified(answered, notified) {
            for slow in slow.iter() {
                requests.record_slow(clock, *slow, answered, notified);
            }
        }
        slow.clear();
        requests.end_iteration(self.slots.busy());
    }
}
