//! Exports from their configuration: each a device behind a socket.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use iscsi_target::{ChapUser, TargetOptions};
use reactor::{ExportPlacement, Pool};
use scsi::{MemoryStore, Store};
use scsi_exec::{Holding, Units};
use virtio_blk::{BlkDevice, BlkOptions};
use virtio_device::VirtioDevice;
use virtio_scsi::{ScsiDevice, ScsiOptions};

use crate::disks::Disks;
use crate::objects::{Servers, Transports, absolute};
use crate::running::Inherited;
use crate::state::{self, FolderStore};
use crate::state_thread::StateThread;
use config::{Config, ExportRef, IscsiConfig, VhostBlkConfig, VhostScsiConfig, read_chap_users};

/// How long the end of an export waits for what is in flight.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// An export that can be connected to. Its text is the line that says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadyExport {
    /// `vhost-blk` or `vhost-scsi`.
    pub kind: &'static str,
    /// The export's name.
    pub name: String,
    /// Where clients come in.
    pub endpoint: Endpoint,
}

/// Where an export's clients come in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
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
        match &self.endpoint {
            Endpoint::Path(socket) => write!(f, " {}", socket.display()),
            Endpoint::Portals(portals) => {
                portals.iter().try_for_each(|portal| write!(f, " {portal}"))
            }
            Endpoint::Listening => f.write_str(" inherited socket"),
            Endpoint::Connection => f.write_str(" inherited connection"),
        }
    }
}

/// One registry, so that a disk is the same logical unit through every transport.
pub(crate) fn units(config: &Config) -> std::io::Result<Arc<Units>> {
    Ok(Units::new(store(config)?))
}

/// Where logical units keep what must survive a restart.
fn store(config: &Config) -> std::io::Result<Box<dyn Store>> {
    Ok(match config.state.clone().or_else(state::default_folder) {
        Some(folder) => Box::new(StateThread::start(FolderStore::new(folder))?),
        None => {
            tracing::warn!(
                "no state folder: reservations, and identities that no file holds, do not survive a restart (hint: --state DIR)"
            );
            Box::new(MemoryStore::default())
        }
    })
}

/// The device behind an export's endpoint.
pub(crate) enum Device {
    /// One disk.
    Blk(Arc<BlkDevice>),
    /// A controller.
    Scsi(Arc<ScsiDevice>),
    /// A target, which the iSCSI transport knows by its name.
    Iscsi,
}

/// An export that was opened.
pub(crate) struct OpenExport {
    pub name: String,
    pub device: Device,
    pub ready: ReadyExport,
}

/// Opens an export. `users`: its CHAP users, where these are not to come from its file.
///
/// # Errors
/// Why it cannot be opened; nothing of it is left then.
pub(crate) fn open(
    export: ExportRef<'_>,
    disks: &Disks,
    servers: &Servers,
    transports: &Transports,
    inherited: Option<Inherited>,
    users: Option<&ChapUsers>,
) -> Result<OpenExport, String> {
    let (pool, units) = (&servers.pool, &servers.units);
    // Before the first client comes.
    pool.assign(export.name(), export.placement())
        .map_err(|error| error.to_string())?;
    let opened = open_placed(export, disks, units, transports, inherited, users);
    if opened.is_err() {
        share(pool, export.name());
    }
    opened
}

/// From now on an export has no workers of its choice. A dedicated one ends with what it serves.
fn share(pool: &Pool, export: &str) {
    if let Err(error) = pool.assign(export, &ExportPlacement::Shared) {
        tracing::error!(export, "its workers stay: {error}");
    }
}

fn open_placed(
    export: ExportRef<'_>,
    disks: &Disks,
    units: &Arc<Units>,
    transports: &Transports,
    inherited: Option<Inherited>,
    users: Option<&ChapUsers>,
) -> Result<OpenExport, String> {
    let (device, endpoint) = match export {
        ExportRef::VhostBlk(config) => {
            let device = blk_device(config, disks, units)?;
            let endpoint = listen(&transports.vhost, device.clone(), &config.socket, inherited)?;
            (Device::Blk(device), endpoint)
        }
        ExportRef::VhostScsi(config) => {
            let device = scsi_device(config, disks, units)?;
            let endpoint = listen(&transports.vhost, device.clone(), &config.socket, inherited)?;
            (Device::Scsi(device), endpoint)
        }
        ExportRef::Iscsi(config) => {
            let portals = iscsi_target(config, disks, &transports.iscsi, users)?;
            (Device::Iscsi, Endpoint::Portals(portals))
        }
    };
    Ok(OpenExport {
        name: export.name().to_owned(),
        device,
        ready: ReadyExport {
            kind: export.kind(),
            name: export.name().to_owned(),
            endpoint,
        },
    })
}

/// Closes an export: its sessions end once what is in flight has been answered.
pub(crate) fn close(name: &str, pool: &Pool, transports: &Transports) {
    if transports.vhost.remove(name) {
        return share(pool, name);
    }
    let (hold, ended) = Holding::new();
    transports.iscsi.remove_target(name, &hold);
    drop(hold);
    if !ended.wait(END_PATIENCE) {
        tracing::warn!("sessions of {name} did not end in time; removing the export without them");
    }
    share(pool, name);
}

/// Can clients come to an export of this name?
pub(crate) fn is_served(name: &str, transports: &Transports) -> bool {
    let mut vhost = transports.vhost.status().into_iter();
    let mut iscsi = transports.iscsi.status().into_iter();
    vhost.any(|export| export.name == name) || iscsi.any(|target| target.name == name)
}

/// The exports that have a client.
pub(crate) fn connected(transports: &Transports) -> HashSet<String> {
    let vhost = transports.vhost.status().into_iter();
    let vhost = vhost.filter(|export| export.connected).map(|e| e.name);
    let iscsi = transports.iscsi.status().into_iter();
    let iscsi = iscsi.filter(|target| target.sessions > 0).map(|t| t.name);
    vhost.chain(iscsi).collect()
}

/// CHAP users by name.
pub(crate) type ChapUsers = HashMap<String, ChapUser>;

/// The CHAP users of an export as they are in its file now; none where it has none.
pub(crate) fn chap_users(export: ExportRef<'_>) -> Result<ChapUsers, String> {
    match export {
        ExportRef::Iscsi(IscsiConfig {
            chap_users: Some(path),
            ..
        }) => read_chap_users(path),
        _ => Ok(HashMap::new()),
    }
}

/// The CHAP users of discovery sessions as they are in their file now; none where there is none.
pub(crate) fn discovery_users(config: &Config) -> Result<ChapUsers, String> {
    match &config.discovery_auth {
        Some(path) => read_chap_users(path).map_err(|reason| format!("discovery_auth: {reason}")),
        None => Ok(HashMap::new()),
    }
}

fn iscsi_target(
    config: &IscsiConfig,
    disks: &Disks,
    server: &iscsi_target::Server,
    users: Option<&ChapUsers>,
) -> Result<Vec<SocketAddr>, String> {
    let found = config.luns.iter().map(|lun| {
        let disk = disks.get(&lun.disk).cloned();
        Ok((lun.lun, disk.ok_or_else(|| missing(&lun.disk))?))
    });
    let found = found.collect::<Result<Vec<_>, String>>()?;
    let chap_users = match users {
        Some(users) => users.clone(),
        None => chap_users(ExportRef::Iscsi(config))?,
    };
    let options = TargetOptions {
        name: config.name.clone(),
        alias: config.alias.clone(),
        portals: config.portals.clone(),
        announce: config.announce.clone(),
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
) -> Result<Endpoint, String> {
    match inherited {
        None => match server.listen(path, device) {
            Ok(()) => Ok(Endpoint::Path(path.to_owned())),
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

fn blk_device(
    config: &VhostBlkConfig,
    disks: &Disks,
    units: &Arc<Units>,
) -> Result<Arc<BlkDevice>, String> {
    let options = BlkOptions {
        name: config.name.clone(),
        queues: config.queues,
    };
    let disk = disks
        .get(&config.disk)
        .ok_or_else(|| missing(&config.disk))?;
    // A guest that has turned write-back off sends no flushes from then on, whatever happens to the daemon.
    let key = format!("virtio-blk {} {}", config.name, disk.info().identity);
    let writethrough = b"writethrough".as_slice();
    let kept = units.store().load(&key);
    let keep = {
        let units = Arc::clone(units);
        move |writeback| {
            let choice = if writeback {
                b"writeback"
            } else {
                writethrough
            };
            // The store says what it cannot keep.
            units.store().save(&key, choice).ok();
        }
    };
    let device = BlkDevice::new(Arc::clone(disk), options);
    let device = device.with_choice(kept.as_deref() != Some(writethrough), keep);
    let device = remember_disk(device, &config.socket, units);
    // A sanitize operation that a restart interrupted goes on, whichever transport its disk has.
    let unit = units.unit(disk);
    if disk.is_removable() {
        // virtio-blk has no word for a medium that is gone: SCSI initiators cannot eject it meanwhile.
        let hold = unit.hold_medium();
        return Ok(Arc::new(device.holding(hold)));
    }
    Ok(Arc::new(device))
}

/// A front end knows an export by its socket only: the disk that its driver started with is persisted under that.
fn remember_disk(device: BlkDevice, socket: &Path, units: &Arc<Units>) -> BlkDevice {
    let key = format!("virtio-blk disk {}", absolute(socket).display());
    let last = units.store().load(&key);
    let last = last.and_then(|last| String::from_utf8(last).ok());
    let units = Arc::clone(units);
    // The store says what it cannot persist.
    device.with_last_disk(last, move |identity| {
        units.store().save(&key, identity.as_bytes()).ok();
    })
}

fn scsi_device(
    config: &VhostScsiConfig,
    disks: &Disks,
    units: &Arc<Units>,
) -> Result<Arc<ScsiDevice>, String> {
    let options = ScsiOptions {
        name: config.name.clone(),
        queues: config.queues,
    };
    let device = ScsiDevice::new(Arc::clone(units), options);
    let found = config.luns.iter().map(|lun| {
        let disk = disks.get(&lun.disk).ok_or_else(|| missing(&lun.disk))?;
        Ok((lun.target, lun.lun, disk.clone()))
    });
    let found = found.collect::<Result<Vec<_>, String>>()?;
    let added = device.add_luns(&found);
    added.map_err(|error| error.to_string())?;
    Ok(Arc::new(device))
}

fn missing(disk: &str) -> String {
    format!("there is no disk {disk}")
}
