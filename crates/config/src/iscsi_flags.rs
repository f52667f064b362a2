//! iSCSI targets in flags: `--iscsi IQN=d0,d1` names a target and its disks. Portals, demo mode and CHAP users have separate flags, which
//! apply to all targets from flags.

use std::sync::Arc;

use super::diagnostics::{Diagnostics, Mistake, MistakeKind};
use super::export_draft::ExportDraft;
use super::export_kinds::ISCSI;
use super::flag_source::{Flags, options, parts};
use super::location::{Located, Location, Source};
use super::value::{Field, Fields, Raw, wrong};

/// Syntax of an iSCSI target in a flag.
pub const ISCSI_FORM: &str =
    "IQN=DISK,DISK,... (LUNs from 0 in this order): iqn.2026-11.org.example:t0=d0,d1";

/// Reads the targets from flags.
pub fn read_flags(
    flags: &Flags,
    source: &mut impl FnMut(&str, &String) -> Arc<Source>,
    diagnostics: &mut Diagnostics,
) -> Vec<ExportDraft> {
    let field = |key: &str, value: Located<Raw>| Field {
        key: Located::new(key.to_owned(), value.location.clone()),
        value,
    };
    let word = |source: &Arc<Source>| {
        Located::new(Raw::Word(source.text.clone()), Location::whole(source))
    };
    let mut common = Vec::new();
    let portals: Vec<Located<Raw>> = flags
        .portal
        .iter()
        .map(|text| word(&source("--portal", text)))
        .collect();
    if let Some(first) = portals.first().map(|portal| portal.location.clone()) {
        common.push(field("portals", Located::new(Raw::List(portals), first)));
    }
    let announced: Vec<Located<Raw>> = flags
        .announce
        .iter()
        .map(|text| word(&source("--announce", text)))
        .collect();
    if let Some(first) = announced.first().map(|one| one.location.clone()) {
        common.push(field("announce", Located::new(Raw::List(announced), first)));
    }
    if let Some(text) = &flags.demo_mode {
        common.push(field("demo_mode", word(&source("--demo-mode", text))));
    }
    if let Some(text) = &flags.chap_user {
        common.push(field("chap_users", word(&source("--chap-user", text))));
    }
    if let (true, Some(first)) = (flags.iscsi.is_empty(), common.first()) {
        let message = "this flag needs --iscsi".to_owned();
        let mistake = Mistake::new(MistakeKind::Relation, &first.value.location, message);
        diagnostics.push(mistake.allowed(ISCSI_FORM));
    }
    let targets = flags.iscsi.iter().filter_map(|text| {
        let source = source("--iscsi", text);
        let mut fields = target_flag(&source, diagnostics)?;
        fields.entries.extend(common.iter().cloned());
        Some((ISCSI.read)(&fields, diagnostics))
    });
    targets.collect()
}

/// Returns a target's fields from `IQN=DISK,DISK[,KEY=VALUE...]`.
fn target_flag(source: &Arc<Source>, diagnostics: &mut Diagnostics) -> Option<Fields> {
    let parts = parts(source);
    let (first, rest) = parts.split_first()?;
    let Some((name, disk)) = first.split('=') else {
        let value = Located::new(Raw::Word(source.text.clone()), Location::whole(source));
        diagnostics.push(wrong("iscsi", &value).allowed(ISCSI_FORM));
        return None;
    };
    let (option_parts, disks): (Vec<_>, Vec<_>) =
        rest.iter().partition(|part| part.text.contains('='));
    let mut words = vec![disk.word()];
    words.extend(disks.iter().map(|part| part.word()));
    let mut entries = vec![
        name.field("name"),
        Field {
            key: Located::new("disks".to_owned(), disk.location()),
            value: Located::new(Raw::List(words), Location::whole(source)),
        },
    ];
    entries.extend(options(option_parts));
    Some(Fields {
        location: Location::whole(source),
        entries,
    })
}
