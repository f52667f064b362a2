//! Failed I/Os on a disk that holds errors wait with their data, and continue, fail or are cancelled as required.

mod common;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bdev::{
    Attach, BlockDevice, Disk, DiskEvent, DiskState, ErrorPolicy, Fault, FaultAction, FaultPlan,
    Faulty, IoChannel, Layer, OnError, Ram, RamOptions, Submission,
};
use block::{IoError, IoErrorKind, IoKind, IoRequest};
use common::{Ended, Recorder};
use guest_memory::IoBuffer;
use latency::Clock;
use reactor::{DiskHandle, SourceId, Tag, Worker};
use uring::Ring;

/// A worker with a client and a disk on which all writes fail until [`Rig::heal`].
struct Rig {
    worker: Worker,
    disk: Arc<Disk>,
    source: SourceId,
    handle: DiskHandle,
    in_flight: Rc<RefCell<usize>>,
    ended: Ended,
}

fn policy(on_error: OnError) -> ErrorPolicy {
    ErrorPolicy {
        on_error,
        ..ErrorPolicy::default()
    }
}

/// A device that fails until it is healed; `absent` and `locked` also make attaching fail.
struct Sick {
    inner: Faulty,
    absent: AtomicBool,
    /// Another process has the locks.
    locked: AtomicBool,
}

impl Layer for Sick {
    fn inner(&self) -> &dyn BlockDevice {
        &self.inner
    }

    fn layer_kind(&self) -> &'static str {
        "sick"
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> std::io::Result<Box<dyn IoChannel>> {
        if self.absent.load(Ordering::Acquire) {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        if self.locked.load(Ordering::Acquire) {
            return Err(std::io::ErrorKind::ResourceBusy.into());
        }
        self.inner.attach(attach)
    }
}

fn full() -> IoError {
    IoError::with_errno(IoErrorKind::NoSpace, 28)
}

fn sick(times: u64, error: IoError, shuffle: Option<u64>) -> Arc<Sick> {
    let ram = Ram::create(RamOptions {
        size: 1 << 20,
        ..RamOptions::default()
    });
    let plan = FaultPlan {
        faults: vec![Fault {
            kind: IoKind::Write,
            skip: 0,
            times,
            action: FaultAction::Fail(error),
        }],
        shuffle,
    };
    Arc::new(Sick {
        inner: Faulty::new(Arc::new(ram.unwrap()), plan),
        absent: AtomicBool::new(false),
        locked: AtomicBool::new(false),
    })
}

impl Rig {
    fn new(device: Arc<Sick>, on_error: OnError) -> Rig {
        let disk = Arc::new(Disk::new("d", None, device).unwrap());
        disk.set_error_policy(policy(on_error));
        let mut worker = Worker::standalone(Ring::new(64).unwrap(), Clock::new()).unwrap();
        let handle = worker.io().open(&disk);
        let recorder = Recorder {
            disk: handle,
            ..Recorder::default()
        };
        let source = recorder.add_to(&mut worker);
        let Recorder {
            in_flight, ended, ..
        } = recorder;
        Rig {
            worker,
            disk,
            source,
            handle,
            in_flight,
            ended,
        }
    }

    fn submit(&mut self, request: &IoRequest, slot: u32, byte: u8) -> Submission {
        let mut buffer = IoBuffer::owned(4096);
        buffer.write_at(0, &[byte; 4096]);
        let tag = Tag {
            source: self.source,
            slot,
        };
        let io = self.worker.io();
        let submitted = io.submit(self.handle, request, &mut buffer, tag);
        *self.in_flight.borrow_mut() += usize::from(submitted == Submission::Pending);
        submitted
    }

    fn write(&mut self, slot: u32) {
        let request = IoRequest::write(u64::from(slot) * 4096, 4096);
        let submitted = self.submit(&request, slot, slot as u8 + 1);
        assert_eq!(submitted, Submission::Pending);
        self.iterate();
    }

    /// Runs enough iterations for all work that does not wait for a device.
    fn iterate(&mut self) {
        for _ in 0..64 {
            self.worker.iterate_once();
        }
    }

    fn waiting(&self) -> usize {
        self.disk
            .state()
            .waiting()
            .map_or(0, |waiting| waiting.count)
    }

    fn outcomes(&self) -> Vec<(u32, Option<IoErrorKind>)> {
        let ended = self.ended.borrow();
        let outcomes = ended.iter();
        let mut outcomes: Vec<_> = outcomes
            .map(|(slot, outcome, _)| (*slot, outcome.err().map(|error| error.kind)))
            .collect();
        outcomes.sort_unstable_by_key(|(slot, _)| *slot);
        outcomes
    }

    /// Returns the byte on the disk, read without the client.
    fn byte(&mut self, slot: u32) -> u8 {
        let before = self.ended.borrow().len();
        let request = IoRequest::read(u64::from(slot) * 4096, 4096);
        assert_eq!(self.submit(&request, 99, 0), Submission::Pending);
        self.iterate();
        let (_, outcome, buffer) = self.ended.borrow_mut().remove(before);
        assert_eq!(outcome, Ok(()));
        let mut byte = [0];
        buffer.read_at(0, &mut byte);
        byte[0]
    }
}

#[test]
fn failed_io_waits_with_its_data_and_is_resumed() {
    // Once with synchronous completion, once through the ring.
    for shuffle in [None, Some(7)] {
        let mut rig = Rig::new(sick(5, full(), shuffle), OnError::Stop);
        (0..3).for_each(|slot| rig.write(slot));
        assert_eq!((rig.waiting(), rig.outcomes()), (3, Vec::new()));
        let waiting = rig.disk.state().waiting().unwrap();
        assert_eq!(waiting.error, full());
        // The device fails two of them again.
        let disk = rig.disk.clone();
        rig.worker.resume_disk(&disk);
        rig.iterate();
        assert_eq!((rig.waiting(), rig.outcomes()), (2, vec![(2, None)]));
        rig.worker.resume_disk(&disk);
        rig.iterate();
        assert_eq!(rig.waiting(), 0);
        assert_eq!(rig.outcomes(), [(0, None), (1, None), (2, None)]);
        assert_eq!(rig.disk.state().waiting(), None);
        if shuffle.is_some() {
            assert_eq!([0, 1, 2].map(|slot| rig.byte(slot)), [1, 2, 3]);
        }
    }
}

#[test]
fn enospc_policy_waits_for_a_full_device_only() {
    let broken = IoError::from(IoErrorKind::WriteMedium);
    for (on_error, error, waits) in [
        (OnError::Report, full(), false),
        (OnError::Enospc, full(), true),
        (OnError::Enospc, broken, false),
        (OnError::Stop, broken, true),
        (OnError::Stop, IoErrorKind::ClientMemory.into(), false),
    ] {
        let mut rig = Rig::new(sick(1, error, Some(3)), on_error);
        rig.write(0);
        let expected = if waits {
            Vec::new()
        } else {
            vec![(0, Some(error.kind))]
        };
        assert_eq!(rig.outcomes(), expected, "{on_error:?} {error:?}");
        assert_eq!(rig.waiting(), usize::from(waits), "{on_error:?} {error:?}");
    }
}

#[test]
fn waiting_io_is_reported_after_on_error_report() {
    let mut rig = Rig::new(sick(2, full(), None), OnError::Stop);
    rig.write(0);
    rig.disk.set_error_policy(policy(OnError::Report));
    let disk = rig.disk.clone();
    rig.worker.resume_disk(&disk);
    rig.iterate();
    assert_eq!(rig.outcomes(), [(0, Some(IoErrorKind::NoSpace))]);
    assert_eq!(rig.waiting(), 0);
}

#[test]
fn waiting_io_of_an_aborted_task_is_cancelled_and_others_wait_on() {
    let mut rig = Rig::new(sick(9, full(), None), OnError::Stop);
    (0..3).for_each(|slot| rig.write(slot));
    let source = rig.source;
    rig.worker.io().cancel_waiting(source, |slot| slot == 1);
    assert_eq!(rig.waiting(), 2);
    rig.iterate();
    assert_eq!(rig.outcomes(), [(1, Some(IoErrorKind::Cancelled))]);
}

#[test]
fn stopped_source_receives_waiting_ios_as_errors() {
    let mut rig = Rig::new(sick(9, full(), Some(3)), OnError::Stop);
    rig.write(0);
    // A second write is in flight when the source stops, and then fails.
    let request = IoRequest::write(4096, 4096);
    assert_eq!(rig.submit(&request, 1, 2), Submission::Pending);
    let stopped = Rc::new(RefCell::new(false));
    let signal = stopped.clone();
    let source = rig.source;
    rig.worker
        .stop(source, move |_, _| *signal.borrow_mut() = true);
    rig.iterate();
    assert!(
        *stopped.borrow(),
        "{} I/Os in flight",
        rig.in_flight.borrow()
    );
    let no_space = Some(IoErrorKind::NoSpace);
    assert_eq!(rig.outcomes(), [(0, no_space), (1, no_space)]);
    assert_eq!(rig.waiting(), 0);
}

#[test]
fn removed_disk_ends_waiting_io() {
    let mut rig = Rig::new(sick(9, full(), None), OnError::Stop);
    rig.write(0);
    let disk = rig.disk.clone();
    rig.worker.close_disk(&disk);
    rig.iterate();
    assert_eq!(rig.outcomes(), [(0, Some(IoErrorKind::NoSpace))]);
    assert_eq!(rig.waiting(), 0);
}

#[test]
fn closed_disk_refuses_waiting_io() {
    let mut rig = Rig::new(sick(9, full(), None), OnError::Stop);
    rig.write(0);
    rig.disk.close();
    rig.iterate();
    assert_eq!(rig.outcomes(), [(0, Some(IoErrorKind::Closed))]);
}

#[test]
fn range_lock_does_not_wait_for_an_io_that_waits() {
    let mut rig = Rig::new(sick(1, full(), Some(3)), OnError::Stop);
    rig.write(0);
    let (grant, granted) = std::sync::mpsc::channel();
    let locks = rig.disk.range_locks().clone();
    locks.acquire(0, 4096, move |lock| drop(grant.send(lock)));
    rig.iterate();
    let lock = granted.try_recv().expect("granted");
    let disk = rig.disk.clone();
    rig.worker.resume_disk(&disk);
    rig.iterate();
    assert_eq!((rig.waiting(), rig.outcomes()), (0, Vec::new()));
    drop(lock);
    rig.iterate();
    assert_eq!(rig.outcomes(), [(0, None)]);
}

#[test]
fn io_waits_for_a_device_until_it_can_be_attached() {
    let device = sick(0, full(), Some(3));
    device.absent.store(true, Ordering::Release);
    let mut rig = Rig::new(device.clone(), OnError::Stop);
    rig.write(0);
    let waiting = rig.disk.state().waiting().unwrap();
    assert_eq!(waiting.error.kind, IoErrorKind::Offline);
    device.absent.store(false, Ordering::Release);
    // The worker retries by itself. The client waits until then.
    while rig.outcomes().is_empty() {
        rig.iterate();
    }
    assert_eq!((rig.waiting(), rig.outcomes()), (0, vec![(0, None)]));
    assert_eq!(rig.byte(0), 1);
}

/// Requests wait for a lock until the time limit, fail from then on, and are executed when the lock is free.
#[test]
fn wait_for_a_lock_ends_at_its_time_limit() {
    const LIMIT: Duration = Duration::from_secs(60);
    for lock_timeout in [0, 1] {
        let device = sick(0, full(), None);
        device.locked.store(true, Ordering::Release);
        let mut rig = Rig::new(device.clone(), OnError::Stop);
        rig.disk.set_error_policy(ErrorPolicy {
            lock_timeout,
            ..policy(OnError::Stop)
        });
        let events = Arc::new(Mutex::new(Vec::new()));
        let seen = events.clone();
        let on_event = move |event: DiskEvent| seen.lock().unwrap().push(event);
        rig.disk.state().on_event(on_event);
        rig.write(0);
        assert_eq!((rig.waiting(), rig.outcomes()), (1, Vec::new()));
        let start = Instant::now();
        while rig.outcomes().is_empty() && start.elapsed() < Duration::from_millis(1500) {
            rig.worker.iterate_once();
        }
        let offline = Some(IoErrorKind::Offline);
        let timed_out = lock_timeout > 0;
        let (waiting, outcomes) = match timed_out {
            true => (0, vec![(0, offline)]),
            false => (1, Vec::new()),
        };
        assert_eq!((rig.waiting(), rig.outcomes()), (waiting, outcomes));
        assert_eq!(
            events.lock().unwrap().contains(&DiskEvent::LockTimeout),
            timed_out
        );
        if timed_out {
            let failed = rig.submit(&IoRequest::write(4096, 4096), 1, 2);
            assert_eq!(failed, Submission::Done(Err(IoErrorKind::Offline.into())));
        }
        device.locked.store(false, Ordering::Release);
        while rig.disk.state().get() != DiskState::Ready {
            assert!(start.elapsed() < LIMIT, "{}", rig.disk.state().get());
            rig.worker.iterate_once();
        }
        let request = IoRequest::write(2 * 4096, 4096);
        match rig.submit(&request, 2, 3) {
            Submission::Done(outcome) => assert_eq!(outcome, Ok(())),
            Submission::Pending => {
                rig.iterate();
                assert_eq!(rig.outcomes().last(), Some(&(2, None)));
            }
        }
        assert!(events.lock().unwrap().contains(&DiskEvent::LockResumed));
    }
}
