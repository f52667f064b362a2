//! A source for tests that need its type only.

use std::sync::Arc;

use block::IoOutcome;
use guest_memory::IoBuffer;
use latency::{QueueRecord, Stamp};
use reactor::{Addressed, Io, Source, SourceHandle};

use crate::SharedMemory;

/// Creates a limit without a limit of the group.
pub(crate) fn alone(
    bytes: usize,
    connections: usize,
    floor: usize,
) -> Arc<SharedMemory<NoConnection>> {
    SharedMemory::new(Arc::default(), bytes, connections, floor)
}

/// A connection that never exists.
pub(crate) enum NoConnection {}

impl Source for NoConnection {
    fn finish(&mut self, _: &mut Io, _: u32, _: IoBuffer, _: IoOutcome, _: Stamp) {
        match *self {}
    }

    fn publish(&mut self, _: &mut Io) {
        match *self {}
    }

    fn in_flight(&self) -> usize {
        match *self {}
    }

    fn stop(&mut self) {
        match *self {}
    }

    fn closed(&mut self, _: &mut Io) {
        match *self {}
    }

    fn record(&self) -> Option<Arc<QueueRecord>> {
        match *self {}
    }
}

impl Addressed for NoConnection {
    fn handle(&self) -> &SourceHandle<NoConnection> {
        match *self {}
    }
}
