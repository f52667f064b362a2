//! Results of a replay that correspond to published findings.

use std::path::Path;

use anyhow::Result;
use bench::study::{Comparison, Report, Results, Run as _};
use bench::table::{McsRow, mcs_ratios};
use serde::Deserialize;
use serde_json::Value;

use super::published::Measure;
use crate::vm::study::Run;

impl Measure {
    /// Returns the number of ratios with an interval of their own, from the results in the folder of a part.
    pub fn comparisons(&self, folder: &Path) -> Result<usize> {
        match self {
            Measure::Ratio { case, .. } => {
                let results = Results::<Run>::read(&folder.join("runs.jsonl"))?;
                Ok(cases(&results.runs, case).len())
            }
            // The table of the connections shares its error among its own ratios.
            Measure::Layer(_) | Measure::Connections(_) => Ok(0),
        }
    }

    /// Describes the value from the result of a part (null before its end) and its folder. `number` ratios share the probability of an
    /// error. `Err`: the reason why there is none.
    pub fn describe(
        &self,
        folder: &Path,
        result: &Value,
        number: usize,
    ) -> Result<Result<String, String>> {
        let (found, caution) = match self {
            Measure::Ratio { way, base, case } => {
                let results = Results::<Run>::read(&folder.join("runs.jsonl"))?;
                let mut runs = results.runs.iter();
                let is_disturbed = runs.any(|run| {
                    run.case.starts_with(case)
                        && [*way, *base].contains(&run.way.as_str())
                        && run.is_disturbed()
                });
                let found = ratios(&results.runs, [way, base], case, number);
                (found, is_disturbed.then_some(DISTURBED))
            }
            Measure::Layer(name) => {
                let is_apart = result["studies"][0]["comparable"] == false;
                (layer(result, name), is_apart.then_some(APART))
            }
            Measure::Connections(count) => {
                let rows = Option::<Vec<McsRow>>::deserialize(&result["rows"])?;
                let found = connections(&rows.unwrap_or_default(), *count);
                let is_disturbed = result["disturbed"] == true;
                (found, is_disturbed.then_some(DISTURBED))
            }
        };
        Ok(found.map(|text| match caution {
            Some(caution) => format!("{text}; {caution}"),
            None => text,
        }))
    }
}

const DISTURBED: &str = "unreliable: disturbed by other work";
const APART: &str = "unreliable: the application's latency differs between the runs";

/// Returns the names of the measured cases that begin with `case`, in the order of their first runs.
fn cases<'a>(runs: &'a [Run], case: &str) -> Vec<&'a str> {
    let mut cases: Vec<&str> = Vec::new();
    for run in runs.iter().filter(|run| run.case.starts_with(case)) {
        if !cases.contains(&run.case.as_str()) {
            cases.push(&run.case);
        }
    }
    cases
}

fn ratios(
    runs: &[Run],
    [way, base]: [&str; 2],
    case: &str,
    number: usize,
) -> Result<String, String> {
    let report = Report {
        runs,
        variants: Vec::new(),
        cases: Vec::new(),
        notes: Vec::new(),
    };
    let cases = cases(runs, case);
    let found = cases.iter().filter_map(|name| {
        let comparison: Comparison = report.comparison(way, base, name, number)?;
        Some(match cases.len() {
            1 => comparison.range_text(),
            _ => format!("{name}: {}", comparison.range_text()),
        })
    });
    let found: Vec<String> = found.collect();
    match found.is_empty() {
        true => Err("not measured".to_owned()),
        false => Ok(found.join("; ")),
    }
}

fn layer(document: &Value, name: &str) -> Result<String, String> {
    let layers = document["studies"][0]["layers"].as_array();
    let layers = layers.map_or(&[][..], Vec::as_slice);
    let of = |name: &str| {
        let mut layers = layers.iter();
        layers.find(|layer| {
            layer["layer"]
                .as_str()
                .is_some_and(|one| one.starts_with(name))
        })
    };
    let whole = of("Guest application").and_then(|layer| layer["mean_ns"].as_f64());
    let found = of(name).ok_or("not measured")?;
    match (found["mean_ns"].as_f64(), whole) {
        (Some(mean), Some(whole)) if whole > 0.0 => Ok(format!(
            "{:.1} of {:.1} us ({:.0} %)",
            mean / 1e3,
            whole / 1e3,
            mean * 100.0 / whole
        )),
        _ => Err(found["why_not"]
            .as_str()
            .unwrap_or("not measured")
            .to_owned()),
    }
}

fn connections(rows: &[McsRow], count: u16) -> Result<String, String> {
    let several = rows.iter().zip(mcs_ratios(rows));
    let found = several.filter(|(row, _)| row.connections == count);
    let found =
        found.filter_map(|(row, ratio)| Some(format!("{}: {}", row.case, ratio?.range_text())));
    let found: Vec<String> = found.collect();
    match found.is_empty() {
        true => Err("not measured".to_owned()),
        false => Ok(found.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_layer_is_a_share_of_the_application() {
        let document = json!({"studies": [{"layers": [
            {"layer": "Guest application", "mean_ns": 200_000.0},
            {"layer": "Host kvm", "why_not": "no KVM"},
            {"layer": "Device (noticed to notified)", "mean_ns": 50_000.0}]}]});
        let share = layer(&document, "Device");
        assert_eq!(share, Ok("50.0 of 200.0 us (25 %)".to_owned()));
        assert_eq!(layer(&document, "Host kvm"), Err("no KVM".to_owned()));
        assert!(layer(&document, "Block device").is_err());
    }

    #[test]
    fn findings_from_different_or_disturbed_runs_have_a_caution() {
        let folder = Path::new("/nonexistent");
        let of = |measure: Measure, document: &Value| {
            let found = measure.describe(folder, document, 1).unwrap();
            found.unwrap()
        };
        let mut latency = json!({"studies": [{"comparable": true, "layers": [
            {"layer": "Guest application", "mean_ns": 200_000.0}, {"layer": "Device", "mean_ns": 50_000.0}]}]});
        assert_eq!(
            of(Measure::Layer("Device"), &latency),
            "50.0 of 200.0 us (25 %)"
        );
        latency["studies"][0]["comparable"] = false.into();
        assert!(of(Measure::Layer("Device"), &latency).ends_with(APART));
        let row = |connections| {
            json!({"case": "read", "connections": connections, "bytes_per_second": [1.0, 1.0],
                "iops": [1.0, 1.0], "target_cpu_seconds_per_million": null, "driver_cpu_seconds_per_million": null})
        };
        let mcs = json!({"disturbed": true, "rows": [row(1), row(2)]});
        assert!(of(Measure::Connections(2), &mcs).ends_with(DISTURBED));
    }

    #[test]
    fn ratios_are_those_of_each_case() {
        let run = |way: &str, case: &str, turn, read_iops| Run {
            way: way.to_owned(),
            case: case.to_owned(),
            turn,
            read_iops,
            ..Run::default()
        };
        let mut runs = Vec::new();
        for turn in 0..4 {
            runs.push(run("scsi", "read, depth 1", turn, 75.0));
            runs.push(run("blk", "read, depth 1", turn, 100.0));
            runs.push(run("scsi", "read, depth 8", turn, 100.0));
            runs.push(run("blk", "read, depth 8", turn, 100.0));
        }
        assert_eq!(
            ratios(&runs, ["scsi", "blk"], "read, depth 1", 1).unwrap(),
            "0.75 (0.75 to 0.75, 4 turns)"
        );
        let both = ratios(&runs, ["scsi", "blk"], "read", 2).unwrap();
        assert!(both.contains("; read, depth 8: 1.00 ("), "{both}");
        assert!(ratios(&runs, ["scsi", "ide"], "read", 2).is_err());
    }
}
