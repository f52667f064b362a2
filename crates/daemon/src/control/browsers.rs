//! Requests that a browser makes for a page that is not ours. Whoever reaches the control socket through a tunnel shows no token, and so
//! any page in the same browser could ask in their name.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::ErrorResponse;

fn refused(detail: &str) -> Response {
    ErrorResponse::new(StatusCode::FORBIDDEN, detail).into_response()
}

fn text(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// Is it made for a page of another site (RFC 6454, 7)? Programs send no Origin, and browsers send it with whatever may change something.
fn is_of_another_site(headers: &HeaderMap) -> bool {
    if !headers.contains_key(header::ORIGIN) {
        return false;
    }
    let origin = text(headers, header::ORIGIN).and_then(|origin| origin.split_once("://"));
    match (origin, text(headers, header::HOST)) {
        (Some((_, site)), Some(host)) => !site.eq_ignore_ascii_case(host),
        _ => true,
    }
}

/// Is the daemon called by a name of the DNS? Whose name it is can have it lead to this host, and its pages are then of the same site.
fn has_public_name(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST) else {
        return false;
    };
    let authority = host
        .to_str()
        .ok()
        .and_then(|host| host.parse::<Authority>().ok());
    let Some(authority) = authority else {
        return true;
    };
    let name = authority.host().trim_matches(['[', ']']);
    name.contains('.') && name.parse::<IpAddr>().is_err()
}

/// Refuses what another site's page asks for.
pub(super) async fn same_site(request: Request, next: Next) -> Response {
    if is_of_another_site(request.headers()) {
        return refused("this request is of a page of another site");
    }
    next.run(request).await
}

/// Refuses also what a page of a name of the DNS asks for: for servers that ask for no token.
pub(super) async fn local_name(request: Request, next: Next) -> Response {
    if has_public_name(request.headers()) {
        return refused(
            "the control socket is not called by a name of the DNS; hint: call it localhost, and have a proxy before it set `Host: localhost`",
        );
    }
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(host: Option<&str>, origin: Option<&str>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in [(header::HOST, host), (header::ORIGIN, origin)] {
            if let Some(value) = value {
                headers.insert(name, value.parse().unwrap());
            }
        }
        headers
    }

    #[test]
    fn a_page_of_another_site_is_known_by_its_origin() {
        let asks = |host, origin| is_of_another_site(&headers(host, origin));
        assert!(!asks(Some("lunette"), None), "a program");
        assert!(!asks(Some("localhost:9751"), Some("http://localhost:9751")));
        assert!(asks(Some("localhost:9751"), Some("http://localhost:80")));
        assert!(asks(Some("localhost:9751"), Some("https://evil.example")));
        assert!(asks(Some("localhost:9751"), Some("null")));
        assert!(asks(None, Some("http://localhost")));
    }

    #[test]
    fn names_of_the_dns_are_told_from_addresses_and_local_names() {
        for host in [
            "lunette",
            "x",
            "localhost:9751",
            "127.0.0.1:9751",
            "[::1]:9751",
        ] {
            assert!(!has_public_name(&headers(Some(host), None)), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:9751",
            "127.0.0.1.evil.example",
            "localhost.",
            "a b",
        ] {
            assert!(has_public_name(&headers(Some(host), None)), "{host}");
        }
    }
}
