//! The files of the state folder: their kinds, their check, and the way to reset a damaged one.
//!
//! ```text
//!   KEY.saved       header of version, length and CRC-32C over key and content, then the content
//!   NAME.json       a line `lunette1 length=N crc32c=X`, then the text; a text without that line is not checked
//!   initiator*      text with a check of its own (`iscsi_initiator`)
//!   *.damaged-N     a file that was reset, N seconds after 1970
//! ```
//!
//! Damage is never taken for absence. The user of a file decides how it fails closed; [`KINDS`] and docs/operations.md list the outcomes.
//! A new kind gets a row in both, and in `tests/tests/saved_state.rs`.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bdev::checked_text::{VERSION, check_line, checksum};
use bdev::iscsi_initiator::is_identity_text;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Method of checking the contents of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Binary header.
    Saved,
    /// First line of a text.
    Line,
    /// Checked by the code that uses the file.
    Elsewhere,
}

/// A kind of state file.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Name of the kind in commands.
    pub word: &'static str,
    /// Prefix of the file name, or of the key for [`Check::Saved`].
    prefix: &'static str,
    /// Suffix of the file name. Not used for keys.
    suffix: &'static str,
    /// There is one file of this kind: the suffix directly follows the prefix.
    is_single: bool,
    /// Method of checking the contents.
    pub check: Check,
}

impl Kind {
    /// Returns true if `text` is the name of a file of this kind, or its key.
    fn matches(&self, text: &str) -> bool {
        let rest = text.strip_prefix(self.prefix);
        let middle = rest.and_then(|rest| rest.strip_suffix(self.suffix));
        middle.is_some_and(|middle| middle.is_empty() || !self.is_single)
    }

    /// Returns the key of a file of this kind, if it has one.
    pub(crate) fn key(&self, name: &str) -> Option<String> {
        saved_key(name).filter(|_| self.check == Check::Saved)
    }

    /// Returns the part of the name that distinguishes files of this kind.
    pub(crate) fn subject(&self, name: &str) -> String {
        let text = match self.key(name) {
            Some(key) => key,
            None => name.strip_suffix(self.suffix).unwrap_or(name).to_owned(),
        };
        text.strip_prefix(self.prefix).unwrap_or(&text).to_owned()
    }
}

const fn saved(word: &'static str, prefix: &'static str) -> Kind {
    Kind {
        word,
        prefix,
        suffix: "",
        is_single: false,
        check: Check::Saved,
    }
}

const fn single(kind: Kind) -> Kind {
    Kind {
        is_single: true,
        ..kind
    }
}

const fn text(word: &'static str, prefix: &'static str, suffix: &'static str) -> Kind {
    Kind {
        word,
        prefix,
        suffix,
        is_single: false,
        check: Check::Line,
    }
}

const fn other(word: &'static str, prefix: &'static str, suffix: &'static str) -> Kind {
    Kind {
        word,
        prefix,
        suffix,
        is_single: false,
        check: Check::Elsewhere,
    }
}

/// All kinds. The first match is used.
pub const KINDS: [Kind; 17] = [
    saved("reservations", "reservations-"),
    saved("mode-pages", "mode-pages-"),
    saved("sanitize", "sanitize-"),
    saved("last-disk", "virtio-blk disk /"),
    saved("cache-mode", "virtio-blk "),
    single(saved("ports", "ports")),
    single(saved("daemon", "daemon")),
    saved("identity", "identity-"),
    saved("unit", crate::unit_records::PREFIX),
    single(text("identities", "identities", ".json")),
    single(text("changes", "changes", ".json")),
    single(text("resizing", "resizing", ".json")),
    text("bitmaps", "bitmaps/", ".json"),
    other("bitmap-bits", "bitmaps/", ".bits"),
    other("initiator", "initiator", ""),
    other("isid-lock", "isid-", ".lock"),
    single(other("lock", "lock", "")),
];

/// Suffix of reset files, before the time.
const DAMAGED: &str = ".damaged-";
/// Suffix of files with a binary header.
const SAVED: &str = ".saved";
/// Suffix of such files in versions without checksums.
const UNCHECKED: &str = ".state";

/// Returns the kind of the file of this name, relative to the state folder.
pub fn kind_of(name: &str) -> Option<&'static Kind> {
    let key = saved_key(name);
    KINDS.iter().find(|kind| match (kind.check, &key) {
        (Check::Saved, Some(key)) => kind.matches(key),
        (Check::Saved, None) | (_, Some(_)) => false,
        _ => kind.matches(name),
    })
}

/// Returns the key of a file if the daemon would use this name for it.
fn saved_key(name: &str) -> Option<String> {
    let stem = name
        .strip_suffix(SAVED)
        .or_else(|| name.strip_suffix(UNCHECKED))?;
    let key = key_of(stem);
    (file_name(&key) == stem).then_some(key)
}

/// Returns true for a file without a checksum that is unused because of a checked one.
pub(crate) fn is_superseded(folder: &Path, name: &str) -> bool {
    let stem = name.strip_suffix(UNCHECKED);
    let checked = stem.map(|stem| folder.join(format!("{stem}{SAVED}")));
    checked.is_some_and(|path| path.symlink_metadata().is_ok())
}

/// Largest state file that is read, in bytes. The changes of 16,384 disks take three megabytes.
pub(crate) const FILE_BYTES_MAX: u64 = 64 << 20;
/// Largest file with the bits of a dirty bitmap that is read, in bytes: those of 512 TiB in blocks of 64 KiB.
pub(crate) const BITS_BYTES_MAX: u64 = 1 << 30;

/// Reads a regular file of at most `most` bytes. Others are an error: reading a FIFO or a device may block.
pub(crate) fn read_regular(path: &Path, most: u64) -> Result<Vec<u8>, Unread> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let mut file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Err(Unread::Absent),
        // A symbolic link or a socket.
        Err(Errno::LOOP | Errno::NXIO) => return Err(Unread::NotRegular),
        Err(errno) => return Err(Unread::Failed(errno.into())),
    };
    let found = file.metadata().map_err(Unread::Failed)?;
    if !found.is_file() {
        return Err(Unread::NotRegular);
    }
    if found.len() > most {
        return Err(Unread::TooLarge(most));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(Unread::Failed)?;
    Ok(bytes)
}

/// Reason why a file was not read. `Display` continues a sentence that begins with the file.
#[derive(Debug)]
pub(crate) enum Unread {
    Absent,
    NotRegular,
    /// The file is larger than this number of bytes.
    TooLarge(u64),
    Failed(io::Error),
}

impl fmt::Display for Unread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unread::Absent => f.write_str("does not exist"),
            Unread::NotRegular => f.write_str("is not a regular file"),
            Unread::TooLarge(most) => write!(f, "is larger than {} MiB", most >> 20),
            Unread::Failed(error) => write!(f, "cannot be read: {error}"),
        }
    }
}

impl From<Unread> for io::Error {
    fn from(unread: Unread) -> io::Error {
        match unread {
            Unread::Absent => io::ErrorKind::NotFound.into(),
            Unread::NotRegular => io::Error::other("not a regular file"),
            Unread::TooLarge(most) => io::Error::other(format!("larger than {} MiB", most >> 20)),
            Unread::Failed(error) => error,
        }
    }
}

/// Returns the file name for a key. Other characters than lower-case letters, digits and dashes are written as codes.
pub(crate) fn file_name(key: &str) -> String {
    let mut name = String::new();
    for byte in key.bytes() {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'-' => name.push(char::from(byte)),
            other => name.push_str(&format!("_{other:02X}")),
        }
    }
    name
}

/// Returns the key of a file's name: the inverse of [`file_name`].
pub(crate) fn key_of(name: &str) -> String {
    let mut key = Vec::new();
    let mut rest = name.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let code = match byte {
            b'_' => after
                .get(..2)
                .and_then(|code| std::str::from_utf8(code).ok()),
            _ => None,
        };
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(code) => {
                key.push(code);
                rest = after.get(2..).unwrap_or_default();
            }
            None => {
                key.push(byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&key).into_owned()
}

/// Bytes of the header: version, length of the payload, checksum.
const HEADER: usize = 8 + 8 + 4;

pub(crate) fn checksum_of(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Adds the header to the state under a key.
pub(crate) fn encode(key: &str, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u64).to_le_bytes();
    let checksum = checksum(key, payload).to_le_bytes();
    [VERSION, &length[..], &checksum, payload].concat()
}

const CUT: &str = "is empty or cut short";
const OTHER_FORMAT: &str = "has an unknown format";
const OTHER_LENGTH: &str = "does not match its saved length";
const OTHER_CONTENT: &str = "does not match its saved checksum";

/// Checks and removes the header.
pub(crate) fn decode(key: &str, file: &[u8]) -> Result<Vec<u8>, &'static str> {
    let (header, payload) = file.split_first_chunk::<HEADER>().ok_or(CUT)?;
    if !header.starts_with(VERSION) {
        return Err(OTHER_FORMAT);
    }
    if header[8..16] != (payload.len() as u64).to_le_bytes() {
        return Err(OTHER_LENGTH);
    }
    if header[16..] != checksum(key, payload).to_le_bytes() {
        return Err(OTHER_CONTENT);
    }
    Ok(payload.to_vec())
}

/// Adds the first line to the text of a file of this name.
pub(crate) fn with_check_line(name: &str, text: &[u8]) -> Vec<u8> {
    debug_assert!(kind_of(name).is_some(), "{name} is of no kind in KINDS");
    [check_line(name, text).as_bytes(), text].concat()
}

/// Checks and removes the first line. A text without it was edited by hand or written by an earlier version.
pub(crate) fn without_check_line<'a>(name: &str, file: &'a [u8]) -> Result<&'a [u8], &'static str> {
    match file.first() {
        None => return Err(CUT),
        Some(b'{' | b'[') => return Ok(file),
        Some(_) => {}
    }
    let end = file.iter().position(|byte| *byte == b'\n').ok_or(CUT)?;
    let (line, text) = file.split_at(end + 1);
    match line == check_line(name, text).as_bytes() {
        true => Ok(text),
        false => Err("does not match the length and checksum in its first line"),
    }
}

/// Unusable state files since the start, by name, with the reason.
#[derive(Clone, Debug, Default)]
pub struct DamagedFiles(Arc<Mutex<BTreeMap<String, String>>>);

impl DamagedFiles {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an unusable file and logs it the first time. Returns the reason with a hint.
    pub(crate) fn found(&self, folder: &Path, name: &str, reason: &str) -> String {
        let path = folder.join(name);
        let path = path.display();
        let hint = reset_hint(name);
        if self
            .lock()
            .insert(name.to_owned(), reason.to_owned())
            .is_none()
        {
            tracing::error!("state file {path} {reason}; hint: {hint}");
        }
        format!("state file {path} {reason}; hint: {hint}")
    }

    /// Records that a file is usable or removed.
    pub(crate) fn cleared(&self, name: &str) {
        self.lock().remove(name);
    }

    /// Returns names and reasons.
    pub fn all(&self) -> Vec<(String, String)> {
        self.lock().clone().into_iter().collect()
    }
}

fn reset_hint(name: &str) -> String {
    format!("restore the file and restart the daemon, or reset it: lunette state reset {name}")
}

/// Reads a checked text of the state folder; `None` if the file does not exist.
///
/// # Errors
/// The reason why it is unusable, with a hint.
pub(crate) fn read_text(
    folder: &Path,
    name: &str,
    damaged: &DamagedFiles,
) -> Result<Option<Vec<u8>>, String> {
    let file = match read_regular(&folder.join(name), FILE_BYTES_MAX) {
        Ok(file) => file,
        Err(Unread::Absent) => return Ok(None),
        Err(unread) => return Err(damaged.found(folder, name, &unread.to_string())),
    };
    match without_check_line(name, &file) {
        Ok(text) => Ok(Some(text.to_vec())),
        Err(reason) => Err(damaged.found(folder, name, reason)),
    }
}

/// Moves a file aside, durably. A missing file is no error.
pub(crate) fn move_aside(path: &Path) -> io::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default().as_secs();
    let aside = |time: u64| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!("{DAMAGED}{time}"));
        PathBuf::from(name)
    };
    let free = (now..).map(aside).find(|aside| !aside.exists());
    let free = free.unwrap_or_else(|| aside(now));
    match fs::rename(path, free) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(()) => File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all(),
    }
}

/// Condition of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The check succeeded, or there is no check.
    Good,
    /// The file has no checksum.
    Unchecked,
    /// The file is unusable, for this reason.
    Damaged(String),
    /// The file was reset.
    Reset,
}

/// Returns the condition of a file in the state folder.
pub(crate) fn condition(folder: &Path, name: &str) -> Condition {
    if name.contains(DAMAGED) {
        return Condition::Reset;
    }
    let Some(kind) = kind_of(name) else {
        return Condition::Unchecked;
    };
    let most = match kind.word {
        "bitmap-bits" => BITS_BYTES_MAX,
        _ => FILE_BYTES_MAX,
    };
    let file = match read_regular(&folder.join(name), most) {
        Ok(file) => file,
        Err(unread) => return Condition::Damaged(unread.to_string()),
    };
    if name.ends_with(UNCHECKED) {
        return Condition::Unchecked;
    }
    let checked = match (kind.word, name.strip_suffix(SAVED)) {
        (_, Some(key)) => decode(&key_of(key), &file).map(drop),
        ("initiator", _) => match std::str::from_utf8(&file).is_ok_and(is_identity_text) {
            true => Ok(()),
            false => Err("is malformed"),
        },
        _ if kind.check == Check::Elsewhere => Ok(()),
        _ => without_check_line(name, &file).map(drop),
    };
    match checked {
        Ok(()) if kind.check == Check::Line && !file.starts_with(VERSION) => Condition::Unchecked,
        Ok(()) => Condition::Good,
        Err(reason) => Condition::Damaged(reason.to_owned()),
    }
}

/// Returns the names of all state files, sorted, without locks and temporary files.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for (below, prefix) in [
        (folder.to_owned(), ""),
        (folder.join("bitmaps"), "bitmaps/"),
    ] {
        for entry in fs::read_dir(below).into_iter().flatten().flatten() {
            if let Some(name) = entry.file_name().to_str() {
                names.push(format!("{prefix}{name}"));
            }
        }
    }
    let is_state = |name: &String| {
        let kind = kind_of(name).map(|kind| kind.word);
        name != "bitmaps" && !name.ends_with(".new") && !matches!(kind, Some("lock" | "isid-lock"))
    };
    names.retain(is_state);
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_follows_from_the_name_of_its_file() {
        for key in ["ports", "virtio-blk disk /run/A b.sock", "a_b", "", "ä"] {
            assert_eq!(key_of(&file_name(key)), key);
        }
    }

    #[test]
    fn each_name_has_its_kind() {
        let saved = |key: &str| format!("{}.saved", file_name(key));
        for (name, word) in [
            (saved("reservations-1"), Some("reservations")),
            (saved("virtio-blk disk /run/a"), Some("last-disk")),
            (saved("virtio-blk disk 1"), Some("cache-mode")),
            (saved("unit-Disk 0"), Some("unit")),
            (saved("other"), None),
            ("identities.json".to_owned(), Some("identities")),
            ("bitmaps/d0.json".to_owned(), Some("bitmaps")),
            ("bitmaps/d0.1.bits".to_owned(), Some("bitmap-bits")),
            ("initiator-0123".to_owned(), Some("initiator")),
            ("isid-80.lock".to_owned(), Some("isid-lock")),
            ("lock".to_owned(), Some("lock")),
            // Copies, and a name that the daemon does not give to a file of this key.
            ("identities-copy.json".to_owned(), None),
            ("changes-2.json".to_owned(), None),
            ("resizing-2.json".to_owned(), None),
            ("lock-2".to_owned(), None),
            (saved("ports2"), None),
            (saved("daemon-copy"), None),
            ("reservations-ab_63.saved".to_owned(), None),
            ("reservations-1 copy.saved".to_owned(), None),
        ] {
            assert_eq!(kind_of(&name).map(|kind| kind.word), word, "{name}");
        }
    }

    #[test]
    fn purge_of_the_package_removes_state_files_and_no_disks() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("var/lib/lunette");
        fs::create_dir_all(folder.join("bitmaps")).unwrap();
        let mut state = Vec::new();
        for kind in KINDS {
            let subject = match (kind.is_single, kind.word) {
                (true, _) => "",
                (false, "initiator") => "-0123456789ab",
                (false, _) => "a B",
            };
            let text = format!("{}{subject}{}", kind.prefix, kind.suffix);
            let name = match kind.check {
                Check::Saved => format!("{}{SAVED}", file_name(&text)),
                _ => text.replace(' ', "_20"),
            };
            assert_eq!(kind_of(&name).map(|kind| kind.word), Some(kind.word));
            if kind.word != "lock" {
                state.extend([format!("{name}.new"), format!("{name}{DAMAGED}1")]);
            }
            state.push(name);
        }
        state.push("reservations-1.state".to_owned());
        let disks = [
            "disk.raw",
            "disk.saved",
            "changes.json.qcow2",
            "initiator.img",
        ];
        let disks = [&disks[..], &["bitmaps.raw", "unit-1.raw", "lock.raw"]].concat();
        for name in state
            .iter()
            .map(String::as_str)
            .chain(disks.iter().copied())
        {
            fs::write(folder.join(name), "").unwrap();
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/debian/postrm");
        let mut purge = std::process::Command::new("sh");
        purge.arg(script).arg("purge").env("DPKG_ROOT", root.path());
        assert!(purge.current_dir(&folder).status().unwrap().success());
        let mut expected = disks;
        expected.sort_unstable();
        let mut present: Vec<_> = fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        present.sort();
        assert_eq!(present, expected);
    }

    #[test]
    fn every_kind_is_in_the_table_and_in_its_test() {
        let table = include_str!("../../../docs/operations.md");
        let test = include_str!("../../../tests/tests/saved_state.rs");
        for Kind { word, .. } in KINDS {
            let mut rows = table.lines().filter(|line| line.starts_with("| `"));
            let is_row = |line: &str| {
                line.split('|')
                    .nth(1)
                    .is_some_and(|cell| cell.contains(&format!("`{word}`")))
            };
            assert!(rows.any(is_row), "docs/operations.md has no row for {word}");
            let is_tested = test.contains(&format!("(\"{word}\", Outcome"));
            let is_elsewhere = ["daemon", "lock", "isid-lock"].contains(&word);
            assert!(
                is_tested || is_elsewhere,
                "tests/tests/saved_state.rs has no row for {word}"
            );
        }
    }

    #[test]
    fn text_is_checked_by_its_first_line() {
        let text = b"{\n}\n";
        let file = with_check_line("changes.json", text);
        // CRC-32C of "changes.json", a zero byte and the text.
        assert_eq!(file, b"lunette1 length=4 crc32c=0bb60e28\n{\n}\n");
        assert_eq!(without_check_line("changes.json", &file), Ok(&text[..]));
        assert_eq!(without_check_line("changes.json", text), Ok(&text[..]));
        without_check_line("b.json", &file).expect_err("a file of another name");
        for length in 0..file.len() {
            without_check_line("changes.json", &file[..length])
                .expect_err("a file that is cut short");
        }
        for bit in 0..file.len() * 8 {
            let mut flipped = file.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            without_check_line("changes.json", &flipped).expect_err("a file with a wrong bit");
        }
    }

    #[test]
    fn files_that_are_huge_or_not_regular_are_damaged_and_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sanitize-1.saved");
        let expected = Condition::Damaged("is not a regular file".to_owned());
        let make: [fn(&Path); 3] = [
            |path| rustix::fs::mkfifoat(rustix::fs::CWD, path, Mode::RWXU).unwrap(),
            |path| std::os::unix::fs::symlink("/dev/zero", path).unwrap(),
            |path| drop(std::os::unix::net::UnixListener::bind(path).unwrap()),
        ];
        for make in make {
            make(&path);
            assert_eq!(condition(folder.path(), "sanitize-1.saved"), expected);
            fs::remove_file(&path).unwrap();
        }
        fs::create_dir(&path).unwrap();
        assert_eq!(condition(folder.path(), "sanitize-1.saved"), expected);
        fs::remove_dir(&path).unwrap();
        File::create(&path).unwrap().set_len(3 << 30).unwrap();
        let expected = Condition::Damaged("is larger than 64 MiB".to_owned());
        assert_eq!(condition(folder.path(), "sanitize-1.saved"), expected);
    }

    #[test]
    fn files_moved_aside_do_not_replace_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ports.saved");
        for content in ["one", "two"] {
            fs::write(&path, content).unwrap();
            move_aside(&path).unwrap();
        }
        move_aside(&path).unwrap();
        let names = names(folder.path());
        assert_eq!(names.len(), 2, "{names:?}");
        for name in names {
            assert_eq!(condition(folder.path(), &name), Condition::Reset);
        }
    }
}
