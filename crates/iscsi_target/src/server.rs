//! The accepting thread of all portals. It places each connection on the next worker, or on one that its target is placed on.
//!
//! The thread also runs the clock: once a second, while there are connections, it notifies those with an expired deadline.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bdev::Disk;
use iscsi::login::ChapUser;
use iscsi::negotiation::SessionParameters;
use latency::{Clock, UnitAddress};
use reactor::{Accepting, Pool, RateLimit, SourceHandle, Worker, write_listen_error};
use scsi::{AccessStates, AttachError};
use scsi_exec::{Call, Hold, TaskOperation, Tasks, Units};

use crate::connection::Connection;
use crate::initiator_counters::InitiatorStatus;
use crate::limits::ServerLimits;
use crate::new_connections::NewConnections;
use crate::portals::{Portals, WaitingPortal};
use crate::refused_logins::RefusedLogin;
use crate::shared::{ConnectionHandle, ConnectionStatus, SessionChange, SharedServer, lock};
use crate::target::{IscsiTarget, PortGroupStatus, TargetOptions};
use iscsi::access::Portal;

static REFUSAL_LOG: RateLimit = RateLimit::new(Duration::from_secs(1));

/// Time that the end of a server waits for connections to drain.
const END_TIME: Duration = Duration::from_secs(5);
const SECOND: Duration = Duration::from_secs(1);

/// Error of a change to the targets.
#[derive(Debug)]
pub enum ServerError {
    /// The portal's address cannot be listened on.
    Bind(SocketAddr, io::Error),
    /// The name is not an iSCSI name.
    Name(String),
    /// A target of this name exists.
    Exists(String),
    /// No target of this name exists.
    Missing(String),
    /// A logical unit cannot be attached.
    Lun(AttachError),
}

impl std::fmt::Display for ServerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ServerError::Bind(address, error) => {
                write_listen_error(f, *address, error, "target program")
            }
            ServerError::Name(name) => write!(
                f,
                "{name:?} is not an iSCSI name such as iqn.2026-11.org.example:t0"
            ),
            ServerError::Exists(name) => write!(f, "target {name} already exists"),
            ServerError::Missing(name) => write!(f, "there is no target {name}"),
            ServerError::Lun(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ServerError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ServerError::Bind(_, error) => Some(error),
            ServerError::Lun(error) => Some(error),
            _ => None,
        }
    }
}

/// Status of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetStatus {
    /// Target name.
    pub name: String,
    /// Open portals, as bound.
    pub portals: Vec<SocketAddr>,
    /// Number of sessions.
    pub sessions: usize,
    /// Number of connections of these sessions.
    pub connections: usize,
}

/// Status of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionStatus {
    /// Target session identifying handle, unique while the session exists.
    pub tsih: u16,
    /// Target name.
    pub target: String,
    /// Initiator name.
    pub initiator: String,
    /// Initiator part of the session identifier.
    pub isid: [u8; 6],
    /// Target portal group tag.
    pub portal_group: u16,
    /// Connections that are logged in.
    pub connections: Vec<ConnectionStatus>,
    /// Counters since login.
    pub counters: latency::Counters,
    /// Negotiated parameters.
    pub parameters: SessionParameters,
    /// Maximum number of commands in progress.
    pub window: u32,
}

struct ServerState {
    shared: Arc<SharedServer>,
    /// Not shared with connections: dropping the last reference joins the workers.
    pool: Arc<Pool>,
    portals: Mutex<Portals>,
    accepting: Accepting,
}

/// All iSCSI targets of a process. Dropping it ends every session.
pub struct Server {
    state: Arc<ServerState>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts the accepting thread, without portals.
    ///
    /// # Errors
    /// Fails if the kernel refuses a thread or a descriptor.
    pub fn start(pool: Arc<Pool>, units: Arc<Units>, limits: ServerLimits) -> io::Result<Server> {
        let state = Arc::new(ServerState {
            shared: Arc::new(SharedServer::new(units, limits)),
            pool,
            portals: Mutex::default(),
            accepting: Accepting::new()?,
        });
        let accepting = state.clone();
        let thread = std::thread::Builder::new()
            .name("iscsi".into())
            .spawn(move || match sandbox::confine(sandbox::Thread::Session) {
                Ok(()) => accept_all(&accepting),
                Err(error) => tracing::error!("cannot accept initiators: {error}"),
            })?;
        Ok(Server {
            state,
            thread: Some(thread),
        })
    }

    /// Adds a target with these disks at their LUNs. Returns its open portals, as bound.
    ///
    /// # Errors
    /// Fails if the name is invalid or taken, a portal cannot be opened, or a LUN is not allowed.
    pub fn add_target(
        &self,
        options: TargetOptions,
        luns: &[(u16, Arc<Disk>)],
    ) -> Result<Vec<SocketAddr>, ServerError> {
        let added = self.try_add_target(options, luns);
        if added.is_err() {
            self.close_unused_portals();
        }
        added
    }

    fn try_add_target(
        &self,
        options: TargetOptions,
        luns: &[(u16, Arc<Disk>)],
    ) -> Result<Vec<SocketAddr>, ServerError> {
        let shared = &self.state.shared;
        let Some(key) = iscsi_name::normalised(&options.name).map(|key| key.into_owned()) else {
            return Err(ServerError::Name(options.name));
        };
        if let Some(known) = shared.target(&key) {
            return Err(ServerError::Exists(known.options.name.clone()));
        }
        let bound = self.listen(&options.portals)?;
        let target = IscsiTarget::new(options, &bound, &shared.units, shared.target_memory());
        target
            .add_luns(&shared.units, luns)
            .map_err(ServerError::Lun)?;
        lock(&shared.targets).insert(key, Arc::new(target));
        self.state.accepting.wake();
        let unreachable = lock(&shared.unreachable_portals);
        let open = bound.iter().map(|portal| portal.address);
        Ok(open.filter(|at| !unreachable.contains(at)).collect())
    }

    /// Removes a target: ends its sessions and closes portals that no other target has. `hold` is kept until none of its I/O is in flight.
    /// Returns false if there is no such target.
    pub fn remove_target(&self, name: &str, hold: &Hold) -> bool {
        let shared = &self.state.shared;
        let key = iscsi_name::normalised(name).unwrap_or_default();
        let Some(target) = lock(&shared.targets).remove(&*key) else {
            return false;
        };
        let name = target.options.name.as_str();
        for session in shared.sessions.sessions() {
            if session.identity.target_name.as_deref() == Some(name)
                && !shared.end_abandoned(session.tsih)
            {
                for key in session.connections() {
                    shared.dismiss_connection(key, Some(hold.clone()));
                }
            }
        }
        for handle in shared.connections() {
            let (name, hold) = (name.to_owned(), hold.clone());
            handle.send(move |connection, io| connection.end_login_to(io, &name, hold));
        }
        self.close_unused_portals();
        true
    }

    /// Replaces the CHAP users of a target. Current sessions continue. Returns false if the users are unchanged.
    ///
    /// # Errors
    /// Fails if there is no such target.
    pub fn set_chap_users(
        &self,
        target: &str,
        users: HashMap<String, ChapUser>,
    ) -> Result<bool, ServerError> {
        Ok(self.found(target)?.set_chap_users(users))
    }

    /// Replaces the CHAP users of discovery sessions. If there are any, every discovery session must authenticate as one of them; the users
    /// of targets are then not accepted. Returns false if the users are unchanged.
    pub fn set_discovery_users(&self, users: HashMap<String, ChapUser>) -> bool {
        self.state.shared.set_discovery_users(users)
    }

    /// Returns the CHAP users of a target, or `None` if there is no such target.
    pub fn chap_users(&self, target: &str) -> Option<Arc<HashMap<String, ChapUser>>> {
        Some(self.state.shared.target(target)?.chap_users())
    }

    /// Sets the access states of portal groups of a target.
    ///
    /// # Errors
    /// Fails if there is no such target.
    pub fn set_access_states(
        &self,
        target: &str,
        states: &AccessStates,
    ) -> Result<(), ServerError> {
        self.found(target)?.set_access_states(states);
        Ok(())
    }

    /// Returns the portal groups of a target with their access states; none if there is no such target.
    pub fn port_groups(&self, target: &str) -> Vec<PortGroupStatus> {
        let target = self.state.shared.target(target);
        target.map_or_else(Vec::new, |target| target.port_groups())
    }

    /// Adds disks to a target, all or none. Initiators get unit attentions.
    ///
    /// # Errors
    /// Fails if there is no such target, or if a LUN is taken.
    pub fn add_luns(&self, target: &str, luns: &[(u16, Arc<Disk>)]) -> Result<(), ServerError> {
        self.found(target)?
            .add_luns(&self.state.shared.units, luns)
            .map_err(ServerError::Lun)
    }

    /// Removes a disk from a target. Returns false if the LUN has none. Initiators get unit attentions on the other units, and "logical
    /// unit not supported" for later commands.
    ///
    /// # Errors
    /// Fails if there is no such target.
    pub fn detach_lun(&self, target: &str, lun: u16) -> Result<bool, ServerError> {
        Ok(self.found(target)?.scsi.detach_unit(lun).is_some())
    }

    /// Keeps `hold` until no task of these units is in flight; `abort` also aborts the tasks.
    pub fn end_tasks(&self, target: &str, luns: &[u16], abort: bool, hold: &Hold) {
        let Some(target) = self.state.shared.target(target) else {
            return;
        };
        let target: Arc<str> = target.options.name.as_str().into();
        let units = luns.iter();
        let units = units.map(|&lun| UnitAddress { target: 0, lun });
        let operation = if abort {
            TaskOperation::Remove
        } else {
            TaskOperation::End
        };
        let call = Call::new(Tasks::Units(units.collect()), operation);
        for handle in self.state.shared.connections() {
            let (target, call, hold) = (target.clone(), call.clone(), hold.clone());
            handle.send(move |connection, io| connection.end_tasks(io, &target, &call, &hold));
        }
    }

    /// Ends a session: asks its initiator to log out. Drops the initiator after a few seconds, or at the second call. Returns false if
    /// there is no session with this TSIH.
    pub fn end_session(&self, tsih: u16) -> bool {
        let shared = &self.state.shared;
        let Some(session) = shared.sessions.session(tsih) else {
            return false;
        };
        if !shared.end_abandoned(tsih) {
            for key in session.connections() {
                shared.request_logout(key);
            }
        }
        true
    }

    fn found(&self, target: &str) -> Result<Arc<IscsiTarget>, ServerError> {
        let found = self.state.shared.target(target);
        found.ok_or_else(|| ServerError::Missing(target.to_owned()))
    }

    /// Returns the configured portal addresses of all targets.
    fn configured_addresses(&self) -> BTreeSet<SocketAddr> {
        let targets = lock(&self.state.shared.targets);
        let configured = targets.values().flat_map(|target| &target.options.portals);
        configured.map(|portal| portal.address).collect()
    }

    fn close_unused_portals(&self) {
        let configured = self.configured_addresses();
        let mut open = lock(&self.state.portals);
        if let Err((portal, error)) = open.set(&configured) {
            tracing::warn!(%portal, %error, "cannot close unused portals");
        }
        self.set_unreachable(&open);
        drop(open);
        self.state.accepting.wake();
    }

    /// Opens these portals too. Returns them as bound.
    fn listen(&self, portals: &[Portal]) -> Result<Vec<Portal>, ServerError> {
        let mut configured = self.configured_addresses();
        configured.extend(portals.iter().map(|portal| portal.address));
        let mut open = lock(&self.state.portals);
        open.set(&configured)
            .map_err(|(portal, error)| ServerError::Bind(portal, error))?;
        self.set_unreachable(&open);
        let bound = portals.iter().map(|portal| Portal {
            address: open.bound(portal.address),
            ..*portal
        });
        Ok(bound.collect())
    }

    fn set_unreachable(&self, portals: &Portals) {
        *lock(&self.state.shared.unreachable_portals) = portals.unreachable();
    }

    /// Retries waiting portals that are due. Returns those that opened, with the target of each.
    pub fn retry_portals(&self, now: Instant) -> Vec<(String, SocketAddr)> {
        let mut portals = lock(&self.state.portals);
        let opened = portals.retry(now);
        self.set_unreachable(&portals);
        drop(portals);
        self.state.accepting.wake();
        let opened = opened.into_iter();
        let of_targets =
            opened.flat_map(|at| self.targets_at(at).into_iter().map(move |t| (t, at)));
        of_targets.collect()
    }

    /// Returns the targets that are configured with this portal address.
    fn targets_at(&self, configured: SocketAddr) -> Vec<String> {
        let targets = lock(&self.state.shared.targets);
        let options = targets.values().map(|target| &target.options);
        let with_portal =
            options.filter(|one| one.portals.iter().any(|at| at.address == configured));
        with_portal.map(|one| one.name.clone()).collect()
    }

    /// Returns the time of the next retry of a waiting portal.
    pub fn next_portal_try(&self) -> Option<Instant> {
        lock(&self.state.portals).next_try()
    }

    /// Returns the portals that are configured and not open yet, with the target of each.
    pub fn waiting_portals(&self) -> Vec<(String, WaitingPortal)> {
        let waiting = lock(&self.state.portals).waiting().into_iter();
        let of_targets = waiting.flat_map(|portal| {
            let targets = self.targets_at(portal.address).into_iter();
            targets.map(move |target| (target, portal.clone()))
        });
        of_targets.collect()
    }

    /// Returns the status of every target.
    pub fn status(&self) -> Vec<TargetStatus> {
        let shared = &self.state.shared;
        let sessions = shared.sessions.sessions();
        let unreachable = lock(&shared.unreachable_portals).clone();
        let targets = lock(&shared.targets);
        let status = |target: &Arc<IscsiTarget>| {
            let name = &target.options.name;
            let ours = sessions
                .iter()
                .filter(|session| session.identity.target_name.as_ref() == Some(name));
            let groups = lock(&target.groups);
            TargetStatus {
                name: name.clone(),
                portals: groups
                    .iter()
                    .flat_map(|group| group.portals.clone())
                    .filter(|portal| !unreachable.contains(portal))
                    .collect(),
                sessions: ours.clone().count(),
                connections: ours.map(|session| session.connections().len()).sum(),
            }
        };
        targets.values().map(status).collect()
    }

    /// Returns the bytes that all connections hold for commands and output. Queries every worker.
    pub fn memory_in_use(&self) -> u64 {
        let bytes = |handle: ConnectionHandle| {
            let worker = handle.worker.clone();
            let bytes = worker.call(move |worker| {
                handle.with(worker, |connection, _| {
                    connection.memory.buffers.in_use() as u64
                })
            });
            bytes.ok().flatten().unwrap_or(0)
        };
        self.state.shared.connections().into_iter().map(bytes).sum()
    }

    /// Returns the status of every session, except discovery sessions.
    pub fn sessions(&self) -> Vec<SessionStatus> {
        let sessions = self.state.shared.sessions.sessions();
        let status = |session: Arc<iscsi::session::Session>| {
            let identity = &session.identity;
            let connections = session.connections().into_iter();
            let status = |key| self.state.shared.connection_status(key);
            Some(SessionStatus {
                tsih: session.tsih,
                target: identity.target_name.clone()?,
                initiator: identity.initiator_name.clone(),
                isid: identity.isid,
                portal_group: identity.portal_group_tag,
                connections: connections.filter_map(status).collect(),
                counters: self.state.shared.tallies.of_session(session.tsih),
                parameters: session.parameters.clone(),
                window: session.window.size(),
            })
        };
        sessions.into_iter().filter_map(status).collect()
    }

    /// Returns the counters of all initiators with sessions, and of the most recent ones without.
    pub fn initiators(&self) -> Vec<InitiatorStatus> {
        self.state.shared.tallies.all()
    }

    /// Returns recent refused logins, ordered by the last attempt.
    pub fn refused_logins(&self) -> Vec<RefusedLogin> {
        self.state.shared.refused_logins.all()
    }

    /// Sets the function that is called when a session begins or ends. It must not block. Later calls have no effect.
    pub fn watch_sessions(&self, watcher: impl Fn(SessionChange) + Send + Sync + 'static) {
        self.state.shared.watcher.set(Box::new(watcher)).ok();
    }

    /// Returns the connections of a target's sessions: TSIH, CID and worker number.
    pub fn connection_workers(&self, target: &str) -> Vec<(u16, u16, u32)> {
        let sessions = self.state.shared.sessions.sessions();
        let ours = sessions
            .iter()
            .filter(|session| session.identity.target_name.as_deref() == Some(target));
        let keys = ours.flat_map(|session| session.connections());
        let placed = keys.filter_map(|key| {
            let worker = self.state.shared.worker_of(key)?;
            Some((key.tsih, key.cid, worker))
        });
        placed.collect()
    }

    /// Sets whether new portals wait that cannot be opened yet. Otherwise [`Server::add_target`] fails. Initially they fail.
    pub fn set_may_wait(&self, may_wait: bool) {
        lock(&self.state.portals).set_may_wait(may_wait);
    }

    /// Takes the listening sockets of the previous daemon, for portals that are about to be opened.
    pub fn take_over_portals(&self, sockets: Vec<OwnedFd>) {
        lock(&self.state.portals).take_over(sockets);
    }

    /// Closes unused inherited sockets. All targets of the start were added.
    pub fn close_unused_sockets(&self) {
        lock(&self.state.portals).forget_inherited();
    }

    /// Stops accepting and returns the listening sockets for another process. Initiators wait in their backlogs meanwhile.
    pub fn hand_over_portals(&self) -> Vec<OwnedFd> {
        let left = lock(&self.state.portals).hand_over();
        self.state.accepting.wake();
        left
    }

    /// Returns the number of TCP connections, logged in or not.
    pub fn connections(&self) -> usize {
        self.state.shared.connection_count()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.accepting.end();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
        lock(&self.state.portals).set(&BTreeSet::new()).ok();
        let connections = self.state.shared.connections();
        let drained = SourceHandle::drain_all(&connections, END_TIME, |connection, io, drained| {
            connection.drain.server = Some(drained);
            connection.dismiss(io, "the daemon is shutting down");
        });
        if !drained {
            tracing::warn!("connections did not end in time, ending without them");
        }
    }
}

fn accept_all(state: &Arc<ServerState>) {
    let mut half_open = VecDeque::new();
    let mut arrivals = NewConnections::default();
    let login_time = state.shared.limits.login_time;
    let clock = Clock::shared();
    let mut last_tick = clock.elapsed();
    while state.accepting.is_accepting() {
        let listeners = lock(&state.portals).listeners();
        let busy = state.shared.connection_count() > 0 || !state.shared.retained.is_empty();
        let now = clock.elapsed();
        let tick = busy.then(|| SECOND.saturating_sub(now.saturating_sub(last_tick)));
        let login = arrivals.patience(now, login_time);
        let timeout = tick.into_iter().chain(login).min();
        let sockets = arrivals.sockets();
        let accepting = &state.accepting;
        accepting.wait_with(&listeners, &sockets, timeout, "initiators");
        drop(sockets);
        for listener in &listeners {
            accept_one(listener, state, &mut arrivals, &mut half_open);
        }
        for one in arrivals.take(clock.elapsed(), login_time) {
            let target = one.target.as_deref();
            keep_half_open(
                start_connection(one.stream, one.peer, target, state),
                state,
                &mut half_open,
            );
        }
        let now = clock.elapsed();
        if !busy {
            last_tick = now;
        } else if now.saturating_sub(last_tick) >= SECOND {
            last_tick = now;
            for handle in state.shared.second_passed() {
                handle.send(Connection::check_deadlines);
            }
        }
    }
}

fn refuse(why: &dyn std::fmt::Display) {
    if let Some(suppressed) = REFUSAL_LOG.pass() {
        tracing::warn!(suppressed, "initiator refused: {why}");
    }
}

fn accept_one(
    listener: &TcpListener,
    state: &ServerState,
    arrivals: &mut NewConnections,
    half_open: &mut VecDeque<ConnectionHandle>,
) {
    let accepted = {
        let portals = lock(&state.portals);
        // Another process may accept here already.
        if !portals.has(listener) {
            return;
        }
        listener.accept()
    };
    let Some((stream, peer)) = Accepting::accepted(accepted, |error| refuse(error)) else {
        return;
    };
    let shared = &state.shared;
    if shared.connection_count() + arrivals.len() >= shared.limits.connections {
        return refuse(&"too many connections");
    }
    if state.pool.has_placements() {
        let now = Clock::shared().elapsed();
        return arrivals.add(stream, peer, now, shared.limits.half_open);
    }
    keep_half_open(
        start_connection(stream, peer, None, state),
        state,
        half_open,
    );
}

/// Records a connection that is not logged in. Above the limit, ends the oldest.
fn keep_half_open(
    started: io::Result<ConnectionHandle>,
    state: &ServerState,
    half_open: &mut VecDeque<ConnectionHandle>,
) {
    let shared = &state.shared;
    match started {
        Ok(handle) => half_open.push_back(handle),
        Err(error) => return refuse(&error),
    }
    if half_open.len() > shared.limits.half_open
        && let Some(oldest) = half_open.pop_front()
    {
        // Usually it has logged in long ago.
        oldest.send(Connection::end_unless_logged_in);
    }
}

/// Places a connection on a worker. `target`: the name in its Login request, if known.
fn start_connection(
    stream: TcpStream,
    peer: SocketAddr,
    target: Option<&str>,
    state: &ServerState,
) -> io::Result<ConnectionHandle> {
    let portal = stream.local_addr()?;
    // Every message is complete, so a delay would only cost time.
    stream.set_nodelay(true)?;
    let worker = match target.and_then(|name| state.shared.target(name)) {
        Some(target) => state.pool.select_worker_for(&target.options.name),
        None => state.pool.select_worker(),
    };
    let number = state.shared.next_number();
    let shared = state.shared.clone();
    let socket = OwnedFd::from(stream);
    let added = worker.call(move |w| begin(w, shared, number, socket, (peer, portal)));
    added.map_err(io::Error::other)
}

/// Begins a connection on this worker. `addresses`: of the initiator and of the portal.
pub(crate) fn begin(
    worker: &mut Worker,
    shared: Arc<SharedServer>,
    number: u64,
    socket: OwnedFd,
    addresses: (SocketAddr, SocketAddr),
) -> ConnectionHandle {
    let handle = SourceHandle::add(worker, number, |io, handle: ConnectionHandle| {
        shared.add_connection(handle.clone());
        Connection::new(io, handle, shared, socket, addresses)
    });
    // The wake-up starts the first receive.
    worker.wake(handle.source);
    handle
}
