//! Commands and their data, PDU by PDU: the target's answers to valid and invalid requests.

mod common;

use common::raw::{Answer, CLOSED_BURSTS, Raw, assert_rejected, data_out};
use common::{read10, small_offer, write10};
use iscsi::Limits;
use iscsi::negotiation::{DigestOffer, Offer};
use iscsi::pdu::{NO_TAG, NopOut, encode};
use iscsi::target::{CloseReason, Completion, Then, Transfer};
use zerocopy::big_endian::U32;

#[test]
fn last_data_in_carries_the_status() {
    let mut raw = Raw::new(&[("MaxRecvDataSegmentLength", "1024")]);
    raw.disk[512..2048].copy_from_slice(&[7; 1536]);
    let header = raw.command(0x0102_0304, 0xc0, 1536, &read10(1, 3));
    let answers = raw.send(header.to_bhs(), &[], &[]);
    // 512 and 1,024 bytes, because the test target sends its data in two pieces.
    assert_eq!(
        answers
            .iter()
            .map(|answer| answer.data.len())
            .collect::<Vec<_>>(),
        [512, 1024]
    );
    #[rustfmt::skip]
    let first = [
        0x25, 0x00, 0, 0, 0, 0x00, 0x02, 0x00, 0, 0, 0, 0, 0, 0, 0, 0,
        0x01, 0x02, 0x03, 0x04, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 2,
        0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];
    #[rustfmt::skip]
    let last = [
        0x25, 0x81, 0, 0, 0, 0x00, 0x04, 0x00, 0, 0, 0, 0, 0, 0, 0, 0,
        0x01, 0x02, 0x03, 0x04, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, 0, 0, 0, 2,
        0, 0, 0, 0x81, 0, 0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 0,
    ];
    assert_eq!(answers[0].bhs, first);
    assert_eq!(answers[1].bhs, last);
}

#[test]
fn write_data_are_requested_by_r2t() {
    let mut raw = Raw::new(&[
        ("InitialR2T", "Yes"),
        ("ImmediateData", "No"),
        ("MaxBurstLength", "1024"),
    ]);
    let header = raw.command(9, 0xa0, 1536, &write10(0, 3));
    let answers = raw.send(header.to_bhs(), &[], &[]);
    assert_eq!(answers.len(), 1, "MaxOutstandingR2T is 1 by default");
    let r2t = &answers[0];
    assert_eq!((r2t.opcode(), r2t.bhs[1]), (0x31, 0x80));
    assert_eq!(
        (
            r2t.word(16),
            r2t.word(24),
            r2t.word(36),
            r2t.word(40),
            r2t.word(44)
        ),
        (9, 1, 0, 0, 1024)
    );
    let ttt = r2t.word(20);
    assert_ne!(ttt, 0xffff_ffff);
    let answers = raw.send(data_out(9, ttt, 0, 0, true), &[], &[1; 1024]);
    assert_eq!(
        (
            answers[0].word(36),
            answers[0].word(40),
            answers[0].word(44)
        ),
        (1, 1024, 512)
    );
    let answers = raw.send(
        data_out(9, answers[0].word(20), 0, 1024, true),
        &[],
        &[2; 512],
    );
    assert_eq!(
        (answers[0].opcode(), answers[0].bhs[3], answers[0].word(36)),
        (0x21, 0, 0),
        "ExpDataSN is 0 when no Data-In was sent (11.4.8)"
    );
    assert_eq!(raw.disk[1000..1030], [[1; 24].as_slice(), &[2; 6]].concat());
}

#[test]
fn commands_outside_the_window_are_ignored_silently() {
    let mut raw = Raw::new(&[]);
    raw.still_serves();
    for cmd_sn in [1, 0, 0x8000_0000, 2 + 128, 1000] {
        let mut header = raw.command(77, 0x80, 0, &[0; 6]);
        header.cmd_sn = U32::new(cmd_sn);
        raw.cmd_sn -= 1;
        assert_eq!(raw.send(header.to_bhs(), &[], &[]), [], "CmdSN {cmd_sn}");
    }
    raw.still_serves();
}

#[test]
fn command_ahead_of_its_turn_waits_for_the_ones_before() {
    let mut raw = Raw::new(&[]);
    let (first, second) = (
        raw.command(1, 0x80, 0, &[0; 6]),
        raw.command(2, 0x80, 0, &[0; 6]),
    );
    assert_eq!(raw.send(second.to_bhs(), &[], &[]), []);
    let answers = raw.send(first.to_bhs(), &[], &[]);
    assert_eq!(
        answers
            .iter()
            .map(|answer| answer.word(16))
            .collect::<Vec<_>>(),
        [1, 2]
    );
}

/// "The target MUST silently ignore ... non-immediate duplicates within the range" (RFC 7143, 4.2.2.1): a retry is one.
#[test]
fn command_that_waits_for_its_turn_may_come_again() {
    let mut raw = Raw::new(&[]);
    let first = raw.command(1, 0x80, 0, &[0; 6]);
    let second = raw.command(2, 0xa0, 512, &write10(0, 1));
    assert_eq!(raw.send(second.to_bhs(), &[], &[1; 512]), []);
    assert_eq!(raw.send(second.to_bhs(), &[], &[1; 512]), []);
    let answers = raw.send(first.to_bhs(), &[], &[]);
    let tags: Vec<u32> = answers.iter().map(|answer| answer.word(16)).collect();
    assert_eq!(tags, [1, 2]);
    assert_eq!(raw.messages.begun, [1, 2]);
    // Both are duplicates now.
    assert_eq!(raw.send(second.to_bhs(), &[], &[1; 512]), []);
    raw.still_serves();
}

#[test]
fn tag_that_is_in_use_is_rejected_and_its_number_used_up() {
    let mut raw = Raw::new(&[]);
    let held = raw.command(5, 0x80, 0, &[0xff]);
    assert_eq!(raw.send(held.to_bhs(), &[], &[]), []);
    let again = raw.command(5, 0x80, 0, &[0; 6]);
    assert_rejected(&raw.send(again.to_bhs(), &[], &[]), 0x07, &again.to_bhs());
    let none = raw.command(NO_TAG, 0x80, 0, &[0; 6]);
    assert_rejected(&raw.send(none.to_bhs(), &[], &[]), 0x09, &none.to_bhs());
    raw.still_serves();
}

#[test]
fn pdus_that_no_initiator_sends_are_rejected() {
    let mut raw = Raw::new(&[]);
    for (opcode, reason) in [
        (0x43, 0x04),
        (0x21, 0x04),
        (0x3f, 0x04),
        (0x10, 0x03),
        (0x1c, 0x05),
        (0x0a, 0x05),
    ] {
        let mut header = NopOut::blank();
        header.opcode = opcode;
        header.itt = U32::new(3);
        let answers = raw.send(header.to_bhs(), &[], b"some data");
        assert_rejected(&answers, reason, &header.to_bhs());
    }
    raw.still_serves();
}

#[test]
fn data_out_for_unknown_tags_is_rejected() {
    let mut raw = Raw::new(&[]);
    let header = data_out(0x55, 0x66, 0, 0, true);
    assert_rejected(&raw.send(header, &[], &[0; 512]), 0x04, &header);
    let held = raw.command(5, 0xa0, 512, &[0xff]);
    raw.send(held.to_bhs(), &[], &[]);
    for ttt in [0x66, NO_TAG] {
        let header = data_out(5, ttt, 0, 0, true);
        assert_rejected(&raw.send(header, &[], &[0; 512]), 0x04, &header);
    }
    raw.still_serves();
}

/// Starts a write of 1,024 bytes and returns the TTT of its R2T.
fn asked_for(raw: &mut Raw) -> u32 {
    let header = raw.command(9, 0xa0, 1024, &write10(0, 2));
    let answers = raw.send(header.to_bhs(), &[], &[]);
    assert_eq!(answers[0].opcode(), 0x31);
    answers[0].word(20)
}

fn assert_check_condition(answers: &[Answer], sense: [u8; 3]) {
    let last = answers.last().unwrap();
    assert_eq!((last.opcode(), last.bhs[2], last.bhs[3]), (0x21, 0, 2));
    assert_eq!(last.data[..2], [0, 18], "SenseLength");
    assert_eq!(
        [last.data[4], last.data[14], last.data[15]],
        sense,
        "key, ASC, ASCQ"
    );
}

#[test]
fn data_out_with_a_wrong_data_sn_fails_the_command() {
    // The cases of libiscsi's iSCSIDataSn test.
    for numbers in [[0, 0].as_slice(), &[27], &[0xffff_ffff], &[1, 0]] {
        let mut raw = Raw::new(&CLOSED_BURSTS);
        let ttt = asked_for(&mut raw);
        let length = 1024 / numbers.len();
        let mut answers = Vec::new();
        for (n, &data_sn) in numbers.iter().enumerate() {
            assert_eq!(answers, [], "no response before the F bit");
            let header = data_out(9, ttt, data_sn, (n * length) as u32, n + 1 == numbers.len());
            answers = raw.send(header, &[], &vec![3; length]);
        }
        assert_check_condition(&answers, [0x0b, 0x47, 0x05]);
        assert_eq!(raw.target_end.abandoned, 1);
        assert!(
            raw.disk.iter().all(|byte| *byte == 0),
            "nothing was written"
        );
        raw.still_serves();
    }
}

#[test]
fn data_out_beyond_its_r2t_fails_the_command() {
    for (offset, length) in [(0, 1020), (512, 1024), (1024, 4), (0xffff_fc00, 1024)] {
        let mut raw = Raw::new(&CLOSED_BURSTS);
        let ttt = asked_for(&mut raw);
        let answers = raw.send(data_out(9, ttt, 0, offset, true), &[], &vec![3; length]);
        assert_check_condition(&answers, [0x0b, 0x0c, 0x0d]);
        raw.still_serves();
    }
}

#[test]
fn unsolicited_data_against_the_agreement_fails_the_command() {
    let mut raw = Raw::new(&CLOSED_BURSTS);
    let header = raw.command(9, 0xa0, 512, &write10(0, 1));
    let answers = raw.send(header.to_bhs(), &[], &[3; 512]);
    assert_check_condition(&answers, [0x0b, 0x0c, 0x0c]);
    assert_eq!(raw.messages.begun, [], "SCSI never saw it");
    raw.still_serves();
    let mut raw = Raw::new(&[("InitialR2T", "No"), ("FirstBurstLength", "512")]);
    let header = raw.command(9, 0x20, 2048, &write10(0, 4));
    assert_eq!(
        raw.send(header.to_bhs(), &[], &[3; 516]),
        [],
        "waits for the F bit"
    );
    let answers = raw.send(data_out(9, NO_TAG, 0, 516, true), &[], &[3; 512]);
    assert_check_condition(&answers, [0x0b, 0x0c, 0x0d]);
    raw.still_serves();
}

#[test]
fn early_response_waits_for_requested_data() {
    let mut raw = Raw::new(&CLOSED_BURSTS);
    let ttt = asked_for(&mut raw);
    let task = raw.target_end.connection.tasks().next().unwrap();
    raw.target_end
        .connection
        .respond(
            task,
            &Completion {
                status: 0x18,
                ..Completion::default()
            },
        )
        .unwrap();
    assert_eq!(raw.answers(), []);
    assert_eq!(raw.send(data_out(9, ttt, 0, 0, false), &[], &[3; 512]), []);
    let answers = raw.send(data_out(9, ttt, 1, 512, true), &[], &[3; 512]);
    assert_eq!((answers[0].opcode(), answers[0].bhs[3]), (0x21, 0x18));
    assert!(raw.disk.iter().all(|byte| *byte == 0));
    raw.still_serves();
}

#[test]
fn aborted_write_takes_late_data_off_the_stream() {
    let mut raw = Raw::new(&CLOSED_BURSTS);
    let ttt = asked_for(&mut raw);
    let task = raw.target_end.connection.tasks().next().unwrap();
    raw.target_end.connection.abort(task).unwrap();
    assert_eq!(raw.send(data_out(9, ttt, 0, 0, true), &[], &[3; 1024]), []);
    raw.still_serves();
    assert!(
        raw.target_end
            .connection
            .respond(task, &Completion::default())
            .is_err(),
        "a stale name finds nothing"
    );
}

/// An initiator answers all R2Ts of tasks that are being aborted (RFC 7143, 4.2.3.3), regardless of their number.
#[test]
fn writes_of_a_whole_window_can_be_aborted_before_their_data() {
    let mut raw = Raw::new(&CLOSED_BURSTS);
    let window = Limits::default().commands_per_session;
    let asked: Vec<(u32, u32)> = (0..window)
        .map(|itt| {
            let header = raw.command(itt, 0xa0, 512, &write10(0, 1));
            let r2t = raw.send(header.to_bhs(), &[], &[]).remove(0);
            (itt, r2t.word(20))
        })
        .collect();
    let tasks: Vec<_> = raw.target_end.connection.tasks().collect();
    for task in tasks {
        raw.target_end.connection.abort(task).unwrap();
    }
    for (itt, ttt) in asked {
        let header = data_out(itt, ttt, 0, 0, true);
        assert_eq!(raw.send(header, &[], &[1; 512]), [], "{itt}");
    }
    raw.still_serves();
}

fn digest_offer() -> Offer {
    Offer {
        header_digest: DigestOffer::Crc32c,
        data_digest: DigestOffer::Crc32c,
        ..small_offer()
    }
}

const DIGESTS: [(&str, &str); 4] = [
    ("HeaderDigest", "CRC32C"),
    ("DataDigest", "CRC32C"),
    ("InitialR2T", "Yes"),
    ("ImmediateData", "Yes"),
];

#[test]
fn broken_data_digest_rejects_the_pdu_and_fails_the_command() {
    let mut raw = Raw::with(digest_offer(), Limits::default(), &DIGESTS);
    let ttt = asked_for(&mut raw);
    let mut bytes = Vec::new();
    encode(
        &mut bytes,
        data_out(9, ttt, 0, 0, true),
        &[],
        &[3; 1024],
        raw.digests,
    );
    *bytes.last_mut().unwrap() ^= 1;
    let answers = raw.send_bytes(&bytes);
    assert_eq!((answers[0].opcode(), answers[0].bhs[2]), (0x3f, 0x02));
    assert_check_condition(&answers, [0x0b, 0x47, 0x05]);
    assert!(raw.disk.iter().all(|byte| *byte == 0));
    let header = raw.command(10, 0xa0, 512, &write10(0, 1));
    let mut bytes = Vec::new();
    encode(&mut bytes, header.to_bhs(), &[], &[3; 512], raw.digests);
    bytes[60] ^= 1;
    let answers = raw.send_bytes(&bytes);
    assert_eq!((answers[0].opcode(), answers[0].bhs[2]), (0x3f, 0x02));
    assert_check_condition(&answers, [0x0b, 0x47, 0x05]);
    raw.still_serves();
}

#[test]
fn broken_header_digest_or_length_ends_the_connection() {
    let mut raw = Raw::with(digest_offer(), Limits::default(), &DIGESTS);
    let header = raw.command(10, 0x80, 0, &[0; 6]);
    let mut bytes = Vec::new();
    encode(&mut bytes, header.to_bhs(), &[], &[], raw.digests);
    bytes[20] ^= 1;
    assert_eq!(raw.send_bytes(&bytes), []);
    assert!(matches!(
        raw.target_end.closed,
        Some(CloseReason::Format(_))
    ));
    let mut raw = Raw::new(&[]);
    let header = raw.command(10, 0xa0, 4096, &write10(0, 8));
    assert_eq!(
        raw.send(header.to_bhs(), &[], &[0; 1028]),
        [],
        "MaxRecvDataSegmentLength is 1,024"
    );
    assert!(matches!(
        raw.target_end.closed,
        Some(CloseReason::Format(_))
    ));
}

#[test]
fn empty_ahs_is_rejected_and_the_largest_ahs_is_taken_off() {
    let mut raw = Raw::new(&[]);
    let header = raw.command(10, 0x80, 0, &[0; 6]);
    assert_rejected(
        &raw.send(header.to_bhs(), &[0, 0, 1, 0], &[]),
        0x09,
        &header.to_bhs(),
    );
    let header = raw.command(11, 0x80, 0, &[0; 6]);
    assert_rejected(
        &raw.send(header.to_bhs(), &[0xff; 1020], &[]),
        0x09,
        &header.to_bhs(),
    );
    let header = raw.command(12, 0x80, 0, &[0xff]);
    let mut ahs = vec![0, 17, 1, 0];
    ahs.extend(100..116);
    assert_eq!(raw.send(header.to_bhs(), &ahs, &[]), []);
    let command = raw
        .target_end
        .connection
        .command(raw.target_end.held[0])
        .unwrap();
    assert_eq!(
        (command.cdb.len(), command.cdb[16], command.cdb[31]),
        (32, 100, 115)
    );
    raw.still_serves();
}

#[test]
fn bidirectional_command_has_two_residuals() {
    let mut raw = Raw::new(&CLOSED_BURSTS);
    let header = raw.command(12, 0xe0, 1024, &[0xff]);
    raw.send(header.to_bhs(), &[0, 5, 2, 0, 0, 0, 0x02, 0x00], &[]);
    let task = raw.target_end.held[0];
    raw.target_end.connection.solicit(task, 1000).unwrap();
    let r2t = raw.answers().remove(0);
    assert_eq!(r2t.word(44), 1000);
    raw.send(data_out(12, r2t.word(20), 0, 0, true), &[], &[1; 1000]);
}

#[test]
fn bidirectional_residuals_are_in_the_response() {
    let mut raw = Raw::new(&CLOSED_BURSTS);
    let header = raw.command(12, 0xe0, 1024, &[0xff]);
    raw.send(header.to_bhs(), &[0, 5, 2, 0, 0, 0, 0x02, 0x00], &[]);
    let task = raw.target_end.held[0];
    let transfer = Transfer {
        data_in: 100,
        data_out: 4096,
    };
    raw.target_end.sending.insert(900, vec![5; 100]);
    let status = Then::Status {
        status: 0,
        transfer,
    };
    raw.target_end
        .connection
        .data_in(task, 900, 0, &[5; 100], status)
        .unwrap();
    let answers = raw.answers();
    assert_eq!((answers[0].opcode(), answers[0].bhs[1]), (0x25, 0x80));
    // Flags F, u, O; 412 bytes too few read, 3,072 too many written.
    assert_eq!((answers[1].opcode(), answers[1].bhs[1]), (0x21, 0x8c));
    assert_eq!(
        (
            answers[1].word(36),
            answers[1].word(40),
            answers[1].word(44)
        ),
        (1, 412, 3072)
    );
}

#[test]
fn data_pdus_in_any_order_and_sequences_in_any_order_where_agreed() {
    let mut raw = Raw::new(&[
        ("InitialR2T", "Yes"),
        ("ImmediateData", "No"),
        ("MaxBurstLength", "1024"),
        ("MaxOutstandingR2T", "2"),
        ("DataPDUInOrder", "No"),
        ("DataSequenceInOrder", "No"),
    ]);
    let header = raw.command(9, 0xa0, 2048, &write10(0, 4));
    let r2ts = raw.send(header.to_bhs(), &[], &[]);
    let (first, second) = (r2ts[0].word(20), r2ts[1].word(20));
    assert_eq!(
        raw.send(data_out(9, second, 0, 1536, false), &[], &[4; 512]),
        []
    );
    assert_eq!(
        raw.send(data_out(9, second, 1, 1024, true), &[], &[3; 512]),
        []
    );
    assert_eq!(
        raw.send(data_out(9, first, 0, 512, false), &[], &[2; 512]),
        []
    );
    let answers = raw.send(data_out(9, first, 1, 0, true), &[], &[1; 512]);
    assert_eq!((answers[0].opcode(), answers[0].bhs[3]), (0x21, 0));
    let expected: Vec<u8> = (1..=4).flat_map(|n| [n; 512]).collect();
    assert_eq!(raw.disk[..2048], expected);
}

#[test]
fn task_aborted_in_the_middle_of_its_data_leaves_the_stream_whole() {
    let mut raw = Raw::new(&CLOSED_BURSTS);
    let ttt = asked_for(&mut raw);
    let mut bytes = Vec::new();
    encode(
        &mut bytes,
        data_out(9, ttt, 0, 0, true),
        &[],
        &[3; 1024],
        raw.digests,
    );
    let (first, second) = bytes.split_at(500);
    assert_eq!(raw.send_bytes(first), []);
    let task = raw.target_end.connection.tasks().next().unwrap();
    raw.target_end.connection.abort(task).unwrap();
    raw.target_end.buffers.remove(&task);
    assert_eq!(raw.send_bytes(second), []);
    assert!(raw.disk.iter().all(|byte| *byte == 0));
    raw.still_serves();
}

#[test]
fn write_is_not_complete_before_its_last_byte_is_in_place() {
    let mut raw = Raw::new(&[
        ("InitialR2T", "No"),
        ("FirstBurstLength", "1024"),
        ("MaxConnections", "2"),
    ]);
    // The command's CmdSN turn comes while its unsolicited data is being received.
    let write = {
        raw.cmd_sn = 2;
        raw.command(9, 0x20, 1024, &write10(0, 2))
    };
    assert_eq!(raw.send(write.to_bhs(), &[], &[7; 512]), []);
    let mut bytes = Vec::new();
    encode(
        &mut bytes,
        data_out(9, NO_TAG, 0, 512, true),
        &[],
        &[8; 512],
        raw.digests,
    );
    let (first, second) = bytes.split_at(300);
    assert_eq!(raw.send_bytes(first), []);
    let mut other = raw.join(1);
    other.still_serves();
    assert_eq!(other.messages.wake, [0]);
    assert_eq!(raw.send_bytes(&[]), [], "begun, not written");
    assert_eq!(raw.messages.begun, [2]);
    let answers = raw.send_bytes(second);
    assert_eq!((answers[0].opcode(), answers[0].bhs[3]), (0x21, 0));
    assert_eq!(raw.disk[..1024], [[7; 512], [8; 512]].concat());
}
