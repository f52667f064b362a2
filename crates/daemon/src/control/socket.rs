//! A Unix socket at a path. It has its mode (0600 unless other users are admitted) from the start. A stale socket is replaced, a live one
//! never.
//!
//! A lock on the folder serializes daemons that start at the same time ([`reactor::remove_stale`]).

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use reactor::{FileId, Obstacle, file_at, lock_folder};
use rustix::fs::{Mode, fchmod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

/// Reason why a socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another process serves the socket.
    #[error(
        "{} is in use by another daemon; hint: stop that daemon, or choose another path",
        path.display()
    )]
    InUse {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The path has a file that is not a socket.
    #[error("{} exists and is not a socket; hint: move it away, or choose another path", path.display())]
    NotASocket {
        /// Path of the file.
        path: PathBuf,
    },
    /// The folder or the socket could not be created.
    #[error("cannot {operation} {}: {}", path.display(), reason(path, source))]
    System {
        /// The failed operation.
        operation: &'static str,
        /// Path of the socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Explains "Permission denied": the sandbox or the folder's permissions, with a remedy.
fn reason(path: &Path, error: &io::Error) -> String {
    if error.kind() != io::ErrorKind::PermissionDenied {
        return error.to_string();
    }
    sandbox::refusal(path, true).unwrap_or_else(|| {
        let user = sandbox::this_user();
        format!(
            "user {user} may not create it in its folder; hint: give that user write access to the folder and access to every directory \
             above it (chmod, chown, setfacl), or choose another path for `control`"
        )
    })
}

/// A listening socket. Dropping it removes its path.
#[derive(Debug)]
pub struct Bound {
    /// Absent after the socket was handed over.
    listener: Option<UnixListener>,
    path: PathBuf,
    /// File of this socket. Another socket at the same path stays.
    identity: Option<FileId>,
}

/// A control socket that is handed over.
#[derive(Debug)]
pub struct ControlSocket {
    /// The listening socket.
    pub socket: OwnedFd,
    /// The path stays: the parent process listens there.
    pub is_inherited: bool,
}

impl ControlSocket {
    fn path(&self) -> Option<PathBuf> {
        let at = rustix::net::getsockname(&self.socket).ok()?;
        let at = SocketAddrUnix::try_from(at).ok()?;
        Some(PathBuf::from(OsStr::from_bytes(at.path_bytes()?)))
    }

    fn is_at(&self, path: &Path) -> bool {
        let is_listening = sockopt::socket_acceptconn(&self.socket).unwrap_or(false);
        let is_there =
            || std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
        is_listening && self.path().is_some_and(|at| same(&at, path)) && is_there()
    }

    /// Closes an unneeded socket and removes its file.
    fn close(self) {
        let path = self.path().filter(|_| !self.is_inherited);
        drop(self);
        if let Some(path) = path {
            let _lock = lock_folder(&path);
            // A live socket stays. A failure is ignored.
            remove_stale(&path).ok();
        }
    }
}

fn same(one: &Path, other: &Path) -> bool {
    let absolute = |path| std::path::absolute(path).ok();
    absolute(one).is_some() && absolute(one) == absolute(other)
}

impl Bound {
    /// Wraps an inherited listening socket. Its path stays.
    pub fn inherited(path: PathBuf, listener: UnixListener) -> Bound {
        Bound {
            listener: Some(listener),
            path,
            identity: None,
        }
    }

    /// Returns a duplicate of the listener. The path is still removed with `self`.
    pub fn listener(&self) -> io::Result<UnixListener> {
        match &self.listener {
            Some(listener) => listener.try_clone(),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Hands over the socket, which stays at its path.
    pub fn hand_over(mut self) -> Option<ControlSocket> {
        let is_inherited = self.identity.take().is_none();
        let socket = self.listener.take()?.into();
        Some(ControlSocket {
            socket,
            is_inherited,
        })
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if self.identity.is_some() && file_at(&self.path) == self.identity {
            // The file may not exist any more. A failure cannot be handled here.
            let _removed = std::fs::remove_file(&self.path);
        }
    }
}

/// Users that may connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// The socket's owner.
    Owner,
    /// All users. The server checks each peer.
    All,
}

impl Audience {
    fn mode(self) -> Mode {
        match self {
            Audience::Owner => Mode::RUSR | Mode::WUSR,
            Audience::All => Mode::from_raw_mode(0o666),
        }
    }
}

/// Returns a listening socket at `path`: the one handed over, or a new one. Creates the folder if needed.
pub fn bind(
    path: &Path,
    audience: Audience,
    handed_over: Option<ControlSocket>,
) -> Result<Bound, BindError> {
    let mode = audience.mode();
    let is_ours = |one: &ControlSocket| {
        one.is_at(path) && (one.is_inherited || rustix::fs::chmod(path, mode).is_ok())
    };
    match handed_over {
        Some(one) if is_ours(&one) => {
            let listener = UnixListener::from(one.socket);
            let mut bound = Bound::inherited(path.to_owned(), listener);
            bound.identity = file_at(path).filter(|_| !one.is_inherited);
            return Ok(bound);
        }
        Some(other) => other.close(),
        None => {}
    }
    let system = |operation| {
        move |source: io::Error| BindError::System {
            operation,
            path: path.to_owned(),
            source,
        }
    };
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    if !folder.is_dir() {
        std::fs::create_dir_all(folder).map_err(system("create the folder of"))?;
    }
    let _lock = lock_folder(path);
    remove_stale(path)?;

    let (listener, file) = listen(path, mode).map_err(system("listen on"))?;
    Ok(Bound {
        listener: Some(listener),
        path: path.to_owned(),
        identity: file,
    })
}

/// Removes the stale socket at a path. The caller holds the lock of [`lock_folder`].
fn remove_stale(path: &Path) -> Result<(), BindError> {
    reactor::remove_stale(path).map_err(|obstacle| {
        let path = path.to_owned();
        match obstacle {
            Obstacle::InUse | Obstacle::NoAccess(_) => BindError::InUse { path },
            Obstacle::NotASocket => BindError::NotASocket { path },
            Obstacle::Io(source) => BindError::System {
                operation: "listen on",
                path,
                source,
            },
        }
    })
}

fn listen(path: &Path, mode: Mode) -> io::Result<(UnixListener, Option<FileId>)> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Linux gives the socket file this mode, so no other user can connect in between.
    fchmod(&socket, mode)?;
    rustix::net::bind(&socket, &address)?;
    let file = file_at(path);
    // The umask may have removed bits, which are restored.
    rustix::fs::chmod(path, mode)?;
    // Clients wait in a long listen queue instead of failing with EAGAIN.
    rustix::net::listen(&socket, 1024)?;
    Ok((UnixListener::from(socket), file))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::FlockOperation;

    use super::*;

    fn bind_own(path: &Path) -> Result<Bound, BindError> {
        bind(path, Audience::Owner, None)
    }

    #[test]
    fn missing_permission_names_the_key() {
        let error = BindError::System {
            operation: "listen on",
            path: "/srv/control.sock".into(),
            source: io::ErrorKind::PermissionDenied.into(),
        };
        let error = error.to_string();
        for part in ["/srv/control.sock", "user ", "`control`"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn only_the_owner_may_connect() {
        let folder = tempfile::tempdir().unwrap();
        let bound = bind_own(&folder.path().join("new/s")).unwrap();
        let mode = std::fs::metadata(bound.path())
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn umask_does_not_restrict_a_socket_with_groups() {
        let folder = tempfile::tempdir().unwrap();
        let before = rustix::process::umask(Mode::from_raw_mode(0o077));
        let bound = bind(&folder.path().join("s"), Audience::All, None);
        rustix::process::umask(before);
        let mode = std::fs::metadata(bound.unwrap().path())
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o666);
    }

    #[test]
    fn a_live_socket_is_never_stolen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = bind_own(&path).unwrap();
        assert!(matches!(bind_own(&path), Err(BindError::InUse { .. })));
        drop(first);
        assert!(!path.exists());
    }

    #[test]
    fn live_socket_with_a_full_backlog_is_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = bind_own(&path).unwrap();
        let listener = first.listener().unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let mut line = Vec::new();
        for _ in 0..2 {
            line.push(std::os::unix::net::UnixStream::connect(&path).unwrap());
        }
        let flags = SocketFlags::NONBLOCK;
        let kind = SocketType::STREAM;
        let next = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        let address = SocketAddrUnix::new(&path).unwrap();
        rustix::net::connect(&next, &address).expect_err("there is room in the line");
        assert!(matches!(bind_own(&path), Err(BindError::InUse { .. })));
    }

    #[test]
    fn a_socket_that_does_not_listen_yet_is_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&first, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        assert!(matches!(bind_own(&path), Err(BindError::InUse { .. })));
        rustix::net::listen(&first, 1).unwrap();
        std::os::unix::net::UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        bind_own(&path).unwrap();

        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(bind_own(&path), Err(BindError::NotASocket { .. })));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn foreign_lock_does_not_block_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let held = std::fs::File::open(folder.path()).unwrap();
        rustix::fs::flock(&held, FlockOperation::LockExclusive).unwrap();
        bind_own(&folder.path().join("s")).unwrap();
    }

    #[test]
    fn foreign_socket_at_our_path_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = bind_own(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = bind_own(&path).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
    }

    #[test]
    fn socket_handed_over_is_removed_by_the_last_daemon() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let socket = bind_own(&path).unwrap().hand_over();
        let _in_line = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let next = bind(&path, Audience::All, socket).unwrap();
        let mode = |path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o666);
        next.listener().unwrap().accept().unwrap();
        // The configuration has another path now.
        let other = folder.path().join("other");
        let other = bind(&other, Audience::Owner, next.hand_over()).unwrap();
        assert!(other.path().exists() && other.path().ends_with("other"));
        assert!(!path.exists());
        // A socket without a path is not used, and a stale one is replaced.
        let first = bind_own(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let next = bind(&path, Audience::Owner, first.hand_over()).unwrap();
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        drop(next);
        assert!(!path.exists());
    }

    #[test]
    fn inherited_socket_keeps_its_path_after_every_handover() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let mut bound = Bound::inherited(path.clone(), listener);
        for _ in 0..2 {
            let socket = bound.hand_over().unwrap();
            assert!(socket.is_inherited);
            bound = bind(&path, Audience::Owner, Some(socket)).unwrap();
        }
        drop(bound);
        assert!(path.exists());
    }
}
