//! The page for browsers. It contains no data of the daemon and needs no token.

use axum::http::header;
use axum::response::IntoResponse;

pub(super) const PATH: &str = "/";

#[cfg(feature = "page")]
const PAGE: &str = ::page::PAGE;
#[cfg(not(feature = "page"))]
const PAGE: &str = "<!DOCTYPE html><html lang=\"en\"><title>Lunette</title><p>This daemon was built without the web page (cargo feature <code>page</code>).";

/// Loads nothing from other sites, sends no request to them, and cannot be framed.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'; \
     base-uri 'none'; form-action 'none'";

/// Show the page for browsers.
#[utoipa::path(get, path = "/", operation_id = "get_page", responses(
    (status = 200, description = "HTML page with disks, stages, exports and workers; it requests a token if necessary", body = String, content_type = "text/html"),
))]
pub(super) async fn get() -> impl IntoResponse {
    (
        [
            (header::CONTENT_TYPE, "text/html; charset=utf-8"),
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            (header::CACHE_CONTROL, "no-store"),
        ],
        PAGE,
    )
}
