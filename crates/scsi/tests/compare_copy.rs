//! COMPARE AND WRITE, ORWRITE, WRITE AND VERIFY, WRITE ATOMIC, GET LBA STATUS, EXTENDED COPY.

mod common;

use std::sync::Arc;

use block::{Extent, IoFlags, IoKind, IoRequest};
use common::*;
use scsi::*;

const BLOCK: usize = 512;

fn compare_and_write(bed: &mut Bed, blocks: u8, data: &[u8]) -> Answer {
    bed.run(
        0,
        &[0x89, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, blocks, 0, 0],
        data,
        0,
    )
}

#[test]
fn compare_and_write_writes_only_after_a_match() {
    let mut bed = Bed::new(512, 2048);
    let data = [vec![0; 2 * BLOCK], vec![0xb0; 2 * BLOCK]].concat();
    assert_eq!(compare_and_write(&mut bed, 2, &data).status, Status::Good);
    assert_eq!(bed.disks.bytes[0][BLOCK..3 * BLOCK], [0xb0; 2 * BLOCK]);
    let mut other = [vec![0xb0; 2 * BLOCK], vec![0xcc; 2 * BLOCK]].concat();
    other[700] = 0;
    let answer = compare_and_write(&mut bed, 2, &other);
    assert_eq!(answer.code(), (0x0e, 0x1d, 0x00));
    assert_eq!(answer.sense[..7], [0xf0, 0, 0x0e, 0, 0, 0x02, 0xbc]); // byte 700
    assert_eq!(bed.disks.bytes[0][BLOCK..3 * BLOCK], [0xb0; 2 * BLOCK]);
}

#[test]
fn compare_and_write_locks_its_range_and_needs_both_halves() {
    let mut bed = Bed::new(512, 2048);
    assert_eq!(
        compare_and_write(&mut bed, 1, &[0; 4 * BLOCK]).code(),
        (0x05, 0x24, 0x00)
    );
    assert_eq!(compare_and_write(&mut bed, 0, &[]).status, Status::Good);
    let (view, nexus) = (bed.target.view(), Arc::clone(&bed.nexus));
    let plan = view.begin(&Command {
        nexus: &nexus,
        lun: Lun::unit(0),
        cdb: &[0x89, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 1, 0, 0],
        attribute: TaskAttribute::Simple,
        data_out_length: 1024,
        data_in_length: 0,
    });
    let Plan::NeedData(pending) = plan else {
        panic!("{plan:?}")
    };
    assert_eq!(pending.length(), 1024);
    let Plan::Run(run) = pending.with_data(vec![0; 1024]) else {
        panic!("no run")
    };
    let range = Exclusive {
        disk: DiskId(0),
        offset: 2048,
        length: 512,
    };
    assert_eq!(run.exclusive, Some(range));
}

fn bed_whose_device_compares(compare_and_write: Option<block::CompareAndWrite>) -> Bed {
    let disk = block::DiskInfo {
        compare_and_write,
        ..info(512, 2048, 0)
    };
    Bed::with(disk, false)
}

#[test]
fn compare_and_write_uses_the_operation_of_the_device() {
    let by = block::CompareAndWrite::Device { boundary: 8192 };
    let mut bed = bed_whose_device_compares(Some(by));
    let data = [vec![0; 2 * BLOCK], vec![0xb0; 2 * BLOCK]].concat();
    assert_eq!(compare_and_write(&mut bed, 2, &data).status, Status::Good);
    assert_eq!(bed.disks.bytes[0][BLOCK..3 * BLOCK], [0xb0; 2 * BLOCK]);
    let requests: Vec<_> = bed.disks.log.iter().map(|(_, io)| *io).collect();
    assert_eq!(requests, [IoRequest::compare_and_write(512, 1024)]);
    let answer = compare_and_write(&mut bed, 2, &data);
    assert_eq!(answer.code(), (0x0e, 0x1d, 0x00));
    assert_eq!(bed.disks.bytes[0][BLOCK..3 * BLOCK], [0xb0; 2 * BLOCK]);
    // Blocks 1 to 16 are in two objects of the device.
    let beyond = vec![0; 32 * BLOCK];
    let answer = compare_and_write(&mut bed, 16, &beyond);
    assert_eq!(answer.code(), (0x05, 0x24, 0x00));
    let limits = bed.run(0, &[0x12, 1, 0xb0, 0, 64, 0], &[], 64).data;
    assert_eq!(limits[5], 16);
    assert_eq!(bed.disks.log.len(), 2);
}

#[test]
fn compare_and_write_needs_exclusive_access() {
    let mut bed = bed_whose_device_compares(None);
    let limits = bed.run(0, &[0x12, 1, 0xb0, 0, 64, 0], &[], 64).data;
    assert_eq!(limits[5], 0);
    let cdb = [0xa3, 0x0c, 0x01, 0x89, 0, 0, 0, 0, 0, 64, 0, 0];
    assert_eq!(bed.run(0, &cdb, &[], 64).data[1], 0x01);
    let cdb = [0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0];
    let all = bed.run(0, &cdb, &[], 4096).data;
    assert!(all[4..].chunks_exact(8).all(|row| row[0] != 0x89));
    let answer = compare_and_write(&mut bed, 1, &[0; 2 * BLOCK]);
    assert_eq!(answer.code(), (0x05, 0x20, 0x00));
    assert!(bed.disks.log.is_empty(), "{:?}", bed.disks.log);
}

#[test]
fn orwrite_combines_with_existing_data() {
    let mut bed = Bed::new(512, 8192);
    bed.disks.bytes[0].fill(0x50);
    let blocks = 3000; // more than one piece of scratch memory
    let cdb = [0x8b, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x0b, 0xb8, 0, 0];
    let answer = bed.run(0, &cdb, &vec![0x05; blocks * BLOCK], 0);
    assert_eq!(answer.status, Status::Good);
    assert!(
        bed.disks.bytes[0][..blocks * BLOCK]
            .iter()
            .all(|&byte| byte == 0x55)
    );
    assert!(
        bed.disks.bytes[0][blocks * BLOCK..]
            .iter()
            .all(|&byte| byte == 0x50)
    );
}

/// The maximum in the block limits page applies to all commands that transfer blocks.
#[test]
fn comparing_commands_follow_block_limits() {
    let blocks = 2 * TRANSFER_MAX as usize / BLOCK;
    let mut bed = Bed::new(512, blocks as u64);
    let page = bed.run(0, &[0x12, 1, 0xb0, 0, 64, 0], &[], 64).data;
    let most = u32::from_be_bytes([page[8], page[9], page[10], page[11]]);
    assert_eq!(most, 65_536, "32 MiB");
    let cdb = |opcode, byte1, blocks: u32| {
        let [a, b, c, d] = blocks.to_be_bytes();
        [opcode, byte1, 0, 0, 0, 0, 0, 0, 0, 8, a, b, c, d, 0, 0]
    };
    let data: Vec<u8> = (0..(most as usize + 1) * BLOCK)
        .map(|at| (at / 700) as u8)
        .collect();
    let length = most as usize * BLOCK;
    let place = 8 * BLOCK..8 * BLOCK + length;
    // WRITE AND VERIFY(16), VERIFY(16) with BYTCHK, ORWRITE(16).
    for (opcode, byte1) in [(0x8e, 0x02), (0x8f, 0x02), (0x8b, 0)] {
        let answer = bed.run(0, &cdb(opcode, byte1, most), &data[..length], 0);
        assert_eq!(answer.status, Status::Good, "{opcode:x}h");
        assert!(
            bed.disks.bytes[0][place.clone()] == data[..length],
            "{opcode:x}h"
        );
        let answer = bed.run(0, &cdb(opcode, byte1, most + 1), &data, 0);
        assert_eq!(answer.code(), (0x05, 0x24, 0x00), "{opcode:x}h");
        assert_eq!(answer.sense[15..18], [0xc0, 0, 10], "{opcode:x}h");
    }
    // A difference in the last block is detected.
    bed.disks.bytes[0][place.end - 1] ^= 1;
    let answer = bed.run(0, &cdb(0x8f, 0x02, most), &data[..length], 0);
    assert_eq!(answer.code(), (0x0e, 0x1d, 0x00));
}

#[test]
fn write_and_verify_writes_forced_reads_back_and_compares() {
    let mut bed = Bed::new(512, 2048);
    let cdb = [0x2e, 0x02, 0, 0, 0, 0, 0, 0, 2, 0];
    let answer = bed.run(0, &cdb, &[9; BLOCK], 0);
    assert_eq!(
        (answer.status, answer.residual),
        (Status::Good, Residual::Overflow(512))
    );
    assert_eq!(
        bed.disks.bytes[0][..2 * BLOCK],
        [[9; BLOCK], [0; BLOCK]].concat()
    );
    let kinds: Vec<_> = bed
        .disks
        .log
        .iter()
        .map(|(_, request)| request.kind)
        .collect();
    assert_eq!(kinds, [IoKind::Write, IoKind::Read]);
}

/// A disk with atomic writes of up to 16 blocks, in units of 8.
fn atomic_bed() -> Bed {
    let disk = block::DiskInfo {
        atomic_writes: Some(block::AtomicWrites {
            bytes_max: 8192,
            unit: 4096,
        }),
        ..info(512, 2048, 0)
    };
    Bed::with(disk, false)
}

/// Returns bytes 44 to 55 of the block limits page, and the REPORT SUPPORTED OPERATION CODES data for 9Ch.
fn told_of_atomic_writes(bed: &mut Bed) -> (Vec<u8>, u8, bool) {
    let limits = bed.run(0, &[0x12, 1, 0xb0, 0, 64, 0], &[], 64).data;
    let cdb = [0xa3, 0x0c, 0x01, 0x9c, 0, 0, 0, 0, 0, 64, 0, 0];
    let one = bed.run(0, &cdb, &[], 64).data;
    let cdb = [0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0];
    let all = bed.run(0, &cdb, &[], 4096).data;
    let listed = all[4..].chunks_exact(8).any(|row| row[0] == 0x9c);
    (limits[44..56].to_vec(), one[1], listed)
}

#[test]
fn write_atomic_needs_the_promise_of_the_disk() {
    let mut bed = Bed::new(512, 2048);
    let (limits, support, listed) = told_of_atomic_writes(&mut bed);
    assert_eq!((limits, support, listed), (vec![0; 12], 0x01, false));
    let cdb = [0x9c, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0];
    let answer = bed.run(0, &cdb, &[1; 8 * BLOCK], 0);
    assert_eq!(answer.code(), (0x05, 0x20, 0x00));
    assert!(bed.disks.log.is_empty(), "{:?}", bed.disks.log);

    let mut bed = atomic_bed();
    let (limits, support, listed) = told_of_atomic_writes(&mut bed);
    assert_eq!(limits, [0, 0, 0, 16, 0, 0, 0, 8, 0, 0, 0, 8]);
    assert_eq!((support, listed), (0x03, true));
    assert_eq!(bed.run(0, &cdb, &[1; 8 * BLOCK], 0).status, Status::Good);
    let (_, request) = bed.disks.log[0];
    assert!(request.flags.has(block::IoFlags::ATOMIC), "{request:?}");
}

#[test]
fn write_atomic_is_one_exclusive_write_of_whole_units() {
    let mut bed = atomic_bed();
    let begin = |bed: &Bed, lba: u8, blocks: u8| {
        let (view, nexus) = (bed.target.view(), Arc::clone(&bed.nexus));
        view.begin(&Command {
            nexus: &nexus,
            lun: Lun::unit(0),
            cdb: &[0x9c, 0, 0, 0, 0, 0, 0, 0, 0, lba, 0, 0, 0, blocks, 0, 0],
            attribute: TaskAttribute::Simple,
            data_out_length: u64::from(blocks) * 512,
            data_in_length: 0,
        })
    };
    assert!(matches!(
        begin(&bed, 8, 16),
        Plan::Io(DirectIo {
            exclusive: true,
            ..
        })
    ));
    let answer = begin(&bed, 1, 8);
    assert_eq!(bed.carry_out(answer, &[], 0).code(), (0x05, 0x24, 0x00));
    for blocks in [1, 24] {
        let answer = begin(&bed, 8, blocks);
        assert_eq!(bed.carry_out(answer, &[], 0).code(), (0x05, 0x24, 0x00));
    }
}

#[test]
fn lba_status_starts_at_the_requested_lba() {
    // Zeroes are deallocated on a disk without permanent holes, and anchored otherwise.
    for (anchors, zeroes) in [(false, 1), (true, 2)] {
        let disk = block::DiskInfo {
            anchors,
            ..info(512, 64, 0)
        };
        lba_status_of(Bed::with(disk, false), zeroes);
    }
}

fn lba_status_of(mut bed: Bed, zeroes: u8) {
    bed.disks.bytes[0][16 * BLOCK..24 * BLOCK].fill(1);
    let cdb = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 255, 0, 0];
    let data = bed.run(0, &cdb, &[], 255).data;
    let extent = |lba: u8, blocks: u8, provisioning: u8| {
        [
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            lba,
            0,
            0,
            0,
            blocks,
            provisioning,
            0,
            0,
            0,
        ]
    };
    assert_eq!(data[..8], [0, 0, 0, 52, 0, 0, 0, 0]);
    assert_eq!(
        data[8..],
        [
            extent(3, 13, zeroes),
            extent(16, 8, 0),
            extent(24, 40, zeroes)
        ]
        .concat()
    );
    let beyond = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0, 24, 0, 0];
    assert_eq!(bed.run(0, &beyond, &[], 24).code(), (0x05, 0x21, 0x00));
}

/// Half of the data would be a torn write.
#[test]
fn write_atomic_without_all_data_writes_nothing() {
    let mut bed = atomic_bed();
    let cdb = [0x9c, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 16, 0, 0];
    let answer = bed.run(0, &cdb, &[1; 8 * BLOCK], 0);
    assert_eq!(answer.code(), (0x05, 0x0e, 0x03));
    assert_eq!(answer.residual, Residual::Overflow(8 * BLOCK as u64));
    assert!(bed.disks.log.is_empty(), "{:?}", bed.disks.log);
    assert_eq!(bed.run(0, &cdb, &[1; 16 * BLOCK], 0).status, Status::Good);
}

fn target_descriptor(naa: u64, block_size: u32) -> Vec<u8> {
    let mut descriptor = vec![0xe4, 0, 0, 0, 0x01, 0x03, 0, 8];
    descriptor.extend(naa.to_be_bytes());
    descriptor.resize(28, 0);
    descriptor.extend(block_size.to_be_bytes());
    descriptor
}

fn segment(source: u16, destination: u16, blocks: u16, from: u64, to: u64) -> Vec<u8> {
    let mut descriptor = vec![0x02, 0, 0, 0x18];
    descriptor.extend(source.to_be_bytes());
    descriptor.extend(destination.to_be_bytes());
    descriptor.extend([0, 0]);
    descriptor.extend(blocks.to_be_bytes());
    descriptor.extend(from.to_be_bytes());
    descriptor.extend(to.to_be_bytes());
    descriptor
}

fn copy_list(list_id: u8, targets: &[Vec<u8>], segments: &[Vec<u8>]) -> Vec<u8> {
    let (targets, segments) = (targets.concat(), segments.concat());
    let mut list = vec![list_id, 0];
    list.extend((targets.len() as u16).to_be_bytes());
    list.extend([0; 4]);
    list.extend((segments.len() as u32).to_be_bytes());
    list.extend([0; 4]);
    list.extend(targets);
    list.extend(segments);
    list
}

fn copy(bed: &mut Bed, list: &[u8]) -> Answer {
    let [high, low] = (list.len() as u16).to_be_bytes();
    bed.run(
        0,
        &[0x83, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, high, low, 0, 0],
        list,
        0,
    )
}

const NAA_0: u64 = 0x3000_0000_0000_0000;
const NAA_1: u64 = 0x3000_0000_0000_0001;

#[test]
fn extended_copy_copies_between_units_and_reports_the_result() {
    let mut bed = Bed::new(512, 8192);
    bed.add(1, info(512, 8192, 1), false);
    bed.run(0, &[0; 6], &[], 0); // LUNs changed
    for (at, byte) in bed.disks.bytes[0].iter_mut().enumerate() {
        *byte = (at / 512) as u8;
    }
    let targets = [target_descriptor(NAA_0, 512), target_descriptor(NAA_1, 512)];
    let status = [0x84, 0x00, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0];
    assert_eq!(bed.run(0, &status, &[], 12).code(), (0x05, 0x24, 0x00));
    let list = copy_list(
        5,
        &targets,
        &[segment(0, 1, 4000, 1, 100), segment(1, 0, 1, 100, 0)],
    );
    assert_eq!(copy(&mut bed, &list).status, Status::Good);
    assert_eq!(
        bed.disks.bytes[1][100 * 512..4100 * 512],
        bed.disks.bytes[0][512..4001 * 512]
    );
    assert_eq!(bed.disks.bytes[0][0], 1);
    let data = bed.run(0, &status, &[], 12).data;
    assert_eq!(data, [0, 0, 0, 8, 0x01, 0, 2, 0x01, 0, 0, 0x07, 0xd0]);
}

/// Initiators do not flush a unit without a cache.
#[test]
fn extended_copy_is_durable_where_the_cache_of_its_destination_is_off() {
    let mut bed = Bed::new(512, 64);
    bed.add(1, info(512, 64, 1), false);
    for lun in [0, 1] {
        bed.run(lun, &[0; 6], &[], 0);
    }
    // MODE SELECT of a caching page with WCE clear.
    let mut list = [0; 24];
    list[4..6].copy_from_slice(&[0x08, 0x12]);
    let select = [0x15, 0x10, 0, 0, 24, 0];
    assert_eq!(bed.run(1, &select, &list, 0).status, Status::Good);
    let targets = [target_descriptor(NAA_0, 512), target_descriptor(NAA_1, 512)];
    let segments = [segment(0, 1, 1, 0, 0), segment(1, 0, 1, 0, 0)];
    let list = copy_list(0, &targets, &segments);
    bed.disks.log.clear();
    assert_eq!(copy(&mut bed, &list).status, Status::Good);
    let write = IoRequest::write(0, 512);
    assert_eq!(bed.disks.log[1], (DiskId(1), write.flagged(IoFlags::FUA)));
    assert_eq!(bed.disks.log[3], (DiskId(0), write));
}

/// Reserves LUN 1 for writes of registrants, as a new registrant with key 2.
fn fence_off(bed: &mut Bed, nexus: &Arc<Nexus>) {
    let mut list = [0; 24];
    list[15] = 2;
    let register = [0x5f, 6, 0, 0, 0, 0, 0, 0, 24, 0];
    assert_eq!(
        bed.run_as(nexus, 1, &register, &list, 0).status,
        Status::Good
    );
    (list[7], list[15]) = (2, 0);
    // RESERVE, WRITE EXCLUSIVE.
    let reserve = [0x5f, 1, 1, 0, 0, 0, 0, 0, 24, 0];
    assert_eq!(
        bed.run_as(nexus, 1, &reserve, &list, 0).status,
        Status::Good
    );
}

#[test]
fn extended_copy_writes_no_more_when_its_initiator_is_fenced_off() {
    let mut bed = Bed::new(512, 8192);
    bed.add(1, info(512, 8192, 1), false);
    let other = bed.other_nexus(2);
    for lun in [0, 1] {
        bed.run(lun, &[0; 6], &[], 0);
        bed.run_as(&other, lun, &[0; 6], &[], 0);
        bed.run_as(&other, lun, &[0; 6], &[], 0);
    }
    let targets = [target_descriptor(NAA_0, 512), target_descriptor(NAA_1, 512)];
    let list = copy_list(5, &targets, &[segment(0, 1, 4000, 0, 0)]);
    let [high, low] = (list.len() as u16).to_be_bytes();
    let nexus = bed.nexus.clone();
    let plan = bed.target.view().begin(&Command {
        nexus: &nexus,
        lun: Lun::unit(0),
        cdb: &[0x83, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, high, low, 0, 0],
        attribute: TaskAttribute::Simple,
        data_out_length: list.len() as u64,
        data_in_length: 0,
    });
    let Plan::NeedData(pending) = plan else {
        panic!("{plan:?}")
    };
    let Plan::Run(mut run) = pending.with_data(list) else {
        panic!("it does not begin")
    };
    let mut scratch = vec![0; run.scratch_length];
    let mut last = None;
    // The first piece, and the read of the second.
    for kind in [IoKind::Read, IoKind::Write, IoKind::Read] {
        match run.next(last, &mut scratch) {
            PlanStep::Io { request, .. } => assert_eq!(request.kind, kind),
            step => panic!("{step:?}"),
        }
        last = Some(Ok(()));
    }
    fence_off(&mut bed, &other);
    match run.next(last, &mut scratch) {
        PlanStep::Done(response) => assert_eq!(response.status, Status::ReservationConflict),
        step => panic!("{step:?}"),
    }
}

#[test]
fn extended_copy_is_refused_for_unknown_units_ranges_and_descriptors() {
    let mut bed = Bed::new(512, 64);
    let known = || target_descriptor(NAA_0, 512);
    let one = |segment| copy_list(0, &[known()], &[segment]);
    let aborted = |answer: Answer| answer.code().0 == 0x0a;
    assert!(aborted(copy(&mut bed, &one(segment(0, 1, 1, 0, 1)))));
    assert!(aborted(copy(&mut bed, &one(segment(0, 0, 2, 0, 63)))));
    let elsewhere = copy_list(0, &[target_descriptor(7, 512)], &[segment(0, 0, 1, 0, 1)]);
    assert!(aborted(copy(&mut bed, &elsewhere)));
    let mut fibre_channel = known();
    fibre_channel[0] = 0xe0;
    let list = copy_list(0, &[fibre_channel], &[segment(0, 0, 1, 0, 1)]);
    assert_eq!(copy(&mut bed, &list).code(), (0x05, 0x26, 0x07));
    let mut stream = segment(0, 0, 1, 0, 1);
    stream[0] = 0x03;
    assert_eq!(copy(&mut bed, &one(stream)).code(), (0x05, 0x26, 0x09));
    let many = copy_list(0, &vec![known(); 17], &[]);
    assert_eq!(copy(&mut bed, &many).code(), (0x05, 0x26, 0x06));
    let many = copy_list(0, &[known()], &vec![segment(0, 0, 1, 0, 1); 65]);
    assert_eq!(copy(&mut bed, &many).code(), (0x05, 0x26, 0x08));
    let list = one(segment(0, 0, 1, 0, 1));
    assert_eq!(
        copy(&mut bed, &list[..list.len() - 1]).code(),
        (0x05, 0x1a, 0x00)
    );
    assert_eq!(copy(&mut bed, &[]).status, Status::Good);
}

#[test]
fn a_unit_of_another_target_is_copied_only_where_it_allows_that() {
    let mut bed = Bed::new(512, 64);
    let elsewhere = Target::new(vec![port(2)]);
    let unit = LogicalUnit::new(
        &bed.directory,
        UnitConfig {
            disk: DiskId(1),
            info: info(512, 64, 1),
            removable: false,
            medium: None,
        },
    );
    bed.disks.bytes.push(vec![7; 64 * 512]);
    elsewhere.attach_unit(0, Arc::clone(&unit)).unwrap();
    let targets = [target_descriptor(NAA_0, 512), target_descriptor(NAA_1, 512)];
    let list = copy_list(0, &targets, &[segment(1, 0, 8, 0, 0)]);
    assert_eq!(copy(&mut bed, &list).code().0, 0x0a);
    unit.allow_copies_from_anywhere(true);
    assert_eq!(copy(&mut bed, &list).status, Status::Good);
    assert_eq!(bed.disks.bytes[0][..512], [7; 512]);
}

/// Returns the GET LBA STATUS data: first block, number of blocks, provisioning status.
fn extents(answer: &Answer) -> Vec<(u64, u32, u8)> {
    let extent = |d: &[u8]| {
        let lba = u64::from_be_bytes(d[..8].try_into().unwrap());
        (lba, u32::from_be_bytes(d[8..12].try_into().unwrap()), d[12])
    };
    answer.data[8..].chunks_exact(16).map(extent).collect()
}

#[test]
fn get_lba_status_distinguishes_space_from_holes() {
    const K: u64 = 1024;
    const MAP: [Extent; 10] = [
        Extent::hole(64 * K),
        Extent::reserved(96 * K),
        Extent::reserved(128 * K),
        // Only the first physical block is written; the rest is zeroes.
        Extent::data(192 * K),
        // Ends inside a physical block, as does the next: neither status applies to the whole block.
        Extent::reserved(194 * K),
        Extent::hole(198 * K),
        Extent::reserved(200 * K),
        Extent::hole(256 * K),
        Extent::data(320 * K),
        Extent::hole(u64::MAX),
    ];
    let mut bed = Bed::new(512, 64);
    bed.disks.extents = Some(|offset| *MAP.iter().find(|extent| offset < extent.end).unwrap());
    let config = UnitConfig {
        disk: DiskId(1),
        info: info(512, 1024, 7),
        removable: false,
        medium: None,
    };
    let unit = LogicalUnit::new(&bed.directory, config);
    bed.disks.bytes.push(vec![0; 512 << 10]);
    for written in [128 * K, 256 * K] {
        bed.disks.bytes[1][written as usize] = 1;
    }
    bed.target.attach_unit(7, unit).unwrap();
    bed.run(7, &[0; 6], &[], 0);
    bed.disks.log.clear();
    let cdb = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    let answer = bed.run(7, &cdb, &[], 256);
    assert_eq!(
        extents(&answer),
        [
            (0, 128, 1),
            (128, 128, 2),
            (256, 8, 0),
            (264, 120, 2),
            (384, 128, 1),
            (512, 8, 0),
            (520, 120, 2),
            (640, 384, 1),
        ]
    );
    let read = |from: u64, to: u64| (DiskId(1), IoRequest::read(from * K, (to - from) * K));
    assert_eq!(
        bed.disks.log,
        [
            read(128, 192),
            read(192, 196),
            read(196, 200),
            read(256, 320)
        ]
    );
}

#[test]
fn get_lba_status_takes_known_holes_without_reading_them() {
    let mut bed = Bed::new(512, 64);
    bed.disks.extents = Some(|_| Extent::hole(u64::MAX));
    let blocks: u64 = 6 << 30;
    // More blocks than fit into a descriptor, all of them holes.
    let config = UnitConfig {
        disk: DiskId(0),
        info: info(512, blocks, 7),
        removable: false,
        medium: None,
    };
    let unit = LogicalUnit::new(&bed.directory, config);
    bed.target.attach_unit(7, unit).unwrap();
    bed.run(7, &[0; 6], &[], 0);
    bed.disks.log.clear();
    let cdb = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    let answer = bed.run(7, &cdb, &[], 256);
    assert_eq!(answer.data[..4], [0, 0, 0, 36], "two descriptors");
    assert_eq!(
        extents(&answer),
        [(0, 0xffff_ff80, 1), (0xffff_ff80, 0x8000_0080, 1)]
    );
    assert!(bed.disks.log.is_empty(), "{:?}", bed.disks.log);
}

#[test]
fn get_lba_status_reads_only_where_data_may_be() {
    const AT: u64 = 1 << 20;
    let mut bed = Bed::new(512, 64);
    bed.disks.extents = Some(|offset| match offset {
        ..AT => Extent::hole(AT),
        AT => Extent::data(AT + 1),
        _ => Extent::hole(u64::MAX),
    });
    let config = UnitConfig {
        disk: DiskId(1),
        info: block::DiskInfo {
            anchors: false,
            ..info(512, 8192, 7)
        },
        removable: false,
        medium: None,
    };
    let unit = LogicalUnit::new(&bed.directory, config);
    bed.disks.bytes.push(vec![0; 8192 * 512]);
    bed.disks.bytes[1][1 << 20] = 1;
    bed.target.attach_unit(7, unit).unwrap();
    bed.run(7, &[0; 6], &[], 0);
    bed.disks.log.clear();
    let cdb = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    let answer = bed.run(7, &cdb, &[], 256);
    let descriptors: Vec<(u8, [u8; 4])> = answer.data[8..]
        .chunks_exact(16)
        .map(|d| (d[12], d[8..12].try_into().unwrap()))
        .collect();
    // 2,048 deallocated, one physical block of 8 mapped, the rest deallocated.
    assert_eq!(
        descriptors,
        [
            (1, [0, 0, 8, 0]),
            (0, [0, 0, 0, 8]),
            (1, [0, 0, 0x17, 0xf8])
        ]
    );
    assert_eq!(
        bed.disks.log,
        [(DiskId(1), IoRequest::read(1 << 20, 1 << 20))]
    );
}

#[test]
fn shared_disk_offers_no_reservation_or_compare_and_write() {
    let disk = block::DiskInfo {
        shared: true,
        compare_and_write: None,
        ..info(512, 2048, 0)
    };
    let mut shared = Bed::with(disk, false);
    let mut sole = Bed::new(512, 2048);
    let all = [0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0];
    let listed = |bed: &mut Bed| -> Vec<u8> {
        let all = bed.run(0, &all, &[], 4096).data;
        all[4..].chunks_exact(8).map(|row| row[0]).collect()
    };
    let (left, whole) = (listed(&mut shared), listed(&mut sole));
    for opcode in [0x5e, 0x5f, 0x16, 0x56, 0x17, 0x57, 0x89, 0x8b] {
        assert!(
            whole.contains(&opcode) && !left.contains(&opcode),
            "{opcode:#x}"
        );
        let mut cdb = [0; 16];
        cdb[0] = opcode;
        assert_eq!(
            shared.run(0, &cdb, &[], 0).code(),
            (0x05, 0x20, 0x00),
            "{opcode:#x}"
        );
    }
    let limits = |bed: &mut Bed| bed.run(0, &[0x12, 1, 0xb0, 0, 64, 0], &[], 64).data[5];
    assert_eq!(limits(&mut shared), 0);
    assert_ne!(limits(&mut sole), 0);
}
