//! A FUSE file system that stops answering requests of chosen kinds, like a network file system whose server is unreachable. It can also fail
//! them with EIO, or go away. Its files and their extended attributes are in memory, all in one folder. For tests that run as root.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};

/// Kinds of requests, by their FUSE opcodes.
pub mod kind {
    /// Looks up a name. Every open begins with LOOKUP.
    pub const LOOKUP: u32 = 1;
    /// Reads attributes, as fstat(2) does.
    pub const GETATTR: u32 = 3;
    /// Changes attributes, here the size of a file.
    pub const SETATTR: u32 = 4;
    /// Removes a file.
    pub const UNLINK: u32 = 10;
    /// Opens a file.
    pub const OPEN: u32 = 14;
    /// Reads from a file.
    pub const READ: u32 = 15;
    /// Writes to a file.
    pub const WRITE: u32 = 16;
    /// Closes a descriptor of a file.
    pub const FLUSH: u32 = 25;
    /// Makes a file's data durable.
    pub const FSYNC: u32 = 20;
    /// Sets an extended attribute.
    pub const SETXATTR: u32 = 21;
    /// Makes the names in a folder durable.
    pub const FSYNCDIR: u32 = 30;
    /// Takes or releases a lock.
    pub const SETLK: u32 = 32;
    /// Creates and opens a file.
    pub const CREATE: u32 = 35;
}

const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const GETXATTR: u32 = 22;
const INIT: u32 = 26;
const GETLK: u32 = 31;
/// FORGET, INTERRUPT and BATCH_FORGET have no reply.
const UNANSWERED: [u32; 3] = [2, 36, 42];

const HEADER_BYTES: usize = 40;
const REQUEST_BYTES_MAX: usize = 256 << 10;
const WRITE_BYTES_MAX: u32 = 128 << 10;
const ROOT: u64 = 1;
const ENOENT: i32 = 2;
const EIO: i32 = 5;
const ERANGE: i32 = 34;
const ENOSYS: i32 = 38;
const ENODATA: i32 = 61;
const FATTR_SIZE: u32 = 8;
const FUSE_POSIX_LOCKS: u32 = 2;
const F_UNLCK: u32 = 2;

#[derive(Default)]
struct State {
    names: HashMap<Vec<u8>, u64>,
    /// Content by inode number, starting at 2.
    files: HashMap<u64, Vec<u8>>,
    /// Extended attributes by inode number and name.
    attributes: HashMap<(u64, Vec<u8>), Vec<u8>>,
    hung: Vec<u32>,
    /// File whose requests hang. `None`: all files.
    hung_file: Option<u64>,
    held: Vec<Vec<u8>>,
    /// Kinds of all answered requests, in order.
    answered: Vec<u32>,
    /// Kinds of requests that are answered with EIO.
    failing: Vec<u32>,
    /// Requests for locks come to the file system, as to that of a network. It grants all of them.
    serves_locks: bool,
}

/// A mounted file system. Unmounted on drop.
pub struct HungMount {
    folder: PathBuf,
    device: File,
    state: Arc<Mutex<State>>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HungMount {
    /// Mounts a file system with files of these names and sizes on a new folder.
    ///
    /// # Errors
    /// Fails with the output of mount(8).
    pub fn new(folder: &Path, files: &[(&str, usize)]) -> Result<HungMount> {
        HungMount::mount(folder, files, State::default())
    }

    /// As [`HungMount::new`], with a lock service that grants every lock.
    ///
    /// # Errors
    /// As there.
    pub fn with_locks(folder: &Path, files: &[(&str, usize)]) -> Result<HungMount> {
        let state = State {
            serves_locks: true,
            ..State::default()
        };
        HungMount::mount(folder, files, state)
    }

    fn mount(folder: &Path, files: &[(&str, usize)], mut state: State) -> Result<HungMount> {
        std::fs::create_dir_all(folder)?;
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = device.context("no /dev/fuse")?;
        for (number, (name, bytes)) in (ROOT + 1..).zip(files) {
            state.names.insert(name.as_bytes().to_vec(), number);
            state.files.insert(number, vec![0; *bytes]);
        }
        let state = Arc::new(Mutex::new(state));
        let mounted = Command::new("mount")
            .args(["-i", "-t", "fuse", "-o"])
            .arg("fd=0,rootmode=40000,user_id=0,group_id=0,allow_other")
            .arg("lunette-test")
            .arg(folder)
            .stdin(device.try_clone()?)
            .output()?;
        let errors = String::from_utf8_lossy(&mounted.stderr);
        ensure!(mounted.status.success(), "mount: {errors}");
        let (mut requests, of_thread) = (device.try_clone()?, Arc::clone(&state));
        std::thread::spawn(move || {
            let mut bytes = vec![0; REQUEST_BYTES_MAX];
            // read() fails after the unmount.
            while let Ok(length) = requests.read(&mut bytes) {
                let request = &bytes[..length];
                let mut state = lock(&of_thread);
                let is_meant = |file| file == u64_at(request, 16);
                if state.hung.contains(&u32_at(request, 4)) && state.hung_file.is_none_or(is_meant)
                {
                    state.held.push(request.to_vec());
                } else {
                    state.answer(&requests, request);
                }
            }
        });
        Ok(HungMount {
            folder: folder.to_owned(),
            device,
            state,
        })
    }

    /// Path of a file.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Stops answering requests of these kinds.
    pub fn hang(&self, kinds: &[u32]) {
        let mut state = lock(&self.state);
        state.hung = kinds.to_vec();
        state.hung_file = None;
    }

    /// Stops answering requests of these kinds for one file.
    pub fn hang_file(&self, name: &str, kinds: &[u32]) {
        let mut state = lock(&self.state);
        state.hung = kinds.to_vec();
        state.hung_file = state.names.get(name.as_bytes()).copied();
    }

    /// Fails requests of these kinds with EIO from now on. Without kinds, all requests succeed again.
    pub fn fail(&self, kinds: &[u32]) {
        lock(&self.state).failing = kinds.to_vec();
    }

    /// Ends the connection of the kernel to the file system, as the death of its server does. Requests fail from now on.
    ///
    /// # Errors
    /// umount(8) cannot be run.
    pub fn go_away(&self) -> Result<()> {
        // umount2(2), MNT_FORCE: "abort pending requests". The call itself fails, because files are open.
        let mut unmount = Command::new("umount");
        unmount.arg("-f").arg(&self.folder).output()?;
        Ok(())
    }

    /// Returns the number of requests that wait for a reply.
    pub fn held(&self) -> usize {
        lock(&self.state).held.len()
    }

    /// Kinds of all answered requests, in order.
    pub fn answered(&self) -> Vec<u32> {
        lock(&self.state).answered.clone()
    }

    /// Answers all waiting requests and resumes normal operation.
    pub fn release(&self) {
        let mut state = lock(&self.state);
        state.hung.clear();
        for request in std::mem::take(&mut state.held) {
            state.answer(&self.device, &request);
        }
    }

    /// Content of a file.
    pub fn content(&self, name: &str) -> Option<Vec<u8>> {
        let state = lock(&self.state);
        let number = state.names.get(name.as_bytes())?;
        state.files.get(number).cloned()
    }
}

impl Drop for HungMount {
    fn drop(&mut self) {
        self.release();
        let unmount = Command::new("umount").arg("-l").arg(&self.folder).output();
        unmount.ok();
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let found = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
    found.map_or(0, u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let found = bytes.get(at..at + 8).and_then(|b| b.try_into().ok());
    found.map_or(0, u64::from_ne_bytes)
}

/// Writes fields of a FUSE structure.
#[derive(Default)]
struct Fields(Vec<u8>);

impl Fields {
    fn u64s(mut self, values: &[u64]) -> Fields {
        for value in values {
            self.0.extend(value.to_ne_bytes());
        }
        self
    }

    fn u32s(mut self, values: &[u32]) -> Fields {
        for value in values {
            self.0.extend(value.to_ne_bytes());
        }
        self
    }

    /// `fuse_attr`.
    fn attributes(self, number: u64, size: u64) -> Fields {
        let mode = match number {
            ROOT => 0o040_755,
            _ => 0o100_644,
        };
        let fields = self.u64s(&[number, size, size.div_ceil(512), 0, 0, 0]);
        fields.u32s(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0])
    }
}

impl State {
    fn answer(&mut self, mut device: &File, request: &[u8]) {
        let (kind, unique) = (u32_at(request, 4), u64_at(request, 8));
        if UNANSWERED.contains(&kind) {
            return;
        }
        self.answered.push(kind);
        let body = request.get(HEADER_BYTES..).unwrap_or_default();
        let reply = match self.failing.contains(&kind) {
            true => Err(EIO),
            false => self.reply(kind, u64_at(request, 16), body),
        };
        let (errno, reply) = match reply {
            Ok(reply) => (0, reply),
            Err(errno) => (-errno, Vec::new()),
        };
        let mut bytes = Vec::new();
        bytes.extend((16 + reply.len() as u32).to_ne_bytes());
        bytes.extend(errno.to_ne_bytes());
        bytes.extend(unique.to_ne_bytes());
        bytes.extend(reply);
        // The write fails if the request was interrupted.
        device.write_all(&bytes).ok();
    }

    fn size(&self, number: u64) -> u64 {
        self.files.get(&number).map_or(0, |file| file.len() as u64)
    }

    fn entry(&self, number: u64) -> Fields {
        let fields = Fields::default().u64s(&[number, 0, 0, 0]).u32s(&[0, 0]);
        fields.attributes(number, self.size(number))
    }

    /// `fuse_init_out`.
    fn init(&self) -> Vec<u8> {
        let flags = match self.serves_locks {
            true => FUSE_POSIX_LOCKS,
            false => 0,
        };
        let fields = Fields::default().u32s(&[7, 31, 0, flags, 0, WRITE_BYTES_MAX, 1]);
        fields.u32s(&[0; 9]).0
    }

    fn reply(&mut self, kind: u32, number: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
        let name_from = |at: usize| {
            let name = body.get(at..).unwrap_or_default();
            name.split(|byte| *byte == 0).next().unwrap_or_default()
        };
        let attributes = |state: &State| {
            let fields = Fields::default().u64s(&[0]).u32s(&[0, 0]);
            fields.attributes(number, state.size(number)).0
        };
        let opened = |fields: Fields| fields.u64s(&[0]).u32s(&[0, 0]).0;
        match kind {
            INIT => Ok(self.init()),
            kind::LOOKUP => {
                let found = self.names.get(name_from(0)).ok_or(ENOENT)?;
                Ok(self.entry(*found).0)
            }
            kind::GETATTR => Ok(attributes(self)),
            kind::SETATTR => {
                if u32_at(body, 0) & FATTR_SIZE != 0
                    && let Some(file) = self.files.get_mut(&number)
                {
                    file.resize(u64_at(body, 16) as usize, 0);
                }
                Ok(attributes(self))
            }
            // The content stays for open files.
            kind::UNLINK => {
                self.names.remove(name_from(0)).ok_or(ENOENT)?;
                Ok(Vec::new())
            }
            kind::OPEN => Ok(opened(Fields::default())),
            kind::CREATE => {
                let number = ROOT + 1 + self.files.len() as u64;
                self.names.insert(name_from(16).to_vec(), number);
                self.files.insert(number, Vec::new());
                Ok(opened(self.entry(number)))
            }
            kind::READ => {
                let file = self.files.get(&number).ok_or(ENOENT)?;
                let from = (u64_at(body, 8) as usize).min(file.len());
                let end = (from + u32_at(body, 16) as usize).min(file.len());
                Ok(file[from..end].to_vec())
            }
            kind::WRITE => {
                let data = body.get(40..).unwrap_or_default();
                let file = self.files.get_mut(&number).ok_or(ENOENT)?;
                let from = u64_at(body, 8) as usize;
                let end = from + data.len();
                if file.len() < end {
                    file.resize(end, 0);
                }
                file[from..end].copy_from_slice(data);
                Ok(Fields::default().u32s(&[data.len() as u32, 0]).0)
            }
            STATFS => Ok(Fields::default()
                .u64s(&[1 << 20; 5])
                .u32s(&[4096, 255, 4096])
                .u32s(&[0; 7])
                .0),
            GETXATTR => {
                let key = (number, name_from(8).to_vec());
                let value = self.attributes.get(&key).ok_or(ENODATA)?;
                match u32_at(body, 0) as usize {
                    0 => Ok(Fields::default().u32s(&[value.len() as u32, 0]).0),
                    room if room < value.len() => Err(ERANGE),
                    _ => Ok(value.clone()),
                }
            }
            kind::SETXATTR => {
                let name = name_from(8).to_vec();
                let value = body.get(8 + name.len() + 1..).unwrap_or_default();
                let value = value.get(..u32_at(body, 0) as usize).unwrap_or_default();
                self.attributes.insert((number, name), value.to_vec());
                Ok(Vec::new())
            }
            GETLK => Ok(Fields::default().u64s(&[0, 0]).u32s(&[F_UNLCK, 0]).0),
            RELEASE | kind::FLUSH | kind::FSYNC | kind::FSYNCDIR | kind::SETLK => Ok(Vec::new()),
            _ => Err(ENOSYS),
        }
    }
}
