//! Large zeroing and unmapping of a RAM disk continues piece by piece, with other I/O in between.

mod common;

use bdev::{BlockDevice, Ram, RamOptions};
use block::{IoFlags, IoRequest};
use common::Worker;
use guest_memory::IoBuffer;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 96 * MIB;

fn ram(size: u64) -> Ram {
    Ram::create(RamOptions {
        size,
        ..RamOptions::default()
    })
    .unwrap()
}

fn ways(offset: u64, length: u64) -> [IoRequest; 3] {
    let zeroes = IoRequest::write_zeroes(offset, length);
    [
        zeroes,
        zeroes.flagged(IoFlags::UNMAP),
        IoRequest::discard(offset, length),
    ]
}

#[test]
fn other_io_is_served_between_pieces() {
    let ram = ram(SIZE);
    for long in ways(0, SIZE) {
        let mut worker = Worker::new(&ram);
        worker.write(0, &vec![7; SIZE as usize]).unwrap();
        let tag = worker.submit(long, IoBuffer::default());
        assert_eq!(worker.backend.in_flight(), 1);
        let mut iterations = 0;
        while worker.backend.in_flight() > 0 {
            // The last byte is zeroed last.
            assert_eq!(
                worker.read(SIZE - 512, 512).unwrap(),
                [7; 512],
                "{iterations}"
            );
            assert!(worker.iterate());
            iterations += 1;
        }
        assert!((4..=96).contains(&iterations), "{iterations} iterations");
        assert_eq!(worker.wait(tag).0, Ok(()));
        assert_eq!(worker.read(SIZE - 512, 512).unwrap(), [0; 512]);
    }
}

#[test]
fn exact_range_is_zeroed_across_added_memory() {
    let ram = ram(SIZE / 2 - 4096);
    ram.set_size(SIZE).unwrap();
    ram.capacity().set(SIZE);
    let mut worker = Worker::new(&ram);
    for (from, to) in [
        (512, SIZE - 512),
        (MIB, 40 * MIB),
        (MIB + 4096, 40 * MIB + 1536),
        (45 * MIB, 51 * MIB + 512),
        (70 * MIB + 3584, SIZE),
    ] {
        for io in ways(from, to - from) {
            worker.write(0, &vec![7; SIZE as usize]).unwrap();
            assert_eq!(worker.do_plain(io), Ok(()));
            let read = worker.read(0, SIZE as usize).unwrap();
            let (before, rest) = read.split_at(from as usize);
            let (zeroed, after) = rest.split_at((to - from) as usize);
            // Comparisons of slices take a tenth of the time of loops without optimisation.
            assert!(zeroed == vec![0; zeroed.len()], "{io:?}");
            for rest in [before, after] {
                assert!(rest == vec![7; rest.len()], "{io:?}");
            }
        }
    }
}

#[test]
fn concurrent_long_ios_end_once_each() {
    let ram = ram(SIZE);
    let mut worker = Worker::new(&ram);
    worker.write(0, &vec![7; SIZE as usize]).unwrap();
    let tags: Vec<u64> = (0..6)
        .map(|n| {
            let io = ways(n * 16 * MIB + 512, 15 * MIB)[0];
            worker.submit(io, IoBuffer::default())
        })
        .collect();
    assert_eq!(worker.backend.in_flight(), 6);
    for tag in tags {
        assert_eq!(worker.wait(tag).0, Ok(()));
    }
    assert_eq!(worker.backend.in_flight(), 0);
    for n in 0..6 {
        let start = n * 16 * MIB;
        assert_eq!(worker.read(start, 1024).unwrap()[511..513], [7, 0]);
        assert_eq!(
            worker.read(start + 15 * MIB, 1024).unwrap()[511..513],
            [0, 7]
        );
    }
}

#[test]
fn terabyte_hole_is_released_in_one_turn() {
    let ram = ram(1 << 40);
    if !ram.info().anchors {
        // This kernel does not report holes (Linux before 6.7).
        return;
    }
    let mut worker = Worker::new(&ram);
    worker.write(1 << 39, &[7; 512]).unwrap();
    let tag = worker.submit(IoRequest::discard(0, 1 << 40), IoBuffer::default());
    let mut iterations = 0;
    while worker.backend.in_flight() > 0 {
        assert!(worker.iterate());
        iterations += 1;
    }
    assert!(iterations < 10, "{iterations} iterations");
    assert_eq!(worker.wait(tag).0, Ok(()));
    assert_eq!(worker.read(1 << 39, 512).unwrap(), [0; 512]);
}

/// Short requests share the limit: a client may have thousands in flight.
#[test]
fn many_short_ios_share_the_budget_of_a_turn() {
    let ram = ram(SIZE);
    for (way, length) in [(0, MIB), (0, MIB / 2), (1, 16 * MIB), (2, 16 * MIB)] {
        let mut worker = Worker::new(&ram);
        worker.write(0, &vec![7; SIZE as usize]).unwrap();
        let count = (SIZE / length).min(32);
        let tags: Vec<u64> = (0..count)
            .map(|n| {
                let io = ways(n * length, length)[way];
                worker.submit(io, IoBuffer::default())
            })
            .collect();
        let share = if way == 0 { MIB } else { 16 * MIB };
        let least = count * length / share - 1;
        assert!(worker.backend.in_flight() as u64 >= least);
        let mut iterations = 0;
        while worker.backend.in_flight() > 0 {
            assert!(worker.iterate());
            iterations += 1;
        }
        assert!(iterations >= least, "{iterations} iterations");
        for tag in tags {
            assert_eq!(worker.wait(tag).0, Ok(()));
        }
    }
}
