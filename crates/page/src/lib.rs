//! The web page of a daemon: one file that sends requests to the API like any client and contains no data of a daemon. Sources are in
//! `web/`. `make page` builds `page.html`, which is checked in, so that the programs build without npm.
#![forbid(unsafe_code)]

/// HTML of the page.
pub const PAGE: &str = include_str!("page.html");

/// Returns a standalone page that shows `moment` instead of a daemon's responses: samples of `/v1/status` and `/v1/statistics`, and other
/// responses by path.
pub fn of(moment: &serde_json::Value) -> String {
    // Escapes `</script>` in the data.
    let data = moment.to_string().replace('<', "\\u003c");
    PAGE.replacen(
        "<script>",
        &format!("<script>\nconst MOMENT = {data};\n</script>\n<script>"),
        1,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_content_cannot_end_its_script() {
        let html = of(&serde_json::json!({ "name": "</script><script>alert(1)" }));
        assert_eq!(html.matches("</script>").count(), 2);
        assert!(html.contains("const MOMENT = {\"name\":\"\\u003c/script>"));
    }

    /// The page works without a network and contains no names.
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
