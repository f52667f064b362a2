//! iSCSI targets: what a file and flags say of them.
//!
//! A flag names a target and its disks, `IQN=d0,d1`; portals, demo mode and CHAP users have flags of their own, which are
//! for all targets that flags name.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use reactor::ExportPlacement;

pub use iscsi_target::{AclEntry, Announced, ChapUser, DemoMode, LoginBounds, Network, Portal};

use super::diagnostics::{Diagnostics, Mistake, MistakeKind};
use super::flag_source::{Flags, options, parts};
use super::model::{LUNS_MAX, LunConfig};
use super::objects::LunDraft;
use super::place::{At, Place, Source};
use super::placement::{PlacementDraft, read_placement};
use super::target_keys::TARGET_KEYS;
use super::value::{Field, Fields, Raw, Reader, text_of, wrong};

/// How an iSCSI target is said in a flag.
pub const ISCSI_FORM: &str =
    "IQN=DISK,DISK,... (LUNs from 0 in this order): iqn.2026-11.org.example:t0=d0,d1";

const NAME_ALLOWED: &str = "an iSCSI name, such as iqn.2026-11.org.example:t0";
const DISKS_ALLOWED: &str = "a list of names of disks: LUNs from 0 in this order";
const LUN_EXAMPLE: &str = "tables such as { lun = 4, disk = \"d0\" }";
const PORTALS_ALLOWED: &str = "a list of addresses, such as \"192.0.2.1\", \"127.0.0.1:3260\" or \"[::1]:3260,2\" (portal group 2)";
const ANNOUNCE_ALLOWED: &str = "an address or a list of them, such as \"203.0.113.7:3260\" or \"san.example.org:3260,2\" (for portal group 2)";
const ACL_EXAMPLE: &str =
    "tables such as { initiator = \"iqn...\", network = \"192.0.2.0/24\", read_only = true }";
const MODES: [(&str, DemoMode); 3] = [
    ("none", DemoMode::None),
    ("ro", DemoMode::ReadOnly),
    ("rw", DemoMode::ReadWrite),
];

/// An iSCSI target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IscsiConfig {
    /// Its iSCSI name.
    pub name: String,
    /// What people call it.
    pub alias: Option<String>,
    /// Its disks; the target number is always 0.
    pub luns: Vec<LunConfig>,
    /// Where it is found.
    pub portals: Vec<Portal>,
    /// Where initiators are told to find it, instead of the portals of the same group.
    pub announce: Vec<Announced>,
    /// What initiators may do that nothing else admits.
    pub demo_mode: DemoMode,
    /// The file with the CHAP users.
    pub chap_users: Option<PathBuf>,
    /// Initiators that may log in.
    pub acl: Vec<AclEntry>,
    /// What it agrees to in logins.
    pub bounds: LoginBounds,
    /// Which workers serve it.
    pub placement: ExportPlacement,
}

/// What was said about a target.
pub struct IscsiDraft {
    pub name: Option<At<String>>,
    pub luns: Vec<LunDraft>,
    pub placement: PlacementDraft,
    /// Nothing was wrong with the rest.
    pub complete: Option<IscsiConfig>,
}

/// A target.
pub fn read_iscsi(fields: &Fields, diagnostics: &mut Diagnostics) -> IscsiDraft {
    let mut reader = Reader::new(fields, "iscsi", diagnostics);
    reader.require("name", NAME_ALLOWED);
    reader.require("portals", PORTALS_ALLOWED);
    let name = read_name(&mut reader);
    let alias = reader.text("alias", "a text").map(|at| at.value);
    let disks = read_list(&mut reader, "disks", DISKS_ALLOWED);
    let luns = reader.objects("lun", LUN_EXAMPLE);
    if let (Some(first), false) = (luns.first(), disks.is_empty()) {
        let message = "iscsi: `disks` and `lun` exclude each other";
        let mistake = Mistake::new(MistakeKind::Key, &first.place, message);
        let help = "`disks` numbers LUNs from 0; to choose numbers, list all disks in `lun`";
        reader.diagnostics().push(mistake.help(help));
    }
    let texts = read_list(&mut reader, "portals", PORTALS_ALLOWED);
    let portals: Vec<Option<Portal>> = texts
        .iter()
        .map(|text| parsed(&mut reader, "portals", text))
        .collect();
    let portals: Option<Vec<Portal>> = portals.into_iter().collect();
    let announce = read_announce(&mut reader, portals.as_deref());
    let demo_mode = reader.choice("demo_mode", &MODES);
    let chap_users = reader.text("chap_users", "the path of a file");
    let acl = reader.objects("acl", ACL_EXAMPLE);
    let mut bounds = LoginBounds::default();
    for key in TARGET_KEYS {
        (key.read)(key, &mut reader, &mut bounds);
    }
    let placement = read_placement(&mut reader);
    reader.finish(|key| match key {
        "disk" => Some(format!(
            "iscsi: a target's disks are its `disks`: {DISKS_ALLOWED}"
        )),
        "portal" => Some(format!("iscsi: `portals` is {PORTALS_ALLOWED}")),
        _ => None,
    });
    let mut luns: Vec<LunDraft> = luns
        .iter()
        .map(|fields| read_iscsi_lun(fields, diagnostics))
        .collect();
    luns.extend((0..).zip(disks).map(|(number, disk)| LunDraft {
        target: Some(At::new(0, disk.place.clone())),
        lun: Some(At::new(number, disk.place.clone())),
        disk: Some(disk),
    }));
    let acl: Option<Vec<AclEntry>> = acl
        .iter()
        .map(|fields| read_acl(fields, diagnostics))
        .collect();
    let attached: Option<Vec<LunConfig>> = luns.iter().map(LunDraft::complete).collect();
    let complete = name.as_ref().zip(portals).zip(announce).zip(acl);
    let complete = complete.zip(attached);
    let complete = complete.map(|((((name, portals), announce), acl), luns)| IscsiConfig {
        name: name.value.clone(),
        alias,
        luns,
        portals,
        announce,
        demo_mode: demo_mode.map_or(DemoMode::None, |at| at.value),
        chap_users: chap_users.map(|at| PathBuf::from(at.value)),
        acl,
        bounds,
        placement: placement.placement(),
    });
    IscsiDraft {
        name,
        luns,
        placement,
        complete,
    }
}

fn read_name(reader: &mut Reader<'_, '_>) -> Option<At<String>> {
    let name = reader.text("name", NAME_ALLOWED)?;
    if !iscsi_target::is_iscsi_name(&name.value) {
        let message = format!("`name`: {:?} is not an iSCSI name", name.value);
        let mistake = Mistake::new(MistakeKind::Value, &name.place, message);
        reader.diagnostics().push(mistake.allowed(NAME_ALLOWED));
    }
    Some(name)
}

fn read_list(reader: &mut Reader<'_, '_>, key: &'static str, allowed: &str) -> Vec<At<String>> {
    let Some(value) = reader.raw(key) else {
        return Vec::new();
    };
    let Raw::List(items) = &value.value else {
        reader.refuse(key, value, allowed);
        return Vec::new();
    };
    let text = |item| text_of(key, item, allowed, reader.diagnostics());
    items.iter().filter_map(text).collect()
}

/// Addresses behind which the portals of a group are found; each needs such a group.
fn read_announce(
    reader: &mut Reader<'_, '_>,
    portals: Option<&[Portal]>,
) -> Option<Vec<Announced>> {
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
    let mut is_right = true;
    for text in &texts {
        let Some(one) = parsed::<Announced>(reader, "announce", text) else {
            is_right = false;
            continue;
        };
        let has_group = |portals: &[Portal]| portals.iter().any(|p| p.group == one.group);
        if !portals.is_none_or(has_group) {
            let message = format!("`announce`: no portal has the portal group {}", one.group);
            let mistake = Mistake::new(MistakeKind::Relation, &text.place, message);
            let help = "add the portal group after a comma, such as \"203.0.113.7:3260,2\"";
            reader.diagnostics().push(mistake.help(help));
        }
        announce.push(one);
    }
    is_right.then_some(announce)
}

fn parsed<T: FromStr<Err = String>>(
    reader: &mut Reader<'_, '_>,
    key: &str,
    text: &At<String>,
) -> Option<T> {
    match text.value.parse() {
        Ok(value) => Some(value),
        Err(what) => {
            let mistake = Mistake::new(MistakeKind::Value, &text.place, format!("`{key}`: {what}"));
            reader.diagnostics().push(mistake);
            None
        }
    }
}

/// A logical unit of a target, whose number may be said or not: it is 0.
fn read_iscsi_lun(fields: &Fields, diagnostics: &mut Diagnostics) -> LunDraft {
    let mut reader = Reader::new(fields, "lun", diagnostics);
    reader.require("lun", "0 to 16383");
    reader.require("disk", "the name of a disk");
    reader.number("target", 0..=0);
    let lun = reader.number("lun", 0..=u64::from(LUNS_MAX - 1));
    let disk = reader.text("disk", "the name of a disk");
    reader.finish(|_| None);
    LunDraft {
        target: Some(At::new(0, fields.place.clone())),
        lun: lun.map(|at| At::new(at.value as u16, at.place)),
        disk,
    }
}

fn read_acl(fields: &Fields, diagnostics: &mut Diagnostics) -> Option<AclEntry> {
    let mut reader = Reader::new(fields, "acl", diagnostics);
    let initiator = reader.text("initiator", NAME_ALLOWED);
    let text = reader.text("network", "an address or a network, such as 192.0.2.0/24");
    let network = match &text {
        Some(text) => Some(parsed::<Network>(&mut reader, "network", text)?),
        None => None,
    };
    let read_only = reader.boolean("read_only").is_some_and(|at| at.value);
    reader.finish(|_| None);
    Some(AclEntry {
        initiator: initiator.map(|at| at.value),
        network,
        read_only,
    })
}

/// The targets that flags name.
pub fn read_flags(
    flags: &Flags,
    source: &mut impl FnMut(&str, &String) -> Arc<Source>,
    diagnostics: &mut Diagnostics,
) -> Vec<IscsiDraft> {
    let field = |key: &str, value: At<Raw>| Field {
        key: At::new(key.to_owned(), value.place.clone()),
        value,
    };
    let word = |source: &Arc<Source>| At::new(Raw::Word(source.text.clone()), Place::whole(source));
    let mut common = Vec::new();
    let portals: Vec<At<Raw>> = flags
        .portal
        .iter()
        .map(|text| word(&source("--portal", text)))
        .collect();
    if let Some(first) = portals.first().map(|portal| portal.place.clone()) {
        common.push(field("portals", At::new(Raw::List(portals), first)));
    }
    let announced: Vec<At<Raw>> = flags
        .announce
        .iter()
        .map(|text| word(&source("--announce", text)))
        .collect();
    if let Some(first) = announced.first().map(|one| one.place.clone()) {
        common.push(field("announce", At::new(Raw::List(announced), first)));
    }
    if let Some(text) = &flags.demo_mode {
        common.push(field("demo_mode", word(&source("--demo-mode", text))));
    }
    if let Some(text) = &flags.chap_user {
        common.push(field("chap_users", word(&source("--chap-user", text))));
    }
    if let (true, Some(first)) = (flags.iscsi.is_empty(), common.first()) {
        let message = "this needs --iscsi".to_owned();
        let mistake = Mistake::new(MistakeKind::Relation, &first.value.place, message);
        diagnostics.push(mistake.allowed(ISCSI_FORM));
    }
    let targets = flags.iscsi.iter().filter_map(|text| {
        let source = source("--iscsi", text);
        let mut fields = target_flag(&source, diagnostics)?;
        fields.entries.extend(common.iter().cloned());
        Some(read_iscsi(&fields, diagnostics))
    });
    targets.collect()
}

/// A target's fields from `IQN=DISK,DISK[,KEY=VALUE...]`.
fn target_flag(source: &Arc<Source>, diagnostics: &mut Diagnostics) -> Option<Fields> {
    let parts = parts(source);
    let (first, rest) = parts.split_first()?;
    let Some((name, disk)) = first.split('=') else {
        let value = At::new(Raw::Word(source.text.clone()), Place::whole(source));
        diagnostics.push(wrong("iscsi", &value).allowed(ISCSI_FORM));
        return None;
    };
    let (said, disks): (Vec<_>, Vec<_>) = rest.iter().partition(|part| part.text.contains('='));
    let mut words = vec![disk.word()];
    words.extend(disks.iter().map(|part| part.word()));
    let mut entries = vec![
        name.field("name"),
        Field {
            key: At::new("disks".to_owned(), disk.place()),
            value: At::new(Raw::List(words), Place::whole(source)),
        },
    ];
    entries.extend(options(said));
    Some(Fields {
        place: Place::whole(source),
        entries,
    })
}

/// The CHAP users of a file: a line each, `NAME SECRET`, then, for initiators that ask the target to prove itself,
/// `TARGET_NAME TARGET_SECRET`. Lines that begin with `#` are passed over. Others must not be able to read it.
///
/// # Errors
/// What is wrong with it, without a word of its content.
pub fn read_chap_users(path: &Path) -> Result<HashMap<String, ChapUser>, String> {
    use std::io::Read;
    use std::os::unix::fs::MetadataExt;

    let shown = path.display();
    let failed = |error| format!("cannot read CHAP users from {shown}: {error}");
    let mut file = std::fs::File::open(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.mode();
    if mode & 0o077 != 0 {
        return Err(format!(
            "{shown} has mode {:o}, so others may read or change the secrets in it; hint: chmod 600 {shown}",
            mode & 0o777
        ));
    }
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(failed)?;
    let mut users = HashMap::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = |what: &str| format!("{shown}:{}: {what}", number + 1);
        let words: Vec<&str> = line.split_whitespace().collect();
        let (name, secret, mutual) = match words[..] {
            [name, secret] => (name, secret, None),
            [name, secret, own, proof] => (name, secret, Some((own, proof))),
            _ => return Err(wrong("not NAME SECRET [TARGET_NAME TARGET_SECRET]")),
        };
        let secrets = mutual.iter().map(|(_, proof)| *proof).chain([secret]);
        for secret in secrets {
            if iscsi_target::Secret::new(secret).is_short() {
                return Err(wrong(
                    "a secret has at least 12 characters (RFC 7143, 9.2.1)",
                ));
            }
        }
        if mutual.is_some_and(|(_, proof)| proof == secret) {
            return Err(wrong(
                "target and initiator need different secrets (RFC 7143, 9.2.1)",
            ));
        }
        let user = ChapUser {
            secret: iscsi_target::Secret::new(secret),
            mutual: mutual.map(|(own, proof)| (own.to_owned(), iscsi_target::Secret::new(proof))),
        };
        if users.insert(name.to_owned(), user).is_some() {
            return Err(wrong("this user already has a line"));
        }
    }
    if users.is_empty() {
        return Err(format!("{shown} has no CHAP user"));
    }
    Ok(users)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::{Config, Surroundings, parse};

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
    fn a_flag_names_a_target_and_its_disks_in_order() {
        let config = from_flags(
            &["iqn.2026-11.org.example:t0=d1,d0,alias=scratch"],
            &["127.0.0.1:0", "[::1]:0,2"],
        );
        let config = config.unwrap_or_else(|mistakes| panic!("{mistakes}"));
        let target = &config.iscsi[0];
        assert_eq!(target.name, "iqn.2026-11.org.example:t0");
        let luns: Vec<_> = target.luns.iter().map(|l| (l.lun, &*l.disk)).collect();
        assert_eq!(luns, [(0, "d1"), (1, "d0")]);
        assert_eq!(target.alias.as_deref(), Some("scratch"));
        assert_eq!(target.portals[1].group, 2);
        assert_eq!(target.demo_mode, DemoMode::ReadWrite);
    }

    #[test]
    fn a_file_says_the_same_and_reads_back() {
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
        assert_eq!(config.iscsi[0].demo_mode, DemoMode::None);
        assert_eq!(
            config.iscsi[0].announce[0].to_string(),
            "san.example.org:3260,1"
        );
        assert!(config.iscsi[0].acl[0].read_only);
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
                discovery_auth: Some("finders".to_owned()),
                ..Flags::default()
            };
            parse(None, &flags, &Surroundings::of_this_process())
        };
        let config = with(&["203.0.113.7:13260", "[2001:db8::7]:3261,2"]);
        let config = config.unwrap_or_else(|mistakes| panic!("{mistakes}"));
        let said: Vec<String> = config.iscsi[0]
            .announce
            .iter()
            .map(|a| a.to_string())
            .collect();
        assert_eq!(said, ["203.0.113.7:13260,1", "[2001:db8::7]:3261,2"]);
        assert_eq!(config.discovery_auth, Some(PathBuf::from("finders")));
        for (announce, told) in [
            ("203.0.113.7:3260,3", "no portal has the portal group 3"),
            ("0.0.0.0:3260", "not an address that others can reach"),
            ("moon landing", "not an address such as"),
        ] {
            let mistakes = with(&[announce]).unwrap_err().to_string();
            assert!(mistakes.contains(told), "{mistakes}");
        }
    }

    #[test]
    fn mistakes_are_told_with_what_is_allowed() {
        for (iscsi, portal, told) in [
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
            assert!(mistakes.contains(told), "{mistakes}");
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

    #[test]
    fn chap_users_come_from_a_file_that_only_its_owner_reads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chap");
        let write = |text: &str, mode| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            read_chap_users(&path)
        };
        let users = write(
            "# us\nann secretsecret\nbob secretsecret t0 othersecret12\n",
            0o600,
        );
        let users = users.unwrap();
        assert!(users["ann"].mutual.is_none() && users["bob"].mutual.is_some());
        for (text, mode, told) in [
            ("ann secretsecret", 0o640, "chmod 600"),
            ("ann short", 0o600, "at least 12"),
            ("ann", 0o600, ":1: not NAME SECRET"),
            ("ann secretsecret t0 secretsecret", 0o600, "different"),
            ("", 0o600, "no CHAP user"),
        ] {
            let error = write(text, mode).unwrap_err();
            assert!(error.contains(told), "{error}");
            assert!(!error.contains("secretsecret"), "{error}");
        }
    }
}
