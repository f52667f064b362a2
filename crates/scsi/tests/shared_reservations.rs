//! Persistent reservations of a unit that two daemons serve: changes by one daemon apply at the other and reach its initiators.

mod common;

use std::sync::Arc;

use common::*;
use scsi::*;

const GOOD: (Status, (u8, u8, u8)) = (Status::Good, (0, 0, 0));
const CONFLICT: (Status, (u8, u8, u8)) = (Status::ReservationConflict, (0, 0, 0));
const BUSY: (Status, (u8, u8, u8)) = (Status::Busy, (0, 0, 0));
const RESERVATIONS_PREEMPTED: (Status, (u8, u8, u8)) = (Status::CheckCondition, (0x06, 0x2a, 0x03));
const RESERVATIONS_RELEASED: (Status, (u8, u8, u8)) = (Status::CheckCondition, (0x06, 0x2a, 0x04));
const REGISTRATIONS_PREEMPTED: (Status, (u8, u8, u8)) =
    (Status::CheckCondition, (0x06, 0x2a, 0x05));

const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const RELEASE: u8 = 2;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const PREEMPT_AND_ABORT: u8 = 5;

/// Two beds that share one unit, each with an initiator of the same name and port.
fn daemons() -> (Arc<SharedState>, [Bed; 2]) {
    let shared = Arc::new(SharedState::default());
    let beds = [0x11, 0x22].map(|daemon| joined(&shared, daemon));
    (shared, beds)
}

fn joined(shared: &Arc<SharedState>, daemon: u128) -> Bed {
    let disk = block::DiskInfo {
        shared: true,
        ..info(512, 64, 0)
    };
    let mut bed = Bed::with(disk, false);
    shared.join(&mut bed, daemon);
    bed
}

fn out(bed: &mut Bed, action: u8, kind: u8, keys: [u64; 2], flags: u8) -> (Status, (u8, u8, u8)) {
    let nexus = Arc::clone(&bed.nexus);
    out_as(bed, &nexus, action, kind, keys, flags)
}

fn out_as(
    bed: &mut Bed,
    nexus: &Arc<Nexus>,
    action: u8,
    kind: u8,
    [key, new_key]: [u64; 2],
    flags: u8,
) -> (Status, (u8, u8, u8)) {
    let mut list = key.to_be_bytes().to_vec();
    list.extend(new_key.to_be_bytes());
    list.extend([0, 0, 0, 0, flags, 0, 0, 0]);
    let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
    let answer = bed.run_as(nexus, 0, &cdb, &list, 0);
    (answer.status, answer.code())
}

fn write(bed: &mut Bed) -> (Status, (u8, u8, u8)) {
    let answer = bed.run(0, &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[0; 512], 0);
    (answer.status, answer.code())
}

fn read(bed: &mut Bed) -> (Status, (u8, u8, u8)) {
    let answer = bed.run(0, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512);
    (answer.status, answer.code())
}

fn keys(bed: &mut Bed) -> Vec<u8> {
    let data = bed
        .run(0, &[0x5e, 0, 0, 0, 0, 0, 0, 1, 0, 0], &[], 256)
        .data;
    data[8..].chunks(8).map(|key| key[7]).collect()
}

#[test]
fn reservation_holds_at_the_other_daemon_until_preempted() {
    let (_shared, [mut a, mut b]) = daemons();
    assert_eq!(out(&mut a, REGISTER, 0, [0, 1], 0), GOOD);
    assert_eq!(out(&mut b, REGISTER, 0, [0, 2], 0), GOOD);
    assert_eq!((keys(&mut a), keys(&mut b)), (vec![1, 2], vec![1, 2]));
    assert_eq!(out(&mut a, RESERVE, 1, [1, 0], 0), GOOD);
    assert_eq!((write(&mut a), read(&mut b)), (GOOD, GOOD));
    assert_eq!(write(&mut b), CONFLICT);
    assert_eq!(out(&mut b, RESERVE, 1, [2, 0], 0), CONFLICT);
    // The same initiator through a port with the same number is still another registrant.
    assert_eq!(out(&mut b, RELEASE, 1, [1, 0], 0), CONFLICT);

    assert_eq!(out(&mut b, PREEMPT, 1, [2, 1], 0), GOOD);
    assert_eq!(write(&mut b), GOOD);
    assert_eq!(write(&mut a), REGISTRATIONS_PREEMPTED);
    assert_eq!(write(&mut a), CONFLICT);
    assert_eq!(keys(&mut a), [2]);
    assert_eq!(a.unit(0).initiator_state().next(), None);
    assert_eq!(b.unit(0).initiator_state().next(), Some("reservations"));
    // Exclusive access excludes readers too.
    assert_eq!(out(&mut b, RELEASE, 1, [2, 0], 0), GOOD);
    assert_eq!(out(&mut b, RESERVE, 3, [2, 0], 0), GOOD);
    assert_eq!((read(&mut a), read(&mut b)), (CONFLICT, GOOD));
}

#[test]
fn unit_attentions_reach_registrants_of_the_other_daemon() {
    let (shared, [mut a, mut b]) = daemons();
    let stranger = b.other_nexus(2);
    for (bed, key) in [(&mut a, 1), (&mut b, 2)] {
        assert_eq!(out(bed, REGISTER, 0, [0, key], 0), GOOD);
    }
    assert_eq!(out(&mut a, RESERVE, 5, [1, 0], 0), GOOD);
    assert_eq!((write(&mut b), write(&mut b)), (GOOD, GOOD));
    assert_eq!(out(&mut a, RELEASE, 5, [1, 0], 0), GOOD);
    assert_eq!(
        (write(&mut b), write(&mut a)),
        (RESERVATIONS_RELEASED, GOOD)
    );
    assert_eq!(out(&mut a, CLEAR, 0, [1, 0], 0), GOOD);
    assert_eq!(
        (write(&mut b), write(&mut a)),
        (RESERVATIONS_PREEMPTED, GOOD)
    );
    let ready = b.run_as(&stranger, 0, &[0; 6], &[], 0);
    assert_eq!(ready.status, Status::Good);
    assert_eq!(keys(&mut b), [0; 0]);
    assert_eq!(shared.take_aborts(), []);
}

#[test]
fn preempt_and_abort_aborts_tasks_at_the_daemon_of_its_victim() {
    let (shared, [mut a, mut b]) = daemons();
    for (bed, key) in [(&mut a, 1), (&mut b, 2)] {
        assert_eq!(out(bed, REGISTER, 0, [0, key], 0), GOOD);
    }
    assert_eq!(out(&mut b, PREEMPT_AND_ABORT, 1, [2, 1], 0), GOOD);
    let aborts = shared.take_aborts();
    let task = |bed: &Bed| TaskTag {
        nexus: bed.nexus.id(),
        unit: bed.unit(0).id(),
    };
    assert_eq!(aborts.len(), 1);
    assert!(aborts[0].matches(task(&a)) && !aborts[0].matches(task(&b)));
    // The initiator's own key: its other tasks are aborted at this daemon before the response.
    assert_eq!(out(&mut b, PREEMPT_AND_ABORT, 1, [2, 2], 0), GOOD);
    assert_eq!((shared.take_aborts(), keys(&mut b)), (vec![], vec![]));
}

/// A process that was stopped and resumed finds commands before it is notified that its copy is out of date.
#[test]
fn shared_state_holds_to_its_deadline_for_the_holder_too() {
    let (_shared, [mut a, mut b]) = daemons();
    for (bed, key) in [(&mut a, 1), (&mut b, 2)] {
        assert_eq!(out(bed, REGISTER, 0, [0, key], 0), GOOD);
    }
    assert_eq!(out(&mut a, RESERVE, 1, [1, 0], 0), GOOD);
    // Twice: the second takes the path of a privileged nexus.
    assert_eq!((write(&mut a), write(&mut a)), (GOOD, GOOD));
    set_now(VALID - std::time::Duration::from_nanos(1));
    assert_eq!((write(&mut a), read(&mut b)), (GOOD, GOOD));
    set_now(VALID);
    assert_eq!((write(&mut a), read(&mut a)), (BUSY, BUSY));
    assert_eq!((write(&mut b), read(&mut b)), (BUSY, BUSY));
    assert_eq!(out(&mut b, PREEMPT, 1, [2, 1], 0), BUSY);
    a.unit(0).set_reservations_valid_until(2 * VALID);
    assert_eq!((write(&mut a), write(&mut b)), (GOOD, BUSY));
}

#[test]
fn outdated_daemon_returns_busy_and_catches_up() {
    let (shared, [mut a, mut b]) = daemons();
    for (bed, key) in [(&mut a, 1), (&mut b, 2)] {
        assert_eq!(out(bed, REGISTER, 0, [0, key], 0), GOOD);
    }
    let unit = b.unit(0);
    unit.set_reservations_current(false);
    assert_eq!((write(&mut b), read(&mut b)), (BUSY, BUSY));
    assert_eq!(out(&mut b, RESERVE, 1, [2, 0], 0), BUSY);
    let in_keys = b.run(0, &[0x5e, 0, 0, 0, 0, 0, 0, 1, 0, 0], &[], 256);
    assert_eq!(in_keys.status, Status::Busy);
    for harmless in [[0; 6], [0x12, 0, 0, 0, 96, 0]] {
        assert_eq!(b.run(0, &harmless, &[], 96).status, Status::Good);
    }
    unit.set_reservations_current(true);

    // Daemon `late` has missed a preemption. A replacement based on its old copy fails, and is repeated on the current state.
    let (version, before) = shared.get();
    assert_eq!(out(&mut a, PREEMPT_AND_ABORT, 0, [1, 2], 0), GOOD);
    shared.take_aborts();
    let (_, after) = shared.get();
    let late = joined(&Arc::default(), 0x22);
    let late_unit = late.unit(0);
    let nexus = Arc::clone(&late.nexus);
    assert!(
        late_unit
            .adopt_reservations(version, &before)
            .unwrap()
            .is_none()
    );
    let scope = late_unit
        .adopt_reservations(version + 1, &after)
        .unwrap()
        .unwrap();
    let task = TaskTag {
        nexus: nexus.id(),
        unit: late_unit.id(),
    };
    assert!(scope.matches(task));
    // Adopting the same version again has no effect.
    assert!(
        late_unit
            .adopt_reservations(version + 1, &after)
            .unwrap()
            .is_none()
    );
    let mut late = late;
    assert_eq!(write(&mut late), REGISTRATIONS_PREEMPTED);
    assert_eq!(write(&mut late), GOOD);
    assert!(
        late_unit
            .adopt_reservations(version + 2, b"garbage")
            .is_err()
    );
}

#[test]
fn change_based_on_an_old_version_is_retried() {
    let (shared, [mut a, mut b]) = daemons();
    assert_eq!(out(&mut a, REGISTER, 0, [0, 1], 0), GOOD);
    let (version, state) = shared.get();
    // A later version with the same state that no daemon adopts: BUSY after some attempts, never GOOD.
    shared.set(version + 1, &state);
    assert_eq!(out(&mut b, REGISTER, 0, [0, 2], 0), BUSY);
    b.unit(0).adopt_reservations(version + 1, &state).unwrap();
    assert_eq!(out(&mut b, REGISTER, 0, [0, 2], 0), GOOD);
    assert_eq!((keys(&mut a), keys(&mut b)), (vec![1, 2], vec![1, 2]));
}

#[test]
fn shared_state_outlives_the_last_daemon_only_with_aptpl() {
    let (shared, [mut a, mut b]) = daemons();
    assert_eq!(out(&mut a, REGISTER, 0, [0, 1], 0), GOOD);
    let (_, volatile) = shared.get();
    assert_eq!(out(&mut b, REGISTER, 0, [0, 2], 1), GOOD);
    assert_eq!(out(&mut b, RESERVE, 1, [2, 0], 0), GOOD);
    let (_, lasting) = shared.get();
    let unit = joined(&Arc::default(), 0x22).unit(0);
    assert!(unit.reservations_after_power_on(&lasting).is_none());
    assert!(unit.reservations_after_power_on(&[]).is_none());
    let cleared = unit.reservations_after_power_on(&volatile).unwrap();
    unit.adopt_reservations(9, &cleared).unwrap();
    assert!(unit.reservations().is_empty());

    // A restart of the holder's daemon: the same number, another nexus.
    let again = Arc::new(SharedState::default());
    again.set(9, &lasting);
    let (mut holder, mut other) = (joined(&again, 0x22), joined(&again, 0x11));
    assert_eq!((write(&mut holder), write(&mut other)), (GOOD, CONFLICT));
    let status = other.unit(0).reservations();
    let daemons: Vec<_> = status
        .registrations
        .iter()
        .map(|one| one.daemon.as_deref())
        .collect();
    assert_eq!(daemons, [None, Some("00000000000000000000000000000022")]);
}

#[test]
fn features_of_a_single_daemon_are_refused_when_shared() {
    let (_shared, [mut a, _b]) = daemons();
    for opcode in [0x16, 0x56, 0x17, 0x57, 0x8b] {
        let mut cdb = [0; 16];
        cdb[0] = opcode;
        assert_eq!(
            a.run(0, &cdb, &[], 0).code(),
            (0x05, 0x20, 0x00),
            "{opcode:#x}"
        );
    }
    let all = a
        .run(0, &[0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0], &[], 4096)
        .data;
    let listed: Vec<u8> = all[4..].chunks_exact(8).map(|row| row[0]).collect();
    assert!(listed.contains(&0x5e) && listed.contains(&0x5f) && !listed.contains(&0x16));
}
