//! The device of a disk is replaced while two workers write, flush and read: every read returns the last write. A mirror is replaced also
//! while its target hangs.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bdev::{
    BlockDevice, BlockingIo, CacheMode, Delay, Disk, Fault, FaultAction, FaultPlan, Faulty, File,
    FileOptions, Mirror, Ram, RamOptions, Submission,
};
use block::{IoKind, IoOutcome, IoRequest};
use common::{Requests, source};
use guest_memory::IoBuffer;
use reactor::{DiskHandle, Io, PollLimit, Pool, SourceId, Tag, WorkerHandle, WorkerOptions};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 64;
const SIZE: u64 = 2 * BLOCKS * BLOCK;
const REPLACEMENTS: usize = 60;

#[derive(Default)]
struct Seen {
    rounds: [AtomicU64; 2],
    wrong: AtomicU64,
    over: AtomicBool,
}

#[derive(Clone, Copy, PartialEq)]
enum RequestStep {
    Write,
    Flush,
    Read,
}

/// Writes a number to each block of its half in turn, flushes, and reads the oldest written block.
struct Client {
    id: SourceId,
    number: usize,
    handle: DiskHandle,
    seen: Arc<Seen>,
    written: u64,
    step: RequestStep,
    busy: bool,
}

impl Client {
    fn offset(&self, nth: u64) -> u64 {
        (self.number as u64 * BLOCKS + nth % BLOCKS) * BLOCK
    }

    fn continue_work(&mut self, io: &mut Io) {
        let buffer = IoBuffer::owned(BLOCK as usize);
        let (request, mut buffer) = match self.step {
            RequestStep::Write => {
                buffer.write_at(0, &self.written.to_le_bytes());
                (IoRequest::write(self.offset(self.written), BLOCK), buffer)
            }
            RequestStep::Flush => (IoRequest::flush(), IoBuffer::default()),
            RequestStep::Read => (
                IoRequest::read(self.offset(self.written + 1), BLOCK),
                buffer,
            ),
        };
        let tag = Tag {
            source: self.id,
            slot: 0,
        };
        self.busy = true;
        if let Submission::Done(outcome) = io.submit(self.handle, &request, &mut buffer, tag) {
            self.done(&buffer, outcome);
        }
    }

    fn done(&mut self, buffer: &IoBuffer, outcome: IoOutcome) {
        self.busy = false;
        outcome.unwrap();
        self.step = match self.step {
            RequestStep::Write if self.written.is_multiple_of(7) => RequestStep::Flush,
            RequestStep::Write | RequestStep::Flush => RequestStep::Read,
            RequestStep::Read => {
                let mut found = [0; 8];
                buffer.read_at(0, &mut found);
                let wanted = (self.written + 1).saturating_sub(BLOCKS);
                let is_right = u64::from_le_bytes(found) == wanted;
                self.seen
                    .wrong
                    .fetch_add((!is_right).into(), Ordering::Relaxed);
                self.written += 1;
                self.seen.rounds[self.number].fetch_add(1, Ordering::Relaxed);
                RequestStep::Write
            }
        };
    }
}

impl Requests for Client {
    fn ready(&self) -> bool {
        !self.busy && !self.seen.over.load(Ordering::Relaxed)
    }

    fn submit(&mut self, io: &mut Io) {
        self.continue_work(io);
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

fn new_device(nth: usize, folder: &std::path::Path) -> Arc<dyn BlockDevice> {
    let ram = || {
        Arc::new(
            Ram::create(RamOptions {
                size: SIZE,
                ..RamOptions::default()
            })
            .unwrap(),
        )
    };
    match nth % 3 {
        0 => ram(),
        // The flushes of this device are in flight long after its replacement.
        1 => Arc::new(Delay::new(ram(), Duration::from_millis(3))),
        _ => Arc::new(
            File::open(FileOptions {
                size: Some(SIZE),
                cache: CacheMode::Writethrough,
                ..FileOptions::new(folder.join(nth.to_string()))
            })
            .unwrap(),
        ),
    }
}

fn copy(from: &Arc<dyn BlockDevice>, to: &Arc<dyn BlockDevice>) {
    let mut bytes = vec![0; SIZE as usize];
    BlockingIo::new(Arc::clone(from))
        .unwrap()
        .read_at(0, &mut bytes)
        .unwrap();
    BlockingIo::new(Arc::clone(to))
        .unwrap()
        .write_at(0, &bytes)
        .unwrap();
}

fn start(pool: &Pool, disk: &Arc<Disk>, seen: &Arc<Seen>) {
    for (number, worker) in pool.workers().iter().enumerate() {
        let (disk, seen) = (disk.clone(), seen.clone());
        let added = worker.call(move |w| {
            w.add(|io, id| {
                let client = Client {
                    id,
                    number,
                    handle: io.open(&disk),
                    seen,
                    written: 1,
                    step: RequestStep::Write,
                    busy: false,
                };
                Ok::<_, ()>(source(client))
            })
            .map(drop)
        });
        added.unwrap().unwrap();
    }
}

fn prepare(worker: &WorkerHandle, disk: &Arc<Disk>, device: &Arc<dyn BlockDevice>) {
    let (disk, device) = (disk.clone(), device.clone());
    let prepared = worker.call(move |w| w.io().prepare_device(&disk, &device));
    prepared.unwrap().unwrap();
}

fn change(pool: &Pool, disk: &Arc<Disk>) {
    for worker in pool.workers() {
        let disk = disk.clone();
        worker.call(move |w| w.io().change_device(&disk)).unwrap();
    }
}

fn two_workers() -> Pool {
    let options = WorkerOptions {
        count: 2,
        cpus: Vec::new(),
        poll: PollLimit::Always.into(),
    };
    Pool::start(&options).unwrap()
}

fn rounds(seen: &Seen) -> [u64; 2] {
    seen.rounds.each_ref().map(|n| n.load(Ordering::Relaxed))
}

fn wait_until(otherwise: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "{otherwise}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn reads_return_the_last_write_across_replacements() {
    let folder = tempfile::tempdir().unwrap();
    let first = new_device(0, folder.path());
    let disk = Arc::new(Disk::new("d", None, Arc::clone(&first)).unwrap());
    let pool = two_workers();
    let seen = Arc::new(Seen::default());
    start(&pool, &disk, &seen);
    let mut old = vec![first];
    for nth in 1..=REPLACEMENTS {
        let before = rounds(&seen);
        let new = new_device(nth, folder.path());
        let workers = pool.workers();
        workers
            .iter()
            .for_each(|worker| prepare(worker, &disk, &new));
        // A device that is prepared and dropped has no effect.
        if nth % 5 == 0 {
            for worker in &workers {
                let dropped = disk.clone();
                worker
                    .call(move |w| w.io().drop_prepared(&dropped))
                    .unwrap();
                prepare(worker, &disk, &new);
            }
        }
        let held = disk.hold(0, u64::MAX).unwrap();
        copy(&disk.device(), &new);
        disk.replace_device(Arc::clone(&new)).unwrap();
        change(&pool, &disk);
        drop(held);
        old.push(new);
        // Both clients continue on the new device.
        let both = |seen: &[u64; 2]| seen.iter().zip(before).all(|(now, n)| *now >= n + 3);
        wait_until("it hangs", || both(&rounds(&seen)));
    }
    assert_eq!(seen.wrong.load(Ordering::Relaxed), 0);
    // Replaced devices are unused, and their channels are closed.
    old.pop();
    let is_unused = |device: &Arc<dyn BlockDevice>| Arc::strong_count(device) == 1;
    wait_until("channels stay", || old.iter().all(is_unused));
    seen.over.store(true, Ordering::Relaxed);
}

#[test]
fn mirror_with_a_hung_target_is_replaced_by_its_source() {
    let folder = tempfile::tempdir().unwrap();
    let source = new_device(0, folder.path());
    let faults = vec![Fault {
        kind: IoKind::Write,
        skip: 0,
        times: 2,
        action: FaultAction::Hold,
    }];
    let plan = FaultPlan {
        faults,
        shuffle: None,
    };
    let target = Arc::new(Faulty::new(new_device(0, folder.path()), plan));
    let mirror = Arc::new(Mirror::new(Arc::clone(&source), Arc::clone(&target) as _));
    let progress = Arc::clone(mirror.progress());
    progress.advance(SIZE);
    let disk = Arc::new(Disk::new("d", None, Arc::clone(&mirror) as _).unwrap());
    let pool = two_workers();
    let seen = Arc::new(Seen::default());
    start(&pool, &disk, &seen);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(rounds(&seen), [0, 0], "the writes wait for the target");

    progress.abandon();
    wait_until("clients wait for the target", || {
        rounds(&seen).iter().all(|n| *n > 3)
    });
    assert_eq!(progress.detached(), 2);
    let workers = pool.workers();
    workers
        .iter()
        .for_each(|worker| prepare(worker, &disk, &source));
    let held = disk.hold(0, u64::MAX).unwrap();
    disk.replace_device(Arc::clone(&source)).unwrap();
    change(&pool, &disk);
    drop(held);
    let before = rounds(&seen);
    wait_until("the source is not used", || {
        rounds(&seen).iter().zip(before).all(|(now, n)| *now > n)
    });
    // Range locks do not wait for the target either.
    drop(disk.hold(0, u64::MAX).unwrap());

    assert_eq!(progress.detached(), 2);
    target.release();
    wait_until("the channels of the mirror stay", || {
        Arc::strong_count(&mirror) == 1 && progress.detached() == 0
    });
    assert_eq!(seen.wrong.load(Ordering::Relaxed), 0);
    seen.over.store(true, Ordering::Relaxed);
}
