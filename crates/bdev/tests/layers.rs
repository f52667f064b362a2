//! Nested layers: each receives its own completions, and aborts reach the layer that holds the I/O.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::{
    Attach, BlockDevice, Delay, DiscardMode, Fault, FaultAction, FaultPlan, Faulty, IoChannel,
    Layer, Ram, RamOptions, Tag, with_discard,
};
use block::{DiskInfo, IoKind, IoRequest};
use common::{CacheMode, Worker, filled, open, options};
use guest_memory::IoBuffer;

const SIZE: u64 = 1 << 20;
const HOUR: Duration = Duration::from_secs(3600);

fn ram() -> Arc<dyn BlockDevice> {
    let options = RamOptions {
        size: SIZE,
        ..RamOptions::default()
    };
    Arc::new(Ram::create(options).unwrap())
}

fn shuffle(seed: u64) -> FaultPlan {
    FaultPlan {
        shuffle: Some(seed),
        ..FaultPlan::default()
    }
}

#[test]
fn layers_of_the_same_kind_stack_without_sharing_tokens() {
    let short = Duration::from_micros(50);
    let folder = tempfile::tempdir().unwrap();
    let file: Arc<dyn BlockDevice> = open(options(
        &folder.path().join("disk"),
        SIZE,
        CacheMode::Writeback,
    ));
    for bottom in [ram(), file] {
        let first = Arc::new(Delay::new(bottom, short));
        let second = Arc::new(Faulty::new(first, shuffle(3)));
        let third = Arc::new(Delay::new(second, short));
        let top = Faulty::new(third, shuffle(5));
        let mut worker = Worker::new(&top);
        let written: Vec<u64> = (0..64u8)
            .map(|block| {
                let io = IoRequest::write(u64::from(block) * 512, 512);
                worker.submit(io, filled(&[block; 512]))
            })
            .collect();
        for tag in written {
            assert_eq!(worker.wait(tag).0, Ok(()));
        }
        for block in 0..64u8 {
            let read = worker.read(u64::from(block) * 512, 512).unwrap();
            assert_eq!(read, [block; 512]);
        }
        assert_eq!(worker.backend.in_flight(), 0);
        worker.backend.close(&mut worker.ring);
        assert!(worker.backend.is_closed());
    }
}

#[test]
fn abort_ends_an_io_that_waits_in_a_layer_below() {
    let delayed = Fault {
        kind: IoKind::Write,
        skip: 0,
        times: 1,
        action: FaultAction::Delay(HOUR),
    };
    let plan = FaultPlan {
        faults: vec![delayed],
        shuffle: None,
    };
    let devices: [Arc<dyn BlockDevice>; 3] = [
        Arc::new(Delay::new(ram(), HOUR)),
        Arc::new(Faulty::new(Arc::new(Delay::new(ram(), HOUR)), shuffle(7))),
        Arc::new(Delay::new(
            Arc::new(Faulty::new(ram(), plan)),
            Duration::ZERO,
        )),
    ];
    for device in devices {
        let begun = Instant::now();
        let mut worker = Worker::new(&*device);
        let tag = worker.submit(IoRequest::write(0, 512), filled(&[1; 512]));
        assert_eq!(worker.backend.in_flight(), 1);
        worker.backend.abort(&mut worker.ring, Tag(tag + 1));
        assert_eq!(worker.backend.in_flight(), 1, "another I/O was named");
        worker.backend.abort(&mut worker.ring, Tag(tag));
        // The device had executed it by then.
        assert_eq!(worker.wait(tag).0, Ok(()));
        assert!(begun.elapsed() < HOUR / 2);
    }
}

#[test]
fn abort_of_a_file_io_ends_only_this_io_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = open(options(
        &folder.path().join("disk"),
        SIZE,
        CacheMode::Writeback,
    ));
    let mut worker = Worker::new(&*file);
    let tags: Vec<u64> = (0..32)
        .map(|block| worker.submit(IoRequest::read(block * 4096, 4096), IoBuffer::owned(4096)))
        .collect();
    for tag in tags.iter().step_by(2) {
        worker.backend.abort(&mut worker.ring, Tag(*tag));
    }
    for (index, tag) in tags.into_iter().enumerate() {
        let (outcome, buffer) = worker.wait(tag);
        assert_eq!(buffer.len(), 4096);
        if index % 2 == 1 {
            assert_eq!(outcome, Ok(()));
        }
    }
}

/// A RAM disk that claims other abilities for discards.
struct Claims {
    ram: Arc<dyn BlockDevice>,
    discard_granularity: Option<u32>,
}

impl Layer for Claims {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.ram
    }

    fn layer_kind(&self) -> &'static str {
        "claims"
    }

    fn layer_info(&self, inner: DiskInfo) -> DiskInfo {
        DiskInfo {
            discard_granularity: self.discard_granularity,
            discard_zeroes: false,
            ..inner
        }
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> std::io::Result<Box<dyn IoChannel>> {
        self.ram.attach(attach)
    }
}

#[test]
fn discard_zeroes_or_is_ignored_by_mode() {
    let presented = ram().info();
    for discard_granularity in [None, Some(4096)] {
        let device: Arc<dyn BlockDevice> = Arc::new(Claims {
            ram: ram(),
            discard_granularity,
        });
        assert_eq!(
            DiscardMode::needed(&presented, &device.info()),
            DiscardMode::Zeroes
        );
        let zeroing = with_discard(DiscardMode::Zeroes, Arc::clone(&device));
        let info = zeroing.info();
        assert!(info.discard_zeroes && info.discard_granularity.is_some());
        assert_eq!(DiscardMode::needed(&presented, &info), DiscardMode::Unmap);
        let ignoring = with_discard(DiscardMode::Ignore, device);
        assert!(!ignoring.info().discard_zeroes && ignoring.info().discard_granularity.is_some());
        for (device, left) in [(ignoring, 7), (zeroing, 0)] {
            let mut worker = Worker::new(&*device);
            assert_eq!(worker.write(0, &[7; 8192]), Ok(()));
            assert_eq!(worker.do_plain(IoRequest::discard(0, 4096)), Ok(()));
            assert_eq!(worker.read(0, 4096).unwrap(), [left; 4096]);
            assert_eq!(worker.read(4096, 4096).unwrap(), [7; 4096]);
            let beyond = worker.do_plain(IoRequest::discard(SIZE, 4096));
            assert!(beyond.is_err(), "{beyond:?}");
        }
    }
    // A device that already behaves like that needs no layer.
    assert_eq!(with_discard(DiscardMode::Zeroes, ram()).kind(), "ram");
    let advice = DiskInfo {
        discard_zeroes: false,
        ..presented.clone()
    };
    let without = DiskInfo {
        discard_granularity: None,
        ..advice.clone()
    };
    for (presented, device, mode) in [
        (&advice, &presented, DiscardMode::Unmap),
        (&advice, &without, DiscardMode::Ignore),
        (&without, &without, DiscardMode::Unmap),
    ] {
        assert_eq!(DiscardMode::needed(presented, device), mode);
    }
}
