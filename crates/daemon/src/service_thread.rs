//! A thread of its own on which HTTP connections are accepted and served. When it ends nobody is accepted any more, and who has been
//! gets an answer.

use std::error::Error;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
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

/// How long requests that are being answered may take until the end. Streams of events go on for ever, and are cut off.
const DRAIN: Duration = Duration::from_millis(100);

/// How often to look whether all connections have brought a request.
const PAUSE: Duration = Duration::from_millis(1);

/// The connections of a service.
#[derive(Default)]
pub(crate) struct Connections {
    graceful: GracefulShutdown,
    /// Those that have not brought a request yet have it, too.
    new: Arc<()>,
}

impl Connections {
    /// Who has just been accepted.
    pub fn accepted(&self) -> Accepted {
        Accepted {
            watcher: self.graceful.watcher(),
            new: Arc::clone(&self.new),
        }
    }

    /// Has all of them end when they have been answered.
    async fn end(self) {
        // hyper closes a connection without a request at once, though that may be on its way.
        while Arc::strong_count(&self.new) > 1 {
            tokio::time::sleep(PAUSE).await;
        }
        self.graceful.shutdown().await;
    }
}

/// HTTP/1.1 with clients that may take so long to say what they want, the next time too: whoever says nothing keeps its place no longer.
pub(crate) fn http(head_time: Duration) -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head_time);
    http
}

/// A connection that is to be served.
pub(crate) struct Accepted {
    watcher: Watcher,
    new: Arc<()>,
}

impl Accepted {
    /// Serves it until either side ends. What goes wrong on one connection concerns its client only.
    pub async fn serve<Stream, Answers, Content>(
        self,
        http: http1::Builder,
        stream: Stream,
        service: Answers,
    ) where
        Stream: Read + Write + Unpin + 'static,
        Answers: Service<Request<Incoming>, Response = Response<Content>> + 'static,
        Answers::Error: Into<Box<dyn Error + Send + Sync>>,
        Content: Body + 'static,
        Content::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let new = Mutex::new(Some(self.new));
        let serving = http.serve_connection(stream, Begun { service, new });
        let _ended = self.watcher.watch(serving).await;
    }
}

/// A service that knows when the first request has come.
struct Begun<Answers> {
    service: Answers,
    new: Mutex<Option<Arc<()>>>,
}

impl<Answers: Service<Request<Incoming>>> Service<Request<Incoming>> for Begun<Answers> {
    type Response = Answers::Response;
    type Error = Answers::Error;
    type Future = Answers::Future;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let mut new = self.new.lock().unwrap_or_else(PoisonError::into_inner);
        drop(new.take());
        self.service.call(request)
    }
}

/// Dropping it ends the service.
#[derive(Debug)]
pub(crate) struct ServiceThread {
    name: &'static str,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ServiceThread {
    /// Has `accept` accept connections until the end. The name is the thread's, and the log's.
    ///
    /// # Errors
    /// When there is no thread for it.
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
            // Whoever is not answered by then is cut off.
            let _late = tokio::time::timeout(DRAIN, connections.end()).await;
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
