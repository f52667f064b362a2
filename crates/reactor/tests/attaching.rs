//! A device that cannot be attached is retried by the worker, not by each I/O.

mod common;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bdev::{
    Attach, BlockDevice, CacheMode, Disk, DiskState, File, FileLock, FileOptions, IoChannel, Layer,
    Null, NullOptions, Submission, release_deadline,
};
use block::{IoErrorKind, IoOutcome, IoRequest};
use common::Recorder;
use guest_memory::IoBuffer;
use latency::Clock;
use reactor::{DiskHandle, Source, SourceId, Tag, Worker};
use uring::{Owner, Ring};

/// A device that refuses the first attempts to attach it.
struct Shy {
    inner: Null,
    refusals: u32,
    attempts: Arc<AtomicU32>,
}

impl Layer for Shy {
    fn inner(&self) -> &dyn BlockDevice {
        &self.inner
    }

    fn layer_kind(&self) -> &'static str {
        "shy"
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        // An owner allocated for a failed attempt is released.
        attach.owner();
        match self.attempts.fetch_add(1, Ordering::Relaxed) {
            nth if nth < self.refusals => Err(io::Error::other("not now")),
            _ => self.inner.attach(attach),
        }
    }
}

fn shy(refusals: u32) -> (Arc<Disk>, Arc<AtomicU32>) {
    let attempts = Arc::new(AtomicU32::new(0));
    let device = Shy {
        inner: Null::create(NullOptions::default()).unwrap(),
        refusals,
        attempts: attempts.clone(),
    };
    let disk = Disk::new("d", None, Arc::new(device)).unwrap();
    (Arc::new(disk), attempts)
}

fn read(worker: &mut Worker, handle: DiskHandle) -> IoOutcome {
    let source = worker.add(|_, id| Err::<Box<dyn Source>, SourceId>(id));
    let tag = Tag {
        source: source.expect_err("only the number is wanted"),
        slot: 0,
    };
    let mut buffer = IoBuffer::owned(512);
    let io = IoRequest::read(0, 512);
    match worker.io().submit(handle, &io, &mut buffer, tag) {
        Submission::Done(outcome) => outcome,
        Submission::Pending => panic!("a null disk answers at once"),
    }
}

#[test]
fn failed_attach_is_tried_again_with_back_off_and_not_for_each_io() {
    let (disk, attempts) = shy(2);
    let mut worker = Worker::standalone(Ring::new(64).unwrap(), Clock::new()).unwrap();
    let handle = worker.io().open(&disk);
    let offline = Err(IoErrorKind::Offline.into());
    for _ in 0..10_000 {
        assert_eq!(read(&mut worker, handle), offline);
    }
    assert_eq!(attempts.load(Ordering::Relaxed), 1);
    let DiskState::Unavailable { reason, next_try } = disk.state().get() else {
        panic!("{}", disk.state().get());
    };
    assert_eq!(reason, "not now");
    assert!(next_try <= Duration::from_millis(100));
    // Other workers' handles and later users of this one are not affected.
    assert_eq!(worker.io().open(&disk), handle);
    let patience = Instant::now() + Duration::from_secs(60);
    while read(&mut worker, handle) == offline {
        assert!(Instant::now() < patience, "never attached");
        worker.iterate_once();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(attempts.load(Ordering::Relaxed), 3);
    assert_eq!(disk.state().get(), DiskState::Ready);
}

#[test]
fn handle_that_waits_to_attach_closes_at_once_and_leaves_no_timer() {
    let (disk, attempts) = shy(u32::MAX);
    let mut worker = Worker::standalone(Ring::new(64).unwrap(), Clock::new()).unwrap();
    for _ in 0..100 {
        let handle = worker.io().open(&disk);
        worker.io().close(handle);
        assert_eq!(disk.state().get(), DiskState::Ready, "no source needs it");
    }
    let patience = Instant::now() + Duration::from_secs(60);
    while worker.io().ring().in_flight() > 0 {
        assert!(Instant::now() < patience, "a timer is left");
        worker.iterate_once();
    }
    assert_eq!(attempts.load(Ordering::Relaxed), 100);
}

/// A worker with one disk, and the ends of its I/Os.
struct Bed {
    worker: Worker,
    handle: DiskHandle,
    source: SourceId,
    recorder: Recorder,
}

impl Bed {
    fn new(disk: &Arc<Disk>) -> Bed {
        let mut worker = Worker::standalone(Ring::new(64).unwrap(), Clock::new()).unwrap();
        let recorder = Recorder::default();
        let source = recorder.add_to(&mut worker);
        Bed {
            handle: worker.io().open(disk),
            worker,
            source,
            recorder,
        }
    }

    fn submit(&mut self) -> Submission {
        let tag = Tag {
            source: self.source,
            slot: 0,
        };
        let (io, mut buffer) = (IoRequest::read(0, 512), IoBuffer::owned(512));
        self.worker.io().submit(self.handle, &io, &mut buffer, tag)
    }

    fn read(&mut self) -> IoOutcome {
        if let Submission::Done(outcome) = self.submit() {
            return outcome;
        }
        let patience = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some((_, outcome, _)) = self.recorder.ended.borrow_mut().pop() {
                return outcome;
            }
            assert!(Instant::now() < patience, "the I/O has not ended");
            self.worker.iterate_once();
        }
    }
}

fn in_turns(path: &Path) -> File {
    let options = FileOptions {
        cache: CacheMode::Writeback,
        lock: FileLock::WhileActive,
        ..FileOptions::new(path)
    };
    File::open(options).unwrap()
}

/// A thread of the device takes the locks. The worker never waits for it, and the I/O of a disk that reports errors does.
#[test]
fn io_waits_for_locks_and_fails_if_another_process_has_them() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let disk = || Arc::new(Disk::new("d", None, Arc::new(in_turns(file.path()))).unwrap());
    let (mine, other) = (disk(), disk());
    let mut bed = Bed::new(&mine);
    assert_eq!(bed.read(), Ok(()));
    assert_eq!(mine.state().get(), DiskState::Ready);

    let mut waiting = Bed::new(&other);
    let offline = Err(IoErrorKind::Offline.into());
    assert_eq!(waiting.read(), offline);
    assert_ne!(other.state().get(), DiskState::Ready);
    bed.worker.io().close(bed.handle);
    mine.wait_for_release(release_deadline());
    let patience = Instant::now() + Duration::from_secs(60);
    while waiting.read() == offline {
        assert!(Instant::now() < patience, "the locks are free");
        waiting.worker.iterate_once();
    }
    assert_eq!(waiting.read(), Ok(()));

    // A handle that closes while its locks are being taken does not keep them.
    waiting.worker.io().close(waiting.handle);
    other.wait_for_release(release_deadline());
    let handle = bed.worker.io().open(&mine);
    bed.worker.io().close(handle);
    mine.wait_for_release(release_deadline());
    let (mut ring, mut owners) = (Ring::new(4).unwrap(), (0..).map(Owner));
    let mut owner = || owners.next().unwrap();
    let device = other.device();
    let attached = device.attach(&mut Attach::new(&mut ring, &mut owner));
    assert!(attached.is_ok(), "{:?}", attached.err());
}
