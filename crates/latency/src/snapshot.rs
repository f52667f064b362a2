//! Snapshots of measurements: plain data in nanoseconds that can be merged, subtracted, stored and sent as JSON.

use crate::{Counters, Operation, SlowRequestSnapshot, Span, SparseHistogram};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Identity of a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Labels {
    /// The export's name.
    pub export: String,
    /// The disk's name; empty if the queue serves several.
    pub disk: String,
    /// The queue's index in its device, or the connection's number.
    pub queue: u32,
    /// Number of the worker that owns the queue.
    pub worker: u32,
}

impl Labels {
    /// Returns true if `EXPORT`, `DISK` or `EXPORT/QUEUE` selects this queue.
    pub fn matches(&self, selector: &str) -> bool {
        self.is_of(selector) || (!self.disk.is_empty() && selector == self.disk)
    }

    /// Returns true if `EXPORT` or `EXPORT/QUEUE` selects this queue.
    pub fn is_of(&self, selector: &str) -> bool {
        let queue = selector
            .strip_prefix(self.export.as_str())
            .and_then(|rest| rest.strip_prefix('/'));
        selector == self.export || queue.is_some_and(|index| index.parse() == Ok(self.queue))
    }
}

impl fmt::Display for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.export, self.queue)?;
        if !self.disk.is_empty() {
            write!(f, " disk {}", self.disk)?;
        }
        write!(f, " worker {}", self.worker)
    }
}

/// Histograms of one operation; unused spans are absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OperationLatencies {
    /// Histograms by span.
    pub spans: BTreeMap<Span, SparseHistogram>,
}

impl OperationLatencies {
    /// Adds all counts of `other`.
    pub fn merge(&mut self, other: &OperationLatencies) {
        for (span, histogram) in &other.spans {
            self.spans.entry(*span).or_default().merge(histogram);
        }
    }

    /// Returns the difference to `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &OperationLatencies) -> OperationLatencies {
        let grown = self
            .spans
            .iter()
            .map(|(span, histogram)| match earlier.spans.get(span) {
                Some(before) => (*span, histogram.since(before)),
                None => (*span, histogram.clone()),
            });
        OperationLatencies {
            spans: grown
                .filter(|(_, histogram)| !histogram.is_empty())
                .collect(),
        }
    }
}

/// Counters and histograms of one queue or several together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latencies {
    /// Counters.
    pub counters: Counters,
    /// Histograms by operation; unused operations are absent.
    pub operations: BTreeMap<Operation, OperationLatencies>,
}

impl Latencies {
    /// Adds all counts of `other`.
    pub fn merge(&mut self, other: &Latencies) {
        self.counters.merge(&other.counters);
        for (operation, latencies) in &other.operations {
            self.operations
                .entry(*operation)
                .or_default()
                .merge(latencies);
        }
    }

    /// Returns the difference to `earlier`: two snapshots of the same queues make an interval.
    #[must_use]
    pub fn since(&self, earlier: &Latencies) -> Latencies {
        let grown = self.operations.iter().map(|(operation, latencies)| {
            match earlier.operations.get(operation) {
                Some(before) => (*operation, latencies.since(before)),
                None => (*operation, latencies.clone()),
            }
        });
        Latencies {
            counters: self.counters.since(&earlier.counters),
            operations: grown
                .filter(|(_, latencies)| !latencies.spans.is_empty())
                .collect(),
        }
    }
}

/// Labels, counters and histograms of one queue.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QueueSnapshot {
    /// Identity of the queue.
    pub labels: Labels,
    /// Current unanswered requests.
    #[serde(default)]
    pub in_flight: u64,
    /// Measurements since the start.
    pub latencies: Latencies,
    /// The slowest requests of the last minute, slowest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slow: Vec<SlowRequestSnapshot>,
    /// The part of the measurements that belongs to each disk, if the queue may serve several.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub disks: BTreeMap<String, Latencies>,
    /// Disks that are not measured separately, because there are too many.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub unmeasured: BTreeSet<String>,
    /// The queue also serves other disks; counters of the queue as a whole are not included here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
}

impl QueueSnapshot {
    /// Adds the measurements of another queue, or of an earlier instance of the same one.
    pub fn merge(&mut self, other: &QueueSnapshot) {
        self.latencies.merge(&other.latencies);
        self.in_flight = self.in_flight.saturating_add(other.in_flight);
        self.slow.extend_from_slice(&other.slow);
        let by_total = |slow: &SlowRequestSnapshot| std::cmp::Reverse(slow.total_ns);
        self.slow.sort_by_key(by_total);
        // Limited to the size of one log, however many instances of a queue are merged.
        self.slow.truncate(crate::slow::HELD);
        for (disk, latencies) in &other.disks {
            let mine = self.disks.entry(disk.clone()).or_default();
            mine.merge(latencies);
        }
        self.unmeasured.extend(other.unmeasured.iter().cloned());
    }

    /// Returns the measurements of one disk; `None` if this queue did not serve it.
    #[must_use]
    pub fn of_disk(&self, disk: &str) -> Option<QueueSnapshot> {
        if self.disks.is_empty() && self.labels.disk == disk {
            return Some(self.clone());
        }
        let of_disk = |slow: &&SlowRequestSnapshot| slow.disk == disk;
        let slow: Vec<_> = self.slow.iter().filter(of_disk).cloned().collect();
        let known = self.disks.get(disk);
        let unmeasured = self.unmeasured.contains(disk);
        if known.is_none() && slow.is_empty() && !unmeasured {
            return None;
        }
        let mut latencies = known.cloned().unwrap_or_default();
        let shared = known.is_none() || self.disks.len() > 1 || !self.unmeasured.is_empty();
        if !shared {
            latencies.counters = Counters {
                operations: latencies.counters.operations,
                ..self.latencies.counters
            };
        }
        Some(QueueSnapshot {
            labels: Labels {
                disk: disk.to_owned(),
                ..self.labels.clone()
            },
            latencies,
            slow,
            shared,
            unmeasured: unmeasured.then(|| disk.to_owned()).into_iter().collect(),
            ..QueueSnapshot::default()
        })
    }

    /// Removes the measurements of single disks; the total stays.
    pub fn forget_disks(&mut self) {
        self.disks.clear();
    }

    /// Removes the distributions of single disks except for the total of each operation. Counts, sums and maxima stay.
    pub fn shorten_disks(&mut self) {
        self.disks.values_mut().for_each(shorten);
    }

    /// Removes the distributions of the queue and its disks as [`QueueSnapshot::shorten_disks`] does.
    pub fn shorten(&mut self) {
        shorten(&mut self.latencies);
        self.shorten_disks();
    }

    /// Adds `nanos` to the age of all slow requests and removes those that are too old.
    pub fn age(&mut self, nanos: u64) {
        for slow in &mut self.slow {
            slow.age_ns = slow.age_ns.saturating_add(nanos);
        }
        let recent = |slow: &SlowRequestSnapshot| slow.age_ns <= SlowRequestSnapshot::AGE_NS_MAX;
        self.slow.retain(recent);
    }
}

/// Removes the distributions except for the total of each operation.
fn shorten(latencies: &mut Latencies) {
    let operations = latencies.operations.values_mut();
    for (span, histogram) in operations.flat_map(|one| &mut one.spans) {
        if *span != Span::Total {
            histogram.buckets.clear();
        }
    }
}

/// Snapshots of several queues.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Queues, in no particular order.
    pub queues: Vec<QueueSnapshot>,
}

impl Snapshot {
    /// Returns the sum of all queues.
    pub fn merged(&self) -> Latencies {
        self.merged_by(|_| true)
    }

    /// Returns the part selected by `EXPORT`, `EXPORT/QUEUE` or `DISK`: whole queues, or the queues' measurements of one
    /// disk.
    #[must_use]
    pub fn select(self, selector: &str) -> Snapshot {
        let meant = self.queues.into_iter().filter_map(|mut queue| {
            if !queue.labels.is_of(selector) {
                queue = queue.of_disk(selector)?;
            }
            queue.forget_disks();
            Some(queue)
        });
        Snapshot {
            queues: meant.collect(),
        }
    }

    /// Returns the slowest requests of all queues, slowest first, each with its queue.
    pub fn slowest(&self, count: usize) -> Vec<(&Labels, &SlowRequestSnapshot)> {
        let each = self.queues.iter();
        let mut all: Vec<_> = each
            .flat_map(|queue| queue.slow.iter().map(|slow| (&queue.labels, slow)))
            .collect();
        all.sort_by_key(|(_, slow)| std::cmp::Reverse(slow.total_ns));
        all.truncate(count);
        all
    }

    /// Returns the sum of the queues with selected labels.
    pub fn merged_by(&self, wanted: impl Fn(&Labels) -> bool) -> Latencies {
        let mut merged = Latencies::default();
        for queue in self.queues.iter().filter(|queue| wanted(&queue.labels)) {
            merged.merge(&queue.latencies);
        }
        merged
    }

    /// Returns the difference of each queue to `earlier`. A queue with decreased counters has restarted and counts in full.
    /// A queue on a new worker also counts in full; its earlier measurements stay with the earlier worker.
    #[must_use]
    pub fn since(&self, earlier: &Snapshot) -> Snapshot {
        let queues = self.queues.iter().map(|now| {
            let mut of_then = earlier.queues.iter();
            let before = of_then.find(|before| before.labels == now.labels);
            let before = before
                .filter(|b| b.latencies.counters.requests() <= now.latencies.counters.requests());
            let Some(before) = before else {
                return now.clone();
            };
            let disks = now.disks.iter().map(|(disk, latencies)| {
                let earlier = before.disks.get(disk).cloned().unwrap_or_default();
                (disk.clone(), latencies.since(&earlier))
            });
            QueueSnapshot {
                labels: now.labels.clone(),
                in_flight: now.in_flight,
                latencies: now.latencies.since(&before.latencies),
                slow: now.slow.clone(),
                disks: disks.collect(),
                unmeasured: now.unmeasured.clone(),
                shared: now.shared,
            }
        });
        Snapshot {
            queues: queues.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Clock, QueueTimeline, Stamp, Stamps};

    fn labels(export: &str, queue: u32) -> Labels {
        Labels {
            export: export.into(),
            disk: "d0".into(),
            queue,
            worker: 1,
        }
    }

    fn snapshot_of(labels: Labels, requests: u32) -> QueueSnapshot {
        let (clock, _) = Clock::simulated();
        let mut queue = QueueTimeline::new(labels, 8);
        for n in 0..requests {
            let reaped = 1000 + u64::from(n) * 77;
            let stamps = [0, 3, 5, 5, 5, 9, reaped, 30_000, 31_000];
            queue.record_iteration(&[2, 1, 0, 0, 1], &Stamps::from_array(stamps.map(Stamp)));
            queue.count(Operation::Read, 0, true);
            queue.count(Operation::Read, 0, true);
            queue.counters().kicks.add(1);
        }
        queue.snapshot(&clock)
    }

    #[test]
    fn json_round_trip_gives_the_same_snapshot() {
        let snapshot = Snapshot {
            queues: vec![
                snapshot_of(labels("a", 0), 3),
                snapshot_of(labels("b", 1), 5),
            ],
        };
        let json = serde_json::to_string(&snapshot).unwrap();
        assert_eq!(serde_json::from_str::<Snapshot>(&json).unwrap(), snapshot);
        let value = serde_json::to_value(&snapshot).unwrap();
        assert_eq!(
            serde_json::from_value::<Snapshot>(value.clone()).unwrap(),
            snapshot
        );
        let total = &value["queues"][0]["latencies"]["operations"]["read"]["total"];
        assert_eq!(
            (&total["count"], &total["max_ns"]),
            (&6.into(), &31_000.into())
        );
    }

    #[test]
    fn merging_is_associative_and_an_interval_is_the_difference() {
        let [a, b, c] = [2, 3, 4].map(|n| snapshot_of(labels("a", n), n).latencies);
        let mut left = a.clone();
        left.merge(&b);
        left.merge(&c);
        let mut right_part = b.clone();
        right_part.merge(&c);
        let mut right = a.clone();
        right.merge(&right_part);
        assert_eq!(left, right);
        let interval = left.since(&a);
        assert_eq!(interval.counters, right_part.counters);
        assert_eq!(
            interval.operations[&Operation::Read].spans[&Span::Reaped].count,
            14
        );
        assert_eq!(left.since(&left), Latencies::default());
    }

    #[test]
    fn selectors_name_an_export_a_disk_or_a_queue() {
        let snapshot = Snapshot {
            queues: vec![
                snapshot_of(labels("a", 0), 1),
                snapshot_of(labels("b", 1), 2),
            ],
        };
        let kicks = |selector: &str| {
            let selected = snapshot.clone().select(selector);
            (!selected.queues.is_empty()).then(|| selected.merged().counters.kicks)
        };
        assert_eq!(kicks("a"), Some(1));
        assert_eq!(kicks("b/1"), Some(2));
        assert_eq!(kicks("d0"), Some(3));
        assert_eq!(kicks("b/0"), None);
        assert_eq!(kicks(""), None);
        assert_eq!(snapshot.merged().counters.kicks, 3);
        assert_eq!(labels("a", 0).to_string(), "a/0 disk d0 worker 1");
    }

    #[test]
    fn of_a_shared_queue_a_disk_has_its_part_and_the_queue_keeps_the_rest() {
        let (clock, _) = Clock::simulated();
        let shared = |disks: &[&str]| {
            let of_queue = Labels {
                disk: String::new(),
                ..labels("c0", 2)
            };
            let mut queue = QueueTimeline::new(of_queue, 8);
            queue.counters().kicks.add(7);
            for (number, name) in (0..).zip(disks) {
                let name = || Some((*name).to_owned());
                let part = queue.part_of(crate::DiskNumber(number), Operation::Read, name);
                queue.select(part);
                queue.count(Operation::Read, 512, true);
            }
            Snapshot {
                queues: vec![snapshot_of(labels("a", 0), 1), queue.snapshot(&clock)],
            }
        };
        let two = shared(&["d0", "d1"]);
        let [blk, part] = &two.clone().select("d0").queues[..] else {
            panic!("two transports");
        };
        assert!(!blk.shared && part.shared);
        let counters = part.latencies.counters;
        assert_eq!((counters.requests(), counters.kicks), (1, 0));
        let [whole] = &two.clone().select("c0/2").queues[..] else {
            panic!("one queue");
        };
        let counters = whole.latencies.counters;
        assert_eq!((counters.requests(), counters.kicks), (2, 7));
        assert!(!whole.shared && whole.disks.is_empty());
        assert_eq!(two.select("d2").queues, []);
        let alone = shared(&["d1"]).select("d1");
        assert_eq!(alone.queues[0].latencies.counters.kicks, 7);
    }

    #[test]
    fn a_queue_that_restarted_counts_in_full() {
        let (long, short) = (
            snapshot_of(labels("a", 0), 9),
            snapshot_of(labels("a", 0), 2),
        );
        let [long, short] = [long, short].map(|queue| Snapshot {
            queues: vec![queue],
        });
        assert_eq!(short.since(&long), short);
        assert_eq!(long.since(&short).merged().counters.kicks, 7);
    }

    /// Measurements on the earlier worker are still reported; the two are separate.
    #[test]
    fn a_queue_that_moved_to_another_worker_counts_on_each_by_itself() {
        let on = |worker: u32, requests: u32| {
            let labels = Labels {
                worker,
                ..labels("a", 0)
            };
            snapshot_of(labels, requests)
        };
        let of = |queues: &[QueueSnapshot]| Snapshot {
            queues: queues.to_vec(),
        };
        let first = of(&[on(0, 5)]);
        let moved = of(&[on(0, 5), on(1, 6)]);
        let later = of(&[on(0, 5), on(1, 9)]);
        let kicks = |now: &Snapshot, before: &Snapshot| now.since(before).merged().counters.kicks;
        assert_eq!(kicks(&moved, &first), 6);
        assert_eq!(kicks(&later, &first), 9);
        assert_eq!(kicks(&later, &moved), 3);
    }
}
