//! The driver with devices of this process: counts, all driver options, and verification.

mod support;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bdev::{
    Attach, BlockDevice, Delay, Finished, IoChannel, Layer, Null, NullOptions, Ram, RamOptions,
    Submission, Tag,
};
use bench::driver::{DriverOptions, Kind, Subject};
use bench::run::Plan;
use block::IoRequest;
use guest_memory::IoBuffer;
use support::{Rig, job, outcome, plan, try_outcome};
use uring::{Completion, Ring};

fn ram(size: u64) -> Arc<dyn BlockDevice> {
    let options = RamOptions {
        size,
        huge_pages: false,
        ..RamOptions::default()
    };
    Arc::new(Ram::create(options).unwrap())
}

fn null(size: u64) -> Arc<dyn BlockDevice> {
    let options = NullOptions {
        size,
        ..NullOptions::default()
    };
    Arc::new(Null::create(options).unwrap())
}

/// Returns all combinations: polling and waiting, indirect and direct descriptors, with and without event indices, split and packed
/// rings.
fn ways() -> Vec<DriverOptions> {
    let mut ways = Vec::new();
    for polling in [true, false] {
        for packed in [true, false] {
            for (indirect, event_idx) in
                [(true, true), (true, false), (false, true), (false, false)]
            {
                ways.push(DriverOptions {
                    polling,
                    indirect,
                    event_idx,
                    packed,
                    ..DriverOptions::default()
                });
            }
        }
    }
    ways
}

#[test]
fn every_way_of_driving_makes_just_the_ios_that_were_asked_for() {
    for driver in ways() {
        let rig = Rig::new();
        let subjects = vec![rig.blk(null(64 << 20), 2), rig.scsi(null(64 << 20), 2)];
        let jobs = vec![job(&[
            ("rw", "randrw"),
            ("size", "8m"),
            ("iodepth", "16"),
            ("numjobs", "3"),
            ("bssplit", "4k/50:16k/50"),
        ])];
        let outcome = outcome(&plan(subjects, jobs, driver.clone()));
        for subject in &outcome.subjects {
            let result = &subject.repetitions[0].jobs[0];
            assert_eq!(result.errors, 0, "{driver:?} {:?}", result.complaints);
            let counted: u64 = result.tallies.iter().map(|t| t.latency.count).sum();
            assert_eq!(counted, result.ios(), "{driver:?}");
            // Each clone transfers 8 MiB, minus at most one request that does not fit.
            let missing = 3 * (8 << 20) - result.bytes();
            assert!(missing < 3 * 16384, "{driver:?} {missing}");
            assert!(result.tallies[0].ios > 0 && result.tallies[1].ios > 0);
            assert!(subject.repetitions[0].device_cpu_per_million.is_none());
        }
    }
}

/// A subject with a dirty log writes and verifies as any other.
#[test]
fn device_with_a_dirty_log_is_driven() {
    let writes = [
        ("rw", "randwrite"),
        ("bs", "4k"),
        ("size", "1m"),
        ("verify", "crc32c"),
    ];
    for packed in [false, true] {
        let rig = Rig::new();
        for subject in [rig.blk(ram(1 << 20), 1), rig.scsi(ram(1 << 20), 1)] {
            let options = DriverOptions {
                packed,
                ..DriverOptions::default()
            };
            let subject = Subject {
                dirty_log: true,
                ..subject
            };
            let plan = plan(vec![subject], vec![job(&writes)], options);
            try_outcome(&plan).unwrap();
        }
    }
}

#[test]
fn a_unit_that_is_not_there_is_said() {
    let rig = Rig::new();
    let subject = rig.scsi(null(1 << 20), 1);
    for (target, lun, words) in [(3, 6, "no such unit"), (4, 5, "no such target")] {
        let subject = Subject {
            kind: Kind::VhostScsi { target, lun },
            ..subject.clone()
        };
        let plan = plan(
            vec![subject],
            vec![job(&[("size", "1m")])],
            DriverOptions::default(),
        );
        let error = try_outcome(&plan).err().unwrap();
        let error = format!("{error:#}");
        let unit = format!("target {target} LUN {lun} of ");
        assert!(error.contains(&unit) && error.contains(words), "{error}");
    }
}

/// An explicit control socket requires stage latencies, so a missing daemon is an error.
#[test]
fn a_control_socket_that_nobody_serves_is_said_before_the_run() {
    let rig = Rig::new();
    let control = rig.path("control");
    let subject = Subject {
        control: Some(control.clone()),
        ..rig.blk(null(1 << 20), 1)
    };
    let plan = plan(
        vec![subject],
        vec![job(&[("size", "1m")])],
        DriverOptions::default(),
    );
    let error = try_outcome(&plan).err().unwrap();
    let error = format!("{error:#}");
    let socket = format!("control={}", control.display());
    assert!(
        error.contains(&socket) && error.contains("no daemon"),
        "{error}"
    );
}

/// Data written through one kind of ring is read through the other.
#[test]
fn packed_rings_carry_the_same_data() {
    let rig = Rig::new();
    for subject in [rig.blk(ram(4 << 20), 2), rig.scsi(ram(4 << 20), 2)] {
        for packed in [true, false] {
            for indirect in [true, false] {
                let driver = |packed| DriverOptions {
                    packed,
                    indirect,
                    ..DriverOptions::default()
                };
                let write = [
                    ("rw", "randwrite"),
                    ("bssplit", "512/30:4k/40:64k/30"),
                    ("iodepth", "32"),
                    ("fsync", "7"),
                    ("verify", "crc32c"),
                ];
                let plan_of = |jobs, packed| plan(vec![subject.clone()], jobs, driver(packed));
                let wrote = outcome(&plan_of(vec![job(&write)], packed));
                let result = &wrote.subjects[0].repetitions[0].jobs[0];
                assert_eq!((result.errors, result.differences), (0, 0), "{packed}");
                assert!(result.verified_bytes > 0 && result.tallies[2].ios > 0);
                let over = [("rw", "write"), ("bs", "8k"), ("verify", "crc32c")];
                let again = [("rw", "randread"), ("bs", "8k"), ("verify", "crc32c")];
                outcome(&plan_of(vec![job(&over)], packed));
                let read = outcome(&plan_of(vec![job(&again)], !packed));
                let result = &read.subjects[0].repetitions[0].jobs[0];
                assert_eq!((result.differences, result.verified_bytes), (0, 4 << 20));
            }
        }
    }
}

/// Needs eight huge pages. Without them, the error contains the command that reserves them.
#[test]
fn guest_memory_is_huge_pages_or_an_error_with_a_hint() {
    let rig = Rig::new();
    let driver = DriverOptions {
        huge_pages: true,
        ..DriverOptions::default()
    };
    let options = [("rw", "randwrite"), ("size", "1m"), ("verify", "crc32c")];
    let plan = plan(vec![rig.blk(ram(1 << 20), 1)], vec![job(&options)], driver);
    match try_outcome(&plan) {
        Ok(outcome) => {
            let result = &outcome.subjects[0].repetitions[0].jobs[0];
            assert_eq!((result.errors, result.differences), (0, 0));
            assert_eq!(result.verified_bytes, 1 << 20);
        }
        Err(error) => {
            let text = format!("{error:#}");
            assert!(text.contains("huge pages of 2 MiB"), "{text}");
            assert!(text.contains("> /proc/sys/vm/nr_hugepages"), "{text}");
        }
    }
}

#[test]
fn flushes_come_after_as_many_writes_as_asked() {
    let rig = Rig::new();
    let subjects = vec![rig.blk(ram(4 << 20), 1), rig.scsi(ram(4 << 20), 1)];
    let jobs = vec![job(&[
        ("rw", "write"),
        ("size", "1m"),
        ("fsync", "16"),
        ("end_fsync", "1"),
    ])];
    for subject in outcome(&plan(subjects, jobs, DriverOptions::default())).subjects {
        let result = &subject.repetitions[0].jobs[0];
        assert_eq!((result.tallies[1].ios, result.errors), (256, 0));
        assert_eq!(result.tallies[2].ios, 16);
    }
}

#[test]
fn discards_reach_the_disk_in_rings_of_either_kind() {
    for packed in [false, true] {
        let rig = Rig::new();
        for subject in [rig.blk(ram(4 << 20), 1), rig.scsi(ram(4 << 20), 1)] {
            let run = |options: &[(&str, &str)]| {
                let driver = DriverOptions {
                    packed,
                    ..DriverOptions::default()
                };
                let plan = plan(vec![subject.clone()], vec![job(options)], driver);
                let mut outcome = outcome(&plan);
                outcome.subjects[0].repetitions[0].jobs.remove(0)
            };
            run(&[("rw", "write"), ("bs", "4k"), ("verify", "crc32c")]);
            let trimmed = run(&[
                ("rw", "randtrim"),
                ("bs", "8k"),
                ("size", "2m"),
                ("iodepth", "8"),
            ]);
            assert_eq!((trimmed.tallies[3].ios, trimmed.errors), (256, 0));
            assert_eq!((trimmed.tallies[3].bytes, trimmed.ios()), (2 << 20, 256));
            // Discarded blocks differ from the written content; the others are intact.
            let read = run(&[("rw", "read"), ("bs", "4k"), ("verify", "crc32c")]);
            assert_eq!((read.differences, read.verified_bytes), (512, 2 << 20));
            let both = run(&[("rw", "trimwrite"), ("bs", "16k"), ("iodepth", "4")]);
            let counts = [0, 1, 3].map(|at: usize| (both.tallies[at].ios, both.tallies[at].bytes));
            assert_eq!(counts, [(0, 0), (256, 4 << 20), (256, 4 << 20)]);
            assert_eq!(both.errors, 0, "{:?}", both.complaints);
        }
    }
}

/// Uses a file, because the content of a null disk is undefined.
#[test]
fn discards_punch_holes_into_files() {
    use std::os::unix::fs::MetadataExt;
    let rig = Rig::new();
    let path = rig.path("file");
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    let text = path.display().to_string();
    let options = [
        ("filename", text.as_str()),
        ("rw", "trim"),
        ("bs", "64k"),
        ("size", "512k"),
        ("iodepth", "4"),
    ];
    let plan = plan(vec![], vec![job(&options)], DriverOptions::default());
    let result = outcome(&plan).subjects[0].repetitions[0].jobs[0].clone();
    assert_eq!((result.tallies[3].ios, result.errors), (8, 0));
    let content = std::fs::read(&path).unwrap();
    assert!(content[..512 << 10].iter().all(|byte| *byte == 0));
    assert!(content[512 << 10..].iter().all(|byte| *byte == 7));
    assert!(path.metadata().unwrap().blocks() * 512 < 1 << 20);
}

#[test]
fn a_file_is_made_filled_and_verified() {
    let rig = Rig::new();
    let path = rig.path("file");
    let text = path.display().to_string();
    let options = [
        ("filename", text.as_str()),
        ("size", "4m"),
        ("rw", "randwrite"),
        ("iodepth", "4"),
        ("verify", "crc64"),
        ("loops", "2"),
    ];
    let outcome = outcome(&plan(
        Vec::new(),
        vec![job(&options)],
        DriverOptions::default(),
    ));
    let result = &outcome.subjects[0].repetitions[0].jobs[0];
    assert_eq!((result.bytes(), result.verified_bytes), (8 << 20, 4 << 20));
    assert_eq!(
        (result.errors, result.differences),
        (0, 0),
        "{:?}",
        result.complaints
    );
    assert_eq!(std::fs::metadata(path).unwrap().len(), 4 << 20);
}

#[test]
fn a_stonewall_makes_phases_and_a_rate_holds() {
    let rig = Rig::new();
    let subjects = vec![rig.blk(null(64 << 20), 1)];
    let mut second = job(&[("rw", "read"), ("io_size", "256k"), ("rate_iops", "1000")]);
    second.stonewall = true;
    let jobs = vec![job(&[("rw", "read"), ("size", "1m")]), second];
    let outcome = outcome(&plan(subjects, jobs, DriverOptions::default()));
    let [first, second] = &outcome.subjects[0].repetitions[0].jobs[..] else {
        panic!("two jobs");
    };
    assert_eq!((first.phase, second.phase), (0, 1));
    assert_eq!((first.ios(), second.ios()), (256, 64));
    // 64 requests, at least a millisecond apart.
    assert!(second.elapsed_ns >= 62_000_000, "{}", second.elapsed_ns);
}

/// Also holds for a time shorter than the interval between clock reads, and for a late start.
#[test]
fn what_is_measured_is_as_long_as_was_asked_for() {
    for interrupts in [false, true] {
        let rig = Rig::new();
        let options = [
            ("rw", "randread"),
            ("runtime", "9ms"),
            ("time_based", "1"),
            ("norandommap", "1"),
        ];
        let driver = DriverOptions {
            polling: !interrupts,
            ..DriverOptions::default()
        };
        let plan = Plan {
            warm_up: Duration::from_millis(3),
            ..plan(
                vec![rig.blk(null(64 << 20), 1)],
                vec![job(&options)],
                driver,
            )
        };
        let outcome = outcome(&plan);
        let result = &outcome.subjects[0].repetitions[0].jobs[0];
        assert!(result.elapsed_ns >= 9_000_000, "{}", result.elapsed_ns);
        assert!(result.ios() > 0);
    }
}

#[test]
fn an_injected_service_time_is_what_is_measured_or_more() {
    let rig = Rig::new();
    let delay = Duration::from_millis(2);
    let device = Arc::new(Delay::new(null(1 << 20), delay));
    let jobs = vec![job(&[
        ("rw", "randread"),
        ("io_size", "128k"),
        ("iodepth", "2"),
    ])];
    let plan = plan(vec![rig.blk(device, 1)], jobs, DriverOptions::default());
    let outcome = outcome(&plan);
    let latency = outcome.subjects[0].repetitions[0].latency();
    assert_eq!(latency.count, 32);
    // The service time is a lower bound. Buckets round by 1.6 %.
    assert!(
        latency.quantile_ns(0.0) >= 1_960_000,
        "{}",
        latency.quantile_ns(0.0)
    );
}

/// A single fault at one offset.
#[derive(Clone, Copy, Debug)]
enum Wrong {
    FlipsABit,
    LosesAWrite,
    MisplacesAWrite,
}

struct Liar {
    inner: Arc<dyn BlockDevice>,
    wrong: Wrong,
    left: Arc<AtomicU64>,
}

const PLACE: u64 = 3 << 18;

impl Layer for Liar {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn layer_kind(&self) -> &'static str {
        "liar"
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        Ok(Box::new(LiarChannel {
            inner: self.inner.attach(attach)?,
            wrong: self.wrong,
            left: self.left.clone(),
        }))
    }
}

struct LiarChannel {
    inner: Box<dyn IoChannel>,
    wrong: Wrong,
    left: Arc<AtomicU64>,
}

impl IoChannel for LiarChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        let covers =
            io.kind == block::IoKind::Write && io.offset <= PLACE && PLACE < io.offset + io.length;
        let now = self.left.load(Ordering::Relaxed);
        if !covers || now == 0 {
            return self.inner.submit(ring, io, buffer, tag);
        }
        self.left.store(now - 1, Ordering::Relaxed);
        match self.wrong {
            Wrong::FlipsABit => {
                let mut byte = [0];
                buffer.read_at(1000, &mut byte);
                byte[0] ^= 0x10;
                buffer.write_at(1000, &byte);
                self.inner.submit(ring, io, buffer, tag)
            }
            Wrong::LosesAWrite => Submission::Done(Ok(())),
            Wrong::MisplacesAWrite => {
                let elsewhere = IoRequest {
                    offset: io.offset + (1 << 20),
                    ..*io
                };
                self.inner.submit(ring, &elsewhere, buffer, tag)
            }
        }
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        self.inner.complete(ring, completion, finished);
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}

/// Flips one bit of a gigabyte. Large blocks shorten the test.
#[test]
fn one_flipped_bit_in_a_gigabyte_is_found() {
    let rig = Rig::new();
    let device = Arc::new(Liar {
        inner: ram(1 << 30),
        wrong: Wrong::FlipsABit,
        left: Arc::new(AtomicU64::new(1)),
    });
    let options = [
        ("rw", "write"),
        ("bs", "256k"),
        ("size", "1g"),
        ("iodepth", "4"),
        ("verify", "crc32c"),
    ];
    let jobs = vec![job(&options)];
    let plan = plan(vec![rig.blk(device, 1)], jobs, DriverOptions::default());
    let outcome = outcome(&plan);
    let result = &outcome.subjects[0].repetitions[0].jobs[0];
    assert_eq!(result.differences, 1, "{:?}", result.complaints);
    assert_eq!(result.verified_bytes, (1 << 30) - (256 << 10));
}

fn complaints(wrong: Wrong, loops: &str) -> Vec<String> {
    let rig = Rig::new();
    let device = Arc::new(Liar {
        inner: ram(4 << 20),
        wrong,
        left: Arc::new(AtomicU64::new(1)),
    });
    let options = [
        ("rw", "randwrite"),
        ("size", "1m"),
        ("iodepth", "8"),
        ("verify", "crc32c"),
        ("loops", loops),
    ];
    let plan = plan(
        vec![rig.blk(device, 1)],
        vec![job(&options)],
        DriverOptions::default(),
    );
    let outcome = outcome(&plan);
    let result = &outcome.subjects[0].repetitions[0].jobs[0];
    assert_eq!(
        result.differences as usize,
        result.complaints.len(),
        "{wrong:?}"
    );
    assert_eq!(
        result.verified_bytes,
        (1 << 20) - 4096 * result.differences,
        "{wrong:?}"
    );
    result.complaints.clone()
}

#[test]
fn verification_finds_one_flipped_bit() {
    let found = complaints(Wrong::FlipsABit, "1");
    assert!(
        matches!(&found[..], [one] if one.contains("the data changed")),
        "{found:?}"
    );
}

#[test]
fn verification_finds_a_lost_write() {
    let found = complaints(Wrong::LosesAWrite, "1");
    assert!(
        matches!(&found[..], [one] if one.contains("zeroes: a write was lost")),
        "{found:?}"
    );
}

#[test]
fn verification_finds_a_misplaced_write() {
    let found = complaints(Wrong::MisplacesAWrite, "1");
    assert!(
        matches!(&found[..], [one] if one.contains("a write was lost")),
        "{found:?}"
    );
}

/// Read-only verification distinguishes a misplaced block from a lost one.
#[test]
fn reads_alone_are_verified_against_what_an_earlier_run_wrote() {
    let rig = Rig::new();
    let subject = rig.blk(ram(1 << 20), 1);
    let write = job(&[("rw", "write"), ("verify", "crc32c"), ("do_verify", "0")]);
    let mut read = job(&[("rw", "randread"), ("verify", "crc32c")]);
    read.stonewall = true;
    let whole = outcome(&plan(
        vec![subject.clone()],
        vec![write, read.clone()],
        DriverOptions::default(),
    ));
    let results = &whole.subjects[0].repetitions[0].jobs;
    assert_eq!(
        (results[0].verified_bytes, results[1].verified_bytes),
        (0, 1 << 20)
    );
    // Another seed means another run.
    read.seed += 1;
    let other = outcome(&plan(vec![subject], vec![read], DriverOptions::default()));
    let result = &other.subjects[0].repetitions[0].jobs[0];
    assert_eq!((result.verified_bytes, result.differences), (0, 256));
    assert!(
        result.complaints[0].contains("seed"),
        "{:?}",
        result.complaints
    );
}
