//! The page for people who look with a browser: one file with everything in it, which asks the API as every client does. It has no data of
//! a daemon in itself. Its sources are in `web/`; `make page` builds `page.html`, which is here so that the programs build without npm.
#![forbid(unsafe_code)]

/// The page.
pub const PAGE: &str = include_str!("page.html");

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
