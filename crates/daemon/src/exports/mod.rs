//! Opens exports. Each transport has a file that opens an export and changes it ([`ExportDevice`]).

mod iscsi;
mod nbd;
mod vhost;
mod vhost_blk;
mod vhost_scsi;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use bdev::Disk;
use control::objects::{PortGroup, UnitAccessState, WaitingPortal};
use iscsi_target::{ChapUser, PortGroupStatus};
use reactor::Rights;
use reactor::{ExportPlacement, Pool};
use scsi::{MemoryStore, Store};
use scsi_exec::{Hold, Units};

use crate::chap_users::read_chap_users;
use crate::disks::Disks;
pub(crate) use iscsi::server_limits;
pub(crate) use vhost_scsi::warn_of_shared_nexuses;

use crate::objects::{Servers, Transports};
use crate::running::Inherited;
use crate::state::{self, FolderStore};
use crate::state_files::DamagedFiles;
use crate::state_thread::StateThread;
use config::{AccessStates, Config, ExportConfig, LunConfig, SocketRights, Transport};

/// An export that accepts clients. `Display` writes its ready line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadyExport {
    /// `vhost-blk`, `vhost-scsi`, `iscsi` or `nbd`.
    pub kind: &'static str,
    /// The export's name.
    pub name: String,
    /// Endpoint for clients.
    pub endpoint: Endpoint,
}

/// Endpoint at which clients connect to an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// Socket at this path.
    Path(PathBuf),
    /// Inherited listening socket.
    Listening,
    /// Inherited connection, which is the only client.
    Connection,
    /// Open iSCSI portals.
    Portals(Vec<SocketAddr>),
    /// Open addresses of NBD.
    Nbd(Vec<nbd_server::Address>),
    /// No listener of the export could be opened yet.
    Waiting,
}

impl fmt::Display for ReadyExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ready {} {}", self.kind, self.name)?;
        match &self.endpoint {
            Endpoint::Path(socket) => write!(f, " {}", socket.display()),
            Endpoint::Portals(portals) => {
                portals.iter().try_for_each(|portal| write!(f, " {portal}"))
            }
            Endpoint::Nbd(addresses) => addresses
                .iter()
                .try_for_each(|address| write!(f, " {address}")),
            Endpoint::Waiting => f.write_str(" once its listener is open"),
            Endpoint::Listening => f.write_str(" inherited socket"),
            Endpoint::Connection => f.write_str(" inherited connection"),
        }
    }
}

/// Creates the registry of logical units. All transports share it, so a disk is one logical unit through all of them.
pub(crate) fn units(config: &Config, damaged: &DamagedFiles) -> std::io::Result<Arc<Units>> {
    Ok(Units::new(store(config, damaged)?))
}

/// Opens the store for persistent state of logical units.
fn store(config: &Config, damaged: &DamagedFiles) -> std::io::Result<Box<dyn Store>> {
    Ok(match config.state.clone().or_else(state::default_folder) {
        Some(folder) => {
            let is_shared = state::changes_folder(config).is_none();
            let store = FolderStore::new(folder, damaged.clone()).shared(is_shared);
            Box::new(StateThread::start(store)?)
        }
        None => {
            tracing::warn!(
                "no state folder: reservations, and identities not stored in a file, do not survive a restart; hint: --state DIR"
            );
            Box::new(MemoryStore::default())
        }
    })
}

/// Arguments for opening an export.
pub(crate) struct Opening<'a> {
    pub disks: &'a Disks,
    pub units: &'a Arc<Units>,
    pub transports: &'a Transports,
    /// Socket from the parent process.
    pub inherited: Option<Inherited>,
    /// CHAP users that replace the contents of the CHAP file.
    pub users: Option<&'a ChapUsers>,
}

impl Opening<'_> {
    /// Returns the disk of an export of one disk.
    fn only_disk(&self, export: &ExportConfig) -> Result<&Arc<Disk>, String> {
        self.disk(export.disk.as_deref().unwrap_or_default())
    }

    fn disk(&self, name: &str) -> Result<&Arc<Disk>, String> {
        let disk = self.disks.get(name);
        disk.ok_or_else(|| format!("there is no disk {name}"))
    }

    fn luns(&self, luns: &[LunConfig]) -> Result<Vec<(LunConfig, Arc<Disk>)>, String> {
        let found = luns.iter();
        let found = found.map(|lun| Ok((lun.clone(), self.disk(&lun.disk)?.clone())));
        found.collect()
    }
}

/// Opens an export. Clients can connect from then on. The only list of transports.
///
/// # Errors
/// The reason. The export is removed completely.
fn open_device(
    export: &ExportConfig,
    opening: Opening<'_>,
) -> Result<(Arc<dyn ExportDevice>, Endpoint), String> {
    match export.transport {
        Transport::VhostBlk => vhost_blk::open(export, opening),
        Transport::VhostScsi => vhost_scsi::open(export, opening),
        Transport::Iscsi => iscsi::open(export, opening),
        Transport::Nbd => nbd::open(export, opening),
    }
}

/// An open export. An export of one disk has no logical units to change.
pub(crate) trait ExportDevice: Send + Sync {
    /// Refuses new clients and ends the sessions after commands in flight.
    fn close(&self);

    /// Adds logical units.
    ///
    /// # Errors
    /// If the checked configuration cannot be applied, a defect of the daemon.
    fn add_luns(&self, luns: &[(LunConfig, Arc<Disk>)]) -> Result<(), String> {
        match luns {
            [] => Ok(()),
            _ => Err("it has one disk and no LUNs".to_owned()),
        }
    }

    /// Refuses new commands to these logical units.
    fn detach_luns(&self, luns: &[LunConfig]);

    /// Drops `hold` once no command to these logical units is in flight. `abort` aborts them.
    fn end_tasks(&self, luns: &[LunConfig], abort: bool, hold: &Hold);

    /// Notifies clients, if the transport can, that logical units were removed.
    fn notify_removed(&self, luns: &[LunConfig]);

    /// Notifies clients, if the transport can, that the disk or logical units were resized.
    fn notify_resized(&self, luns: &[LunConfig]);

    /// Returns the CHAP users in force, which may differ from the CHAP file.
    fn chap_users(&self) -> Option<Arc<ChapUsers>> {
        None
    }

    /// Sets the access states of portal groups. Exports without portal groups ignore it.
    fn set_access_states(&self, _states: &AccessStates) {}

    /// Replaces the CHAP users. Returns false if nothing changed.
    fn set_chap_users(&self, _users: ChapUsers) -> bool {
        false
    }
}

pub(crate) struct OpenExport {
    pub name: String,
    pub device: Arc<dyn ExportDevice>,
    pub ready: ReadyExport,
}

/// Opens an export. `users` replaces the contents of its CHAP file.
///
/// # Errors
/// The reason. The export is removed completely.
pub(crate) fn open(
    export: &ExportConfig,
    disks: &Disks,
    servers: &Servers,
    transports: &Transports,
    inherited: Option<Inherited>,
    users: Option<&ChapUsers>,
) -> Result<OpenExport, String> {
    let pool = &servers.pool;
    // Workers are assigned before the first client connects.
    pool.assign(&export.name, &export.placement)
        .map_err(|error| error.to_string())?;
    let opening = Opening {
        disks,
        units: &servers.units,
        transports,
        inherited,
        users,
    };
    if let Some(warning) = export.warning(servers.nbd_tls.checks_clients()) {
        tracing::warn!(export = export.name, "{warning}");
    }
    let opened = open_device(export, opening);
    let (device, endpoint) = opened.inspect_err(|_| share(pool, &export.name))?;
    Ok(OpenExport {
        name: export.name.clone(),
        device,
        ready: ReadyExport {
            kind: export.kind(),
            name: export.name.clone(),
            endpoint,
        },
    })
}

/// Closes an export and releases its workers.
pub(crate) fn close(name: &str, device: &dyn ExportDevice, pool: &Pool) {
    device.close();
    share(pool, name);
}

/// Returns an export to the shared workers. Its dedicated workers end.
fn share(pool: &Pool, export: &str) {
    if let Err(error) = pool.assign(export, &ExportPlacement::Shared) {
        tracing::error!(export, "worker placement unchanged: {error}");
    }
}

pub(crate) fn is_served(name: &str, transports: &Transports) -> bool {
    let mut vhost = transports.vhost.status().into_iter();
    let mut iscsi = transports.iscsi.status().into_iter();
    let mut nbd = transports.nbd.status().into_iter();
    vhost.any(|export| export.name == name)
        || iscsi.any(|target| target.name == name)
        || nbd.any(|export| export.name == name)
}

pub(crate) fn connected(transports: &Transports) -> HashSet<String> {
    let vhost = transports.vhost.status().into_iter();
    let vhost = vhost.filter(|export| export.connected).map(|e| e.name);
    let iscsi = transports.iscsi.status().into_iter();
    let iscsi = iscsi.filter(|target| target.sessions > 0).map(|t| t.name);
    let nbd = transports.nbd.status().into_iter();
    let nbd = nbd.filter(|export| export.connections > 0).map(|e| e.name);
    vhost.chain(iscsi).chain(nbd).collect()
}

/// Returns the virtio-blk exports with a write cache that the driver has disabled.
pub(crate) fn without_write_cache(transports: &Transports) -> HashSet<String> {
    let vhost = transports.vhost.status().into_iter();
    let disabled = vhost.filter(|export| export.is_write_cache_disabled);
    disabled.map(|export| export.name).collect()
}

/// Returns the TCP addresses of an NBD export, as bound.
pub(crate) fn tcp_addresses(export: &nbd_server::ExportStatus) -> Vec<String> {
    let addresses = export.addresses.iter();
    let tcp = addresses.filter(|one| matches!(one, nbd_server::Address::Tcp(_)));
    tcp.map(ToString::to_string).collect()
}

/// Returns the Unix socket of an NBD export.
pub(crate) fn unix_socket(export: &nbd_server::ExportStatus) -> Option<PathBuf> {
    export.addresses.iter().find_map(|one| match one {
        nbd_server::Address::Unix(path) => Some(path.clone()),
        nbd_server::Address::Tcp(_) => None,
    })
}

/// Returns the portals of each target that are not open yet.
pub(crate) fn waiting_portals(transports: &Transports) -> HashMap<String, Vec<WaitingPortal>> {
    let mut waiting: HashMap<String, Vec<WaitingPortal>> = HashMap::new();
    for (target, portal) in transports.iscsi.waiting_portals() {
        let next_try = portal.next_try.saturating_duration_since(Instant::now());
        waiting.entry(target).or_default().push(WaitingPortal {
            address: portal.address.to_string(),
            reason: portal.reason,
            next_try_seconds: next_try.as_secs(),
        });
    }
    waiting
}

/// Returns the portal groups of a target with their access states.
pub(crate) fn port_groups(name: &str, transports: &Transports) -> Vec<PortGroup> {
    let groups = transports.iscsi.port_groups(name).into_iter();
    let group = |group: PortGroupStatus| PortGroup {
        group: group.tag,
        target_port_group: group.port_group,
        state: group.state.name().to_owned(),
        changed_by_initiators: group
            .changed
            .into_iter()
            .map(|(lun, state)| UnitAccessState {
                lun,
                state: state.name().to_owned(),
            })
            .collect(),
    };
    groups.map(group).collect()
}

/// Sets mode, owner and group of an export's socket. Returns the previous ones.
///
/// # Errors
/// The reason. Nothing has changed then.
pub(crate) fn set_socket_rights(
    export: &str,
    rights: &SocketRights,
    transports: &Transports,
) -> Result<Rights, String> {
    let numbers = vhost::numbers(rights)?;
    let is_nbd = transports.nbd.status().iter().any(|one| one.name == export);
    let set = match is_nbd {
        true => transports.nbd.set_rights(export, numbers),
        false => transports.vhost.set_rights(export, numbers),
    };
    set.map_err(|error| error.to_string())
}

pub(crate) type ChapUsers = HashMap<String, ChapUser>;

/// Reads the CHAP file of an export, if there is one.
pub(crate) fn chap_users(file: Option<&Path>) -> Result<ChapUsers, String> {
    file.map_or_else(|| Ok(HashMap::new()), read_chap_users)
}

/// Reads the CHAP file of discovery sessions, if there is one.
pub(crate) fn discovery_users(config: &Config) -> Result<ChapUsers, String> {
    match &config.discovery_auth {
        Some(path) => read_chap_users(path).map_err(|reason| format!("discovery_auth: {reason}")),
        None => Ok(HashMap::new()),
    }
}
