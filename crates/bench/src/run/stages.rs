//! Latencies of stages, from the Lunette daemon that serves a subject.

use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use control::ExportStatus;
use latency::{Latencies, Snapshot};
use nbd::address::ServerAddress;

use crate::driver::{Kind, Subject, UnitAddress, parse_address};

/// Reads the latencies of the subject's Lunette daemon, if it is one.
pub(super) fn read(subject: Option<&Subject>) -> Option<Snapshot> {
    control::get(&control_of(subject?)?, "/v1/latency").ok()
}

/// Returns the control socket; by default the usual one, which may belong to another daemon.
fn control_of(subject: &Subject) -> Option<PathBuf> {
    if subject.kind == Kind::File {
        return None;
    }
    let usual = || control::default_socket().filter(|socket| socket.exists());
    subject.control.clone().or_else(usual)
}

/// Checks that the daemon of an explicit control socket runs and has the export.
pub(super) fn check_export(subject: &Subject) -> Result<()> {
    let Some(socket) = &subject.control else {
        return Ok(());
    };
    if subject.kind == Kind::File {
        return Ok(());
    }
    let named = || format!("{}: control={}", subject.name, socket.display());
    let status: control::Status = control::get(socket, "/v1/status").with_context(named)?;
    ensure!(
        export_of(subject, &status).is_some(),
        "{}: that daemon has no export {}",
        named(),
        subject.path.display()
    );
    Ok(())
}

fn export_of(subject: &Subject, status: &control::Status) -> Option<String> {
    if subject.kind == Kind::Iscsi {
        let place = UnitAddress::parse(&subject.path.to_string_lossy()).ok()?;
        let mut named = status.exports.iter().map(|export| &export.name);
        return named
            .find(|name| iscsi_name::is_same(name, &place.target))
            .cloned();
    }
    let mut exports = status.exports.iter();
    let export = if subject.kind == Kind::Nbd {
        let address = parse_address(&subject.path.to_string_lossy()).ok()?;
        // Clients may see the export by another name than the daemon's.
        let of_server: Vec<&ExportStatus> = exports
            .filter(|one| one.kind == "nbd" && is_served_at(one, &address.server))
            .collect();
        let find = |matches: &dyn Fn(&ExportStatus) -> bool| {
            of_server.iter().copied().find(|one| matches(one))
        };
        let only = of_server.first().copied().filter(|_| of_server.len() == 1);
        find(&|one| one.name == address.export)
            .or_else(|| find(&|one| one.luns.iter().any(|lun| lun.disk == address.export)))
            .or(only)?
    } else {
        exports.find(|one| has_socket(one, &subject.path))?
    };
    Some(export.name.clone())
}

fn has_socket(export: &ExportStatus, path: &Path) -> bool {
    let resolved = |path: &Path| path.canonicalize().ok();
    let socket = export.socket.as_deref().and_then(resolved);
    socket.is_some() && socket == resolved(path)
}

/// Returns true if an NBD export of a daemon on this host is served at an address.
fn is_served_at(export: &ExportStatus, server: &ServerAddress) -> bool {
    let (host, port) = match server {
        ServerAddress::Unix(path) => return has_socket(export, path),
        ServerAddress::Tcp { host, port } => (host.as_str(), *port),
    };
    let wanted: Vec<SocketAddr> = match (host, port).to_socket_addrs() {
        Ok(addresses) => addresses.collect(),
        Err(_) => return false,
    };
    let mut bound = export.addresses.iter().filter_map(|one| one.parse().ok());
    bound.any(|bound: SocketAddr| {
        let is_same = |one: &SocketAddr| match bound.ip().is_unspecified() {
            true => is_of_this_host(*one),
            false => bound.ip() == one.ip(),
        };
        wanted
            .iter()
            .any(|one| one.port() == bound.port() && is_same(one))
    })
}

/// Returns true if an interface of this host has the IP address. The system binds a socket to such an address only.
fn is_of_this_host(mut address: SocketAddr) -> bool {
    address.set_port(0);
    UdpSocket::bind(address).is_ok()
}

/// Returns the latencies of the subject's export since `before`.
pub(super) fn since(subject: Option<&Subject>, before: Option<Snapshot>) -> Option<Latencies> {
    let after = read(subject)?;
    let subject = subject?;
    let socket = control_of(subject)?;
    let status: control::Status = control::get(&socket, "/v1/status").ok()?;
    let export = export_of(subject, &status)?;
    let grown = after.since(&before.unwrap_or_default());
    Some(grown.merged_by(|labels| labels.export == export))
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::{LunStatus, Status};

    fn export(name: &str, disk: &str, socket: Option<&Path>, address: &str) -> ExportStatus {
        let lun = LunStatus {
            target: 0,
            lun: 0,
            disk: disk.to_owned(),
        };
        let addresses = Some(address.to_owned()).filter(|text| !text.is_empty());
        ExportStatus {
            name: name.to_owned(),
            kind: "nbd".to_owned(),
            socket: socket.map(Path::to_owned),
            addresses: addresses.into_iter().collect(),
            queues: 0,
            connected: true,
            served: Vec::new(),
            waiting_portals: Vec::new(),
            port_groups: Vec::new(),
            luns: vec![lun],
            queue_stops: None,
            warning: None,
        }
    }

    #[test]
    fn nbd_exports_are_found_by_address_and_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let status = Status {
            exports: vec![
                export("a", "d0", Some(file.path()), ""),
                export("b", "d1", Some(file.path()), "127.0.0.1:7001"),
                export("c", "d0", None, "0.0.0.0:7002"),
            ],
            ..Status::default()
        };
        let found = |text: &str| export_of(&Subject::parse(text).unwrap(), &status);
        let unix = |name| {
            found(&format!(
                "nbd+unix:///{name}?socket={}",
                file.path().display()
            ))
        };
        assert_eq!(unix("b").as_deref(), Some("b"));
        assert_eq!(unix("d0").as_deref(), Some("a"));
        assert_eq!(unix("x"), None);
        // The only export of the address may have another name for clients.
        assert_eq!(found("nbd://127.0.0.1:7001/x").as_deref(), Some("b"));
        assert_eq!(found("nbd://127.0.0.1:7002/d0").as_deref(), Some("c"));
        assert_eq!(found("nbd://127.0.0.1:7003/d0"), None);
        // An address for documentation, which is of no host.
        assert_eq!(found("nbd://192.0.2.1:7002/d0"), None);
        assert_eq!(found("nbd+unix:///d0?socket=/nonexistent"), None);
    }
}
