//! Identities of disks: read from their medium, created if there is none, and written back.
//!
//! A file keeps its identity in an attribute. A medium without attributes (a block device, some file systems, a read-only disk) has a
//! record in the state folder under its key. The identity of a Ceph RBD image is derived from its location and needs a record only after a
//! replacement. Disks with contents that end with the process have a line in `identities.json` while they are configured.
//!
//! Reservations, saved mode pages and initiators refer to the identity. A disk with an unusable identity is unavailable, and the damaged
//! file or attribute stays until it is restored or reset. The daemon and its other disks start. A failed write of an identity is logged,
//! and the disk is served.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bdev::{BlockDevice, Disk, IdentityRecord, Medium};
use block::Identity;
use scsi::Store;
use serde::{Deserialize, Serialize};

use crate::disks::Disks;
use crate::state;
use crate::state_files::{self, DamagedFiles};
use config::{Config, DiskConfig};

const VOLATILE: &str = "identities.json";

/// Confidence that a disk has the identity that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Certainty {
    /// Written for this medium or derived from it.
    Written,
    /// The file was moved, restored or copied with its identity, and the original does not exist.
    Inherited,
    /// New: there was no identity, or it belongs to another disk.
    New,
}

/// Identity of a disk that is being opened.
#[derive(Debug)]
pub(crate) struct Claim {
    pub identity: Identity,
    certainty: Certainty,
    /// Key of the medium; `None` without a medium.
    key: Option<String>,
    /// The stored record is missing or differs.
    is_stale: bool,
}

impl Claim {
    fn new(key: Option<String>) -> Claim {
        Claim {
            identity: Identity::random(),
            certainty: Certainty::New,
            key,
            is_stale: true,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Volatile {
    backend: String,
    identity: String,
}

/// Identities of disks without a medium.
#[derive(Debug, Default)]
pub(crate) struct Identities {
    folder: Option<PathBuf>,
    volatile: BTreeMap<String, Volatile>,
    /// Reason why the file is unusable. The file is not replaced before a reset.
    unusable: Option<String>,
    damaged: DamagedFiles,
}

impl Identities {
    /// Loads the identities from a state folder, which only this daemon uses. Without one they end with the process.
    pub(crate) fn load(folder: Option<&Path>, damaged: &DamagedFiles) -> Identities {
        let Some(folder) = folder else {
            return Identities::default();
        };
        let loaded = state_files::read_text(folder, VOLATILE, damaged).and_then(|text| {
            let text = text.unwrap_or_else(|| b"{}".to_vec());
            serde_json::from_slice(&text)
                .map_err(|error| damaged.found(folder, VOLATILE, &format!("is malformed: {error}")))
        });
        let (volatile, unusable) = match loaded {
            Ok(volatile) => (volatile, None),
            Err(reason) => (BTreeMap::new(), Some(reason)),
        };
        Identities {
            folder: Some(folder.to_owned()),
            volatile,
            unusable,
            damaged: damaged.clone(),
        }
    }

    /// Resets the file. Saves known identities again; otherwise disks without a medium get new ones.
    ///
    /// # Errors
    /// The file is still there, or the known identities cannot be saved.
    pub(crate) fn reset(&mut self) -> std::io::Result<()> {
        if let Some(folder) = &self.folder {
            state_files::move_aside(&folder.join(VOLATILE))?;
        }
        self.damaged.cleared(VOLATILE);
        match self.unusable.take() {
            Some(_) => Ok(()),
            None => self.save_volatile(),
        }
    }

    fn save_volatile(&self) -> std::io::Result<()> {
        let Some(folder) = &self.folder else {
            return Ok(());
        };
        let text = serde_json::to_vec_pretty(&self.volatile).unwrap_or_default();
        let text = state_files::with_check_line(VOLATILE, &text);
        state::replace(&folder.join(VOLATILE), &text)
    }

    /// Returns the disk with the identity record of this key.
    pub(crate) fn disk_of_record(disks: &Disks, key: &str) -> Option<Arc<Disk>> {
        let has_record = |disk: &&Arc<Disk>| {
            let device = disk.device();
            device
                .medium()
                .is_some_and(|medium| store_key(&medium.key()) == key)
        };
        disks.values().find(has_record).cloned()
    }

    /// Writes the present identity of a disk to its medium again. May block.
    ///
    /// # Errors
    /// The reason why it cannot be saved.
    pub(crate) fn write_again(disk: &Disk, store: &dyn Store) -> Result<(), String> {
        Identities::write(disk.info().identity, &*disk.device(), store)
    }

    /// Returns the identity of a disk without a medium.
    ///
    /// # Errors
    /// The reason why the saved identities are unusable.
    pub(crate) fn claim_volatile(&self, config: &DiskConfig) -> Result<Claim, String> {
        if let Some(reason) = &self.unusable {
            return Err(format!("its identity is unknown: {reason}"));
        }
        let known = self.volatile.get(&config.name);
        let Some(known) = known.filter(|known| known.backend == config.backend.word()) else {
            return Ok(Claim::new(None));
        };
        let identity = known.identity.parse();
        let identity =
            identity.map_err(|_| format!("{VOLATILE}: {:?} is not an identity", known.identity))?;
        Ok(Claim {
            identity,
            certainty: Certainty::Written,
            key: None,
            is_stale: false,
        })
    }

    /// Saves the identities of the configured disks without a medium. A disk that waits to be opened keeps its identity.
    pub(crate) fn keep_volatile(&mut self, config: &Config, disks: &Disks) {
        if self.unusable.is_some() {
            return;
        }
        let volatile = config.disks.iter().filter_map(|config| {
            let Some(disk) = disks.get(&config.name) else {
                let known = self.volatile.get(&config.name)?;
                let is_same = known.backend == config.backend.word();
                return is_same.then(|| (config.name.clone(), known.clone()));
            };
            if disk.device().medium().is_some() {
                return None;
            }
            let volatile = Volatile {
                backend: config.backend.word().to_owned(),
                identity: disk.info().identity.to_string(),
            };
            Some((config.name.clone(), volatile))
        });
        let volatile = volatile.collect();
        if self.volatile == volatile {
            return;
        }
        self.volatile = volatile;
        if let Err(error) = self.save_volatile() {
            let folder = self.folder.clone().unwrap_or_default();
            let file = folder.join(VOLATILE);
            let file = file.display();
            tracing::error!(
                "cannot write {file}, RAM disks get new identities at the next start: {error}"
            );
        }
    }

    /// Writes a new identity to the medium of a disk and returns it. The disk still has the old one. May block.
    ///
    /// # Errors
    /// The reason why it cannot be saved.
    pub(crate) fn write_new(disk: &Disk, store: &dyn Store) -> Result<Identity, String> {
        let identity = Identity::random();
        Identities::write(identity, &*disk.device(), store)?;
        Ok(identity)
    }

    /// Writes a disk's identity to its next device.
    ///
    /// # Errors
    /// The reason why it cannot be saved there.
    pub(crate) fn carry_over(
        disk: &Disk,
        device: &dyn BlockDevice,
        store: &dyn Store,
    ) -> Result<(), String> {
        Identities::write(disk.info().identity, device, store)
    }

    fn write(
        identity: Identity,
        device: &dyn BlockDevice,
        store: &dyn Store,
    ) -> Result<(), String> {
        if let Some(medium) = device.medium() {
            let record = record(identity, medium);
            if let Err(refused) = medium.set_attribute(&record.to_attribute()) {
                let has_attribute = matches!(medium.attribute(), Ok(Some(_)));
                if has_attribute {
                    return Err(format!(
                        "cannot change the identity in the file's attribute: {refused}"
                    ));
                }
                save(medium, &record, store)
                    .map_err(|error| format!("cannot persist the identity: {error}"))?;
            } else if let Ok(file) = medium.reopen() {
                rustix::fs::fsync(file)
                    .map_err(|error| format!("cannot make the identity durable: {error}"))?;
            }
        }
        Ok(())
    }
}

/// Reads the identity from the medium of a device, before conflicts are resolved. Returns `None` without a medium. May block. The error is
/// the reason why an existing identity is unusable.
pub(crate) fn claim(
    name: &str,
    device: &dyn BlockDevice,
    store: &dyn Store,
) -> Option<Result<Claim, String>> {
    let medium = device.medium()?;
    Some(claim_medium(name, medium, store))
}

/// A new identity that is not on its medium yet.
pub(crate) struct Unwritten {
    pub disk: Arc<Disk>,
    certainty: Certainty,
}

impl Unwritten {
    /// Returns the identity to write for a claim, unless the medium has it or there is none.
    pub fn of(disk: &Arc<Disk>, claim: &Claim) -> Option<Unwritten> {
        let is_new = claim.is_stale && disk.device().medium().is_some();
        is_new.then(|| Unwritten {
            disk: Arc::clone(disk),
            certainty: claim.certainty,
        })
    }

    /// Writes the identity. Returns the file to sync. May block.
    pub fn write(&self, store: &dyn Store) -> Option<OwnedFd> {
        let device = self.disk.device();
        let medium = device.medium()?;
        let record = record(self.disk.info().identity, medium);
        let Err(refused) = medium.set_attribute(&record.to_attribute()) else {
            return medium.reopen().ok();
        };
        if self.certainty == Certainty::Written {
            return None;
        }
        let disk = self.disk.name();
        tracing::debug!(disk, "the medium cannot hold the identity: {refused}");
        if let Err(error) = save(medium, &record, store) {
            tracing::warn!(
                disk,
                "cannot persist its identity, which changes at a restart: {error}; hint: --state DIR"
            );
        }
        None
    }
}

/// Makes written identities durable. Blocks until the storage has written all other data of the files, too.
pub(crate) fn sync(files: &[OwnedFd]) {
    for file in files {
        if let Err(error) = rustix::fs::fsync(file) {
            tracing::warn!("cannot persist an identity: {error}");
        }
    }
}

/// Resolves conflicts, because initiators would treat disks with one identity as one. A file with an inherited identity is the copy and
/// gets a new one. Other disks are refused with a reason.
pub(crate) fn resolve_conflicts(
    opening: &mut [(&DiskConfig, Claim)],
    known: &Disks,
    failed: &mut Vec<(String, String)>,
) {
    refuse_one_medium_twice(opening, known, failed);
    let mut taken: HashMap<Identity, String> = known
        .iter()
        .map(|(name, disk)| (disk.info().identity, name.clone()))
        .collect();
    for certainty in [Certainty::Written, Certainty::Inherited, Certainty::New] {
        for (config, claim) in opening.iter_mut() {
            if claim.certainty != certainty {
                continue;
            }
            let (name, identity) = (&config.name, claim.identity);
            let Some(other) = taken.get(&identity) else {
                taken.insert(identity, name.clone());
                continue;
            };
            if certainty == Certainty::Written {
                let reason = format!(
                    "it has the same identity as disk {other}, {identity}: both are the same file, device, image or logical unit, or one is a snapshot of the other; hint: for a snapshot of a file, setfattr -x user.lunette.identity FILE gives it a new identity"
                );
                failed.push((name.clone(), reason));
                continue;
            }
            let renewed = Claim::new(claim.key.clone());
            tracing::warn!(
                disk = name,
                "its file is a copy of the file of disk {other} with identity {identity}, new identity assigned: {}",
                renewed.identity
            );
            taken.insert(renewed.identity, name.clone());
            *claim = renewed;
        }
    }
    for (config, claim) in opening.iter() {
        if claim.certainty == Certainty::Inherited {
            tracing::warn!(
                disk = config.name,
                "its file was moved, restored or copied since the identity {} was assigned; the disk retains this identity; hint: if the file is a copy of a file in use, run lunette disk identity {} --new",
                claim.identity,
                config.name
            );
        }
    }
}

/// Refuses two paths to one new file, which would get two identities.
fn refuse_one_medium_twice(
    opening: &[(&DiskConfig, Claim)],
    known: &Disks,
    failed: &mut Vec<(String, String)>,
) {
    let is_new = |claim: &Claim| claim.certainty == Certainty::New && claim.key.is_some();
    if !opening.iter().any(|(_, claim)| is_new(claim)) {
        return;
    }
    let mut taken: HashMap<String, &str> = known
        .iter()
        .filter_map(|(name, disk)| Some((disk.device().medium()?.key(), name.as_str())))
        .collect();
    for (config, claim) in opening {
        let Some(key) = &claim.key else { continue };
        if let Some(other) = taken.insert(key.clone(), &config.name)
            && is_new(claim)
        {
            let reason = format!("its file or device already belongs to disk {other}: {key}");
            failed.push((config.name.clone(), reason));
        }
    }
}

fn record(identity: Identity, medium: &dyn Medium) -> IdentityRecord {
    IdentityRecord {
        identity,
        stamp: medium.stamp(),
    }
}

fn claim_medium(name: &str, medium: &dyn Medium, store: &dyn Store) -> Result<Claim, String> {
    let now = medium.stamp();
    let is_of_this = |record: &IdentityRecord| match (&record.stamp, &now) {
        (Some(written_for), Some(now)) => written_for.is_same_file(now),
        // A block device has no stamp; its key identifies it.
        (None, None) => true,
        _ => false,
    };
    let key = medium.key();
    let written = |record: &IdentityRecord, is_stale| Claim {
        identity: record.identity,
        certainty: Certainty::Written,
        key: Some(key.clone()),
        is_stale,
    };
    let mut inherited = None;
    if let Some((attribute, record)) = attribute(medium)? {
        let is_here = record.stamp == now;
        if is_here || is_of_this(&record) && !medium.is_copy_of(&record) {
            // The file was moved, or an earlier version wrote the attribute.
            let current = self::record(record.identity, medium).to_attribute();
            return Ok(written(&record, attribute != current));
        }
        inherited = Some(record);
    }
    let kept = load(medium, store)?.filter(|record| is_of_this(record));
    if let Some(record) = kept {
        // The claim is marked as stale, so that the identity is written to the file once that is possible.
        return Ok(written(&record, now.is_some()));
    }
    let Some(record) = inherited else {
        return Ok(match medium.own_identity() {
            Some(identity) => Claim {
                identity,
                certainty: Certainty::Written,
                key: Some(key),
                is_stale: false,
            },
            None => Claim::new(Some(key)),
        });
    };
    if medium.is_copy_of(&record) {
        let claim = Claim::new(Some(key));
        let original = record
            .stamp
            .and_then(|stamp| stamp.path)
            .unwrap_or_default();
        tracing::warn!(
            disk = name,
            "its file is a copy of {} with identity {}, new identity assigned: {}",
            original.display(),
            record.identity,
            claim.identity
        );
        return Ok(claim);
    }
    Ok(Claim {
        identity: record.identity,
        certainty: match record.stamp {
            Some(_) => Certainty::Inherited,
            // An identity without a stamp was set by hand for this file.
            None => Certainty::Written,
        },
        key: Some(key),
        is_stale: true,
    })
}

/// Returns the attribute of a file, and the identity in it; `None` if the file has none or cannot have one.
fn attribute(medium: &dyn Medium) -> Result<Option<(Vec<u8>, IdentityRecord)>, String> {
    let hint = "hint: restore the attribute, or remove it to give the disk a new identity without reservations: setfattr -x user.lunette.identity FILE";
    match medium.attribute() {
        Ok(None) => Ok(None),
        Ok(Some(attribute)) => match IdentityRecord::from_attribute(&attribute) {
            Some(record) => Ok(Some((attribute, record))),
            None => Err(format!(
                "its identity is unknown: the attribute user.lunette.identity of its file is damaged; {hint}"
            )),
        },
        Err(error) if error.kind() == std::io::ErrorKind::Unsupported => Ok(None),
        Err(error) => Err(format!(
            "its identity is unknown: cannot read the attribute user.lunette.identity of its file: {error}; {hint}"
        )),
    }
}

/// Returns a short file name for a key, which may be a long path. The file has the whole key.
fn store_key(key: &str) -> String {
    // FNV-1a, 128 bits.
    let hash = key.bytes().fold(
        0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128,
        |hash, byte| {
            (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
        },
    );
    format!("identity-{hash:032x}")
}

fn load(medium: &dyn Medium, store: &dyn Store) -> Result<Option<IdentityRecord>, String> {
    let key = medium.key();
    let unknown = |reason: String| format!("its identity is unknown: {reason}");
    let saved = store_key(&key);
    let Some(bytes) = store
        .load(&saved)
        .map_err(|error| unknown(error.to_string()))?
    else {
        return Ok(None);
    };
    let record = bytes.strip_prefix(key.as_bytes());
    let record = record.and_then(|rest| IdentityRecord::decode(rest.strip_prefix(b"\n")?));
    let malformed = || {
        unknown(format!(
            "the record {saved} is malformed or of another medium"
        ))
    };
    record.ok_or_else(malformed).map(Some)
}

fn save(medium: &dyn Medium, record: &IdentityRecord, store: &dyn Store) -> std::io::Result<()> {
    let key = medium.key();
    let bytes = [key.as_bytes(), b"\n", &record.encode()].concat();
    store.save(&store_key(&key), &bytes)
}

#[cfg(test)]
#[path = "identities_tests.rs"]
mod tests;
