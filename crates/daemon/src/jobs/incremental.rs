//! Incremental backups. Ranges marked in a dirty bitmap are copied to the target of the last backup, or into a new image over it. The first
//! backup of a name copies everything. A complete backup begins a new bitmap: see [`crate::bitmaps`]. A bitmap is a checkpoint: several
//! may exist, and a backup may copy the changes since any of them.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bdev::{BlockDevice, DirtyBitmap, Disk, FrozenBitmap, Image, ImageOptions};

use super::Context;
use super::backing_name::backing_name;
use super::copy::shown;
use super::exchange::failed;
use crate::bitmaps::{Bitmaps, COUNT_MAX, Last, Shown, StartedBackup, is_name};
use crate::objects::{Fault, Refusal, bodies};
use config::{BlockDeviceConfig, DiskConfig, disk_json};

/// Checkpoints of a backup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckpointNames {
    /// The backup contains the changes since this checkpoint; `None`: everything.
    pub since: Option<String>,
    /// Checkpoint that the backup creates or replaces.
    pub checkpoint: Option<String>,
    /// Without a usable checkpoint `since`, the backup contains everything.
    pub may_be_full: bool,
}

impl CheckpointNames {
    /// Returns the names of a backup since the last one with this name.
    pub fn latest(name: &str) -> CheckpointNames {
        CheckpointNames {
            since: Some(name.to_owned()),
            checkpoint: Some(name.to_owned()),
            may_be_full: true,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.since.is_none() && self.checkpoint.is_none()
    }
}

pub(super) struct Incremental {
    bitmaps: Arc<Bitmaps>,
    disk: String,
    names: CheckpointNames,
    /// Size of the disk.
    disk_bytes: u64,
    /// Bits of `changed` at the point in time.
    frozen: Option<Arc<FrozenBitmap>>,
    /// Ranges to copy; `None` for everything.
    changed: Option<Arc<DirtyBitmap>>,
    begun: Option<StartedBackup>,
    /// Target; `None` for a pull.
    target: Option<BlockDeviceConfig>,
    last: Last,
}

impl Incremental {
    /// Determines how a backup of this name is made and creates its next bitmap. Also returns the last backup if the target is an image
    /// over it.
    ///
    /// # Errors
    /// If the backup cannot be made. Nothing has changed then.
    pub fn prepare(
        context: &Context,
        disk: &Arc<Disk>,
        names: &CheckpointNames,
        target: Option<&DiskConfig>,
    ) -> Result<(Incremental, Option<DiskConfig>), Refusal> {
        let bitmaps = Arc::clone(&context.bitmaps);
        let known = bitmaps.of(disk.name());
        if let Some(name) = &names.checkpoint {
            check_name(&bitmaps, disk.name(), name, &known)?;
        }
        let since = names.since.as_ref();
        let since = known.into_iter().find(|known| Some(&known.name) == since);
        let required = names.since.as_deref().filter(|_| !names.may_be_full);
        if let Some(name) = required {
            check_usable(disk.name(), name, since.as_ref())?;
        }
        let (is_full, base) = match (&since, target) {
            (None, _) => (true, None),
            (Some(known), Some(target)) => base(disk.name(), known, target)?,
            (Some(known), None) => (known.broken.is_some(), None),
        };
        if let Some(name) = required.filter(|_| is_full) {
            return Err(Refusal::conflict(
                format!(
                    "disk {}: the target of checkpoint {name} no longer exists",
                    disk.name()
                ),
                "make a backup without --since",
            ));
        }
        let begun = names.checkpoint.as_ref().map(|_| bitmaps.begin(disk));
        let begun = begun.transpose().map_err(|error| {
            failed(
                disk.name(),
                &format!("cannot create a dirty bitmap: {error}"),
            )
        })?;
        // The running job now prevents the removal of the bitmap.
        let changed = since.filter(|_| !is_full);
        let changed = changed.and_then(|known| bitmaps.bits(disk.name(), &known.name));
        let last = Last {
            target: serde_json::json!(target.map(bodies::disk)),
            shown: target.map_or(PULLED.to_owned(), |target| shown(&target.backend)),
            // Set when the backup is complete.
            at: 0,
            identity: None,
        };
        let incremental = Incremental {
            bitmaps,
            disk: disk.name().to_owned(),
            names: names.clone(),
            disk_bytes: disk.info().geometry.capacity_bytes(),
            frozen: None,
            changed,
            begun,
            target: target.map(|target| target.backend.clone()),
            last,
        };
        if let Some(name) = required
            && incremental.changed.is_none()
        {
            let reason = format!(
                "cannot use checkpoint {name}: it was removed, or its bitmap file was truncated"
            );
            return Err(failed(disk.name(), &reason));
        }
        Ok((incremental, base))
    }

    pub fn changed(&self) -> Option<&DirtyBitmap> {
        self.changed.as_deref()
    }

    /// Returns the name of the checkpoint before the changes.
    pub fn since(&self) -> &str {
        self.names.since.as_deref().unwrap_or_default()
    }

    /// Returns the changes up to the point in time, after [`Incremental::freeze`]; `None` for everything.
    pub fn frozen(&self) -> Option<&Arc<FrozenBitmap>> {
        self.frozen.as_ref()
    }

    /// Separates the changes before and after the point in time. The caller holds the disk.
    pub fn freeze(&mut self) -> Result<(), Refusal> {
        if let Some(changed) = &self.changed {
            let recorded = self.bitmaps.bits(&self.disk, self.since());
            if !recorded.is_some_and(|bits| Arc::ptr_eq(&bits, changed)) {
                return Err(Refusal::conflict(
                    format!(
                        "disk {}: checkpoint {} was removed while the backup began",
                        self.disk,
                        self.since()
                    ),
                    "make a backup without --since",
                ));
            }
            let frozen = FrozenBitmap::copy(changed, self.disk_bytes).map_err(|error| {
                let reason = format!("cannot use checkpoint {}: {error}", self.since());
                failed(&self.disk, &reason)
            })?;
            self.frozen = Some(Arc::new(frozen));
        }
        self.record();
        Ok(())
    }

    /// Starts to record changes for the next backup. The caller holds the disk.
    pub fn record(&self) {
        if let Some(begun) = &self.begun {
            self.bitmaps.record_in(&self.disk, begun);
        }
    }

    /// Records that the backup is complete and durable.
    pub fn complete(&mut self) -> Result<(), Refusal> {
        let Some(begun) = &self.begun else {
            return Ok(());
        };
        let at = SystemTime::now().duration_since(UNIX_EPOCH);
        self.last.at = at.unwrap_or_default().as_secs();
        self.last.identity = self.target.as_ref().and_then(file_identity);
        let name = self.names.checkpoint.as_deref().unwrap_or_default();
        let completed = self
            .bitmaps
            .complete(&self.disk, name, begun, self.last.clone());
        completed.map_err(|error| {
            failed(
                &self.disk,
                &format!("cannot persist its dirty bitmap: {error}"),
            )
        })?;
        self.begun = None;
        Ok(())
    }
}

impl Incremental {
    /// Removes the checkpoint that [`Incremental::complete`] has created.
    pub fn revoke(&self) {
        if let Some(name) = &self.names.checkpoint
            && let Err(error) = self.bitmaps.remove(&self.disk, name)
        {
            let disk = &self.disk;
            tracing::warn!(
                disk,
                "cannot remove checkpoint {name} of a failed backup: {error}"
            );
        }
    }
}

impl Drop for Incremental {
    fn drop(&mut self) {
        if let Some(begun) = &self.begun {
            self.bitmaps.give_up(&self.disk, begun);
        }
    }
}

/// Target that is shown for the backups of clients.
const PULLED: &str = "pulled by a client";

/// Refuses a checkpoint that does not exist or that has missed changes.
fn check_usable(disk: &str, name: &str, known: Option<&Shown>) -> Result<(), Refusal> {
    let help = "make a backup without --since; see lunette disk bitmap list";
    let broken = known.map(|known| known.broken.as_ref());
    match broken {
        None => Err(Refusal::NotFound(
            Fault::new(format!("disk {disk} has no checkpoint `{name}`")).help(help),
        )),
        Some(Some(reason)) => Err(Refusal::conflict(
            format!("disk {disk}: checkpoint {name} is unusable: {reason}"),
            help,
        )),
        Some(None) => Ok(()),
    }
}

/// Refuses a checkpoint that only some disks of a backup have.
pub(super) fn check_on_all(bitmaps: &Bitmaps, disks: &[&str], name: &str) -> Result<(), Refusal> {
    let has_it = |disk: &&str| bitmaps.of(disk).iter().any(|known| known.name == name);
    let (with, without): (Vec<&str>, Vec<&str>) = disks.iter().partition(|disk| has_it(disk));
    if with.is_empty() || without.is_empty() {
        return Ok(());
    }
    let (with, without) = (with.join(", "), without.join(", "));
    let detail = format!("checkpoint {name} exists on {with}, but not on {without}");
    let help = "name a checkpoint of all these disks, or make a backup without --since; a backup to targets that was killed or has failed completes the checkpoints of some disks only";
    Err(Refusal::NotFound(Fault::new(detail).help(help)))
}

fn check_name(bitmaps: &Bitmaps, disk: &str, name: &str, known: &[Shown]) -> Result<(), Refusal> {
    if !is_name(name) {
        let fault = Fault::at(
            "/incremental",
            format!("{name:?} is not a valid bitmap name"),
        );
        let help = crate::bitmaps::NAMES;
        return Err(Refusal::Invalid(vec![fault.help(help)]));
    }
    if !bitmaps.are_kept() {
        let detail = format!(
            "disk {disk}: its dirty bitmap would be lost at a restart, because this daemon has no state folder"
        );
        return Err(Refusal::conflict(
            detail,
            "start the daemon with a state folder, --state DIR",
        ));
    }
    let is_new = !known.iter().any(|known| known.name == name);
    if is_new && known.len() >= COUNT_MAX {
        let detail = format!("disk {disk} already has {COUNT_MAX} dirty bitmaps, the maximum");
        let help = "remove one that no backup needs with lunette disk bitmap remove";
        return Err(Refusal::conflict(detail, help));
    }
    Ok(())
}

/// Returns whether a further backup copies everything, and the backup below its target image.
fn base(
    disk: &str,
    known: &Shown,
    target: &DiskConfig,
) -> Result<(bool, Option<DiskConfig>), Refusal> {
    let is_there = target.backend.file().is_none_or(Path::exists);
    let is_same = known.last.shown == shown(&target.backend);
    if let Some(broken) = &known.broken {
        let bitmap = &known.name;
        tracing::warn!(
            disk,
            bitmap,
            "dirty bitmap invalid, copying everything: {broken}"
        );
        return Ok((true, None));
    }
    if known.last.target.is_null() {
        let name = &known.name;
        return Err(Refusal::conflict(
            format!(
                "disk {disk}: a client pulled the backup of checkpoint {name}, so no target can continue it"
            ),
            "pull the changes, too, or make a backup without --since",
        ));
    }
    match (&target.backend, is_there) {
        (backend, true) if is_same => check_identity(disk, known, backend).map(|()| (false, None)),
        // The last backup was removed.
        (_, false) if is_same => Ok((true, None)),
        (BlockDeviceConfig::Image { .. }, false) => {
            let last = disk_json(disk, &known.last.target).map_err(Refusal::from)?;
            if let Err((reason, help)) = backing_name(&last.backend) {
                let (name, shown) = (&known.name, &known.last.shown);
                let detail = format!(
                    "disk {disk}: cannot use the last backup of {name:?}, {shown}, as a backing image: {reason}"
                );
                return Err(Refusal::conflict(detail, help));
            }
            match last.backend.file().is_some_and(|path| !path.exists()) {
                true => Err(last_bitmap_missing(disk, known)),
                false => check_identity(disk, known, &last.backend).map(|()| (false, Some(last))),
            }
        }
        _ => Err(Refusal::conflict(
            format!(
                "disk {disk}: an incremental backup of {:?} must continue its last backup, {}",
                known.name, known.last.shown
            ),
            "give that target again to update it, or a new image, image:PATH, to create an overlay of it",
        )),
    }
}

/// Refuses a file at the path of the last backup that is another one.
fn check_identity(disk: &str, known: &Shown, backend: &BlockDeviceConfig) -> Result<(), Refusal> {
    let recorded = known.last.identity.as_ref();
    if recorded.is_none() || recorded == file_identity(backend).as_ref() {
        return Ok(());
    }
    let (shown, name) = (&known.last.shown, &known.name);
    Err(Refusal::conflict(
        format!(
            "disk {disk}: {shown} is not the backup of checkpoint {name}: another file has replaced it"
        ),
        &format!(
            "restore that backup, or start with a full one after lunette disk bitmap remove {disk} {name}"
        ),
    ))
}

/// Returns the identity of a target's file: that in its header, which a copy shares, or that of its inode. Inode numbers are reused, so
/// a file without a time of creation has no identity.
fn file_identity(backend: &BlockDeviceConfig) -> Option<String> {
    let path = backend.file()?;
    if let BlockDeviceConfig::Image { .. } = backend
        && let Some(identity) = bdev::identity_of(path)
    {
        return Some(format!("image {identity}"));
    }
    let found = std::fs::metadata(path).ok().filter(Metadata::is_file)?;
    let created = found.created().ok()?;
    let created = created.duration_since(UNIX_EPOCH).ok()?.as_nanos();
    Some(format!("inode {} created {created}", found.ino()))
}

fn last_bitmap_missing(disk: &str, known: &Shown) -> Refusal {
    let (shown, name) = (&known.last.shown, &known.name);
    Refusal::conflict(
        format!("disk {disk}: the last backup of {name:?}, {shown}, no longer exists"),
        &format!(
            "remove the bitmap, lunette disk bitmap remove {disk} {name}, and start with a full backup"
        ),
    )
}

/// Removes a bitmap of a disk.
///
/// # Errors
/// If the disk has no bitmap of that name, or if a running job may need it.
pub fn remove_bitmap(context: &Context, disk: &str, name: &str) -> Result<(), Refusal> {
    if let Some(conflict) = context.jobs.at_work(disk) {
        return Err(Refusal::Conflict(vec![conflict]));
    }
    let removed = context.bitmaps.remove(disk, name);
    match removed.map_err(|error| failed(disk, &format!("cannot remove {name:?}: {error}")))? {
        true => Ok(()),
        false => Err(Refusal::NotFound(Fault::new(format!(
            "disk `{disk}` has no bitmap `{name}`"
        )))),
    }
}

pub(super) fn image_over(
    options: &ImageOptions,
    last: &DiskConfig,
    bytes: u64,
) -> Result<Arc<dyn BlockDevice>, String> {
    let name = backing_name(&last.backend).map_err(|(reason, _)| reason)?;
    let last = DiskConfig {
        read_only: true,
        ..last.clone()
    };
    let below = crate::block_devices::open(&last).map_err(|error| error.to_string())?;
    let image = Image::create_over(options, &name, below, bytes);
    Ok(Arc::new(image.map_err(|error| error.to_string())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state_files::DamagedFiles;

    #[test]
    fn checkpoint_removed_before_the_point_in_time_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let bitmaps = Arc::new(Bitmaps::load(Some(folder.path()), &DamagedFiles::default()));
        let ram = bdev::Ram::create(bdev::RamOptions {
            size: 1 << 20,
            ..bdev::RamOptions::default()
        });
        let disk = Arc::new(Disk::new("d", None, Arc::new(ram.unwrap())).unwrap());
        let last = || Last {
            target: serde_json::Value::Null,
            shown: PULLED.to_owned(),
            at: 1,
            identity: None,
        };
        let complete = || {
            let begun = bitmaps.begin(&disk).unwrap();
            bitmaps.record_in("d", &begun);
            bitmaps.complete("d", "mon", &begun, last()).unwrap();
        };
        complete();
        let since_mon = || Incremental {
            bitmaps: Arc::clone(&bitmaps),
            disk: "d".to_owned(),
            names: CheckpointNames {
                since: Some("mon".to_owned()),
                ..CheckpointNames::default()
            },
            disk_bytes: 1 << 20,
            frozen: None,
            changed: bitmaps.bits("d", "mon"),
            begun: None,
            target: None,
            last: last(),
        };
        since_mon().freeze().unwrap();
        let mut backup = since_mon();
        assert!(bitmaps.remove("d", "mon").unwrap());
        let refused = backup.freeze().unwrap_err().to_string();
        assert!(refused.contains("checkpoint mon was removed"), "{refused}");
        complete();
        backup.freeze().unwrap_err();
        assert!(backup.frozen().is_none());
    }
}
