//! Writes down what was changed at run time, so that it comes back after a restart.
//!
//! One file, replaced as a whole with every change, before the change is answered: after a crash there is the state of
//! before or of after. A resize changes a file that is not ours, so it is announced first in a file of its own.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::overlay::Overlay;
use crate::state::{self, fault};
use crate::state_files::{self, Unread};
use config::Config;

const CHANGES: &str = "changes.json";
const RESIZING: &str = "resizing.json";

/// Keeps the changes of one daemon in its state folder.
#[derive(Debug)]
pub struct StateStore {
    folder: PathBuf,
    /// Held as long as the daemon lives: two daemons need two folders.
    _lock: File,
}

/// A resize that was begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resizing {
    /// The disk.
    pub disk: String,
    /// Bytes that it had.
    pub from: u64,
    /// Bytes that it was to have.
    pub to: u64,
}

impl StateStore {
    /// A state store in a folder, which is made when it is not there.
    ///
    /// # Errors
    /// When it cannot be made, or belongs to another daemon.
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
                "another daemon uses the state folder {shown}; hint: give each its own with --state"
            )),
            Err(errno) => Err(failed(errno.into())),
        }
    }

    /// The folder, which this daemon has for itself.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What was changed before.
    ///
    /// # Errors
    /// When it is there and cannot be read.
    pub fn kept(&self) -> Result<Overlay, String> {
        let Some(text) = self.read(CHANGES)? else {
            return Ok(Overlay::default());
        };
        let text = String::from_utf8_lossy(&text);
        Overlay::from_text(&text).map_err(|error| self.unusable(CHANGES, &error))
    }

    /// Reads a file and removes its first line; `None`: there is no such file.
    fn read(&self, name: &str) -> Result<Option<Vec<u8>>, String> {
        match state_files::read_regular(&self.folder.join(name)) {
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
            "cannot use {shown}: {reason}; hint: {consequence}restore the file, or move it away to start without it. After an edit, delete its \
             first line, which has the checksum"
        )
    }

    /// Where what does not go together with the file is written, and what to do about it.
    pub fn help(&self) -> String {
        let shown = self.folder.join(CHANGES);
        format!(
            "file and flags are valid, but conflict with changes made at run time, which are in {}; correct the file, or move \
             the changes away to start without them",
            shown.display()
        )
    }

    /// The same for one object that cannot be made.
    pub fn help_with_one(&self) -> String {
        let shown = self.folder.join(CHANGES);
        format!(
            "it was added or changed at run time, in {}; correct it there and delete the first line, which has the \
             checksum, or move that file away to start without these changes",
            shown.display()
        )
    }

    /// Writes down that `now` is in effect over `base`. It is durable when this returns.
    ///
    /// # Errors
    /// Which file could not be written, and what the system says; what was written before is still there then.
    pub fn keep(&self, base: &Config, now: &Config) -> Result<(), String> {
        fault("before-keep");
        let text = Overlay::between(base, now).to_text();
        self.write(CHANGES, text.as_bytes())?;
        fault("after-keep");
        Ok(())
    }

    /// Announces the resizes of a change.
    ///
    /// # Errors
    /// Which file could not be written, and what the system says.
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

    /// It is over, or was taken back.
    pub fn end_resize(&self) {
        // Left behind, it says what is so anyway.
        std::fs::remove_file(self.folder.join(RESIZING)).ok();
        fault("after-end-resize");
    }

    /// Completes resizes that a crash has interrupted: each file gets the configured size, which is the one before or after the resize.
    /// To be called with the configuration in effect, before disks are opened.
    ///
    /// # Errors
    /// The announcement cannot be used, so the files may have other sizes than the configuration.
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
                tracing::error!("disk {} was being resized: {error}", resizing.disk);
                is_complete = false;
            }
        }
        // Else the next start tries again: a file system may not have been there yet.
        if is_complete {
            self.end_resize();
        }
        Ok(())
    }
}

/// Whoever can open a file can lock it: others of the machine shall not, and keep the daemon from starting.
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
    let Some(path) = super::owner::file_of(config, &resizing.disk) else {
        return Ok(());
    };
    let disk = config.disk(&resizing.disk);
    let wanted = disk.and_then(|disk| disk.backend.size());
    let wanted = wanted.unwrap_or(resizing.from);
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
        // As earlier versions made it.
        std::fs::write(&lock, "").unwrap();
        std::fs::set_permissions(&lock, Permissions::from_mode(0o644)).unwrap();
        let _keeper = StateStore::open(folder.path()).unwrap();
        let mode = lock.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn what_cannot_be_written_is_told_with_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let state_store = StateStore::open(folder.path()).unwrap();
        std::fs::create_dir(folder.path().join("changes.new")).unwrap();
        std::fs::create_dir(folder.path().join("resizing.new")).unwrap();
        let flags = Flags {
            disk: vec!["a=ram:1M".to_owned()],
            ..Flags::default()
        };
        let config = parse(None, &flags, &Surroundings::of_this_process()).unwrap();
        for (told, name) in [
            (state_store.keep(&config, &config), CHANGES),
            (state_store.begin_resize(&[]), RESIZING),
        ] {
            let error = told.unwrap_err();
            let path = folder.path().join(name);
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_told_with_its_path() {
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
