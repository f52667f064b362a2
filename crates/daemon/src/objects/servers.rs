//! Transports and workers that serve the objects. Shared with readers.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bdev::Disk;
use reactor::Pool;
use scsi_exec::Units;

use super::events::EventBus;
use crate::certificates::Identities;
use crate::tcp_service::TcpEntrance;
use crate::unit_records::Unrecorded;

/// Returns the session name of a vhost-user export.
pub fn vhost_session(export: &str) -> String {
    format!("vhost-{export}")
}

/// Returns the name of an iSCSI session.
pub fn iscsi_session(tsih: u16) -> String {
    format!("iscsi-{tsih}")
}

/// Returns the name of an NBD session.
pub fn nbd_session(number: u64) -> String {
    format!("nbd-{number}")
}

/// Workers, units and transports of a daemon.
pub struct Servers {
    /// Workers.
    pub pool: Arc<Pool>,
    /// Registry of logical units.
    pub units: Arc<Units>,
    /// Disks with a failed record of their unit.
    pub unrecorded: Unrecorded,
    transports: Mutex<Option<Transports>>,
    /// Certificate of the API and of metrics over TCP.
    pub api_tls: tls::ServerTls,
    /// Certificate of NBD exports with TLS.
    pub nbd_tls: tls::ServerTls,
    /// Listeners of the API and of metrics.
    entrances: Mutex<Vec<Arc<TcpEntrance>>>,
    pub(super) listener_watcher: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// Transports, which exist until the daemon ends.
#[derive(Clone)]
pub struct Transports {
    /// Server for vhost-user front ends.
    pub vhost: Arc<vhost_user::Server>,
    /// Server for iSCSI initiators.
    pub iscsi: Arc<iscsi_target::Server>,
    /// Server for NBD clients.
    pub nbd: Arc<nbd_server::Server>,
}

impl Servers {
    /// Starts the transports without exports.
    ///
    /// # Errors
    /// If a kernel resource is missing.
    pub fn start(
        pool: Arc<Pool>,
        units: Arc<Units>,
        limits: iscsi_target::ServerLimits,
    ) -> Result<Servers, String> {
        let vhost = vhost_user::Server::start(Arc::clone(&pool))
            .map_err(|error| format!("cannot serve vhost-user: {error}"))?;
        let iscsi = iscsi_target::Server::start(Arc::clone(&pool), Arc::clone(&units), limits)
            .map_err(|error| format!("cannot serve iSCSI: {error}"))?;
        let nbd_tls = tls::ServerTls::default();
        let nbd_limits = nbd_server::ServerLimits::default();
        let nbd = nbd_server::Server::start(Arc::clone(&pool), nbd_limits, nbd_tls.clone())
            .map_err(|error| format!("cannot serve NBD: {error}"))?;
        let transports = Transports {
            vhost: Arc::new(vhost),
            iscsi: Arc::new(iscsi),
            nbd: Arc::new(nbd),
        };
        Ok(Servers {
            pool,
            units,
            unrecorded: Unrecorded::default(),
            transports: Mutex::new(Some(transports)),
            api_tls: tls::ServerTls::default(),
            nbd_tls,
            entrances: Mutex::default(),
            listener_watcher: OnceLock::new(),
        })
    }

    /// Sends an event whenever a session is opened or closed.
    pub fn publish_sessions(&self, event_bus: &EventBus) {
        let Some(transports) = self.transports() else {
            return;
        };
        let events = event_bus.clone();
        transports.vhost.watch_sessions(move |export, came| {
            events.publish_session(came, export, vhost_session(export), None);
        });
        let events = event_bus.clone();
        transports.iscsi.watch_sessions(move |change| {
            let id = iscsi_session(change.tsih);
            events.publish_session(change.opened, &change.target, id, Some(change.initiator));
        });
        let events = event_bus.clone();
        transports.nbd.watch_sessions(move |change| {
            let id = nbd_session(change.number);
            events.publish_session(change.opened, &change.export, id, None);
        });
    }

    /// Replaces the identities for new connections. Returns false if all certificates are the present ones.
    pub(super) fn set_identities(&self, identities: Identities) -> bool {
        let api = self.api_tls.set(identities.api);
        let nbd = self.nbd_tls.set(identities.nbd);
        api || nbd
    }

    /// Returns the transports; `None` once the daemon ends.
    pub fn transports(&self) -> Option<Transports> {
        self.lock().clone()
    }

    /// Detaches all workers from a disk and waits for them, so that its file is free once the disk is dropped.
    pub fn detach_disk(&self, disk: &Arc<Disk>) {
        self.units.remove(disk);
        for worker in self.pool.workers() {
            let disk = disk.clone();
            // A worker that has ended has detached.
            worker.call(move |w| w.close_disk(&disk)).ok();
        }
    }

    /// Ends all sessions once no thread uses the transports.
    pub fn end(&self) {
        let transports = self.lock().take();
        drop(transports);
        self.units.leave_shared_states();
    }

    pub(super) fn lock_entrances(&self) -> MutexGuard<'_, Vec<Arc<TcpEntrance>>> {
        self.entrances
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Transports>> {
        self.transports
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
