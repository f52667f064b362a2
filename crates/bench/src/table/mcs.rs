//! `lunette bench mcs`: one session with one to several connections (MC/S), as a table.
//!
//! Reads, writes and both at 256 KiB with 64 in flight. Each number of connections is a subject, and all take turns. The target is ours
//! with a RAM disk on one CPU, or any given one.

use std::net::SocketAddr;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use latency::Clock;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::iscsi::{Served, fill, job, lunette, start_lunette};
use super::{TableOptions, chosen, disturbances, head, introduction};
use crate::children::Scratch;
use crate::driver::{DriverOptions, Subject};
use crate::job::Job;
use crate::link::{FAR, Link, LinkOptions};
use crate::report::{columns, rate};
use crate::run::{Outcome, Plan, Progress, Repetition, SubjectResult, run_without_errors, spread};
use crate::study::{Comparison, METHOD};
use std::time::Duration;

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct McsOptions {
    /// Options of all tables.
    pub table: TableOptions,
    /// `iscsi://HOST[:PORT]/TARGET/LUN`; its content is lost. `None`: a daemon of our own.
    pub target: Option<String>,
    /// Largest number of connections.
    pub connections: u16,
    /// Size of a request in fio's notation.
    pub size: String,
    /// Requests in flight in the session.
    pub depth: u32,
    /// Line between driver and target; `None`: loopback. Only for a daemon of our own.
    pub link: Option<LinkOptions>,
    /// Block devices that are measured in turns with the session.
    pub devices: Vec<Beside>,
}

/// A block device beside the session; its content is lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beside {
    /// Name in the table.
    pub name: String,
    /// Path of the device.
    pub device: String,
}

impl FromStr for Beside {
    type Err = String;

    fn from_str(text: &str) -> Result<Beside, String> {
        let is_name = |name: &str| !name.is_empty() && name.parse::<u16>().is_err();
        match text.split_once('=') {
            Some((name, device)) if is_name(name) && !device.is_empty() && !text.contains(',') => {
                Ok(Beside {
                    name: name.to_owned(),
                    device: device.to_owned(),
                })
            }
            _ => {
                Err("expected NAME=DEVICE without commas, and a name that is no number".to_owned())
            }
        }
    }
}

/// Name, and fio's pattern.
const CASES: [(&str, &str); 3] = [("read", "read"), ("write", "write"), ("both", "rw")];

/// Result of one case, with a subject per number of connections.
struct Line {
    case: &'static str,
    outcome: Outcome,
}

/// The table as text and as JSON.
pub struct McsTable {
    /// Table as text, for a terminal.
    pub text: String,
    /// Rows of the table as JSON.
    pub json: Value,
}

/// Runs the cases and returns the table.
pub fn mcs_table(
    options: &McsOptions,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<McsTable> {
    chosen(&options.table, CASES.iter().map(|(name, _)| *name))?;
    let clock = Clock::new();
    let folder = Scratch::for_sockets("lm")?;
    let link = options.link.map(Link::new).transpose()?;
    let own = match (&options.target, &link) {
        (Some(_), _) => None,
        (None, link) => {
            progress.print("starting the target and filling its disk");
            Some(start(options, folder.path(), link.as_ref())?)
        }
    };
    let subjects = subjects(options, own.as_ref())?;
    if own.is_some() {
        fill(subjects[..1].to_vec(), &clock, interrupted)?;
    }
    let mut lines = Vec::new();
    for (case, pattern) in CASES {
        let only = options.table.only.as_ref();
        if !only.is_none_or(|only| case.contains(only.as_str()))
            || interrupted.load(Ordering::Relaxed)
        {
            continue;
        }
        let plan = plan(case, pattern, subjects.clone(), options)?;
        let outcome = run_without_errors(&plan, &clock, interrupted, progress)
            .with_context(|| format!("case {case}"))?;
        lines.push(Line { case, outcome });
    }
    Ok(McsTable {
        text: render(&lines, options),
        json: json!(rows_of(&lines)),
    })
}

/// Starts a daemon of our own, at the far end of the line if there is one.
fn start(options: &McsOptions, folder: &Path, link: Option<&Link>) -> Result<Served> {
    let Some(link) = link else {
        return lunette(&options.table, folder, "lunette", &[]);
    };
    let address: SocketAddr = format!("{FAR}:3260").parse()?;
    start_lunette(&options.table, folder, "lunette", &[], address, &link.far())
}

fn subjects(options: &McsOptions, own: Option<&Served>) -> Result<Vec<Subject>> {
    ensure!(
        (1..=16).contains(&options.connections),
        "{} connections; a session has 1 to 16",
        options.connections
    );
    let (place, pid) = match (own, &options.target) {
        (Some(own), _) => (own.place().to_owned(), format!(",pid={}", own.pid())),
        (None, Some(target)) => (target.clone(), String::new()),
        (None, None) => anyhow::bail!("no target"),
    };
    let sessions = (1..=options.connections)
        .map(|count| format!("{place},name={count},connections={count}{pid}"));
    let devices = options.devices.iter();
    let devices = devices.map(|beside| format!("file:{},name={}", beside.device, beside.name));
    sessions
        .chain(devices)
        .map(|words| Subject::parse(&words))
        .collect()
}

fn plan(case: &str, pattern: &str, subjects: Vec<Subject>, options: &McsOptions) -> Result<Plan> {
    let depth = options.depth.to_string();
    let words = [
        ("rw", pattern),
        ("bs", options.size.as_str()),
        ("iodepth", depth.as_str()),
    ];
    let job = Job {
        time_based: true,
        runtime: Some(options.table.turn),
        ..job(case, &words)?
    };
    Ok(Plan {
        subjects,
        jobs: vec![job],
        driver: DriverOptions {
            polling: false,
            ..DriverOptions::default()
        },
        repetitions: options.table.repetitions,
        // A connection over a distance needs many round trips to reach its full rate.
        warm_up: match options.link {
            Some(_) => Duration::from_secs(1),
            None => Duration::from_millis(100),
        },
        cpus: vec![options.table.driver_cpu],
        retries: 1,
        disturbance_max: 0.1,
        ..Plan::default()
    })
}

fn measured(line: &Line) -> impl Iterator<Item = &SubjectResult> {
    let subjects = line.outcome.subjects.iter();
    subjects.filter(|subject| !subject.repetitions.is_empty())
}

fn render(lines: &[Line], options: &McsOptions) -> String {
    let mut text = introduction(&options.table);
    if let Some(link) = options.link {
        text.push_str(&format!(
            "Line with {:.1} ms round trip time, {} and {:.3} % loss, packets of 9000 bytes; driver and target in separate network namespaces\n\n",
            link.delay.as_secs_f64() * 2e3,
            match link.rate {
                0 => "any rate".to_owned(),
                rate => format!("{:.1} Gbit/s", rate as f64 / 1e9),
            },
            link.loss * 100.0
        ));
    }
    text.push_str(&format!(
        "One session, {} a request, {} in flight; {}\n\n",
        options.size,
        options.depth,
        mcs_columns()
    ));
    text.push_str(&mcs_rows(&rows_of(lines)));
    text.push_str(&disturbances(lines.iter().flat_map(measured)));
    text
}

/// One row of the table.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct McsRow {
    /// `read`, `write` or `both`.
    pub case: String,
    /// Number of connections of the session; 0 for a device.
    pub connections: u16,
    /// Name of the block device that was measured instead of a session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Bytes per second of each turn.
    pub bytes_per_second: Vec<f64>,
    /// I/Os per second of each turn.
    pub iops: Vec<f64>,
    /// CPU time of the target, if known.
    pub target_cpu_seconds_per_million: Option<f64>,
    /// CPU time of the driver.
    pub driver_cpu_seconds_per_million: Option<f64>,
}

/// Returns the bandwidth of each row relative to one connection in the same turns; `None` for one connection itself. All comparisons share the
/// probability of an error.
pub fn mcs_ratios(rows: &[McsRow]) -> Vec<Option<Comparison>> {
    let first = |row: &McsRow| {
        let mut rows = rows.iter().filter(|_| row.connections != 1);
        rows.find(|one| one.case == row.case && one.connections == 1)
    };
    let number = rows.iter().filter(|row| first(row).is_some()).count();
    let ratio = |row: &McsRow| {
        let turns = row.bytes_per_second.iter();
        let turns = turns.zip(&first(row)?.bytes_per_second);
        let turns: Vec<(f64, f64)> = turns.map(|(one, other)| (*one, *other)).collect();
        Comparison::of(&turns, number)
    };
    rows.iter().map(ratio).collect()
}

/// Describes the columns of [`mcs_rows`].
pub fn mcs_columns() -> String {
    format!(
        "MB/s and I/Os per second: median, half the spread; relative to one connection: bandwidth, by a {METHOD}; CPU seconds per million requests"
    )
}

/// Formats rows as a text table.
pub fn mcs_rows(rows: &[McsRow]) -> String {
    let mut cells = vec![head(&[
        "case",
        "connections",
        "MB/s",
        "IOPS",
        "relative to one",
        "target CPU",
        "driver CPU",
    ])];
    let mut missing = String::new();
    for (row, relative) in rows.iter().zip(mcs_ratios(rows)) {
        let (bytes, ios) = (spread(&row.bytes_per_second), spread(&row.iops));
        let cpu = |of: Option<f64>| of.map_or_else(|| "-".to_owned(), |s| format!("{s:.1} s"));
        let name = match &row.device {
            Some(name) => name.clone(),
            None => row.connections.to_string(),
        };
        for (turn, _) in (1..)
            .zip(&row.bytes_per_second)
            .filter(|(_, rate)| **rate <= 0.0)
        {
            missing.push_str(&format!(
                "no result (0 MB/s), left out of the ratios: {}, {name}, turn {turn}\n",
                row.case
            ));
        }
        cells.push(vec![
            row.case.clone(),
            name,
            format!(
                "{:.0} +-{:.0} %",
                bytes.median / 1e6,
                bytes.relative() * 100.0
            ),
            rate(ios.median),
            relative.map_or_else(String::new, |found| found.range_text()),
            cpu(row.target_cpu_seconds_per_million),
            cpu(row.driver_cpu_seconds_per_million),
        ]);
    }
    columns(&cells) + &missing
}

fn rows_of(lines: &[Line]) -> Vec<McsRow> {
    let row = |line: &Line, subject: &SubjectResult| {
        let middle = subject.median_repetition();
        let connections = subject.name.parse().ok();
        McsRow {
            case: line.case.to_owned(),
            connections: connections.unwrap_or(0),
            device: connections.is_none().then(|| subject.name.clone()),
            bytes_per_second: subject.each(Repetition::bandwidth),
            iops: subject.each(Repetition::iops),
            target_cpu_seconds_per_million: middle.and_then(|one| one.device_cpu_per_million),
            driver_cpu_seconds_per_million: middle.map(|one| one.driver_cpu_per_million),
        }
    };
    let rows = lines
        .iter()
        .flat_map(|line| measured(line).map(move |subject| row(line, subject)));
    rows.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_a_row_with_their_name() {
        let beside: Beside = "2 sessions of Linux=/dev/dm-0".parse().unwrap();
        assert_eq!(beside.device, "/dev/dm-0");
        for text in ["/dev/dm-0", "2=/dev/dm-0", "a=", "a,b=/dev/dm-0"] {
            assert!(text.parse::<Beside>().is_err(), "{text}");
        }
        let row = |connections, device: Option<&str>| McsRow {
            case: "read".to_owned(),
            connections,
            device: device.map(str::to_owned),
            bytes_per_second: vec![1e6; 4],
            iops: vec![4.0; 4],
            target_cpu_seconds_per_million: None,
            driver_cpu_seconds_per_million: None,
        };
        let text = mcs_rows(&[row(1, None), row(2, None), row(0, Some("Linux"))]);
        let lines: Vec<&str> = text.lines().collect();
        let equal = "1.00 (1.00 to 1.00, 4 turns)";
        assert!(!lines[1].contains(equal), "{text}");
        assert!(lines[2].contains(equal), "{text}");
        assert!(
            lines[3].contains("Linux") && lines[3].contains(equal),
            "{text}"
        );
    }

    /// Turns drift by a factor of ten, but two connections have twice the bandwidth in each of them.
    #[test]
    fn turns_are_compared_in_pairs_that_share_the_error() {
        let row = |connections, turns: &[f64]| McsRow {
            case: "read".to_owned(),
            connections,
            device: None,
            bytes_per_second: turns.to_vec(),
            iops: vec![1.0; turns.len()],
            target_cpu_seconds_per_million: None,
            driver_cpu_seconds_per_million: None,
        };
        let one = [1e6, 1e7, 3e6, 5e6];
        let two = one.map(|rate| rate * 2.0);
        let three = [2.9e6, 3.1e7, 9.2e6, 1.48e7];
        let ratios = mcs_ratios(&[row(1, &one), row(2, &two), row(3, &three)]);
        assert_eq!(ratios[0], None);
        let of_two = ratios[1].unwrap().ratio;
        assert!((of_two.low - 2.0).abs() < 1e-9 && (of_two.high - 2.0).abs() < 1e-9);
        let alone = mcs_ratios(&[row(1, &one), row(3, &three)])[1].unwrap();
        let beside = ratios[2].unwrap();
        assert_eq!(alone.ratio.value, beside.ratio.value);
        assert!(beside.ratio.low < alone.ratio.low && alone.ratio.high < beside.ratio.high);
        // A turn without bytes has no ratio, and is named.
        let empty = [row(1, &one), row(2, &[two[0], two[1], 0.0, two[3]])];
        let text = mcs_rows(&empty);
        assert!(
            text.contains("2.00 (2.00 to 2.00, 3 turns and 1 without a result)"),
            "{text}"
        );
        assert!(
            text.ends_with("left out of the ratios: read, 2, turn 3\n"),
            "{text}"
        );
        // An interrupted turn has no pair.
        let cut = mcs_ratios(&[row(1, &one), row(2, &two[..3])]);
        assert_eq!(cut[1].unwrap().turns, 3);
    }
}
