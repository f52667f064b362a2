//! Commands that wait: nothing that a task management function or a new session has ended touches the disk afterwards, or is
//! answered, and nobody waits for data that do not come.

mod common;

use std::sync::Arc;
use std::time::Duration;

use backend::{Fault, FaultAction, FaultPlan, Faulty};
use common::{BLOCK, Client, Door, cdb10, ram, settings, target};
use disk::IoKind;
use iscsi::initiator::{Event, Initiator, Request, TaskManagementRequestFields};
use iscsi::negotiation::Offer;
use iscsi::pdu::{LogoutReason, TaskFunction};
use iscsi_net::DoorLimits;

const SIMPLE: u8 = 1;
const ORDERED: u8 = 2;

fn login(door: &Door, number: u8) -> Client {
    let mut client = Client::login(door.portal, settings(number, Offer::default()), 1);
    client.settle();
    client
}

/// A door whose disk keeps the next write to itself until it is released.
fn door_that_holds_a_write() -> (Arc<Faulty>, Door) {
    let engine = Arc::new(Faulty::new(ram(16), FaultPlan::default()));
    engine.inject(Fault {
        kind: IoKind::Write,
        skip: 0,
        times: 1,
        action: FaultAction::Hold,
    });
    let door = Door::open(engine.clone(), target(), DoorLimits::default());
    (engine, door)
}

fn write(lba: u32, byte: u8, attribute: u8) -> Request {
    let request = Initiator::write(0, &cdb10(0x2a, lba, 1), vec![byte; BLOCK]);
    Request {
        attribute,
        ..request
    }
}

/// Long enough for what must not come.
fn pump_a_while(client: &mut Client) {
    for _ in 0..100 {
        client.pump();
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn waiting_command_is_ended_by(function: TaskFunction, by_another: bool) {
    let (engine, door) = door_that_holds_a_write();
    let (mut writer, mut other) = (login(&door, 1), login(&door, 2));
    writer.initiator.command(0, write(0, 1, SIMPLE)).unwrap();
    writer.until(|_| other.read(0, 0, 1).data == [1; BLOCK]);
    let ordered = writer.initiator.command(0, write(8, 7, ORDERED)).unwrap();
    // When this is answered the target has it.
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
    engine.release();
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

#[test]
fn command_that_waits_for_its_turn_is_ended_as_one_that_runs() {
    waiting_command_is_ended_by(TaskFunction::AbortTaskSet, false);
    waiting_command_is_ended_by(TaskFunction::LogicalUnitReset, true);
    waiting_command_is_ended_by(TaskFunction::ItNexusReset, false);
}

/// The usual recovery of an initiator whose connection broke, or who has logged out in a hurry: what it sends next must not be
/// overtaken by a write from before.
fn new_session_waits_after(end: impl FnOnce(&Door, &mut Client)) {
    let (engine, door) = door_that_holds_a_write();
    let (mut other, mut first) = (login(&door, 2), login(&door, 1));
    first.initiator.command(0, write(0, 1, SIMPLE)).unwrap();
    first.until(|_| other.read(0, 0, 1).data == [1; BLOCK]);
    end(&door, &mut first);
    let mut second = Client::login(door.portal, settings(1, Offer::default()), 1);
    second.initiator.nop_out(0, Vec::new(), false).unwrap();
    pump_a_while(&mut second);
    let is_served = |client: &Client| {
        client
            .events
            .iter()
            .any(|(_, e)| matches!(e, Event::Nop { .. }))
    };
    assert!(!is_served(&second), "while a write of before is in flight");
    // And not because somebody else was there in between.
    let mut third = Client::login(door.portal, settings(1, Offer::default()), 1);
    third.initiator.nop_out(0, Vec::new(), false).unwrap();
    pump_a_while(&mut third);
    assert!(
        !is_served(&third),
        "while a write of the last but one is in flight"
    );
    engine.release();
    third.until(|client| is_served(client));
    third.settle();
    assert_eq!(third.write(0, 0, vec![2; BLOCK]).status, 0);
    assert_eq!(other.read(0, 0, 1).data, [2; BLOCK]);
}

fn is_gone(door: &Door) {
    for _ in 0..2_000 {
        if door.server.sessions().len() == 1 {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("the session stays");
}

#[test]
fn new_session_waits_for_writes_of_those_before_it() {
    new_session_waits_after(|_, _| {});
    new_session_waits_after(|door, client| {
        client.hang_up(0);
        is_gone(door);
    });
    new_session_waits_after(|door, client| {
        let reason = LogoutReason::CloseSession;
        client.initiator.logout(0, reason, 0).unwrap();
        client.until(|client| client.is_closed(0));
        is_gone(door);
    });
}

/// WRITE ATOMIC(16) has its range for itself from when its data are there, not from when it came.
#[test]
fn write_atomic_whose_data_do_not_come_holds_nobody_up() {
    const BLOCKS: u8 = 8;
    let door = Door::ram();
    let mut other = login(&door, 2);
    let mut offer = Offer::default();
    (offer.session.initial_r2t, offer.session.immediate_data) = (true, false);
    let mut client = Client::login(door.portal, settings(1, offer), 1);
    client.settle();
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x9c, BLOCKS);
    let data = vec![1; usize::from(BLOCKS) * BLOCK];
    let atomic = Initiator::write(0, &cdb, data.clone());
    let atomic = client.initiator.command(0, atomic).unwrap();
    // It is sent, and the R2T is not answered.
    client.push();
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(other.write(0, 2, vec![2; BLOCK]).status, 0);
    client.until(|client| {
        let its = |event: &Event| matches!(event, Event::Command(done) if done.itt == atomic && done.status == 0);
        client.events.iter().any(|(_, event)| its(event))
    });
    assert_eq!(other.read(0, 0, BLOCKS.into()).data, data);
}
