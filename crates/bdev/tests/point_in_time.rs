//! A point in time has the content of its start for every order of client writes, copies and reads, on several workers.

mod common;

use std::sync::Arc;
use std::time::Duration;

use bdev::{
    Attach, BlockDevice, BlockingIo, CacheMode, Fault, FaultAction, FaultPlan, Faulty, Finished,
    IoChannel, Layer, PointInTime, PointInTimeError, Ram, RamOptions, Submission, Tag,
};
use block::{
    Allocation, IoError, IoErrorKind, IoFlags, IoKind, IoRequest, STATUS_BYTES, decode_extents,
};
use common::{Worker, bytes, filled, open, options};
use guest_memory::IoBuffer;
use proptest::prelude::*;
use uring::{Completion, Owner, Ring};

const BLOCK: u64 = 4096;
const UNIT: u64 = 64 << 10;
/// The last unit is not whole.
const BLOCKS: u64 = 402;
const SIZE: u64 = BLOCKS * BLOCK;

fn ram() -> Arc<dyn BlockDevice> {
    ram_of(SIZE)
}

fn ram_of(size: u64) -> Arc<dyn BlockDevice> {
    let ram = Ram::create(RamOptions {
        size,
        ..RamOptions::default()
    });
    Arc::new(ram.unwrap())
}

fn faulty(device: Arc<dyn BlockDevice>, plan: FaultPlan) -> Arc<dyn BlockDevice> {
    Arc::new(Faulty::new(device, plan))
}

/// A layer that executes reads some time after their submission. Other I/O is executed at once.
struct LateReads(Arc<dyn BlockDevice>);

struct LateChannel {
    inner: Box<dyn IoChannel>,
    owner: Owner,
    waiting: Vec<Option<(IoRequest, IoBuffer, Tag)>>,
}

impl Layer for LateReads {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.0
    }

    fn layer_kind(&self) -> &'static str {
        "late_reads"
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> std::io::Result<Box<dyn IoChannel>> {
        Ok(Box::new(LateChannel {
            owner: attach.owner(),
            inner: self.0.attach(attach)?,
            waiting: Vec::new(),
        }))
    }
}

impl IoChannel for LateChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        if io.kind != IoKind::Read {
            return self.inner.submit(ring, io, buffer, tag);
        }
        let token = self.waiting.len() as u64;
        self.waiting.push(Some((*io, std::mem::take(buffer), tag)));
        ring.timer(self.owner, token, Duration::from_millis(1));
        Submission::Pending
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        if completion.owner != self.owner {
            return self.inner.complete(ring, completion, finished);
        }
        let (io, mut buffer, tag) = self.waiting[completion.token as usize].take().unwrap();
        if let Submission::Done(outcome) = self.inner.submit(ring, &io, &mut buffer, tag) {
            finished.push(Finished {
                tag,
                buffer,
                outcome,
            });
        }
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.waiting.iter().flatten().count()
    }
}

fn fault(kind: IoKind, skip: u64, action: FaultAction) -> FaultPlan {
    let times = 1;
    FaultPlan {
        faults: vec![Fault {
            kind,
            skip,
            times,
            action,
        }],
        shuffle: None,
    }
}

fn content(device: &Arc<dyn BlockDevice>) -> std::io::Result<Vec<u8>> {
    let mut content = vec![0; SIZE as usize];
    let mut io = BlockingIo::new(Arc::clone(device))?;
    io.read_at(0, &mut content)?;
    Ok(content)
}

/// Fills most of a device: the first units stay holes.
fn fill(device: &Arc<dyn BlockDevice>) {
    let mut io = BlockingIo::new(Arc::clone(device)).unwrap();
    for block in 40..BLOCKS {
        let data = vec![block as u8 | 1; BLOCK as usize];
        io.write_at(block * BLOCK, &data).unwrap();
    }
}

#[derive(Clone, Debug)]
enum PointStep {
    Write(u64, u64, u8),
    Zero(u64, u64),
    Discard(u64, u64),
    Flush,
    Read(u64, u64),
}

fn range(max: u64) -> impl Strategy<Value = (u64, u64)> {
    (0..BLOCKS).prop_flat_map(move |at| (Just(at), 1..=(BLOCKS - at).min(max)))
}

fn step() -> impl Strategy<Value = PointStep> {
    prop_oneof![
        6 => (range(40), any::<u8>()).prop_map(|((at, n), byte)| PointStep::Write(at, n, byte)),
        1 => range(300).prop_map(|(at, n)| PointStep::Zero(at, n)),
        1 => range(300).prop_map(|(at, n)| PointStep::Discard(at, n)),
        1 => Just(PointStep::Flush),
        3 => range(80).prop_map(|(at, n)| PointStep::Read(at, n)),
    ]
}

fn submit(worker: &mut Worker, step: &PointStep) -> u64 {
    let none = IoBuffer::default;
    let (io, buffer) = match *step {
        PointStep::Write(at, n, byte) => {
            let data = vec![byte; (n * BLOCK) as usize];
            (IoRequest::write(at * BLOCK, n * BLOCK), filled(&data))
        }
        PointStep::Zero(at, n) => {
            let io = IoRequest::write_zeroes(at * BLOCK, n * BLOCK);
            (io.flagged(IoFlags::UNMAP), none())
        }
        PointStep::Discard(at, n) => (IoRequest::discard(at * BLOCK, n * BLOCK), none()),
        PointStep::Flush => (IoRequest::flush(), none()),
        PointStep::Read(at, n) => {
            let length = n * BLOCK;
            let io = IoRequest::read(at * BLOCK, length);
            (io, IoBuffer::owned(length as usize))
        }
    };
    worker.submit(io, buffer)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Writes of two workers overlap, I/Os complete in a random order, and reads run between them.
    #[test]
    fn reads_return_the_content_of_the_start(
        steps in prop::collection::vec((step(), 0..2usize, any::<bool>()), 1..120),
        is_file_source in any::<bool>(),
        has_late_reads in any::<bool>(),
        shuffle in any::<Option<u64>>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| -> Arc<dyn BlockDevice> {
            open(options(&folder.path().join(name), SIZE, CacheMode::Writeback))
        };
        let (source, scratch) = match is_file_source {
            true => (file("source"), ram()),
            false => (ram(), file("scratch")),
        };
        fill(&source);
        let start = content(&source).unwrap();
        let shuffled = |device| faulty(device, FaultPlan { faults: Vec::new(), shuffle });
        let below: Arc<dyn BlockDevice> = match has_late_reads {
            true => Arc::new(LateReads(Arc::clone(&source))),
            false => shuffled(Arc::clone(&source)),
        };
        let point = PointInTime::new(below, shuffled(scratch), u64::MAX);
        let (layer, device) = (point.layer(), point.reader());
        let mut workers = [Worker::new(&*layer), Worker::new(&*layer)];
        let mut reader = Worker::new(&*device);
        let mut writes: Vec<(usize, u64)> = Vec::new();
        let mut reads: Vec<(u64, u64, u64)> = Vec::new();
        for (step, worker, pauses) in &steps {
            match step {
                PointStep::Read(at, n) => reads.push((submit(&mut reader, step), *at, *n)),
                _ => writes.push((*worker, submit(&mut workers[*worker], step))),
            }
            if *pauses {
                for worker in workers.iter_mut().chain([&mut reader]) {
                    worker.turn(Duration::ZERO);
                }
            }
        }
        // A write of one worker may wait for a copy of the other.
        while writes.iter().any(|(worker, _)| workers[*worker].backend.in_flight() > 0) {
            for worker in &mut workers {
                worker.turn(Duration::from_millis(1));
            }
        }
        for (worker, tag) in writes {
            prop_assert_eq!(workers[worker].wait(tag).0, Ok(()));
        }
        for (tag, at, n) in reads {
            let (outcome, buffer) = reader.wait(tag);
            prop_assert_eq!(outcome, Ok(()));
            let wanted = &start[(at * BLOCK) as usize..((at + n) * BLOCK) as usize];
            prop_assert!(bytes(&buffer) == wanted, "the read at block {} differs", at);
        }
        prop_assert_eq!(point.error(), None);
        prop_assert!(content(&device).unwrap() == start);
    }
}

/// The source is read after a client has overwritten it.
#[test]
fn read_overtaken_by_a_write_returns_old_data() {
    let source = ram();
    fill(&source);
    let late: Arc<dyn BlockDevice> = Arc::new(LateReads(Arc::clone(&source)));
    let point = PointInTime::new(late, ram(), u64::MAX);
    let mut reader = Worker::new(&*point.reader());
    let mut worker = Worker::new(&*point.layer());
    let length = 40 * BLOCK;
    let io = IoRequest::read(90 * BLOCK, length);
    let tag = reader.submit(io, IoBuffer::owned(length as usize));
    worker.write(100 * BLOCK, &[7; 4096]).unwrap();
    assert_eq!(content(&source).unwrap()[100 * 4096], 7);
    let (outcome, buffer) = reader.wait(tag);
    assert_eq!(outcome, Ok(()));
    for (block, found) in (90u8..).zip(bytes(&buffer).chunks_exact(4096)) {
        assert!(found == [block | 1; 4096], "block {block}");
    }
}

#[test]
fn clients_read_their_writes_and_the_source_has_them() {
    let source = ram();
    fill(&source);
    let start = content(&source).unwrap();
    let point = PointInTime::new(Arc::clone(&source), ram(), u64::MAX);
    let mut worker = Worker::new(&*point.layer());
    worker.write(50 * BLOCK, &[7; 4096]).unwrap();
    assert_eq!(worker.read(50 * BLOCK, 4096).unwrap(), [7; 4096]);
    // Zeroes take no space in the scratch device.
    worker.write(0, &[7; 4096]).unwrap();
    assert_eq!(point.scratch_used(), UNIT);
    assert_eq!(content(&point.reader()).unwrap(), start);
    assert_ne!(content(&source).unwrap(), start);
    assert_eq!(worker.backend.in_flight(), 0);
}

/// The source grows before the reader is made, for example on an NBD server.
#[test]
fn reader_has_the_size_of_the_start() {
    let source = ram();
    fill(&source);
    let start = content(&source).unwrap();
    let point = PointInTime::new(Arc::clone(&source), ram(), u64::MAX);
    source.set_size(2 * SIZE).unwrap();
    source.capacity().set(2 * SIZE);
    assert_eq!(source.info().geometry.capacity_bytes(), 2 * SIZE);
    let reader = point.reader();
    assert_eq!(reader.info().geometry.capacity_bytes(), SIZE);
    assert!(Worker::new(&*reader).read(SIZE, 4096).is_err());
    assert_eq!(content(&reader).unwrap(), start);
}

/// Bad scratch devices, a source that cannot be read, and a limit: clients notice none of them.
#[test]
fn lost_point_is_invisible_to_clients() {
    let full = IoError::with_errno(IoErrorKind::NoSpace, 28);
    let bad = IoError::with_errno(IoErrorKind::ReadMedium, 5);
    let plain = FaultPlan::default;
    let cases = [
        (
            plain(),
            fault(IoKind::Write, 1, FaultAction::Fail(full)),
            u64::MAX,
            PointInTimeError::Scratch(full),
        ),
        (
            fault(IoKind::Read, 1, FaultAction::Fail(bad)),
            plain(),
            u64::MAX,
            PointInTimeError::Source(bad),
        ),
        (plain(), plain(), UNIT, PointInTimeError::Full(UNIT)),
    ];
    for (of_source, of_scratch, limit, expected) in cases {
        let source = ram();
        fill(&source);
        let point = PointInTime::new(
            faulty(Arc::clone(&source), of_source),
            faulty(ram(), of_scratch),
            limit,
        );
        let mut worker = Worker::new(&*point.layer());
        worker.write(100 * BLOCK, &[7; 4096]).unwrap();
        assert_eq!(point.error(), None);
        worker.write(200 * BLOCK, &[8; 4096]).unwrap();
        assert_eq!(point.error(), Some(expected));
        worker.write(300 * BLOCK, &[9; 4096]).unwrap();
        let now = content(&source).unwrap();
        for (block, byte) in [(100, 7), (200, 8), (300, 9)] {
            assert_eq!(now[block * 4096], byte, "{expected}");
        }
        assert!(content(&point.reader()).is_err(), "{expected}");
    }
}

#[test]
fn hung_scratch_delays_writes_until_the_point_ends() {
    let source = ram();
    fill(&source);
    let hung = faulty(ram(), fault(IoKind::Write, 0, FaultAction::Hold));
    let point = PointInTime::new(Arc::clone(&source), hung, u64::MAX);
    let layer = point.layer();
    let (mut one, mut other) = (Worker::new(&*layer), Worker::new(&*layer));
    let first = one.submit(IoRequest::write(100 * BLOCK, BLOCK), filled(&[7; 4096]));
    let second = other.submit(IoRequest::write(101 * BLOCK, BLOCK), filled(&[8; 4096]));
    assert!(
        !other.turn(Duration::from_millis(20)),
        "it waits for the copy of the first"
    );
    point.end();
    assert_eq!(other.wait(second).0, Ok(()));
    assert_eq!(one.wait(first).0, Ok(()));
    // The copy still uses its memory, and no client waits for it.
    assert_eq!(one.backend.in_flight(), 0);
    assert!(!one.backend.is_closed());
    let now = content(&source).unwrap();
    assert_eq!((now[100 * 4096], now[101 * 4096]), (7, 8));
}

/// Reads of holes complete at once. A long discard yields to other requests of the worker.
#[test]
fn long_discard_of_holes_yields_to_other_requests() {
    const LONG: u64 = 64 << 20;
    let source = ram_of(LONG);
    let point = PointInTime::new(Arc::clone(&source), ram_of(LONG), u64::MAX);
    let mut worker = Worker::new(&*point.layer());
    let discard = worker.submit(IoRequest::discard(0, LONG), IoBuffer::default());
    assert_eq!(worker.backend.in_flight(), 1, "the worker was not yielded");
    let read = worker.submit(IoRequest::read(0, BLOCK), IoBuffer::owned(BLOCK as usize));
    assert_eq!(worker.wait(read).0, Ok(()));
    assert_eq!(worker.wait(discard).0, Ok(()));
    assert_eq!(worker.order, [read, discard]);
    assert_eq!((point.error(), point.scratch_used()), (None, 0));
}

#[test]
fn released_ranges_need_no_copy_and_cannot_be_read() {
    let source = ram();
    fill(&source);
    let point = PointInTime::new(Arc::clone(&source), ram(), u64::MAX);
    let mut worker = Worker::new(&*point.layer());
    point.release(200 * BLOCK);
    worker.write(100 * BLOCK, &[7; 4096]).unwrap();
    assert_eq!(point.scratch_used(), 0);
    let mut reader = Worker::new(&*point.reader());
    assert!(reader.read(100 * BLOCK, 4096).is_err());
    let block = reader.read(201 * BLOCK, 4096).unwrap();
    assert_eq!(block, [201; 4096]);
    point.release(SIZE);
    worker.write(SIZE - BLOCK, &[7; 4096]).unwrap();
    assert_eq!(point.scratch_used(), 0);
}

#[test]
fn status_of_changed_units_is_data_and_writes_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("source");
    let source: Arc<dyn BlockDevice> = open(options(&path, SIZE, CacheMode::Writeback));
    let point = PointInTime::new(Arc::clone(&source), ram(), u64::MAX);
    let mut worker = Worker::new(&*point.layer());
    worker.write(UNIT, &[7; 4096]).unwrap();
    worker.write(SIZE - BLOCK, &[7; 4096]).unwrap();
    let mut reader = Worker::new(&*point.reader());
    let mut status = |from: u64| {
        let io = IoRequest::block_status(from, SIZE - from);
        let tag = reader.submit(io, IoBuffer::owned(STATUS_BYTES));
        let (outcome, buffer) = reader.wait(tag);
        assert_eq!(outcome, Ok(()));
        let extents: Vec<_> = decode_extents(&bytes(&buffer)).collect();
        let [one] = extents[..] else {
            panic!("{extents:?}")
        };
        (one.allocation, one.end)
    };
    assert_eq!(status(0), (Allocation::Hole, UNIT));
    assert_eq!(status(UNIT), (Allocation::Data, 2 * UNIT));
    assert_eq!(status(2 * UNIT), (Allocation::Hole, SIZE / UNIT * UNIT));
    assert_eq!(status(SIZE - 512), (Allocation::Data, SIZE));
    let refused = reader.write(0, &[1; 4096]);
    assert_eq!(refused, Err(IoErrorKind::ReadOnly.into()));
    assert_eq!(reader.do_plain(IoRequest::flush()), Ok(()));
}
