//! Requests larger than one I/O: executed in pieces, with limited memory, while other requests continue.

mod support;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bdev::{
    BlockDevice, Fault, FaultAction, FaultPlan, Faulty, File, FileOptions, Null, NullOptions,
};
use block::{IoError, IoErrorKind, IoFlags, IoKind};
use support::{IoEvent, Rig, Watched, ram};
use vhost_frontend::{Area, FrontEnd, Options, Queue, QueueOptions, kind, status};

const LIMIT: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;
/// Length of a piece.
const PIECE: u64 = 4 << 20;

struct Driver {
    front_end: FrontEnd,
    queue: Queue,
    small: Area,
}

impl Driver {
    /// Starts a driver without SIZE_MAX and SEG_MAX, with memory for `bytes` of data.
    fn start(socket: &Path, packed: bool, indirect: Option<u16>, bytes: usize) -> Driver {
        let defaults = Options::default();
        let options = Options {
            packed,
            device_features: defaults.device_features & !(1 << 1 | 1 << 2),
            memory: bytes + 8 * MIB,
            ..defaults
        };
        let mut front_end = FrontEnd::connect(socket, &options).unwrap();
        let options = QueueOptions {
            indirect,
            ..QueueOptions::default()
        };
        let queue = front_end.start_queue(0, &options).unwrap();
        let small = front_end.allocate(4096, 4096).unwrap();
        Driver {
            front_end,
            queue,
            small,
        }
    }

    fn data(&mut self, bytes: usize) -> Area {
        self.front_end.allocate(bytes, 4096).unwrap()
    }

    fn status(&self, slot: usize) -> u8 {
        let mut got = [0];
        self.small.read(slot * 64 + 16, &mut got);
        got[0]
    }

    /// Adds a request with the header and status of `slot`.
    fn add(&mut self, slot: usize, kind: u32, sector: u64, data: &[(u64, u32)]) {
        let (header, answer) = (
            self.small.part(slot * 64, 16),
            self.small.part(slot * 64 + 16, 1),
        );
        header.write(0, &[0; 16]);
        header.write(0, &kind.to_le_bytes());
        header.write(8, &sector.to_le_bytes());
        answer.write(0, &[0xee]);
        let (mut readable, mut writable) = (vec![header.element()], Vec::new());
        match kind {
            kind::OUT => readable.extend(data),
            _ => writable.extend(data),
        }
        writable.push(answer.element());
        assert!(self.queue.add(&readable, &writable, slot as u64));
    }

    /// Returns the slot that completes, and the bytes written as reported by the device.
    fn wait(&mut self) -> (usize, u32) {
        loop {
            if let Some(used) = self.queue.pop_used() {
                return (used.token as usize, used.written);
            }
            self.queue.wait(LIMIT).unwrap();
        }
    }

    /// Runs one request. Returns its status and the bytes written.
    fn run(&mut self, kind: u32, sector: u64, data: &[(u64, u32)]) -> (u8, u32) {
        self.add(0, kind, sector, data);
        self.queue.publish();
        let (_, written) = self.wait();
        (self.status(0), written)
    }
}

/// Returns data with different groups of eight bytes.
fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let words = (0..bytes as u64 / 8).flat_map(|at| (at ^ (seed << 40)).to_le_bytes());
    words.collect()
}

/// Serialises the tests: they measure the process, and use gigabytes.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the process's anonymous memory, which excludes guest memory.
fn anonymous_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.unwrap().parse::<usize>().unwrap() << 10
}

#[test]
fn request_of_64_mib_moves_in_one_descriptor_and_in_many() {
    let _alone = alone();
    let rig = Rig::new(1);
    let socket = rig.serve_ram("d", 1);
    let ways = [(false, None), (true, Some(1026))];
    for (round, (packed, indirect)) in ways.into_iter().enumerate() {
        let mut driver = Driver::start(&socket, packed, indirect, 64 * MIB);
        let data = driver.data(64 * MIB);
        let elements: Vec<(u64, u32)> = match indirect {
            Some(_) => (0..1024)
                .map(|at| data.part(at * 65536, 65536).element())
                .collect(),
            None => vec![data.element()],
        };
        let bytes = pattern(64 * MIB, round as u64);
        data.write(0, &bytes);
        assert_eq!(driver.run(kind::OUT, 0, &elements), (status::OK, 1));
        data.write(0, &vec![0; 64 * MIB]);
        let read = driver.run(kind::IN, 0, &elements);
        assert_eq!(read, (status::OK, (64 << 20) + 1));
        let mut got = vec![0; 64 * MIB];
        data.read(0, &mut got);
        assert!(got == bytes, "packed {packed}, {} elements", elements.len());
        // One sector beyond the disk, and a length that is not a multiple of a sector.
        assert_eq!(driver.run(kind::IN, 1, &elements), (status::IOERR, 1));
        let part = data.part(0, 64 * MIB - 100).element();
        assert_eq!(driver.run(kind::IN, 0, &[part]), (status::IOERR, 1));
    }
}

#[test]
fn request_of_1_gib_is_carried_out_piece_by_piece_with_bounded_memory() {
    let _alone = alone();
    let rig = Rig::new(1);
    let null = Null::create(NullOptions::default()).unwrap();
    let device = Watched::new(Arc::new(null), Duration::ZERO);
    let socket = rig.serve("d", device.clone(), 1);
    let mut driver = Driver::start(&socket, false, None, GIB);
    let data = driver.data(GIB);
    let before = anonymous_bytes();
    for kind in [kind::IN, kind::OUT] {
        for durable in [false, true] {
            // The `writeback` field.
            driver
                .front_end
                .write_config(32, &[u8::from(!durable)])
                .unwrap();
            device.forget();
            let written = if kind == kind::IN { 1 << 30 } else { 0 };
            let got = driver.run(kind, 0, &[data.element()]);
            assert_eq!(got, (status::OK, written + 1));
            let seen = device.seen();
            let fua = durable && kind == kind::OUT;
            for (io, offset) in seen.iter().zip((0..).step_by(PIECE as usize)) {
                assert_eq!((io.offset, io.length), (offset, PIECE));
                assert_eq!(io.kind == IoKind::Write, kind == kind::OUT);
                assert_eq!(io.flags.has(IoFlags::FUA), fua);
            }
            assert_eq!(seen.len(), 256);
        }
    }
    let grown = anonymous_bytes().saturating_sub(before);
    assert!(grown < 16 * MIB, "{grown} bytes for requests of 1 GiB");
}

/// Unaligned memory of file I/O needs bounce buffers.
#[test]
fn long_request_with_unaligned_memory_takes_little_memory() {
    let _alone = alone();
    let rig = Rig::new(1);
    let mut options = FileOptions::new(rig.directory.path().join("disk.raw"));
    options.size = Some(64 << 20);
    let socket = rig.serve("f", Arc::new(File::open(options).unwrap()), 1);
    let mut driver = Driver::start(&socket, false, None, 65 * MIB);
    let data = driver.data(65 * MIB).part(3, 64 * MIB);
    let bytes = pattern(64 * MIB, 1);
    data.write(0, &bytes);
    let before = anonymous_bytes();
    let written = driver.run(kind::OUT, 0, &[data.element()]);
    let grown = anonymous_bytes().saturating_sub(before);
    assert_eq!(written, (status::OK, 1));
    assert!(grown < 16 * MIB, "{grown} bytes for a request of 64 MiB");
    data.write(0, &vec![0; 64 * MIB]);
    let read = driver.run(kind::IN, 0, &[data.element()]);
    assert_eq!(read, (status::OK, (64 << 20) + 1));
    let mut got = vec![0; 64 * MIB];
    data.read(0, &mut got);
    assert!(got == bytes);
}

#[test]
fn requests_that_come_later_do_not_wait_for_long_ones() {
    let _alone = alone();
    let rig = Rig::new(1);
    let socket = rig.serve("d", ram(1 << 30), 1);
    let mut driver = Driver::start(&socket, false, Some(64), 64 * MIB);
    let data = driver.data(32 * MIB);
    let long: Vec<_> = (0..32).map(|_| data.element()).collect();
    let short = driver.data(4096);
    // Three requests of 1 GiB to the same memory, followed by one of 4 KiB.
    for slot in 0..3 {
        driver.add(slot, kind::IN, 0, &long);
    }
    driver.add(3, kind::IN, 8, &[short.element()]);
    driver.queue.publish();
    assert_eq!(driver.wait(), (3, 4097), "the short one is answered first");
    let mut slots: Vec<_> = (0..3).map(|_| driver.wait()).collect();
    slots.sort_unstable();
    assert_eq!(slots, [0, 1, 2].map(|slot| (slot, (1 << 30) + 1)));
    assert_eq!(
        [0, 1, 2, 3].map(|slot| driver.status(slot)),
        [status::OK; 4]
    );
}

#[test]
fn error_in_a_piece_is_answered_once_when_nothing_is_in_flight() {
    for kind in [IoKind::Read, IoKind::Write] {
        let _alone = alone();
        let rig = Rig::new(1);
        let faults = vec![Fault {
            kind,
            skip: 5,
            times: 1,
            action: FaultAction::Fail(IoError::new(IoErrorKind::ReadMedium)),
        }];
        let shuffle = None;
        let faulty = Faulty::new(ram(64 << 20), FaultPlan { faults, shuffle });
        let device = Watched::new(
            Arc::new(faulty) as Arc<dyn BlockDevice>,
            Duration::from_millis(1),
        );
        let socket = rig.serve("d", device.clone(), 1);
        let mut driver = Driver::start(&socket, false, None, 64 * MIB);
        let data = driver.data(64 * MIB);
        let request = match kind {
            IoKind::Read => kind::IN,
            _ => kind::OUT,
        };
        let got = driver.run(request, 0, &[data.element()]);
        assert_eq!(got, (status::IOERR, 1));
        let pieces = (0..6).map(|at| at * PIECE);
        let io_events: Vec<_> = pieces
            .flat_map(|at| [IoEvent::Start(at), IoEvent::End(at)])
            .collect();
        assert_eq!(
            device.io_events(),
            io_events,
            "no piece follows the one that failed"
        );
        // The next request is served completely.
        let got = driver.run(request, 0, &[data.element()]);
        assert_eq!(got.0, status::OK);
    }
}
