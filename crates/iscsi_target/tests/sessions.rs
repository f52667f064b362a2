//! Start and end of sessions: reinstatement, logout, access, limits, task management.

mod common;

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use bdev::{Disk, Fault, FaultAction, FaultPlan, Faulty};
use block::IoKind;
use common::{BLOCK, Client, Rig, ram, settings, target};
use fastrand::Rng;
use iscsi::chap::{Algorithm, Secret};
use iscsi::initiator::{Event, Initiator, InitiatorSettings, Request, TaskManagementRequestFields};
use iscsi::login::{ChapUser, Credentials};
use iscsi::negotiation::Offer;
use iscsi::pdu::{LogoutReason, TaskFunction};
use iscsi_target::{AclEntry, DemoMode, ServerLimits, TargetOptions};
use scsi::cdb::cdb10;

fn login(rig: &Rig, number: u8) -> Client {
    let mut client = Client::login(rig.portal, settings(number, Offer::default()), 1);
    client.settle();
    client
}

fn is_refused(rig: &Rig, number: u8) -> bool {
    is_refused_with(rig, settings(number, Offer::default()))
}

fn is_refused_with(rig: &Rig, settings: InitiatorSettings) -> bool {
    let mut client = Client::new(rig.portal, settings);
    client.connect();
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        client.until(|client| client.initiator.is_ready(0));
    }));
    refused.is_err()
}

#[test]
fn same_initiator_port_reinstates_its_session() {
    let rig = Rig::ram();
    let mut old = login(&rig, 1);
    old.write(0, 0, vec![1; 512]);
    let mut new = login(&rig, 1);
    old.until(|old| old.is_closed(0));
    assert_eq!(new.read(0, 0, 1).data, [1; 512]);
    assert_eq!(rig.server.status()[0].sessions, 1);
    rig.wait_for_connections(1);
}

/// Each portal group is a target port, and an ISID may be used at each (RFC 7143, 10.1.1): these are two nexuses.
#[test]
fn same_initiator_port_has_a_session_with_each_portal_group() {
    let options = TargetOptions {
        portals: vec![
            "127.0.0.1:0,1".parse().unwrap(),
            "127.0.0.2:0,2".parse().unwrap(),
        ],
        ..target()
    };
    let rig = Rig::open(ram(16), options, ServerLimits::default());
    let mut first = login(&rig, 1);
    first.write(0, 0, vec![1; 512]);
    let portals = rig.server.status()[0].portals.clone();
    let mut second = Client::login(portals[1], settings(1, Offer::default()), 1);
    second.settle();
    assert_eq!(second.read(0, 0, 1).data, [1; 512]);
    assert_eq!(rig.server.status()[0].sessions, 2);
    assert_eq!(first.read(0, 0, 1).data, [1; 512]);
}

#[test]
fn logout_of_one_connection_leaves_the_others() {
    let rig = Rig::ram();
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 2);
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
    rig.wait_for_connections(0);
    assert_eq!(rig.server.status()[0].sessions, 0);
}

#[test]
fn logout_of_another_connection_leaves_the_session() {
    let rig = Rig::ram();
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 2);
    client.settle();
    let reason = LogoutReason::CloseConnection;
    client.initiator.logout(0, reason, 1).unwrap();
    client.until(|client| client.is_closed(1));
    for byte in 1..50 {
        assert_eq!(client.write(0, 5, vec![byte; BLOCK]).status, 0);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(!client.is_closed(0), "the session went with it");
    assert_eq!(rig.server.sessions().len(), 1);
}

#[test]
fn removed_target_ends_its_sessions_in_every_spelling() {
    let rig = Rig::ram();
    let settings = InitiatorSettings {
        target_name: Some(common::TARGET.replace("example", "EXAMPLE")),
        ..settings(1, Offer::default())
    };
    let mut client = Client::login(rig.portal, settings, 1);
    client.settle();
    let (hold, holding) = scsi_exec::Holding::new();
    assert!(rig.server.remove_target(common::TARGET, &hold));
    drop(hold);
    assert!(holding.wait(Duration::from_secs(30)));
    client.until(|client| client.is_closed(0));
}

#[test]
fn target_that_is_replaced_has_its_portal_again_at_once() {
    let rig = Rig::ram();
    let disk = Disk::new("d9", None, ram(1)).unwrap();
    let luns = [(0, Arc::new(disk))];
    let portal = format!("{}", rig.portal);
    let at = |portals: &str| TargetOptions {
        portals: vec![portals.parse().unwrap()],
        ..target()
    };
    let (hold, _holding) = scsi_exec::Holding::new();
    rig.server.remove_target(common::TARGET, &hold);
    for iteration in 0..100 {
        let added = rig.server.add_target(at(&portal), &luns);
        added.unwrap_or_else(|error| panic!("iteration {iteration}: {error}"));
        let mut client = login(&rig, 1);
        assert_eq!(client.write(0, 0, vec![1; BLOCK]).status, 0);
        assert!(rig.server.remove_target(common::TARGET, &hold));
        assert!(std::net::TcpStream::connect(rig.portal).is_err());
    }
}

/// Otherwise a login that began without authentication could also complete without it.
#[test]
fn begun_login_does_not_reach_the_replacing_target() {
    let rig = Rig::ram();
    let mut stream = rig.connect();
    // Byte 1: stays in the operational stage, then ends it (RFC 7143, 11.12).
    let mut step = |flags: u8| -> std::io::Result<[u8; 2]> {
        let text = format!(
            "InitiatorName=iqn.2026-11.org.example:i1\0TargetName={}\0",
            common::TARGET
        );
        let text = text.as_bytes();
        let text = if flags == 0x04 { text } else { &[] };
        let mut request = vec![0; 48];
        (request[0], request[1]) = (0x43, flags);
        request[7] = text.len() as u8;
        request[8..14].copy_from_slice(&[0x80, 0, 0, 0, 0, 1]);
        request.extend(text);
        request.resize(request.len().next_multiple_of(4), 0);
        stream.write_all(&request)?;
        let mut answer = [0; 48];
        stream.read_exact(&mut answer)?;
        let mut data = vec![0; usize::from(answer[7]).next_multiple_of(4)];
        stream.read_exact(&mut data)?;
        Ok([answer[36], answer[37]])
    };
    assert_eq!(step(0x04).unwrap(), [0, 0]);
    let (hold, holding) = scsi_exec::Holding::new();
    rig.server.remove_target(common::TARGET, &hold);
    drop(hold);
    assert!(holding.wait(Duration::from_secs(30)));
    let user = ChapUser {
        secret: Secret::new("a secret of theirs".to_owned()),
        mutual: None,
    };
    let options = TargetOptions {
        portals: vec![rig.portal.to_string().parse().unwrap()],
        chap_users: [("user".to_owned(), user)].into(),
        ..target()
    };
    let disk = Disk::new("d9", None, ram(1)).unwrap();
    rig.server
        .add_target(options, &[(0, Arc::new(disk))])
        .unwrap();
    let ended = step(0x87);
    assert!(ended.as_ref().ok() != Some(&[0, 0]), "{ended:?}");
    assert!(rig.server.sessions().is_empty());
}

#[test]
fn read_only_demo_mode_refuses_modifying_commands() {
    let options = TargetOptions {
        demo_mode: DemoMode::ReadOnly,
        ..target()
    };
    let rig = Rig::open(ram(16), options, ServerLimits::default());
    let mut client = login(&rig, 1);
    let done = client.write(0, 0, vec![1; 4096]);
    // CHECK CONDITION, DATA PROTECT, WRITE PROTECTED
    assert_eq!(done.status, 2);
    assert_eq!((done.sense[2] & 0x0f, done.sense[12]), (7, 0x27));
    // LOGICAL UNIT NOT SUPPORTED
    let done = client.run(0, Initiator::write(9, &cdb10(0x2a, 0, 8), vec![1; 4096]));
    assert_eq!((done.sense[2] & 0x0f, done.sense[12]), (5, 0x25));
    assert_eq!(client.read(0, 0, 8).data, [0; 4096]);
}

/// Functions that end other initiators' tasks have more effect than a write (RFC 7143, 11.6.1: function authorization failed).
#[test]
fn initiator_that_may_only_read_resets_nothing() {
    let entry = |number: u8, read_only| AclEntry {
        initiator: Some(format!("iqn.2026-11.org.example:i{number}")),
        network: None,
        read_only,
    };
    let options = TargetOptions {
        demo_mode: DemoMode::None,
        acl: vec![entry(1, false), entry(2, true)],
        ..target()
    };
    let rig = Rig::open(ram(16), options, ServerLimits::default());
    let (mut writer, mut reader) = (login(&rig, 1), login(&rig, 2));
    for function in [
        TaskFunction::LogicalUnitReset,
        TaskFunction::TargetWarmReset,
        TaskFunction::TargetColdReset,
    ] {
        assert_eq!(manage(&mut reader, function), 6, "{function:?}");
    }
    // It may end its own tasks.
    assert_eq!(manage(&mut reader, TaskFunction::AbortTaskSet), 0);
    assert_eq!(manage(&mut reader, TaskFunction::ClearTaskSet), 0);
    assert_eq!(ready(&mut writer), (0, 0, 0), "no unit attention");
    assert_eq!(manage(&mut writer, TaskFunction::LogicalUnitReset), 0);
}

#[test]
fn access_list_decides_who_logs_in() {
    let entry = AclEntry {
        initiator: Some("iqn.2026-11.org.example:i1".to_owned()),
        network: Some("127.0.0.0/8".parse().unwrap()),
        read_only: false,
    };
    // Initiators spell the name in another way.
    let name = common::TARGET.replace("example", "EXAMPLE");
    let options = TargetOptions {
        name: name.clone(),
        demo_mode: DemoMode::None,
        acl: vec![entry],
        ..target()
    };
    let rig = Rig::open(ram(16), options, ServerLimits::default());
    assert_eq!(login(&rig, 1).write(0, 0, vec![1; 512]).status, 0);
    assert!(is_refused(&rig, 2) && is_refused(&rig, 2));
    let refused = rig.server.refused_logins();
    assert_eq!(refused.len(), 1, "{refused:?}");
    let one = &refused[0];
    assert!(one.initiator.ends_with(":i2") && one.count == 2, "{one:?}");
    assert!(one.reason.starts_with("authorization failure"), "{one:?}");
    assert_eq!(one.target, Some(name), "the configured name");
    assert!(one.address.starts_with("127.0.0.1"), "{one:?}");
}

/// Another initiator's name and ISID, which are not secret, do not suffice to end its session: the CHAP user must be the same.
#[test]
fn login_of_another_user_reinstates_no_session() {
    let secret = |user: &str| Secret::new(format!("secret of {user}"));
    let users = ["alice", "bob"].map(|user| {
        let secret = secret(user);
        (
            user.to_owned(),
            ChapUser {
                secret,
                mutual: None,
            },
        )
    });
    let options = TargetOptions {
        chap_users: users.into(),
        ..target()
    };
    let rig = Rig::open(ram(16), options, ServerLimits::default());
    let settings_of = |user: &str, number| InitiatorSettings {
        credentials: Some(Credentials {
            name: user.to_owned(),
            secret: secret(user),
            mutual: None,
            algorithms: Algorithm::ALL.to_vec(),
        }),
        ..settings(number, Offer::default())
    };
    let mut client = Client::login(rig.portal, settings_of("alice", 1), 1);
    client.settle();
    assert!(is_refused_with(&rig, settings_of("bob", 1)));
    assert_eq!(client.write(0, 0, vec![1; 512]).status, 0);
    // Alice may reinstate her own session, and Bob may have one.
    Client::login(rig.portal, settings_of("bob", 2), 1);
    Client::login(rig.portal, settings_of("alice", 1), 1);
    client.until(|client| client.is_closed(0));
}

/// Sends a login to an existing session from this address of the host. Returns status class and detail.
fn join_from(rig: &Rig, source: [u8; 4], number: u8, tsih: u16, cid: u16) -> [u8; 2] {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&socket, &std::net::SocketAddr::from((source, 0))).unwrap();
    connect(&socket, &rig.portal).unwrap();
    let mut stream = std::net::TcpStream::from(socket);
    let text = format!(
        "InitiatorName=iqn.2026-11.org.example:i{number}\0TargetName={}\0",
        common::TARGET
    );
    let mut request = vec![0; 48];
    (request[0], request[1]) = (0x43, 0x87);
    request[7] = text.len() as u8;
    request[8..14].copy_from_slice(&[0x80, 0, 0, 0, 0, number]);
    request[14..16].copy_from_slice(&tsih.to_be_bytes());
    request[20..22].copy_from_slice(&cid.to_be_bytes());
    request.extend(text.bytes());
    request.resize(request.len().next_multiple_of(4), 0);
    stream.write_all(&request).unwrap();
    let mut answer = [0; 48];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[0], 0x23);
    [answer[36], answer[37]]
}

/// Allows writes from one address of the host, and reads from another.
fn by_address() -> TargetOptions {
    let entry = |network: &str, read_only| AclEntry {
        initiator: None,
        network: Some(network.parse().unwrap()),
        read_only,
    };
    TargetOptions {
        demo_mode: DemoMode::None,
        acl: vec![entry("127.0.0.1", false), entry("127.0.0.2", true)],
        ..target()
    }
}

/// The address of the first connection determines the rights of a session. A connection with fewer rights can neither join it nor replace
/// one of its connections.
#[test]
fn connection_that_may_only_read_joins_no_session_that_writes() {
    let rig = Rig::open(ram(16), by_address(), ServerLimits::default());
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 2);
    client.settle();
    let tsih = rig.server.sessions()[0].tsih;
    for cid in [0, 1, 2] {
        let status = join_from(&rig, [127, 0, 0, 2], 1, tsih, cid);
        assert_eq!(status, [0x02, 0x02], "authorization failure");
    }
    assert_eq!(client.write(1, 0, vec![1; 512]).status, 0);
    assert_eq!(join_from(&rig, [127, 0, 0, 1], 1, tsih, 2), [0, 0]);
}

/// A connection with fewer rights cannot end the session by reinstatement either (RFC 7143, 6.3.5). TSIH 0 requests a new session.
#[test]
fn login_that_may_only_read_reinstates_no_session_that_writes() {
    let rig = Rig::open(ram(16), by_address(), ServerLimits::default());
    let mut client = login(&rig, 1);
    let status = join_from(&rig, [127, 0, 0, 2], 1, 0, 0);
    assert_eq!(status, [0x02, 0x02], "authorization failure");
    assert_eq!(client.write(0, 0, vec![1; 512]).status, 0);
    // The same initiator may open and reinstate a read-only session.
    for _ in 0..2 {
        assert_eq!(join_from(&rig, [127, 0, 0, 2], 2, 0, 0), [0, 0]);
    }
    assert_eq!(client.write(0, 0, vec![1; 512]).status, 0);
}

#[test]
fn slow_login_ends_and_half_open_ones_give_way() {
    let limits = ServerLimits {
        half_open: 4,
        ..ServerLimits::default()
    };
    let rig = Rig::open(ram(16), target(), limits);
    let mut client = login(&rig, 1);
    let mut idle: Vec<_> = (0..20).map(|_| rig.connect()).collect();
    let mut oldest = idle.remove(0);
    assert_eq!(oldest.read(&mut [0; 8]).unwrap(), 0, "the oldest gives way");
    assert_eq!(client.write(0, 0, vec![1; 512]).status, 0);
    let limits = ServerLimits {
        login_time: Duration::from_secs(1),
        ..ServerLimits::default()
    };
    let rig = Rig::open(ram(16), target(), limits);
    assert_eq!(rig.connect().read(&mut [0; 8]).unwrap(), 0);
}

/// Discovery is open to every peer, so its sessions count as not logged in.
#[test]
fn idle_discovery_sessions_give_way_to_new_ones() {
    let limits = ServerLimits {
        half_open: 4,
        sessions: 8,
        ..ServerLimits::default()
    };
    let rig = Rig::open(ram(16), target(), limits);
    let mut first = login(&rig, 1);
    let discovery = |number| InitiatorSettings {
        target_name: None,
        ..settings(number, Offer::default())
    };
    let mut stay: Vec<Client> = (100..130)
        .map(|number| Client::login(rig.portal, discovery(number), 1))
        .collect();
    stay[0].until(|client| client.is_closed(0));
    let mut last = login(&rig, 2);
    assert_eq!(last.write(0, 0, vec![1; 512]).status, 0);
    assert_eq!(first.read(0, 0, 1).data, [1; 512]);
    rig.wait_for_connections(2 + 4);
}

#[test]
fn session_continues_after_a_target_reset() {
    let rig = Rig::ram();
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 2);
    client.settle();
    let mut random = Rng::with_seed(5);
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
            function: functions[random.usize(..4)],
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

/// Runs a task management function on LUN 0. Returns its response.
fn manage(client: &mut Client, function: TaskFunction) -> u8 {
    let fields = TaskManagementRequestFields {
        function,
        lun: [0; 8],
        referenced: None,
    };
    let itt = client.initiator.task_management(0, fields).unwrap();
    let mut found = None;
    client.until(|client| {
        found = client.events.iter().find_map(|(_, event)| match event {
            Event::TaskManagement {
                itt: done,
                response,
            } if *done == itt => Some(*response),
            _ => None,
        });
        found.is_some()
    });
    client.events.clear();
    found.unwrap()
}

/// Returns sense key, additional sense code and qualifier of TEST UNIT READY.
fn ready(client: &mut Client) -> (u8, u8, u8) {
    let done = client.run(0, Initiator::read(0, &[0; 6], 0));
    match done.sense.as_slice() {
        [] => (0, 0, 0),
        sense => (sense[2] & 0x0f, sense[12], sense[13]),
    }
}

#[test]
fn rfc_7144_functions_report_attentions_and_end_the_nexus() {
    let rig = Rig::ram();
    let (mut one, mut other) = (login(&rig, 1), login(&rig, 2));
    // Function complete: no unit attention is pending. Function succeeded: one is pending, and stays pending.
    assert_eq!(manage(&mut one, TaskFunction::QueryAsynchronousEvent), 0);
    assert_eq!(manage(&mut other, TaskFunction::LogicalUnitReset), 0);
    assert_eq!(manage(&mut one, TaskFunction::QueryAsynchronousEvent), 7);
    assert_eq!(manage(&mut one, TaskFunction::QueryAsynchronousEvent), 7);
    // BUS DEVICE RESET FUNCTION OCCURRED
    assert_eq!(ready(&mut one), (6, 0x29, 0x03));
    assert_eq!(ready(&mut one), (0, 0, 0));
    other.settle();

    // The reset releases RESERVE(6) of its nexus, and affects no other nexus.
    let reserve = Initiator::read(0, &[0x16, 0, 0, 0, 0, 0], 0);
    assert_eq!(one.run(0, reserve).status, 0);
    assert_eq!(other.write(0, 0, vec![1; BLOCK]).status, 0x18);
    assert_eq!(manage(&mut one, TaskFunction::ItNexusReset), 0);
    assert_eq!(other.write(0, 0, vec![1; BLOCK]).status, 0);
    // I_T NEXUS LOSS OCCURRED
    assert_eq!(ready(&mut one), (6, 0x29, 0x07));
    assert_eq!(ready(&mut one), (0, 0, 0));
    // Task management function not supported: CLEAR ACA, consistent with NORMACA.
    assert_eq!(manage(&mut one, TaskFunction::ClearAca), 5);
}

/// Checks that each connection of the session received the Async Message "will drop all connections" before it was closed.
fn assert_dismissed(client: &mut Client, connections: u16) {
    for cid in 0..connections {
        client.until(|client| client.is_closed(cid));
        // Negotiated Time2Wait; nothing is retained.
        let wait = client.initiator.parameters().time_to_wait;
        let reports = |(on, event): &(u16, Event)| match event {
            Event::Async {
                event: 3,
                parameters,
                ..
            } => *on == cid && *parameters == [0, wait, 0],
            _ => false,
        };
        assert!(client.events.iter().any(reports), "{:?}", client.events);
    }
}

#[test]
fn ended_sessions_get_an_asynchronous_message() {
    let rig = Rig::ram();
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 2);
    client.settle();
    let (hold, holding) = scsi_exec::Holding::new();
    assert!(rig.server.remove_target(common::TARGET, &hold));
    drop(hold);
    assert_dismissed(&mut client, 2);
    assert!(
        holding.wait(Duration::from_secs(30)),
        "something stays in flight"
    );

    let rig = Rig::ram();
    let (mut one, mut other) = (login(&rig, 1), login(&rig, 2));
    assert_eq!(manage(&mut one, TaskFunction::TargetColdReset), 0);
    assert_dismissed(&mut other, 1);
    one.until(|one| one.is_closed(0));

    let rig = Rig::ram();
    let mut client = login(&rig, 1);
    drop(rig);
    assert_dismissed(&mut client, 1);
}

/// Checks that each connection was asked to log out within two seconds.
fn is_asked_to_log_out(client: &mut Client, connections: u16) {
    let asked = |(_, event): &&(u16, Event)| {
        matches!(
            event,
            Event::Async {
                event: 1,
                parameters: [0, 0, 2],
                ..
            }
        )
    };
    client.until(|client| client.events.iter().filter(asked).count() == usize::from(connections));
    client.events.clear();
}

#[test]
fn ending_session_is_served_until_its_initiator_logs_out() {
    let rig = Rig::ram();
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 2);
    client.settle();
    let tsih = rig.server.sessions()[0].tsih;
    assert!(rig.server.end_session(tsih));
    is_asked_to_log_out(&mut client, 2);
    assert_eq!(client.write(1, 5, vec![3; BLOCK]).status, 0);
    assert_eq!(client.read(0, 5, 1).data, [3; BLOCK]);
    client
        .initiator
        .logout(0, LogoutReason::CloseSession, 0)
        .unwrap();
    client.until(|client| client.is_closed(0) && client.is_closed(1));
    let dropped = |(_, event): &(u16, Event)| matches!(event, Event::Async { .. });
    assert!(!client.events.iter().any(dropped), "{:?}", client.events);
    assert!(!rig.server.end_session(tsih), "it is gone");
    login(&rig, 1);
}

#[test]
fn initiator_that_does_not_log_out_is_dropped_in_time() {
    let rig = Rig::ram();
    let (mut one, mut other) = (login(&rig, 1), login(&rig, 2));
    for session in rig.server.sessions() {
        assert!(rig.server.end_session(session.tsih));
    }
    is_asked_to_log_out(&mut one, 1);
    is_asked_to_log_out(&mut other, 1);
    assert_dismissed(&mut one, 1);
    assert_dismissed(&mut other, 1);

    let mut one = login(&rig, 1);
    let tsih = rig.server.sessions()[0].tsih;
    assert!(rig.server.end_session(tsih) && rig.server.end_session(tsih));
    assert_dismissed(&mut one, 1);
}

#[test]
fn silent_initiator_is_pinged_and_only_one_that_answers_stays() {
    let limits = ServerLimits {
        idle_time: Duration::from_secs(1),
        silent_time: Duration::from_secs(3),
        ..ServerLimits::default()
    };
    let rig = Rig::open(ram(16), target(), limits);
    let mut answers = login(&rig, 1);
    let _silent = login(&rig, 2);
    assert_eq!(rig.server.connections(), 2);
    answers.until(|_| rig.server.connections() == 1);
    assert_eq!(answers.read(0, 0, 1).status, 0, "it has answered");
}

#[test]
fn aborted_write_never_touches_the_disk_after_the_functions_answer() {
    // Functions for tasks of one initiator, sent by that initiator, and functions for all task sets, sent by another one.
    for (function, by_other) in [
        (TaskFunction::AbortTaskSet, false),
        (TaskFunction::ItNexusReset, false),
        (TaskFunction::ClearTaskSet, false),
        (TaskFunction::LogicalUnitReset, true),
        (TaskFunction::TargetWarmReset, true),
    ] {
        let device = Arc::new(Faulty::new(ram(16), FaultPlan::default()));
        let rig = Rig::open(device.clone(), target(), ServerLimits::default());
        let (mut writer, mut other) = (login(&rig, 1), login(&rig, 2));
        device.inject(Fault {
            kind: IoKind::Write,
            skip: 0,
            times: 1,
            action: FaultAction::Hold,
        });
        let late = Initiator::write(0, &cdb10(0x2a, 0, 1), vec![1; BLOCK]);
        let late = writer.initiator.command(0, late).unwrap();
        // The write is done but not answered.
        writer.until(|_| other.read(0, 0, 1).data == [1; BLOCK]);
        let asks = if by_other { &mut other } else { &mut writer };
        let fields = TaskManagementRequestFields {
            function,
            lun: [0; 8],
            referenced: None,
        };
        let function = asks.initiator.task_management(0, fields).unwrap();
        let is_answered = |client: &Client| {
            let answer = |(_, event): &(u16, Event)| matches!(event, Event::TaskManagement { itt, response: 0 } if *itt == function);
            client.events.iter().any(answer)
        };
        for _ in 0..50 {
            asks.pump();
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!is_answered(asks), "the write is on its way to the disk");
        device.release();
        asks.until(|asks| is_answered(asks));
        writer.pump();
        let ended =
            |(_, event): &(u16, Event)| matches!(event, Event::Command(done) if done.itt == late);
        assert!(
            !writer.events.iter().any(ended),
            "an aborted task has no status"
        );
        other.events.clear();
        other.settle();
        assert_eq!(other.write(0, 0, vec![2; BLOCK]).status, 0);
        assert_eq!(other.read(0, 0, 1).data, [2; BLOCK]);
    }
}

/// ORDERED (attribute 2) and HEAD OF QUEUE (3) apply to all connections of a session (RFC 7143, 4.2.2.1: one order).
#[test]
fn ordered_command_waits_for_older_ones_of_other_connections() {
    let device = Arc::new(Faulty::new(ram(16), FaultPlan::default()));
    let rig = Rig::open(device.clone(), target(), ServerLimits::default());
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 2);
    client.settle();
    let hold = Fault {
        kind: IoKind::Write,
        skip: 0,
        times: 1,
        action: FaultAction::Hold,
    };
    device.inject(hold);
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
    // the ping's answer follows all earlier responses of its connection
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
    device.release();
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
