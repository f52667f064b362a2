//! The same API over TCP, for those who show a token ([`Tokens`]); a thread of its own, so that nobody out there can
//! hold up the control socket.
//!
//! The conversation is in the clear: an address that others can listen to needs a tunnel before it. A connection that
//! shows no token holds its place for seconds only.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use axum::Router;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::header;
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;

use super::ErrorResponse;
use super::access::{Peer, check};
use super::api::{Api, router};
use super::browsers::same_site;
use super::page;
use super::server::HEAD_TIME;
use super::token::Tokens;
use crate::service_thread::http;
use crate::tcp_service::{Place, TcpService};

/// Connections at a time; further ones wait. Each may bring a body of some megabytes.
const CONNECTIONS_MAX: usize = 128;

/// The API served over TCP; dropping it ends that.
#[derive(Debug)]
pub struct TcpServer(TcpService);

impl TcpServer {
    /// Serves the API on an address.
    ///
    /// # Errors
    /// When it cannot be listened on.
    pub fn start(place: Place, api: Api, tokens: Tokens) -> io::Result<TcpServer> {
        // Whoever is not on this machine has no socket to take descriptors at.
        let api = Api {
            ending: None,
            ..api
        };
        let routes: Router = router(api)
            .layer(middleware::from_fn(check))
            .layer(middleware::from_fn(same_site))
            .layer(middleware::from_fn_with_state(tokens, recognise));
        let service = TcpService::start("api", place, CONNECTIONS_MAX, move |stream, accepted| {
            let service = TowerToHyperService::new(routes.clone());
            accepted.serve(http(HEAD_TIME), TokioIo::new(stream), service)
        })?;
        Ok(TcpServer(service))
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.0.address()
    }

    /// Ends, but leaves the socket open for another process.
    pub fn leave(self) -> OwnedFd {
        self.0.leave()
    }
}

/// Nobody without a token comes further than here, but to the page.
async fn recognise(State(tokens): State<Tokens>, mut request: Request, next: Next) -> Response {
    let known = tokens.right(request.headers());
    if known.is_err() && request.method() == Method::GET && request.uri().path() == page::PATH {
        // The page has nothing of the daemon in it, and asks for the token.
        let mut response = page::get().await.into_response();
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
        return response;
    }
    match known {
        Ok(right) => {
            request.headers_mut().remove(header::AUTHORIZATION);
            request.extensions_mut().insert(ConnectInfo(Peer { right }));
            next.run(request).await
        }
        Err(unknown) => {
            let problem = ErrorResponse::new(StatusCode::UNAUTHORIZED, unknown.detail());
            let mut response = problem.into_response();
            let headers = response.headers_mut();
            let challenge = HeaderValue::from_static(unknown.challenge());
            headers.insert(header::WWW_AUTHENTICATE, challenge);
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            response
        }
    }
}
