//! Descriptors from a service manager (`sd_listen_fds(3)`), from number 3 on. Listening sockets are assigned to the control socket or
//! an export by their bound path. Descriptors of a handover have their own names.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use config::{Config, ExportConfig};
use daemon::{Handover, Inherited, InheritedControl};
use rustix::net::{AddressFamily, SocketAddrUnix};

use crate::failure::Failure;
use crate::program::inherited_descriptor;

/// First descriptor from the service manager.
const FIRST: i32 = 3;

/// Descriptors of the start by origin.
#[derive(Debug, Default)]
pub struct Descriptors {
    /// Control socket of a socket unit.
    pub control: Option<InheritedControl>,
    /// Sockets of exports, from socket units.
    pub exports: Vec<Inherited>,
    /// Descriptors from the previous daemon.
    pub handover: Handover,
}

pub fn take(config: &Config, usual_control: Option<&Path>) -> Result<Descriptors, Failure> {
    let value = |name| std::env::var(name).ok();
    let count = count_of(
        value("LISTEN_PID").as_deref(),
        value("LISTEN_FDS").as_deref(),
        std::process::id(),
    );
    let names = value("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let (mut sockets, mut handover) = (Vec::new(), Handover::default());
    for index in 0..count {
        let descriptor = inherited_descriptor(FIRST + index)?;
        let name = names.next().unwrap_or_default();
        sockets.extend(handover.add(name, descriptor).err());
    }
    Ok(Descriptors {
        handover,
        ..assign(sockets, config, usual_control)?
    })
}

/// Number of descriptors for this process. Descriptors passed to a parent are ignored.
fn count_of(pid: Option<&str>, count: Option<&str>, own: u32) -> i32 {
    let mine = pid.and_then(|pid| pid.parse().ok()) == Some(own);
    let count = count.and_then(|count| count.parse().ok());
    count.filter(|count| mine && *count > 0).unwrap_or(0)
}

fn assign(
    sockets: Vec<OwnedFd>,
    config: &Config,
    usual_control: Option<&Path>,
) -> Result<Descriptors, Failure> {
    let mut descriptors = Descriptors::default();
    let same = |path: &Path, bound: &Path| std::path::absolute(path).is_ok_and(|p| p == bound);
    let control = config.control.as_deref().or(usual_control);
    for socket in sockets {
        let bound = path_of(&socket)?;
        if control.is_some_and(|control| same(control, &bound)) {
            let listener = UnixListener::from(socket);
            listener.set_nonblocking(true)?;
            descriptors.control = Some(InheritedControl {
                path: bound,
                listener,
            });
            continue;
        }
        let mut exports = config.exports().filter(|export| !export.shares_socket());
        let has_socket = |export: &&ExportConfig| {
            let socket = export.socket.as_ref();
            socket.is_some_and(|socket| same(socket, &bound))
        };
        match exports.find(has_socket) {
            Some(export) => descriptors.exports.push(Inherited {
                export: export.name.clone(),
                socket,
            }),
            None => {
                return Err(Failure::because(format!(
                    "the service manager passes the socket {}, which belongs neither to the control interface nor to an export; hint: add it to the configuration, or remove it from the socket unit",
                    bound.display()
                )));
            }
        }
    }
    Ok(descriptors)
}

/// Returns the path that a socket is bound to.
fn path_of(socket: &OwnedFd) -> Result<PathBuf, Failure> {
    let refused =
        |why: String| Failure::because(format!("descriptor passed by the service manager: {why}"));
    let address = rustix::net::getsockname(socket.as_fd())
        .map_err(|errno| refused(format!("{errno}; only sockets can be served")))?;
    if address.address_family() != AddressFamily::UNIX {
        return Err(refused("only Unix sockets can be passed".to_owned()));
    }
    let address = SocketAddrUnix::try_from(address).map_err(|errno| refused(errno.to_string()))?;
    let path = address.path_bytes().unwrap_or_default();
    match std::str::from_utf8(path) {
        Ok(path) if !path.is_empty() => Ok(PathBuf::from(path)),
        _ => Err(refused("the socket is not bound to a path".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use config::{Flags, Surroundings, parse};

    use super::*;

    #[test]
    fn descriptors_are_for_the_process_that_they_were_passed_to() {
        assert_eq!(count_of(Some("7"), Some("2"), 7), 2);
        assert_eq!(count_of(Some("8"), Some("2"), 7), 0);
        assert_eq!(count_of(None, Some("2"), 7), 0);
        assert_eq!(count_of(Some("7"), Some("-1"), 7), 0);
        assert_eq!(count_of(Some("7"), None, 7), 0);
    }

    #[test]
    fn sockets_are_distinguished_by_path() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let flags = Flags {
            disk: vec!["d0=ram:1M".to_owned()],
            vhost_blk: vec![format!("d0:{}", at("d0.sock").display())],
            ..Flags::default()
        };
        let config = parse(None, &flags, &Surroundings::of_this_process()).unwrap();
        let bind = |name: &str| OwnedFd::from(UnixListener::bind(at(name)).unwrap());
        let sockets = vec![bind("d0.sock"), bind("control.sock")];
        let descriptors = assign(sockets, &config, Some(&at("control.sock"))).unwrap();
        assert_eq!(descriptors.exports[0].export, "d0");
        assert_eq!(descriptors.control.unwrap().path, at("control.sock"));

        match assign(vec![bind("other.sock")], &config, None) {
            Err(Failure::Reasons(reasons)) => assert!(reasons[0].contains("other.sock")),
            other => panic!("{other:?}"),
        }
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(assign(vec![tcp.into()], &config, None).is_err());
    }
}
