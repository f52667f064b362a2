//! Chains of drivers that ignore limits: many segments in an indirect table, and many bytes.

mod support;

use std::path::Path;
use std::time::Duration;

use support::Rig;
use vhost_frontend::{Area, FrontEnd, Options, Queue, QueueOptions, feature, kind};

const LIMIT: Duration = Duration::from_secs(30);
/// Length of one data segment in bytes.
const SEGMENT: usize = 512;
/// Numbers of data segments per chain: those of viostor, those reported for bhyve and Nutanix, and the maximum for direct descriptors.
const SEGMENTS: [usize; 5] = [129, 257, 515, 1022, 1024];

/// Runs one chain. Returns the bytes written, as reported by the device.
fn run(queue: &mut Queue, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> u32 {
    assert!(queue.add(readable, writable, 0), "no room in the ring");
    queue.publish();
    loop {
        if let Some(used) = queue.pop_used() {
            return used.written;
        }
        queue.wait(LIMIT).unwrap();
    }
}

/// Starts a front end and a queue of 128 with indirect tables of 1,026 descriptors.
fn start(socket: &Path, index: u16, packed: bool, seg_max: bool) -> (FrontEnd, Queue) {
    const F_SEG_MAX: u64 = 1 << 2;
    let defaults = Options::default();
    let device_features = match seg_max {
        true => defaults.device_features | F_SEG_MAX,
        false => defaults.device_features & !F_SEG_MAX,
    };
    let options = Options {
        packed,
        device_features,
        ..defaults
    };
    let mut front_end = FrontEnd::connect(socket, &options).unwrap();
    assert_eq!(front_end.has(feature::RING_PACKED), packed);
    let options = QueueOptions {
        indirect: Some(1026),
        ..QueueOptions::default()
    };
    let queue = front_end.start_queue(index, &options).unwrap();
    (front_end, queue)
}

/// Returns segments of 512 bytes in reverse order: none continues its predecessor.
fn pieces(data: &Area, count: usize) -> Vec<(u64, u32)> {
    let piece = |at: usize| data.part(at * SEGMENT, SEGMENT).element();
    (0..count).rev().map(piece).collect()
}

/// Returns the driver's data, segment by segment.
fn pattern(count: usize, seed: u8) -> Vec<u8> {
    (0..count * SEGMENT)
        .map(|at| (at / SEGMENT) as u8 ^ (at % 251) as u8 ^ seed)
        .collect()
}

#[test]
fn disk_serves_tables_of_more_segments_than_seg_max_and_the_queue_say() {
    let rig = Rig::new(1);
    let socket = rig.serve_ram("d", 1);
    for (packed, seg_max) in [(false, false), (false, true), (true, false), (true, true)] {
        let (mut front_end, mut queue) = start(&socket, 0, packed, seg_max);
        let small = front_end.allocate(4096, 4096).unwrap();
        let data = front_end.allocate(1024 * SEGMENT, 4096).unwrap();
        let (header, status) = (small.part(0, 16), small.part(64, 1));
        for (round, count) in SEGMENTS.into_iter().enumerate() {
            let case = format!("{count} segments, packed {packed}, SEG_MAX {seg_max}");
            let bytes = pattern(count, round as u8);
            for kind in [kind::OUT, kind::IN] {
                let (mut readable, mut writable) = (vec![header.element()], Vec::new());
                if kind == kind::OUT {
                    data.write(0, &bytes);
                    readable.extend(pieces(&data, count));
                } else {
                    data.write(0, &vec![0; bytes.len()]);
                    writable.extend(pieces(&data, count));
                }
                writable.push(status.element());
                header.write(0, &[0; 16]);
                header.write(0, &kind.to_le_bytes());
                header.write(8, &(round as u64 * 2048).to_le_bytes());
                status.write(0, &[0xee]);
                let written = run(&mut queue, &readable, &writable);
                let mut got = [0];
                status.read(0, &mut got);
                assert_eq!(got, [0], "{case}, kind {kind}");
                let expected = if kind == kind::IN { bytes.len() } else { 0 };
                assert_eq!(written as usize, expected + 1, "{case}, kind {kind}");
            }
            let mut got = vec![0; bytes.len()];
            data.read(0, &mut got);
            assert!(got == bytes, "{case}");
        }
    }
}

#[test]
fn controller_serves_tables_of_more_segments_than_the_queue() {
    let rig = Rig::new(1);
    let socket = rig.serve_controller(Duration::ZERO);
    for packed in [false, true] {
        let (mut front_end, mut queue) = start(&socket, 2, packed, false);
        let small = front_end.allocate(4096, 4096).unwrap();
        let data = front_end.allocate(1024 * SEGMENT, 4096).unwrap();
        let (request, response) = (small.part(0, 51), small.part(256, 108));
        for (round, count) in SEGMENTS.into_iter().enumerate() {
            let case = format!("{count} segments, packed {packed}");
            let bytes = pattern(count, round as u8);
            // WRITE(10) and READ(10) from block 0 on.
            for opcode in [0x2a, 0x28] {
                let (mut readable, mut writable) = (vec![request.element()], vec![]);
                writable.push(response.element());
                if opcode == 0x2a {
                    data.write(0, &bytes);
                    readable.extend(pieces(&data, count));
                } else {
                    data.write(0, &vec![0; bytes.len()]);
                    writable.extend(pieces(&data, count));
                }
                let [high, low] = (count as u16).to_be_bytes();
                request.write(0, &[0; 51]);
                request.write(0, &[1, 0, 0x40, 0]);
                request.write(19, &[opcode, 0, 0, 0, 0, 0, 0, high, low, 0]);
                response.write(0, &[0xee; 108]);
                run(&mut queue, &readable, &writable);
                let mut got = [0; 12];
                response.read(0, &mut got);
                // The first command of a nexus gets a UNIT ATTENTION.
                if got[10] == 2 {
                    run(&mut queue, &readable, &writable);
                    response.read(0, &mut got);
                }
                assert_eq!(got, [0; 12], "{case}, opcode {opcode:#x}");
            }
            let mut got = vec![0; bytes.len()];
            data.read(0, &mut got);
            assert!(got == bytes, "{case}");
        }
    }
}
