//! Queries of the Grafana dashboard, evaluated by promtool over the metrics of a daemon.

use std::fmt::Write;
use std::process::Command;

use crate::Scratch;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vm::workspace;

/// Seconds between the two scrapes that promtool sees.
const INTERVAL: u64 = 15;

/// Checks that each query of the dashboard has a result over two pages of metrics. A query that selects problems (`> 0`) may have none.
///
/// # Errors
/// The queries without a result, or the output of promtool.
pub fn ensure_queries_have_results(scratch: &Scratch, pages: [&str; 2]) -> Result<()> {
    let queries = queries()?;
    ensure!(queries.len() > 30, "{} queries", queries.len());
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
    let later = values(pages[1]);
    for (series, value) in values(pages[0]) {
        let found = later.iter().find(|(other, _)| *other == series);
        let next = found.map_or("_", |(_, value)| value);
        writeln!(test, "  - series: {}", Value::from(series))?;
        writeln!(
            test,
            "    values: {}",
            Value::from(format!("{value} {next}"))
        )?;
    }
    let up = with_target("up");
    writeln!(test, "  - series: {}\n    values: \"1 1\"", Value::from(up))?;
    test.push_str("  promql_expr_test:\n");
    for query in &queries {
        let query = Value::from(query.as_str());
        writeln!(
            test,
            "  - expr: {query}\n    eval_time: {INTERVAL}s\n    exp_samples: []"
        )?;
    }
    let file = scratch.file("dashboard.yml");
    std::fs::write(&file, test)?;
    let output = Command::new("promtool")
        .args(["test", "rules"])
        .arg(&file)
        .output();
    let output = output.context("cannot run promtool; hint: apt-get install prometheus")?;
    // promtool reports each query with a result, because none is expected.
    let report = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let silent = queries.iter().filter(|query| {
        let has_result = report.contains(&format!("expr: {query:?}"));
        !has_result && !query.ends_with("> 0")
    });
    let silent: Vec<&String> = silent.collect();
    ensure!(silent.is_empty(), "no result: {silent:#?}\n{report}");
    Ok(())
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
