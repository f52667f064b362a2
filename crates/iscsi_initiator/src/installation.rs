//! Identity of this installation as an iSCSI initiator: its name, and the seed of its ISIDs.
//!
//! Both are random, created once, and stored in the state folder. Two hosts therefore never share an initiator port, and a
//! restarted daemon uses the port of its predecessor. The file name depends on the machine ID, so a clone of a disk image
//! with another machine ID creates its own identity.
//!
//! An ISID in use is locked. Two daemons that share a state folder, and serve one unit under one disk name, get different
//! ISIDs.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

use crate::session::random_bytes;

/// The initiator name created by open-iscsi for this host.
const OPEN_ISCSI_NAME: &str = "/etc/iscsi/initiatorname.iscsi";
const MACHINE_ID: &str = "/etc/machine-id";
/// A daemon holds its ISIDs until its sessions have ended; its successor waits this long for them.
const LOCK_PATIENCE: Duration = Duration::from_secs(3);
const LOCK_POLL: Duration = Duration::from_millis(20);
/// Maximum number of daemons of one state folder that serve one unit under one disk name.
const ISIDS_MAX: u32 = 64;

/// Initiator name and ISID seed of an installation.
#[derive(Debug)]
pub struct Installation {
    /// InitiatorName.
    pub name: String,
    seed: [u8; 16],
    /// Folder of the stored identity and the locks; `None` if the identity could not be stored.
    folder: Option<PathBuf>,
}

/// An ISID that no other process with the same state folder uses.
#[derive(Clone, Debug)]
pub struct ReservedIsid {
    isid: [u8; 6],
    _lock: Option<Arc<File>>,
}

impl ReservedIsid {
    /// Returns the ISID, in the random format (RFC 7143, 11.12.5).
    pub fn isid(&self) -> [u8; 6] {
        self.isid
    }
}

/// Returns the default state folder: the one set by systemd, otherwise `/var/lib/lunette` for root and the user's state
/// folder for other users. Returns `None` if there is none.
pub fn default_state_folder() -> Option<PathBuf> {
    let given = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    if let Some(folder) = given("STATE_DIRECTORY") {
        return Some(folder);
    }
    if rustix::process::geteuid().is_root() {
        return Some(PathBuf::from("/var/lib/lunette"));
    }
    let base = given("XDG_STATE_HOME").or_else(|| Some(given("HOME")?.join(".local/state")))?;
    Some(base.join("lunette"))
}

static STATE_FOLDER: Mutex<Option<PathBuf>> = Mutex::new(None);
static KNOWN: Mutex<Option<(Option<PathBuf>, Arc<Installation>)>> = Mutex::new(None);
static LOCKS: Mutex<Option<HashMap<PathBuf, Weak<File>>>> = Mutex::new(None);

fn lock<T>(mutex: &'static Mutex<T>) -> std::sync::MutexGuard<'static, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the state folder of this process; `None` selects the default one.
pub fn set_state_folder(folder: Option<PathBuf>) {
    *lock(&STATE_FOLDER) = folder;
}

/// Returns the identity of this installation; creates and stores it if it does not exist.
///
/// # Errors
/// If the stored identity is damaged or cannot be read.
pub fn installation() -> Result<Arc<Installation>, String> {
    let folder = lock(&STATE_FOLDER).clone().or_else(default_state_folder);
    let mut known = lock(&KNOWN);
    if let Some((of, installation)) = known.as_ref()
        && *of == folder
    {
        return Ok(Arc::clone(installation));
    }
    let installation = Arc::new(Installation::open(
        folder.as_deref(),
        read(MACHINE_ID).as_deref(),
        read(OPEN_ISCSI_NAME).as_deref(),
    )?);
    *known = Some((folder, Arc::clone(&installation)));
    Ok(installation)
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// Validates a machine ID; an empty file and `uninitialized` mean none (machine-id(5)).
fn machine_id(text: Option<&str>) -> Option<&str> {
    let id = text?.trim();
    let is_id = id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_id && id.bytes().any(|byte| byte != b'0')).then_some(id)
}

/// Parses open-iscsi's file and returns the name.
fn open_iscsi_name(text: &str) -> Option<String> {
    let mut lines = text.lines().map(str::trim);
    let name = lines.find_map(|line| line.strip_prefix("InitiatorName="))?;
    let name = name.trim();
    iscsi::login::is_iscsi_name(name).then(|| name.to_owned())
}

fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        // The length prefix distinguishes ("a", "bc") from ("ab", "c").
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

struct Stored {
    name: String,
    seed: [u8; 16],
}

impl Stored {
    fn random() -> Option<Stored> {
        let mut bytes = [0; 22];
        random_bytes(&mut bytes).then(|| Stored::of(&bytes))
    }

    fn of(bytes: &[u8; 22]) -> Stored {
        let (seed, name) = bytes.split_at(16);
        let mut stored = Stored {
            name: format!("iqn.2026-11.org.example:lunette-{}", hex(name)),
            seed: [0; 16],
        };
        stored.seed.copy_from_slice(seed);
        stored
    }

    /// Derives an identity from a machine ID, for hosts without a writable state folder.
    fn of_machine(id: &str) -> Stored {
        let digest = digest(&[b"lunette initiator", id.as_bytes()]);
        let mut bytes = [0; 22];
        bytes.copy_from_slice(&digest[..22]);
        Stored::of(&bytes)
    }

    fn text(&self) -> String {
        format!(
            "# iSCSI initiator identity of this installation. Each host needs its own: do not copy this file.\n\
             name={}\nseed={}\ncheck={}\n",
            self.name,
            hex(&self.seed),
            check(&self.name, &hex(&self.seed))
        )
    }

    fn parse(text: &str) -> Option<Stored> {
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
        let name = value("name=")?;
        let digits = value("seed=")?;
        if digits.len() != 32 || !digits.is_ascii() {
            return None;
        }
        let is_known = |line: &str| {
            ["#", "name=", "seed=", "check="]
                .iter()
                .any(|begin| line.starts_with(begin))
        };
        if !text.lines().all(is_known) {
            return None;
        }
        // Files of earlier versions have no checksum.
        if value("check=").is_some_and(|saved| saved != check(name, digits)) {
            return None;
        }
        let mut seed = [0; 16];
        for (byte, place) in seed.iter_mut().zip((0..32).step_by(2)) {
            *byte = u8::from_str_radix(digits.get(place..place + 2)?, 16).ok()?;
        }
        iscsi::login::is_iscsi_name(name).then(|| Stored {
            name: name.to_owned(),
            seed,
        })
    }
}

/// Checksum of a stored identity: the first half of a SHA-256.
fn check(name: &str, seed: &str) -> String {
    hex(&digest(&[name.as_bytes(), seed.as_bytes()])[..16])
}

/// Returns true if this is the text of a stored identity.
pub fn is_identity_text(text: &str) -> bool {
    Stored::parse(text).is_some()
}

impl Installation {
    fn open(
        folder: Option<&Path>,
        machine: Option<&str>,
        open_iscsi: Option<&str>,
    ) -> Result<Installation, String> {
        let machine = machine_id(machine);
        let given = open_iscsi.and_then(open_iscsi_name);
        if open_iscsi.is_some() && given.is_none() {
            tracing::warn!(
                path = OPEN_ISCSI_NAME,
                "file ignored: no valid InitiatorName"
            );
        }
        let file = match machine {
            Some(id) => format!("initiator-{}", &hex(&digest(&[id.as_bytes()]))[..12]),
            None => "initiator".to_owned(),
        };
        let (stored, folder) = match folder
            .map(|folder| (folder, load_or_make(&folder.join(&file))))
        {
            Some((folder, Ok(stored))) => (stored, Some(folder.to_owned())),
            Some((_, Err(Failure::Damaged(error)))) => return Err(error),
            Some((folder, Err(Failure::NotStored(error)))) => {
                let folder = folder.display();
                tracing::warn!(
                    %folder,
                    "cannot store the iSCSI initiator identity: {error}; hint: make the state folder writable (--state)"
                );
                (unstored(machine)?, None)
            }
            None => (unstored(machine)?, None),
        };
        Ok(Installation {
            name: given.unwrap_or(stored.name),
            seed: stored.seed,
            folder,
        })
    }

    /// Returns true if the identity is the same in all processes of this installation.
    pub fn is_stored(&self) -> bool {
        self.folder.is_some()
    }

    /// Returns the ISID for a use, such as a disk and its unit. It is the same in every process.
    pub fn isid(&self, of: &[&str]) -> [u8; 6] {
        let parts: Vec<&[u8]> = std::iter::once(&self.seed[..])
            .chain(of.iter().map(|part| part.as_bytes()))
            .collect();
        // The random format (RFC 7143, 11.12.5): T is 10b; qualifier and random number have 24 bits.
        let mut isid = [0x80; 6];
        isid[1..].copy_from_slice(&digest(&parts)[..5]);
        isid
    }

    /// Reserves the ISID of a use until the returned value is dropped. If another process holds it and does not release it
    /// in time, reserves the next one of a fixed sequence. May wait.
    pub fn reserve_isid(&self, of: &[&str]) -> ReservedIsid {
        self.reserve_isid_within(of, LOCK_PATIENCE)
    }

    fn reserve_isid_within(&self, of: &[&str], patience: Duration) -> ReservedIsid {
        let unlocked = |isid| ReservedIsid { isid, _lock: None };
        let first = self.isid(of);
        let Some(folder) = &self.folder else {
            return unlocked(first);
        };
        for number in 0..ISIDS_MAX {
            let counted = number.to_string();
            let isid = match number {
                0 => first,
                _ => self.isid(&[of, &[&counted]].concat()),
            };
            let path = folder.join(format!("isid-{}.lock", hex(&isid)));
            match lock_file(&path, patience) {
                Ok(Some(lock)) => {
                    if number > 0 {
                        tracing::warn!(
                            isid = hex(&isid),
                            "another daemon with this state folder serves the same unit under the same disk name, using another ISID; hint: give each daemon its own state folder (--state)"
                        );
                    }
                    return ReservedIsid {
                        isid,
                        _lock: Some(lock),
                    };
                }
                Ok(None) => {}
                Err(error) => {
                    let path = path.display();
                    tracing::warn!(%path, "cannot lock the ISID, using it without a lock: {error}");
                    return unlocked(isid);
                }
            }
        }
        unlocked(first)
    }
}

/// Creates and locks a file; a lock held by this process is shared. Returns `None` if another process holds the lock.
fn lock_file(path: &Path, patience: Duration) -> io::Result<Option<Arc<File>>> {
    let begun = Instant::now();
    loop {
        // Released while this thread sleeps, so that other disks can open.
        let mut guard = lock(&LOCKS);
        let locks = guard.get_or_insert_default();
        if let Some(file) = locks.get(path).and_then(Weak::upgrade) {
            return Ok(Some(file));
        }
        let file = private().truncate(false).create(true).open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let file = Arc::new(file);
                locks.retain(|_, file| file.strong_count() > 0);
                locks.insert(path.to_owned(), Arc::downgrade(&file));
                return Ok(Some(file));
            }
            Err(rustix::io::Errno::WOULDBLOCK) if begun.elapsed() >= patience => return Ok(None),
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            Err(errno) => return Err(errno.into()),
        }
        drop(guard);
        std::thread::sleep(LOCK_POLL);
    }
}

/// Creates an identity for this process if none can be stored.
fn unstored(machine: Option<&str>) -> Result<Stored, String> {
    let random = || Stored::random().ok_or_else(|| "the system gives no random numbers".to_owned());
    machine.map_or_else(random, |id| Ok(Stored::of_machine(id)))
}

/// Reason for a missing stored identity.
enum Failure {
    /// The file exists and is unusable.
    Damaged(String),
    /// The file cannot be created.
    NotStored(io::Error),
}

fn load(path: &Path) -> Result<Option<Stored>, Failure> {
    let damaged = |why: String| {
        Failure::Damaged(format!(
            "cannot use the iSCSI initiator identity in {}: {why}; hint: restore the file, or remove it to get a new name and new ISIDs \
             (lunette state reset {})",
            path.display(),
            path.file_name().unwrap_or_default().display()
        ))
    };
    // A FIFO would block its reader.
    if fs::symlink_metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        return Err(damaged("it is not a regular file".to_owned()));
    }
    match fs::read_to_string(path) {
        Ok(text) => match Stored::parse(&text) {
            Some(stored) => Ok(Some(stored)),
            None => Err(damaged("the file is damaged".to_owned())),
        },
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(damaged(error.to_string())),
    }
}

fn load_or_make(path: &Path) -> Result<Stored, Failure> {
    if let Some(stored) = load(path)? {
        return Ok(stored);
    }
    make(path).map_err(Failure::NotStored)?;
    // Another process may have created it first.
    let missing = || Failure::NotStored(io::ErrorKind::NotFound.into());
    load(path)?.ok_or_else(missing)
}

/// Stores a new identity durably, unless another process has stored one.
fn make(path: &Path) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let stored = Stored::random().ok_or(io::ErrorKind::Unsupported)?;
    let beside = path.with_extension(format!("new-{}", std::process::id()));
    let written = (|| {
        let mut file = private().truncate(true).create(true).open(&beside)?;
        file.write_all(stored.text().as_bytes())?;
        file.sync_all()?;
        // A link, unlike a rename, never replaces the file of another process.
        match fs::hard_link(&beside, path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => File::open(folder)?.sync_all(),
        }
    })();
    fs::remove_file(&beside).ok();
    written
}

fn private() -> fs::OpenOptions {
    let mut options = File::options();
    options.read(true).write(true).mode(0o600);
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: &str = "3d1219c7c4c5404aaa1f6d2a48adfda4\n";
    const OTHER: &str = "00000000000000000000000000000001\n";

    fn open(folder: &Path, machine: Option<&str>) -> Installation {
        Installation::open(Some(folder), machine, None).unwrap()
    }

    /// Returns name and ISID, which identify an initiator port.
    fn port(installation: &Installation) -> (String, [u8; 6]) {
        (
            installation.name.clone(),
            installation.isid(&["d0", "unit"]),
        )
    }

    #[test]
    fn identity_is_made_once_and_differs_between_installations() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        // Containers of one image: with an empty machine-id, without one, or with the same one.
        for machine in [Some(""), None, Some("uninitialized\n"), Some(MACHINE)] {
            let [one, other] = folders
                .each_ref()
                .map(|folder| port(&open(folder.path(), machine)));
            assert!(one.0 != other.0 && one.1 != other.1, "{machine:?}");
            assert_eq!(one, port(&open(folders[0].path(), machine)), "{machine:?}");
            assert!(iscsi::login::is_iscsi_name(&one.0));
        }
        let empty = port(&open(folders[0].path(), Some("")));
        assert_eq!(empty, port(&open(folders[0].path(), None)));
    }

    #[test]
    fn clone_with_another_machine_id_has_another_identity() {
        let folder = tempfile::tempdir().unwrap();
        let image = port(&open(folder.path(), Some("")));
        let [one, other] = [MACHINE, OTHER].map(|id| port(&open(folder.path(), Some(id))));
        assert!(image != one && image != other && one.0 != other.0 && one.1 != other.1);
        assert_eq!(one, port(&open(folder.path(), Some(MACHINE))));
    }

    #[test]
    fn isids_differ_between_uses_and_have_the_random_format() {
        let folder = tempfile::tempdir().unwrap();
        let installation = open(folder.path(), None);
        let isid = installation.isid(&["d0", "unit"]);
        assert_eq!(isid[0], 0x80);
        for of in [
            &["d1", "unit"][..],
            &["d0", "unit2"],
            &["d0unit"],
            &["d0", "unit", "1"],
        ] {
            assert_ne!(installation.isid(of), isid, "{of:?}");
        }
    }

    #[test]
    fn name_of_open_iscsi_is_taken_if_it_is_valid() {
        let folder = tempfile::tempdir().unwrap();
        let name = |text| {
            Installation::open(Some(folder.path()), None, Some(text))
                .unwrap()
                .name
        };
        assert_eq!(
            name("# a\nInitiatorName=iqn.1993-08.org.debian:01:a\n"),
            "iqn.1993-08.org.debian:01:a"
        );
        let own = open(folder.path(), None).name;
        for invalid in [
            "",
            "InitiatorName=\n",
            "#InitiatorName=iqn.1993-08.org.debian:01:a\n",
            "GenerateName=yes\n",
        ] {
            assert_eq!(name(invalid), own, "{invalid:?}");
        }
    }

    #[test]
    fn identity_that_cannot_be_stored_follows_from_the_machine_id() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let below = file.join("state");
        let one = open(&below, Some(MACHINE));
        assert!(!one.is_stored());
        assert_eq!(port(&one), port(&open(&below, Some(MACHINE))));
        assert_ne!(port(&one), port(&open(&below, Some(OTHER))));
        assert_ne!(port(&open(&below, Some(""))), port(&open(&below, Some(""))));
    }

    #[test]
    fn damaged_identity_is_an_error_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("initiator");
        for damaged in [
            "",
            "name=iqn.2026-11.org.example:a\n",
            "name=a\nseed=00112233445566778899aabbccddeeff\n",
            // One bit differs from the text with this checksum.
            "name=iqn.2026-11.org.example:b\nseed=00112233445566778899aabbccddeeff\ncheck=b6deef3a49cc0758ad0508b493379071\n",
            "name=iqn.2026-11.org.example:a\nseed=00112233445566778899aabbccddeeff\ncheck=\n",
        ] {
            fs::write(&path, damaged).unwrap();
            let error = Installation::open(Some(folder.path()), None, None).unwrap_err();
            assert!(error.contains("damaged; hint: "), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), damaged);
        }
    }

    #[test]
    fn identity_of_an_earlier_version_has_no_checksum() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("initiator");
        let old = "name=iqn.2026-11.org.example:a\nseed=00112233445566778899aabbccddeeff\n";
        let check = "check=b6deef3a49cc0758ad0508b493379071\n";
        for text in [old.to_owned(), format!("{old}{check}")] {
            fs::write(&path, text).unwrap();
            assert_eq!(open(folder.path(), None).name, "iqn.2026-11.org.example:a");
        }
        fs::remove_file(&path).unwrap();
        open(folder.path(), None);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("\ncheck="), "{text}");
    }

    #[test]
    fn isid_that_another_process_uses_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let installation = open(folder.path(), None);
        let of = ["d0", "unit"];
        let reserve = || installation.reserve_isid_within(&of, Duration::ZERO);
        let first = installation.isid(&of);
        // Simulates another process with another open file description.
        let path = folder.path().join(format!("isid-{}.lock", hex(&first)));
        let other = File::create(&path).unwrap();
        flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
        let second = reserve();
        assert_ne!(second.isid(), first);
        drop(other);
        let own = reserve();
        assert_eq!(own.isid(), first);
        assert_eq!(reserve().isid(), first, "this process has it already");
        drop((own, second));
        assert_eq!(reserve().isid(), first);
    }
}
