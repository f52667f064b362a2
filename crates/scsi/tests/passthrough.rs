//! Commands to a pass-through unit: those that reach its device, those that do not, and unchanged responses.

mod common;

use std::sync::mpsc::{Receiver, channel};

use block::{IoErrorKind, IoKind, PassedReservations, Passthrough, ScsiAnswer, ScsiCommand};
use common::*;
use proptest::prelude::*;
use scsi::*;

type Seen = Receiver<(ScsiCommand, Vec<u8>)>;

/// Creates a unit with a device that reports its commands, and answers with `status`, `sense` and data for the whole buffer, at most 36
/// bytes.
fn passed(reservations: PassedReservations, read_only: bool, answer: ScsiAnswer) -> (Bed, Seen) {
    passed_of_type(0, reservations, read_only, answer)
}

fn passed_of_type(
    device_type: u8,
    reservations: PassedReservations,
    read_only: bool,
    answer: ScsiAnswer,
) -> (Bed, Seen) {
    let mut info = info(512, 64, 0);
    info.passthrough = Some(Passthrough {
        device_type,
        reservations,
        read_only,
    });
    info.read_only = read_only;
    let (send, seen) = channel();
    let mut bed = Bed::with(info, false);
    bed.disks.device = Some(Box::new(move |command, data: &[u8]| {
        send.send((command, data.to_vec())).unwrap();
        Ok((answer.clone(), vec![0xd5; command.data_in.min(36) as usize]))
    }));
    (bed, seen)
}

fn good(reservations: PassedReservations) -> (Bed, Seen) {
    passed(reservations, false, ScsiAnswer::default())
}

const INVALID_OPCODE: (u8, u8, u8) = (5, 0x20, 0);
const REGISTER: [u8; 10] = [0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0];

fn register(key: u8) -> [u8; 24] {
    let mut list = [0; 24];
    list[15] = key;
    list
}

#[test]
fn command_and_data_pass_through_unchanged() {
    let (mut bed, seen) = good(PassedReservations::Refuse);
    let inquiry = [0x12, 1, 0x83, 0, 36, 0];
    // Longer than the CDB, as received from transports.
    let mut padded = inquiry.to_vec();
    padded.resize(32, 0xee);
    let answer = bed.run(0, &padded, &[], 64);
    assert_eq!(answer.status, Status::Good);
    assert_eq!(answer.data, [0xd5; 36]);
    assert_eq!(answer.residual, Residual::Underflow(28));
    let (command, out) = seen.try_recv().unwrap();
    assert_eq!((command.cdb_length, command.data_in), (6, 64));
    assert_eq!(command.cdb[..6], inquiry);
    assert_eq!((&command.cdb[6..], out.len()), (&[0; 10][..], 0));
}

#[test]
fn data_out_reach_the_device() {
    let (mut bed, seen) = good(PassedReservations::Refuse);
    let mode_select = [0x15, 0x10, 0, 0, 12, 0];
    let answer = bed.run(0, &mode_select, b"twelve bytes", 0);
    assert_eq!(
        (answer.status, answer.residual),
        (Status::Good, Residual::None)
    );
    let (command, out) = seen.try_recv().unwrap();
    assert_eq!((command.data_out, command.data_in), (12, 0));
    assert_eq!(out, b"twelve bytes");
}

#[test]
fn sense_data_status_and_residual_are_the_devices() {
    let sense: Vec<u8> = [0x72, 3, 0x11, 1, 0, 0, 0, 12]
        .into_iter()
        .chain(0..12)
        .collect();
    let answer = ScsiAnswer {
        status: 2,
        residual: -7,
        sense: sense.clone(),
        ..ScsiAnswer::default()
    };
    let (mut bed, _seen) = passed(PassedReservations::Refuse, false, answer);
    let answer = bed.run(0, &[0x4d, 0, 0x40, 0, 0, 0, 0, 0, 43, 0], &[], 43);
    assert_eq!(answer.status, Status::CheckCondition);
    assert_eq!(answer.sense, sense);
    assert_eq!(answer.residual, Residual::Underflow(7));
    let conflict = ScsiAnswer {
        status: 0x18,
        ..ScsiAnswer::default()
    };
    let (mut bed, _seen) = passed(PassedReservations::Forward, false, conflict);
    let answer = bed.run(0, &REGISTER, &register(1), 0);
    assert_eq!(answer.status, Status::ReservationConflict);
}

#[test]
fn plain_reads_and_writes_travel_as_io() {
    let (mut bed, seen) = good(PassedReservations::Refuse);
    bed.disks.log.clear();
    bed.run(0, &[0x2a, 0, 0, 0, 0, 1, 0, 0, 1, 0], &[7; 512], 0);
    let read = bed.run(0, &[0x28, 0, 0, 0, 0, 1, 0, 0, 1, 0], &[], 512);
    assert_eq!(read.data, [7; 512]);
    let kinds: Vec<IoKind> = bed.disks.log.iter().map(|(_, io)| io.kind).collect();
    assert_eq!(kinds, [IoKind::Write, IoKind::Read]);
    // A read beyond the end is refused by the device.
    bed.run(0, &[0x28, 0, 0, 0, 0, 64, 0, 0, 1, 0], &[], 512);
    assert_eq!(seen.try_recv().unwrap().0.cdb[5], 64);
}

#[test]
fn commands_for_other_units_and_variable_cdbs_are_refused() {
    let (mut bed, seen) = good(PassedReservations::Forward);
    for opcode in [0x83, 0x84, 0x7e, 0x7f] {
        let mut cdb = [0; 16];
        cdb[0] = opcode;
        assert_eq!(
            bed.run(0, &cdb, &[], 0).code(),
            INVALID_OPCODE,
            "{opcode:x}h"
        );
    }
    // REPORT LUNS is answered by the target.
    let luns = bed.run(0, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0], &[], 64);
    assert_eq!(luns.data.len(), 16);
    // Data in both directions, or more than the maximum of a command.
    let both = bed.run(0, &[0x12, 0, 0, 0, 36, 0], &[0; 8], 36);
    assert_eq!(both.code(), (5, 0x0e, 3));
    let long = vec![0; PASSED_MAX as usize + 1];
    assert_eq!(
        bed.run(0, &[0x3b, 2, 0, 0, 0, 0, 0x40, 0, 1, 0], &long, 0)
            .code(),
        (5, 0x0e, 3)
    );
    assert!(seen.try_recv().is_err(), "nothing got to the device");
}

#[test]
fn reservations_are_refused_emulated_or_forwarded() {
    let (mut bed, seen) = good(PassedReservations::Refuse);
    for cdb in [
        &REGISTER[..],
        &[0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0],
        &[0x16, 0, 0, 0, 0, 0],
    ] {
        assert_eq!(bed.run(0, cdb, &register(1), 0).code(), INVALID_OPCODE);
    }
    assert!(seen.try_recv().is_err());

    let (mut bed, seen) = good(PassedReservations::Forward);
    assert_eq!(bed.run(0, &REGISTER, &register(1), 0).status, Status::Good);
    assert_eq!(seen.try_recv().unwrap().1, register(1));

    let (mut bed, seen) = good(PassedReservations::Emulate);
    let other = bed.other_nexus(2);
    while seen.try_recv().is_ok() {}
    assert_eq!(bed.run(0, &REGISTER, &register(1), 0).status, Status::Good);
    let mut reserve = register(0);
    reserve[7] = 1;
    // RESERVE, exclusive access.
    let answer = bed.run(0, &[0x5f, 1, 3, 0, 0, 0, 0, 0, 24, 0], &reserve, 0);
    assert_eq!(answer.status, Status::Good);
    assert!(seen.try_recv().is_err(), "the device has no such state");
    for refused in [
        &[0x1a, 0, 0x3f, 0, 255, 0][..],
        // A command with unknown effects on the device.
        &[0xc5, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ] {
        let answer = bed.run_as(&other, 0, refused, &[], 255);
        assert_eq!(answer.status, Status::ReservationConflict, "{refused:02x?}");
    }
    let allowed = bed.run_as(&other, 0, &[0x12, 0, 0, 0, 36, 0], &[], 36);
    assert_eq!(allowed.status, Status::Good);
    assert_eq!(seen.try_iter().count(), 1);
}

#[test]
fn read_only_unit_lets_no_command_through_that_may_change_anything() {
    let answer = ScsiAnswer::default();
    let (mut bed, seen) = passed(PassedReservations::Refuse, true, answer);
    while seen.try_recv().is_ok() {}
    for opcode in [
        0x51, 0x04, 0x0a, 0x15, 0x1d, 0x3b, 0x41, 0x42, 0x48, 0x85, 0x93, 0xa1, 0xc1,
    ] {
        let mut cdb = [0; 16];
        cdb[0] = opcode;
        assert_eq!(
            bed.run(0, &cdb, &[0; 24], 0).code(),
            (7, 0x27, 0),
            "{opcode:x}h"
        );
    }
    let write = bed.run(0, &[0x2a, 0, 0, 0, 0, 1, 0, 0, 1, 0], &[7; 512], 0);
    assert_eq!(write.code(), (7, 0x27, 0));
    assert!(seen.try_recv().is_err());
    let inquiry = [0x12, 0, 0, 0, 36, 0];
    assert_eq!(bed.run(0, &inquiry, &[], 36).status, Status::Good);
    assert_eq!(seen.try_iter().count(), 1);
}

/// Commands that read tables of contents of an optical unit write to a disk, and vice versa.
#[test]
fn operation_codes_depend_on_the_device_type() {
    let runs = |device_type, cdb: &[u8]| {
        let answer = ScsiAnswer::default();
        let (mut bed, _seen) =
            passed_of_type(device_type, PassedReservations::Refuse, true, answer);
        bed.run(0, cdb, &[], 36).status == Status::Good
    };
    // READ TOC, READ DISC INFORMATION; on disks the latter is XPWRITE (10).
    for opcode in [0x43, 0x51] {
        let cdb = [opcode, 0, 0, 0, 0, 0, 0, 0, 36, 0];
        assert!(runs(5, &cdb) && !runs(0, &cdb), "{opcode:x}h");
    }
    // REPORT SUPPORTED OPERATION CODES; on optical units SEND KEY.
    let cdb = [0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 0, 36, 0, 0];
    assert!(runs(0, &cdb) && !runs(5, &cdb));
}

/// For initiators with read-only access.
#[test]
fn modifying_commands_are_distinguished() {
    let (bed, _seen) = good(PassedReservations::Forward);
    let view = bed.target.view();
    let changes = |cdb: &[u8]| {
        view.changes(&Command {
            nexus: &bed.nexus,
            lun: Lun::unit(0),
            cdb,
            attribute: TaskAttribute::Simple,
            data_out_length: 0,
            data_in_length: 0,
        })
    };
    // WRITE BUFFER, XPWRITE (51h is READ DISC INFORMATION on optical units only), ATA PASS-THROUGH (16), WRITE LONG (16), BLANK, one vendor
    // specific; reservations; an empty CDB is TEST UNIT READY.
    for opcode in [
        0x2a, 0x3b, 0x51, 0x85, 0x9f, 0xa1, 0xc1, 0x16, 0x56, 0x5f, 0x7f,
    ] {
        assert!(changes(&[opcode, 0, 0, 0, 0, 0, 0, 0, 0, 0]), "{opcode:x}h");
    }
    for opcode in [0x00, 0x12, 0x1a, 0x28, 0x5e, 0x88, 0xa0] {
        assert!(
            !changes(&[opcode, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            "{opcode:x}h"
        );
    }
    assert!(!changes(&[]));
}

#[test]
fn a_command_that_was_lost_on_its_way_is_aborted() {
    let (mut bed, _seen) = good(PassedReservations::Refuse);
    bed.disks.device = Some(Box::new(|_, _| Err(IoErrorKind::Cancelled)));
    let answer = bed.run(0, &[0x12, 0, 0, 0, 36, 0], &[], 36);
    assert_eq!(answer.code(), (0x0b, 0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// No command and no response of the device panics, and data-in never exceeds the client's buffer.
    #[test]
    fn no_command_and_no_answer_panics(
        cdb in prop::collection::vec(any::<u8>(), 1..33),
        out in prop::collection::vec(any::<u8>(), 0..64),
        room in 0usize..600,
        answer in prop::collection::vec(any::<u8>(), 0..4),
        sense in prop::collection::vec(any::<u8>(), 1..300),
        residual in any::<i64>(),
        came in 0usize..600,
    ) {
        let (mut bed, _seen) = good(PassedReservations::Forward);
        let status = if answer.is_empty() { 2 } else { answer[0] & !2 };
        bed.disks.device = Some(Box::new(move |command, _| {
            let sense = if status == 2 { sense.clone() } else { Vec::new() };
            let answer = ScsiAnswer { status, residual, sense, ..ScsiAnswer::default() };
            Ok((answer, vec![1; came.min(command.data_in as usize)]))
        }));
        let answer = bed.run(0, &cdb, &out, room);
        prop_assert!(answer.data.len() <= room);
    }
}
