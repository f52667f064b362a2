//! iSCSI targets in flags: `--iscsi IQN=d0,d1` names a target and its disks. Portals, demo mode and CHAP users have separate flags, which
//! apply to all targets from flags.

use std::sync::Arc;

use super::diagnostics::{Diagnostics, Mistake, MistakeKind};
use super::export_kinds::ISCSI;
use super::flag_source::{Flags, Part, options, parts, word_flag};
use super::location::{Located, Location, Source};
use super::model::ExportConfig;
use super::value::{Draft, Field, Fields, Raw, wrong};

/// Reads the targets from flags.
pub fn read_flags(
    flags: &Flags,
    source: &mut impl FnMut(&str, &String) -> Arc<Source>,
    diagnostics: &mut Diagnostics,
) -> Vec<Draft<ExportConfig>> {
    let mut common = Vec::new();
    for (key, flag, texts) in [
        ("portals", "--portal", &flags.portal),
        ("announce", "--announce", &flags.announce),
    ] {
        let items = texts.iter().map(|text| word_flag(&source(flag, text)));
        let items: Vec<Located<Raw>> = items.collect();
        if let Some(first) = items.first().map(|item| item.location.clone()) {
            common.push(Field::new(key, Located::new(Raw::List(items), first)));
        }
    }
    for (key, flag, text) in [
        ("demo_mode", "--demo-mode", &flags.demo_mode),
        ("chap_users", "--chap-user", &flags.chap_user),
    ] {
        let value = text.iter().map(|text| word_flag(&source(flag, text)));
        common.extend(value.map(|value| Field::new(key, value)));
    }
    if let (true, Some(first)) = (flags.iscsi.is_empty(), common.first()) {
        let message = "this flag needs --iscsi";
        let mistake = Mistake::new(MistakeKind::Relation, &first.value.location, message);
        diagnostics.push(mistake.allowed(ISCSI.form));
    }
    let targets = flags.iscsi.iter().filter_map(|text| {
        let source = source("--iscsi", text);
        let mut fields = target_flag(&source, diagnostics)?;
        fields.entries.extend(common.iter().cloned());
        Some(ISCSI.read(&fields, diagnostics))
    });
    targets.collect()
}

/// Returns a target's fields from `IQN=DISK,DISK[,KEY=VALUE...]`.
fn target_flag(source: &Arc<Source>, diagnostics: &mut Diagnostics) -> Option<Fields> {
    let parts = parts(source);
    let (first, rest) = parts.split_first()?;
    let Some((name, disk)) = first.split('=') else {
        diagnostics.push(wrong("iscsi", &word_flag(source)).allowed(ISCSI.form));
        return None;
    };
    let (option_parts, disks): (Vec<_>, Vec<_>) =
        rest.iter().partition(|part| part.value.contains('='));
    let disks = std::iter::once(&disk)
        .chain(disks)
        .map(Part::word)
        .collect();
    let disks = Located::new(Raw::List(disks), Location::whole(source));
    let mut entries = vec![name.field("name"), Field::new("disks", disks)];
    entries.extend(options(option_parts));
    Some(Fields {
        location: Location::whole(source),
        entries,
    })
}
