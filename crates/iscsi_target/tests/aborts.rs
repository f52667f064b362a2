//! Waiting commands: after a task management function or a new session has ended them, they neither access the disk nor get a response.
//! Missing data delays no other command.

mod common;

use std::sync::Arc;
use std::time::Duration;

use bdev::{BlockDevice, Fault, FaultAction, FaultPlan, Faulty};
use block::IoKind;
use common::{BLOCK, Client, Rig, ram, settings, target};
use iscsi::initiator::{Event, Initiator, Request, TaskManagementRequestFields};
use iscsi::negotiation::Offer;
use iscsi::pdu::{LogoutReason, TaskFunction};
use iscsi_target::ServerLimits;
use scsi::cdb::cdb10;

const SIMPLE: u8 = 1;
const ORDERED: u8 = 2;

fn login(rig: &Rig, number: u8) -> Client {
    let mut client = Client::login(rig.portal, settings(number, Offer::default()), 1);
    client.settle();
    client
}

/// Creates a server. Its disk holds the next write until it is released.
fn target_that_holds_a_write() -> (Arc<Faulty>, Rig) {
    let device = Arc::new(Faulty::new(ram(16), FaultPlan::default()));
    device.inject(Fault {
        kind: IoKind::Write,
        skip: 0,
        times: 1,
        action: FaultAction::Hold,
    });
    let rig = Rig::open(device.clone(), target(), ServerLimits::default());
    (device, rig)
}

fn write(lba: u32, byte: u8, attribute: u8) -> Request {
    let request = Initiator::write(0, &cdb10(0x2a, lba, 1), vec![byte; BLOCK]);
    Request {
        attribute,
        ..request
    }
}

/// Pumps long enough to detect an unexpected response.
fn pump_a_while(client: &mut Client) {
    for _ in 0..100 {
        client.pump();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// "When MaxCmdSN changes at the target while the target has no pending PDUs to convey this information to the initiator, it MUST generate
/// a NOP-In" (RFC 7143, 11.4.10): a full window that another initiator's reset has emptied opens at once.
#[test]
fn initiator_is_notified_when_its_window_opens() {
    let rig = Rig::ram();
    let mut offer = Offer::default();
    (offer.session.initial_r2t, offer.session.immediate_data) = (true, false);
    let mut full = Client::login(rig.portal, settings(1, offer), 1);
    full.settle();
    let mut other = login(&rig, 2);
    let last = full.initiator.max_cmd_sn();
    for _ in 0..ServerLimits::default().protocol.commands_per_session {
        let request = write(0, 1, SIMPLE);
        full.initiator.command(0, request).unwrap();
    }
    full.push();
    // The commands have arrived, and no response was received.
    std::thread::sleep(Duration::from_millis(100));
    let fields = TaskManagementRequestFields {
        function: TaskFunction::LogicalUnitReset,
        lun: [0; 8],
        referenced: None,
    };
    other.initiator.task_management(0, fields).unwrap();
    other.until(|other| {
        let mut events = other.events.iter();
        events.any(|(_, event)| matches!(event, Event::TaskManagement { .. }))
    });
    // Much shorter than the ping interval of idle connections.
    pump_a_while(&mut full);
    let expected = full.initiator.max_cmd_sn().wrapping_sub(last);
    assert_eq!(
        expected,
        ServerLimits::default().protocol.commands_per_session
    );
}

fn waiting_command_is_ended_by(function: TaskFunction, by_another: bool) {
    let (device, rig) = target_that_holds_a_write();
    let (mut writer, mut other) = (login(&rig, 1), login(&rig, 2));
    writer.initiator.command(0, write(0, 1, SIMPLE)).unwrap();
    writer.until(|_| other.read(0, 0, 1).data == [1; BLOCK]);
    let ordered = writer.initiator.command(0, write(8, 7, ORDERED)).unwrap();
    // The ping's answer shows that the target has the command.
    writer.initiator.nop_out(0, Vec::new(), false).unwrap();
    writer.until(|w| w.events.iter().any(|(_, e)| matches!(e, Event::Nop { .. })));
    let asks = if by_another { &mut other } else { &mut writer };
    let fields = TaskManagementRequestFields {
        function,
        lun: [0; 8],
        referenced: None,
    };
    let asked = asks.initiator.task_management(0, fields).unwrap();
    pump_a_while(asks);
    device.release();
    asks.until(|client| {
        let complete = |event: &Event| matches!(event, Event::TaskManagement { itt, response: 0 } if *itt == asked);
        client.events.iter().any(|(_, event)| complete(event))
    });
    pump_a_while(&mut writer);
    let is_its_answer =
        |event: &Event| matches!(event, Event::Command(done) if done.itt == ordered);
    let answered = writer.events.iter().any(|(_, event)| is_its_answer(event));
    other.events.clear();
    other.settle();
    let block = other.read(0, 8, 1).data;
    assert!(!answered, "{function:?}: the command was answered");
    assert!(block == [0; BLOCK], "{function:?}: the disk was written to");
}

/// Sends ABORT TASK. Returns the ITT of the function.
fn abort_task(client: &mut Client, task: u32) -> u32 {
    let fields = TaskManagementRequestFields {
        function: TaskFunction::AbortTask,
        lun: [0; 8],
        referenced: Some(task),
    };
    client.initiator.task_management(0, fields).unwrap()
}

fn response(client: &Client, function: u32) -> Option<u8> {
    let of = |event: &Event| match event {
        Event::TaskManagement { itt, response } if *itt == function => Some(*response),
        _ => None,
    };
    client.events.iter().find_map(|(_, event)| of(event))
}

/// An initiator aborts a command after a timeout and then repeats it. The old write, ended by another initiator's reset, may still be in
/// flight: it must not reach the disk after the abort's response.
#[test]
fn repeated_abort_is_answered_after_the_task_ends() {
    let (device, rig) = target_that_holds_a_write();
    let (mut writer, mut other) = (login(&rig, 1), login(&rig, 2));
    let task = writer.initiator.command(0, write(0, 1, SIMPLE)).unwrap();
    writer.until(|_| other.read(0, 0, 1).data == [1; BLOCK]);
    let fields = TaskManagementRequestFields {
        function: TaskFunction::LogicalUnitReset,
        lun: [0; 8],
        referenced: None,
    };
    let reset = other.initiator.task_management(0, fields).unwrap();
    pump_a_while(&mut other);
    let functions = [task, task].map(|task| abort_task(&mut writer, task));
    pump_a_while(&mut writer);
    let early = functions.map(|function| response(&writer, function));
    assert_eq!(early, [None; 2], "the write is still on its way");
    device.release();
    other.until(|other| response(other, reset) == Some(0));
    for function in functions {
        writer.until(|writer| response(writer, function) == Some(0));
    }
    let late = abort_task(&mut writer, task);
    // Task does not exist (RFC 7143, 11.6.1).
    writer.until(|writer| response(writer, late) == Some(1));
}

#[test]
fn command_that_waits_for_its_turn_is_ended_as_one_that_runs() {
    waiting_command_is_ended_by(TaskFunction::AbortTaskSet, false);
    waiting_command_is_ended_by(TaskFunction::LogicalUnitReset, true);
    waiting_command_is_ended_by(TaskFunction::ItNexusReset, false);
}

/// Recovery of an initiator after a lost connection or an early logout. Old writes must not overtake its new commands, nor commands that
/// other initiators send after its new login (RFC 7143, 6.3.5).
fn new_session_waits_after(end: impl FnOnce(&Rig, &mut Client)) {
    let (device, rig) = target_that_holds_a_write();
    let (mut other, mut first) = (login(&rig, 2), login(&rig, 1));
    first.initiator.command(0, write(0, 1, SIMPLE)).unwrap();
    first.until(|_| other.read(0, 0, 1).data == [1; BLOCK]);
    end(&rig, &mut first);
    let mut second = Client::new(rig.portal, settings(1, Offer::default()));
    let cid = second.connect();
    pump_a_while(&mut second);
    assert!(
        !second.initiator.is_ready(cid),
        "while a write of before is in flight"
    );
    // Also after another session in between.
    let mut third = Client::new(rig.portal, settings(1, Offer::default()));
    let cid = third.connect();
    pump_a_while(&mut third);
    assert!(
        !third.initiator.is_ready(cid),
        "while a write of the last but one is in flight"
    );
    device.release();
    third.until(|client| client.initiator.is_ready(cid));
    third.settle();
    assert_eq!(third.write(0, 0, vec![2; BLOCK]).status, 0);
    assert_eq!(other.read(0, 0, 1).data, [2; BLOCK]);
}

fn is_gone(rig: &Rig) {
    for _ in 0..2_000 {
        if rig.server.sessions().len() == 1 {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("the session stays");
}

#[test]
fn new_session_waits_for_writes_of_those_before_it() {
    new_session_waits_after(|_, _| {});
    new_session_waits_after(|rig, client| {
        client.hang_up(0);
        is_gone(rig);
    });
    new_session_waits_after(|rig, client| {
        let reason = LogoutReason::CloseSession;
        client.initiator.logout(0, reason, 0).unwrap();
        pump_a_while(client);
        client.hang_up(0);
        is_gone(rig);
    });
}

/// RFC 7143, 11.15: the logout response confirms that the cleanup is complete. The initiator may then let others access the disk.
fn logout_is_answered_when_nothing_is_in_flight(reason: LogoutReason, from: u16, of: u16) {
    let (device, rig) = target_that_holds_a_write();
    let mut other = login(&rig, 2);
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 2);
    client.settle();
    let late = client.initiator.command(1, write(0, 1, SIMPLE)).unwrap();
    client.until(|_| other.read(0, 0, 1).data == [1; BLOCK]);
    client.initiator.logout(from, reason, of).unwrap();
    pump_a_while(&mut client);
    let answered = |client: &Client| {
        let yes = |event: &Event| matches!(event, Event::LoggedOut { response: 0, .. });
        client.events.iter().any(|(_, event)| yes(event))
    };
    assert!(!answered(&client), "{reason:?}: a write is in flight");
    device.release();
    client.until(|client| answered(client));
    assert_eq!(other.write(0, 0, vec![2; BLOCK]).status, 0);
    pump_a_while(&mut client);
    let its = |event: &Event| matches!(event, Event::Command(done) if done.itt == late);
    assert!(!client.events.iter().any(|(_, event)| its(event)));
    assert_eq!(other.read(0, 0, 1).data, [2; BLOCK]);
    let stays = reason == LogoutReason::CloseConnection && of == 1;
    assert!(client.is_closed(1));
    assert_eq!(client.is_closed(0), !stays, "{reason:?}");
    if stays {
        assert_eq!(client.write(0, 8, vec![3; BLOCK]).status, 0);
    }
}

#[test]
fn logout_response_waits_for_io_in_flight() {
    use LogoutReason::{CloseConnection, CloseSession};
    logout_is_answered_when_nothing_is_in_flight(CloseConnection, 0, 1);
    logout_is_answered_when_nothing_is_in_flight(CloseConnection, 1, 1);
    logout_is_answered_when_nothing_is_in_flight(CloseSession, 0, 0);
    logout_is_answered_when_nothing_is_in_flight(CloseSession, 1, 0);
}

/// A function applies to commands with a lower CmdSN (RFC 7143, 4.2.2.3.4), on all connections. A younger command, aborted silently, would
/// never be answered.
#[test]
fn function_spares_younger_commands_of_other_connections() {
    let rig = Rig::ram();
    let mut offer = Offer::default();
    // Solicited data keeps a write open for a while.
    (offer.session.initial_r2t, offer.session.immediate_data) = (true, false);
    let mut client = Client::login(rig.portal, settings(1, offer), 2);
    client.settle();
    for iteration in 0..3_000 {
        let (asks, writes) = (iteration % 2, (iteration + 1) % 2);
        let fields = TaskManagementRequestFields {
            function: TaskFunction::AbortTaskSet,
            lun: [0; 8],
            referenced: None,
        };
        let asked = client.initiator.task_management(asks, fields).unwrap();
        let younger = client
            .initiator
            .command(writes, write(0, 1, SIMPLE))
            .unwrap();
        client.until(|client| {
            let answered =
                |event: &Event| matches!(event, Event::TaskManagement { itt, .. } if *itt == asked);
            let done = |event: &Event| matches!(event, Event::Command(done) if done.itt == younger);
            client.events.iter().any(|(_, event)| answered(event))
                && client.events.iter().any(|(_, event)| done(event))
        });
        client.events.clear();
    }
}

/// The response confirms that all affected tasks have ended: nothing of them may arrive later on another connection.
#[test]
fn function_response_follows_earlier_responses() {
    let rig = Rig::ram();
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 2);
    client.settle();
    let read = Initiator::read(0, &cdb10(0x28, 0, 1), BLOCK as u32);
    let task = client.initiator.command(1, read).unwrap();
    client.push();
    std::thread::sleep(Duration::from_millis(100));
    let fields = TaskManagementRequestFields {
        function: TaskFunction::AbortTaskSet,
        lun: [0; 8],
        referenced: None,
    };
    let function = client.initiator.task_management(0, fields).unwrap();
    for _ in 0..200 {
        client.pump_one(0);
        std::thread::sleep(Duration::from_millis(1));
    }
    let early = std::mem::take(&mut client.events);
    assert!(early.is_empty(), "the answer waits on the other: {early:?}");
    client.until(|client| client.events.len() == 2);
    let is_done = matches!(&client.events[0], (1, Event::Command(done)) if done.itt == task);
    assert!(is_done, "{:?}", client.events);
    let (cid, answer) = &client.events[1];
    let is_answer =
        matches!(answer, Event::TaskManagement { itt, response: 0 } if *itt == function);
    assert!(*cid == 0 && is_answer, "{:?}", client.events);
}

/// WRITE ATOMIC(16) locks its range when its data has arrived, not earlier.
#[test]
fn write_atomic_without_data_delays_no_other() {
    const BLOCKS: u8 = 8;
    let rig = Rig::ram();
    let mut other = login(&rig, 2);
    let mut offer = Offer::default();
    (offer.session.initial_r2t, offer.session.immediate_data) = (true, false);
    let mut client = Client::login(rig.portal, settings(1, offer), 1);
    client.settle();
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x9c, BLOCKS);
    let data = vec![1; usize::from(BLOCKS) * BLOCK];
    let atomic = Initiator::write(0, &cdb, data.clone());
    let atomic = client.initiator.command(0, atomic).unwrap();
    // Sends the command without answering the R2T.
    client.push();
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(other.write(0, 2, vec![2; BLOCK]).status, 0);
    client.until(|client| {
        let its = |event: &Event| matches!(event, Event::Command(done) if done.itt == atomic && done.status == 0);
        client.events.iter().any(|(_, event)| its(event))
    });
    assert_eq!(other.read(0, 0, BLOCKS.into()).data, data);
}

/// Builds a PERSISTENT RESERVE OUT with 24 bytes of parameters.
fn reserve_out(action: u8, kind: u8, key: u64, service_key: u64) -> Request {
    let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
    let keys = [key.to_be_bytes(), service_key.to_be_bytes(), [0; 8]];
    Initiator::write(0, &cdb, keys.concat())
}

#[test]
fn preempt_and_abort_that_waits_is_ended_by_a_reset() {
    let (device, rig) = target_that_holds_a_write();
    let (mut victim, mut preempts) = (login(&rig, 1), login(&rig, 2));
    let mut resets = login(&rig, 3);
    assert_eq!(victim.run(0, reserve_out(6, 0, 0, 1)).status, 0);
    assert_eq!(preempts.run(0, reserve_out(6, 0, 0, 2)).status, 0);
    victim.initiator.command(0, write(0, 1, SIMPLE)).unwrap();
    victim.until(|_| resets.read(0, 0, 1).data == [1; BLOCK]);
    let preempt = reserve_out(5, 1, 2, 1);
    let preempt = preempts.initiator.command(0, preempt).unwrap();
    let its = |event: &Event| matches!(event, Event::Command(done) if done.itt == preempt);
    pump_a_while(&mut preempts);
    let fields = TaskManagementRequestFields {
        function: TaskFunction::LogicalUnitReset,
        lun: [0; 8],
        referenced: None,
    };
    let asked = resets.initiator.task_management(0, fields).unwrap();
    pump_a_while(&mut resets);
    device.release();
    resets.until(|client| {
        let complete = |event: &Event| matches!(event, Event::TaskManagement { itt, response: 0 } if *itt == asked);
        client.events.iter().any(|(_, event)| complete(event))
    });
    pump_a_while(&mut preempts);
    assert!(
        !preempts.events.iter().any(|(_, event)| its(event)),
        "answered after the reset that has ended it"
    );
    preempts.events.clear();
    preempts.settle();
}

/// LUN 1, peripheral device addressing (SAM-5, 4.7.7.2).
const LUN_1: u64 = 0x0001 << 48;

/// Returns the NAA designator of a unit: the first of its Device Identification page.
fn naa(client: &mut Client, lun: u64) -> Vec<u8> {
    let page = client.run(0, Initiator::read(lun, &[0x12, 1, 0x83, 0, 255, 0], 255));
    assert_eq!(page.data[4..8], [0x01, 0x03, 0, 8]);
    page.data[8..16].to_vec()
}

/// Builds an EXTENDED COPY of one block from LUN 0 to LUN 1, to be sent to LUN 0.
fn copy(client: &mut Client) -> Request {
    let target = |naa: Vec<u8>| {
        [
            &[0xe4, 0, 0, 0, 1, 3, 0, 8][..],
            &naa,
            &[0; 12],
            &[0, 0, 2, 0],
        ]
        .concat()
    };
    let (from, to) = (target(naa(client, 0)), target(naa(client, LUN_1)));
    let header = [0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0, 28, 0, 0, 0, 0];
    let segment = [&[2, 0, 0, 0x18, 0, 0, 0, 1, 0, 0, 0, 1][..], &[0; 16]].concat();
    let list = [&header[..], &from, &to, &segment].concat();
    let cdb = [
        0x83,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        list.len() as u8,
        0,
        0,
    ];
    Initiator::write(0, &cdb, list)
}

/// PREEMPT AND ABORT fences all writes of an initiator from a unit, including those of its copies.
#[test]
fn preempt_and_abort_waits_for_the_write_of_a_copy_from_another_unit() {
    let to = Arc::new(Faulty::new(ram(16), FaultPlan::default()));
    to.inject(Fault {
        kind: IoKind::Write,
        skip: 0,
        times: 1,
        action: FaultAction::Hold,
    });
    let disks: [Arc<dyn BlockDevice>; 2] = [ram(16), to.clone()];
    let rig = Rig::with_disks(&disks, target(), ServerLimits::default());
    let (mut victim, mut preempts) = (login(&rig, 1), login(&rig, 2));
    assert_eq!(victim.write(0, 0, vec![1; BLOCK]).status, 0);
    let on_lun_1 = |request: Request| Request {
        lun: LUN_1.to_be_bytes(),
        ..request
    };
    for (client, key) in [(&mut victim, 1), (&mut preempts, 2)] {
        client.run(0, on_lun_1(Initiator::read(0, &[0; 6], 0)));
        let register = on_lun_1(reserve_out(6, 0, 0, key));
        assert_eq!(client.run(0, register).status, 0);
    }
    let copy = copy(&mut victim);
    let copy = victim.initiator.command(0, copy).unwrap();
    let written = on_lun_1(Initiator::read(0, &cdb10(0x28, 0, 1), BLOCK as u32));
    victim.until(|_| preempts.run(0, written.clone()).data == [1; BLOCK]);
    let preempt = on_lun_1(reserve_out(5, 1, 2, 1));
    let preempt = preempts.initiator.command(0, preempt).unwrap();
    let answered = |client: &Client, itt: u32| {
        let mut all = client.events.iter();
        all.any(|(_, event)| matches!(event, Event::Command(done) if done.itt == itt))
    };
    pump_a_while(&mut preempts);
    assert!(
        !answered(&preempts, preempt),
        "a write of the copy is in flight"
    );
    to.release();
    preempts.until(|client| answered(client, preempt));
    victim.until(|client| answered(client, copy));
}

/// Before its turn in CmdSN order, a command is in no task set and its LUN is not evaluated.
#[test]
fn removed_unit_does_not_abort_queued_commands() {
    let rig = Rig::ram();
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 2);
    client.settle();
    let window = |client: &Client| {
        let last = client.initiator.max_cmd_sn();
        last.wrapping_sub(client.initiator.cmd_sn())
    };
    let before = window(&client);
    let first = client.initiator.command(0, write(0, 1, SIMPLE)).unwrap();
    let second = client.initiator.command(1, write(8, 2, SIMPLE)).unwrap();
    // The second command arrives with its data and waits for the first.
    client.push_in_pieces(1, 1 << 16);
    std::thread::sleep(Duration::from_millis(100));
    let (hold, holding) = scsi_exec::Holding::new();
    rig.server.end_tasks(common::TARGET, &[0], true, &hold);
    drop(hold);
    assert!(holding.wait(Duration::from_secs(30)));
    for itt in [first, second] {
        client.until(|client| {
            let its = |event: &Event| matches!(event, Event::Command(done) if done.itt == itt && done.status == 0);
            client.events.iter().any(|(_, event)| its(event))
        });
    }
    client.settle();
    assert_eq!(window(&client), before, "no place in it is lost");
}
