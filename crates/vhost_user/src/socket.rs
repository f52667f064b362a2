//! The listening socket's file: a stale one is replaced, a live one never stolen.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

/// Why a socket could not be listened on.
#[derive(Debug)]
pub enum SocketError {
    /// Another process serves this path.
    InUse(PathBuf),
    /// Something that is no socket is in the way.
    NotASocket(PathBuf),
    /// The kernel refused.
    Io(PathBuf, io::Error),
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
            SocketError::Io(path, error) => {
                write!(f, "cannot listen on socket {}: ", path.display())?;
                if error.kind() == io::ErrorKind::PermissionDenied {
                    return f.write_str(&no_access(path));
                }
                write!(f, "{error}")?;
                match error.kind() {
                    io::ErrorKind::NotFound => f.write_str(" (does its directory exist?)"),
                    io::ErrorKind::InvalidInput => {
                        f.write_str(" (a socket's path has at most 107 bytes)")
                    }
                    _ => Ok(()),
                }
            }
        }
    }
}

impl std::error::Error for SocketError {}

/// Explains "Permission denied": the sandbox or the permissions of the folder, each with its remedy.
fn no_access(path: &Path) -> String {
    sandbox::refusal(path, true).unwrap_or_else(|| {
        let user = rustix::process::geteuid().as_raw();
        format!(
            "user {user} may not create it in its folder; hint: give that user write access to the folder and access to every directory \
             above it (chmod, chown, setfacl), or choose another path for `socket`"
        )
    })
}

impl SocketError {
    /// Returns true if a later attempt may succeed without a change of the configuration: the folder is missing, or another
    /// process serves the path.
    pub(crate) fn can_heal(&self) -> bool {
        match self {
            SocketError::InUse(_) => true,
            SocketError::NotASocket(_) => false,
            SocketError::Io(_, error) => error.kind() == io::ErrorKind::NotFound,
        }
    }
}

/// Sockets at which another process has listened, by their paths.
#[derive(Debug, Default)]
pub(crate) struct InheritedSockets(Vec<(PathBuf, UnixListener)>);

impl InheritedSockets {
    pub fn inherit(&mut self, sockets: Vec<OwnedFd>) {
        let listening = sockets.into_iter().filter_map(|socket| {
            let is_listening = sockopt::socket_acceptconn(&socket).unwrap_or(false);
            let listener = UnixListener::from(socket);
            let path = listener.local_addr().ok()?.as_pathname()?.to_owned();
            is_listening.then_some((path, listener))
        });
        self.0 = listening.collect();
    }

    /// What is inherited for a path, or a new socket.
    pub fn bind(&mut self, path: &Path) -> Result<UnixListener, SocketError> {
        if let Some(at) = self.0.iter().position(|(known, _)| known == path) {
            let (_, listener) = self.0.swap_remove(at);
            let is_there = std::fs::symlink_metadata(path);
            if is_there.is_ok_and(|found| found.file_type().is_socket()) {
                return Ok(listener);
            }
        }
        match bind(path) {
            // It may be one of these, by another name.
            Err(SocketError::InUse(_)) if !self.0.is_empty() => {
                self.0.clear();
                bind(path)
            }
            bound => bound,
        }
    }

    /// Those that nobody needs go, with their files.
    pub fn forget(&mut self) {
        for (path, listener) in self.0.drain(..) {
            drop(listener);
            // Another one that listens there answers.
            if connect_at_once(&path).is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused) {
                std::fs::remove_file(&path).ok();
            }
        }
    }
}

/// Listens on a path.
///
/// # Errors
/// When another process listens there, something else is in the way, or the kernel refuses.
pub fn bind(path: &Path) -> Result<UnixListener, SocketError> {
    let io_error = |error| SocketError::Io(path.to_owned(), error);
    match std::fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(SocketError::NotASocket(path.to_owned()));
        }
        Ok(_) => match connect_at_once(path) {
            // Its owner sees a client that comes and goes.
            Ok(()) => return Err(SocketError::InUse(path.to_owned())),
            // Its line is full.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(SocketError::InUse(path.to_owned()));
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(io_error)?;
            }
            Err(error) => return Err(io_error(error)),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(io_error(error)),
    }
    UnixListener::bind(path).map_err(|error| match error.kind() {
        // Somebody was faster than us.
        io::ErrorKind::AddrInUse => SocketError::InUse(path.to_owned()),
        _ => io_error(error),
    })
}

/// Tells whether anybody serves there, without waiting.
///
/// # Errors
/// What the system says; `WouldBlock`: the line is full, so somebody does.
pub fn connect_at_once(path: &Path) -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok(rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?)
}

#[cfg(test)]
mod tests {
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
    fn socket_whose_line_is_full_is_in_use_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let _in_line = std::os::unix::net::UnixStream::connect(&path).unwrap();
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
        let can_heal = |path: &Path| bind(path).unwrap_err().can_heal();
        assert!(can_heal(&dir.path().join("missing/s")));
        let live = dir.path().join("live");
        let _listener = bind(&live).unwrap();
        assert!(can_heal(&live));
        let file = dir.path().join("file");
        std::fs::write(&file, "data").unwrap();
        assert!(!can_heal(&file), "a regular file");
        assert!(!can_heal(&file.join("s")), "a file in place of the folder");
        assert!(!can_heal(&dir.path().join("n".repeat(200))), "too long");
    }

    #[test]
    fn missing_directory_is_named() {
        let error = bind(Path::new("/nonexistent-directory/s"))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("/nonexistent-directory/s") && error.contains("directory exist"),
            "{error}"
        );
    }
}
