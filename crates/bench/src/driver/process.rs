//! Finds the process of this machine at the other end of a connection, so that the target's CPU time is not counted as foreign load.

use std::net::{SocketAddr, TcpStream};

use procfs::net::{TcpNetEntry, tcp, tcp6};
use procfs::process::{FDTarget, Process, all_processes};

/// Returns the ID of the process at the other end of the connection. Returns `None` if that process is on another machine, or belongs to
/// another user and is not visible.
pub fn at_other_end(stream: &TcpStream) -> Option<u32> {
    let same = |address: SocketAddr| (address.ip().to_canonical(), address.port());
    let ends = (
        same(stream.peer_addr().ok()?),
        same(stream.local_addr().ok()?),
    );
    let is_it = |one: &TcpNetEntry| (same(one.local_address), same(one.remote_address)) == ends;
    // An IPv6 listener that also accepts IPv4 has all its connections in the IPv6 table.
    let found = |table: Vec<TcpNetEntry>| table.into_iter().find(is_it);
    let socket = tcp().ok().and_then(found);
    let socket = socket.or_else(|| tcp6().ok().and_then(found))?;
    let has_it = |process: &Process| {
        let open = process.fd().into_iter().flatten().flatten();
        open.into_iter()
            .any(|one| matches!(one.target, FDTarget::Socket(inode) if inode == socket.inode))
    };
    let process = all_processes().ok()?.flatten().find(has_it)?;
    u32::try_from(process.pid).ok()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn the_process_that_accepted_is_found() {
        for address in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                // The machine has no IPv6.
                continue;
            };
            let port = listener.local_addr().unwrap().port();
            let host = match address {
                "[::1]:0" => "::1",
                // Both address families.
                _ => "127.0.0.1",
            };
            let stream = TcpStream::connect((host, port)).unwrap();
            let accepted = listener.accept().unwrap();
            assert_eq!(at_other_end(&stream), Some(std::process::id()), "{address}");
            drop(accepted);
        }
    }
}
