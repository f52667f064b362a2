//! Logical units of an export.

use serde_json::{Value, json};

use super::diagnostics::Diagnostics;
use super::key::{Key, Kind, REQUIRED, RunTime, read_all};
use super::location::Located;
use super::model::{LUNS_MAX, LunConfig, TARGETS_MAX};
use super::readers;
use super::setting::key;
use super::value::{Fields, Reader};

/// For keys that `lunette lun` changes.
pub const LUN_COMMAND: RunTime = RunTime::Command("lunette lun");

/// Values given for a logical unit.
#[derive(Default)]
pub struct LunDraft {
    pub target: Option<Located<u8>>,
    pub lun: Option<Located<u16>>,
    pub disk: Option<Located<String>>,
}

impl LunDraft {
    /// Returns the logical unit, if no key is missing.
    pub fn complete(&self) -> Option<LunConfig> {
        Some(LunConfig {
            target: self.target.as_ref()?.value,
            lun: self.lun.as_ref()?.value,
            disk: self.disk.as_ref()?.value.clone(),
        })
    }
}

/// A key of a logical unit.
pub type LunKey = Key<LunDraft, LunConfig>;

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
        run_time: RunTime::Never,
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
) -> LunDraft {
    let mut reader = Reader::new(fields, "lun", diagnostics);
    let mut draft = LunDraft::default();
    read_all(keys, &mut reader, &mut draft);
    reader.finish(|_| None);
    draft
}

/// Returns logical units as the value of a key.
pub fn luns_value(luns: &[LunConfig]) -> Value {
    let luns = luns.iter();
    let luns = luns.map(|lun| json!({"target": lun.target, "lun": lun.lun, "disk": lun.disk}));
    luns.collect()
}
