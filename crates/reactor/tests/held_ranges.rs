//! No read on any worker sees part of a write by the holder of a range.

mod common;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bdev::{
    BlockDevice, CacheMode, Condition, Delay, Disk, File, FileOptions, Ram, RamOptions, RangeLock,
};
use bdev::{RateLimits, Submission};
use block::{IoFlags, IoOutcome, IoRequest};
use common::{Requests, TestSource, source};
use guest_memory::IoBuffer;
use reactor::WorkerOptions;
use reactor::{DiskHandle, Io, PollLimit, Pool, SourceId, Tag, Worker, WorkerHandle};

/// I/O size in bytes: copying it takes longer than another worker needs to start a read.
const LENGTH: usize = 256 << 10;
/// Minimum number of writes.
const WRITES: u64 = 200;

/// Results of both workers.
#[derive(Default)]
struct Seen {
    reads: AtomicU64,
    torn: AtomicU64,
    writes: AtomicU64,
    over: AtomicBool,
}

enum Job {
    Read,
    /// Flags of each write, and the range while it is held.
    Write(IoFlags, Option<RangeLock>),
}

struct Client {
    id: SourceId,
    worker: WorkerHandle,
    disk: Arc<Disk>,
    handle: DiskHandle,
    job: Job,
    seen: Arc<Seen>,
    busy: bool,
}

fn buffer_of(byte: u8) -> IoBuffer {
    let buffer = IoBuffer::owned(LENGTH);
    buffer.fill(0, LENGTH, byte);
    buffer
}

impl Client {
    fn begin(&mut self, io: &mut Io, request: IoRequest, mut buffer: IoBuffer) {
        let tag = Tag {
            source: self.id,
            slot: 0,
        };
        match io.submit(self.handle, &request, &mut buffer, tag) {
            Submission::Pending => self.busy = true,
            Submission::Done(outcome) => self.done(&buffer, outcome),
        }
    }

    fn done(&mut self, buffer: &IoBuffer, outcome: IoOutcome) {
        outcome.unwrap();
        self.busy = false;
        match &mut self.job {
            Job::Read => {
                let mut bytes = vec![0; LENGTH];
                buffer.read_at(0, &mut bytes);
                let torn = bytes[1..] != bytes[..LENGTH - 1];
                self.seen.torn.fetch_add(torn.into(), Ordering::Relaxed);
                self.seen.reads.fetch_add(1, Ordering::Relaxed);
            }
            Job::Write(_, lease) => {
                *lease = None;
                self.seen.writes.fetch_add(1, Ordering::Relaxed);
                self.acquire();
            }
        }
    }

    fn acquire(&self) {
        let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
        // On a busy machine the reader may not have had a CPU yet.
        if count(&self.seen.writes) >= WRITES && count(&self.seen.reads) > 0 {
            return self.seen.over.store(true, Ordering::Relaxed);
        }
        let (worker, id) = (self.worker.clone(), self.id);
        self.disk
            .range_locks()
            .acquire(0, LENGTH as u64, move |lease| {
                worker.send(move |worker: &mut Worker| {
                    let (source, io) = worker.source(id).unwrap();
                    let source = (source as &mut dyn Any).downcast_mut();
                    let TestSource::<Client>(client) = source.unwrap();
                    client.granted(io, lease);
                });
            });
    }

    fn granted(&mut self, io: &mut Io, granted: RangeLock) {
        let Job::Write(flags, lease) = &mut self.job else {
            return;
        };
        *lease = Some(granted);
        let number = self.seen.writes.load(Ordering::Relaxed);
        let flags = flags.with(IoFlags::HOLDER);
        let request = IoRequest::write(0, LENGTH as u64).flagged(flags);
        self.begin(io, request, buffer_of(number as u8));
    }
}

impl Requests for Client {
    fn ready(&self) -> bool {
        let over = self.seen.over.load(Ordering::Relaxed);
        matches!(self.job, Job::Read) && !self.busy && !over
    }

    fn submit(&mut self, io: &mut Io) {
        self.begin(io, IoRequest::read(0, LENGTH as u64), buffer_of(0));
    }

    fn finish(&mut self, _: &mut Io, _: u32, buffer: IoBuffer, outcome: IoOutcome) {
        self.done(&buffer, outcome);
    }

    fn in_flight(&self) -> usize {
        usize::from(self.busy)
    }

    fn disk(&mut self) -> &mut DiskHandle {
        &mut self.handle
    }
}

/// One worker writes and holds the range for each write; the other one reads it continuously.
fn no_read_is_torn(device: Arc<dyn BlockDevice>, flags: IoFlags, limits: RateLimits) {
    let disk = Arc::new(Disk::new("d", None, device).unwrap());
    disk.set_limits(limits);
    let options = WorkerOptions {
        count: 2,
        cpus: Vec::new(),
        poll: PollLimit::Always.into(),
    };
    let pool = Pool::start(&options).unwrap();
    let seen = Arc::new(Seen::default());
    for writes in [false, true] {
        let (disk, seen) = (disk.clone(), seen.clone());
        let place = pool.workers()[usize::from(writes)].clone();
        let worker = place.clone();
        place
            .call(move |w| {
                w.add(|io, id| {
                    let client = Client {
                        id,
                        worker,
                        handle: io.open(&disk),
                        disk,
                        job: match writes {
                            true => Job::Write(flags, None),
                            false => Job::Read,
                        },
                        seen,
                        busy: false,
                    };
                    if writes {
                        client.acquire();
                    }
                    Ok::<_, ()>(source(client))
                })
                .unwrap();
            })
            .unwrap();
    }
    let start = Instant::now();
    while !seen.over.load(Ordering::Relaxed) {
        assert!(start.elapsed() < Duration::from_secs(60), "it hangs");
        std::thread::sleep(Duration::from_millis(1));
    }
    let (reads, torn) = (&seen.reads, &seen.torn);
    let (reads, torn) = (reads.load(Ordering::Relaxed), torn.load(Ordering::Relaxed));
    assert_eq!(torn, 0, "of {reads} reads");
    assert!(reads > 0);
    assert_eq!(disk.throttle().setting() == 0, limits.is_none());
    assert!(
        !disk.conditions().has(Condition::Locked),
        "all ranges are released"
    );
}

fn ram() -> Arc<dyn BlockDevice> {
    let options = RamOptions {
        size: 1 << 20,
        ..RamOptions::default()
    };
    Arc::new(Ram::create(options).unwrap())
}

#[test]
fn read_of_a_ram_disk_sees_all_of_an_atomic_write_or_nothing() {
    no_read_is_torn(ram(), IoFlags::ATOMIC, RateLimits::default());
}

#[test]
fn page_cache_read_sees_all_of_a_holders_write_or_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = File::open(FileOptions {
        size: Some(1 << 20),
        cache: CacheMode::Writeback,
        ..FileOptions::new(folder.path().join("disk"))
    });
    no_read_is_torn(
        Arc::new(file.unwrap()),
        IoFlags::NONE,
        RateLimits::default(),
    );
}

/// Slow I/Os started before the range was held; I/Os that wait for limits start later.
#[test]
fn slow_limited_read_sees_all_of_an_atomic_write_or_nothing() {
    let time = Duration::from_micros(200);
    let limits = RateLimits {
        iops: 1_000_000,
        iops_burst: 2,
        ..RateLimits::default()
    };
    no_read_is_torn(Arc::new(Delay::new(ram(), time)), IoFlags::ATOMIC, limits);
}
