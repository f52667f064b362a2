//! State shared by the accepting thread, connections on workers, and the control plane. Not used per request.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use latency::QueueRecord;
use nbd::handshake::Exports;
use nbd::{ExportInfo, Violation};
use reactor::{PeerRateLimit, RateLimit, SourceHandle};
use request_engine::{GroupMemory, MemoryBudget, SharedMemory};
use tls::ServerTls;

use crate::connection::Connection;
use crate::export::{Export, ExportOptions};
use crate::limits::ServerLimits;
use crate::listeners::Address;

static VIOLATION_LOG: PeerRateLimit = peer_log();

/// Creates the limit of log lines about one kind of fault of clients: one line every 10 s about each client, 5 lines per second about all.
pub(crate) const fn peer_log() -> PeerRateLimit {
    let all = RateLimit::with_burst(Duration::from_millis(200), 5);
    PeerRateLimit::new(Duration::from_secs(10), 1, all)
}

/// Minimum interval of messages to all connections about memory.
const RECLAIM_INTERVAL: Duration = Duration::from_millis(100);

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Start or end of a session, which is one connection with an open export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionChange {
    /// Number of the connection, unique in the process.
    pub number: u64,
    /// Name of the export in the daemon.
    pub export: String,
    /// Address of the client.
    pub client: String,
    /// True at the start, false at the end.
    pub opened: bool,
}

pub(crate) type SessionWatcher = Box<dyn Fn(SessionChange) + Send + Sync>;

pub(crate) type ConnectionHandle = SourceHandle<Connection>;

/// A connection in the transmission phase, as the control plane sees it.
pub(crate) struct Established {
    pub handle: ConnectionHandle,
    pub export: Arc<Export>,
    pub client: String,
    pub style: nbd::Style,
    pub record: Arc<QueueRecord>,
}

/// Counts a client until it is dropped, also if its connection cannot be set up.
pub(crate) struct Admitted {
    shared: Arc<SharedServer>,
    address: Option<IpAddr>,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut clients = lock(&self.shared.clients);
        clients.count -= 1;
        if let Some(address) = self.address
            && let Some(count) = clients.by_address.get_mut(&address)
        {
            *count -= 1;
            if *count == 0 {
                clients.by_address.remove(&address);
            }
        }
    }
}

#[derive(Default)]
struct Clients {
    count: usize,
    by_address: HashMap<IpAddr, usize>,
}

pub(crate) struct SharedServer {
    pub limits: ServerLimits,
    /// Memory for the data of all connections.
    memory: Arc<MemoryBudget>,
    /// Limit of messages to all connections about memory.
    reclaims: RateLimit,
    /// Certificate for exports with TLS.
    pub tls: ServerTls,
    /// Exports by their names in the daemon.
    pub exports: Mutex<BTreeMap<String, Arc<Export>>>,
    /// Connections in the transmission phase, by number.
    pub connections: Mutex<BTreeMap<u64, Established>>,
    /// Called when a session begins or ends.
    pub watcher: OnceLock<SessionWatcher>,
    clients: Mutex<Clients>,
    numbers: AtomicU64,
    /// Connections that ended because their client broke the protocol.
    pub violations: AtomicU64,
}

impl SharedServer {
    pub fn new(limits: ServerLimits, tls: ServerTls) -> SharedServer {
        SharedServer {
            memory: MemoryBudget::new(limits.leased_bytes()),
            reclaims: RateLimit::new(RECLAIM_INTERVAL),
            limits,
            tls,
            exports: Mutex::default(),
            connections: Mutex::default(),
            watcher: OnceLock::new(),
            clients: Mutex::default(),
            numbers: AtomicU64::new(1),
            violations: AtomicU64::new(0),
        }
    }

    /// Returns the memory of a new export.
    pub fn export_memory(&self) -> Arc<SharedMemory<Connection>> {
        let limits = &self.limits;
        let group = GroupMemory::new(self.memory.clone());
        let floor = limits.floor_bytes;
        SharedMemory::new(group, limits.total_bytes, limits.connections, floor)
    }

    pub fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Counts a new client.
    ///
    /// # Errors
    /// The limit that it would exceed.
    pub fn admit(self: &Arc<Self>, address: Option<IpAddr>) -> Result<Admitted, &'static str> {
        let mut clients = lock(&self.clients);
        let reserved = match address {
            Some(_) => self.limits.unix_connections,
            None => 0,
        };
        if clients.count >= self.limits.connections.saturating_sub(reserved) {
            return Err("too many connections");
        }
        if let Some(address) = address {
            let count = clients.by_address.entry(address).or_default();
            if *count >= self.limits.connections_per_address {
                return Err("too many connections from this address");
            }
            *count += 1;
        }
        clients.count += 1;
        Ok(Admitted {
            shared: self.clone(),
            address,
        })
    }

    /// Records a connection in the transmission phase. Returns false if its export was removed meanwhile.
    pub fn opened(&self, established: Established) -> bool {
        let mut connections = lock(&self.connections);
        if established.export.is_removed() {
            return false;
        }
        // Under the lock, so that reports are in order.
        self.report(&established, true);
        connections.insert(established.handle.number, established);
        true
    }

    /// Removes the record of a connection.
    pub fn ended(&self, number: u64) {
        let mut connections = lock(&self.connections);
        if let Some(established) = connections.remove(&number) {
            self.report(&established, false);
        }
    }

    fn report(&self, established: &Established, opened: bool) {
        if let Some(tell) = self.watcher.get() {
            tell(SessionChange {
                number: established.handle.number,
                export: established.export.options.name.clone(),
                client: established.client.clone(),
                opened,
            });
        }
    }

    /// Counts and logs a client that breaks the protocol. Its connection ends.
    pub fn violated(&self, client: &str, violation: &Violation) {
        self.violations.fetch_add(1, Ordering::Relaxed);
        if let Some(suppressed) = VIOLATION_LOG.pass(client) {
            tracing::warn!(
                client,
                suppressed,
                "NBD client disconnected: protocol violation, {violation}"
            );
        }
    }

    /// Has connections free their unused memory, because one waits for memory. See [`request_engine::Buffers::reclaim`].
    #[cold]
    pub fn reclaim_memory(&self) {
        if self.reclaims.pass().is_some() {
            for handle in self.handles(|_| true) {
                handle.send(|connection, _| connection.buffers.reclaim());
            }
        }
    }

    /// Returns true if a client of the listener with this address must use TLS before it sees an export.
    pub fn requires_tls(&self, address: &Address) -> bool {
        self.any_export(address, |options| options.tls)
    }

    /// Returns true if the listener with this address has an export of this name.
    pub fn has_export(&self, address: &Address, export_name: &str) -> bool {
        self.any_export(address, |options| options.export_name == export_name)
    }

    fn any_export(&self, address: &Address, is_meant: impl Fn(&ExportOptions) -> bool) -> bool {
        let exports = lock(&self.exports);
        let mut all = exports.values().map(|export| &export.options);
        all.any(|options| options.addresses.contains(address) && is_meant(options))
    }

    /// Returns the handles of the connections to these exports.
    pub fn handles(&self, is_meant: impl Fn(&Export) -> bool) -> Vec<ConnectionHandle> {
        let connections = lock(&self.connections);
        let meant = connections.values().filter(|one| is_meant(&one.export));
        meant.map(|one| one.handle.clone()).collect()
    }
}

/// The exports of one listener.
pub(crate) struct ListenerExports<'a> {
    pub shared: &'a SharedServer,
    pub address: &'a Address,
    /// The client uses TLS. Otherwise exports with TLS are hidden, also those that were added during the handshake.
    pub is_encrypted: bool,
}

impl ListenerExports<'_> {
    fn exports(&self) -> Vec<Arc<Export>> {
        let exports = lock(&self.shared.exports);
        let here = exports
            .values()
            .filter(|export| export.options.addresses.contains(self.address))
            .filter(|export| self.is_encrypted || !export.options.tls);
        here.cloned().collect()
    }
}

impl Exports for ListenerExports<'_> {
    type Export = Arc<Export>;

    fn find(&self, name: &str) -> Option<(Arc<Export>, ExportInfo)> {
        let exports = self.exports();
        let found = match (name, exports.as_slice()) {
            // A listener with one export has a default export.
            ("", [only]) => Some(only),
            _ => exports
                .iter()
                .find(|export| export.options.export_name == name),
        };
        found.map(|export| (export.clone(), export.info()))
    }

    fn list(&self, visit: &mut dyn FnMut(&str, &str)) {
        for export in self.exports() {
            visit(&export.options.export_name, &export.options.description);
        }
    }
}
