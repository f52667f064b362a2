//! Comparison of two configurations of one disk, key by key.

use serde_json::Value;

use super::disk::DISK_KEYS;
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
    let differences = DISK_KEYS.iter().filter_map(|key| {
        let (of_one, of_other) = ((key.get)(one), (key.get)(other));
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            value => key.kind.toml(value).trim_matches('"').to_owned(),
        };
        (of_one != of_other).then(|| Difference {
            key: key.name,
            one: of_one.as_ref().map(text),
            other: of_other.as_ref().map(text),
        })
    });
    differences.collect()
}
