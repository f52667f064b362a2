//! The measurements of one queue, readable while their owner writes.
//!
//! Every word has one writer, the queue's owner, so a request needs no locked instruction. A reader costs the owner only
//! the shared cache lines. Values that are read together may be a few requests apart. Aligned, so that no two queues share
//! a cache line.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::parts::PartPermit;
use crate::snapshot::{Labels, Latencies, OperationLatencies, QueueSnapshot};
use crate::{
    Clock, Counters, Histogram, Operation, OperationCounters, SlowLog, SlowRequest, Span,
    SparseHistogram, Stamp, Word,
};

pub(crate) type SpanHistograms = [Histogram; Span::COUNT];

#[derive(Debug, Default)]
struct OperationWords {
    requests: Word,
    bytes: Word,
    errors: Word,
    noticed_ticks: Word,
}

/// [`Counters`], as written by their owner.
#[derive(Debug, Default)]
pub struct CounterWords {
    operations: [OperationWords; Operation::COUNT],
    /// Kicks received.
    pub kicks: Word,
    /// Notifications sent.
    pub notifications: Word,
    /// Polls without work.
    pub polls: Word,
    /// Number of times that the queue was armed for a kick and its worker slept.
    pub sleeps: Word,
    /// Malformed requests, which have no operation.
    pub malformed: Word,
    /// Unanswered requests, as of the last iteration.
    pub in_flight: Word,
}

impl CounterWords {
    /// Counts an answered request.
    #[inline]
    pub fn count(&self, operation: Operation, bytes: u64, good: bool) {
        let words = &self.operations[operation as usize];
        words.requests.add(1);
        words.bytes.add(bytes);
        if !good {
            words.errors.add(1);
        }
    }

    /// Adds the stamp of `weight` requests that were noticed together.
    #[inline]
    pub(crate) fn noticed(&self, operation: Operation, at: Stamp, weight: u32) {
        let words = &self.operations[operation as usize];
        let ticks = at.0.wrapping_mul(u64::from(weight));
        words.noticed_ticks.add(ticks);
    }

    /// Returns the counters.
    pub fn get(&self) -> Counters {
        Counters {
            operations: self.operations.each_ref().map(|words| OperationCounters {
                requests: words.requests.get(),
                bytes: words.bytes.get(),
                errors: words.errors.get(),
                noticed_ticks: words.noticed_ticks.get(),
            }),
            kicks: self.kicks.get(),
            notifications: self.notifications.get(),
            polls: self.polls.get(),
            sleeps: self.sleeps.get(),
            malformed: self.malformed.get(),
        }
    }

    fn clear(&self) {
        let operations = self.operations.iter();
        let of_operations =
            operations.flat_map(|o| [&o.requests, &o.bytes, &o.errors, &o.noticed_ticks]);
        let others = [
            &self.kicks,
            &self.notifications,
            &self.polls,
            &self.sleeps,
            &self.malformed,
        ];
        of_operations.chain(others).for_each(|word| word.set(0));
    }
}

/// Histograms and counters of one queue.
#[derive(Debug)]
#[repr(align(128))]
pub struct QueueRecord {
    counters: CounterWords,
    operations: [OnceLock<Box<SpanHistograms>>; Operation::COUNT],
    /// Created with the first slow request. Only slow requests need the lock, and their owner never waits for it.
    slow: Mutex<Option<Box<SlowLog>>>,
    labels: Labels,
    /// Parts of single disks, if there are several. The owner adds entries and never reads them.
    parts: Mutex<PartRecords>,
    /// Set if this record is such a part.
    _permit: Option<PartPermit>,
}

#[derive(Debug, Default)]
struct PartRecords {
    records: Vec<Arc<QueueRecord>>,
    unmeasured: BTreeSet<String>,
}

impl QueueRecord {
    pub(crate) fn new(labels: Labels) -> QueueRecord {
        QueueRecord {
            counters: CounterWords::default(),
            operations: [const { OnceLock::new() }; Operation::COUNT],
            slow: Mutex::default(),
            labels,
            parts: Mutex::default(),
            _permit: None,
        }
    }

    pub(crate) fn part(labels: Labels, permit: PartPermit) -> QueueRecord {
        QueueRecord {
            _permit: Some(permit),
            ..QueueRecord::new(labels)
        }
    }

    fn parts(&self) -> MutexGuard<'_, PartRecords> {
        // A poisoned lock is usable: no change is left incomplete.
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add_part(&self, part: Arc<QueueRecord>) {
        self.parts().records.push(part);
    }

    /// Returns the number of this disk's part, from 1.
    pub(crate) fn part_named(&self, disk: &str) -> Option<u16> {
        let parts = self.parts();
        let at = parts.records.iter().position(|p| p.labels.disk == disk)?;
        u16::try_from(at + 1).ok()
    }

    pub(crate) fn add_unmeasured(&self, disk: String) {
        self.parts().unmeasured.insert(disk);
    }

    /// Returns the number of unanswered requests, as of the last iteration.
    pub fn in_flight(&self) -> u64 {
        self.counters.in_flight.get()
    }

    /// Returns the labels of the queue.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    /// Returns the counters, including the parts.
    pub fn counters(&self) -> Counters {
        let mut sum = self.counters.get();
        for part in &self.parts().records {
            sum.merge(&part.counters.get());
        }
        sum
    }

    #[inline]
    pub(crate) fn words(&self) -> &CounterWords {
        &self.counters
    }

    /// Returns a histogram in ticks; `None` if the operation was never used.
    pub fn histogram(&self, operation: Operation, span: Span) -> Option<&Histogram> {
        let spans = self.operations[operation as usize].get()?;
        Some(&spans[span as usize])
    }

    /// Returns an operation's histograms, for the owner.
    #[inline]
    pub(crate) fn spans(&self, operation: Operation) -> &SpanHistograms {
        self.operations[operation as usize].get_or_init(empty_histograms)
    }

    /// Stores a request if it is slow enough. Returns the new threshold in ticks and its expiry. Stores nothing while
    /// another thread reads the log.
    pub(crate) fn record_slow(&self, clock: &Clock, request: SlowRequest) -> Option<(u64, Stamp)> {
        let mut slow = self.slow.try_lock().ok()?;
        let log = slow.get_or_insert_with(|| Box::new(SlowLog::new(clock, crate::slow::KEPT)));
        log.offer(request);
        Some((log.threshold(), log.due()))
    }

    fn slow(&self) -> MutexGuard<'_, Option<Box<SlowLog>>> {
        // A poisoned lock is usable: no change is left incomplete.
        self.slow.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns all measurements so far, in nanoseconds. Takes some tens of microseconds of the caller's time per part.
    pub fn snapshot(&self, clock: &Clock) -> QueueSnapshot {
        let (parts, unmeasured) = {
            let parts = self.parts();
            (parts.records.clone(), parts.unmeasured.clone())
        };
        let mut snapshot = QueueSnapshot {
            labels: self.labels.clone(),
            in_flight: self.in_flight(),
            latencies: self.latencies(clock),
            slow: match &*self.slow() {
                Some(log) => log.snapshot(clock),
                None => Vec::new(),
            },
            unmeasured,
            ..QueueSnapshot::default()
        };
        for part in parts {
            let latencies = part.latencies(clock);
            snapshot.latencies.merge(&latencies);
            let disk = snapshot.disks.entry(part.labels.disk.clone());
            disk.or_default().merge(&latencies);
        }
        snapshot
    }

    /// Adds the total times of all requests to `totals`, by disk. Requests without a disk are left out.
    pub fn add_totals(&self, clock: &Clock, totals: &mut BTreeMap<String, SparseHistogram>) {
        let parts = self.parts().records.clone();
        let own = (!self.labels.disk.is_empty()).then_some(self);
        for record in parts.iter().map(|part| &**part).chain(own) {
            let used = record.operations.iter().filter_map(OnceLock::get);
            for spans in used {
                let total = SparseHistogram::from_ticks(&spans[Span::Total as usize], clock);
                if !total.is_empty() {
                    let sum = totals.entry(record.labels.disk.clone()).or_default();
                    sum.merge(&total);
                }
            }
        }
    }

    /// Returns the own measurements, without parts.
    fn latencies(&self, clock: &Clock) -> Latencies {
        let mut latencies = Latencies {
            counters: self.counters.get(),
            ..Default::default()
        };
        for operation in Operation::ALL {
            let Some(histograms) = self.operations[operation as usize].get() else {
                continue;
            };
            let spans = Span::ALL.into_iter().zip(histograms.iter());
            let spans =
                spans.map(|(span, ticks)| (span, SparseHistogram::from_ticks(ticks, clock)));
            let spans = spans
                .filter(|(_, histogram)| !histogram.is_empty())
                .collect();
            latencies
                .operations
                .insert(operation, OperationLatencies { spans });
        }
        latencies
    }

    pub(crate) fn reset(&self) {
        self.counters.clear();
        *self.slow() = None;
        let histograms = self.operations.iter().filter_map(OnceLock::get);
        for histogram in histograms.flat_map(|spans| spans.iter()) {
            histogram.clear();
        }
        for part in &self.parts().records {
            part.reset();
        }
    }
}

/// Allocates histograms, once per queue and operation.
#[cold]
fn empty_histograms() -> Box<SpanHistograms> {
    Box::new([const { Histogram::new() }; Span::COUNT])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{QueueTimeline, Stamp, Stamps};

    #[test]
    fn records_share_no_cache_line() {
        assert_eq!(align_of::<QueueRecord>(), 128);
    }

    #[test]
    fn concurrent_snapshot_is_consistent() {
        let (clock, _) = Clock::simulated();
        let mut timeline = QueueTimeline::new(Labels::default(), 8);
        let record = timeline.record().clone();
        let looking = std::thread::spawn(move || {
            let mut last = 0;
            while last < 20_000 {
                let snapshot = record.snapshot(&clock);
                let Some(reads) = snapshot.latencies.operations.get(&Operation::Read) else {
                    continue;
                };
                for histogram in reads.spans.values() {
                    let counted: u64 = histogram.buckets.iter().map(|(_, count)| count).sum();
                    assert_eq!(histogram.count, counted);
                    assert!(histogram.buckets.is_sorted());
                }
                let now = reads.spans.get(&Span::Total).map_or(0, |total| total.count);
                assert!(now >= last);
                last = now;
            }
        });
        for n in 0..20_000u64 {
            let stamps = [0, 1, 2, 2, 2, 3, n, n + 5, n + 9].map(Stamp);
            timeline.record_request(Operation::Read, &Stamps::from_array(stamps));
        }
        looking.join().unwrap();
    }
}
