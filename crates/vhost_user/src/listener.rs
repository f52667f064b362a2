//! The listening sockets: one thread accepts for all exports and starts a thread per front end.
//!
//! An export serves one front end at a time. A second one is refused by closing its connection, with a log line. If the first has never
//! sent a message, the second replaces it.
//!
//! Closing a connection also closes unread messages with their descriptors. This may block as long as the front end wants, for example on a
//! lingering socket (SO_LINGER). Connections are therefore closed on threads that no other work depends on.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use reactor::{
    Accepting, FileId, Pool, RateLimit, Retry, Rights, SocketError, TakenOverSockets, bind_with,
    file_at, set_rights,
};
use rustix::net::{Shutdown, shutdown};
use sys::Peer;
use virtio_device::VirtioDevice;

use crate::front_end::{self, SessionHandle, TakenOverSession};
use crate::queue_times::{QueueTimeHistograms, QueueTimes};

mod handover;

static REFUSAL_LOG: RateLimit = RateLimit::new(Duration::from_secs(1));

/// After a front end has blocked a worker, its export refuses connections for this time. The front end could otherwise do so repeatedly.
const REFUSAL_TIME: Duration = Duration::from_secs(30);

/// Maximum wait for the end of a session: the time that clients of the daemon wait for a change. After that it ends on its own when the
/// operations that it waits for have completed.
const END_WAIT_MAX: Duration = Duration::from_secs(60);
const END_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Replaces [`END_WAIT_MAX`] after a handover, because the front ends of the other process wait.
const HANDOVER_END_WAIT_MAX: Duration = Duration::from_secs(1);

/// Stack of a session's thread, which handles messages of a few hundred bytes.
const SESSION_STACK: usize = 256 * 1024;

/// Status of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportStatus {
    /// Export name.
    pub name: String,
    /// Socket path; `None` for an inherited socket.
    pub path: Option<PathBuf>,
    /// A front end is connected.
    pub connected: bool,
    /// Process of the connected front end.
    pub peer: Option<Peer>,
    /// The driver has disabled the write cache.
    pub is_write_cache_disabled: bool,
}

/// The socket of an export that cannot be bound yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingSocket {
    /// The export's name.
    pub export: String,
    /// The configured path.
    pub path: PathBuf,
    /// The error of the last attempt.
    pub reason: String,
    /// Time of the next attempt.
    pub next_try: Instant,
}

/// The listening socket of an export.
enum Listening {
    /// Front ends are accepted.
    Open(Arc<UnixListener>),
    /// The socket could not be bound and is retried.
    Waiting(Retry),
    /// The export serves an inherited connection alone, or another process has the socket.
    Absent,
}

impl Listening {
    fn listener(&self) -> Option<&Arc<UnixListener>> {
        match self {
            Listening::Open(listener) => Some(listener),
            Listening::Waiting(_) | Listening::Absent => None,
        }
    }

    fn retry(&self) -> Option<&Retry> {
        match self {
            Listening::Waiting(retry) => Some(retry),
            Listening::Open(_) | Listening::Absent => None,
        }
    }

    /// Takes the listener of an open socket. A waiting socket is not retried any more.
    fn take(&mut self) -> Option<Arc<UnixListener>> {
        match std::mem::replace(self, Listening::Absent) {
            Listening::Open(listener) => Some(listener),
            Listening::Waiting(_) | Listening::Absent => None,
        }
    }
}

struct Export {
    device: Arc<dyn VirtioDevice>,
    listening: Listening,
    rights: Rights,
    path: Option<PathBuf>,
    /// File of the socket.
    file: Option<FileId>,
    /// The connected front end.
    session: Arc<Mutex<Option<SessionHandle>>>,
    serving: Option<Serving>,
    /// Next front end, while its predecessor's requests drain.
    waiting: Option<UnixStream>,
    /// Time at which a front end last blocked a worker.
    blocked_at: Arc<Mutex<Option<Instant>>>,
    /// A refused connection is being closed. No other one is accepted meanwhile.
    refusing: Arc<AtomicBool>,
    times: Arc<QueueTimes>,
}

/// Thread of a session.
struct Serving {
    thread: JoinHandle<()>,
    /// Only descriptors remain to be closed.
    over: Arc<AtomicBool>,
}

impl Serving {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire) || self.thread.is_finished()
    }
}

/// A refused connection of an export.
struct Refused {
    stream: Option<UnixStream>,
    refusing: Arc<AtomicBool>,
    state: Arc<State>,
}

impl Drop for Refused {
    fn drop(&mut self) {
        drop(self.stream.take());
        self.refusing.store(false, Ordering::Release);
        self.state.accepting.wake();
    }
}

impl Export {
    fn is_refusing(&self) -> bool {
        self.refusing.load(Ordering::Acquire)
    }

    fn refuse(&self, stream: UnixStream, state: &Arc<State>) {
        self.refusing.store(true, Ordering::Release);
        let refused = Refused {
            stream: Some(stream),
            refusing: self.refusing.clone(),
            state: state.clone(),
        };
        close_on_thread(refused);
    }

    fn is_blocked_out(&self) -> bool {
        lock(&self.blocked_at).is_some_and(|since| since.elapsed() < REFUSAL_TIME)
    }

    fn is_connected(&self) -> bool {
        lock(&self.session).is_some()
    }

    /// Ends the session and waits for its thread until `until`.
    fn end_session(&mut self, until: Instant) {
        if let Some(session) = &*lock(&self.session) {
            session.end();
        }
        let Some(serving) = self.serving.take() else {
            return;
        };
        while !serving.is_over() && Instant::now() < until {
            // Usually it has ended, or ends immediately.
            thread::sleep(END_POLL_INTERVAL);
        }
        if serving.thread.is_finished() {
            // The panic hook has reported a session that panicked.
            serving.thread.join().ok();
        } else if !serving.is_over() {
            tracing::error!(
                export = self.device.name(),
                "session abandoned: it did not end in time, because a disk or the front end does not respond"
            );
        }
    }
}

/// Called with the name of an export when its front end connects (true) or leaves (false).
type SessionWatcher = Box<dyn Fn(&str, bool) + Send + Sync>;

struct State {
    exports: Mutex<Vec<Export>>,
    /// Called when a front end connects or leaves.
    watcher: OnceLock<SessionWatcher>,
    pool: Arc<Pool>,
    accepting: Accepting,
    /// Sessions were handed over.
    is_handed_over: AtomicBool,
    /// No front end is accepted, because sessions of another process will be resumed.
    holds_accepting: AtomicBool,
}

impl State {
    /// Returns the latest time for the end of sessions that are ended now.
    fn end_of_sessions(&self) -> Instant {
        let limit = match self.is_handed_over.load(Ordering::Relaxed) {
            true => HANDOVER_END_WAIT_MAX,
            false => END_WAIT_MAX,
        };
        Instant::now() + limit
    }

    fn may_accept(&self) -> bool {
        !self.holds_accepting.load(Ordering::Acquire)
    }

    fn session_changed(&self, export: &str, connected: bool) {
        if let Some(watcher) = self.watcher.get() {
            watcher(export, connected);
        }
    }
}

/// All vhost-user sockets of a process. Dropping it ends every session and removes the socket files.
pub struct Server {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
    taken_over: Mutex<TakenOverSockets>,
    /// Sockets that cannot be bound yet may wait.
    may_wait: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Starts the accepting thread, without sockets.
    ///
    /// # Errors
    /// Fails if the kernel refuses a thread or a descriptor.
    pub fn start(pool: Arc<Pool>) -> io::Result<Server> {
        guest_memory::sigbus::install()?;
        let state = Arc::new(State {
            exports: Mutex::new(Vec::new()),
            watcher: OnceLock::new(),
            pool,
            accepting: Accepting::new()?,
            is_handed_over: AtomicBool::new(false),
            holds_accepting: AtomicBool::new(false),
        });
        let accepting = state.clone();
        let thread = thread::Builder::new()
            .name("vhost-user".into())
            .spawn(move || match sandbox::confine(sandbox::Thread::Session) {
                // Session threads are started by this one and inherit its confinement.
                Ok(()) => accept_all(&accepting),
                Err(error) => tracing::error!("cannot accept front ends: {error}"),
            })?;
        Ok(Server {
            state,
            thread: Some(thread),
            taken_over: Mutex::default(),
            may_wait: AtomicBool::new(false),
        })
    }

    /// Serves a device on a socket path. If the socket cannot be bound yet and [`Server::set_may_wait`] allows it to wait, returns false.
    ///
    /// # Errors
    /// See [`bind_with`].
    pub fn listen(&self, path: &Path, device: Arc<dyn VirtioDevice>) -> Result<bool, SocketError> {
        self.listen_with(path, Rights::default(), device)
    }

    /// Like [`Server::listen`], with these rights for the socket.
    ///
    /// # Errors
    /// See [`bind_with`]. Also fails if the rights cannot be set.
    pub fn listen_with(
        &self,
        path: &Path,
        rights: Rights,
        device: Arc<dyn VirtioDevice>,
    ) -> Result<bool, SocketError> {
        let (listening, file) = match lock(&self.taken_over).bind(path, rights) {
            Ok(bound) => (Listening::Open(Arc::new(bound.listener)), bound.file),
            Err(error) if error.may_succeed_later() && self.may_wait.load(Ordering::Relaxed) => {
                let retry = Retry::first(&error, Instant::now());
                (Listening::Waiting(retry), None)
            }
            Err(error) => return Err(error),
        };
        let is_open = listening.listener().is_some();
        self.add(listening, Some((path.to_owned(), rights, file)), device)
            .map_err(|e| SocketError::Io(path.to_owned(), e))?;
        Ok(is_open)
    }

    /// Sets mode, owner and group of an export's socket as far as they are given. Returns the previous ones.
    ///
    /// # Errors
    /// Fails if the kernel refuses, or if another file is at the path.
    pub fn set_rights(&self, export: &str, rights: Rights) -> Result<Rights, SocketError> {
        let mut exports = lock(&self.state.exports);
        let found = exports.iter_mut().find(|one| one.device.name() == export);
        let Some(export) = found else {
            return Ok(rights);
        };
        let previous = match (&export.listening, &export.path) {
            (Listening::Open(_), Some(path)) if file_at(path) == export.file => {
                set_rights(path, rights)?
            }
            (Listening::Open(_), Some(path)) => {
                let replaced = io::Error::other("another file has replaced the socket");
                return Err(SocketError::Rights(path.clone(), replaced));
            }
            _ => export.rights,
        };
        export.rights = rights;
        Ok(previous)
    }

    /// Sets whether sockets wait that cannot be bound yet. Otherwise [`Server::listen`] fails. Initially it fails.
    pub fn set_may_wait(&self, may_wait: bool) {
        self.may_wait.store(may_wait, Ordering::Relaxed);
    }

    /// Retries the waiting sockets that are due. Returns the exports of the sockets that opened.
    pub fn retry_sockets(&self, now: Instant) -> Vec<String> {
        let mut opened = Vec::new();
        for export in lock(&self.state.exports).iter_mut() {
            let (Listening::Waiting(retry), Some(path)) = (&mut export.listening, &export.path)
            else {
                continue;
            };
            if !retry.is_due(now) {
                continue;
            }
            let bound = bind_with(path, export.rights).and_then(|bound| {
                let io_error = |error| SocketError::Io(path.clone(), error);
                bound.listener.set_nonblocking(true).map_err(io_error)?;
                Ok(bound)
            });
            match bound {
                Ok(bound) => {
                    export.file = bound.file;
                    export.listening = Listening::Open(Arc::new(bound.listener));
                    opened.push(export.device.name().to_owned());
                }
                Err(error) => retry.again(&error, now),
            }
        }
        if !opened.is_empty() {
            self.state.accepting.wake();
        }
        opened
    }

    /// Returns the time of the next retry of a waiting socket.
    pub fn next_socket_try(&self) -> Option<Instant> {
        let exports = lock(&self.state.exports);
        let retries = exports.iter().filter_map(|one| one.listening.retry());
        retries.map(|retry| retry.next_try).min()
    }

    /// Returns the sockets that cannot be bound yet.
    pub fn waiting_sockets(&self) -> Vec<WaitingSocket> {
        let exports = lock(&self.state.exports);
        let waiting = exports.iter().filter_map(|export| {
            let retry = export.listening.retry()?;
            Some(WaitingSocket {
                export: export.device.name().to_owned(),
                path: export.path.clone()?,
                reason: retry.reason.clone(),
                next_try: retry.next_try,
            })
        });
        waiting.collect()
    }

    /// Serves a device on an inherited listening socket.
    ///
    /// # Errors
    /// Fails if it cannot be made non-blocking, for example because it is not a socket.
    pub fn listen_on(
        &self,
        listener: UnixListener,
        device: Arc<dyn VirtioDevice>,
    ) -> io::Result<()> {
        self.add(Listening::Open(Arc::new(listener)), None, device)
    }

    /// Serves a device on an inherited connection only. [`Server::status`] shows when its front end has left.
    ///
    /// # Errors
    /// Fails if the session cannot be set up.
    pub fn serve_on(&self, stream: UnixStream, device: Arc<dyn VirtioDevice>) -> io::Result<()> {
        let name = device.name().to_owned();
        self.add(Listening::Absent, None, device)?;
        let mut exports = lock(&self.state.exports);
        let export = exports
            .iter_mut()
            .rev()
            .find(|export| export.device.name() == name);
        export.map_or(Ok(()), |export| {
            start_session(export, stream, &self.state, true, None)
        })
    }

    /// Takes the listening sockets of the previous process, for the exports with their paths.
    pub fn take_over_sockets(&self, sockets: Vec<OwnedFd>) {
        lock(&self.taken_over).take_over(sockets);
    }

    /// Closes unused inherited sockets. All exports of the start were added.
    pub fn close_unused_sockets(&self) {
        lock(&self.taken_over).close_unused();
    }

    fn add(
        &self,
        listening: Listening,
        location: Option<(PathBuf, Rights, Option<FileId>)>,
        device: Arc<dyn VirtioDevice>,
    ) -> io::Result<()> {
        let (path, rights, file) = match location {
            Some((path, rights, file)) => (Some(path), rights, file),
            None => (None, Rights::default(), None),
        };
        if let Some(listener) = listening.listener() {
            listener.set_nonblocking(true)?;
        }
        let session = Arc::new(Mutex::new(None));
        lock(&self.state.exports).push(Export {
            device,
            listening,
            rights,
            path,
            file,
            session,
            serving: None,
            waiting: None,
            blocked_at: Arc::default(),
            refusing: Arc::default(),
            times: Arc::default(),
        });
        self.state.accepting.wake();
        Ok(())
    }

    /// Sets the function that is called when a front end connects or leaves. It must not block. Later calls have no effect.
    pub fn watch_sessions(&self, watcher: impl Fn(&str, bool) + Send + Sync + 'static) {
        self.state.watcher.set(Box::new(watcher)).ok();
    }

    /// Returns the status of every export.
    pub fn status(&self) -> Vec<ExportStatus> {
        let exports = lock(&self.state.exports);
        let status = |export: &Export| ExportStatus {
            name: export.device.name().to_owned(),
            path: export.path.clone(),
            connected: export.is_connected(),
            peer: lock(&export.session).as_ref().and_then(SessionHandle::peer),
            is_write_cache_disabled: export.device.is_write_cache_disabled(),
        };
        exports.iter().map(status).collect()
    }

    /// Returns the durations of queue starts and stops of every export.
    pub fn queue_times(&self) -> Vec<(String, QueueTimeHistograms)> {
        let times = |one: &Export| (one.device.name().to_owned(), one.times.histograms());
        lock(&self.state.exports).iter().map(times).collect()
    }

    /// Notifies the front end of an export that its configuration space has changed. Returns false if there is none to notify.
    pub fn config_changed(&self, name: &str) -> bool {
        let exports = lock(&self.state.exports);
        let export = exports.iter().find(|export| export.device.name() == name);
        export.is_some_and(|export| {
            let session = lock(&export.session);
            session.as_ref().is_some_and(SessionHandle::config_changed)
        })
    }

    /// Removes an export: ends its session after its requests were answered, and removes its socket. Returns false if there is no such
    /// export.
    pub fn remove(&self, name: &str) -> bool {
        let removed = {
            let mut exports = lock(&self.state.exports);
            let at = exports
                .iter()
                .position(|export| export.device.name() == name);
            at.map(|at| exports.swap_remove(at))
        };
        self.state.accepting.wake();
        removed.is_some_and(|mut export| {
            stop_listening(&mut export);
            export.end_session(self.state.end_of_sessions());
            true
        })
    }
}

/// Stops accepting. A new front end must not wait for an answer until the session has ended.
fn stop_listening(export: &mut Export) {
    // The file may have been removed manually, and another daemon may have its socket there.
    if let Some(path) = &export.path
        && export.file.is_some()
        && file_at(path) == export.file
    {
        std::fs::remove_file(path).ok();
    }
    if let Some(listener) = export.listening.take() {
        let is_sole_owner = export.path.is_some();
        close_on_thread((
            export.waiting.take(),
            Backlog {
                listener,
                is_sole_owner,
            },
        ));
    }
}

/// Unaccepted connections of a closed socket.
struct Backlog {
    listener: Arc<UnixListener>,
    /// False: another process also accepts there.
    is_sole_owner: bool,
}

impl Drop for Backlog {
    fn drop(&mut self) {
        // The accepting thread may hold the listener longer: its backlog is emptied here.
        if self.is_sole_owner && shutdown(&self.listener, Shutdown::Read).is_ok() {
            while self.listener.accept().is_ok() {}
        }
    }
}

/// Closes front ends' connections on a thread of its own.
fn close_on_thread(value: impl Send + 'static) {
    let closing = thread::Builder::new()
        .name("closing".into())
        .stack_size(SESSION_STACK)
        .spawn(move || drop(value));
    if let Err(error) = closing {
        // Without a thread, the connections were closed here.
        tracing::warn!("cannot start a thread to close connections: {error}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.accepting.end();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
        let mut exports = std::mem::take(&mut *lock(&self.state.exports));
        // All sessions are ended first, so that they drain in parallel.
        for export in &mut exports {
            stop_listening(export);
            if let Some(session) = &*lock(&export.session) {
                session.end();
            }
        }
        let until = self.state.end_of_sessions();
        for export in &mut exports {
            export.end_session(until);
        }
    }
}

fn accept_all(state: &Arc<State>) {
    while state.accepting.is_accepting() {
        let listeners: Vec<Arc<UnixListener>> = lock(&state.exports)
            .iter()
            .filter(|export| state.may_accept() && !export.is_refusing())
            .filter_map(|export| export.listening.listener().cloned())
            .collect();
        state.accepting.wait(&listeners, None, "front ends");
        for export in lock(&state.exports).iter_mut() {
            // Exports may have been added under a hold during the wait.
            if state.may_accept() {
                accept_one(export, state);
            }
        }
    }
}

/// Accepts the next front end of an export, if one waits.
fn accept_one(export: &mut Export, state: &Arc<State>) {
    if !export.is_connected()
        && let Some(stream) = export.waiting.take()
    {
        match export.is_blocked_out() {
            true => export.refuse(stream, state),
            false => start_or_log(export, stream, state),
        }
    }
    let listener = export.listening.listener();
    let Some(listener) = listener.filter(|_| !export.is_refusing()) else {
        return;
    };
    let accepted = Accepting::accepted(listener.accept(), |error| {
        if let Some(suppressed) = REFUSAL_LOG.pass() {
            tracing::warn!(
                export = export.device.name(),
                suppressed,
                "cannot accept a front end: {error}"
            );
        }
    });
    let Some((stream, _)) = accepted else { return };
    if export.is_blocked_out() {
        if let Some(suppressed) = REFUSAL_LOG.pass() {
            tracing::warn!(
                export = export.device.name(),
                suppressed,
                "front end refused: the previous one blocked a worker, and the export refuses connections for {REFUSAL_TIME:?}"
            );
        }
        return export.refuse(stream, state);
    }
    let (connected, leaving, silent) = match &*lock(&export.session) {
        Some(session) => (true, session.is_leaving(), session.is_silent()),
        None => (false, false, false),
    };
    if !connected {
        return start_or_log(export, stream, state);
    }
    if !leaving && !silent {
        if let Some(suppressed) = REFUSAL_LOG.pass() {
            tracing::warn!(
                export = export.device.name(),
                suppressed,
                "second front end refused: one is already connected"
            );
        }
        return export.refuse(stream, state);
    }
    if !leaving {
        tracing::warn!(
            export = export.device.name(),
            "silent front end disconnected: another one connects"
        );
        if let Some(session) = &*lock(&export.session) {
            session.end();
        }
    }
    // The old front end may be sending a message: this thread does not wait for its end.
    if let Some(previous) = export.waiting.replace(stream) {
        export.refuse(previous, state);
    }
}

fn start_or_log(export: &mut Export, stream: UnixStream, state: &Arc<State>) {
    // Its slot is free; the rest of the last session ends on its own.
    export.end_session(state.end_of_sessions());
    if let Err(error) = start_session(export, stream, state, false, None) {
        tracing::warn!(
            export = export.device.name(),
            "cannot serve a front end: {error}"
        );
    }
}

/// Frees the slot when a session's thread ends, also by a panic.
struct SlotRelease {
    slot: Arc<Mutex<Option<SessionHandle>>>,
    state: Arc<State>,
    export: String,
    over: Arc<AtomicBool>,
}

impl Drop for SlotRelease {
    fn drop(&mut self) {
        let mut slot = lock(&self.slot);
        let handle = slot.take();
        if handle.is_some() {
            // Under the lock, so that the next front end is reported later.
            self.state.session_changed(&self.export, false);
        }
        drop(slot);
        self.over.store(true, Ordering::Release);
        self.state.accepting.wake();
        // The last reference to the connection and the front end's channel.
        drop(handle);
    }
}

/// Starts the thread of a session. `confines`: the caller is not confined, so the thread must confine itself.
fn start_session(
    export: &mut Export,
    stream: UnixStream,
    state: &Arc<State>,
    confines: bool,
    taken_over: Option<TakenOverSession>,
) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let (device, state, slot) = (export.device.clone(), state.clone(), export.session.clone());
    let (blocked_at, times) = (export.blocked_at.clone(), export.times.clone());
    let over = Arc::new(AtomicBool::new(false));
    let is_over = over.clone();
    // The handle is stored before the thread continues, so that the session can be ended from now on.
    let (ready, started) = std::sync::mpsc::sync_channel(1);
    let name = format!("session-{}", device.name());
    let thread = thread::Builder::new()
        .name(name)
        .stack_size(SESSION_STACK)
        .spawn(move || {
            let stored = slot.clone();
            let (watched, export) = (state.clone(), device.name().to_owned());
            let _leaving = SlotRelease {
                slot,
                state: state.clone(),
                export: export.clone(),
                over: is_over,
            };
            if confines && let Err(error) = sandbox::confine(sandbox::Thread::Session) {
                tracing::error!("cannot set up a session: {error}");
                return;
            }
            let started = move |handle| {
                let mut slot = lock(&stored);
                *slot = Some(handle);
                watched.session_changed(&export, true);
                drop(slot);
                ready.send(()).ok();
            };
            let on_blocked = move || *lock(&blocked_at) = Some(Instant::now());
            let served = front_end::serve(
                stream,
                device,
                state.pool.clone(),
                started,
                on_blocked,
                times,
                taken_over,
            );
            if let Err(error) = served {
                tracing::warn!("cannot set up a session: {error}");
            }
        })?;
    export.serving = Some(Serving { thread, over });
    // An error means that the session could not be set up, which was logged.
    started.recv().ok();
    Ok(())
}
