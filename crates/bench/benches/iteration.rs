//! Worker cost of a request: one iteration over a ring that the benchmark fills itself, including time stamps.
//!
//! `cargo bench -p bench --bench iteration` prints the time per iteration and requests per second. Only the iteration is timed, not the
//! driver's part. The driver never sleeps, so the worker never interrupts it. The argument `count` only runs iterations, for a profiler
//! that counts instructions; `pair` prints the mutual cost of two workers on one disk; `stamps` prints the cost of stamps and their
//! records per iteration.

use std::sync::{Arc, Barrier};
use std::time::Instant;

use bdev::{BlockDevice, Disk, Null, NullOptions, Ram, RamOptions};
use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use guest_memory::{IoBuffer, Mapping, MemoryTable, RegionSpec};
use latency::{Clock, Labels};
use reactor::{SourceId, Worker};
use rustix::thread::{CpuSet, sched_setaffinity};
use scsi::MemoryStore;
use scsi_exec::Units;
use uring::Ring;
use virtio_blk::{BlkDevice, BlkOptions};
use virtio_device::{QueueSetup, VirtioDevice};
use virtio_scsi::{ScsiDevice, ScsiOptions};
use virtqueue::driver::{DriverConfig, DriverQueue, IndirectTables, RingLayout};

const BATCHES: [usize; 4] = [1, 8, 32, 128];
const SIZE: u16 = 256;
const MEMORY: usize = 1 << 22;
/// Distance between request headers in bytes. It is not a multiple of the page size: otherwise all headers would map to the eight lines
/// of one cache set, which does not happen with real drivers.
const APART: u64 = 8192 + 64;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match &arguments[1..] {
        [word, transport, batch, iterations, ..] if word == "count" => {
            count(transport, batch, iterations)
        }
        [word, transport, batch, ..] if word == "pair" => {
            pair(transport_of(transport), number(batch))
        }
        [word, transport, batch, ..] if word == "stamps" => {
            stamps(transport_of(transport), number(batch))
        }
        _ => divan::main(),
    }
}

fn transport_of(word: &str) -> Transport {
    match word {
        "scsi" => Transport::Scsi,
        _ => Transport::Blk,
    }
}

fn number(word: &str) -> usize {
    word.parse().expect("a number")
}

/// `iteration pair blk|scsi BATCH`: median nanoseconds per request of a queue alone on its CPU, and next to another queue of the same
/// disk on the next CPU, in turns. Queues without shared cache lines give equal values.
fn pair(transport: Transport, batch: usize) {
    const ROUNDS: usize = 9;
    let (device, first) = virtio_device(transport, null(), 2);
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        alone.extend(side_by_side(&*device, first, transport, batch, 1));
        beside.extend(side_by_side(&*device, first, transport, batch, 2));
    }
    let (alone, beside) = (median(&mut alone), median(&mut beside));
    let rise = (beside / alone - 1.0) * 100.0;
    println!("alone {alone:.1} ns, beside another {beside:.1} ns per request: {rise:+.1} %");
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns nanoseconds per request for queues that run at the same time, each on its own CPU. Uses the median iteration, because other
/// load on the machine prolongs some of them.
fn side_by_side(
    device: &dyn VirtioDevice,
    first: u16,
    transport: Transport,
    batch: usize,
    queues: u16,
) -> Vec<f64> {
    const ITERATIONS: usize = 20_000;
    let start = Barrier::new(usize::from(queues));
    let run = |queue: u16| {
        let mut cpus = CpuSet::new();
        cpus.set(usize::from(queue));
        sched_setaffinity(None, &cpus).expect("as many CPUs as queues");
        let mut setup = Setup::of(device, first + queue, transport, batch);
        start.wait();
        let mut iterations = Vec::with_capacity(ITERATIONS);
        for _ in 0..ITERATIONS {
            setup.fill();
            let began = Instant::now();
            assert!(setup.worker.iterate_once());
            iterations.push(began.elapsed().as_secs_f64() * 1e9 / batch as f64);
        }
        // All threads run until the last measurement ends.
        start.wait();
        median(&mut iterations)
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..queues).map(|q| scope.spawn(move || run(q))).collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results.map(|ns| ns.expect("a queue that runs")).collect()
    })
}

/// `iteration stamps blk|scsi BATCH`: nanoseconds per batch with and without stamps, on one queue in turns; means of the middle half.
/// From 16 requests on (virtio-scsi: 8) a batch is two iterations. The final empty poll is included.
fn stamps(transport: Transport, batch: usize) {
    const ROUNDS: usize = 400;
    const ITERATIONS: usize = 200;
    let mut setup = Setup::new(transport, null(), batch);
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        let without = round % 4 == 1 || round % 4 == 2;
        setup.set_recording(!without);
        for iteration in 0..ITERATIONS {
            setup.fill();
            let began = Instant::now();
            while setup.worker.iterate_once() {}
            if iteration >= ITERATIONS / 10 {
                times[usize::from(without)].push(began.elapsed().as_secs_f64() * 1e9);
            }
        }
    }
    let [with, without] = times.each_mut().map(|times| middle(times));
    let (cost, part) = (with - without, (with / without - 1.0) * 100.0);
    println!("with {with:.1} ns, without {without:.1} ns per batch: {cost:+.1} ns, {part:+.1} %");
}

/// Returns the mean of the middle half.
fn middle(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = &values[values.len() / 4..values.len() * 3 / 4];
    middle.iter().sum::<f64>() / middle.len() as f64
}

/// `iteration count blk|scsi BATCH ITERATIONS`: only iterations, for a profiler that counts instructions
/// (`valgrind --tool=callgrind --toggle-collect='*iterate_once*'`).
fn count(transport: &str, batch: &str, iterations: &str) {
    let mut setup = Setup::new(transport_of(transport), null(), number(batch));
    for _ in 0..number(iterations) {
        setup.fill();
        assert!(setup.worker.iterate_once());
    }
}

#[derive(Clone, Copy)]
enum Transport {
    Blk,
    Scsi,
}

struct Setup {
    worker: Worker,
    queue: SourceId,
    driver: DriverQueue,
    /// Readable and writable parts of each request of a batch.
    requests: Vec<Request>,
}

type Range = (u64, u32);

struct Request {
    readable: [Range; 1],
    writable: Vec<Range>,
}

/// Creates a device with one disk. Returns it and the index of its first request queue.
fn virtio_device(
    transport: Transport,
    device: Arc<dyn BlockDevice>,
    queues: u16,
) -> (Box<dyn VirtioDevice>, u16) {
    let disk = Arc::new(Disk::new("d0", None, device).unwrap());
    match transport {
        Transport::Blk => (
            Box::new(BlkDevice::new(
                disk,
                BlkOptions {
                    name: "d0".into(),
                    queues,
                },
            )),
            0,
        ),
        Transport::Scsi => {
            let units = Units::new(Box::<MemoryStore>::default());
            let device = ScsiDevice::new(
                units,
                ScsiOptions {
                    name: "c0".into(),
                    queues,
                },
            );
            device.add_lun(0, 0, &disk).unwrap();
            (Box::new(device), 2)
        }
    }
}

/// Builds a 4 KiB read: header, and buffers for data and status.
fn request(transport: Transport, memory: &Arc<Mapping>, at: u64, block: u64) -> Request {
    let mut header = [0; 64];
    let (length, writable) = match transport {
        Transport::Blk => {
            header[8..16].copy_from_slice(&(block * 8).to_le_bytes());
            (16, vec![(at + 4096, 4096), (at + 512, 1)])
        }
        Transport::Scsi => {
            header[..4].copy_from_slice(&[1, 0, 0x40, 0]);
            header[19] = 0x28;
            header[21..25].copy_from_slice(&(block as u32 * 8).to_be_bytes());
            header[26..28].copy_from_slice(&8u16.to_be_bytes());
            (51, vec![(at + 512, 108), (at + 4096, 4096)])
        }
    };
    IoBuffer::of_mapping(memory, at as usize, length).write_at(0, &header[..length]);
    Request {
        readable: [(at, length as u32)],
        writable,
    }
}

impl Setup {
    fn new(transport: Transport, device: Arc<dyn BlockDevice>, batch: usize) -> Setup {
        let (device, index) = virtio_device(transport, device, 1);
        Setup::of(&*device, index, transport, batch)
    }

    /// Creates a queue of a device on a worker of the calling thread.
    fn of(device: &dyn VirtioDevice, index: u16, transport: Transport, batch: usize) -> Setup {
        let spec = RegionSpec {
            guest_address: 0,
            size: MEMORY as u64,
            user_address: 0,
            file_offset: 0,
        };
        let memory = Mapping::anonymous(MEMORY).unwrap();
        let table = MemoryTable::default()
            .with_mapping(spec, memory.clone())
            .unwrap();
        let layout = RingLayout::at(0, SIZE, false);
        let tables = IndirectTables {
            address: layout.end,
            descriptors: 4,
        };
        let driver = DriverConfig {
            event_idx: true,
            tables: Some(tables),
            ..DriverConfig::new(layout)
        };
        let mut driver = DriverQueue::new(driver, &table).unwrap();
        driver.disable_interrupts();
        let mut config = layout.device_config();
        config.event_idx = true;
        let mut worker = Worker::standalone(Ring::new(1024).unwrap(), Clock::new()).unwrap();
        let setup = QueueSetup {
            inflight: None,
            log: None,
            index,
            features: device.features(),
            config,
            memory: Arc::new(table),
            kick: None,
            call: None,
            error: None,
            enabled: true,
            on_broken: Arc::new(|_, why| panic!("queue broke: {why}")),
            labels: Labels::default(),
        };
        let make = device.queue(setup, worker.handle());
        let queue = worker
            .add(|io, id| make(io, id).map(|built| built.source))
            .unwrap();
        let data = (layout.end + tables.bytes(SIZE)).next_multiple_of(8192);
        let requests = (0..batch as u64)
            .map(|i| request(transport, &memory, data + i * APART, i * 7919 % 16384))
            .collect();
        let mut setup = Setup {
            worker,
            queue,
            driver,
            requests,
        };
        // The power-on unit attention and first-use allocations are not timed.
        for _ in 0..3 {
            setup.fill();
            setup.worker.iterate_once();
        }
        setup
    }

    fn set_recording(&mut self, recording: bool) {
        let (queue, _) = self.worker.source(self.queue).expect("added at the start");
        queue.set_recording(recording);
    }

    fn fill(&mut self) {
        while self.driver.pop_used().is_some() {}
        for (i, request) in self.requests.iter().enumerate() {
            let added = self
                .driver
                .add_indirect(&request.readable, &request.writable, i as u64);
            added.expect("room in the ring");
        }
        self.driver.publish();
    }
}

fn iterations(
    bencher: Bencher<'_, '_>,
    transport: Transport,
    device: Arc<dyn BlockDevice>,
    batch: usize,
) {
    let setup = std::cell::RefCell::new(Setup::new(transport, device, batch));
    bencher
        .counter(ItemsCount::new(batch))
        .with_inputs(|| setup.borrow_mut().fill())
        .bench_local_values(|()| assert!(black_box(setup.borrow_mut().worker.iterate_once())));
}

fn null() -> Arc<dyn BlockDevice> {
    Arc::new(Null::create(NullOptions::default()).unwrap())
}

fn ram() -> Arc<dyn BlockDevice> {
    Arc::new(
        Ram::create(RamOptions {
            size: 64 << 20,
            ..RamOptions::default()
        })
        .unwrap(),
    )
}

#[divan::bench(args = BATCHES, sample_count = 20000, sample_size = 1)]
fn blk_null(bencher: Bencher<'_, '_>, batch: usize) {
    iterations(bencher, Transport::Blk, null(), batch);
}

#[divan::bench(args = BATCHES, sample_count = 20000, sample_size = 1)]
fn scsi_null(bencher: Bencher<'_, '_>, batch: usize) {
    iterations(bencher, Transport::Scsi, null(), batch);
}

#[divan::bench(args = BATCHES, sample_count = 20000, sample_size = 1)]
fn blk_ram(bencher: Bencher<'_, '_>, batch: usize) {
    iterations(bencher, Transport::Blk, ram(), batch);
}

#[divan::bench(args = BATCHES, sample_count = 20000, sample_size = 1)]
fn scsi_ram(bencher: Bencher<'_, '_>, batch: usize) {
    iterations(bencher, Transport::Scsi, ram(), batch);
}

/// Measures an empty poll, without the pause after it.
#[divan::bench(sample_count = 2000, sample_size = 100)]
fn nothing(bencher: Bencher<'_, '_>) {
    let mut setup = Setup::new(Transport::Blk, null(), 1);
    bencher.bench_local(|| assert!(!black_box(setup.worker.iterate_once())));
}
