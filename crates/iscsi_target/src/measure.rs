//! Measurements of commands: stamps of solicited data, counters, and descriptions of the slowest commands.

use latency::{Operation, SlowRequest, Stage, Stamp, UnitAddress};
use scsi::{Lun, LunAddress, Response};

use crate::connection::Connection;
use crate::slots::Arrival;

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
        let timeline = &mut self.measurement.timeline;
        timeline.select(part);
        timeline.record_arrival(operation.unwrap_or(Operation::Other), &stamps);
    }

    /// Records the arrival of data for a command; `whole`: no more data is outstanding.
    pub(crate) fn data_arrived(&mut self, index: u32, whole: bool) {
        let (at, id) = (self.measurement.noticed, self.measurement.probe_id(index));
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

    /// Counts a command that is being answered. Its slot is about to be released.
    pub(crate) fn count(&mut self, index: u32, response: &Response) {
        let requests = &mut self.measurement;
        let slot = self.slots.get(index);
        let operation = slot.operation.unwrap_or(Operation::Other);
        let good = !response.is_error();
        let bytes = u64::from(slot.bytes);
        let pended = slot.arrival != Arrival::New;
        requests.timeline.select(slot.part);
        let describe = |stamps| {
            let task = slot.iscsi().and_then(|task| self.iscsi.command(task));
            SlowRequest {
                operation,
                tag: task.map_or(0, |command| u64::from(command.itt)),
                unit: task.and_then(|command| {
                    let LunAddress::Unit(lun) = Lun(command.lun).address() else {
                        return None;
                    };
                    Some(UnitAddress { target: 0, lun })
                }),
                offset: slot.offset,
                length: bytes,
                stamps,
            }
        };
        requests.answered_and_released(
            index,
            operation,
            bytes,
            good,
            pended,
            slot.stamps,
            describe,
        );
    }
}
