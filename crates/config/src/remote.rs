//! Keys of disks on logical units of iSCSI targets: unit, credentials and session.

use iscsi::address::{Portal, UnitAddress};
use iscsi::chap::Algorithm as ChapAlgorithm;
use serde_json::json;

use super::device_keys::{DiskKey, device_key};
use super::key::{Kind, NONE, REQUIRED, allow};
use super::login_keys::{
    ALGORITHMS, ALGORITHMS_DEFAULT, LENGTHS, algorithms_value, login_keys, read_algorithms,
};
use super::readers::ISCSI_NAME;
use super::value::Reader;

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

/// Declares a key for a field of the offer of a disk on a target.
macro_rules! offered {
    ($name:literal: $kind:expr; $default:expr; $help:expr; $($path:ident).+) => {
        device_key! { $name: $kind; $default; $help; [Iscsi] (offer.$($path).+) }
    };
}

/// Keys of logins that targets have, too.
pub static REMOTE_LOGIN_KEYS: &[DiskKey] =
    login_keys!(offered; DIGEST, "`none`"; *LENGTHS.end(); "`1048576`"; 65_535, "`1`");

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
        "chap_algorithms": ALGORITHMS; ALGORITHMS_DEFAULT;
        "offered [CHAP algorithms](remote-disks.md#chap), in order of preference";
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
        "error_recovery_level": Kind::Number("", 0..=2); "`0`";
        "requested level; the target may allow a lower one. 1: data with a wrong digest is sent again. 2: commands survive the \
            loss of a connection"; [Iscsi] (offer.session.error_recovery_level)
    },
];
