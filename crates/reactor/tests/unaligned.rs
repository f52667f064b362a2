//! I/O on parts of the device's blocks: disks of 512-byte blocks over a device that accepts only multiples of 4096 bytes.

mod common;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use bdev::{
    Attach, BlockDevice, Delay, Disk, ErrorPolicy, Fault, FaultAction, FaultPlan, Faulty, Finished,
    IoChannel, Layer, OnError, Ram, RamOptions, RangeLock, Submission,
};
use block::{DiskInfo, IoError, IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest};
use common::{Ended, Recorder, Requests, source};
use guest_memory::IoBuffer;
use latency::Clock;
use proptest::prelude::*;
use reactor::{DiskHandle, Io, PollLimit, Pool, SourceId, Tag, Worker, WorkerOptions};
use uring::{Completion, Ring};

const SIZE: u64 = 64 << 10;

/// A device that accepts only multiples of `alignment` bytes and records its requests.
struct Coarse {
    inner: Arc<dyn BlockDevice>,
    alignment: u32,
    discard_zeroes: bool,
    seen: Arc<Mutex<Vec<IoRequest>>>,
}

struct CoarseChannel(Box<dyn IoChannel>, u64, Arc<Mutex<Vec<IoRequest>>>);

impl Layer for Coarse {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn layer_kind(&self) -> &'static str {
        "coarse"
    }

    fn layer_info(&self, inner: DiskInfo) -> DiskInfo {
        DiskInfo {
            io_alignment: self.alignment,
            discard_zeroes: self.discard_zeroes,
            ..inner
        }
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        let (inner, seen) = (self.inner.attach(attach)?, self.seen.clone());
        Ok(Box::new(CoarseChannel(inner, self.alignment.into(), seen)))
    }
}

impl IoChannel for CoarseChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: bdev::Tag,
    ) -> Submission {
        assert!((io.offset | io.length).is_multiple_of(self.1), "{io:?}");
        self.2.lock().unwrap().push(*io);
        self.0.submit(ring, io, buffer, tag)
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        self.0.complete(ring, completion, finished);
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }
}

fn ram() -> Arc<dyn BlockDevice> {
    let options = RamOptions {
        size: SIZE,
        huge_pages: false,
        ..RamOptions::default()
    };
    Arc::new(Ram::create(options).unwrap())
}

fn coarse(inner: Arc<dyn BlockDevice>) -> Coarse {
    Coarse {
        inner,
        alignment: 4096,
        discard_zeroes: true,
        seen: Arc::default(),
    }
}

/// A worker on this thread with a client of the disk.
struct Rig {
    worker: Worker,
    disk: Arc<Disk>,
    source: SourceId,
    handle: DiskHandle,
    ended: Ended,
}

impl Rig {
    fn new(device: Arc<dyn BlockDevice>) -> Rig {
        let disk = Arc::new(Disk::new("d", None, device).unwrap());
        let mut worker = Worker::standalone(Ring::new(64).unwrap(), Clock::new()).unwrap();
        let handle = worker.io().open(&disk);
        let recorder = Recorder {
            disk: handle,
            ..Recorder::default()
        };
        Rig {
            source: recorder.add_to(&mut worker),
            worker,
            disk,
            handle,
            ended: recorder.ended,
        }
    }

    /// Submits an I/O; one that ends synchronously is also added to `ended`.
    fn submit(&mut self, slot: u32, request: &IoRequest, data: &[u8]) {
        let mut buffer = IoBuffer::owned(request.buffer_length() as usize);
        buffer.write_at(0, data);
        let tag = Tag {
            source: self.source,
            slot,
        };
        let io = self.worker.io();
        let submitted = io.submit(self.handle, request, &mut buffer, tag);
        if let Submission::Done(outcome) = submitted {
            self.ended.borrow_mut().push((slot, outcome, buffer));
        }
    }

    fn iterate_until(&mut self, condition: &str, mut holds: impl FnMut(&Rig) -> bool) {
        let until = Instant::now() + Duration::from_secs(20);
        while !holds(self) {
            assert!(Instant::now() < until, "never came: {condition}");
            self.worker.iterate_once();
        }
    }

    /// Executes one I/O and returns its buffer.
    fn run(&mut self, request: IoRequest, data: &[u8]) -> Result<Vec<u8>, IoErrorKind> {
        self.submit(0, &request, data);
        self.iterate_until("the end of an I/O", |rig| !rig.ended.borrow().is_empty());
        let (_, outcome, buffer) = self.ended.borrow_mut().remove(0);
        let mut bytes = vec![0; request.buffer_length() as usize];
        buffer.read_at(0, &mut bytes);
        outcome.map(|()| bytes).map_err(|error| error.kind)
    }
}

fn requests() -> impl Strategy<Value = Vec<(u8, u64, u64, u8)>> {
    let sectors = SIZE / 512;
    let one = (0..5u8, 0..sectors, 1..=40u64, any::<u8>());
    proptest::collection::vec(
        one.prop_map(move |(kind, from, length, byte)| {
            (kind, from, length.min(sectors - from), byte)
        }),
        1..60,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Sequential I/Os on synchronous and asynchronous devices behave like a byte array.
    #[test]
    fn unaligned_disk_agrees_with_the_model(
        requests in requests(),
        alignment in prop_oneof![Just(4096u32), Just(1024), Just(16384)],
        discard_zeroes: bool,
        shuffle in proptest::option::of(any::<u64>()),
    ) {
        let inner: Arc<dyn BlockDevice> = match shuffle {
            None => ram(),
            Some(_) => Arc::new(Faulty::new(ram(), FaultPlan { shuffle, ..FaultPlan::default() })),
        };
        let device = Coarse { alignment, discard_zeroes, ..coarse(inner) };
        let mut rig = Rig::new(Arc::new(device));
        let mut model = vec![0u8; SIZE as usize];
        for (kind, sector, sectors, byte) in requests {
            let (from, length) = (sector * 512, sectors * 512);
            let range = from as usize..(from + length) as usize;
            let data: Vec<u8> = (0..length).map(|at| byte.wrapping_add((at / 512) as u8)).collect();
            match kind {
                0 => {
                    let fua = IoRequest::write(from, length).flagged(IoFlags::FUA);
                    prop_assert_eq!(rig.run(fua, &data).map(drop), Ok(()));
                    model[range].copy_from_slice(&data);
                }
                1 => {
                    let unmap = IoFlags::UNMAP;
                    prop_assert!(rig.run(IoRequest::write_zeroes(from, length).flagged(unmap), &[]).is_ok());
                    model[range].fill(0);
                }
                2 => {
                    prop_assert!(rig.run(IoRequest::discard(from, length), &[]).is_ok());
                    let unit = u64::from(alignment);
                    let whole = (from.next_multiple_of(unit), (from + length) / unit * unit);
                    // The RAM disk zeroes discarded blocks.
                    match (discard_zeroes, whole.0 < whole.1) {
                        (true, _) => model[range].fill(0),
                        (false, true) => model[whole.0 as usize..whole.1 as usize].fill(0),
                        (false, false) => {}
                    }
                }
                _ => prop_assert_eq!(rig.run(IoRequest::read(from, length), &[]), Ok(model[range].to_vec())),
            }
        }
        prop_assert_eq!(rig.run(IoRequest::read(0, SIZE), &[]), Ok(model));
        prop_assert!(rig.disk.range_locks().is_open());
    }

    /// Concurrent writes to different sectors: no neighbour's write is lost, for any order of completions.
    #[test]
    fn concurrent_neighbours_retain_their_writes(shuffle: u64, sectors in 2..64u32) {
        let faulty = Faulty::new(ram(), FaultPlan { shuffle: Some(shuffle), ..FaultPlan::default() });
        let mut rig = Rig::new(Arc::new(coarse(Arc::new(faulty))));
        for slot in 0..sectors {
            let write = IoRequest::write(u64::from(slot) * 512, 512);
            rig.submit(slot, &write, &[slot as u8 + 1; 512]);
        }
        rig.iterate_until("all writes", |rig| rig.ended.borrow().len() == sectors as usize);
        for (_, outcome, _) in rig.ended.borrow_mut().drain(..) {
            prop_assert_eq!(outcome, Ok(()));
        }
        for slot in 0..sectors {
            let read = rig.run(IoRequest::read(u64::from(slot) * 512, 512), &[]);
            prop_assert_eq!(read, Ok(vec![slot as u8 + 1; 512]));
        }
    }
}

#[test]
fn aligned_io_goes_to_the_device_as_it_is() {
    let device = Arc::new(coarse(ram()));
    let seen = device.seen.clone();
    let mut rig = Rig::new(device);
    let requests = [
        IoRequest::write(4096, 8192).flagged(IoFlags::FUA),
        IoRequest::read(0, 4096),
        IoRequest::discard(8192, 4096),
        IoRequest::write_zeroes(0, 4096),
        IoRequest::flush(),
    ];
    for request in requests {
        rig.run(request, &[]).unwrap();
    }
    assert_eq!(*seen.lock().unwrap(), requests);
}

/// The edge blocks are read, and one write carries the flags, so durable data stays durable and FUA is honoured.
#[test]
fn write_reads_the_edges_and_writes_whole_blocks_with_its_flags() {
    let device = Arc::new(coarse(ram()));
    let seen = device.seen.clone();
    let mut rig = Rig::new(device);
    let write = IoRequest::write(512, 16384).flagged(IoFlags::FUA);
    rig.run(write, &[1; 16384]).unwrap();
    let holder = IoFlags::HOLDER;
    let expected = [
        IoRequest::read(0, 4096).flagged(holder),
        IoRequest::read(16384, 4096).flagged(holder),
        IoRequest::write(0, 20480).flagged(IoFlags::FUA.with(holder)),
    ];
    assert_eq!(*seen.lock().unwrap(), expected);
}

/// The holder locked sectors of a block, and therefore the whole block, like COMPARE AND WRITE of 512 bytes.
#[test]
fn holder_of_a_part_of_a_block_writes_it_and_others_wait() {
    let mut rig = Rig::new(Arc::new(coarse(ram())));
    let (grant, granted) = mpsc::channel();
    let locks = rig.disk.range_locks().clone();
    locks.acquire(512, 512, move |lock| drop(grant.send(lock)));
    let mut lock: Option<RangeLock> = None;
    rig.iterate_until("the lock", |_| {
        lock = granted.try_recv().ok();
        lock.is_some()
    });
    // A neighbour in the same block.
    rig.submit(1, &IoRequest::write(1024, 512), &[2; 512]);
    rig.submit(2, &IoRequest::read(0, 4096), &[]);
    for _ in 0..64 {
        rig.worker.iterate_once();
    }
    assert!(rig.ended.borrow().is_empty());
    let write = IoRequest::write(512, 512).flagged(IoFlags::HOLDER);
    assert_eq!(rig.run(write, &[1; 512]).map(drop), Ok(()));
    drop(lock);
    rig.iterate_until("both others", |rig| rig.ended.borrow().len() == 2);
    rig.ended.borrow_mut().clear();
    let block = rig.run(IoRequest::read(0, 1536), &[]).unwrap();
    assert_eq!([block[0], block[512], block[1024]], [0, 1, 2]);
}

#[test]
fn io_beyond_the_end_and_compare_and_write_of_the_device_are_refused() {
    let mut rig = Rig::new(Arc::new(coarse(ram())));
    let beyond = IoRequest::write(SIZE - 512, 1024);
    assert_eq!(rig.run(beyond, &[1; 1024]), Err(IoErrorKind::OutOfRange));
    assert_eq!(
        rig.run(IoRequest::read(SIZE - 512, 512), &[]),
        Ok(vec![0; 512])
    );
    let compare = IoRequest::compare_and_write(512, 512);
    assert_eq!(rig.run(compare, &[0; 1024]), Err(IoErrorKind::Unsupported));
    let atomic = IoRequest::write(512, 512).flagged(IoFlags::ATOMIC);
    assert_eq!(rig.run(atomic, &[0; 512]), Err(IoErrorKind::Unsupported));
    assert!(rig.disk.range_locks().is_open());
}

/// The first blocks of the range stay unchanged, and a discard without effect is refused too.
#[test]
fn io_that_ends_beyond_the_disk_changes_nothing() {
    let device = Coarse {
        discard_zeroes: false,
        ..coarse(ram())
    };
    let seen = device.seen.clone();
    let mut rig = Rig::new(Arc::new(device));
    let beyond = [
        IoRequest::write_zeroes(512, SIZE),
        IoRequest::discard(512, SIZE),
        IoRequest::discard(SIZE - 512, 1024),
        IoRequest::write(512, SIZE),
        IoRequest::read(512, SIZE),
        IoRequest::read(u64::MAX - 511, 512),
    ];
    for io in beyond {
        let data = vec![1; io.buffer_length() as usize];
        assert_eq!(rig.run(io, &data), Err(IoErrorKind::OutOfRange), "{io:?}");
    }
    assert_eq!(*seen.lock().unwrap(), []);
    assert!(rig.disk.range_locks().is_open());
}

/// A failed step makes the whole I/O wait without the lock; after the disk is resumed it restarts from the beginning.
#[test]
fn failed_write_waits_as_a_whole_and_holds_no_lock() {
    for kind in [IoKind::Read, IoKind::Write] {
        let fault = Fault {
            kind,
            skip: 0,
            times: 1,
            action: FaultAction::Fail(IoError::with_errno(IoErrorKind::NoSpace, 28)),
        };
        for shuffle in [None, Some(7)] {
            let faults = vec![fault];
            let faulty = Faulty::new(ram(), FaultPlan { faults, shuffle });
            let mut rig = Rig::new(Arc::new(coarse(Arc::new(faulty))));
            rig.disk.set_error_policy(ErrorPolicy {
                on_error: OnError::Stop,
                ..ErrorPolicy::default()
            });
            let disk = rig.disk.clone();
            rig.submit(0, &IoRequest::write(512, 512), &[5; 512]);
            rig.iterate_until("a waiting I/O", |rig| rig.disk.state().waiting().is_some());
            assert!(disk.range_locks().is_open(), "{kind:?} {shuffle:?}");
            assert!(rig.ended.borrow().is_empty(), "{kind:?} {shuffle:?}");
            rig.worker.resume_disk(&disk);
            rig.iterate_until("its end", |rig| !rig.ended.borrow().is_empty());
            assert_eq!(rig.ended.borrow_mut().remove(0).1, Ok(()));
            let block = rig.run(IoRequest::read(0, 4096), &[]).unwrap();
            assert!(block[512..1024] == [5; 512] && block[..512] == [0; 512]);
        }
    }
}

/// A client on its own worker that writes its ranges of one block in turn and reads them back.
struct Writer {
    id: SourceId,
    handle: DiskHandle,
    offset: u64,
    length: usize,
    /// The bytes to check: a range that no other client changes.
    checked: std::ops::Range<usize>,
    round: u8,
    reads: bool,
    is_busy: bool,
    results: Arc<Results>,
}

#[derive(Default)]
struct Results {
    rounds: AtomicU64,
    lost: AtomicU64,
    is_over: AtomicBool,
}

impl Writer {
    fn next(&mut self, io: &mut Io) {
        loop {
            let length = self.length as u64;
            let request = match self.reads {
                true => IoRequest::read(self.offset, length),
                false => IoRequest::write(self.offset, length),
            };
            let mut buffer = IoBuffer::owned(self.length);
            if !self.reads {
                self.round = self.round.wrapping_add(1);
                buffer.fill(0, self.length, self.round);
            }
            let tag = Tag {
                source: self.id,
                slot: 0,
            };
            match io.submit(self.handle, &request, &mut buffer, tag) {
                Submission::Pending => return self.is_busy = true,
                Submission::Done(outcome) => self.ended(&buffer, outcome),
            }
        }
    }

    fn ended(&mut self, buffer: &IoBuffer, outcome: IoOutcome) {
        outcome.unwrap();
        if self.reads {
            let mut bytes = vec![0; self.length];
            buffer.read_at(0, &mut bytes);
            let is_lost = bytes[self.checked.clone()]
                .iter()
                .any(|byte| *byte != self.round);
            self.results
                .lost
                .fetch_add(is_lost.into(), Ordering::Relaxed);
            self.results.rounds.fetch_add(1, Ordering::Relaxed);
        }
        self.reads = !self.reads;
    }
}

impl Requests for Writer {
    fn ready(&self) -> bool {
        !self.is_busy && !self.results.is_over.load(Ordering::Relaxed)
    }

    fn submit(&mut self, io: &mut Io) {
        self.next(io);
    }

    fn finish(&mut self, _: &mut Io, _: u32, buffer: IoBuffer, outcome: IoOutcome) {
        self.is_busy = false;
        self.ended(&buffer, outcome);
    }

    fn in_flight(&self) -> usize {
        usize::from(self.is_busy)
    }

    fn disk(&mut self) -> &mut DiskHandle {
        &mut self.handle
    }
}

/// Two workers write ranges of one block, and no write is lost.
fn nothing_is_lost(ranges: [(u64, usize, std::ops::Range<usize>); 2]) {
    let device = coarse(Arc::new(Delay::new(ram(), Duration::from_micros(20))));
    let disk = Arc::new(Disk::new("d", None, Arc::new(device)).unwrap());
    let options = WorkerOptions {
        count: 2,
        cpus: Vec::new(),
        poll: PollLimit::Micros(50).into(),
    };
    let pool = Pool::start(&options).unwrap();
    let all = [Arc::<Results>::default(), Arc::default()];
    for ((worker, results), (offset, length, checked)) in
        pool.workers().iter().zip(&all).zip(ranges)
    {
        let (disk, results) = (disk.clone(), results.clone());
        worker
            .call(move |w| {
                w.add(|io, id| {
                    let writer = Writer {
                        id,
                        handle: io.open(&disk),
                        offset,
                        length,
                        checked,
                        round: 0,
                        reads: false,
                        is_busy: false,
                        results,
                    };
                    Ok::<_, ()>(source(writer))
                })
                .unwrap();
            })
            .unwrap();
    }
    let until = Instant::now() + Duration::from_secs(60);
    let rounds = |results: &Results| results.rounds.load(Ordering::Relaxed);
    while all.iter().any(|results| rounds(results) < 300) {
        assert!(Instant::now() < until, "it hangs");
        std::thread::sleep(Duration::from_millis(1));
    }
    for results in &all {
        results.is_over.store(true, Ordering::Relaxed);
        assert_eq!(
            results.lost.load(Ordering::Relaxed),
            0,
            "of {}",
            rounds(results)
        );
    }
}

#[test]
fn two_workers_that_write_neighbouring_sectors_lose_nothing() {
    nothing_is_lost([(512, 512, 0..512), (1024, 1024, 0..1024)]);
}

#[test]
fn whole_block_of_one_worker_is_not_undone_by_a_sector_of_another() {
    nothing_is_lost([(0, 512, 0..0), (0, 4096, 512..4096)]);
}

/// The disk's device is replaced by one with larger blocks, as for a mirror, and then by the original one.
#[test]
fn device_that_is_replaced_brings_its_own_alignment() {
    let (small, large) = (ram(), Arc::new(coarse(ram())));
    let mut rig = Rig::new(small.clone());
    let disk = rig.disk.clone();
    let write = |rig: &mut Rig, byte| {
        assert!(rig.run(IoRequest::write(512, 512), &[byte; 512]).is_ok());
        assert_eq!(rig.run(IoRequest::read(512, 512), &[]), Ok(vec![byte; 512]));
    };
    write(&mut rig, 1);
    let devices: [Arc<dyn BlockDevice>; 2] = [large.clone(), small];
    for (byte, device) in (2..).zip(devices) {
        rig.worker.io().prepare_device(&disk, &device).unwrap();
        disk.replace_device(device).unwrap();
        rig.worker.io().change_device(&disk);
        write(&mut rig, byte);
    }
    assert_eq!(large.seen.lock().unwrap().len(), 3);
}
