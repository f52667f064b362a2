//! virtio-scsi over a real session: commands through every kind of ring, with any division into descriptors.

mod support;

use std::sync::Arc;
use std::time::Duration;

use bdev::{Disk, Fault, FaultAction, FaultPlan, Faulty};
use block::{DeviceSense, IoError, IoErrorKind, IoKind};
use latency::{Operation, Span};
use reactor::PollLimit;
use scsi::MemoryStore;
use scsi_exec::Units;
use support::{Rig, ram};
use vhost_frontend::{FrontEnd, Layout, Options, QueueOptions, ScsiQueue, ScsiRequest};
use virtio_scsi::{ScsiDevice, ScsiOptions};

/// First request queue, after the control and event queues (virtio 1.3, 5.6.2).
const REQUESTS: u16 = 2;
const GOOD: u8 = 0x00;
const CHECK_CONDITION: u8 = 0x02;

fn request<'a>(target: u8, lun: u16, cdb: &'a [u8]) -> ScsiRequest<'a> {
    ScsiRequest {
        target,
        lun,
        tag: 7,
        cdb,
    }
}

/// Consumes the unit attentions of a new nexus.
fn settle(queue: &mut ScsiQueue, target: u8, lun: u16) {
    for _ in 0..4 {
        let done = queue
            .run(&request(target, lun, &[0; 6]), &[], &mut [])
            .unwrap();
        if done.status == GOOD {
            return;
        }
    }
    panic!("unit {target}:{lun} never gets ready");
}

fn write_10(block: u8, blocks: u8) -> [u8; 10] {
    [0x2a, 0, 0, 0, 0, block, 0, 0, blocks, 0]
}

fn read_10(block: u8, blocks: u8) -> [u8; 10] {
    [0x28, 0, 0, 0, 0, block, 0, 0, blocks, 0]
}

/// Target, unit, command, data out, and room for data in.
type BatchCommand<'a> = (u8, u16, &'a [u8], &'a [u8], usize);

/// Submits all commands in one batch. Returns status and sense code of each, in this order.
fn batch(queue: &mut ScsiQueue, commands: &[BatchCommand]) -> Vec<(u8, [u8; 2])> {
    let mut slots = Vec::new();
    for &(target, lun, cdb, out, into) in commands {
        let slot = queue.take().unwrap();
        queue.data_out(slot).write(0, out);
        assert!(queue.submit(slot, &request(target, lun, cdb), out.len(), into));
        slots.push(slot);
    }
    queue.publish();
    let mut ends = vec![(0xff, [0, 0]); slots.len()];
    for _ in &slots {
        let done = queue.wait().unwrap();
        assert_eq!(done.response, 0);
        let at = slots.iter().position(|slot| *slot == done.slot).unwrap();
        let code = done
            .sense
            .get(12..14)
            .map_or([0, 0], |code| [code[0], code[1]]);
        ends[at] = (done.status, code);
    }
    slots.into_iter().rev().for_each(|slot| queue.release(slot));
    ends
}

#[test]
fn commands_of_one_batch_see_what_those_before_them_changed() {
    let rig = Rig::new(1);
    let socket = rig.serve_controller(Duration::ZERO);
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let options = QueueOptions::default();
    let mut queue = ScsiQueue::start(
        &mut front_end,
        REQUESTS,
        &options,
        16,
        4096,
        Layout::Separate,
    )
    .unwrap();
    for (target, lun) in [(0, 0), (5, 300)] {
        settle(&mut queue, target, lun);
    }
    // Two units in turns, each written and read within one batch.
    for round in 1..5 {
        let writes: Vec<_> = (0..8)
            .map(|n| (write_10(n, 1), [round ^ n << 4; 512]))
            .collect();
        let read = read_10(7, 1);
        let mut commands: Vec<BatchCommand> = Vec::new();
        for (n, (cdb, data)) in writes.iter().enumerate() {
            let (target, lun) = [(0, 0), (5, 300)][n % 2];
            commands.push((target, lun, cdb, data, 0));
        }
        commands.push((5, 300, &read, &[], 512));
        assert_eq!(batch(&mut queue, &commands), [(GOOD, [0, 0]); 9]);
        for (n, (_, data)) in writes.iter().enumerate() {
            let (target, lun) = [(0, 0), (5, 300)][n % 2];
            let (mut got, read) = ([0; 512], read_10(n as u8, 1));
            queue
                .run(&request(target, lun, &read), &[], &mut got)
                .unwrap();
            assert_eq!(&got, data, "round {round} block {n}");
        }
    }
    // The control mode page: SWP (SPC-4, 7.5.8) protects the unit from writes, until it is cleared.
    let mut page = [0; 16];
    let sense = [0x1a, 0x08, 0x0a, 0, 16, 0];
    queue.run(&request(0, 0, &sense), &[], &mut page).unwrap();
    assert_eq!((page[4] & 0x3f, page[5]), (0x0a, 0x0a));
    // Reserved in MODE SELECT: the header, PS.
    page[..4].fill(0);
    page[4] &= 0x3f;
    let open = page;
    page[8] |= 0x08;
    let select = [0x15, 0x10, 0, 0, 16, 0];
    let (write, read, block) = (write_10(9, 1), read_10(9, 1), [9; 512]);
    let ends = batch(
        &mut queue,
        &[
            (0, 0, &write, &block, 0),
            (0, 0, &select, &page, 0),
            (0, 0, &write, &block, 0),
            (5, 300, &write, &block, 0),
            (0, 0, &write, &block, 0),
            (0, 0, &read, &[], 512),
            (0, 0, &select, &open, 0),
            (0, 0, &write, &block, 0),
        ],
    );
    // DATA PROTECT, WRITE PROTECTED
    let (good, refused) = ((GOOD, [0, 0]), (CHECK_CONDITION, [0x27, 0]));
    let codes: Vec<_> = ends
        .iter()
        .map(|(status, [asc, _])| (*status, [*asc, 0]))
        .collect();
    assert_eq!(
        codes,
        [good, good, refused, good, refused, good, good, good]
    );
}

/// 2.7.8.2: "The device MUST write at least len bytes".
#[test]
fn read_that_failed_claims_no_data() {
    const RESPONSE: u32 = 108;
    let rig = Rig::new(1);
    let disk = Arc::new(Faulty::new(ram(1 << 20), FaultPlan::default()));
    let units = Units::new(Box::<MemoryStore>::default());
    let (name, queues) = ("c".into(), 1);
    let controller = Arc::new(ScsiDevice::new(units, ScsiOptions { name, queues }));
    let lun = Disk::new("a", None, disk.clone()).unwrap();
    controller.add_lun(0, 0, &Arc::new(lun)).unwrap();
    let socket = rig.socket("c");
    rig.server.listen(&socket, controller).unwrap();
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let options = QueueOptions::default();
    let mut queue = ScsiQueue::start(
        &mut front_end,
        REQUESTS,
        &options,
        4,
        4096,
        Layout::Separate,
    )
    .unwrap();
    settle(&mut queue, 0, 0);
    let read = read_10(3, 1);
    // A plain command, and one with more room than it needs.
    for room in [512, 700] {
        for fails in [false, false, true, false] {
            if fails {
                disk.inject(Fault {
                    kind: IoKind::Read,
                    skip: 0,
                    times: 1,
                    action: FaultAction::Fail(IoErrorKind::ReadMedium.into()),
                });
            }
            let mut got = vec![0xee; room];
            let done = queue.run(&request(0, 0, &read), &[], &mut got).unwrap();
            let (status, bytes) = match fails {
                true => (CHECK_CONDITION, 0),
                false => (GOOD, 512),
            };
            assert_eq!((done.response, done.status), (0, status));
            assert_eq!(done.residual, room as u32 - bytes);
            assert_eq!(done.written, RESPONSE + bytes, "{room} fails {fails}");
            assert!(got[bytes as usize..].iter().all(|byte| *byte == 0xee));
        }
    }
}

/// A disk that is a SCSI device reports the cause of an error, and the number of bytes before it.
#[test]
fn sense_and_residual_of_a_scsi_device_reach_the_driver() {
    const RESPONSE: u32 = 108;
    let rig = Rig::new(1);
    let disk = Arc::new(Faulty::new(ram(1 << 20), FaultPlan::default()));
    let units = Units::new(Box::<MemoryStore>::default());
    let (name, queues) = ("c".into(), 1);
    let controller = Arc::new(ScsiDevice::new(units, ScsiOptions { name, queues }));
    let lun = Disk::new("a", None, disk.clone()).unwrap();
    controller.add_lun(0, 0, &Arc::new(lun)).unwrap();
    let socket = rig.socket("c");
    rig.server.listen(&socket, controller).unwrap();
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let options = QueueOptions::default();
    let mut queue = ScsiQueue::start(
        &mut front_end,
        REQUESTS,
        &options,
        4,
        8192,
        Layout::Separate,
    )
    .unwrap();
    settle(&mut queue, 0, 0);
    let data = vec![7; 2048];
    for bytes in [0, 512, 2048] {
        for kind in [IoKind::Write, IoKind::Read] {
            // HARDWARE ERROR, LOGICAL UNIT COMMUNICATION TIME-OUT.
            let sense = DeviceSense {
                key: 0x4,
                code: 0x08,
                qualifier: 0x01,
            };
            let error = IoError::with_sense(IoErrorKind::WriteMedium, sense, bytes);
            disk.inject(Fault {
                kind,
                skip: 0,
                times: 1,
                action: FaultAction::Undone(error),
            });
            let mut got = vec![0; if kind == IoKind::Read { 2048 } else { 0 }];
            let (cdb, out, transferred) = match kind {
                IoKind::Read => (read_10(3, 4), &[][..], bytes),
                _ => (write_10(3, 4), &data[..], 0),
            };
            let done = queue.run(&request(0, 0, &cdb), out, &mut got).unwrap();
            assert_eq!((done.response, done.status), (0, CHECK_CONDITION));
            let sense = &done.sense;
            let seen = (sense[0], sense[2], sense[12], sense[13]);
            assert_eq!(seen, (0x70, 0x04, 0x08, 0x01));
            assert_eq!(done.residual, 2048 - bytes);
            assert_eq!(done.written, RESPONSE + transferred, "{kind:?}");
            assert!(got[..transferred as usize].iter().all(|byte| *byte == 7));
        }
    }
}

#[test]
fn each_disk_of_a_queue_has_its_own_times_in_batches_of_both() {
    const DELAY: Duration = Duration::from_millis(5);
    for (slow, delays) in [
        (None, [Duration::ZERO; 2]),
        (Some("b"), [Duration::ZERO, DELAY]),
        (Some("a"), [DELAY, Duration::ZERO]),
    ] {
        let rig = Rig::new(1);
        let (socket, ..) = rig.serve_delayed_controller(delays);
        let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
        let options = QueueOptions::default();
        let mut queue = ScsiQueue::start(
            &mut front_end,
            REQUESTS,
            &options,
            16,
            4096,
            Layout::Separate,
        )
        .unwrap();
        let units = [("a", 0, 0), ("b", 5, 300)];
        for (_, target, lun) in units {
            settle(&mut queue, target, lun);
        }
        let read = read_10(3, 1);
        for round in 0..20 {
            let mut asked = 0;
            // In turns, runs of two, and an odd one of the second disk at the end of the batch.
            for at in [0, 1, 0, 0, 1, 1, 0, 1, 1] {
                let (_, target, lun) = units[at];
                let slot = queue.take().unwrap();
                assert!(queue.submit(slot, &request(target, lun, &read), 0, 512));
                asked += 1;
            }
            queue.publish();
            for _ in 0..asked {
                let done = queue.wait().unwrap();
                assert_eq!((done.response, done.status), (0, GOOD), "round {round}");
                queue.release(done.slot);
            }
        }
        front_end.stop_queue(REQUESTS).unwrap();
        let snapshots = rig.pool.snapshots();
        let is_request_queue =
            |queue: &&latency::QueueSnapshot| queue.labels.queue == u32::from(REQUESTS);
        let snapshot = snapshots.iter().find(is_request_queue).unwrap();
        assert_eq!(snapshot.disks.len(), 2);
        let mut reads = 0;
        for (name, count) in [("a", 20 * 4), ("b", 20 * 5)] {
            let latencies = &snapshot.disks[name];
            let read = latencies.counters.of(Operation::Read);
            assert_eq!((read.requests, read.bytes), (count, 512 * count), "{name}");
            let spans = &latencies.operations[&Operation::Read].spans;
            for span in Span::COMMON {
                assert_eq!(spans[&span].count, count, "{name} {span} {slow:?}");
            }
            if slow == Some(name) {
                let least = spans[&Span::Reaped].buckets.first().unwrap().0;
                let delay = DELAY.as_nanos() as u64;
                assert!(least > delay - delay / 64, "{name}: {least} ns");
            }
            reads += count;
        }
        let whole = &snapshot.latencies;
        assert_eq!(whole.counters.of(Operation::Read).requests, reads);
        let total = &whole.operations[&Operation::Read].spans[&Span::Total];
        assert_eq!(total.count, reads);
    }
}

/// For one command, or for a whole batch.
#[test]
fn long_commands_share_what_a_turn_may_take() {
    const COMMANDS: u16 = 32;
    const BLOCKS: u32 = 1 << 11;
    let rig = Rig::polling(1, PollLimit::Never);
    let socket = rig.serve_controller(Duration::ZERO);
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let options = QueueOptions::default();
    let mut queue = ScsiQueue::start(
        &mut front_end,
        2,
        &options,
        COMMANDS,
        4096,
        Layout::Separate,
    )
    .unwrap();
    settle(&mut queue, 0, 0);
    let before = rig.pool.counters()[0].1.busy_iterations;
    // WRITE SAME(16) of 1 MiB, all of it a pattern
    let mut cdb = [0; 16];
    cdb[0] = 0x93;
    cdb[10..14].copy_from_slice(&BLOCKS.to_be_bytes());
    for _ in 0..COMMANDS {
        let slot = queue.take().unwrap();
        queue.data_out(slot).write(0, &[7; 512]);
        assert!(queue.submit(slot, &request(0, 0, &cdb), 512, 0));
    }
    queue.publish();
    for _ in 0..COMMANDS {
        let done = queue.wait().unwrap();
        assert_eq!((done.response, done.status), (0, 0), "{:x?}", done.sense);
    }
    // about 4 MiB per iteration; the last iteration is counted after its answers are visible
    let iterations = rig.pool.counters()[0].1.busy_iterations - before + 1;
    assert!(
        iterations >= u64::from(COMMANDS) / 4,
        "{iterations} iterations"
    );
}

/// Commands above the memory limit must be repeated by the driver, for any number and size of commands.
#[test]
fn commands_that_hold_memory_hold_no_more_than_a_controller_may() {
    const TASK_SET_FULL: u8 = 0x28;
    const COMMANDS: u16 = 128;
    let rig = Rig::new(1);
    let socket = rig.serve_controller(Duration::from_millis(50));
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let options = QueueOptions {
        size: 512,
        ..QueueOptions::default()
    };
    let mut queue = ScsiQueue::start(
        &mut front_end,
        2,
        &options,
        COMMANDS,
        4096,
        Layout::Separate,
    )
    .unwrap();
    settle(&mut queue, 0, 0);
    // VERIFY(10) of 1 MiB: as much memory, and as much again in flight
    let verify = [0x2f, 0, 0, 0, 0, 0, 0, 8, 0, 0];
    for _ in 0..3 {
        for _ in 0..COMMANDS {
            let slot = queue.take().unwrap();
            assert!(queue.submit(slot, &request(0, 0, &verify), 0, 0));
        }
        queue.publish();
        let (mut good, mut full) = (0, 0);
        for _ in 0..COMMANDS {
            let done = queue.wait().unwrap();
            assert_eq!(done.response, 0);
            match done.status {
                GOOD => good += 1,
                TASK_SET_FULL => full += 1,
                status => panic!("{status:#x} {:x?}", done.sense),
            }
            queue.release(done.slot);
        }
        assert!((32..=64).contains(&good), "{good} at a time");
        assert_eq!(good + full, COMMANDS);
    }
}

#[test]
fn command_that_compares_takes_as_much_as_the_block_limits_say() {
    const BYTES: usize = 32 << 20;
    let rig = Rig::new(1);
    let units = Units::new(Box::<MemoryStore>::default());
    let options = ScsiOptions {
        name: "c".into(),
        queues: 1,
    };
    let controller = Arc::new(ScsiDevice::new(units, options));
    let disk = Arc::new(Disk::new("a", None, ram(64 << 20)).unwrap());
    controller.add_lun(0, 0, &disk).unwrap();
    let socket = rig.socket("c");
    rig.server.listen(&socket, controller).unwrap();
    let options = Options {
        memory: 256 << 20,
        ..Options::default()
    };
    let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
    let options = QueueOptions::default();
    let mut queue =
        ScsiQueue::start(&mut front_end, REQUESTS, &options, 1, BYTES, Layout::Merged).unwrap();
    settle(&mut queue, 0, 0);
    let data: Vec<u8> = (0..BYTES).map(|at| (at / 700) as u8).collect();
    let [a, b, c, d] = (BYTES as u32 / 512).to_be_bytes();
    // WRITE AND VERIFY(16), VERIFY(16) with BYTCHK, ORWRITE(16)
    for (opcode, byte1) in [(0x8e, 0x02), (0x8f, 0x02), (0x8b, 0)] {
        let cdb = [opcode, byte1, 0, 0, 0, 0, 0, 0, 0, 8, a, b, c, d, 0, 0];
        let done = queue.run(&request(0, 0, &cdb), &data, &mut []).unwrap();
        assert_eq!(
            (done.response, done.status),
            (0, GOOD),
            "{opcode:x}h: {:x?}",
            done.sense
        );
    }
}
