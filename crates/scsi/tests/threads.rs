//! Many threads on one unit: concurrent reservations, resets, map changes and I/O complete correctly.

mod common;

use std::sync::Arc;
use std::thread;

use common::*;
use scsi::*;

const ROUNDS: u64 = 300;

fn begin(view: &TargetView, nexus: &Arc<Nexus>, cdb: &[u8], data_out: &[u8]) -> Status {
    let plan = view.begin(&Command {
        nexus,
        lun: Lun::unit(0),
        cdb,
        attribute: TaskAttribute::Simple,
        data_out_length: data_out.len() as u64,
        data_in_length: 512,
    });
    let plan = match plan {
        Plan::NeedData(pending) => pending.with_data(data_out.to_vec()),
        plan => plan,
    };
    match plan {
        Plan::Done(response) => response.status,
        Plan::Io(io) => io.finish(Ok(())).status,
        plan => panic!("{plan:?}"),
    }
}

#[test]
fn only_one_of_many_threads_holds_the_reservation_at_a_time() {
    let bed = Bed::new(512, 2048);
    let holders = std::sync::atomic::AtomicU32::new(0);
    thread::scope(|scope| {
        for number in 0..4u8 {
            let (target, holders) = (&bed.target, &holders);
            scope.spawn(move || {
                use std::sync::atomic::Ordering::SeqCst;
                let nexus = target.attach_nexus(initiator(10 + number), port(1));
                let mut view = target.view();
                let mut held = 0;
                while held < ROUNDS / 10 {
                    view.refresh();
                    if begin(&view, &nexus, &[0x16, 0, 0, 0, 0, 0], &[]) == Status::Good {
                        assert_eq!(holders.fetch_add(1, SeqCst), 0);
                        held += 1;
                        holders.fetch_sub(1, SeqCst);
                        let released = begin(&view, &nexus, &[0x17, 0, 0, 0, 0, 0], &[]);
                        assert_eq!(released, Status::Good);
                    }
                    thread::yield_now();
                }
                target.detach_nexus(&nexus);
            });
        }
    });
}

#[test]
fn io_continues_while_luns_nexuses_and_mode_pages_change() {
    let bed = Bed::new(512, 2048);
    let target = &bed.target;
    let other = LogicalUnit::new(
        &bed.directory,
        UnitConfig {
            disk: DiskId(9),
            info: info(512, 64, 9),
            removable: false,
            medium: None,
        },
    );
    thread::scope(|scope| {
        for number in 0..3u8 {
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let nexus = target.attach_nexus(initiator(20 + number), port(1));
                    let mut view = target.view();
                    view.refresh();
                    let mut good = 0;
                    for _ in 0..20 {
                        let lba = (round % 128) as u8;
                        let status =
                            begin(&view, &nexus, &[0x28, 0, 0, 0, 0, lba, 0, 0, 1, 0], &[]);
                        good += u32::from(status == Status::Good);
                    }
                    assert!(good > 0);
                    target.detach_nexus(&nexus);
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                target.attach_unit(7, Arc::clone(&other)).unwrap();
                assert!(target.detach_unit(7).is_some());
            }
        });
        scope.spawn(|| {
            let view = target.view();
            let nexus = target.attach_nexus(initiator(40), port(1));
            for round in 0..ROUNDS {
                let d_sense = if round % 2 == 0 { 0x24 } else { 0x20 };
                let page = [0x0a, 0x0a, d_sense, 0x10, 0, 0, 0, 0, 0, 0, 0, 0];
                let list = [&[0; 4][..], &page].concat();
                begin(&view, &nexus, &[0x15, 0x10, 0, 0, 16, 0], &list);
                let reset = TaskManagementFunction::LogicalUnitReset;
                assert!(matches!(
                    view.manage(&nexus, Lun::unit(0), reset),
                    Managed::Abort(_)
                ));
            }
        });
    });
}
