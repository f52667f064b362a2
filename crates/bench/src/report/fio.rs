//! fio's JSON output, for existing tools. Values without a field in fio are below `lunette`.

use anyhow::{Context, Result};
use latency::SparseHistogram;
use serde_json::{Map, Value, json};

use crate::drive::Tally;
use crate::job::Job;
use crate::run::{JobResult, Outcome, bootstrap_ratio, spread};

/// Returns the whole document; with `bins` (fio's `json+`) it contains the histograms.
pub fn to_json(outcome: &Outcome, jobs: &[Job], bins: bool) -> Value {
    let mut entries = Vec::new();
    let mut group = 0u64;
    for subject in &outcome.subjects {
        let Some(one) = subject.median_repetition() else {
            continue;
        };
        // As with fio, a group ends where a job waits for the previous ones.
        let first = group;
        for (index, result) in one.jobs.iter().enumerate() {
            let job = jobs.get(index);
            group = first + result.phase as u64;
            let mut entry = entry(result, job, group, bins);
            entry.insert("subject".into(), json!(subject.name));
            entries.push(Value::Object(entry));
        }
        group += 1;
    }
    let first = outcome.subjects.first();
    let comparisons: Vec<Value> = outcome
        .subjects
        .iter()
        .skip(1)
        .filter_map(|subject| {
            let first = first?;
            let iops = |one: &crate::run::Repetition| one.iops();
            let ratio = bootstrap_ratio(&subject.each(iops), &first.each(iops))?;
            Some(json!({"subject": subject.name, "against": first.name, "iops_ratio": ratio}))
        })
        .collect();
    let summaries: Vec<Value> = outcome
        .subjects
        .iter()
        .map(|subject| {
            json!({
                "subject": subject.name,
                "iops": spread(&subject.each(|one| one.iops())),
                "bandwidth": spread(&subject.each(|one| one.bandwidth())),
            })
        })
        .collect();
    json!({
        "fio version": format!("fio-3 (lunette {})", outcome.environment.version),
        "timestamp": outcome.environment.time,
        "timestamp_ms": outcome.environment.time * 1000,
        "time": super::date::clock(outcome.environment.time),
        "jobs": entries,
        "disk_util": [],
        "lunette": {
            "summaries": summaries,
            "comparisons": comparisons,
            "outcome": outcome,
        },
    })
}

/// Parses a document written by [`to_json`].
pub fn read(text: &str) -> Result<Outcome> {
    let document: Value = serde_json::from_str(text).context("the file is not JSON")?;
    let outcome = document
        .get("lunette")
        .and_then(|ours| ours.get("outcome"))
        .context("not a result of lunette bench: the field `lunette` is missing")?;
    serde_json::from_value(outcome.clone()).context("its field `lunette` is malformed")
}

fn entry(result: &JobResult, job: Option<&Job>, group: u64, bins_too: bool) -> Map<String, Value> {
    let usual = Job::default();
    let fields = LatencyFields {
        percentiles: &job.unwrap_or(&usual).percentiles,
        clat: job.is_none_or(|job| job.clat_percentiles),
        lat: job.is_some_and(|job| job.lat_percentiles),
        bins: bins_too,
    };
    let depth = job.map_or(1, |job| job.iodepth);
    let seconds = result.elapsed_ns / 1_000_000_000;
    let mut all = SparseHistogram::default();
    result
        .tallies
        .iter()
        .for_each(|tally| all.merge(&tally.latency));
    let mut entry = Map::new();
    entry.insert("jobname".into(), json!(result.name));
    entry.insert("groupid".into(), json!(group));
    entry.insert(
        "error".into(),
        json!(if result.errors + result.differences > 0 {
            5
        } else {
            0
        }),
    );
    entry.insert("eta".into(), json!(0));
    entry.insert("elapsed".into(), json!(seconds));
    if let Some(job) = job {
        entry.insert("job options".into(), options(job));
    }
    for (name, tally) in ["read", "write"].iter().zip(&result.tallies) {
        entry.insert((*name).into(), direction(tally, result.elapsed_ns, &fields));
    }
    let trims = &result.tallies[3];
    entry.insert("trim".into(), direction(trims, result.elapsed_ns, &fields));
    let flushes = &result.tallies[2];
    entry.insert(
        "sync".into(),
        json!({"total_ios": flushes.ios, "lat_ns": latency(&flushes.latency, &fields, fields.clat)}),
    );
    entry.insert("job_runtime".into(), json!(result.elapsed_ns / 1_000_000));
    entry.insert("latency_depth".into(), json!(depth));
    // Fields that are not measured are 0, for readers that require them.
    for name in ["usr_cpu", "sys_cpu", "latency_percentile"] {
        entry.insert(name.into(), json!(0.0));
    }
    for name in ["ctx", "majf", "minf", "latency_target", "latency_window"] {
        entry.insert(name.into(), json!(0));
    }
    add_depths(&mut entry, depth);
    add_bins(&mut entry, &all);
    entry
}

/// Adds the distribution of the time over queue depths.
fn add_depths(entry: &mut Map<String, Value>, depth: u16) {
    let levels = ["1", "2", "4", "8", "16", "32", ">=64"];
    // The driver has a constant depth, so all time belongs to one level.
    let level = usize::from(depth.max(1)).ilog2().min(6) as usize;
    let shares = levels.iter().zip(0..).map(|(name, index)| {
        (
            (*name).to_owned(),
            json!(if index == level { 100.0 } else { 0.0 }),
        )
    });
    entry.insert("iodepth_level".into(), Value::Object(shares.collect()));
    for name in ["iodepth_submit", "iodepth_complete"] {
        entry.insert(
            name.into(),
            json!({"0": 0.0, "4": 0.0, "8": 0.0, "16": 0.0, "32": 0.0, "64": 0.0, ">=64": 0.0}),
        );
    }
}

/// Adds the distribution of latencies over fio's bounds.
fn add_bins(entry: &mut Map<String, Value>, all: &SparseHistogram) {
    entry.insert(
        "latency_ns".into(),
        bins(all, 1, &[2, 4, 10, 20, 50, 100, 250, 500, 750, 1000]),
    );
    entry.insert(
        "latency_us".into(),
        bins(all, 1000, &[2, 4, 10, 20, 50, 100, 250, 500, 750, 1000]),
    );
    entry.insert(
        "latency_ms".into(),
        bins(
            all,
            1_000_000,
            &[2, 4, 10, 20, 50, 100, 250, 500, 750, 1000, 2000],
        ),
    );
}

/// Returns the options as given, plus those that distinguish jobs where they were not given.
fn options(job: &Job) -> Value {
    let sizes = |at: usize| match &job.sizes[at] {
        crate::job::Sizes::Fixed(size) => size.to_string(),
        other => format!("{}-{}", other.min(), other.max()),
    };
    let bs = if job.sizes[0] == job.sizes[1] {
        sizes(0)
    } else {
        format!("{},{}", sizes(0), sizes(1))
    };
    let mut options = Map::new();
    for (option, value) in [
        ("name", job.name.clone()),
        ("rw", job.pattern.word().to_owned()),
        ("bs", bs),
        ("iodepth", job.iodepth.to_string()),
        ("numjobs", job.numjobs.to_string()),
        ("rwmixread", job.pattern.read_percent.to_string()),
    ] {
        options.insert(option.to_owned(), json!(value));
    }
    for (option, value) in &job.given {
        options.insert(option.clone(), json!(value));
    }
    Value::Object(options)
}

/// Latency values to report.
struct LatencyFields<'a> {
    percentiles: &'a [f64],
    clat: bool,
    lat: bool,
    bins: bool,
}

fn direction(tally: &Tally, elapsed_ns: u64, fields: &LatencyFields<'_>) -> Value {
    let per_second = |value: u64| value as f64 * 1e9 / elapsed_ns.max(1) as f64;
    let bandwidth = per_second(tally.bytes);
    let iops = per_second(tally.ios);
    json!({
        "io_bytes": tally.bytes,
        "io_kbytes": tally.bytes / 1024,
        "bw_bytes": bandwidth as u64,
        "bw": bandwidth as u64 / 1024,
        "iops": iops,
        "runtime": elapsed_ns / 1_000_000,
        "total_ios": tally.ios,
        "short_ios": 0,
        "drop_ios": 0,
        "slat_ns": latency(&SparseHistogram::default(), fields, false),
        "clat_ns": latency(&tally.latency, fields, fields.clat),
        "lat_ns": latency(&tally.latency, fields, fields.lat),
        "bw_min": bandwidth as u64 / 1024,
        "bw_max": bandwidth as u64 / 1024,
        "bw_agg": 100.0,
        "bw_mean": bandwidth / 1024.0,
        "bw_dev": 0.0,
        "bw_samples": 1,
        "iops_min": iops as u64,
        "iops_max": iops as u64,
        "iops_mean": iops,
        "iops_stddev": 0.0,
        "iops_samples": 1,
    })
}

fn latency(histogram: &SparseHistogram, fields: &LatencyFields<'_>, percentiles: bool) -> Value {
    let mean = histogram.mean_ns();
    let count = histogram.count.max(1) as f64;
    let squares: f64 = histogram
        .buckets
        .iter()
        .map(|(value, count)| (*value as f64 - mean).powi(2) * *count as f64)
        .sum();
    let mut object = json!({
        "min": histogram.buckets.first().map_or(0, |(value, _)| *value),
        "max": histogram.max_ns,
        "mean": mean,
        "stddev": (squares / count).sqrt(),
        "N": histogram.count,
    });
    if !percentiles || histogram.count == 0 {
        return object;
    }
    if !fields.percentiles.is_empty() {
        let list: Map<String, Value> = fields
            .percentiles
            .iter()
            .map(|p| (format!("{p:.6}"), json!(histogram.quantile_ns(p / 100.0))))
            .collect();
        object["percentile"] = Value::Object(list);
    }
    if fields.bins {
        let bins = histogram.buckets.iter();
        let bins: Map<String, Value> = bins
            .map(|(nanos, count)| (nanos.to_string(), json!(count)))
            .collect();
        object["bins"] = Value::Object(bins);
    }
    object
}

/// Returns fio's distribution: percentage of values in each bin above the previous bound.
fn bins(histogram: &SparseHistogram, unit: u64, edges: &[u64]) -> Value {
    let total = histogram.count.max(1) as f64;
    let mut before = if unit == 1 {
        0
    } else {
        histogram.count_at_most(unit.saturating_sub(1))
    };
    let mut object = Map::new();
    for edge in edges {
        let now = histogram
            .count_at_most((edge * unit).saturating_sub(1))
            .max(before);
        object.insert(
            edge.to_string(),
            json!((now - before) as f64 * 100.0 / total),
        );
        before = now;
    }
    if unit == 1_000_000 {
        let rest = histogram.count - before;
        object.insert(">=2000".into(), json!(rest as f64 * 100.0 / total));
    }
    Value::Object(object)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::{Repetition, SubjectResult};

    fn outcome() -> Outcome {
        let tally = Tally {
            ios: 3,
            bytes: 3 << 12,
            latency: SparseHistogram::from_nanos([1_000, 3_000, 5_000_000_000]),
        };
        let job = JobResult {
            name: "j".to_owned(),
            tallies: [tally, Tally::default(), Tally::default(), Tally::default()],
            elapsed_ns: 2_000_000_000,
            ..JobResult::default()
        };
        let repetition = Repetition {
            jobs: vec![job],
            ..Repetition::default()
        };
        Outcome {
            subjects: vec![SubjectResult {
                name: "s".to_owned(),
                repetitions: vec![repetition],
            }],
            ..Outcome::default()
        }
    }

    #[test]
    fn numbers_stand_where_fio_s_readers_look_for_them() {
        let document = to_json(&outcome(), &[], false);
        let job = &document["jobs"][0];
        assert_eq!(job["jobname"], "j");
        assert_eq!(job["read"]["total_ios"], 3);
        assert_eq!(job["read"]["iops"], 1.5);
        assert_eq!(job["read"]["bw_bytes"], 6144);
        assert_eq!(job["read"]["runtime"], 2000);
        assert_eq!(job["read"]["clat_ns"]["percentile"]["50.000000"], 3000);
        assert_eq!(job["read"]["clat_ns"]["max"], 5_000_000_000u64);
        assert_eq!(job["write"]["total_ios"], 0);
        let share = |table: &str, bin: &str| job[table][bin].as_f64().unwrap().round();
        assert_eq!(
            (share("latency_us", "2"), share("latency_us", "4")),
            (33.0, 33.0)
        );
        assert_eq!(share("latency_ms", ">=2000"), 33.0);
    }

    #[test]
    fn histograms_are_in_json_plus() {
        let of = |bins| to_json(&outcome(), &[], bins)["jobs"][0]["read"]["clat_ns"].clone();
        assert_eq!(of(false).get("bins"), None);
        let bins = of(true)["bins"].clone();
        assert_eq!((&bins["1000"], &bins["3000"]), (&json!(1), &json!(1)));
    }

    #[test]
    fn what_is_written_can_be_read_again() {
        let text = to_json(&outcome(), &[], false).to_string();
        let again = read(&text).unwrap();
        assert_eq!(again.subjects[0].repetitions[0].jobs[0].ios(), 3);
        assert!(read("{}").unwrap_err().to_string().contains("lunette"));
    }
}
