//! Dirty bitmaps of disks ([`bdev::DirtyBitmap`]), kept in the state folder. A bitmap begins when a backup is complete and records the
//! ranges that the next backup of that name must copy.
//!
//! At its end a backup starts new bits in a file of their own, while the old bits still record. The record then marks the backup as
//! complete. A kill in between leaves one file with all changes since its backup.
//!
//! Bits survive a killed daemon in the page cache, but not a system crash. Writes to a disk that is not served are in no bitmap: each opening
//! compares the state of the disk's files with the state when they were last closed. In both cases the bitmap is reported as broken and the
//! next backup copies everything. An unusable record has this effect on all bitmaps of its disk. It stays until the next backup with a bitmap
//! is complete or until it is reset. The bits of a closed disk are checked against a checksum.

mod record;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bdev::{DirtyBitmap, Disk, Recorder};
use control::objects::Bitmap as Body;

use crate::state;
use crate::state_files::{self, DamagedFiles};
use record::{Bitmap, Record};

pub use record::Last;
pub(crate) use record::{FileStamp, OpenedStamps};

const FOLDER: &str = "bitmaps";

/// Largest number of bitmaps per disk.
pub const COUNT_MAX: usize = 16;

/// Longest bitmap name in characters.
const NAME_MAX: usize = 64;

/// Names that [`is_name`] permits.
pub const NAMES: &str =
    "1 to 64 letters, digits, or - _ . :, without - at the start, and not . or ..";

/// Returns true if `name` is a valid name of a bitmap or a backup. Names are parts of paths, and arguments of commands.
pub fn is_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    let is_special = matches!(name, "" | "." | "..") || name.starts_with('-');
    !is_special && name.len() <= NAME_MAX && name.bytes().all(is_plain)
}

/// Snapshot of a bitmap.
#[derive(Clone, Debug)]
pub struct Shown {
    pub name: String,
    /// Bytes that the next backup copies; all bytes for a broken bitmap.
    pub dirty: u64,
    /// Backup that the recorded changes follow.
    pub last: Last,
    /// Reason why the bitmap is unusable.
    pub broken: Option<String>,
}

/// New bits of a running backup, which are not recorded yet.
pub struct StartedBackup {
    number: u64,
    disk_bytes: u64,
    path: PathBuf,
    bits: Arc<DirtyBitmap>,
}

struct OfDisk {
    /// Weak, so that bitmaps keep no disk open.
    disk: Weak<Disk>,
    recorder: Arc<Recorder>,
    record: Record,
    /// State of the disk's files after it was opened.
    opened: Option<FileStamp>,
    /// Running backups, which need the present bitmaps.
    backups: usize,
    /// Mapped bits by file number.
    mapped: BTreeMap<u64, Arc<DirtyBitmap>>,
}

impl OfDisk {
    fn shown(&self) -> impl Iterator<Item = Shown> {
        let disk = self.disk.upgrade();
        let bytes = disk.map_or(0, |disk| disk.info().geometry.capacity_bytes());
        self.record.bitmaps.iter().map(move |bitmap| {
            let broken = self.broken(bitmap);
            let bits = self.mapped.get(&bitmap.bits);
            let bits = bits.filter(|_| broken.is_none());
            Shown {
                name: bitmap.name.clone(),
                dirty: bits.map_or(bytes, |bits| bits.dirty_bytes(bytes)),
                last: bitmap.last.clone(),
                broken,
            }
        })
    }

    fn broken(&self, bitmap: &Bitmap) -> Option<String> {
        match self.mapped.get(&bitmap.bits) {
            _ if bitmap.broken.is_some() => bitmap.broken.clone(),
            Some(bits) if !bits.is_broken() => None,
            _ => Some("its bitmap file was truncated or cannot be read".to_owned()),
        }
    }
}

#[derive(Default)]
struct BitmapsState {
    /// Records of disks that are not served, by the disk's part of the file name.
    found: BTreeMap<String, Record>,
    /// Reasons for unusable records, by the disk's part of the file name.
    unusable: BTreeMap<String, String>,
    disks: BTreeMap<String, OfDisk>,
    /// The files belong to the next daemon.
    is_handed_over: bool,
}

impl BitmapsState {
    /// Closes the bitmaps of a disk that was opened but is not served, before its files are closed. The next opening compares the files.
    fn unserved(&mut self, folder: &Path, disk: &str) {
        let Some(of_disk) = self.disks.remove(disk) else {
            return;
        };
        let record = of_disk.close(folder, disk, of_disk.opened.clone());
        self.found.insert(state::file_name(disk), record);
    }
}

pub struct Bitmaps {
    folder: Option<PathBuf>,
    /// Boot ID of the system.
    system_run: String,
    damaged: DamagedFiles,
    state: Mutex<BitmapsState>,
    /// Locked while a bitmap is begun, completed or removed, but never while clients wait.
    changing: Mutex<()>,
}

impl Bitmaps {
    /// Loads the bitmaps of a state folder, which only this daemon uses.
    pub(crate) fn load(state_folder: Option<&Path>, damaged: &DamagedFiles) -> Bitmaps {
        let run = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        // Without a boot ID, no earlier bits are trusted.
        let run = run.unwrap_or_else(|_| format!("{:?}", std::time::SystemTime::now()));
        Bitmaps::load_in_run(state_folder, run.trim(), damaged)
    }

    fn load_in_run(
        state_folder: Option<&Path>,
        system_run: &str,
        damaged: &DamagedFiles,
    ) -> Bitmaps {
        let state = state_folder.map(|folder| find(folder, damaged));
        Bitmaps {
            folder: state_folder.map(|folder| folder.join(FOLDER)),
            system_run: system_run.to_owned(),
            damaged: damaged.clone(),
            state: Mutex::new(state.unwrap_or_default()),
            changing: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BitmapsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the state folder.
    pub fn state_folder(&self) -> Option<&Path> {
        self.folder.as_deref().and_then(Path::parent)
    }

    /// Returns true if bitmaps survive a restart.
    pub fn are_kept(&self) -> bool {
        self.folder.is_some()
    }

    fn record_path(folder: &Path, disk: &str) -> PathBuf {
        folder.join(record_name(disk))
    }

    fn bits_path(folder: &Path, disk: &str, number: u64) -> PathBuf {
        folder.join(format!("{}.{number}.bits", state::file_name(disk)))
    }

    /// Starts to record the changes of new disks, which are not in use yet.
    pub(crate) fn attach<'a>(
        &self,
        opened: impl IntoIterator<Item = (&'a Arc<Disk>, &'a OpenedStamps)>,
    ) {
        let Some(folder) = &self.folder else { return };
        let mut state = self.lock();
        for (disk, stamps) in opened {
            let name = disk.name();
            // Otherwise the record would still belong to an earlier opening of the disk.
            state.unserved(folder, name);
            if let Some(record) = state.found.remove(&state::file_name(name)) {
                let of_disk = self.open(folder, disk, record, stamps);
                state.disks.insert(name.to_owned(), of_disk);
            }
        }
    }

    /// Closes the bitmaps of opened disks that are not served, before their files are closed: other programs may write to them afterwards.
    pub(crate) fn close_unserved(&self, is_served: impl Fn(&str) -> bool) {
        let mut state = self.lock();
        let Some(folder) = self.folder.as_ref().filter(|_| !state.is_handed_over) else {
            return;
        };
        let names = state.disks.keys().filter(|name| !is_served(name));
        for name in names.cloned().collect::<Vec<_>>() {
            state.unserved(folder, &name);
        }
    }

    fn open(
        &self,
        folder: &Path,
        disk: &Arc<Disk>,
        mut record: Record,
        stamps: &OpenedStamps,
    ) -> OfDisk {
        let name = disk.name();
        let before = record.clone();
        let identity = disk.info().identity.to_string();
        let doubt = match record.doubt(&self.system_run, stamps.before.as_ref()) {
            Some(doubt) => Some(doubt),
            None if record.identity != identity => Some("the disk was replaced by another one"),
            None if disk.device().medium().is_none() => {
                Some("the disk's content was lost at the end of the daemon")
            }
            None => None,
        };
        record.identity = identity;
        record.version = record::VERSION;
        let was_closed = record.in_use.is_none();
        (record.in_use, record.left) = (Some(self.system_run.clone()), None);
        let mut mapped = BTreeMap::new();
        for bitmap in &mut record.bitmaps {
            if bitmap.broken.is_none() {
                bitmap.broken = doubt.map(str::to_owned);
            }
            if bitmap.broken.is_some() {
                continue;
            }
            let path = Bitmaps::bits_path(folder, name, bitmap.bits);
            let saved = bitmap.checksum.take().filter(|_| was_closed);
            let checked = match saved {
                Some(saved) => check_bits(&path, saved),
                None => Ok(()),
            };
            let opened = checked.and_then(|()| File::options().read(true).write(true).open(&path));
            match opened.and_then(|file| DirtyBitmap::map(&file, bitmap.disk_bytes)) {
                Ok(bits) => drop(mapped.insert(bitmap.bits, Arc::new(bits))),
                Err(error) => bitmap.broken = Some(format!("{}: {error}", path.display())),
            }
        }
        // Saved before the first write to the disk: after a crash the record must not describe a closed disk.
        if record != before
            && let Err(error) = save(folder, name, &record)
        {
            for bitmap in &mut record.bitmaps {
                bitmap.broken = Some(format!("it cannot be persisted: {error}"));
            }
        }
        warn_of_broken(name, &record);
        let recorder = Arc::clone(disk.recorder());
        recorder.record_in(mapped.values().cloned().collect());
        OfDisk {
            disk: Arc::downgrade(disk),
            recorder,
            record,
            opened: stamps.after.clone(),
            backups: 0,
            mapped,
        }
    }

    pub fn of(&self, disk: &str) -> Vec<Shown> {
        let state = self.lock();
        let of_disk = state.disks.get(disk);
        of_disk.map_or(Vec::new(), |of_disk| of_disk.shown().collect())
    }

    /// Returns the bitmaps of all disks as API objects.
    pub fn all(&self) -> Vec<Body> {
        let state = self.lock();
        let all = state.disks.iter().flat_map(|(disk, of_disk)| {
            of_disk.shown().map(|shown| Body {
                disk: disk.clone(),
                name: shown.name,
                dirty: shown.dirty,
                target: shown.last.shown,
                at: shown.last.at,
                reason: shown.broken,
            })
        });
        // The names of the bitmaps in an unusable record are unknown.
        let unusable = state.unusable.iter().map(|(disk, reason)| Body {
            disk: state_files::key_of(disk),
            name: String::new(),
            dirty: 0,
            target: String::new(),
            at: 0,
            reason: Some(format!(
                "dirty bitmaps invalid, the next backup copies everything: {reason}"
            )),
        });
        all.chain(unusable).collect()
    }

    pub fn bits(&self, disk: &str, name: &str) -> Option<Arc<DirtyBitmap>> {
        let state = self.lock();
        let of_disk = state.disks.get(disk)?;
        let mut bitmaps = of_disk.record.bitmaps.iter();
        let bitmap = bitmaps.find(|bitmap| bitmap.name == name)?;
        match of_disk.broken(bitmap) {
            None => of_disk.mapped.get(&bitmap.bits).cloned(),
            Some(_) => None,
        }
    }

    /// Creates new bits. They record nothing before [`Bitmaps::record_in`].
    ///
    /// # Errors
    /// If the file cannot be created.
    pub fn begin(&self, disk: &Arc<Disk>) -> io::Result<StartedBackup> {
        let none =
            || io::Error::other("this daemon has no state folder; hint: start it with --state DIR");
        let folder = self.folder.as_ref().ok_or_else(none)?;
        let name = disk.name();
        std::fs::create_dir_all(folder)?;
        let _changing = self.changing();
        let number = {
            let mut state = self.lock();
            let of_disk = state
                .disks
                .entry(name.to_owned())
                .or_insert_with(|| OfDisk {
                    disk: Arc::downgrade(disk),
                    recorder: Arc::clone(disk.recorder()),
                    record: Record::new(disk.info().identity.to_string(), &self.system_run),
                    opened: None,
                    backups: 0,
                    mapped: BTreeMap::new(),
                });
            of_disk.record.next += 1;
            of_disk.record.next
        };
        let path = Bitmaps::bits_path(folder, name, number);
        let disk_bytes = disk.info().geometry.capacity_bytes();
        let made = make_bits(&path, disk_bytes);
        let bits = made.inspect_err(|_| drop(std::fs::remove_file(&path)))?;
        if let Some(of_disk) = self.lock().disks.get_mut(name) {
            of_disk.backups += 1;
        }
        Ok(StartedBackup {
            number,
            disk_bytes,
            path,
            bits: Arc::new(bits),
        })
    }

    /// Starts to record in new bits, too. The caller holds the disk.
    pub fn record_in(&self, disk: &str, begun: &StartedBackup) {
        let mut state = self.lock();
        if let Some(of_disk) = state.disks.get_mut(disk) {
            of_disk.mapped.insert(begun.number, Arc::clone(&begun.bits));
            of_disk.follow();
        }
    }

    /// Completes a backup: the new bits replace the bitmap's old ones.
    ///
    /// # Errors
    /// If the record cannot be saved. The old bitmap stays.
    pub fn complete(
        &self,
        disk: &str,
        name: &str,
        begun: &StartedBackup,
        last: Last,
    ) -> io::Result<()> {
        let new = Bitmap {
            name: name.to_owned(),
            bits: begun.number,
            disk_bytes: begun.disk_bytes,
            last,
            broken: None,
            checksum: None,
        };
        let _changing = self.changing();
        let replaced = self.replace(disk, name, Some(new))?;
        match replaced {
            Some(_) => {
                self.end_backup(disk);
                Ok(())
            }
            None => Err(io::Error::other("the disk no longer exists")),
        }
    }

    /// Replaces or removes the bitmap of a name and deletes its old bits. Returns the number of old bitmaps, or `None` without the disk.
    ///
    /// The caller holds `changing`. The state is not locked during the save, because clients wait while [`Bitmaps::record_in`] runs.
    fn replace(&self, disk: &str, name: &str, new: Option<Bitmap>) -> io::Result<Option<usize>> {
        let Some(folder) = &self.folder else {
            return Ok(None);
        };
        let Some(mut record) = self
            .lock()
            .disks
            .get(disk)
            .map(|known| known.record.clone())
        else {
            return Ok(None);
        };
        let is_named = |bitmap: &mut Bitmap| bitmap.name == name;
        let old: Vec<Bitmap> = record.bitmaps.extract_if(.., is_named).collect();
        if old.is_empty() && new.is_none() {
            return Ok(Some(0));
        }
        record.bitmaps.extend(new);
        record.bitmaps.sort_by(|a, b| a.name.cmp(&b.name));
        self.reset(&state::file_name(disk))?;
        save(folder, disk, &record)?;
        let mut state = self.lock();
        let Some(of_disk) = state.disks.get_mut(disk) else {
            std::fs::remove_file(Bitmaps::record_path(folder, disk)).ok();
            return Ok(None);
        };
        of_disk.record.bitmaps = record.bitmaps;
        for bitmap in &old {
            of_disk.drop_bits(folder, disk, bitmap.bits);
        }
        of_disk.follow();
        Ok(Some(old.len()))
    }

    /// Moves an unusable record aside, if there is one for this stem.
    ///
    /// # Errors
    /// The record is still in place.
    pub(crate) fn reset(&self, stem: &str) -> io::Result<()> {
        let Some(folder) = &self.folder else {
            return Ok(());
        };
        if self.lock().unusable.contains_key(stem) {
            let name = format!("{stem}.json");
            state_files::move_aside(&folder.join(&name))?;
            self.lock().unusable.remove(stem);
            self.damaged.cleared(&format!("{FOLDER}/{name}"));
        }
        Ok(())
    }

    /// Discards the new bits of a failed backup.
    pub fn give_up(&self, disk: &str, begun: &StartedBackup) {
        let mut state = self.lock();
        if let Some(of_disk) = state.disks.get_mut(disk) {
            of_disk.mapped.remove(&begun.number);
            of_disk.follow();
        }
        drop(state);
        std::fs::remove_file(&begun.path).ok();
        self.end_backup(disk);
    }

    fn end_backup(&self, disk: &str) {
        if let Some(of_disk) = self.lock().disks.get_mut(disk) {
            of_disk.backups = of_disk.backups.saturating_sub(1);
        }
    }

    /// Removes a bitmap. Returns false if the disk has none of that name.
    ///
    /// # Errors
    /// If a backup of the disk is running or the record cannot be saved.
    pub fn remove(&self, disk: &str, name: &str) -> io::Result<bool> {
        let _changing = self.changing();
        let backups = self.lock().disks.get(disk).map_or(0, |known| known.backups);
        if backups > 0 {
            return Err(io::Error::other("a backup of the disk is running"));
        }
        let replaced = self.replace(disk, name, None)?;
        Ok(replaced.is_some_and(|old| old > 0))
    }

    /// Records the new identity of a disk with the same content.
    pub(crate) fn renamed(&self, disk: &Disk) {
        let mut state = self.lock();
        let (Some(folder), Some(of_disk)) = (&self.folder, state.disks.get_mut(disk.name())) else {
            return;
        };
        of_disk.record.identity = disk.info().identity.to_string();
        if let Err(error) = save(folder, disk.name(), &of_disk.record) {
            tracing::warn!(
                disk = disk.name(),
                "cannot persist the dirty bitmaps, they are lost at the next start: {error}"
            );
        }
    }

    /// Deletes the bitmaps of a removed disk.
    pub(crate) fn forget(&self, disk: &str) {
        let Some(folder) = &self.folder else { return };
        if let Err(error) = self.reset(&state::file_name(disk)) {
            tracing::warn!(disk, "cannot reset the dirty bitmaps: {error}");
        }
        let mut state = self.lock();
        state.found.remove(&state::file_name(disk));
        let Some(mut of_disk) = state.disks.remove(disk) else {
            return;
        };
        of_disk.recorder.record_in(Vec::new());
        std::fs::remove_file(Bitmaps::record_path(folder, disk)).ok();
        let known = of_disk.record.bitmaps.iter().map(|bitmap| bitmap.bits);
        let numbers: BTreeSet<u64> = known.chain(of_disk.mapped.keys().copied()).collect();
        for number in numbers {
            of_disk.drop_bits(folder, disk, number);
        }
    }

    /// Hands over the files to the next daemon, which uses them at once.
    pub(crate) fn hand_over(&self) {
        self.lock().is_handed_over = true;
    }

    /// Makes the bits durable and records the state of the disks' files, after all disks are closed. `files` returns the files of a disk.
    pub(crate) fn close(&self, files: impl Fn(&str) -> Vec<PathBuf>) {
        let mut state = self.lock();
        let Some(folder) = self.folder.as_ref().filter(|_| !state.is_handed_over) else {
            return;
        };
        for (name, of_disk) in std::mem::take(&mut state.disks) {
            of_disk.close(folder, &name, FileStamp::of(&files(&name)));
        }
    }
}

/// Logs the unusable bitmaps of a disk.
fn warn_of_broken(disk: &str, record: &Record) {
    for bitmap in &record.bitmaps {
        let Some(broken) = &bitmap.broken else {
            continue;
        };
        let bitmap = &bitmap.name;
        tracing::warn!(
            disk,
            bitmap,
            "dirty bitmap invalid, the next backup copies everything: {broken}"
        );
    }
}

impl OfDisk {
    /// Makes the bits durable and saves the record of the closed disk with the state of its files.
    fn close(&self, folder: &Path, name: &str, left: Option<FileStamp>) -> Record {
        let mut record = self.record.clone();
        for bitmap in &mut record.bitmaps {
            bitmap.broken = self.broken(bitmap);
        }
        let bits = record.bitmaps.iter_mut().filter(|one| one.broken.is_none());
        let durable = { bits }.try_for_each(|bitmap| {
            let path = Bitmaps::bits_path(folder, name, bitmap.bits);
            bitmap.checksum = Some(state_files::checksum_of(&state_files::read_regular(
                &path,
                state_files::BITS_BYTES_MAX,
            )?));
            File::open(path)?.sync_all()
        });
        (record.in_use, record.left) = (None, left);
        if let Err(error) = durable.and_then(|()| save(folder, name, &record)) {
            tracing::warn!(
                disk = name,
                "cannot persist the dirty bitmaps, they are lost if the system restarts: {error}"
            );
        }
        record
    }

    fn follow(&self) {
        let bitmaps = self.mapped.values().cloned();
        self.recorder.record_in(bitmaps.collect());
    }

    fn drop_bits(&mut self, folder: &Path, disk: &str, number: u64) {
        self.mapped.remove(&number);
        std::fs::remove_file(Bitmaps::bits_path(folder, disk, number)).ok();
    }
}

fn record_name(disk: &str) -> String {
    format!("{}.json", state::file_name(disk))
}

/// Checks the bits of a closed disk against the saved checksum.
fn check_bits(path: &Path, saved: u32) -> io::Result<()> {
    match state_files::checksum_of(&state_files::read_regular(
        path,
        state_files::BITS_BYTES_MAX,
    )?) == saved
    {
        true => Ok(()),
        false => Err(io::Error::other("the bits do not match the saved checksum")),
    }
}

/// Finds the records in the folder. Deletes bits of killed backups, which have no record.
fn find(state_folder: &Path, damaged: &DamagedFiles) -> BitmapsState {
    let folder = state_folder.join(FOLDER);
    let (mut state, mut bits) = (BitmapsState::default(), Vec::new());
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = path.file_name().and_then(|name| name.to_str());
        match name.and_then(|name| name.rsplit_once('.')) {
            Some((disk, "json")) => {
                let name = format!("{FOLDER}/{disk}.json");
                let record =
                    state_files::read_text(state_folder, &name, damaged).and_then(|text| {
                        serde_json::from_slice::<Record>(&text.unwrap_or_default()).map_err(
                            |error| {
                                damaged.found(
                                    state_folder,
                                    &name,
                                    &format!("is malformed: {error}"),
                                )
                            },
                        )
                    });
                match record {
                    Ok(record) => drop(state.found.insert(disk.to_owned(), record)),
                    Err(reason) => drop(state.unusable.insert(disk.to_owned(), reason)),
                }
            }
            Some((numbered, "bits")) => {
                let numbered = numbered.rsplit_once('.');
                let number = |text: &str| text.parse::<u64>().ok();
                let numbered =
                    numbered.and_then(|(disk, text)| Some((disk.to_owned(), number(text)?)));
                bits.extend(numbered.map(|numbered| (numbered, path)));
            }
            _ => {}
        }
    }
    for ((disk, number), path) in bits {
        let record = state.found.get(&disk);
        let is_named = |record: &Record| record.bitmaps.iter().any(|one| one.bits == number);
        if !record.is_some_and(is_named) {
            std::fs::remove_file(path).ok();
        }
    }
    state
}

fn save(folder: &Path, disk: &str, record: &Record) -> io::Result<()> {
    let path = Bitmaps::record_path(folder, disk);
    if record.bitmaps.is_empty() {
        return match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
    }
    let text = serde_json::to_vec_pretty(record)?;
    let name = format!("{FOLDER}/{}", record_name(disk));
    state::replace(&path, &state_files::with_check_line(&name, &text))
}

/// Allocates all blocks of the file, because a failed write to a mapped page would end the bitmap.
fn make_bits(path: &Path, disk_bytes: u64) -> io::Result<DirtyBitmap> {
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    let bytes = DirtyBitmap::file_bytes(disk_bytes);
    let flags = rustix::fs::FallocateFlags::empty();
    match rustix::fs::fallocate(&file, flags, 0, bytes) {
        // The file system does not support fallocate.
        Err(rustix::io::Errno::OPNOTSUPP) => {
            let zeroes = [0; 64 << 10];
            let mut left = bytes;
            while left > 0 {
                let part = left.min(zeroes.len() as u64);
                io::Write::write_all(&mut &file, &zeroes[..part as usize])?;
                left -= part;
            }
        }
        other => other?,
    }
    DirtyBitmap::map(&file, disk_bytes)
}

#[cfg(test)]
mod tests;
