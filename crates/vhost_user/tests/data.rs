//! Written data reads back through every kind of ring and request.

mod support;

use std::sync::Arc;
use std::time::Duration;

use bdev::{Disk, File, FileOptions, Null, NullOptions};
use block::{IoFlags, IoKind};
use reactor::PollLimit;
use support::{Rig, Watched, connect, eventually, ram, start_blk};
use vhost_frontend::{
    BlkQueue, FrontEnd, Layout, Options, QueueOptions, Range, Verifier, feature, kind, request,
    status,
};
use virtio_blk::{BlkDevice, BlkOptions};

const PIECE: u64 = 4 << 20;

#[test]
fn data_comes_back_through_every_ring_queue_and_worker_count() {
    for workers in [1, 2] {
        let rig = Rig::new(workers);
        let socket = rig.serve_ram("d", 4);
        for number in 0..8 {
            let (packed, event_idx, indirect) = (number & 1 != 0, number & 2 != 0, number & 4 != 0);
            for queues in 1..=4 {
                let options = Options {
                    packed,
                    event_idx,
                    ..Options::default()
                };
                let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
                assert_eq!(front_end.has(feature::RING_PACKED), packed);
                assert_eq!(front_end.has(feature::EVENT_IDX), event_idx);
                let queue_options = QueueOptions {
                    size: 64,
                    indirect: indirect.then_some(8),
                    ..QueueOptions::default()
                };
                let mut used: Vec<_> = (0..queues)
                    .map(|index| {
                        let queue = BlkQueue::start(
                            &mut front_end,
                            index,
                            &queue_options,
                            16,
                            8192,
                            Layout::Separate,
                        );
                        let seed = u64::from(index) + 1;
                        let verifier = Verifier::new(PIECE * u64::from(index), 24, seed);
                        (queue.unwrap(), verifier)
                    })
                    .collect();
                for _ in 0..8 {
                    for (queue, verifier) in &mut used {
                        let case = format!("workers {workers} kind {number:03b} queues {queues}");
                        verifier.round(queue, 16).expect(&case);
                    }
                }
                for (queue, verifier) in &mut used {
                    verifier.check_all(queue).unwrap();
                }
            }
        }
    }
}

#[test]
fn a_file_serves_what_was_written() {
    let rig = Rig::new(2);
    let mut options = FileOptions::new(rig.directory.path().join("disk.raw"));
    options.size = Some(16 << 20);
    let socket = rig.serve("f", Arc::new(File::open(options).unwrap()), 2);
    let mut front_end = connect(&socket);
    let mut queues = [start_blk(&mut front_end, 0), start_blk(&mut front_end, 1)];
    let mut verifiers = [Verifier::new(0, 64, 1), Verifier::new(PIECE, 64, 2)];
    for _ in 0..20 {
        for (queue, verifier) in queues.iter_mut().zip(&mut verifiers) {
            verifier.round(queue, 32).unwrap();
        }
    }
    drop((queues, front_end));
    // Another front end reads the data into memory that is not aligned for O_DIRECT.
    let mut front_end = connect(&socket);
    let mut queue = BlkQueue::start(
        &mut front_end,
        0,
        &QueueOptions::default(),
        4,
        4096,
        Layout::MaxLength(1000),
    )
    .unwrap();
    for verifier in &mut verifiers {
        verifier.check_all(&mut queue).unwrap();
    }
}

#[test]
fn a_null_disk_answers_every_kind() {
    let rig = Rig::new(1);
    let null = Null::create(NullOptions::default()).unwrap();
    let socket = rig.serve("n", Arc::new(null), 1);
    let mut front_end = connect(&socket);
    let mut queue = start_blk(&mut front_end, 0);
    assert_eq!(queue.write(0, &[1; 4096]).unwrap(), status::OK);
    assert_eq!(queue.read(0, &mut [0; 4096]).unwrap(), status::OK);
    assert_eq!(queue.flush().unwrap(), status::OK);
}

#[test]
fn a_request_moves_more_than_32_mib_however_its_chain_is_laid_out() {
    const EACH: usize = 8 << 20;
    let rig = Rig::new(1);
    let socket = rig.serve_ram("d", 1);
    for (packed, indirect) in [false, true]
        .into_iter()
        .flat_map(|p| [(p, None), (p, Some(128))])
    {
        let options = Options {
            packed,
            ..Options::default()
        };
        let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
        let queue_options = QueueOptions {
            indirect,
            ..QueueOptions::default()
        };
        let mut queue = front_end.start_queue(0, &queue_options).unwrap();
        let small = front_end.allocate(4096, 4096).unwrap();
        // All elements refer to the same memory, so a request of 40 MiB needs less guest memory. The disk has 64 MiB.
        let data = front_end.allocate(EACH, 4096).unwrap();
        let (header, answer) = (small.part(0, 16), small.part(64, 1));
        for kind in [kind::IN, kind::OUT] {
            for (times, expected) in [(4, status::OK), (5, status::OK), (9, status::IOERR)] {
                header.write(0, &[0; 16]);
                header.write(0, &kind.to_le_bytes());
                answer.write(0, &[0xee]);
                let (mut readable, mut writable) = (vec![header.element()], Vec::new());
                let elements = std::iter::repeat_n(data.element(), times);
                match kind {
                    kind::OUT => readable.extend(elements),
                    _ => writable.extend(elements),
                }
                writable.push(answer.element());
                assert!(queue.add(&readable, &writable, 0));
                queue.publish();
                while queue.pop_used().is_none() {
                    queue.wait(Duration::from_secs(30)).unwrap();
                }
                let mut got = [0];
                answer.read(0, &mut got);
                assert_eq!(got, [expected], "kind {kind}, {times} times, {indirect:?}");
            }
        }
    }
}

#[test]
fn driver_that_turns_write_back_off_gets_every_write_durable() {
    let rig = Rig::new(1);
    let device = Watched::new(ram(1 << 20), Duration::ZERO);
    let socket = rig.serve("w", device.clone(), 1);
    let write = |queue: &mut BlkQueue| {
        device.forget();
        assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
        let seen = device.seen();
        assert_eq!((seen.len(), seen[0].kind), (1, IoKind::Write));
        seen[0].flags.has(IoFlags::FUA)
    };
    let mut front_end = connect(&socket);
    let mut queue = start_blk(&mut front_end, 0);
    const WRITEBACK: u32 = 32;
    assert_eq!(front_end.config(WRITEBACK, 1).unwrap(), [1]);
    assert!(!write(&mut queue), "write-back as it begins");
    let is_disabled = || rig.server.status()[0].is_write_cache_disabled;
    assert!(!is_disabled());
    front_end.write_config(WRITEBACK, &[0]).unwrap();
    assert!(is_disabled());
    assert_eq!(front_end.config(WRITEBACK, 1).unwrap(), [0]);
    assert!(write(&mut queue), "turned off");
    let range = Range {
        sector: 0,
        sectors: 8,
        flags: 0,
    };
    device.forget();
    assert_eq!(queue.write_zeroes(&[range]).unwrap(), status::OK);
    let kinds: Vec<_> = device.seen().iter().map(|io| io.kind).collect();
    assert_eq!(kinds, [IoKind::WriteZeroes, IoKind::Flush]);
    for on in [1, 2, 0xff] {
        front_end.write_config(WRITEBACK, &[0]).unwrap();
        assert!(write(&mut queue), "turned off");
        // Any byte that QEMU's device accepts for on: a guest may write any of them.
        front_end.write_config(WRITEBACK, &[on]).unwrap();
        assert_eq!(front_end.config(WRITEBACK, 1).unwrap(), [1]);
        assert!(!write(&mut queue), "turned on again by {on}");
    }
    drop((queue, front_end));

    // A driver without the flush feature cannot request durability (5.2.6.2).
    const F_FLUSH: u64 = 1 << 9;
    let options = Options {
        device_features: Options::default().device_features & !F_FLUSH,
        ..Options::default()
    };
    let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
    assert!(front_end.offered() & F_FLUSH != 0 && !front_end.has(F_FLUSH));
    let mut queue = start_blk(&mut front_end, 0);
    assert!(write(&mut queue), "without VIRTIO_BLK_F_FLUSH");
    drop((queue, front_end));

    let mut front_end = connect(&socket);
    let mut queue = start_blk(&mut front_end, 0);
    assert!(!write(&mut queue), "a new driver starts with the default");
}

/// From then on the driver sends no flushes, also on a later connection. The next driver after a reset does not either: QEMU shows it the
/// last written value without reading it again.
#[test]
fn write_back_stays_off_until_the_driver_has_left() {
    const WRITEBACK: u32 = 32;
    let rig = Rig::new(1);
    let device = Watched::new(ram(1 << 20), Duration::ZERO);
    let socket = rig.serve("w", device.clone(), 1);
    let durable = |queue: &mut BlkQueue| {
        device.forget();
        assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
        device.seen()[0].flags.has(IoFlags::FUA)
    };
    let connect_again = || {
        eventually("its session ends", || !rig.is_connected("w"));
        let mut front_end = connect(&socket);
        let queue = start_blk(&mut front_end, 0);
        (queue, front_end)
    };
    for reset in [true, false] {
        let (mut queue, front_end) = connect_again();
        assert!(!durable(&mut queue));
        front_end.write_config(WRITEBACK, &[0]).unwrap();
        // The connection is lost. A third party then checks whether the socket answers.
        drop((queue, front_end));
        drop(connect_again().1);
        let (mut queue, front_end) = connect_again();
        assert!(durable(&mut queue), "after its connection was lost");
        assert_eq!(front_end.config(WRITEBACK, 1).unwrap(), [0]);
        // The machine is switched off, or first restarted.
        front_end.stop_queue(0).unwrap();
        drop(queue);
        let mut front_end = front_end;
        if reset {
            front_end.reset_device().unwrap();
            let features = front_end.features().to_ne_bytes();
            front_end
                .acknowledged(request::SET_FEATURES, &features, &[])
                .unwrap();
            let mut queue = start_blk(&mut front_end, 0);
            assert!(durable(&mut queue), "after a reset");
            assert_eq!(front_end.config(WRITEBACK, 1).unwrap(), [0]);
            front_end.stop_queue(0).unwrap();
        }
    }
    assert!(!durable(&mut connect_again().0));
}

#[test]
fn every_poll_limit_serves() {
    for poll in [PollLimit::Never, PollLimit::Micros(50), PollLimit::Always] {
        let rig = Rig::polling(1, poll);
        let socket = rig.serve_ram("d", 2);
        let mut front_end = connect(&socket);
        let mut queues = [start_blk(&mut front_end, 0), start_blk(&mut front_end, 1)];
        let mut verifier = Verifier::new(0, 64, 7);
        for round in 0..40 {
            verifier.round(&mut queues[round % 2], 4).unwrap();
            if round % 10 == 0 {
                // Long enough for a worker to fall asleep, if it ever does.
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

#[test]
fn queue_of_1024_entries_is_filled_to_the_brim() {
    let rig = Rig::new(1);
    let device = Watched::new(ram(64 << 20), Duration::from_millis(2));
    let socket = rig.serve("d", device, 1);
    for packed in [false, true] {
        let options = Options {
            packed,
            ..Options::default()
        };
        let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
        let queue_options = QueueOptions {
            size: 1024,
            indirect: Some(4),
            ..QueueOptions::default()
        };
        let mut queue = BlkQueue::start(
            &mut front_end,
            0,
            &queue_options,
            1024,
            512,
            Layout::Separate,
        )
        .unwrap();
        for round in 0u64..3 {
            for _ in 0..1024 {
                let slot = queue.take().unwrap();
                queue.data(slot).write(0, &[slot as u8 ^ round as u8; 512]);
                assert!(queue.submit(slot, kind::OUT, u64::from(slot), 512, 0));
            }
            queue.publish();
            for _ in 0..1024 {
                let done = queue.wait().unwrap();
                assert_eq!(done.status, status::OK);
                queue.release(done.slot);
            }
        }
        let mut got = [0; 512];
        assert_eq!(queue.read(700 * 512, &mut got).unwrap(), status::OK);
        assert_eq!(got, [700u16 as u8 ^ 2; 512]);
    }
}

/// A driver may read a new capacity before the message about it has reached the queue. The test never sends this message.
#[test]
fn requests_within_a_capacity_that_the_driver_has_read_are_served() {
    const MIB: u64 = 1 << 20;
    let rig = Rig::new(1);
    let disk = Arc::new(Disk::new("d", None, ram(MIB)).unwrap());
    let options = BlkOptions {
        name: "d".to_owned(),
        queues: 1,
    };
    let socket = rig.socket("d");
    let device = Arc::new(BlkDevice::new(disk.clone(), options));
    rig.server.listen(&socket, device).unwrap();
    let mut front_end = connect(&socket);
    let mut queue = start_blk(&mut front_end, 0);
    let within = |end: u64| Range {
        sector: end / 512 - 8,
        sectors: 8,
        flags: 0,
    };
    for end in [2 * MIB, 3 * MIB] {
        assert_eq!(queue.write(end - 4096, &[1; 4096]).unwrap(), status::IOERR);
        assert_eq!(queue.write_zeroes(&[within(end)]).unwrap(), status::IOERR);
        disk.resize(end).unwrap();
        assert_eq!(front_end.config(0, 8).unwrap(), (end / 512).to_le_bytes());
        if end == 2 * MIB {
            assert_eq!(queue.write(end - 4096, &[1; 4096]).unwrap(), status::OK);
        }
        assert_eq!(queue.write_zeroes(&[within(end)]).unwrap(), status::OK);
    }
}
