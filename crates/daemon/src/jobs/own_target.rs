//! Finds targets that lead back to a disk of this daemon by another way than its path: a loop device over its file, an NBD export or an
//! iSCSI target of this daemon. A copy to such a target would overwrite newer data of clients.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};

use config::{BlockDeviceConfig, ExportConfig, Transport};
use iscsi::address::Lun;
use nbd::address::{ExportAddress, ServerAddress};
use rustix::fs::{major, minor};

use super::copy::is_same_file;

/// Major number of loop devices in Linux.
const LOOP_MAJOR: u32 = 7;

/// Returns the file below a loop device, otherwise the path itself.
pub(super) fn file_below(path: &Path) -> PathBuf {
    let file_of_loop = || {
        let number = rustix::fs::stat(path).ok()?.st_rdev;
        if major(number) != LOOP_MAJOR {
            return None;
        }
        let entry = format!(
            "/sys/dev/block/{}:{}/loop/backing_file",
            LOOP_MAJOR,
            minor(number)
        );
        let file = std::fs::read_to_string(entry).ok()?;
        Some(PathBuf::from(file.trim_end_matches('\n')))
    };
    file_of_loop().unwrap_or_else(|| path.to_owned())
}

/// Returns the disk that this daemon serves at the address of a job's target. Blocks, because it resolves the host's name.
pub(super) fn disk_behind<'a>(
    target: &BlockDeviceConfig,
    exports: impl Iterator<Item = &'a ExportConfig>,
) -> Option<&'a str> {
    let over = |transport| exports.filter(move |export| export.transport == transport);
    match target {
        BlockDeviceConfig::Nbd(target) => {
            let found =
                over(Transport::Nbd).find(|export| is_served_at(export, &target.address))?;
            found.disk.as_deref()
        }
        BlockDeviceConfig::Iscsi(target) => {
            let unit = target.unit.as_ref()?;
            // Names of targets are unique in the world (RFC 7143, 4.2.7.1).
            let found = over(Transport::Iscsi).find(|export| export.name == unit.target)?;
            let number = Lun::number_of(unit.lun.standard_field());
            let lun = found.luns.iter().find(|lun| number == Some(lun.lun))?;
            Some(&lun.disk)
        }
        _ => None,
    }
}

fn is_served_at(export: &ExportConfig, address: &ExportAddress) -> bool {
    // The empty name selects the server's default export.
    let is_named = address.export.is_empty() || address.export == export.export_name();
    is_named
        && match &address.server {
            ServerAddress::Unix(path) => is_same_file(Some(path), export.socket.as_deref()),
            ServerAddress::Tcp { host, port } => export.nbd.listen.is_some_and(|listen| {
                listen.port() == *port
                    && (host.as_str(), *port)
                        .to_socket_addrs()
                        .is_ok_and(|mut found| found.any(|to| reaches(to.ip(), listen.ip())))
            }),
        }
}

/// Returns true if a connection to an address reaches a listener of this host.
fn reaches(to: IpAddr, listens: IpAddr) -> bool {
    to == listens || listens.is_unspecified() && is_of_this_host(to)
}

/// Only addresses of this host can be bound.
fn is_of_this_host(address: IpAddr) -> bool {
    address.is_unspecified() || UdpSocket::bind(SocketAddr::new(address, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::{LunConfig, RemoteConfig};

    fn export(socket: Option<&Path>, listen: Option<&str>) -> ExportConfig {
        let mut export = ExportConfig {
            name: "a".to_owned(),
            disk: Some("d0".to_owned()),
            socket: socket.map(Path::to_owned),
            transport: Transport::Nbd,
            ..ExportConfig::default()
        };
        export.nbd.listen = listen.map(|text| text.parse().unwrap());
        export
    }

    fn served_disk(uri: &str, export: &ExportConfig) -> Option<String> {
        let target = BlockDeviceConfig::Nbd(Box::new(config::NbdDiskConfig {
            address: uri.parse().unwrap(),
            ..config::NbdDiskConfig::default()
        }));
        disk_behind(&target, std::iter::once(export)).map(str::to_owned)
    }

    #[test]
    fn own_units_are_found_by_the_name_of_their_target() {
        let name = "iqn.2026-11.org.example:a";
        let lun = |lun, disk: &str| LunConfig {
            target: 0,
            lun,
            disk: disk.to_owned(),
        };
        let export = ExportConfig {
            name: name.to_owned(),
            transport: Transport::Iscsi,
            luns: vec![lun(0, "d0"), lun(3, "d3")],
            ..ExportConfig::default()
        };
        let served = |uri: String| {
            let target = BlockDeviceConfig::Iscsi(Box::new(RemoteConfig {
                unit: Some(uri.parse().unwrap()),
                ..RemoteConfig::default()
            }));
            disk_behind(&target, std::iter::once(&export)).map(str::to_owned)
        };
        assert_eq!(
            served(format!("iscsi://192.0.2.1/{name}/3")).as_deref(),
            Some("d3")
        );
        assert_eq!(served(format!("iscsi://192.0.2.1/{name}/1")), None);
        assert_eq!(served(format!("iscsi://192.0.2.1/{name}2/3")), None);
    }

    #[test]
    fn own_exports_are_found_by_socket_and_by_local_address() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("nbd.sock");
        let link = folder.path().join("link");
        std::fs::write(&socket, "").unwrap();
        std::os::unix::fs::symlink(&socket, &link).unwrap();
        let unix = export(Some(&socket), None);
        let uri = |name: &str, path: &Path| format!("nbd+unix:///{name}?socket={}", path.display());
        assert_eq!(
            served_disk(&uri("a", &socket), &unix).as_deref(),
            Some("d0")
        );
        assert_eq!(served_disk(&uri("a", &link), &unix).as_deref(), Some("d0"));
        assert_eq!(served_disk(&uri("", &socket), &unix).as_deref(), Some("d0"));
        assert_eq!(served_disk(&uri("b", &socket), &unix), None);
        assert_eq!(served_disk(&uri("a", folder.path()), &unix), None);

        let any = export(None, Some("0.0.0.0:5401"));
        assert_eq!(
            served_disk("nbd://127.0.0.2:5401/a", &any).as_deref(),
            Some("d0")
        );
        assert_eq!(served_disk("nbd://192.0.2.1:5401/a", &any), None);
        assert_eq!(served_disk("nbd://127.0.0.1:5402/a", &any), None);
        let one = export(None, Some("127.0.0.1:5401"));
        assert_eq!(
            served_disk("nbd://localhost:5401/a", &one).as_deref(),
            Some("d0")
        );
        assert_eq!(served_disk("nbd://127.0.0.2:5401/a", &one), None);
    }
}
