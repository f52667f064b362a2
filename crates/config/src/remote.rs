//! Keys of disks on logical units of iSCSI targets: unit, credentials and session.

use iscsi::address::{Portal, UnitAddress};
use iscsi::chap::Algorithm as ChapAlgorithm;
use serde_json::{Value, json};

use super::devices::{BlockDeviceConfig, Digest, RemoteConfig};
use super::disk_draft::DiskKey;
use super::key::{Key, Kind, NONE, REQUIRED, RunTime};
use super::model::DiskConfig;
use super::setting::{Choice, Setting, key};
use super::value::Reader;

/// Returns the configuration of a disk on a unit.
fn remote(disk: &DiskConfig) -> Option<&RemoteConfig> {
    match &disk.backend {
        BlockDeviceConfig::Iscsi(remote) => Some(remote),
        _ => None,
    }
}

/// Returns a value unless it is the default.
fn unless<S: Setting + PartialEq>(
    disk: &DiskConfig,
    get: impl Fn(&RemoteConfig) -> &S,
) -> Option<Value> {
    get(remote(disk)?).value_unless(get(&RemoteConfig::default()))
}

const ISCSI: &[&str] = &["iscsi"];
/// Disks with connections that are replaced when they are lost.
const CONNECTED: &[&str] = &["iscsi", "nbd"];

/// RFC 7143, 13.13 and 13.14: 512 to 2^24-1.
const LENGTHS: std::ops::RangeInclusive<u64> = 512..=16_777_215;

/// Declares a key for a field of [`RemoteConfig`]. The value is written unless it is the default.
macro_rules! remote {
    ($name:literal: $kind:expr; $default:expr; $help:expr; $field:ident) => {
        key! {
            $name: $kind; $default; RunTime::AddAnew, of ISCSI; $help;
            set remote.$field; get |disk| unless(disk, |remote| &remote.$field)
        }
    };
}

pub const UNIT: DiskKey = key! {
    "unit": Kind::Text("`iscsi://[USER@]HOST[:PORT]/TARGET/LUN`", UnitAddress::FORM);
    REQUIRED; RunTime::AddAnew, of ISCSI; "the logical unit. USER is the CHAP user";
    read |key, reader, disk| disk.remote.unit = read_unit(key, reader);
    get |disk| Some(json!(remote(disk)?.unit.as_ref()?.to_string()))
};

fn read_unit(key: &DiskKey, reader: &mut Reader<'_, '_>) -> Option<UnitAddress> {
    let text = key.text(reader)?;
    // In a flag the disk's kind precedes it: d0=iscsi://HOST/TARGET/LUN.
    let whole = match text.value.starts_with("//") {
        true => format!("iscsi:{}", text.value),
        false => text.value.clone(),
    };
    let unit = whole.parse().ok();
    if unit.is_none() {
        key.refuse(reader, &text);
    }
    unit
}

const PATHS: &str =
    "one or more of HOST[:PORT] and iscsi://HOST[:PORT]/TARGET/LUN, with blanks between them";

pub const PATHS_KEY: DiskKey = key! {
    "paths": Kind::Text("`HOST[:PORT]` or `iscsi://HOST[:PORT]/TARGET/LUN`, or several", PATHS);
    NONE; RunTime::AddAnew, of ISCSI;
    "alternative paths to the same unit, used if the first has no session: other portals, or other targets";
    read |key, reader, disk| disk.remote.paths = read_paths(key, reader);
    get |disk| {
        let paths = &remote(disk)?.paths;
        (!paths.is_empty()).then(|| json!(paths.join(" ")))
    }
};

fn read_paths(key: &DiskKey, reader: &mut Reader<'_, '_>) -> Vec<String> {
    let Some(text) = key.text(reader) else {
        return Vec::new();
    };
    let paths = text.value.split_whitespace();
    let is_path = |path: &str| match UnitAddress::looks_like_one(path) {
        true => path.parse::<UnitAddress>().is_ok(),
        false => path.parse::<Portal>().is_ok(),
    };
    if text.value.trim().is_empty() || !paths.clone().all(is_path) {
        key.refuse(reader, &text);
        return Vec::new();
    }
    paths.map(str::to_owned).collect()
}

/// Accepted values of a list of CHAP algorithms.
pub const ALGORITHMS_ALLOWED: &str =
    "one or more of sha3-256, sha256, sha1 and md5, with blanks between them";

/// Reads a list of CHAP algorithms; `None`: absent, wrong, or the default.
pub fn read_algorithms<D, T>(
    key: &Key<D, T>,
    reader: &mut Reader<'_, '_>,
) -> Option<Vec<ChapAlgorithm>> {
    let text = key.text(reader)?;
    let algorithms = ChapAlgorithm::parse_list(&text.value);
    if algorithms.is_none() {
        key.refuse(reader, &text);
    }
    algorithms.filter(|algorithms| *algorithms != ChapAlgorithm::strongest_first())
}

/// Returns a list of CHAP algorithms as it is written.
pub fn algorithms_value(algorithms: Option<&[ChapAlgorithm]>) -> Option<Value> {
    Some(json!(ChapAlgorithm::list(algorithms?)))
}

fn read_initiator_name(key: &DiskKey, reader: &mut Reader<'_, '_>) -> Option<String> {
    let name = key.text(reader)?;
    if !iscsi_name::is_iscsi_name(&name.value) {
        key.refuse(reader, &name);
        return None;
    }
    Some(name.value)
}

pub const TRUST_PATHS: DiskKey = remote! {
    "trust_paths": Kind::Boolean; "`false`";
    "uses `paths` also if the unit has no identity that can be compared. Set it only if all paths lead to one unit: \
        otherwise writes reach another disk"; trust_paths
};
pub const CONNECTIONS_KEY: DiskKey = remote! {
    "connections": Kind::Number("connections of the session", 1..=16); "`1`";
    "requested number; the target may allow fewer"; connections
};
pub const CHAP_FILE: DiskKey = remote! {
    "chap_file": Kind::Text("path of a file of mode 600", "the path of a file of mode 600"); NONE;
    "CHAP secrets, one per line: `NAME SECRET [TARGET_NAME TARGET_SECRET]`; with the last two fields the target must authenticate too";
    chap_file
};
pub const CHAP_ALGORITHMS: DiskKey = key! {
    "chap_algorithms": Kind::Text("names with blanks between them: `sha3-256`, `sha256`, `sha1`, `md5`", ALGORITHMS_ALLOWED);
    "`sha3-256 sha256 sha1 md5`"; RunTime::AddAnew, of ISCSI;
    "offered [CHAP algorithms](remote-disks.md#chap), in order of preference";
    read |key, reader, disk| disk.remote.chap_algorithms = read_algorithms(key, reader);
    get |disk| algorithms_value(remote(disk)?.chap_algorithms.as_deref())
};
pub const INITIATOR_NAME: DiskKey = key! {
    "initiator_name": Kind::Text("an iSCSI name", "an iSCSI name, such as \"iqn.2026-11.org.example:host\"");
    "that of `/etc/iscsi/initiatorname.iscsi`, else [that of the state folder](remote-disks.md#initiator-name-and-isid)";
    RunTime::AddAnew, of ISCSI; "initiator name for the login";
    read |key, reader, disk| disk.remote.initiator_name = read_initiator_name(key, reader);
    get |disk| remote(disk)?.initiator_name.value()
};
pub const QUEUE_DEPTH_KEY: DiskKey = key! {
    "queue_depth": Kind::Number("commands", 1..=1024); "`128`"; RunTime::AddAnew, of CONNECTED;
    "maximum number of commands in flight at the target; `nbd`: of requests in flight of a connection";
    set remote.queue_depth; get |disk| match &disk.backend {
        BlockDeviceConfig::Nbd(nbd) => nbd.queue_depth.value_unless(&RemoteConfig::default().queue_depth),
        _ => unless(disk, |remote| &remote.queue_depth),
    }
};
pub const REPLACEMENT_TIMEOUT_KEY: DiskKey = key! {
    "replacement_timeout": Kind::Number("seconds", 0..=86_400); "`120`"; RunTime::AddAnew, of CONNECTED;
    "time that I/O waits for a lost session or connection. Then it fails, and `on_error` applies. 0: no limit";
    set remote.replacement_timeout; get |disk| match &disk.backend {
        BlockDeviceConfig::Nbd(nbd) => nbd.replacement_timeout.value_unless(&RemoteConfig::default().replacement_timeout),
        _ => unless(disk, |remote| &remote.replacement_timeout),
    }
};
pub const HEADER_DIGEST: DiskKey = remote! {
    "header_digest": Digest::KIND; "`none`"; "checksum over each header"; header_digest
};
pub const DATA_DIGEST: DiskKey = remote! {
    "data_digest": Digest::KIND; "`none`"; "checksum over the data of each PDU"; data_digest
};
pub const MAX_RECV_DATA_SEGMENT_LENGTH: DiskKey = remote! {
    "max_recv_data_segment_length": Kind::Number("bytes", LENGTHS); "`262144`";
    "maximum data of a PDU from the target"; max_recv_data_segment_length
};
pub const MAX_BURST_LENGTH: DiskKey = remote! {
    "max_burst_length": Kind::Number("bytes", LENGTHS); "`1048576`";
    "maximum data of one request (R2T) or sequence of the target"; max_burst_length
};
pub const FIRST_BURST_LENGTH: DiskKey = remote! {
    "first_burst_length": Kind::Number("bytes", LENGTHS); "`262144`";
    "maximum unsolicited data; at most `max_burst_length`"; first_burst_length
};
pub const MAX_OUTSTANDING_R2T: DiskKey = remote! {
    "max_outstanding_r2t": Kind::Number("requests", 1..=65_535); "`1`";
    "maximum outstanding data requests (R2T) per command"; max_outstanding_r2t
};
pub const IMMEDIATE_DATA: DiskKey = remote! {
    "immediate_data": Kind::Boolean; "`true`"; "sends data in the PDU of the command"; immediate_data
};
pub const INITIAL_R2T: DiskKey = remote! {
    "initial_r2t": Kind::Boolean; "`false`"; "sends other data only on request of the target"; initial_r2t
};
pub const ERROR_RECOVERY_LEVEL: DiskKey = remote! {
    "error_recovery_level": Kind::Number("", 0..=2); "`0`";
    "requested level; the target may allow a lower one. 1: data with a wrong digest is sent again. 2: commands survive the \
        loss of a connection"; error_recovery_level
};
