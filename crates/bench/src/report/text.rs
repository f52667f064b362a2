//! Text table.

use latency::{Latencies, OperationReport, Report, table};

use crate::run::{Interval, JobResult, Outcome, Repetition, bootstrap_ratio, spread};

/// Formats a rate with three digits: `1.23 M`, `456 k`, `78.9`.
pub fn rate(value: f64) -> String {
    let (value, unit) = match value {
        v if v >= 999_500.0 => (v / 1e6, " M"),
        v if v >= 999.5 => (v / 1e3, " k"),
        v => (v, ""),
    };
    let digits = match value {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.digits$}{unit}")
}

/// Formats a bandwidth.
pub fn per_second(bytes: f64) -> String {
    match bytes {
        b if b >= 1e9 => format!("{:.2} GB/s", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB/s", b / 1e6),
        b => format!("{:.1} kB/s", b / 1e3),
    }
}

/// Formats a ratio: `x1.23 (1.20 to 1.26)`.
pub fn ratio(interval: Option<Interval>) -> String {
    interval.map_or_else(String::new, |i| {
        format!("x{:.2} ({:.2} to {:.2})", i.value, i.low, i.high)
    })
}

/// Aligns cells to the right, except the first column.
pub fn columns(lines: &[Vec<String>]) -> String {
    let count = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..count).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let mut whole = String::new();
        for ((cell, width), column) in line.iter().zip(&widths).zip(0..) {
            let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
            if column == 0 {
                whole.push_str(cell);
                whole.push_str(&pad);
            } else {
                whole.push_str("  ");
                whole.push_str(&pad);
                whole.push_str(cell);
            }
        }
        text.push_str(whole.trim_end());
        text.push('\n');
    }
    text
}

fn time(nanos: u64) -> String {
    table::time(nanos as f64)
}

/// Formats the complete outcome.
pub fn to_text(outcome: &Outcome) -> String {
    let mut text = String::new();
    let environment = &outcome.environment;
    text.push_str(&format!(
        "{}, {} CPUs {}, lunette {}\n",
        environment.kernel,
        environment.cpus,
        environment.cpu,
        environment.build(),
    ));
    if outcome.interrupted {
        text.push_str("interrupted: partial results\n");
    }
    text.push('\n');
    text.push_str(&overview(outcome));
    for subject in &outcome.subjects {
        let Some(one) = subject.median_repetition() else {
            continue;
        };
        text.push_str(&format!("\n{} (median repetition)\n", subject.name));
        text.push_str(&jobs(&one.jobs));
        for complaint in one.jobs.iter().flat_map(|job| &job.complaints) {
            text.push_str(&format!("  {complaint}\n"));
        }
        if let Some(stages) = &one.stages {
            let report = stage_report(&subject.name, one, stages);
            text.push_str(&format!("\n{}", table::render(&report)));
            if one.ends.iter().all(Option::is_none) {
                text.push_str(&around(&one.latency(), stages));
            }
        }
    }
    let disturbed: usize = outcome
        .subjects
        .iter()
        .map(|subject| {
            subject
                .repetitions
                .iter()
                .filter(|one| one.disturbed)
                .count()
        })
        .sum();
    let again: u32 = outcome
        .subjects
        .iter()
        .flat_map(|subject| &subject.repetitions)
        .map(|one| one.attempts.saturating_sub(1))
        .sum();
    if again > 0 {
        text.push_str(&format!("\n{again} disturbed repetitions were run again\n"));
    }
    if disturbed > 0 {
        text.push_str(&format!(
            "\nwarning: {disturbed} repetitions were disturbed by other work on this machine, even when run again\n"
        ));
    }
    text
}

/// Creates the report of the device's stages, plus the time before and after them where known.
fn stage_report(name: &str, one: &Repetition, stages: &Latencies) -> Report {
    let mut report = Report::new(format!("stages of {name}"), stages);
    for table in &mut report.operations {
        let direction = table.operation as usize;
        let ends = one.ends.get(direction).and_then(Option::as_ref);
        let latencies = stages.operations.get(&table.operation);
        if let (Some(ends), Some(latencies)) = (ends, latencies) {
            let mut total = latency::SparseHistogram::default();
            for job in &one.jobs {
                total.merge(&job.tallies[direction].latency);
            }
            *table = OperationReport::between(table.operation, latencies, ends, &total);
        }
    }
    report
}

/// Formats the latency that the driver measured in addition to the device's.
fn around(seen: &latency::SparseHistogram, stages: &latency::Latencies) -> String {
    let totals = stages
        .operations
        .values()
        .filter_map(|spans| spans.spans.get(&latency::Span::Total));
    let (count, sum) = totals.fold((0u64, 0.0), |(count, sum), total| {
        (count + total.count, sum + total.sum_ns)
    });
    if count == 0 || seen.count == 0 {
        return String::new();
    }
    let inside = sum / count as f64;
    let outside = seen.mean_ns() - inside;
    format!(
        "driver: published -> seen {} on average; of it {} outside of the device (published -> noticed, notified -> seen)\n",
        table::time(seen.mean_ns()),
        table::time(outside.max(0.0)),
    )
}

fn overview(outcome: &Outcome) -> String {
    let mut lines = vec![
        [
            "subject",
            "IOPS",
            "+-",
            "bandwidth",
            "mean",
            "p50",
            "p99",
            "p99.9",
            "max",
            "kicks/IO",
            "irqs/IO",
            "device CPU",
            "driver CPU",
            "relative to the first",
        ]
        .map(String::from)
        .to_vec(),
    ];
    let first = outcome.subjects.first();
    for subject in &outcome.subjects {
        let iops = subject.each(|one| one.iops());
        let Some(middle) = subject.median_repetition() else {
            continue;
        };
        let latency = middle.latency();
        let against = match first {
            Some(first) if !std::ptr::eq(first, subject) => {
                ratio(bootstrap_ratio(&iops, &first.each(|one| one.iops())))
            }
            _ => String::new(),
        };
        let device = middle.device_cpu_per_million;
        let duration = |nanos: f64| match latency.count {
            0 => "-".to_owned(),
            _ => table::time(nanos),
        };
        let quantile = |q: f64| duration(latency.quantile_ns(q) as f64);
        let per_million = |cpu: f64| match middle.requests() {
            0 => "-".to_owned(),
            _ => format!("{cpu:.2} s/M"),
        };
        lines.push(vec![
            subject.name.clone(),
            rate(spread(&iops).median),
            match iops.len() {
                1 => "-".to_owned(),
                _ => format!("{:.1} %", spread(&iops).relative() * 100.0),
            },
            per_second(spread(&subject.each(|one| one.bandwidth())).median),
            duration(latency.mean_ns()),
            quantile(0.5),
            quantile(0.99),
            quantile(0.999),
            duration(latency.max_ns as f64),
            format!("{:.3}", middle.kicks_per_io),
            format!("{:.3}", middle.interrupts_per_io),
            device.map_or("-".to_owned(), per_million),
            per_million(middle.driver_cpu_per_million),
            against,
        ]);
    }
    columns(&lines)
}

fn jobs(jobs: &[JobResult]) -> String {
    let mut lines = Vec::new();
    for job in jobs {
        for (direction, tally) in ["read", "write", "flush", "trim"].iter().zip(&job.tallies) {
            if tally.ios == 0 {
                continue;
            }
            let seconds = job.elapsed_ns as f64 / 1e9;
            let latency = &tally.latency;
            let mut line = vec![
                format!("  {} {direction}", job.name),
                format!("{} IOPS", rate(tally.ios as f64 / seconds)),
                per_second(tally.bytes as f64 / seconds),
                format!("{} I/Os in {seconds:.2} s", tally.ios),
            ];
            for (name, q) in [
                ("p50", 0.5),
                ("p90", 0.9),
                ("p99", 0.99),
                ("p99.9", 0.999),
                ("p99.99", 0.9999),
            ] {
                line.push(format!("{name} {}", time(latency.quantile_ns(q))));
            }
            lines.push(line);
        }
        if job.verified_bytes > 0 || job.differences > 0 || job.errors > 0 {
            lines.push(vec![
                format!("  {}", job.name),
                format!("{} bytes verified", job.verified_bytes),
                format!("{} differences", job.differences),
                format!("{} errors", job.errors),
            ]);
        }
    }
    columns(&lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_three_digits() {
        for (value, text) in [
            (7_123_456.0, "7.12 M"),
            (456_789.0, "457 k"),
            (99_999.0, "100 k"),
            (12_345.0, "12.3 k"),
            (999.6, "1.00 k"),
            (42.0, "42.0"),
            (0.0, "0.00"),
        ] {
            assert_eq!(rate(value), text);
        }
        assert_eq!(per_second(3.2e9), "3.20 GB/s");
    }
}
