//! A handle on a disk closes when it has no operations on the ring; only then are its owner numbers reused.

mod common;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bdev::{
    Attach, BlockDevice, Delay, Disk, Finished, IoChannel, Layer, Ram, RamOptions, Submission,
    Tag as IoTag,
};
use block::{IoOutcome, IoRequest};
use common::{Requests, source};
use guest_memory::IoBuffer;
use latency::Clock;
use reactor::{DiskHandle, Io, SourceId, Tag, Worker};
use rustix::event::{EventfdFlags, eventfd};
use uring::{Completion, Owner, Ring, RingFd, WatchId};

/// Counts the events of [`Late`].
#[derive(Default)]
struct Count {
    attached: AtomicUsize,
    closed: AtomicUsize,
    heard: AtomicUsize,
}

/// A device that watches a descriptor and needs one more iteration of the ring to close.
struct Late {
    inner: Arc<dyn BlockDevice>,
    count: Arc<Count>,
}

impl Layer for Late {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn layer_kind(&self) -> &'static str {
        "late"
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        let owner = attach.owner();
        let event = RingFd::from(eventfd(1, EventfdFlags::CLOEXEC)?);
        let watch = attach.ring().watch(owner, 0, &event);
        self.count.attached.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(LateChannel {
            inner: self.inner.attach(attach)?,
            owner,
            watch,
            last: None,
            count: self.count.clone(),
        }))
    }
}

struct LateChannel {
    inner: Box<dyn IoChannel>,
    owner: Owner,
    watch: WatchId,
    /// Set while closing: the last completion was read.
    last: Option<bool>,
    count: Arc<Count>,
}

impl IoChannel for LateChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: IoTag,
    ) -> Submission {
        assert!(self.last.is_none(), "I/O on a handle that closes");
        self.inner.submit(ring, io, buffer, tag)
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        if completion.owner != self.owner {
            return self.inner.complete(ring, completion, finished);
        }
        match completion.token {
            0 => drop(self.count.heard.fetch_add(1, Ordering::Relaxed)),
            1 => self.last = Some(true),
            other => panic!("completion {other} belongs to another source"),
        }
    }

    fn close(&mut self, ring: &mut Ring) {
        ring.unwatch(self.watch);
        ring.nop(self.owner, 1);
        self.last = Some(false);
        self.inner.close(ring);
    }

    fn is_closed(&self) -> bool {
        self.last == Some(true) && self.inner.is_closed()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}

impl Drop for LateChannel {
    fn drop(&mut self) {
        self.count
            .closed
            .fetch_add(usize::from(self.is_closed()), Ordering::Relaxed);
    }
}

/// Reads up to a limit; each block contains its own number.
struct Reader {
    id: SourceId,
    disk: DiskHandle,
    left: u32,
    in_flight: usize,
    stopped: bool,
}

impl Reader {
    fn begin(&mut self, io: &mut Io) {
        while self.left > 0 && self.in_flight < 8 && !self.stopped {
            self.left -= 1;
            let slot = self.left % 64;
            let tag = Tag {
                source: self.id,
                slot,
            };
            let mut buffer = IoBuffer::owned(512);
            let request = IoRequest::read(u64::from(slot) * 512, 512);
            match io.submit(self.disk, &request, &mut buffer, tag) {
                Submission::Pending => self.in_flight += 1,
                Submission::Done(outcome) => assert_eq!(outcome, Ok(())),
            }
        }
    }
}

impl Requests for Reader {
    fn ready(&self) -> bool {
        self.left > 0 && !self.stopped
    }

    fn submit(&mut self, io: &mut Io) {
        self.begin(io);
    }

    fn finish(&mut self, _: &mut Io, slot: u32, buffer: IoBuffer, outcome: IoOutcome) {
        assert_eq!(outcome, Ok(()));
        let mut bytes = [0; 512];
        buffer.read_at(0, &mut bytes);
        assert_eq!(bytes, [slot as u8; 512], "a completion of another I/O");
        self.in_flight -= 1;
    }

    fn arm(&self) -> bool {
        false
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn stop(&mut self) {
        self.stopped = true;
    }

    fn disk(&mut self) -> &mut DiskHandle {
        &mut self.disk
    }
}

fn disk_of(device: Arc<dyn BlockDevice>, name: &str) -> Arc<Disk> {
    Arc::new(Disk::new(name, None, device).unwrap())
}

/// Fills the first 64 blocks with their numbers.
fn numbered() -> Arc<dyn BlockDevice> {
    let options = RamOptions {
        size: 1 << 20,
        ..RamOptions::default()
    };
    let ram = Ram::create(options).unwrap();
    let mut ring = Ring::new(4).unwrap();
    let mut owner = || Owner(0);
    let mut handle = ram.attach(&mut Attach::new(&mut ring, &mut owner)).unwrap();
    for block in 0..64u8 {
        let mut buffer = IoBuffer::owned(512);
        buffer.write_at(0, &[block; 512]);
        let io = IoRequest::write(u64::from(block) * 512, 512);
        let done = handle.submit(&mut ring, &io, &mut buffer, IoTag(0));
        assert_eq!(done, Submission::Done(Ok(())));
    }
    Arc::new(ram)
}

#[test]
fn thousand_closes_under_load_leave_no_completion_astray() {
    const TIMES: usize = 1000;
    let count = Arc::new(Count::default());
    let slow = Arc::new(Delay::new(numbered(), Duration::from_micros(30)));
    let late: Arc<dyn BlockDevice> = Arc::new(Late {
        inner: Arc::new(Delay::new(slow, Duration::from_micros(10))),
        count: count.clone(),
    });
    let (first, second) = (disk_of(late.clone(), "a"), disk_of(late, "b"));
    let mut worker = Worker::standalone(Ring::new(64).unwrap(), Clock::new()).unwrap();
    for round in 0..TIMES {
        let disk = if round % 3 == 0 { &first } else { &second };
        let added = worker.add(|io, id| {
            let reader = Reader {
                id,
                disk: io.open(disk),
                left: 100,
                in_flight: 0,
                stopped: false,
            };
            Ok::<_, ()>(source(reader))
        });
        for _ in 0..round % 7 {
            worker.iterate_once();
        }
        // The next source opens the disk while I/Os of the stopped source are in flight, or while its handle closes.
        worker.stop(added.unwrap(), |_, _| {});
    }
    let opened = count.attached.load(Ordering::Relaxed);
    assert!(opened > 1, "handles were opened again");
    while worker.source_count() > 0 || count.closed.load(Ordering::Relaxed) < opened {
        worker.iterate_once();
    }
    assert!(count.heard.load(Ordering::Relaxed) > 0);
    assert_eq!(count.closed.load(Ordering::Relaxed), opened);
}
