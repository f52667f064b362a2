//! A thread of its own that accepts TCP connections and has each of them served, few at a time: whoever is out there, the
//! control socket is not concerned.

use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::{Semaphore, oneshot};

/// How long to wait when the kernel gives no connection, for want of descriptors say.
const PAUSE: Duration = Duration::from_millis(100);

/// Dropping it ends the service, and what it serves just then.
#[derive(Debug)]
pub(crate) struct TcpService {
    name: &'static str,
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl TcpService {
    /// Has `serve` serve the connections to an address, at most so many at a time; further ones wait. The name is the thread's,
    /// and the log's.
    ///
    /// # Errors
    /// When it cannot be listened on.
    pub fn start<Serve, Served>(
        name: &'static str,
        address: SocketAddr,
        connections_max: usize,
        serve: Serve,
    ) -> io::Result<TcpService>
    where
        Serve: Fn(TcpStream) -> Served + Send + 'static,
        Served: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .thread_keep_alive(Duration::from_secs(1))
            .build()?;
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        result = accept_all(name, listener, connections_max, serve) => {
                            if let Err(error) = result {
                                tracing::error!(service = name, %error, "TCP service ended");
                            }
                        }
                        _ = stopped => {}
                    }
                });
                runtime.shutdown_background();
            })?;
        Ok(TcpService {
            name,
            address,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for TcpService {
    fn drop(&mut self) {
        // A thread that is gone already has nothing to stop.
        if let Some(stop) = self.stop.take() {
            let _gone = stop.send(());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(service = self.name, "its thread panicked");
        }
    }
}

async fn accept_all<Serve, Served>(
    name: &'static str,
    listener: TcpListener,
    connections_max: usize,
    serve: Serve,
) -> io::Result<()>
where
    Serve: Fn(TcpStream) -> Served,
    Served: Future<Output = ()> + Send + 'static,
{
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let room = Arc::new(Semaphore::new(connections_max));
    loop {
        let Ok(place) = room.clone().acquire_owned().await else {
            return Ok(());
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let served = serve(stream);
                tokio::spawn(async move {
                    served.await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::debug!(service = name, %error, "no connection");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}
