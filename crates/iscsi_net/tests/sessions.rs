//! Sessions and their ends: reinstatement, logout, access, limits, task management.

mod common;

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use backend::{Fault, FaultAction, FaultPlan, Faulty};
use common::{BLOCK, Client, Door, Random, cdb10, ram, settings, target};
use disk::IoKind;
use iscsi::initiator::{Event, Initiator, Request, TaskManagementRequestFields};
use iscsi::negotiation::Offer;
use iscsi::pdu::{LogoutReason, TaskFunction};
use iscsi_net::{AclEntry, DemoMode, DoorLimits, TargetOptions};

fn login(door: &Door, number: u8) -> Client {
    let mut client = Client::login(door.portal, settings(number, Offer::default()), 1);
    client.settle();
    client
}

fn is_refused(door: &Door, number: u8) -> bool {
    let mut client = Client::new(door.portal, settings(number, Offer::default()));
    client.connect();
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        client.until(|client| client.initiator.is_ready(0));
    }));
    refused.is_err()
}

#[test]
fn same_initiator_port_reinstates_its_session() {
    let door = Door::ram();
    let mut old = login(&door, 1);
    old.write(0, 0, vec![1; 512]);
    let mut new = login(&door, 1);
    old.until(|old| old.is_closed(0));
    assert_eq!(new.read(0, 0, 1).data, [1; 512]);
    assert_eq!(door.server.status()[0].sessions, 1);
    door.wait_for_connections(1);
}

#[test]
fn logout_of_one_connection_leaves_the_others() {
    let door = Door::ram();
    let mut client = Client::login(door.portal, settings(1, Offer::default()), 2);
    client.settle();
    client
        .initiator
        .logout(1, LogoutReason::CloseConnection, 1)
        .unwrap();
    client.until(|client| client.is_closed(1));
    assert_eq!(client.write(0, 5, vec![3; 512]).status, 0);
    client
        .initiator
        .logout(0, LogoutReason::CloseSession, 0)
        .unwrap();
    client.until(|client| client.is_closed(0));
    door.wait_for_connections(0);
    assert_eq!(door.server.status()[0].sessions, 0);
}

#[test]
fn read_only_demo_mode_refuses_what_changes() {
    let options = TargetOptions {
        demo_mode: DemoMode::ReadOnly,
        ..target()
    };
    let door = Door::open(ram(16), options, DoorLimits::default());
    let mut client = login(&door, 1);
    let done = client.write(0, 0, vec![1; 4096]);
    // CHECK CONDITION, DATA PROTECT, WRITE PROTECTED
    assert_eq!(done.status, 2);
    assert_eq!((done.sense[2] & 0x0f, done.sense[12]), (7, 0x27));
    assert_eq!(client.read(0, 0, 8).data, [0; 4096]);
}

#[test]
fn access_list_decides_who_logs_in() {
    let entry = AclEntry {
        initiator: Some("iqn.2026-11.org.example:i1".to_owned()),
        network: Some("127.0.0.0/8".parse().unwrap()),
        read_only: false,
    };
    let options = TargetOptions {
        demo_mode: DemoMode::None,
        acl: vec![entry],
        ..target()
    };
    let door = Door::open(ram(16), options, DoorLimits::default());
    assert_eq!(login(&door, 1).write(0, 0, vec![1; 512]).status, 0);
    assert!(is_refused(&door, 2));
}

#[test]
fn slow_login_ends_and_half_open_ones_give_way() {
    let limits = DoorLimits {
        half_open: 4,
        ..DoorLimits::default()
    };
    let door = Door::open(ram(16), target(), limits);
    let mut client = login(&door, 1);
    let mut idle: Vec<_> = (0..20).map(|_| door.connect()).collect();
    let mut oldest = idle.remove(0);
    assert_eq!(oldest.read(&mut [0; 8]).unwrap(), 0, "the oldest gives way");
    assert_eq!(client.write(0, 0, vec![1; 512]).status, 0);
    let limits = DoorLimits {
        login_time: Duration::from_secs(1),
        ..DoorLimits::default()
    };
    let door = Door::open(ram(16), target(), limits);
    assert_eq!(door.connect().read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn target_reset_is_answered_and_the_session_goes_on() {
    let door = Door::ram();
    let mut client = Client::login(door.portal, settings(1, Offer::default()), 2);
    client.settle();
    let mut random = Random(5);
    for _ in 0..20 {
        for region in 0..8u32 {
            let cdb = cdb10(0x2a, region * 64, 64);
            let write = Initiator::write(0, &cdb, vec![9; 32 << 10]);
            client.initiator.command(region as u16 % 2, write).unwrap();
        }
        let functions = [
            TaskFunction::LogicalUnitReset,
            TaskFunction::AbortTaskSet,
            TaskFunction::ClearTaskSet,
            TaskFunction::TargetWarmReset,
        ];
        let fields = TaskManagementRequestFields {
            function: functions[random.below(4) as usize],
            lun: [0; 8],
            referenced: None,
        };
        let itt = client.initiator.task_management(0, fields).unwrap();
        client.until(|client| {
            client.events.iter().any(|(_, event)| {
                matches!(event, Event::TaskManagement { itt: done, response: 0 } if *done == itt)
            })
        });
        client.events.clear();
    }
    client.settle();
}

/// ORDERED (attribute 2) and HEAD OF QUEUE (3) hold over the connections of a session (RFC 7143, 4.2.2.1: one order).
#[test]
fn ordered_command_waits_for_older_ones_of_other_connections() {
    let engine = Arc::new(Faulty::new(ram(16), FaultPlan::default()));
    let door = Door::open(engine.clone(), target(), DoorLimits::default());
    let mut client = Client::login(door.portal, settings(1, Offer::default()), 2);
    client.settle();
    let hold = Fault {
        kind: IoKind::Write,
        skip: 0,
        times: 1,
        action: FaultAction::Hold,
    };
    engine.inject(hold);
    // SIMPLE is 1
    let with = |attribute: u8, request: Request| Request {
        attribute,
        ..request
    };
    let read = |lba| Initiator::read(0, &cdb10(0x28, lba, 1), BLOCK as u32);
    let write = |byte| Initiator::write(0, &cdb10(0x2a, 0, 1), vec![byte; BLOCK]);
    let mut send = |cid, request| client.initiator.command(cid, request).unwrap();
    let older = send(0, with(1, write(1)));
    let ordered = send(1, with(2, read(0)));
    let younger = send(0, with(1, write(2)));
    let head = send(1, with(3, read(8)));
    let mut done: Vec<(u32, Vec<u8>)> = Vec::new();
    let take = |client: &mut Client, done: &mut Vec<(u32, Vec<u8>)>| {
        for (_, event) in std::mem::take(&mut client.events) {
            if let Event::Command(one) = event {
                assert_eq!(one.status, 0, "{one:?}");
                done.push((one.itt, one.data));
            }
        }
    };
    client.until(|client| {
        take(client, &mut done);
        done.iter().any(|(itt, _)| *itt == head)
    });
    // a ping on either connection comes back after whatever could have been answered before it
    for cid in [0, 1] {
        client.initiator.nop_out(cid, Vec::new(), false).unwrap();
        client.until(|client| {
            let came = client
                .events
                .iter()
                .any(|(on, event)| *on == cid && matches!(event, Event::Nop { .. }));
            take(client, &mut done);
            came
        });
    }
    assert_eq!(done.len(), 1, "the others wait: {done:?}");
    engine.release();
    client.until(|client| {
        take(client, &mut done);
        done.len() == 4
    });
    for itt in [older, younger] {
        assert!(done.iter().any(|(done, _)| *done == itt));
    }
    let seen = done.iter().find(|(itt, _)| *itt == ordered);
    assert_eq!(
        seen.unwrap().1,
        [1; BLOCK],
        "after the older, before the younger"
    );
    assert_eq!(client.read(0, 0, 1).data, [2; BLOCK]);
}
