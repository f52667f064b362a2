//! A thread that accepts TCP connections and has each of them served, within the limits of [`ConnectionTable`]. The control socket has
//! a thread of its own, and is not affected by clients of this one.

use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::TcpStream;

use crate::connection_table::{ConnectionGuard, ConnectionLimits, ConnectionTable};
use crate::service_thread::{Accepted, Connections, ServiceThread};

/// How long to wait when the kernel gives no connection, for want of descriptors say.
const PAUSE: Duration = Duration::from_millis(100);

/// Where to listen.
pub struct Place {
    /// As configured; port 0: any.
    pub address: SocketAddr,
    /// The socket at which the daemon before this one has listened.
    pub inherited: Option<OwnedFd>,
}

impl From<SocketAddr> for Place {
    fn from(address: SocketAddr) -> Place {
        let inherited = None;
        Place { address, inherited }
    }
}

impl Place {
    /// The socket of the daemon before if that is the place, or else a new one.
    fn listen(self) -> io::Result<TcpListener> {
        let is_it = |socket: &TcpListener| {
            let is_listening = sockopt::socket_acceptconn(socket).unwrap_or(false);
            let at = socket.local_addr();
            is_listening
                && at.is_ok_and(|at| {
                    at.ip() == self.address.ip() && [0, at.port()].contains(&self.address.port())
                })
        };
        let inherited = self.inherited.map(TcpListener::from).filter(is_it);
        let listener = match inherited {
            Some(listener) => listener,
            None => TcpListener::bind(self.address)?,
        };
        listener.set_nonblocking(true)?;
        Ok(listener)
    }
}

/// Dropping it ends the service, and what it serves just then.
#[derive(Debug)]
pub(crate) struct TcpService {
    address: SocketAddr,
    listener: TcpListener,
    // Only to end.
    _thread: ServiceThread,
}

impl TcpService {
    /// Has `serve` serve the connections to an address within `limits`. The thread and the log use `name`.
    ///
    /// # Errors
    /// When it cannot be listened on.
    pub fn start<Serve, Served>(
        name: &'static str,
        place: Place,
        limits: ConnectionLimits,
        serve: Serve,
    ) -> io::Result<TcpService>
    where
        Serve: Fn(TcpStream, Accepted, ConnectionGuard) -> Served + Send + 'static,
        Served: Future<Output = ()> + Send + 'static,
    {
        let listener = place.listen()?;
        let address = listener.local_addr()?;
        let accepting = listener.try_clone()?;
        let thread = ServiceThread::start(name, async move |connections: &Connections| {
            accept_all(name, accepting, limits, serve, connections).await
        })?;
        Ok(TcpService {
            address,
            listener,
            _thread: thread,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends the service, but leaves the socket open for another process: nobody is refused.
    pub fn leave(self) -> OwnedFd {
        self.listener.into()
    }
}

async fn accept_all<Serve, Served>(
    name: &'static str,
    listener: TcpListener,
    limits: ConnectionLimits,
    serve: Serve,
    connections: &Connections,
) -> io::Result<()>
where
    Serve: Fn(TcpStream, Accepted, ConnectionGuard) -> Served,
    Served: Future<Output = ()> + Send + 'static,
{
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let table = ConnectionTable::new(limits);
    loop {
        match listener.accept().await {
            Ok((stream, address)) => {
                let (guard, closed) = table.register(address.ip());
                let served = serve(stream, connections.accepted(), guard);
                tokio::spawn(async move {
                    tokio::select! {
                        () = served => {}
                        _ = closed => {}
                    }
                });
                // A request that has come with the connection is read before further connections can close it.
                tokio::task::yield_now().await;
            }
            Err(error) => {
                tracing::debug!(service = name, %error, "no connection");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}
