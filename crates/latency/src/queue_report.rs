//! Latency tables per export, for `lunette latency` and SIGUSR1.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::table::{Table, time};
use crate::{
    Counters, Labels, Latencies, Operation, QueueSnapshot, Report, SlowRequestSnapshot, Snapshot,
    Span, Stage, UnitAddress,
};

/// Stages in order, for the head of a report.
pub const RULE: &str = "stages: noticed > popped > parsed > (awaited > received >) submitted > reaped > answered > notified";

/// Combined measurements of some queues: tables and counters.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QueueReport {
    /// Latency tables.
    #[serde(flatten)]
    pub report: Report,
    /// Counters.
    pub counters: Counters,
    /// Measured interval in seconds, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Exports with shared queues. Counters of whole queues are missing here.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub shares_queues_of: BTreeSet<String>,
    /// Queues with too many disks: requests for this one are missing here.
    #[serde(rename = "untold_by", skip_serializing_if = "BTreeSet::is_empty")]
    pub unattributed_in: BTreeSet<String>,
}

impl QueueReport {
    fn new(title: String, latencies: &Latencies) -> QueueReport {
        QueueReport {
            report: Report::new(title, latencies),
            counters: latencies.counters,
            seconds: None,
            shares_queues_of: BTreeSet::new(),
            unattributed_in: BTreeSet::new(),
        }
    }

    /// Records measurements missing because queues serve other disks, too.
    fn of_some(mut self, queues: &[QueueSnapshot]) -> QueueReport {
        for queue in queues.iter().filter(|queue| queue.shared) {
            let export = queue.labels.export.clone();
            if queue.unmeasured.is_empty() {
                self.shares_queues_of.insert(export);
            } else {
                self.unattributed_in
                    .insert(format!("{export}/{}", queue.labels.queue));
            }
        }
        self
    }

    /// Marks the report as that of an interval, which is printed with rates.
    #[must_use]
    pub fn over(mut self, interval: Duration) -> QueueReport {
        self.seconds = Some(interval.as_secs_f64());
        self
    }
}

impl fmt::Display for QueueReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counters = &self.counters;
        write!(f, "{}", Table(&self.report))?;
        if let Some(seconds) = self.seconds.filter(|seconds| *seconds > 0.0) {
            write!(f, "\nper second:")?;
            if counters.requests() == 0 {
                write!(f, "  nothing")?;
            }
            for operation in Operation::ALL {
                let counted = counters.of(operation);
                if counted.requests > 0 {
                    write!(
                        f,
                        "  {operation} {:.0} ({:.1} MB/s)",
                        counted.requests as f64 / seconds,
                        counted.bytes as f64 / seconds / 1e6
                    )?;
                }
            }
        }
        let joined = |names: &BTreeSet<String>| {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            names.join(", ")
        };
        if !self.unattributed_in.is_empty() {
            write!(
                f,
                "\nnot included: requests through {}, which serve too many disks for separate figures",
                joined(&self.unattributed_in)
            )?;
        }
        if !self.shares_queues_of.is_empty() || !self.unattributed_in.is_empty() {
            write!(f, "\nerrors {}", counters.errors())?;
            if !self.shares_queues_of.is_empty() {
                let shared_with = joined(&self.shares_queues_of);
                write!(
                    f,
                    "  kicks, interrupts, polls: see {shared_with}, which has the same queues"
                )?;
            }
            return writeln!(f);
        }
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

/// Returns one report for `selector` (export, disk or queue), or one per export.
pub fn reports(snapshot: &Snapshot, selector: Option<&str>) -> Vec<QueueReport> {
    if let Some(selector) = selector {
        let selected = snapshot.clone().select(selector);
        let report = QueueReport::new(selector.to_owned(), &selected.merged());
        return vec![report.of_some(&selected.queues)];
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

/// One of the slowest requests, with its queue.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlowReport {
    /// Queue of the request.
    #[serde(flatten)]
    pub queue: Labels,
    /// Operation.
    pub operation: Operation,
    /// Descriptor head or initiator task tag.
    pub tag: u64,
    /// Logical unit, if the export may have several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<UnitAddress>,
    /// First byte on the disk.
    pub offset: u64,
    /// First sector, in units of 512 bytes.
    pub lba_512: u64,
    /// Length in bytes.
    pub length: u64,
    /// Time since the end of the request.
    pub age_ns: u64,
    /// End of the request in milliseconds since 1970, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_ms: Option<u64>,
    /// Time from noticed to notified.
    pub total_ns: u64,
    /// Time of each stage since noticed.
    pub stages_ns: BTreeMap<&'static str, u64>,
    #[serde(skip)]
    way: [u64; Stage::COUNT],
}

impl SlowReport {
    fn new(queue: &Labels, slow: &SlowRequestSnapshot) -> SlowReport {
        let stages = Stage::ALL.iter().map(|stage| stage.name());
        SlowReport {
            queue: Labels {
                disk: if slow.disk.is_empty() {
                    queue.disk.clone()
                } else {
                    slow.disk.clone()
                },
                ..queue.clone()
            },
            unit: slow.unit,
            operation: slow.operation,
            tag: slow.tag,
            offset: slow.offset,
            lba_512: slow.offset / 512,
            length: slow.length,
            age_ns: slow.age_ns,
            ended_ms: slow.ended_ms,
            total_ns: slow.total_ns,
            stages_ns: stages.zip(slow.stages_ns).collect(),
            way: slow.stages_ns,
        }
    }
}

impl fmt::Display for SlowReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>8}  {} at byte {} + {}, tag {}, {}",
            time(self.total_ns as f64),
            self.operation,
            self.offset,
            self.length,
            self.tag,
            self.queue,
        )?;
        if let Some(UnitAddress { target, lun }) = self.unit {
            write!(f, " unit {target}:{lun}")?;
        }
        write!(f, ", {} ago", time(self.age_ns as f64))?;
        if let Some(ended_ms) = self.ended_ms {
            let seconds = ended_ms / 1000;
            let (hours, minutes) = (seconds / 3600 % 24, seconds / 60 % 60);
            write!(f, " at {hours:02}:{minutes:02}:{:02} UTC", seconds % 60)?;
        }
        writeln!(f)?;
        let at = |stage: Stage| self.way.get(stage as usize).copied().unwrap_or(0);
        write!(f, "         ")?;
        for span in Span::STEPS {
            let step = at(span.to()).saturating_sub(at(span.from()));
            if step > 0 || !span.is_optional() {
                write!(f, " {span} +{}", time(step as f64))?;
            }
        }
        Ok(())
    }
}

/// Returns the slowest requests, slowest first.
pub fn slowest(snapshot: &Snapshot, count: usize) -> Vec<SlowReport> {
    let slowest = snapshot.slowest(count).into_iter();
    slowest
        .map(|(queue, slow)| SlowReport::new(queue, slow))
        .collect()
}

#[cfg(test)]
mod tests {
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
    fn an_interval_has_rates() {
        let mut latencies = Latencies::default();
        latencies.counters.of_mut(Operation::Write).requests = 300;
        latencies.counters.of_mut(Operation::Write).bytes = 3_000_000;
        let report = QueueReport::new("d0".to_owned(), &latencies);
        assert!(!report.to_string().contains("per second"));
        let text = report.over(Duration::from_millis(1500)).to_string();
        assert!(
            text.contains("per second:  write 200 (2.0 MB/s)\n"),
            "{text}"
        );
    }

    #[test]
    fn slow_request_is_reported_completely() {
        let mut one = snapshot();
        one.queues[0].slow.push(SlowRequestSnapshot {
            operation: Operation::Write,
            unit: None,
            disk: String::new(),
            tag: 7,
            offset: 4096,
            length: 512,
            age_ns: 2_000_000_000,
            // 11,045 seconds after midnight.
            ended_ms: Some(20_000 * 86_400_000 + 11_045_900),
            total_ns: 5000,
            stages_ns: [0, 100, 200, 1200, 1300, 1400, 4400, 4500, 5000],
        });
        let [slow] = &slowest(&one, 5)[..] else {
            panic!("one request");
        };
        assert_eq!((slow.lba_512, slow.stages_ns["reaped"]), (8, 4400));
        assert_eq!(
            slow.to_string(),
            " 5.00 us  write at byte 4096 + 512, tag 7, d0/0 disk d0 worker 0, 2.00 s ago at 03:04:05 UTC\n         \
             \u{20}popped +100 ns parsed +100 ns awaited +1.00 us received +100 ns submitted +100 ns \
             reaped +3.00 us answered +100 ns notified +500 ns"
        );
    }

    #[test]
    fn the_rule_names_every_stage() {
        for stage in Stage::ALL {
            assert!(RULE.contains(stage.name()));
        }
    }
}
