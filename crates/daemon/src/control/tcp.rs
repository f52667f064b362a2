//! The same API over TCP, for those who show a token ([`Tokens`]); a thread of its own, so that nobody out there can
//! hold up the control socket.
//!
//! The conversation is in the clear: an address that others can listen to needs a tunnel before it. A connection that
//! shows no token holds its place for seconds only.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::header;
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::{Semaphore, oneshot};

use super::Problem;
use super::access::{Peer, check};
use super::api::{Api, router};
use super::token::Tokens;

/// Connections at a time; further ones wait. Each may bring a body of some megabytes.
const CONNECTIONS_MAX: usize = 128;
/// How long a connection may take to say what it wants, the next time too.
const HEAD_TIME: Duration = Duration::from_secs(15);
/// How long to wait when the kernel gives no connection, for want of descriptors say.
const PAUSE: Duration = Duration::from_millis(100);

/// The API served over TCP; dropping it ends that.
#[derive(Debug)]
pub struct TcpServer {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl TcpServer {
    /// Serves the API on an address.
    ///
    /// # Errors
    /// When it cannot be listened on.
    pub fn start(address: SocketAddr, api: Api, tokens: Tokens) -> io::Result<TcpServer> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .thread_keep_alive(Duration::from_secs(1))
            .build()?;
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("api".to_owned())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        result = accept_all(listener, api, tokens) => {
                            if let Err(error) = result {
                                tracing::error!(%error, "the API is not served over TCP any more");
                            }
                        }
                        _ = stopped => {}
                    }
                });
                runtime.shutdown_background();
            })?;
        Ok(TcpServer {
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

impl Drop for TcpServer {
    fn drop(&mut self) {
        // A thread that is gone already has nothing to stop.
        if let Some(stop) = self.stop.take() {
            let _gone = stop.send(());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the API's thread panicked");
        }
    }
}

async fn accept_all(listener: TcpListener, api: Api, tokens: Tokens) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let routes: Router = router(api)
        .layer(middleware::from_fn(check))
        .layer(middleware::from_fn_with_state(tokens, recognise));
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = room.clone().acquire_owned().await else {
            return Ok(());
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "no connection for the API");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let service = TowerToHyperService::new(routes.clone());
        tokio::spawn(async move {
            let serving = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIME)
                .serve_connection(TokioIo::new(stream), service);
            // What goes wrong on one connection concerns its client only.
            let _ended = serving.await;
            drop(place);
        });
    }
}

/// Nobody without a token comes further than here, whatever is asked for.
async fn recognise(State(tokens): State<Tokens>, mut request: Request, next: Next) -> Response {
    match tokens.right(request.headers()) {
        Ok(right) => {
            request.headers_mut().remove(header::AUTHORIZATION);
            request.extensions_mut().insert(ConnectInfo(Peer { right }));
            next.run(request).await
        }
        Err(unknown) => {
            let problem = Problem::new(StatusCode::UNAUTHORIZED, unknown.detail());
            let mut response = problem.into_response();
            let headers = response.headers_mut();
            let challenge = HeaderValue::from_static(unknown.challenge());
            headers.insert(header::WWW_AUTHENTICATE, challenge);
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            response
        }
    }
}
