//! A device that cannot be attached is retried by the worker, not by each I/O.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bdev::{Attach, BlockDevice, Disk, DiskState, IoChannel, Layer, Null, NullOptions, Submission};
use block::{IoErrorKind, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use latency::Clock;
use reactor::{DiskHandle, Source, SourceId, Tag, Worker};
use uring::Ring;

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
