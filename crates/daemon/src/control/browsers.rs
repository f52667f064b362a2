//! Checks the Host field and the requests that a browser makes for a page of another site. A browser at the control socket, through a
//! tunnel, sends no token: without these checks any of its pages could make requests.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::ErrorResponse;

/// Names that browsers may use besides `localhost` and IP addresses.
#[derive(Clone, Debug, Default)]
pub struct Names(Arc<[String]>);

impl Names {
    /// Creates the list from configured names.
    pub fn new(names: &[String]) -> Names {
        Names(names.into())
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|known| known.eq_ignore_ascii_case(name))
    }
}

fn refused(detail: &str) -> Response {
    ErrorResponse::new(StatusCode::FORBIDDEN, detail).into_response()
}

fn text(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// Returns true if Origin (RFC 6454, 7) names another site than Host. Programs send no Origin; browsers send it with every change.
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

/// Checks the number of Host fields (RFC 9112, 3.2): HTTP/1.1 exactly one, HTTP/1.0 at most one.
pub(crate) fn has_one_host(version: Version, headers: &HeaderMap) -> bool {
    let count = headers.get_all(header::HOST).iter().count();
    count == 1 || (count == 0 && version < Version::HTTP_11)
}

fn is_of_a_browser(headers: &HeaderMap) -> bool {
    headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site")
}

/// Returns the host that the request is for; `None` if the field is malformed.
fn host_name(headers: &HeaderMap) -> Option<String> {
    let host = text(headers, header::HOST)?.parse::<Authority>().ok()?;
    Some(host.host().trim_matches(['[', ']']).to_owned())
}

/// Returns true if no DNS owner can direct browsers to the daemon by this name.
fn is_local_or_address(name: &str, names: &Names) -> bool {
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok() || names.has(name)
}

/// Refuses requests without exactly one Host, of pages of other sites, and of browsers that use an unconfigured name.
pub(super) async fn same_site(
    State(names): State<Names>,
    request: Request,
    next: Next,
) -> Response {
    let headers = request.headers();
    if !has_one_host(request.version(), headers) {
        let detail = "a request needs exactly one Host field";
        return ErrorResponse::bad_request(detail).into_response();
    }
    if is_of_another_site(headers) {
        return refused("the request comes from a page of another site");
    }
    let is_known = |name: String| is_local_or_address(&name, &names);
    if is_of_a_browser(headers) && !host_name(headers).is_some_and(is_known) {
        return refused(
            "browsers may address this API only as `localhost`, by IP address or by a name in `api_names`; hint: add the name to api_names, or use the IP address",
        );
    }
    next.run(request).await
}

/// Refuses requests for an unconfigured DNS name, on servers without tokens. Old browsers send neither Origin nor Sec-Fetch-Site with a
/// plain GET.
pub(super) async fn local_name(
    State(names): State<Names>,
    request: Request,
    next: Next,
) -> Response {
    let is_local = |name: String| !name.contains('.') || is_local_or_address(&name, &names);
    if request.headers().contains_key(header::HOST)
        && !host_name(request.headers()).is_some_and(is_local)
    {
        return refused(
            "the control socket does not accept DNS names in the Host field; hint: use localhost, configure the proxy to set `Host: localhost`, or add the name to api_names",
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
    fn foreign_page_is_detected_by_its_origin() {
        let asks = |host, origin| is_of_another_site(&headers(host, origin));
        assert!(!asks(Some("lunette"), None), "a program");
        assert!(!asks(Some("localhost:9751"), Some("http://localhost:9751")));
        assert!(asks(Some("localhost:9751"), Some("http://localhost:80")));
        assert!(asks(Some("localhost:9751"), Some("https://evil.example")));
        assert!(asks(Some("localhost:9751"), Some("null")));
        assert!(asks(None, Some("http://localhost")));
    }

    #[test]
    fn local_and_configured_host_names_are_accepted() {
        let names = Names::new(&["storage1.example".to_owned()]);
        let is_known = |host: &str| {
            host_name(&headers(Some(host), None))
                .is_some_and(|name| is_local_or_address(&name, &names))
        };
        for host in [
            "localhost",
            "LOCALHOST:9751",
            "127.0.0.1:9751",
            "192.0.2.1",
            "[::1]:9751",
            "storage1.example:9753",
        ] {
            assert!(is_known(host), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:9751",
            "127.0.0.1.evil.example",
            "storage1.example.evil.example",
            "localhost.",
            "lunette",
            "a b",
        ] {
            assert!(!is_known(host), "{host}");
        }
    }

    #[test]
    fn http_1_1_requires_exactly_one_host() {
        let mut fields = headers(None, None);
        assert!(!has_one_host(Version::HTTP_11, &fields));
        assert!(has_one_host(Version::HTTP_10, &fields));
        fields.append(header::HOST, "localhost".parse().unwrap());
        assert!(has_one_host(Version::HTTP_11, &fields));
        fields.append(header::HOST, "evil.example".parse().unwrap());
        assert!(!has_one_host(Version::HTTP_11, &fields));
        assert!(!has_one_host(Version::HTTP_10, &fields));
    }
}
