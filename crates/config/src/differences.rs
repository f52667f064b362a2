//! Comparison of two configurations of one disk, key by key.

use serde_json::Value;

use super::device_keys::DiskKey;
use super::disk::disk_keys;
use super::key::differing;
use super::model::DiskConfig;

/// A key with different values in two configurations of a disk; `None`: without a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Name of the key.
    pub key: &'static str,
    /// Value of the first configuration, as in a file.
    pub one: Option<String>,
    /// Value of the second configuration.
    pub other: Option<String>,
}

/// Returns the keys of a disk with different values.
pub fn disk_differences(one: &DiskConfig, other: &DiskConfig) -> Vec<Difference> {
    let difference = |key: &'static DiskKey| {
        let text = |disk| match (key.get)(disk)? {
            Value::String(text) => Some(text),
            value => Some(key.kind.toml(&value).trim_matches('"').to_owned()),
        };
        Difference {
            key: key.name,
            one: text(one),
            other: text(other),
        }
    };
    differing(disk_keys(), one, other).map(difference).collect()
}
