//! Life of a daemon: starts workers, then disks and exports, then the control socket.
//!
//! A failed start reports all reasons and stops the parts that were started.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use ::control::Status;
use latency::Snapshot;
use reactor::{Pool, WorkerOptions};

use crate::blocking_call::no_thread;
use crate::control::{self, Api, Audience, BindError, Names, Tokens, View, upgrade_command};
use crate::exports::{self, Endpoint, ReadyExport};
use crate::handover::{Ending, Handover, Item};
use crate::history::{History, Sampler};
use crate::logs::LogHandle;
use crate::notify::Notifier;
use crate::objects::{
    ChangeOptions, ChangeResult, Manager, ManagerThread, Owner, Refusal, Servers, StateStore, Work,
};
use crate::overview::Overview;
use crate::state_files::DamagedFiles;
use crate::storage_space::StorageSpace;
use crate::tcp_service::{ListenAddress, TcpEntrance};
use crate::uevents::Uevents;
use crate::watchdog::Watchdog;
use crate::{block_devices, limits, metrics, state};
use config::{AccessConfig, Config, Diagnostics, Placement, WorkersConfig};

mod handover;

/// Reason to refuse a reload.
pub(crate) const NO_FILE: &str = "this daemon was started without a configuration file; hint: lunette disk add, export add and lun add change it";

/// Reads the configuration file and flags again.
pub type Reload = Arc<dyn Fn() -> Result<Config, Diagnostics> + Send + Sync>;

/// Start options that are not configuration.
#[derive(Default)]
pub struct StartOptions {
    /// Function for `reload`. Absent if the configuration cannot be read again.
    pub reload: Option<Reload>,
    /// Default control socket. If another daemon uses it, this one runs without.
    pub control: Option<PathBuf>,
    /// Sockets inherited from the parent process.
    pub inherited: Vec<Inherited>,
    /// Control socket inherited from the parent process.
    pub inherited_control: Option<InheritedControl>,
    /// Handle of the log filter.
    pub log: Option<LogHandle>,
    /// Descriptors handed over by the previous daemon, without memory of RAM disks.
    pub handover: Handover,
    /// Lets API clients end this daemon in favour of another one.
    pub ending: Option<Ending>,
    /// Disables time stamps of request stages, to measure their cost.
    pub without_stamps: bool,
}

/// A socket of an export that the parent process has opened.
#[derive(Debug)]
pub struct Inherited {
    /// Export that is served on the socket instead of its own.
    pub export: String,
    /// The socket.
    pub socket: OwnedFd,
}

/// A control socket that the parent process has opened.
#[derive(Debug)]
pub struct InheritedControl {
    /// Path of the socket.
    pub path: PathBuf,
    /// The socket.
    pub listener: std::os::unix::net::UnixListener,
}

/// All reasons why a daemon did not start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartError {
    /// Reasons, each with the failed operation and the system's error.
    pub reasons: Vec<String>,
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reasons.join("\n"))
    }
}

impl std::error::Error for StartError {}

impl From<String> for StartError {
    fn from(reason: String) -> Self {
        StartError {
            reasons: vec![reason],
        }
    }
}

fn all_well(reasons: &[String]) -> Result<(), StartError> {
    match reasons {
        [] => Ok(()),
        reasons => Err(StartError {
            reasons: reasons.to_vec(),
        }),
    }
}

/// A running daemon. Dropping it ends all sessions, the workers and the sockets.
pub struct Running {
    // Fields in the order of their end: API clients, changes, clients of exports, workers.
    control: Option<control::Server>,
    api: Option<control::TcpServer>,
    metrics: Option<metrics::Listener>,
    // Held only for their drop.
    _uevents: Option<Uevents>,
    _sampler: Option<Sampler>,
    manager: Option<ManagerThread>,
    overview: Arc<Overview>,
    ready: Vec<ReadyExport>,
    reload: Option<Reload>,
}

/// Starts a daemon with this configuration.
pub fn start(config: Config, mut options: StartOptions) -> Result<Running, StartError> {
    limits::raise_descriptors();
    bdev::iscsi_initiator::set_state_folder(config.state.clone());
    let mut reasons = Vec::new();
    let access = config.access.clone();
    let tokens = Tokens::of(&access)?;
    let can_be_asked = can_be_asked(&config, &options);
    let control = bind_control(&config, &mut options, &mut reasons);
    let handover = &mut options.handover;
    let api = open_entrance(
        "api",
        access.api_listen,
        handover.take(&Item::Api),
        &mut reasons,
    );
    let socket = handover.take(&Item::Metrics);
    let metrics = open_entrance("metrics", config.metrics_listen, socket, &mut reasons);
    all_well(&reasons)?;
    let folder = state::changes_folder(&config).filter(|_| can_be_asked);
    let state_store = folder.map(|folder| StateStore::open(&folder)).transpose()?;

    let damaged = DamagedFiles::default();
    let servers = start_servers(&config, &damaged, options.without_stamps)?;
    let keeps = state_store.is_some();
    let (mut owner, inbox) = Owner::new(config, Arc::clone(&servers), state_store, damaged.clone());
    let started = Instant::now();
    let overview = Arc::new(Overview {
        history: History::new(started),
        space: StorageSpace::default(),
        live: owner.live(),
        servers,
        jobs: owner.jobs.clone(),
        bitmaps: Arc::clone(&owner.disks.bitmaps),
        started,
        keeps,
        damaged,
        log: options.log,
        upgrade_command: control.as_ref().and_then(|one| upgrade_command(one.path())),
    });
    take_over_listeners(&overview.servers, &mut options.handover);
    let result = owner.begin(options.inherited, &inbox).map_err(|refusal| {
        overview.servers.end();
        not_begun(&refusal)
    })?;
    log_shadowed(&result.shadowed);
    resume(options.handover, &overview);
    let (events, event_bus) = (owner.events(), owner.event_bus.clone());
    let manager = Manager::start(owner, inbox)
        .map_err(|error| no_thread("for changes of objects", &error))?;
    let asked = Api {
        view: overview.clone(),
        manager: manager.manager(),
        overview: Some(overview.clone()),
        events,
        jobs: Some(overview.context(manager.manager(), event_bus)),
        ending: options.ending,
        reload: options.reload.clone(),
    };
    let api = api
        .map(|entrance| serve_tcp(entrance, &access, tokens.as_ref(), &asked))
        .transpose()?;
    let control = control
        .map(|bound| control::Server::start(bound, asked, access))
        .transpose()
        .map_err(|error| format!("cannot serve the control socket: {error}"))?;
    let metrics = metrics
        .map(|entrance| serve_metrics(entrance, &overview, tokens))
        .transpose()?;
    report_entrances(&manager)?;
    let running = Running {
        control,
        api,
        metrics,
        _uevents: listen_to_uevents(&manager),
        _sampler: record_history(&overview),
        manager: Some(manager),
        overview,
        ready: result.ready,
        reload: options.reload,
    };
    running.check_reachable()?;
    Ok(running)
}

fn not_begun(refusal: &Refusal) -> StartError {
    let reasons = refusal.faults().iter().map(ToString::to_string).collect();
    StartError { reasons }
}

/// Returns true if clients can reach the API, so that objects may change.
fn can_be_asked(config: &Config, options: &StartOptions) -> bool {
    config.control.is_some()
        || options.control.is_some()
        || options.inherited_control.is_some()
        || config.access.api_listen.is_some()
}

/// Gives the listening sockets of the previous daemon to the transports. Until [`resume`], its sessions keep their exports from other front
/// ends, which wait in the backlogs.
fn take_over_listeners(servers: &Servers, handover: &mut Handover) {
    let Some(transports) = servers.transports() else {
        return;
    };
    if handover.has_sessions() {
        transports.vhost.hold_accepting();
    }
    let portals = handover.take_all(&Item::Portal);
    transports.iscsi.take_over_portals(portals);
    let exports = handover.take_all(&Item::Export);
    transports.vhost.take_over_sockets(exports);
    let nbd = handover.take_all(&Item::Nbd);
    transports.nbd.take_over_sockets(nbd);
}

/// Starts the workers and the transports without exports.
fn start_servers(
    config: &Config,
    damaged: &DamagedFiles,
    without_stamps: bool,
) -> Result<Arc<Servers>, StartError> {
    let pool = Pool::start(&worker_options(&config.workers)).map_err(|error| error.to_string())?;
    pool.set_recording(!without_stamps);
    let units = exports::units(config, damaged)
        .map_err(|error| format!("cannot start the state thread: {error}"))?;
    let pool = Arc::new(pool);
    units.run_on(&pool);
    let limits = exports::server_limits(&config.iscsi_limits);
    Ok(Arc::new(Servers::start(pool, units, limits)?))
}

/// Wakes the owner, which then reports and retries waiting listeners of the API and of metrics.
fn report_entrances(manager: &ManagerThread) -> Result<(), StartError> {
    let reported = manager.manager().call(|owner| {
        owner.listeners.report();
        Ok(())
    });
    let ended = |_| StartError::from("the objects' thread ended during the start".to_owned());
    reported.map_err(ended)
}

/// Logs values of the file that a change at run time replaces.
pub fn log_shadowed(lines: &[String]) {
    for change in lines {
        tracing::warn!(
            change,
            "value of the file not in effect: changed at run time"
        );
    }
}

/// Resumes the sessions of the previous daemon, then accepts other front ends. Front ends of failed sessions reconnect. All sockets are open
/// by now.
fn resume(mut handover: Handover, overview: &Overview) {
    let Some(transports) = overview.servers.transports() else {
        return;
    };
    transports.iscsi.close_unused_sockets();
    transports.vhost.close_unused_sockets();
    transports.nbd.close_unused_sockets();
    let sessions = handover.take_sessions();
    let sessions = sessions.inspect_err(|error| {
        tracing::error!("cannot take over sessions, front ends must reconnect: {error}")
    });
    for session in sessions.unwrap_or_default() {
        let export = session.export.clone();
        if let Err(error) = transports.vhost.take_over_session(session) {
            tracing::warn!(
                export,
                "cannot resume the session, its front end must reconnect: {error}"
            );
        }
    }
    transports.vhost.accept();
}

/// Opens the listener of the API or of metrics, if it is configured.
fn open_entrance(
    name: &'static str,
    address: Option<SocketAddr>,
    handed_over: Option<OwnedFd>,
    reasons: &mut Vec<String>,
) -> Option<Arc<TcpEntrance>> {
    let address = address?;
    let place = ListenAddress {
        address,
        handed_over,
    };
    match TcpEntrance::open(name, place) {
        Ok(entrance) => Some(entrance),
        Err(error) => {
            let served = match name {
                "api" => "the API",
                name => name,
            };
            reasons.push(format!("cannot serve {served} on {address}: {error}"));
            None
        }
    }
}

/// Serves the API over TCP, to clients with a token.
fn serve_tcp(
    entrance: Arc<TcpEntrance>,
    access: &AccessConfig,
    tokens: Option<&Tokens>,
    asked: &Api,
) -> Result<control::TcpServer, StartError> {
    let address = entrance.address;
    // The configuration check refuses an address without a token.
    let Some(tokens) = tokens else {
        let reason = format!(
            "the API on {address} needs a token; hint: set token_file or --token-file FILE"
        );
        return Err(reason.into());
    };
    if let Some(overview) = &asked.overview {
        overview.servers.add_entrance(Arc::clone(&entrance));
    }
    let names = Names::new(&access.api_names);
    let server = control::TcpServer::start(entrance, asked.clone(), tokens.clone(), names);
    let server = server.map_err(|error| format!("cannot serve the API on {address}: {error}"))?;
    if let Some(address) = server.address() {
        tracing::info!(%address, "API served over TCP, with tokens");
    }
    Ok(server)
}

fn serve_metrics(
    entrance: Arc<TcpEntrance>,
    overview: &Arc<Overview>,
    tokens: Option<Tokens>,
) -> Result<metrics::Listener, StartError> {
    let address = entrance.address;
    overview.servers.add_entrance(Arc::clone(&entrance));
    let view: Arc<dyn View> = Arc::clone(overview) as Arc<dyn View>;
    let tls = overview.servers.api_tls.clone();
    metrics::Listener::start(entrance, view, tokens, tls)
        .map_err(|error| format!("cannot serve metrics on {address}: {error}").into())
}

/// Records the history of all disks. The daemon can serve without it.
fn record_history(overview: &Arc<Overview>) -> Option<Sampler> {
    let live = Arc::clone(&overview.live);
    let disks = move || {
        let live = live.read().unwrap_or_else(PoisonError::into_inner);
        live.disks.keys().cloned().collect()
    };
    let history = Arc::clone(&overview.history);
    let sampler = Sampler::start(history, overview.servers.pool.clone(), disks);
    sampler
        .inspect_err(|error| tracing::warn!(%error, "cannot start a thread, disks have no history"))
        .ok()
}

/// Listens to uevents. Without them, sizes are checked only at status and reload requests.
fn listen_to_uevents(manager: &ManagerThread) -> Option<Uevents> {
    let uevents = Uevents::start(manager.manager());
    uevents
        .inspect_err(|error| {
            tracing::info!(%error, "cannot receive uevents, checking sizes of block devices only at `lunette status` and `lunette reload`");
        })
        .ok()
}

/// Returns the inherited, the configured or the default control socket. The latter two may have been handed over. A failure of the default one is not an error.
fn bind_control(
    config: &Config,
    options: &mut StartOptions,
    reasons: &mut Vec<String>,
) -> Option<control::Bound> {
    if let Some(inherited) = options.inherited_control.take() {
        let InheritedControl { path, listener } = inherited;
        return Some(control::Bound::inherited(path, listener));
    }
    let (usual, handed_over) = (options.control.take(), options.handover.take_control());
    let audience = match config.access.has_groups() {
        true => Audience::All,
        false => Audience::Owner,
    };
    let bind = |path| control::bind(path, audience, handed_over);
    if let Some(path) = &config.control {
        return match bind(path) {
            Ok(bound) => Some(bound),
            Err(error) => {
                reasons.push(format!("control socket: {error}"));
                None
            }
        };
    }
    match bind(&usual?) {
        Ok(bound) => Some(bound),
        Err(error @ BindError::InUse { .. }) => {
            tracing::warn!("control socket disabled: {error} with --control");
            None
        }
        Err(error) => {
            tracing::warn!("control socket disabled: {error}; hint: choose a path with --control");
            None
        }
    }
}

fn worker_options(workers: &WorkersConfig) -> WorkerOptions {
    // The configuration bounds both: CPU numbers to 65535, workers to 128.
    let cpus = match &workers.placement {
        Placement::Count(_) => Vec::new(),
        Placement::Cpus(cpus) => cpus.iter().map(|cpu| *cpu as u32).collect(),
    };
    WorkerOptions {
        count: workers.placement.count() as u32,
        cpus,
        poll: workers.poll_limits(),
    }
}

impl Running {
    /// Returns the exports of the start. All of them accept clients except those that wait for a listener.
    pub fn ready(&self) -> &[ReadyExport] {
        &self.ready
    }

    /// Returns true if this daemon served one inherited connection and its client has left.
    pub fn is_left(&self) -> bool {
        let gone = |ready: &ReadyExport| {
            let status = self.overview.export_status();
            let found = status.iter().find(|export| export.name == ready.name);
            ready.endpoint == Endpoint::Connection && found.is_none_or(|export| !export.connected)
        };
        self.ready.iter().any(gone)
    }

    /// Returns true if this daemon serves one inherited connection. The caller must then poll [`Running::is_left`].
    pub fn has_one_client(&self) -> bool {
        let is_connection = |ready: &ReadyExport| ready.endpoint == Endpoint::Connection;
        self.ready.iter().any(is_connection)
    }

    /// Returns the path of the control socket, if there is one.
    pub fn control(&self) -> Option<&std::path::Path> {
        self.control.as_ref().map(control::Server::path)
    }

    /// Notifies the service manager at least every `time` while the workers make progress.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn watchdog(&self, notifier: Arc<Notifier>, time: Duration) -> std::io::Result<Watchdog> {
        Watchdog::start(self.overview.servers.pool.clone(), notifier, time)
    }

    /// Returns the address of the metrics listener, if it is open.
    pub fn metrics(&self) -> Option<std::net::SocketAddr> {
        self.metrics.as_ref().and_then(metrics::Listener::address)
    }

    /// Calls `watcher` whenever a listener begins to wait or opens. The watcher must not change objects.
    pub fn watch_listeners(&self, watcher: impl Fn() + Send + Sync + 'static) {
        self.overview.servers.watch_listeners(watcher);
    }

    /// Refuses a start after which no client could reach the daemon.
    fn check_reachable(&self) -> Result<(), StartError> {
        let waiting = self.overview.servers.waiting_listeners();
        let api = self.api.as_ref().and_then(control::TcpServer::address);
        let is_ready = |ready: &ReadyExport| ready.endpoint != Endpoint::Waiting;
        if waiting.is_empty()
            || self.control.is_some()
            || api.is_some()
            || self.metrics().is_some()
            || self.ready.iter().any(is_ready)
        {
            return Ok(());
        }
        let reasons = waiting.iter();
        let reasons = reasons.map(|one| format!("{one} cannot be opened: {}", one.reason));
        let mut reasons: Vec<String> = reasons.collect();
        reasons.push(
            "cannot start without a control socket, because no listener could be opened; hint: --control PATH"
                .to_owned(),
        );
        Err(StartError { reasons })
    }

    /// Returns the measurements of all queues.
    pub fn snapshot(&self) -> Snapshot {
        self.overview.snapshot()
    }

    /// Ends API clients, jobs, changes and clients of exports.
    fn end_clients(&mut self) {
        self.control = None;
        self.api = None;
        self.metrics = None;
        // Jobs return their disks to the source, which needs the owner's thread.
        self.overview.jobs.end();
        self.manager = None;
        self.overview.servers.end();
    }

    /// Returns the served objects and their clients.
    pub fn status(&self) -> Status {
        self.overview.status()
    }

    /// Returns a handle that reloads the configuration, on any thread and while the daemon ends.
    pub fn reloader(&self) -> Reloader {
        Reloader {
            reload: self.reload.clone(),
            manager: self.manager.as_ref().map(ManagerThread::manager),
            overview: self.overview.clone(),
        }
    }
}

/// Reloads the configuration file.
pub struct Reloader {
    reload: Option<Reload>,
    manager: Option<Manager>,
    overview: Arc<Overview>,
}

impl Reloader {
    /// Applies the smallest set of changes that the file requires, or none. Waits for clients of removed objects.
    ///
    /// # Errors
    /// All reasons for a refusal. Nothing has changed then.
    pub fn reload(&self) -> Result<ChangeResult, Vec<String>> {
        let because = |refusal: Refusal| -> Vec<String> {
            refusal.faults().iter().map(ToString::to_string).collect()
        };
        let Some(reload) = &self.reload else {
            return Err(vec![NO_FILE.to_owned()]);
        };
        let config = reload().map_err(|mistakes| vec![mistakes.to_string()])?;
        let manager = self.manager.as_ref();
        let manager = manager.ok_or(Refusal::Ending).map_err(because)?;
        let result =
            manager.change_blocking(Work::Reload(Box::new(config)), ChangeOptions::default());
        result.map_err(because)
    }

    /// Returns the served objects and their clients.
    pub fn status(&self) -> Status {
        self.overview.status()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self._sampler = None;
        self.end_clients();
        // Remaining readers must keep no disk open: closing an image releases its reservations.
        let mut live = self.overview.write_live();
        let disks = live.take_disks();
        let config = Arc::clone(&live.config);
        drop(live);
        disks
            .values()
            .for_each(|disk| self.overview.servers.detach_disk(disk));
        handover::flush_before_close(&config, &disks);
        drop(disks);
        let files = |disk: &str| {
            let disk = config.disk(disk);
            disk.map_or_else(Vec::new, |disk| block_devices::files_of(&disk.backend))
        };
        self.overview.bitmaps.close(files);
    }
}

#[cfg(test)]
#[path = "running_tests.rs"]
mod tests;
