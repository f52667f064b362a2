//! Exports from their configuration: each a device behind a socket.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use iscsi_net::TargetOptions;
use scsi::{MemoryStore, Store};
use scsi_tasks::Units;
use virtio::VirtioDevice;
use virtio_blk::{BlkDevice, BlkOptions};
use virtio_scsi::{ScsiDevice, ScsiOptions};

use crate::config::{Config, IscsiConfig, VhostBlkConfig, VhostScsiConfig, read_chap_users};
use crate::disks::Disks;
use crate::running::Inherited;
use crate::state::{self, FolderStore};

/// An export that can be connected to. Its text is the line that says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadyExport {
    /// `vhost-blk` or `vhost-scsi`.
    pub kind: &'static str,
    /// The export's name.
    pub name: String,
    /// Where clients come in.
    pub door: Door,
}

/// Where an export's clients come in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Door {
    /// The socket at this path.
    Path(PathBuf),
    /// A listening socket that was inherited.
    Listening,
    /// A connection that was inherited: its client is the only one.
    Connection,
    /// iSCSI portals.
    Portals(Vec<SocketAddr>),
}

impl fmt::Display for ReadyExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ready {} {}", self.kind, self.name)?;
        match &self.door {
            Door::Path(socket) => write!(f, " {}", socket.display()),
            Door::Portals(portals) => portals.iter().try_for_each(|portal| write!(f, " {portal}")),
            Door::Listening => f.write_str(" inherited socket"),
            Door::Connection => f.write_str(" inherited connection"),
        }
    }
}

/// One registry, so that a disk is the same logical unit through every door.
pub(crate) fn units(config: &Config) -> Arc<Units> {
    Units::new(store(config))
}

/// Where logical units keep what must survive a restart.
fn store(config: &Config) -> Box<dyn Store> {
    match config.state.clone().or_else(state::default_folder) {
        Some(folder) => Box::new(FolderStore::new(folder)),
        None => {
            tracing::warn!(
                "no state folder: reservations do not survive a restart (mend: --state DIR)"
            );
            Box::new(MemoryStore::default())
        }
    }
}

/// Opens all exports. Every one that cannot be opened adds a reason.
pub(crate) fn open_all(
    config: &Config,
    disks: &Disks,
    units: &Arc<Units>,
    server: &vhost_user::Server,
    inherited: Option<Inherited>,
    reasons: &mut Vec<String>,
) -> Vec<ReadyExport> {
    let mut ready = Vec::new();
    let mut inherited = inherited;
    let blk = config.vhost_blk.iter().map(|export| {
        let device = blk_device(export, disks, units);
        ("vhost-blk", &export.name, &export.socket, device)
    });
    let scsi = config.vhost_scsi.iter().map(|export| {
        let device = scsi_device(export, disks, units);
        ("vhost-scsi", &export.name, &export.socket, device)
    });
    for (kind, name, socket, device) in blk.chain(scsi) {
        let inherited = inherited.take_if(|inherited| inherited.export == *name);
        let listening = device.and_then(|device| listen(server, device, socket, inherited));
        match listening {
            Ok(door) => ready.push(ReadyExport {
                kind,
                name: name.clone(),
                door,
            }),
            Err(reason) => reasons.push(format!("{kind} {name}: {reason}")),
        }
    }
    ready
}

/// Opens the iSCSI targets. Every one that cannot be opened adds a reason.
pub(crate) fn open_iscsi(
    config: &Config,
    disks: &Disks,
    server: &iscsi_net::Server,
    ready: &mut Vec<ReadyExport>,
    reasons: &mut Vec<String>,
) {
    for target in &config.iscsi {
        match iscsi_target(target, disks, server) {
            Ok(portals) => ready.push(ReadyExport {
                kind: "iscsi",
                name: target.name.clone(),
                door: Door::Portals(portals),
            }),
            Err(reason) => reasons.push(format!("iscsi {}: {reason}", target.name)),
        }
    }
}

fn iscsi_target(
    config: &IscsiConfig,
    disks: &Disks,
    server: &iscsi_net::Server,
) -> Result<Vec<SocketAddr>, String> {
    let found = config
        .disks
        .iter()
        .map(|name| disks.get(name).cloned().ok_or_else(|| missing(name)));
    let found = found.collect::<Result<Vec<_>, String>>()?;
    let chap_users = match &config.chap_users {
        Some(path) => read_chap_users(path)?,
        None => Default::default(),
    };
    let options = TargetOptions {
        name: config.name.clone(),
        alias: config.alias.clone(),
        portals: config.portals.clone(),
        demo_mode: config.demo_mode,
        acl: config.acl.clone(),
        chap_users,
    };
    server
        .add_target(options, &found)
        .map_err(|error| error.to_string())
}

fn listen(
    server: &vhost_user::Server,
    device: Arc<dyn VirtioDevice>,
    path: &Path,
    inherited: Option<Inherited>,
) -> Result<Door, String> {
    match inherited {
        None => match server.listen(path, device) {
            Ok(()) => Ok(Door::Path(path.to_owned())),
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
) -> std::io::Result<Door> {
    if rustix::net::sockopt::socket_acceptconn(&socket)? {
        server.listen_on(UnixListener::from(socket), device)?;
        Ok(Door::Listening)
    } else {
        server.serve_on(UnixStream::from(socket), device)?;
        Ok(Door::Connection)
    }
}

fn blk_device(
    config: &VhostBlkConfig,
    disks: &Disks,
    units: &Arc<Units>,
) -> Result<Arc<dyn VirtioDevice>, String> {
    let options = BlkOptions {
        name: config.name.clone(),
        queues: config.queues,
    };
    let disk = disks
        .get(&config.disk)
        .ok_or_else(|| missing(&config.disk))?;
    let device = BlkDevice::new(Arc::clone(disk), options);
    if disk.is_removable() {
        // virtio-blk has no word for a medium that is gone: SCSI initiators cannot eject it meanwhile.
        let hold = units.unit(disk).hold_medium();
        return Ok(Arc::new(device.holding(hold)));
    }
    Ok(Arc::new(device))
}

fn scsi_device(
    config: &VhostScsiConfig,
    disks: &Disks,
    units: &Arc<Units>,
) -> Result<Arc<dyn VirtioDevice>, String> {
    let options = ScsiOptions {
        name: config.name.clone(),
        queues: config.queues,
    };
    let device = ScsiDevice::new(Arc::clone(units), options);
    for lun in &config.luns {
        let disk = disks.get(&lun.disk).ok_or_else(|| missing(&lun.disk))?;
        device
            .add_lun(lun.target, lun.lun, disk)
            .map_err(|error| format!("LUN {}: {error}", lun.lun))?;
    }
    Ok(Arc::new(device))
}

fn missing(disk: &str) -> String {
    format!("there is no disk {disk}")
}
