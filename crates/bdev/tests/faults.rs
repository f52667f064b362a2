//! Layers over block devices execute their plan exactly.

mod common;

use std::sync::Arc;
use std::time::Duration;

use bdev::{BlockDevice, Delay, Fault, FaultAction, FaultPlan, Faulty, Ram, RamOptions};
use block::{AtomicWrites, IoError, IoErrorKind, IoFlags, IoKind, IoRequest};
use common::{Worker, filled};
use guest_memory::IoBuffer;

const EIO: IoError = IoError::with_errno(IoErrorKind::WriteMedium, 5);

fn ram() -> Arc<dyn BlockDevice> {
    let options = RamOptions {
        size: 1 << 20,
        ..RamOptions::default()
    };
    Arc::new(Ram::create(options).unwrap())
}

fn faulty(kind: IoKind, skip: u64, times: u64, action: FaultAction) -> Faulty {
    let fault = Fault {
        kind,
        skip,
        times,
        action,
    };
    let plan = FaultPlan {
        faults: vec![fault],
        shuffle: None,
    };
    Faulty::new(ram(), plan)
}

#[test]
fn nth_write_fails_without_effect() {
    let faulty = faulty(IoKind::Write, 1, 2, FaultAction::Fail(EIO));
    let mut worker = Worker::new(&faulty);
    let outcomes: Vec<_> = (0..4).map(|n| worker.write(n * 512, &[7; 512])).collect();
    assert_eq!(outcomes, [Ok(()), Err(EIO), Err(EIO), Ok(())]);
    let read = worker.read(0, 2048).unwrap();
    assert_eq!([read[0], read[512], read[1024], read[1536]], [7, 0, 0, 7]);
}

#[test]
fn torn_write_writes_its_beginning() {
    let faulty = faulty(IoKind::Write, 0, 1, FaultAction::Torn(512, EIO));
    let mut worker = Worker::new(&faulty);
    let tag = worker.submit(IoRequest::write(0, 1024), filled(&[7; 1024]));
    let (outcome, buffer) = worker.wait(tag);
    assert_eq!((outcome, buffer.len()), (Err(EIO), 1024));
    let read = worker.read(0, 1024).unwrap();
    assert_eq!([read[511], read[512]], [7, 0]);
}

#[test]
fn atomic_write_is_never_torn_and_layers_pass_the_promise_on() {
    let faulty = Arc::new(faulty(IoKind::Write, 0, 1, FaultAction::Torn(512, EIO)));
    let promised = Some(AtomicWrites {
        bytes_max: 1 << 20,
        unit: 512,
    });
    assert_eq!(ram().info().atomic_writes, promised);
    assert_eq!(faulty.info().atomic_writes, promised);
    let mut worker = Worker::new(&*faulty);
    let write = IoRequest::write(0, 1024).flagged(IoFlags::ATOMIC);
    let tag = worker.submit(write, filled(&[7; 1024]));
    assert_eq!(worker.wait(tag).0, Err(EIO));
    assert_eq!(worker.read(0, 1024).unwrap(), [0; 1024]);
    let tag = worker.submit(write, filled(&[7; 1024]));
    assert_eq!(worker.wait(tag).0, Ok(()));
    assert_eq!(worker.read(0, 1024).unwrap(), [7; 1024]);
    let delay = Delay::new(faulty, Duration::ZERO);
    assert_eq!(delay.info().atomic_writes, promised);
}

#[test]
fn reverted_fault_lets_the_write_pass() {
    let faulty = faulty(IoKind::Write, 0, 1, FaultAction::Undone(EIO));
    let mut worker = Worker::new(&faulty);
    assert_eq!(worker.write(0, &[7; 512]), Err(EIO));
    assert_eq!(worker.read(0, 512).unwrap(), [7; 512]);
}

#[test]
fn held_read_waits_for_its_release_and_others_overtake_it() {
    let faulty = faulty(IoKind::Read, 0, 1, FaultAction::Hold);
    let mut worker = Worker::new(&faulty);
    let held = worker.submit(IoRequest::read(0, 512), IoBuffer::owned(512));
    worker.read(0, 512).unwrap();
    assert_eq!(worker.backend.in_flight(), 1);
    faulty.release();
    assert_eq!(worker.wait(held).0, Ok(()));
    assert_eq!(worker.backend.in_flight(), 0);
}

#[test]
fn shuffle_changes_the_order_and_repeats_it() {
    let order = |seed| {
        let plan = FaultPlan {
            shuffle: Some(seed),
            ..FaultPlan::default()
        };
        let mut worker = Worker::new(&Faulty::new(ram(), plan));
        let tags: Vec<u64> = (0..20)
            .map(|n| worker.submit(IoRequest::read(n * 512, 512), IoBuffer::owned(512)))
            .collect();
        for tag in &tags {
            assert_eq!(worker.wait(*tag).0, Ok(()));
        }
        assert_ne!(worker.order, tags);
        worker.order
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
}

#[test]
fn fault_injected_later_hits_later() {
    let faulty = Faulty::new(ram(), FaultPlan::default());
    let mut worker = Worker::new(&faulty);
    assert_eq!(worker.do_plain(IoRequest::flush()), Ok(()));
    faulty.inject(Fault {
        kind: IoKind::Flush,
        skip: 0,
        times: u64::MAX,
        action: FaultAction::Fail(EIO),
    });
    assert_eq!(worker.do_plain(IoRequest::flush()), Err(EIO));
}

#[test]
fn wrappers_can_be_nested_both_ways() {
    let time = Duration::from_micros(100);
    let shuffle = || FaultPlan {
        shuffle: Some(3),
        ..FaultPlan::default()
    };
    let outer = Delay::new(Arc::new(Faulty::new(ram(), shuffle())), time);
    let inner = Faulty::new(Arc::new(Delay::new(ram(), time)), shuffle());
    for device in [&outer as &dyn BlockDevice, &inner] {
        let mut worker = Worker::new(device);
        let tags: Vec<u64> = (0..10)
            .map(|n| worker.submit(IoRequest::write(n * 512, 512), filled(&[n as u8; 512])))
            .collect();
        for tag in tags {
            assert_eq!(worker.wait(tag).0, Ok(()));
        }
        assert_eq!(worker.read(9 * 512, 512).unwrap(), [9; 512]);
        assert_eq!(worker.backend.in_flight(), 0);
    }
}
