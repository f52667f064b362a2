//! Two workers and one RAM disk without a kernel, in simulated time: I/O, range locks, limits, errors, closing and opening
//! in an order chosen by a seed. Each I/O ends once. None reaches the device while its range is locked, or before the
//! limits admit it. Reads return written data. A failure names its seed.
//!
//! `LUNETTE_SEEDS=1000000` tries more seeds; `LUNETTE_SEED=7` tries that one.

mod common;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bdev::{
    Attach, BlockDevice, Disk, ErrorPolicy, Finished, IoChannel, Layer, OnError, Ram, RamOptions,
    RangeLock, RateLimits, Submission,
};
use block::{IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest};
use common::{Ended, Recorder};
use guest_memory::IoBuffer;
use latency::{Clock, SimulatedTime};
use reactor::{DiskHandle, SourceId, Tag, Worker};
use uring::{Completion, Owner, Ring};

const BLOCK: u64 = 512;
const BLOCKS: u64 = 16;
const STEPS: usize = 80;
const LIMITS: RateLimits = RateLimits {
    iops: 1000,
    iops_burst: 4,
    bandwidth: 0,
    bandwidth_burst: 0,
};

struct Random(fastrand::Rng);

impl Random {
    fn new(seed: u64) -> Random {
        Random(fastrand::Rng::with_seed(seed))
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0.u64(..bound)
    }

    fn range(&mut self) -> Range<u64> {
        let first = self.below(BLOCKS);
        let length = 1 + self.below(4.min(BLOCKS - first));
        first * BLOCK..(first + length) * BLOCK
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// State of the device and the checks applied to it.
struct Seen {
    random: Random,
    clock: Clock,
    in_flight: Vec<Range<u64>>,
    locked: Vec<Range<u64>>,
    /// Number of writes that must fail.
    failing: u64,
    /// I/Os admitted by [`LIMITS`] since the start, if they are always set.
    limited: Option<u64>,
}

impl Seen {
    fn begins(&mut self, io: &IoRequest) {
        let range = io.offset..io.offset + io.length;
        let is_locked = self.locked.iter().any(|locked| overlap(locked, &range));
        assert!(
            !is_locked || io.flags.has(IoFlags::HOLDER),
            "{io:?} reached the device while its range was locked"
        );
        if let Some(admitted) = &mut self.limited {
            *admitted += 1;
            let earned = self.clock.elapsed().as_nanos() as u64 * LIMITS.iops / 1_000_000_000;
            assert!(
                *admitted <= LIMITS.iops_burst + earned + 1,
                "{admitted} I/Os were admitted, {earned} earned"
            );
        }
        self.in_flight.push(range);
    }

    fn ends(&mut self, io: &IoRequest) {
        let range = io.offset..io.offset + io.length;
        let at = self.in_flight.iter().position(|known| *known == range);
        self.in_flight.swap_remove(at.expect("it had begun"));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

/// A RAM disk with random latencies and failing writes.
struct Device {
    ram: Ram,
    seen: Arc<Mutex<Seen>>,
}

impl Layer for Device {
    fn inner(&self) -> &dyn BlockDevice {
        &self.ram
    }

    fn layer_kind(&self) -> &'static str {
        "simulated"
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> std::io::Result<Box<dyn IoChannel>> {
        Ok(Box::new(Channel {
            inner: self.ram.attach(attach)?,
            owner: attach.owner(),
            seen: self.seen.clone(),
            waiting: Vec::new(),
            count: 0,
        }))
    }
}

struct Channel {
    inner: Box<dyn IoChannel>,
    owner: Owner,
    seen: Arc<Mutex<Seen>>,
    waiting: Vec<Option<(IoRequest, Finished)>>,
    count: usize,
}

impl IoChannel for Channel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: bdev::Tag,
    ) -> Submission {
        let mut seen = lock(&self.seen);
        let is_flush = io.kind == IoKind::Flush;
        if !is_flush {
            seen.begins(io);
        }
        let fails = io.kind == IoKind::Write && seen.failing > 0;
        let outcome = if fails {
            seen.failing -= 1;
            Err(IoErrorKind::NoSpace.into())
        } else {
            match self.inner.submit(ring, io, buffer, tag) {
                Submission::Done(outcome) => outcome,
                Submission::Pending => panic!("a small I/O in memory is over at once"),
            }
        };
        if seen.random.below(3) == 0 {
            if !is_flush {
                seen.ends(io);
            }
            return Submission::Done(outcome);
        }
        let finished = Finished {
            tag,
            buffer: std::mem::take(buffer),
            outcome,
        };
        ring.timer(
            self.owner,
            self.waiting.len() as u64,
            Duration::from_micros(seen.random.below(2000)),
        );
        self.waiting.push(Some((*io, finished)));
        self.count += 1;
        Submission::Pending
    }

    fn complete(&mut self, _: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        let one = self.waiting[completion.token as usize].take();
        let (io, over) = one.expect("a completion comes once");
        if io.kind != IoKind::Flush {
            lock(&self.seen).ends(&io);
        }
        self.count -= 1;
        finished.push(over);
    }

    fn in_flight(&self) -> usize {
        self.count
    }
}

struct Seat {
    worker: Worker,
    source: SourceId,
    handle: DiskHandle,
    ended: Ended,
}

/// Locked ranges to be released.
type Locked = Arc<Mutex<Vec<(Range<u64>, RangeLock)>>>;

struct World {
    random: Random,
    time: SimulatedTime,
    disk: Arc<Disk>,
    seen: Arc<Mutex<Seen>>,
    seats: [Seat; 2],
    /// Unfinished I/Os, by seat and slot.
    pending: HashMap<(usize, u32), IoRequest>,
    slots: u32,
    /// Values written to each block: the possible results of a read.
    written: Vec<Vec<u32>>,
    locked: Locked,
    asked: usize,
}

impl World {
    fn new(seed: u64, memory: Ram) -> World {
        let (clock, time) = Clock::simulated();
        let seen = Arc::new(Mutex::new(Seen {
            random: Random::new(!seed),
            clock: clock.clone(),
            in_flight: Vec::new(),
            locked: Vec::new(),
            failing: 0,
            limited: None,
        }));
        let device = Device {
            ram: memory,
            seen: seen.clone(),
        };
        let disk = Arc::new(Disk::new("d", None, Arc::new(device)).unwrap());
        let seat = |number: u64| {
            let by = clock.clone();
            let ring = Ring::simulated(2 * seed + number, move || by.elapsed());
            let mut worker = Worker::standalone(ring, clock.clone()).unwrap();
            // The test closes the handle.
            let recorder = Recorder::default();
            Seat {
                source: recorder.add_to(&mut worker),
                handle: worker.io().open(&disk),
                worker,
                ended: recorder.ended,
            }
        };
        World {
            seats: [seat(0), seat(1)],
            random: Random::new(seed),
            time,
            seen,
            pending: HashMap::new(),
            slots: 0,
            written: vec![vec![0]; BLOCKS as usize],
            locked: Locked::default(),
            asked: 0,
            disk,
        }
    }

    fn submit(&mut self) {
        let range = self.random.range();
        let length = range.end - range.start;
        let mut request = match self.random.below(8) {
            0..=3 => IoRequest::write(range.start, length),
            4..=6 => IoRequest::read(range.start, length),
            _ => IoRequest::flush(),
        };
        let holds = lock(&self.locked)
            .iter()
            .any(|(held, _)| held.start <= range.start && range.end <= held.end);
        if holds && self.random.below(2) == 0 && request.moves_data() {
            request = request.flagged(IoFlags::HOLDER);
        }
        let seat = self.random.below(2) as usize;
        self.slots += 1;
        let slot = self.slots;
        let mut buffer = IoBuffer::owned(request.buffer_length() as usize);
        if request.kind == IoKind::Write {
            for (index, block) in (range.start / BLOCK..range.end / BLOCK).enumerate() {
                buffer.write_at(index * BLOCK as usize, &slot.to_le_bytes());
                self.written[block as usize].push(slot);
            }
        }
        let Seat {
            worker,
            source,
            handle,
            ..
        } = &mut self.seats[seat];
        let tag = Tag {
            source: *source,
            slot,
        };
        match worker.io().submit(*handle, &request, &mut buffer, tag) {
            Submission::Pending => drop(self.pending.insert((seat, slot), request)),
            Submission::Done(outcome) => self.ended(&request, outcome, &buffer),
        }
    }

    fn ended(&self, request: &IoRequest, outcome: IoOutcome, buffer: &IoBuffer) {
        match outcome {
            Ok(()) if request.kind == IoKind::Read => {
                for index in 0..request.length / BLOCK {
                    let mut found = [0; 4];
                    buffer.read_at((index * BLOCK) as usize, &mut found);
                    let block = (request.offset / BLOCK + index) as usize;
                    let found = u32::from_le_bytes(found);
                    assert!(
                        self.written[block].contains(&found),
                        "block {block} has {found}, which was not written there"
                    );
                }
            }
            Ok(()) => {}
            Err(error) => assert!(
                matches!(error.kind, IoErrorKind::NoSpace | IoErrorKind::Closed),
                "{request:?}: {error}"
            ),
        }
    }

    fn iterate(&mut self, seat: usize) {
        self.seats[seat].worker.iterate_once();
        let ended = self.seats[seat].ended.take();
        for (slot, outcome, buffer) in ended {
            let request = self.pending.remove(&(seat, slot));
            let request = request.expect("an I/O ends once");
            self.ended(&request, outcome, &buffer);
        }
    }

    fn acquire(&mut self) {
        let range = self.random.range();
        let (seen, locked, held) = (self.seen.clone(), self.locked.clone(), range.clone());
        self.asked += 1;
        let locks = self.disk.range_locks();
        locks.acquire(range.start, range.end - range.start, move |granted| {
            let mut seen = lock(&seen);
            let in_flight = seen.in_flight.iter().any(|io| overlap(io, &held));
            assert!(!in_flight, "{held:?} was granted with I/O of it in flight");
            seen.locked.push(held.clone());
            lock(&locked).push((held, granted));
        });
    }

    fn release(&mut self) {
        let mut locked = lock(&self.locked);
        if locked.is_empty() {
            return;
        }
        let index = self.random.below(locked.len() as u64) as usize;
        let (range, granted) = locked.swap_remove(index);
        drop(locked);
        // The holder's own I/O ends first, as required of every holder.
        if self.pending.values().any(|io| {
            io.flags.has(IoFlags::HOLDER) && overlap(&(io.offset..io.offset + io.length), &range)
        }) {
            lock(&self.locked).push((range, granted));
            return;
        }
        let mut seen = lock(&self.seen);
        let at = seen.locked.iter().position(|known| *known == range);
        seen.locked.swap_remove(at.expect("it was granted"));
        drop(seen);
        self.asked -= 1;
        drop(granted);
    }

    fn set_errors(&mut self, on_error: OnError, failing: u64) {
        lock(&self.seen).failing = failing;
        self.disk.set_error_policy(ErrorPolicy {
            on_error,
            ..ErrorPolicy::default()
        });
        for seat in &mut self.seats {
            seat.worker.resume_disk(&self.disk);
        }
    }

    fn open_anew(&mut self) {
        let seat = &mut self.seats[self.random.below(2) as usize];
        let io = seat.worker.io();
        io.close(seat.handle);
        seat.handle = io.open(&self.disk);
    }

    fn step(&mut self) {
        match self.random.below(20) {
            0..=7 => self.submit(),
            8 if self.asked < 3 => self.acquire(),
            9 => self.release(),
            10 => self.disk.set_limits(LIMITS),
            11 => self.disk.set_limits(RateLimits::default()),
            12 => self.set_errors(OnError::Stop, self.slots as u64 % 3),
            13 => self.set_errors(OnError::Report, 0),
            14 => self.open_anew(),
            15 if self.asked == 0 => self.disk.close(),
            16 => self.disk.reopen(),
            17 => self.time.advance(self.random.below(2_000_000)),
            _ => {
                let seat = self.random.below(2) as usize;
                self.iterate(seat);
            }
        }
    }

    /// Removes all obstacles to I/O.
    fn make_way(&mut self) {
        self.disk.reopen();
        self.set_errors(OnError::Report, 0);
        self.disk.set_limits(RateLimits::default());
    }

    /// Waits for the end of all I/O.
    fn settle(&mut self) {
        for _ in 0..5_000 {
            self.release();
            self.time.advance(1_000_000);
            self.iterate(0);
            self.iterate(1);
            let rings = self.seats.iter_mut().map(|seat| seat.worker.io().ring());
            let on_rings: usize = rings.map(|ring| ring.in_flight()).sum();
            if self.pending.is_empty() && self.asked == 0 && on_rings == 0 {
                return;
            }
        }
        panic!(
            "{} I/Os did not end ({:?} first), {} ranges were not granted",
            self.pending.len(),
            self.pending.values().next(),
            self.asked
        );
    }
}

fn memory() -> Ram {
    let options = RamOptions {
        size: BLOCKS * BLOCK,
        huge_pages: false,
        ..RamOptions::default()
    };
    Ram::create(options).unwrap()
}

fn anything(seed: u64) {
    let mut world = World::new(seed, memory());
    for _ in 0..STEPS {
        world.step();
    }
    world.make_way();
    world.settle();
}

/// With limits set from the start and no other obstacles, no more I/Os are admitted than allowed.
fn limits(seed: u64) {
    let mut world = World::new(seed, memory());
    world.disk.set_limits(LIMITS);
    lock(&world.seen).limited = Some(0);
    for _ in 0..STEPS {
        match world.random.below(8) {
            0..=2 => world.submit(),
            3 => world.time.advance(world.random.below(2_000_000)),
            // Opening an open disk does not grant another burst.
            4 => world.disk.reopen(),
            _ => {
                let seat = world.random.below(2) as usize;
                world.iterate(seat);
            }
        }
    }
    world.settle();
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect("a number"))
}

fn for_all_seeds(name: &str, run: fn(u64)) {
    let seeds = match number("LUNETTE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("LUNETTE_SEEDS").unwrap_or(2_000),
    };
    for seed in seeds {
        if let Err(panic) = std::panic::catch_unwind(|| run(seed)) {
            eprintln!("{name} failed with the seed {seed}; LUNETTE_SEED={seed} runs that one");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn each_io_ends_once_outside_locked_ranges_in_any_order() {
    for_all_seeds("any order", anything);
}

#[test]
fn limits_hold_across_two_workers() {
    for_all_seeds("limits", limits);
}
