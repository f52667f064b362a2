//! All spellings of an iSCSI name are one initiator or target (RFC 7143, 4.2.7): case, and RFC 3722 normalisation.

mod common;

use common::{Client, Rig, ram, settings, target};
use iscsi::initiator::{Initiator, InitiatorSettings};
use iscsi::negotiation::Offer;
use iscsi_target::{AclEntry, DemoMode, ServerError, ServerLimits, TargetOptions};

/// Returns settings with this name and the ISID of initiator 1.
fn named(initiator: &str) -> InitiatorSettings {
    InitiatorSettings {
        initiator_name: initiator.to_owned(),
        ..settings(1, Offer::default())
    }
}

fn log_in(rig: &Rig, settings: InitiatorSettings) -> Client {
    let mut client = Client::login(rig.portal, settings, 1);
    client.settle();
    client
}

/// Spellings of one name: full-width digits, and capitals.
const SPELLINGS: [&str; 3] = [
    "iqn.2026-11.org.example:i1",
    "IQN.2026-11.ORG.Example:I1",
    "iqn.2026-11.org.example:i\u{ff11}",
];

#[test]
fn access_lists_match_every_spelling_of_a_name() {
    for listed in SPELLINGS {
        let options = TargetOptions {
            demo_mode: DemoMode::None,
            acl: vec![AclEntry {
                initiator: Some(listed.to_owned()),
                network: None,
                read_only: false,
            }],
            ..target()
        };
        let rig = Rig::open(ram(1), options, ServerLimits::default());
        for name in SPELLINGS {
            assert_eq!(
                log_in(&rig, named(name)).write(0, 0, vec![1; 512]).status,
                0
            );
        }
    }
}

#[test]
fn login_with_another_spelling_reinstates_the_session() {
    let rig = Rig::ram();
    let mut old = log_in(&rig, named(SPELLINGS[0]));
    assert_eq!(old.read(0, 0, 1).status, 0);
    for name in &SPELLINGS[1..] {
        let mut new = log_in(&rig, named(name));
        old.until(|old| old.is_closed(0));
        assert_eq!(new.read(0, 0, 1).status, 0);
        old = new;
    }
    let sessions = rig.server.sessions();
    assert_eq!(sessions.len(), 1);
    assert_eq!(sessions[0].initiator, SPELLINGS[0]);
    let initiators = rig.server.initiators();
    assert_eq!(initiators.len(), 1, "{initiators:?}");
    assert_eq!(initiators[0].initiator, SPELLINGS[0]);
}

/// Sends PERSISTENT RESERVE OUT with a service action, a type, the key and the service action key. Returns the status.
fn reserve_out(client: &mut Client, action: u8, kind: u8, keys: (u64, u64)) -> u8 {
    let mut cdb = vec![0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
    cdb.resize(10, 0);
    let mut list = keys.0.to_be_bytes().to_vec();
    list.extend(keys.1.to_be_bytes());
    list.resize(24, 0);
    client.run(0, Initiator::write(0, &cdb, list)).status
}

#[test]
fn reservation_belongs_to_the_initiator_however_it_spells_its_name() {
    let rig = Rig::ram();
    let mut client = log_in(&rig, named(SPELLINGS[0]));
    assert_eq!(reserve_out(&mut client, 0, 0, (0, 7)), 0, "REGISTER");
    assert_eq!(
        reserve_out(&mut client, 1, 3, (7, 0)),
        0,
        "RESERVE: exclusive access"
    );
    let mut again = log_in(&rig, named(SPELLINGS[1]));
    assert_eq!(again.write(0, 0, vec![1; 512]).status, 0);
    let mut other = log_in(&rig, settings(2, Offer::default()));
    assert_eq!(
        other.write(0, 0, vec![1; 512]).status,
        0x18,
        "reservation conflict"
    );
    assert_eq!(reserve_out(&mut again, 2, 3, (7, 0)), 0, "RELEASE");
}

#[test]
fn target_has_one_name_in_all_spellings() {
    let rig = Rig::ram();
    let upper = common::TARGET.to_ascii_uppercase();
    for name in [common::TARGET, &upper, "iqn.2026-11.org.example:t\u{ff10}"] {
        let settings = InitiatorSettings {
            target_name: Some(name.to_owned()),
            ..settings(1, Offer::default())
        };
        assert_eq!(log_in(&rig, settings).read(0, 0, 1).status, 0);
    }
    let again = TargetOptions {
        name: upper,
        ..target()
    };
    let refused = rig.server.add_target(again, &[]);
    assert!(matches!(refused, Err(ServerError::Exists(name)) if name == common::TARGET));
}
