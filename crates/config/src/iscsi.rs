//! iSCSI targets: their keys, and the values given for them.

use std::path::{Path, PathBuf};

use block::ExportPlacement;
use iscsi::access::{Announced, DemoMode};
use scsi::{AccessState, AccessStates, StateSetters};
use serde_json::json;

use super::access_list::{ACL_KEYS, acl_value, read_acl};
use super::diagnostics::{Diagnostics, Mistake, MistakeKind};
use super::export::ExportObject;
use super::export_draft::{ExportDraft, ExportKind, dedicated, texts, workers};
use super::key::{
    Item, Key, KeyValue, Kind, NONE, REQUIRED, RunTime, key_values, read_all, schema_of,
};
use super::location::Located;
use super::lun::{LUN_COMMAND, LunDraft, TARGET_LUN_KEYS, luns_value, read_lun};
use super::model::{ExportConfig, IscsiConfig, LunConfig};
use super::readers::{ISCSI_NAME, SECRET_FILE, parsed, read_list};
use super::setting::{Choice, Setting, key};
use super::target_keys::TARGET_KEYS;
use super::value::{Fields, Raw, Reader, items_of, text_of};

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
    word: "iscsi",
    table: "iscsi",
    example: "tables with the header [[iscsi]]",
    schema: "Iscsi",
    summary: "An iSCSI target.",
    properties: || {
        let mut schema = schema_of(ISCSI_KEYS);
        let bounds = schema_of(TARGET_KEYS);
        if let (Some(all), Some(more)) = (
            schema["properties"].as_object_mut(),
            bounds["properties"].as_object(),
        ) {
            all.extend(more.clone());
        }
        schema
    },
    read: read_iscsi,
};

impl ExportObject for IscsiConfig {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> &'static str {
        ISCSI.word
    }

    fn fill(
        &mut self,
        name: String,
        _disk: Option<String>,
        _socket: Option<PathBuf>,
    ) -> Option<()> {
        self.name = name;
        Some(())
    }

    fn values(&self) -> Vec<KeyValue> {
        let mut values = key_values(ISCSI_KEYS, self);
        values.extend(key_values(TARGET_KEYS, self));
        values
    }

    /// Lists the disks only, if the logical units are numbered from 0.
    fn file_values(&self) -> Vec<KeyValue> {
        let mut values = self.values();
        if self.luns.iter().zip(0..).all(|(lun, at)| lun.lun == at)
            && let Some(disks) = ISCSI_KEYS.iter().find(|key| key.name == "disks")
            && let Some(lun) = values.iter_mut().find(|value| value.name == "lun")
        {
            *lun = KeyValue {
                name: disks.name,
                kind: &disks.kind,
                value: self.luns.iter().map(|lun| lun.disk.as_str()).collect(),
            };
        }
        values
    }

    fn placement(&self) -> &ExportPlacement {
        &self.placement
    }

    fn placement_mut(&mut self) -> &mut ExportPlacement {
        &mut self.placement
    }

    fn warning(&self) -> Option<String> {
        let is_closed =
            self.demo_mode == DemoMode::None && self.acl.is_empty() && self.chap_users.is_none();
        is_closed.then(|| {
            "no initiator may log in; hint: add initiators with `acl`, set `chap_users`, or set `demo_mode` to ro or rw for all initiators"
                .to_owned()
        })
    }

    fn luns(&self) -> Option<&[LunConfig]> {
        Some(&self.luns)
    }

    fn luns_mut(&mut self) -> Option<&mut Vec<LunConfig>> {
        Some(&mut self.luns)
    }

    fn only_target(&self) -> Option<u8> {
        Some(0)
    }

    fn chap_users(&self) -> Option<&Path> {
        self.chap_users.as_deref()
    }

    fn access_states(&self) -> Option<&AccessStates> {
        Some(&self.access_states)
    }

    fn access_states_mut(&mut self) -> Option<&mut AccessStates> {
        Some(&mut self.access_states)
    }

    fn has_portal_group(&self, group: u16) -> bool {
        self.portals.iter().any(|portal| portal.group == group)
    }

    fn path_mut(&mut self) -> Option<&mut PathBuf> {
        self.chap_users.as_mut()
    }

    /// Initiators spell a name in several ways (RFC 7143, 4.2.7.1). Portals may be shared.
    fn bars(&self, name: &str) -> bool {
        iscsi_name::is_same(&self.name, name)
    }
}

/// A key of a target.
pub type IscsiKey = Key<ExportDraft<IscsiConfig>, IscsiConfig>;

/// All keys except those of logins.
pub static ISCSI_KEYS: &[IscsiKey] = &[
    key! { "name": ISCSI_NAME; REQUIRED; RunTime::AddAnew; "name of the target"; set name; get |target| target.name.value() },
    key! { "alias": Kind::Text("any", "a text"); NONE; RunTime::Reload; "descriptive name"; both alias },
    key! { "disks": Kind::List("list of names of disks", DISKS_ALLOWED, Item::Text); NONE; LUN_COMMAND;
        "logical units from 0 on, in this order";
        // `lun` contains them, for all numbers.
        read |key, reader, draft| draft.disks = read_list(reader, key.name, DISKS_ALLOWED); get |_| None
    },
    key! { "lun": Kind::List("list of tables", LUN_EXAMPLE,
            Item::Table { fields: &["lun", "disk"], schema: || schema_of(TARGET_LUN_KEYS) });
        NONE; LUN_COMMAND; "logical units with numbers, instead of `disks`: `{ lun = 4, disk = \"d0\" }`";
        read |key, reader, draft| {
            for fields in reader.objects(key.name, LUN_EXAMPLE) {
                let mut lun = read_lun(TARGET_LUN_KEYS, fields, reader.diagnostics());
                lun.target = Some(Located::new(0, fields.location.clone()));
                draft.luns.push(lun);
            }
        };
        get |target| Some(luns_value(&target.luns))
    },
    key! { "portals": Kind::List("list of addresses", PORTALS_ALLOWED, Item::Text); REQUIRED; RunTime::Reload;
        "`\"192.0.2.1\"`, `\"127.0.0.1:3260\"`, `\"[::1]:3260,2\"`: port 3260 and portal group 1 unless given";
        read |key, reader, draft| {
            let texts = read_list(reader, key.name, PORTALS_ALLOWED);
            let portals: Vec<_> = texts.iter().map(|text| parsed(reader, key.name, text)).collect();
            draft.has_wrong_portal = portals.contains(&None);
            draft.portals = portals.into_iter().flatten().collect();
        };
        get |target| texts(&target.portals)
    },
    key! { "announce": Kind::List("string or list: addresses", ANNOUNCE_ALLOWED, Item::Text); "the portals"; RunTime::Reload;
        "[addresses in discovery responses](operations.md#discovery), instead of the portals of the same group";
        read |_, reader, draft| draft.announce = read_announce(reader, draft);
        get |target| texts(&target.announce)
    },
    key! { "access_states": Kind::List("list of `GROUP=STATE`", ACCESS_STATES_ALLOWED, Item::Text); "`active/optimized` for all";
        RunTime::Command("lunette export access-state");
        "`\"2=standby\"`: [access states](operations.md#target-port-groups) (ALUA) of portal groups: `active/optimized`, \
            `active/non-optimized`, `standby`, `unavailable`. In a flag `access_states=2=standby+3=unavailable`";
        read |key, reader, draft| draft.access_states = read_access_states(key, reader, draft);
        get |target| {
            let states = target.access_states.iter();
            texts(states.map(|(group, state)| format!("{group}={}", state.name())))
        }
    },
    // Initiators may set states by default, as LIO, SCST and most arrays allow; so does every earlier version of this program.
    key! { "explicit_alua": Kind::Boolean; "`true`"; RunTime::Reload;
        "initiators may set access states (SET TARGET PORT GROUPS). `false`: only the administrator may";
        read |key, reader, draft| {
            if reader.boolean(key.name).is_some_and(|at| !at.value) {
                draft.state_setters = StateSetters::AdministratorOnly;
            }
        };
        get |target| (target.state_setters == StateSetters::AdministratorOnly).then_some(json!(false))
    },
    key! { "demo_mode": DemoMode::KIND; "`none`"; RunTime::Reload;
        "rights of initiators without a CHAP user or an entry in `acl`"; both demo_mode
    },
    key! { "chap_users": SECRET_FILE; NONE; RunTime::ReloadReread;
        "CHAP users, one per line: `NAME SECRET [TARGET_NAME TARGET_SECRET]`; secrets have at least 12 characters. With this key \
            every initiator must authenticate"; both chap_users
    },
    key! { "acl": Kind::List("list of tables", ACL_EXAMPLE,
            Item::Table { fields: &["initiator", "network", "read_only"], schema: || schema_of(ACL_KEYS) });
        NONE; RunTime::Reload; "initiators that may log in";
        read |key, reader, draft| {
            let entries = reader.objects(key.name, ACL_EXAMPLE).into_iter();
            draft.acl = entries.map(|fields| read_acl(fields, reader.diagnostics())).collect();
        };
        get |target| (!target.acl.is_empty()).then(|| acl_value(&target.acl))
    },
    workers(),
    dedicated("start a worker for this target alone"),
];

/// Reads a target.
pub fn read_iscsi(fields: &Fields, diagnostics: &mut Diagnostics) -> ExportDraft {
    let mut reader = Reader::new(fields, "iscsi", diagnostics);
    let mut draft = ExportDraft::<IscsiConfig>::default();
    read_all(ISCSI_KEYS, &mut reader, &mut draft);
    read_all(TARGET_KEYS, &mut reader, &mut draft.bounds);
    draft.placement.relate(&mut reader);
    let first = fields.entries.iter().find(|field| field.key.value == "lun");
    if let (Some(first), false) = (first, draft.disks.is_empty() || draft.luns.is_empty()) {
        let message = "iscsi: `disks` and `lun` exclude each other";
        let mistake = Mistake::new(MistakeKind::Key, &first.value.location, message);
        let help = "`disks` numbers LUNs from 0; to choose the numbers, list all disks in `lun`";
        reader.diagnostics().push(mistake.help(help));
    }
    reader.finish(|key| match key {
        "disk" => Some(format!(
            "iscsi: list a target's disks in `disks`: {DISKS_ALLOWED}"
        )),
        "portal" => Some(format!("iscsi: `portals` must be {PORTALS_ALLOWED}")),
        _ => None,
    });
    let numbered = (0..).zip(std::mem::take(&mut draft.disks));
    draft.luns.extend(numbered.map(|(number, disk)| LunDraft {
        target: Some(Located::new(0, disk.location.clone())),
        lun: Some(Located::new(number, disk.location.clone())),
        disk: Some(disk),
    }));
    draft.of_any_kind(ExportConfig::Iscsi)
}

/// Returns true if a portal of this group is configured, or if a portal is wrong.
fn may_have_group(draft: &ExportDraft<IscsiConfig>, group: u16) -> bool {
    draft.has_wrong_portal || draft.has_portal_group(group)
}

/// Reads the announced addresses of portal groups. Each needs a portal of that group.
fn read_announce(reader: &mut Reader<'_, '_>, draft: &ExportDraft<IscsiConfig>) -> Vec<Announced> {
    let texts = match reader.raw("announce") {
        None => Vec::new(),
        Some(value) => match &value.value {
            Raw::List(items) => {
                let text = |item| text_of("announce", item, ANNOUNCE_ALLOWED, reader.diagnostics());
                items.iter().filter_map(text).collect()
            }
            _ => text_of("announce", value, ANNOUNCE_ALLOWED, reader.diagnostics())
                .into_iter()
                .collect(),
        },
    };
    let mut announce = Vec::new();
    for text in &texts {
        let Some(one) = parsed::<Announced>(reader, "announce", text) else {
            continue;
        };
        if !may_have_group(draft, one.group) {
            let message = format!("`announce`: no portal has the portal group {}", one.group);
            let mistake = Mistake::new(MistakeKind::Relation, &text.location, message);
            let help = "add the portal group after a comma, such as \"203.0.113.7:3260,2\"";
            reader.diagnostics().push(mistake.help(help));
        }
        announce.push(one);
    }
    announce
}

/// Reads `GROUP=STATE` items. Each needs a portal of that group.
fn read_access_states(
    key: &IscsiKey,
    reader: &mut Reader<'_, '_>,
    draft: &ExportDraft<IscsiConfig>,
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
        let text = text_of(key.name, item, ACCESS_STATES_ALLOWED, reader.diagnostics());
        let Some(text) = text else { break };
        let Some((group, state)) = access_state(&text.value) else {
            reader.refuse(key.name, item, ACCESS_STATES_ALLOWED);
            continue;
        };
        if !may_have_group(draft, group) {
            let message = format!("`{}`: no portal has the portal group {group}", key.name);
            let mistake = Mistake::new(MistakeKind::Relation, &item.location, message);
            let help = "add a portal of the group to `portals`, such as \"192.0.2.1:3260,2\"";
            reader.diagnostics().push(mistake.help(help));
        }
        if states.insert(group, state).is_some() {
            let message = format!("`{}`: portal group {group} is given twice", key.name);
            let mistake = Mistake::new(MistakeKind::Value, &item.location, message);
            reader
                .diagnostics()
                .push(mistake.help("name each group once"));
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
    use crate::{Config, Flags, Surroundings, parse};

    fn iscsi_of(config: &Config) -> &IscsiConfig {
        config.iscsi().next().expect("a target")
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
        let target = iscsi_of(&config);
        assert_eq!(target.name, "iqn.2026-11.org.example:t0");
        let luns: Vec<_> = target.luns.iter().map(|l| (l.lun, &*l.disk)).collect();
        assert_eq!(luns, [(0, "d1"), (1, "d0")]);
        assert_eq!(target.alias.as_deref(), Some("scratch"));
        assert_eq!(target.portals[1].group, 2);
        assert_eq!(target.demo_mode, DemoMode::ReadWrite);
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
        assert_eq!(config.discovery_auth, Some(PathBuf::from("finders")));
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
