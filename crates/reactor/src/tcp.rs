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

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    struct ListenError(io::Error);

    impl fmt::Display for ListenError {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write_listen_error(f, ([192, 0, 2, 1], 860).into(), &self.0, "target program")
        }
    }

    #[test]
    fn errors_have_a_hint_for_their_cause() {
        for (kind, hint) in [
            (
                io::ErrorKind::AddrInUse,
                "another target program may use this port",
            ),
            (
                io::ErrorKind::AddrNotAvailable,
                "no interface of this machine has this address",
            ),
            (io::ErrorKind::PermissionDenied, "CAP_NET_BIND_SERVICE"),
        ] {
            let message = ListenError(kind.into()).to_string();
            assert!(message.starts_with("cannot listen on 192.0.2.1:860: "));
            assert!(
                message.contains("; hint: ") && message.contains(hint),
                "{message}"
            );
        }
    }

    #[test]
    fn only_listening_sockets_are_taken_over() {
        let listener = listen_tcp(([127, 0, 0, 1], 0).into(), false).unwrap();
        let address = listener.local_addr().unwrap();
        let client = TcpStream::connect(address).unwrap();
        let taken_over: Vec<_> = listening_tcp(vec![client.into(), listener.into()]).collect();
        let [(at, listener)] = &taken_over[..] else {
            panic!("{taken_over:?}");
        };
        assert_eq!(*at, address);
        listener.accept().unwrap();
        assert_eq!(
            listener.accept().unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
    }
}
