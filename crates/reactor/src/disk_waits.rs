//! Estimates how long an otherwise idle worker waits for a disk, and whether clients wait for disks most of the time.
//!
//! The worker uses the estimate to choose between polling and sleeping. The estimate follows the shorter waits, for any
//! cause, so that a worker keeps polling where work arrives quickly. Measurements: `docs/performance.md`.
//!
//! A sleep makes the wait for a disk longer and, if clients send at a fixed rate, their part shorter. Disks then seem to limit
//! the clients until the worker polls. Such a trial is repeated after a number of waits, which doubles.

use std::time::Duration;

use latency::{Clock, Stamp};

/// Minimum adjustment of the estimate after a longer wait, in nanoseconds.
const STEP_MIN_NS: u64 = 40;
/// For a wait far from the estimate, the adjustment is the difference divided by this...
const STEP_PART: u64 = 32;
/// ...but at most this many nanoseconds, because one wait of seconds does not predict the next one.
const STEP_MAX_NS: u64 = 1_000;

/// Weight of a shorter wait; the estimate settles where one wait in four is shorter.
const SHORTER_COUNTS: u64 = 3;

/// Divisor of both sums. The quotient decays with each wait for a disk.
const SUM_PART: u64 = 16;
/// Divisor of the time that the worker waits for disks. Disks limit the clients if it waits for clients for at most the quotient.
const CLIENTS_PART: u64 = 2;
/// Limit on an idle time in the sum, in nanoseconds: a pause does not predict the next idle time.
const IDLE_MAX_NS: u64 = 100_000;

/// Minimum number of waits until disks are assumed to limit the clients again: the first and the largest.
const REST_FIRST: u32 = 16;
const REST_MAX: u32 = 256;
/// If disks limit the clients for fewer waits than this, the next rest is twice as long.
const TRIAL: u32 = 32;

pub(crate) struct DiskWaits {
    step_min: u64,
    step_max: u64,
    idle_max: u64,
    /// Decaying sum of the waits for disks, with the submissions before them.
    for_disks: u64,
    /// Decaying sum of the waits for clients before them.
    for_clients: u64,
    /// Wait for clients since the last wait for a disk.
    idle: u64,
    /// Disks limit the clients.
    limits: bool,
    /// Number of waits since the last change of `limits`.
    unchanged: u32,
    /// Duration of the rest, in waits.
    rest: u32,
    /// First quartile of the waits, in ticks.
    expected: u64,
    /// Start of the iteration before the current wait. Its I/Os are submitted before the wait begins.
    submitted: Option<Stamp>,
    /// Start of the current wait.
    began: Option<Stamp>,
}

impl DiskWaits {
    pub(crate) fn new(clock: &Clock) -> DiskWaits {
        let ticks = |ns: u64| clock.ticks(Duration::from_nanos(ns));
        DiskWaits {
            step_min: ticks(STEP_MIN_NS),
            step_max: ticks(STEP_MAX_NS),
            idle_max: ticks(IDLE_MAX_NS),
            for_disks: 0,
            for_clients: 0,
            idle: 0,
            limits: true,
            unchanged: TRIAL,
            rest: REST_FIRST,
            expected: 0,
            submitted: None,
            began: None,
        }
    }

    /// Returns the estimated duration of a wait, in ticks.
    #[inline]
    pub(crate) fn expected(&self) -> u64 {
        self.expected
    }

    /// Records an idle time without I/O in flight.
    #[inline]
    pub(crate) fn idled(&mut self, idle: u64) {
        self.idle = idle.saturating_add(self.idle).min(self.idle_max);
    }

    /// Returns true if clients send the next request soon after a response, so that faster disks would mean more requests.
    #[inline]
    pub(crate) fn limit_clients(&self) -> bool {
        self.limits
    }

    /// Decides whether disks limit the clients, after a wait.
    #[inline]
    fn compare(&mut self) {
        self.unchanged = self.unchanged.saturating_add(1);
        let limits = self.for_clients <= self.for_disks / CLIENTS_PART;
        if limits == self.limits || (limits && self.unchanged < self.rest) {
            return;
        }
        if self.limits {
            self.rest = match self.unchanged {
                ..TRIAL => (self.rest * 2).min(REST_MAX),
                _ => REST_FIRST,
            };
        }
        (self.limits, self.unchanged) = (limits, 0);
    }

    /// Records an iteration that began at `at` and left I/O in flight. The next `io_uring_enter` submits new I/Os, which can
    /// take as long as a fast disk does.
    #[inline]
    pub(crate) fn submits(&mut self, at: Stamp) {
        self.submitted = Some(at);
    }

    /// Restarts the current wait at the next call of [`DiskWaits::waited`].
    #[inline]
    pub(crate) fn begin_later(&mut self) {
        self.began = None;
    }

    /// Records that the worker only waits for a disk. Returns the duration of this wait so far, in ticks.
    #[inline]
    pub(crate) fn waited(&mut self, now: Stamp) -> u64 {
        now.since(*self.began.get_or_insert(now))
    }

    /// Records that there is work, which ends a wait.
    #[inline]
    pub(crate) fn worked(&mut self, now: Stamp) {
        let submitted = self.submitted.take();
        if let Some(began) = self.began.take() {
            self.learn(now.since(began), now.since(submitted.unwrap_or(began)));
        }
    }

    /// Learns from a wait and from its duration with the submission before it.
    fn learn(&mut self, waited: u64, whole: u64) {
        let decayed = |sum: u64| sum - sum / SUM_PART;
        self.for_disks = decayed(self.for_disks).saturating_add(whole);
        self.for_clients = decayed(self.for_clients) + std::mem::take(&mut self.idle);
        self.compare();
        let is_like_others = (self.expected / 2..=self.expected * 2).contains(&waited);
        let step = if is_like_others {
            self.step_min
        } else {
            (waited.abs_diff(self.expected) / STEP_PART).clamp(self.step_min, self.step_max)
        };
        self.expected = if waited > self.expected {
            self.expected.saturating_add(step)
        } else {
            self.expected.saturating_sub(SHORTER_COUNTS * step)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits() -> DiskWaits {
        let (clock, _) = Clock::simulated();
        DiskWaits::new(&clock)
    }

    /// Simulates a wait of `ns` nanoseconds.
    fn wait(waits: &mut DiskWaits, ns: u64) {
        assert_eq!(waits.waited(Stamp(1_000)), 0);
        waits.worked(Stamp(1_000 + ns));
    }

    #[test]
    fn expected_wait_follows_the_shorter_waits() {
        let mut waits = waits();
        for round in 0..4_000 {
            // One wait in five takes 16 us, the others up to twice as long.
            wait(&mut waits, 16_000 + round % 5 * 4_000);
        }
        assert!(
            (15_000..21_000).contains(&waits.expected()),
            "{}",
            waits.expected()
        );
    }

    #[test]
    fn slow_disk_is_detected_after_a_hundred_waits() {
        let mut waits = waits();
        wait(&mut waits, 1_000_000_000);
        assert!(waits.expected() <= 1_000);
        for _ in 0..400 {
            wait(&mut waits, 100_000);
        }
        assert!(waits.expected() > 60_000, "{}", waits.expected());
    }

    #[test]
    fn disks_limit_clients_that_respond_quickly() {
        let mut waits = waits();
        assert!(waits.limit_clients(), "not known yet");
        let mut serve = |idle, ns| {
            waits.idled(idle);
            wait(&mut waits, ns);
            waits.limit_clients()
        };
        assert!((0..100).all(|_| serve(20_000, 45_000)));
        // 10,000 requests a second are offered: 55 us pass between a response and the next request.
        assert!(
            (0..100)
                .map(|_| serve(55_000, 45_000))
                .skip(20)
                .all(|limit| !limit)
        );
        assert!(
            (0..100)
                .map(|_| serve(20_000, 45_000))
                .skip(40)
                .all(|limit| limit)
        );
        // The effect of a pause is over soon.
        serve(1_000_000_000_000, 45_000);
        assert!(
            (0..100)
                .map(|_| serve(20_000, 45_000))
                .skip(16)
                .all(|limit| limit)
        );
    }

    /// 10,000 requests a second are offered to a disk that takes 43 us, or 70 us with a sleep.
    #[test]
    fn sleeps_do_not_make_a_disk_limit_the_clients() {
        let mut waits = waits();
        let polled = (0..10_000).filter(|_| {
            let polls = waits.limit_clients();
            let [idle, ns] = if polls {
                [55_000, 43_000]
            } else {
                [28_000, 70_000]
            };
            waits.idled(idle);
            wait(&mut waits, ns);
            polls
        });
        let polled = polled.count();
        assert!((10..1_000).contains(&polled), "{polled} of 10,000");
    }

    #[test]
    fn submission_is_part_of_the_wait_for_a_disk() {
        let mut waits = waits();
        for _ in 0..100 {
            waits.idled(17_000);
            waits.submits(Stamp(0));
            waits.waited(Stamp(18_000));
            waits.worked(Stamp(43_000));
        }
        assert!(waits.limit_clients());
        assert!(waits.expected() <= 25_000, "{}", waits.expected());
    }

    #[test]
    fn waits_that_end_at_once_are_soon_expected_to() {
        let mut waits = waits();
        (0..1_000).for_each(|_| wait(&mut waits, 40_000));
        (0..320).for_each(|_| wait(&mut waits, 500));
        assert!(waits.expected() < 3_000, "{}", waits.expected());
        // Work without a preceding wait does not change the estimate.
        let before = waits.expected();
        waits.worked(Stamp(9_000_000));
        assert_eq!(waits.expected(), before);
        assert_eq!(waits.waited(Stamp(9_000_000)), 0);
        assert_eq!(waits.waited(Stamp(9_000_700)), 700);
    }
}
