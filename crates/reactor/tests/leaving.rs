//! A stopping source does not wait for its disk's limits, regardless of its remaining steps.

mod common;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use bdev::{Disk, Null, NullOptions, RateLimits, Submission};
use block::{IoOutcome, IoRequest};
use common::{Requests, source};
use guest_memory::IoBuffer;
use latency::Clock;
use reactor::{DiskHandle, Io, SourceId, Tag, Worker};
use uring::Ring;

/// One request with several I/Os, like UNMAP, WRITE SAME and EXTENDED COPY.
struct Steps {
    id: SourceId,
    disk: DiskHandle,
    left: u32,
    begun: bool,
    busy: bool,
    done: Rc<Cell<u32>>,
}

impl Steps {
    fn continue_work(&mut self, io: &mut Io) {
        self.busy = false;
        while self.left > 0 && !self.busy {
            self.left -= 1;
            let tag = Tag {
                source: self.id,
                slot: 0,
            };
            let request = IoRequest::write_zeroes(0, 4096);
            match io.submit(self.disk, &request, &mut IoBuffer::default(), tag) {
                Submission::Pending => self.busy = true,
                Submission::Done(_) => self.done.set(self.done.get() + 1),
            }
        }
    }
}

impl Requests for Steps {
    fn ready(&self) -> bool {
        !self.begun
    }

    fn submit(&mut self, io: &mut Io) {
        self.begun = true;
        self.continue_work(io);
    }

    fn finish(&mut self, io: &mut Io, _: u32, _: IoBuffer, _: IoOutcome) {
        self.done.set(self.done.get() + 1);
        self.continue_work(io);
    }

    fn in_flight(&self) -> usize {
        usize::from(self.busy)
    }

    fn disk(&mut self) -> &mut DiskHandle {
        &mut self.disk
    }
}

#[test]
fn source_that_stops_does_not_wait_for_limits() {
    const STEPS: u32 = 5;
    let device = Null::create(NullOptions::default()).unwrap();
    let disk = Arc::new(Disk::new("d", None, Arc::new(device)).unwrap());
    disk.set_limits(RateLimits {
        iops: 1,
        iops_burst: 1,
        ..RateLimits::default()
    });
    let mut worker = Worker::standalone(Ring::new(64).unwrap(), Clock::new()).unwrap();
    let (done, stopped) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
    let counted = done.clone();
    let added = worker.add(|io, id| {
        let steps = Steps {
            id,
            disk: io.open(&disk),
            left: STEPS,
            begun: false,
            busy: false,
            done: counted,
        };
        Ok::<_, ()>(source(steps))
    });
    worker.iterate_once();
    assert_eq!(done.get(), 1, "the burst");
    let signal = stopped.clone();
    worker.stop(added.unwrap(), move |_, _| signal.set(true));
    // Too few iterations for a second to pass.
    for _ in 0..100 {
        worker.iterate_once();
    }
    assert!(stopped.get(), "{} of {STEPS} steps are done", done.get());
    assert_eq!(done.get(), STEPS);
}
