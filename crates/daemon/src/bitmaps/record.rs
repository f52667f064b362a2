//! Persisted record of a disk's bitmaps, and the check of their bits.
//!
//! ```text
//!   bitmaps/DISK.json        the bitmaps of a disk: replaced as a whole
//!   bitmaps/DISK.N.bits      the bits of one, mapped while the disk is served
//! ```

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Format version. Records with another version are not used.
pub(super) const VERSION: u32 = 1;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub version: u32,
    pub identity: String,
    /// Boot ID while the disk is served. Its bits are lost with that run.
    pub in_use: Option<String>,
    /// State of the disk's file while the disk is not served.
    pub left: Option<FileStamp>,
    /// Number of the next file of bits.
    pub next: u64,
    pub bitmaps: Vec<Bitmap>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Bitmap {
    pub name: String,
    /// Number of the file with the bits.
    pub bits: u64,
    /// Size of the disk in bytes when the file was created.
    pub disk_bytes: u64,
    pub last: Last,
    /// Reason why the bitmap is unusable.
    pub broken: Option<String>,
    /// CRC-32C of the bits, for a closed disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<u32>,
}

/// Backup that the recorded changes follow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Last {
    /// Target of the backup: `backend` and its keys, as in the API.
    pub target: serde_json::Value,
    /// Target for display.
    pub shown: String,
    /// End of the backup, in seconds since 1970.
    pub at: u64,
    /// Identity of the target's file. Another file at its path is not this backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
}

/// State of a disk's file. A later write changes the time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileStamp {
    path: PathBuf,
    inode: u64,
    bytes: u64,
    /// Modification time: seconds since 1970 and nanoseconds.
    changed: (i64, i64),
    /// External data file of an image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    data_file: Option<Box<FileStamp>>,
}

impl FileStamp {
    /// Returns the state of a disk's regular files; `None` for other files, because writes to them cannot be detected.
    pub fn of(files: &[PathBuf]) -> Option<FileStamp> {
        let (path, others) = files.split_first()?;
        let found = std::fs::metadata(path).ok().filter(Metadata::is_file)?;
        let data_file = match others {
            [] => None,
            others => Some(Box::new(FileStamp::of(others)?)),
        };
        Some(FileStamp {
            data_file,
            path: path.to_owned(),
            inode: found.ino(),
            bytes: found.len(),
            changed: (found.mtime(), found.mtime_nsec()),
        })
    }
}

/// State of a disk's files before and after the disk was opened: opening can change a file.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpenedStamps {
    /// Compared with the state when the disk was last closed.
    pub before: Option<FileStamp>,
    /// State while the disk has the locks of the files.
    pub after: Option<FileStamp>,
}

impl Record {
    pub fn new(identity: String, system_run: &str) -> Record {
        Record {
            version: VERSION,
            identity,
            in_use: Some(system_run.to_owned()),
            left: None,
            next: 0,
            bitmaps: Vec::new(),
        }
    }

    /// Returns the reason why changes may be missing. `found` is the state of the disk's files just before it was opened.
    pub fn doubt(&self, system_run: &str, found: Option<&FileStamp>) -> Option<&'static str> {
        if self.version != VERSION {
            return Some("it was written by another version of Lunette");
        }
        match (&self.in_use, &self.left) {
            (Some(run), _) if run != system_run => {
                Some("the system crashed while the disk was in use")
            }
            (None, Some(left)) if Some(left) != found => {
                Some("the disk's file was changed while the disk was not served")
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_or_unflushed_bitmaps_are_distrusted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("d.raw");
        let data = folder.path().join("d.data");
        std::fs::write(&path, b"content").unwrap();
        std::fs::write(&data, b"content").unwrap();
        let files = [path.clone(), data.clone()];
        let found = || FileStamp::of(&files);
        let in_use = Record::new("id".to_owned(), "run-1");
        let doubt = |record: &Record, run: &str| record.doubt(run, found().as_ref());
        assert_eq!(doubt(&in_use, "run-1"), None, "killed, and begun again");
        assert!(doubt(&in_use, "run-2").unwrap().contains("system"));
        let closed = Record {
            in_use: None,
            left: found(),
            ..in_use.clone()
        };
        assert_eq!(doubt(&closed, "run-2"), None);
        let text = serde_json::to_string(&closed).unwrap();
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), closed);
        std::fs::write(&data, b"Content").unwrap();
        assert!(doubt(&closed, "run-2").unwrap().contains("not served"));
        let left = found();
        let closed = Record { left, ..closed };
        assert_eq!(doubt(&closed, "run-2"), None);
        std::fs::write(&path, b"Content").unwrap();
        assert!(doubt(&closed, "run-2").unwrap().contains("not served"));
        std::fs::remove_file(&path).unwrap();
        assert!(doubt(&closed, "run-2").unwrap().contains("not served"));
        let other = Record {
            version: 2,
            ..in_use
        };
        assert!(doubt(&other, "run-1").unwrap().contains("version"));
    }
}
