//! A source of a worker for tests: each test adds its requests.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use bdev::Disk;
use block::IoOutcome;
use guest_memory::IoBuffer;
use latency::{QueueRecord, Stamp};
use reactor::{DiskHandle, Io, Source, SourceId, Worker};
use uring::RingFd;

/// Requests of a [`TestSource`].
pub trait Requests: 'static {
    /// Returns true if there are requests to submit.
    fn ready(&self) -> bool {
        false
    }

    /// Submits requests.
    fn submit(&mut self, io: &mut Io) {
        let _ = io;
    }

    /// Handles the end of a pending I/O.
    fn finish(&mut self, io: &mut Io, slot: u32, buffer: IoBuffer, outcome: IoOutcome);

    /// Returns the number of pending I/Os.
    fn in_flight(&self) -> usize {
        0
    }

    /// Returns true if the worker must not sleep.
    fn arm(&self) -> bool {
        self.ready()
    }

    /// Stops submitting requests.
    fn stop(&mut self) {}

    /// Returns the handle of the disk, which the source closes at its end.
    fn disk(&mut self) -> &mut DiskHandle;
}

/// A source without a client.
pub struct TestSource<R>(pub R);

impl<R: Requests> Source for TestSource<R> {
    fn ready(&mut self, _: Stamp) -> bool {
        self.0.ready()
    }

    fn drain(&mut self, io: &mut Io, _: Stamp) {
        self.0.submit(io);
    }

    fn finish(&mut self, io: &mut Io, slot: u32, buffer: IoBuffer, outcome: IoOutcome, _: Stamp) {
        self.0.finish(io, slot, buffer, outcome);
    }

    fn publish(&mut self, _: &mut Io) {}

    fn arm(&mut self) -> bool {
        self.0.arm()
    }

    fn disarm(&mut self) {}

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    fn kick(&self) -> Option<RingFd> {
        None
    }

    fn stop(&mut self) {
        self.0.stop();
    }

    fn close_disk(&mut self, io: &mut Io, _: &Arc<Disk>) {
        io.close(std::mem::take(self.0.disk()));
    }

    fn closed(&mut self, io: &mut Io) {
        io.close(*self.0.disk());
    }

    fn record(&self) -> Option<Arc<QueueRecord>> {
        None
    }
}

/// Returns a source with these requests.
pub fn source(requests: impl Requests) -> Box<dyn Source> {
    Box::new(TestSource(requests))
}

/// Outcomes and buffers of pending I/Os, by slot.
pub type Ended = Rc<RefCell<Vec<(u32, IoOutcome, IoBuffer)>>>;

/// Records the I/Os that a test submits itself.
#[derive(Clone, Default)]
pub struct Recorder {
    /// Handle that the source closes.
    pub disk: DiskHandle,
    /// Pending I/Os, if the test counts them.
    pub in_flight: Rc<RefCell<usize>>,
    pub ended: Ended,
}

impl Recorder {
    /// Adds a source with this recorder to a worker.
    pub fn add_to(&self, worker: &mut Worker) -> SourceId {
        let source = source(self.clone());
        worker.add(|_, _| Ok::<_, ()>(source)).unwrap()
    }
}

impl Requests for Recorder {
    fn finish(&mut self, _: &mut Io, slot: u32, buffer: IoBuffer, outcome: IoOutcome) {
        let mut in_flight = self.in_flight.borrow_mut();
        *in_flight = in_flight.saturating_sub(1);
        self.ended.borrow_mut().push((slot, outcome, buffer));
    }

    fn in_flight(&self) -> usize {
        *self.in_flight.borrow()
    }

    fn disk(&mut self) -> &mut DiskHandle {
        &mut self.disk
    }
}
