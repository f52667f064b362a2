//! An I/O beyond its disk's timeout is cancelled by the device and fails; an I/O that cannot be cancelled continues.

mod common;

use std::sync::Arc;
use std::time::Duration;

use bdev::{
    Attach, BlockDevice, Disk, ErrorPolicy, Finished, IoChannel, Layer, OnError, Ram, RamOptions,
    Submission,
};
use block::{IoErrorKind, IoOutcome, IoRequest};
use common::Recorder;
use guest_memory::IoBuffer;
use latency::Clock;
use reactor::{DiskHandle, SourceId, Tag, Worker};
use uring::{Completion, Owner, Ring};

/// A device that completes nothing on its own: reads can be aborted, writes end after [`WRITES_TAKE`].
struct Stuck(Ram);

const WRITES_TAKE: Duration = Duration::from_millis(2500);

impl Layer for Stuck {
    fn inner(&self) -> &dyn BlockDevice {
        &self.0
    }

    fn layer_kind(&self) -> &'static str {
        "stuck"
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> std::io::Result<Box<dyn IoChannel>> {
        Ok(Box::new(StuckChannel {
            owner: attach.owner(),
            pending: Vec::new(),
        }))
    }
}

struct StuckChannel {
    owner: Owner,
    pending: Vec<Option<Finished>>,
}

impl IoChannel for StuckChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: bdev::Tag,
    ) -> Submission {
        let index = self.pending.len() as u64;
        let outcome = match io.modifies() {
            true => Ok(()),
            false => Err(IoErrorKind::Cancelled.into()),
        };
        self.pending.push(Some(Finished {
            tag,
            buffer: std::mem::take(buffer),
            outcome,
        }));
        if io.modifies() {
            ring.timer(self.owner, index, WRITES_TAKE);
        }
        Submission::Pending
    }

    fn complete(&mut self, _: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        finished.extend(self.pending[completion.token as usize].take());
    }

    fn abort(&mut self, ring: &mut Ring, tag: bdev::Tag) {
        let named = |one: &Option<Finished>| one.as_ref().is_some_and(|one| one.tag == tag);
        let index = self.pending.iter().position(named).expect("a tag of mine");
        let cancels = |one: &Finished| one.outcome.is_err();
        if self.pending[index].as_ref().is_some_and(cancels) {
            ring.nop(self.owner, index as u64);
        }
    }

    fn in_flight(&self) -> usize {
        self.pending.iter().flatten().count()
    }
}

struct Rig {
    worker: Worker,
    disk: Arc<Disk>,
    source: SourceId,
    handle: DiskHandle,
    recorder: Recorder,
}

fn rig(on_error: OnError) -> Rig {
    let ram = Ram::create(RamOptions {
        size: 1 << 20,
        ..RamOptions::default()
    });
    let disk = Arc::new(Disk::new("d", None, Arc::new(Stuck(ram.unwrap()))).unwrap());
    disk.set_error_policy(ErrorPolicy {
        on_error,
        io_timeout: 1,
        ..ErrorPolicy::default()
    });
    let mut worker = Worker::standalone(Ring::new(64).unwrap(), Clock::new()).unwrap();
    let handle = worker.io().open(&disk);
    let recorder = Recorder {
        disk: handle,
        ..Recorder::default()
    };
    Rig {
        source: recorder.add_to(&mut worker),
        worker,
        disk,
        handle,
        recorder,
    }
}

impl Rig {
    fn submit(&mut self, request: &IoRequest, slot: u32) {
        let tag = Tag {
            source: self.source,
            slot,
        };
        let mut buffer = IoBuffer::owned(request.buffer_length() as usize);
        let io = self.worker.io();
        let submitted = io.submit(self.handle, request, &mut buffer, tag);
        assert_eq!(submitted, Submission::Pending);
    }

    /// Removes and returns the outcomes, by slot.
    fn take_ended(&self) -> Vec<(u32, IoOutcome)> {
        let ended = self.recorder.ended.take().into_iter();
        ended.map(|(slot, outcome, _)| (slot, outcome)).collect()
    }

    fn until(&mut self, is_so: impl Fn(&Rig) -> bool) {
        while !is_so(self) {
            self.worker.iterate_once();
        }
    }
}

#[test]
fn io_is_cancelled_at_its_timeout_if_it_can_be() {
    let mut rig = rig(OnError::Report);
    rig.submit(&IoRequest::write(0, 4096), 0);
    rig.submit(&IoRequest::read(4096, 4096), 1);
    // A flush has a tag of another kind.
    rig.submit(&IoRequest::flush(), 2);
    rig.until(|rig| rig.recorder.ended.borrow().len() == 3);
    let mut ended = rig.take_ended();
    // The write ends last, with the device's outcome.
    assert_eq!(ended.pop(), Some((0, Ok(()))));
    ended.sort_unstable_by_key(|(slot, _)| *slot);
    let late = Err(IoErrorKind::TimedOut.into());
    assert_eq!(ended, [(1, late), (2, late)]);
}

#[test]
fn an_io_that_takes_too_long_waits_where_the_disk_holds_errors() {
    let mut rig = rig(OnError::Stop);
    rig.submit(&IoRequest::read(0, 4096), 7);
    rig.until(|rig| rig.disk.state().waiting().is_some());
    let waiting = rig.disk.state().waiting().unwrap();
    let late = IoErrorKind::TimedOut;
    assert_eq!((waiting.count, waiting.error.kind), (1, late));
    // After resuming, it times out again and is now reported.
    rig.disk.set_error_policy(ErrorPolicy {
        on_error: OnError::Report,
        io_timeout: 1,
        ..ErrorPolicy::default()
    });
    let disk = rig.disk.clone();
    rig.worker.resume_disk(&disk);
    rig.until(|rig| !rig.recorder.ended.borrow().is_empty());
    assert_eq!(rig.take_ended(), [(7, Err(late.into()))]);
}
