//! The medium of a disk's content stores its identity: an attribute of the file, with a record that distinguishes the original from copies.
//!
//! Control plane only; may block. The attribute comes with the file and is not trusted.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use block::Identity;
use iscsi_initiator::KnownUnits;

use crate::checked_text::{VERSION, check_line};

/// Name of the record in its checksum.
const ATTRIBUTE: &str = "identity";
/// Maximum bytes of a path in a record; longer ones are omitted. ext4 has one block for all attributes of a file.
const PATH_BYTES_MAX: usize = 2048;

/// Distinguishes a file from other files, including its copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Inode number.
    pub inode: u64,
    /// Creation time: seconds since 1970, and nanoseconds, if the file system reports it.
    pub birth: Option<(i64, u32)>,
    /// Path of the file.
    pub path: Option<PathBuf>,
}

impl Stamp {
    /// Returns true if both stamps are of one file, at any path. A snapshot of a file system has the stamps of all its files.
    pub fn is_same_file(&self, other: &Stamp) -> bool {
        match (self.birth, other.birth) {
            // Not the inode number, which some file systems assign at mount.
            (Some(one), Some(another)) => one == another,
            _ => self.inode == other.inode,
        }
    }
}

/// An identity, and the stamp of its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityRecord {
    /// The identity.
    pub identity: Identity,
    /// Stamp of the file; `None` for block devices and identities set by hand.
    pub stamp: Option<Stamp>,
}

impl IdentityRecord {
    /// Encodes `UUID inode=N birth=SECONDS.NANOSECONDS path=...`; only the UUID is always present.
    pub fn encode(&self) -> Vec<u8> {
        let mut text = self.identity.to_string().into_bytes();
        let Some(stamp) = &self.stamp else {
            return text;
        };
        text.extend(format!(" inode={}", stamp.inode).bytes());
        if let Some((seconds, nanos)) = stamp.birth {
            text.extend(format!(" birth={seconds}.{nanos:09}").bytes());
        }
        let path = stamp.path.as_ref().map(|path| path.as_os_str().as_bytes());
        if let Some(path) = path.filter(|path| path.len() <= PATH_BYTES_MAX) {
            text.extend(b" path=");
            text.extend(path);
        }
        text
    }

    /// Returns the attribute of the file: a line with the version, the length and the checksum of the record, then the record.
    pub fn to_attribute(&self) -> Vec<u8> {
        let text = self.encode();
        [check_line(ATTRIBUTE, &text).as_bytes(), &text].concat()
    }

    /// Reads an attribute. Returns `None` if the attribute is damaged. Records of earlier versions, and those set by hand, have no first line:
    /// they start with the UUID, so a damaged first line is never taken for one.
    pub fn from_attribute(bytes: &[u8]) -> Option<IdentityRecord> {
        if !bytes.starts_with(VERSION) {
            return IdentityRecord::decode(bytes);
        }
        let end = bytes.iter().position(|byte| *byte == b'\n')?;
        let (line, text) = bytes.split_at(end + 1);
        match line == check_line(ATTRIBUTE, text).as_bytes() {
            true => IdentityRecord::decode(text),
            false => None,
        }
    }

    /// Parses the output of [`IdentityRecord::encode`]; skips unknown words. `None`: not a record.
    pub fn decode(bytes: &[u8]) -> Option<IdentityRecord> {
        let (identity, mut rest) = split_word(bytes);
        let identity = std::str::from_utf8(identity).ok()?.trim().parse().ok()?;
        let (mut inode, mut birth, mut path) = (None, None, None);
        while !rest.is_empty() {
            // A path may contain blanks, therefore it comes last.
            if let Some(bytes) = rest.strip_prefix(b"path=") {
                path = Some(PathBuf::from(OsStr::from_bytes(bytes)));
                break;
            }
            let (word, others) = split_word(rest);
            rest = others;
            let word = std::str::from_utf8(word).unwrap_or_default();
            if let Some(number) = word.strip_prefix("inode=") {
                inode = Some(number.parse().ok()?);
            } else if let Some(time) = word.strip_prefix("birth=") {
                let (seconds, nanos) = time.split_once('.')?;
                birth = Some((seconds.parse().ok()?, nanos.parse().ok()?));
            }
        }
        let stamp = inode.map(|inode| Stamp { inode, birth, path });
        Some(IdentityRecord { identity, stamp })
    }
}

fn split_word(bytes: &[u8]) -> (&[u8], &[u8]) {
    match bytes.iter().position(|byte| *byte == b' ') {
        Some(at) => (&bytes[..at], &bytes[at + 1..]),
        None => (bytes, &[]),
    }
}

/// A file, block device or image that outlives the process.
pub trait Medium: Send + Sync {
    /// Returns the medium's name for identities stored elsewhere; stable across restarts.
    fn key(&self) -> String;

    /// Returns the identity that follows from the location, for a medium that is the same on every host.
    fn own_identity(&self) -> Option<Identity> {
        None
    }

    /// Returns the units that a disk on an iSCSI target has used, including the present one.
    fn known_units(&self) -> Option<&KnownUnits> {
        None
    }

    /// Returns major and minor number of a block device. Does not block.
    fn device_number(&self) -> Option<(u32, u32)> {
        None
    }

    /// Returns the present stamp of a file; `None` for other media.
    fn stamp(&self) -> Option<Stamp>;

    /// Returns its attribute, if any.
    ///
    /// # Errors
    /// The system fails; block devices have no attributes.
    fn attribute(&self) -> io::Result<Option<Vec<u8>>>;

    /// Replaces the attribute; durable only after a sync: see [`Medium::reopen`].
    ///
    /// # Errors
    /// The system refuses, or the disk is read-only; the attribute is unchanged.
    fn set_attribute(&self, bytes: &[u8]) -> io::Result<()>;

    /// Returns true if this is a copy: the record is of another file that still exists at its path.
    fn is_copy_of(&self, record: &IdentityRecord) -> bool;

    /// Opens the file again for a sync, without locks.
    ///
    /// # Errors
    /// The error of a system call.
    fn reopen(&self) -> io::Result<OwnedFd>;
}

/// Converts a path returned by the kernel.
pub(crate) fn path_of(bytes: Vec<u8>) -> PathBuf {
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = "6f9619ff-8b86-4011-b42d-00c04fc964ff";

    #[test]
    fn record_is_one_readable_line() {
        let record = IdentityRecord {
            identity: TEXT.parse().unwrap(),
            stamp: Some(Stamp {
                inode: 12,
                birth: Some((1_700_000_000, 5)),
                path: Some("/srv/a b.raw".into()),
            }),
        };
        let text = format!("{TEXT} inode=12 birth=1700000000.000000005 path=/srv/a b.raw");
        assert_eq!(record.encode(), text.as_bytes());
        assert_eq!(IdentityRecord::decode(text.as_bytes()), Some(record));
        let by_hand = IdentityRecord::decode(format!("{TEXT}\n").as_bytes()).unwrap();
        assert_eq!(by_hand.stamp, None);
        let later = format!("{TEXT} colour=red inode=12");
        let later = IdentityRecord::decode(later.as_bytes()).unwrap();
        assert_eq!(later.stamp.unwrap().inode, 12);
    }

    #[test]
    fn other_text_is_no_record() {
        for text in ["", " ", "d0", "d0 inode=1"] {
            assert_eq!(IdentityRecord::decode(text.as_bytes()), None, "{text:?}");
        }
        for rest in [
            "inode=x",
            "inode=-1",
            "inode=1 birth=1",
            "inode=1 birth=a.b",
        ] {
            let text = format!("{TEXT} {rest}");
            assert_eq!(IdentityRecord::decode(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn damaged_attribute_is_no_record() {
        let record = IdentityRecord {
            identity: TEXT.parse().unwrap(),
            stamp: Some(Stamp {
                inode: 12,
                birth: None,
                path: Some("/srv/a\nb.raw".into()),
            }),
        };
        let attribute = record.to_attribute();
        let text = format!("{TEXT} inode=12 path=/srv/a\nb.raw");
        let line = format!("lunette1 length={} crc32c=", text.len());
        assert!(attribute.starts_with(line.as_bytes()) && attribute.ends_with(text.as_bytes()));
        for length in 0..attribute.len() {
            let cut = IdentityRecord::from_attribute(&attribute[..length]);
            assert_eq!(cut, None, "{length} bytes");
        }
        for bit in 0..attribute.len() * 8 {
            let mut damaged = attribute.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let read = IdentityRecord::from_attribute(&damaged);
            assert_eq!(read, None, "bit {bit}");
        }
        assert_eq!(
            IdentityRecord::from_attribute(&attribute),
            Some(record.clone())
        );
        // A record without a first line is that of an earlier version.
        assert_eq!(
            IdentityRecord::from_attribute(text.as_bytes()),
            Some(record)
        );
    }

    #[test]
    fn file_key_is_its_birth_time_or_else_its_inode() {
        let stamp = |inode, birth| Stamp {
            inode,
            birth,
            path: None,
        };
        let born = Some((1, 2));
        assert!(stamp(1, born).is_same_file(&stamp(1, born)));
        assert!(!stamp(1, born).is_same_file(&stamp(1, Some((1, 3)))));
        assert!(stamp(1, None).is_same_file(&stamp(1, born)));
        assert!(!stamp(1, None).is_same_file(&stamp(2, None)));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), known: bool) {
            let mut text = if known { format!("{TEXT} ").into_bytes() } else { Vec::new() };
            text.extend(&bytes);
            if let Some(record) = IdentityRecord::from_attribute(&text) {
                prop_assert_eq!(IdentityRecord::from_attribute(&record.to_attribute()), Some(record));
            }
        }

        #[test]
        fn encoded_record_is_decoded(bits: u128, inode: u64, birth: Option<(i64, u32)>, path in proptest::option::of("/[ -~]{0,50}")) {
            let birth = birth.map(|(seconds, nanos)| (seconds, nanos % 1_000_000_000));
            let record = IdentityRecord {
                identity: Identity::from_random_bits(bits),
                stamp: Some(Stamp { inode, birth, path: path.map(PathBuf::from) }),
            };
            prop_assert_eq!(IdentityRecord::from_attribute(&record.to_attribute()), Some(record.clone()));
            prop_assert_eq!(IdentityRecord::decode(&record.encode()), Some(record));
        }
    }
}
