//! A logical unit that replaces another one: unit attentions for initiators, and refusal of commands built for the old unit.

mod common;

use std::sync::Arc;

use block::IoKind;
use common::*;
use scsi::*;

const READY: [u8; 6] = [0; 6];
const CAPACITY_10: [u8; 10] = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const CAPACITY_16: [u8; 16] = [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0];
/// LBA 80, 8 blocks: byte 40,960 with blocks of 512 bytes, 327,680 with blocks of 4,096.
const WRITE_10: [u8; 10] = [0x2a, 0, 0, 0, 0, 80, 0, 0, 8, 0];
const READ_10: [u8; 10] = [0x28, 0, 0, 0, 0, 80, 0, 0, 8, 0];
const GONE: (u8, u8, u8) = (0x05, 0x25, 0x00);

/// Replaces the disk at LUN 0, which has blocks of 512 bytes.
fn replaced(block_size: u32) -> Bed {
    let mut bed = Bed::new(512, 2048);
    bed.run(0, &CAPACITY_10, &[], 8);
    bed.target.detach_unit(0);
    bed.add(0, info(block_size, 2048, 1), false);
    bed
}

fn attentions(bed: &mut Bed, nexus: &Arc<Nexus>, lun: u16) -> Vec<(u8, u8)> {
    let codes = std::iter::from_fn(|| {
        let (key, asc, ascq) = bed.run_as(nexus, lun, &READY, &[], 0).code();
        (key == 0x06).then_some((asc, ascq))
    });
    codes.collect()
}

fn writes(bed: &Bed) -> usize {
    let is_change = |kind| matches!(kind, IoKind::Write | IoKind::Discard | IoKind::WriteZeroes);
    let log = bed.disks.log.iter();
    log.filter(|(_, io)| is_change(io.kind)).count()
}

#[test]
fn replaced_unit_reports_changed_luns_and_inquiry_data() {
    let mut bed = replaced(512);
    let nexus = bed.nexus.clone();
    let expected = [(0x29, 0x00), (0x3f, 0x0e), (0x3f, 0x03)];
    assert_eq!(attentions(&mut bed, &nexus, 0), expected);
    // A unit at a free LUN replaces none.
    bed.add(1, info(512, 8, 2), false);
    assert_eq!(attentions(&mut bed, &nexus, 1), [(0x29, 0x00)]);
}

#[test]
fn returning_larger_unit_reports_its_capacity() {
    let mut bed = Bed::new(512, 2048);
    bed.target.detach_unit(0);
    bed.add(0, info(512, 4096, 0), false);
    let nexus = bed.nexus.clone();
    assert_eq!(
        attentions(&mut bed, &nexus, 0),
        [(0x29, 0x00), (0x2a, 0x09)]
    );
    assert_eq!(bed.run(0, &WRITE_10, &[1; 4096], 0).status, Status::Good);
}

#[test]
fn another_unit_does_no_io_until_its_capacity_has_been_read() {
    for read_capacity in [&CAPACITY_10[..], &CAPACITY_16] {
        let mut bed = replaced(512);
        let nexus = bed.nexus.clone();
        attentions(&mut bed, &nexus, 0);
        let nothing: [(&[u8], &[u8], usize); 9] = [
            (&WRITE_10, &[1; 4096], 0),
            (&READ_10, &[], 4096),
            (&[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0),
            (&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &[0; 24], 0),
            (&[0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[1; 512], 0),
            (&[0x2f, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 0),
            (&[0x15, 0x10, 0, 0, 4, 0], &[0; 4], 0),
            (&[0x48, 0x03, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0),
            (&[0x1b, 0, 0, 0, 1, 0], &[], 0),
        ];
        for (cdb, out, room) in nothing {
            assert_eq!(bed.run(0, cdb, out, room).code(), GONE, "{cdb:02x?}");
        }
        let answered: [(&[u8], usize); 5] = [
            (&READY, 0),
            (&[0x12, 0, 0, 0, 96, 0], 96),
            (&[0x12, 1, 0x83, 0, 96, 0], 96),
            (&[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0], 64),
            (&[0x1a, 0, 0x3f, 0, 64, 0], 64),
        ];
        for (cdb, room) in answered {
            assert_eq!(bed.run(0, cdb, &[], room).status, Status::Good);
        }
        assert_eq!(bed.run(0, &WRITE_10, &[1; 4096], 0).code(), GONE);
        assert_eq!(bed.disks.log, []);
        let room = read_capacity.len() * 2;
        assert_eq!(bed.run(0, read_capacity, &[], room).status, Status::Good);
        assert_eq!(bed.run(0, &WRITE_10, &[1; 4096], 0).status, Status::Good);
        assert_eq!(writes(&bed), 1);
    }
}

#[test]
fn commands_for_another_block_size_are_refused() {
    let mut bed = replaced(4096);
    let nexus = bed.nexus.clone();
    attentions(&mut bed, &nexus, 0);
    bed.run(0, &CAPACITY_16, &[], 32);
    let mut sixteen = [0; 16];
    (sixteen[0], sixteen[9], sixteen[13]) = (0x8a, 80, 8);
    let mut compare = [0; 16];
    (compare[0], compare[9], compare[13]) = (0x89, 80, 1);
    let old: [(&[u8], &[u8], usize); 6] = [
        (&WRITE_10, &[1; 4096], 0),
        (&sixteen, &[1; 4096], 0),
        (&[0x2e, 0, 0, 0, 0, 80, 0, 0, 8, 0], &[1; 4096], 0),
        (&[0x41, 0, 0, 0, 0, 80, 0, 0, 8, 0], &[1; 512], 0),
        (&compare, &[0; 1024], 0),
        (&READ_10, &[], 4096),
    ];
    for (cdb, out, room) in old {
        let code = bed.run(0, cdb, out, room).code();
        assert_eq!(code.0, 0x05, "{cdb:02x?}: {code:02x?}");
    }
    assert_eq!(bed.run(0, &WRITE_10, &[1; 4096], 0).code(), (5, 0x0e, 0x03));
    assert_eq!(writes(&bed), 0);
    let good = bed.run(0, &WRITE_10, &vec![1; 8 * 4096], 0);
    assert_eq!(good.status, Status::Good);
    // An initiator with a session from after the replacement has no old commands.
    let other = bed.other_nexus(2);
    let short = bed.run_as(&other, 0, &WRITE_10, &[1; 4096], 0);
    assert_eq!(short.status, Status::Good);
    assert_eq!(short.residual, Residual::Overflow(28672));
}

#[test]
fn returning_session_is_notified_of_a_replaced_unit() {
    let mut bed = Bed::new(512, 2048);
    let old = bed.nexus.clone();
    bed.target.detach_nexus(&old);
    bed.target.detach_unit(0);
    bed.add(0, info(4096, 2048, 1), false);
    let again = bed.target.attach_nexus(initiator(1), port(1));
    let expected = [(0x29, 0x00), (0x3f, 0x0e), (0x3f, 0x03)];
    assert_eq!(attentions(&mut bed, &again, 0), expected);
    assert_eq!(bed.run_as(&again, 0, &WRITE_10, &[1; 4096], 0).code(), GONE);
    // Another initiator port has not used the old unit.
    let other = bed.target.attach_nexus(initiator(2), port(1));
    assert_eq!(attentions(&mut bed, &other, 0), [(0x29, 0x00)]);
    assert_eq!(
        bed.run_as(&other, 0, &READ_10, &[], 32768).status,
        Status::Good
    );
}

#[test]
fn unit_with_two_luns_is_held_back_only_where_it_replaced() {
    let mut bed = Bed::new(512, 2048);
    let other = bed.add(1, info(512, 2048, 1), false);
    let nexus = bed.nexus.clone();
    attentions(&mut bed, &nexus, 1);
    bed.target.detach_unit(0);
    bed.target.attach_unit(0, other).unwrap();
    attentions(&mut bed, &nexus, 1);
    assert_eq!(bed.run(0, &READ_10, &[], 4096).code(), GONE);
    assert_eq!(bed.run(1, &READ_10, &[], 4096).status, Status::Good);
    bed.run(1, &CAPACITY_10, &[], 8);
    assert_eq!(bed.run(0, &READ_10, &[], 4096).code(), GONE);
    // The fast path is closed too.
    let view = bed.target.view();
    let plain = view.plain_unit(&nexus, Lun::unit(0)).unwrap();
    assert!(plain.plain_parameters().is_none());
    bed.run(0, &CAPACITY_10, &[], 8);
    assert!(plain.plain_parameters().is_some());
    assert_eq!(bed.run(0, &READ_10, &[], 4096).status, Status::Good);
}

#[test]
fn restored_unit_continues_immediately() {
    let mut bed = Bed::new(512, 2048);
    let first = bed.unit(0);
    bed.target.detach_unit(0);
    bed.add(0, info(4096, 2048, 1), false);
    bed.target.detach_unit(0);
    bed.target.attach_unit(0, first).unwrap();
    let nexus = bed.nexus.clone();
    assert_eq!(attentions(&mut bed, &nexus, 0), [(0x29, 0x00)]);
    assert_eq!(bed.run(0, &WRITE_10, &[1; 4096], 0).status, Status::Good);
}
