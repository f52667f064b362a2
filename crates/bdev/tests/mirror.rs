//! A mirror's target equals its source for every order of client writes. Also streaming and committing of images.

mod common;

use std::path::Path;
use std::sync::Arc;

use bdev::{
    BackingName, BlockDevice, BlockingIo, CacheMode, Fault, FaultAction, FaultPlan, Faulty, Image,
    ImageDevice, ImageOptions, Mirror, Ram, RamOptions,
};
use block::{IoError, IoErrorKind, IoFlags, IoKind, IoRequest};
use common::{Worker, become_read_only, filled, open, options};
use guest_memory::IoBuffer;
use proptest::prelude::*;

const BLOCK: u64 = 512;
const BLOCKS: u64 = 256;
const SIZE: u64 = BLOCK * BLOCKS;
/// Bytes copied at a time.
const PART: u64 = 32 * BLOCK;

fn ram() -> Arc<dyn BlockDevice> {
    let ram = Ram::create(RamOptions {
        size: SIZE,
        ..RamOptions::default()
    });
    Arc::new(ram.unwrap())
}

fn content(device: &Arc<dyn BlockDevice>) -> Vec<u8> {
    let mut bytes = vec![0; device.capacity().bytes() as usize];
    let mut io = BlockingIo::new(Arc::clone(device)).unwrap();
    io.read_at(0, &mut bytes).unwrap();
    bytes
}

#[derive(Clone, Debug)]
enum MirrorStep {
    Write(u64, u64, u8),
    Zero(u64, u64, bool),
    Discard(u64, u64),
    Flush,
    /// Copies the next part, with no I/O in flight.
    Copy,
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    (0..BLOCKS).prop_flat_map(|at| (Just(at), 1..=(BLOCKS - at).min(64)))
}

fn step() -> impl Strategy<Value = MirrorStep> {
    prop_oneof![
        5 => (range(), any::<u8>()).prop_map(|((at, n), byte)| MirrorStep::Write(at, n, byte)),
        1 => (range(), any::<bool>()).prop_map(|((at, n), unmap)| MirrorStep::Zero(at, n, unmap)),
        1 => range().prop_map(|(at, n)| MirrorStep::Discard(at, n)),
        1 => Just(MirrorStep::Flush),
        2 => Just(MirrorStep::Copy),
    ]
}

fn copy_part(source: &Arc<dyn BlockDevice>, target: &Arc<dyn BlockDevice>, mirror: &Mirror) {
    let from = mirror.progress().copied();
    if from == SIZE {
        return;
    }
    let mut bytes = vec![0; PART as usize];
    let mut io = BlockingIo::new(Arc::clone(source)).unwrap();
    io.read_at(from, &mut bytes).unwrap();
    let mut io = BlockingIo::new(Arc::clone(target)).unwrap();
    io.write_at(from, &bytes).unwrap();
    mirror.progress().advance(from + PART);
}

fn submit(worker: &mut Worker, step: &MirrorStep) -> Option<u64> {
    let (io, buffer) = match *step {
        MirrorStep::Write(at, n, byte) => {
            let data = vec![byte; (n * BLOCK) as usize];
            (IoRequest::write(at * BLOCK, n * BLOCK), filled(&data))
        }
        MirrorStep::Zero(at, n, unmap) => {
            let flags = if unmap { IoFlags::UNMAP } else { IoFlags::NONE };
            let io = IoRequest::write_zeroes(at * BLOCK, n * BLOCK).flagged(flags);
            (io, IoBuffer::default())
        }
        MirrorStep::Discard(at, n) => (
            IoRequest::discard(at * BLOCK, n * BLOCK),
            IoBuffer::default(),
        ),
        MirrorStep::Flush => (IoRequest::flush(), IoBuffer::default()),
        MirrorStep::Copy => return None,
    };
    Some(worker.submit(io, buffer))
}

fn overlaps(pending: &[(u64, MirrorStep)], next: &MirrorStep) -> bool {
    let range = |step: &MirrorStep| match *step {
        MirrorStep::Write(at, n, _) | MirrorStep::Zero(at, n, _) | MirrorStep::Discard(at, n) => {
            at..at + n
        }
        MirrorStep::Flush | MirrorStep::Copy => 0..0,
    };
    let next = range(next);
    let mut pending = pending.iter().map(|(_, step)| range(step));
    pending.any(|other| other.start < next.end && next.start < other.end)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn target_has_the_content_of_the_source(
        steps in prop::collection::vec(step(), 1..120),
        is_file_source in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| -> Arc<dyn BlockDevice> {
            open(options(&folder.path().join(name), SIZE, CacheMode::Writeback))
        };
        // One device completes synchronously, the other later.
        let (source, target) = match is_file_source {
            true => (file("source"), ram()),
            false => (ram(), file("target")),
        };
        // Previous content of the target must not matter.
        BlockingIo::new(Arc::clone(&target)).unwrap().write_at(0, &vec![0xee; SIZE as usize]).unwrap();
        let mirror = Mirror::new(Arc::clone(&source), Arc::clone(&target));
        let mut worker = Worker::new(&mirror);
        let mut pending: Vec<(u64, MirrorStep)> = Vec::new();
        let rest = std::iter::repeat_n(&MirrorStep::Copy, (SIZE / PART) as usize);
        for step in steps.iter().chain(rest) {
            let must_wait = matches!(step, MirrorStep::Copy) || pending.len() >= 8 || overlaps(&pending, step);
            if must_wait {
                for (tag, _) in pending.drain(..) {
                    worker.wait(tag).0.unwrap();
                }
            }
            match submit(&mut worker, step) {
                Some(tag) => pending.push((tag, step.clone())),
                None => copy_part(&source, &target, &mirror),
            }
        }
        prop_assert_eq!(mirror.progress().copied(), SIZE);
        prop_assert_eq!(mirror.progress().error(), None);
        prop_assert_eq!(worker.backend.in_flight(), 0);
        let (source, target) = (content(&source), content(&target));
        let differs = source.iter().zip(&target).position(|(a, b)| a != b);
        prop_assert_eq!(differs, None);
    }
}

#[test]
fn failed_target_is_invisible_to_clients() {
    let full = IoError::with_errno(IoErrorKind::NoSpace, 28);
    let plan = FaultPlan {
        faults: vec![Fault {
            kind: IoKind::Write,
            skip: 1,
            times: 1,
            action: FaultAction::Fail(full),
        }],
        shuffle: None,
    };
    let source = ram();
    let target = Faulty::new(ram(), plan);
    let mirror = Mirror::new(Arc::clone(&source), Arc::new(target));
    mirror.progress().advance(SIZE);
    let mut worker = Worker::new(&mirror);
    for byte in 1..=4 {
        worker.write(0, &[byte; 512]).unwrap();
        let error = (byte > 1).then_some(full);
        assert_eq!(mirror.progress().error(), error);
    }
    assert_eq!(content(&source)[..512], [4; 512]);
}

#[test]
fn failed_source_is_reported_to_the_client() {
    let broken = IoError::with_errno(IoErrorKind::WriteMedium, 5);
    let plan = FaultPlan {
        faults: vec![Fault {
            kind: IoKind::Write,
            skip: 0,
            times: 1,
            action: FaultAction::Fail(broken),
        }],
        shuffle: None,
    };
    let source = Faulty::new(ram(), plan);
    let mirror = Mirror::new(Arc::new(source), ram());
    mirror.progress().advance(SIZE);
    let mut worker = Worker::new(&mirror);
    assert_eq!(worker.write(0, &[1; 512]), Err(broken));
    assert_eq!(worker.write(0, &[2; 512]), Ok(()));
    let atomic = IoRequest::write(0, 512).flagged(IoFlags::ATOMIC);
    let refused = worker.run(atomic, filled(&[3; 512]));
    assert_eq!(refused, Err(IoErrorKind::Unsupported.into()));
}

fn image_options(path: &Path) -> ImageOptions {
    ImageOptions {
        cache: CacheMode::Writeback,
        trusts_name: true,
        ..ImageOptions::new(path)
    }
}

/// An image over an open raw disk, and another over that; after streaming all data nothing below is needed.
#[test]
fn image_over_an_open_disk_becomes_independent() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    const SIZE: u64 = 4 << 20;
    let base = open(options(&path("base.raw"), SIZE, CacheMode::Writeback));
    let mut worker = Worker::new(&*base);
    for at in (0..SIZE / 2).step_by(1 << 18) {
        worker.write(at, &[at.to_le_bytes()[2] | 1; 4096]).unwrap();
    }
    drop(worker);
    let name = |file: &str, format| BackingName {
        name: path(file).to_str().unwrap().to_owned(),
        format,
    };
    let below: Arc<dyn BlockDevice> = base.clone();
    let one = image_options(&path("one.qcow2"));
    let one = Image::create_over(&one, &name("base.raw", "raw"), below, SIZE).unwrap();
    let one: Arc<dyn BlockDevice> = Arc::new(one);
    become_read_only(&*base);
    Worker::new(&*one).write(65536, &[7; 65536]).unwrap();
    let two = image_options(&path("two.qcow2"));
    let again = Image::create_over(
        &one_options(&two, &path("one.qcow2")),
        &name("x", "raw"),
        ram(),
        SIZE,
    );
    assert!(again.err().unwrap().to_string().contains("already exists"));
    let two_image = Image::create_over(&two, &name("one.qcow2", "qcow2"), Arc::clone(&one), SIZE);
    let two_image: Arc<dyn BlockDevice> = Arc::new(two_image.unwrap());
    become_read_only(&*one);
    Worker::new(&*two_image).write(1 << 20, &[9; 512]).unwrap();
    let expected = content(&two_image);
    assert_eq!(expected[65536], 7);
    assert_eq!(expected[1 << 20..][..512], [9; 512]);

    let image = two_image.capabilities().image.unwrap();
    let mut at = 0;
    while at < SIZE {
        at = image.copy_up(at, 1 << 20).unwrap().end;
    }
    assert!(!image.close_backing().unwrap());
    assert!(image.backing().is_some());
    image.detach_backing().unwrap();
    assert!(image.backing().is_none());
    assert_eq!(content(&two_image), expected);
    assert!(image.close_backing().unwrap());
    assert_eq!(Arc::strong_count(&one), 1);
    // Discarded clusters have no entry any more, and read as zeroes.
    Worker::new(&*two_image)
        .do_plain(IoRequest::discard(65536, 65536))
        .unwrap();
    let mut expected = expected;
    expected[65536..][..65536].fill(0);
    assert_eq!(content(&two_image), expected);
    drop((two_image, one, base));
    std::fs::remove_file(path("base.raw")).unwrap();
    std::fs::remove_file(path("one.qcow2")).unwrap();
    let alone: Arc<dyn BlockDevice> = Arc::new(Image::open(&two).unwrap());
    assert_eq!(content(&alone), expected);
    // Holes have remained.
    let space = std::fs::metadata(path("two.qcow2")).unwrap();
    assert!(std::os::unix::fs::MetadataExt::blocks(&space) * 512 < SIZE / 2);
}

/// A worker that has read the backing image closes its channel to it while it uses the image.
#[test]
fn image_closes_its_former_backing_image() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let base = Image::create(&image_options(&path("base.qcow2")), SIZE).unwrap();
    let base: Arc<dyn BlockDevice> = Arc::new(base);
    Worker::new(&*base).write(65536, &[7; 65536]).unwrap();
    become_read_only(&*base);
    let name = BackingName {
        name: "base.qcow2".to_owned(),
        format: "qcow2",
    };
    let options = image_options(&path("over.qcow2"));
    let over = Image::create_over(&options, &name, Arc::clone(&base), SIZE).unwrap();
    let mut worker = Worker::new(&over);
    assert_eq!(worker.read(65536, 512).unwrap(), [7; 512]);
    let mut at = 0;
    while at < SIZE {
        at = over.copy_up(at, 1 << 20).unwrap().end;
    }
    over.detach_backing().unwrap();
    assert!(!over.close_backing().unwrap(), "a worker has a channel");
    // Holes of the backing image read as zeroes before and after the channel is closed.
    assert_eq!(worker.read(0, 512).unwrap(), [0; 512]);
    assert_eq!(worker.read(65536, 512).unwrap(), [7; 512]);
    worker.write(0, &[3; 512]).unwrap();
    assert!(over.close_backing().unwrap());
    assert!(!over.close_backing().unwrap(), "it is closed once");
    assert_eq!(Arc::strong_count(&base), 1);
    assert_eq!(
        worker.read(0, 1024).unwrap()[..],
        [[3; 512], [0; 512]].concat()
    );
    drop((worker, over, base));
    std::fs::remove_file(path("base.qcow2")).unwrap();
    let alone = Image::open(&options).unwrap();
    assert_eq!(Worker::new(&alone).read(65536, 512).unwrap(), [7; 512]);
}

fn one_options(like: &ImageOptions, path: &Path) -> ImageOptions {
    ImageOptions {
        path: path.to_owned(),
        ..like.clone()
    }
}

/// Cluster size and disk size of committed images, in bytes.
const CLUSTER: u64 = 64 << 10;
const COMMITTED: u64 = 24 * CLUSTER;

/// Spreads a step over a disk of the committed size.
fn spread(step: &MirrorStep) -> MirrorStep {
    let at = |at: u64| at * (COMMITTED / BLOCK / BLOCKS);
    match *step {
        MirrorStep::Write(from, n, byte) => MirrorStep::Write(at(from), n, byte),
        // Some of them are whole clusters.
        MirrorStep::Zero(from, n, unmap) => MirrorStep::Zero(at(from), n * 4, unmap),
        MirrorStep::Discard(from, n) => MirrorStep::Discard(at(from), n * 4),
        ref other => other.clone(),
    }
}

fn commit_part(opened: &bdev::Committable, mirror: &Mirror, part: u64) {
    let from = mirror.progress().copied();
    let end = (from + part).min(COMMITTED);
    if from == end {
        return;
    }
    let mut source = BlockingIo::new(Arc::clone(&opened.overlay)).unwrap();
    let mut target = BlockingIo::new(Arc::clone(&opened.base)).unwrap();
    let mut at = from;
    let image = opened.overlay.capabilities().image.unwrap();
    for (piece, is_own) in image.own_pieces(from, end - from).unwrap() {
        let mut bytes = vec![0; (piece - at) as usize];
        if is_own {
            source.read_at(at, &mut bytes).unwrap();
            target.write_at(at, &bytes).unwrap();
        }
        at = piece;
    }
    assert_eq!(at, end, "the pieces are all of the range");
    mirror.progress().advance(end);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn committed_base_has_all_content(
        before in prop::collection::vec(step(), 0..20),
        steps in prop::collection::vec(step(), 1..80),
        is_base_image in any::<bool>(),
        part in prop::sample::select(vec![7 * BLOCK, CLUSTER, 3 * CLUSTER + BLOCK]),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let base: Arc<dyn BlockDevice> = match is_base_image {
            true => Arc::new(Image::create(&image_options(&path("base")), COMMITTED).unwrap()),
            false => open(options(&path("base"), COMMITTED, CacheMode::Writeback)),
        };
        let run = |device: &dyn BlockDevice, steps: &[MirrorStep]| {
            let mut worker = Worker::new(device);
            for step in steps {
                if let Some(tag) = submit(&mut worker, &spread(step)) {
                    worker.wait(tag).0.unwrap();
                }
            }
        };
        let (of_base, of_image) = before.split_at(before.len() / 2);
        run(&*base, of_base);
        let name = BackingName {
            name: "base".to_owned(),
            format: if is_base_image { "qcow2" } else { "raw" },
        };
        let bytes = base.capacity().bytes();
        let image =
            Image::create_over(&image_options(&path("image")), &name, base, bytes).unwrap();
        run(&image, of_image);
        let opened = image.reopen_to_commit().unwrap();
        drop(image);
        let mirror = Mirror::new(Arc::clone(&opened.overlay), Arc::clone(&opened.base));
        let mut worker = Worker::new(&mirror);
        let mut pending: Vec<(u64, MirrorStep)> = Vec::new();
        let rest = std::iter::repeat_n(&MirrorStep::Copy, COMMITTED.div_ceil(part) as usize);
        for step in steps.iter().chain(rest) {
            let step = spread(step);
            if matches!(step, MirrorStep::Copy) || pending.len() >= 8 || overlaps(&pending, &step) {
                for (tag, _) in pending.drain(..) {
                    worker.wait(tag).0.unwrap();
                }
            }
            match submit(&mut worker, &step) {
                Some(tag) => pending.push((tag, step)),
                None => commit_part(&opened, &mirror, part),
            }
        }
        prop_assert_eq!(mirror.progress().copied(), COMMITTED);
        prop_assert_eq!(mirror.progress().error(), None);
        let (image, base) = (content(&opened.overlay), content(&opened.base));
        let differs = image.iter().zip(&base).position(|(a, b)| a != b);
        prop_assert_eq!(differs, None);
    }
}

#[test]
fn stream_skips_unallocated_ranges() {
    const LARGE: u64 = 16 << 40;
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let base = Image::create(&ImageOptions::new(&path("base")), LARGE).unwrap();
    let base: Arc<dyn BlockDevice> = Arc::new(base);
    // Data in the middle of a cluster, with holes around it.
    Worker::new(&*base).write(8 << 40, &[7; 4096]).unwrap();
    let name = BackingName {
        name: "base".to_owned(),
        format: "qcow2",
    };
    let options = ImageOptions::new(&path("over"));
    let over = Image::create_over(&options, &name, base, LARGE).unwrap();
    let (mut at, mut steps, mut bytes) = (0, 0, 0);
    while at < LARGE {
        let copied = over.copy_up(at, 1 << 20).unwrap();
        (at, steps, bytes) = (copied.end, steps + 1, bytes + copied.bytes);
    }
    assert_eq!(bytes, 65_536);
    assert!(steps < 10, "{steps}");
    over.detach_backing().unwrap();
    let data = Worker::new(&over).read(8 << 40, 4096).unwrap();
    assert_eq!(data, [7; 4096]);
}
