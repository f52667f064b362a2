//! The API over TCP, for clients with a token ([`Tokens`]), on a thread of its own.
//!
//! The connection is encrypted if the daemon has a certificate. Connections without a token, with the readers' token and with the
//! full token have separate limits, so that the first two cannot shut the third out.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{ConnectInfo, Request, State};
use axum::http::header;
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use reactor::RateLimit;

use super::ErrorResponse;
use super::access::{Origin, Peer, Right, check};
use super::api::{Api, router};
use super::body_time::{BODY_TIME, limit_body_time};
use super::browsers::{Names, same_site};
use super::health::check_of;
use super::page;
use super::server::HEAD_TIME;
use super::token::{Tokens, Unknown};
use crate::connection_table::{ConnectionGuard, ConnectionLimits, Standing};
use crate::service_thread::http;
use crate::tcp_service::{TcpEntrance, TcpService};

/// Limits of connections. Those of administrators may each carry a body of some megabytes.
const LIMITS: ConnectionLimits = ConnectionLimits {
    unauthenticated: 64,
    per_network: 32,
    readers: 64,
    administrators: 64,
};

/// Limit of log lines about wrong tokens.
static WRONG_TOKEN_LOG: RateLimit = RateLimit::new(Duration::from_secs(10));

/// Server of the API over TCP. Dropping it ends the service.
#[derive(Debug)]
pub struct TcpServer(TcpService);

impl TcpServer {
    /// Serves the API at an entrance. Browsers may only use `names`.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start(
        entrance: Arc<TcpEntrance>,
        api: Api,
        tokens: Tokens,
        names: Names,
    ) -> io::Result<TcpServer> {
        let tls = api.overview.as_ref();
        let tls = tls.map(|overview| overview.servers.api_tls.clone());
        // An upgrade passes descriptors over a local socket, which remote clients lack.
        let api = Api {
            ending: None,
            ..api
        };
        let routes: Router = router(api)
            .layer(middleware::from_fn_with_state(BODY_TIME, limit_body_time))
            .layer(middleware::from_fn(check))
            .layer(middleware::from_fn_with_state(names, same_site))
            .layer(middleware::from_fn_with_state(tokens, recognise));
        let service = TcpService::start(
            entrance,
            LIMITS,
            tls.unwrap_or_default(),
            move |stream, accepted, guard| {
                let origin = Origin::Address(Some(stream.address));
                let routes = routes.clone().layer(Extension(guard));
                let service = TowerToHyperService::new(routes.layer(Extension(origin)));
                async move {
                    let Some(stream) = stream.ready().await else {
                        return;
                    };
                    let stream = TokioIo::new(stream);
                    accepted.serve(http(HEAD_TIME), stream, service).await;
                }
            },
        )?;
        Ok(TcpServer(service))
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

/// Returns true for the page, which contains no data of the daemon and prompts for the token, and for checks of health.
fn needs_no_token(request: &Request) -> bool {
    let path = request.uri().path();
    let is_public = path == page::PATH || check_of(path).is_some();
    is_public && matches!(*request.method(), Method::GET | Method::HEAD)
}

/// Refuses requests without a token, except for the page and checks of health, and connections beyond the token's limit.
async fn recognise(
    State(tokens): State<Tokens>,
    Extension(guard): Extension<ConnectionGuard>,
    Extension(origin): Extension<Origin>,
    mut request: Request,
    next: Next,
) -> Response {
    let known = tokens.right(request.headers());
    if known.is_err() && needs_no_token(&request) {
        let right = Right::Read;
        request
            .extensions_mut()
            .insert(ConnectInfo(Peer { right, origin }));
        return last(next.run(request).await);
    }
    match known {
        Ok(right) => {
            let standing = match right {
                Right::Read => Standing::Reader,
                Right::Control | Right::Administrator => Standing::Administrator,
            };
            if !guard.authenticate(standing) {
                let detail = "too many connections with this token; hint: close some, for example event streams, and try again";
                let problem = ErrorResponse::new(StatusCode::TOO_MANY_REQUESTS, detail);
                return last(problem.into_response());
            }
            request.headers_mut().remove(header::AUTHORIZATION);
            request
                .extensions_mut()
                .insert(ConnectInfo(Peer { right, origin }));
            next.run(request).await
        }
        Err(unknown) => {
            if unknown == Unknown::Stranger
                && let Some(suppressed) = WRONG_TOKEN_LOG.pass()
            {
                tracing::warn!(peer = %origin, suppressed, "API: wrong token");
            }
            let problem = ErrorResponse::new(StatusCode::UNAUTHORIZED, unknown.detail());
            let mut response = problem.into_response();
            let challenge = HeaderValue::from_static(unknown.challenge());
            let headers = response.headers_mut();
            headers.insert(header::WWW_AUTHENTICATE, challenge);
            last(response)
        }
    }
}

/// Closes the connection after this response.
pub(super) fn last(mut response: Response) -> Response {
    let close = HeaderValue::from_static("close");
    response.headers_mut().insert(header::CONNECTION, close);
    response
}
