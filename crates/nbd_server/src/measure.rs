//! Measurements of requests: counters, and complete records of the slowest requests.

use latency::{Clock, SlowRequest, Stage as Hop, Stamp};

use crate::connection::Connection;

/// Maximum number of slow candidates per iteration.
const SLOW_MAX: usize = 64;

impl Connection {
    /// Counts a request that is being answered.
    pub(crate) fn count(&mut self, index: u32, good: bool) {
        let slot = self.slots.get(index);
        let values = slot.values;
        let bytes = match values.operation {
            latency::Operation::Read | latency::Operation::Write => values.length,
            _ => 0,
        };
        let (noticed, submitted) = (slot.stamps.at(Hop::Noticed), slot.stamps.at(Hop::Submitted));
        let pended = slot.pended.then_some((noticed, submitted));
        let mut stamps = slot.stamps;
        let measurement = &mut self.measurement;
        measurement.answered(values.operation, bytes, good, pended);
        let id = measurement.probe_id(index);
        probes::answered(|| std::iter::once((id, good)));
        probes::notified(|| std::iter::once(id));
        // The slot is about to be released. The factor covers the time until the reply is sent.
        let latest = measurement.reaped.max(submitted);
        let may_be_slow = measurement.timeline.may_be_slow(2 * latest.since(noticed));
        if may_be_slow && self.slow.len() < SLOW_MAX {
            stamps.mark(Hop::Reaped, latest);
            self.slow.push(SlowRequest {
                operation: values.operation,
                tag: values.to.cookie,
                unit: None,
                offset: values.to.offset,
                length: bytes,
                stamps,
            });
        }
    }

    /// Hop 7: records the measurements of this iteration.
    pub(crate) fn record_iteration(&mut self, clock: &Clock, answered: Stamp, notified: Stamp) {
        if self.measurement.notified(answered, notified) {
            for slow in &self.slow {
                self.measurement
                    .record_slow(clock, *slow, answered, notified);
            }
        }
        self.slow.clear();
        self.measurement.end_iteration(self.slots.busy());
    }
}
