//! The page for people who look with a browser: one file with everything in it, which asks the API as every client does. It has no data of
//! the daemon in itself, and so whoever has no token gets it too, over TCP.

use axum::http::header;
use axum::response::IntoResponse;

/// Where it is.
pub(super) const PATH: &str = "/";

const PAGE: &str = include_str!("page.html");

/// The page as a file of its own, which shows this instead of asking a daemon: samples of `/v1/status` and `/v1/statistics`, and other
/// answers by their paths.
pub fn of(moment: &serde_json::Value) -> String {
    // Nothing in it ends the script.
    let data = moment.to_string().replace('<', "\\u003c");
    PAGE.replacen(
        "<script>",
        &format!("<script>\nconst MOMENT = {data};\n</script>\n<script>"),
        1,
    )
}

/// Nothing from elsewhere is loaded, nobody else is asked, and no other page shows this one.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'; \
     base-uri 'none'; form-action 'none'";

/// Show the page for browsers.
#[utoipa::path(get, path = "/", responses(
    (status = 200, description = "A page that shows disks, stages, exports and workers, and asks for a token if it needs one", body = String, content_type = "text/html"),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_report_has_does_not_end_its_script() {
        let html = of(&serde_json::json!({ "name": "</script><script>alert(1)" }));
        assert_eq!(html.matches("</script>").count(), 2);
        assert!(html.contains("const MOMENT = {\"name\":\"\\u003c/script>"));
    }

    /// It works without a network, and names nobody.
    #[test]
    fn the_page_is_small_and_loads_nothing() {
        assert!(PAGE.len() < 300 << 10);
        for word in [
            "http://",
            "https://",
            "src=",
            "href=",
            "@import",
            "url(",
            "innerHTML",
            "eval(",
        ] {
            assert!(!PAGE.contains(word), "{word}");
        }
    }
}
