//! Exports from their configuration: a file for each kind, which opens it ([`Openable`]) and changes it ([`ExportDevice`]).

mod iscsi;
mod vhost;
mod vhost_blk;
mod vhost_scsi;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use bdev::Disk;
use control::objects::{PortGroup, UnitAccessState, WaitingPortal};
use iscsi_target::{ChapUser, PortGroupStatus};
use reactor::{ExportPlacement, Pool};
use scsi::{MemoryStore, Store};
use scsi_exec::{Hold, Units};
use vhost_user::Rights;

use crate::disks::Disks;
use crate::objects::{Servers, Transports};
use crate::running::Inherited;
use crate::state::{self, FolderStore};
use crate::state_files::DamagedFiles;
use crate::state_thread::StateThread;
use config::{AccessStates, Config, ExportRef, LunConfig, SocketRights, read_chap_users};

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
    /// Open iSCSI portals.
    Portals(Vec<SocketAddr>),
    /// No listener of the export can be opened yet.
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
            Endpoint::Waiting => f.write_str(" once its listener is open"),
            Endpoint::Listening => f.write_str(" inherited socket"),
            Endpoint::Connection => f.write_str(" inherited connection"),
        }
    }
}

/// One registry, so that a disk is the same logical unit through every transport.
pub(crate) fn units(config: &Config, damaged: &DamagedFiles) -> std::io::Result<Arc<Units>> {
    Ok(Units::new(store(config, damaged)?))
}

/// Where logical units keep what must survive a restart.
fn store(config: &Config, damaged: &DamagedFiles) -> std::io::Result<Box<dyn Store>> {
    Ok(match config.state.clone().or_else(state::default_folder) {
        Some(folder) => Box::new(StateThread::start(FolderStore::new(
            folder,
            damaged.clone(),
        ))?),
        None => {
            tracing::warn!(
                "no state folder: reservations, and identities that no file holds, do not survive a restart (hint: --state DIR)"
            );
            Box::new(MemoryStore::default())
        }
    })
}

/// What an export is opened with.
pub(crate) struct Opening<'a> {
    pub disks: &'a Disks,
    pub units: &'a Arc<Units>,
    pub transports: &'a Transports,
    /// A socket that was handed over.
    pub inherited: Option<Inherited>,
    /// Its CHAP users, where these are not to come from its file.
    pub users: Option<&'a ChapUsers>,
}

impl Opening<'_> {
    fn disk(&self, name: &str) -> Result<&Arc<Disk>, String> {
        let disk = self.disks.get(name);
        disk.ok_or_else(|| format!("there is no disk {name}"))
    }

    /// The logical units with their disks.
    fn luns(&self, luns: &[LunConfig]) -> Result<Vec<(LunConfig, Arc<Disk>)>, String> {
        let found = luns.iter();
        let found = found.map(|lun| Ok((lun.clone(), self.disk(&lun.disk)?.clone())));
        found.collect()
    }
}

/// The configuration of an export, which becomes an open one.
pub(crate) trait Openable {
    /// Opens it: clients can come.
    ///
    /// # Errors
    /// Why it cannot be opened; nothing of it is left then.
    fn open(&self, opening: Opening<'_>) -> Result<(Arc<dyn ExportDevice>, Endpoint), String>;
}

/// The one place that knows which kinds there are.
fn kind(export: ExportRef<'_>) -> &dyn Openable {
    match export {
        ExportRef::VhostBlk(export) => export,
        ExportRef::VhostScsi(export) => export,
        ExportRef::Iscsi(export) => export,
    }
}

/// An open export, as its owner changes it. An export of one disk has no logical units to change.
pub(crate) trait ExportDevice: Send + Sync {
    /// Ends its sessions once what is in flight has been answered, and nobody can come any more.
    fn close(&self);

    /// Some logical units more.
    ///
    /// # Errors
    /// Where the configuration that was checked cannot be: a defect of ours.
    fn add_luns(&self, luns: &[(LunConfig, Arc<Disk>)]) -> Result<(), String> {
        match luns {
            [] => Ok(()),
            _ => Err("it has one disk and no LUNs".to_owned()),
        }
    }

    /// Commands to these logical units are refused from now on.
    fn detach_luns(&self, luns: &[LunConfig]);

    /// `hold` is dropped when no command to them is in flight any more; `abort`: they are aborted.
    fn end_tasks(&self, luns: &[LunConfig], abort: bool, hold: &Hold);

    /// Clients that can be told hear that these logical units are gone.
    fn tell_removed(&self, luns: &[LunConfig]);

    /// Clients that can be told hear that its disk, or these logical units of it, have another size.
    fn tell_resized(&self, luns: &[LunConfig]);

    /// The CHAP users that it has, whatever their file says by now.
    fn chap_users(&self) -> Option<Arc<ChapUsers>> {
        None
    }

    /// Sets the access states of portal groups. Exports without portal groups ignore it.
    fn set_access_states(&self, _states: &AccessStates) {}

    /// Has these from now on. False: it has them already, or has none at all.
    fn set_chap_users(&self, _users: ChapUsers) -> bool {
        false
    }
}

/// An export that was opened.
pub(crate) struct OpenExport {
    pub name: String,
    pub device: Arc<dyn ExportDevice>,
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
    let pool = &servers.pool;
    // Before the first client comes.
    pool.assign(export.name(), export.placement())
        .map_err(|error| error.to_string())?;
    let opening = Opening {
        disks,
        units: &servers.units,
        transports,
        inherited,
        users,
    };
    let opened = kind(export).open(opening);
    let (device, endpoint) = opened.inspect_err(|_| share(pool, export.name()))?;
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

/// Closes an export, whose workers are free then.
pub(crate) fn close(name: &str, device: &dyn ExportDevice, pool: &Pool) {
    device.close();
    share(pool, name);
}

/// From now on an export has no workers of its choice. A dedicated one ends with what it serves.
fn share(pool: &Pool, export: &str) {
    if let Err(error) = pool.assign(export, &ExportPlacement::Shared) {
        tracing::error!(export, "its workers stay: {error}");
    }
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

/// The portals of each target that are not open yet.
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

/// Returns the portal groups of a target with their access states; none for other exports.
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

/// Sets mode, owner and group of an export's socket. Returns those that it had.
///
/// # Errors
/// Why they cannot be set; nothing has changed then.
pub(crate) fn set_socket_rights(
    export: &str,
    rights: &SocketRights,
    transports: &Transports,
) -> Result<Rights, String> {
    let set = transports.vhost.set_rights(export, vhost::numbers(rights)?);
    set.map_err(|error| error.to_string())
}

/// CHAP users by name.
pub(crate) type ChapUsers = HashMap<String, ChapUser>;

/// The CHAP users of an export as they are in its file now; none where it has none.
pub(crate) fn chap_users(export: ExportRef<'_>) -> Result<ChapUsers, String> {
    match export.object().chap_users() {
        Some(path) => read_chap_users(path),
        None => Ok(HashMap::new()),
    }
}

/// The CHAP users of discovery sessions as they are in their file now; none where there is none.
pub(crate) fn discovery_users(config: &Config) -> Result<ChapUsers, String> {
    match &config.discovery_auth {
        Some(path) => read_chap_users(path).map_err(|reason| format!("discovery_auth: {reason}")),
        None => Ok(HashMap::new()),
    }
}
