//! History of all disks: the last hour by second and the last day by minute. Failures of queues and disks in the last hour.
//!
//! A thread reads the counters once a second while there is I/O. After two seconds without I/O it waits until a worker wakes up, so an idle
//! daemon has no timer. The data are lost when the daemon ends.

mod failures;
mod series;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use ::control::{DiskFailures, DiskHistory, HistoryInterval, QueueFailures};
use block::IoKind;
use latency::SparseHistogram;
use reactor::{DiskCounters, Pool};

use self::failures::{Failures, FailuresOfDisks, OfQueues};
use self::series::{BLOCK, Sample, Series};

/// Hour of seconds, in blocks.
const SECOND_BLOCKS: u64 = 60;
/// Day of minutes, in blocks.
const MINUTE_BLOCKS: u64 = 24;
/// Smallest 99th percentile of a slow disk, in nanoseconds.
const SLOW_NS: u64 = 500_000_000;
/// Number of the last seconds with requests that decide whether a disk is slow, and the age of the oldest of them.
const SLOW_SECONDS: usize = 5;
const SLOW_WINDOW: u64 = 30;
/// Sum of the 99th percentiles of fewer seconds that suffice.
const SLOW_SUM_NS: u64 = SLOW_SECONDS as u64 * 1_000_000_000;
/// Index of the 99th percentile in a sample.
const P99: usize = 4;
/// Seconds without I/O after which the thread waits for a worker.
const IDLE_SECONDS: u32 = 2;

/// Counters of a disk at one time.
#[derive(Clone, Debug, Default)]
struct Counted {
    reads: u64,
    writes: u64,
    bytes: u64,
    errors: u64,
    in_flight: u64,
    total: SparseHistogram,
}

impl Counted {
    fn new(counters: &DiskCounters, total: SparseHistogram) -> Counted {
        let mut counted = Counted {
            errors: counters.errors.iter().sum(),
            in_flight: counters.in_flight,
            total,
            ..Counted::default()
        };
        for kind in IoKind::ALL {
            let one = counters.of(kind);
            match kind {
                IoKind::Read => counted.reads += one.requests,
                _ => counted.writes += one.requests,
            }
            counted.bytes += one.bytes;
        }
        counted
    }

    /// Returns true if I/O has arrived or completed since `earlier`, or is in flight.
    fn is_active(&self, earlier: &Counted) -> bool {
        let words = |one: &Counted| (one.reads, one.writes, one.errors, one.total.count);
        self.in_flight > 0 || words(self) != words(earlier)
    }

    /// Returns rates, quantiles and errors of the time since `earlier`.
    fn since(&self, earlier: &Counted, seconds: u64) -> Sample {
        let rate = |now: u64, then: u64| now.saturating_sub(then).div_ceil(seconds.max(1));
        let total = self.total.since(&earlier.total);
        [
            rate(self.reads, earlier.reads),
            rate(self.writes, earlier.writes),
            rate(self.bytes, earlier.bytes),
            total.quantile_ns(0.5),
            total.quantile_ns(0.99),
            self.errors.saturating_sub(earlier.errors),
        ]
    }
}

/// History of one disk.
#[derive(Debug)]
struct OfDisk {
    seconds: Series,
    minutes: Series,
    /// Counters of the last sample.
    last: Counted,
    /// Counters at the start of the present minute.
    minute: Counted,
}

#[derive(Debug, Default)]
struct Store {
    disks: BTreeMap<String, OfDisk>,
    /// Second of the last sample, since the start.
    second: u64,
}

impl Store {
    /// Adds the counters of all disks at a second, with activity in the last `seconds`. Returns true if there was I/O.
    fn add(&mut self, second: u64, seconds: u64, counted: BTreeMap<String, Counted>) -> bool {
        let (minute, last_minute) = (second / BLOCK as u64, self.second / BLOCK as u64);
        self.second = second;
        self.disks.retain(|name, _| counted.contains_key(name));
        let mut is_active = false;
        for (name, now) in counted {
            let disk = self.disks.entry(name).or_insert_with(|| OfDisk {
                seconds: Series::new(SECOND_BLOCKS),
                minutes: Series::new(MINUTE_BLOCKS),
                last: Counted::default(),
                minute: Counted::default(),
            });
            if minute != last_minute {
                // The sample belongs to the minute that has ended.
                disk.minutes
                    .add(last_minute, &disk.last.since(&disk.minute, BLOCK as u64));
                disk.minute = disk.last.clone();
            }
            is_active |= now.is_active(&disk.last);
            if now.total.count < disk.last.total.count {
                // A queue has ended, and its measurements are no longer in the sum.
                disk.last.total = SparseHistogram::default();
                disk.minute.total = SparseHistogram::default();
            }
            disk.seconds.add(second, &now.since(&disk.last, seconds));
            disk.seconds.expire(second);
            disk.minutes.expire(minute);
            disk.last = now;
        }
        is_active
    }
}

/// History of all disks of a daemon.
#[derive(Debug)]
pub(crate) struct History {
    started: Instant,
    store: Mutex<Store>,
    failures: Mutex<Failures>,
    of_disks: Mutex<FailuresOfDisks>,
}

impl History {
    pub(crate) fn new(started: Instant) -> Arc<History> {
        Arc::new(History {
            started,
            store: Mutex::default(),
            failures: Mutex::default(),
            of_disks: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the failures of queues up to now, and returns those of the last hour.
    pub(crate) fn failures(&self, counters: impl FnOnce() -> OfQueues) -> Vec<QueueFailures> {
        let failures = self.failures.lock();
        let mut failures = failures.unwrap_or_else(PoisonError::into_inner);
        let second = self.started.elapsed().as_secs();
        // Counters that are read under the lock never decrease from one caller to the next.
        failures.add(second, &counters());
        failures.recent(second)
    }

    /// Counts the failed I/Os of disks up to now. Returns the counters, and by disk the failures of the last hour.
    pub(crate) fn disk_failures(
        &self,
        counters: impl FnOnce() -> BTreeMap<String, DiskCounters>,
    ) -> (
        BTreeMap<String, DiskCounters>,
        BTreeMap<String, Vec<DiskFailures>>,
    ) {
        let of_disks = self.of_disks.lock();
        let mut of_disks = of_disks.unwrap_or_else(PoisonError::into_inner);
        let second = self.started.elapsed().as_secs();
        // As above.
        let counters = counters();
        of_disks.add(second, &counters);
        (counters, of_disks.recent(second))
    }

    /// Returns the slow disks, each with the least 99th percentile of its last seconds, rounded down to 500 ms times a power of two: a value
    /// that changes each second would change the text of the problem.
    pub(crate) fn slow_disks(&self) -> BTreeMap<String, u64> {
        let first = self.started.elapsed().as_secs().saturating_sub(SLOW_WINDOW);
        let store = self.lock();
        let slow = store.disks.iter().filter_map(|(name, disk)| {
            let samples = disk.seconds.since(first);
            let times = samples.iter().rev().map(|(_, sample)| sample[P99]);
            let last: Vec<u64> = times.filter(|ns| *ns > 0).take(SLOW_SECONDS).collect();
            let least = *last.iter().min()?;
            // I/Os that take several seconds complete in few seconds of the window.
            let enough = last.len() == SLOW_SECONDS || last.iter().sum::<u64>() >= SLOW_SUM_NS;
            if !enough || least < SLOW_NS {
                return None;
            }
            Some((name.clone(), SLOW_NS << (least / SLOW_NS).ilog2()))
        });
        slow.collect()
    }

    /// Returns the history of a disk, without idle intervals.
    pub(crate) fn of(&self, disk: &str, interval: HistoryInterval) -> DiskHistory {
        let store = self.lock();
        let found = store.disks.get(disk);
        let (seconds, blocks, series) = match interval {
            HistoryInterval::Second => (1, SECOND_BLOCKS, found.map(|disk| &disk.seconds)),
            HistoryInterval::Minute => (60, MINUTE_BLOCKS, found.map(|disk| &disk.minutes)),
        };
        let mut samples = series.map(Series::samples).unwrap_or_default();
        if let (HistoryInterval::Minute, Some(disk)) = (interval, found) {
            let is_over = self.started.elapsed().as_secs() / 60 > store.second / 60;
            let present = match is_over {
                true => 60,
                false => store.second % 60 + 1,
            };
            let sample = disk.last.since(&disk.minute, present);
            if sample != Sample::default() {
                samples.push((store.second / 60, sample));
            }
        }
        drop(store);
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = unix.map_or(0, |now| now.as_secs());
        let elapsed = self.started.elapsed().as_secs();
        let at = |interval: u64| now.saturating_sub(elapsed.saturating_sub(interval * seconds));
        let from = now.saturating_sub(elapsed.min(blocks * BLOCK as u64 * seconds));
        samples.retain(|(interval, _)| at(*interval) >= from);
        let column = |index: usize| samples.iter().map(|(_, sample)| sample[index]).collect();
        DiskHistory {
            disk: disk.to_owned(),
            interval_seconds: seconds,
            from,
            to: now,
            at: samples.iter().map(|(interval, _)| at(*interval)).collect(),
            reads: column(0),
            writes: column(1),
            bytes: column(2),
            p50_ns: column(3),
            p99_ns: column(4),
            errors: column(5),
        }
    }
}

/// Reads the counters of all disks. The times of requests are sums over all queues and connections, possibly thousands. They are read again
/// only if I/O has completed since the sample before the last one: the times of an I/O are counted soon after it.
#[derive(Default)]
struct Reader {
    used: BTreeMap<String, DiskCounters>,
    totals: BTreeMap<String, SparseHistogram>,
    /// The counters have not changed between the last two samples.
    is_settled: bool,
}

impl Reader {
    fn read(
        &mut self,
        names: Vec<String>,
        used: BTreeMap<String, DiskCounters>,
        totals: impl FnOnce() -> BTreeMap<String, SparseHistogram>,
    ) -> BTreeMap<String, Counted> {
        let is_unchanged = used == self.used;
        if !(is_unchanged && self.is_settled) {
            self.totals = totals();
        }
        (self.used, self.is_settled) = (used, is_unchanged);
        let counted = names.into_iter().map(|name| {
            let counters = self.used.get(&name).copied().unwrap_or_default();
            let total = self.totals.get(&name).cloned().unwrap_or_default();
            (name, Counted::new(&counters, total))
        });
        counted.collect()
    }
}

/// Thread that fills a history. Dropping it ends the thread.
pub(crate) struct Sampler {
    stop: Arc<AtomicBool>,
    pool: Arc<Pool>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// Starts the thread. `disks` returns the names of the present disks.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start(
        history: Arc<History>,
        pool: Arc<Pool>,
        disks: impl Fn() -> Vec<String> + Send + 'static,
    ) -> std::io::Result<Sampler> {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, of_thread) = (stop.clone(), pool.clone());
        let thread = std::thread::Builder::new()
            .name("history".to_owned())
            .spawn(move || sample(&history, &of_thread, &disks, &stopped))?;
        Ok(Sampler {
            stop,
            pool,
            thread: Some(thread),
        })
    }
}

fn sample(history: &History, pool: &Pool, disks: &dyn Fn() -> Vec<String>, stopped: &AtomicBool) {
    let mut idle_seconds = 0;
    let mut last = 0;
    let mut reader = Reader::default();
    while !stopped.load(Ordering::Acquire) {
        let elapsed = history.started.elapsed();
        let to_next = Duration::from_secs(elapsed.as_secs() + 1).saturating_sub(elapsed);
        let is_idle = idle_seconds > IDLE_SECONDS && !pool.always_polls();
        match idle_seconds {
            _ if is_idle => pool.activity().wait(None),
            // For I/O of workers that are awake now. They report nothing.
            IDLE_SECONDS => pool.activity().wait(Some(Duration::from_secs(1))),
            _ => std::thread::park_timeout(to_next),
        }
        let second = history.started.elapsed().as_secs();
        if second == last {
            idle_seconds = 0;
            continue;
        }
        let seconds = match is_idle {
            true => 1,
            false => second - last,
        };
        last = second;
        history.failures(|| pool.failures());
        let (used, _) = history.disk_failures(|| pool.disks());
        let counted = reader.read(disks(), used, || pool.totals());
        idle_seconds = match history.lock().add(second, seconds, counted) || is_idle {
            true => 0,
            false => idle_seconds + 1,
        };
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.pool.activity().wake();
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("history thread panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(reads: u64, total: &SparseHistogram) -> BTreeMap<String, Counted> {
        let counted = Counted {
            reads,
            bytes: reads * 4096,
            total: total.clone(),
            ..Counted::default()
        };
        BTreeMap::from([("d".to_owned(), counted)])
    }

    fn history(store: Store) -> History {
        History {
            started: Instant::now() - Duration::from_secs(store.second),
            store: Mutex::new(store),
            failures: Mutex::default(),
            of_disks: Mutex::default(),
        }
    }

    #[test]
    fn history_has_rates_and_quantiles_by_second_and_minute() {
        let mut store = Store::default();
        let mut total = SparseHistogram::default();
        for second in 1..=150 {
            total.merge(&SparseHistogram::from_nanos(
                [50_000; 99].into_iter().chain([9_000_000]),
            ));
            assert!(store.add(second, 1, counted(100 * second, &total)));
        }
        // Two idle minutes.
        for second in 151..=270 {
            assert!(!store.add(second, 1, counted(15_000, &total)));
        }
        let history = history(store);
        let seconds = history.of("d", HistoryInterval::Second);
        assert_eq!((seconds.at.len(), seconds.interval_seconds), (150, 1));
        assert_eq!(seconds.to - seconds.from, 270);
        assert_eq!(seconds.at[0], seconds.from + 1);
        let near = |found: u64, wanted: f64| (found as f64 / wanted - 1.0).abs() < 0.1;
        assert!(
            seconds.reads.iter().all(|reads| near(*reads, 100.0)),
            "{seconds:?}"
        );
        assert!(seconds.bytes.iter().all(|bytes| near(*bytes, 409_600.0)));
        assert!(seconds.p50_ns.iter().all(|ns| near(*ns, 50_000.0)));
        assert!(seconds.p99_ns.iter().all(|ns| near(*ns, 50_000.0)));
        let minutes = history.of("d", HistoryInterval::Minute);
        assert_eq!(minutes.at.len(), 3, "{minutes:?}");
        assert!(
            near(minutes.reads[1], 100.0) && near(minutes.reads[2], 52.0),
            "{minutes:?}"
        );
        assert!(history.of("other", HistoryInterval::Second).at.is_empty());
    }

    #[test]
    fn disk_is_slow_after_five_seconds_with_slow_requests() {
        let mut store = Store::default();
        let mut total = SparseHistogram::default();
        for second in 1..=5 {
            total.merge(&SparseHistogram::from_nanos([1_100_000_000]));
            store.add(3 * second, 1, counted(second, &total));
            let history = history(std::mem::take(&mut store));
            let slow = history.slow_disks();
            let expected = (second == 5).then_some(1_000_000_000);
            assert_eq!(slow.get("d").copied(), expected, "{second}");
            store = history.store.into_inner().unwrap();
        }
        // One fast second ends it, and so does a pause.
        store.second = 60;
        let later = history(std::mem::take(&mut store));
        assert!(later.slow_disks().is_empty());
        store = later.store.into_inner().unwrap();
        total.merge(&SparseHistogram::from_nanos([1_000_000]));
        store.add(16, 1, counted(6, &total));
        assert!(history(store).slow_disks().is_empty());
    }

    #[test]
    fn disk_is_slow_after_few_requests_that_take_five_seconds_in_sum() {
        for (nanos, slow_at) in [(3_300_000_000, 2), (7_000_000_000, 1)] {
            let mut store = Store::default();
            let mut total = SparseHistogram::default();
            for second in 1..=slow_at {
                total.merge(&SparseHistogram::from_nanos([nanos]));
                store.add(7 * second, 1, counted(second, &total));
                let history = history(std::mem::take(&mut store));
                let is_slow = history.slow_disks().contains_key("d");
                assert_eq!(is_slow, second == slow_at, "{nanos} {second}");
                store = history.store.into_inner().unwrap();
            }
        }
    }

    #[test]
    fn removed_disk_and_ended_queue_leave_no_wrong_values() {
        let mut store = Store::default();
        let much = SparseHistogram::from_nanos([1000; 50]);
        store.add(1, 1, counted(50, &much));
        // The client has reconnected: the measurements of its queue start again.
        store.add(2, 1, counted(53, &SparseHistogram::from_nanos([7000; 3])));
        let history = history(store);
        let found = history.of("d", HistoryInterval::Second);
        assert_eq!(found.reads[1], 3);
        assert!((6400..=7600).contains(&found.p50_ns[1]), "{found:?}");
        let mut store = history.store.into_inner().unwrap();
        store.add(3, 1, BTreeMap::new());
        assert!(store.disks.is_empty());
    }

    #[test]
    fn times_of_requests_are_read_twice_after_the_last_io() {
        let mut reader = Reader::default();
        let mut read = |reads| {
            let mut counters = DiskCounters::default();
            counters.kinds[IoKind::Read as usize].requests = reads;
            let mut was_read = false;
            let used = BTreeMap::from([("d".to_owned(), counters)]);
            let counted = reader.read(vec!["d".to_owned()], used, || {
                was_read = true;
                BTreeMap::new()
            });
            assert_eq!(counted["d"].reads, reads);
            was_read
        };
        assert_eq!(
            [1, 2, 2, 2, 2, 3, 3, 3].map(&mut read),
            [true, true, true, false, false, true, true, false]
        );
    }
}
