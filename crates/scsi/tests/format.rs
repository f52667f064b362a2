//! FORMAT UNIT (SBC-3, 5.3): effects on the blocks, and refusals.

mod common;

use std::sync::Arc;

use block::{IoErrorKind, IoFlags, IoKind, IoRequest};
use common::*;
use scsi::*;

const READY: [u8; 6] = [0; 6];
/// FMTDATA and CMPLST, as sent by sg_format.
const FORMAT: [u8; 6] = [0x04, 0x18, 0, 0, 0, 0];
const FOV: u8 = 0x80;
const IP: u8 = 0x08;
const IMMED: u8 = 0x02;

fn list(flags: u8, descriptor: &[u8]) -> Vec<u8> {
    [&[0, flags, 0, 0][..], descriptor].concat()
}

/// Returns the content of a 1 MiB disk after a format; it was filled with 7.
fn formatted(cdb: &[u8], list: &[u8]) -> (Answer, Vec<u8>) {
    let mut bed = Bed::new(512, 2048);
    bed.disks.bytes[0].fill(7);
    let answer = bed.run(0, cdb, list, 0);
    assert_eq!(bed.run(0, &READY, &[], 0).status, Status::Good);
    (answer, bed.disks.bytes.remove(0))
}

#[test]
fn without_an_initialization_pattern_the_blocks_stay() {
    let all_sevens = |bytes: &[u8]| bytes.iter().all(|&byte| byte == 7);
    for (cdb, list) in [
        ([0x04, 0, 0, 0, 0, 0], vec![]),
        // LONGLIST and CMPLST are ignored without FMTDATA.
        ([0x04, 0x28, 0, 0, 0, 0], vec![]),
        (FORMAT, list(0, &[])),
        (FORMAT, list(IMMED, &[])),
        // DPRY, DCRT, STPF.
        (FORMAT, list(FOV | 0x70, &[])),
        (
            [0x04, 0x30, 0, 0, 0, 0],
            vec![0, FOV | 0x20, 0, 0, 0, 0, 0, 0],
        ),
    ] {
        let (answer, bytes) = formatted(&cdb, &list);
        assert_eq!(answer.status, Status::Good, "{cdb:02x?} {list:02x?}");
        assert_eq!(answer.residual, Residual::None);
        assert!(all_sevens(&bytes));
    }
}

#[test]
fn the_initialization_pattern_fills_every_block() {
    let (answer, bytes) = formatted(&FORMAT, &list(FOV | IP, &[0, 0x01, 0, 3, 1, 2, 3]));
    assert_eq!(answer.status, Status::Good);
    let block: Vec<u8> = [1, 2, 3].into_iter().cycle().take(512).collect();
    assert!(bytes.chunks(512).all(|chunk| chunk == block));
    // The default pattern: zeroes; a short header and a long one.
    let long = [0x04, 0x38, 0, 0, 0, 0];
    for (cdb, list) in [
        (FORMAT, list(FOV | IP, &[0, 0, 0, 0])),
        (long, vec![0, FOV | IP, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    ] {
        let (answer, bytes) = formatted(&cdb, &list);
        assert_eq!(answer.status, Status::Good);
        assert!(bytes.iter().all(|&byte| byte == 0));
    }
    let whole = [&[0, 0x01, 0x02, 0x00][..], &[9; 512]].concat();
    let (answer, bytes) = formatted(&FORMAT, &list(FOV | IP, &whole));
    assert_eq!(
        (answer.status, answer.residual),
        (Status::Good, Residual::None)
    );
    assert!(bytes.iter().all(|&byte| byte == 9));
}

/// Starts a format with a pattern, up to its response and some of its writes.
fn begin(bed: &mut Bed) -> (Box<Run>, Vec<u8>) {
    let list = list(FOV | IP | IMMED, &[0, 0x01, 0, 1, 9]);
    let plan = bed.target.view().begin(&Command {
        nexus: &bed.nexus,
        lun: Lun::unit(0),
        cdb: &FORMAT,
        attribute: TaskAttribute::Simple,
        data_out_length: list.len() as u64,
        data_in_length: 0,
    });
    let Plan::NeedData(pending) = plan else {
        panic!("{plan:?}")
    };
    let Plan::Run(mut run) = pending.with_data(list) else {
        panic!("no run")
    };
    assert!(run.survives_abort);
    let mut scratch = vec![0; run.scratch_length];
    assert!(matches!(run.next(None, &mut scratch), PlanStep::Answer(_)));
    let mut last = None;
    for _ in 0..3 {
        let PlanStep::Io { request, .. } = run.next(last.replace(Ok(())), &mut scratch) else {
            panic!("no io")
        };
        assert_eq!(request.kind, IoKind::Write);
        assert!(request.flags.has(IoFlags::CLOSER));
    }
    (run, scratch)
}

#[test]
fn running_format_reports_progress_and_blocks_commands() {
    let mut bed = Bed::new(512, 8192);
    let other = bed.other_nexus(2);
    let (run, _) = begin(&mut bed);
    assert!(bed.shutter.is_closed());
    // NOT READY, FORMAT IN PROGRESS; half of 4 MiB.
    let sense = bed.run_as(&other, 0, &READY, &[], 0).sense;
    assert_eq!((sense[2], sense[12], sense[13]), (0x02, 0x04, 0x04));
    assert_eq!(sense[15..18], [0x80, 0x80, 0x00]);
    let data = bed.run(0, &[0x03, 0, 0, 0, 18, 0], &[], 18).data;
    assert_eq!((data[2], data[12], data[13]), (0x02, 0x04, 0x04));
    assert_eq!(data[15..18], [0x80, 0x80, 0x00]);
    for cdb in [
        &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0][..],
        &FORMAT,
        &[0x04, 0, 0, 0, 0, 0],
        &[0x48, 0x02, 0, 0, 0, 0, 0, 0, 0, 0],
        &[0x1b, 0, 0, 0, 1, 0],
    ] {
        let answer = bed.run(0, cdb, &[0; 512], 512);
        assert_eq!(answer.code(), (0x02, 0x04, 0x04), "{cdb:02x?}");
    }
    let inquiry = bed.run(0, &[0x12, 0, 0, 0, 96, 0], &[], 96);
    assert_eq!(inquiry.status, Status::Good);
    // A reset does not end the format operation.
    let nexus = Arc::clone(&bed.nexus);
    let view = bed.target.view();
    view.manage(&nexus, Lun::unit(0), TaskManagementFunction::TargetReset);
    bed.run(0, &READY, &[], 0);
    assert_eq!(bed.run(0, &READY, &[], 0).code(), (0x02, 0x04, 0x04));
    drop(run);
    assert!(bed.shutter.is_closed(), "it has failed");
}

/// The unit reports MEDIUM FORMAT CORRUPTED until a format or a sanitize operation succeeds.
#[test]
fn failed_format_corrupts_the_medium_until_another_succeeds() {
    let failed = || {
        let mut bed = Bed::new(512, 2048);
        bed.disks.failure = Some(IoErrorKind::WriteMedium);
        let list = list(FOV | IP, &[0, 0x01, 0, 1, 9]);
        // FORMAT COMMAND FAILED.
        assert_eq!(bed.run(0, &FORMAT, &list, 0).code(), (0x03, 0x31, 0x01));
        assert_eq!(bed.run(0, &READY, &[], 0).code(), (0x03, 0x31, 0x00));
        assert!(bed.shutter.is_closed());
        let exit = [0x48, 0x3f, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(bed.run(0, &exit, &[], 0).code(), (0x05, 0x24, 0x00));
        bed
    };
    for cdb in [
        &[0x04, 0, 0, 0, 0, 0][..],
        &[0x48, 0x02, 0, 0, 0, 0, 0, 0, 0, 0],
    ] {
        let mut bed = failed();
        bed.disks.bytes[0].fill(7);
        assert_eq!(bed.run(0, cdb, &[], 0).status, Status::Good);
        assert_eq!(bed.run(0, &READY, &[], 0).status, Status::Good);
        assert!(bed.disks.bytes[0].iter().all(|&byte| byte == 0));
        assert!(!bed.shutter.is_closed());
    }
    // A format does not repair a failed sanitize operation.
    let mut bed = Bed::new(512, 2048);
    bed.disks.failure = Some(IoErrorKind::WriteMedium);
    bed.run(0, &[0x48, 0x02, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0);
    let answer = bed.run(0, &[0x04, 0, 0, 0, 0, 0], &[], 0);
    assert_eq!(answer.code(), (0x03, 0x31, 0x03));
}

/// A store that outlives its directory, like a folder.
struct SharedStore(Arc<MemoryStore>);

impl Store for SharedStore {
    fn load(&self, key: &str) -> Result<Option<Vec<u8>>, scsi::Unusable> {
        self.0.load(key)
    }

    fn save(&self, key: &str, bytes: &[u8]) -> std::io::Result<()> {
        self.0.save(key, bytes)
    }
}

#[test]
fn format_continues_after_a_restart() {
    let store = Arc::new(MemoryStore::default());
    let bed = || {
        let directory = Directory::new(Box::new(SharedStore(store.clone())));
        Bed::over(directory, info(512, 8192, 0), false)
    };
    let mut first = bed();
    let (run, mut scratch) = begin(&mut first);
    drop((run, first));
    let mut second = bed();
    assert_eq!(second.run(0, &READY, &[], 0).code(), (0x02, 0x04, 0x04));
    let mut run = second.unit(0).resume_operation().unwrap();
    let mut last = None;
    while let PlanStep::Io {
        disk,
        request,
        scratch: range,
    } = run.next(last.take(), &mut scratch)
    {
        last = Some(second.disks.io(disk, request, &mut scratch[range]));
    }
    assert_eq!(second.run(0, &READY, &[], 0).status, Status::Good);
    assert!(second.disks.bytes[0].iter().all(|&byte| byte == 9));
    let flush = IoRequest::flush().flagged(IoFlags::CLOSER);
    assert_eq!(second.disks.log.last().unwrap().1, flush);
    assert!(bed().unit(0).resume_operation().is_none());
}

#[test]
fn protected_and_reserved_units_are_not_formatted() {
    let mut disk = info(512, 2048, 0);
    disk.read_only = true;
    let mut bed = Bed::with(disk, false);
    let cdb = [0x04, 0, 0, 0, 0, 0];
    assert_eq!(bed.run(0, &cdb, &[], 0).code(), (0x07, 0x27, 0x00));
    let mut bed = Bed::new(512, 2048);
    let other = bed.other_nexus(2);
    bed.run_as(&other, 0, &[0x16, 0, 0, 0, 0, 0], &[], 0);
    assert_eq!(bed.run(0, &cdb, &[], 0).status, Status::ReservationConflict);
    bed.run_as(&other, 0, &[0x17, 0, 0, 0, 0, 0], &[], 0);
    // WRITE EXCLUSIVE reservation of a registrant.
    let register = [&[0; 8][..], &[0, 0, 0, 0, 0, 0, 0, 1], &[0; 8]].concat();
    let reserve = [&[0, 0, 0, 0, 0, 0, 0, 1][..], &[0; 16]].concat();
    bed.run_as(&other, 0, &[0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0], &register, 0);
    let cdb_reserve = [0x5f, 1, 1, 0, 0, 0, 0, 0, 24, 0];
    bed.run_as(&other, 0, &cdb_reserve, &reserve, 0);
    assert_eq!(bed.run(0, &cdb, &[], 0).status, Status::ReservationConflict);
}

#[test]
fn lists_that_end_too_soon_are_a_length_error() {
    for list in [
        vec![],
        vec![0, FOV, 0],
        list(FOV | IP, &[0, 1, 0]),
        list(FOV | IP, &[0, 1, 0, 2, 9]),
    ] {
        let (answer, bytes) = formatted(&FORMAT, &list);
        assert_eq!(answer.code(), (0x05, 0x1a, 0x00), "{list:02x?}");
        assert!(bytes.iter().all(|&byte| byte == 7));
    }
}

/// The pointer is to a byte if a field of several bytes is at fault (SPC-5, 4.4.2.4.2).
#[test]
fn bad_patterns_and_defect_lists_are_refused_with_a_pointer() {
    let long = [0x04, 0x38, 0, 0, 0, 0];
    for (cdb, list, pointer) in [
        // DEFECT LIST LENGTH.
        (FORMAT, vec![0, 0, 0, 4, 0, 0, 0, 0], [0x80, 0, 2]),
        (long, vec![0, 0, 0, 0, 0, 0, 0, 8], [0x80, 0, 4]),
        // INITIALIZATION PATTERN TYPE.
        (FORMAT, list(FOV | IP, &[0, 2, 0, 1, 9]), [0x80, 0, 5]),
        // INITIALIZATION PATTERN LENGTH: with the default pattern, zero, more than a block.
        (FORMAT, list(FOV | IP, &[0, 0, 0, 1, 9]), [0x80, 0, 6]),
        (FORMAT, list(FOV | IP, &[0, 1, 0, 0]), [0x80, 0, 6]),
        (
            FORMAT,
            list(FOV | IP, &[&[0, 1, 2, 1][..], &[9; 513]].concat()),
            [0x80, 0, 6],
        ),
    ] {
        let (answer, bytes) = formatted(&cdb, &list);
        assert_eq!(answer.code(), (0x05, 0x26, 0x00), "{list:02x?}");
        assert_eq!(answer.sense[15..18], pointer, "{list:02x?}");
        assert!(bytes.iter().all(|&byte| byte == 7));
    }
}
