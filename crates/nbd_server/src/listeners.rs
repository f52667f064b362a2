//! Listening sockets. Exports with the same address share one. Control thread only.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use reactor::{
    FileId, Retry, Rights, SocketError, TakenOverSockets, address_can_heal, file_at, listen_tcp,
    listening_tcp, set_rights, write_listen_error,
};
use rustix::net::{AddressFamily, sockopt};

/// Address of a listener.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Address {
    /// Unix socket at this path.
    Unix(PathBuf),
    /// TCP address. Port 0 selects a free port.
    Tcp(SocketAddr),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "{}", path.display()),
            Address::Tcp(address) => address.fmt(f),
        }
    }
}

/// An address that cannot be listened on yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingAddress {
    /// The address.
    pub address: Address,
    /// The error of the last attempt.
    pub reason: String,
    /// Time of the next attempt.
    pub next_try: Instant,
}

/// Error of listening on an address.
#[derive(Debug)]
pub enum ListenError {
    /// A Unix socket.
    Unix(SocketError),
    /// A TCP address.
    Tcp(SocketAddr, io::Error),
}

impl ListenError {
    fn may_succeed_later(&self) -> bool {
        match self {
            ListenError::Unix(error) => error.may_succeed_later(),
            ListenError::Tcp(_, error) => address_can_heal(error),
        }
    }
}

impl fmt::Display for ListenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenError::Unix(error) => error.fmt(f),
            ListenError::Tcp(address, error) => {
                write_listen_error(f, *address, error, "NBD server")
            }
        }
    }
}

impl std::error::Error for ListenError {}

/// A connected client.
#[derive(Debug)]
pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        match self {
            Stream::Unix(stream) => stream.set_nonblocking(nonblocking),
            Stream::Tcp(stream) => stream.set_nonblocking(nonblocking),
        }
    }
}

impl io::Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.read(bytes),
            Stream::Tcp(stream) => stream.read(bytes),
        }
    }
}

impl io::Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.write(bytes),
            Stream::Tcp(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl From<Stream> for OwnedFd {
    fn from(stream: Stream) -> OwnedFd {
        match stream {
            Stream::Unix(stream) => stream.into(),
            Stream::Tcp(stream) => stream.into(),
        }
    }
}

#[derive(Debug)]
enum Socket {
    Unix(UnixListener, Option<FileId>),
    Tcp(TcpListener),
}

/// An open listener.
#[derive(Debug)]
pub(crate) struct Listener {
    /// Address as configured.
    pub address: Address,
    socket: Socket,
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Unix(socket, _) => socket.as_fd(),
            Socket::Tcp(socket) => socket.as_fd(),
        }
    }
}

impl Listener {
    /// Accepts a client. Returns it with its address, if it has one.
    pub fn accept(&self) -> io::Result<(Stream, Option<IpAddr>, String)> {
        match &self.socket {
            Socket::Unix(socket, _) => {
                let (stream, _) = socket.accept()?;
                let peer = rustix::net::sockopt::socket_peercred(&stream).map_or_else(
                    |_| "unix".to_owned(),
                    |peer| format!("unix:pid={}", peer.pid),
                );
                Ok((Stream::Unix(stream), None, peer))
            }
            Socket::Tcp(socket) => {
                let (stream, peer) = socket.accept()?;
                // Every message is complete, so a delay would only cost time.
                stream.set_nodelay(true)?;
                // Detects clients on machines that have disappeared.
                sockopt::set_socket_keepalive(&stream, true)?;
                let address = peer.ip().to_canonical();
                Ok((Stream::Tcp(stream), Some(address), peer.to_string()))
            }
        }
    }

    fn bound(&self) -> Address {
        match &self.socket {
            Socket::Tcp(socket) => socket
                .local_addr()
                .map_or_else(|_| self.address.clone(), Address::Tcp),
            Socket::Unix(..) => self.address.clone(),
        }
    }

    /// Removes the file of the socket, unless another process has replaced it.
    fn remove_file(&self) {
        if let (Address::Unix(path), Socket::Unix(_, file)) = (&self.address, &self.socket)
            && file.is_some()
            && file_at(path) == *file
        {
            std::fs::remove_file(path).ok();
        }
    }
}

#[derive(Debug)]
enum State {
    Open(Arc<Listener>),
    Waiting(Retry),
}

/// Listening sockets of all exports, by their configured addresses.
#[derive(Debug, Default)]
pub(crate) struct Listeners {
    all: BTreeMap<Address, (State, Rights)>,
    taken_over_unix: TakenOverSockets,
    taken_over_tcp: Vec<(SocketAddr, TcpListener)>,
    /// Addresses that cannot be listened on yet may wait.
    may_wait: bool,
    /// Another process listens now; this one opens no more sockets.
    has_left: bool,
}

impl Listeners {
    /// Listens on an address, unless a listener is there. Returns false if it must wait.
    ///
    /// # Errors
    /// If the address cannot be listened on, and must not or need not wait.
    pub fn add(&mut self, address: &Address, rights: Rights) -> Result<bool, ListenError> {
        if self.has_left {
            return Ok(true);
        }
        if let Some((state, _)) = self.all.get(address) {
            return Ok(matches!(state, State::Open(_)));
        }
        let state = match self.open(address, rights) {
            Ok(listener) => State::Open(Arc::new(listener)),
            Err(error) if self.may_wait && error.may_succeed_later() => {
                State::Waiting(Retry::first(&error, Instant::now()))
            }
            Err(error) => return Err(error),
        };
        let is_open = matches!(state, State::Open(_));
        self.all.insert(address.clone(), (state, rights));
        Ok(is_open)
    }

    fn open(&mut self, address: &Address, rights: Rights) -> Result<Listener, ListenError> {
        let socket = match address {
            Address::Unix(path) => {
                let unix = |error| ListenError::Unix(error);
                let bound = self.taken_over_unix.bind(path, rights).map_err(unix)?;
                bound
                    .listener
                    .set_nonblocking(true)
                    .map_err(|error| unix(SocketError::Io(path.clone(), error)))?;
                Socket::Unix(bound.listener, bound.file)
            }
            Address::Tcp(address) => {
                let inherited = self.taken_over_tcp.iter();
                let inherited = { inherited }.position(|(known, _)| known == address);
                let socket = match inherited {
                    Some(at) => Ok(self.taken_over_tcp.swap_remove(at).1),
                    None => listen_tcp(*address, false),
                };
                Socket::Tcp(socket.map_err(|error| ListenError::Tcp(*address, error))?)
            }
        };
        Ok(Listener {
            address: address.clone(),
            socket,
        })
    }

    /// Closes the listeners that are not in `wanted`.
    pub fn retain(&mut self, is_wanted: impl Fn(&Address) -> bool) {
        let all = std::mem::take(&mut self.all).into_iter();
        let (wanted, closed): (BTreeMap<_, _>, BTreeMap<_, _>) =
            all.partition(|(address, _)| is_wanted(address));
        self.all = wanted;
        for (state, _) in closed.into_values() {
            if let State::Open(listener) = state {
                listener.remove_file();
                // The accepting thread may hold the listener longer: its backlog ends here.
                rustix::net::shutdown(&*listener, rustix::net::Shutdown::Read).ok();
            }
        }
    }

    /// Returns the address as bound.
    pub fn bound(&self, address: &Address) -> Address {
        match self.all.get(address) {
            Some((State::Open(listener), _)) => listener.bound(),
            _ => address.clone(),
        }
    }

    /// Returns the open listeners.
    pub fn open_listeners(&self) -> Vec<Arc<Listener>> {
        let all = self.all.values();
        let open = all.filter_map(|(state, _)| match state {
            State::Open(listener) => Some(listener.clone()),
            State::Waiting(_) => None,
        });
        open.collect()
    }

    /// Returns true if this is one of the open listeners.
    pub fn has(&self, listener: &Arc<Listener>) -> bool {
        matches!(self.all.get(&listener.address), Some((State::Open(one), _)) if Arc::ptr_eq(one, listener))
    }

    /// Sets mode, owner and group of a Unix socket. Returns the previous ones.
    ///
    /// # Errors
    /// If the kernel refuses, or if another file is at the path.
    pub fn set_rights(&mut self, path: &Path, rights: Rights) -> Result<Rights, SocketError> {
        let Some((state, known)) = self.all.get_mut(&Address::Unix(path.to_owned())) else {
            return Ok(rights);
        };
        let before = match state {
            State::Open(listener) => match &listener.socket {
                Socket::Unix(_, file) if file_at(path) == *file => set_rights(path, rights)?,
                _ => {
                    let replaced = io::Error::other("another file has replaced the socket");
                    return Err(SocketError::Rights(path.to_owned(), replaced));
                }
            },
            State::Waiting(_) => *known,
        };
        *known = rights;
        Ok(before)
    }

    /// Sets whether addresses wait that cannot be listened on yet.
    pub fn set_may_wait(&mut self, may_wait: bool) {
        self.may_wait = may_wait;
    }

    /// Retries the addresses that are due. Returns those that opened.
    pub fn retry(&mut self, now: Instant) -> Vec<Address> {
        let due = self.all.iter().filter_map(|(address, (state, rights))| {
            let is_due = matches!(state, State::Waiting(retry) if retry.is_due(now));
            is_due.then(|| (address.clone(), *rights))
        });
        let due: Vec<_> = due.collect();
        let mut opened = Vec::new();
        for (address, rights) in due {
            let result = self.open(&address, rights);
            let Some((state, _)) = self.all.get_mut(&address) else {
                continue;
            };
            match (result, state) {
                (Ok(listener), state) => {
                    *state = State::Open(Arc::new(listener));
                    opened.push(address);
                }
                (Err(error), State::Waiting(retry)) => retry.again(&error, now),
                (Err(_), State::Open(_)) => {}
            }
        }
        opened
    }

    /// Returns the addresses that cannot be listened on yet.
    pub fn waiting(&self) -> Vec<WaitingAddress> {
        let all = self.all.iter();
        let waiting = all.filter_map(|(address, (state, _))| match state {
            State::Waiting(retry) => Some(WaitingAddress {
                address: address.clone(),
                reason: retry.reason.clone(),
                next_try: retry.next_try,
            }),
            State::Open(_) => None,
        });
        waiting.collect()
    }

    /// Takes the listening sockets of the previous process.
    pub fn take_over(&mut self, sockets: Vec<OwnedFd>) {
        let (unix, tcp): (Vec<_>, Vec<_>) = sockets.into_iter().partition(|socket| {
            sockopt::socket_domain(socket).is_ok_and(|family| family == AddressFamily::UNIX)
        });
        self.taken_over_unix.take_over(unix);
        self.taken_over_tcp = listening_tcp(tcp).collect();
    }

    /// Closes unused inherited sockets after all exports were added.
    pub fn close_unused(&mut self) {
        self.taken_over_unix.close_unused();
        self.taken_over_tcp.clear();
    }

    /// Stops listening and returns the open sockets for another process. Files of Unix sockets stay.
    pub fn hand_over(&mut self) -> Vec<OwnedFd> {
        self.has_left = true;
        let open = self.open_listeners();
        self.all.clear();
        let copies = open.iter().filter_map(|listener| {
            let copy = listener.as_fd().try_clone_to_owned();
            copy.ok()
        });
        copies.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_share_a_listener_and_the_last_one_removes_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nbd.sock");
        let address = Address::Unix(path.clone());
        let mut listeners = Listeners::default();
        assert!(listeners.add(&address, Rights::default()).unwrap());
        assert!(listeners.add(&address, Rights::default()).unwrap());
        let open = listeners.open_listeners();
        assert!(open.len() == 1 && listeners.has(&open[0]));
        UnixStream::connect(&path).unwrap();
        listeners.retain(|_| false);
        assert!(!path.exists() && !listeners.has(&open[0]));
    }

    #[test]
    fn used_port_is_refused_or_waits() {
        let free = Address::Tcp("127.0.0.1:0".parse().unwrap());
        let mut first = Listeners::default();
        first.add(&free, Rights::default()).unwrap();
        let used = first.bound(&free);
        let mut second = Listeners::default();
        let error = second.add(&used, Rights::default()).unwrap_err();
        assert!(error.to_string().contains("hint: "), "{error}");
        second.set_may_wait(true);
        assert!(!second.add(&used, Rights::default()).unwrap());
        let next_try = second.waiting()[0].next_try;
        first.retain(|_| false);
        drop(first);
        assert_eq!(second.retry(next_try), [used]);
    }
}
