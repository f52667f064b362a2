//! Sockets of vhost-user exports.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use config::{ExportConfig, SocketRights, group_id, user_id};
use reactor::Rights;
use virtio_device::VirtioDevice;

use super::Endpoint;
use crate::running::Inherited;

pub(super) fn listen(
    server: &vhost_user::Server,
    device: Arc<dyn VirtioDevice>,
    export: &ExportConfig,
    inherited: Option<Inherited>,
) -> Result<Endpoint, String> {
    let (path, rights) = (export.socket_path(), &export.rights);
    match inherited {
        None => match server.listen_with(path, numbers(rights)?, device) {
            Ok(true) => Ok(Endpoint::Path(path.to_owned())),
            Ok(false) => Ok(Endpoint::Waiting),
            Err(error) => Err(error.to_string()),
        },
        Some(_) if !rights.is_default() => Err(
            "socket_mode, socket_owner and socket_group cannot be set on an inherited socket; \
             hint: remove them, and use SocketMode=, SocketUser= and SocketGroup= of the socket unit"
                .to_owned(),
        ),
        Some(inherited) => serve_inherited(server, device, inherited.socket)
            .map_err(|error| format!("cannot serve the inherited descriptor: {error}")),
    }
}

/// Resolves user and group names.
///
/// # Errors
/// If a name is unknown.
pub(crate) fn numbers(rights: &SocketRights) -> Result<Rights, String> {
    let owner = rights.owner.as_deref().map(|user| {
        user_id(user).ok_or_else(|| format!("socket_owner: /etc/passwd has no user `{user}`"))
    });
    let group = rights.group.as_deref().map(|group| {
        group_id(group).ok_or_else(|| format!("socket_group: /etc/group has no group `{group}`"))
    });
    Ok(Rights {
        mode: rights.mode,
        owner: owner.transpose()?,
        group: group.transpose()?,
    })
}

/// Serves an inherited socket, listening or connected. Programs that start back ends pass either.
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
