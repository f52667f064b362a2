//! List of the kinds of exports, for code that reads, writes or describes configurations. Each kind has its own file.

use serde_json::Value;

use super::export_keys::ExportKind;
pub use super::iscsi::ISCSI;
use super::key::{KeyValue, key_values};
use super::model::{ExportConfig, Transport};
pub use super::nbd::NBD;
pub use super::vhost_blk::VHOST_BLK;
pub use super::vhost_scsi::VHOST_SCSI;

/// All kinds.
pub static EXPORT_KINDS: [&ExportKind; 4] = [&VHOST_BLK, &VHOST_SCSI, &ISCSI, &NBD];

impl ExportConfig {
    fn description(&self) -> &'static ExportKind {
        match self.transport {
            Transport::VhostBlk => &VHOST_BLK,
            Transport::VhostScsi => &VHOST_SCSI,
            Transport::Iscsi => &ISCSI,
            Transport::Nbd => &NBD,
        }
    }

    /// Returns the word of its kind.
    pub fn kind(&self) -> &'static str {
        self.description().word
    }

    /// Returns the configured values, in the order of the keys.
    pub fn values(&self) -> Vec<KeyValue> {
        key_values(self.description().all_keys(), self)
    }

    /// Returns the values for a file. A target has a list of disks only, if its logical units are numbered from 0.
    pub fn file_values(&self) -> Vec<KeyValue> {
        let mut values = self.values();
        let mut keys = self.description().all_keys();
        if self.luns.iter().zip(0..).all(|(lun, at)| lun.lun == at)
            && let Some(disks) = keys.find(|key| key.name == "disks")
            && let Some(lun) = values.iter_mut().find(|value| value.name == "lun")
        {
            *lun = KeyValue {
                name: disks.name,
                kind: &disks.kind,
                value: self.luns.iter().map(|lun| lun.disk.as_str()).collect(),
            };
        }
        values
    }

    /// Returns the values for the body of a request, which has a field of its own for the name. Logical units are sorted as an initiator
    /// lists them.
    pub fn body_values(&self) -> Vec<(String, Value)> {
        let values = self.values().into_iter();
        let values = values.filter(|one| one.name != "name");
        let value = |mut one: KeyValue| {
            if let ("lun", Some(luns)) = (one.name, one.value.as_array_mut()) {
                luns.sort_by_key(|lun| (lun["target"].as_u64(), lun["lun"].as_u64()));
            }
            (one.name.to_owned(), one.value)
        };
        values.map(value).collect()
    }
}
