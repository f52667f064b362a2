//! Thread that accepts TCP connections and serves them within the limits of [`ConnectionTable`]. The control socket has a thread of its
//! own.
//!
//! A [`TcpEntrance`] waits while its address is not available. The owner of all objects retries it.

use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use reactor::{Retry, address_can_heal};
use rustix::net::sockopt;
use tls::ServerTls;
use tokio::sync::watch;

use crate::connection_table::{ConnectionGuard, ConnectionLimits, ConnectionTable};
use crate::service_thread::{Accepted, Connections, ServiceThread};
use crate::tcp_stream::IncomingStream;

/// Delay after a failed accept, for example without free descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Address to listen at.
pub struct ListenAddress {
    /// Configured address; port 0 for any port.
    pub address: SocketAddr,
    /// Listening socket of the previous daemon.
    pub handed_over: Option<OwnedFd>,
}

impl From<SocketAddr> for ListenAddress {
    fn from(address: SocketAddr) -> ListenAddress {
        ListenAddress {
            address,
            handed_over: None,
        }
    }
}

impl ListenAddress {
    /// Returns the socket handed over if it listens at the address, otherwise a new one.
    fn listen(self) -> io::Result<TcpListener> {
        let is_it = |socket: &TcpListener| {
            let is_listening = sockopt::socket_acceptconn(socket).unwrap_or(false);
            let at = socket.local_addr();
            is_listening
                && at.is_ok_and(|at| {
                    at.ip() == self.address.ip() && [0, at.port()].contains(&self.address.port())
                })
        };
        let handed_over = self.handed_over.map(TcpListener::from).filter(is_it);
        let listener = match handed_over {
            Some(listener) => listener,
            None => TcpListener::bind(self.address)?,
        };
        listener.set_nonblocking(true)?;
        Ok(listener)
    }
}

#[derive(Debug)]
enum Listening {
    Open(Arc<TcpListener>),
    /// The address is not available yet and is retried.
    Waiting(Retry),
    /// The service has ended, or the socket was handed over.
    Closed,
}

/// A listener that the owner of all objects reports and retries while it waits.
#[derive(Debug)]
pub(crate) struct TcpEntrance {
    /// Name of the service: `api` or `metrics`.
    pub name: &'static str,
    pub address: SocketAddr,
    listening: Mutex<Listening>,
    /// Sends the listener to the accepting thread.
    opened: watch::Sender<Option<Arc<TcpListener>>>,
}

impl TcpEntrance {
    /// Listens at `listen_address`. The entrance waits if the address is not available yet.
    ///
    /// # Errors
    /// If a later attempt cannot succeed either.
    pub fn open(name: &'static str, listen_address: ListenAddress) -> io::Result<Arc<TcpEntrance>> {
        let address = listen_address.address;
        let listening = match listen_address.listen() {
            Ok(listener) => Listening::Open(Arc::new(listener)),
            Err(error) if address_can_heal(&error) => {
                Listening::Waiting(Retry::first(&error, Instant::now()))
            }
            Err(error) => return Err(error),
        };
        let listener = match &listening {
            Listening::Open(listener) => Some(listener.clone()),
            _ => None,
        };
        Ok(Arc::new(TcpEntrance {
            name,
            address,
            listening: Mutex::new(listening),
            opened: watch::Sender::new(listener),
        }))
    }

    pub fn retry_state(&self) -> Option<Retry> {
        match &*self.lock() {
            Listening::Waiting(retry) => Some(retry.clone()),
            Listening::Open(_) | Listening::Closed => None,
        }
    }

    /// Returns the bound address of an open listener.
    pub fn open_address(&self) -> Option<SocketAddr> {
        match &*self.lock() {
            Listening::Open(listener) => listener.local_addr().ok(),
            Listening::Waiting(_) | Listening::Closed => None,
        }
    }

    /// Retries a waiting entrance that is due. Returns true if it opened.
    pub fn retry(&self, now: Instant) -> bool {
        let mut listening = self.lock();
        let Listening::Waiting(retry) = &mut *listening else {
            return false;
        };
        if !retry.is_due(now) {
            return false;
        }
        match ListenAddress::from(self.address).listen() {
            Ok(listener) => {
                let listener = Arc::new(listener);
                *listening = Listening::Open(listener.clone());
                self.opened.send_replace(Some(listener));
                true
            }
            Err(error) => {
                retry.again(&error, now);
                false
            }
        }
    }

    fn bound(&self) -> Option<SocketAddr> {
        match &*self.lock() {
            Listening::Open(listener) => listener.local_addr().ok(),
            Listening::Waiting(_) | Listening::Closed => None,
        }
    }

    /// Ends the retries and returns the listener of an open entrance.
    fn close(&self) -> Option<Arc<TcpListener>> {
        self.opened.send_replace(None);
        match std::mem::replace(&mut *self.lock(), Listening::Closed) {
            Listening::Open(listener) => Some(listener),
            Listening::Waiting(_) | Listening::Closed => None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Listening> {
        self.listening
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// A TCP service. Dropping it ends the service and its connections.
#[derive(Debug)]
pub(crate) struct TcpService {
    entrance: Arc<TcpEntrance>,
    // Held only for its drop.
    _thread: ServiceThread,
}

impl TcpService {
    /// Serves the connections to an entrance with `serve`, within `limits`, with TLS if `tls` has a certificate. Thread and log use the entrance's name.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start<Serve, Served>(
        entrance: Arc<TcpEntrance>,
        limits: ConnectionLimits,
        tls: ServerTls,
        serve: Serve,
    ) -> io::Result<TcpService>
    where
        Serve: Fn(IncomingStream, Accepted, ConnectionGuard) -> Served + Send + 'static,
        Served: Future<Output = ()> + Send + 'static,
    {
        let name = entrance.name;
        let mut opened = entrance.opened.subscribe();
        let thread = ServiceThread::start(name, async move |connections: &Connections| {
            let listener = match opened.wait_for(Option::is_some).await {
                Ok(listener) => listener.as_deref().map(TcpListener::try_clone),
                // The entrance was dropped.
                Err(_) => None,
            };
            // No duplicate may stay open: the next process may listen at the address.
            drop(opened);
            match listener {
                Some(listener) => {
                    let listener = listener?;
                    accept_all(name, listener, limits, (tls, serve), connections).await
                }
                None => Ok(()),
            }
        })?;
        Ok(TcpService {
            entrance,
            _thread: thread,
        })
    }

    /// Returns the bound address; `None` while the service waits for its address.
    pub fn address(&self) -> Option<SocketAddr> {
        self.entrance.bound()
    }

    /// Ends the service and hands over the open socket, so that no client is refused.
    pub fn hand_over(self) -> Option<OwnedFd> {
        let listener = self.entrance.close()?;
        Some(listener.try_clone().ok()?.into())
    }
}

impl Drop for TcpService {
    fn drop(&mut self) {
        self.entrance.close();
    }
}

async fn accept_all<Serve, Served>(
    name: &'static str,
    listener: TcpListener,
    limits: ConnectionLimits,
    (tls, serve): (ServerTls, Serve),
    connections: &Connections,
) -> io::Result<()>
where
    Serve: Fn(IncomingStream, Accepted, ConnectionGuard) -> Served,
    Served: Future<Output = ()> + Send + 'static,
{
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let table = ConnectionTable::new(limits);
    loop {
        match listener.accept().await {
            Ok((stream, address)) => {
                let (guard, closed) = table.register(address.ip());
                let stream = IncomingStream {
                    service: name,
                    stream,
                    address,
                    tls: tls.get(),
                };
                let served = serve(stream, connections.accepted(), guard);
                tokio::spawn(async move {
                    tokio::select! {
                        () = served => {}
                        _ = closed => {}
                    }
                });
                // Lets the connection read a request that arrived with it, before further connections can close it.
                tokio::task::yield_now().await;
            }
            Err(error) => {
                tracing::debug!(service = name, %error, "cannot accept a connection");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ConnectionLimits = ConnectionLimits {
        unauthenticated: 4,
        per_network: 4,
        readers: 0,
        administrators: 0,
    };

    #[test]
    fn an_address_in_use_waits_and_its_service_accepts_once_it_is_free() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = other.local_addr().unwrap();
        let entrance = TcpEntrance::open("test", address.into()).unwrap();
        let (accepted, clients) = std::sync::mpsc::channel();
        let service = TcpService::start(
            entrance.clone(),
            LIMITS,
            ServerTls::default(),
            move |_, _, _| {
                accepted.send(()).unwrap();
                std::future::ready(())
            },
        );
        let service = service.unwrap();
        assert_eq!(service.address(), None);
        let retry = entrance.retry_state().unwrap();
        assert!(retry.reason.contains("in use"), "{}", retry.reason);
        assert!(!entrance.retry(retry.next_try), "the port is still in use");
        drop(other);
        assert!(entrance.retry(entrance.retry_state().unwrap().next_try));
        assert!(entrance.retry_state().is_none());
        assert_eq!(service.address(), Some(address));
        std::net::TcpStream::connect(address).unwrap();
        clients.recv_timeout(Duration::from_secs(60)).unwrap();
        // The next daemon takes over the socket or listens there itself.
        let socket = service.hand_over();
        assert!(socket.is_some() && !entrance.retry(Instant::now() + Duration::from_secs(60)));
        drop(socket);
        TcpListener::bind(address).unwrap();
    }

    #[test]
    fn a_missing_address_waits_and_is_not_opened_after_the_end() {
        let address: SocketAddr = "192.0.2.77:3710".parse().unwrap();
        let entrance = TcpEntrance::open("test", address.into()).unwrap();
        let service =
            TcpService::start(entrance.clone(), LIMITS, ServerTls::default(), |_, _, _| {
                std::future::ready(())
            });
        assert!(entrance.retry_state().is_some());
        assert!(service.unwrap().hand_over().is_none());
        assert!(entrance.retry_state().is_none());
    }
}
