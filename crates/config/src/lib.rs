//! What a daemon is to serve: read from a file, from flags or from both, and checked as a whole.
//!
//! text -> keys and values with places (`toml_source`, `flag_source`) -> objects (`objects`) -> held against
//! each other and this machine (`check`) -> [`Config`]. Every step notes mistakes and goes on, so that
//! all of them are reported at once. Tests: here for whole configurations, in each module for its part.

#![forbid(unsafe_code)]

mod check;
mod devices;
mod diagnostics;
mod disk;
mod flag_source;
mod iscsi;
mod iscsi_limits;
mod json_source;
mod key;
mod model;
mod objects;
mod place;
pub mod placement;
mod rbd;
mod render;
mod size;
#[cfg(test)]
mod tests;
mod toml_source;
mod value;

use std::path::Path;
use std::sync::Arc;

pub use check::Surroundings;
pub use devices::{Around, BlockDeviceConfig, CacheMode};
pub use diagnostics::{Diagnostics, Mistake, MistakeKind, nearest};
pub use disk::{DISK_KEYS, DISK_SET, DiskDraft, DiskKey};
pub use flag_source::{DISK_FORM, Flags, LUN_FORM, VHOST_BLK_FORM, VHOST_SCSI_FORM};
pub use iscsi::{
    AclEntry, Announced, DemoMode, ISCSI_FORM, IscsiConfig, Network, Portal, read_chap_users,
};
pub use iscsi_limits::{ISCSI_LIMITS_FORM, IscsiLimits};
pub use json_source::{
    DiskSettings, JsonExport, disk_json, disk_settings_json, export_json, limits_json, lun_json,
    luns_json, objects_json, size_json,
};
pub use key::{Key, Kind, RunTime};
pub use model::{
    AccessConfig, BLK_QUEUES_MAX, Config, DiskConfig, ExportConfig, ExportRef, LUNS_MAX,
    LimitsConfig, LunConfig, NAME_MAX, POLL_MICROS_MAX, Placement, PollLimit, SCSI_QUEUES_MAX,
    SERIAL_MAX, SOCKET_PATH_MAX, ShownConfig, TARGETS_MAX, VhostBlkConfig, VhostScsiConfig,
    WORKERS_MAX, WorkersConfig,
};
pub use place::{At, Place, Source};
pub use rbd::RbdConfig;
pub use reactor::ExportPlacement;
pub use render::render;
pub use size::{SIZE_MAX, SizeError, parse_size, render_size};

use objects::{Draft, WorkersDraft};
use value::{Field, Fields, Reader};

/// The configuration of the file at `path`, where there is one, and of `flags`. Objects of both add up;
/// of a single value (`--workers`, `--control`, ...) the flag's counts.
pub fn load(
    path: Option<&Path>,
    flags: &Flags,
    surroundings: &Surroundings,
) -> Result<Config, Diagnostics> {
    let Some(path) = path else {
        return parse(None, flags, surroundings);
    };
    let label = path.to_string_lossy();
    match std::fs::read(path) {
        Ok(bytes) => match String::from_utf8(bytes) {
            Ok(text) => parse(Some((&label, &text)), flags, surroundings),
            Err(error) => {
                let at = error.utf8_error().valid_up_to();
                let text = String::from_utf8_lossy(error.as_bytes());
                let source = Source::file(&label, &text, 0);
                let place = Place::new(&source, at..at + 1);
                Err(only(
                    &place,
                    "this byte is not UTF-8".to_owned(),
                    "TOML is UTF-8 text",
                ))
            }
        },
        Err(error) => {
            let place = Place::whole(&Source::flag("--config", &label, 0));
            let message = format!("cannot read {label}: {error}");
            Err(only(&place, message, "a TOML file that this user may read"))
        }
    }
}

fn only(place: &Place, message: String, allowed: &str) -> Diagnostics {
    let mut diagnostics = Diagnostics::default();
    diagnostics.push(Mistake::new(MistakeKind::Syntax, place, message).allowed(allowed));
    diagnostics
}

/// The configuration of a file's text, given with its name, and of `flags`.
pub fn parse(
    file: Option<(&str, &str)>,
    flags: &Flags,
    surroundings: &Surroundings,
) -> Result<Config, Diagnostics> {
    let mut diagnostics = Diagnostics::default();
    let mut draft = match file {
        Some((label, text)) => {
            let source = Source::file(label, text, 0);
            let fields = toml_source::read_toml(&source, &mut diagnostics);
            objects::read_file(&fields, &mut diagnostics)
        }
        None => Draft::default(),
    };
    add_flags(&mut draft, flags, &mut diagnostics);
    let config = check::complete(draft, surroundings, &mut diagnostics);
    diagnostics.sort_and_prune();
    match config {
        Some(config) if diagnostics.is_empty() => Ok(config),
        _ => Err(diagnostics),
    }
}

fn add_flags(draft: &mut Draft, flags: &Flags, diagnostics: &mut Diagnostics) {
    // The file is source 0; flags are told apart, and listed, by their order.
    let mut order = 0;
    let mut source = |flag: &str, text: &String| -> Arc<Source> {
        order += 1;
        Source::flag(flag, text, order)
    };
    for text in &flags.disk {
        let fields = flag_source::disk_flag(&source("--disk", text), diagnostics);
        draft
            .disks
            .extend(fields.map(|fields| disk::read_disk(&fields, diagnostics)));
    }
    for text in &flags.vhost_blk {
        let source = source("--vhost-blk", text);
        let fields = flag_source::export_flag(&source, "disk", VHOST_BLK_FORM, diagnostics);
        let export = fields.map(|fields| objects::read_vhost_blk(&fields, diagnostics));
        draft.vhost_blk.extend(export);
    }
    for text in &flags.vhost_scsi {
        let source = source("--vhost-scsi", text);
        let fields = flag_source::export_flag(&source, "name", VHOST_SCSI_FORM, diagnostics);
        let controller = fields.map(|fields| objects::read_vhost_scsi(&fields, diagnostics));
        draft.vhost_scsi.extend(controller);
    }
    for text in &flags.lun {
        if let Some((controller, fields)) =
            flag_source::lun_flag(&source("--lun", text), diagnostics)
        {
            let lun = objects::read_lun(&fields, diagnostics);
            draft.luns.push((controller, lun));
        }
    }
    draft
        .iscsi
        .extend(iscsi::read_flags(flags, &mut source, diagnostics));
    if let Some(text) = &flags.discovery_auth {
        let word = flag_source::word_flag(&source("--discovery-auth", text));
        let fields = single("discovery_auth", word);
        let mut reader = Reader::new(&fields, "discovery_auth", diagnostics);
        draft.discovery_auth = objects::read_file_name(&mut reader, "discovery_auth");
    }
    if let Some(text) = &flags.iscsi_limits {
        let fields = flag_source::options_flag(&source("--iscsi-limits", text));
        draft.iscsi_limits = Some(iscsi_limits::read_iscsi_limits(&fields, diagnostics));
    }
    if flags.workers.is_some() || flags.cpus.is_some() {
        // Count and CPUs say one thing together: a flag for either replaces both.
        draft.workers = WorkersDraft::default();
    }
    if let Some(text) = &flags.workers {
        let value = flag_source::word_flag(&source("--workers", text));
        draft.workers.count = objects::read_workers(&value, diagnostics);
    }
    if let Some(text) = &flags.cpus {
        let value = flag_source::list_flag(&source("--cpus", text));
        draft.workers.cpus = objects::read_cpus(&value, diagnostics);
    }
    if let Some(text) = &flags.poll_us {
        let value = flag_source::word_flag(&source("--poll-us", text));
        draft.poll = objects::read_poll(objects::POLL_KEY, &value, diagnostics);
    }
    if let Some(text) = &flags.network_poll_us {
        let value = flag_source::word_flag(&source("--network-poll-us", text));
        draft.network_poll = objects::read_poll(objects::NETWORK_POLL_KEY, &value, diagnostics);
    }
    if let Some(text) = &flags.disk_poll_us {
        let value = flag_source::word_flag(&source("--disk-poll-us", text));
        draft.disk_poll = objects::read_poll(objects::DISK_POLL_KEY, &value, diagnostics);
    }
    if let Some(text) = &flags.control {
        let fields = single(
            "control",
            flag_source::word_flag(&source("--control", text)),
        );
        let mut reader = Reader::new(&fields, "control", diagnostics);
        draft.control = objects::read_socket(&mut reader, "control");
    }
    if let Some(text) = &flags.state {
        let fields = single("state", flag_source::word_flag(&source("--state", text)));
        let mut reader = Reader::new(&fields, "state", diagnostics);
        draft.state = objects::read_folder(&mut reader, "state");
    }
    if let Some(text) = &flags.metrics_listen {
        let word = flag_source::word_flag(&source("--metrics-listen", text));
        let fields = single("metrics_listen", word);
        let mut reader = Reader::new(&fields, "metrics_listen", diagnostics);
        draft.metrics_listen = objects::read_address(&mut reader, "metrics_listen");
    }
    if let Some(text) = &flags.api_listen {
        let word = flag_source::word_flag(&source("--api-listen", text));
        let fields = single("api_listen", word);
        let mut reader = Reader::new(&fields, "api_listen", diagnostics);
        draft.api_listen = objects::read_address(&mut reader, "api_listen");
    }
    if let Some(text) = &flags.token_file {
        let word = flag_source::word_flag(&source("--token-file", text));
        let fields = single("token_file", word);
        let mut reader = Reader::new(&fields, "token_file", diagnostics);
        draft.token_file = objects::read_file_name(&mut reader, "token_file");
    }
    if let Some(text) = &flags.readers_token_file {
        let word = flag_source::word_flag(&source("--readers-token-file", text));
        let fields = single("readers_token_file", word);
        let mut reader = Reader::new(&fields, "readers_token_file", diagnostics);
        draft.readers_token_file = objects::read_file_name(&mut reader, "readers_token_file");
    }
}

/// A flag's value as the only field of a table, so that the file's reader reads it.
fn single(key: &str, value: At<value::Raw>) -> Fields {
    let place = value.place.clone();
    let key = At::new(key.to_owned(), place.clone());
    Fields {
        place,
        entries: vec![Field { key, value }],
    }
}
