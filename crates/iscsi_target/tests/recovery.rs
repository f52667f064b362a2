//! Error recovery level 2 on a server with workers and disks (RFC 7143, 7.2.2): commands of lost connections, and sessions without
//! connections.

mod common;

use std::sync::Arc;
use std::time::Duration;

use bdev::{BlockDevice, ErrorPolicy, Fault, FaultAction, FaultPlan, Faulty, OnError};
use block::{IoErrorKind, IoKind};
use common::{BLOCK, Client, Rig, ram, settings, target};
use iscsi::initiator::{Event, Initiator, InitiatorSettings, TaskManagementRequestFields};
use iscsi::negotiation::Offer;
use iscsi::pdu::TaskFunction;
use iscsi_target::ServerLimits;
use scsi::DiskId;
use scsi::cdb::cdb10;

fn offer() -> Offer {
    let mut offer = Offer::default();
    offer.session.error_recovery_level = 2;
    offer.session.max_connections = 4;
    // No unsolicited data.
    offer.session.immediate_data = false;
    offer.session.initial_r2t = true;
    offer
}

/// `retain`: DefaultTime2Retain.
fn recovering(number: u8, retain: u16) -> InitiatorSettings {
    let mut offer = offer();
    offer.session.time_to_retain = retain;
    settings(number, offer)
}

fn rig(device: Arc<dyn BlockDevice>) -> Rig {
    let mut options = target();
    options.bounds.offer = offer();
    Rig::open(device, options, ServerLimits::default())
}

fn login(rig: &Rig, settings: InitiatorSettings, connections: usize) -> Client {
    let mut client = Client::login(rig.portal, settings, connections);
    client.settle();
    client
}

fn held() -> (Arc<Faulty>, Rig) {
    let device = Arc::new(Faulty::new(ram(16), FaultPlan::default()));
    device.inject(Fault {
        kind: IoKind::Write,
        skip: 0,
        times: 1,
        action: FaultAction::Hold,
    });
    let rig = rig(device.clone());
    (device, rig)
}

fn write(lba: u32, byte: u8) -> iscsi::initiator::Request {
    Initiator::write(0, &cdb10(0x2a, lba, 1), vec![byte; BLOCK])
}

fn pump_a_while(client: &mut Client) {
    for _ in 0..100 {
        client.pump();
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn status_of(client: &Client, itt: u32) -> Option<u8> {
    client.events.iter().find_map(|(_, event)| match event {
        Event::Command(done) if done.itt == itt => Some(done.status),
        _ => None,
    })
}

fn is_lost(client: &Client, of: u32) -> bool {
    let lost = |event: &Event| matches!(event, Event::Lost { itt, .. } if *itt == of);
    client.events.iter().any(|(_, event)| lost(event))
}

#[test]
fn write_under_way_is_done_once_and_answered_when_the_session_is_back() {
    let (device, rig) = held();
    let mut other = login(&rig, settings(2, Offer::default()), 1);
    let mut client = login(&rig, recovering(1, 20), 1);
    let late = client.initiator.command(0, write(0, 1)).unwrap();
    client.until(|_| other.read(0, 0, 1).data == [1; BLOCK]);
    client.recover(0);
    pump_a_while(&mut client);
    assert_eq!(status_of(&client, late), None, "it is under way");
    // Another initiator writes there before the response: a repeated write would overwrite that.
    assert_eq!(other.write(0, 0, vec![9; BLOCK]).status, 0);
    device.release();
    client.until(|client| status_of(client, late).is_some());
    assert_eq!(status_of(&client, late), Some(0));
    assert_eq!(other.read(0, 0, 1).data, [9; BLOCK]);
    assert_eq!(client.read(0, 0, 1).data, [9; BLOCK]);
    assert_eq!(rig.server.sessions().len(), 2, "the sessions of before");
}

#[test]
fn another_connection_takes_the_command_over() {
    let (device, rig) = held();
    let mut other = login(&rig, settings(2, Offer::default()), 1);
    let mut client = login(&rig, recovering(1, 20), 2);
    let late = client.initiator.command(1, write(0, 1)).unwrap();
    client.until(|_| other.read(0, 0, 1).data == [1; BLOCK]);
    client.hang_up(1);
    assert!(client.initiator.suspend(1).is_empty());
    client.initiator.reassign(1, 0).unwrap();
    pump_a_while(&mut client);
    assert_eq!(status_of(&client, late), None);
    device.release();
    client.until(|client| status_of(client, late).is_some());
    assert_eq!(status_of(&client, late), Some(0));
}

/// Sends a write without answering its R2T.
fn write_without_data(client: &mut Client) -> u32 {
    let itt = client.initiator.command(0, write(8, 7)).unwrap();
    client.push();
    std::thread::sleep(Duration::from_millis(100));
    itt
}

#[test]
fn write_without_data_restarts_unless_the_unit_was_reset() {
    for reset in [false, true] {
        let rig = rig(ram(16));
        let mut other = login(&rig, settings(2, Offer::default()), 1);
        let mut client = login(&rig, recovering(1, 20), 1);
        let late = write_without_data(&mut client);
        client.hang_up(0);
        rig.wait_for_connections(1);
        if reset {
            let fields = TaskManagementRequestFields {
                function: TaskFunction::LogicalUnitReset,
                lun: [0; 8],
                referenced: None,
            };
            other.initiator.task_management(0, fields).unwrap();
            let answered =
                |event: &Event| matches!(event, Event::TaskManagement { response: 0, .. });
            other.until(|other| other.events.iter().any(|(_, event)| answered(event)));
        }
        client.recover(0);
        client.until(|client| status_of(client, late).is_some() || is_lost(client, late));
        assert_eq!(
            is_lost(&client, late),
            reset,
            "{:?}",
            status_of(&client, late)
        );
        other.settle();
        let byte = if reset { 0 } else { 7 };
        assert_eq!(other.read(0, 8, 1).data, [byte; BLOCK]);
    }
}

/// ABORT TASK from another connection of the session, for a task without a connection.
#[test]
fn task_without_a_connection_can_be_aborted() {
    let rig = rig(ram(16));
    let mut client = login(&rig, recovering(1, 20), 2);
    let late = write_without_data(&mut client);
    client.hang_up(0);
    rig.wait_for_connections(1);
    let fields = TaskManagementRequestFields {
        function: TaskFunction::AbortTask,
        lun: [0; 8],
        referenced: Some(late),
    };
    client.initiator.task_management(1, fields).unwrap();
    let answered = |event: &Event| matches!(event, Event::TaskManagement { response: 0, .. });
    client.until(|client| client.events.iter().any(|(_, event)| answered(event)));
    client.recover(0);
    client.until(|client| is_lost(client, late));
    assert_eq!(client.read(1, 8, 1).data, [0; BLOCK]);
}

#[test]
fn session_without_connections_ends_when_its_time_is_over() {
    let rig = rig(ram(16));
    let mut other = login(&rig, settings(2, Offer::default()), 1);
    let mut client = login(&rig, recovering(1, 1), 1);
    write_without_data(&mut client);
    client.hang_up(0);
    rig.wait_for_connections(1);
    assert_eq!(rig.server.sessions().len(), 2, "it is kept for a second");
    other.until(|_| rig.server.sessions().len() == 1);
}

/// The disk has failed and retries indefinitely (`on_error = stop`).
#[test]
fn write_that_waits_for_its_disk_keeps_no_new_session_out() {
    let device = Arc::new(Faulty::new(ram(16), FaultPlan::default()));
    device.inject(Fault {
        kind: IoKind::Write,
        skip: 0,
        times: u64::MAX,
        action: FaultAction::Fail(IoErrorKind::Offline.into()),
    });
    let rig = rig(device.clone());
    let disk = rig.units.disk(DiskId(0)).unwrap();
    disk.set_error_policy(ErrorPolicy {
        on_error: OnError::Stop,
        ..ErrorPolicy::default()
    });
    let mut client = login(&rig, recovering(1, 20), 1);
    client.initiator.command(0, write(0, 1)).unwrap();
    pump_a_while(&mut client);
    client.hang_up(0);
    let mut second = login(&rig, recovering(1, 20), 1);
    assert_eq!(second.read(0, 0, 1).data, [0; BLOCK]);
}
