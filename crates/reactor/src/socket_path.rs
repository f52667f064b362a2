//! The path of a listening socket: detection and removal of the stale socket of a daemon that was killed.
//!
//! A connection of type `SOCK_DGRAM` to the file of a stream socket fails with `EPROTOTYPE` if a process has the socket, and with
//! `ECONNREFUSED` if none has. This is also right between bind(2) and listen(2), when `SOCK_STREAM` fails with `ECONNREFUSED`, and the
//! process gets no connection. Linking a socket from a temporary name would also close this gap, but getsockname(2) and `ss` would show
//! the temporary name, and the sandbox does not permit it in a folder that is made later.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, FlockOperation, Mode, OFlags, RenameFlags, flock, fstat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Device and inode of a file.
pub type FileId = (u64, u64);

/// Maximum wait for the lock of a folder. Daemons hold it for a far shorter time.
const LOCK_PATIENCE: Duration = Duration::from_millis(200);
const LOCK_PAUSE: Duration = Duration::from_millis(1);

/// Reason why no socket can be created at a path.
#[derive(Debug)]
pub enum Obstacle {
    /// A process has a socket at the path.
    InUse,
    /// Another kind of file is at the path.
    NotASocket,
    /// This process may not connect to the socket at the path.
    NoAccess(io::Error),
    /// A system call failed.
    Io(io::Error),
}

impl From<io::Error> for Obstacle {
    fn from(error: io::Error) -> Obstacle {
        Obstacle::Io(error)
    }
}

/// Lock on the folder of a socket, released when dropped. It is held while a stale socket is replaced, so that two daemons that start at
/// one path do not remove each other's socket.
#[derive(Debug)]
pub struct FolderLock {
    _file: Option<File>,
}

/// Locks the folder of a socket. Continues without a lock if the folder cannot be read or locked, or if another process holds the lock
/// longer than a daemon needs it: every user with read access to the folder can lock it.
pub fn lock_folder(path: &Path) -> FolderLock {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let locked = File::open(folder).ok().filter(|file| {
        let deadline = Instant::now() + LOCK_PATIENCE;
        loop {
            match flock(file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return true,
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                    std::thread::sleep(LOCK_PAUSE);
                }
                Err(Errno::WOULDBLOCK) => {
                    tracing::warn!(
                        folder = %folder.display(),
                        "another process holds a lock on the folder of a socket; continuing without the lock"
                    );
                    return false;
                }
                Err(_) => return false,
            }
        }
    });
    FolderLock { _file: locked }
}

/// Returns device and inode of the file at a path.
pub fn file_at(path: &Path) -> Option<FileId> {
    let found = std::fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

/// Returns true if a process has a socket at the path, even one that does not listen yet.
///
/// # Errors
/// Fails if there is no file, or if this process may not connect to it.
fn is_bound(path: &Path) -> io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    match rustix::net::connect(&probe, &SocketAddrUnix::new(path)?) {
        Ok(()) | Err(Errno::PROTOTYPE) => Ok(true),
        Err(Errno::CONNREFUSED) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// The file of a socket that no process has.
#[derive(Debug)]
struct Stale<'a> {
    path: &'a Path,
    /// `O_PATH` descriptor of the file. While it is open, no other file gets this inode.
    file: OwnedFd,
}

impl Stale<'_> {
    /// Returns the stale socket at a path, or `None` if the path is free.
    fn find(path: &Path) -> Result<Option<Stale<'_>>, Obstacle> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(Obstacle::Io(errno.into())),
        };
        let found = fstat(&file).map_err(io::Error::from)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
            return Err(Obstacle::NotASocket);
        }
        let is_own = found.st_uid == rustix::process::geteuid().as_raw();
        match is_bound(path) {
            Ok(true) => Err(Obstacle::InUse),
            Ok(false) => Ok(Some(Stale { path, file })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            // A daemon of the same user has not set the mode of its new socket yet.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && is_own => {
                Err(Obstacle::InUse)
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Err(Obstacle::NoAccess(error))
            }
            Err(error) => Err(Obstacle::Io(error)),
        }
    }

    /// Removes the file. Without the lock, another process may have replaced it: the other file is put back then.
    fn remove(self) -> Result<(), Obstacle> {
        let found = fstat(&self.file).map_err(io::Error::from)?;
        let aside = name_aside(self.path);
        match std::fs::rename(self.path, &aside) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            renamed => renamed?,
        }
        if file_at(&aside) == Some((found.st_dev, found.st_ino)) {
            return Ok(std::fs::remove_file(&aside)?);
        }
        rustix::fs::renameat_with(CWD, &aside, CWD, self.path, RenameFlags::NOREPLACE).ok();
        Err(Obstacle::InUse)
    }
}

/// Returns the name that a stale socket has while it is removed. The next removal replaces the file that a killed daemon left there.
fn name_aside(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".lunette-stale");
    path.with_file_name(name)
}

/// Removes the stale socket at a path, if there is one. The caller holds the lock of [`lock_folder`].
///
/// # Errors
/// Fails if a process has a socket at the path, if the file is not a socket, or if a system call fails.
pub fn remove_stale(path: &Path) -> Result<(), Obstacle> {
    Stale::find(path)?.map_or(Ok(()), Stale::remove)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn names(folder: &Path) -> Vec<OsString> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    }

    #[test]
    fn socket_that_replaced_the_stale_one_is_put_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        // Two daemons find the same stale socket, without a lock.
        let first = Stale::find(&path).unwrap().unwrap();
        let second = Stale::find(&path).unwrap().unwrap();
        first.remove().unwrap();
        let _listener = UnixListener::bind(&path).unwrap();
        assert!(matches!(second.remove(), Err(Obstacle::InUse)));
        UnixStream::connect(&path).unwrap();
        assert_eq!(names(folder.path()), ["s"]);
    }

    #[test]
    fn file_left_by_a_killed_removal_goes_with_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        std::fs::rename(&path, name_aside(&path)).unwrap();
        drop(UnixListener::bind(&path).unwrap());
        remove_stale(&path).unwrap();
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn sockets_of_every_type_are_bound_before_they_listen() {
        let folder = tempfile::tempdir().unwrap();
        for kind in [SocketType::STREAM, SocketType::SEQPACKET, SocketType::DGRAM] {
            let path = folder.path().join(format!("{kind:?}"));
            let socket = rustix::net::socket(AddressFamily::UNIX, kind, None).unwrap();
            rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            assert!(is_bound(&path).unwrap(), "{kind:?}");
            drop(socket);
            assert!(!is_bound(&path).unwrap(), "{kind:?}");
        }
    }
}
