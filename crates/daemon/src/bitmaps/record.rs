//! What is written down of a disk's bitmaps, and whether their bits may be relied on.
//!
//! ```text
//!   bitmaps/DISK.json        the bitmaps of a disk: replaced as a whole
//!   bitmaps/DISK.N.bits      the bits of one, mapped while the disk is served
//! ```

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A daemon that finds another number makes no use of what it finds.
pub(super) const VERSION: u32 = 1;

/// The bitmaps of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub version: u32,
    /// The disk's identity.
    pub identity: String,
    /// While it is served: of the run of the system in which it is. What that has written to the bits is lost with it.
    pub in_use: Option<String>,
    /// While it is not served: how its file was left.
    pub left: Option<Left>,
    /// The number that the next file of bits has.
    pub next: u64,
    pub bitmaps: Vec<Bitmap>,
}

/// One bitmap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Bitmap {
    pub name: String,
    /// Which file has its bits.
    pub bits: u64,
    /// Bytes that the disk had when the file was made.
    pub disk_bytes: u64,
    pub last: Last,
    /// Why it cannot be relied on.
    pub broken: Option<String>,
    /// CRC-32C of the bits, of a disk that was closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<u32>,
}

/// The backup since whose end changes are recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Last {
    /// Where it went: `backend` and its keys, as in the API.
    pub target: serde_json::Value,
    /// The same for people.
    pub shown: String,
    /// When it was complete, in seconds since 1970.
    pub at: u64,
}

/// How a file was left. One that has been written since then has another time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Left {
    path: PathBuf,
    inode: u64,
    bytes: u64,
    /// Seconds since 1970, and nanoseconds.
    changed: (i64, i64),
    /// The file that has the data, of an image that has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    data_file: Option<Box<Left>>,
}

impl Left {
    /// The regular files of a disk as they are now. Of anything else nobody can say whether it was written.
    pub fn of(files: &[PathBuf]) -> Option<Left> {
        let (path, others) = files.split_first()?;
        let found = std::fs::metadata(path).ok().filter(Metadata::is_file)?;
        let data_file = match others {
            [] => None,
            others => Some(Box::new(Left::of(others)?)),
        };
        Some(Left {
            data_file,
            path: path.to_owned(),
            inode: found.ino(),
            bytes: found.len(),
            changed: (found.mtime(), found.mtime_nsec()),
        })
    }

    fn is_as_left(&self) -> bool {
        let data_file = self.data_file.as_ref();
        let files = std::iter::once(&self.path).chain(data_file.map(|left| &left.path));
        let files: Vec<PathBuf> = files.cloned().collect();
        Left::of(&files).as_ref() == Some(self)
    }
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

    /// Why changes may have been missed while nobody recorded them; looked at before the disk is opened.
    pub fn doubt(&self, system_run: &str) -> Option<&'static str> {
        if self.version != VERSION {
            return Some("it was written by another version of Lunette");
        }
        match (&self.in_use, &self.left) {
            (Some(run), _) if run != system_run => {
                Some("the system has ended while the disk was in use")
            }
            (None, Some(left)) if !left.is_as_left() => {
                Some("the disk's file has been written while the disk was not served")
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_by_others_or_not_written_back_is_doubted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("d.raw");
        let data = folder.path().join("d.data");
        std::fs::write(&path, b"content").unwrap();
        std::fs::write(&data, b"content").unwrap();
        let in_use = Record::new("id".to_owned(), "run-1");
        assert_eq!(in_use.doubt("run-1"), None, "killed, and begun again");
        assert!(in_use.doubt("run-2").unwrap().contains("system"));
        let closed = Record {
            in_use: None,
            left: Left::of(&[path.clone(), data.clone()]),
            ..in_use.clone()
        };
        assert_eq!(closed.doubt("run-2"), None);
        let text = serde_json::to_string(&closed).unwrap();
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), closed);
        std::fs::write(&data, b"Content").unwrap();
        assert!(closed.doubt("run-2").unwrap().contains("not served"));
        let closed = Record {
            left: Left::of(std::slice::from_ref(&path)),
            ..closed
        };
        assert_eq!(closed.doubt("run-2"), None);
        std::fs::write(&path, b"Content").unwrap();
        assert!(closed.doubt("run-2").unwrap().contains("not served"));
        std::fs::remove_file(&path).unwrap();
        assert!(closed.doubt("run-2").unwrap().contains("not served"));
        let other = Record {
            version: 2,
            ..in_use
        };
        assert!(other.doubt("run-1").unwrap().contains("version"));
    }
}
