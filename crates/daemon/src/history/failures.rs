//! Failed requests and protocol violations of queues, and failed I/Os of disks, in the last hour.
//!
//! Counted by minute, and only for queues and disks with failures: a daemon without failures stores nothing. The counts begin with the daemon.

use std::collections::{BTreeMap, VecDeque};

use ::control::{DiskFailures, FailureKind, QueueFailures};
use block::{IoError, IoErrorKind, OnError};
use reactor::{DiskCounters, FailureCounters};

/// Hour, in seconds.
const HOUR: u64 = 3600;
/// Seconds that are counted together.
const MINUTE: u64 = 60;

/// Failures of all queues since the start of the daemon, by export and queue. Queues without failures may be absent.
pub(crate) type OfQueues = BTreeMap<(String, u32), FailureCounters>;

/// Failures of one kind at a queue, or of one class at a disk.
#[derive(Debug, Default)]
struct Recent {
    /// Counter of the last sample.
    total: u64,
    /// Number of failures in each minute with failures, oldest first.
    minutes: VecDeque<(u64, u64)>,
    /// Second of the last failure.
    second: u64,
}

impl Recent {
    fn add(&mut self, second: u64, total: u64) {
        // A smaller counter is that of a new export of the same name.
        let count = total.checked_sub(self.total).unwrap_or(total);
        self.total = total;
        if count == 0 {
            return;
        }
        self.second = second;
        let minute = second / MINUTE;
        match self.minutes.back_mut().filter(|(at, _)| *at == minute) {
            Some((_, sum)) => *sum += count,
            None => self.minutes.push_back((minute, count)),
        }
    }

    fn count(&self) -> u64 {
        self.minutes.iter().map(|(_, count)| count).sum()
    }

    /// Drops minutes that ended an hour ago.
    fn expire(&mut self, second: u64) {
        let is_old = |(minute, _): &(u64, u64)| (minute + 1) * MINUTE + HOUR <= second;
        while self.minutes.front().is_some_and(is_old) {
            self.minutes.pop_front();
        }
    }
}

/// Failures of all queues.
#[derive(Debug, Default)]
pub(super) struct Failures(BTreeMap<(String, u32), [(FailureKind, Recent); 2]>);

impl Failures {
    /// Adds the counters at a second since the start of the daemon. Seconds and counters must not decrease.
    pub fn add(&mut self, second: u64, counters: &OfQueues) {
        // The measurements of removed exports are dropped.
        self.0.retain(|queue, _| counters.contains_key(queue));
        for (queue, counted) in counters {
            let [(_, requests), (_, violations)] =
                self.0.entry(queue.clone()).or_insert_with(|| {
                    [FailureKind::Request, FailureKind::Protocol]
                        .map(|kind| (kind, Recent::default()))
                });
            requests.add(second, counted.requests);
            violations.add(second, counted.violations);
        }
        for (_, recent) in self.0.values_mut().flatten() {
            recent.expire(second);
        }
    }

    /// Returns the failures of the hour before a second.
    pub fn recent(&self, second: u64) -> Vec<QueueFailures> {
        let queues = self.0.iter();
        let each = queues.flat_map(|(queue, kinds)| kinds.iter().map(move |kind| (queue, kind)));
        let recent = each.filter_map(|((export, queue), (kind, recent))| {
            let count = recent.count();
            (count > 0).then(|| QueueFailures {
                export: export.clone(),
                queue: *queue,
                kind: *kind,
                count,
                seconds: second - recent.second,
            })
        });
        recent.collect()
    }
}

/// Errors of the storage of all disks, by disk and class. Errors of clients, such as invalid ranges, do not count.
#[derive(Debug, Default)]
pub(super) struct FailuresOfDisks(BTreeMap<(String, &'static str), Recent>);

impl FailuresOfDisks {
    /// Adds the counters at a second since the start of the daemon. Seconds and counters must not decrease.
    pub fn add(&mut self, second: u64, counters: &BTreeMap<String, DiskCounters>) {
        // The measurements of removed disks are dropped.
        self.0.retain(|(disk, _), _| counters.contains_key(disk));
        for (disk, counted) in counters {
            for (kind, total) in IoErrorKind::ALL.into_iter().zip(counted.errors) {
                if total > 0 && OnError::Stop.holds(IoError::from(kind)) {
                    let recent = self.0.entry((disk.clone(), kind.word()));
                    recent.or_default().add(second, total);
                }
            }
        }
        for recent in self.0.values_mut() {
            recent.expire(second);
        }
    }

    /// Returns the failures of the hour before a second, by disk.
    pub fn recent(&self, second: u64) -> BTreeMap<String, Vec<DiskFailures>> {
        let mut all = BTreeMap::<_, Vec<_>>::new();
        for ((disk, class), recent) in &self.0 {
            let count = recent.count();
            if count > 0 {
                all.entry(disk.clone()).or_default().push(DiskFailures {
                    class: (*class).to_owned(),
                    count,
                    seconds: second - recent.second,
                });
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(requests: u64, violations: u64) -> OfQueues {
        let counted = FailureCounters {
            requests,
            violations,
        };
        BTreeMap::from([(("d".to_owned(), 0), counted)])
    }

    /// Returns kind, number and age of recent failures.
    fn recent(
        failures: &mut Failures,
        second: u64,
        counters: &OfQueues,
    ) -> Vec<(FailureKind, u64, u64)> {
        failures.add(second, counters);
        let recent = failures.recent(second);
        recent
            .iter()
            .map(|one| (one.kind, one.count, one.seconds))
            .collect()
    }

    #[test]
    fn failures_are_counted_for_an_hour_after_their_minute() {
        use FailureKind::{Protocol, Request};
        let mut failures = Failures::default();
        assert_eq!(
            recent(&mut failures, 59, &counters(3, 0)),
            [(Request, 3, 0)]
        );
        let both = [(Request, 4, 0), (Protocol, 1, 0)];
        assert_eq!(recent(&mut failures, 70, &counters(4, 1)), both);
        let both = [(Request, 4, 3589), (Protocol, 1, 3589)];
        assert_eq!(recent(&mut failures, 3659, &counters(4, 1)), both);
        // The first minute ended an hour ago.
        let second = [(Request, 1, 3590), (Protocol, 1, 3590)];
        assert_eq!(recent(&mut failures, 3660, &counters(4, 1)), second);
        assert_eq!(recent(&mut failures, 3720, &counters(4, 1)), []);
        assert_eq!(
            recent(&mut failures, 9000, &counters(5, 1)),
            [(Request, 1, 0)]
        );
    }

    #[test]
    fn failures_end_with_their_export_and_a_new_one_counts_in_full() {
        let mut failures = Failures::default();
        assert_eq!(recent(&mut failures, 1, &counters(3, 0)).len(), 1);
        assert_eq!(recent(&mut failures, 2, &OfQueues::new()), []);
        let found = recent(&mut failures, 3, &counters(2, 0));
        assert_eq!(found, [(FailureKind::Request, 2, 0)]);
        // Removed and added between two samples.
        let found = recent(&mut failures, 4, &counters(1, 0));
        assert_eq!(found, [(FailureKind::Request, 3, 0)]);
    }

    #[test]
    fn errors_of_storage_are_counted_by_disk_and_class_for_an_hour() {
        let mut failures = FailuresOfDisks::default();
        let mut counters = DiskCounters::default();
        counters.errors[IoErrorKind::NoSpace as usize] = 3;
        counters.errors[IoErrorKind::OutOfRange as usize] = 9;
        let mut used = BTreeMap::from([("d".to_owned(), counters)]);
        used.insert("good".to_owned(), DiskCounters::default());
        let failed = |class: &str, count, seconds| DiskFailures {
            class: class.to_owned(),
            count,
            seconds,
        };
        failures.add(59, &used);
        let expected = BTreeMap::from([("d".to_owned(), vec![failed("no_space", 3, 1)])]);
        assert_eq!(failures.recent(60), expected);
        let counted = used.get_mut("d").unwrap();
        counted.errors[IoErrorKind::Offline as usize] = 1;
        failures.add(3659, &used);
        let both = vec![failed("no_space", 3, 3600), failed("offline", 1, 0)];
        assert_eq!(failures.recent(3659)["d"], both);
        failures.add(3660, &used);
        assert_eq!(failures.recent(3660)["d"], [failed("offline", 1, 1)]);
        failures.add(3661, &BTreeMap::new());
        assert_eq!(failures.recent(3661), BTreeMap::new());
    }
}
