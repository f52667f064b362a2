//! Listening TCP sockets. Control plane only.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};

/// Listen backlog, as in the standard library.
const BACKLOG: i32 = 128;

/// Opens a listening socket that does not block. `only_v6`: `[::]` does not include IPv4.
///
/// # Errors
/// If the address cannot be listened on.
pub fn listen_tcp(address: SocketAddr, only_v6: bool) -> io::Result<TcpListener> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    // Connections of a closed listener do not block its address.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if only_v6 && address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    Ok(TcpListener::from(socket))
}

/// Returns the listening ones of sockets from another process, with their addresses.
pub fn listening_tcp(sockets: Vec<OwnedFd>) -> impl Iterator<Item = (SocketAddr, TcpListener)> {
    sockets.into_iter().filter_map(|socket| {
        let is_listening = sockopt::socket_acceptconn(&socket).unwrap_or(false);
        let listener = TcpListener::from(socket);
        listener.set_nonblocking(true).ok()?;
        let address = listener.local_addr().ok()?;
        is_listening.then_some((address, listener))
    })
}

/// Writes the error of a TCP address that cannot be listened on, with a hint. `program` names a program that may use the port.
///
/// # Errors
/// If `f` fails.
pub fn write_listen_error(
    f: &mut fmt::Formatter<'_>,
    address: SocketAddr,
    error: &io::Error,
    program: &str,
) -> fmt::Result {
    write!(f, "cannot listen on {address}: {error}")?;
    match error.kind() {
        io::ErrorKind::AddrInUse => write!(
            f,
            "; hint: another {program} may use this port; choose another one"
        ),
        io::ErrorKind::AddrNotAvailable => {
            f.write_str("; hint: no interface of this machine has this address; see ip address")
        }
        io::ErrorKind::PermissionDenied => {
            f.write_str("; hint: ports below 1024 need CAP_NET_BIND_SERVICE")
        }
        _ => Ok(()),
    }
}
