//! The full feature phase, PDU by PDU: what a target answers to what an initiator may, and may not, send.

mod common;

use std::sync::Arc;

use common::{Door, INITIATOR, Messages, Policy, TARGET, read10, small_offer, write10};
use iscsi::Limits;
use iscsi::negotiation::{DigestOffer, Offer};
use iscsi::pdu::{
    AsyncEvent, Bhs, DataOut, Digests, LogoutRequest, NO_TAG, NopOut, ScsiCommand,
    TaskManagementRequest, TextRequest, crc32c, encode,
};
use iscsi::target::{CloseReason, Completion, Then, Transfer};
use iscsi::text::push_pair;
use proptest::prelude::*;
use zerocopy::big_endian::U32;

/// A logged-in connection that is spoken to in bytes.
struct Raw {
    door: Door,
    disk: Vec<u8>,
    messages: Messages,
    digests: Digests,
    cmd_sn: u32,
    policy: Arc<Policy>,
}

/// One PDU of the target.
#[derive(Debug, PartialEq)]
struct Answer {
    bhs: [u8; 48],
    data: Vec<u8>,
}

impl Answer {
    fn opcode(&self) -> u8 {
        self.bhs[0]
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.bhs[at..at + 4].try_into().unwrap())
    }
}

impl Raw {
    fn with(offer: Offer, limits: Limits, keys: &[(&str, &str)]) -> Self {
        let policy = Arc::new(Policy::open(offer));
        let mut raw = Raw {
            door: Door::new(policy.clone(), limits),
            disk: vec![0; 256 * 512],
            messages: Messages::default(),
            digests: Digests::default(),
            cmd_sn: 1,
            policy,
        };
        raw.log_in(0, 0, keys);
        raw
    }

    fn new(keys: &[(&str, &str)]) -> Self {
        Raw::with(small_offer(), Limits::default(), keys)
    }

    fn log_in(&mut self, tsih: u16, cid: u16, keys: &[(&str, &str)]) {
        let mut request = iscsi::pdu::LoginRequest::blank();
        request.opcode = 0x43;
        request.flags = 0x87;
        request.isid = [0x80, 0, 0, 0, 0, 1];
        request.tsih.set(tsih);
        request.cid.set(cid);
        request.cmd_sn.set(1);
        let mut text = Vec::new();
        push_pair(&mut text, "InitiatorName", INITIATOR);
        push_pair(&mut text, "TargetName", TARGET);
        for (key, value) in keys {
            push_pair(&mut text, key, value);
        }
        let answers = self.send(request.to_bhs(), &[], &text);
        assert_eq!(
            (answers[0].opcode(), answers[0].word(36) >> 16),
            (0x23, 0),
            "{:?}",
            self.door.closed
        );
        self.digests = self.door.connection.digests();
    }

    /// A further connection of the same session.
    fn join(&self, cid: u16) -> Raw {
        let mut raw = Raw {
            door: Door::new(self.policy.clone(), Limits::default()),
            disk: vec![0; 256 * 512],
            messages: Messages::default(),
            digests: Digests::default(),
            cmd_sn: 1,
            policy: self.policy.clone(),
        };
        raw.log_in(self.door.connection.key().unwrap().tsih, cid, &[]);
        raw
    }

    fn send_bytes(&mut self, bytes: &[u8]) -> Vec<Answer> {
        self.door.feed(bytes, &mut self.disk, &mut self.messages);
        self.answers()
    }

    fn answers(&mut self) -> Vec<Answer> {
        let bytes = self.door.take_bytes();
        let mut left = &bytes[..];
        let mut answers = Vec::new();
        while !left.is_empty() {
            let bhs: [u8; 48] = left[..48].try_into().unwrap();
            assert_eq!(bhs[4], 0, "no additional headers");
            let length = u32::from_be_bytes([0, bhs[5], bhs[6], bhs[7]]) as usize;
            let mut at = 48;
            if self.digests.header {
                assert_eq!(left[48..52], crc32c(&left[..48]).to_le_bytes());
                at = 52;
            }
            let data = left[at..at + length].to_vec();
            let padded = length.next_multiple_of(4);
            if self.digests.data && length > 0 {
                assert_eq!(
                    left[at + padded..at + padded + 4],
                    crc32c(&left[at..at + padded]).to_le_bytes()
                );
                at += 4;
            }
            left = &left[at + padded..];
            answers.push(Answer { bhs, data });
        }
        answers
    }

    fn send(&mut self, header: Bhs, ahs: &[u8], data: &[u8]) -> Vec<Answer> {
        let mut bytes = Vec::new();
        encode(&mut bytes, header, ahs, data, self.digests);
        self.send_bytes(&bytes)
    }

    fn command(&mut self, itt: u32, flags: u8, expected: u32, cdb: &[u8]) -> ScsiCommand {
        let mut header = ScsiCommand::blank();
        header.flags = flags;
        header.itt = U32::new(itt);
        header.expected_length = U32::new(expected);
        header.cmd_sn = U32::new(self.cmd_sn);
        header.cdb[..cdb.len()].copy_from_slice(cdb);
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        header
    }

    fn test_unit_ready(&mut self, itt: u32) -> Vec<Answer> {
        let header = self.command(itt, 0x80, 0, &[0; 6]);
        self.send(header.to_bhs(), &[], &[])
    }

    /// The connection serves on.
    fn still_serves(&mut self) {
        let answers = self.test_unit_ready(0xabcd);
        assert_eq!(answers.len(), 1, "{:?}", self.door.closed);
        assert_eq!((answers[0].opcode(), answers[0].bhs[3]), (0x21, 0));
    }
}

fn data_out(itt: u32, ttt: u32, data_sn: u32, offset: u32, is_final: bool) -> Bhs {
    let mut header = DataOut::blank();
    header.flags = if is_final { 0x80 } else { 0 };
    header.itt = U32::new(itt);
    header.ttt = U32::new(ttt);
    header.data_sn = U32::new(data_sn);
    header.buffer_offset = U32::new(offset);
    header.to_bhs()
}

fn assert_rejected(answers: &[Answer], reason: u8, header: &Bhs) {
    assert_eq!(answers.len(), 1, "{answers:?}");
    assert_eq!(
        (answers[0].opcode(), answers[0].bhs[1], answers[0].bhs[2]),
        (0x3f, 0x80, reason)
    );
    assert_eq!(answers[0].word(16), 0xffff_ffff);
    // the lengths of what was sent are set by the encoder
    assert_eq!(answers[0].data[..4], header.bytes()[..4]);
    assert_eq!(answers[0].data[8..48], header.bytes()[8..48]);
}

const CLOSED_BURSTS: [(&str, &str); 2] = [("InitialR2T", "Yes"), ("ImmediateData", "No")];

#[test]
fn read_rides_its_status_on_the_last_data_in() {
    let mut raw = Raw::new(&[("MaxRecvDataSegmentLength", "1024")]);
    raw.disk[512..2048].copy_from_slice(&[7; 1536]);
    let header = raw.command(0x0102_0304, 0xc0, 1536, &read10(1, 3));
    let answers = raw.send(header.to_bhs(), &[], &[]);
    // 512 and 1,024 bytes, for the door gives its data in two pieces
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
fn write_without_unsolicited_data_is_asked_for_by_r2ts() {
    let mut raw = Raw::new(&[
        ("InitialR2T", "Yes"),
        ("ImmediateData", "No"),
        ("MaxBurstLength", "1024"),
    ]);
    let header = raw.command(9, 0xa0, 1536, &write10(0, 3));
    let answers = raw.send(header.to_bhs(), &[], &[]);
    assert_eq!(
        answers.len(),
        1,
        "MaxOutstandingR2T is 1 when nothing is said"
    );
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
        (0x21, 0, 2),
        "ExpDataSN counts the R2Ts"
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

/// A write of 1,024 bytes that is asked for; gives the TTT.
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
    // the cases of libiscsi's iSCSIDataSn test
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
        assert_eq!(raw.door.abandoned, 1);
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
fn early_response_waits_for_the_data_that_was_asked_for() {
    let mut raw = Raw::new(&CLOSED_BURSTS);
    let ttt = asked_for(&mut raw);
    let task = raw.door.connection.tasks().next().unwrap();
    raw.door
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
    let task = raw.door.connection.tasks().next().unwrap();
    raw.door.connection.abort(task).unwrap();
    assert_eq!(raw.send(data_out(9, ttt, 0, 0, true), &[], &[3; 1024]), []);
    raw.still_serves();
    assert!(
        raw.door
            .connection
            .respond(task, &Completion::default())
            .is_err(),
        "a stale name finds nothing"
    );
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
    assert!(matches!(raw.door.closed, Some(CloseReason::Format(_))));
    let mut raw = Raw::new(&[]);
    let header = raw.command(10, 0xa0, 4096, &write10(0, 8));
    assert_eq!(
        raw.send(header.to_bhs(), &[], &[0; 1028]),
        [],
        "MaxRecvDataSegmentLength is 1,024"
    );
    assert!(matches!(raw.door.closed, Some(CloseReason::Format(_))));
}

#[test]
fn additional_headers_of_length_zero_are_rejected_and_of_the_largest_length_taken_off() {
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
    let command = raw.door.connection.command(raw.door.held[0]).unwrap();
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
    let task = raw.door.held[0];
    raw.door.connection.solicit(task, 1000).unwrap();
    let r2t = raw.answers().remove(0);
    assert_eq!(r2t.word(44), 1000);
    raw.send(data_out(12, r2t.word(20), 0, 0, true), &[], &[1; 1000]);
}

#[test]
fn bidirectional_residuals_are_told_in_the_response() {
    let mut raw = Raw::new(&CLOSED_BURSTS);
    let header = raw.command(12, 0xe0, 1024, &[0xff]);
    raw.send(header.to_bhs(), &[0, 5, 2, 0, 0, 0, 0x02, 0x00], &[]);
    let task = raw.door.held[0];
    let transfer = Transfer {
        data_in: 100,
        data_out: 4096,
    };
    raw.door.sending.insert(900, vec![5; 100]);
    let status = Then::Status {
        status: 0,
        transfer,
    };
    raw.door
        .connection
        .data_in(task, 900, 0, &[5; 100], status)
        .unwrap();
    let answers = raw.answers();
    assert_eq!((answers[0].opcode(), answers[0].bhs[1]), (0x25, 0x80));
    // F, u, O; 412 bytes too few read, 3,072 too many written
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
fn nop_out_comes_back_with_its_data_and_pings_are_answered() {
    let mut raw = Raw::new(&[]);
    let mut header = NopOut::idle();
    header.opcode = 0x40;
    header.itt = U32::new(0x77);
    header.cmd_sn = U32::new(1);
    let answers = raw.send(header.to_bhs(), &[], b"nopping\0");
    assert_eq!(
        (answers[0].opcode(), answers[0].bhs[1], answers[0].word(16)),
        (0x20, 0x80, 0x77)
    );
    assert_eq!(
        (answers[0].word(20), answers[0].data.as_slice()),
        (0xffff_ffff, b"nopping\0".as_slice())
    );
    let stat_sn = answers[0].word(24);
    assert!(raw.door.connection.ping());
    let ping = raw.answers().remove(0);
    assert_eq!(
        (ping.opcode(), ping.word(16), ping.word(24)),
        (0x20, 0xffff_ffff, stat_sn + 1)
    );
    assert_eq!(raw.door.connection.pings_outstanding(), 1);
    let mut pong = NopOut::idle();
    pong.opcode = 0x40;
    pong.ttt = U32::new(ping.word(20));
    assert_eq!(raw.send(pong.to_bhs(), &[], &[]), []);
    assert_eq!(raw.door.connection.pings_outstanding(), 0);
    assert_eq!(
        raw.test_unit_ready(1)[0].word(24),
        stat_sn + 1,
        "a ping uses no StatSN up"
    );
    for _ in 0..Limits::default().outstanding_pings {
        assert!(raw.door.connection.ping());
    }
    assert!(!raw.door.connection.ping());
}

fn text_request(itt: u32, ttt: u32, flags: u8) -> Bhs {
    let mut header = TextRequest::blank();
    header.opcode = 0x44;
    header.flags = flags;
    header.itt = U32::new(itt);
    header.ttt = U32::new(ttt);
    header.to_bhs()
}

#[test]
fn send_targets_in_a_normal_session_tells_of_its_own_target() {
    let mut raw = Raw::new(&[]);
    for text in [b"SendTargets=All\0".as_slice(), b"SendTargets=\0"] {
        let answers = raw.send(text_request(8, NO_TAG, 0x80), &[], text);
        assert_eq!(
            (answers[0].opcode(), answers[0].bhs[1], answers[0].word(20)),
            (0x24, 0x80, 0xffff_ffff)
        );
        assert!(
            answers[0]
                .data
                .starts_with(b"TargetName=iqn.2026-11.org.example:t0\0TargetAddress=")
        );
    }
}

#[test]
fn text_of_which_nothing_is_understood_is_rejected() {
    let mut raw = Raw::new(&[]);
    // the cases of libiscsi's iSCSISendTargets test, and some of our own
    for text in [
        "SendTargetsPlease=All\0",
        "SendTargets=Alle\0",
        "SendTargets=A\0",
        "sENDtARGETS=aLL\0",
        "no pair at all\0",
    ] {
        let header = text_request(8, NO_TAG, 0x80);
        assert_rejected(&raw.send(header, &[], text.as_bytes()), 0x04, &header);
    }
    let answers = raw.send(
        text_request(8, NO_TAG, 0x80),
        &[],
        b"X-org.example.a=1\0MaxBurstLength=512\0",
    );
    assert_eq!(
        answers[0].data,
        b"X-org.example.a=NotUnderstood\0MaxBurstLength=Reject\0"
    );
    raw.still_serves();
}

#[test]
fn long_text_is_cut_and_continued_in_both_directions() {
    let mut raw = Raw::new(&[("MaxRecvDataSegmentLength", "512")]);
    let answers = raw.send(text_request(8, NO_TAG, 0x40), &[], b"SendTar");
    assert_eq!((answers[0].bhs[1], answers[0].data.len()), (0, 0));
    let ttt = answers[0].word(20);
    assert_ne!(ttt, NO_TAG);
    let wrong = text_request(9, ttt, 0x80);
    let answers = raw.send(text_request(8, ttt, 0x80), &[], b"gets=All\0");
    assert_eq!(answers[0].bhs[1], 0x80);
    assert!(answers[0].data.starts_with(b"TargetName="));
    assert_rejected(&raw.send(wrong, &[], &[]), 0x04, &wrong);
}

#[test]
fn declared_segment_length_holds_from_then_on() {
    let mut raw = Raw::new(&[]);
    let answers = raw.send(
        text_request(8, NO_TAG, 0x80),
        &[],
        b"MaxRecvDataSegmentLength=512\0",
    );
    assert_eq!((answers[0].opcode(), answers[0].data.len()), (0x24, 0));
    let header = raw.command(9, 0xc0, 2048, &read10(0, 4));
    assert!(
        raw.send(header.to_bhs(), &[], &[])
            .iter()
            .all(|answer| answer.data.len() <= 512)
    );
}

fn function(code: u8, itt: u32, referenced: u32, cmd_sn: u32, ref_cmd_sn: u32) -> Bhs {
    let mut header = TaskManagementRequest::blank();
    header.opcode = 0x42;
    header.flags = 0x80 | code;
    header.itt = U32::new(itt);
    header.referenced_task_tag = U32::new(referenced);
    header.cmd_sn = U32::new(cmd_sn);
    header.ref_cmd_sn = U32::new(ref_cmd_sn);
    header.to_bhs()
}

/// Sends a function; gives the response code.
fn manage(raw: &mut Raw, header: Bhs) -> u8 {
    let answers = raw.send(header, &[], &[]);
    assert_eq!(
        (answers.len(), answers[0].opcode(), answers[0].word(16)),
        (1, 0x22, header.itt.get())
    );
    answers[0].bhs[2]
}

#[test]
fn abort_task_finds_the_task_or_says_what_became_of_it() {
    let mut raw = Raw::new(&[]);
    let held = raw.command(5, 0x80, 0, &[0xff]);
    raw.send(held.to_bhs(), &[], &[]);
    assert_eq!(manage(&mut raw, function(1, 6, 5, 2, 1)), 0);
    assert_eq!(raw.messages.functions.len(), 1);
    assert_eq!(raw.door.connection.tasks().count(), 0);
    // gone, and its number long past: it does not exist
    assert_eq!(manage(&mut raw, function(1, 7, 5, 2, 1)), 1);
    // number 2 is on its way: counts as received, and is ignored when it comes
    assert_eq!(manage(&mut raw, function(1, 8, 99, 3, 2)), 0);
    let late = raw.command(99, 0x80, 0, &[0; 6]);
    assert_eq!(raw.send(late.to_bhs(), &[], &[]), []);
    assert_eq!(raw.messages.functions.len(), 1, "SCSI was asked once");
    raw.still_serves();
}

#[test]
fn abort_task_takes_back_a_command_whose_turn_has_not_come() {
    let mut raw = Raw::new(&[]);
    let first = raw.command(1, 0x80, 0, &[0; 6]);
    let second = raw.command(2, 0xa0, 512, &write10(0, 1));
    raw.send(second.to_bhs(), &[], &[1; 512]);
    assert_eq!(manage(&mut raw, function(1, 8, 2, 3, 2)), 0);
    assert_eq!(raw.door.abandoned, 1, "its immediate data had been placed");
    assert_eq!(raw.send(first.to_bhs(), &[], &[]).len(), 1);
    assert_eq!(raw.messages.begun, [1]);
    raw.still_serves();
}

#[test]
fn task_management_functions_that_are_not_there_say_so() {
    let mut raw = Raw::new(&[]);
    assert_eq!(
        manage(&mut raw, function(8, 6, 5, 1, 0)),
        4,
        "TASK REASSIGN"
    );
    assert_eq!(manage(&mut raw, function(13, 6, 5, 1, 0)), 5);
    assert_eq!(
        manage(&mut raw, function(9, 6, 5, 1, 0)),
        5,
        "QUERY TASK needs iSCSIProtocolLevel 2"
    );
    assert_eq!(
        manage(&mut raw, function(5, 6, NO_TAG, 1, 0)),
        0,
        "LOGICAL UNIT RESET"
    );
    let mut raw = Raw::new(&[("iSCSIProtocolLevel", "2")]);
    assert_eq!(
        manage(&mut raw, function(9, 6, 5, 1, 0)),
        0,
        "QUERY TASK finds no task"
    );
    assert_eq!(
        manage(&mut raw, function(11, 6, 5, 1, 0)),
        0,
        "I_T NEXUS RESET"
    );
    assert_eq!(raw.messages.functions.len(), 1);
}

fn logout(reason: u8, cid: u16) -> Bhs {
    let mut header = LogoutRequest::blank();
    header.opcode = 0x46;
    header.flags = 0x80 | reason;
    header.itt = U32::new(0x10);
    header.cid.set(cid);
    header.to_bhs()
}

#[test]
fn logout_for_every_reason() {
    let mut raw = Raw::new(&[]);
    for (reason, cid, response) in [(1, 7, 1), (2, 0, 2)] {
        let answers = raw.send(logout(reason, cid), &[], &[]);
        assert_eq!(
            (answers[0].opcode(), answers[0].bhs[2], answers[0].word(40)),
            (0x26, response, 0x0002_0014)
        );
        assert_eq!(raw.door.closed, None);
    }
    let header = logout(3, 0);
    assert_rejected(&raw.send(header, &[], &[]), 0x09, &header);
    let answers = raw.send(logout(0, 0), &[], &[]);
    assert_eq!((answers[0].opcode(), answers[0].bhs[2]), (0x26, 0));
    assert_eq!(
        raw.door.closed,
        Some(CloseReason::LoggedOut {
            whole_session: true
        })
    );
    assert_eq!(raw.door.connection.close().drop, []);
    assert!(raw.policy.table.sessions().is_empty());
}

#[test]
fn connection_logs_out_itself_or_another_and_the_session_goes_on() {
    let mut first = Raw::new(&[("MaxConnections", "3")]);
    let mut second = first.join(1);
    let mut third = first.join(2);
    second.send(logout(1, 1), &[], &[]);
    assert_eq!(
        second.door.closed,
        Some(CloseReason::LoggedOut {
            whole_session: false
        })
    );
    assert_eq!(second.door.connection.close().drop, []);
    first.send(logout(1, 2), &[], &[]);
    assert_eq!(first.messages.drop, [third.door.connection.key().unwrap()]);
    first.still_serves();
    // lost without a logout: at error recovery level 0 the session ends
    assert_eq!(
        third.door.connection.close().drop,
        [first.door.connection.key().unwrap()]
    );
    first.send_bytes(&[]);
    assert_eq!(first.door.closed, Some(CloseReason::SessionGone));
}

#[test]
fn connection_that_logs_out_gives_its_commands_back_to_the_window() {
    let mut first = Raw::new(&[("MaxConnections", "2")]);
    let mut second = first.join(1);
    for itt in 0..10 {
        second.cmd_sn = 1 + itt;
        let header = second.command(itt, 0x80, 0, &[0xff]);
        second.send(header.to_bhs(), &[], &[]);
    }
    // one waits here for a turn that will never come, another there for the turn after it
    second.cmd_sn = 12;
    let header = second.command(11, 0x80, 0, &[0xff]);
    second.send(header.to_bhs(), &[], &[]);
    first.cmd_sn = 13;
    assert_eq!(first.test_unit_ready(1), []);
    second.send(logout(1, 1), &[], &[]);
    let closed = second.door.connection.close();
    assert_eq!(
        (closed.drop.len(), closed.wake.len()),
        (0, 0),
        "number 11 is still missing"
    );
    first.cmd_sn = 11;
    let answers = first.test_unit_ready(2);
    assert_eq!(
        answers
            .iter()
            .map(|answer| answer.word(16))
            .collect::<Vec<_>>(),
        [2, 1]
    );
    let last = &answers[1];
    assert_eq!(
        last.word(32).wrapping_sub(last.word(28)),
        Limits::default().commands_per_session - 1
    );
}

#[test]
fn task_management_waits_for_commands_under_way_on_other_connections() {
    let mut first = Raw::new(&[("MaxConnections", "2")]);
    let mut second = first.join(1);
    assert_eq!(second.send(function(5, 6, NO_TAG, 2, 0), &[], &[]), []);
    first.still_serves();
    assert_eq!(first.messages.wake, [1]);
    assert_eq!(second.send_bytes(&[])[0].opcode(), 0x22);
}

#[test]
fn immediate_commands_are_bounded() {
    let mut raw = Raw::new(&[]);
    let bound = Limits::default().immediate_commands;
    for itt in 0..=bound {
        let mut header = raw.command(itt, 0x80, 0, &[0xff]);
        header.opcode |= 0x40;
        raw.cmd_sn = 1;
        let answers = raw.send(header.to_bhs(), &[], &[]);
        if itt == bound {
            assert_rejected(&answers, 0x06, &header.to_bhs());
        } else {
            assert_eq!(answers, []);
        }
    }
    raw.still_serves();
}

#[test]
fn held_commands_close_the_window_and_answers_open_it() {
    let limits = Limits::default();
    let mut raw = Raw::new(&[]);
    for itt in 0..limits.commands_per_session {
        let header = raw.command(itt, 0x80, 0, &[0xff]);
        assert_eq!(raw.send(header.to_bhs(), &[], &[]), []);
    }
    assert_eq!(raw.test_unit_ready(0xffff), [], "beyond MaxCmdSN");
    raw.cmd_sn -= 1;
    let task = raw.door.held[7];
    raw.door
        .connection
        .respond(task, &Completion::default())
        .unwrap();
    let answer = raw.answers().remove(0);
    assert_eq!(
        (answer.word(28), answer.word(32)),
        (raw.cmd_sn, raw.cmd_sn),
        "ExpCmdSN and MaxCmdSN: one more"
    );
    raw.still_serves();
}

#[test]
fn asynchronous_message_asks_for_logout() {
    let mut raw = Raw::new(&[]);
    raw.door.connection.request_logout(30).unwrap();
    let answer = raw.answers().remove(0);
    assert_eq!(
        (answer.opcode(), answer.bhs[36], answer.word(16)),
        (0x32, 1, 0xffff_ffff)
    );
    assert_eq!(answer.bhs[38..44], [0, 0, 0, 0, 0, 30], "Parameter1 to 3");
    raw.door
        .connection
        .async_message(AsyncEvent::TasksTerminated, [1; 8], [0; 3], &[])
        .unwrap();
    assert_eq!(raw.answers()[0].word(24), answer.word(24) + 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_after_login_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let mut raw = Raw::new(&[("InitialR2T", "No")]);
        raw.door.feed(&bytes, &mut raw.disk, &mut raw.messages);
    }

    /// PDUs with plausible headers and hostile fields; another connection of the target is not touched by any.
    #[test]
    fn hostile_pdus_never_panic_and_never_stop_another_session(
        pdus in prop::collection::vec(
            (
                prop::sample::select(vec![0x00u8, 0x40, 0x01, 0x41, 0x02, 0x42, 0x04, 0x44, 0x05, 0x10, 0x46, 0x03]),
                any::<u8>(), 0u32..4, 0u32..6, prop_oneof![Just(NO_TAG), any::<u32>(), 0u32..4],
                prop::collection::vec(any::<u8>(), 0..64), 0usize..3, any::<u32>(),
            ),
            0..60,
        ),
    ) {
        let mut raw = Raw::new(&[("InitialR2T", "No")]);
        for (opcode, flags, itt, cmd_sn, ttt, data, ahs, word) in pdus {
            let mut header = ScsiCommand::blank();
            header.opcode = opcode;
            // a logout would only end the test early
            header.flags = if opcode == 0x46 { 0x87 } else { flags };
            header.itt = U32::new(itt);
            header.expected_length = U32::new(if opcode & 0x3f == 1 { word % 4096 } else { ttt });
            header.cmd_sn = U32::new(raw.cmd_sn.wrapping_add(cmd_sn).wrapping_sub(2));
            // in a task management function: RefCmdSN; in a Data-Out: DataSN and offset; in a command: the CDB
            header.cdb = [0; 16];
            header.cdb[0] = [0xff, 0x28, 0x2a, 0x00][word as usize >> 4 & 3];
            header.cdb[4..12].copy_from_slice(&[0, 0, 0, 0, (word >> 8) as u8 & 3, 0, (word >> 16) as u8 & 7, 0]);
            let mut bytes = Vec::new();
            encode(&mut bytes, header.to_bhs(), &[0, 5, 2, 0, 0, 0, 1, 0][..ahs.min(1) * 8], &data, Digests::default());
            raw.door.feed(&bytes, &mut raw.disk, &mut raw.messages);
            if raw.door.closed.is_some() { break; }
            if let Some(task) = raw.door.held.pop().filter(|_| word & 1 == 0) {
                // whatever its data does, the answer is taken once
                prop_assert!(raw.door.connection.respond(task, &Completion::default()).is_ok() || raw.door.abandoned > 0 );
            }
            raw.cmd_sn = raw.door.connection.session().unwrap().window.exp_cmd_sn();
        }
        raw.door.take_bytes();
        let mut other = Raw::new(&[]);
        other.still_serves();
    }
}
