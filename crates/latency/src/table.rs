//! The latency table as plain text in 80 columns, in the style of the classic virtio-blk latency study.
//!
//! One table per operation, one line per stage: mean time since noticed, mean time of the step (as queueing, or as service
//! for the backend), its share of the total, and percentiles of the step.

use crate::{OperationReport, Report, Row, Share};
use std::fmt;

/// A report, ready to print.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a>(pub &'a Report);

/// Returns the tables as text.
pub fn render(report: &Report) -> String {
    Table(report).to_string()
}

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.0.title)?;
        if self.0.operations.is_empty() {
            return writeln!(f, "\nno requests yet");
        }
        self.0
            .operations
            .iter()
            .try_for_each(|operation| write_operation(f, operation))
    }
}

fn write_operation(f: &mut fmt::Formatter<'_>, report: &OperationReport) -> fmt::Result {
    let plural = if report.requests == 1 { "" } else { "s" };
    writeln!(
        f,
        "\n{}: {} request{plural}",
        report.operation,
        grouped(report.requests)
    )?;
    writeln!(
        f,
        "{:10}{:>9}{:>19}{:>8}{:>32}",
        "", "since", "mean step", "", "the step's percentiles"
    )?;
    let head = ["queueing", "service", "share", "p50", "p99", "p99.9", "max"];
    write!(f, "{:10}{:>9}", "stage", "noticed")?;
    write_columns(f, head.map(str::to_owned))?;
    for row in &report.rows {
        let (queueing, service) = match row.share {
            Some(Share::Service) => (String::new(), time(row.mean_ns)),
            _ => (time(row.mean_ns), String::new()),
        };
        write_row(f, row, queueing, service)?;
    }
    write_row(
        f,
        &report.total,
        time(report.queueing_ns),
        time(report.service_ns),
    )?;
    let whole = report.queueing_ns + report.service_ns;
    let part = |ns: f64| percent(if whole > 0.0 { ns / whole } else { 0.0 });
    let (queueing, service) = (report.queueing_ns, report.service_ns);
    writeln!(
        f,
        "mean {}: {} queueing ({}) + {} service ({})",
        time(report.total.mean_ns),
        time(queueing),
        part(queueing),
        time(service),
        part(service)
    )?;
    if report.rows.iter().any(|row| row.mean_ns < 0.0) {
        writeln!(
            f,
            "below 0: the driver found responses in the ring before the worker sent the\ninterrupt or read the clock"
        )?;
    }
    Ok(())
}

fn write_row(
    f: &mut fmt::Formatter<'_>,
    row: &Row,
    queueing: String,
    service: String,
) -> fmt::Result {
    // Longer names of foreign layers are cut, so that the columns stay aligned.
    write!(f, "{:10.10}{:>9}", row.name, time(row.elapsed_ns))?;
    let [p50, p99, p999, max] =
        [row.p50_ns, row.p99_ns, row.p999_ns, row.max_ns].map(|ns| match row.mean_only {
            true => "-".to_owned(),
            false => time(ns as f64),
        });
    write_columns(
        f,
        [
            queueing,
            service,
            percent(row.fraction),
            p50,
            p99,
            p999,
            max,
        ],
    )
}

fn write_columns(f: &mut fmt::Formatter<'_>, columns: [String; 7]) -> fmt::Result {
    let widths = [10, 9, 8, 8, 8, 8, 8];
    for (text, width) in columns.iter().zip(widths) {
        write!(f, " {text:>width$}", width = width - 1)?;
    }
    writeln!(f)
}

/// Formats a time with three significant digits and a suitable unit: `7 ns`, `1.25 us`, `430 ms`, `75.0 s`.
pub fn time(ns: f64) -> String {
    const UNITS: [(f64, &str); 4] = [(1.0, "ns"), (1e3, "us"), (1e6, "ms"), (1e9, "s")];
    // 999.5 would be printed as 1000, which is 1.00 of the next unit.
    let fits = |(unit, _): &&(f64, &str)| ns.abs() / unit < 999.5;
    let (unit, name) = UNITS.iter().find(fits).unwrap_or(&UNITS[3]);
    let value = ns / unit;
    let digits = match value.abs() {
        _ if *unit == 1.0 => 0,
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {name}")
}

fn percent(fraction: f64) -> String {
    format!("{:.1} %", fraction * 100.0)
}

/// Formats a number with digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.char_indices() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Clock, Labels, Operation, QueueTimeline, Span, Stamp, Stamps};

    fn report() -> Report {
        let (clock, _) = Clock::simulated();
        let mut queue = QueueTimeline::new(Labels::default(), 8);
        let fast = [0, 60, 110, 110, 110, 500, 10_500, 10_650, 10_800].map(Stamp);
        let slow = [0, 60, 150, 150, 150, 900, 2_000_900, 2_001_000, 2_050_000].map(Stamp);
        queue.record_iteration(&[9_980, 0, 0, 0, 0], &Stamps::from_array(fast));
        queue.record_iteration(&[20, 0, 1, 0, 0], &Stamps::from_array(slow));
        Report::new("disk d0", &queue.snapshot(&clock).latencies)
    }

    #[test]
    fn table_looks_like_this() {
        let expected = "\
disk d0

read: 10,000 requests
              since          mean step                  the step's percentiles
stage       noticed  queueing  service   share     p50     p99   p99.9     max
popped        60 ns     60 ns            0.4 %   60 ns   60 ns   60 ns   60 ns
parsed       110 ns     50 ns            0.3 %   50 ns   50 ns   90 ns   90 ns
submitted    501 ns    391 ns            2.6 %  388 ns  388 ns  744 ns  750 ns
reaped      14.5 us            14.0 us  94.0 % 10.1 us 10.1 us 2.00 ms 2.00 ms
answered    14.6 us    150 ns            1.0 %  150 ns  150 ns  150 ns  150 ns
notified    14.9 us    248 ns            1.7 %  150 ns  150 ns 48.6 us 49.0 us
total       14.9 us    898 ns  14.0 us 100.0 % 10.9 us 10.9 us 2.05 ms 2.05 ms
mean 14.9 us: 898 ns queueing (6.0 %) + 14.0 us service (94.0 %)

flush: 1 request
";
        let text = render(&report());
        assert!(text.starts_with(expected), "{text}");
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
    }

    #[test]
    fn the_widest_values_still_fit_80_columns() {
        let (clock, _) = Clock::simulated();
        let mut queue = QueueTimeline::new(Labels::default(), 8);
        for span in Span::ALL {
            queue.record_batch(Operation::Discard, span, 999_000_000_000, 1);
        }
        let text = render(&Report::new("t", &queue.snapshot(&clock).latencies));
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
    }

    #[test]
    fn times_have_three_digits_and_the_unit_that_suits() {
        let texts = [
            0.0, 7.4, 999.4, 999.6, 9994.0, 9996.0, 99_960.0, 1e6, 4.3e8, 7.5e10, 1e13, -1250.0,
        ]
        .map(time);
        let expected = [
            "0 ns", "7 ns", "999 ns", "1.00 us", "9.99 us", "10.0 us", "100 us", "1.00 ms",
            "430 ms", "75.0 s", "10000 s", "-1.25 us",
        ];
        assert_eq!(texts, expected);
        assert_eq!(
            [0, 999, 1000, 1234567].map(grouped),
            ["0", "999", "1,000", "1,234,567"]
        );
    }

    #[test]
    fn early_driver_stage_has_no_rank_and_an_explanation() {
        let mut latencies = crate::OperationLatencies::default();
        let stage = crate::SparseHistogram::from_nanos([500]);
        latencies.spans.insert(Span::Reaped, stage);
        let ends = crate::Ends {
            count: 1,
            noticed_ns: 100.0,
            seen_ns: -150.0,
        };
        let total = crate::SparseHistogram::from_nanos([450]);
        let report = Report {
            title: "d0".to_owned(),
            operations: vec![crate::OperationReport::between(
                Operation::Read,
                &latencies,
                &ends,
                &total,
            )],
        };
        let text = render(&report);
        let seen = text.lines().find(|line| line.starts_with("seen ")).unwrap();
        assert!(seen.starts_with("seen         450 ns   -150 ns"), "{text}");
        assert!(
            text.contains("\nbelow 0: the driver found responses"),
            "{text}"
        );
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
    }

    #[test]
    fn report_without_requests_is_marked_empty() {
        let report = Report {
            title: "disk d1".into(),
            operations: Vec::new(),
        };
        assert_eq!(render(&report), "disk d1\n\nno requests yet\n");
    }

    #[test]
    fn json_round_trip_gives_the_same_report() {
        let report = report();
        let json = serde_json::to_string(&report).unwrap();
        // JSON may change the last bit of a float.
        let back: Report = serde_json::from_str(&json).unwrap();
        assert_eq!(render(&back), render(&report));
        assert_eq!(back.operations[1], report.operations[1]);
    }
}
