//! What vhost-user exports share: their sockets.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;

use virtio_device::VirtioDevice;

use super::Endpoint;
use crate::running::Inherited;

pub(super) fn listen(
    server: &vhost_user::Server,
    device: Arc<dyn VirtioDevice>,
    path: &Path,
    inherited: Option<Inherited>,
) -> Result<Endpoint, String> {
    match inherited {
        None => match server.listen(path, device) {
            Ok(true) => Ok(Endpoint::Path(path.to_owned())),
            Ok(false) => Ok(Endpoint::Waiting),
            Err(error) => Err(error.to_string()),
        },
        Some(inherited) => serve_inherited(server, device, inherited.socket)
            .map_err(|error| format!("cannot serve the inherited descriptor: {error}")),
    }
}

/// Programs that start back ends pass either kind of socket; the kernel tells which it is.
fn serve_inherited(
    server: &vhost_user::Server,
    device: Arc<dyn VirtioDevice>,
    socket: OwnedFd,
) -> std::io::Result<Endpoint> {
    if rustix::net::sockopt::socket_acceptconn(&socket)? {
        server.listen_on(UnixListener::from(socket), device)?;
        Ok(Endpoint::Listening)
    } else {
        server.serve_on(UnixStream::from(socket), device)?;
        Ok(Endpoint::Connection)
    }
}
