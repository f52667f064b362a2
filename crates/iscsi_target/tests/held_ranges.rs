//! A read from a RAM disk's memory returns all or nothing of an atomic command's data. An initiator that does not receive it delays no
//! other command.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{BLOCK, Client, Rig, ram, settings, target};
use iscsi::initiator::{Event, Initiator};
use iscsi::negotiation::Offer;
use iscsi_target::ServerLimits;
use scsi::cdb::cdb10;

fn login(rig: &Rig, number: u8) -> Client {
    let mut client = Client::login(rig.portal, settings(number, Offer::default()), 1);
    client.settle();
    client
}

fn is_whole(data: &[u8]) -> bool {
    data[1..] == data[..data.len() - 1]
}

#[test]
fn read_sees_all_of_a_compare_and_write_or_nothing() {
    const BLOCKS: u8 = 255;
    const LENGTH: usize = BLOCKS as usize * BLOCK;
    let rig = Rig::ram();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| {
            let mut client = login(&rig, 1);
            let (mut reads, mut torn) = (0, 0);
            while !over.load(Ordering::Relaxed) {
                let done = client.read(0, 0, BLOCKS.into());
                assert_eq!((done.status, done.data.len()), (0, LENGTH));
                torn += u32::from(!is_whole(&done.data));
                reads += 1;
            }
            (reads, torn)
        });
        let mut client = login(&rig, 2);
        let started = Instant::now();
        let mut writes = 0_u8;
        while started.elapsed() < Duration::from_secs(2) {
            let mut cdb = [0; 16];
            (cdb[0], cdb[13]) = (0x89, BLOCKS);
            let mut data = vec![writes; LENGTH];
            writes = writes.wrapping_add(1);
            data.resize(2 * LENGTH, writes);
            assert_eq!(client.run(0, Initiator::write(0, &cdb, data)).status, 0);
        }
        over.store(true, Ordering::Relaxed);
        let (reads, torn) = reads.join().unwrap();
        assert!(reads > 0);
        assert_eq!(torn, 0, "of {reads} reads");
    });
}

#[test]
fn stalled_initiator_delays_no_atomic_write_and_reads_whole() {
    const BLOCKS: u16 = 2048;
    const READS: usize = 32;
    let rig = Rig::ram();
    let (mut slow, mut writes) = (login(&rig, 1), login(&rig, 2));
    for _ in 0..READS {
        let read = Initiator::read(0, &cdb10(0x28, 0, BLOCKS), u32::from(BLOCKS) * BLOCK as u32);
        slow.initiator.command(0, read).unwrap();
    }
    slow.push();
    std::thread::sleep(Duration::from_millis(300));
    let mut cdb = [0; 16];
    (cdb[0], cdb[12]) = (0x9c, (BLOCKS >> 8) as u8);
    for round in 1..=2 {
        let started = Instant::now();
        let data = vec![round; usize::from(BLOCKS) * BLOCK];
        assert_eq!(writes.run(0, Initiator::write(0, &cdb, data)).status, 0);
        assert!(started.elapsed() < Duration::from_secs(5));
    }
    let mut all = Vec::new();
    slow.until(|client| {
        for (_, event) in client.events.drain(..) {
            if let Event::Command(done) = event {
                all.push(done);
            }
        }
        all.len() == READS
    });
    for (at, done) in all.iter().enumerate() {
        assert_eq!(done.data.len(), usize::from(BLOCKS) * BLOCK);
        let at_byte = done.data.iter().position(|byte| *byte != done.data[0]);
        assert!(is_whole(&done.data), "read {at} is torn at {at_byte:?}");
    }
    assert_eq!(all[0].data[0], 0, "it was begun before");
    assert_eq!(slow.read(0, 0, 1).data, [2; BLOCK]);
}

/// Unsent data is copied, up to a limit.
#[test]
fn initiator_stalled_on_much_data_is_dropped_for_atomic_write() {
    const BLOCKS: u16 = 2048;
    let rig = Rig::ram();
    let (mut slow, mut writes) = (login(&rig, 1), login(&rig, 2));
    for _ in 0..100 {
        let read = Initiator::read(0, &cdb10(0x28, 0, BLOCKS), u32::from(BLOCKS) * BLOCK as u32);
        slow.initiator.command(0, read).unwrap();
    }
    slow.push();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(rig.server.connections(), 2);
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x9c, 1);
    let started = Instant::now();
    let write = Initiator::write(0, &cdb, vec![1; BLOCK]);
    assert_eq!(writes.run(0, write).status, 0);
    assert!(started.elapsed() < Duration::from_secs(5));
    rig.wait_for_connections(1);
    assert_eq!(writes.read(0, 0, 1).data, [1; BLOCK]);
}

/// The memory of a grown disk has two parts. Reads before the border are sent from memory, reads across it are not.
#[test]
fn stalled_read_is_whole_beside_atomic_write_at_the_old_end() {
    const BLOCKS: u16 = 2048;
    const READS: usize = 16;
    let device = ram(16);
    let end = (16 << 20) / BLOCK as u32;
    device.set_size(32 << 20).unwrap();
    device.capacity().set(32 << 20);
    let rig = Rig::open(device, target(), ServerLimits::default());
    let (mut slow, mut writes) = (login(&rig, 1), login(&rig, 2));
    let first = end - u32::from(BLOCKS);
    for _ in 0..READS {
        let read = cdb10(0x28, first, BLOCKS);
        let read = Initiator::read(0, &read, u32::from(BLOCKS) * BLOCK as u32);
        slow.initiator.command(0, read).unwrap();
    }
    slow.push();
    std::thread::sleep(Duration::from_millis(300));
    // Half of the read range, and as much behind it.
    let mut cdb = [0; 16];
    (cdb[0], cdb[12]) = (0x9c, (BLOCKS >> 8) as u8);
    cdb[6..10].copy_from_slice(&(end - u32::from(BLOCKS) / 2).to_be_bytes());
    let data = vec![1; usize::from(BLOCKS) * BLOCK];
    assert_eq!(writes.run(0, Initiator::write(0, &cdb, data)).status, 0);
    let mut left = READS;
    slow.until(|client| {
        for (_, event) in client.events.drain(..) {
            if let Event::Command(done) = event {
                assert_eq!(done.data.len(), usize::from(BLOCKS) * BLOCK);
                let (_, half) = done.data.split_at(done.data.len() / 2);
                assert!(is_whole(half), "read {} is torn", READS - left);
                left -= 1;
            }
        }
        left == 0
    });
    let after = writes.read(0, end - 1, 2);
    assert_eq!(after.data, [1; 2 * BLOCK]);
}
