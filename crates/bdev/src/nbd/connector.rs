//! Connects to the server, on a thread of its own: workers never wait, and their sandbox reaches no server.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use block::Backoff;
use latency::Clock;
use nbd::Style;
use nbd::address::{ExportAddress, ServerAddress, TlsFolder};
use nbd::client::{Handshake, Session, Step, Wanted};
use nbd::wire::BASE_ALLOCATION;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use tls::ClientFiles;
use tls::rustls::ClientConfig;
use tls::rustls::pki_types::ServerName;

use super::Core;
use crate::DiskState;
use crate::inbox::Inbox;

/// Time limits of a connection attempt and of the handshake after it.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// Maximum time that sent data stays unacknowledged, and the interval and number of probes of an idle connection.
const USER_TIMEOUT_MS: u32 = 20_000;
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
const PROBES: u32 = 3;
/// Pauses between attempts.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Intervals of checks of a disk without lost connections: of the spare connection, and of its users.
const SPARE_INTERVAL: Duration = Duration::from_secs(1);
const USERS_INTERVAL: Duration = Duration::from_secs(5);
/// Minimum interval between log lines about lost connections.
const WARNINGS_APART: Duration = Duration::from_secs(1);
/// Hint if a handshake takes too long.
const ONE_CONNECTION: &str = "; hint: if it permits no further connection, set multi_conn=false";

/// An open export.
pub(super) struct Connection {
    pub socket: OwnedFd,
    pub session: Session,
    /// Bytes that arrived after the handshake, decrypted.
    pub early: Vec<u8>,
    /// TLS, if the connection is encrypted.
    pub tls: Option<tls::Session>,
}

/// Receives a channel's connection.
pub(super) type Mailbox = Inbox<Connection>;

/// A channel that needs a connection.
struct WantedConnection {
    mailbox: Weak<Mailbox>,
    /// The previous connection was lost before any request succeeded.
    is_again: bool,
}

/// Thread of a disk that makes connections. It ends when this is dropped.
pub(super) struct Connector {
    requests: mpsc::Sender<WantedConnection>,
    warned: Mutex<Warned>,
}

/// Time of the last logged loss, and the number of losses since.
#[derive(Default)]
struct Warned {
    at: Option<Duration>,
    suppressed: u32,
}

impl Connector {
    /// Starts the thread. `first` is used for the first request.
    pub fn start(core: Arc<Core>, first: Connection) -> io::Result<Connector> {
        let (requests, waiting) = mpsc::channel();
        let thread = std::thread::Builder::new().name("nbd-connect".to_owned());
        thread.spawn(move || run(&core, first, &waiting))?;
        Ok(Connector {
            requests,
            warned: Mutex::default(),
        })
    }

    /// Requests a connection for this mailbox. `is_again`: the previous one was lost before any request succeeded. Does not block.
    pub fn request(&self, mailbox: &Arc<Mailbox>, is_again: bool) {
        let mailbox = Arc::downgrade(mailbox);
        // The thread receives as long as the disk exists.
        self.requests
            .send(WantedConnection { mailbox, is_again })
            .ok();
    }

    /// Logs the loss of a connection, rate-limited, because a server may come and go.
    pub fn lost(&self, core: &Core, reason: &str) {
        core.state
            .set_unavailable(reason.to_owned(), Duration::ZERO);
        let now = Clock::shared().elapsed();
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if warned
            .at
            .is_some_and(|at| now.saturating_sub(at) < WARNINGS_APART)
        {
            warned.suppressed += 1;
            return;
        }
        warned.at = Some(now);
        let suppressed = std::mem::take(&mut warned.suppressed);
        drop(warned);
        tracing::warn!(export = %core.options.address, suppressed, "NBD connection lost, connecting again: {reason}");
    }
}

fn run(core: &Core, first: Connection, requests: &mpsc::Receiver<WantedConnection>) {
    let mut spare = Some(first);
    let mut waiting: Vec<Weak<Mailbox>> = Vec::new();
    // Channels that got a connection. Without any, the spare connection shows whether the server is available.
    let mut users: Vec<Weak<Mailbox>> = Vec::new();
    let mut backoff = Backoff::new(PAUSE_FIRST, PAUSE_MAX);
    let mut next_try = Duration::ZERO;
    loop {
        let now = Clock::shared().elapsed();
        // A server that is unavailable is asked also if no channel waits, because the state of the disk is shown.
        let is_needed = !waiting.is_empty() || core.state.get() != DiskState::Ready;
        let received = match is_needed {
            true => requests.recv_timeout(next_try.saturating_sub(now)),
            false if spare.is_some() => requests.recv_timeout(SPARE_INTERVAL),
            false => requests.recv_timeout(USERS_INTERVAL),
        };
        match received {
            Ok(wanted) => {
                // A server that accepts connections and ends each of them is not asked without pauses.
                if wanted.is_again {
                    next_try = next_try.max(Clock::shared().elapsed() + backoff.pause());
                } else {
                    backoff.reset();
                    next_try = Duration::ZERO;
                }
                waiting.push(wanted.mailbox);
                continue;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if !is_needed {
            users.retain(|mailbox| mailbox.strong_count() > 0);
            match &spare {
                // The disk is unavailable if the server does not accept another one.
                Some(connection) if has_ended(&connection.socket) => spare = None,
                Some(_) => continue,
                None if !users.is_empty() => continue,
                // The server may serve one client at a time, and another daemon may need it.
                None if !core.promises.has_multi_conn() => continue,
                None => {}
            }
        }
        waiting.retain(|mailbox| mailbox.strong_count() > 0);
        match spare.take().map_or_else(|| reconnect(core), Ok) {
            Ok(connection) => {
                core.adopt_size(connection.session.size);
                match waiting.pop().and_then(|mailbox| mailbox.upgrade()) {
                    Some(mailbox) => {
                        mailbox.put(0, connection);
                        users.push(Arc::downgrade(&mailbox));
                    }
                    None => spare = Some(connection),
                }
                if waiting.is_empty() {
                    core.state.set_ready();
                }
                core.state.notify_change();
            }
            Err(reason) => {
                let pause = backoff.pause();
                tracing::debug!(export = %core.options.address, "cannot connect: {reason}");
                next_try = Clock::shared().elapsed() + pause;
                core.state.set_unavailable(reason, pause);
            }
        }
    }
}

/// Returns true if the server has closed an idle connection.
fn has_ended(socket: &OwnedFd) -> bool {
    let mut ends = [PollFd::new(socket, PollFlags::RDHUP)];
    poll(&mut ends, Some(&Timespec::default())).is_ok_and(|ended| ended > 0)
}

/// Connects and checks that the export is the same.
pub(super) fn reconnect(core: &Core) -> Result<Connection, String> {
    let connection = connect(&core.options.address)?;
    let size = core.capacity.bytes();
    core.promises.check(&connection.session, size)?;
    Ok(connection)
}

/// Describes why a further connection failed while the disk had one: a server for one client does not begin its handshake.
pub(super) fn no_further(reason: String) -> String {
    match reason.strip_suffix(ONE_CONNECTION) {
        Some(late) => format!(
            "{late}; hint: a server for one client cannot be asked while the disk is in use; the disk adopts a larger size when it connects again"
        ),
        None => reason,
    }
}

/// A connected socket with time limits.
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    fn open(server: &ServerAddress) -> io::Result<Stream> {
        match server {
            ServerAddress::Tcp { host, port } => {
                let stream = iscsi_initiator::connect_tcp(host, *port, CONNECT_LIMIT)?;
                stream.set_nodelay(true)?;
                // A host that fails without closing its connections is detected.
                sockopt::set_socket_keepalive(&stream, true)?;
                sockopt::set_tcp_keepidle(&stream, PROBE_INTERVAL)?;
                sockopt::set_tcp_keepintvl(&stream, PROBE_INTERVAL)?;
                sockopt::set_tcp_keepcnt(&stream, PROBES)?;
                sockopt::set_tcp_user_timeout(&stream, USER_TIMEOUT_MS)?;
                Ok(Stream::Tcp(stream))
            }
            ServerAddress::Unix(path) => connect_unix(path).map(Stream::Unix),
        }
    }

    fn set_limit(&self, limit: Option<Duration>) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => {
                stream.set_read_timeout(limit)?;
                stream.set_write_timeout(limit)
            }
            Stream::Unix(stream) => {
                stream.set_read_timeout(limit)?;
                stream.set_write_timeout(limit)
            }
        }
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(into),
            Stream::Unix(stream) => stream.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(bytes),
            Stream::Unix(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl From<Stream> for OwnedFd {
    fn from(stream: Stream) -> OwnedFd {
        match stream {
            Stream::Tcp(stream) => stream.into(),
            Stream::Unix(stream) => stream.into(),
        }
    }
}

/// Connects without waiting for a server that does not accept connections.
fn connect_unix(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = SocketAddrUnix::new(path)?;
    rustix::net::connect(&socket, &address).map_err(|errno| match errno {
        Errno::AGAIN => io::Error::other("the server does not accept connections"),
        errno => errno.into(),
    })?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Reads the certificates of an address. The files are read for every connection, so that renewed ones are used.
fn tls_client(
    address: &ExportAddress,
    folder: &TlsFolder,
) -> Result<(Arc<ClientConfig>, ServerName<'static>), String> {
    let ServerAddress::Tcp { host, .. } = &address.server else {
        return Err("TLS needs a TCP address".to_owned());
    };
    let mut files = ClientFiles::default();
    if let Some(path) = &folder.path {
        files.ca = Some(path.join("ca-cert.pem"));
        let own = path.join("client-cert.pem");
        files.certificate = own.exists().then(|| (own, path.join("client-key.pem")));
    }
    Ok((files.read()?, tls::server_name(host)?))
}

/// Describes an error of a handshake.
fn broken(error: io::Error) -> String {
    match error.kind() {
        ErrorKind::WouldBlock => {
            format!("the server did not complete the handshake in time{ONE_CONNECTION}")
        }
        ErrorKind::InvalidData => format!(
            "TLS with the server failed: {error}; hint: check ca-cert.pem in tls-certificates, and use a host name that the server's certificate contains"
        ),
        _ => format!("the server has ended the handshake: {error}"),
    }
}

/// Appends received bytes to `input`, decrypted if TLS has begun. Returns false if more must arrive first.
fn receive(
    stream: &mut Stream,
    session: Option<&mut tls::Session>,
    input: &mut Vec<u8>,
) -> io::Result<bool> {
    let Some(session) = session else {
        let mut piece = [0; 4096];
        return match stream.read(&mut piece) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => {
                input.extend_from_slice(&piece[..bytes]);
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(false),
            Err(error) => Err(error),
        };
    };
    let read = session.read(stream, input);
    // The next records of the handshake, or an alert.
    let sent = session.send(stream);
    read.and(sent)?;
    Ok(!session.is_handshaking())
}

/// Connects to the server and opens the export.
pub(super) fn connect(address: &ExportAddress) -> Result<Connection, String> {
    let failed = |error: io::Error| {
        let place = match &address.server {
            ServerAddress::Unix(path) => path.display().to_string(),
            ServerAddress::Tcp { host, port } => format!("{host} port {port}"),
        };
        format!(
            "cannot connect to {place}: {error}; hint: check that the NBD server runs and listens there"
        )
    };
    // Read first: a missing file is reported also while the server is unreachable.
    let client = address
        .tls
        .as_ref()
        .map(|folder| tls_client(address, folder));
    let client = client.transpose()?;
    let mut stream = Stream::open(&address.server).map_err(failed)?;
    let mut handshake = Handshake::new(Wanted {
        export: address.export.clone(),
        style: Style::Extended,
        contexts: vec![BASE_ALLOCATION.to_owned()],
    });
    if client.is_some() {
        handshake = handshake.with_tls();
    }
    let mut session: Option<tls::Session> = None;
    let end = Clock::shared().elapsed() + HANDSHAKE_LIMIT;
    let (mut input, mut output) = (Vec::new(), Vec::new());
    loop {
        let left = end.saturating_sub(Clock::shared().elapsed());
        if left.is_zero() {
            return Err(broken(ErrorKind::WouldBlock.into()));
        }
        stream.set_limit(Some(left)).map_err(broken)?;
        match receive(&mut stream, session.as_mut(), &mut input) {
            Ok(true) => {}
            Ok(false) => continue,
            Err(error) => return Err(broken(error)),
        }
        let stepped = handshake.receive(&input, &mut output);
        let (used, step) = stepped.map_err(|failure| failure.to_string())?;
        input.drain(..used);
        match (step, &client) {
            (Step::Open(opened), _) => {
                stream.set_limit(None).map_err(broken)?;
                return Ok(Connection {
                    socket: stream.into(),
                    session: *opened,
                    early: input,
                    tls: session,
                });
            }
            (Step::StartTls, Some((config, name))) => {
                let started = tls::Session::client(Arc::clone(config), name.clone());
                session = Some(started.map_err(broken)?);
                handshake.continue_with_tls(&mut output);
            }
            (Step::More | Step::StartTls, _) => {}
        }
        let sent = match &mut session {
            None => stream.write_all(&output),
            // Options wait for the end of the TLS handshake.
            Some(session) => session
                .write(&output)
                .and_then(|()| session.send(&mut stream)),
        };
        sent.map_err(broken)?;
        output.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_further_connection_names_servers_for_one_client() {
        let late = no_further(broken(ErrorKind::WouldBlock.into()));
        assert_eq!(
            late,
            "the server did not complete the handshake in time; hint: a server for one client cannot be asked while the disk is in use; the disk adopts a larger size when it connects again"
        );
        let other = broken(ErrorKind::InvalidData.into());
        assert_eq!(no_further(other.clone()), other);
    }
}
