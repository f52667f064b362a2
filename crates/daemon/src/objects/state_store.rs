//! Persists changes made at run time.
//!
//! One file is replaced as a whole with every change, before the reply: after a crash it has the old or the new state. A resize changes the
//! file of a disk, so it is recorded first in a file of its own.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::overlay::Overlay;
use crate::state::{self, fault};
use crate::state_files::{self, Unread};
use config::{BlockDeviceConfig, Config};

const CHANGES: &str = "changes.json";
const RESIZING: &str = "resizing.json";

/// Persists the changes of one daemon in its state folder.
#[derive(Debug)]
pub struct StateStore {
    folder: PathBuf,
    /// Locked until the daemon ends: two daemons need two folders.
    _lock: File,
}

/// A resize in progress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resizing {
    /// Name of the disk.
    pub disk: String,
    /// Previous size in bytes.
    pub from: u64,
    /// New size in bytes.
    pub to: u64,
}

impl StateStore {
    /// Opens a state store in a folder, which is created if needed.
    ///
    /// # Errors
    /// If the folder cannot be created or belongs to another daemon.
    pub fn open(folder: &Path) -> Result<StateStore, String> {
        let shown = folder.display();
        let failed = |error: io::Error| format!("cannot use the state folder {shown}: {error}");
        std::fs::create_dir_all(folder).map_err(failed)?;
        let lock = lock_file(&folder.join("lock")).map_err(failed)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(StateStore {
                folder: folder.to_owned(),
                _lock: lock,
            }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(format!(
                "another daemon uses the state folder {shown}; hint: give each daemon its own folder with --state"
            )),
            Err(errno) => Err(failed(errno.into())),
        }
    }

    /// Returns the folder, which only this daemon uses.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Reads the persisted changes.
    ///
    /// # Errors
    /// If the file exists and cannot be read.
    pub fn kept(&self) -> Result<Overlay, String> {
        let Some(text) = self.read(CHANGES)? else {
            return Ok(Overlay::default());
        };
        let text = String::from_utf8_lossy(&text);
        Overlay::from_text(&text).map_err(|error| self.unusable(CHANGES, &error))
    }

    /// Reads the persisted changes in a folder without locking it; none if they cannot be read.
    pub fn kept_in(folder: &Path) -> Overlay {
        let read = || {
            let file =
                state_files::read_regular(&folder.join(CHANGES), state_files::FILE_BYTES_MAX)
                    .ok()?;
            let text = state_files::without_check_line(CHANGES, &file).ok()?;
            Overlay::from_text(&String::from_utf8_lossy(text)).ok()
        };
        read().unwrap_or_default()
    }

    /// Reads a file and removes its checksum line; `None` if the file does not exist.
    fn read(&self, name: &str) -> Result<Option<Vec<u8>>, String> {
        match state_files::read_regular(&self.folder.join(name), state_files::FILE_BYTES_MAX) {
            Err(Unread::Absent) => Ok(None),
            Err(unread) => Err(self.unusable(name, &format!("it {unread}"))),
            Ok(file) => match state_files::without_check_line(name, &file) {
                Ok(text) => Ok(Some(text.to_vec())),
                Err(reason) => Err(self.unusable(name, &format!("it {reason}"))),
            },
        }
    }

    fn unusable(&self, name: &str, reason: &str) -> String {
        let shown = self.folder.join(name);
        let shown = shown.display();
        let consequence = match name {
            RESIZING => {
                "a resize was interrupted; compare the size of each file with the configuration, then "
            }
            _ => "",
        };
        format!(
            "cannot use {shown}: {reason}; hint: {consequence}restore the file, or move it away to start without it. After an edit, delete its first line, the checksum"
        )
    }

    /// Returns a hint for changes that conflict with the file.
    pub fn help(&self) -> String {
        let shown = self.folder.join(CHANGES);
        format!(
            "file and flags are valid, but conflict with the changes made at run time in {}; correct the file, or move the changes away to start without them",
            shown.display()
        )
    }

    /// Returns a hint for one object that cannot be opened.
    pub fn help_with_one(&self) -> String {
        let shown = self.folder.join(CHANGES);
        format!(
            "it was added or changed at run time; correct it in {} and delete the first line, the checksum, or move that file away to start without these changes",
            shown.display()
        )
    }

    /// Persists the difference between `base` and `now`. It is durable when this returns.
    ///
    /// # Errors
    /// The path and the system's error. The previous contents of the file stay.
    pub fn keep(&self, base: &Config, now: &Config) -> Result<(), String> {
        fault("before-keep");
        let text = Overlay::between(base, now).to_text();
        self.write(CHANGES, text.as_bytes())?;
        fault("after-keep");
        Ok(())
    }

    /// Records the resizes of a change.
    ///
    /// # Errors
    /// The path and the system's error.
    pub fn begin_resize(&self, resizing: &[Resizing]) -> Result<(), String> {
        let text = serde_json::to_vec(resizing).map_err(|error| error.to_string())?;
        self.write(RESIZING, &text)?;
        fault("after-begin-resize");
        Ok(())
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), String> {
        let path = self.folder.join(name);
        state::replace(&path, &state_files::with_check_line(name, bytes)).map_err(|error| {
            let shown = path.display();
            format!("cannot persist the change in {shown}: {error}")
        })
    }

    /// Removes the record of resizes that are complete or rolled back.
    pub fn end_resize(&self) {
        // A leftover record is harmless: the files have the configured sizes.
        std::fs::remove_file(self.folder.join(RESIZING)).ok();
        fault("after-end-resize");
    }

    /// Completes resizes that a crash interrupted: each file gets the configured size, the one before or after the resize. Must run before
    /// disks are opened.
    ///
    /// # Errors
    /// The record cannot be used. The files may then differ in size from the configuration.
    pub fn finish_resize(&self, config: &Config) -> Result<(), String> {
        let Some(text) = self.read(RESIZING)? else {
            return Ok(());
        };
        let several = serde_json::from_slice::<Vec<Resizing>>(&text);
        let all = several.or_else(|_| serde_json::from_slice(&text).map(|one: Resizing| vec![one]));
        let all = all.map_err(|error| self.unusable(RESIZING, &error.to_string()))?;
        let mut is_complete = true;
        for resizing in all {
            if let Err(error) = complete_resize(&resizing, config) {
                tracing::error!(
                    disk = resizing.disk,
                    "cannot complete an interrupted resize: {error}"
                );
                is_complete = false;
            }
        }
        // Otherwise the next start tries again: a file system may not be mounted yet.
        if is_complete {
            self.end_resize();
        }
        Ok(())
    }
}

/// Mode 0600: a user who can lock the file could prevent the daemon's start.
fn lock_file(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    let file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    Ok(file)
}

fn complete_resize(resizing: &Resizing, config: &Config) -> io::Result<()> {
    // The size of an image is in its header, not the length of its file.
    let backend = config.disk(&resizing.disk).map(|disk| &disk.backend);
    let Some(BlockDeviceConfig::File { path, size, .. }) = backend else {
        return Ok(());
    };
    let wanted = size.unwrap_or(resizing.from);
    let file = File::options().write(true).open(path)?;
    let metadata = file.metadata()?;
    let is_between = [resizing.from, resizing.to].contains(&metadata.len());
    if metadata.is_file() && is_between && metadata.len() != wanted {
        file.set_len(wanted)?;
        file.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::{Flags, Surroundings, parse};

    #[test]
    fn a_folder_belongs_to_one_daemon() {
        let folder = tempfile::tempdir().unwrap();
        let first = StateStore::open(folder.path()).unwrap();
        let error = StateStore::open(folder.path()).unwrap_err();
        assert!(error.contains("another daemon"), "{error}");
        assert!(first.kept().unwrap().is_empty());
        drop(first);
        StateStore::open(folder.path()).unwrap();
    }

    #[test]
    fn only_the_daemons_user_can_lock_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let lock = folder.path().join("lock");
        // Mode of the lock file in earlier versions.
        std::fs::write(&lock, "").unwrap();
        std::fs::set_permissions(&lock, Permissions::from_mode(0o644)).unwrap();
        let _keeper = StateStore::open(folder.path()).unwrap();
        let mode = lock.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    /// The file may have the length of the disk by chance.
    #[test]
    fn interrupted_resize_of_an_image_does_not_cut_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let state_store = StateStore::open(&folder.path().join("state")).unwrap();
        let image = folder.path().join("d.qcow2");
        std::fs::write(&image, vec![7; 2 << 20]).unwrap();
        let flags = Flags {
            disk: vec![format!("d=image:{}", image.display())],
            ..Flags::default()
        };
        let config = parse(None, &flags, &Surroundings::of_this_process()).unwrap();
        let resizing = Resizing {
            disk: "d".to_owned(),
            from: 1 << 20,
            to: 2 << 20,
        };
        state_store.begin_resize(&[resizing]).unwrap();
        state_store.finish_resize(&config).unwrap();
        assert_eq!(std::fs::metadata(&image).unwrap().len(), 2 << 20);
    }

    #[test]
    fn write_error_has_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let state_store = StateStore::open(folder.path()).unwrap();
        std::fs::create_dir(folder.path().join("changes.new")).unwrap();
        std::fs::create_dir(folder.path().join("resizing.new")).unwrap();
        let flags = Flags {
            disk: vec!["a=ram:1M".to_owned()],
            ..Flags::default()
        };
        let config = parse(None, &flags, &Surroundings::of_this_process()).unwrap();
        for (result, name) in [
            (state_store.keep(&config, &config), CHANGES),
            (state_store.begin_resize(&[]), RESIZING),
        ] {
            let error = result.unwrap_err();
            let path = folder.path().join(name);
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
    }

    #[test]
    fn read_error_has_the_path() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(CHANGES), "{").unwrap();
        let error = StateStore::open(folder.path()).unwrap().kept().unwrap_err();
        assert!(error.contains(CHANGES) && error.contains("move it away"));
    }

    #[test]
    fn damaged_announcement_of_a_resize_stays_and_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let state_store = StateStore::open(folder.path()).unwrap();
        let config = parse(None, &Flags::default(), &Surroundings::of_this_process()).unwrap();
        let path = folder.path().join(RESIZING);
        state_store.begin_resize(&[]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for damaged in [&b""[..], &whole[..whole.len() - 1], b"{"] {
            std::fs::write(&path, damaged).unwrap();
            let error = state_store.finish_resize(&config).unwrap_err();
            assert!(error.contains(RESIZING), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), damaged);
        }
        std::fs::write(&path, whole).unwrap();
        state_store.finish_resize(&config).unwrap();
        assert!(!path.exists());
    }
}
