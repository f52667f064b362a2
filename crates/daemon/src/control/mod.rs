//! The control socket: HTTP/JSON over a Unix socket, one file per resource.

use std::path::PathBuf;

/// Where the control socket is when nothing is said: `/run/lunette/lunette.sock` for root,
/// `$XDG_RUNTIME_DIR/lunette.sock` for everybody else; `None` where that is not set.
pub fn default_socket() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some(PathBuf::from("/run/lunette/lunette.sock"));
    }
    let folder = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty())?;
    Some(PathBuf::from(folder).join("lunette.sock"))
}
