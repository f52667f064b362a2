//! Commands that move or change blocks: ranges, residuals, flags, provisioning.

mod common;

use block::{DiskInfo, IoErrorKind, IoFlags, IoKind, IoRequest};
use common::*;
use scsi::*;

const BLOCK: usize = 512;

fn pattern(blocks: usize) -> Vec<u8> {
    (0..blocks * BLOCK).map(|at| (at / 7 % 251) as u8).collect()
}

#[test]
fn write10_then_read_6_10_12_16_gives_the_same_bytes() {
    let mut bed = Bed::new(512, 2048);
    let data = pattern(2);
    assert_eq!(
        bed.run(0, &[0x2a, 0, 0, 0, 0, 9, 0, 0, 2, 0], &data, 0)
            .status,
        Status::Good
    );
    for cdb in [
        &[0x08, 0, 0, 9, 2, 0][..],
        &[0x28, 0x18, 0, 0, 0, 9, 0, 0, 2, 0],
        &[0xa8, 0, 0, 0, 0, 9, 0, 0, 0, 2, 0, 0],
        &[0x88, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 2, 0, 0],
    ] {
        let answer = bed.run(0, cdb, &[], 2 * BLOCK);
        assert_eq!(
            (answer.status, answer.residual),
            (Status::Good, Residual::None),
            "{cdb:02x?}"
        );
        assert_eq!(answer.data, data, "{cdb:02x?}");
    }
}

#[test]
fn read6_of_zero_blocks_reads_256() {
    let mut bed = Bed::new(512, 2048);
    let answer = bed.run(0, &[0x08, 0, 0, 0, 0, 0], &[], 256 * BLOCK);
    assert_eq!(answer.data.len(), 256 * BLOCK);
}

#[test]
fn read10_beyond_last_lba_returns_lba_out_of_range() {
    let mut bed = Bed::new(512, 2048);
    for cdb in [
        [0x28, 0, 0, 0, 8, 0, 0, 0, 1, 0],
        [0x28, 0, 0, 0, 7, 0xff, 0, 0, 2, 0],
        [0x28, 0, 0x80, 0, 0, 0, 0, 0, 0, 0],
        [0x28, 0, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0],
    ] {
        let answer = bed.run(0, &cdb, &[], 64 * 1024 * 1024);
        assert_eq!(answer.code(), (0x05, 0x21, 0x00), "{cdb:02x?}");
    }
    let cdb = [
        0x88, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 2, 0, 0,
    ];
    assert_eq!(bed.run(0, &cdb, &[], 1024).code(), (0x05, 0x21, 0x00));
    assert!(bed.disks.log.is_empty());
}

#[test]
fn protection_bits_are_an_invalid_field() {
    let mut bed = Bed::new(512, 2048);
    for byte1 in [0x20, 0x40, 0x60, 0x80, 0xa0, 0xe0] {
        for opcode in [0x28, 0x2a, 0x2f, 0x41] {
            let answer = bed.run(
                0,
                &[opcode, byte1, 0, 0, 0, 0, 0, 0, 1, 0],
                &[0; BLOCK],
                BLOCK,
            );
            assert_eq!(
                answer.code(),
                (0x05, 0x24, 0x00),
                "{opcode:02x} {byte1:02x}"
            );
            assert_eq!(answer.sense[15..18], [0xcf, 0x00, 0x01]);
        }
    }
}

#[test]
fn naca_is_an_invalid_field() {
    let mut bed = Bed::new(512, 2048);
    let answer = bed.run(0, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0x04], &[], BLOCK);
    assert_eq!(answer.code(), (0x05, 0x24, 0x00));
    assert_eq!(answer.sense[15..18], [0xca, 0x00, 0x09]);
}

/// SAM-5, 8.6.4: an ACA task requires an ACA condition, and there are none.
#[test]
fn aca_task_is_an_invalid_message() {
    let mut bed = Bed::new(512, 2048);
    let (nexus, lun) = (bed.nexus.clone(), Lun::unit(0));
    let write = [0x2a, 0, 0, 0, 0, 9, 0, 0, 1, 0];
    let aca = TaskAttribute::Aca;
    let answer = bed.run_task(&nexus, lun, aca, &write, &[7; BLOCK], 0);
    assert_eq!(answer.code(), (0x05, 0x49, 0x00));
    assert!(bed.disks.log.is_empty());
    for attribute in [
        TaskAttribute::Simple,
        TaskAttribute::Ordered,
        TaskAttribute::HeadOfQueue,
    ] {
        let answer = bed.run_task(&nexus, lun, attribute, &write, &[7; BLOCK], 0);
        assert_eq!(answer.status, Status::Good);
    }
}

#[test]
fn long_read_fills_the_buffer_and_reports_overflow() {
    let mut bed = Bed::new(512, 2048);
    bed.disks.bytes[0][..2 * BLOCK].copy_from_slice(&pattern(2));
    let two = [0x28, 0, 0, 0, 0, 0, 0, 0, 2, 0];
    let cases = [
        (0, 0, Residual::Overflow(1024)),
        (200, 200, Residual::Overflow(824)),
        (512, 512, Residual::Overflow(512)),
        (1000, 1000, Residual::Overflow(24)),
        (1024, 1024, Residual::None),
        (10000, 1024, Residual::Underflow(8976)),
    ];
    for (buffer, moved, residual) in cases {
        let answer = bed.run(0, &two, &[], buffer);
        assert_eq!(
            (answer.status, answer.residual),
            (Status::Good, residual),
            "{buffer}"
        );
        assert_eq!(answer.data, pattern(2)[..moved], "{buffer}");
    }
}

#[test]
fn short_write_uses_whole_blocks_and_reports_the_residual() {
    let two = [0x2a, 0, 0, 0, 0, 0, 0, 0, 2, 0];
    let cases = [
        (0, 0, Residual::Overflow(1024)),
        (512, 512, Residual::Overflow(512)),
        (10000, 1024, Residual::Underflow(8976)),
    ];
    for (offered, moved, residual) in cases {
        let mut bed = Bed::new(512, 2048);
        let answer = bed.run(0, &two, &vec![0xa6; offered], 0);
        assert_eq!(
            (answer.status, answer.residual),
            (Status::Good, residual),
            "{offered}"
        );
        let written = bed.disks.bytes[0]
            .iter()
            .filter(|&&byte| byte == 0xa6)
            .count();
        assert_eq!(written, moved, "{offered}");
    }
}

#[test]
fn write_that_ends_inside_a_block_is_refused_with_residual() {
    let mut bed = Bed::new(512, 2048);
    for cdb in [
        [0x2a, 0, 0, 0, 0, 0, 0, 0, 2, 0],
        [0x2e, 2, 0, 0, 0, 0, 0, 0, 2, 0],
    ] {
        let answer = bed.run(0, &cdb, &[0xa6; 1000], 0);
        assert_eq!(
            (answer.code(), answer.residual),
            ((0x05, 0x0e, 0x03), Residual::Overflow(24))
        );
    }
    assert!(bed.disks.log.is_empty());
}

#[test]
fn a_transfer_longer_than_the_limit_is_an_invalid_field() {
    let mut bed = Bed::new(512, 1 << 18);
    let cdb = [0xa8, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0];
    assert_eq!(bed.run(0, &cdb, &[], 0).code(), (0x05, 0x24, 0x00));
}

#[test]
fn fua_and_a_cache_switched_off_reach_the_disk_as_fua() {
    let mut bed = Bed::new(512, 2048);
    bed.run(0, &[0x2a, 0x08, 0, 0, 0, 0, 0, 0, 1, 0], &[1; BLOCK], 0);
    let expected = IoRequest::write(0, 512).flagged(IoFlags::FUA);
    assert_eq!(bed.disks.log, [(DiskId(0), expected)]);
}

#[test]
fn synchronize_cache_flushes_and_checks_its_range() {
    let mut bed = Bed::new(512, 2048);
    let answer = bed.run(0, &[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0);
    assert_eq!(answer.status, Status::Good);
    assert_eq!(bed.disks.log, [(DiskId(0), IoRequest::flush())]);
    let answer = bed.run(0, &[0x35, 0, 0, 0, 8, 1, 0, 0, 0, 0], &[], 0);
    assert_eq!(answer.code(), (0x05, 0x21, 0x00));
}

#[test]
fn a_failed_flush_is_a_medium_error() {
    let mut bed = Bed::new(512, 2048);
    bed.disks.failure = Some(IoErrorKind::WriteMedium);
    let answer = bed.run(0, &[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0);
    assert_eq!(answer.code(), (0x03, 0x0c, 0x00));
}

#[test]
fn read_only_disk_is_write_protected_in_mode_sense() {
    let mut bed = Bed::with(
        block::DiskInfo {
            read_only: true,
            ..info(512, 2048, 0)
        },
        false,
    );
    for cdb in [
        &[0x0a, 0, 0, 0, 1, 0][..],
        &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0],
        &[0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0],
        &[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0],
    ] {
        let answer = bed.run(0, cdb, &[0; BLOCK], 0);
        assert_eq!(answer.code(), (0x07, 0x27, 0x00), "{cdb:02x?}");
    }
    assert_eq!(
        bed.run(0, &[0x1a, 0, 0x08, 0, 255, 0], &[], 255).data[2],
        0x90
    );
    assert_eq!(
        bed.run(0, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], BLOCK)
            .status,
        Status::Good
    );
}

fn unmap_list(ranges: &[(u64, u32)]) -> Vec<u8> {
    let described = 16 * ranges.len() as u16;
    let mut list = (described + 6).to_be_bytes().to_vec();
    list.extend(described.to_be_bytes());
    list.extend([0; 4]);
    for (lba, blocks) in ranges {
        list.extend(lba.to_be_bytes());
        list.extend(blocks.to_be_bytes());
        list.extend([0; 4]);
    }
    list
}

fn unmap(bed: &mut Bed, list: &[u8]) -> Answer {
    let [high, low] = (list.len() as u16).to_be_bytes();
    bed.run(0, &[0x42, 0, 0, 0, 0, 0, 0, high, low, 0], list, 0)
}

#[test]
fn unmap_discards_each_descriptor() {
    let mut bed = Bed::new(512, 2048);
    let answer = unmap(&mut bed, &unmap_list(&[(8, 8), (0, 0), (100, 2)]));
    assert_eq!(
        (answer.status, answer.residual),
        (Status::Good, Residual::None)
    );
    let requests: Vec<_> = bed.disks.log.iter().map(|(_, request)| *request).collect();
    assert_eq!(
        requests,
        [
            IoRequest::discard(4096, 4096),
            IoRequest::discard(51200, 1024)
        ]
    );
}

#[test]
fn unmap_with_anchor_zeroes_and_keeps_the_space() {
    let mut bed = Bed::new(512, 2048);
    let list = unmap_list(&[(8, 8), (0, 0), (100, 2)]);
    let [high, low] = (list.len() as u16).to_be_bytes();
    let cdb = [0x42, 0x01, 0, 0, 0, 0, 0, high, low, 0];
    bed.disks.bytes[0][..0x2000].fill(7);
    let answer = bed.run(0, &cdb, &list, 0);
    assert_eq!(
        (answer.status, answer.residual),
        (Status::Good, Residual::None)
    );
    let requests: Vec<_> = bed.disks.log.iter().map(|(_, request)| *request).collect();
    assert_eq!(
        requests,
        [
            IoRequest::write_zeroes(4096, 4096),
            IoRequest::write_zeroes(51200, 1024)
        ]
    );
    assert_eq!(bed.disks.bytes[0][..0x1000], [7; 0x1000]);
    assert_eq!(bed.disks.bytes[0][0x1000..0x2000], [0; 0x1000]);

    bed.disks.log.clear();
    bed.disks.failure = Some(IoErrorKind::NoSpace);
    let answer = bed.run(0, &cdb, &list, 0);
    // DATA PROTECT, SPACE ALLOCATION FAILED WRITE PROTECT.
    assert_eq!(answer.code(), (0x07, 0x27, 0x07));
    assert_eq!(bed.disks.log.len(), 1);
}

#[test]
fn zeroes_of_an_anchor_are_durable_where_there_is_no_write_cache() {
    let mut bed = Bed::new(512, 2048);
    // Caching page with WCE clear.
    let mut list = [0; 24];
    list[4..6].copy_from_slice(&[0x08, 0x12]);
    let select = bed.run(0, &[0x15, 0x10, 0, 0, 24, 0], &list, 0);
    assert_eq!(select.status, Status::Good);
    for ranges in [&[(8, 8)][..], &[(8, 8), (100, 2)]] {
        bed.disks.log.clear();
        let list = unmap_list(ranges);
        let cdb = [0x42, 0x01, 0, 0, 0, 0, 0, 0, list.len() as u8, 0];
        assert_eq!(bed.run(0, &cdb, &list, 0).status, Status::Good);
        assert_eq!(bed.disks.log.len(), ranges.len());
        for (_, request) in &bed.disks.log {
            assert_eq!(request.flags, IoFlags::FUA);
        }
    }
}

#[test]
fn anchor_is_refused_without_support() {
    let cannot = DiskInfo {
        anchors: false,
        ..info(512, 2048, 0)
    };
    let list = unmap_list(&[(8, 8)]);
    let block = [0; BLOCK];
    let unmap: (&[u8], &[u8]) = (&[0x42, 0x01, 0, 0, 0, 0, 0, 0, 24, 0], &list);
    let same: [(&[u8], &[u8]); 2] = [
        (&[0x41, 0x18, 0, 0, 0, 8, 0, 0, 8, 0], &block),
        (
            &[0x93, 0x18, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0],
            &block,
        ),
    ];
    let mut bed = Bed::with(cannot, false);
    for (cdb, data) in [unmap, same[0], same[1]] {
        let answer = bed.run(0, cdb, data, 0);
        assert_eq!(answer.code(), (0x05, 0x24, 0x00), "{cdb:02x?}");
        // Sense-key specific: byte 1 of the CDB, bit.
        let bit = if cdb[0] == 0x42 { 0xc8 } else { 0xcc };
        assert_eq!(answer.sense[15..18], [bit, 0, 1], "{cdb:02x?}");
    }
    // Without UNMAP it is an error on every disk (SBC-4, table 151).
    let mut bed = Bed::new(512, 2048);
    for (cdb, data) in same {
        let mut without = cdb.to_vec();
        without[1] = 0x10;
        let answer = bed.run(0, &without, data, 0);
        assert_eq!(answer.code(), (0x05, 0x24, 0x00), "{without:02x?}");
        assert_eq!(bed.run(0, cdb, data, 0).status, Status::Good);
    }
    let zeroes = (DiskId(0), IoRequest::write_zeroes(4096, 4096));
    assert_eq!(bed.disks.log, [zeroes, zeroes]);
}

#[test]
fn unmap_beyond_the_end_unmaps_nothing() {
    let mut bed = Bed::new(512, 2048);
    let answer = unmap(&mut bed, &unmap_list(&[(8, 8), (2048, 1)]));
    assert_eq!(answer.code(), (0x05, 0x21, 0x00));
    assert!(bed.disks.log.is_empty());
}

#[test]
fn unmap_with_a_short_list_is_a_length_error_and_an_empty_one_is_good() {
    let mut bed = Bed::new(512, 2048);
    assert_eq!(unmap(&mut bed, &[0; 7]).code(), (0x05, 0x1a, 0x00));
    assert_eq!(unmap(&mut bed, &[]).status, Status::Good);
    let answer = bed.run(0, &[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &[0; 8], 0);
    assert_eq!(answer.code(), (0x05, 0x1a, 0x00));
}

#[test]
fn write_same_with_a_pattern_repeats_the_block() {
    let mut bed = Bed::new(512, 8192);
    let block: Vec<u8> = (0..512).map(|at| at as u8).collect();
    let answer = bed.run(0, &[0x41, 0, 0, 0, 0, 1, 0, 0x10, 0, 0], &block, 0);
    assert_eq!(answer.status, Status::Good);
    assert_eq!(bed.disks.bytes[0][..BLOCK], [0; BLOCK]);
    assert_eq!(bed.disks.bytes[0][BLOCK..4097 * BLOCK], block.repeat(4096));
    assert_eq!(bed.disks.bytes[0][4097 * BLOCK..4098 * BLOCK], [0; BLOCK]);
    assert_eq!(bed.disks.log.len(), 2);
}

#[test]
fn write_same_of_zeroes_is_one_request_that_may_unmap() {
    let mut bed = Bed::new(512, 2048);
    bed.run(0, &[0x41, 0x08, 0, 0, 0, 8, 0, 0, 8, 0], &[0; BLOCK], 0);
    let ndob = [0x93, 0x01, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0];
    bed.run(0, &ndob, &[], 0);
    let requests: Vec<_> = bed.disks.log.iter().map(|(_, request)| *request).collect();
    let zeroes = IoRequest::write_zeroes(4096, 4096);
    assert_eq!(requests, [zeroes.flagged(IoFlags::UNMAP), zeroes]);
}

#[test]
fn write_same_of_no_number_of_blocks_goes_to_the_end() {
    let mut bed = Bed::new(512, 2048);
    let cdb = [0x93, 0x01, 0, 0, 0, 0, 0, 0, 7, 0xf0, 0, 0, 0, 0, 0, 0];
    assert_eq!(bed.run(0, &cdb, &[], 0).status, Status::Good);
    assert_eq!(
        bed.disks.log[0].1,
        IoRequest::write_zeroes(0x7f0 * 512, 16 * 512)
    );
    let beyond = [0x93, 0x01, 0, 0, 0, 0, 0, 0, 8, 1, 0, 0, 0, 0, 0, 0];
    assert_eq!(bed.run(0, &beyond, &[], 0).code(), (0x05, 0x21, 0x00));
}

#[test]
fn write_same_needs_exactly_one_block_of_data() {
    let mut bed = Bed::new(512, 2048);
    for offered in [0, 256, 1024] {
        let answer = bed.run(0, &[0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0], &vec![0; offered], 0);
        assert_eq!(answer.code(), (0x05, 0x24, 0x00), "{offered}");
    }
}

#[test]
fn write_same_longer_than_the_limit_is_an_invalid_field() {
    let mut bed = Bed::new(512, 16);
    let mut large = info(512, 16, 0);
    large.geometry = block::Geometry::new(512, 1 << 40);
    bed.unit(0).update(large);
    bed.run(0, &[0; 6], &[], 0);
    let cdb = [0x93, 0x01, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x80, 0, 0, 0, 0];
    assert_eq!(bed.run(0, &cdb, &[], 0).code(), (0x05, 0x24, 0x00));
}

#[test]
fn verify_reads_and_compares_by_bytchk() {
    let mut bed = Bed::new(512, 2048);
    bed.disks.bytes[0][..2 * BLOCK].fill(0x11);
    let verify = |bytchk: u8| [0x2f, bytchk << 1, 0, 0, 0, 0, 0, 0, 2, 0];
    assert_eq!(bed.run(0, &verify(0), &[], 0).status, Status::Good);
    assert_eq!(
        bed.run(0, &verify(1), &[0x11; 2 * BLOCK], 0).status,
        Status::Good
    );
    assert_eq!(
        bed.run(0, &verify(1), &[0x12; 2 * BLOCK], 0).code(),
        (0x0e, 0x1d, 0x00)
    );
    assert_eq!(
        bed.run(0, &verify(3), &[0x11; BLOCK], 0).status,
        Status::Good
    );
    assert_eq!(
        bed.run(0, &verify(2), &[0x11; BLOCK], 0).code(),
        (0x05, 0x24, 0x00)
    );
    assert!(
        bed.disks
            .log
            .iter()
            .all(|(_, request)| request.kind == IoKind::Read)
    );
    bed.disks.failure = Some(IoErrorKind::ReadMedium);
    assert_eq!(bed.run(0, &verify(0), &[], 0).code(), (0x03, 0x11, 0x00));
}

#[test]
fn an_unknown_operation_code_and_a_short_cdb_are_refused() {
    let mut bed = Bed::new(512, 2048);
    assert_eq!(bed.run(0, &[0xff; 16], &[], 0).code(), (0x05, 0x20, 0x00));
    assert_eq!(
        bed.run(0, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1], &[], BLOCK)
            .code(),
        (0x05, 0x24, 0x00)
    );
    assert_eq!(bed.run(0, &[], &[], 0).code(), (0x05, 0x24, 0x00));
}

/// READ CAPACITY through one nexus shows a new capacity. Commands of another nexus reach the new blocks, also through a `PlainParameters` that was
/// looked up before.
#[test]
fn capacity_that_one_nexus_has_read_holds_for_another() {
    let mut bed = Bed::new(512, 16);
    let other = bed.other_nexus(2);
    let view = bed.target.view();
    let kept = view.plain_unit(&other, Lun::unit(0)).unwrap();
    let before = kept.plain_parameters().unwrap();
    bed.disks.bytes[0].resize(32 * BLOCK, 0);
    bed.unit(0).update(info(512, 32, 0));
    bed.run(0, &[0; 6], &[], 0); // CAPACITY DATA HAS CHANGED
    let read_capacity = bed.run(0, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 8);
    assert_eq!(read_capacity.data, [0, 0, 0, 31, 0, 0, 2, 0]);

    let write = [0x2a, 0, 0, 0, 0, 31, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    assert!(before.begin(&write, 512, 512).is_none());
    assert!(!kept.is_still(&before));
    let attention = bed.run_as(&other, 0, &write[..10], &[7; BLOCK], 0);
    assert_eq!(attention.code(), (0x06, 0x2a, 0x09));
    let unmap = [
        0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 30, 0, 0, 0, 2, 0, 0, 0, 0,
    ];
    for (cdb, data_out, data_in) in [
        (&write[..10], &[7; BLOCK][..], 0),
        (&[0x28, 0, 0, 0, 0, 31, 0, 0, 1, 0], &[], BLOCK),
        (&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &unmap, 0),
        (&[0x41, 0, 0, 0, 0, 30, 0, 0, 2, 0], &[1; BLOCK], 0),
    ] {
        let answer = bed.run_as(&other, 0, cdb, data_out, data_in);
        assert_eq!(answer.status, Status::Good, "{cdb:02x?} {answer:?}");
    }
    assert!(
        kept.plain_parameters()
            .unwrap()
            .begin(&write, 512, 512)
            .is_some()
    );
}
