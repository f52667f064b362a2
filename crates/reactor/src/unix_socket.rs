//! Listening Unix sockets: a stale socket file is replaced, a live one never stolen. Control plane only.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid, fchmod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::socket_path::{FileId, Obstacle, file_at, lock_folder, remove_stale};

/// Listen backlog: the system's limit, as in the standard library.
const BACKLOG: i32 = -1;

/// Error of listening on a socket.
#[derive(Debug)]
pub enum SocketError {
    /// Another process serves this path.
    InUse(PathBuf),
    /// The file at the path is not a socket.
    NotASocket(PathBuf),
    /// The kernel refused.
    Io(PathBuf, io::Error),
    /// Mode, owner or group could not be set.
    Rights(PathBuf, io::Error),
}

/// A socket that listens at a path.
#[derive(Debug)]
pub struct Bound {
    /// The listening socket.
    pub listener: UnixListener,
    /// File of the socket at its path.
    pub file: Option<FileId>,
}

/// Mode, owner and group of a socket. The kernel chooses those that are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    /// Permission bits.
    pub mode: Option<u16>,
    /// Number of the owner.
    pub owner: Option<u32>,
    /// Number of the group.
    pub group: Option<u32>,
}

impl std::fmt::Display for SocketError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SocketError::InUse(path) => write!(
                f,
                "another process serves socket {}; hint: stop it, or choose another path",
                path.display()
            ),
            SocketError::NotASocket(path) => {
                write!(
                    f,
                    "{} exists and is not a socket; hint: choose another path, or remove it",
                    path.display()
                )
            }
            SocketError::Rights(path, error) => {
                write!(
                    f,
                    "cannot set mode, owner or group of socket {}: {error}",
                    path.display()
                )?;
                match error.kind() {
                    io::ErrorKind::PermissionDenied => f.write_str(
                        "; hint: choose a group that the daemon's user is a member of, or give the daemon CAP_CHOWN and CAP_FOWNER",
                    ),
                    _ => Ok(()),
                }
            }
            SocketError::Io(path, error) => {
                write!(f, "cannot listen on socket {}: ", path.display())?;
                if error.kind() == io::ErrorKind::PermissionDenied {
                    return f.write_str(&access_hint(path));
                }
                write!(f, "{error}")?;
                match error.kind() {
                    io::ErrorKind::NotFound => {
                        f.write_str("; hint: create its directory, or choose another path")
                    }
                    io::ErrorKind::InvalidInput => {
                        f.write_str("; hint: a socket's path has at most 107 bytes")
                    }
                    _ => Ok(()),
                }
            }
        }
    }
}

impl std::error::Error for SocketError {}

/// Explains "Permission denied": the sandbox or the permissions of the folder, each with its remedy.
fn access_hint(path: &Path) -> String {
    sandbox::refusal(path, true).unwrap_or_else(|| {
        let user = sandbox::this_user();
        format!(
            "user {user} may not create it in its folder; hint: give that user write access to the folder and access to every directory \
             above it (chmod, chown, setfacl), or choose another path for `socket`"
        )
    })
}

impl SocketError {
    /// Returns true if a later attempt may succeed without a change of the configuration: the folder is missing, or another
    /// process serves the path.
    pub fn may_succeed_later(&self) -> bool {
        match self {
            SocketError::InUse(_) => true,
            SocketError::NotASocket(_) | SocketError::Rights(..) => false,
            SocketError::Io(_, error) => error.kind() == io::ErrorKind::NotFound,
        }
    }
}

/// Listening sockets of the previous process, by path.
#[derive(Debug, Default)]
pub struct TakenOverSockets(Vec<(PathBuf, UnixListener)>);

impl TakenOverSockets {
    /// Takes over the sockets of the previous process.
    pub fn take_over(&mut self, sockets: Vec<OwnedFd>) {
        let listening = sockets.into_iter().filter_map(|socket| {
            let is_listening = sockopt::socket_acceptconn(&socket).unwrap_or(false);
            let listener = UnixListener::from(socket);
            let path = listener.local_addr().ok()?.as_pathname()?.to_owned();
            is_listening.then_some((path, listener))
        });
        self.0 = listening.collect();
    }

    /// Returns the inherited socket of a path, or a new one.
    ///
    /// # Errors
    /// See [`bind_with`].
    pub fn bind(&mut self, path: &Path, rights: Rights) -> Result<Bound, SocketError> {
        if let Some(at) = self.0.iter().position(|(known, _)| known == path) {
            let (_, listener) = self.0.swap_remove(at);
            let has_socket_file = std::fs::symlink_metadata(path);
            if has_socket_file.is_ok_and(|found| found.file_type().is_socket()) {
                set_rights(path, rights)?;
                let file = file_at(path);
                return Ok(Bound { listener, file });
            }
        }
        match bind_with(path, rights) {
            // The path may be another name of an inherited socket.
            Err(SocketError::InUse(_)) if !self.0.is_empty() => {
                self.0.clear();
                bind_with(path, rights)
            }
            bound => bound,
        }
    }

    /// Closes unused sockets and removes their files.
    pub fn close_unused(&mut self) {
        for (path, listener) in self.0.drain(..) {
            drop(listener);
            let _lock = lock_folder(&path);
            // The socket of another process stays.
            remove_stale(&path).ok();
        }
    }
}

/// Listens on a path.
///
/// # Errors
/// Fails if another process listens there, if the file at the path is not a socket, or if the kernel refuses.
pub fn bind(path: &Path) -> Result<UnixListener, SocketError> {
    bind_with(path, Rights::default()).map(|bound| bound.listener)
}

/// Listens on a path with these rights. No other process can connect before the socket has them.
///
/// # Errors
/// Like [`bind`]. Also fails if the rights cannot be set.
pub fn bind_with(path: &Path, rights: Rights) -> Result<Bound, SocketError> {
    let io_error = |error| SocketError::Io(path.to_owned(), error);
    let lock = lock_folder(path);
    remove_stale(path).map_err(|obstacle| match obstacle {
        Obstacle::InUse => SocketError::InUse(path.to_owned()),
        Obstacle::NotASocket => SocketError::NotASocket(path.to_owned()),
        Obstacle::NoAccess(error) | Obstacle::Io(error) => io_error(error),
    })?;
    let socket = bind_socket(path, rights).map_err(|error| match error.kind() {
        // Another process was faster.
        io::ErrorKind::AddrInUse => SocketError::InUse(path.to_owned()),
        _ => io_error(error),
    })?;
    // No other daemon replaces the file of a bound socket, and none holds the lock.
    let file = file_at(path);
    drop(lock);
    let listening = set_rights(path, rights).and_then(|_| {
        rustix::net::listen(&socket, BACKLOG).map_err(|errno| io_error(errno.into()))
    });
    match listening {
        Ok(()) => Ok(Bound {
            listener: UnixListener::from(socket),
            file,
        }),
        Err(error) => {
            if file.is_some() && file_at(path) == file {
                std::fs::remove_file(path).ok();
            }
            Err(error)
        }
    }
}

/// Creates a socket at a path, without listening.
fn bind_socket(path: &Path, rights: Rights) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Linux gives the socket file the mode of the socket, less the umask. A new owner or group alone needs the default mode.
    if rights.mode.is_some() {
        fchmod(&socket, Mode::empty())?;
    }
    rustix::net::bind(&socket, &address)?;
    Ok(socket)
}

/// Sets mode, owner and group of a socket's file as far as they are given. Returns the previous ones.
///
/// # Errors
/// Fails if there is no socket at the path, or if the kernel refuses.
pub fn set_rights(path: &Path, rights: Rights) -> Result<Rights, SocketError> {
    let set = || -> io::Result<Rights> {
        // Another file at the path, or behind a symbolic link, must not get these rights.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        let found = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
            return Err(io::ErrorKind::NotFound.into());
        }
        if rights.owner.is_some() || rights.group.is_some() {
            let (owner, group) = (
                rights.owner.map(Uid::from_raw),
                rights.group.map(Gid::from_raw),
            );
            rustix::fs::chownat(&file, "", owner, group, AtFlags::EMPTY_PATH)?;
        }
        if let Some(mode) = rights.mode {
            // fchmod(2) refuses a descriptor of this kind, and chmod(2) by its name in /proc does not.
            let by_descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
            rustix::fs::chmod(by_descriptor, Mode::from_raw_mode(mode.into()))?;
        }
        Ok(Rights {
            mode: Some((found.st_mode & 0o777) as u16),
            owner: Some(found.st_uid),
            group: Some(found.st_gid),
        })
    };
    match rights == Rights::default() {
        true => Ok(rights),
        false => set().map_err(|error| SocketError::Rights(path.to_owned(), error)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn stale_socket_is_replaced_and_a_live_one_is_not_stolen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let first = bind(&path).unwrap();
        assert!(matches!(bind(&path), Err(SocketError::InUse(_))));
        drop(first);
        assert!(path.exists(), "the file is left behind, as after a crash");
        bind(&path).unwrap();
    }

    #[test]
    fn socket_that_does_not_listen_yet_is_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let rights = Rights {
            mode: Some(0o660),
            ..Rights::default()
        };
        let first = bind_socket(&path, rights).unwrap();
        let file = file_at(&path);
        for rights in [Rights::default(), rights] {
            assert!(matches!(
                bind_with(&path, rights),
                Err(SocketError::InUse(_))
            ));
        }
        assert_eq!(file_at(&path), file);
        set_rights(&path, rights).unwrap();
        rustix::net::listen(&first, BACKLOG).unwrap();
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn one_of_many_that_replace_a_stale_socket_gets_the_path() {
        const STARTERS: usize = 4;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let rights = Rights {
            mode: Some(0o600),
            ..Rights::default()
        };
        for round in 0..100 {
            // The previous round left a stale socket.
            let ready = std::sync::Barrier::new(STARTERS);
            let start = || {
                ready.wait();
                bind_with(&path, rights)
            };
            let all: Vec<_> = std::thread::scope(|scope| {
                let threads = [(); STARTERS].map(|()| scope.spawn(start));
                threads.into_iter().map(|one| one.join().unwrap()).collect()
            });
            let (won, lost): (Vec<_>, Vec<_>) = all.into_iter().partition(Result::is_ok);
            let in_use = |one: &_| matches!(one, Err(SocketError::InUse(_)));
            assert!(lost.iter().all(in_use), "round {round}: {lost:?}");
            assert_eq!(won.len(), 1, "round {round}");
            let winner = won.into_iter().next().unwrap().unwrap();
            assert_eq!(winner.file, file_at(&path), "round {round}");
            UnixStream::connect(&path).unwrap();
            winner.listener.accept().unwrap();
        }
    }

    #[test]
    fn socket_whose_line_is_full_is_in_use_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let _in_line = UnixStream::connect(&path).unwrap();
        assert!(matches!(bind(&path), Err(SocketError::InUse(_))));
    }

    #[test]
    fn file_in_the_way_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("precious");
        std::fs::write(&path, "data").unwrap();
        assert!(matches!(bind(&path), Err(SocketError::NotASocket(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "data");
    }

    #[test]
    fn missing_permission_names_the_key() {
        let denied = io::ErrorKind::PermissionDenied.into();
        let error = SocketError::Io("/srv/d0.sock".into(), denied).to_string();
        for part in ["/srv/d0.sock", "user ", "`socket`"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn only_a_missing_folder_and_a_live_socket_can_heal() {
        let dir = tempfile::tempdir().unwrap();
        let may_succeed_later = |path: &Path| bind(path).unwrap_err().may_succeed_later();
        assert!(may_succeed_later(&dir.path().join("missing/s")));
        let live = dir.path().join("live");
        let _listener = bind(&live).unwrap();
        assert!(may_succeed_later(&live));
        let file = dir.path().join("file");
        std::fs::write(&file, "data").unwrap();
        assert!(!may_succeed_later(&file), "a regular file");
        assert!(
            !may_succeed_later(&file.join("s")),
            "a file in place of the folder"
        );
        assert!(
            !may_succeed_later(&dir.path().join("n".repeat(200))),
            "too long"
        );
    }

    #[test]
    fn a_socket_has_its_mode_whatever_the_umask_and_never_more() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let mode = || std::fs::symlink_metadata(&path).unwrap().mode() & 0o777;
        let rights = |mode| Rights {
            mode: Some(mode),
            ..Rights::default()
        };
        // The file is polled from its first moment.
        let seen = std::thread::scope(|scope| {
            let watching = scope.spawn(|| {
                let mut seen = std::collections::BTreeSet::new();
                while !seen.contains(&0o640) {
                    seen.extend(std::fs::symlink_metadata(&path).map(|found| found.mode() & 0o777));
                }
                seen
            });
            let _listener = bind_with(&path, rights(0o640)).unwrap();
            watching.join().unwrap()
        });
        assert!(
            seen.iter().all(|mode| [0, 0o640].contains(mode)),
            "{seen:?}"
        );
        let _listener = bind_with(&path, rights(0o666)).unwrap();
        assert_eq!(mode(), 0o666);
        let before = set_rights(&path, rights(0o600)).unwrap();
        assert_eq!((before.mode, mode()), (Some(0o666), 0o600));
        UnixStream::connect(&path).unwrap();
        // A link in place of the socket is not followed.
        let other = dir.path().join("other");
        std::fs::write(&other, "data").unwrap();
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        let before = std::fs::metadata(&other).unwrap().mode();
        assert!(set_rights(&path, rights(0o777)).is_err());
        assert_eq!(std::fs::metadata(&other).unwrap().mode(), before);
    }

    #[test]
    fn an_owner_that_the_daemon_may_not_set_is_an_error_with_a_hint() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let rights = Rights {
            owner: Some(4711),
            group: Some(4712),
            ..Rights::default()
        };
        match bind_with(&path, rights) {
            Ok(_) => {
                use std::os::unix::fs::MetadataExt;
                let found = std::fs::symlink_metadata(&path).unwrap();
                assert_eq!((found.uid(), found.gid()), (4711, 4712));
            }
            Err(error) => {
                assert!(error.to_string().contains("hint: "), "{error}");
                assert!(!path.exists());
            }
        }
    }

    #[test]
    fn missing_directory_is_named() {
        let error = bind(Path::new("/nonexistent-directory/s"))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("/nonexistent-directory/s") && error.contains("create its directory"),
            "{error}"
        );
    }
}
