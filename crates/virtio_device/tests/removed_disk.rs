//! Removal of a disk while a request is between two steps. The next disk of the worker may get the handle that the request holds.

use std::sync::{Arc, Mutex};

use bdev::{Disk, Ram, RamOptions, Submission};
use block::{IoErrorKind, IoOutcome, IoRequest};
use guest_memory::{IoBuffer, Mapping, MemoryTable, RegionSpec};
use latency::{Clock, Labels, Operation};
use reactor::{DiskHandle, Io, SourceId, Tag, Worker};
use uring::Ring;
use virtio_device::{
    Answer, Job, Malformed, ParsedRequest, Protocol, Queue, QueueSetup, Request, Step,
};
use virtqueue::driver::{DriverConfig, DriverQueue, RingLayout};

const MEMORY: usize = 1 << 20;
const DATA: u64 = 128 << 10;
/// More than a queue executes in one iteration.
const WRITES: usize = 100;

/// Writes to its disk [`WRITES`] times before it answers.
struct Writer {
    disk: DiskHandle,
    outcomes: Arc<Mutex<Vec<IoOutcome>>>,
}

fn step_writing_ones() -> Step {
    let buffer = IoBuffer::owned(4096);
    buffer.fill(0, 4096, 0xff);
    Step::Scratch(Box::new(buffer))
}

impl Protocol for Writer {
    type State = ();

    fn parse(
        &mut self,
        _: &mut Io,
        request: &mut Request<()>,
        _: Tag,
    ) -> Result<ParsedRequest, Malformed> {
        request.job = Job {
            disk: self.disk,
            io: IoRequest::write(0, 4096),
        };
        Ok(ParsedRequest {
            step: step_writing_ones(),
            operation: Operation::Write,
            bytes: 0,
        })
    }

    fn resume(
        &mut self,
        _: &mut Io,
        _: &mut Request<()>,
        outcome: IoOutcome,
        _: Option<IoBuffer>,
    ) -> Step {
        let mut outcomes = self.outcomes.lock().unwrap();
        outcomes.push(outcome);
        if outcomes.len() < WRITES {
            step_writing_ones()
        } else {
            Step::Answer
        }
    }

    fn refuse(&mut self, _: &mut Request<()>, _: virtqueue::ResponseSpace) -> u32 {
        0
    }

    fn answer(&mut self, _: &mut Request<()>) -> Answer {
        Answer {
            written: 1,
            good: true,
        }
    }

    fn close_disk(&mut self, io: &mut Io, disk: &Arc<Disk>) {
        if io.is_of(self.disk, disk) {
            io.close(std::mem::take(&mut self.disk));
        }
    }

    fn close(&mut self, io: &mut Io) {
        io.close(self.disk);
    }
}

fn ram(name: &str) -> Arc<Disk> {
    let options = RamOptions {
        size: 1 << 20,
        ..RamOptions::default()
    };
    let device = Arc::new(Ram::create(options).unwrap());
    Arc::new(Disk::new(name, None, device).unwrap())
}

#[test]
fn deferred_request_does_not_reach_a_disk_that_reuses_a_handle() {
    let spec = RegionSpec {
        guest_address: 0,
        size: MEMORY as u64,
        user_address: 0,
        file_offset: 0,
    };
    let memory = Mapping::anonymous(MEMORY).unwrap();
    let table = MemoryTable::default().with_mapping(spec, memory).unwrap();
    let layout = RingLayout::at(0, 16, false);
    let mut driver = DriverQueue::new(DriverConfig::new(layout), &table).unwrap();
    let setup = QueueSetup {
        inflight: None,
        log: None,
        index: 0,
        features: 0,
        config: layout.device_config(),
        memory: Arc::new(table),
        kick: None,
        call: None,
        error: None,
        enabled: true,
        on_broken: Arc::new(|_, why| panic!("queue broke: {why}")),
        labels: Labels::default(),
    };
    let (first, second) = (ram("a"), ram("b"));
    let outcomes = Arc::default();
    let mut worker = Worker::standalone(Ring::new(64).unwrap(), Clock::new()).unwrap();
    let first_handle = worker.io().open(&first);
    let writer = Writer {
        disk: first_handle,
        outcomes: Arc::clone(&outcomes),
    };
    let make = |io: &mut Io, id: SourceId| Queue::new(setup, id, io.clock(), writer);
    let source = worker
        .add(|io, id| make(io, id).map(|queue| queue.built().source))
        .unwrap();
    driver.add(&[(DATA, 16)], &[(DATA + 16, 1)], 0).unwrap();
    driver.publish();
    worker.iterate_once();
    let before = outcomes.lock().unwrap().len();
    assert!(
        before > 0 && before < WRITES,
        "{before} steps in an iteration"
    );

    worker.close_disk(&first);
    let second_handle = worker.io().open(&second);
    assert_eq!(
        first_handle, second_handle,
        "otherwise this test proves nothing"
    );
    while driver.pop_used().is_none() {
        worker.iterate_once();
    }
    let outcomes = outcomes.lock().unwrap();
    assert!(outcomes[..before].iter().all(Result::is_ok));
    let is_offline =
        |outcome: &IoOutcome| matches!(outcome, Err(e) if e.kind == IoErrorKind::Offline);
    assert!(outcomes[before..].iter().all(is_offline), "{outcomes:?}");
    let mut buffer = IoBuffer::owned(4096);
    let tag = Tag { source, slot: 0 };
    let read = IoRequest::read(0, 4096);
    let submitted = worker.io().submit(second_handle, &read, &mut buffer, tag);
    assert_eq!(submitted, Submission::Done(Ok(())));
    let mut bytes = [1; 4096];
    buffer.read_at(0, &mut bytes);
    assert_eq!(bytes, [0; 4096], "it was written to");
}
