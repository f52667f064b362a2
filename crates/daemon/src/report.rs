//! Latency tables per export, for `lunette latency` and SIGUSR1.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use timeline::{Counters, Labels, Latencies, Report, Snapshot, table::Table};

/// The stages in their order, for the head of a print-out.
pub const RULE: &str =
    "stages: noticed > popped > parsed > submitted > reaped > answered > notified";

/// What some queues measured together: tables and counters.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QueueReport {
    /// The tables.
    #[serde(flatten)]
    pub report: Report,
    /// What was counted beside them.
    pub counters: Counters,
}

impl QueueReport {
    fn new(title: String, latencies: &Latencies) -> QueueReport {
        QueueReport {
            report: Report::new(title, latencies),
            counters: latencies.counters,
        }
    }
}

impl fmt::Display for QueueReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counters = &self.counters;
        write!(f, "{}", Table(&self.report))?;
        writeln!(
            f,
            "\nkicks {}  interrupts {}  polls {}  sleeps {}  errors {}  malformed {}",
            counters.kicks,
            counters.notifications,
            counters.polls,
            counters.sleeps,
            counters.errors(),
            counters.malformed,
        )
    }
}

/// One report for what `selector` means (an export, a disk or a queue), or one for each export.
pub fn reports(snapshot: &Snapshot, selector: Option<&str>) -> Vec<QueueReport> {
    if let Some(selector) = selector {
        let latencies = snapshot.selected(selector).unwrap_or_default();
        return vec![QueueReport::new(selector.to_owned(), &latencies)];
    }
    let mut exports: BTreeMap<&str, Vec<&Labels>> = BTreeMap::new();
    for queue in &snapshot.queues {
        let labels = exports.entry(&queue.labels.export).or_default();
        labels.push(&queue.labels);
    }
    exports
        .into_iter()
        .map(|(export, labels)| {
            let latencies = snapshot.merged_by(|labels| labels.export == export);
            QueueReport::new(title(export, &labels), &latencies)
        })
        .collect()
}

fn title(export: &str, labels: &[&Labels]) -> String {
    let queues = match labels.len() {
        1 => "1 queue".to_owned(),
        count => format!("{count} queues"),
    };
    match labels.first().map(|labels| labels.disk.as_str()) {
        Some(disk) if !disk.is_empty() => format!("{export} (disk {disk}, {queues})"),
        _ => format!("{export} ({queues})"),
    }
}

#[cfg(test)]
mod tests {
    use timeline::QueueSnapshot;

    use super::*;

    fn snapshot() -> Snapshot {
        let queue = |export: &str, disk: &str, queue| QueueSnapshot {
            labels: Labels {
                export: export.to_owned(),
                disk: disk.to_owned(),
                queue,
                worker: 0,
            },
            latencies: Latencies {
                counters: Counters {
                    kicks: 1,
                    ..Counters::default()
                },
                ..Latencies::default()
            },
            ..QueueSnapshot::default()
        };
        Snapshot {
            queues: vec![
                queue("d0", "d0", 0),
                queue("c0", "", 1),
                queue("d0", "d0", 1),
            ],
        }
    }

    #[test]
    fn without_a_selector_each_export_has_a_report_of_all_its_queues() {
        let reports = reports(&snapshot(), None);
        let titles: Vec<&str> = reports.iter().map(|r| r.report.title.as_str()).collect();
        assert_eq!(titles, ["c0 (1 queue)", "d0 (disk d0, 2 queues)"]);
        assert_eq!(reports[1].counters.kicks, 2);
    }

    #[test]
    fn a_selector_makes_one_report() {
        for (selector, kicks) in [("d0", 2), ("d0/1", 1), ("nothing", 0)] {
            let reports = reports(&snapshot(), Some(selector));
            assert_eq!(reports.len(), 1);
            assert_eq!(reports[0].counters.kicks, kicks, "{selector}");
        }
    }

    #[test]
    fn the_rule_names_every_stage() {
        for stage in timeline::Stage::ALL {
            assert!(RULE.contains(stage.name()));
        }
    }
}
