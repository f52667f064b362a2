//! Front ends that change request headers, ranges and parameter lists while the device reads them.
//!
//! A device that checks one load of a field and uses another (double fetch) passes I/O outside of the disk, or of another length than the
//! request's buffer, to the block device.

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use block::IoRequest;
use reactor::PollLimit;
use support::{Rig, Watched, connect, ram};
use vhost_frontend::{Area, BlkQueue, Layout, QueueOptions, ScsiQueue, ScsiRequest, kind};

const CAPACITY: u64 = 1 << 20;
const DATA: usize = 4096;
const DEPTH: u16 = 4;
const TIME: Duration = Duration::from_secs(1);
/// I/Os to see at least, also on a loaded machine.
const SEEN_MIN: usize = 500;
const PATIENCE: Duration = Duration::from_secs(60);

/// Sectors inside of the disk, at its end and outside.
const SECTORS: [u64; 8] = [0, 1, 8, 2040, 2041, 2048, 1 << 40, u64::MAX];

struct Random(fastrand::Rng);

impl Random {
    fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.0.usize(..values.len())]
    }
}

/// Runs `change` on a thread of its own for as long as `work` takes.
fn beside(change: impl Fn(&mut Random) + Sync, work: impl FnOnce()) {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(fastrand::Rng::with_seed(0x9e37_79b9_7f4a_7c15));
            while !done.load(Ordering::Relaxed) {
                change(&mut random);
            }
        });
        // Ends the thread also if a check fails.
        let _end = End(&done);
        work();
    });
}

struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `round` for some time, and until the disk has seen enough I/Os. Checks all of them.
fn check_ios(disk: &Watched, length_max: u64, mut round: impl FnMut()) {
    let begun = Instant::now();
    let mut count = 0;
    while begun.elapsed() < TIME || (count < SEEN_MIN && begun.elapsed() < PATIENCE) {
        round();
        let seen = disk.seen();
        disk.forget();
        count += seen.len();
        seen.iter().for_each(|io| check(io, length_max));
    }
    assert!(count >= SEEN_MIN, "{count} I/Os");
}

fn check(io: &IoRequest, length_max: u64) {
    assert!(
        io.length <= CAPACITY && io.offset <= CAPACITY - io.length,
        "{io:?}"
    );
    assert_eq!((io.offset | io.length) % 512, 0, "{io:?}");
    if io.moves_data() {
        assert!(io.length <= length_max, "{io:?}");
    }
}

/// Writes the header of 5.2.6: type, reserved, sector.
fn change_blk_header(header: &Area, random: &mut Random) {
    let types = [kind::IN, kind::IN, kind::OUT, kind::OUT, 4, 8, 11, 13, 99];
    header.write(0, &random.pick(&types).to_le_bytes());
    header.write(8, &random.pick(&SECTORS).to_le_bytes());
}

/// Writes a range of a discard or write-zeroes request: sector, number of sectors, flags.
fn change_range(data: &Area, random: &mut Random) {
    data.write(0, &random.pick(&SECTORS).to_le_bytes());
    let sectors: u32 = random.pick(&[0, 1, 7, 8, 2048, u32::MAX]);
    data.write(8, &sectors.to_le_bytes());
    let flags: u32 = random.pick(&[0, 0, 0, 1, 2]);
    data.write(12, &flags.to_le_bytes());
}

#[test]
fn blk_headers_that_change_while_they_are_read_give_checked_ios() {
    let rig = Rig::polling(1, PollLimit::Micros(20));
    let disk = Watched::new(ram(CAPACITY), Duration::ZERO);
    let mut front_end = connect(&rig.serve("d", disk.clone(), 1));
    let options = QueueOptions::default();
    let mut queue =
        BlkQueue::start(&mut front_end, 0, &options, DEPTH, DATA, Layout::Separate).unwrap();
    let places: Vec<(Area, Area)> = (0..DEPTH)
        .map(|slot| (queue.header(slot), queue.data(slot)))
        .collect();
    let change = move |random: &mut Random| {
        let (header, data) = &places[random.next() as usize % places.len()];
        change_blk_header(header, random);
        change_range(data, random);
    };
    let mut turn = 0u64;
    beside(change, || {
        check_ios(&disk, DATA as u64, || {
            while let Some(slot) = queue.take() {
                turn += 1;
                let (kind, out, into) = match turn % 4 {
                    0 => (kind::IN, 0, DATA),
                    1 => (kind::OUT, DATA, 0),
                    2 => (kind::DISCARD, 16, 0),
                    _ => (kind::WRITE_ZEROES, 32, 0),
                };
                assert!(queue.submit(slot, kind, 0, out, into));
            }
            queue.publish();
            for _ in 0..DEPTH {
                let done = queue.wait().unwrap();
                assert!(done.status <= 2, "{done:?}");
                queue.release(done.slot);
            }
        });
    });
}

#[test]
fn scsi_headers_that_change_while_they_are_read_give_checked_ios() {
    let rig = Rig::polling(1, PollLimit::Micros(20));
    let (socket, disk, _controller) = rig.serve_watched_controller(Duration::ZERO);
    let mut front_end = connect(&socket);
    let options = QueueOptions::default();
    let mut queue =
        ScsiQueue::start(&mut front_end, 2, &options, DEPTH, DATA, Layout::Separate).unwrap();
    let places: Vec<(Area, Area)> = (0..DEPTH)
        .map(|slot| (queue.header(slot), queue.data_out(slot)))
        .collect();
    let change = move |random: &mut Random| {
        let (header, data) = &places[random.next() as usize % places.len()];
        // LUN field (5.6.6.1): target 0 and LUN 0, mostly.
        header.write(1, &[random.pick(&[0, 0, 0, 5, 7])]);
        // READ (10), WRITE (10), UNMAP, WRITE SAME (10), VERIFY (10), COMPARE AND WRITE and others.
        let code = random.pick(&[0x28, 0x28, 0x2a, 0x2a, 0x42, 0x41, 0x2f, 0x89, 0x88, 0x00]);
        header.write(19, &[code]);
        let block = random.pick(&SECTORS) as u32;
        header.write(21, &block.to_be_bytes());
        let blocks: u16 = random.pick(&[0, 1, 8, 8, 8, 9, 0xffff]);
        header.write(26, &blocks.to_be_bytes());
        // UNMAP's parameter list: lengths, then a descriptor with LBA and number of blocks.
        data.write(0, &random.pick(&[22u16, 22, 38, 0xffff]).to_be_bytes());
        data.write(2, &random.pick(&[16u16, 16, 32, 0xffff]).to_be_bytes());
        data.write(8, &random.pick(&SECTORS).to_be_bytes());
        let unmapped: u32 = random.pick(&[0, 1, 8, 2048, u32::MAX]);
        data.write(16, &unmapped.to_be_bytes());
    };
    let mut turn = 0u64;
    beside(change, || {
        // WRITE SAME writes more than its data.
        check_ios(&disk, CAPACITY, || {
            while let Some(slot) = queue.take() {
                turn += 1;
                let (code, out, into) = match turn % 3 {
                    0 => (0x28, 0, DATA),
                    1 => (0x2a, DATA, 0),
                    _ => (0x42, DATA, 0),
                };
                let request = ScsiRequest {
                    target: 0,
                    lun: 0,
                    tag: turn,
                    cdb: &[code, 0, 0, 0, 0, 0, 0, 0, 8, 0],
                };
                assert!(queue.submit(slot, &request, out, into));
            }
            queue.publish();
            for _ in 0..DEPTH {
                let done = queue.wait().unwrap();
                queue.release(done.slot);
            }
        });
    });
}
