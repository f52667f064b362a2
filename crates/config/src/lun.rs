//! Logical units of an export.

use serde_json::{Value, json};

use super::diagnostics::Diagnostics;
use super::key::{Key, Kind, REQUIRED, RunTime, read_all};
use super::model::{LUNS_MAX, LunConfig, TARGETS_MAX};
use super::readers;
use super::setting::key;
use super::value::{Fields, Reader};

/// For keys that `lunette lun` changes.
pub const LUN_COMMAND: RunTime = RunTime("`lunette lun`, reload");

/// A key of a logical unit.
pub type LunKey = Key<LunConfig>;

const TARGET: LunKey = key! { "target": Kind::Number("", 0..=TARGETS_MAX as u64 - 1); REQUIRED; LUN_COMMAND; "target"; both target };

const LUN: LunKey = key! { "lun": Kind::Number("", 0..=LUNS_MAX as u64 - 1); REQUIRED; LUN_COMMAND; "logical unit number"; both lun };

const DISK: LunKey = key! { "disk": readers::DISK; REQUIRED; LUN_COMMAND; "the disk"; both disk };

/// Keys of a controller's logical unit.
pub static LUN_KEYS: &[LunKey] = &[TARGET, LUN, DISK];

/// Keys of a logical unit of an iSCSI target, which has one target only.
pub static TARGET_LUN_KEYS: &[LunKey] = &[
    Key {
        kind: Kind::Number("", 0..=0),
        default: "`0`",
        run_time: RunTime::NEVER,
        help: "always 0",
        ..TARGET
    },
    LUN,
    DISK,
];

/// Reads a logical unit.
pub fn read_lun(
    keys: &'static [LunKey],
    fields: &Fields,
    diagnostics: &mut Diagnostics,
) -> LunConfig {
    let mut reader = Reader::new(fields, "lun", diagnostics);
    let mut lun = LunConfig::default();
    read_all(keys, &mut reader, &mut lun);
    reader.finish(|_| None);
    lun
}

/// Reads a list of logical units.
pub fn read_luns(
    key: &'static str,
    keys: &'static [LunKey],
    example: &str,
    reader: &mut Reader<'_, '_>,
) -> Vec<LunConfig> {
    let luns = reader.objects(key, example).into_iter();
    luns.map(|fields| read_lun(keys, fields, reader.diagnostics))
        .collect()
}

/// Returns logical units as the value of a key.
pub fn luns_value(luns: &[LunConfig]) -> Value {
    let luns = luns.iter();
    let luns = luns.map(|lun| json!({"target": lun.target, "lun": lun.lun, "disk": lun.disk}));
    luns.collect()
}
