//! What must survive a restart: registrations with APTPL, saved mode pages. One small file per key.
//!
//! A file is replaced as a whole: written beside, synchronised, renamed, and the folder synchronised. So after a
//! crash there is the state of before or of after. The folder is made at the first save; two daemons need two.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub use bdev::iscsi_initiator::default_state_folder as default_folder;
use config::Config;

/// Where what is changed at run time is kept: only in a folder that was chosen, for two daemons that share the usual one
/// must not find each other's disks.
pub fn changes_folder(config: &Config) -> Option<PathBuf> {
    let given = || std::env::var_os("STATE_DIRECTORY").filter(|folder| !folder.is_empty());
    config.state.clone().or_else(|| given().map(PathBuf::from))
}

/// A folder with a file per key.
#[derive(Debug)]
pub struct FolderStore {
    folder: PathBuf,
}

impl FolderStore {
    /// A store in `folder`, which need not exist yet.
    pub fn new(folder: PathBuf) -> FolderStore {
        FolderStore { folder }
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{}.saved", file_name(key)))
    }

    /// File of a version without checksums, which counts if there is no other.
    fn unchecked_path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{}.state", file_name(key)))
    }
}

/// A file name for any key: what is no letter, digit or dash is written as its code.
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

/// A disk that takes longer to make a few bytes durable is busy with something else, and who waits wants to know.
const SLOW: Duration = Duration::from_secs(1);

/// Replaces a file as a whole; what it says is durable when this returns.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let begun = Instant::now();
    let replaced = replace_by_rename(path, bytes);
    let took = begun.elapsed();
    if took > SLOW {
        let (seconds, path) = (took.as_secs_f64(), path.display());
        tracing::warn!(
            "it took {seconds:.1} s to make {path} durable, and who asked for the change waited: its disk is slow or busy; \
             see --state"
        );
    }
    replaced
}

fn replace_by_rename(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    replace_in(path, bytes, || File::open(folder)?.sync_all())
}

/// What is told as not written is not there for the next start either: whoever asked goes on as before, and so it shall.
fn replace_in(
    path: &Path,
    bytes: &[u8],
    synchronise_folder: impl Fn() -> io::Result<()>,
) -> io::Result<()> {
    let before = match fs::read(path) {
        Ok(before) => Some(before),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let beside = path.with_extension("new");
    let written = write_beside(&beside, bytes);
    // Half of a file is of no use to anybody, and what room there is may be little.
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
            "{error}; rolling back {shown} failed too ({and}): the change is there after a restart"
        ))
    })?;
    Err(error)
}

fn write_beside(beside: &Path, bytes: &[u8]) -> io::Result<()> {
    // Whatever the umask: what is kept here decides what is served.
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(beside)?;
    // A crash may have left it with another mode.
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    fault("created");
    file.write_all(bytes)?;
    fault("written");
    file.sync_all()?;
    fault("synchronised");
    Ok(())
}

/// Where tests have the process killed: at the step that `LUNETTE_FAULT` names, `STEP` or `STEP:N` for the Nth time that
/// it is passed. Costs a look at the environment with each change of state.
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
        // As a crash: nothing is cleaned up.
        rustix::process::kill_process(own, rustix::process::Signal::KILL).ok();
    }
}

/// Begins each file.
const MAGIC: &[u8; 8] = b"lunette1";
/// Magic, length of the payload and checksum.
const HEADER: usize = 8 + 8 + 4;

/// CRC-32C of key and payload, so that a file under another name is no state either.
fn checksum(key: &str, payload: &[u8]) -> [u8; 4] {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    digest.update(key.as_bytes());
    digest.update(&[0]);
    digest.update(payload);
    (digest.finalize() as u32).to_le_bytes()
}

fn encode(key: &str, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u64).to_le_bytes();
    [MAGIC, &length[..], &checksum(key, payload), payload].concat()
}

fn decode(key: &str, file: &[u8]) -> Result<Vec<u8>, &'static str> {
    let (header, payload) = file.split_first_chunk::<HEADER>().ok_or("is cut short")?;
    if !header.starts_with(MAGIC) {
        return Err("is not in the format of this version");
    }
    if header[8..16] != (payload.len() as u64).to_le_bytes() {
        return Err("has another length than was saved");
    }
    if header[16..] != checksum(key, payload) {
        return Err("has another content than was saved");
    }
    Ok(payload.to_vec())
}

impl scsi::Store for FolderStore {
    fn load(&self, key: &str) -> Result<Option<Vec<u8>>, scsi::Unusable> {
        let unusable = |path: &Path, reason: &dyn std::fmt::Display| {
            let path = path.display();
            tracing::error!(
                "saved state {path} {reason}; hint: restore the file, or stop the daemon and remove it to reset what it holds"
            );
            scsi::Unusable(format!("{path} {reason}"))
        };
        for (path, is_checked) in [(self.path(key), true), (self.unchecked_path(key), false)] {
            match fs::read(&path) {
                Ok(file) if is_checked => {
                    let payload = decode(key, &file);
                    return payload.map(Some).map_err(|reason| unusable(&path, &reason));
                }
                Ok(file) => return Ok(Some(file)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(unusable(&path, &format!("cannot be read: {error}"))),
            }
        }
        Ok(None)
    }

    fn save(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
        let path = self.path(key);
        replace(&path, &encode(key, bytes)).inspect_err(|error| {
            tracing::error!(path = %path.display(), "cannot save state: {error}");
        })?;
        // Otherwise it would count again when the new file is removed to reset the state.
        fs::remove_file(self.unchecked_path(key)).ok();
        Ok(())
    }

    fn remove(&self, key: &str) {
        // A file that stays belongs to no disk.
        for path in [self.unchecked_path(key), self.path(key)] {
            fs::remove_file(path).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use scsi::Store;

    use super::*;

    #[test]
    fn what_was_saved_last_is_loaded_by_another_store() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("state");
        let store = FolderStore::new(inner.clone());
        assert_eq!(store.load("pr/3001"), Ok(None));
        store.save("pr/3001", b"one").unwrap();
        store.save("pr/3001", b"two").unwrap();
        store.save("PR_3001", b"other").unwrap();
        let again = FolderStore::new(inner.clone());
        assert_eq!(again.load("pr/3001"), Ok(Some(b"two".to_vec())));
        assert_eq!(again.load("PR_3001"), Ok(Some(b"other".to_vec())));
        assert_eq!(
            fs::read_dir(inner).unwrap().count(),
            2,
            "no file is left beside"
        );
    }

    #[test]
    fn damaged_files_are_no_absent_files() {
        let folder = tempfile::tempdir().unwrap();
        let store = FolderStore::new(folder.path().to_owned());
        let path = store.path("pr");
        for payload in [&b""[..], b"some registrations"] {
            store.save("pr", payload).unwrap();
            let whole = fs::read(&path).unwrap();
            for length in 0..whole.len() {
                fs::write(&path, &whole[..length]).unwrap();
                store.load("pr").expect_err("a file that is cut short");
            }
            for bit in 0..whole.len() * 8 {
                let mut flipped = whole.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                fs::write(&path, flipped).unwrap();
                store.load("pr").expect_err("a file with a wrong bit");
            }
            fs::write(store.path("other"), &whole).unwrap();
            store.load("other").expect_err("a file of another key");
            fs::write(&path, whole).unwrap();
            assert_eq!(store.load("pr"), Ok(Some(payload.to_vec())));
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        store.load("pr").expect_err("a file that cannot be read");
        fs::remove_dir(&path).unwrap();
        assert_eq!(store.load("pr"), Ok(None));
    }

    #[test]
    fn files_without_a_checksum_count_until_the_first_save() {
        let folder = tempfile::tempdir().unwrap();
        let store = FolderStore::new(folder.path().to_owned());
        fs::write(folder.path().join("pr.state"), b"old").unwrap();
        assert_eq!(store.load("pr"), Ok(Some(b"old".to_vec())));
        store.save("pr", b"new").unwrap();
        assert_eq!(store.load("pr"), Ok(Some(b"new".to_vec())));
        fs::remove_file(store.path("pr")).unwrap();
        assert_eq!(store.load("pr"), Ok(None), "the old file is gone");
        store.save("pr", b"new").unwrap();
        store.remove("pr");
        assert_eq!(store.load("pr"), Ok(None));
    }

    #[test]
    fn what_is_kept_is_for_the_daemons_user_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kept");
        // As a file is made under the umask of a daemon whose group may connect to its sockets.
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
    fn what_could_not_be_made_durable_is_not_there() {
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
    fn key_cannot_leave_the_folder() {
        let store = FolderStore::new(PathBuf::from("/state"));
        assert_eq!(store.path("../x"), Path::new("/state/_2E_2E_2Fx.saved"));
    }

    #[test]
    fn folder_that_cannot_be_made_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(
            FolderStore::new(file.join("state"))
                .save("k", b"v")
                .is_err()
        );
    }
}
