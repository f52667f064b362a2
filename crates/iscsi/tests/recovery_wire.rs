//! SNACK Request and TASK REASSIGN on the wire (RFC 7143, 11.16 and 11.5): the target's answers byte by byte.

mod common;

use common::raw::{Answer, Raw};
use common::{read10, small_offer};
use iscsi::Limits;
use iscsi::pdu::{NopOut, ScsiCommand};
use iscsi::target::DetachedState;
use zerocopy::big_endian::U32;

fn logged_in(level: u8) -> Raw {
    let mut offer = small_offer();
    offer.session.error_recovery_level = level;
    offer.session.max_connections = 2;
    let level = level.to_string();
    let keys = [
        ("ErrorRecoveryLevel", level.as_str()),
        ("MaxConnections", "2"),
        ("MaxRecvDataSegmentLength", "512"),
    ];
    Raw::with(offer, Limits::default(), &keys)
}

/// A SNACK Request: 10h, F and its type, no data, LUN, ITT, no tag, ExpStatSN, BegRun, RunLength.
fn snack(kind: u8, itt: u32, exp_stat_sn: u32, begin: u32, length: u32) -> [u8; 48] {
    let mut bytes = [0; 48];
    (bytes[0], bytes[1]) = (0x10, 0x80 | kind);
    bytes[16..20].copy_from_slice(&itt.to_be_bytes());
    bytes[20..24].copy_from_slice(&[0xff; 4]);
    bytes[28..32].copy_from_slice(&exp_stat_sn.to_be_bytes());
    bytes[40..44].copy_from_slice(&begin.to_be_bytes());
    bytes[44..48].copy_from_slice(&length.to_be_bytes());
    bytes
}

/// TASK REASSIGN for immediate delivery: 42h, F and 8, LUN, ITT, RefTag, CmdSN.
fn reassign(itt: u32, referenced: u32, cmd_sn: u32) -> [u8; 48] {
    let mut bytes = [0; 48];
    (bytes[0], bytes[1]) = (0x42, 0x88);
    bytes[16..20].copy_from_slice(&itt.to_be_bytes());
    bytes[20..24].copy_from_slice(&referenced.to_be_bytes());
    bytes[24..28].copy_from_slice(&cmd_sn.to_be_bytes());
    bytes
}

fn command(raw: &mut Raw, itt: u32, cdb: &[u8], read: u32) -> Vec<Answer> {
    let mut header = ScsiCommand::blank();
    header.flags |= if read > 0 { 0x40 } else { 0 };
    header.itt = U32::new(itt);
    header.expected_length = U32::new(read);
    header.cmd_sn = U32::new(raw.cmd_sn);
    header.cdb[..cdb.len()].copy_from_slice(cdb);
    raw.cmd_sn += 1;
    raw.send(header.to_bhs(), &[], &[])
}

/// Returns opcode, ITT, DataSN or StatSN, and the data.
fn fields(answer: &Answer, at: usize) -> (u8, u32, u32, Vec<u8>) {
    let data = answer.data.clone();
    (answer.opcode(), answer.word(16), answer.word(at), data)
}

#[test]
fn snack_retransmits_data_and_response_until_acknowledged() {
    let mut raw = logged_in(1);
    let answers = command(&mut raw, 7, &read10(1, 4), 2048);
    let opcodes: Vec<u8> = answers.iter().map(Answer::opcode).collect();
    assert_eq!(
        opcodes,
        [0x25, 0x25, 0x25, 0x25, 0x25, 0x21],
        "the status comes by itself"
    );
    let stat_sn = answers[5].word(24);
    // One Data-In PDU, then a run up to the last one.
    let again = raw.send_bytes(&snack(0, 7, stat_sn, 2, 1));
    assert_eq!(again.len(), 1);
    assert_eq!(fields(&again[0], 36), fields(&answers[2], 36));
    let again = raw.send_bytes(&snack(0, 7, stat_sn, 1, 0));
    let numbers: Vec<u32> = again.iter().map(|answer| answer.word(36)).collect();
    assert_eq!(numbers, [1, 2, 3, 4]);
    let again = raw.send_bytes(&snack(1, 0xffff_ffff, stat_sn, stat_sn, 1));
    assert_eq!(again.len(), 1);
    assert_eq!(fields(&again[0], 24), fields(&answers[5], 24));
    // A PDU that was never sent; an ITT where the reserved tag is required; a DataACK that was not requested.
    for refused in [
        snack(0, 7, stat_sn, 5, 1),
        snack(0, 8, stat_sn, 0, 1),
        snack(1, 7, stat_sn, stat_sn, 1),
        snack(2, 7, stat_sn, 2, 0),
    ] {
        let answers = raw.send_bytes(&refused);
        assert_eq!((answers[0].opcode(), answers[0].bhs[2]), (0x3f, 0x03));
        assert_eq!(answers[0].data, refused);
    }
    // The response is dropped once acknowledged.
    let mut nop = NopOut::idle();
    nop.opcode |= 0x40;
    nop.exp_stat_sn = U32::new(stat_sn + 1);
    nop.cmd_sn = U32::new(raw.cmd_sn);
    raw.send(nop.to_bhs(), &[], &[]);
    let answers = raw.send_bytes(&snack(0, 7, stat_sn + 1, 2, 1));
    assert_eq!((answers[0].opcode(), answers[0].bhs[2]), (0x3f, 0x03));
}

/// The output for many SNACKs received at once is limited to about the size of the store.
#[test]
fn concurrent_snacks_have_bounded_answers() {
    let mut offer = small_offer();
    offer.session.error_recovery_level = 1;
    let limits = Limits {
        retransmission_bytes: 64 << 10,
        ..Limits::default()
    };
    let mut raw = Raw::with(offer, limits, &[("ErrorRecoveryLevel", "1")]);
    let answers = command(&mut raw, 7, &read10(0, 100), 51_200);
    let stat_sn = answers[answers.len() - 1].word(24);
    let snacks = snack(0, 7, stat_sn, 0, 0).repeat(100);
    raw.target_end
        .feed(&snacks, &mut raw.disk, &mut raw.messages);
    let queued = raw.target_end.connection.outgoing().len();
    assert!((64 << 10..256 << 10).contains(&queued), "{queued}");
}

#[test]
fn level_0_retransmits_nothing() {
    let mut raw = logged_in(0);
    let answers = command(&mut raw, 7, &read10(1, 4), 2048);
    assert_eq!(answers.len(), 5, "the status rides on the last data");
    let stat_sn = answers[4].word(24);
    let answers = raw.send_bytes(&snack(0, 7, stat_sn, 2, 1));
    assert_eq!((answers[0].opcode(), answers[0].bhs[2]), (0x3f, 0x03));
}

/// Returns the response code of a task management function (11.6.1).
fn response(answers: &[Answer]) -> u8 {
    assert_eq!(answers[0].opcode(), 0x22);
    answers[0].bhs[2]
}

#[test]
fn task_reassign_response_depends_on_the_task_state() {
    for (level, answer) in [(0, 4), (1, 4), (2, 1)] {
        let mut raw = logged_in(level);
        let cmd_sn = raw.cmd_sn;
        let unknown = raw.send_bytes(&reassign(3, 9, cmd_sn));
        assert_eq!(response(&unknown), answer, "level {level}");
    }
    let mut first = logged_in(2);
    let mut second = first.join(1);
    assert!(command(&mut first, 9, &[0xff], 0).is_empty(), "it is held");
    let cmd_sn = first.cmd_sn;
    let own = first.send_bytes(&reassign(3, 9, cmd_sn));
    assert_eq!(response(&own), 3, "still allegiant");
    let task = first.target_end.held[0];
    let connection = &mut first.target_end.connection;
    assert_eq!(connection.detach_task(task, DetachedState::Running), Ok(9));
    assert!(connection.close().drop.is_empty(), "the session continues");
    let running = second.send_bytes(&reassign(4, 9, cmd_sn));
    assert_eq!(response(&running), 3, "its I/O is under way");
    let session = second.target_end.connection.session().cloned().unwrap();
    let reserved = iscsi::target::Completion {
        status: 0x18,
        ..Default::default()
    };
    session.reassignable.ended(9, &reserved, Vec::new());
    let elsewhere = second.send_bytes(&{
        let mut other = reassign(5, 9, cmd_sn);
        other[9] = 1;
        other
    });
    assert_eq!(response(&elsewhere), 1, "of another logical unit");
    let taken = second.send_bytes(&reassign(6, 9, cmd_sn));
    assert_eq!(response(&taken), 0);
    // RESERVATION CONFLICT, the original status.
    assert_eq!(
        (taken[1].opcode(), taken[1].word(16), taken[1].bhs[3]),
        (0x21, 9, 0x18)
    );
    let again = second.send_bytes(&reassign(7, 9, cmd_sn));
    assert_eq!(response(&again), 1, "it is done");
}

#[test]
fn session_without_connections_ends_on_request() {
    let mut raw = logged_in(2);
    assert!(command(&mut raw, 9, &[0xff], 0).is_empty());
    let session = raw.target_end.connection.session().cloned().unwrap();
    let task = raw.target_end.held[0];
    let connection = &mut raw.target_end.connection;
    connection
        .detach_task(task, DetachedState::ToRestart)
        .unwrap();
    connection.close();
    assert!(!session.is_closed());
    let mut back = raw.join_session(session.tsih, 0);
    let cmd_sn = session.window.exp_cmd_sn();
    let taken = back.send_bytes(&reassign(3, 9, cmd_sn));
    assert_eq!(
        (response(&taken), back.target_end.held.len()),
        (0, 1),
        "it starts again"
    );
    back.target_end.connection.close();
    session.forget_reassignable(|_, _| true);
    assert!(session.reassignable.is_empty() && raw.policy.table.end_abandoned(session.tsih));
    assert!(session.is_closed() && !raw.policy.table.end_abandoned(session.tsih));
}
