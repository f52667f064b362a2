//! Combines flags with a file: objects add up, and for single values the flag has priority.

use std::sync::Arc;

use super::daemon_keys::{ConfigDraft, DAEMON_KEYS, DaemonKey, WorkersDraft};
use super::diagnostics::Diagnostics;
use super::disk::read_disk;
use super::export_kinds::{NBD, VHOST_BLK, VHOST_SCSI};
use super::flag_source::{self, Flags};
use super::iscsi_flags::read_flags;
use super::key::{Item, Kind};
use super::location::{Located, Source};
use super::lun::{LUN_KEYS, read_lun};
use super::value::{Draft, Field, Fields, Raw, Reader};

/// Reads all flags into the draft of a file.
pub fn add(draft: &mut ConfigDraft, flags: &Flags, diagnostics: &mut Diagnostics) {
    // The file is source 0, and each flag is a separate source. Mistakes are listed in the order of sources.
    let mut order = 0;
    let mut source = |flag: &str, text: &String| -> Arc<Source> {
        order += 1;
        Source::flag(flag, text, order)
    };
    add_objects(draft, flags, &mut source, diagnostics);
    let is_given = |name: &str| flags.daemon.iter().any(|(flag, _)| *flag == name);
    if is_given("workers") || is_given("cpus") {
        // Count and CPUs are one setting: a flag for either replaces both.
        draft.workers = WorkersDraft::default();
    }
    for DaemonKey { key, flag } in DAEMON_KEYS {
        let Some(flag) = flag else { continue };
        for (_, text) in flags.daemon.iter().filter(|(name, _)| *name == flag.name) {
            let value = value_of(&key.kind, &source(&format!("--{}", flag.name), text));
            // A table with this field only, for the reader of files.
            let fields = Fields {
                location: value.location.clone(),
                entries: vec![Field::new(key.name, value)],
            };
            draft.read(key, &mut Reader::new(&fields, key.name, diagnostics));
        }
    }
}

/// Returns the value of a flag's text.
fn value_of(kind: &Kind, source: &Arc<Source>) -> Located<Raw> {
    match kind {
        Kind::List(_, _, Item::Number) => flag_source::list_flag(source),
        Kind::Sections(..) => {
            let fields = flag_source::options_flag(source);
            Located::new(Raw::Table(fields.clone()), fields.location)
        }
        _ => flag_source::word_flag(source),
    }
}

fn add_objects(
    draft: &mut ConfigDraft,
    flags: &Flags,
    source: &mut impl FnMut(&str, &String) -> Arc<Source>,
    diagnostics: &mut Diagnostics,
) {
    for text in &flags.disk {
        let fields = flag_source::disk_flag(&source("--disk", text), diagnostics);
        let disk = fields.map(|fields| read_disk(&fields, diagnostics));
        draft.disks.extend(disk);
    }
    for (kind, texts) in [
        (&VHOST_BLK, &flags.vhost_blk),
        (&VHOST_SCSI, &flags.vhost_scsi),
        (&NBD, &flags.nbd),
    ] {
        for text in texts {
            let source = source(&format!("--{}", kind.word), text);
            let fields = flag_source::export_flag(&source, kind, diagnostics);
            let export = fields.map(|fields| kind.read(&fields, diagnostics));
            draft.exports.extend(export);
        }
    }
    for text in &flags.lun {
        if let Some((controller, fields)) =
            flag_source::lun_flag(&source("--lun", text), diagnostics)
        {
            let config = read_lun(LUN_KEYS, &fields, diagnostics);
            draft.luns.push((controller, Draft { config, fields }));
        }
    }
    draft.exports.extend(read_flags(flags, source, diagnostics));
}
