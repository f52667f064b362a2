//! Commands that change the unit's state: mode pages, medium, sanitize, port groups, resets.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::{IoErrorKind, IoFlags, IoKind, IoRequest};
use common::*;
use scsi::*;

const READY: [u8; 6] = [0; 6];

/// MODE SELECT(6) of one page.
fn select(bed: &mut Bed, save: bool, page: &[u8]) -> Answer {
    let list = [&[0, 0, 0, 0][..], page].concat();
    let cdb = [0x15, 0x10 | u8::from(save), 0, 0, list.len() as u8, 0];
    bed.run(0, &cdb, &list, 0)
}

fn control(byte2: u8, byte4: u8) -> [u8; 12] {
    [0x0a, 0x0a, 0x20 | byte2, 0x10, byte4, 0, 0, 0, 0, 0, 0, 0]
}

fn caching(byte2: u8) -> [u8; 20] {
    let mut page = [0; 20];
    page[..3].copy_from_slice(&[0x08, 0x12, byte2]);
    page
}

#[test]
fn d_sense_changes_the_format_with_an_attention() {
    let mut bed = Bed::new(512, 2048);
    let other = bed.other_nexus(2);
    assert_eq!(
        select(&mut bed, false, &control(0x04, 0)).status,
        Status::Good
    );
    let sense = bed
        .run(0, &[0x28, 0, 0xff, 0, 0, 0, 0, 0, 1, 0], &[], 512)
        .sense;
    assert_eq!(sense, [0x72, 0x05, 0x21, 0x00, 0, 0, 0, 0]);
    assert_eq!(
        bed.run_as(&other, 0, &READY, &[], 0).code(),
        (0x06, 0x2a, 0x01)
    );
    assert_eq!(bed.run(0, &READY, &[], 0).status, Status::Good);
}

#[test]
fn swp_protects_the_unit_until_cleared() {
    let mut bed = Bed::new(512, 2048);
    select(&mut bed, false, &control(0, 0x08));
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    assert_eq!(bed.run(0, &write, &[0; 512], 0).code(), (0x07, 0x27, 0x00));
    select(&mut bed, false, &control(0, 0));
    assert_eq!(bed.run(0, &write, &[0; 512], 0).status, Status::Good);
}

#[test]
fn cache_turned_off_is_flushed_and_later_writes_are_forced() {
    let mut bed = Bed::new(512, 2048);
    assert_eq!(select(&mut bed, false, &caching(0)).status, Status::Good);
    bed.run(0, &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[0; 512], 0);
    let requests: Vec<_> = bed.disks.log.iter().map(|(_, request)| *request).collect();
    let write = IoRequest::write(0, 512).flagged(IoFlags::FUA);
    assert_eq!(requests, [IoRequest::flush(), write]);
}

#[test]
fn saved_pages_come_back_after_a_reset_unsaved_ones_go() {
    let mut bed = Bed::new(512, 2048);
    select(&mut bed, true, &control(0x04, 0));
    select(&mut bed, false, &control(0x00, 0x08));
    let nexus = Arc::clone(&bed.nexus);
    bed.target
        .view()
        .manage(&nexus, Lun::unit(0), TaskManagementFunction::TargetReset);
    assert_eq!(bed.run(0, &READY, &[], 0).code(), (0x06, 0x29, 0x03));
    let page = bed.run(0, &[0x1a, 0x08, 0x0a, 0, 255, 0], &[], 255).data;
    assert_eq!(page[4..9], [0x8a, 0x0a, 0x24, 0x10, 0x00]);
}

#[test]
fn saved_pages_come_back_after_a_restart() {
    let store = Arc::new(MemoryStore::default());
    let bed = || {
        let directory = Directory::new(Box::new(SharedStore(store.clone())));
        Bed::over(directory, info(512, 2048, 0), false)
    };
    let mut first = bed();
    select(&mut first, true, &caching(0x00));
    select(&mut first, false, &control(0x04, 0));
    drop(first);
    let mut second = bed();
    let page = second.run(0, &[0x1a, 0x08, 0x08, 0, 255, 0], &[], 255).data;
    assert_eq!(page[4..7], [0x88, 0x12, 0x00], "WCE was saved as 0");
    let page = second.run(0, &[0x1a, 0x08, 0x0a, 0, 255, 0], &[], 255).data;
    assert_eq!(page[6] & 0x04, 0, "D_SENSE was not saved");
    // PC 11b: saved values.
    let page = second.run(0, &[0x1a, 0x08, 0xc8, 0, 255, 0], &[], 255).data;
    assert_eq!(page[4..7], [0x88, 0x12, 0x00]);
}

#[test]
fn changed_mode_pages_and_an_ejected_medium_are_initiator_state() {
    let mut bed = Bed::with(info(512, 2048, 0), true);
    let unit = bed.unit(0);
    let state = || unit.initiator_state().collect::<Vec<_>>();
    assert!(state().is_empty());
    select(&mut bed, true, &control(0x04, 0));
    select(&mut bed, false, &control(0x00, 0));
    assert_eq!(state(), ["mode-pages"], "D_SENSE is saved");
    let (store, disk) = (bed.directory.store(), info(512, 2048, 0));
    assert_eq!(scsi::saved_initiator_state(store, disk), ["mode-pages"]);
    select(&mut bed, true, &control(0x00, 0));
    assert!(state().is_empty());
    bed.run(0, &[0x1b, 0, 0, 0, 0x02, 0], &[], 0);
    assert_eq!(state(), ["ejected"]);
}

#[test]
fn mode_select_that_is_refused_changes_nothing() {
    let mut bed = Bed::new(512, 2048);
    let mut list = vec![0; 4];
    list.extend(control(0x04, 0));
    list.extend(caching(0x01)); // RCD
    let cdb = [0x15, 0x10, 0, 0, list.len() as u8, 0];
    let answer = bed.run(0, &cdb, &list, 0);
    assert_eq!(answer.code(), (0x05, 0x26, 0x00));
    assert_eq!(answer.sense[15..18], [0x80, 0, 18]);
    let page = bed.run(0, &[0x1a, 0x08, 0x0a, 0, 255, 0], &[], 255).data;
    assert_eq!(page[6], 0x20);
    assert_eq!(
        bed.run(0, &[0x15, 0x10, 0, 0, 10, 0], &list[..10], 0)
            .code(),
        (0x05, 0x1a, 0x00)
    );
    assert_eq!(
        bed.run(0, &[0x15, 0x00, 0, 0, 36, 0], &list, 0).code(),
        (0x05, 0x24, 0x00)
    );
}

/// The BLOCK DESCRIPTOR LENGTH field of the long header has two bytes (SPC-4, 7.5.5).
#[test]
fn mode_select_does_not_parse_descriptors_as_pages() {
    let mut bed = Bed::new(512, 2048);
    let mut list = vec![0, 0, 0, 0, 0, 0, 0x01, 0x00];
    list.extend(caching(0));
    let cdb = [0x55, 0x10, 0, 0, 0, 0, 0, 0, list.len() as u8, 0];
    assert_eq!(bed.run(0, &cdb, &list, 0).code(), (0x05, 0x1a, 0x00));
    let page = bed.run(0, &[0x1a, 0x08, 0x08, 0, 255, 0], &[], 255).data;
    assert_eq!(page[4..7], [0x88, 0x12, 0x04], "WCE is as it was");
}

#[test]
fn mode_select_without_storage_changes_nothing() {
    struct Full;
    impl Store for Full {
        fn load(&self, _: &str) -> Result<Option<Vec<u8>>, scsi::Unusable> {
            Ok(None)
        }
        fn save(&self, _: &str, _: &[u8]) -> std::io::Result<()> {
            Err(std::io::Error::other("full"))
        }
    }
    let mut bed = Bed::over(Directory::new(Box::new(Full)), info(512, 64, 0), false);
    let answer = select(&mut bed, true, &control(0, 0x08));
    assert_eq!(answer.status, Status::CheckCondition);
    let page = bed.run(0, &[0x1a, 0x08, 0x0a, 0, 32, 0], &[], 32).data;
    assert_eq!((page[2] & 0x80, page[8] & 0x08), (0, 0), "WP, SWP");
    let write = bed.run(0, &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[1; 512], 0);
    assert_eq!(write.status, Status::Good);
}

#[test]
fn unusable_saved_state_refuses_every_initiator() {
    struct Damaged;
    impl Store for Damaged {
        fn load(&self, key: &str) -> Result<Option<Vec<u8>>, scsi::Unusable> {
            match key.starts_with("reservations-") {
                true => Err(scsi::Unusable("reservations is cut short".to_owned())),
                false => Ok(None),
            }
        }
        fn save(&self, _: &str, _: &[u8]) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut bed = Bed::over(Directory::new(Box::new(Damaged)), info(512, 64, 0), false);
    let read = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    assert_eq!(bed.run(0, &read, &[], 512).status, Status::Busy);
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    assert_eq!(bed.run(0, &write, &[1; 512], 0).status, Status::Busy);
    let read_keys = [0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    assert_eq!(bed.run(0, &read_keys, &[], 8).status, Status::Busy);
    let register = [0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0];
    assert_eq!(bed.run(0, &register, &[0; 24], 0).status, Status::Busy);
    let inquiry = [0x12, 0, 0, 0, 36, 0];
    assert_eq!(bed.run(0, &inquiry, &[], 36).status, Status::Good);
    let reason = bed.unit(0).unknown_state();
    assert_eq!(reason.as_deref(), Some("reservations is cut short"));
}

/// A store with state of one kind that is damaged until it is reset.
struct DamagedUntilReset(&'static str, Arc<AtomicBool>);

impl Store for DamagedUntilReset {
    fn load(&self, key: &str) -> Result<Option<Vec<u8>>, scsi::Unusable> {
        let is_reset = self.1.load(Ordering::Relaxed);
        match key.starts_with(self.0) && !is_reset {
            true => Err(scsi::Unusable(format!("{} is cut short", self.0))),
            false => Ok(None),
        }
    }
    fn save(&self, _: &str, _: &[u8]) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn unit_is_served_with_defaults_once_damaged_state_is_reset() {
    let (read, read_keys) = (
        [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0],
        [0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0],
    );
    for kind in ["reservations-", "mode-pages-", "sanitize-"] {
        let is_reset = Arc::new(AtomicBool::new(false));
        let store = DamagedUntilReset(kind, Arc::clone(&is_reset));
        let directory = Directory::new(Box::new(store));
        let mut bed = Bed::over(directory, info(512, 64, 0), false);
        let unit = bed.unit(0);
        assert!(!unit.reload_unknown_state(), "{kind}");
        assert_eq!(bed.run(0, &read, &[], 512).status, Status::Busy, "{kind}");
        is_reset.store(true, Ordering::Relaxed);
        assert!(unit.reload_unknown_state(), "{kind}");
        assert_eq!(unit.unknown_state(), None, "{kind}");
        assert_eq!(bed.run(0, &read, &[], 512).status, Status::Good, "{kind}");
        let keys = bed.run(0, &read_keys, &[], 8);
        assert_eq!(
            (keys.status, keys.data),
            (Status::Good, vec![0; 8]),
            "{kind}"
        );
    }
}

#[test]
fn software_write_protection_survives_a_change_of_the_cache_option() {
    let directory = Directory::new(Box::new(MemoryStore::default()));
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let mut bed = Bed::over(directory.clone(), info(512, 64, 0), false);
    // WCE is changeable on a disk with a write cache only.
    assert_eq!(select(&mut bed, true, &caching(0x04)).status, Status::Good);
    assert_eq!(
        select(&mut bed, true, &control(0, 0x08)).status,
        Status::Good
    );
    let without_cache = block::DiskInfo {
        write_cache: false,
        ..info(512, 64, 0)
    };
    let mut bed = Bed::over(directory, without_cache, false);
    assert_eq!(bed.run(0, &write, &[1; 512], 0).code(), (0x07, 0x27, 0x00));
}

#[test]
fn transport_without_media_holds_and_loads_the_medium() {
    let mut bed = Bed::with(info(512, 64, 0), true);
    let other = bed.other_nexus(2);
    let unit = bed.unit(0);
    let (eject, ready) = ([0x1b, 0, 0, 0, 0x02, 0], [0; 6]);
    assert_eq!(bed.run(0, &eject, &[], 0).status, Status::Good);
    assert_eq!(bed.run(0, &ready, &[], 0).code(), (0x02, 0x3a, 0x00));
    let hold = unit.hold_medium();
    for nexus in [bed.nexus.clone(), other] {
        let changed = bed.run_as(&nexus, 0, &ready, &[], 0);
        assert_eq!(
            changed.code(),
            (0x06, 0x28, 0x00),
            "medium may have changed"
        );
    }
    assert_eq!(bed.run(0, &ready, &[], 0).status, Status::Good);
    assert_eq!(
        bed.run(0, &eject, &[], 0).code(),
        (0x05, 0x53, 0x02),
        "medium removal prevented"
    );
    let second = unit.hold_medium();
    drop(hold);
    assert_eq!(bed.run(0, &eject, &[], 0).code(), (0x05, 0x53, 0x02));
    drop(second);
    assert_eq!(bed.run(0, &eject, &[], 0).status, Status::Good);
}

#[test]
fn removable_medium_is_ejected_unless_prevented() {
    let mut bed = Bed::with(info(512, 2048, 0), true);
    let other = bed.other_nexus(2);
    let (eject, load) = ([0x1b, 0, 0, 0, 0x02, 0], [0x1b, 0, 0, 0, 0x03, 0]);
    let (prevent, allow) = ([0x1e, 0, 0, 0, 1, 0], [0x1e, 0, 0, 0, 0, 0]);
    bed.run(0, &prevent, &[], 0);
    assert_eq!(
        bed.run_as(&other, 0, &eject, &[], 0).code(),
        (0x05, 0x53, 0x02)
    );
    bed.run(0, &allow, &[], 0);
    assert_eq!(bed.run(0, &eject, &[], 0).status, Status::Good);
    assert_eq!(bed.disks.log.last().unwrap().1, IoRequest::flush());
    assert_eq!(bed.run(0, &READY, &[], 0).code(), (0x02, 0x3a, 0x00));
    assert_eq!(
        bed.run(0, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512)
            .code(),
        (0x02, 0x3a, 0x00)
    );
    bed.run(0, &prevent, &[], 0);
    assert_eq!(bed.run(0, &load, &[], 0).code(), (0x05, 0x53, 0x02));
    bed.run(0, &allow, &[], 0);
    assert_eq!(bed.run(0, &load, &[], 0).status, Status::Good);
    assert_eq!(bed.run(0, &READY, &[], 0).status, Status::Good);
    assert_eq!(
        bed.run_as(&other, 0, &READY, &[], 0).code(),
        (0x06, 0x28, 0x00)
    );
}

fn overwrite(pattern: &[u8], flags: u8) -> Vec<u8> {
    let [high, low] = (pattern.len() as u16).to_be_bytes();
    [&[flags, 0, high, low], pattern].concat()
}

#[test]
fn sanitize_overwrite_fills_every_block_with_the_pattern() {
    let mut bed = Bed::new(512, 4096);
    let list = overwrite(&[1, 2, 3], 0x82); // INVERT, two passes
    let cdb = [0x48, 0x01, 0, 0, 0, 0, 0, 0, list.len() as u8, 0];
    assert_eq!(bed.run(0, &cdb, &list, 0).status, Status::Good);
    let block: Vec<u8> = [!1u8, !2, !3].into_iter().cycle().take(512).collect();
    assert!(bed.disks.bytes[0].chunks(512).all(|chunk| chunk == block));
    let flush = IoRequest::flush().flagged(IoFlags::CLOSER);
    assert_eq!(bed.disks.log.last().unwrap().1, flush);
    let passes = |io: &IoRequest| io.flags.has(IoFlags::CLOSER);
    assert!(bed.disks.log.iter().all(|(_, io)| passes(io)));
    assert_eq!(bed.run(0, &READY, &[], 0).status, Status::Good);
}

#[test]
fn sanitize_erase_leaves_nothing_and_reserved_fields_are_refused() {
    let mut bed = Bed::new(512, 2048);
    bed.disks.bytes[0].fill(7);
    assert_eq!(
        bed.run(0, &[0x48, 0x02, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0)
            .status,
        Status::Good
    );
    assert!(bed.disks.bytes[0].iter().all(|&byte| byte == 0));
    for cdb in [
        [0x48, 0x42, 0, 0, 0, 0, 0, 0, 0, 0],
        [0x48, 0x02, 0, 0, 1, 0, 0, 0, 0, 0],
        [0x48, 0x02, 0, 0, 0, 0, 0, 0, 8, 0],
        [0x48, 0x04, 0, 0, 0, 0, 0, 0, 0, 0],
    ] {
        assert_eq!(
            bed.run(0, &cdb, &[0; 8], 0).code(),
            (0x05, 0x24, 0x00),
            "{cdb:02x?}"
        );
    }
}

#[test]
fn while_sanitizing_other_commands_see_the_progress() {
    let mut bed = Bed::new(512, 8192);
    let view = bed.target.view();
    let nexus = Arc::clone(&bed.nexus);
    let list = overwrite(&[0; 512], 0x01);
    let plan = view.begin(&Command {
        nexus: &nexus,
        lun: Lun::unit(0),
        cdb: &[0x48, 0x81, 0, 0, 0, 0, 0, 2, 4, 0],
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
    for _ in 0..3 {
        let PlanStep::Io { request, .. } = run.next(None.or(Some(Ok(()))), &mut scratch) else {
            panic!("no io")
        };
        assert_eq!(request.kind, IoKind::Write);
    }
    assert!(bed.shutter.is_closed());
    let sense = bed.run(0, &READY, &[], 0).sense;
    assert_eq!((sense[2], sense[12], sense[13]), (0x02, 0x04, 0x1b));
    assert_eq!(sense[15], 0x80);
    assert!(sense[16] > 0);
    assert_eq!(
        bed.run(0, &[0x12, 0, 0, 0, 96, 0], &[], 96).status,
        Status::Good
    );
    drop(run);
    assert_eq!(bed.run(0, &READY, &[], 0).code(), (0x03, 0x31, 0x03));
    assert!(bed.shutter.is_closed(), "it has failed");
    // Without AUSE only another sanitize operation repairs the failure.
    let exit = [0x48, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(bed.run(0, &exit, &[], 0).code(), (0x05, 0x24, 0x00));
    bed.run(0, &[0x48, 0x02, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0);
    assert_eq!(bed.run(0, &READY, &[], 0).status, Status::Good);
    assert!(!bed.shutter.is_closed());
}

#[test]
fn a_sanitize_that_fails_with_ause_can_be_left() {
    let mut bed = Bed::new(512, 2048);
    bed.disks.failure = Some(IoErrorKind::WriteMedium);
    let erase = [0x48, 0x22, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(bed.run(0, &erase, &[], 0).code(), (0x03, 0x0c, 0x00));
    assert_eq!(bed.run(0, &READY, &[], 0).code(), (0x03, 0x31, 0x03));
    assert!(bed.shutter.is_closed());
    let exit = [0x48, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(bed.run(0, &exit, &[], 0).status, Status::Good);
    assert_eq!(bed.run(0, &READY, &[], 0).status, Status::Good);
    assert!(!bed.shutter.is_closed());
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
fn sanitize_continues_after_a_restart_and_failure_persists() {
    let store = Arc::new(MemoryStore::default());
    let bed = || {
        let directory = Directory::new(Box::new(SharedStore(store.clone())));
        Bed::over(directory, info(512, 8192, 0), false)
    };
    let first = bed();
    assert!(first.unit(0).resume_operation().is_none());
    let list = overwrite(&[1, 2], 0x82); // INVERT, two passes
    let plan = first.target.view().begin(&Command {
        nexus: &first.nexus,
        lun: Lun::unit(0),
        cdb: &[0x48, 0x81, 0, 0, 0, 0, 0, 0, list.len() as u8, 0],
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
    let mut scratch = vec![0; run.scratch_length];
    run.next(None, &mut scratch);
    run.next(None, &mut scratch);
    run.next(Some(Ok(())), &mut scratch);
    drop((run, first));

    let mut second = bed();
    assert_eq!(second.run(0, &READY, &[], 0).code(), (0x02, 0x04, 0x1b));
    assert!(second.shutter.is_closed());
    let mut run = second.unit(0).resume_operation().unwrap();
    assert!(second.unit(0).resume_operation().is_none());
    let mut last = None;
    loop {
        match run.next(last.take(), &mut scratch) {
            PlanStep::Io {
                disk,
                request,
                scratch: range,
            } => last = Some(second.disks.io(disk, request, &mut scratch[range])),
            PlanStep::End => break,
            step => panic!("{step:?}"),
        }
    }
    assert_eq!(second.run(0, &READY, &[], 0).status, Status::Good);
    assert!(!second.shutter.is_closed());
    let all_inverted = |chunk: &[u8]| chunk == [!1, !2];
    assert!(second.disks.bytes[0].chunks(2).all(all_inverted));

    let mut third = bed();
    assert_eq!(third.run(0, &READY, &[], 0).status, Status::Good);
    third.disks.failure = Some(IoErrorKind::WriteMedium);
    third.run(0, &[0x48, 0x22, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0);

    let mut fourth = bed();
    assert!(fourth.unit(0).resume_operation().is_none());
    assert!(fourth.shutter.is_closed());
    assert_eq!(fourth.run(0, &READY, &[], 0).code(), (0x03, 0x31, 0x03));
    // AUSE was saved too.
    let exit = [0x48, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(fourth.run(0, &exit, &[], 0).status, Status::Good);
    assert_eq!(bed().run(0, &READY, &[], 0).status, Status::Good);
}

#[test]
fn transport_refusals_have_sense_data_of_the_unit() {
    let mut bed = Bed::new(512, 2048);
    let nexus = Arc::clone(&bed.nexus);
    let refused = |bed: &mut Bed, lun| {
        let mut view = bed.target.view();
        view.refresh();
        let protected = Sense::new(SenseKey::DataProtect, SenseCode::WRITE_PROTECTED);
        let command = Command {
            nexus: &nexus,
            lun: Lun::unit(lun),
            cdb: &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0],
            attribute: TaskAttribute::Simple,
            data_out_length: 512,
            data_in_length: 0,
        };
        let plan = view.refuse(&command, protected);
        bed.carry_out(plan, &[0; 512], 0)
    };
    let fixed = refused(&mut bed, 0);
    assert_eq!((fixed.sense[0], fixed.code()), (0x70, (7, 0x27, 0)));
    assert_eq!(fixed.residual, Residual::Underflow(512));
    assert_eq!(refused(&mut bed, 9).code(), (5, 0x25, 0));
    assert_eq!(
        select(&mut bed, false, &control(0x04, 0)).status,
        Status::Good
    );
    let described = refused(&mut bed, 0);
    assert_eq!((described.sense[0], described.code()), (0x72, (7, 0x27, 0)));
}

/// SPC-5, 6.36: TARGET PORT COUNT is one byte.
#[test]
fn port_group_of_many_ports_has_several_descriptors() {
    let mut bed = Bed::new(512, 2048);
    let mut others = Vec::new();
    for number in 2..=300 {
        let other = Target::new(vec![port(number)]);
        other.attach_unit(0, bed.unit(0)).unwrap();
        others.push(other);
    }
    let report = [0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0];
    let data = bed.run(0, &report, &[], 4096).data;
    assert_eq!(data[..4], [0, 0, 0x04, 0xc0]); // 2 * 8 + 300 * 4
    assert_eq!(data[4..16], [0x00, 0x8f, 0, 1, 0, 0, 0, 255, 0, 0, 0, 1]);
    let second = 4 + 8 + 255 * 4;
    assert_eq!(
        data[second..][..12],
        [0x00, 0x8f, 0, 1, 0, 0, 0, 45, 0, 0, 1, 0]
    );
}

#[test]
fn port_groups_are_reported_and_a_standby_one_does_no_io() {
    let mut bed = Bed::new(512, 2048);
    let other = bed.other_nexus(2);
    let report = [0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    let data = bed.run(0, &report, &[], 256).data;
    assert_eq!(
        data,
        [0, 0, 0, 12, 0x00, 0x8f, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    );
    let set = [0xa4, 0x0a, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0];
    assert_eq!(
        bed.run(0, &set, &[0, 0, 0, 0, 2, 0, 0, 1], 0).status,
        Status::Good
    );
    assert_eq!(bed.run(0, &READY, &[], 0).code(), (0x02, 0x04, 0x0b));
    assert_eq!(
        bed.run(0, &[0x1a, 0, 0x3f, 0, 255, 0], &[], 255).status,
        Status::Good
    );
    assert_eq!(
        bed.run_as(&other, 0, &READY, &[], 0).code(),
        (0x06, 0x2a, 0x06)
    );
    assert_eq!(
        bed.run(0, &set, &[0, 0, 0, 0, 0, 0, 0, 1], 0).status,
        Status::Good
    );
    assert_eq!(bed.run(0, &READY, &[], 0).status, Status::Good);
    assert_eq!(
        bed.run(0, &set, &[0, 0, 0, 0, 0, 0, 0, 9], 0).code(),
        (0x05, 0x26, 0x00)
    );
}

/// A port in its own target port group.
fn grouped(relative_id: u16) -> Arc<TargetPort> {
    Arc::new(TargetPort {
        group: relative_id,
        ..TargetPort::clone(&port(relative_id))
    })
}

/// SPC-4, 5.15.2.4: a state applies to the ports of one group.
#[test]
fn state_of_one_port_group_leaves_the_others_alone() {
    let mut bed = Bed::new(512, 2048);
    let target = Target::new(vec![grouped(2), grouped(3)]);
    target.attach_unit(0, bed.unit(0)).unwrap();
    let nexus = target.attach_nexus(initiator(2), grouped(2));
    assert_eq!(
        bed.run_as(&nexus, 0, &READY, &[], 0).code(),
        (0x06, 0x29, 0x00)
    );
    let page = bed
        .run_as(&nexus, 0, &[0x12, 0x01, 0x83, 0, 255, 0], &[], 255)
        .data;
    let designators = [
        0x51, 0x94, 0, 4, 0, 0, 0, 2, // relative target port 2
        0x51, 0x95, 0, 4, 0, 0, 0, 2, // target port group 2
    ];
    assert!(page.windows(16).any(|bytes| bytes == designators));

    let set = [0xa4, 0x0a, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0];
    let report = [0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    let read = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    // PERSISTENT RESERVE IN, READ KEYS.
    let keys = [0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    let answer = bed.run(0, &set, &[0, 0, 0, 0, 2, 0, 0, 2], 0);
    assert_eq!(answer.status, Status::Good);
    assert_eq!(bed.run(0, &read, &[], 512).status, Status::Good);
    let answer = bed.run_as(&nexus, 0, &READY, &[], 0);
    assert_eq!(answer.code(), (0x06, 0x2a, 0x06));
    let answer = bed.run_as(&nexus, 0, &read, &[], 512);
    assert_eq!(answer.code(), (0x02, 0x04, 0x0b));
    let answer = bed.run_as(&nexus, 0, &keys, &[], 8);
    assert_eq!(answer.status, Status::Good);
    assert_eq!(
        bed.run_as(&nexus, 0, &report, &[], 256).data,
        [
            0, 0, 0, 36, //
            0x00, 0x8f, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, // group 1
            0x02, 0x8f, 0, 2, 0, 1, 0, 1, 0, 0, 0, 2, // group 2
            0x00, 0x8f, 0, 3, 0, 0, 0, 1, 0, 0, 0, 3, // group 3
        ]
    );

    let answer = bed.run(0, &set, &[0, 0, 0, 0, 3, 0, 0, 2], 0);
    assert_eq!(answer.status, Status::Good);
    let answer = bed.run_as(&nexus, 0, &READY, &[], 0);
    assert_eq!(answer.code(), (0x06, 0x2a, 0x06));
    for (cdb, room) in [(&read[..], 512), (&keys[..], 8)] {
        let answer = bed.run_as(&nexus, 0, cdb, &[], room);
        assert_eq!(answer.code(), (0x02, 0x04, 0x0c));
    }
    let inquiry = bed.run_as(&nexus, 0, &[0x12, 0, 0, 0, 36, 0], &[], 36);
    assert_eq!(inquiry.status, Status::Good);
    // The port that is unavailable can leave that state.
    let answer = bed.run_as(&nexus, 0, &set, &[0, 0, 0, 0, 0, 0, 0, 2], 0);
    assert_eq!(answer.status, Status::Good);
    assert_eq!(bed.run_as(&nexus, 0, &READY, &[], 0).status, Status::Good);
}

#[test]
fn port_groups_of_a_removed_target_are_not_reported() {
    let mut bed = Bed::new(512, 2048);
    let unit = bed.unit(0);
    let report = [0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    let own = [0, 0, 0, 12, 0x00, 0x8f, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1];
    for is_dropped in [false, true] {
        let other = Target::new(vec![grouped(2)]);
        other.attach_unit(0, Arc::clone(&unit)).unwrap();
        unit.set_access_state(2, AccessState::Standby);
        assert_eq!(bed.run(0, &READY, &[], 0).code().0, 0x06);
        assert_eq!(bed.run(0, &report, &[], 256).data[3], 24);
        if is_dropped {
            drop(other);
        } else {
            other.detach_unit(0);
        }
        assert_eq!(bed.run(0, &report, &[], 256).data, own);
    }
    // A later target with the same port begins in active/optimized.
    let other = Target::new(vec![grouped(2)]);
    other.attach_unit(0, unit).unwrap();
    assert_eq!(bed.run(0, &report, &[], 256).data[16], 0x00);
}

/// "If the PARAMETER POINTER field is larger than the largest available parameter code", it is a field at fault (SPC-4, 6.7).
#[test]
fn log_sense_begins_at_the_parameter_that_is_asked_for() {
    let mut bed = Bed::new(512, 64);
    let mut temperature =
        |pointer| bed.run(0, &[0x4d, 0, 0x4d, 0, 0, 0, pointer, 0, 64, 0], &[], 64);
    assert_eq!(
        temperature(0).data,
        [
            0x0d, 0, 0, 12, 0, 0, 0x03, 2, 0, 0xff, 0, 1, 0x03, 2, 0, 0xff
        ]
    );
    assert_eq!(temperature(1).data, [0x0d, 0, 0, 6, 0, 1, 0x03, 2, 0, 0xff]);
    let beyond = temperature(2);
    assert_eq!(beyond.code(), (0x05, 0x24, 0x00));
    assert_eq!(beyond.sense[15..18], [0xc0, 0, 5], "byte 5 of the CDB");
}

#[test]
fn supported_log_pages_and_functions_are_reported() {
    let mut bed = Bed::new(512, 2048);
    let pages = bed
        .run(0, &[0x4d, 0, 0x00, 0, 0, 0, 0, 0, 64, 0], &[], 64)
        .data;
    assert_eq!(pages, [0x00, 0x00, 0, 3, 0x00, 0x0d, 0x2f]);
    assert_eq!(
        bed.run(0, &[0x4d, 0, 0x01, 0, 0, 0, 0, 0, 64, 0], &[], 64)
            .code()
            .1,
        0x24
    );
    let functions = [0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0];
    assert_eq!(bed.run(0, &functions, &[], 16).data, [0xde, 0x07, 0, 0]);
}

#[test]
fn known_state_is_saved_again_under_its_key() {
    let identity = info(512, 64, 0).identity;
    let [modes, operation] = ["mode-pages", "sanitize"].map(|kind| format!("{kind}-{identity}"));
    let directory = Directory::new(Box::new(MemoryStore::default()));
    let store = directory.store();
    let mut bed = Bed::over(directory.clone(), info(512, 64, 0), false);
    assert_eq!(
        select(&mut bed, true, &control(0, 0x08)).status,
        Status::Good
    );
    // A failed sanitize operation. The unit then answers MODE SELECT with NOT READY.
    store.save(&operation, &[1, 1, 0]).unwrap();
    let bed = Bed::over(directory.clone(), info(512, 64, 0), false);
    for key in [modes, operation] {
        let saved = store.load(&key).unwrap();
        assert!(saved.is_some(), "{key}");
        store.remove(&key);
        bed.unit(0).save_again("reservations-0").unwrap();
        assert_eq!(store.load(&key), Ok(None));
        bed.unit(0).save_again(&key).unwrap();
        assert_eq!(store.load(&key), Ok(saved), "{key}");
    }
}
