//! iSCSI targets: their keys, and the values given for them.

use iscsi::access::{Announced, DemoMode};
use scsi::{AccessState, AccessStates, StateSetters};
use serde_json::json;

use super::access_list::{ACL_KEYS, acl_value, read_acl};
use super::diagnostics::{Mistake, MistakeKind};
use super::export_keys::{DEDICATED, ExportKey, ExportKind, WORKERS, texts};
use super::key::{Item, Key, Kind, NONE, REQUIRED, RunTime, schema_of};
use super::location::Located;
use super::lun::{LUN_COMMAND, TARGET_LUN_KEYS, luns_value, read_luns};
use super::model::{ExportConfig, LunConfig, Transport};
use super::readers::{ISCSI_NAME, SECRET_FILE, parsed, read_list};
use super::setting::{Choice, key};
use super::target_keys::{LOGIN_KEYS, TARGET_KEYS};
use super::value::{Raw, Reader, items_of, text_of};

const DISKS_ALLOWED: &str = "a list of names of disks: LUNs from 0 in this order";
const LUN_EXAMPLE: &str = "tables such as { lun = 4, disk = \"d0\" }";
const PORTALS_ALLOWED: &str = "a list of addresses, such as \"192.0.2.1\", \"127.0.0.1:3260\" or \"[::1]:3260,2\" (portal group 2)";
const ANNOUNCE_ALLOWED: &str = "an address or a list of them, such as \"203.0.113.7:3260\" or \"san.example.org:3260,2\" (for portal group 2)";
const ACCESS_STATES_ALLOWED: &str = "a list of portal groups with their states, such as [\"2=standby\"]; states are \
     active/optimized, active/non-optimized, standby and unavailable";
const ACL_EXAMPLE: &str =
    "tables such as { initiator = \"iqn...\", network = \"192.0.2.0/24\", read_only = true }";

/// An iSCSI target.
pub static ISCSI: ExportKind = ExportKind {
    transport: Transport::Iscsi,
    word: "iscsi",
    table: "iscsi",
    form: "IQN=DISK,DISK,... (LUNs from 0 in this order): iqn.2026-11.org.example:t0=d0,d1",
    example: "tables with the header [[iscsi]]",
    schema: "Iscsi",
    summary: "An iSCSI target.",
    keys: &[
        ("iSCSI targets", ISCSI_KEYS),
        ("Limits of an iSCSI target at a login", LOGIN_KEYS),
        ("Limits of an iSCSI target for its sessions", TARGET_KEYS),
    ],
    queues: 0,
    relate,
    elsewhere: |key| match key {
        "disk" => Some(format!(
            "iscsi: list a target's disks in `disks`: {DISKS_ALLOWED}"
        )),
        "portal" => Some(format!("iscsi: `portals` must be {PORTALS_ALLOWED}")),
        _ => None,
    },
};

/// All keys except those of logins.
pub static ISCSI_KEYS: &[ExportKey] = &[
    key! { "name": ISCSI_NAME; REQUIRED; RunTime::ADD_AGAIN; "name of the target"; both name },
    key! { "alias": Kind::Text("any", "a text"); NONE; RunTime::RELOAD; "descriptive name"; both iscsi.alias },
    key! { "disks": Kind::List("list of names of disks", DISKS_ALLOWED, Item::Text); NONE; LUN_COMMAND;
        "logical units from 0 on, in this order";
        // `lun` contains them, for all numbers.
        read |key, reader, target| {
            let disks = read_list(reader, key.name, DISKS_ALLOWED);
            let lun = |(lun, disk): (u16, Located<String>)| LunConfig { target: 0, lun, disk: disk.value };
            target.luns.extend((0..).zip(disks).map(lun));
        };
        get |_| None
    },
    key! { "lun": Kind::List("list of tables", LUN_EXAMPLE,
            Item::Table { fields: &["lun", "disk"], schema: || schema_of(TARGET_LUN_KEYS) });
        NONE; LUN_COMMAND; "logical units with numbers, instead of `disks`: `{ lun = 4, disk = \"d0\" }`";
        read |key, reader, target| target.luns.extend(read_luns(key.name, TARGET_LUN_KEYS, LUN_EXAMPLE, reader));
        get |target| Some(luns_value(&target.luns))
    },
    key! { "portals": Kind::List("list of addresses", PORTALS_ALLOWED, Item::Text); REQUIRED; RunTime::RELOAD;
        "`\"192.0.2.1\"`, `\"127.0.0.1:3260\"`, `\"[::1]:3260,2\"`: port 3260 and portal group 1 unless given";
        read |key, reader, target| {
            let texts = read_list(reader, key.name, PORTALS_ALLOWED);
            let portals = texts.iter().filter_map(|text| parsed(reader, key.name, text));
            target.iscsi.portals = portals.collect();
        };
        get |target| texts(&target.iscsi.portals)
    },
    key! { "announce": Kind::List("string or list: addresses", ANNOUNCE_ALLOWED, Item::Text); "the portals"; RunTime::RELOAD;
        "[addresses in discovery responses](operations.md#discovery), instead of the portals of the same group";
        read |_, reader, target| target.iscsi.announce = read_announce(reader, target);
        get |target| texts(&target.iscsi.announce)
    },
    key! { "access_states": Kind::List("list of `GROUP=STATE`", ACCESS_STATES_ALLOWED, Item::Text); "`active/optimized` for all";
        RunTime("`lunette export access-state`, reload");
        "`\"2=standby\"`: [access states](operations.md#target-port-groups) (ALUA) of portal groups: `active/optimized`, \
            `active/non-optimized`, `standby`, `unavailable`. In a flag `access_states=2=standby+3=unavailable`";
        read |key, reader, target| target.iscsi.access_states = read_access_states(key, reader, target);
        get |target| {
            let states = target.iscsi.access_states.iter();
            texts(states.map(|(group, state)| format!("{group}={}", state.name())))
        }
    },
    // Initiators may set states by default, as LIO, SCST and most arrays allow; so does every earlier version of this program.
    key! { "explicit_alua": Kind::Boolean; "`true`"; RunTime::RELOAD;
        "initiators may set access states (SET TARGET PORT GROUPS). `false`: only the administrator may";
        read |key, reader, target| {
            if reader.boolean(key.name).is_some_and(|at| !at.value) {
                target.iscsi.state_setters = StateSetters::AdministratorOnly;
            }
        };
        get |target| (target.iscsi.state_setters == StateSetters::AdministratorOnly).then_some(json!(false))
    },
    key! { "demo_mode": DemoMode::KIND; "`none`"; RunTime::RELOAD;
        "rights of initiators without a CHAP user or an entry in `acl`"; both iscsi.demo_mode
    },
    key! { "chap_users": SECRET_FILE; NONE; RunTime::RELOAD_REREAD;
        "CHAP users, one per line: `NAME SECRET [TARGET_NAME TARGET_SECRET]`; secrets have at least 12 characters. With this key \
            every initiator must authenticate"; both iscsi.chap_users
    },
    key! { "acl": Kind::List("list of tables", ACL_EXAMPLE,
            Item::Table { fields: &["initiator", "network", "read_only"], schema: || schema_of(ACL_KEYS) });
        NONE; RunTime::RELOAD; "initiators that may log in";
        read |key, reader, target| {
            let entries = reader.objects(key.name, ACL_EXAMPLE).into_iter();
            target.iscsi.acl = entries.map(|fields| read_acl(fields, reader.diagnostics)).collect();
        };
        get |target| (!target.iscsi.acl.is_empty()).then(|| acl_value(&target.iscsi.acl))
    },
    WORKERS,
    Key {
        help: "start a worker for this target alone",
        ..DEDICATED
    },
];

/// Reports that `disks` and `lun` are given.
fn relate(reader: &mut Reader<'_, '_>, _target: &ExportConfig) {
    let fields = reader.fields;
    if let ([_, ..], [_, ..], Some(at)) =
        (fields.items("disks"), fields.items("lun"), fields.at("lun"))
    {
        let message = "iscsi: `disks` and `lun` exclude each other";
        let mistake = Mistake::new(MistakeKind::Key, at, message);
        let help = "`disks` numbers LUNs from 0; to choose the numbers, list all disks in `lun`";
        reader.diagnostics.push(mistake.help(help));
    }
}

/// Returns true if a portal of this group is configured, or if a portal is wrong.
fn may_have_group(reader: &Reader<'_, '_>, target: &ExportConfig, group: u16) -> bool {
    let given = reader.fields.items("portals").len();
    given != target.iscsi.portals.len() || target.has_portal_group(group)
}

/// Reads the announced addresses of portal groups. Each needs a portal of that group.
fn read_announce(reader: &mut Reader<'_, '_>, target: &ExportConfig) -> Vec<Announced> {
    let mut announce = Vec::new();
    let items = match reader.raw("announce") {
        None => return announce,
        Some(value) => match &value.value {
            Raw::List(items) => items.as_slice(),
            _ => std::slice::from_ref(value),
        },
    };
    for item in items {
        let text = text_of("announce", item, ANNOUNCE_ALLOWED, reader.diagnostics);
        let one = text.and_then(|text| parsed::<Announced>(reader, "announce", &text));
        let Some(one) = one else { continue };
        if !may_have_group(reader, target, one.group) {
            let message = format!("`announce`: no portal has the portal group {}", one.group);
            let help = "add the portal group after a comma, such as \"203.0.113.7:3260,2\"";
            reader.diagnostics.conflict(&item.location, message, help);
        }
        announce.push(one);
    }
    announce
}

/// Reads `GROUP=STATE` items. Each needs a portal of that group.
fn read_access_states(
    key: &ExportKey,
    reader: &mut Reader<'_, '_>,
    target: &ExportConfig,
) -> AccessStates {
    let mut states = AccessStates::new();
    let Some(value) = reader.raw(key.name) else {
        return states;
    };
    let Some(items) = items_of(value) else {
        reader.refuse(key.name, value, ACCESS_STATES_ALLOWED);
        return states;
    };
    for item in &items {
        let text = text_of(key.name, item, ACCESS_STATES_ALLOWED, reader.diagnostics);
        let Some(text) = text else { break };
        let Some((group, state)) = access_state(&text.value) else {
            reader.refuse(key.name, item, ACCESS_STATES_ALLOWED);
            continue;
        };
        if !may_have_group(reader, target, group) {
            let message = format!("`{}`: no portal has the portal group {group}", key.name);
            let help = "add a portal of the group to `portals`, such as \"192.0.2.1:3260,2\"";
            reader.diagnostics.conflict(&item.location, message, help);
        }
        if states.insert(group, state).is_some() {
            let message = format!("`{}`: portal group {group} is given twice", key.name);
            reader.diagnostics.remedy(
                MistakeKind::Value,
                &item.location,
                message,
                "name each group once",
            );
        }
    }
    states.retain(|_, state| *state != AccessState::default());
    states
}

/// Parses `GROUP=STATE`.
fn access_state(text: &str) -> Option<(u16, AccessState)> {
    let (group, state) = text.split_once('=')?;
    let mut states = AccessState::SETTABLE.into_iter();
    Some((group.parse().ok()?, states.find(|one| one.name() == state)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Diagnostics, Flags, IscsiConfig, Surroundings, parse};

    fn iscsi_of(config: &Config) -> &IscsiConfig {
        &target_of(config).iscsi
    }

    fn target_of(config: &Config) -> &ExportConfig {
        config.exports().next().expect("a target")
    }

    fn from_flags(iscsi: &[&str], portal: &[&str]) -> Result<Config, Diagnostics> {
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let flags = Flags {
            disk: owned(&["d0=ram:1M", "d1=ram:1M"]),
            iscsi: owned(iscsi),
            portal: owned(portal),
            demo_mode: Some("rw".to_owned()),
            ..Flags::default()
        };
        parse(None, &flags, &Surroundings::of_this_process())
    }

    #[test]
    fn portal_groups_have_access_states() {
        let target = "iqn.2026-11.org.example:t0=d0";
        let read = |options: &str| {
            let portals = ["127.0.0.1:0,1", "127.0.0.1:0,2", "127.0.0.1:0,3"];
            from_flags(&[&format!("{target},{options}")], &portals)
        };
        let config = read("access_states=2=standby+3=active/non-optimized+1=active/optimized");
        let config = config.unwrap_or_else(|mistakes| panic!("{mistakes}"));
        let states = &iscsi_of(&config).access_states;
        let wanted = [
            (2, AccessState::Standby),
            (3, AccessState::ActiveNonOptimized),
        ];
        assert_eq!(*states, AccessStates::from(wanted));
        let file = crate::render(&config);
        assert!(
            file.contains("access_states = [\"2=standby\", \"3=active/non-optimized\"]"),
            "{file}"
        );
        let again = parse(
            Some(("lunette.toml", &file)),
            &Flags::default(),
            &Surroundings::of_this_process(),
        );
        assert_eq!(again.unwrap().exports, config.exports);
        for (options, expected) in [
            (
                "access_states=4=standby",
                "no portal has the portal group 4",
            ),
            ("access_states=2=asleep", "active/non-optimized, standby"),
            ("access_states=2=offline", "active/non-optimized, standby"),
            ("access_states=standby", "active/non-optimized, standby"),
            ("access_states=2=standby+2=standby", "given twice"),
        ] {
            let mistakes = read(options).unwrap_err().to_string();
            assert!(mistakes.contains(expected), "{options}: {mistakes}");
        }
        let config = read("explicit_alua=false").unwrap();
        let setters = iscsi_of(&config).state_setters;
        assert_eq!(setters, StateSetters::AdministratorOnly);
    }

    #[test]
    fn a_flag_names_a_target_and_its_disks_in_order() {
        let config = from_flags(
            &["iqn.2026-11.org.example:t0=d1,d0,alias=scratch"],
            &["127.0.0.1:0", "[::1]:0,2"],
        );
        let config = config.unwrap_or_else(|mistakes| panic!("{mistakes}"));
        let target = target_of(&config);
        assert_eq!(target.name, "iqn.2026-11.org.example:t0");
        let luns: Vec<_> = target.luns.iter().map(|l| (l.lun, &*l.disk)).collect();
        assert_eq!(luns, [(0, "d1"), (1, "d0")]);
        assert_eq!(target.iscsi.alias.as_deref(), Some("scratch"));
        assert_eq!(target.iscsi.portals[1].group, 2);
        assert_eq!(target.iscsi.demo_mode, DemoMode::ReadWrite);
    }

    #[test]
    fn file_equals_the_flags_and_round_trips() {
        let text = "
            discovery_auth = \"/etc/lunette/discovery\"
            [[disk]]
            name = \"d0\"
            backend = \"ram\"
            size = \"1M\"
            [[iscsi]]
            name = \"iqn.2026-11.org.example:t0\"
            disks = [\"d0\"]
            portals = [\"127.0.0.1\"]
            announce = \"san.example.org\"
            chap_users = \"/etc/lunette/chap\"
            acl = [{ initiator = \"iqn.2026-11.org.example:i\", network = \"192.0.2.0/24\", read_only = true }]
        ";
        let surroundings = Surroundings::of_this_process();
        let read = |text: &str| parse(Some(("a.toml", text)), &Flags::default(), &surroundings);
        let config = read(text).unwrap_or_else(|mistakes| panic!("{mistakes}"));
        assert_eq!(iscsi_of(&config).demo_mode, DemoMode::None);
        assert_eq!(
            iscsi_of(&config).announce[0].to_string(),
            "san.example.org:3260,1"
        );
        assert!(iscsi_of(&config).acl[0].read_only);
        let path = std::path::Path::new("/etc/lunette/discovery");
        assert_eq!(config.discovery_auth.as_deref(), Some(path));
        let again = read(&crate::render(&config));
        assert_eq!(
            again.unwrap_or_else(|mistakes| panic!("{mistakes}")),
            config
        );
    }

    #[test]
    fn flags_announce_addresses_and_name_users_of_discovery() {
        let with = |announce: &[&str]| {
            let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
            let flags = Flags {
                disk: owned(&["d0=ram:1M"]),
                iscsi: owned(&["iqn.2026-11.org.example:t0=d0"]),
                portal: owned(&["10.0.0.5", "10.0.1.5:3261,2"]),
                announce: owned(announce),
                ..Flags::default()
            };
            let flags = flags.with("discovery-auth", "finders");
            parse(None, &flags, &Surroundings::of_this_process())
        };
        let config = with(&["203.0.113.7:13260", "[2001:db8::7]:3261,2"]);
        let config = config.unwrap_or_else(|mistakes| panic!("{mistakes}"));
        let addresses: Vec<String> = iscsi_of(&config)
            .announce
            .iter()
            .map(|a| a.to_string())
            .collect();
        assert_eq!(addresses, ["203.0.113.7:13260,1", "[2001:db8::7]:3261,2"]);
        assert_eq!(config.discovery_auth, Some("finders".into()));
        for (announce, expected) in [
            ("203.0.113.7:3260,3", "no portal has the portal group 3"),
            ("0.0.0.0:3260", "not an address that initiators can reach"),
            ("moon landing", "not an address such as"),
        ] {
            let mistakes = with(&[announce]).unwrap_err().to_string();
            assert!(mistakes.contains(expected), "{mistakes}");
        }
    }

    #[test]
    fn mistakes_name_the_allowed_values() {
        for (iscsi, portal, expected) in [
            ("moon=d0", "127.0.0.1", "not an iSCSI name"),
            (
                "iqn.2026-11.org.example:t0=d2",
                "127.0.0.1",
                "there is no disk `d2`",
            ),
            ("iqn.2026-11.org.example:t0=d0", "moon", "is not an address"),
            ("iqn.2026-11.org.example:t0", "127.0.0.1", "IQN=DISK"),
        ] {
            let mistakes = from_flags(&[iscsi], &[portal]).unwrap_err().to_string();
            assert!(mistakes.contains(expected), "{mistakes}");
        }
        let missing = from_flags(&["iqn.2026-11.org.example:t0=d0"], &[]).unwrap_err();
        assert!(
            missing.to_string().contains("`portals` is missing"),
            "{missing}"
        );
    }

    #[test]
    fn two_spellings_of_one_name_are_one_target() {
        let targets = [
            "iqn.2026-11.org.example:t0=d0",
            "IQN.2026-11.org.EXAMPLE:t0=d1",
        ];
        let mistakes = from_flags(&targets, &["127.0.0.1"]).unwrap_err();
        let mistakes = mistakes.to_string();
        assert!(mistakes.contains("is already used at"), "{mistakes}");
    }
}
