//! Folders of running guests, one per name.
//!
//! A folder is created complete with lock and owner under a temporary name and then renamed, which fails if the name is taken. A partial
//! folder is therefore never visible. The supervisor holds the lock. A folder with a free lock remains after a supervisor and its watcher
//! were both killed; the next guest of that name removes it.

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::getuid;
use serde::{Deserialize, Serialize};
use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Maximum length of a socket path: `sun_path` of unix(7) without its NUL.
const SOCKET_PATH_MAX: usize = 107;
/// Longest socket name in a guest's folder.
const SOCKET_NAME_MAX: usize = 24;
const NAME_MAX: usize = 40;

const LOCK: &str = "lock";
const OWNER: &str = "owner";
const STATE: &str = "state.json";
const STATE_LOCK: &str = "state.lock";

/// Phase of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The daemon or QEMU is starting.
    Starting,
    /// The system is booting.
    Booting,
    /// The agent accepts commands, or the system is not expected to have an agent.
    Running,
    /// The guest is being stopped.
    Stopping,
}

impl Phase {
    /// Returns the name for users.
    pub fn word(self) -> &'static str {
        match self {
            Phase::Starting => "starting",
            Phase::Booting => "booting",
            Phase::Running => "running",
            Phase::Stopping => "stopping",
        }
    }
}

/// State of a guest, as stored in its folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Name of the guest.
    pub name: String,
    /// Phase of the guest's life.
    pub phase: Phase,
    /// Process ID of the supervisor.
    pub supervisor: u32,
    /// Process group of everything that the supervisor has started, and process ID of the watcher.
    pub group: u32,
    /// Process ID of QEMU.
    pub qemu: Option<u32>,
    /// Process ID of the guest's own daemon.
    pub daemon: Option<u32>,
    /// Control socket of the daemon, if there is one.
    pub control: Option<PathBuf>,
    /// `KVM` or `TCG`.
    pub accelerator: String,
    /// `q35` or `pc`.
    pub machine: String,
    /// Number of virtual CPUs.
    pub cpus: u32,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Topology as given.
    pub topology: String,
    /// Start time: seconds since 1970.
    pub started: u64,
    /// Number of starts of the agent.
    #[serde(default)]
    pub boots: u32,
    /// Number of hot-plugged disks so far.
    #[serde(default)]
    pub plugs: u32,
    /// Disks that were hot-plugged.
    #[serde(default)]
    pub plugged: Vec<Plugged>,
}

/// A disk that was hot-plugged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plugged {
    /// `blk` or `scsi`.
    pub kind: String,
    /// Name of the disk.
    pub disk: String,
    /// Root port of the device, or address of the LUN.
    pub at: String,
    /// Export of a virtio-blk disk.
    pub export: String,
    /// The disk was created for the guest and is removed with it.
    pub is_new: bool,
    /// QEMU serves the disk.
    pub via_qemu: bool,
}

/// Folder of all guests' folders.
#[derive(Clone, Debug)]
pub struct Registry {
    root: PathBuf,
}

/// Folder of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeFolder {
    folder: PathBuf,
}

/// A folder with its lock. The owner of this value is the guest's supervisor.
#[derive(Debug)]
pub struct Claim {
    /// Folder of the guest.
    pub runtime_folder: RuntimeFolder,
    _lock: File,
}

impl Registry {
    /// Opens `$XDG_RUNTIME_DIR/lunette/vm`, or `/tmp/lunette-UID/vm` if the variable is not set.
    pub fn open() -> Result<Registry> {
        let uid = getuid().as_raw();
        let root = match std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()) {
            Some(path) => {
                let directory = PathBuf::from(path);
                ensure!(
                    directory.is_dir(),
                    "XDG_RUNTIME_DIR is {}, which is not a folder; hint: unset it to use /tmp for guests' folders",
                    directory.display()
                );
                make(&directory.join("lunette"), uid)?
            }
            None => make(Path::new(&format!("/tmp/lunette-{uid}")), uid)?,
        };
        Registry::at(&make(&root.join("vm"), uid)?)
    }

    /// Opens an existing folder.
    pub fn at(root: &Path) -> Result<Registry> {
        Ok(Registry {
            root: root.to_owned(),
        })
    }

    /// Returns the path.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the folder for a guest of this name, whether it exists or not.
    pub fn runtime_folder(&self, name: &str) -> Result<RuntimeFolder> {
        let is_valid = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        ensure!(
            (1..=NAME_MAX).contains(&name.len())
                && name.chars().all(is_valid)
                && name.starts_with(|c: char| c.is_ascii_alphanumeric()),
            "{name:?} is not a valid guest name; hint: use up to {NAME_MAX} letters, digits, '-', '_' and '.', the first one a letter or digit"
        );
        let folder = self.root.join(name);
        let longest = folder.as_os_str().len() + 1 + SOCKET_NAME_MAX;
        ensure!(
            longest <= SOCKET_PATH_MAX,
            "sockets below {} would have paths of {longest} bytes, the maximum is {SOCKET_PATH_MAX}; hint: use a shorter name, or set XDG_RUNTIME_DIR to a shorter path",
            folder.display()
        );
        Ok(RuntimeFolder { folder })
    }

    /// Returns the names of all folders, sorted.
    pub fn names(&self) -> Result<Vec<String>> {
        let entries = std::fs::read_dir(&self.root)
            .with_context(|| format!("cannot read {}", self.root.display()))?;
        let names = entries.flatten().map(|entry| entry.file_name());
        let mut names: Vec<String> = names
            .filter_map(|name| name.into_string().ok())
            .filter(|name| !name.starts_with('.'))
            .collect();
        names.sort();
        Ok(names)
    }

    /// Returns the first free name of `vm1`, `vm2`, ...
    pub fn free_name(&self) -> Result<String> {
        let taken = self.names()?;
        let mut names = (1..).map(|number| format!("vm{number}"));
        names
            .find(|name| !taken.contains(name))
            .context("no free name")
    }

    /// Returns a running guest's folder and state.
    pub fn find(&self, name: &str) -> Result<(RuntimeFolder, State)> {
        let runtime_folder = self.runtime_folder(name)?;
        if !runtime_folder.is_held() {
            let running = self.running()?;
            let running = match running.is_empty() {
                true => "none is running".to_owned(),
                false => format!("running: {}", running.join(", ")),
            };
            bail!("there is no guest {name}; {running}; hint: lunette vm list");
        }
        let state = runtime_folder.state()?;
        Ok((runtime_folder, state))
    }

    /// Returns the names of running guests.
    pub fn running(&self) -> Result<Vec<String>> {
        let mut names = self.names()?;
        names.retain(|name| {
            self.runtime_folder(name)
                .is_ok_and(|runtime_folder| runtime_folder.is_held())
        });
        Ok(names)
    }

    /// Claims a name. `owner` is the process ID of the watcher, which removes the folder in any case.
    pub fn claim(&self, name: &str, owner: u32, state: &State) -> Result<Claim> {
        let runtime_folder = self.runtime_folder(name)?;
        let fresh = unfinished(&self.root, owner);
        let full = || {
            format!(
                "cannot create {}; hint: check that its file system is not full (df {0}), or set XDG_RUNTIME_DIR to another one",
                self.root.display()
            )
        };
        // Left over from an earlier watcher with the same process ID.
        remove(&fresh)?;
        DirBuilder::new()
            .mode(0o700)
            .create(&fresh)
            .with_context(full)?;
        let lock = File::create(fresh.join(LOCK)).with_context(full)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).context("cannot lock a new file")?;
        std::fs::write(fresh.join(OWNER), owner.to_string()).with_context(full)?;
        let text = serde_json::to_vec(state)?;
        std::fs::write(fresh.join(STATE), text).with_context(full)?;
        if !rename(&fresh, &runtime_folder.folder)? {
            let removed = runtime_folder.remove_left_over()?;
            if !removed || !rename(&fresh, &runtime_folder.folder)? {
                remove(&fresh)?;
                bail!(
                    "a guest named {name} is already running; hint: choose another --name, or end it with lunette vm stop {name}"
                );
            }
        }
        Ok(Claim {
            runtime_folder,
            _lock: lock,
        })
    }

    /// Removes the folders of a dead guest that belong to the watcher `owner`.
    pub fn remove_owned(&self, name: &str, owner: u32) -> Result<()> {
        remove(&unfinished(&self.root, owner))?;
        let runtime_folder = self.runtime_folder(name)?;
        match std::fs::read_to_string(runtime_folder.folder.join(OWNER)) {
            Ok(text) if text == owner.to_string() => runtime_folder.remove(),
            _ => Ok(()),
        }
    }
}

impl RuntimeFolder {
    /// Returns the path.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the path of a file or socket in the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Returns true if a supervisor holds the lock.
    pub fn is_held(&self) -> bool {
        let Ok(file) = File::open(self.file(LOCK)) else {
            return false;
        };
        flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
    }

    /// Reads the state of the guest.
    pub fn state(&self) -> Result<State> {
        let path = self.file(STATE);
        let text =
            std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} is malformed", path.display()))
    }

    /// Replaces the state atomically.
    pub fn set_state(&self, state: &State) -> Result<()> {
        let mut part = tempfile::NamedTempFile::new_in(&self.folder)
            .with_context(|| format!("cannot write to {}", self.folder.display()))?;
        serde_json::to_writer(&mut part, state)?;
        part.persist(self.file(STATE))?;
        Ok(())
    }

    /// Changes the state under an exclusive lock.
    pub fn change(&self, change: impl FnOnce(&mut State)) -> Result<()> {
        let lock = File::create(self.file(STATE_LOCK))
            .with_context(|| format!("cannot write to {}", self.folder.display()))?;
        flock(&lock, FlockOperation::LockExclusive)?;
        let mut state = self.state()?;
        change(&mut state);
        self.set_state(&state)
    }

    /// Removes the folder. Other processes see the whole folder or none.
    pub fn remove(&self) -> Result<()> {
        let name = self.folder.file_name().unwrap_or_default();
        let renamed = format!(".old-{}-{}", std::process::id(), name.to_string_lossy());
        let renamed = self.folder.with_file_name(renamed);
        match std::fs::rename(&self.folder, &renamed) {
            Ok(()) => remove(&renamed),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => {
                Err(error).with_context(|| format!("cannot remove {}", self.folder.display()))
            }
        }
    }

    /// Removes the folder if no supervisor holds its lock, after killing remaining processes. Returns true if the folder is gone.
    pub fn remove_left_over(&self) -> Result<bool> {
        let Ok(lock) = File::open(self.file(LOCK)) else {
            // The folder was removed meanwhile, or it is not a guest's folder.
            return Ok(!self.folder.exists());
        };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(false);
        }
        if let Ok(state) = self.state() {
            super::watcher::kill_left_over(state.group, &self.folder);
        }
        self.remove()?;
        Ok(true)
    }
}

fn unfinished(root: &Path, owner: u32) -> PathBuf {
    root.join(format!(".new-{owner}"))
}

/// Renames a folder. Returns `false` if the name is taken.
fn rename(from: &Path, to: &Path) -> Result<bool> {
    match rustix::fs::rename(from, to) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR) => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot create {}", to.display())),
    }
}

fn remove(folder: &Path) -> Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Creates a folder with mode 700, or accepts an existing one that only this user may write to. The check is necessary because all users
/// may write to `/tmp`.
fn make(folder: &Path, uid: u32) -> Result<PathBuf> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| {
                format!(
                    "cannot create {}; hint: set XDG_RUNTIME_DIR to a folder of your own",
                    folder.display()
                )
            });
        }
        _ => {}
    }
    let metadata = std::fs::symlink_metadata(folder)
        .with_context(|| format!("cannot stat {}", folder.display()))?;
    ensure!(
        metadata.is_dir() && metadata.uid() == uid && metadata.permissions().mode() & 0o022 == 0,
        "{} is not a folder, or other users may write to it; hint: remove it, or set XDG_RUNTIME_DIR to a folder of your own",
        folder.display()
    );
    Ok(folder.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(name: &str) -> State {
        State {
            name: name.to_owned(),
            phase: Phase::Starting,
            supervisor: std::process::id(),
            // An impossible process ID: Linux's maximum is 2^22.
            group: 1 << 23,
            qemu: None,
            daemon: None,
            control: None,
            accelerator: "TCG".to_owned(),
            machine: "q35".to_owned(),
            cpus: 1,
            memory_mib: 256,
            topology: "blk:1".to_owned(),
            started: 0,
            boots: 0,
            plugs: 0,
            plugged: Vec::new(),
        }
    }

    #[test]
    fn a_name_is_taken_until_its_claim_is_gone() {
        let _alone = crate::process::no_other_starts();
        let root = tempfile::tempdir().unwrap();
        let registry = Registry::at(root.path()).unwrap();
        let claim = registry.claim("one", 1, &state("one")).unwrap();
        assert_eq!(registry.running().unwrap(), ["one"]);
        assert_eq!(claim.runtime_folder.state().unwrap(), state("one"));
        let taken = registry.claim("one", 2, &state("one")).unwrap_err();
        assert!(
            taken.to_string().contains("hint: choose another --name"),
            "{taken}"
        );
        assert_eq!(
            registry.names().unwrap(),
            ["one"],
            "the refused guest leaves no files"
        );
        registry.claim("two", 3, &state("two")).unwrap();
        // The lock is free and the folder exists: the supervisor was killed.
        drop(claim);
        assert!(registry.running().unwrap().is_empty());
        assert!(
            registry
                .find("one")
                .unwrap_err()
                .to_string()
                .contains("there is no guest one")
        );
        let second = registry.claim("one", 4, &state("one")).unwrap();
        assert!(second.runtime_folder.is_held());
        let renamed = std::fs::read_dir(root.path()).unwrap().flatten();
        let renamed = renamed.filter(|entry| entry.file_name().to_string_lossy().starts_with('.'));
        assert_eq!(renamed.count(), 0);
    }

    #[test]
    fn a_watcher_removes_its_own_guest_only() {
        let _alone = crate::process::no_other_starts();
        let root = tempfile::tempdir().unwrap();
        let registry = Registry::at(root.path()).unwrap();
        let claim = registry.claim("one", 1, &state("one")).unwrap();
        registry.remove_owned("one", 2).unwrap();
        assert!(claim.runtime_folder.is_held());
        registry.remove_owned("one", 1).unwrap();
        assert!(!claim.runtime_folder.folder().exists());
    }

    #[test]
    fn names_are_names_of_files_and_short() {
        let registry = Registry::at(Path::new("/run/x")).unwrap();
        for good in ["a", "vm1", "db-2.test_x"] {
            assert!(registry.runtime_folder(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "-x", "ä", "x y", &"x".repeat(41)] {
            assert!(registry.runtime_folder(bad).is_err(), "{bad}");
        }
        let deep = Registry::at(Path::new(&"/d".repeat(50))).unwrap();
        let long = deep.runtime_folder("a").unwrap_err().to_string();
        assert!(long.contains("the maximum is 107"), "{long}");
    }
}
