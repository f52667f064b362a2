//! Measurements of requests: counters, and descriptions of the slowest requests.

use latency::{Operation, SlowRequest};

use crate::connection::Connection;

impl Connection {
    /// Counts a request that is being answered. Its slot is about to be released.
    pub(crate) fn count(&mut self, index: u32, good: bool) {
        let slot = self.slots.get(index);
        let values = slot.values;
        let bytes = match values.operation {
            Operation::Read | Operation::Write => values.length,
            _ => 0,
        };
        let describe = |stamps| SlowRequest {
            operation: values.operation,
            tag: values.to.cookie,
            unit: None,
            offset: values.to.offset,
            length: bytes,
            stamps,
        };
        self.measurement.answered_and_released(
            index,
            values.operation,
            bytes,
            good,
            slot.pended,
            slot.stamps,
            describe,
        );
    }
}
