//! Disks on logical units of iSCSI targets: unit, credentials and session.

use std::path::PathBuf;

use block::PassedReservations;
use iscsi::address::{Portal, UnitAddress};
use iscsi::chap::Algorithm as ChapAlgorithm;
use serde_json::{Value, json};

use super::devices::BlockDeviceConfig;
use super::disk::DiskKey;
use super::key::{Key, Kind, NONE, REQUIRED, RunTime, key};
use super::model::DiskConfig;
use super::setting::{Choice, Setting};
use super::value::Reader;

/// A logical unit and its session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteConfig {
    /// Address of the unit; may be absent in a draft.
    pub unit: Option<UnitAddress>,
    /// Alternative paths, as written.
    pub paths: Vec<String>,
    /// All paths lead to one unit, even if its identity cannot be checked.
    pub trust_paths: bool,
    /// File with the user's CHAP secret.
    pub chap_file: Option<PathBuf>,
    /// CHAP algorithms in order of preference; `None`: all, strongest first.
    pub chap_algorithms: Option<Vec<ChapAlgorithm>>,
    /// Initiator name; the host's name by default.
    pub initiator_name: Option<String>,
    /// Number of connections of the session.
    pub connections: u16,
    /// Maximum number of commands in flight.
    pub queue_depth: u16,
    /// Time in seconds that I/O waits for an unreachable target; 0: no limit.
    pub replacement_timeout: u32,
    /// Digest of headers.
    pub header_digest: Digest,
    /// Digest of data.
    pub data_digest: Digest,
    /// Declared MaxRecvDataSegmentLength.
    pub max_recv_data_segment_length: u32,
    /// MaxBurstLength.
    pub max_burst_length: u32,
    /// FirstBurstLength.
    pub first_burst_length: u32,
    /// MaxOutstandingR2T.
    pub max_outstanding_r2t: u16,
    /// ImmediateData.
    pub immediate_data: bool,
    /// InitialR2T.
    pub initial_r2t: bool,
    /// ErrorRecoveryLevel.
    pub error_recovery_level: u8,
    /// The unit is passed through, with this handling of reservations.
    pub passthrough: Option<PassedReservations>,
}

/// A digest of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Digest {
    /// No digest.
    #[default]
    None,
    /// CRC32C.
    Crc32c,
}

impl Digest {
    /// All values with their words.
    pub const WORDS: [(&'static str, Digest); 2] =
        [("none", Digest::None), ("crc32c", Digest::Crc32c)];
}

impl Default for RemoteConfig {
    fn default() -> Self {
        RemoteConfig {
            unit: None,
            paths: Vec::new(),
            trust_paths: false,
            chap_file: None,
            chap_algorithms: None,
            initiator_name: None,
            connections: 1,
            queue_depth: 128,
            // As for open-iscsi.
            replacement_timeout: 120,
            header_digest: Digest::None,
            data_digest: Digest::None,
            max_recv_data_segment_length: 262_144,
            max_burst_length: 1 << 20,
            first_burst_length: 262_144,
            max_outstanding_r2t: 1,
            immediate_data: true,
            initial_r2t: false,
            error_recovery_level: 0,
            passthrough: None,
        }
    }
}

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
pub const QUEUE_DEPTH_KEY: DiskKey = remote! {
    "queue_depth": Kind::Number("commands", 1..=1024); "`128`";
    "maximum number of commands in flight at the target"; queue_depth
};
pub const REPLACEMENT_TIMEOUT_KEY: DiskKey = remote! {
    "replacement_timeout": Kind::Number("seconds", 0..=86_400); "`120`";
    "time that I/O waits for a lost session. Then it fails, and `on_error` applies. 0: no limit"; replacement_timeout
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
