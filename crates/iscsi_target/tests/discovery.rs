//! Discovery sessions over real sockets: addresses in SendTargets, and authentication.

mod common;

use std::net::SocketAddr;
use std::sync::Arc;

use bdev::Disk;
use common::{Client, Rig, ram, settings, target};
use iscsi::chap::{Algorithm, Secret};
use iscsi::initiator::{Event, InitiatorSettings};
use iscsi::login::{ChapUser, Credentials};
use iscsi::negotiation::Offer;
use iscsi_target::{DemoMode, ServerError, ServerLimits, TargetOptions};

const OTHER: &str = "iqn.2026-11.org.example:t1";

fn discovery() -> InitiatorSettings {
    InitiatorSettings {
        target_name: None,
        ..settings(1, Offer::default())
    }
}

fn credentials(name: &str, secret: &str, mutual: Option<(&str, &str)>) -> InitiatorSettings {
    let credentials = Credentials {
        name: name.to_owned(),
        secret: Secret::new(secret),
        mutual: mutual.map(|(name, secret)| (name.to_owned(), Secret::new(secret))),
        algorithms: Algorithm::ALL.to_vec(),
    };
    InitiatorSettings {
        credentials: Some(credentials),
        ..discovery()
    }
}

fn user(secret: &str, mutual: Option<(&str, &str)>) -> ChapUser {
    ChapUser {
        secret: Secret::new(secret),
        mutual: mutual.map(|(name, secret)| (name.to_owned(), Secret::new(secret))),
    }
}

/// Returns the response to SendTargets=All at this address.
fn send_targets(portal: SocketAddr, settings: InitiatorSettings) -> String {
    let mut client = Client::login(portal, settings, 1);
    client.initiator.text(0, b"SendTargets=All\0").unwrap();
    let is_text = |event: &(u16, Event)| matches!(event.1, Event::Text { .. });
    client.until(|client| client.events.iter().any(is_text));
    let Some(Event::Text { text, .. }) = client.events.pop().map(|(_, event)| event) else {
        panic!("no text")
    };
    String::from_utf8(text).unwrap().replace('\0', ";")
}

/// Returns true if a login with these settings fails.
fn is_refused(portal: SocketAddr, settings: InitiatorSettings) -> bool {
    std::panic::catch_unwind(|| Client::login(portal, settings, 1)).is_err()
}

fn add(rig: &Rig, name: &str, portals: &[String]) -> Result<Vec<SocketAddr>, ServerError> {
    let disk = Disk::new(&format!("disk of {name}"), None, ram(1)).unwrap();
    let options = TargetOptions {
        name: name.to_owned(),
        portals: portals.iter().map(|text| text.parse().unwrap()).collect(),
        ..target()
    };
    rig.server.add_target(options, &[(0, Arc::new(disk))])
}

#[test]
fn discovery_over_ipv6_names_no_ipv4_only_portal() {
    let options = TargetOptions {
        portals: vec!["0.0.0.0:0".parse().unwrap()],
        ..target()
    };
    let rig = Rig::open(ram(1), options, ServerLimits::default());
    let six = add(&rig, OTHER, &["[::1]:0".to_owned()]).unwrap()[0];
    let four = SocketAddr::from(([127, 0, 0, 1], rig.portal.port()));
    let told_six = format!("TargetName={OTHER};TargetAddress={six},1;");
    assert_eq!(send_targets(six, discovery()), told_six);
    assert_eq!(
        send_targets(four, discovery()),
        format!(
            "TargetName={};TargetAddress={four},1;{told_six}",
            common::TARGET
        )
    );
}

#[test]
fn wildcard_portals_of_both_families_come_in_any_order() {
    let options = TargetOptions {
        portals: vec!["[::]:0,2".parse().unwrap()],
        ..target()
    };
    let rig = Rig::open(ram(1), options, ServerLimits::default());
    let port = rig.portal.port();
    let (four, six) = (
        SocketAddr::from(([127, 0, 0, 1], port)),
        SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, port)),
    );
    // A single wildcard portal serves both address families.
    let first = |address: SocketAddr, tag| {
        format!(
            "TargetName={};TargetAddress={address},{tag};",
            common::TARGET
        )
    };
    assert_eq!(send_targets(four, discovery()), first(four, 2));
    assert_eq!(send_targets(six, discovery()), first(six, 2));
    let mut stays = Client::login(six, settings(9, Offer::default()), 1);
    stays.settle();
    // Another target with the other wildcard: both continue.
    for _ in 0..3 {
        add(&rig, OTHER, &[format!("0.0.0.0:{port},1")]).unwrap();
        let other = format!("TargetName={OTHER};TargetAddress={four},1;");
        assert_eq!(send_targets(four, discovery()), first(four, 2) + &other);
        assert_eq!(send_targets(six, discovery()), first(six, 2));
        let (hold, _holding) = scsi_exec::Holding::new();
        assert!(rig.server.remove_target(OTHER, &hold));
        assert_eq!(send_targets(four, discovery()), first(four, 2));
    }
    // One target with both: each family uses its own group.
    let portals = [format!("0.0.0.0:{port},1"), format!("[::]:{port},2")];
    add(&rig, OTHER, &portals).unwrap();
    for (address, tag) in [(four, 1), (six, 2)] {
        let other = format!("TargetName={OTHER};TargetAddress={address},{tag};");
        assert_eq!(
            send_targets(address, discovery()),
            first(address, 2) + &other
        );
        let settings = InitiatorSettings {
            target_name: Some(OTHER.to_owned()),
            ..settings(2, Offer::default())
        };
        let client = Client::login(address, settings, 1);
        let sessions = rig.server.sessions();
        let session = sessions.iter().find(|session| session.target == OTHER);
        assert_eq!(session.map(|session| session.portal_group), Some(tag));
        drop(client);
        rig.wait_for_connections(1);
    }
    assert_eq!(
        stays.read(0, 0, 1).status,
        0,
        "opening the portal again ends no session"
    );
}

#[test]
fn address_and_wildcard_of_one_port_share_a_socket() {
    let rig = Rig::ram();
    let port = rig.portal.port();
    add(&rig, OTHER, &[format!("0.0.0.0:{port}")]).unwrap();
    let two = SocketAddr::from(([127, 0, 0, 2], port));
    assert_eq!(
        send_targets(two, discovery()),
        format!(
            "TargetName={};TargetAddress={},1;TargetName={OTHER};TargetAddress={two},1;",
            common::TARGET,
            rig.portal
        )
    );
    let (hold, _holding) = scsi_exec::Holding::new();
    assert!(rig.server.remove_target(OTHER, &hold));
    assert!(std::net::TcpStream::connect(two).is_err());
    Client::login(rig.portal, settings(1, Offer::default()), 1);
}

#[test]
fn announced_address_is_named_instead_of_the_portal() {
    let options = TargetOptions {
        announce: vec!["203.0.113.7:13260".parse().unwrap()],
        ..target()
    };
    let rig = Rig::open(ram(1), options, ServerLimits::default());
    assert_eq!(
        send_targets(rig.portal, discovery()),
        format!(
            "TargetName={};TargetAddress=203.0.113.7:13260,1;",
            common::TARGET
        )
    );
}

#[test]
fn discovery_users_are_required_of_discovery_sessions_only() {
    let rig = Rig::ram();
    let at = rig.portal;
    assert!(
        is_refused(at, credentials("finder", "finder's secret", None)),
        "no target has CHAP users"
    );
    let mutual = Some(("the daemon", "the daemon's secret"));
    let users = || [("finder".to_owned(), user("finder's secret", mutual))].into();
    assert!(rig.server.set_discovery_users(users()));
    assert!(
        !rig.server.set_discovery_users(users()),
        "they are the same"
    );
    assert!(is_refused(at, discovery()));
    assert!(is_refused(
        at,
        credentials("finder", "another secret", None)
    ));
    assert!(is_refused(
        at,
        credentials("another", "finder's secret", None)
    ));
    let expected = format!("TargetName={};TargetAddress={at},1;", common::TARGET);
    for mutual in [None, mutual] {
        let found = send_targets(at, credentials("finder", "finder's secret", mutual));
        assert_eq!(found, expected);
    }
    let liar = Some(("the daemon", "of another daemon"));
    assert!(is_refused(
        at,
        credentials("finder", "finder's secret", liar)
    ));
    // The target itself has no users.
    Client::login(at, settings(1, Offer::default()), 1);
    assert!(rig.server.set_discovery_users([].into()));
    assert_eq!(send_targets(at, discovery()), expected);
}

#[test]
fn chap_only_discovery_uses_the_users_of_a_target() {
    let options = TargetOptions {
        demo_mode: DemoMode::None,
        chap_users: [("ann".to_owned(), user("secret of ann", None))].into(),
        ..target()
    };
    let rig = Rig::open(ram(1), options, ServerLimits::default());
    let at = rig.portal;
    // The same name with another secret at another target.
    let disk = Disk::new("d9", None, ram(1)).unwrap();
    let other = TargetOptions {
        name: OTHER.to_owned(),
        portals: vec![at.to_string().parse().unwrap()],
        chap_users: [("ann".to_owned(), user("secret of another", None))].into(),
        ..target()
    };
    rig.server
        .add_target(other, &[(0, Arc::new(disk))])
        .unwrap();
    let all = send_targets(at, discovery());
    assert!(all.contains(common::TARGET) && all.contains(OTHER), "{all}");
    for secret in ["secret of ann", "secret of another"] {
        assert_eq!(send_targets(at, credentials("ann", secret, None)), all);
    }
    assert!(is_refused(
        at,
        credentials("ann", "unknown secret value", None)
    ));
    // Discovery with its own users does not accept those of targets.
    let finder = [("finder".to_owned(), user("finder's secret", None))];
    rig.server.set_discovery_users(finder.into());
    assert!(is_refused(at, credentials("ann", "secret of ann", None)));
}
