//! Self-contained page of a study: measurements, conclusions, pictures and tables.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use bench::chart::Chart;
use bench::run::environment;

use super::report::Report;

/// Contents of a page.
pub struct Page<'a> {
    pub title: &'a str,
    /// Description of the measurement in one or two sentences.
    pub about: String,
    /// `KVM` or `TCG`.
    pub accelerator: &'a str,
    /// Conclusions.
    pub advice: Vec<String>,
    /// Findings of each case.
    pub findings: Vec<String>,
    /// Limitations.
    pub cautions: Vec<String>,
    /// Pictures with their file names.
    pub charts: Vec<(&'static str, Chart)>,
}

const STYLE: &str = ":root{color-scheme:light dark}\
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:0 auto;padding:1em;color:#16181d;background:#fff}\
h1{font-size:1.5em}h2{font-size:1.15em;margin:1.6em 0 .4em}.picture{background:#fff;border-radius:6px;overflow-x:auto}\
svg{max-width:100%;height:auto;min-width:640px}.scroll{overflow-x:auto}\
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}\
th,td{border-bottom:1px solid #d5d9e0;padding:.3em .7em;text-align:right;white-space:nowrap}th:first-child,td:first-child{text-align:left}\
.caution{border-left:4px solid #c77700;padding:.2em .8em;background:#fff6e5}li{margin:.2em 0}summary{cursor:pointer}\
@media(prefers-color-scheme:dark){body{color:#e4e7ec;background:#14161a}th,td{border-color:#3a3f48}.caution{background:#33270f}}\
@media(max-width:600px){body{padding:.6em}h1{font-size:1.2em}}";

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

fn list(heading: &str, lines: &[String], is_open: bool) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let items: String = lines
        .iter()
        .map(|line| format!("<li>{}</li>\n", escape(line)))
        .collect();
    match is_open {
        true => format!("<h2>{heading}</h2>\n<ul>\n{items}</ul>\n"),
        false => format!("<details><summary>{heading}</summary>\n<ul>\n{items}</ul>\n</details>\n"),
    }
}

impl Page<'_> {
    /// Writes `report.html`.
    pub fn write(&self, report: &Report<'_>, base: Option<&str>, folder: &Path) -> Result<PathBuf> {
        let path = folder.join("report.html");
        std::fs::write(&path, self.html(report, base))
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }

    fn html(&self, report: &Report<'_>, base: Option<&str>) -> String {
        let environment = environment();
        let mut html = head(self.title, &self.about);
        html.push_str(&format!(
            "<p>Guests under {accelerator}, {kernel}, {cpus} CPUs {cpu}, lunette {build}. Bars are medians of the turns; lines extend from the minimum to the maximum.</p>\n",
            accelerator = escape(self.accelerator),
            kernel = escape(&environment.kernel),
            cpus = environment.cpus,
            cpu = escape(&environment.cpu),
            build = escape(&environment.build()),
        ));
        for caution in &self.cautions {
            html.push_str(&format!("<p class=\"caution\">{}</p>\n", escape(caution)));
        }
        html.push_str(&list("Advice", &self.advice, true));
        for (name, chart) in &self.charts {
            // Identifiers must be unique within the page.
            let svg = chart.svg().replace("hatch", &format!("{name}-hatch"));
            html.push_str(&format!(
                "<h2>{}</h2>\n<div class=\"picture\">{svg}</div>\n",
                escape(&chart.title)
            ));
        }
        html.push_str("<h2>Tables</h2>\n");
        for case in report.cases {
            html.push_str(&format!("<h3>{}</h3>\n", escape(&case.name)));
            html.push_str(&table(&report.rows(&case.name, base)));
        }
        html.push_str(&list("Findings, case by case", &self.findings, false));
        html.push_str("</body></html>\n");
        html
    }
}

/// Returns a page with one picture and tables as text.
pub fn plain_page(
    title: &str,
    about: &str,
    cautions: &[&str],
    svg: &str,
    texts: &[String],
) -> String {
    let mut html = head(title, about);
    for caution in cautions {
        html.push_str(&format!("<p class=\"caution\">{}</p>\n", escape(caution)));
    }
    html.push_str(&format!("<div class=\"picture\">{svg}</div>\n"));
    for text in texts {
        html.push_str(&format!(
            "<div class=\"scroll\"><pre>{}</pre></div>\n",
            escape(text)
        ));
    }
    html.push_str("</body></html>\n");
    html
}

fn head(title: &str, about: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>Lunette: {title}</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n<p>{about}</p>\n",
        title = escape(title),
        about = escape(about),
    )
}

fn table(rows: &[Vec<String>]) -> String {
    let mut html = "<div class=\"scroll\"><table>\n".to_owned();
    for (number, row) in rows.iter().enumerate() {
        let cell = if number == 0 { "th" } else { "td" };
        let cells: String = row
            .iter()
            .map(|text| format!("<{cell}>{}</{cell}>", escape(text)))
            .collect();
        html.push_str(&format!("<tr>{cells}</tr>\n"));
    }
    html.push_str("</table></div>\n");
    html
}

#[cfg(test)]
mod tests {
    use super::super::{Case, Run, Way};
    use super::*;

    #[test]
    fn a_page_has_everything_and_fetches_nothing() {
        let ways = [Way {
            name: "a <b>".to_owned(),
            words: None,
            disks: 1,
            choices: Vec::new(),
        }];
        let cases = [Case {
            name: "randread, depth 1".to_owned(),
            ..Case::default()
        }];
        let runs = [Run {
            way: "a <b>".to_owned(),
            case: "randread, depth 1".to_owned(),
            read_iops: 1234.0,
            ..Run::default()
        }];
        let report = Report {
            runs: &runs,
            ways: ways.iter().collect(),
            cases: &cases,
        };
        let page = Page {
            title: "Matrix",
            about: "Jobs.".to_owned(),
            accelerator: "TCG",
            advice: vec!["take: a".to_owned()],
            findings: vec!["a & b".to_owned()],
            cautions: vec!["emulated".to_owned()],
            charts: vec![("iops", report.chart("IOPS", "IOPS", Run::iops))],
        };
        let folder = tempfile::tempdir().unwrap();
        let path = page.write(&report, None, folder.path()).unwrap();
        let html = std::fs::read_to_string(path).unwrap();
        for part in [
            "take: a",
            "a &amp; b",
            "emulated",
            "a &lt;b&gt;",
            "1234",
            "<svg",
        ] {
            assert!(html.contains(part), "{part}");
        }
        // The name of a namespace is not fetched.
        let html = html.replace("http://www.w3.org/2000/svg", "");
        for outside in [
            "://", "<script", "<link", "<img", "<iframe", "@import", "src=",
        ] {
            assert!(!html.contains(outside), "{outside}");
        }
    }
}
