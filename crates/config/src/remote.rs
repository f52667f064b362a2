//! Disks on logical units of iSCSI targets: unit, credentials and session.

use std::path::PathBuf;

use block::PassedReservations;
use iscsi::address::{Portal, UnitAddress};
use iscsi::chap::Algorithm as ChapAlgorithm;
use serde_json::{Value, json};

use super::devices::BlockDeviceConfig;
use super::disk::DiskKey;
use super::key::{Key, Kind, NONE, REQUIRED, RunTime, words};
use super::model::DiskConfig;

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
    /// CRC32C for headers, and for data.
    pub digests: [Digest; 2],
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
    const WORDS: [(&'static str, Digest); 2] = [("none", Digest::None), ("crc32c", Digest::Crc32c)];

    fn word(self) -> &'static str {
        match self {
            Digest::None => "none",
            Digest::Crc32c => "crc32c",
        }
    }
}

const CONNECTIONS: u16 = 1;
const QUEUE_DEPTH: u16 = 128;
const MAX_RECV_DATA_SEGMENT_LENGTH_DEFAULT: u32 = 262_144;
const MAX_BURST_LENGTH_DEFAULT: u32 = 1 << 20;
const FIRST_BURST_LENGTH_DEFAULT: u32 = 262_144;
const MAX_OUTSTANDING_R2T_DEFAULT: u16 = 1;
/// Default in seconds, as for open-iscsi.
const REPLACEMENT_TIMEOUT: u32 = 120;

impl Default for RemoteConfig {
    fn default() -> Self {
        RemoteConfig {
            unit: None,
            paths: Vec::new(),
            trust_paths: false,
            chap_file: None,
            chap_algorithms: None,
            initiator_name: None,
            connections: CONNECTIONS,
            queue_depth: QUEUE_DEPTH,
            replacement_timeout: REPLACEMENT_TIMEOUT,
            digests: [Digest::None; 2],
            max_recv_data_segment_length: MAX_RECV_DATA_SEGMENT_LENGTH_DEFAULT,
            max_burst_length: MAX_BURST_LENGTH_DEFAULT,
            first_burst_length: FIRST_BURST_LENGTH_DEFAULT,
            max_outstanding_r2t: MAX_OUTSTANDING_R2T_DEFAULT,
            immediate_data: true,
            initial_r2t: false,
            error_recovery_level: 0,
            passthrough: None,
        }
    }
}

fn remote(disk: &DiskConfig) -> Option<&RemoteConfig> {
    match &disk.backend {
        BlockDeviceConfig::Iscsi(remote) => Some(remote),
        _ => None,
    }
}

/// Returns a value unless it is the default.
fn unless<T: PartialEq + Into<Value>>(value: T, default: T) -> Option<Value> {
    (value != default).then(|| value.into())
}

const ISCSI: &[&str] = &["iscsi"];

/// RFC 7143, 13.13 and 13.14: 512 to 2^24-1.
const LENGTHS: std::ops::RangeInclusive<u64> = 512..=16_777_215;

pub const UNIT: DiskKey = Key {
    name: "unit",
    kind: Kind::Text("`iscsi://[USER@]HOST[:PORT]/TARGET/LUN`", UnitAddress::FORM),
    default: REQUIRED,
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "the logical unit. USER is the CHAP user",
    read: |key, reader, disk| {
        let Some(text) = key.text(reader) else {
            return;
        };
        // In a flag the disk's kind precedes it: d0=iscsi://HOST/TARGET/LUN.
        let whole = match text.value.starts_with("//") {
            true => format!("iscsi:{}", text.value),
            false => text.value.clone(),
        };
        match whole.parse() {
            Ok(unit) => disk.remote.unit = Some(unit),
            Err(_) => key.refuse(reader, &text),
        }
    },
    get: |disk| Some(json!(remote(disk)?.unit.as_ref()?.to_string())),
};

const PATHS: &str =
    "one or more of HOST[:PORT] and iscsi://HOST[:PORT]/TARGET/LUN, with blanks between them";

pub const PATHS_KEY: DiskKey = Key {
    name: "paths",
    kind: Kind::Text(
        "`HOST[:PORT]` or `iscsi://HOST[:PORT]/TARGET/LUN`, or several",
        PATHS,
    ),
    default: NONE,
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "alternative paths to the same unit, used if the first has no session: other portals, or other targets",
    read: |key, reader, disk| {
        let Some(text) = key.text(reader) else {
            return;
        };
        let paths = text.value.split_whitespace();
        let is_path = |path: &str| match UnitAddress::looks_like_one(path) {
            true => path.parse::<UnitAddress>().is_ok(),
            false => path.parse::<Portal>().is_ok(),
        };
        if text.value.trim().is_empty() || !paths.clone().all(is_path) {
            return key.refuse(reader, &text);
        }
        disk.remote.paths = paths.map(str::to_owned).collect();
    },
    get: |disk| {
        let paths = &remote(disk)?.paths;
        (!paths.is_empty()).then(|| json!(paths.join(" ")))
    },
};

pub const TRUST_PATHS: DiskKey = Key {
    name: "trust_paths",
    kind: Kind::Boolean,
    default: "`false`",
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "uses `paths` also if the unit has no identity that can be compared. Set it only if all paths lead to one unit: \
        otherwise writes reach another disk",
    read: |key, reader, disk| {
        disk.remote.trust_paths = reader.boolean(key.name).is_some_and(|at| at.value);
    },
    get: |disk| unless(remote(disk)?.trust_paths, false),
};

pub const CONNECTIONS_KEY: DiskKey = Key {
    name: "connections",
    kind: Kind::Number("connections of the session", 1..=16),
    default: "`1`",
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "requested number; the target may allow fewer",
    read: |key, reader, disk| {
        if let Some(at) = key.number(reader) {
            disk.remote.connections = at.value as u16;
        }
    },
    get: |disk| unless(remote(disk)?.connections, CONNECTIONS),
};

pub const CHAP_FILE: DiskKey = Key {
    name: "chap_file",
    kind: Kind::Text(
        "path of a file of mode 600",
        "the path of a file of mode 600",
    ),
    default: NONE,
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "CHAP secrets, one per line: `NAME SECRET [TARGET_NAME TARGET_SECRET]`; with the last two fields the target must authenticate too",
    read: |key, reader, disk| disk.remote.chap_file = key.text(reader).map(|at| at.value.into()),
    get: |disk| Some(json!(remote(disk)?.chap_file.as_ref()?.to_string_lossy())),
};

/// Accepted values of a list of CHAP algorithms.
pub const ALGORITHMS_ALLOWED: &str =
    "one or more of sha3-256, sha256, sha1 and md5, with blanks between them";

/// Returns a list of algorithms, or `None` if it is the default one.
pub fn unless_all(algorithms: Vec<ChapAlgorithm>) -> Option<Vec<ChapAlgorithm>> {
    (algorithms != ChapAlgorithm::strongest_first()).then_some(algorithms)
}

pub const CHAP_ALGORITHMS: DiskKey = Key {
    name: "chap_algorithms",
    kind: Kind::Text(
        "names with blanks between them: `sha3-256`, `sha256`, `sha1`, `md5`",
        ALGORITHMS_ALLOWED,
    ),
    default: "`sha3-256 sha256 sha1 md5`",
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "offered [CHAP algorithms](remote-disks.md#chap), in order of preference",
    read: |key, reader, disk| {
        let Some(text) = key.text(reader) else {
            return;
        };
        match ChapAlgorithm::parse_list(&text.value) {
            Some(algorithms) => disk.remote.chap_algorithms = unless_all(algorithms),
            None => key.refuse(reader, &text),
        }
    },
    get: |disk| {
        let algorithms = remote(disk)?.chap_algorithms.as_ref()?;
        Some(json!(ChapAlgorithm::list(algorithms)))
    },
};

pub const INITIATOR_NAME: DiskKey = Key {
    name: "initiator_name",
    kind: Kind::Text(
        "an iSCSI name",
        "an iSCSI name, such as \"iqn.2026-11.org.example:host\"",
    ),
    default: "that of `/etc/iscsi/initiatorname.iscsi`, else [that of the state folder](remote-disks.md#initiator-name-and-isid)",
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "initiator name for the login",
    read: |key, reader, disk| {
        let Some(name) = key.text(reader) else {
            return;
        };
        match iscsi_name::is_iscsi_name(&name.value) {
            true => disk.remote.initiator_name = Some(name.value),
            false => key.refuse(reader, &name),
        }
    },
    get: |disk| remote(disk)?.initiator_name.clone().map(Value::from),
};

pub const QUEUE_DEPTH_KEY: DiskKey = Key {
    name: "queue_depth",
    kind: Kind::Number("commands", 1..=1024),
    default: "`128`",
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "maximum number of commands in flight at the target",
    read: |key, reader, disk| {
        if let Some(at) = key.number(reader) {
            disk.remote.queue_depth = at.value as u16;
        }
    },
    get: |disk| unless(remote(disk)?.queue_depth, QUEUE_DEPTH),
};

pub const REPLACEMENT_TIMEOUT_KEY: DiskKey = Key {
    name: "replacement_timeout",
    kind: Kind::Number("seconds", 0..=86_400),
    default: "`120`",
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "time that I/O waits for a lost session. Then it fails, and `on_error` applies. 0: no limit",
    read: |key, reader, disk| {
        if let Some(at) = key.number(reader) {
            disk.remote.replacement_timeout = at.value as u32;
        }
    },
    get: |disk| unless(remote(disk)?.replacement_timeout, REPLACEMENT_TIMEOUT),
};

pub const HEADER_DIGEST: DiskKey = Key {
    name: "header_digest",
    kind: Kind::Word(&const { words(&Digest::WORDS) }),
    default: "`none`",
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "checksum over each header",
    read: |key, reader, disk| {
        let digest = reader.choice(key.name, &Digest::WORDS);
        disk.remote.digests[0] = digest.map_or(Digest::None, |at| at.value);
    },
    get: |disk| unless(remote(disk)?.digests[0].word(), Digest::None.word()),
};

pub const DATA_DIGEST: DiskKey = Key {
    name: "data_digest",
    kind: Kind::Word(&const { words(&Digest::WORDS) }),
    default: "`none`",
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "checksum over the data of each PDU",
    read: |key, reader, disk| {
        let digest = reader.choice(key.name, &Digest::WORDS);
        disk.remote.digests[1] = digest.map_or(Digest::None, |at| at.value);
    },
    get: |disk| unless(remote(disk)?.digests[1].word(), Digest::None.word()),
};

pub const MAX_RECV_DATA_SEGMENT_LENGTH: DiskKey = Key {
    name: "max_recv_data_segment_length",
    kind: Kind::Number("bytes", LENGTHS),
    default: "`262144`",
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "maximum data of a PDU from the target",
    read: |key, reader, disk| {
        if let Some(at) = key.number(reader) {
            disk.remote.max_recv_data_segment_length = at.value as u32;
        }
    },
    get: |disk| {
        unless(
            remote(disk)?.max_recv_data_segment_length,
            MAX_RECV_DATA_SEGMENT_LENGTH_DEFAULT,
        )
    },
};

pub const MAX_BURST_LENGTH: DiskKey = Key {
    name: "max_burst_length",
    kind: Kind::Number("bytes", LENGTHS),
    default: "`1048576`",
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "maximum data of one request (R2T) or sequence of the target",
    read: |key, reader, disk| {
        if let Some(at) = key.number(reader) {
            disk.remote.max_burst_length = at.value as u32;
        }
    },
    get: |disk| unless(remote(disk)?.max_burst_length, MAX_BURST_LENGTH_DEFAULT),
};

pub const FIRST_BURST_LENGTH: DiskKey = Key {
    name: "first_burst_length",
    kind: Kind::Number("bytes", LENGTHS),
    default: "`262144`",
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "maximum unsolicited data; at most `max_burst_length`",
    read: |key, reader, disk| {
        if let Some(at) = key.number(reader) {
            disk.remote.first_burst_length = at.value as u32;
        }
    },
    get: |disk| unless(remote(disk)?.first_burst_length, FIRST_BURST_LENGTH_DEFAULT),
};

pub const MAX_OUTSTANDING_R2T: DiskKey = Key {
    name: "max_outstanding_r2t",
    kind: Kind::Number("requests", 1..=65_535),
    default: "`1`",
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "maximum outstanding data requests (R2T) per command",
    read: |key, reader, disk| {
        if let Some(at) = key.number(reader) {
            disk.remote.max_outstanding_r2t = at.value as u16;
        }
    },
    get: |disk| {
        unless(
            remote(disk)?.max_outstanding_r2t,
            MAX_OUTSTANDING_R2T_DEFAULT,
        )
    },
};

pub const IMMEDIATE_DATA: DiskKey = Key {
    name: "immediate_data",
    kind: Kind::Boolean,
    default: "`true`",
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "sends data in the PDU of the command",
    read: |key, reader, disk| {
        disk.remote.immediate_data = reader.boolean(key.name).is_none_or(|at| at.value);
    },
    get: |disk| unless(remote(disk)?.immediate_data, true),
};

pub const INITIAL_R2T: DiskKey = Key {
    name: "initial_r2t",
    kind: Kind::Boolean,
    default: "`false`",
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "sends other data only on request of the target",
    read: |key, reader, disk| {
        disk.remote.initial_r2t = reader.boolean(key.name).is_some_and(|at| at.value);
    },
    get: |disk| unless(remote(disk)?.initial_r2t, false),
};

pub const ERROR_RECOVERY_LEVEL: DiskKey = Key {
    name: "error_recovery_level",
    kind: Kind::Number("", 0..=2),
    default: "`0`",
    run_time: RunTime::AddAnew,
    of: ISCSI,
    help: "requested level; the target may allow a lower one. 1: data with a wrong digest is sent again. 2: commands survive the \
        loss of a connection",
    read: |key, reader, disk| {
        if let Some(at) = key.number(reader) {
            disk.remote.error_recovery_level = at.value as u8;
        }
    },
    get: |disk| unless(remote(disk)?.error_recovery_level, 0),
};
