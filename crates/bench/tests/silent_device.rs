//! The driver with a device that returns requests without a response. The response of an earlier request must not count.

mod support;

use std::sync::Arc;

use bdev::{Disk, Null, NullOptions};
use bench::driver::{DriverOptions, Subject};
use block::IoOutcome;
use guest_memory::IoBuffer;
use latency::Operation;
use reactor::{Io, SourceId, Tag, WorkerHandle};
use support::{Rig, job, outcome, plan};
use virtio_blk::{BlkDevice, BlkOptions};
use virtio_device::{
    Answer, ConfigError, Malformed, ParsedRequest, Protocol, Queue, QueueMaker, QueueSetup,
    Request, Step, VirtioDevice,
};

/// Requests answered before the device stops responding: each slot has had a response by then.
const ANSWERED: u64 = 100;
const DEPTH: &str = "4";

/// Answers the first requests with VIRTIO_BLK_S_OK and writes no response to the others.
struct Silent {
    given_back: u64,
}

impl Protocol for Silent {
    type State = ();

    fn parse(
        &mut self,
        _: &mut Io,
        request: &mut Request<()>,
        _: Tag,
    ) -> Result<ParsedRequest, Malformed> {
        Ok(ParsedRequest {
            step: Step::Answer,
            operation: Operation::Read,
            bytes: request.chain.writable - 1,
        })
    }

    fn resume(
        &mut self,
        _: &mut Io,
        _: &mut Request<()>,
        _: IoOutcome,
        _: Option<IoBuffer>,
    ) -> Step {
        Step::Answer
    }

    fn refuse(&mut self, _: &mut Request<()>, _: virtqueue::ResponseSpace) -> u32 {
        0
    }

    fn answer(&mut self, request: &mut Request<()>) -> Answer {
        if self.given_back < ANSWERED {
            request.chain.buffer.write_last(0);
        }
        self.given_back += 1;
        Answer {
            written: request.chain.writable,
            good: true,
        }
    }

    fn close(&mut self, _: &mut Io) {}
}

/// A virtio-blk device with modified requests.
struct SilentDevice(BlkDevice);

impl VirtioDevice for SilentDevice {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn features(&self) -> u64 {
        self.0.features()
    }

    fn queue_count(&self) -> u16 {
        self.0.queue_count()
    }

    fn config(&self) -> Vec<u8> {
        self.0.config()
    }

    fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), ConfigError> {
        self.0.write_config(offset, data)
    }

    fn packed(&self) -> bool {
        self.0.packed()
    }

    fn reset(&self) {
        self.0.reset();
    }

    fn queue(&self, setup: QueueSetup, _: &WorkerHandle) -> QueueMaker {
        Box::new(|io, id| {
            let queue = Queue::new(setup, id, io.clock(), Silent { given_back: 0 });
            queue.map(Queue::built).map_err(|error| error.to_string())
        })
    }

    fn queue_stopped(&self, index: u16) {
        self.0.queue_stopped(index);
    }

    fn wait_for_release(&self) {
        self.0.wait_for_release();
    }

    fn queue_placed(&self, index: u16, worker: &WorkerHandle, source: SourceId) {
        self.0.queue_placed(index, worker, source);
    }
}

#[test]
fn a_request_that_comes_back_without_an_answer_is_an_error() {
    let rig = Rig::new();
    let device = Arc::new(
        Null::create(NullOptions {
            size: 4 << 20,
            ..NullOptions::default()
        })
        .unwrap(),
    );
    let disk = Arc::new(Disk::new("d0", None, device).unwrap());
    let options = BlkOptions {
        name: "d0".into(),
        queues: 1,
    };
    let socket = rig.listen(
        "silent",
        Arc::new(SilentDevice(BlkDevice::new(disk, options))),
    );
    let subject = Subject::parse(&format!("vhost-user-blk:{}", socket.display())).unwrap();
    let jobs = vec![job(&[
        ("rw", "read"),
        ("size", "4m"),
        ("bs", "4k"),
        ("iodepth", DEPTH),
    ])];
    let outcome = outcome(&plan(vec![subject], jobs, DriverOptions::default()));
    let result = &outcome.subjects[0].repetitions[0].jobs[0];
    // All requests then in flight failed; the first failure ends the job.
    assert_eq!(result.ios(), ANSWERED);
    assert!((1..=4).contains(&result.errors), "{}", result.errors);
    assert_eq!(
        result.complaints[0], "Read of 4096 bytes at 409600 failed",
        "the first without an answer"
    );
}
