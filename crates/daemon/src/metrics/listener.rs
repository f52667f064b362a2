//! Metrics over TCP, for a Prometheus that cannot open the control socket: `GET /metrics`, and nothing else.
//!
//! Whoever can reach the address may read, or where there are tokens whoever shows one. A connection lives for seconds
//! and there are few at a time, so that nobody can hold the daemon's descriptors; the control socket is not concerned.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, WWW_AUTHENTICATE};
use hyper::server::conn::http1;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{Semaphore, oneshot};

use crate::control::{Tokens, View};

/// Connections at a time.
const CONNECTIONS_MAX: usize = 16;
/// How long a connection may live.
const CONNECTION_TIME: Duration = Duration::from_secs(10);
/// How long to wait when the kernel gives no connection, for want of descriptors say.
const PAUSE: Duration = Duration::from_millis(100);

/// A listener that is being served; dropping it ends that.
#[derive(Debug)]
pub struct Listener {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Serves the metrics of `view` on an address.
    ///
    /// # Errors
    /// When it cannot be listened on.
    pub fn start(
        address: SocketAddr,
        view: Arc<dyn View>,
        tokens: Option<Tokens>,
    ) -> io::Result<Listener> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .thread_keep_alive(Duration::from_secs(1))
            .build()?;
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("metrics".to_owned())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        result = accept_all(listener, view, tokens) => {
                            if let Err(error) = result {
                                tracing::error!(%error, "metrics are not served any more");
                            }
                        }
                        _ = stopped => {}
                    }
                });
                runtime.shutdown_background();
            })?;
        Ok(Listener {
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

impl Drop for Listener {
    fn drop(&mut self) {
        // A thread that is gone already has nothing to stop.
        if let Some(stop) = self.stop.take() {
            let _gone = stop.send(());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the metrics thread panicked");
        }
    }
}

async fn accept_all(
    listener: TcpListener,
    view: Arc<dyn View>,
    tokens: Option<Tokens>,
) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = room.clone().acquire_owned().await else {
            return Ok(());
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "no connection for metrics");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let (view, tokens) = (view.clone(), tokens.clone());
        tokio::spawn(async move {
            let service = hyper::service::service_fn(move |request| {
                answer(request, view.clone(), tokens.clone())
            });
            let serving = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(CONNECTION_TIME)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            // What goes wrong on one connection concerns its client only.
            let _ended = tokio::time::timeout(CONNECTION_TIME, serving).await;
            drop(place);
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    view: Arc<dyn View>,
    tokens: Option<Tokens>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let plain = |status: StatusCode, kind: &'static str, text: String| {
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
        response
    };
    const TEXT: &str = "text/plain; charset=utf-8";
    if let Some(tokens) = tokens
        && let Err(unknown) = tokens.may_look(request.headers())
    {
        let text = format!("{}\n", unknown.detail());
        let mut response = plain(StatusCode::UNAUTHORIZED, TEXT, text);
        let challenge = hyper::header::HeaderValue::from_static(unknown.challenge());
        response.headers_mut().insert(WWW_AUTHENTICATE, challenge);
        return Ok(response);
    }
    if request.uri().path() != "/metrics" {
        let text = "there is only /metrics here\n".to_owned();
        return Ok(plain(StatusCode::NOT_FOUND, TEXT, text));
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let text = "metrics are read with GET\n".to_owned();
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, TEXT, text);
        let allowed = hyper::header::HeaderValue::from_static("GET, HEAD");
        response.headers_mut().insert(ALLOW, allowed);
        return Ok(response);
    }
    let page = tokio::task::spawn_blocking(move || view.metrics()).await;
    Ok(match page {
        Ok(page) => plain(StatusCode::OK, super::CONTENT_TYPE, page),
        Err(_) => {
            let text = "the daemon failed while it made this page; see its log\n".to_owned();
            plain(StatusCode::INTERNAL_SERVER_ERROR, TEXT, text)
        }
    })
}
