//! Records of the logical units of iSCSI disks, and of the devices of disks with a path that the kernel assigns (`/dev/sdb`): each disk has
//! one file in the state folder with the names of its unit or device.
//!
//! A record is written when a disk is served for the first time, and compared at every later open. It is removed with the disk. A disk with
//! a damaged record is unavailable. After `lunette state reset` of the record, the next unit or device is accepted and recorded.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bdev::iscsi_initiator::KnownUnits;
use bdev::{BlockDevice, Medium, OpenError};
use config::{BlockDeviceConfig, Config, DiskConfig};
use scsi::Store;

use crate::state::checked_name;

/// Prefix of the keys, before the name of the disk.
pub(crate) const PREFIX: &str = "unit-";

fn key(disk: &str) -> String {
    format!("{PREFIX}{disk}")
}

/// Returns the path of a local disk that the kernel assigns, and that may lead to another device after a restart of the machine.
fn kernel_path(disk: &DiskConfig) -> Option<&Path> {
    let path = match &disk.backend {
        BlockDeviceConfig::File { path, .. }
        | BlockDeviceConfig::Image { path, .. }
        | BlockDeviceConfig::ScsiGeneric { path, .. } => path,
        _ => return None,
    };
    (path.parent() == Some(Path::new("/dev"))).then_some(path)
}

fn has_record(disk: &DiskConfig) -> bool {
    matches!(disk.backend, BlockDeviceConfig::Iscsi(_)) || kernel_path(disk).is_some()
}

fn error(disk: &DiskConfig, reason: String) -> OpenError {
    match &disk.backend {
        BlockDeviceConfig::Iscsi(remote) => OpenError::Unit {
            unit: remote
                .unit
                .as_ref()
                .map_or_else(String::new, ToString::to_string),
            reason,
        },
        other => OpenError::File {
            path: other
                .file()
                .or(kernel_path(disk))
                .unwrap_or(Path::new(""))
                .to_owned(),
            reason,
        },
    }
}

/// Loads the record of a disk. It is empty for a disk without a record.
///
/// # Errors
/// The record is damaged.
pub(crate) fn load(disk: &DiskConfig, store: &dyn Store) -> Result<KnownUnits, OpenError> {
    if !has_record(disk) {
        return Ok(KnownUnits::default());
    }
    let (key, name) = (key(&disk.name), &disk.name);
    let file = checked_name(&key);
    let failed = |reason: String| {
        error(
            disk,
            format!("cannot check the identity of its unit or device: {reason}"),
        )
    };
    let record = store.load(&key);
    let mut known = match record.map_err(|unusable| failed(unusable.to_string()))? {
        None => KnownUnits::default(),
        Some(record) => KnownUnits::decode(&record).ok_or_else(|| {
            failed(format!(
                "state file {file} is malformed; hint: lunette state reset {file}"
            ))
        })?,
    };
    known.remedy = match kernel_path(disk) {
        None => format!(
            "correct the LUN or its mapping at the target, or accept the other unit as disk {name}: lunette state reset {file}"
        ),
        Some(_) => format!(
            "use a path in /dev/disk/by-id, or accept the other device as disk {name}: lunette state reset {file}"
        ),
    };
    Ok(known)
}

/// Checks that an open disk is on the recorded unit or device.
///
/// # Errors
/// The names of both, with a hint.
pub(crate) fn check(
    disk: &DiskConfig,
    known: &KnownUnits,
    device: &dyn BlockDevice,
) -> Result<(), OpenError> {
    let found = device.medium().and_then(Medium::known_units);
    let found = found.cloned().unwrap_or_default();
    if !known.excludes(&found) {
        return Ok(());
    }
    let shown = match found.is_empty() {
        true => "one without an identifier".to_owned(),
        false => found.to_string(),
    };
    let reason = format!(
        "the path leads to another device than before: found {shown}, expected {known}; hint: {}",
        known.remedy
    );
    Err(error(disk, reason))
}

/// Records the units of a served disk, unless the record has them. A damaged record stays.
///
/// # Errors
/// The record cannot be written.
pub(crate) fn save(disk: &str, device: &dyn BlockDevice, store: &dyn Store) -> std::io::Result<()> {
    let Some(units) = device.medium().and_then(Medium::known_units) else {
        return Ok(());
    };
    let (key, record) = (key(disk), units.encode());
    match store.load(&key) {
        Ok(Some(saved)) if saved == record => Ok(()),
        Ok(Some(_)) if units.is_empty() => {
            store.remove(&key);
            Ok(())
        }
        Ok(_) if !units.is_empty() => store.save(&key, &record),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Disks with a failed record of their unit, and the reasons. The owner of the objects retries them.
#[derive(Debug, Default)]
pub struct Unrecorded(Mutex<BTreeMap<String, String>>);

impl Unrecorded {
    /// Interval of the attempts to write the records.
    pub(crate) const RETRY: Duration = Duration::from_secs(5);

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the result of an attempt. Returns true if it is the first failure of this disk.
    pub(crate) fn set(&self, disk: &str, outcome: &std::io::Result<()>) -> bool {
        match outcome {
            Ok(()) => {
                self.lock().remove(disk);
                false
            }
            Err(error) => {
                let before = self.lock().insert(disk.to_owned(), error.to_string());
                before.is_none()
            }
        }
    }

    /// Forgets a disk that was removed.
    pub(crate) fn forget(&self, disk: &str) {
        self.lock().remove(disk);
    }

    /// Returns the disks without a record.
    pub(crate) fn disks(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// Returns the warning about a disk, if its record could not be written.
    pub(crate) fn warning(&self, disk: &str) -> Option<String> {
        let reason = self.lock().get(disk).cloned()?;
        Some(format!(
            "cannot record the identity of its unit or device, so that another one is accepted after a restart: {reason}; hint: make the state folder writable"
        ))
    }
}

/// Removes the records of disks that the next configuration does not have.
pub(crate) fn forget(before: &Config, next: &Config, store: &dyn Store) {
    let recorded = |config: &Config| -> HashSet<String> {
        let disks = config.disks.iter().filter(|disk| has_record(disk));
        disks.map(|disk| disk.name.clone()).collect()
    };
    let before = recorded(before);
    if before.is_empty() {
        return;
    }
    for disk in before.difference(&recorded(next)) {
        store.remove(&key(disk));
    }
}

#[cfg(test)]
mod tests {
    use config::{Flags, Surroundings, parse};

    use super::*;

    fn disk(text: &str) -> DiskConfig {
        let flags = Flags {
            disk: vec![text.to_owned()],
            ..Flags::default()
        };
        let config = parse(None, &flags, &Surroundings::of_this_process());
        config.unwrap_or_else(|mistakes| panic!("{mistakes}")).disks[0].clone()
    }

    #[test]
    fn failed_record_is_a_warning_until_it_is_written() {
        let unrecorded = Unrecorded::default();
        let failed = Err(std::io::ErrorKind::StorageFull.into());
        assert!(unrecorded.set("d0", &failed));
        assert!(!unrecorded.set("d0", &failed), "it is logged once");
        let warning = unrecorded.warning("d0").unwrap();
        assert!(warning.contains("cannot record the identity"), "{warning}");
        assert_eq!(unrecorded.warning("d1"), None);
        assert_eq!(unrecorded.disks(), ["d0"]);
        assert!(!unrecorded.set("d0", &Ok(())));
        assert_eq!(unrecorded.warning("d0"), None);
    }

    #[test]
    fn units_and_kernel_paths_have_records() {
        for (text, expected) in [
            ("d0=iscsi://192.0.2.1/iqn.2026-11.org.example:t0/0", true),
            ("d0=file:/dev/sdb", true),
            ("d0=image:/dev/sdb", true),
            ("d0=scsi_generic:/dev/sg1", true),
            ("d0=file:/dev/disk/by-id/wwn-0x5000c500a1b2c3d4", false),
            ("d0=file:/dev/vg0/a", false),
            ("d0=file:/srv/a.raw", false),
            ("d0=ram:1M", false),
        ] {
            assert_eq!(has_record(&disk(text)), expected, "{text}");
        }
    }
}
