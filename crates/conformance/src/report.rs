//! Results as a table, as JSON and as JUnit XML.

use std::fmt::Write;

use serde_json::{Value, json as value};

use crate::runner::{Outcome, Report, TestReport};

/// Formats one line of the table: result, name, clause and reason.
pub fn table(report: &TestReport) -> String {
    let (test, outcome) = (report.test, &report.outcome);
    let mut line = format!("{:<8} {}", outcome.word(), test.name());
    match outcome.reason() {
        "" => {}
        reason => write!(line, "\n         {}: {reason}", test.clause).unwrap_or_default(),
    }
    line
}

/// Returns the report as JSON.
pub fn json(device: &str, report: &Report) -> Value {
    let tests = report.tests.iter().map(|one| {
        value!({
            "name": one.test.name(),
            "clause": one.test.clause,
            "writes": one.test.writes,
            "result": one.outcome.word(),
            "reason": one.outcome.reason(),
            "seconds": one.duration.as_secs_f64(),
        })
    });
    value!({
        "device": device,
        "passed": report.count("passed"),
        "failed": report.count("failed"),
        "skipped": report.count("skipped"),
        "died": report.count("died"),
        "tests": tests.collect::<Vec<_>>(),
    })
}

/// Returns the report as JUnit XML. A back end that died is an error of its test.
pub fn junit(device: &str, report: &Report) -> String {
    let seconds: f64 = report.tests.iter().map(|t| t.duration.as_secs_f64()).sum();
    let mut xml = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"{}\" tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\" time=\"{seconds:.3}\">\n",
        escape(device),
        report.tests.len(),
        report.count("failed"),
        report.count("died"),
        report.count("skipped"),
    );
    for one in &report.tests {
        let name = escape(&one.test.name());
        let reason = escape(one.outcome.reason());
        let group = one.test.group;
        let seconds = one.duration.as_secs_f64();
        let inner = match one.outcome {
            Outcome::Passed => String::new(),
            Outcome::Failed(_) => format!(
                "<failure message=\"{reason}\">{}</failure>",
                escape(one.test.clause)
            ),
            Outcome::Skipped(_) => format!("<skipped message=\"{reason}\"/>"),
            Outcome::Died(_) => format!("<error message=\"{reason}\"/>"),
        };
        // Writing to a String cannot fail.
        writeln!(
            xml,
            "  <testcase classname=\"{group}\" name=\"{name}\" time=\"{seconds:.3}\">{inner}</testcase>"
        )
        .unwrap_or_default();
    }
    xml.push_str("</testsuite>\n");
    xml
}

/// Escapes text for XML. Control characters, which XML forbids, become question marks.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c if c.is_control() => escaped.push('?'),
            c => escaped.push(c),
        }
    }
    escaped
}
