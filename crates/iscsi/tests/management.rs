//! NOP, text, task management, logout, the command window, and hostile PDUs.

mod common;

use common::raw::{Raw, assert_rejected};
use common::{read10, small_offer, write10};
use iscsi::Limits;
use iscsi::pdu::{
    AsyncEvent, Bhs, Digests, LogoutRequest, NO_TAG, NopOut, ScsiCommand, TaskManagementRequest,
    TextRequest, encode,
};
use iscsi::target::{CloseReason, Completion};
use proptest::prelude::*;
use zerocopy::big_endian::U32;

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
    let sent = raw.target_end.connection.ping().unwrap();
    assert!(!raw.target_end.connection.is_answered(sent));
    let ping = raw.answers().remove(0);
    assert_eq!(
        (ping.opcode(), ping.word(16), ping.word(24)),
        (0x20, 0xffff_ffff, stat_sn + 1)
    );
    assert_eq!(raw.target_end.connection.pings_outstanding(), 1);
    let mut pong = NopOut::idle();
    pong.opcode = 0x40;
    pong.ttt = U32::new(ping.word(20));
    assert_eq!(raw.send(pong.to_bhs(), &[], &[]), []);
    assert_eq!(raw.target_end.connection.pings_outstanding(), 0);
    assert!(raw.target_end.connection.is_answered(sent));
    assert_eq!(
        raw.test_unit_ready(1)[0].word(24),
        stat_sn + 1,
        "a ping uses no StatSN up"
    );
    for _ in 0..Limits::default().outstanding_pings {
        assert!(raw.target_end.connection.ping().is_some());
    }
    assert!(raw.target_end.connection.ping().is_none());
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
fn send_targets_in_a_normal_session_lists_its_target() {
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

/// No key may be negotiated twice in a sequence (RFC 7143, 6.3). Otherwise a request of 16 KiB could list all targets a
/// thousand times.
#[test]
fn send_targets_is_accepted_once_per_request() {
    let mut raw = Raw::new(&[]);
    let header = text_request(8, NO_TAG, 0x80);
    let twice = b"SendTargets=All\0SendTargets=All\0";
    assert_rejected(&raw.send(header, &[], twice), 0x04, &header);
    let once = raw.send(header, &[], b"SendTargets=All\0");
    assert!(once[0].data.starts_with(b"TargetName="));
}

#[test]
fn text_without_a_known_key_is_rejected() {
    let mut raw = Raw::new(&[]);
    // The cases of libiscsi's iSCSISendTargets test, and further ones.
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
        b"X-org.example.a=1\0MaxBurstLength=512\0InitiatorAlias=me\0",
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

/// Sends a function and returns the response code.
fn manage(raw: &mut Raw, header: Bhs) -> u8 {
    let answers = raw.send(header, &[], &[]);
    assert_eq!(
        (answers.len(), answers[0].opcode(), answers[0].word(16)),
        (1, 0x22, header.itt.get())
    );
    answers[0].bhs[2]
}

#[test]
fn abort_task_finds_the_task_or_reports_its_state() {
    let mut raw = Raw::new(&[]);
    let held = raw.command(5, 0x80, 0, &[0xff]);
    raw.send(held.to_bhs(), &[], &[]);
    assert_eq!(manage(&mut raw, function(1, 6, 5, 2, 1)), 0);
    assert_eq!(raw.messages.functions.len(), 1);
    assert_eq!(raw.target_end.connection.tasks().count(), 0);
    // The task has ended and its CmdSN is long past: it does not exist.
    assert_eq!(manage(&mut raw, function(1, 7, 5, 2, 1)), 1);
    // CmdSN 2 is in transit: it counts as received, and is ignored on arrival.
    assert_eq!(manage(&mut raw, function(1, 8, 99, 3, 2)), 0);
    let late = raw.command(99, 0x80, 0, &[0; 6]);
    assert_eq!(raw.send(late.to_bhs(), &[], &[]), []);
    assert_eq!(
        raw.messages.functions.len(),
        2,
        "SCSI received queries for existing and for missing tasks"
    );
    raw.still_serves();
}

#[test]
fn abort_task_removes_a_command_ahead_of_its_turn() {
    let mut raw = Raw::new(&[]);
    let first = raw.command(1, 0x80, 0, &[0; 6]);
    let second = raw.command(2, 0xa0, 512, &write10(0, 1));
    raw.send(second.to_bhs(), &[], &[1; 512]);
    assert_eq!(manage(&mut raw, function(1, 8, 2, 3, 2)), 0);
    assert_eq!(
        raw.target_end.abandoned, 1,
        "its immediate data had been placed"
    );
    assert_eq!(raw.send(first.to_bhs(), &[], &[]).len(), 1);
    assert_eq!(raw.messages.begun, [1]);
    raw.still_serves();
}

#[test]
fn unsupported_task_management_is_reported() {
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
        assert_eq!(raw.target_end.closed, None);
    }
    let header = logout(3, 0);
    assert_rejected(&raw.send(header, &[], &[]), 0x09, &header);
    let answers = raw.send(logout(0, 0), &[], &[]);
    assert_eq!((answers[0].opcode(), answers[0].bhs[2]), (0x26, 0));
    assert_eq!(
        raw.target_end.closed,
        Some(CloseReason::LoggedOut {
            whole_session: true
        })
    );
    assert_eq!(raw.target_end.connection.close().drop, []);
    assert!(raw.policy.table.sessions().is_empty());
}

#[test]
fn logout_is_answered_after_cleanup_and_ignores_all_until_then() {
    let mut raw = Raw::new(&[]);
    raw.target_end.answers_logouts = false;
    assert_eq!(raw.send(logout(0, 0), &[], &[]), []);
    assert_eq!(raw.test_unit_ready(1), []);
    assert_eq!(raw.messages.begun, [], "a command after the logout");
    assert_eq!(raw.target_end.closed, None);
    raw.target_end.connection.logout_response(0x10).unwrap();
    let again = raw.target_end.connection.logout_response(0x10);
    assert!(again.is_err(), "answered once");
    let answers = raw.send_bytes(&[]);
    assert_eq!((answers[0].opcode(), answers[0].bhs[2]), (0x26, 0));
    let whole_session = true;
    assert_eq!(
        raw.target_end.closed,
        Some(CloseReason::LoggedOut { whole_session })
    );
}

#[test]
fn session_continues_after_a_connection_logout() {
    let mut first = Raw::new(&[("MaxConnections", "3")]);
    let mut second = first.join(1);
    let mut third = first.join(2);
    second.send(logout(1, 1), &[], &[]);
    assert_eq!(
        second.target_end.closed,
        Some(CloseReason::LoggedOut {
            whole_session: false
        })
    );
    assert_eq!(second.target_end.connection.close().drop, []);
    first.send(logout(1, 2), &[], &[]);
    assert_eq!(
        first.messages.drop,
        [third.target_end.connection.key().unwrap()]
    );
    first.still_serves();
    // Lost without a logout: at error recovery level 0 the session ends.
    assert_eq!(
        third.target_end.connection.close().drop,
        [first.target_end.connection.key().unwrap()]
    );
    first.send_bytes(&[]);
    assert_eq!(first.target_end.closed, Some(CloseReason::SessionEnded));
}

#[test]
fn logout_returns_commands_to_the_window() {
    let mut first = Raw::new(&[("MaxConnections", "2")]);
    let mut second = first.join(1);
    for itt in 0..10 {
        second.cmd_sn = 1 + itt;
        let header = second.command(itt, 0x80, 0, &[0xff]);
        second.send(header.to_bhs(), &[], &[]);
    }
    // A command on the second connection waits for its CmdSN turn, which never comes. One on the first connection waits for the
    // turn after that.
    second.cmd_sn = 12;
    let header = second.command(11, 0x80, 0, &[0xff]);
    second.send(header.to_bhs(), &[], &[]);
    first.cmd_sn = 13;
    assert_eq!(first.test_unit_ready(1), []);
    second.send(logout(1, 1), &[], &[]);
    let closed = second.target_end.connection.close();
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
    let task = raw.target_end.held[7];
    raw.target_end
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

/// The commands before the function on its connection are not immediate, so they count for the window.
#[test]
fn function_waits_behind_as_many_commands_as_the_window_holds() {
    let mut first = Raw::new(&[("MaxConnections", "2")]);
    let mut second = first.join(1);
    let window = Limits::default().commands_per_session;
    second.cmd_sn = 2;
    for itt in 2..=window {
        assert_eq!(second.test_unit_ready(itt), []);
    }
    let abort = function(2, 0x77, NO_TAG, window + 1, 0);
    assert_eq!(second.send(abort, &[], &[]), []);
    assert_eq!(first.test_unit_ready(1).len(), 1);
    assert_eq!(first.messages.wake, [1]);
    let tags: Vec<u32> = second
        .send_bytes(&[])
        .iter()
        .map(|answer| answer.word(16))
        .collect();
    let expected: Vec<u32> = (2..=window).chain([0x77]).collect();
    assert_eq!(tags, expected);
}

#[test]
fn asynchronous_message_asks_for_logout() {
    let mut raw = Raw::new(&[]);
    raw.target_end.connection.request_logout(30).unwrap();
    let answer = raw.answers().remove(0);
    assert_eq!(
        (answer.opcode(), answer.bhs[36], answer.word(16)),
        (0x32, 1, 0xffff_ffff)
    );
    assert_eq!(answer.bhs[38..44], [0, 0, 0, 0, 0, 30], "Parameter1 to 3");
    raw.target_end
        .connection
        .async_message(AsyncEvent::TasksTerminated, [1; 8], [0; 3], &[])
        .unwrap();
    assert_eq!(raw.answers()[0].word(24), answer.word(24) + 1);
}

/// Connections on four threads, like workers: SCSI receives the commands in order.
#[test]
fn commands_of_connections_on_four_threads_begin_in_order() {
    use std::sync::atomic::AtomicU32;
    use std::sync::{Arc, Mutex, mpsc};
    use std::time::Duration;
    const COMMANDS: u32 = 800;
    let leading = Raw::new(&[("MaxConnections", "4")]);
    let others: Vec<Raw> = (1..4).map(|cid| leading.join(cid)).collect();
    let begun = Arc::new(Mutex::new(Vec::new()));
    let last = Arc::new(AtomicU32::new(0));
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..4).map(|_| mpsc::channel::<()>()).unzip();
    let raws = std::iter::once(leading).chain(others);
    let threads: Vec<_> = raws
        .zip(receivers)
        .enumerate()
        .map(|(me, (mut raw, wake))| {
            let (begun, senders) = (begun.clone(), senders.clone());
            raw.messages.last_begun = Some(last.clone());
            std::thread::spawn(move || {
                let mine = (0..COMMANDS).filter(|n| (n / 3 + n / 7) % 4 == me as u32);
                let mut left: Vec<u32> = mine.rev().collect();
                let mut answered = 0;
                let wanted = left.len();
                let mut patience = 0;
                while answered < wanted {
                    // Limited to the window: MaxCmdSN depends on all connections.
                    let window = &raw.target_end.connection.session().unwrap().window;
                    let next = left.last().copied().filter(|n| *n < window.max_cmd_sn());
                    let answers = match next {
                        Some(n) => {
                            left.pop();
                            raw.cmd_sn = n + 1;
                            raw.test_unit_ready(n)
                        }
                        None => {
                            let woken = wake.recv_timeout(Duration::from_millis(5)).is_ok();
                            patience = if woken { 0 } else { patience + 1 };
                            assert!(patience < 4000, "connection {me} waits without an end");
                            if !woken {
                                continue;
                            }
                            raw.send_bytes(&[])
                        }
                    };
                    answered += answers.len();
                    begun.lock().unwrap().append(&mut raw.messages.begun);
                    for cid in raw.messages.wake.drain(..) {
                        senders[usize::from(cid)].send(()).unwrap_or_default();
                    }
                }
            })
        })
        .collect();
    drop(senders);
    for thread in threads {
        thread.join().unwrap();
    }
    let mut begun = begun.lock().unwrap().clone();
    begun.sort_unstable();
    assert_eq!(begun, (1..=COMMANDS).collect::<Vec<_>>(), "each once");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_after_login_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let mut raw = Raw::new(&[("InitialR2T", "No")]);
        raw.target_end.feed(&bytes, &mut raw.disk, &mut raw.messages);
    }

    /// PDUs with plausible headers and hostile fields do not affect other connections of the target.
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
        level in 0u8..3,
    ) {
        let mut offer = small_offer();
        offer.session.error_recovery_level = level;
        let keys = [("InitialR2T", "No"), ("ErrorRecoveryLevel", ["0", "1", "2"][usize::from(level)])];
        let mut raw = Raw::with(offer, Limits::default(), &keys);
        for (opcode, flags, itt, cmd_sn, ttt, data, ahs, word) in pdus {
            let mut header = ScsiCommand::blank();
            header.opcode = opcode;
            // A logout would end the test early.
            header.flags = if opcode == 0x46 { 0x87 } else { flags };
            header.itt = U32::new(itt);
            header.expected_length = U32::new(if opcode & 0x3f == 1 { word % 4096 } else { ttt });
            header.cmd_sn = U32::new(raw.cmd_sn.wrapping_add(cmd_sn).wrapping_sub(2));
            // The field is RefCmdSN in a task management function, DataSN and offset in a Data-Out, and the CDB in a
            // command.
            header.cdb = [0; 16];
            header.cdb[0] = [0xff, 0x28, 0x2a, 0x00][word as usize >> 4 & 3];
            header.cdb[4..12].copy_from_slice(&[0, 0, 0, 0, (word >> 8) as u8 & 3, 0, (word >> 16) as u8 & 7, 0]);
            let mut bytes = Vec::new();
            encode(&mut bytes, header.to_bhs(), &[0, 5, 2, 0, 0, 0, 1, 0][..ahs.min(1) * 8], &data, Digests::default());
            raw.target_end.feed(&bytes, &mut raw.disk, &mut raw.messages);
            if raw.target_end.closed.is_some() { break; }
            if let Some(task) = raw.target_end.held.pop().filter(|_| word & 1 == 0) {
                // The response is accepted once, regardless of the state of its data.
                prop_assert!(raw.target_end.connection.respond(task, &Completion::default()).is_ok() || raw.target_end.abandoned > 0 );
            }
            raw.cmd_sn = raw.target_end.connection.session().unwrap().window.exp_cmd_sn();
        }
        raw.target_end.take_bytes();
        let mut other = Raw::new(&[]);
        other.still_serves();
    }
}
