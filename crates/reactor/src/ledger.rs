//! A worker's counters for other threads: iterations, queues, disks.
//!
//! The worker writes its own words ([`latency::Word`]). Readers load them without waking or stopping the worker. The lock
//! is taken when a queue or a disk is added or removed, and by readers to list them, never per request.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bdev::Disk;
use block::{IoError, IoErrorKind, IoKind, IoOutcome, IoRequest};
use latency::{Clock, Labels, QueueRecord, QueueSnapshot, SparseHistogram, Stamp, Word};

use crate::time_use::TimeWords;
use crate::{Activity, RateLimit, WorkerCounters};

#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct IterationCounters {
    pub busy_iterations: Word,
    pub empty_iterations: Word,
    pub sleeps: Word,
    pub messages: Word,
    pub poll_suspensions: Word,
    pub time: TimeWords,
}

#[derive(Debug, Default)]
struct KindWords {
    requests: Word,
    bytes: Word,
}

/// Minimum interval between log lines about I/O errors of a disk, per worker.
const FAILURE_LOG: Duration = Duration::from_secs(1);

/// Counters of one worker for one disk.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct DiskRecord {
    kinds: [KindWords; IoKind::COUNT],
    pended: Word,
    finished: Word,
    errors: [Word; IoErrorKind::COUNT],
    limited: Word,
    limited_ns: Word,
    failures: RateLimit,
    /// Dead after the disk was removed, and its counters with it.
    disk: Weak<Disk>,
}

impl DiskRecord {
    fn new(disk: &Arc<Disk>) -> DiskRecord {
        DiskRecord {
            kinds: Default::default(),
            pended: Word::default(),
            finished: Word::default(),
            errors: Default::default(),
            limited: Word::default(),
            limited_ns: Word::default(),
            failures: RateLimit::new(FAILURE_LOG),
            disk: Arc::downgrade(disk),
        }
    }

    #[inline]
    pub fn record_request(&self, request: &IoRequest) {
        let words = &self.kinds[request.kind as usize];
        words.requests.add(1);
        words.bytes.add(request.length);
    }

    #[inline]
    pub fn pended(&self) {
        self.pended.add(1);
    }

    #[inline]
    pub fn ended(&self, outcome: &IoOutcome) {
        if let Err(error) = outcome {
            self.failed(*error);
        }
    }

    #[cold]
    fn failed(&self, error: IoError) {
        use IoErrorKind::*;
        self.errors[error.kind as usize].add(1);
        // Only errors of the storage are logged; invalid requests of clients are not.
        if let NoSpace | ReadMedium | WriteMedium | Offline | TimedOut = error.kind
            && let Some(disk) = self.disk.upgrade()
            && let Some(suppressed) = self.failures.pass()
        {
            tracing::warn!(disk = disk.name(), suppressed, "I/O failed: {error}");
        }
    }

    /// Counts and logs a failed I/O that is held. It does not count while the disk is offline, because then it may only wait for a lock.
    pub fn held(&self, error: IoError) {
        if error.kind != IoErrorKind::Offline {
            self.errors[error.kind as usize].add(1);
        }
        if let Some(disk) = self.disk.upgrade()
            && let Some(suppressed) = self.failures.pass()
        {
            let disk = disk.name();
            tracing::warn!(
                disk,
                suppressed,
                "I/O failed and waits for a resume: {error}; hint: lunette disk resume {disk}"
            );
        }
    }

    /// Logs the number of I/Os beyond the disk's timeout.
    pub fn late(&self, count: usize, timeout: Duration) {
        if let Some(disk) = self.disk.upgrade()
            && let Some(suppressed) = self.failures.pass()
        {
            tracing::warn!(
                disk = disk.name(),
                count,
                suppressed,
                "I/O takes longer than io_timeout ({} s), cancelling it; hint: check the device",
                timeout.as_secs()
            );
        }
    }

    /// Counts the end of a pending I/O.
    #[inline]
    pub fn finished(&self, outcome: &IoOutcome) {
        self.finished.add(1);
        self.ended(outcome);
    }

    /// Counts the end of an I/O that was held. Its error counts unless [`DiskRecord::held`] has counted it.
    pub fn finished_held(&self, outcome: &IoOutcome) {
        self.finished.add(1);
        if let Err(error) = outcome
            && error.kind == IoErrorKind::Offline
        {
            self.failed(*error);
        }
    }

    /// Counts an I/O that was delayed by the disk's limits.
    pub fn limited(&self, waited: Duration) {
        self.limited.add(1);
        self.limited_ns
            .add(u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX));
    }

    fn add_to(&self, counters: &mut DiskCounters) {
        for (sum, words) in counters.kinds.iter_mut().zip(&self.kinds) {
            sum.requests += words.requests.get();
            sum.bytes += words.bytes.get();
        }
        // Read in this order, so that a concurrent completion reduces the result but never makes it negative.
        let finished = self.finished.get();
        counters.in_flight += self.pended.get().saturating_sub(finished);
        for (sum, word) in counters.errors.iter_mut().zip(&self.errors) {
            *sum += word.get();
        }
        counters.limited += self.limited.get();
        counters.limited_ns += self.limited_ns.get();
    }
}

/// I/Os of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KindCounters {
    /// Number of I/Os.
    pub requests: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// I/O counters of a disk over all transports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCounters {
    /// Counters of each kind, in the order of [`IoKind::ALL`].
    pub kinds: [KindCounters; IoKind::COUNT],
    /// I/Os that the block device has not completed.
    pub in_flight: u64,
    /// I/Os that failed, by class, in the order of [`IoErrorKind::ALL`].
    pub errors: [u64; IoErrorKind::COUNT],
    /// I/Os that were delayed by the disk's limits.
    pub limited: u64,
    /// Total delay of these I/Os in nanoseconds.
    pub limited_ns: u64,
}

impl DiskCounters {
    /// Returns the counters of one kind.
    pub fn of(&self, kind: IoKind) -> KindCounters {
        self.kinds[kind as usize]
    }
}

/// Failures of a queue since the start of the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FailureCounters {
    /// Data requests that were answered with an error.
    pub requests: u64,
    /// Violations of the protocol by the driver or the front end.
    pub violations: u64,
}

#[derive(Debug, Default)]
struct Known {
    live: Vec<Arc<QueueRecord>>,
    /// Measurements of removed queues, with the time of the last addition.
    retired: Arc<BTreeMap<Labels, (QueueSnapshot, Stamp)>>,
    disks: Vec<Arc<DiskRecord>>,
}

#[derive(Debug)]
pub(crate) struct Ledger {
    pub iterations: IterationCounters,
    clock: Clock,
    known: Mutex<Known>,
    /// Reported to when the worker wakes up for a client or a disk.
    pub activity: Arc<Activity>,
}

impl Ledger {
    pub fn new(clock: Clock) -> Arc<Ledger> {
        Ledger::reporting_to(clock, Arc::default())
    }

    /// Creates a ledger. Its worker reports to `activity`.
    pub fn reporting_to(clock: Clock, activity: Arc<Activity>) -> Arc<Ledger> {
        Arc::new(Ledger {
            iterations: IterationCounters::default(),
            clock,
            known: Mutex::default(),
            activity,
        })
    }

    /// Returns the clock of all entries.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // A poisoned lock is usable: no change is left incomplete.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a queue.
    pub fn register(&self, record: Arc<QueueRecord>) {
        self.known().live.push(record);
    }

    /// Removes a queue. Its measurements are retained, because its client may reconnect and its user may read them later.
    pub fn retire(&self, record: &Arc<QueueRecord>) {
        let last = record.snapshot(&self.clock);
        let mut known = self.known();
        known.live.retain(|live| !Arc::ptr_eq(live, record));
        let now = self.clock.now();
        let fresh = QueueSnapshot {
            labels: last.labels.clone(),
            ..QueueSnapshot::default()
        };
        let (sum, since) = Arc::make_mut(&mut known.retired)
            .entry(last.labels.clone())
            .or_insert((fresh, now));
        sum.age(self.clock.nanos(now.since(*since)));
        sum.merge(&last);
        (sum.in_flight, *since) = (0, now);
    }

    /// Returns the current queues with their requests in flight.
    pub fn live(&self) -> Vec<(Labels, u64)> {
        let known = self.known();
        let live = known.live.iter();
        live.map(|one| (one.labels().clone(), one.in_flight()))
            .collect()
    }

    /// Drops the measurements of a removed export's queues.
    pub fn forget(&self, export: &str) {
        Arc::make_mut(&mut self.known().retired).retain(|labels, _| labels.export != export);
    }

    /// Returns this worker's counters for a disk.
    pub fn disk(&self, disk: &Arc<Disk>) -> Arc<DiskRecord> {
        let mut known = self.known();
        known.disks.retain(|one| one.disk.strong_count() > 0);
        let same = |one: &&Arc<DiskRecord>| Weak::as_ptr(&one.disk) == Arc::as_ptr(disk);
        if let Some(record) = known.disks.iter().find(same) {
            return record.clone();
        }
        let record = Arc::new(DiskRecord::new(disk));
        known.disks.push(record.clone());
        record
    }

    /// Returns latencies and counters of every queue, including removed ones.
    pub fn snapshots(&self) -> Vec<QueueSnapshot> {
        let (live, retired) = {
            let known = self.known();
            (known.live.clone(), known.retired.clone())
        };
        let now = self.clock.now();
        let gone = retired.values().map(|(sum, since)| {
            let mut sum = sum.clone();
            sum.age(self.clock.nanos(now.since(*since)));
            sum
        });
        let mut all: BTreeMap<Labels, QueueSnapshot> =
            gone.map(|queue| (queue.labels.clone(), queue)).collect();
        for now in live.iter().map(|record| record.snapshot(&self.clock)) {
            match all.get_mut(&now.labels) {
                Some(sum) => sum.merge(&now),
                None => drop(all.insert(now.labels.clone(), now)),
            }
        }
        all.into_values().collect()
    }

    /// Adds the total times of the requests of all current queues to `totals`, by disk.
    pub fn add_totals(&self, totals: &mut BTreeMap<String, SparseHistogram>) {
        let live = self.known().live.clone();
        for record in live {
            record.add_totals(&self.clock, totals);
        }
    }

    /// Adds the counters of each disk to `sums`, by name.
    pub fn add_disks(&self, sums: &mut BTreeMap<String, DiskCounters>) {
        let records = self.known().disks.clone();
        for record in records {
            if let Some(disk) = record.disk.upgrade() {
                record.add_to(sums.entry(disk.name().to_owned()).or_default());
            }
        }
    }

    /// Adds the failures of each queue to `sums`, by export and queue, including removed queues. Leaves out queues without failures.
    pub fn add_failures(&self, sums: &mut BTreeMap<(String, u32), FailureCounters>) {
        let (live, retired) = {
            let known = self.known();
            (known.live.clone(), known.retired.clone())
        };
        let live = live.iter().map(|one| (one.labels(), one.counters()));
        let retired = retired.values();
        let retired = retired.map(|(sum, _)| (&sum.labels, sum.latencies.counters));
        for (labels, counters) in live.chain(retired) {
            let (requests, violations) = (counters.data_errors(), counters.malformed);
            if requests > 0 || violations > 0 {
                let sum = sums.entry((labels.export.clone(), labels.queue));
                let sum = sum.or_default();
                sum.requests += requests;
                sum.violations += violations;
            }
        }
    }

    /// Returns the worker's own counters.
    pub fn counters(&self) -> WorkerCounters {
        let time = self.iterations.time.sums(self.clock.now());
        WorkerCounters {
            busy_iterations: self.iterations.busy_iterations.get(),
            empty_iterations: self.iterations.empty_iterations.get(),
            sleeps: self.iterations.sleeps.get(),
            messages: self.iterations.messages.get(),
            work_ns: self.clock.nanos(time.work),
            poll_found_ns: self.clock.nanos(time.poll_found),
            poll_empty_ns: self.clock.nanos(time.poll_empty),
            sleep_ns: self.clock.nanos(time.sleep),
            poll_suspensions: self.iterations.poll_suspensions.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use latency::{Operation, QueueTimeline, SlowRequest, Stage, Stamps};

    use super::*;

    fn labels(queue: u32) -> Labels {
        Labels {
            export: "d0".to_owned(),
            queue,
            ..Labels::default()
        }
    }

    #[test]
    fn io_that_waits_counts_once_in_the_class_of_its_error() {
        let options = bdev::RamOptions::default();
        let ram = Arc::new(bdev::Ram::create(options).unwrap());
        let disk = Arc::new(Disk::new("d", None, ram).unwrap());
        let record = DiskRecord::new(&disk);
        for kind in [IoErrorKind::NoSpace, IoErrorKind::Offline] {
            record.held(kind.into());
            record.finished_held(&Err(kind.into()));
            assert_eq!(record.errors[kind as usize].get(), 1, "{kind:?}");
        }
    }

    #[test]
    fn ended_queue_is_counted_once_beside_its_successor() {
        let ledger = Ledger::new(Clock::simulated().0);
        for round in 1..=3 {
            let timeline = QueueTimeline::new(labels(0), 1);
            ledger.register(timeline.record().clone());
            timeline.counters().count(Operation::Read, 512, round != 2);
            let counted = |ledger: &Ledger| ledger.snapshots()[0].latencies.counters;
            assert_eq!(counted(&ledger).requests(), round);
            ledger.retire(timeline.record());
            assert_eq!(counted(&ledger).requests(), round);
        }
        assert_eq!(ledger.snapshots()[0].latencies.counters.errors(), 1);
        ledger.forget("d0");
        assert_eq!(ledger.snapshots(), []);
    }

    #[test]
    fn failures_are_the_sum_of_a_queue_and_its_predecessors() {
        let ledger = Ledger::new(Clock::simulated().0);
        let failures = || {
            let mut sums = BTreeMap::new();
            ledger.add_failures(&mut sums);
            sums
        };
        let good = QueueTimeline::new(labels(1), 1);
        ledger.register(good.record().clone());
        for _ in 0..2 {
            let timeline = QueueTimeline::new(labels(0), 1);
            ledger.register(timeline.record().clone());
            timeline.counters().count(Operation::Write, 512, false);
            timeline.counters().count(Operation::Other, 0, false);
            timeline.counters().malformed.add(2);
            ledger.retire(timeline.record());
        }
        let expected = FailureCounters {
            requests: 2,
            violations: 4,
        };
        let expected = BTreeMap::from([(("d0".to_owned(), 0), expected)]);
        assert_eq!(failures(), expected);
        ledger.forget("d0");
        assert!(failures().is_empty());
    }

    /// A client may reconnect a thousand times a second, and each disconnect adds to the retained measurements.
    #[test]
    fn removed_queue_frees_its_slow_requests() {
        let (clock, time) = Clock::simulated();
        let ledger = Ledger::new(clock.clone());
        for round in 1..=200 {
            time.set(1_000_000 * round);
            let mut timeline = QueueTimeline::new(labels(0), 1);
            ledger.register(timeline.record().clone());
            let mut stamps = Stamps::noticed(Stamp(0));
            stamps.mark(Stage::Notified, clock.now());
            let slow = SlowRequest {
                operation: Operation::Read,
                tag: 0,
                unit: None,
                offset: 0,
                length: 512,
                stamps,
            };
            timeline.record_slow(&clock, slow);
            ledger.retire(timeline.record());
        }
        let [one] = ledger.snapshots().try_into().unwrap();
        let kept: Vec<u64> = one.slow.iter().map(|slow| slow.total_ns).collect();
        let slowest: Vec<u64> = (89..=200).rev().map(|round| 1_000_000 * round).collect();
        assert_eq!(kept, slowest);
    }

    #[test]
    fn queues_of_one_name_are_reported_together() {
        let ledger = Ledger::new(Clock::simulated().0);
        for in_flight in [3, 4] {
            let timeline = QueueTimeline::new(labels(1), 1);
            timeline.counters().in_flight.set(in_flight);
            timeline.counters().kicks.add(1);
            ledger.register(timeline.record().clone());
        }
        let [one] = ledger.snapshots().try_into().unwrap();
        assert_eq!((one.in_flight, one.latencies.counters.kicks), (7, 2));
    }

    #[test]
    fn words_of_different_owners_lie_apart() {
        assert_eq!(align_of::<IterationCounters>(), 128);
        assert_eq!(align_of::<DiskRecord>(), 128);
    }
}
