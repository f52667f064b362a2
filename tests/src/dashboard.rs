//! Queries of the Grafana dashboard and alerts, evaluated by promtool over the metrics of a daemon.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::Command;

use crate::Scratch;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vm::workspace;

/// Seconds between the two scrapes that promtool sees.
const INTERVAL: u64 = 15;
/// Scrapes of the alerts' test, for fifteen minutes.
const SCRAPES: u64 = 60;

/// Checks that each query of the dashboard has a result over two pages of metrics. A query that selects problems (`> 0`) may have none.
///
/// # Errors
/// The queries without a result, or the output of promtool.
pub fn ensure_queries_have_results(scratch: &Scratch, pages: [&str; 2]) -> Result<()> {
    let queries = queries()?;
    ensure!(queries.len() > 30, "{} queries", queries.len());
    let mut test = series(pages, |value, next| {
        format!("{value} {}", next.unwrap_or("_"))
    })?;
    test.push_str("  promql_expr_test:\n");
    for query in &queries {
        let query = Value::from(query.as_str());
        writeln!(
            test,
            "  - expr: {query}\n    eval_time: {INTERVAL}s\n    exp_samples: []"
        )?;
    }
    // promtool reports each query with a result, because none is expected.
    let report = report_of(scratch, &test)?;
    let silent = queries.iter().filter(|query| {
        let has_result = report.contains(&format!("expr: {query:?}"));
        !has_result && !query.ends_with("> 0")
    });
    let silent: Vec<&String> = silent.collect();
    ensure!(silent.is_empty(), "no result: {silent:#?}\n{report}");
    Ok(())
}

/// Returns promtool's list of the alerts that fire if the counters of a daemon continue to grow as between two pages of metrics.
///
/// # Errors
/// If promtool cannot be run.
pub fn firing_alerts(scratch: &Scratch, pages: [&str; 2]) -> Result<String> {
    let rules = workspace().join("contrib/prometheus/lunette.rules.yml");
    let rules = Value::from(rules.display().to_string());
    let mut test = format!("rule_files: [{rules}]\n");
    test.push_str(&series(pages, |value, next| {
        let number = |text: &str| text.parse::<f64>().unwrap_or(0.0);
        let step = next.map_or(0.0, |next| number(next) - number(value));
        format!("{value}{step:+}x{SCRAPES}")
    })?);
    test.push_str("  promql_expr_test:\n");
    // No alert waits for longer than ten minutes.
    test.push_str(
        "  - expr: ALERTS{alertstate=\"firing\"}\n    eval_time: 15m\n    exp_samples: []\n",
    );
    report_of(scratch, &test)
}

/// Returns the head of a test for promtool with all series of two pages of metrics. `values` forms the values of a series from those of both
/// pages.
fn series(pages: [&str; 2], values_of: impl Fn(&str, Option<&str>) -> String) -> Result<String> {
    let mut test = format!(
        "evaluation_interval: {INTERVAL}s\ntests:\n- interval: {INTERVAL}s\n  input_series:\n"
    );
    let values = |page: &str| -> Vec<(String, String)> {
        let samples = page.lines().filter(|line| !line.starts_with('#'));
        samples
            .filter_map(|line| line.rsplit_once(' '))
            .map(|(series, value)| (with_target(series), value.to_owned()))
            .collect()
    };
    let later: BTreeMap<String, String> = values(pages[1]).into_iter().collect();
    for (series, value) in values(pages[0]) {
        let next = later.get(&series).map(String::as_str);
        writeln!(test, "  - series: {}", Value::from(series))?;
        let values = Value::from(values_of(&value, next));
        writeln!(test, "    values: {values}")?;
    }
    let up = Value::from(with_target("up"));
    let values = Value::from(values_of("1", Some("1")));
    writeln!(test, "  - series: {up}\n    values: {values}")?;
    Ok(test)
}

/// Runs a test by promtool and returns its output.
fn report_of(scratch: &Scratch, test: &str) -> Result<String> {
    let file = scratch.file("promtool.yml");
    std::fs::write(&file, test)?;
    let output = Command::new("promtool")
        .args(["test", "rules"])
        .arg(&file)
        .output();
    let output = output.context("cannot run promtool; hint: apt-get install prometheus")?;
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    Ok(text.into_owned())
}

/// Adds the labels of a scrape target, as Prometheus does.
fn with_target(series: &str) -> String {
    const TARGET: &str = "job=\"lunette\",instance=\"h\"";
    match series.split_once('{') {
        Some((name, labels)) => format!("{name}{{{TARGET},{labels}"),
        None => format!("{series}{{{TARGET}}}"),
    }
}

/// Returns the dashboard's queries with the values that Grafana gives to its variables.
fn queries() -> Result<Vec<String>> {
    let file = workspace().join("contrib/grafana/lunette.json");
    let dashboard: Value = serde_json::from_str(&std::fs::read_to_string(file)?)?;
    let panels = dashboard["panels"].as_array().into_iter().flatten();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let queries = targets.filter_map(|target| target["expr"].as_str());
    Ok(queries
        .map(|query| {
            let query = query.replace("$__rate_interval", "1m");
            ["$instance", "$export", "$operation"]
                .iter()
                .fold(query, |query, variable| query.replace(variable, ".*"))
        })
        .collect())
}
