//! Keys of disks on logical units of iSCSI targets: unit, credentials and session.

use iscsi::address::{Portal, UnitAddress};
use iscsi::chap::Algorithm as ChapAlgorithm;
use iscsi::negotiation::DigestOffer;
use serde_json::{Value, json};

use super::disk_draft::{DiskKey, device_key};
use super::key::{Key, Kind, NONE, REQUIRED, words};
use super::value::Reader;

/// RFC 7143, 13.13 and 13.14: 512 to 2^24-1.
const LENGTHS: std::ops::RangeInclusive<u64> = 512..=16_777_215;

/// Digests with their words.
const DIGESTS: [(&str, DigestOffer); 2] =
    [("none", DigestOffer::None), ("crc32c", DigestOffer::Crc32c)];

fn read_digest(key: &DiskKey, reader: &mut Reader<'_, '_>) -> Option<DigestOffer> {
    Some(reader.choice(key.name, &DIGESTS)?.value)
}

fn digest_value(digest: &DigestOffer) -> Option<Value> {
    (*digest == DigestOffer::Crc32c).then(|| json!("crc32c"))
}

pub const UNIT: DiskKey = device_key! {
    "unit": Kind::Text("`iscsi://[USER@]HOST[:PORT]/TARGET/LUN`", UnitAddress::FORM); REQUIRED;
    "the logical unit. USER is the CHAP user"; [Iscsi] (unit) by (read_unit, |unit: &Option<UnitAddress>| Some(json!(unit.as_ref()?.to_string())))
};

fn read_unit(key: &DiskKey, reader: &mut Reader<'_, '_>) -> Option<Option<UnitAddress>> {
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
    Some(unit)
}

const PATHS: &str =
    "one or more of HOST[:PORT] and iscsi://HOST[:PORT]/TARGET/LUN, with blanks between them";

pub const PATHS_KEY: DiskKey = device_key! {
    "paths": Kind::Text("`HOST[:PORT]` or `iscsi://HOST[:PORT]/TARGET/LUN`, or several", PATHS); NONE;
    "alternative paths to the same unit, used if the first has no session: other portals, or other targets";
    [Iscsi] (paths) by (read_paths, |paths: &Vec<String>| (!paths.is_empty()).then(|| json!(paths.join(" "))))
};

fn read_paths(key: &DiskKey, reader: &mut Reader<'_, '_>) -> Option<Vec<String>> {
    let text = key.text(reader)?;
    let paths = text.value.split_whitespace();
    let is_path = |path: &str| match UnitAddress::looks_like_one(path) {
        true => path.parse::<UnitAddress>().is_ok(),
        false => path.parse::<Portal>().is_ok(),
    };
    if text.value.trim().is_empty() || !paths.clone().all(is_path) {
        key.refuse(reader, &text);
        return None;
    }
    Some(paths.map(str::to_owned).collect())
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

fn read_initiator_name(key: &DiskKey, reader: &mut Reader<'_, '_>) -> Option<Option<String>> {
    let name = key.text(reader)?;
    if !iscsi_name::is_iscsi_name(&name.value) {
        key.refuse(reader, &name);
        return None;
    }
    Some(Some(name.value))
}

pub const TRUST_PATHS: DiskKey = device_key! {
    "trust_paths": Kind::Boolean; "`false`";
    "uses `paths` also if the unit has no identity that can be compared. Set it only if all paths lead to one unit: \
        otherwise writes reach another disk"; [Iscsi] (trust_paths)
};
pub const CONNECTIONS_KEY: DiskKey = device_key! {
    "connections": Kind::Number("connections of the session", 1..=16); "`1`";
    "requested number; the target may allow fewer"; [Iscsi] (connections)
};
pub const CHAP_FILE: DiskKey = device_key! {
    "chap_file": Kind::Text("path of a file of mode 600", "the path of a file of mode 600"); NONE;
    "CHAP secrets, one per line: `NAME SECRET [TARGET_NAME TARGET_SECRET]`; with the last two fields the target must authenticate too";
    [Iscsi] (chap_file)
};
pub const CHAP_ALGORITHMS: DiskKey = device_key! {
    "chap_algorithms": Kind::Text("names with blanks between them: `sha3-256`, `sha256`, `sha1`, `md5`", ALGORITHMS_ALLOWED);
    "`sha3-256 sha256 sha1 md5`"; "offered [CHAP algorithms](remote-disks.md#chap), in order of preference";
    [Iscsi] (chap_algorithms) by (
        |key, reader| Some(read_algorithms(key, reader)),
        |algorithms: &Option<Vec<ChapAlgorithm>>| algorithms_value(algorithms.as_deref())
    )
};
pub const INITIATOR_NAME: DiskKey = device_key! {
    "initiator_name": Kind::Text("an iSCSI name", "an iSCSI name, such as \"iqn.2026-11.org.example:host\"");
    "that of `/etc/iscsi/initiatorname.iscsi`, else [that of the state folder](remote-disks.md#initiator-name-and-isid)";
    "initiator name for the login"; [Iscsi] (initiator_name) by (read_initiator_name, |name: &Option<String>| Some(json!(name.as_ref()?)))
};
pub const QUEUE_DEPTH_KEY: DiskKey = device_key! {
    "queue_depth": Kind::Number("commands", 1..=1024); "`128`";
    "maximum number of commands in flight at the target; `nbd`: of requests in flight of a connection"; [Iscsi Nbd] (queue_depth)
};
pub const REPLACEMENT_TIMEOUT_KEY: DiskKey = device_key! {
    "replacement_timeout": Kind::Number("seconds", 0..=86_400); "`120`";
    "time that I/O waits for a lost session or connection. Then it fails, and `on_error` applies. 0: no limit"; [Iscsi Nbd] (replacement_timeout)
};
pub const HEADER_DIGEST: DiskKey = device_key! {
    "header_digest": Kind::Word(&const { words(&DIGESTS) }); "`none`"; "checksum over each header"; [Iscsi] (offer.header_digest) by (read_digest, digest_value)
};
pub const DATA_DIGEST: DiskKey = device_key! {
    "data_digest": Kind::Word(&const { words(&DIGESTS) }); "`none`"; "checksum over the data of each PDU"; [Iscsi] (offer.data_digest) by (read_digest, digest_value)
};
pub const MAX_RECV_DATA_SEGMENT_LENGTH: DiskKey = device_key! {
    "max_recv_data_segment_length": Kind::Number("bytes", LENGTHS); "`262144`";
    "maximum data of a PDU from the target"; [Iscsi] (offer.max_recv_data_segment_length)
};
pub const MAX_BURST_LENGTH: DiskKey = device_key! {
    "max_burst_length": Kind::Number("bytes", LENGTHS); "`1048576`";
    "maximum data of one request (R2T) or sequence of the target"; [Iscsi] (offer.session.max_burst_length)
};
pub const FIRST_BURST_LENGTH: DiskKey = device_key! {
    "first_burst_length": Kind::Number("bytes", LENGTHS); "`262144`";
    "maximum unsolicited data; at most `max_burst_length`"; [Iscsi] (offer.session.first_burst_length)
};
pub const MAX_OUTSTANDING_R2T: DiskKey = device_key! {
    "max_outstanding_r2t": Kind::Number("requests", 1..=65_535); "`1`";
    "maximum outstanding data requests (R2T) per command"; [Iscsi] (offer.session.max_outstanding_r2t)
};
pub const IMMEDIATE_DATA: DiskKey = device_key! {
    "immediate_data": Kind::Boolean; "`true`"; "sends data in the PDU of the command"; [Iscsi] (offer.session.immediate_data)
};
pub const INITIAL_R2T: DiskKey = device_key! {
    "initial_r2t": Kind::Boolean; "`false`"; "sends other data only on request of the target"; [Iscsi] (offer.session.initial_r2t)
};
pub const ERROR_RECOVERY_LEVEL: DiskKey = device_key! {
    "error_recovery_level": Kind::Number("", 0..=2); "`0`";
    "requested level; the target may allow a lower one. 1: data with a wrong digest is sent again. 2: commands survive the \
        loss of a connection"; [Iscsi] (offer.session.error_recovery_level)
};
