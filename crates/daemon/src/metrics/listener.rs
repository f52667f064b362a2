//! Metrics over TCP, for a Prometheus server that cannot open the control socket. Serves only `GET /metrics`.
//!
//! If tokens are configured, only clients with a token may read. Connections last for seconds and are limited in number, which bounds the
//! descriptors.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, WWW_AUTHENTICATE};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tls::ServerTls;

use crate::connection_table::ConnectionLimits;
use crate::control::health::{self, check_of};
use crate::control::{Tokens, View, has_one_host};
use crate::service_thread::http;
use crate::tcp_service::{TcpEntrance, TcpService};

/// Each connection carries one request, so all of them count as unauthenticated.
const LIMITS: ConnectionLimits = ConnectionLimits {
    unauthenticated: 16,
    per_network: 8,
    readers: 0,
    administrators: 0,
};
/// Longest life of a connection.
const CONNECTION_TIME: Duration = Duration::from_secs(10);

/// Metrics listener. Dropping it ends the service.
#[derive(Debug)]
pub struct Listener(TcpService);

impl Listener {
    /// Serves the metrics of `view` at an entrance.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start(
        entrance: Arc<TcpEntrance>,
        view: Arc<dyn View>,
        tokens: Option<Tokens>,
        tls: ServerTls,
    ) -> io::Result<Listener> {
        let service = TcpService::start(entrance, LIMITS, tls, move |stream, accepted, guard| {
            let (view, tokens) = (view.clone(), tokens.clone());
            async move {
                let service = hyper::service::service_fn(move |request| {
                    answer(request, view.clone(), tokens.clone())
                });
                let mut http = http(CONNECTION_TIME);
                http.keep_alive(false);
                let serving = async {
                    if let Some(stream) = stream.ready().await {
                        accepted.serve(http, TokioIo::new(stream), service).await;
                    }
                };
                let _late = tokio::time::timeout(CONNECTION_TIME, serving).await;
                drop(guard);
            }
        })?;
        Ok(Listener(service))
    }

    /// Returns the bound address; `None` while the address is not available.
    pub fn address(&self) -> Option<SocketAddr> {
        self.0.address()
    }

    /// Ends the service and hands over the open socket.
    pub fn hand_over(self) -> Option<OwnedFd> {
        self.0.hand_over()
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
    if !has_one_host(request.version(), request.headers()) {
        let text = "bad request: exactly one Host field is required\n".to_owned();
        return Ok(plain(StatusCode::BAD_REQUEST, TEXT, text));
    }
    if let Some(check) = check_of(request.uri().path())
        && request.method() == Method::GET
    {
        let passed = crate::blocking_call::blocking(move || check(&*view)).await;
        return Ok(match passed.is_ok_and(|passed| passed) {
            true => plain(StatusCode::OK, TEXT, health::OK.to_owned()),
            false => plain(StatusCode::SERVICE_UNAVAILABLE, TEXT, "not ok\n".to_owned()),
        });
    }
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
        let text = "not found: only /metrics, /healthz and /readyz are served here\n".to_owned();
        return Ok(plain(StatusCode::NOT_FOUND, TEXT, text));
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let text = "method not allowed: use GET\n".to_owned();
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, TEXT, text);
        let allowed = hyper::header::HeaderValue::from_static("GET, HEAD");
        response.headers_mut().insert(ALLOW, allowed);
        return Ok(response);
    }
    let page = crate::blocking_call::blocking(move || view.metrics()).await;
    Ok(match page {
        Ok(page) => plain(StatusCode::OK, super::CONTENT_TYPE, page),
        Err(error) => {
            let text = format!("cannot collect metrics: {error}\n");
            plain(StatusCode::SERVICE_UNAVAILABLE, TEXT, text)
        }
    })
}
