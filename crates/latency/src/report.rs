//! The latency table as data: one row per layer and operation, for JSON and for [`crate::table`].
//!
//! A layer is usually one of our spans. A report can also have other layers, so that a driver can add its own before and
//! after ours.

use crate::{Latencies, Operation, OperationLatencies, Share, Span, SparseHistogram};
use serde::{Deserialize, Serialize};

/// One step of the path with its measurements, the source of a row.
#[derive(Clone, Debug)]
pub struct Layer<'a> {
    /// Name of the row.
    pub name: &'a str,
    /// Kind of time spent in the layer.
    pub share: Share,
    /// Measurements of the layer.
    pub histogram: &'a SparseHistogram,
    /// Some requests skip the layer. Means and shares still refer to all requests, so that they add up; percentiles refer
    /// to the requests in the layer.
    pub optional: bool,
}

impl Layer<'_> {
    fn mean_ns(&self, requests: u64) -> f64 {
        match self.optional {
            true => self.histogram.sum_ns / requests.max(self.histogram.count).max(1) as f64,
            false => self.histogram.mean_ns(),
        }
    }
}

/// The row of one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Name of the layer. For a layer of the daemon, the stage at its end.
    pub name: String,
    /// Queueing or service; absent for the total.
    pub share: Option<Share>,
    /// Number of measured requests.
    pub count: u64,
    /// Mean time from the start of the first layer to the end of this one.
    pub elapsed_ns: f64,
    /// Mean time in this layer.
    pub mean_ns: f64,
    /// Only the mean is available.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mean_only: bool,
    /// Fraction of the total, from 0 to 1.
    pub fraction: f64,
    /// Median.
    pub p50_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// 99.9th percentile.
    pub p999_ns: u64,
    /// Maximum.
    pub max_ns: u64,
}

/// Table of one operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OperationReport {
    /// The operation.
    pub operation: Operation,
    /// Number of complete requests.
    pub requests: u64,
    /// Mean time outside the backend.
    pub queueing_ns: f64,
    /// Mean time in the backend.
    pub service_ns: f64,
    /// Rows in path order.
    pub rows: Vec<Row>,
    /// The total.
    pub total: Row,
}

/// All tables of a disk, an export, a queue or a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Title of the report.
    pub title: String,
    /// Reports of the operations in use, in the order of [`Operation::ALL`].
    pub operations: Vec<OperationReport>,
}

impl Report {
    /// Creates the tables of the measurements of one or more queues.
    pub fn new(title: impl Into<String>, latencies: &Latencies) -> Self {
        let operations = latencies.operations.iter();
        let operations =
            operations.map(|(operation, spans)| OperationReport::new(*operation, spans));
        Report {
            title: title.into(),
            operations: operations.filter(|table| table.total.count > 0).collect(),
        }
    }
}

/// Measurements of the same requests by a driver on the same clock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ends {
    /// Number of requests.
    pub count: u64,
    /// Mean time from published to noticed.
    pub noticed_ns: f64,
    /// Mean time from notified to seen. Negative if a driver reads the ring while the device still notifies.
    pub seen_ns: f64,
}

impl OperationReport {
    /// Creates the table of our stages.
    pub fn new(operation: Operation, latencies: &OperationLatencies) -> Self {
        Self::of_stages(operation, latencies, None)
    }

    /// Creates the end-to-end table, from publication by the driver to the driver's view of the response. The total is the
    /// driver's.
    pub fn between(
        operation: Operation,
        latencies: &OperationLatencies,
        ends: &Ends,
        total: &SparseHistogram,
    ) -> Self {
        Self::of_stages(operation, latencies, Some((ends, total)))
    }

    fn of_stages(
        operation: Operation,
        latencies: &OperationLatencies,
        driver: Option<(&Ends, &SparseHistogram)>,
    ) -> Self {
        let mean = |count: u64, mean_ns: f64| SparseHistogram {
            count,
            sum_ns: mean_ns * count as f64,
            ..SparseHistogram::default()
        };
        let (first, last) = match driver {
            Some((ends, _)) => (
                mean(ends.count, ends.noticed_ns),
                mean(ends.count, ends.seen_ns),
            ),
            None => Default::default(),
        };
        let end = |name, histogram| {
            driver.is_some().then_some(Layer {
                name,
                share: Share::Queueing,
                histogram,
                optional: false,
            })
        };
        let empty = SparseHistogram::default();
        let of = |span: Span| latencies.spans.get(&span).unwrap_or(&empty);
        let steps = Span::STEPS.into_iter();
        let steps = steps.filter(|span| !(span.is_optional() && of(*span).is_empty()));
        let steps = steps.map(|span| Layer {
            name: span.name(),
            share: span.share().unwrap_or(Share::Queueing),
            histogram: of(span),
            optional: span.is_optional(),
        });
        let layers: Vec<Layer<'_>> = end("noticed", &first)
            .into_iter()
            .chain(steps)
            .chain(end("seen", &last))
            .collect();
        let total = driver.map_or_else(|| of(Span::Total), |(_, total)| total);
        Self::from_layers(operation, &layers, total)
    }

    /// Creates the table of any layers, in path order, and the total.
    pub fn from_layers(
        operation: Operation,
        layers: &[Layer<'_>],
        total: &SparseHistogram,
    ) -> Self {
        let sum = |wanted: Share| {
            let layers = layers.iter().filter(|layer| layer.share == wanted);
            layers.map(|layer| layer.mean_ns(total.count)).sum::<f64>()
        };
        let (queueing_ns, service_ns) = (sum(Share::Queueing), sum(Share::Service));
        let whole_ns = queueing_ns + service_ns;
        let fraction = |part: f64| if whole_ns > 0.0 { part / whole_ns } else { 0.0 };
        let mut elapsed_ns = 0.0;
        let rows = layers.iter().map(|layer| {
            let mean_ns = layer.mean_ns(total.count);
            elapsed_ns += mean_ns;
            Row::new(
                layer.name,
                Some(layer.share),
                layer.histogram,
                elapsed_ns,
                mean_ns,
                fraction(mean_ns),
            )
        });
        let rows = rows.collect();
        let whole = if whole_ns > 0.0 { 1.0 } else { 0.0 };
        let mean_ns = total.mean_ns();
        let total = Row::new(Span::Total.name(), None, total, mean_ns, mean_ns, whole);
        OperationReport {
            operation,
            requests: total.count,
            queueing_ns,
            service_ns,
            rows,
            total,
        }
    }
}

impl Row {
    fn new(
        name: &str,
        share: Option<Share>,
        histogram: &SparseHistogram,
        elapsed_ns: f64,
        mean_ns: f64,
        fraction: f64,
    ) -> Self {
        Row {
            name: name.to_owned(),
            share,
            count: histogram.count,
            elapsed_ns,
            mean_ns,
            mean_only: histogram.count > 0 && histogram.buckets.is_empty(),
            fraction,
            p50_ns: histogram.quantile_ns(0.5),
            p99_ns: histogram.quantile_ns(0.99),
            p999_ns: histogram.quantile_ns(0.999),
            max_ns: histogram.max_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_are_of_the_whole_and_elapsed_adds_up() {
        let [wait, serve] = [
            SparseHistogram::from_nanos([100, 300]),
            SparseHistogram::from_nanos([700, 900]),
        ];
        let layers = [
            Layer {
                name: "wait",
                share: Share::Queueing,
                histogram: &wait,
                optional: false,
            },
            Layer {
                name: "serve",
                share: Share::Service,
                histogram: &serve,
                optional: false,
            },
        ];
        let whole = SparseHistogram::from_nanos([800, 1200]);
        let report = OperationReport::from_layers(Operation::Read, &layers, &whole);
        assert_eq!(
            (report.queueing_ns, report.service_ns, report.requests),
            (200.0, 800.0, 2)
        );
        assert_eq!(
            report
                .rows
                .iter()
                .map(|row| row.elapsed_ns)
                .collect::<Vec<_>>(),
            [200.0, 1000.0]
        );
        assert_eq!(
            report
                .rows
                .iter()
                .map(|row| row.fraction)
                .collect::<Vec<_>>(),
            [0.2, 0.8]
        );
        assert_eq!((report.total.mean_ns, report.total.max_ns), (1000.0, 1200));
    }

    #[test]
    fn a_step_of_few_requests_counts_as_much_as_it_takes_of_all() {
        let [asked, all] = [
            SparseHistogram::from_nanos([400]),
            SparseHistogram::from_nanos([100, 100, 100, 500]),
        ];
        let layers = [Layer {
            name: "awaited",
            share: Share::Queueing,
            histogram: &asked,
            optional: true,
        }];
        let row = &OperationReport::from_layers(Operation::Write, &layers, &all).rows[0];
        assert_eq!((row.mean_ns, row.p50_ns, row.count), (100.0, 400, 1));
    }

    #[test]
    fn a_driver_s_table_begins_and_ends_with_the_driver() {
        let mut latencies = OperationLatencies::default();
        let stage = SparseHistogram::from_nanos([50, 70]);
        latencies.spans.insert(Span::Reaped, stage);
        let ends = Ends {
            count: 2,
            noticed_ns: 30.0,
            seen_ns: 20.0,
        };
        let total = SparseHistogram::from_nanos([100, 120]);
        let report = OperationReport::between(Operation::Read, &latencies, &ends, &total);
        let names: Vec<&str> = report.rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!((names[0], names[7]), ("noticed", "seen"));
        assert!(report.rows[0].mean_only && !report.rows[4].mean_only);
        assert_eq!(report.rows[7].elapsed_ns, 110.0);
        assert_eq!((report.queueing_ns, report.service_ns), (50.0, 60.0));
        assert_eq!((report.total.mean_ns, report.requests), (110.0, 2));
    }

    #[test]
    fn an_operation_without_a_finished_request_has_no_table() {
        let mut latencies = Latencies::default();
        latencies
            .operations
            .insert(Operation::Read, OperationLatencies::default());
        assert_eq!(Report::new("d0", &latencies).operations, []);
    }
}
