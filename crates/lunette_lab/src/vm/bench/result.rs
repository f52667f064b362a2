//! Result of a job file in a guest: fio's JSON with CPU times, and a table of both.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use bench::run::{Disturbance, Environment};
use serde_json::{Value, json};
use vm::running::State;

use super::seconds;

/// Unit of /proc/stat, in nanoseconds.
const TICK_NS: u64 = 10_000_000;

/// CPU times of a guest in nanoseconds, summed over all CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTimes {
    /// Programs, including niced ones.
    user: u64,
    /// Kernel, for programs and itself.
    system: u64,
    irq: u64,
    /// Deferred work of interrupts.
    softirq: u64,
    /// Taken by the host.
    steal: u64,
}

impl CpuTimes {
    /// Parses the first line of /proc/stat.
    pub fn parse(text: &str) -> Option<CpuTimes> {
        let mut words = text.lines().next()?.split_whitespace();
        if words.next() != Some("cpu") {
            return None;
        }
        // user nice system idle iowait irq softirq steal
        let words: Vec<u64> = words
            .map(|word| word.parse::<u64>().ok()?.checked_mul(TICK_NS))
            .collect::<Option<_>>()?;
        Some(CpuTimes {
            user: words.first()?.checked_add(*words.get(1)?)?,
            system: *words.get(2)?,
            irq: *words.get(5)?,
            softirq: *words.get(6)?,
            steal: *words.get(7)?,
        })
    }

    /// Difference from an earlier sample.
    pub fn since(&self, earlier: &CpuTimes) -> CpuTimes {
        CpuTimes {
            user: self.user.saturating_sub(earlier.user),
            system: self.system.saturating_sub(earlier.system),
            irq: self.irq.saturating_sub(earlier.irq),
            softirq: self.softirq.saturating_sub(earlier.softirq),
            steal: self.steal.saturating_sub(earlier.steal),
        }
    }
}

pub struct Measured {
    document: Value,
}

impl Measured {
    /// Combines fio's JSON, which may follow lines of text, with the measurements of the host.
    pub fn new(
        result: &str,
        state: &State,
        elapsed: Duration,
        guest: CpuTimes,
        [qemu, daemon]: [Option<u64>; 2],
        logs: Vec<PathBuf>,
    ) -> Result<Measured> {
        let begin = result.find('{').unwrap_or(0);
        let mut document: Value = serde_json::from_str(&result[begin..])
            .context("the load generator's result is not JSON")?;
        let object = document.as_object_mut();
        let object = object.context("the load generator's result is not a JSON object")?;
        let around = json!({
            "guest": state.name,
            "topology": state.topology,
            "accelerator": state.accelerator,
            "cpus": state.cpus,
            "elapsed_ns": elapsed.as_nanos() as u64,
            "guest_cpu_ns": {
                "user": guest.user,
                "system": guest.system,
                "irq": guest.irq,
                "softirq": guest.softirq,
                "steal": guest.steal,
            },
            "host_cpu_ns": {"qemu": qemu, "daemon": daemon},
            "logs": logs,
        });
        object.insert("vm".to_owned(), around);
        Ok(Measured { document })
    }

    pub fn json(&self) -> &Value {
        &self.document
    }

    fn jobs(&self) -> &[Value] {
        let jobs = self.document["jobs"].as_array();
        jobs.map_or(&[], Vec::as_slice)
    }

    /// Marks the result as that of an interrupted run.
    pub fn set_interrupted(&mut self) {
        self.document["vm"]["interrupted"] = true.into();
    }

    /// Returns true for an interrupted run.
    pub fn is_interrupted(&self) -> bool {
        self.document["vm"]["interrupted"] == true
    }

    /// Adds the conditions: the guest, the host and its other load. `has_daemon`: the process of the daemon is known.
    pub fn set_origin(
        &mut self,
        guest: &str,
        host: &Environment,
        load: &Disturbance,
        has_daemon: bool,
    ) {
        let around = &mut self.document["vm"];
        around["conditions"] = json!([guest, format!("Host: {}.", host.provenance())]);
        around["environment"] = json!(host);
        around["load"] = json!(load);
        around["disturbed"] = load.is_disturbed().into();
        if load.is_disturbed() {
            let daemon = match has_daemon {
                true => "",
                false => " (including a daemon that ran before)",
            };
            around["caution"] = format!("{}{daemon}", load.describe()).into();
        }
    }

    /// Number of jobs with an error.
    pub fn errors(&self) -> usize {
        let jobs = self.jobs().iter();
        jobs.filter(|job| job["error"].as_u64() != Some(0)).count()
    }

    /// Returns a line for each direction with the total over jobs, if there are several jobs. Rates are relative to the time of all groups of
    /// concurrent jobs, one group after the other.
    fn totals(&self) -> Vec<Vec<String>> {
        if self.jobs().len() < 2 {
            return Vec::new();
        }
        let number = |value: &Value| value.as_f64().unwrap_or(0.0);
        let total = |direction: &'static str| {
            let mut times = BTreeMap::new();
            let (mut ios, mut bytes, mut latencies_ns) = (0.0, 0.0, 0.0);
            let mut bins = BTreeMap::new();
            for job in self.jobs() {
                let one = &job[direction];
                let count = number(&one["total_ios"]);
                let time = times.entry(job["groupid"].as_u64()).or_insert(0.0);
                if count > 0.0 {
                    *time = number(&one["runtime"]).max(*time);
                }
                ios += count;
                bytes += number(&one["io_bytes"]);
                latencies_ns += number(&one["lat_ns"]["mean"]) * count;
                add_bins(&mut bins, one);
            }
            let seconds = times.values().sum::<f64>().max(1.0) / 1e3;
            let quantile = |part| micros((!bins.is_empty()).then(|| quantile(&bins, part)));
            (ios > 0.0).then(|| {
                vec![
                    "total".to_owned(),
                    direction.to_owned(),
                    format!("{ios:.0}"),
                    format!("{:.0}", ios / seconds),
                    format!("{:.2}", bytes / seconds / 1e6),
                    micros(Some(latencies_ns / ios)),
                    quantile(0.50),
                    quantile(0.99),
                ]
            })
        };
        DIRECTIONS.into_iter().filter_map(total).collect()
    }

    pub fn table(&self) -> String {
        let mut lines = vec![
            [
                "job", "", "I/Os", "IOPS", "MB/s", "mean us", "p50 us", "p99 us",
            ]
            .map(str::to_owned)
            .to_vec(),
        ];
        for job in self.jobs() {
            for direction in DIRECTIONS {
                let one = &job[direction];
                if one["total_ios"].as_u64().unwrap_or(0) == 0 {
                    continue;
                }
                let percentiles = &one["clat_ns"]["percentile"];
                lines.push(vec![
                    job["jobname"].as_str().unwrap_or("-").to_owned(),
                    direction.to_owned(),
                    one["total_ios"].to_string(),
                    format!("{:.0}", one["iops"].as_f64().unwrap_or(0.0)),
                    format!("{:.2}", one["bw_bytes"].as_f64().unwrap_or(0.0) / 1e6),
                    micros(one["lat_ns"]["mean"].as_f64()),
                    micros(percentiles["50.000000"].as_f64()),
                    micros(percentiles["99.000000"].as_f64()),
                ]);
            }
        }
        lines.extend(self.totals());
        let mut text = columns(&lines);
        if self.is_interrupted() {
            text.push_str("interrupted: partial results\n");
        }
        self.add_around(&mut text);
        text
    }

    fn add_around(&self, text: &mut String) {
        let around = &self.document["vm"];
        let guest = |name: &str| seconds(around["guest_cpu_ns"][name].as_u64());
        let host = |name: &str| seconds(around["host_cpu_ns"][name].as_u64());
        let elapsed = seconds(around["elapsed_ns"].as_u64());
        let word = |name: &str| around[name].as_str().unwrap_or("-");
        let lines = [
            format!(
                "\nguest {} ({}, {} CPUs) for {elapsed}",
                word("guest"),
                word("accelerator"),
                around["cpus"]
            ),
            format!(
                "guest CPU: user {}, system {}, irq {}, softirq {}, steal {}",
                guest("user"),
                guest("system"),
                guest("irq"),
                guest("softirq"),
                guest("steal")
            ),
            format!("host CPU: QEMU {}, daemon {}", host("qemu"), host("daemon")),
        ];
        for line in lines {
            writeln!(text, "{line}").unwrap_or(());
        }
        let caution = around["caution"].as_str().into_iter();
        let conditions = around["conditions"].as_array().into_iter().flatten();
        for line in caution.chain(conditions.filter_map(Value::as_str)) {
            writeln!(text, "{line}").unwrap_or(());
        }
        for log in around["logs"].as_array().into_iter().flatten() {
            writeln!(text, "log: {}", log.as_str().unwrap_or("-")).unwrap_or(());
        }
    }
}

const DIRECTIONS: [&str; 3] = ["read", "write", "trim"];

/// Formats nanoseconds as microseconds.
fn micros(nanos: Option<f64>) -> String {
    nanos.map_or_else(|| "-".to_owned(), |nanos| format!("{:.1}", nanos / 1e3))
}

/// Adds the histogram of one direction of a job.
pub fn add_bins(bins: &mut BTreeMap<u64, u64>, side: &Value) {
    for (nanos, count) in side["clat_ns"]["bins"].as_object().into_iter().flatten() {
        let nanos: u64 = nanos.parse().unwrap_or(0);
        *bins.entry(nanos).or_insert(0) += count.as_u64().unwrap_or(0);
    }
}

/// Returns a quantile of a histogram; 0 if it is empty.
pub fn quantile(bins: &BTreeMap<u64, u64>, part: f64) -> f64 {
    let total: u64 = bins.values().sum();
    let wanted = (part * total as f64).ceil() as u64;
    let mut seen = 0;
    let found = bins.iter().find(|(_, count)| {
        seen += **count;
        seen >= wanted
    });
    found.map_or(0.0, |(nanos, _)| *nanos as f64)
}

/// Aligns cells in columns, the first two to the left.
fn columns(lines: &[Vec<String>]) -> String {
    let width = |at: usize| {
        let cells = lines.iter().filter_map(|line| line.get(at));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let mut text = String::new();
    for line in lines {
        let cells = line.iter().enumerate().map(|(at, cell)| match at {
            0 | 1 => format!("{cell:<0$}", width(at)),
            _ => format!("{cell:>0$}", width(at)),
        });
        let cells: Vec<String> = cells.collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_of_all_jobs_in_the_time_of_all_groups() {
        let job = |group: u64, ios: u64, runtime_ms: u64, mean_ns: u64| {
            json!({"jobname": "j", "groupid": group, "write": {"total_ios": 0},
                "read": {"total_ios": ios, "io_bytes": ios * 4096, "runtime": runtime_ms, "lat_ns": {"mean": mean_ns},
                    "clat_ns": {"bins": {mean_ns.to_string(): ios}}}})
        };
        let measured = |jobs: &[Value]| Measured {
            document: json!({ "jobs": jobs }),
        };
        let both = measured(&[job(0, 300, 1000, 1000), job(0, 100, 2000, 5000)]).totals();
        let wanted = ["total", "read", "400", "200", "0.82", "2.0", "1.0", "5.0"];
        assert_eq!(both, [wanted.map(str::to_owned)]);
        let one_by_one = measured(&[job(0, 300, 1000, 1000), job(1, 100, 1000, 5000)]).totals();
        assert_eq!(one_by_one, both);
        assert!(measured(&[job(0, 300, 1000, 1000)]).totals().is_empty());
    }

    #[test]
    fn the_table_has_guest_host_and_other_load() {
        let load = |foreign_cpus| Disturbance {
            foreign_cpus,
            stolen_cpus: 0.0,
        };
        let table = |foreign_cpus, has_daemon| {
            let mut measured = Measured {
                document: json!({"jobs": [], "vm": {}}),
            };
            let host = Environment::default();
            measured.set_origin(
                "TCG (emulated), QEMU 7.2",
                &host,
                &load(foreign_cpus),
                has_daemon,
            );
            assert_eq!(measured.json()["vm"]["disturbed"], foreign_cpus > 0.1);
            measured.table()
        };
        let quiet = table(0.0, true);
        assert!(
            quiet.contains("QEMU 7.2") && quiet.contains("mitigations"),
            "{quiet}"
        );
        assert!(!quiet.contains("disturbed"), "{quiet}");
        let disturbed = table(0.5, false);
        let wanted =
            "disturbed: others used 0.50 CPUs, the hypervisor took 0.00 (including a daemon";
        assert!(disturbed.contains(wanted), "{disturbed}");
    }

    #[test]
    fn times_are_those_between_two_moments() {
        let times = |text: &str| CpuTimes::parse(text).unwrap();
        let before = times("cpu  10 1 5 100 7 2 3 4 0 0\ncpu0 1\n");
        let after = times("cpu  20 2 9 900 9 5 4 4 0 0\n");
        let expected = CpuTimes {
            user: 110_000_000,
            system: 40_000_000,
            irq: 30_000_000,
            softirq: 10_000_000,
            steal: 0,
        };
        assert_eq!(after.since(&before), expected);
        for wrong in ["", "cpu 1 2", "intr 1 2 3 4 5 6 7 8", "cpu a b c d e f g h"] {
            assert_eq!(CpuTimes::parse(wrong), None, "{wrong}");
        }
    }
}
