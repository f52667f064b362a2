//! Shared view of the daemon's parts: status and statistics for the API and the metrics.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};
use std::time::{Duration, Instant};

use ::control::statistics::{DiskStatistics, Statistics};
use ::control::{DamagedState, DiskStatus, ExportStatus, LunStatus, RefusedLogin, Status};
use config::{ExportConfig, LunConfig};
use latency::Snapshot;

use crate::bitmaps::Bitmaps;
use crate::certificates;
use crate::control::View;
use crate::exports;
use crate::history::History;
use crate::jobs::{Context, Jobs};
use crate::logs::LogHandle;
use crate::objects::{EventBus, Live, Manager, Servers, bodies, served};
use crate::state_files::DamagedFiles;
use crate::statistics;
use crate::storage_space::StorageSpace;
use crate::watchdog::all_make_progress;

/// Maximum time between two iterations of a worker in a healthy daemon.
const PROGRESS_PATIENCE: Duration = Duration::from_secs(1);

/// Time after which a refused login is no longer reported.
const REFUSED_LOGINS_SHOWN: Duration = Duration::from_secs(3600);

/// Shared view of the daemon's parts.
pub(crate) struct Overview {
    pub(crate) live: Arc<RwLock<Live>>,
    pub(crate) servers: Arc<Servers>,
    pub(crate) jobs: Jobs,
    pub(crate) bitmaps: Arc<Bitmaps>,
    pub(crate) started: Instant,
    pub(crate) history: Arc<History>,
    pub(crate) space: StorageSpace,
    /// Changes made at run time are persisted.
    pub(crate) keeps: bool,
    pub(crate) damaged: DamagedFiles,
    pub(crate) log: Option<LogHandle>,
    pub(crate) upgrade_command: Option<String>,
}

/// Returns the warning about locks that are not released (`lock = "while-active"`).
fn kept_lock(disk: &bdev::Disk) -> Option<String> {
    let error = disk.device().capabilities().turns?.release_error()?;
    Some(format!(
        "not in use, but its lock is not released: {error}; other daemons wait for it"
    ))
}

impl View for Overview {
    fn snapshot(&self) -> Snapshot {
        Snapshot {
            queues: self.servers.pool.snapshots(),
        }
    }

    fn log(&self) -> Option<LogHandle> {
        self.log.clone()
    }

    fn makes_progress(&self) -> bool {
        all_make_progress(&self.servers.pool, PROGRESS_PATIENCE)
    }

    fn statistics(&self) -> Statistics {
        let mut latency = self.snapshot();
        // `/v1/latency` has these; they would be most of the response.
        for queue in &mut latency.queues {
            queue.slow.clear();
            queue.shorten_disks();
        }
        let pool = &self.servers.pool;
        let workers = pool.counters().into_iter();
        let used = pool.disks();
        let live = self.live();
        let mut names: Vec<&String> = live.disks.keys().collect();
        names.sort_unstable();
        let waiting = |name: &str| {
            let disk = live.disks.get(name);
            let waiting = disk.and_then(|disk| disk.state().waiting());
            waiting.map_or(0, |waiting| waiting.count as u64)
        };
        let disks = names.into_iter().map(|name| DiskStatistics {
            waiting: waiting(name),
            ..statistics::disk(name, used.get(name))
        });
        let transports = self.servers.transports();
        let initiators = transports.as_ref().map(|all| all.iscsi.initiators());
        let initiators = initiators.unwrap_or_default().into_iter();
        let times = transports.as_ref().map(|all| all.vhost.queue_times());
        let times = times.unwrap_or_default().into_iter();
        Statistics {
            initiators: initiators.map(statistics::initiator).collect(),
            queue_times: times
                .map(|(export, times)| statistics::queue_times(export, times))
                .collect(),
            workers: workers
                .map(|(worker, counters)| statistics::worker(worker, counters))
                .collect(),
            disks: disks.collect(),
            jobs: self.jobs.all().iter().map(|job| job.body()).collect(),
            bitmaps: self.bitmaps.all(),
            latency,
            at_ns: self.started.elapsed().as_nanos() as u64,
        }
    }

    fn status(&self) -> Status {
        let live = self.live();
        let spaces = self.space.of_disks(&live);
        let slow = self.history.slow_disks();
        let (_, mut failures) = self.history.disk_failures(|| self.servers.pool.disks());
        let disks = live.config.disks.iter().map(|disk| {
            let space = spaces.get(&disk.name);
            let status = bodies::disk_status(&live, disk, Vec::new());
            DiskStatus {
                name: disk.name.clone(),
                backend: disk.backend.word().to_owned(),
                path: disk.backend.location(),
                size: status.size,
                allocated: space.map(|space| space.allocated),
                free: space.map(|space| space.free),
                block_size: status.block_size,
                read_only: disk.read_only,
                serial: status.serial,
                state: status.state,
                reason: status.reason,
                waiting: status.waiting,
                waiting_reason: status.waiting_reason,
                next_try_seconds: status.next_try_seconds,
                reservations_unknown: status.reservations_unknown,
                warning: self
                    .servers
                    .unrecorded
                    .warning(&disk.name)
                    .or_else(|| kept_lock(live.disks.get(&disk.name)?)),
                slow_ns: slow.get(&disk.name).copied(),
                damage: status.damage,
                failures: failures.remove(&disk.name).unwrap_or_default(),
            }
        });
        Status {
            // Set by the API server, which has the client's rights.
            may_change: false,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host: rustix::system::uname()
                .nodename()
                .to_string_lossy()
                .into_owned(),
            pid: std::process::id(),
            uptime_seconds: self.started.elapsed().as_secs(),
            workers: self.servers.pool.count(),
            upgrade_command: self.upgrade_command.clone(),
            sandbox: live.config.sandbox.to_string(),
            sandbox_missing: sandbox::report()
                .map_or_else(Vec::new, |report| report.missing.clone()),
            disks: disks.collect(),
            exports: self.export_status(),
            damaged_state: {
                let damaged = self.damaged.all().into_iter();
                damaged
                    .map(|(file, reason)| DamagedState { file, reason })
                    .collect()
            },
            open_listeners: self.servers.open_listeners(),
            waiting_listeners: self.servers.waiting_listeners(),
            refused_logins: self.refused_logins(),
            failures: self.history.failures(|| self.servers.pool.failures()),
            certificates: certificates::status(&live.config, &self.servers),
            // Set by the API server, which also has the counters.
            problems: Vec::new(),
        }
    }
}

impl Overview {
    pub(crate) fn context(&self, manager: Manager, event_bus: EventBus) -> Context {
        Context {
            manager,
            servers: Arc::clone(&self.servers),
            jobs: self.jobs.clone(),
            bitmaps: Arc::clone(&self.bitmaps),
            event_bus,
        }
    }

    pub(crate) fn write_live(&self) -> RwLockWriteGuard<'_, Live> {
        self.live.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn live(&self) -> Live {
        let live = self.live.read().unwrap_or_else(PoisonError::into_inner);
        live.clone()
    }

    fn refused_logins(&self) -> Vec<RefusedLogin> {
        let transports = self.servers.transports();
        let refused = transports.map(|all| all.iscsi.refused_logins());
        let recent = refused.unwrap_or_default().into_iter();
        let recent = recent.filter(|one| one.age() < REFUSED_LOGINS_SHOWN);
        let body = |one: iscsi_target::RefusedLogin| RefusedLogin {
            seconds: one.age().as_secs(),
            export: one.target,
            initiator: one.initiator,
            address: one.address,
            reason: one.reason,
            count: one.count,
        };
        recent.map(body).collect()
    }

    pub(crate) fn export_status(&self) -> Vec<ExportStatus> {
        let live = self.live();
        let transports = self.servers.transports();
        let connected = transports
            .as_ref()
            .map(exports::connected)
            .unwrap_or_default();
        let mut served_by = match &transports {
            Some(transports) => served(&self.servers, transports),
            None => HashMap::new(),
        };
        let waiting = transports.as_ref().map(exports::waiting_portals);
        let port_groups = |name: &str| {
            let transports = transports.as_ref();
            transports.map_or_else(Vec::new, |all| exports::port_groups(name, all))
        };
        let mut waiting = waiting.unwrap_or_default();
        let served = transports.as_ref();
        let served = served
            .map(|transports| transports.vhost.status())
            .unwrap_or_default();
        let nbd = transports.as_ref().map(|all| all.nbd.status());
        let nbd = nbd.unwrap_or_default();
        let mut tcp: HashMap<&str, Vec<String>> = HashMap::new();
        let mut sockets: HashMap<String, Option<PathBuf>> =
            served.into_iter().map(|e| (e.name, e.path)).collect();
        for export in &nbd {
            tcp.insert(&export.name, exports::tcp_addresses(export));
            sockets.insert(export.name.clone(), exports::unix_socket(export));
        }
        let times = transports.as_ref().map(|all| all.vhost.queue_times());
        let times: HashMap<_, _> = times.unwrap_or_default().into_iter().collect();
        let lun = |lun: &LunConfig| LunStatus {
            target: lun.target,
            lun: lun.lun,
            disk: lun.disk.clone(),
        };
        let mut status = |export: &ExportConfig| ExportStatus {
            name: export.name().to_owned(),
            kind: export.kind().to_owned(),
            socket: sockets.remove(export.name()).flatten(),
            addresses: tcp.remove(export.name()).unwrap_or_default(),
            queues: export.queues,
            warning: export.warning(live.config.tls.nbd_client_ca.is_some()),
            connected: connected.contains(export.name()),
            served: served_by.remove(export.name()).unwrap_or_default(),
            waiting_portals: waiting.remove(export.name()).unwrap_or_default(),
            port_groups: port_groups(export.name()),
            queue_stops: times.get(export.name()).and_then(statistics::queue_stops),
            luns: match export.disk() {
                Some(disk) => vec![LunStatus {
                    target: 0,
                    lun: 0,
                    disk: disk.to_owned(),
                }],
                None => export.luns().unwrap_or_default().iter().map(lun).collect(),
            },
        };
        let mut exports: Vec<ExportStatus> = live.config.exports().map(&mut status).collect();
        exports::warn_of_shared_nexuses(live.config.exports(), &mut exports);
        exports
    }
}
