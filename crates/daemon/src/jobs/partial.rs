//! New files of backups. A file has the name `PATH.lunette-partial` until its backup is complete. An incomplete copy cannot be taken for
//! a backup, also after a kill. The next backup to the folder removes the files of killed daemons.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bdev::LockedUse;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

const SUFFIX: &str = ".lunette-partial";

/// Temporary names of the running backups of this process. Locks alone do not protect a file while it is created.
static IN_USE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn in_use() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    IN_USE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The new file of a backup. Dropping it removes the file, unless [`PartialFile::keep`] was called.
#[derive(Debug)]
pub(super) struct PartialFile {
    temporary: PathBuf,
    path: PathBuf,
    /// The file has its final name.
    is_published: bool,
    is_kept: bool,
}

impl PartialFile {
    /// Reserves the temporary name of a file that does not exist. Removes files that killed backups left in its folder.
    ///
    /// # Errors
    /// Another backup writes to this file, or a file with its temporary name cannot be removed.
    pub fn begin(path: &Path) -> Result<PartialFile, String> {
        let mut temporary = path.to_owned().into_os_string();
        temporary.push(SUFFIX);
        let temporary = PathBuf::from(temporary);
        // The names are not locked during the search: storage that hangs must not block other backups.
        if !in_use().insert(temporary.clone()) {
            return Err(format!("another backup writes to {}", path.display()));
        }
        remove_left_files(path, &temporary);
        if temporary.symlink_metadata().is_ok() {
            in_use().remove(&temporary);
            return Err(format!(
                "{} exists: another program uses it, or it cannot be removed; hint: remove it when no backup writes to it",
                temporary.display()
            ));
        }
        // Only now, because dropping it removes the file.
        Ok(PartialFile {
            temporary,
            path: path.to_owned(),
            is_published: false,
            is_kept: false,
        })
    }

    /// Returns the name under which the file is created.
    pub fn temporary(&self) -> &Path {
        &self.temporary
    }

    /// Gives the complete and durable file its final name, durably.
    ///
    /// # Errors
    /// A file with this name has been created meanwhile, or the file system fails.
    pub fn publish(&mut self) -> io::Result<()> {
        match renameat_with(
            CWD,
            &self.temporary,
            CWD,
            &self.path,
            RenameFlags::NOREPLACE,
        ) {
            // File systems such as NFS lack the flag.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP)
                if self.path.symlink_metadata().is_err() =>
            {
                std::fs::rename(&self.temporary, &self.path)?;
            }
            renamed => renamed?,
        }
        self.is_published = true;
        bdev::sync_folder(&self.path)
    }

    /// Keeps the file: its backup is complete.
    pub fn keep(&mut self) {
        self.is_kept = true;
    }

    /// Removes the file.
    pub fn remove(&self) {
        let path = match self.is_published {
            true => &self.path,
            false => &self.temporary,
        };
        std::fs::remove_file(path).ok();
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.is_kept {
            self.remove();
        }
        in_use().remove(&self.temporary);
    }
}

/// Removes incomplete files beside `path` that no process has locked. `own`: reserved temporary name of the caller.
fn remove_left_files(path: &Path, own: &Path) {
    let folder = path
        .parent()
        .and_then(|folder| std::fs::read_dir(folder).ok());
    for entry in folder.into_iter().flatten().flatten() {
        let path = entry.path();
        let is_partial = path
            .as_os_str()
            .as_encoded_bytes()
            .ends_with(SUFFIX.as_bytes());
        if !is_partial {
            continue;
        }
        // Before the check of the names: a backup that begins after it creates another file.
        let Some(found) = entry.metadata().ok().filter(Metadata::is_file) else {
            continue;
        };
        if path != own && in_use().contains(&path) {
            continue;
        }
        let Ok(locked) = bdev::open_locked(&path, LockedUse::Write) else {
            continue;
        };
        let is_found =
            |opened: Metadata| (opened.dev(), opened.ino()) == (found.dev(), found.ino());
        if !locked.metadata().is_ok_and(is_found) {
            continue;
        }
        let path = path.display();
        match std::fs::remove_file(entry.path()) {
            Ok(()) => tracing::warn!(%path, "incomplete file of an interrupted backup removed"),
            Err(error) => {
                tracing::warn!(%path, "cannot remove the incomplete file of an interrupted backup: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn file_has_its_name_only_after_its_backup_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.qcow2");
        let mut partial = PartialFile::begin(&path).unwrap();
        std::fs::write(partial.temporary(), "content").unwrap();
        assert_eq!(names(folder.path()), ["a.qcow2.lunette-partial"]);
        let busy = PartialFile::begin(&path).unwrap_err();
        assert!(busy.contains("another backup"), "{busy}");
        partial.publish().unwrap();
        assert_eq!(names(folder.path()), ["a.qcow2"]);
        // Its checkpoint cannot be completed.
        drop(partial);
        assert!(names(folder.path()).is_empty());
        let mut partial = PartialFile::begin(&path).unwrap();
        std::fs::write(partial.temporary(), "content").unwrap();
        partial.publish().unwrap();
        partial.keep();
        drop(partial);
        assert_eq!(names(folder.path()), ["a.qcow2"]);
    }

    #[test]
    fn file_that_was_created_meanwhile_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.qcow2");
        let mut partial = PartialFile::begin(&path).unwrap();
        std::fs::write(partial.temporary(), "content").unwrap();
        std::fs::write(&path, "of another program").unwrap();
        let error = partial.publish().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        drop(partial);
        assert_eq!(names(folder.path()), ["a.qcow2"]);
        assert_eq!(std::fs::read_to_string(path).unwrap(), "of another program");
    }

    #[test]
    fn files_of_killed_backups_are_removed_and_locked_ones_stay() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        for name in [
            "a.qcow2.lunette-partial",
            "b.qcow2.lunette-partial",
            "c.qcow2",
        ] {
            std::fs::write(file(name), "content").unwrap();
        }
        let locked = file("b.qcow2.lunette-partial");
        let locked = bdev::open_locked(&locked, LockedUse::Write).unwrap();
        let partial = PartialFile::begin(&file("a.qcow2")).unwrap();
        assert_eq!(names(folder.path()), ["b.qcow2.lunette-partial", "c.qcow2"]);
        drop(partial);
        let refused = PartialFile::begin(&file("b.qcow2")).unwrap_err();
        assert!(refused.contains("lunette-partial exists"), "{refused}");
        drop(locked);
        PartialFile::begin(&file("b.qcow2")).unwrap();
        assert_eq!(names(folder.path()), ["c.qcow2"]);
    }
}
