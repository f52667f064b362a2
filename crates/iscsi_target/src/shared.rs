//! State shared by connections on different workers: targets, sessions with their nexuses, and the handle of each connection.
//!
//! Control plane only: used at login, at the end of a connection, and for task management.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use iscsi::login::{ChapUser, LoggedIn};
use iscsi::pdu::Digests;
use iscsi::session::{ConnectionKey, SessionTable};
use reactor::{RateLimit, SourceHandle};
use request_engine::{GroupMemory, MemoryBudget};
use scsi::{Nexus, TransportId};
use scsi_exec::{Hold, Units};

use crate::connection::Connection;
use crate::contest::Contest;
use crate::deadlines::Deadlines;
use crate::initiator_counters::InitiatorCounters;
use crate::limits::ServerLimits;
use crate::memory::SessionMemory;
use crate::refused_logins::RefusedLogins;
use crate::retained::Retained;
use crate::target::IscsiTarget;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Replaces the users. Returns false if they are unchanged.
pub(crate) fn replace_users(
    known: &mut Arc<HashMap<String, ChapUser>>,
    users: HashMap<String, ChapUser>,
) -> bool {
    let is_known =
        |(name, user): (&String, &ChapUser)| known.get(name).is_some_and(|one| one.is(user));
    if known.len() == users.len() && users.iter().all(is_known) {
        return false;
    }
    *known = Arc::new(users);
    true
}

pub(crate) type ConnectionHandle = SourceHandle<Connection>;

/// The I_T nexus of a session.
#[derive(Clone)]
pub(crate) struct SessionNexus {
    pub target: Arc<IscsiTarget>,
    pub nexus: Arc<Nexus>,
    pub read_only: bool,
    pub initiator: String,
    /// CHAP user of the first login.
    pub chap_user: Option<String>,
    /// Takeovers of its identity.
    pub contest: Contest,
    pub memory: SessionMemory,
}

/// Exists until no I/O of a connection can access a disk. A later login through the same ports waits for this, even if the connection has
/// ended: its I/O must not be overtaken by old I/O.
pub(crate) struct InFlight {
    tsih: u16,
    handle: ConnectionHandle,
    ended: AtomicBool,
    waits: Mutex<Vec<Hold>>,
}

impl InFlight {
    /// Marks the connection as ended: it begins no more I/O.
    pub fn ended(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Keeps `hold` until the connection has drained.
    pub fn keep(&self, hold: Hold) {
        lock(&self.waits).push(hold);
    }
}

/// Initiator port and relative identifier of the target port, which is a portal group of a target. Another group of the target is another
/// port, and the initiator may use the same ISID there (RFC 7143, 10.1.1).
type Ports = (TransportId, u16);

/// A connection in the full feature phase.
struct LoggedInConnection {
    number: u64,
    status: ConnectionStatus,
}

/// A connection of a session, and its keys from the end of the login.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionStatus {
    /// Connection identifier (CID).
    pub cid: u16,
    /// Address of the initiator.
    pub address: String,
    /// Digests in use.
    pub digests: Digests,
    /// MaxRecvDataSegmentLength of the initiator, in bytes.
    pub initiator_max_recv: u32,
    /// MaxRecvDataSegmentLength of the target, in bytes.
    pub target_max_recv: u32,
}

impl ConnectionStatus {
    pub(crate) fn new(login: &LoggedIn) -> ConnectionStatus {
        ConnectionStatus {
            cid: login.connection.cid,
            address: login.visitor.address.clone(),
            digests: login.parameters.digests,
            initiator_max_recv: login.parameters.peer_max_recv,
            target_max_recv: login.max_recv,
        }
    }
}

#[derive(Default)]
struct ConnectionTable {
    /// Number of the newest connection.
    last_number: u64,
    all: HashMap<u64, ConnectionHandle>,
    by_key: HashMap<ConnectionKey, LoggedInConnection>,
    alarms: Deadlines,
    /// Connections to be dropped before their handle was known.
    doomed: VecDeque<ConnectionKey>,
}

/// Coarse clock in seconds, running while connections exist. Every transfer reads it. It has cache lines of its own and is written once a
/// second.
#[derive(Default)]
#[repr(align(128))]
struct Seconds(AtomicU64);

/// Minimum interval of messages to connections about memory.
pub(crate) const RECLAIM_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of `doomed` entries: more than can exist between a login and its first step.
const DOOMED_MAX: usize = 1024;

pub(crate) struct SharedServer {
    pub units: Arc<Units>,
    pub limits: ServerLimits,
    /// Targets by normalised name.
    pub targets: Mutex<BTreeMap<String, Arc<IscsiTarget>>>,
    /// Bound addresses that nothing listens at yet: discovery leaves them out.
    pub unreachable_portals: Mutex<BTreeSet<SocketAddr>>,
    /// CHAP users of discovery sessions. If there are any, discovery requires one of them.
    discovery_users: Mutex<Arc<HashMap<String, ChapUser>>>,
    pub sessions: SessionTable,
    /// Nexuses by TSIH.
    pub nexuses: Mutex<HashMap<u16, SessionNexus>>,
    /// Sessions with lost connections.
    pub retained: Retained,
    /// Counters per initiator.
    pub tallies: InitiatorCounters,
    /// Recent refused logins.
    pub refused_logins: RefusedLogins,
    /// Called when a session begins or ends.
    pub watcher: OnceLock<SessionWatcher>,
    table: Mutex<ConnectionTable>,
    /// All connections that have not drained.
    in_flight: Mutex<HashMap<Ports, Vec<Weak<InFlight>>>>,
    seconds: Seconds,
    memory: ServerMemory,
}

/// Memory for the data of all sessions.
struct ServerMemory {
    budget: Arc<MemoryBudget>,
    /// Limit of messages to all connections about memory.
    reclaims: RateLimit,
}

/// Start or end of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionChange {
    /// Target session identifying handle, unique while the session exists.
    pub tsih: u16,
    /// Target name.
    pub target: String,
    /// Initiator name.
    pub initiator: String,
    /// True at the start, false at the end.
    pub opened: bool,
}

pub(crate) type SessionWatcher = Box<dyn Fn(SessionChange) + Send + Sync>;

impl SharedServer {
    pub fn new(units: Arc<Units>, limits: ServerLimits) -> SharedServer {
        let window = limits.protocol.commands_per_session;
        SharedServer {
            units,
            targets: Mutex::default(),
            unreachable_portals: Mutex::default(),
            discovery_users: Mutex::default(),
            sessions: SessionTable::new(limits.sessions, window),
            nexuses: Mutex::default(),
            retained: Retained::default(),
            table: Mutex::default(),
            in_flight: Mutex::default(),
            seconds: Seconds::default(),
            tallies: InitiatorCounters::default(),
            refused_logins: RefusedLogins::default(),
            watcher: OnceLock::new(),
            memory: ServerMemory {
                budget: MemoryBudget::new(limits.leased_bytes()),
                reclaims: RateLimit::new(RECLAIM_INTERVAL),
            },
            limits,
        }
    }

    /// Reports the start or end of a session. The caller must hold `nexuses`, so that reports are in order.
    pub fn session_changed(&self, tsih: u16, nexus: &SessionNexus, opened: bool) {
        let (target, initiator) = (&nexus.target.options.name, &nexus.initiator);
        match opened {
            true => self.tallies.opened(tsih, target, initiator),
            false => self.tallies.closed(tsih),
        }
        if opened {
            self.refused_logins.forget(target, initiator);
        }
        if let Some(notify) = self.watcher.get() {
            notify(SessionChange {
                tsih,
                target: target.clone(),
                initiator: initiator.clone(),
                opened,
            });
        }
    }

    /// Returns the memory of a new target.
    pub fn target_memory(&self) -> Arc<GroupMemory> {
        GroupMemory::new(self.memory.budget.clone())
    }

    /// Has connections free their unused memory because one of the session waits: all connections if it waits for memory of the target or
    /// of the server, otherwise those of the session. See [`request_engine::Buffers::reclaim`].
    #[cold]
    pub fn reclaim_memory(&self, tsih: u16, of_session: &RateLimit, waits_beyond_own_limit: bool) {
        let limit = if waits_beyond_own_limit {
            &self.memory.reclaims
        } else {
            of_session
        };
        if limit.pass().is_none() {
            return;
        }
        let handles: Vec<ConnectionHandle> = match waits_beyond_own_limit {
            true => self.connections(),
            false => {
                let table = lock(&self.table);
                let session = table.by_key.iter().filter(|(key, _)| key.tsih == tsih);
                let handles = session.filter_map(|(_, one)| table.all.get(&one.number));
                handles.cloned().collect()
            }
        };
        for handle in handles {
            handle.send(|connection, _| connection.memory.buffers.reclaim());
        }
    }

    pub fn next_number(&self) -> u64 {
        let mut table = lock(&self.table);
        table.last_number += 1;
        table.last_number
    }

    pub fn target(&self, name: &str) -> Option<Arc<IscsiTarget>> {
        let key = iscsi_name::normalised(name)?;
        lock(&self.targets).get(&*key).cloned()
    }

    /// Returns the name of a target as configured, for any spelling of an initiator. An unknown name is returned unchanged.
    pub fn configured_name(&self, name: &str) -> String {
        match self.target(name) {
            Some(target) => target.options.name.clone(),
            None => name.to_owned(),
        }
    }

    pub fn discovery_users(&self) -> Arc<HashMap<String, ChapUser>> {
        lock(&self.discovery_users).clone()
    }

    /// Replaces the CHAP users of discovery sessions. Returns false if they are unchanged.
    pub fn set_discovery_users(&self, users: HashMap<String, ChapUser>) -> bool {
        replace_users(&mut lock(&self.discovery_users), users)
    }

    pub fn nexus(&self, tsih: u16) -> Option<SessionNexus> {
        lock(&self.nexuses).get(&tsih).cloned()
    }

    /// Registers a new connection of a session. Returns its entry and the entries that it must wait for: connections of earlier sessions
    /// through the same ports, and ended connections of its own session.
    pub fn begins(
        &self,
        nexus: &SessionNexus,
        tsih: u16,
        handle: ConnectionHandle,
    ) -> (Arc<InFlight>, Vec<Arc<InFlight>>) {
        let new = Arc::new(InFlight {
            tsih,
            handle,
            ended: AtomicBool::new(false),
            waits: Mutex::default(),
        });
        let ports = (
            nexus.nexus.initiator().clone(),
            nexus.nexus.port().relative_id,
        );
        let mut all = lock(&self.in_flight);
        all.retain(|_, of_ports| {
            of_ports.retain(|one| one.strong_count() > 0);
            !of_ports.is_empty()
        });
        let of_ports = all.entry(ports).or_default();
        let mut older: Vec<_> = of_ports.iter().filter_map(Weak::upgrade).collect();
        older.retain(|one| one.tsih != tsih || one.ended.load(Ordering::Acquire));
        of_ports.push(Arc::downgrade(&new));
        (new, older)
    }

    /// Aborts, as far as possible, the running tasks of an ended session's lost connections.
    pub fn abort_detached(&self, tsih: u16) {
        let all = lock(&self.in_flight);
        let of_ports = all.values().flatten().filter_map(Weak::upgrade);
        for one in of_ports.filter(|one| one.tsih == tsih && one.ended.load(Ordering::Acquire)) {
            one.handle.send(Connection::abort_detached);
        }
    }

    /// Keeps `hold` until the ended connections of a session have drained.
    pub fn keep_until_drained(&self, nexus: &SessionNexus, tsih: u16, hold: &Hold) {
        let ports = (
            nexus.nexus.initiator().clone(),
            nexus.nexus.port().relative_id,
        );
        let all = lock(&self.in_flight);
        let of_ports = all.get(&ports).into_iter().flatten();
        for one in of_ports.filter_map(Weak::upgrade) {
            if one.tsih == tsih && one.ended.load(Ordering::Acquire) {
                one.keep(hold.clone());
            }
        }
    }

    /// Returns the coarse clock.
    #[inline]
    pub fn seconds(&self) -> u64 {
        self.seconds.0.load(Ordering::Relaxed)
    }

    /// Advances the clock. Returns the connections with an expired deadline.
    pub fn second_passed(&self) -> Vec<ConnectionHandle> {
        let now = self.seconds.0.fetch_add(1, Ordering::Relaxed) + 1;
        for session in self.retained.expire(now) {
            self.end_abandoned(session.tsih);
        }
        let mut table = lock(&self.table);
        let mut due = Vec::new();
        while let Some(number) = table.alarms.next_due(now) {
            due.extend(table.all.get(&number).cloned());
        }
        due
    }

    /// Sets the deadline of a connection in `seconds`, at least 1, unless it has an earlier one.
    pub fn schedule_check(&self, number: u64, seconds: u64) {
        let second = self.seconds().saturating_add(seconds.max(1));
        let mut table = lock(&self.table);
        if table.all.contains_key(&number) {
            table.alarms.set(number, second);
        }
    }

    /// Adds a connection with its handle.
    pub fn add_connection(&self, handle: ConnectionHandle) {
        let number = handle.number;
        lock(&self.table).all.insert(number, handle);
        self.schedule_check(number, self.limits.login_time.as_secs());
    }

    /// Records the login of a connection. Returns false if it was displaced already.
    pub fn logged_in(&self, number: u64, login: &LoggedIn) -> bool {
        let key = login.connection;
        let status = ConnectionStatus::new(login);
        let mut table = lock(&self.table);
        if let Some(at) = table.doomed.iter().position(|doomed| *doomed == key) {
            table.doomed.remove(at);
            return false;
        }
        let connection = LoggedInConnection { number, status };
        table.by_key.insert(key, connection);
        true
    }

    /// Removes a connection.
    pub fn forget(&self, number: u64, key: Option<ConnectionKey>) {
        let mut table = lock(&self.table);
        table.all.remove(&number);
        table.alarms.forget(number);
        if let Some(key) = key {
            table.by_key.remove(&key);
        }
    }

    pub fn connections(&self) -> Vec<ConnectionHandle> {
        lock(&self.table).all.values().cloned().collect()
    }

    pub fn connection_count(&self) -> usize {
        lock(&self.table).all.len()
    }

    pub fn worker_of(&self, key: ConnectionKey) -> Option<u32> {
        self.handle(key).map(|handle| handle.worker.index())
    }

    fn handle(&self, key: ConnectionKey) -> Option<ConnectionHandle> {
        let table = lock(&self.table);
        let connection = table.by_key.get(&key)?;
        table.all.get(&connection.number).cloned()
    }

    /// Returns the status of a connection that is logged in.
    pub fn connection_status(&self, key: ConnectionKey) -> Option<ConnectionStatus> {
        let table = lock(&self.table);
        Some(table.by_key.get(&key)?.status.clone())
    }

    /// Drops a connection. `held` is dropped when nothing of it is in flight.
    pub fn drop_connection(&self, key: ConnectionKey, held: Option<Hold>) {
        match self.handle(key) {
            Some(handle) => handle.send(move |connection, io| {
                connection.drain.holds.extend(held);
                connection.end(io, "displaced");
            }),
            None => {
                let mut table = lock(&self.table);
                if table.doomed.len() == DOOMED_MAX {
                    table.doomed.pop_front();
                }
                table.doomed.push_back(key);
            }
        }
    }

    /// Closes a connection and leaves its tasks to another one of its session; `held` as above.
    pub fn remove_for_recovery(&self, key: ConnectionKey, held: Hold) {
        match self.handle(key) {
            Some(handle) => handle.send(move |connection, io| {
                connection.drain.holds.push(held);
                connection.end_for_recovery(io);
            }),
            None => self.drop_connection(key, None),
        }
    }

    /// Closes a connection that another one of its session has logged out. The session continues; `held` as above.
    pub fn log_out_connection(&self, key: ConnectionKey, held: Hold) {
        match self.handle(key) {
            Some(handle) => handle.send(move |connection, io| {
                connection.drain.holds.push(held);
                connection.end_logged_out(io);
            }),
            None => self.drop_connection(key, None),
        }
    }

    /// Drops a connection because its session ends, after an announcement to the initiator; `held` as above.
    pub fn dismiss_connection(&self, key: ConnectionKey, held: Option<Hold>) {
        match self.handle(key) {
            Some(handle) => handle.send(move |connection, io| {
                connection.drain.holds.extend(held);
                connection.dismiss(io, "dropped by the target");
            }),
            None => self.drop_connection(key, held),
        }
    }

    /// Asks a connection's initiator to log out within a time limit.
    pub fn request_logout(&self, key: ConnectionKey) {
        match self.handle(key) {
            Some(handle) => handle.send(Connection::request_logout),
            None => self.drop_connection(key, None),
        }
    }

    /// Makes another connection of a session continue parsing.
    pub fn wake(&self, tsih: u16, cid: u16) {
        let session = self.sessions.session(tsih);
        let key = session.and_then(|session| session.connection(cid));
        if let Some(handle) = key.and_then(|key| self.handle(key)) {
            handle.send(Connection::resume_parsing);
        }
    }
}
