//! Configuration of a daemon, read from a file, from flags or from both, and checked as a whole.
//!
//! text -> keys and values with locations (`toml_source`, `flag_source`) -> objects, by their keys (`key`) -> checks between objects and
//! against this machine (`check`) -> [`Config`]. No step stops at a mistake, so that all are reported at once. Tests: here for whole
//! configurations, in each module for its part.
//!
//! ```text
//!   lib, json_source, render, help_page    whole configurations
//!   check, relations, flags_over_file      relations between objects
//!   disk, iscsi, vhost_blk, daemon_keys    keys of each object
//!   setting                                types of values, and the macro that declares a key
//!   key, value, readers, diagnostics       declarations of keys, and readers with locations
//!   model, devices                         plain structs of a valid configuration
//! ```
//!
//! A module imports only modules of its own row and below, without a circle (`tests/modules.rs`).

#![forbid(unsafe_code)]

mod access_list;
mod accounts;
mod check;
mod daemon_keys;
mod device_keys;
mod devices;
mod diagnostics;
mod differences;
mod disk;
#[cfg(test)]
mod example_tests;
mod export;
mod export_keys;
mod export_kinds;
mod file_lookup;
mod flag_source;
mod flags_over_file;
mod help_page;
mod iscsi;
mod iscsi_flags;
mod iscsi_limits;
mod json_source;
mod key;
mod location;
mod login_keys;
mod lun;
mod model;
mod nbd;
mod nbd_disk;
mod passthrough;
mod placement;
#[cfg(test)]
mod property_tests;
mod rbd;
mod readers;
mod relations;
mod remote;
mod render;
mod setting;
mod size;
mod socket_rights;
mod surroundings;
mod target_keys;
#[cfg(test)]
mod tests;
mod toml_source;
mod value;
mod vhost_blk;
mod vhost_scsi;

use std::path::Path;

pub use ::iscsi::access::{AclEntry, Announced, DemoMode, Network, Portal};
pub use ::iscsi::address::{SECRET_REFUSED, has_secret};
pub use ::nbd::address::{ExportAddress, ServerAddress};
pub use access_list::ACL_KEYS;
pub use accounts::{account, group_id, user_id, user_name};
pub use block::{CacheMode, ExportPlacement, PollLimit, PollMode};
pub use daemon_keys::{DAEMON_KEYS, DaemonKey, Flag};
pub use device_keys::DiskKey;
pub use devices::{
    BlockDeviceConfig, DEVICE_KINDS, DelayStorage, NbdDiskConfig, Persist, RbdConfig, RemoteConfig,
};
pub use diagnostics::{Diagnostics, Mistake, MistakeKind, nearest};
pub use differences::{Difference, disk_differences};
pub use disk::{DISK_SET, disk_keys};
pub use export_keys::{ExportKey, ExportKind};
pub use export_kinds::EXPORT_KINDS;
pub use file_lookup::look_at_files;
pub use flag_source::Flags;
pub use help_page::{HelpTopic, man_page};
pub use iscsi::ISCSI_KEYS;
pub use iscsi_limits::ISCSI_LIMIT_KEYS;
pub use json_source::{
    DiskSettings, JsonExport, access_state_json, disk_json, disk_settings_json, export_json,
    limits_json, lun_json, luns_json, objects_json, pointer_token, size_json,
};
pub use key::{Key, KeyValue, Kind, RunTime};
pub use location::{Located, Location, Source};
pub use lun::{LUN_KEYS, TARGET_LUN_KEYS};
pub use model::{
    AccessConfig, BLK_QUEUES_MAX, Config, DiskConfig, ExportConfig, IscsiConfig, IscsiLimits,
    LUNS_MAX, LimitsConfig, LunConfig, NAME_MAX, NbdConfig, POLL_MICROS_MAX, Placement,
    SCSI_QUEUES_MAX, SERIAL_MAX, SOCKET_PATH_MAX, ShownConfig, SocketRights, TARGETS_MAX,
    TlsConfig, Transport, WORKERS_MAX, WorkersConfig,
};
pub use nbd::NBD_KEYS;
pub use relations::conflicts;
pub use render::render;
pub use scsi::{AccessState, AccessStates};
pub use size::{SIZE_MAX, SizeError, parse_size, render_size};
pub use surroundings::Surroundings;
pub use target_keys::{LOGIN_KEYS, TARGET_KEYS};
pub use vhost_blk::VHOST_BLK_KEYS;
pub use vhost_scsi::VHOST_SCSI_KEYS;

use daemon_keys::ConfigDraft;

/// Loads the configuration from the file at `path`, if given, and from `flags`. Objects of both add up; for single values (`--workers`,
/// `--control`, ...) the flag has priority.
pub fn load(
    path: Option<&Path>,
    flags: &Flags,
    surroundings: &Surroundings,
) -> Result<Config, Diagnostics> {
    let Some(path) = path else {
        return parse(None, flags, surroundings);
    };
    let label = path.to_string_lossy();
    let (location, message, allowed) = match std::fs::read(path).map(String::from_utf8) {
        Ok(Ok(text)) => return parse(Some((&label, &text)), flags, surroundings),
        Ok(Err(error)) => {
            let at = error.utf8_error().valid_up_to();
            let text = String::from_utf8_lossy(error.as_bytes());
            let location = Location::new(&Source::file(&label, &text, 0), at..at + 1);
            let message = "this byte is not UTF-8".to_owned();
            (location, message, "TOML is UTF-8 text")
        }
        Err(error) => {
            let location = Location::whole(&Source::flag("--config", &label, 0));
            let message = format!("cannot read {label}: {error}");
            (location, message, "a TOML file that this user may read")
        }
    };
    let mut diagnostics = Diagnostics::default();
    let mistake = Mistake::new(MistakeKind::Syntax, &location, message);
    diagnostics.push(mistake.allowed(allowed));
    Err(diagnostics)
}

/// Parses the configuration from a file's text with its name, and from `flags`.
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
            daemon_keys::read_file(&fields, &mut diagnostics)
        }
        None => ConfigDraft::default(),
    };
    flags_over_file::add(&mut draft, flags, &mut diagnostics);
    let config = check::complete(draft, surroundings, &mut diagnostics);
    diagnostics.sort_and_prune();
    match diagnostics.is_empty() {
        true => Ok(config),
        false => Err(diagnostics),
    }
}
