//! State that must survive a restart: registrations with APTPL, saved mode pages. One small file per key.
//!
//! A file is replaced as a whole: written beside, synchronised, renamed, and the folder synchronised. After a crash it has the old or the
//! new state. The folder is created by the first save. Two daemons need two folders.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub use bdev::iscsi_initiator::default_state_folder as default_folder;
use config::Config;

pub(crate) use crate::state_files::file_name;
use crate::state_files::{
    DamagedFiles, FILE_BYTES_MAX, Unread, decode, encode, kind_of, move_aside, read_regular,
};
use crate::unit_records;

/// Returns the folder for changes made at run time. Only a configured folder or `$STATE_DIRECTORY` is used: two daemons that share the
/// default folder must not load each other's disks.
pub fn changes_folder(config: &Config) -> Option<PathBuf> {
    let given = || std::env::var_os("STATE_DIRECTORY").filter(|folder| !folder.is_empty());
    config.state.clone().or_else(|| given().map(PathBuf::from))
}

/// A folder with one file per key.
#[derive(Debug)]
pub struct FolderStore {
    folder: PathBuf,
    damaged: DamagedFiles,
    /// Other daemons may use the folder. Names of disks then identify no state.
    is_shared: bool,
}

impl FolderStore {
    /// Creates a store in `folder`, which need not exist yet. Unusable files are recorded in `damaged`.
    pub fn new(folder: PathBuf, damaged: DamagedFiles) -> FolderStore {
        FolderStore {
            folder,
            damaged,
            is_shared: false,
        }
    }

    /// Marks the folder as shared with other daemons. The store then has no records of units, because their keys are names of disks.
    #[must_use]
    pub fn shared(self, is_shared: bool) -> FolderStore {
        FolderStore { is_shared, ..self }
    }

    fn is_ignored(&self, key: &str) -> bool {
        self.is_shared && key.starts_with(unit_records::PREFIX)
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(checked_name(key))
    }

    /// Returns the path of a file without checksum, used if there is no other.
    fn unchecked_path(&self, key: &str) -> PathBuf {
        self.folder.join(unchecked_name(key))
    }
}

pub(crate) fn checked_name(key: &str) -> String {
    format!("{}.saved", file_name(key))
}

fn unchecked_name(key: &str) -> String {
    format!("{}.state", file_name(key))
}

/// Longest normal time of a durable write. A longer one is logged, because a client waits.
const SLOW: Duration = Duration::from_secs(1);

/// Replaces a file as a whole. The contents are durable when this returns.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let begun = Instant::now();
    let replaced = replace_by_rename(path, bytes);
    let took = begun.elapsed();
    if took > SLOW {
        let (seconds, path) = (took.as_secs_f64(), path.display());
        tracing::warn!(
            "slow state folder: {path} took {seconds:.1} s to become durable, which delays changes; hint: choose a faster disk with --state"
        );
    }
    replaced
}

fn replace_by_rename(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    replace_in(path, bytes, || File::open(folder)?.sync_all())
}

/// Replaces a file. If the folder cannot be synchronised, restores the old contents: a start must not see a change reported as failed.
fn replace_in(
    path: &Path,
    bytes: &[u8],
    synchronise_folder: impl Fn() -> io::Result<()>,
) -> io::Result<()> {
    let before = match read_regular(path, FILE_BYTES_MAX) {
        Ok(before) => Some(before),
        Err(Unread::Absent) => None,
        Err(unread) => return Err(unread.into()),
    };
    let beside = path.with_extension("new");
    let written = write_beside(&beside, bytes);
    // A partial file is useless and may take scarce space.
    written.inspect_err(|_| drop(fs::remove_file(&beside)))?;
    fs::rename(&beside, path)?;
    fault("renamed");
    let Err(error) = synchronise_folder() else {
        return Ok(());
    };
    let restored = match before {
        Some(before) => write_beside(&beside, &before).and_then(|()| fs::rename(&beside, path)),
        None => fs::remove_file(path),
    };
    restored.map_err(|and| {
        let shown = path.display();
        io::Error::other(format!(
            "{error}; rolling back {shown} also failed ({and}): the change takes effect at a restart"
        ))
    })?;
    Err(error)
}

fn write_beside(beside: &Path, bytes: &[u8]) -> io::Result<()> {
    // A crash may have left a file there. A FIFO would block the open.
    fs::remove_file(beside).ok();
    // Mode 0600 regardless of the umask, because the state determines the exports.
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(beside)?;
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    fault("created");
    file.write_all(bytes)?;
    fault("written");
    file.sync_all()?;
    fault("synchronised");
    Ok(())
}

/// Fault injection for tests: kills the process at the step in `LUNETTE_FAULT`, `STEP` or `STEP:N` for its Nth occurrence. Each change of
/// state reads the environment.
pub(crate) fn fault(step: &str) {
    static PASSED: AtomicUsize = AtomicUsize::new(0);
    let Some(wanted) = std::env::var_os("LUNETTE_FAULT") else {
        return;
    };
    let wanted = wanted.to_string_lossy().into_owned();
    let (name, count) = match wanted.split_once(':') {
        Some((name, count)) => (name, count.parse().unwrap_or(1)),
        None => (wanted.as_str(), 1),
    };
    if name == step && PASSED.fetch_add(1, Ordering::Relaxed) + 1 == count {
        tracing::error!("killed at {step}, as LUNETTE_FAULT asks");
        let own = rustix::process::getpid();
        // Kills without cleanup, as in a crash.
        rustix::process::kill_process(own, rustix::process::Signal::KILL).ok();
    }
}

impl scsi::Store for FolderStore {
    fn load(&self, key: &str) -> Result<Option<Vec<u8>>, scsi::Unusable> {
        if self.is_ignored(key) {
            return Ok(None);
        }
        for (name, is_checked) in [(checked_name(key), true), (unchecked_name(key), false)] {
            let loaded = match read_regular(&self.folder.join(&name), FILE_BYTES_MAX) {
                Ok(file) if is_checked => decode(key, &file).map_err(str::to_owned),
                Ok(file) => Ok(file),
                Err(Unread::Absent) => continue,
                Err(unread) => Err(unread.to_string()),
            };
            return match loaded {
                Ok(payload) => Ok(Some(payload)),
                Err(reason) => {
                    let reason = self.damaged.found(&self.folder, &name, &reason);
                    Err(scsi::Unusable(reason))
                }
            };
        }
        Ok(None)
    }

    fn save(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
        if self.is_ignored(key) {
            return Ok(());
        }
        let path = self.path(key);
        debug_assert!(
            kind_of(&checked_name(key)).is_some(),
            "{key} is of no kind in KINDS"
        );
        replace(&path, &encode(key, bytes)).inspect_err(|error| {
            tracing::error!(path = %path.display(), "cannot save state: {error}");
        })?;
        // A remaining old file would be used again after the new file is reset.
        fs::remove_file(self.unchecked_path(key)).ok();
        self.damaged.cleared(&checked_name(key));
        Ok(())
    }

    fn remove(&self, key: &str) {
        if self.is_ignored(key) {
            return;
        }
        // A remaining file belongs to no disk.
        for path in [self.unchecked_path(key), self.path(key)] {
            fs::remove_file(path).ok();
        }
        self.damaged.cleared(&checked_name(key));
    }

    fn discard_damaged(&self, key: &str) -> io::Result<()> {
        for name in [unchecked_name(key), checked_name(key)] {
            move_aside(&self.folder.join(&name))?;
            self.damaged.cleared(&name);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use scsi::Store;

    use super::*;

    #[test]
    fn last_saved_value_is_loaded_by_another_store() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("state");
        let store = FolderStore::new(inner.clone(), DamagedFiles::default());
        assert_eq!(store.load("virtio-blk a/b 1"), Ok(None));
        store.save("virtio-blk a/b 1", b"one").unwrap();
        store.save("virtio-blk a/b 1", b"two").unwrap();
        store.save("reservations-3001", b"other").unwrap();
        let again = FolderStore::new(inner.clone(), DamagedFiles::default());
        assert_eq!(again.load("virtio-blk a/b 1"), Ok(Some(b"two".to_vec())));
        assert_eq!(again.load("reservations-3001"), Ok(Some(b"other".to_vec())));
        assert_eq!(
            fs::read_dir(inner).unwrap().count(),
            2,
            "no file is left beside"
        );
    }

    #[test]
    fn damaged_file_is_not_treated_as_missing() {
        let folder = tempfile::tempdir().unwrap();
        let store = FolderStore::new(folder.path().to_owned(), DamagedFiles::default());
        let path = store.path("ports");
        for payload in [&b""[..], b"some registrations"] {
            store.save("ports", payload).unwrap();
            let whole = fs::read(&path).unwrap();
            for length in 0..whole.len() {
                fs::write(&path, &whole[..length]).unwrap();
                store.load("ports").expect_err("a file that is cut short");
            }
            for bit in 0..whole.len() * 8 {
                let mut flipped = whole.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                fs::write(&path, flipped).unwrap();
                store.load("ports").expect_err("a file with a wrong bit");
            }
            fs::write(store.path("daemon"), &whole).unwrap();
            store.load("daemon").expect_err("a file of another key");
            fs::write(&path, whole).unwrap();
            assert_eq!(store.load("ports"), Ok(Some(payload.to_vec())));
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        store.load("ports").expect_err("a file that cannot be read");
        fs::remove_dir(&path).unwrap();
        assert_eq!(store.load("ports"), Ok(None));
    }

    #[test]
    fn files_without_a_checksum_count_until_the_first_save() {
        let folder = tempfile::tempdir().unwrap();
        let store = FolderStore::new(folder.path().to_owned(), DamagedFiles::default());
        fs::write(folder.path().join("ports.state"), b"old").unwrap();
        assert_eq!(store.load("ports"), Ok(Some(b"old".to_vec())));
        store.save("ports", b"new").unwrap();
        assert_eq!(store.load("ports"), Ok(Some(b"new".to_vec())));
        fs::remove_file(store.path("ports")).unwrap();
        assert_eq!(store.load("ports"), Ok(None), "the old file is gone");
        store.save("ports", b"new").unwrap();
        store.remove("ports");
        assert_eq!(store.load("ports"), Ok(None));
    }

    #[test]
    fn saved_files_are_private_to_the_daemons_user() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kept");
        // File mode under the umask of a daemon that shares its sockets with a group.
        fs::write(path.with_extension("new"), b"left by a crash").unwrap();
        fs::set_permissions(
            path.with_extension("new"),
            fs::Permissions::from_mode(0o660),
        )
        .unwrap();
        for _ in 0..2 {
            replace(&path, b"state").unwrap();
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
    }

    #[test]
    fn value_without_durability_is_not_saved() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kept.json");
        let failing = || Err(io::Error::from(rustix::io::Errno::IO));
        replace_in(&path, b"one", failing).unwrap_err();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        replace(&path, b"one").unwrap();
        let error = replace_in(&path, b"two", failing).unwrap_err();
        assert_eq!(
            error.raw_os_error(),
            Some(rustix::io::Errno::IO.raw_os_error())
        );
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn folder_of_several_daemons_has_no_state_under_names_of_disks() {
        let folder = tempfile::tempdir().unwrap();
        let store = |is_shared| {
            let store = FolderStore::new(folder.path().to_owned(), DamagedFiles::default());
            store.shared(is_shared)
        };
        store(false).save("unit-d0", b"unit").unwrap();
        store(true).save("unit-d0", b"of another daemon").unwrap();
        assert_eq!(store(true).load("unit-d0"), Ok(None));
        store(true).remove("unit-d0");
        assert_eq!(store(false).load("unit-d0"), Ok(Some(b"unit".to_vec())));
    }

    #[test]
    fn key_cannot_leave_the_folder() {
        let store = FolderStore::new(PathBuf::from("/state"), DamagedFiles::default());
        assert_eq!(store.path("../x"), Path::new("/state/_2E_2E_2Fx.saved"));
    }

    #[test]
    fn folder_that_cannot_be_made_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(
            FolderStore::new(file.join("state"), DamagedFiles::default())
                .save("ports", b"v")
                .is_err()
        );
    }
}
