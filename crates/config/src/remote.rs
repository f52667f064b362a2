//! Keys of disks on logical units of iSCSI targets: unit, credentials and session.

use iscsi::address::{Portal, UnitAddress};
use iscsi::chap::Algorithm as ChapAlgorithm;
use serde_json::{Value, json};

use super::device_keys::{DiskKey, device_key};
use super::key::{Key, Kind, NONE, REQUIRED, allow};
use super::readers::ISCSI_NAME;
use super::value::Reader;

/// RFC 7143, 13.13 and 13.14: 512 to 2^24-1.
const LENGTHS: std::ops::RangeInclusive<u64> = 512..=16_777_215;

/// Digests that an initiator requests; the target may refuse them.
const DIGEST: Kind = Kind::Word(&["none", "crc32c"]);

const PATHS: &str =
    "one or more of HOST[:PORT] and iscsi://HOST[:PORT]/TARGET/LUN, with blanks between them";

fn read_paths(key: &DiskKey, reader: &mut Reader<'_, '_>) -> Option<Vec<String>> {
    let is_path = |path: &str| match UnitAddress::looks_like_one(path) {
        true => path.parse::<UnitAddress>().is_ok(),
        false => path.parse::<Portal>().is_ok(),
    };
    let paths = key.parsed(reader, |text| {
        let paths: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        let all_valid = !paths.is_empty() && paths.iter().all(|path| is_path(path));
        allow(all_valid).map(|()| paths)
    })?;
    Some(paths.value)
}

/// Accepted values of a list of CHAP algorithms.
pub const ALGORITHMS_ALLOWED: &str =
    "one or more of sha3-256, sha256, sha1 and md5, with blanks between them";

/// Reads a list of CHAP algorithms; `None`: absent, wrong, or the default.
pub fn read_algorithms<D, T>(
    key: &Key<D, T>,
    reader: &mut Reader<'_, '_>,
) -> Option<Vec<ChapAlgorithm>> {
    let parse = |text: &str| ChapAlgorithm::parse_list(text).ok_or_else(String::new);
    let algorithms = key.parsed(reader, parse)?.value;
    (algorithms != ChapAlgorithm::strongest_first()).then_some(algorithms)
}

/// Returns a list of CHAP algorithms as it is written.
pub fn algorithms_value(algorithms: Option<&[ChapAlgorithm]>) -> Option<Value> {
    Some(json!(ChapAlgorithm::list(algorithms?)))
}

/// Keys of disks on logical units of iSCSI targets.
pub static REMOTE_KEYS: &[DiskKey] = &[
    device_key! {
        "unit": Kind::Text("`iscsi://[USER@]HOST[:PORT]/TARGET/LUN`", UnitAddress::FORM); REQUIRED;
        "the logical unit. USER is the CHAP user"; [Iscsi] (unit)
    },
    device_key! {
        "paths": Kind::Text("`HOST[:PORT]` or `iscsi://HOST[:PORT]/TARGET/LUN`, or several", PATHS); NONE;
        "alternative paths to the same unit, used if the first has no session: other portals, or other targets";
        [Iscsi] (paths) by (read_paths, |paths: &Vec<String>| (!paths.is_empty()).then(|| json!(paths.join(" "))))
    },
    device_key! {
        "trust_paths": Kind::Boolean; "`false`";
        "uses `paths` also if the unit has no identity that can be compared. Set it only if all paths lead to one unit: \
            otherwise writes reach another disk"; [Iscsi] (trust_paths)
    },
    device_key! {
        "connections": Kind::Number("connections of the session", 1..=16); "`1`";
        "requested number; the target may allow fewer"; [Iscsi] (connections)
    },
    device_key! {
        "chap_file": Kind::Text("path of a file of mode 600", "the path of a file of mode 600"); NONE;
        "CHAP secrets, one per line: `NAME SECRET [TARGET_NAME TARGET_SECRET]`; with the last two fields the target must authenticate too";
        [Iscsi] (chap_file)
    },
    device_key! {
        "chap_algorithms": Kind::Text("names with blanks between them: `sha3-256`, `sha256`, `sha1`, `md5`", ALGORITHMS_ALLOWED);
        "`sha3-256 sha256 sha1 md5`"; "offered [CHAP algorithms](remote-disks.md#chap), in order of preference";
        [Iscsi] (chap_algorithms) by (
            |key, reader| Some(read_algorithms(key, reader)),
            |algorithms: &Option<Vec<ChapAlgorithm>>| algorithms_value(algorithms.as_deref())
        )
    },
    device_key! {
        "initiator_name": ISCSI_NAME;
        "that of `/etc/iscsi/initiatorname.iscsi`, else [that of the state folder](remote-disks.md#initiator-name-and-isid)";
        "initiator name for the login"; [Iscsi] (initiator_name)
    },
    device_key! {
        "queue_depth": Kind::Number("commands", 1..=1024); "`128`";
        "maximum number of commands in flight at the target; `nbd`: of requests in flight of a connection"; [Iscsi Nbd] (queue_depth)
    },
    device_key! {
        "replacement_timeout": Kind::Number("seconds", 0..=86_400); "`120`";
        "time that I/O waits for a lost session or connection. Then it fails, and `on_error` applies. 0: no limit"; [Iscsi Nbd] (replacement_timeout)
    },
    device_key! {
        "header_digest": DIGEST; "`none`"; "checksum over each header"; [Iscsi] (offer.header_digest)
    },
    device_key! {
        "data_digest": DIGEST; "`none`"; "checksum over the data of each PDU"; [Iscsi] (offer.data_digest)
    },
    device_key! {
        "max_recv_data_segment_length": Kind::Number("bytes", LENGTHS); "`262144`";
        "maximum data of a PDU from the target"; [Iscsi] (offer.max_recv_data_segment_length)
    },
    device_key! {
        "max_burst_length": Kind::Number("bytes", LENGTHS); "`1048576`";
        "maximum data of one request (R2T) or sequence of the target"; [Iscsi] (offer.session.max_burst_length)
    },
    device_key! {
        "first_burst_length": Kind::Number("bytes", LENGTHS); "`262144`";
        "maximum unsolicited data; at most `max_burst_length`"; [Iscsi] (offer.session.first_burst_length)
    },
    device_key! {
        "max_outstanding_r2t": Kind::Number("requests", 1..=65_535); "`1`";
        "maximum outstanding data requests (R2T) per command"; [Iscsi] (offer.session.max_outstanding_r2t)
    },
    device_key! {
        "immediate_data": Kind::Boolean; "`true`"; "sends data in the PDU of the command"; [Iscsi] (offer.session.immediate_data)
    },
    device_key! {
        "initial_r2t": Kind::Boolean; "`false`"; "sends other data only on request of the target"; [Iscsi] (offer.session.initial_r2t)
    },
    device_key! {
        "error_recovery_level": Kind::Number("", 0..=2); "`0`";
        "requested level; the target may allow a lower one. 1: data with a wrong digest is sent again. 2: commands survive the \
            loss of a connection"; [Iscsi] (offer.session.error_recovery_level)
    },
];
