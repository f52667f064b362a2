//! RESERVE/RELEASE and persistent reservations, through commands.

mod common;

use std::sync::Arc;

use common::*;
use scsi::*;

const READY: [u8; 6] = [0; 6];
const RESERVE: [u8; 6] = [0x16, 0, 0, 0, 0, 0];
const RELEASE: [u8; 6] = [0x17, 0, 0, 0, 0, 0];
const MODE_SENSE: [u8; 6] = [0x1a, 0x08, 0x3f, 0, 255, 0];

#[test]
fn reserve_is_held_by_one_nexus_until_it_releases_it() {
    let mut bed = Bed::new(512, 2048);
    let other = bed.other_nexus(2);
    assert_eq!(bed.run(0, &RESERVE, &[], 0).status, Status::Good);
    assert_eq!(bed.run(0, &RESERVE, &[], 0).status, Status::Good);
    assert_eq!(
        bed.run_as(&other, 0, &RESERVE, &[], 0).status,
        Status::ReservationConflict
    );
    assert_eq!(bed.run_as(&other, 0, &RELEASE, &[], 0).status, Status::Good);
    assert_eq!(
        bed.run_as(&other, 0, &MODE_SENSE, &[], 255).status,
        Status::ReservationConflict
    );
    assert_eq!(
        bed.run_as(&other, 0, &READY, &[], 0).status,
        Status::ReservationConflict
    );
    assert_eq!(
        bed.run_as(&other, 0, &[0x12, 0, 0, 0, 96, 0], &[], 96)
            .status,
        Status::Good
    );
    assert_eq!(bed.run(0, &MODE_SENSE, &[], 255).status, Status::Good);
    assert_eq!(bed.run(0, &RELEASE, &[], 0).status, Status::Good);
    assert_eq!(bed.run_as(&other, 0, &RESERVE, &[], 0).status, Status::Good);
}

#[test]
fn reserve_ends_with_its_nexus_and_with_a_reset() {
    let mut bed = Bed::new(512, 2048);
    let other = bed.other_nexus(2);
    bed.run_as(&other, 0, &RESERVE, &[], 0);
    bed.target.detach_nexus(&other);
    assert_eq!(bed.run(0, &RESERVE, &[], 0).status, Status::Good);
    let third = bed.other_nexus(3);
    let view = bed.target.view();
    let reset = TaskManagementFunction::LogicalUnitReset;
    assert!(matches!(
        view.manage(&third, Lun::unit(0), reset),
        Managed::Abort(_)
    ));
    for nexus in [&third, &Arc::clone(&bed.nexus)] {
        assert_eq!(
            bed.run_as(nexus, 0, &READY, &[], 0).code(),
            (0x06, 0x29, 0x03)
        );
    }
    assert_eq!(bed.run_as(&third, 0, &RESERVE, &[], 0).status, Status::Good);
}

/// With one task set per nexus (Control mode page, TST 001b) it equals ABORT TASK SET (SAM-5, 7.4).
#[test]
fn clear_task_set_affects_the_task_set_of_its_nexus() {
    let mut bed = Bed::new(512, 2048);
    let other = bed.other_nexus(2);
    bed.run_as(&other, 0, &READY, &[], 0);
    let control = bed.run(0, &[0x1a, 0, 0x0a, 0, 255, 0], &[], 255);
    // After a header of 4 bytes and a block descriptor of 8.
    assert_eq!(
        (control.data[12] & 0x3f, control.data[14] & 0xe0),
        (0x0a, 0x20)
    );
    let nexus = Arc::clone(&bed.nexus);
    let scope_of = |function| match bed.target.view().manage(&nexus, Lun::unit(0), function) {
        Managed::Abort(scope) => scope,
        managed => panic!("{managed:?}"),
    };
    let clear = scope_of(TaskManagementFunction::ClearTaskSet);
    assert_eq!(clear, scope_of(TaskManagementFunction::AbortTaskSet));
    let ready = bed.run_as(&other, 0, &READY, &[], 0);
    assert_eq!(ready.status, Status::Good, "no unit attention is pending");
}

/// A parameter list of PERSISTENT RESERVE OUT.
fn list(key: u64, new_key: u64, flags: u8) -> Vec<u8> {
    let mut list = key.to_be_bytes().to_vec();
    list.extend(new_key.to_be_bytes());
    list.extend([0, 0, 0, 0, flags, 0, 0, 0]);
    list
}

fn out(bed: &mut Bed, nexus: &Arc<Nexus>, action: u8, kind: u8, key: u64, new_key: u64) -> Answer {
    let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
    bed.run_as(nexus, 0, &cdb, &list(key, new_key, 0), 0)
}

fn read(bed: &mut Bed, action: u8) -> Vec<u8> {
    bed.run(0, &[0x5e, action, 0, 0, 0, 0, 0, 0x10, 0, 0], &[], 4096)
        .data
}

const REGISTER: u8 = 0;
const RESERVE_OUT: u8 = 1;
const RELEASE_OUT: u8 = 2;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const PREEMPT_AND_ABORT: u8 = 5;
const REGISTER_AND_IGNORE: u8 = 6;
const MOVE: u8 = 7;

#[test]
fn keys_and_reservation_are_read_back_byte_by_byte() {
    let mut bed = Bed::new(512, 2048);
    let nexus = Arc::clone(&bed.nexus);
    assert_eq!(read(&mut bed, 0), [0; 8]);
    assert_eq!(
        out(&mut bed, &nexus, REGISTER, 0, 0, 0xabcd).status,
        Status::Good
    );
    assert_eq!(
        read(&mut bed, 0),
        [0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0xab, 0xcd]
    );
    assert_eq!(
        out(&mut bed, &nexus, RESERVE_OUT, 5, 0xabcd, 0).status,
        Status::Good
    );
    let reservation = [0, 0, 0, 1, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0xab, 0xcd];
    assert_eq!(
        read(&mut bed, 1),
        [&reservation[..], &[0, 0, 0, 0, 0, 5, 0, 0]].concat()
    );
    assert_eq!(read(&mut bed, 2), [0, 8, 0x0d, 0x80, 0xea, 0x01, 0, 0]);
    let full = read(&mut bed, 3);
    assert_eq!(
        full[8..28],
        [
            0, 0, 0, 0, 0, 0, 0xab, 0xcd, 0, 0, 0, 0, 1, 5, 0, 0, 0, 0, 0, 1
        ]
    );
    assert_eq!(&full[32..], bed.nexus.initiator().as_bytes());
}

#[test]
fn a_wrong_key_and_a_second_reservation_conflict() {
    let mut bed = Bed::new(512, 2048);
    let (one, two) = (Arc::clone(&bed.nexus), bed.other_nexus(2));
    out(&mut bed, &one, REGISTER, 0, 0, 1);
    out(&mut bed, &two, REGISTER_AND_IGNORE, 0, 99, 2);
    assert_eq!(
        out(&mut bed, &one, REGISTER, 0, 7, 3).status,
        Status::ReservationConflict
    );
    assert_eq!(
        out(&mut bed, &one, RESERVE_OUT, 1, 7, 0).status,
        Status::ReservationConflict
    );
    assert_eq!(
        out(&mut bed, &one, RESERVE_OUT, 1, 1, 0).status,
        Status::Good
    );
    assert_eq!(
        out(&mut bed, &two, RESERVE_OUT, 1, 2, 0).status,
        Status::ReservationConflict
    );
    assert_eq!(
        out(&mut bed, &one, RESERVE_OUT, 3, 1, 0).status,
        Status::ReservationConflict
    );
    assert_eq!(
        out(&mut bed, &one, RELEASE_OUT, 3, 1, 0).code(),
        (0x05, 0x26, 0x04)
    );
    assert_eq!(
        bed.run_as(&two, 0, &RESERVE, &[], 0).status,
        Status::ReservationConflict
    );
}

#[test]
fn release_of_registrants_only_is_reported_to_them() {
    let mut bed = Bed::new(512, 2048);
    let (one, two) = (Arc::clone(&bed.nexus), bed.other_nexus(2));
    out(&mut bed, &one, REGISTER, 0, 0, 1);
    out(&mut bed, &two, REGISTER, 0, 0, 2);
    out(&mut bed, &one, RESERVE_OUT, 6, 1, 0);
    assert_eq!(
        out(&mut bed, &one, RELEASE_OUT, 6, 1, 0).status,
        Status::Good
    );
    assert_eq!(
        bed.run_as(&two, 0, &READY, &[], 0).code(),
        (0x06, 0x2a, 0x04)
    );
    assert_eq!(bed.run_as(&one, 0, &READY, &[], 0).status, Status::Good);
}

#[test]
fn clear_reports_preemption_to_other_registrants() {
    let mut bed = Bed::new(512, 2048);
    let (one, two) = (Arc::clone(&bed.nexus), bed.other_nexus(2));
    out(&mut bed, &one, REGISTER, 0, 0, 1);
    out(&mut bed, &two, REGISTER, 0, 0, 2);
    assert_eq!(out(&mut bed, &one, CLEAR, 0, 1, 0).status, Status::Good);
    assert_eq!(
        bed.run_as(&two, 0, &READY, &[], 0).code(),
        (0x06, 0x2a, 0x03)
    );
    assert_eq!(read(&mut bed, 0), [0, 0, 0, 3, 0, 0, 0, 0]);
}

/// Executes PREEMPT AND ABORT of key 1 by the nexus with key 2. Returns its response before the abort.
fn preempt_and_abort(bed: &Bed, two: &Arc<Nexus>) -> Response {
    let view = bed.target.view();
    let cdb = [0x5f, PREEMPT_AND_ABORT, 3, 0, 0, 0, 0, 0, 24, 0];
    let plan = view.begin(&Command {
        nexus: two,
        lun: Lun::unit(0),
        cdb: &cdb,
        attribute: TaskAttribute::Simple,
        data_out_length: 24,
        data_in_length: 0,
    });
    let Plan::NeedData(pending) = plan else {
        panic!("{plan:?}")
    };
    let Plan::Done(response) = pending.with_data(list(2, 1, 0)) else {
        panic!("no answer")
    };
    response
}

#[test]
fn preempt_and_abort_takes_over_and_names_the_tasks() {
    let mut bed = Bed::new(512, 2048);
    let (one, two) = (Arc::clone(&bed.nexus), bed.other_nexus(2));
    out(&mut bed, &one, REGISTER, 0, 0, 1);
    out(&mut bed, &two, REGISTER, 0, 0, 2);
    out(&mut bed, &one, RESERVE_OUT, 3, 1, 0);
    let response = preempt_and_abort(&bed, &two);
    assert_eq!(response.status, Status::Good);
    let scope = response.abort.expect("tasks to abort");
    let unit = bed.unit(0).id();
    assert!(scope.matches(TaskTag {
        nexus: one.id(),
        unit
    }));
    assert!(!scope.matches(TaskTag {
        nexus: two.id(),
        unit
    }));
    assert_eq!(
        bed.run_as(&one, 0, &READY, &[], 0).code(),
        (0x06, 0x2a, 0x05)
    );
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    assert_eq!(
        bed.run_as(&one, 0, &write, &[0; 512], 0).status,
        Status::ReservationConflict
    );
    assert_eq!(
        bed.run_as(&two, 0, &write, &[0; 512], 0).status,
        Status::Good
    );
}

/// The connections of a lost session end only after their I/O. Until then the victim's writes may reach the medium.
#[test]
fn preempt_and_abort_includes_lost_nexuses_with_tasks() {
    let mut bed = Bed::new(512, 2048);
    let (one, two) = (bed.other_nexus(3), bed.other_nexus(2));
    out(&mut bed, &one, REGISTER, 0, 0, 1);
    out(&mut bed, &two, REGISTER, 0, 0, 2);
    out(&mut bed, &one, RESERVE_OUT, 3, 1, 0);
    let unit = bed.unit(0).id();
    let nexus = one.id();
    // A connection holds the nexus while its I/O drains.
    bed.target.detach_nexus(&one);
    let scope = preempt_and_abort(&bed, &two).abort.expect("tasks to abort");
    assert!(scope.matches(TaskTag { nexus, unit }));
    out(&mut bed, &two, RELEASE_OUT, 3, 2, 0);
    let again = bed.other_nexus(3);
    out(&mut bed, &again, REGISTER, 0, 0, 1);
    drop(one);
    let scope = preempt_and_abort(&bed, &two).abort.expect("tasks to abort");
    assert!(!scope.matches(TaskTag { nexus, unit }));
}

/// SPC-4, 5.13.11.2.6, and SBC-4, 5.15: a preempted initiator cannot withdraw its prevention.
#[test]
fn preempt_and_clear_release_prevented_medium_removal() {
    let prevent = [0x1e, 0, 0, 0, 1, 0];
    let eject = [0x1b, 0, 0, 0, 0x02, 0];
    for (action, two_keeps_it) in [
        (PREEMPT_AND_ABORT, false),
        (PREEMPT_AND_ABORT, true),
        (CLEAR, true),
    ] {
        let mut bed = Bed::with(info(512, 2048, 0), true);
        let one = Arc::clone(&bed.nexus);
        let (two, three) = (bed.other_nexus(2), bed.other_nexus(3));
        for (nexus, key) in [(&one, 1), (&two, 2), (&three, 3)] {
            out(&mut bed, nexus, REGISTER, 0, 0, key);
        }
        bed.run_as(&one, 0, &prevent, &[], 0);
        if two_keeps_it {
            bed.run_as(&two, 0, &prevent, &[], 0);
        }
        // The reservation changes, and `two` gets a unit attention.
        out(&mut bed, &one, RESERVE_OUT, 5, 1, 0);
        out(&mut bed, &three, action, 6, 3, 1);
        let answer = bed.run_as(&three, 0, &eject, &[], 0);
        let expected = match (action, two_keeps_it) {
            (PREEMPT_AND_ABORT, true) => (0x05, 0x53, 0x02),
            _ => (0, 0, 0),
        };
        assert_eq!(answer.code(), expected, "{action} {two_keeps_it}");
    }
}

#[test]
fn register_and_move_gives_the_reservation_to_another_initiator() {
    let mut bed = Bed::new(512, 2048);
    let (one, two) = (Arc::clone(&bed.nexus), bed.other_nexus(2));
    out(&mut bed, &one, REGISTER, 0, 0, 1);
    out(&mut bed, &one, RESERVE_OUT, 3, 1, 0);
    let moved = move_to(&mut bed, &one, (1, 2), 0x02, two.initiator());
    assert_eq!(moved.status, Status::Good);
    assert_eq!(
        bed.run_as(&one, 0, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512)
            .status,
        Status::ReservationConflict
    );
    assert_eq!(
        out(&mut bed, &two, RELEASE_OUT, 3, 2, 0).status,
        Status::Good
    );
}

/// REGISTER AND MOVE with two keys and the flags UNREG and APTPL.
fn move_to(
    bed: &mut Bed,
    nexus: &Arc<Nexus>,
    keys: (u64, u64),
    flags: u8,
    to: &TransportId,
) -> Answer {
    let id = to.as_bytes();
    let mut list = keys.0.to_be_bytes().to_vec();
    list.extend(keys.1.to_be_bytes());
    list.extend([0, flags, 0, 1, 0, 0, 0, id.len() as u8]);
    list.extend(id);
    let cdb = [0x5f, MOVE, 0, 0, 0, 0, 0, 0, list.len() as u8, 0];
    bed.run_as(nexus, 0, &cdb, &list, 0)
}

/// SPC-4, 5.13.8.
#[test]
fn register_and_move_without_a_reservation_is_an_invalid_field() {
    let mut bed = Bed::new(512, 2048);
    let (one, two) = (Arc::clone(&bed.nexus), bed.other_nexus(2));
    let moved = |bed: &mut Bed| move_to(bed, &one, (1, 2), 0, two.initiator());
    let unregistered = moved(&mut bed);
    assert_eq!(unregistered.status, Status::ReservationConflict);
    out(&mut bed, &one, REGISTER, 0, 0, 1);
    let unreserved = moved(&mut bed);
    assert_eq!(unreserved.code(), (0x05, 0x24, 0x00));
    out(&mut bed, &one, RESERVE_OUT, 7, 1, 0);
    let of_all = moved(&mut bed);
    assert_eq!(of_all.status, Status::ReservationConflict);
}

#[test]
fn spec_i_pt_registers_an_absent_initiator() {
    let mut bed = Bed::new(512, 2048);
    let one = Arc::clone(&bed.nexus);
    let absent = initiator(9);
    let mut list = list(0, 5, 0x08);
    list.extend((absent.as_bytes().len() as u32).to_be_bytes());
    list.extend(absent.as_bytes());
    let cdb = [0x5f, REGISTER, 0, 0, 0, 0, 0, 0, list.len() as u8, 0];
    assert_eq!(bed.run_as(&one, 0, &cdb, &list, 0).status, Status::Good);
    assert_eq!(read(&mut bed, 0)[7], 16);
    let later = bed.other_nexus(9);
    assert_eq!(
        out(&mut bed, &later, RESERVE_OUT, 1, 5, 0).status,
        Status::Good
    );
}

/// REGISTER with SPEC_I_PT for one more initiator.
fn register_with(bed: &mut Bed, nexus: &Arc<Nexus>, key: u64, id: &[u8]) -> Answer {
    let mut list = list(0, key, 0x08);
    list.extend((id.len() as u32).to_be_bytes());
    list.extend(id);
    let cdb = [0x5f, REGISTER, 0, 0, 0, 0, 0, 0, list.len() as u8, 0];
    bed.run_as(nexus, 0, &cdb, &list, 0)
}

/// SPC-4, table 67.
#[test]
fn spec_i_pt_leaves_the_key_of_a_registered_initiator_alone() {
    let mut bed = Bed::new(512, 2048);
    let (one, two) = (Arc::clone(&bed.nexus), bed.other_nexus(2));
    out(&mut bed, &two, REGISTER, 0, 0, 2);
    out(&mut bed, &two, RESERVE_OUT, 1, 2, 0);
    let answer = register_with(&mut bed, &one, 5, two.initiator().as_bytes());
    assert_eq!(answer.code(), (0x05, 0x26, 0x00));
    assert_eq!(
        read(&mut bed, 0)[4..],
        [0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 2],
        "no registration, no change"
    );
    assert_eq!(
        out(&mut bed, &two, RELEASE_OUT, 1, 2, 0).status,
        Status::Good
    );
}

/// SPC-4, table 67: a wrong key has priority.
#[test]
fn spec_i_pt_needs_an_unregistered_sender() {
    let mut bed = Bed::new(512, 2048);
    let one = Arc::clone(&bed.nexus);
    let absent = initiator(9);
    assert_eq!(out(&mut bed, &one, REGISTER, 0, 0, 5).status, Status::Good);
    // The list has key 0.
    let wrong = register_with(&mut bed, &one, 6, absent.as_bytes());
    assert_eq!(wrong.status, Status::ReservationConflict);
    let mut nobody = list(5, 6, 0x08);
    nobody.extend([0; 4]);
    let cdb = [0x5f, REGISTER, 0, 0, 0, 0, 0, 0, nobody.len() as u8, 0];
    let again = bed.run_as(&one, 0, &cdb, &nobody, 0);
    assert_eq!(again.code(), (0x05, 0x26, 0x00));
}

/// SPC-4, 5.13.7: a repeated registration is no error.
#[test]
fn registrant_may_change_its_key_when_the_table_is_full() {
    let mut bed = Bed::new(512, 2048);
    let (one, two, three) = (
        Arc::clone(&bed.nexus),
        bed.other_nexus(2),
        bed.other_nexus(3),
    );
    out(&mut bed, &two, REGISTER, 0, 0, 2);
    let others: Vec<u8> = (0..1022u16)
        .flat_map(|number| {
            let [high, low] = number.to_be_bytes();
            let id = TransportId::iscsi_port("iqn.2026-11.org.example:i", [1, 0, 0, 0, high, low]);
            id.as_bytes().to_vec()
        })
        .collect();
    let mut many = list(0, 1, 0x08);
    many.extend((others.len() as u32).to_be_bytes());
    many.extend(others);
    let [_, a, b, c] = (many.len() as u32).to_be_bytes();
    let cdb = [0x5f, REGISTER, 0, 0, 0, 0, a, b, c, 0];
    assert_eq!(bed.run_as(&one, 0, &cdb, &many, 0).status, Status::Good);
    let more = out(&mut bed, &three, REGISTER, 0, 0, 3);
    assert_eq!(more.code(), (0x05, 0x55, 0x04));
    let again = out(&mut bed, &two, REGISTER, 0, 2, 5);
    assert_eq!(again.status, Status::Good);
    // The same limit applies to moving a reservation, unless its holder unregisters.
    out(&mut bed, &two, RESERVE_OUT, 3, 5, 0);
    let stays = move_to(&mut bed, &two, (5, 7), 0, three.initiator());
    assert_eq!(stays.code(), (0x05, 0x55, 0x04));
    let goes = move_to(&mut bed, &two, (5, 7), 0x02, three.initiator());
    assert_eq!(goes.status, Status::Good);
}

/// SPC-4, 7.6.4.6: the name of a node stands for all its known ports.
#[test]
fn spec_i_pt_with_the_name_of_a_node_registers_its_initiator_ports() {
    let mut bed = Bed::new(512, 2048);
    let named = |bed: &mut Bed, name: &str| {
        let one = bed.nexus.clone();
        let id = TransportId::iscsi_device(name);
        register_with(bed, &one, 5, id.as_bytes())
    };
    let stranger = named(&mut bed, "iqn.2026-11.org.example:stranger");
    assert_eq!(stranger.code(), (0x05, 0x26, 0x00));
    let (two, three) = (bed.other_nexus(2), bed.other_nexus(3));
    let answer = named(&mut bed, "iqn.2026-11.org.example:i");
    assert_eq!(answer.status, Status::Good);
    for nexus in [&two, &three] {
        let reserved = out(&mut bed, nexus, RESERVE_OUT, 7, 5, 0);
        assert_eq!(reserved.status, Status::Good);
    }
    assert_eq!(read(&mut bed, 0)[7], 3 * 8);
}

/// The TransportID of a guest contains an iSCSI node name without an ISID.
#[test]
fn spec_i_pt_registers_a_guest_by_its_name() {
    let mut bed = Bed::new(512, 2048);
    let id = TransportId::iscsi_device("iqn.2026-11.org.lunette:guest");
    let guest = bed.target.attach_nexus(id.clone(), port(1));
    bed.run_as(&guest, 0, &READY, &[], 0);
    let one = bed.nexus.clone();
    let answer = register_with(&mut bed, &one, 5, id.as_bytes());
    assert_eq!(answer.status, Status::Good);
    let reserved = out(&mut bed, &guest, RESERVE_OUT, 1, 5, 0);
    assert_eq!(reserved.status, Status::Good);
}

#[test]
fn only_all_tg_pt_registers_at_every_port_of_the_unit() {
    for (all_ports, status) in [(0x00, Status::ReservationConflict), (0x04, Status::Good)] {
        let mut bed = Bed::new(512, 2048);
        let elsewhere = Target::new(vec![port(2)]);
        elsewhere.attach_unit(0, bed.unit(0)).unwrap();
        let same = elsewhere.attach_nexus(initiator(1), port(2));
        let view = elsewhere.view();
        let begin = |cdb: &[u8], data: &[u8]| {
            let plan = view.begin(&Command {
                nexus: &same,
                lun: Lun::unit(0),
                cdb,
                attribute: TaskAttribute::Simple,
                data_out_length: data.len() as u64,
                data_in_length: 0,
            });
            let plan = match plan {
                Plan::NeedData(pending) => pending.with_data(data.to_vec()),
                plan => plan,
            };
            match plan {
                Plan::Done(response) => response.status,
                plan => panic!("{plan:?}"),
            }
        };
        assert_eq!(begin(&READY, &[]), Status::CheckCondition); // power on
        let cdb = [0x5f, REGISTER, 0, 0, 0, 0, 0, 0, 24, 0];
        let answer = bed.run(0, &cdb, &list(0, 5, all_ports), 0);
        assert_eq!(answer.status, Status::Good);
        let reserve = [0x5f, RESERVE_OUT, 1, 0, 0, 0, 0, 0, 24, 0];
        assert_eq!(begin(&reserve, &list(5, 0, 0)), status, "{all_ports:#x}");
    }
}

#[test]
fn lists_of_a_wrong_length_and_unknown_actions_are_refused() {
    let mut bed = Bed::new(512, 2048);
    let short = [0x5f, REGISTER, 0, 0, 0, 0, 0, 0, 23, 0];
    assert_eq!(bed.run(0, &short, &[0; 23], 0).code(), (0x05, 0x1a, 0x00));
    let long = [0x5f, REGISTER, 0, 0, 0, 0, 0, 0, 25, 0];
    assert_eq!(bed.run(0, &long, &[0; 25], 0).code(), (0x05, 0x1a, 0x00));
    let unknown = [0x5f, 8, 0, 0, 0, 0, 0, 0, 24, 0];
    assert_eq!(bed.run(0, &unknown, &[0; 24], 0).code(), (0x05, 0x24, 0x00));
    let bad_type = [0x5f, RESERVE_OUT, 2, 0, 0, 0, 0, 0, 24, 0];
    assert_eq!(
        bed.run(0, &bad_type, &[0; 24], 0).code(),
        (0x05, 0x24, 0x00)
    );
}

#[test]
fn aptpl_restores_registrations_and_reservation() {
    #[derive(Default, Clone)]
    struct SharedStore(Arc<MemoryStore>);
    impl Store for SharedStore {
        fn load(&self, key: &str) -> Result<Option<Vec<u8>>, scsi::Unusable> {
            self.0.load(key)
        }
        fn save(&self, key: &str, bytes: &[u8]) -> std::io::Result<()> {
            self.0.save(key, bytes)
        }
    }
    let store = SharedStore::default();
    let start = |aptpl: bool| {
        let directory = Directory::new(Box::new(store.clone()));
        let mut bed = Bed::over(directory, info(512, 2048, 0), false);
        let nexus = Arc::clone(&bed.nexus);
        let keys = read(&mut bed, 0)[7];
        if keys == 0 {
            let cdb = [0x5f, REGISTER, 0, 0, 0, 0, 0, 0, 24, 0];
            bed.run(0, &cdb, &list(0, 1, u8::from(aptpl)), 0);
            assert_eq!(
                out(&mut bed, &nexus, RESERVE_OUT, 1, 1, 0).status,
                Status::Good
            );
        }
        (bed, keys)
    };
    assert_eq!(start(false).1, 0);
    assert_eq!(start(true).1, 0);
    let (mut bed, keys) = start(true);
    assert_eq!(keys, 8);
    assert_eq!(read(&mut bed, 1)[21], 1);
    assert_eq!(read(&mut bed, 2)[3], 0x81);
    let other = bed.other_nexus(2);
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    assert_eq!(
        bed.run_as(&other, 0, &write, &[0; 512], 0).status,
        Status::ReservationConflict
    );
    assert_eq!(bed.run(0, &write, &[0; 512], 0).status, Status::Good);
}

#[test]
fn a_reservation_holds_through_every_target_that_has_the_unit() {
    let mut bed = Bed::new(512, 2048);
    let nexus = Arc::clone(&bed.nexus);
    out(&mut bed, &nexus, REGISTER, 0, 0, 1);
    out(&mut bed, &nexus, RESERVE_OUT, 3, 1, 0);
    let elsewhere = Target::new(vec![port(2)]);
    elsewhere.attach_unit(5, bed.unit(0)).unwrap();
    let guest = elsewhere.attach_nexus(initiator(7), port(2));
    let view = elsewhere.view();
    let begin = |cdb: &[u8]| {
        let lengths = (0, 512);
        let plan = view.begin(&Command {
            nexus: &guest,
            lun: Lun::unit(5),
            cdb,
            attribute: TaskAttribute::Simple,
            data_out_length: lengths.0,
            data_in_length: lengths.1,
        });
        match plan {
            Plan::Done(response) => response.status,
            plan => panic!("{plan:?}"),
        }
    };
    assert_eq!(begin(&READY), Status::CheckCondition); // power on
    assert_eq!(
        begin(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]),
        Status::ReservationConflict
    );
}

/// Service actions with a scope accept only LU_SCOPE (0). The others ignore the scope (SPC-4, table 216).
#[test]
fn scope_is_the_logical_unit_for_all_that_have_one() {
    let mut bed = Bed::new(512, 2048);
    let nexus = Arc::clone(&bed.nexus);
    out(&mut bed, &nexus, REGISTER, 0, 0, 1);
    for action in [RESERVE_OUT, RELEASE_OUT, PREEMPT, PREEMPT_AND_ABORT, MOVE] {
        let answer = out(&mut bed, &nexus, action, 0x13, 1, 1);
        assert_eq!(answer.code(), (0x05, 0x24, 0x00), "{action}");
    }
    for action in [REGISTER, REGISTER_AND_IGNORE, CLEAR] {
        let answer = out(&mut bed, &nexus, action, 0x13, 1, 1);
        assert_eq!(answer.status, Status::Good, "{action}");
    }
}

#[test]
fn preempt_without_a_reservation_removes_the_registrations_of_a_key() {
    let mut bed = Bed::new(512, 2048);
    let (one, two) = (Arc::clone(&bed.nexus), bed.other_nexus(2));
    out(&mut bed, &one, REGISTER, 0, 0, 1);
    out(&mut bed, &two, REGISTER, 0, 0, 2);
    assert_eq!(out(&mut bed, &two, PREEMPT, 3, 2, 1).status, Status::Good);
    assert_eq!(bed.run(0, &READY, &[], 0).code(), (0x06, 0x2a, 0x05));
    assert_eq!(
        read(&mut bed, 0),
        [0, 0, 0, 3, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 2]
    );
    assert_eq!(
        out(&mut bed, &two, PREEMPT, 3, 2, 9).status,
        Status::ReservationConflict
    );
    assert_eq!(
        out(&mut bed, &two, PREEMPT, 3, 2, 0).code(),
        (0x05, 0x26, 0x00)
    );
}
