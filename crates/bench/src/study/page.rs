//! Self-contained page of a study: conclusions, pictures and tables.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::chart::{Chart, escape};
use crate::picture::Painter;

/// Rows of cells. The first row is the heading.
pub type Table = Vec<Vec<String>>;

/// Contents of a page.
#[derive(Default)]
pub struct Page {
    /// Title.
    pub title: String,
    /// Paragraphs about the measurement.
    pub about: Vec<String>,
    /// Limitations.
    pub cautions: Vec<String>,
    /// Conclusions.
    pub advice: Vec<String>,
    /// Pictures as SVG, with their headings.
    pub pictures: Vec<(String, String)>,
    /// Tables with their headings.
    pub tables: Vec<(String, Table)>,
    /// Preformatted texts.
    pub texts: Vec<String>,
    /// Findings of each case.
    pub findings: Vec<String>,
}

const STYLE: &str = ":root{color-scheme:light dark}\
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:0 auto;padding:1em;color:#16181d;background:#fff}\
h1{font-size:1.5em}h2{font-size:1.15em;margin:1.6em 0 .4em}.picture{background:#fff;border-radius:6px;overflow-x:auto}\
svg{max-width:100%;height:auto;min-width:640px}.scroll{overflow-x:auto}\
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}\
th,td{border-bottom:1px solid #d5d9e0;padding:.3em .7em;text-align:right;white-space:nowrap}th:first-child,td:first-child{text-align:left}\
.caution{border-left:4px solid #c77700;padding:.2em .8em;background:#fff6e5}li{margin:.2em 0}summary{cursor:pointer}\
@media(prefers-color-scheme:dark){body{color:#e4e7ec;background:#14161a}th,td{border-color:#3a3f48}.caution{background:#33270f}}\
@media(max-width:600px){body{padding:.6em}h1{font-size:1.2em}th:first-child,td:first-child{white-space:normal}}";

impl Page {
    /// Adds the picture of a chart. `name` makes the chart's identifiers unique within the page.
    pub fn add_chart(&mut self, name: &str, chart: &Chart) {
        let svg = chart.svg().replace("hatch", &format!("{name}-hatch"));
        self.pictures.push((chart.title.clone(), svg));
    }

    /// Returns the page as HTML.
    pub fn html(&self) -> String {
        let title = escape(&self.title);
        let mut html = format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
             <title>Lunette: {title}</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n"
        );
        for about in &self.about {
            html += &format!("<p>{}</p>\n", escape(about));
        }
        for caution in &self.cautions {
            html += &format!("<p class=\"caution\">{}</p>\n", escape(caution));
        }
        if !self.advice.is_empty() {
            html += &format!("<h2>Advice</h2>\n{}", list(&self.advice));
        }
        for (heading, svg) in &self.pictures {
            let heading = escape(heading);
            html += &format!("<h2>{heading}</h2>\n<div class=\"picture\">{svg}</div>\n");
        }
        if !self.tables.is_empty() {
            html += "<h2>Tables</h2>\n";
        }
        for (heading, rows) in &self.tables {
            html += &format!("<h3>{}</h3>\n{}", escape(heading), table(rows));
        }
        for text in &self.texts {
            let text = escape(text);
            html += &format!("<div class=\"scroll\"><pre>{text}</pre></div>\n");
        }
        if !self.findings.is_empty() {
            let items = list(&self.findings);
            html +=
                &format!("<details><summary>Findings, case by case</summary>\n{items}</details>\n");
        }
        html + "</body></html>\n"
    }
}

fn list(lines: &[String]) -> String {
    let items = lines
        .iter()
        .map(|line| format!("<li>{}</li>\n", escape(line)));
    format!("<ul>\n{}</ul>\n", items.collect::<String>())
}

fn table(rows: &Table) -> String {
    let mut html = "<div class=\"scroll\"><table>\n".to_owned();
    for (number, row) in rows.iter().enumerate() {
        let cell = if number == 0 { "th" } else { "td" };
        let cells = row
            .iter()
            .map(|text| format!("<{cell}>{}</{cell}>", escape(text)));
        html += &format!("<tr>{}</tr>\n", cells.collect::<String>());
    }
    html + "</table></div>\n"
}

/// Writes a chart as SVG and PNG. Returns both paths.
pub fn draw(chart: &Chart, folder: &Path, name: &str, painter: &Painter) -> Result<[PathBuf; 2]> {
    let svg = chart.svg();
    Ok([
        write_file(folder, &format!("{name}.svg"), svg.as_bytes())?,
        write_file(folder, &format!("{name}.png"), &painter.png(&svg)?)?,
    ])
}

/// Writes a file of a study. Returns its path.
pub fn write_file(folder: &Path, name: &str, bytes: &[u8]) -> Result<PathBuf> {
    let path = folder.join(name);
    std::fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::super::tests::run;
    use super::super::{Report, Run as _, Variant};
    use super::*;

    #[test]
    fn a_page_has_everything_and_fetches_nothing() {
        let variant = Variant {
            name: "a <b>".to_owned(),
            settings: Vec::new(),
        };
        let report = Report {
            runs: &[run("a <b>", "randread, depth 1", 0, 1234.0)],
            variants: vec![&variant],
            cases: vec!["randread, depth 1".to_owned()],
            notes: Vec::new(),
        };
        let chart = report.chart("IOPS", "IOPS", |run| run.iops());
        let mut page = Page {
            title: "Matrix <script src=http://evil>".to_owned(),
            about: vec!["Jobs.".to_owned()],
            cautions: vec!["emulated".to_owned()],
            advice: vec!["take: a".to_owned()],
            tables: vec![(chart.title.clone(), chart.rows())],
            texts: vec!["1 < 2".to_owned()],
            findings: vec!["a & b".to_owned()],
            ..Page::default()
        };
        page.add_chart("iops", &chart);
        let html = page.html();
        for part in [
            "Jobs.",
            "take: a",
            "a &amp; b",
            "emulated",
            "a &lt;b&gt;",
            "1 &lt; 2",
            "<td>1234</td>",
            "<svg",
        ] {
            assert!(html.contains(part), "{part}");
        }
        // The name of a namespace is not fetched.
        let html = html.replace("http://www.w3.org/2000/svg", "");
        let html = html.replace("&lt;script src=http://evil&gt;", "");
        for outside in [
            "://", "<script", "<link", "<img", "<iframe", "@import", "src=",
        ] {
            assert!(!html.contains(outside), "{outside}");
        }
        // Links lead only to patterns of the same picture.
        for link in html.split("url(").skip(1) {
            assert!(link.starts_with("#iops-hatch"), "{link}");
        }
    }

    #[test]
    fn a_chart_is_written_as_svg_and_png() {
        let folder = tempfile::tempdir().unwrap();
        let chart = Chart {
            title: "IOPS".to_owned(),
            unit: String::new(),
            notes: Vec::new(),
            groups: Vec::new(),
            series: Vec::new(),
            stacked: false,
            logarithmic: false,
        };
        let paths = draw(&chart, folder.path(), "iops", &Painter::new()).unwrap();
        for (path, begins) in paths.iter().zip([&b"<svg"[..], b"\x89PNG\r\n\x1a\n"]) {
            assert!(std::fs::read(path).unwrap().starts_with(begins), "{path:?}");
        }
    }
}
