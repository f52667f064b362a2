//! Thread that accepts and serves HTTP connections. At its end it answers the accepted ones.

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use hyper::body::{Body, Incoming};
use hyper::rt::{Read, Write};
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper::{Request, Response};
use hyper_util::rt::TokioTimer;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::sync::oneshot;

/// Longest wait at the end for requests of new connections, and for the responses to all requests. Usually it takes milliseconds.
const ANSWERS: Duration = Duration::from_secs(1);

/// Longest wait for the end of all connections after that. Event streams do not end and are cut off.
const DRAIN: Duration = Duration::from_millis(100);

/// Interval of the check whether all requests have a response.
const PAUSE: Duration = Duration::from_millis(1);

#[derive(Default)]
pub(crate) struct Connections {
    graceful: GracefulShutdown,
    /// Shared with each connection that has not sent a request yet, and with each request that has no response yet.
    unanswered: Arc<()>,
}

impl Connections {
    /// Registers an accepted connection.
    pub fn accepted(&self) -> Accepted {
        Accepted {
            watcher: self.graceful.watcher(),
            new: Arc::clone(&self.unanswered),
        }
    }

    /// Ends all connections after their responses.
    async fn end(self) {
        // hyper closes a connection without a request at once, although one may be on its way.
        let answered = async {
            while Arc::strong_count(&self.unanswered) > 1 {
                tokio::time::sleep(PAUSE).await;
            }
        };
        // Clients without a request and slow responses are cut off.
        let _late = tokio::time::timeout(ANSWERS, answered).await;
        let _late = tokio::time::timeout(DRAIN, self.graceful.shutdown()).await;
    }
}

/// Returns an HTTP/1.1 server that closes a connection after `head_time` without the head of a request.
pub(crate) fn http(head_time: Duration) -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head_time);
    http
}

pub(crate) struct Accepted {
    watcher: Watcher,
    new: Arc<()>,
}

impl Accepted {
    /// Serves the connection until either side ends it. Errors affect only this client.
    pub async fn serve<Stream, Answers, Content>(
        self,
        http: http1::Builder,
        stream: Stream,
        service: Answers,
    ) where
        Stream: Read + Write + Unpin + 'static,
        Answers: Service<Request<Incoming>, Response = Response<Content>> + 'static,
        Answers::Future: Send + 'static,
        Answers::Error: Into<Box<dyn Error + Send + Sync>>,
        Content: Body + 'static,
        Content::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let unanswered = Arc::downgrade(&self.new);
        let tracked = TrackedRequests {
            service,
            new: Mutex::new(Some(self.new)),
            unanswered,
        };
        let serving = http.serve_connection(stream, tracked);
        let _ended = self.watcher.watch(serving).await;
    }
}

/// Service that counts the requests without a response, for [`Connections`].
struct TrackedRequests<Answers> {
    service: Answers,
    /// Present until the first request.
    new: Mutex<Option<Arc<()>>>,
    unanswered: Weak<()>,
}

impl<Answers: Service<Request<Incoming>>> Service<Request<Incoming>> for TrackedRequests<Answers>
where
    Answers::Future: Send + 'static,
{
    type Response = Answers::Response;
    type Error = Answers::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let mut new = self.new.lock().unwrap_or_else(PoisonError::into_inner);
        let unanswered = new.take().or_else(|| self.unanswered.upgrade());
        drop(new);
        let response = self.service.call(request);
        Box::pin(async move {
            let response = response.await;
            drop(unanswered);
            response
        })
    }
}

/// A running service thread. Dropping it ends the service.
#[derive(Debug)]
pub(crate) struct ServiceThread {
    name: &'static str,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ServiceThread {
    /// Runs `accept` on a thread until the end. `name` is used for the thread and the log.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start<Accept>(name: &'static str, accept: Accept) -> io::Result<ServiceThread>
    where
        Accept: AsyncFnOnce(&Connections) -> io::Result<()> + Send + 'static,
    {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .thread_keep_alive(Duration::from_secs(1))
            .build()?;
        let (stop, stopped) = oneshot::channel();
        let run = async move || {
            let connections = Connections::default();
            tokio::select! {
                result = accept(&connections) => {
                    if let Err(error) = result {
                        tracing::error!(service = name, %error, "service failed");
                    }
                }
                _ = stopped => {}
            }
            connections.end().await;
        };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                runtime.block_on(run());
                runtime.shutdown_background();
            })?;
        Ok(ServiceThread {
            name,
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for ServiceThread {
    fn drop(&mut self) {
        // The thread may have ended already.
        if let Some(stop) = self.stop.take() {
            let _gone = stop.send(());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(service = self.name, "service thread panicked");
        }
    }
}
