//! The sockets: one thread accepts for all exports, and hands each front end to a thread of its own.
//!
//! An export serves one front end at a time. A second one is refused by closing its connection, with a log line,
//! unless the first has never said a word: then the newcomer has its place.
//!
//! What a front end has sent and nobody has read is closed with its connection, and that may take as long as the front end
//! likes: a socket that lingers (SO_LINGER) may be among it. So connections are closed where nobody else waits.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use reactor::{Accepting, Pool, RateLimit, Retry};
use rustix::net::{Shutdown, shutdown};
use virtio_device::VirtioDevice;

use crate::front_end::{self, Resumed, SessionHandle};
use crate::record::HandedOver;
use crate::socket::{self, InheritedSockets, Rights, SocketError};
use crate::socket_path::{FileId, file_at};

static REFUSAL_LOG: RateLimit = RateLimit::new(Duration::from_secs(1));

/// How long an export is left alone whose front end made a worker wait: it can do so for a moment each time that it comes.
const SHUNNED: Duration = Duration::from_secs(30);

/// How long the end of a session may take before nobody waits for it any more: as long as clients of the daemon wait for a change.
/// It ends by itself, then, when what it waits for has come.
const END_PATIENCE: Duration = Duration::from_secs(60);
const END_PAUSE: Duration = Duration::from_millis(1);

/// How long sessions may take to stop that are handed over.
const HANDOVER_PATIENCE: Duration = Duration::from_secs(5);

/// A session's stack: it handles messages of a few hundred bytes.
const SESSION_STACK: usize = 256 * 1024;

/// What a server says of one of its exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportStatus {
    /// The export's name.
    pub name: String,
    /// Its socket; `None` for an inherited one.
    pub path: Option<PathBuf>,
    /// Is a front end connected?
    pub connected: bool,
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
    /// The socket's file.
    file: Option<FileId>,
    /// The front end that is connected.
    session: Arc<Mutex<Option<SessionHandle>>>,
    serving: Option<Serving>,
    /// One that came while its predecessor's requests are still being drained.
    waiting: Option<UnixStream>,
    /// When a front end last made a worker wait.
    held_up: Arc<Mutex<Option<Instant>>>,
    /// A connection that was refused is being closed; nobody else is accepted meanwhile.
    refusing: Arc<AtomicBool>,
}

/// The thread of a session.
struct Serving {
    thread: JoinHandle<()>,
    /// It is over but for what has to be closed.
    over: Arc<AtomicBool>,
}

impl Serving {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire) || self.thread.is_finished()
    }
}

/// A connection of an export's that is refused.
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
    /// Its socket, whose path stays.
    fn leave_socket(&mut self) -> Option<UnixListener> {
        if self.listening.retry().is_some() {
            self.listening = Listening::Absent;
        }
        let path = self.path.as_deref()?;
        // Others may have their own there by now.
        if self.file.is_none() || file_at(path) != self.file {
            return None;
        }
        let left = self.listening.listener()?.try_clone().ok()?;
        (self.path, self.file) = (None, None);
        self.listening = Listening::Absent;
        Some(left)
    }

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
        close_aside(refused);
    }

    fn is_shunned(&self) -> bool {
        lock(&self.held_up).is_some_and(|since| since.elapsed() < SHUNNED)
    }

    fn is_connected(&self) -> bool {
        lock(&self.session).is_some()
    }

    fn end_session(&mut self) {
        if let Some(session) = &*lock(&self.session) {
            session.end();
        }
        let Some(serving) = self.serving.take() else {
            return;
        };
        let until = Instant::now() + END_PATIENCE;
        while !serving.is_over() && Instant::now() < until {
            // Mostly it has ended, or does so at once.
            thread::sleep(END_PAUSE);
        }
        if serving.thread.is_finished() {
            // A session that panicked has been reported by the panic hook.
            serving.thread.join().ok();
        } else if !serving.is_over() {
            tracing::error!(
                export = self.device.name(),
                "session does not end within {} s, and is abandoned: a disk or the front end does not answer",
                END_PATIENCE.as_secs()
            );
        }
    }
}

/// Told the name of an export, and whether its front end has come or gone.
type SessionWatcher = Box<dyn Fn(&str, bool) + Send + Sync>;

struct State {
    exports: Mutex<Vec<Export>>,
    /// Who wants to know of front ends.
    watcher: OnceLock<SessionWatcher>,
    pool: Arc<Pool>,
    accepting: Accepting,
}

impl State {
    fn session_changed(&self, export: &str, came: bool) {
        if let Some(tell) = self.watcher.get() {
            tell(export, came);
        }
    }
}

/// All vhost-user sockets of a process. Dropping it ends every session and removes the socket files.
pub struct Server {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
    inherited: Mutex<InheritedSockets>,
    /// Sockets that cannot be bound yet wait.
    may_wait: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Starts the accepting thread, with nothing to accept yet.
    ///
    /// # Errors
    /// When the kernel gives no thread or descriptor.
    pub fn start(pool: Arc<Pool>) -> io::Result<Server> {
        guest_memory::sigbus::install()?;
        let state = Arc::new(State {
            exports: Mutex::new(Vec::new()),
            watcher: OnceLock::new(),
            pool,
            accepting: Accepting::new()?,
        });
        let accepting = state.clone();
        let thread = thread::Builder::new()
            .name("vhost-user".into())
            .spawn(move || match sandbox::confine(sandbox::Thread::Session) {
                // Threads of sessions are started by this one, and inherit it.
                Ok(()) => accept_all(&accepting),
                Err(error) => tracing::error!("no front end is served: {error}"),
            })?;
        Ok(Server {
            state,
            thread: Some(thread),
            inherited: Mutex::default(),
            may_wait: AtomicBool::new(false),
        })
    }

    /// Serves a device on a socket path. A socket that cannot be bound yet waits if [`Server::set_may_wait`] allows it; the result
    /// is false then.
    ///
    /// # Errors
    /// See [`bind`].
    pub fn listen(&self, path: &Path, device: Arc<dyn VirtioDevice>) -> Result<bool, SocketError> {
        self.listen_with(path, Rights::default(), device)
    }

    /// As [`Server::listen`], at a socket with these rights.
    ///
    /// # Errors
    /// See [`bind`], or when the rights cannot be set.
    pub fn listen_with(
        &self,
        path: &Path,
        rights: Rights,
        device: Arc<dyn VirtioDevice>,
    ) -> Result<bool, SocketError> {
        let (listening, file) = match lock(&self.inherited).bind(path, rights) {
            Ok(bound) => (Listening::Open(Arc::new(bound.listener)), bound.file),
            Err(error) if error.can_heal() && self.may_wait.load(Ordering::Relaxed) => {
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

    /// Sets mode, owner and group of an export's socket as far as they are given. Returns those that it had.
    ///
    /// # Errors
    /// When the kernel refuses, or another file is at the path.
    pub fn set_rights(&self, export: &str, rights: Rights) -> Result<Rights, SocketError> {
        let mut exports = lock(&self.state.exports);
        let found = exports.iter_mut().find(|one| one.device.name() == export);
        let Some(export) = found else {
            return Ok(rights);
        };
        let before = match (&export.listening, &export.path) {
            (Listening::Open(_), Some(path)) if file_at(path) == export.file => {
                socket::set_rights(path, rights)?
            }
            (Listening::Open(_), Some(path)) => {
                let replaced = io::Error::other("another file is at the path");
                return Err(SocketError::Rights(path.clone(), replaced));
            }
            _ => export.rights,
        };
        export.rights = rights;
        Ok(before)
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
            let bound = socket::bind_with(path, export.rights).and_then(|bound| {
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

    /// Time of the next retry of a waiting socket.
    pub fn next_socket_try(&self) -> Option<Instant> {
        let exports = lock(&self.state.exports);
        let retries = exports.iter().filter_map(|one| one.listening.retry());
        retries.map(|retry| retry.next_try).min()
    }

    /// Sockets that cannot be bound yet.
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

    /// Serves a device on a listening socket that was inherited.
    ///
    /// # Errors
    /// When it cannot be made non-blocking, as with something that is no socket.
    pub fn listen_on(
        &self,
        listener: UnixListener,
        device: Arc<dyn VirtioDevice>,
    ) -> io::Result<()> {
        self.add(Listening::Open(Arc::new(listener)), None, device)
    }

    /// Serves a device on a connection that was inherited, and on nothing else: [`Server::status`] tells when its
    /// front end has left.
    ///
    /// # Errors
    /// When the session cannot be set up.
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

    /// Sockets at which another process has listened, for the exports of their paths.
    pub fn inherit(&self, sockets: Vec<OwnedFd>) {
        lock(&self.inherited).inherit(sockets);
    }

    /// All exports of the start are there: no front end waits at a socket of others.
    pub fn has_all_exports(&self) {
        lock(&self.inherited).forget();
    }

    /// Accepts no front end any more, and leaves its sockets at their paths to another process: who connects meanwhile waits there.
    pub fn leave_sockets(&self) -> Vec<OwnedFd> {
        let mut exports = lock(&self.state.exports);
        let left = exports.iter_mut().filter_map(Export::leave_socket);
        let left = left.map(OwnedFd::from).collect();
        drop(exports);
        self.state.accepting.wake();
        left
    }

    /// Has the front ends that are connected go on in another process. Their requests in flight are answered first; what a front end says
    /// meanwhile is read by the other process. A session that does not stop in time stays, and ends with this process.
    pub fn hand_over(&self) -> Vec<HandedOver> {
        let (to, handed) = std::sync::mpsc::channel();
        for export in lock(&self.state.exports).iter() {
            if let Some(session) = &*lock(&export.session) {
                session.hand_over(to.clone());
            }
        }
        // A session that ends by itself drops its own.
        drop(to);
        let until = Instant::now() + HANDOVER_PATIENCE;
        let mut all = Vec::new();
        while let Ok(one) = handed.recv_timeout(until.saturating_duration_since(Instant::now())) {
            all.push(one);
        }
        all
    }

    /// Serves a front end that another process has handed over.
    ///
    /// # Errors
    /// When there is no such export, or what was handed over is no session: the front end connects anew then.
    pub fn resume(&self, handed: HandedOver) -> io::Result<()> {
        let name = handed.export.clone();
        let (stream, resumed) = Resumed::of(handed)?;
        let mut exports = lock(&self.state.exports);
        let mut exports = exports.iter_mut();
        let Some(export) = exports.find(|export| export.device.name() == name) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        start_session(export, stream, &self.state, true, Some(resumed))
    }

    fn add(
        &self,
        listening: Listening,
        place: Option<(PathBuf, Rights, Option<FileId>)>,
        device: Arc<dyn VirtioDevice>,
    ) -> io::Result<()> {
        let (path, rights, file) = match place {
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
            held_up: Arc::default(),
            refusing: Arc::default(),
        });
        self.state.accepting.wake();
        Ok(())
    }

    /// Has whoever wants to know told of every front end that comes or goes. It must not block; only the first counts.
    pub fn watch_sessions(&self, watcher: impl Fn(&str, bool) + Send + Sync + 'static) {
        self.state.watcher.set(Box::new(watcher)).ok();
    }

    /// Every export and whether it is in use.
    pub fn status(&self) -> Vec<ExportStatus> {
        let exports = lock(&self.state.exports);
        let status = |export: &Export| ExportStatus {
            name: export.device.name().to_owned(),
            path: export.path.clone(),
            connected: export.is_connected(),
        };
        exports.iter().map(status).collect()
    }

    /// Tells the front end of an export that its configuration space has changed; false when nobody was told.
    pub fn config_changed(&self, name: &str) -> bool {
        let exports = lock(&self.state.exports);
        let export = exports.iter().find(|export| export.device.name() == name);
        export.is_some_and(|export| {
            let session = lock(&export.session);
            session.as_ref().is_some_and(SessionHandle::config_changed)
        })
    }

    /// Stops serving an export: ends its session, after its requests are answered, and removes its socket.
    /// False when there is none of that name.
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
            shut(&mut export);
            export.end_session();
            true
        })
    }
}

/// Nobody comes any more: whoever connects must not wait for an answer until the session has ended.
fn shut(export: &mut Export) {
    // It may have been removed by hand, and another daemon may have its own there by now.
    if let Some(path) = &export.path
        && export.file.is_some()
        && file_at(path) == export.file
    {
        std::fs::remove_file(path).ok();
    }
    if let Some(listener) = export.listening.take() {
        let is_ours = export.path.is_some();
        close_aside((export.waiting.take(), Line { listener, is_ours }));
    }
}

/// Those who wait to be accepted, at a socket that is closed.
struct Line {
    listener: Arc<UnixListener>,
    /// Else others accept there, too.
    is_ours: bool,
}

impl Drop for Line {
    fn drop(&mut self) {
        // The last one to have the listener may be the accepting thread: it is left an empty line.
        if self.is_ours && shutdown(&self.listener, Shutdown::Read).is_ok() {
            while self.listener.accept().is_ok() {}
        }
    }
}

/// Closes front ends' connections on a thread of its own.
fn close_aside(what: impl Send + 'static) {
    let closing = thread::Builder::new()
        .name("closing".into())
        .stack_size(SESSION_STACK)
        .spawn(move || drop(what));
    if let Err(error) = closing {
        // They have been closed here, then.
        tracing::warn!("no thread to close connections: {error}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.accepting.end();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
        let mut exports = std::mem::take(&mut *lock(&self.state.exports));
        // All are told first, so that they drain side by side.
        for export in &mut exports {
            shut(export);
            if let Some(session) = &*lock(&export.session) {
                session.end();
            }
        }
        exports.iter_mut().for_each(Export::end_session);
    }
}

fn accept_all(state: &Arc<State>) {
    while state.accepting.goes_on() {
        let listeners: Vec<Arc<UnixListener>> = lock(&state.exports)
            .iter()
            .filter(|export| !export.is_refusing())
            .filter_map(|export| export.listening.listener().cloned())
            .collect();
        state.accepting.wait(&listeners, None, "front ends");
        for export in lock(&state.exports).iter_mut() {
            accept_one(export, state);
        }
    }
}

/// Takes the next front end of an export, if one waits.
fn accept_one(export: &mut Export, state: &Arc<State>) {
    if !export.is_connected()
        && let Some(stream) = export.waiting.take()
    {
        match export.is_shunned() {
            true => export.refuse(stream, state),
            false => start_or_log(export, stream, state),
        }
    }
    let listener = export.listening.listener();
    let Some(listener) = listener.filter(|_| !export.is_refusing()) else {
        return;
    };
    let stream = match listener.accept() {
        Ok((stream, _)) => stream,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
        Err(error) => {
            // Out of descriptors, say: the front end stays in the backlog.
            if let Some(suppressed) = REFUSAL_LOG.pass() {
                tracing::warn!(
                    export = export.device.name(),
                    suppressed,
                    "cannot accept a front end: {error}"
                );
            }
            thread::sleep(Duration::from_millis(10));
            return;
        }
    };
    if export.is_shunned() {
        if let Some(suppressed) = REFUSAL_LOG.pass() {
            tracing::warn!(
                export = export.device.name(),
                suppressed,
                "front end refused: the previous one blocked a worker, and the export is closed for {SHUNNED:?}"
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
    // It may be speaking just now: nobody waits for its end here.
    if let Some(before) = export.waiting.replace(stream) {
        export.refuse(before, state);
    }
}

fn start_or_log(export: &mut Export, stream: UnixStream, state: &Arc<State>) {
    // Its slot is free: what is left of the last one ends by itself.
    export.end_session();
    if let Err(error) = start_session(export, stream, state, false, None) {
        tracing::warn!(
            export = export.device.name(),
            "cannot serve a front end: {error}"
        );
    }
}

/// Makes room for the next front end when a session's thread ends, by a panic too.
struct Leaving {
    slot: Arc<Mutex<Option<SessionHandle>>>,
    state: Arc<State>,
    export: String,
    over: Arc<AtomicBool>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let mut slot = lock(&self.slot);
        let handle = slot.take();
        if handle.is_some() {
            // With the slot held, so that nobody hears of the next one first.
            self.state.session_changed(&self.export, false);
        }
        drop(slot);
        self.over.store(true, Ordering::Release);
        self.state.accepting.wake();
        // The last to have the connection and the front end's channel.
        drop(handle);
    }
}

/// `confines`: the caller is not confined itself, so the session's thread has nothing to inherit.
fn start_session(
    export: &mut Export,
    stream: UnixStream,
    state: &Arc<State>,
    confines: bool,
    resumed: Option<Resumed>,
) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let (device, state, slot) = (export.device.clone(), state.clone(), export.session.clone());
    let held_up = export.held_up.clone();
    let over = Arc::new(AtomicBool::new(false));
    let is_over = over.clone();
    // The handle is there before the thread runs on, so that whoever ends the session finds it.
    let (ready, started) = std::sync::mpsc::sync_channel(1);
    let name = format!("session-{}", device.name());
    let thread = thread::Builder::new()
        .name(name)
        .stack_size(SESSION_STACK)
        .spawn(move || {
            let in_place = slot.clone();
            let (watched, export) = (state.clone(), device.name().to_owned());
            let _leaving = Leaving {
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
                let mut slot = lock(&in_place);
                *slot = Some(handle);
                watched.session_changed(&export, true);
                drop(slot);
                ready.send(()).ok();
            };
            let held_up = move || *lock(&held_up) = Some(Instant::now());
            let served = front_end::serve(
                stream,
                device,
                state.pool.clone(),
                started,
                held_up,
                resumed,
            );
            if let Err(error) = served {
                tracing::warn!("cannot set up a session: {error}");
            }
        })?;
    export.serving = Some(Serving { thread, over });
    // An error here is a session that could not be set up and has said so.
    started.recv().ok();
    Ok(())
}
