//! Target port groups: permission to set access states, accepted commands by state, and the data of REPORT TARGET PORT GROUPS and INQUIRY.

mod common;

use std::sync::Arc;

use block::{PassedReservations, Passthrough, ScsiAnswer};
use common::*;
use scsi::*;

const READY: [u8; 6] = [0; 6];
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
/// REPORT TARGET PORT GROUPS, 256 bytes.
const REPORT: [u8; 12] = [0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
/// SET TARGET PORT GROUPS with one descriptor.
const SET: [u8; 12] = [0xa4, 0x0a, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0];
const INQUIRY: [u8; 6] = [0x12, 0, 0, 0, 36, 0];
/// ASYMMETRIC ACCESS STATE CHANGED.
const STATE_CHANGED: (u8, u8, u8) = (0x06, 0x2a, 0x06);
const IN_STANDBY: (u8, u8, u8) = (0x02, 0x04, 0x0b);
const IS_UNAVAILABLE: (u8, u8, u8) = (0x02, 0x04, 0x0c);
const INVALID_OPCODE: (u8, u8, u8) = (0x05, 0x20, 0x00);

fn grouped(relative_id: u16, state_setters: StateSetters) -> Arc<TargetPort> {
    Arc::new(TargetPort {
        group: relative_id,
        state_setters,
        ..TargetPort::clone(&port(relative_id))
    })
}

/// Creates a second target of the bed's unit, with a port in group 2, and a nexus to it without unit attentions.
fn second_target(bed: &mut Bed, setters: StateSetters) -> (Arc<Target>, Arc<Nexus>) {
    let port = grouped(2, setters);
    let target = Target::new(vec![Arc::clone(&port)]);
    target.attach_unit(0, bed.unit(0)).unwrap();
    let nexus = target.attach_nexus(initiator(2), port);
    assert_eq!(bed.run_as(&nexus, 0, &READY, &[], 0).code().0, 0x06);
    (target, nexus)
}

/// PERSISTENT RESERVE OUT with a type, and two keys.
fn reserve_out(
    bed: &mut Bed,
    nexus: &Arc<Nexus>,
    action: u8,
    kind: u8,
    [key, new_key]: [u8; 2],
) -> Status {
    let mut list = [0; 24];
    (list[7], list[15]) = (key, new_key);
    let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
    bed.run_as(nexus, 0, &cdb, &list, 0).status
}

/// The controllers of a guest that migrates. Both are attached during the migration, then one is removed.
#[test]
fn targets_of_one_nexus_share_its_reservations_and_port() {
    const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let mut bed = Bed::new(512, 2048);
    let (source, from) = second_target(&mut bed, StateSetters::Initiators);
    // REGISTER, RESERVE: write exclusive.
    assert_eq!(reserve_out(&mut bed, &from, 0, 0, [0, 7]), Status::Good);
    assert_eq!(reserve_out(&mut bed, &from, 1, 1, [7, 0]), Status::Good);
    let state: Vec<_> = bed.unit(0).initiator_state().collect();
    assert_eq!(state, ["reservations"]);
    bed.unit(0)
        .set_access_state(2, AccessState::ActiveNonOptimized);
    for nexus in [&from, &Arc::clone(&bed.nexus)] {
        assert_eq!(bed.run_as(nexus, 0, &READY, &[], 0).code(), STATE_CHANGED);
    }

    let (destination, to) = second_target(&mut bed, StateSetters::Initiators);
    let shows_the_port_once = |bed: &mut Bed| {
        let ports = bed.run(0, &[0x12, 1, 0x88, 0, 255, 0], &[], 255).data;
        let is_port_2 = |bytes: &&[u8]| **bytes == [0, 0, 0, 2, 0, 0, 0, 0, 0, 0];
        assert_eq!(ports.windows(10).filter(is_port_2).count(), 1);
        let groups = bed.run(0, &REPORT, &[], 256).data;
        let expected = [0x01, 0x8f, 0, 2, 0, 0x02, 0, 1, 0, 0, 0, 2];
        assert_eq!(groups[16..], expected);
    };
    shows_the_port_once(&mut bed);
    let write =
        |bed: &mut Bed, nexus: &Arc<Nexus>| bed.run_as(nexus, 0, &WRITE, &[1; 512], 0).status;
    for nexus in [&from, &to] {
        assert_eq!(write(&mut bed, nexus), Status::Good);
    }
    let stranger = Arc::clone(&bed.nexus);
    assert_eq!(write(&mut bed, &stranger), Status::ReservationConflict);

    source.detach_nexus(&from);
    drop(source);
    shows_the_port_once(&mut bed);
    assert_eq!(write(&mut bed, &to), Status::Good);
    assert_eq!(reserve_out(&mut bed, &to, 2, 1, [7, 0]), Status::Good);
    drop(destination);
    assert_eq!(bed.run(0, &REPORT, &[], 256).data.len(), 16);
}

/// SPC-4, 6.36: STATUS CODE 02h after an implicit change, 01h after SET TARGET PORT GROUPS. SPC-4, 5.15.2: every I_T nexus has a unit
/// attention condition, except for the one that changed the state explicitly.
#[test]
fn status_code_and_unit_attentions_name_the_kind_of_change() {
    let mut bed = Bed::new(512, 2048);
    let (_target, nexus) = second_target(&mut bed, StateSetters::Initiators);
    let groups = |state, status_code| {
        [
            0,
            0,
            0,
            24,
            0x00,
            0x8f,
            0,
            1,
            0,
            0,
            0,
            1,
            0,
            0,
            0,
            1,
            state,
            0x8f,
            0,
            2,
            0,
            status_code,
            0,
            1,
            0,
            0,
            0,
            2,
        ]
    };
    let unit = bed.unit(0);
    assert_eq!(bed.run(0, &REPORT, &[], 256).data, groups(0x00, 0x00));
    unit.set_access_state(2, AccessState::ActiveNonOptimized);
    assert_eq!(bed.run(0, &READY, &[], 0).code(), STATE_CHANGED);
    assert_eq!(bed.run_as(&nexus, 0, &READY, &[], 0).code(), STATE_CHANGED);
    assert_eq!(bed.run(0, &REPORT, &[], 256).data, groups(0x01, 0x02));
    // Setting the same state is no change.
    unit.set_access_state(2, AccessState::ActiveNonOptimized);
    let same = bed.run_as(&nexus, 0, &SET, &[0, 0, 0, 0, 1, 0, 0, 2], 0);
    assert_eq!(same.status, Status::Good);
    assert_eq!(bed.run(0, &READY, &[], 0).status, Status::Good);
    assert_eq!(bed.run(0, &REPORT, &[], 256).data, groups(0x01, 0x02));

    for (state, status_code) in [(0x03, 0x01), (0x00, 0x01)] {
        let set = bed.run_as(&nexus, 0, &SET, &[0, 0, 0, 0, state, 0, 0, 2], 0);
        assert_eq!(set.status, Status::Good);
        assert_eq!(bed.run(0, &READY, &[], 0).code(), STATE_CHANGED);
        assert_eq!(
            bed.run(0, &REPORT, &[], 256).data,
            groups(state, status_code)
        );
    }
    assert_eq!(bed.run_as(&nexus, 0, &READ, &[], 512).status, Status::Good);
    unit.set_access_state(2, AccessState::Standby);
    assert_eq!(bed.run_as(&nexus, 0, &READY, &[], 0).code(), STATE_CHANGED);
    assert_eq!(bed.run_as(&nexus, 0, &READ, &[], 512).code(), IN_STANDBY);
    assert_eq!(bed.run(0, &READY, &[], 0).code(), STATE_CHANGED);
    assert_eq!(bed.run(0, &REPORT, &[], 256).data, groups(0x02, 0x02));
}

/// SPC-4, 6.4.2: TPGS is 01b for implicit and 11b for implicit and explicit access.
#[test]
fn states_of_the_administrator_alone_are_refused_to_initiators() {
    let mut bed = Bed::new(512, 2048);
    let (_target, nexus) = second_target(&mut bed, StateSetters::AdministratorOnly);
    let set = [0, 0, 0, 0, 2, 0, 0, 2];
    assert_eq!(bed.run_as(&nexus, 0, &SET, &set, 0).code(), INVALID_OPCODE);
    let empty = [0xa4, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(bed.run_as(&nexus, 0, &empty, &[], 0).code(), INVALID_OPCODE);
    let tpgs =
        |bed: &mut Bed, nexus: &Arc<Nexus>| bed.run_as(nexus, 0, &INQUIRY, &[], 36).data[5] & 0x30;
    assert_eq!(tpgs(&mut bed, &nexus), 0x10);
    let own = Arc::clone(&bed.nexus);
    assert_eq!(tpgs(&mut bed, &own), 0x30);
    // REPORT SUPPORTED OPERATION CODES: this command, and all commands.
    let one = [0xa3, 0x0c, 0x03, 0xa4, 0, 0x0a, 0, 0, 0, 64, 0, 0];
    assert_eq!(bed.run_as(&nexus, 0, &one, &[], 64).data, [0, 0x01, 0, 0]);
    assert_eq!(bed.run(0, &one, &[], 64).data[1], 0x03);
    let all = [0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0];
    let lists = |data: &[u8]| data[4..].chunks(8).any(|row| row[0] == 0xa4);
    assert!(!lists(&bed.run_as(&nexus, 0, &all, &[], 4096).data));
    assert!(lists(&bed.run(0, &all, &[], 4096).data));
    // Through another target of the unit: INVALID FIELD IN PARAMETER LIST, and no part of the list is applied.
    let both = [0, 0, 0, 0, 2, 0, 0, 1, 2, 0, 0, 2];
    let cdb = [0xa4, 0x0a, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0];
    assert_eq!(bed.run(0, &cdb, &both, 0).code(), (0x05, 0x26, 0x00));
    assert_eq!(bed.run(0, &READ, &[], 512).status, Status::Good);
    // The administrator may set the state.
    bed.unit(0).set_access_state(2, AccessState::Standby);
    assert_eq!(bed.run_as(&nexus, 0, &READY, &[], 0).code(), STATE_CHANGED);
    assert_eq!(bed.run_as(&nexus, 0, &READ, &[], 512).code(), IN_STANDBY);
}

/// Commands that a port accepts in standby, with a flag for those that an unavailable port accepts too (SPC-4, 5.15.2.4.4 and 5.15.2.4.5).
/// READ CAPACITY in standby is not required by the standard: initiators scan units through such ports.
const IN_STANDBY_ACCEPTED: &[(&[u8], bool)] = &[
    (&INQUIRY, true),
    (&[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0], true), // REPORT LUNS
    (&[0x03, 0, 0, 0, 18, 0], true),                   // REQUEST SENSE
    (&REPORT, true),
    (&[0xa4, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], true), // SET TARGET PORT GROUPS
    (&[0x4d, 0, 0x40, 0, 0, 0, 0, 0, 64, 0], false),     // LOG SENSE
    (&[0x1a, 0, 0x3f, 0, 255, 0], false),                // MODE SENSE (6)
    (&[0x5a, 0, 0x3f, 0, 0, 0, 0, 0, 255, 0], false),    // MODE SENSE (10)
    (&[0x15, 0x10, 0, 0, 0, 0], false),                  // MODE SELECT (6)
    (&[0x55, 0x10, 0, 0, 0, 0, 0, 0, 0, 0], false),      // MODE SELECT (10)
    (&[0x1d, 0x04, 0, 0, 0, 0], false),                  // SEND DIAGNOSTIC, self-test
    (&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], false),         // READ CAPACITY (10)
    (
        &[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0],
        false,
    ), // READ CAPACITY (16)
];

/// Commands that are refused in both states.
const REFUSED: &[&[u8]] = &[
    &READY,
    &READ,
    &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], // WRITE (10)
    &[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], // SYNCHRONIZE CACHE (10)
    &[0x1b, 0, 0, 0, 0, 0],             // START STOP UNIT
    &[0x1e, 0, 0, 0, 1, 0],             // PREVENT ALLOW MEDIUM REMOVAL
    &[0x16, 0, 0, 0, 0, 0],             // RESERVE (6)
    &[0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 24, 0, 0], // GET LBA STATUS
];

fn check_states(bed: &mut Bed, accepted: &[(&[u8], bool)], refused: &[&[u8]]) {
    for (state, code) in [
        (AccessState::Standby, IN_STANDBY),
        (AccessState::Unavailable, IS_UNAVAILABLE),
    ] {
        bed.unit(0).set_access_state(1, state);
        assert_eq!(bed.run(0, &READY, &[], 0).code(), STATE_CHANGED);
        for (cdb, in_unavailable) in accepted {
            let answer = bed.run(0, cdb, &[], 255);
            match *in_unavailable || state == AccessState::Standby {
                true => assert_eq!(answer.status, Status::Good, "{state:?} {cdb:02x?}"),
                false => assert_eq!(answer.code(), code, "{state:?} {cdb:02x?}"),
            }
        }
        for cdb in refused {
            let out = if cdb[0] == 0x2a { &[0; 512][..] } else { &[] };
            let answer = bed.run(0, cdb, out, 512);
            assert_eq!(answer.code(), code, "{state:?} {cdb:02x?}");
        }
    }
    // INQUIRY through an unavailable port: peripheral qualifier 001b.
    assert_eq!(bed.run(0, &INQUIRY, &[], 36).data[0] >> 5, 0b001);
    bed.unit(0).set_access_state(1, AccessState::Standby);
    assert_eq!(bed.run(0, &INQUIRY, &[], 36).data[0] >> 5, 0b000);
}

#[test]
fn ports_that_are_not_active_accept_the_commands_of_the_standard_only() {
    let mut bed = Bed::new(512, 2048);
    check_states(&mut bed, IN_STANDBY_ACCEPTED, REFUSED);
    let page = |bed: &mut Bed| bed.run(0, &[0x12, 1, 0x80, 0, 64, 0], &[], 64).data[0];
    assert_eq!(page(&mut bed), 0x00);
    bed.unit(0).set_access_state(1, AccessState::Unavailable);
    assert_eq!(page(&mut bed), 0x20);
}

/// A pass-through unit refuses all commands that an emulated unit refuses.
#[test]
fn passed_through_units_accept_no_more() {
    let device = |bed: &mut Bed| {
        bed.disks.device = Some(Box::new(|command, _: &[u8]| {
            let data = vec![0x00; command.data_in.min(36) as usize];
            Ok((ScsiAnswer::default(), data))
        }));
    };
    let passed = |device_type| {
        let mut info = info(512, 64, 0);
        info.passthrough = Some(Passthrough {
            device_type,
            reservations: PassedReservations::Forward,
            read_only: false,
        });
        let mut bed = Bed::with(info, false);
        device(&mut bed);
        bed
    };
    let mut accepted = IN_STANDBY_ACCEPTED.to_vec();
    accepted.extend_from_slice(&[
        (&[0x4c, 0, 0x40, 0, 0, 0, 0, 0, 0, 0], false), // LOG SELECT
        (&[0x1c, 1, 0, 0, 64, 0], false),               // RECEIVE DIAGNOSTIC RESULTS
        (&[0x3c, 0x0a, 0, 0, 0, 0, 0, 0, 64, 0], true), // READ BUFFER, echo buffer
    ]);
    let mut refused = REFUSED.to_vec();
    let more: &[&[u8]] = &[
        &[0xc5, 0, 0, 0, 0, 0, 0, 0, 0, 0],     // vendor specific
        &[0x3c, 0x02, 0, 0, 0, 0, 0, 0, 64, 0], // READ BUFFER, data
        &[0x85, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], // ATA PASS-THROUGH (16)
    ];
    refused.extend_from_slice(more);
    check_states(&mut passed(0), &accepted, &refused);

    // A4h is REPORT KEY on an optical unit.
    let mut optical = passed(5);
    optical.unit(0).set_access_state(1, AccessState::Standby);
    assert_eq!(optical.run(0, &READY, &[], 0).code(), STATE_CHANGED);
    assert_eq!(optical.run(0, &REPORT, &[], 256).code(), IN_STANDBY);

    let mut bed = passed(0);
    let (_target, nexus) = second_target(&mut bed, StateSetters::AdministratorOnly);
    let set = bed.run_as(&nexus, 0, &SET, &[0, 0, 0, 0, 2, 0, 0, 2], 0);
    assert_eq!(set.code(), INVALID_OPCODE);
}

/// A unit with a port in standby serves other ports as fast as before: without its mutex.
#[test]
fn standby_of_another_port_leaves_the_fast_path_open() {
    let mut bed = Bed::new(512, 2048);
    let (_target, nexus) = second_target(&mut bed, StateSetters::Initiators);
    bed.unit(0).set_access_state(2, AccessState::Standby);
    assert_eq!(bed.run(0, &READY, &[], 0).code(), STATE_CHANGED);
    assert_eq!(bed.run_as(&nexus, 0, &READY, &[], 0).code(), STATE_CHANGED);
    let is_direct = |bed: &Bed, nexus: &Arc<Nexus>| {
        let mut cdb = [0; 16];
        cdb[..10].copy_from_slice(&READ);
        let command = Command {
            nexus,
            lun: Lun::unit(0),
            cdb: &cdb,
            attribute: TaskAttribute::Simple,
            data_out_length: 0,
            data_in_length: 512,
        };
        bed.target.view().begin_direct(&command).is_some()
    };
    let own = Arc::clone(&bed.nexus);
    // The first command establishes that its port is active.
    assert_eq!(bed.run(0, &READ, &[], 512).status, Status::Good);
    assert!(is_direct(&bed, &own));
    assert_eq!(bed.run_as(&nexus, 0, &READ, &[], 512).code(), IN_STANDBY);
    assert!(!is_direct(&bed, &nexus));
    // A state without restrictions has no cost.
    bed.unit(0)
        .set_access_state(2, AccessState::ActiveNonOptimized);
    assert_eq!(bed.run_as(&nexus, 0, &READY, &[], 0).code(), STATE_CHANGED);
    assert!(is_direct(&bed, &nexus));
}
