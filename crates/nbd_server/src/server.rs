//! The accepting thread of all listeners, and the changes that the control plane makes.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bdev::Disk;
use latency::Clock;
use reactor::{Accepting, PeerRateLimit, Pool, Rights, SocketError, SourceHandle};
use tls::ServerTls;

use crate::connection::{Connection, Parts};
use crate::export::{Export, ExportOptions};
use crate::limits::ServerLimits;
use crate::listeners::{Address, ListenError, Listener, Listeners, WaitingAddress};
use crate::negotiations::{Negotiations, Opened};
use crate::shared::{Established, SessionChange, SharedServer, lock, peer_log};

static REFUSAL_LOG: PeerRateLimit = peer_log();

/// Maximum wait for the connections of a removed export, and of all exports at the end.
const END_TIME: Duration = Duration::from_secs(5);

/// Error of a change to the exports.
#[derive(Debug)]
pub enum ServerError {
    /// An address cannot be listened on.
    Listen(ListenError),
    /// Another export of the listener has this name for clients.
    NameTaken(String, Address),
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServerError::Listen(error) => error.fmt(f),
            ServerError::NameTaken(name, address) => write!(
                f,
                "listener {address} already has an export {name:?}; hint: set export_name to another name"
            ),
        }
    }
}

impl std::error::Error for ServerError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ServerError::Listen(error) => Some(error),
            ServerError::NameTaken(..) => None,
        }
    }
}

/// Status of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportStatus {
    /// Name of the export in the daemon.
    pub name: String,
    /// Addresses of its listeners, as bound.
    pub addresses: Vec<Address>,
    /// Number of connections in the transmission phase.
    pub connections: usize,
}

/// Status of a session, which is one connection with an open export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionStatus {
    /// Number of the connection, unique in the process.
    pub number: u64,
    /// Name of the export in the daemon.
    pub export: String,
    /// Address of the client.
    pub client: String,
    /// Form of requests and replies.
    pub style: nbd::Style,
    /// Number of the worker.
    pub worker: u32,
    /// Counters since the start of the session.
    pub counters: latency::Counters,
}

struct ServerState {
    shared: Arc<SharedServer>,
    /// Not shared with connections: dropping the last reference joins the workers.
    pool: Arc<Pool>,
    listeners: Mutex<Listeners>,
    accepting: Accepting,
}

/// All NBD exports of a process. Dropping it ends every connection.
pub struct Server {
    state: Arc<ServerState>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts the accepting thread, without listeners. `tls` is the certificate for exports with TLS.
    ///
    /// # Errors
    /// Fails if the kernel refuses a thread or a descriptor.
    pub fn start(pool: Arc<Pool>, limits: ServerLimits, tls: ServerTls) -> io::Result<Server> {
        let state = Arc::new(ServerState {
            shared: Arc::new(SharedServer::new(limits, tls)),
            pool,
            listeners: Mutex::default(),
            accepting: Accepting::new()?,
        });
        let accepting = state.clone();
        let thread = std::thread::Builder::new()
            .name("nbd".into())
            .spawn(move || match sandbox::confine(sandbox::Thread::Session) {
                Ok(()) => accept_all(&accepting),
                Err(error) => tracing::error!("cannot accept NBD clients: {error}"),
            })?;
        Ok(Server {
            state,
            thread: Some(thread),
        })
    }

    /// Adds an export. Unix sockets get these rights. Returns the addresses of its open listeners, as bound.
    ///
    /// # Errors
    /// Fails if an address cannot be listened on, or if another export of a listener has its name.
    pub fn add_export(
        &self,
        options: ExportOptions,
        rights: Rights,
        disk: Arc<Disk>,
    ) -> Result<Vec<Address>, ServerError> {
        let shared = &self.state.shared;
        // Until the export is inserted, the end of another export would close the new listeners.
        let mut listeners = lock(&self.state.listeners);
        let mut addresses = options.addresses.iter();
        if let Some(address) = addresses.find(|one| shared.has_export(one, &options.export_name)) {
            let address = address.clone();
            return Err(ServerError::NameTaken(options.export_name, address));
        }
        let mut open = Vec::new();
        for address in &options.addresses {
            match listeners.add(address, rights) {
                Ok(true) => open.push(listeners.bound(address)),
                Ok(false) => {}
                Err(error) => {
                    self.close_unused_listeners(&mut listeners);
                    return Err(ServerError::Listen(error));
                }
            }
        }
        let name = options.name.clone();
        let export = Arc::new(Export::new(options, disk, shared.export_memory()));
        lock(&shared.exports).insert(name, export);
        drop(listeners);
        self.state.accepting.wake();
        Ok(open)
    }

    /// Returns true if the exports of this address are served with TLS only.
    pub fn requires_tls(&self, address: &Address) -> bool {
        self.state.shared.requires_tls(address)
    }

    /// Returns true if clients of this address find an export of this name.
    pub fn has_export(&self, address: &Address, export_name: &str) -> bool {
        self.state.shared.has_export(address, export_name)
    }

    /// Removes an export: ends its connections, closes listeners without exports, and waits for requests in flight. Returns false if
    /// requests are still in flight after some seconds.
    pub fn remove_export(&self, name: &str) -> bool {
        let Some(export) = lock(&self.state.shared.exports).remove(name) else {
            return true;
        };
        export.remove();
        self.close_unused_listeners(&mut lock(&self.state.listeners));
        self.state.accepting.wake();
        self.dismiss(|one| std::ptr::eq(one, &*export), "export was removed")
    }

    /// Ends connections and waits until they have no requests in flight. Returns false after a time-out.
    fn dismiss(&self, is_meant: impl Fn(&Export) -> bool, reason: &'static str) -> bool {
        let handles = self.state.shared.handles(is_meant);
        SourceHandle::drain_all(&handles, END_TIME, |connection, io, drained| {
            connection.dismiss(io, reason, drained);
        })
    }

    fn close_unused_listeners(&self, listeners: &mut Listeners) {
        let exports = lock(&self.state.shared.exports);
        listeners.retain(|address| {
            let mut exports = exports.values();
            exports.any(|export| export.options.addresses.contains(address))
        });
    }

    /// Ends a session. Returns false if there is none with this number.
    pub fn end_session(&self, number: u64) -> bool {
        let connections = lock(&self.state.shared.connections);
        let Some(session) = connections.get(&number) else {
            return false;
        };
        session
            .handle
            .send(|connection, io| connection.end(io, "session closed by the server"));
        true
    }

    /// Sets mode, owner and group of the Unix sockets of an export. Returns the previous ones.
    ///
    /// # Errors
    /// Fails if the kernel refuses, or if another file is at the path.
    pub fn set_rights(&self, export: &str, rights: Rights) -> Result<Rights, SocketError> {
        let export = lock(&self.state.shared.exports).get(export).cloned();
        let addresses = export.iter().flat_map(|export| &export.options.addresses);
        let mut listeners = lock(&self.state.listeners);
        let mut before = rights;
        for address in addresses {
            if let Address::Unix(path) = address {
                before = listeners.set_rights(path, rights)?;
            }
        }
        Ok(before)
    }

    /// Sets the function that is called when a session begins or ends. It must not block. Later calls have no effect.
    pub fn watch_sessions(&self, watcher: impl Fn(SessionChange) + Send + Sync + 'static) {
        self.state.shared.watcher.set(Box::new(watcher)).ok();
    }

    /// Returns the status of every export.
    pub fn status(&self) -> Vec<ExportStatus> {
        let shared = &self.state.shared;
        let exports: Vec<Arc<Export>> = lock(&shared.exports).values().cloned().collect();
        let listeners = lock(&self.state.listeners);
        let connections = lock(&shared.connections);
        let status = exports.iter().map(|export| {
            let addresses = export.options.addresses.iter();
            let of_export = connections
                .values()
                .filter(|one| Arc::ptr_eq(&one.export, export));
            ExportStatus {
                name: export.options.name.clone(),
                addresses: addresses.map(|address| listeners.bound(address)).collect(),
                connections: of_export.count(),
            }
        });
        status.collect()
    }

    /// Returns the status of every session.
    pub fn sessions(&self) -> Vec<SessionStatus> {
        let connections = lock(&self.state.shared.connections);
        let sessions = connections.values().map(|one| SessionStatus {
            number: one.handle.number,
            export: one.export.options.name.clone(),
            client: one.client.clone(),
            style: one.style,
            worker: one.handle.worker.index(),
            counters: one.record.counters(),
        });
        sessions.collect()
    }

    /// Returns the number of connections that ended because their client broke the protocol.
    pub fn violations(&self) -> u64 {
        self.state.shared.violations.load(Ordering::Relaxed)
    }

    /// Sets whether addresses wait that cannot be listened on yet. Otherwise [`Server::add_export`] fails. Initially it fails.
    pub fn set_may_wait(&self, may_wait: bool) {
        lock(&self.state.listeners).set_may_wait(may_wait);
    }

    /// Retries the waiting addresses that are due. Returns those that opened.
    pub fn retry_listeners(&self, now: Instant) -> Vec<Address> {
        let opened = lock(&self.state.listeners).retry(now);
        if !opened.is_empty() {
            self.state.accepting.wake();
        }
        opened
    }

    /// Returns the time of the next retry of a waiting address.
    pub fn next_listener_try(&self) -> Option<Instant> {
        let waiting = lock(&self.state.listeners).waiting();
        waiting.iter().map(|one| one.next_try).min()
    }

    /// Returns the addresses that cannot be listened on yet, with the names of their exports.
    pub fn waiting_listeners(&self) -> Vec<(String, WaitingAddress)> {
        let exports = lock(&self.state.shared.exports).clone();
        let mut all = Vec::new();
        for waiting in lock(&self.state.listeners).waiting() {
            let here = exports
                .values()
                .filter(|export| export.options.addresses.contains(&waiting.address));
            all.extend(here.map(|export| (export.options.name.clone(), waiting.clone())));
        }
        all
    }

    /// Takes the listening sockets of the previous process, for exports that are about to be added.
    pub fn take_over_sockets(&self, sockets: Vec<OwnedFd>) {
        lock(&self.state.listeners).take_over(sockets);
    }

    /// Closes unused inherited sockets. All exports of the start were added.
    pub fn close_unused_sockets(&self) {
        lock(&self.state.listeners).close_unused();
    }

    /// Stops accepting and returns the listening sockets for another process. Clients wait in their backlogs meanwhile.
    pub fn hand_over_sockets(&self) -> Vec<OwnedFd> {
        let left = lock(&self.state.listeners).hand_over();
        self.state.accepting.wake();
        left
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.accepting.end();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
        lock(&self.state.listeners).retain(|_| false);
        for export in lock(&self.state.shared.exports).values() {
            export.remove();
        }
        if !self.dismiss(|_| true, "the daemon is shutting down") {
            tracing::warn!("NBD connections did not end in time, ending without them");
        }
    }
}

fn accept_all(state: &Arc<ServerState>) {
    let mut negotiations = Negotiations::default();
    let clock = Clock::shared();
    let handshake_time = state.shared.limits.handshake_time;
    while state.accepting.is_accepting() {
        let listeners = lock(&state.listeners).open_listeners();
        let timeout = negotiations.patience(clock.elapsed(), handshake_time);
        let sockets = negotiations.sockets();
        let accepting = &state.accepting;
        accepting.wait_with(&listeners, &sockets, timeout, "NBD clients");
        drop(sockets);
        for listener in &listeners {
            accept_one(listener, state, &mut negotiations, clock.elapsed());
        }
        for opened in negotiations.advance(&state.shared, clock.elapsed()) {
            start_connection(opened, state);
        }
    }
}

/// Logs a client that is not served. `client`: its address; empty if it is unknown.
fn refuse(client: &str, reason: &dyn fmt::Display) {
    if let Some(suppressed) = REFUSAL_LOG.pass(client) {
        tracing::warn!(client, suppressed, "NBD client refused: {reason}");
    }
}

fn accept_one(
    listener: &Arc<Listener>,
    state: &ServerState,
    negotiations: &mut Negotiations,
    now: Duration,
) {
    let accepted = {
        let listeners = lock(&state.listeners);
        // Another process may accept here already.
        if !listeners.has(listener) {
            return;
        }
        listener.accept()
    };
    let Some((stream, address, client)) = Accepting::accepted(accepted, |error| refuse("", error))
    else {
        return;
    };
    match state.shared.admit(address) {
        Ok(admitted) => {
            let shared = &state.shared;
            negotiations.add(stream, listener.clone(), client, admitted, now, shared);
        }
        Err(limit) => refuse(&client, &limit),
    }
}

/// Places a client on a worker.
fn start_connection(opened: Opened, state: &ServerState) {
    // Workers need a blocking socket: the kernel waits for them.
    if let Err(error) = opened.stream.set_nonblocking(false) {
        return refuse(&opened.client, &error);
    }
    let worker = state
        .pool
        .select_worker_for(&opened.session.export.options.name);
    let shared = state.shared.clone();
    let started = worker.call(move |worker| {
        let number = shared.next_number();
        let export = opened.session.export.clone();
        let style = opened.session.style;
        let client = opened.client.clone();
        let handle = SourceHandle::add(worker, number, |io, handle| {
            let parts = Parts {
                handle,
                shared: shared.clone(),
                socket: opened.stream.into(),
                client: opened.client,
                admitted: opened.admitted,
                encryption: opened.encryption,
                session: *opened.session,
                input: opened.input,
            };
            Connection::new(io, parts)
        });
        let record = handle.with(worker, |connection, _| connection.record_of_requests());
        let Some(record) = record else { return };
        let is_open = shared.opened(Established {
            handle: handle.clone(),
            export,
            client,
            style,
            record,
        });
        handle.with(worker, |connection, io| match is_open {
            true => connection.start(io),
            false => connection.end(io, "export was removed"),
        });
        worker.wake(handle.source);
    });
    if let Err(error) = started {
        refuse("", &error);
    }
}
