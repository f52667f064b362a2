//! Tables, pictures and JSON of a study's runs.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use bench::chart::Chart;
use bench::report::columns;
use bench::run::{Environment, Interval, spread};
use bench::study::{METHOD, Page, Report, Results, Run as _, Table, percent, write_file};
use cli_common::{Failure, Outcome, print_line};
use serde::Deserialize;
use serde_json::{Value, json};

use super::engine::{Study, accelerator};
use super::{DiskRoute, Run};

/// Class of a way by its share of bare metal's IOPS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Below 40 %. A mistake in the configuration is likely.
    Mistake,
    /// 40 to 75 %. Tuning is worthwhile.
    Tuning,
    /// 75 % or more.
    Near,
}

impl Class {
    /// Returns the class of a share of bare metal's IOPS, if its whole interval is in one class.
    pub fn of(ratio: Interval) -> Option<Class> {
        let class = |part: f64| match part {
            part if part < 0.40 => Class::Mistake,
            part if part < 0.75 => Class::Tuning,
            _ => Class::Near,
        };
        (class(ratio.low) == class(ratio.high)).then(|| class(ratio.low))
    }

    pub fn words(self) -> &'static str {
        match self {
            Class::Mistake => "below 40 %: a mistake in the configuration is likely",
            Class::Tuning => "40 to 75 %: worth tuning",
            Class::Near => "near bare metal",
        }
    }
}

impl Study {
    /// Returns the ways in display order.
    pub fn ways(&self) -> impl Iterator<Item = &DiskRoute> {
        self.setups.iter().flat_map(|setup| &setup.ways)
    }

    /// Returns the comparison of runs.
    pub fn report<'a>(&'a self, runs: &'a [Run]) -> Report<'a, Run> {
        Report {
            runs,
            variants: self.ways().map(|way| &way.variant).collect(),
            cases: self.cases.iter().map(|case| case.name.clone()).collect(),
            notes: Vec::new(),
        }
    }
}

/// Returns the CPU time of the host per request in nanoseconds, if all turns have it.
fn host_ns(report: &Report<'_, Run>, way: &str, case: &str) -> Option<f64> {
    let runs = report.runs_of(way, case).into_iter();
    let known: Option<Vec<f64>> = runs.map(|run| run.host_ns).collect();
    known
        .filter(|known| !known.is_empty())
        .map(|known| spread(&known).median)
}

/// Returns a table with a line for each way that has runs of a case. `base` is the way for relative values.
pub fn table(report: &Report<'_, Run>, case: &str, base: Option<&str>) -> Table {
    let heading = [
        "way",
        "IOPS",
        "least to most",
        "of the first",
        "p50 us",
        "p99 us",
        "guest CPU us/IO",
        "host CPU us/IO",
    ];
    let mut lines = vec![heading.map(str::to_owned).to_vec()];
    for way in &report.variants {
        let name = way.name.as_str();
        let iops = report.spread(name, case, Run::iops);
        if report.runs_of(name, case).is_empty() {
            continue;
        }
        let ratio = base.filter(|base| *base != name);
        let ratio = ratio
            .and_then(|base| report.comparison(name, base, case, report.comparisons_with_one()));
        // 0: unknown, as on the host.
        let micros = |nanos: f64| match nanos {
            0.0 => "-".to_owned(),
            nanos => format!("{:.1}", nanos / 1e3),
        };
        let median = |value: fn(&Run) -> f64| micros(report.spread(name, case, value).median);
        lines.push(vec![
            name.to_owned(),
            format!("{:.0}", iops.median),
            format!("{:.0} to {:.0}", iops.min, iops.max),
            ratio.map_or("-".to_owned(), |ratio| percent(&ratio)),
            median(|run| run.p50_ns),
            median(|run| run.p99_ns),
            median(Run::guest_ns),
            micros(host_ns(report, name, case).unwrap_or(0.0)),
        ]);
    }
    lines
}

/// Formats [`table`] as text.
pub fn text(report: &Report<'_, Run>, case: &str, base: Option<&str>) -> String {
    columns(&table(report, case, base))
}

/// Prints the results of an interrupted study.
///
/// # Errors
/// Always, for the exit code.
pub fn interrupted(report: &Report<'_, Run>, base: Option<&str>) -> Outcome {
    let mut stdout = cli_common::stdout();
    let cases = report.cases.iter();
    for case in cases.filter(|case| report.runs.iter().any(|run| run.case == **case)) {
        writeln!(stdout, "{case}\n{}", text(report, case, base))?;
    }
    for caution in run_cautions(report) {
        writeln!(stdout, "{caution}")?;
    }
    stdout.flush()?;
    print_line(
        &"interrupted: partial results; hint: run the same command again to continue the study",
    );
    Err(Failure::Interrupted)
}

/// Adds charts, with those of latency and CPU time, and tables to a page.
pub fn fill_page(
    page: &mut Page,
    report: &Report<'_, Run>,
    base: Option<&str>,
    charts: &[(&str, Chart)],
) {
    for (name, chart) in charts {
        page.add_chart(name, chart);
    }
    type More = (&'static str, &'static str, fn(&Run) -> f64);
    let more: [More; 4] = [
        ("p50", "Latency, median", |run| run.p50_ns),
        ("p99", "Latency, 99 of 100", |run| run.p99_ns),
        (
            "guest-cpu",
            "CPU time of the guest for each request",
            Run::guest_ns,
        ),
        ("host-cpu", "CPU time of the host for each request", |run| {
            run.host_ns.unwrap_or(0.0)
        }),
    ];
    for (name, title, value) in more {
        let mut chart = report.chart(title, "microseconds", |run| value(run) / 1e3);
        if title.starts_with("Latency") {
            chart.unit.push_str(", logarithmic");
            chart.logarithmic = true;
        }
        page.add_chart(name, &chart);
    }
    for case in &report.cases {
        page.tables.push((case.clone(), table(report, case, base)));
    }
}

pub fn json(report: &Report<'_, Run>, header: &Value, base: Option<&str>) -> Value {
    let cells = report.cases.iter().flat_map(|case| {
        let ways = report.variants.iter();
        ways.map(move |way| (case.as_str(), way.name.as_str()))
    });
    let cells = cells.map(|(case, way)| {
        let median = |value: fn(&Run) -> f64| report.spread(way, case, value).median;
        let ratio = base.and_then(|base| report.comparison(way, base, case, report.comparisons_with_one()));
        let ratio = ratio.map(|comparison| comparison.ratio);
        json!({
            "way": way, "case": case, "iops": report.spread(way, case, Run::iops),
            "turns": report.runs_of(way, case).len(),
            "of_first": ratio, "mean_ns": median(|run| run.mean_ns),
            "p50_ns": median(|run| run.p50_ns), "p99_ns": median(|run| run.p99_ns),
            "guest_cpu_ns_per_io": {"user": median(|run| run.guest_user_ns),
                "system": median(|run| run.guest_system_ns), "irq": median(|run| run.guest_irq_ns)},
            "host_cpu_ns_per_io": host_ns(report, way, case),
            "disturbed_turns": report.runs_of(way, case).iter().filter(|run| run.is_disturbed()).count(),
            "turns_without_result": report.runs_of(way, case).iter().filter(|run| run.iops() <= 0.0).count(),
        })
    });
    json!({"accelerator": header["accelerator"], "guest": header["guest"], "environment": header["environment"],
        "conditions": report.notes, "method": METHOD, "cells": cells.collect::<Vec<_>>()})
}

/// Result of a study as JSON, in its folder.
pub const RESULT: &str = "result.json";

/// Result of an interrupted study as JSON.
pub const PARTIAL: &str = "partial.json";

/// Writes [`RESULT`].
pub fn write_json(folder: &Path, document: &Value) -> Result<()> {
    write_file(folder, RESULT, format!("{document:#}\n").as_bytes())?;
    std::fs::remove_file(folder.join(PARTIAL)).ok();
    Ok(())
}

/// Writes the results of an interrupted study.
pub fn write_partial(folder: &Path, document: &Value) -> Result<()> {
    let text = format!("{document:#}\n");
    let path = write_file(folder, PARTIAL, text.as_bytes())?;
    print_line(&format_args!(
        "interrupted: partial results, saved in {}",
        path.display()
    ));
    Ok(())
}

/// Minimum turns for conclusions. With two or three values the width of a confidence interval is random.
const TURNS_FOR_INTERVALS: u32 = 4;

/// Message in place of conclusions after too few turns.
pub fn too_few(report: &Report<'_, Run>) -> Option<String> {
    let turns = turns(report.runs);
    (turns < TURNS_FOR_INTERVALS)
        .then(|| format!("{turns} turns are too few for a comparison; hint: --turns {TURNS_FOR_INTERVALS} or more"))
}

/// Returns the number of turns of a study with these runs.
pub fn turns(runs: &[Run]) -> u32 {
    runs.iter().map(|run| run.turn + 1).max().unwrap_or(0)
}

/// Describes the conditions of a study, for its pictures, tables and page: guests, `load` and bars, then machine and time of its first run.
pub fn notes(results: &Results<Run>, load: &str, turn: Duration) -> Vec<String> {
    let header = &results.header;
    let guest = header["guest"]
        .as_str()
        .unwrap_or_else(|| accelerator(results));
    let load = format!(
        "{guest}; {load}; {} turns of {} ms. Bars are medians of the turns; lines extend from the minimum to the maximum.",
        turns(&results.runs),
        turn.as_millis()
    );
    let environment = Environment::deserialize(&header["environment"]);
    let origin = environment.map(|environment| format!("Host: {}.", environment.provenance()));
    std::iter::once(load).chain(origin.ok()).collect()
}

/// Describes the disturbed runs of a study, and those without a result.
pub fn run_cautions(report: &Report<'_, Run>) -> Vec<String> {
    bench::study::cautions(report.runs.iter().map(|run| run as &dyn bench::study::Run))
}

/// Limitations of results from an emulated guest.
pub fn caution(accelerator: &str) -> Option<&'static str> {
    (accelerator != "KVM").then_some(
        "The guest was emulated (TCG), which is many times slower than a CPU. Comparisons with bare metal and between variants do not apply to guests under KVM.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(way: &str, turn: u32, iops: f64) -> Run {
        Run {
            way: way.to_owned(),
            case: "c".to_owned(),
            turn,
            read_iops: iops,
            write_iops: 0.0,
            mean_ns: 1e9 / iops,
            p50_ns: 1e9 / iops,
            p99_ns: 1e9 / iops,
            guest_user_ns: 100.0,
            ..Run::default()
        }
    }

    /// A disk with three times the host's latency has a third of its IOPS at depth one.
    #[test]
    fn a_part_of_bare_metal_has_its_class() {
        let runs: Vec<Run> = (0..4)
            .flat_map(|turn| {
                let drift = 1.0 + f64::from(turn) * 0.05;
                [
                    run("host", turn, 30_000.0 * drift),
                    run("slow", turn, 10_000.0 * drift),
                    run("half", turn, 15_100.0 * drift),
                ]
            })
            .collect();
        let report = Report {
            runs: &runs,
            variants: Vec::new(),
            cases: Vec::new(),
            notes: Vec::new(),
        };
        let class = |way| Class::of(report.comparison(way, "host", "c", 3).unwrap().ratio);
        assert_eq!(class("slow"), Some(Class::Mistake));
        assert_eq!(class("half"), Some(Class::Tuning));
        assert_eq!(class("host"), Some(Class::Near));
        for (low, high, class) in [
            (0.38, 0.399, Some(Class::Mistake)),
            (0.40, 0.749, Some(Class::Tuning)),
            (0.75, 2.0, Some(Class::Near)),
            (0.39, 0.41, None),
            (0.3, 0.9, None),
        ] {
            let value = f64::midpoint(low, high);
            assert_eq!(Class::of(Interval { value, low, high }), class);
        }
    }

    #[test]
    fn a_turn_without_a_result_is_named() {
        let variants = ["host", "slow"].map(|name| bench::study::Variant {
            name: name.to_owned(),
            settings: Vec::new(),
        });
        let mut runs: Vec<Run> = (0..4)
            .flat_map(|turn| [run("host", turn, 200.0), run("slow", turn, 100.0)])
            .collect();
        runs[3].read_iops = 0.0;
        // The table has a line for `slow`, also without a result.
        let two = [runs[0].clone(), runs[3].clone()];
        let [whole, short] = [&runs[..], &two].map(|runs| Report {
            runs,
            variants: variants.iter().collect(),
            cases: vec!["c".to_owned()],
            notes: Vec::new(),
        });
        let text = text(&whole, "c", Some("host"));
        assert!(text.contains("1 turn without a result"), "{text}");
        let named =
            "no result (0 IOPS) in 1 of 8 runs, which the comparisons leave out: slow, c, turn 1.";
        assert_eq!(run_cautions(&whole), [named]);
        let document = json(&whole, &json!({}), Some("host"));
        assert_eq!(document["cells"][1]["turns_without_result"], 1);
        assert_eq!(document["cells"][1]["of_first"]["value"], 0.5);
        let lines = table(&short, "c", Some("host"));
        assert_eq!(lines[2][..2], ["slow", "0"]);
    }

    #[test]
    fn a_document_has_conditions_environment_and_method() {
        let variants = ["host", "slow"].map(|name| bench::study::Variant {
            name: name.to_owned(),
            settings: Vec::new(),
        });
        let runs = [run("host", 0, 200.0), run("slow", 0, 100.0)];
        let report = Report {
            runs: &runs,
            variants: variants.iter().collect(),
            cases: vec!["c".to_owned()],
            notes: vec!["TCG, 1 turn".to_owned(), "Host: Linux.".to_owned()],
        };
        let environment = Environment {
            kernel: "Linux 6.1".to_owned(),
            mitigations: Some(3),
            ..Environment::default()
        };
        let header = json!({"accelerator": "TCG", "guest": "QEMU 7.2", "environment": environment});
        let document = json(&report, &header, Some("host"));
        assert_eq!(document["conditions"][0], "TCG, 1 turn");
        assert_eq!(document["environment"]["kernel"], "Linux 6.1");
        assert_eq!(document["environment"]["mitigations"], 3);
        assert_eq!(document["method"], METHOD);
        assert_eq!(document["cells"][1]["of_first"]["value"], 0.5);
    }

    #[test]
    fn a_complete_result_replaces_the_partial_one() {
        let folder = tempfile::tempdir().unwrap();
        let names = || {
            let entries = std::fs::read_dir(folder.path()).unwrap();
            let names = entries.map(|entry| entry.unwrap().file_name());
            names.collect::<Vec<_>>()
        };
        write_partial(folder.path(), &json!({"studies": [1]})).unwrap();
        assert_eq!(names(), [PARTIAL]);
        write_json(folder.path(), &json!({"studies": [1, 2]})).unwrap();
        assert_eq!(names(), [RESULT]);
    }
}
