//! Tables, pictures and sentences of a study's runs.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use bench::chart::{Chart, Point, Series};
use bench::picture::Painter;
use bench::report::columns;
use bench::run::{Interval, bootstrap_ratio, spread};
use serde_json::{Value, json};

use super::{Case, Run, Way};

/// Runs of a study by way and case.
pub struct Report<'a> {
    pub runs: &'a [Run],
    pub ways: Vec<&'a Way>,
    pub cases: &'a [Case],
}

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
    /// Class of a share of bare metal's IOPS.
    pub fn of(ratio: f64) -> Class {
        match ratio {
            r if r < 0.40 => Class::Mistake,
            r if r < 0.75 => Class::Tuning,
            _ => Class::Near,
        }
    }

    pub fn words(self) -> &'static str {
        match self {
            Class::Mistake => "below 40 %: a mistake in the configuration is likely",
            Class::Tuning => "40 to 75 %: worth tuning",
            Class::Near => "near bare metal",
        }
    }
}

impl Report<'_> {
    fn runs_of(&self, way: &str, case: &str) -> Vec<&Run> {
        let runs = self
            .runs
            .iter()
            .filter(|run| run.way == way && run.case == case);
        let mut runs: Vec<&Run> = runs.collect();
        runs.sort_by_key(|run| run.turn);
        runs
    }

    fn each(&self, way: &str, case: &str, value: impl Fn(&Run) -> f64) -> Vec<f64> {
        self.runs_of(way, case).into_iter().map(value).collect()
    }

    /// CPU time of the host per request in nanoseconds, if all turns have it.
    fn host_ns(&self, way: &str, case: &str) -> Option<f64> {
        let runs = self.runs_of(way, case);
        let known: Option<Vec<f64>> = runs.iter().map(|run| run.host_ns).collect();
        known
            .filter(|known| !known.is_empty())
            .map(|known| spread(&known).median)
    }

    /// Ratio of the IOPS of two ways, from the turns that both have.
    pub fn ratio(&self, way: &str, base: &str, case: &str) -> Option<Interval> {
        let (of_way, of_base) = (self.runs_of(way, case), self.runs_of(base, case));
        let turns = of_way.iter().filter_map(|run| {
            let other = of_base.iter().find(|other| other.turn == run.turn)?;
            Some((run.iops(), other.iops()))
        });
        let (a, b): (Vec<f64>, Vec<f64>) = turns.unzip();
        bootstrap_ratio(&a, &b)
    }

    /// Table with a line for each way that has runs of a case. `base` is the way for relative values.
    pub fn table(&self, case: &str, base: Option<&str>) -> String {
        columns(&self.rows(case, base))
    }

    /// Cells of [`Report::table`].
    pub fn rows(&self, case: &str, base: Option<&str>) -> Vec<Vec<String>> {
        let mut lines = vec![vec![
            "way".to_owned(),
            "IOPS".to_owned(),
            "least to most".to_owned(),
            "of the first".to_owned(),
            "p50 us".to_owned(),
            "p99 us".to_owned(),
            "guest CPU us/IO".to_owned(),
            "host CPU us/IO".to_owned(),
        ]];
        for way in &self.ways {
            let iops = spread(&self.each(&way.name, case, Run::iops));
            if iops.median == 0.0 {
                continue;
            }
            let micros = |value: &dyn Fn(&Run) -> f64| {
                format!(
                    "{:.1}",
                    spread(&self.each(&way.name, case, value)).median / 1e3
                )
            };
            let ratio = base.filter(|base| *base != way.name);
            let ratio = ratio.and_then(|base| self.ratio(&way.name, base, case));
            let guest = match way.words {
                Some(_) => {
                    micros(&|run| run.guest_user_ns + run.guest_system_ns + run.guest_irq_ns)
                }
                None => "-".to_owned(),
            };
            lines.push(vec![
                way.name.clone(),
                format!("{:.0}", iops.median),
                format!("{:.0} to {:.0}", iops.min, iops.max),
                ratio.map_or("-".to_owned(), percent),
                micros(&|run| run.p50_ns),
                micros(&|run| run.p99_ns),
                guest,
                self.host_ns(&way.name, case)
                    .map_or("-".to_owned(), |nanos| format!("{:.1}", nanos / 1e3)),
            ]);
        }
        lines
    }

    /// The way with the most IOPS in a case, and those without a significant difference from it.
    pub fn best(&self, case: &str) -> Option<String> {
        let median = |way: &&&Way| spread(&self.each(&way.name, case, Run::iops)).median;
        let best = self
            .ways
            .iter()
            .max_by(|one, other| median(one).total_cmp(&median(other)))?;
        let is_as_good = |way: &&&Way| {
            let ratio = self.ratio(&way.name, &best.name, case);
            way.name != best.name && ratio.is_some_and(|ratio| ratio.high >= 1.0)
        };
        let equals = self.ways.iter().filter(is_as_good);
        let equals: Vec<&str> = equals.map(|way| way.name.as_str()).collect();
        let also = match equals.as_slice() {
            [] => String::new(),
            equals => format!("; statistically equal: {}", equals.join("; ")),
        };
        let iops = median(&best);
        Some(format!(
            "{case}: most IOPS ({iops:.0}) by {}{also}",
            best.name
        ))
    }

    /// Bars of a value, grouped by case.
    pub fn chart(&self, title: &str, unit: &str, value: impl Fn(&Run) -> f64) -> Chart {
        let series = self.ways.iter().map(|way| Series {
            name: way.name.clone(),
            points: self
                .cases
                .iter()
                .map(|case| {
                    let values = self.each(&way.name, &case.name, &value);
                    let reach = spread(&values);
                    (reach.median > 0.0).then_some(Point {
                        value: reach.median,
                        low: reach.min,
                        high: reach.max,
                    })
                })
                .collect(),
        });
        let series = series.filter(|series| series.points.iter().any(Option::is_some));
        Chart {
            title: title.to_owned(),
            unit: unit.to_owned(),
            groups: self.cases.iter().map(|case| case.name.clone()).collect(),
            series: series.collect(),
            stacked: false,
            logarithmic: false,
        }
    }

    /// Pictures of latency and CPU time for a page.
    pub fn more_charts(&self) -> Vec<(&'static str, Chart)> {
        let guest = |run: &Run| (run.guest_user_ns + run.guest_system_ns + run.guest_irq_ns) / 1e3;
        let mut p50 = self.chart("Latency, median", "microseconds, logarithmic", |run| {
            run.p50_ns / 1e3
        });
        let mut p99 = self.chart("Latency, 99 of 100", "microseconds, logarithmic", |run| {
            run.p99_ns / 1e3
        });
        (p50.logarithmic, p99.logarithmic) = (true, true);
        vec![
            ("p50", p50),
            ("p99", p99),
            (
                "guest-cpu",
                self.chart(
                    "CPU time of the guest for each request",
                    "microseconds",
                    guest,
                ),
            ),
            (
                "host-cpu",
                self.chart(
                    "CPU time of the host for each request",
                    "microseconds",
                    |run| run.host_ns.unwrap_or(0.0) / 1e3,
                ),
            ),
        ]
    }

    pub fn json(&self, accelerator: &str, base: Option<&str>) -> Value {
        let cells = self
            .cases
            .iter()
            .flat_map(|case| self.ways.iter().map(move |way| (case, way)));
        let cells = cells.map(|(case, way)| {
            let iops = spread(&self.each(&way.name, &case.name, Run::iops));
            let median = |value: &dyn Fn(&Run) -> f64| {
                spread(&self.each(&way.name, &case.name, value)).median
            };
            let ratio = base.and_then(|base| self.ratio(&way.name, base, &case.name));
            json!({
                "way": way.name, "case": case.name, "iops": iops,
                "turns": self.runs_of(&way.name, &case.name).len(),
                "of_first": ratio, "mean_ns": median(&|run| run.mean_ns),
                "p50_ns": median(&|run| run.p50_ns), "p99_ns": median(&|run| run.p99_ns),
                "guest_cpu_ns_per_io": {"user": median(&|run| run.guest_user_ns),
                    "system": median(&|run| run.guest_system_ns), "irq": median(&|run| run.guest_irq_ns)},
                "host_cpu_ns_per_io": self.host_ns(&way.name, &case.name),
            })
        });
        json!({"accelerator": accelerator, "cells": cells.collect::<Vec<_>>()})
    }
}

/// Formats a ratio and its interval in per cent.
pub fn percent(ratio: Interval) -> String {
    let Interval { value, low, high } = ratio;
    format!(
        "{:.0} % ({:.0} to {:.0})",
        value * 100.0,
        low * 100.0,
        high * 100.0
    )
}

/// Writes a picture as SVG and PNG.
pub fn draw(chart: &Chart, folder: &Path, name: &str) -> Result<PathBuf> {
    let svg = chart.svg();
    let path = folder.join(format!("{name}.svg"));
    let write = |path: &Path, bytes: &[u8]| {
        std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
    };
    write(&path, svg.as_bytes())?;
    write(
        &folder.join(format!("{name}.png")),
        &Painter::new().png(&svg)?,
    )?;
    Ok(path)
}

/// Minimum turns for conclusions. With two or three values the width of a confidence interval is random.
const TURNS_FOR_INTERVALS: u32 = 4;

/// Message in place of conclusions after too few turns.
pub fn too_few(turns: u32) -> Option<String> {
    (turns < TURNS_FOR_INTERVALS)
        .then(|| format!("{turns} turns are too few for a comparison; hint: --turns {TURNS_FOR_INTERVALS} or more"))
}

/// Sentence on two ways, including whether their difference is significant.
pub fn sentence(case: &str, one: &str, other: &str, ratio: Option<Interval>) -> String {
    let mut text = format!("{case}: ");
    let written = match ratio {
        None => write!(text, "{one} and {other} have no turn in common"),
        Some(Interval { value, low, high }) if low <= 1.0 && high >= 1.0 => write!(
            text,
            "{one} and {other} are statistically equal: {value:.2} ({low:.2} to {high:.2})"
        ),
        Some(Interval { value, low, high }) => write!(
            text,
            "{one} has {value:.2} ({low:.2} to {high:.2}) of the IOPS of {other}"
        ),
    };
    written.unwrap_or(());
    text
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
            ways: Vec::new(),
            cases: &[],
        };
        let class = |way| Class::of(report.ratio(way, "host", "c").unwrap().value);
        assert_eq!(class("slow"), Class::Mistake);
        assert_eq!(class("half"), Class::Tuning);
        assert_eq!(class("host"), Class::Near);
        for (ratio, class) in [
            (0.399, Class::Mistake),
            (0.40, Class::Tuning),
            (0.749, Class::Tuning),
            (0.75, Class::Near),
        ] {
            assert_eq!(Class::of(ratio), class);
        }
    }

    #[test]
    fn sentences_say_what_the_interval_says() {
        let interval = |value, low, high| Some(Interval { value, low, high });
        assert_eq!(
            sentence(
                "randread, depth 1",
                "scsi",
                "blk",
                interval(0.91, 0.88, 0.94)
            ),
            "randread, depth 1: scsi has 0.91 (0.88 to 0.94) of the IOPS of blk"
        );
        let same = sentence("x", "a", "b", interval(0.99, 0.95, 1.02));
        assert!(same.contains("statistically equal"), "{same}");
        assert!(sentence("x", "a", "b", None).contains("no turn in common"));
    }
}
