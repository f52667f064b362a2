//! How long disks keep a worker waiting that has nothing else to do.
//!
//! By it a worker decides whether to poll through such a wait or to sleep. What is expected follows the shorter ones of the
//! waits seen, whatever ended them: where work comes quickly a worker goes on polling. Figures: `docs/performance.md`.

use std::time::Duration;

use latency::{Clock, Stamp};

/// By so much a wait that was longer than expected changes what is expected, in nanoseconds.
const STEP_MIN_NS: u64 = 40;
/// If it was far longer the step is this part of the difference...
const STEP_PART: u64 = 32;
/// ...but at most so much: one wait of seconds says little of the next.
const STEP_MAX_NS: u64 = 1_000;

/// A wait that was shorter counts so much more: one in four is.
const SHORTER_COUNTS: u64 = 3;

pub(crate) struct DiskWaits {
    step_min: u64,
    step_max: u64,
    /// How long a wait lasts that is shorter than three out of four, in ticks.
    expected: u64,
    /// The wait that goes on, if there is one.
    began: Option<Stamp>,
}

impl DiskWaits {
    pub(crate) fn new(clock: &Clock) -> DiskWaits {
        let ticks = |ns: u64| clock.ticks(Duration::from_nanos(ns));
        DiskWaits {
            step_min: ticks(STEP_MIN_NS),
            step_max: ticks(STEP_MAX_NS),
            expected: 0,
            began: None,
        }
    }

    /// How long a wait lasts, as far as is known, in ticks.
    #[inline]
    pub(crate) fn expected(&self) -> u64 {
        self.expected
    }

    /// There is nothing to do but to wait for a disk: for how long has there been nothing else, in ticks?
    #[inline]
    pub(crate) fn waited(&mut self, now: Stamp) -> u64 {
        now.since(*self.began.get_or_insert(now))
    }

    /// There is work: a wait, if there was one, is over.
    #[inline]
    pub(crate) fn worked(&mut self, now: Stamp) {
        if let Some(began) = self.began.take() {
            self.learn(now.since(began));
        }
    }

    fn learn(&mut self, waited: u64) {
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

    /// A wait of so many nanoseconds.
    fn wait(waits: &mut DiskWaits, ns: u64) {
        assert_eq!(waits.waited(Stamp(1_000)), 0);
        waits.worked(Stamp(1_000 + ns));
    }

    #[test]
    fn what_is_expected_follows_the_shorter_ones_of_the_waits_seen() {
        let mut waits = waits();
        for round in 0..4_000 {
            // Every fifth takes 16 us, the others up to twice as long.
            wait(&mut waits, 16_000 + round % 5 * 4_000);
        }
        assert!(
            (15_000..21_000).contains(&waits.expected()),
            "{}",
            waits.expected()
        );
    }

    #[test]
    fn slow_disk_is_known_after_a_hundred_waits_not_after_one() {
        let mut waits = waits();
        wait(&mut waits, 1_000_000_000);
        assert!(waits.expected() <= 1_000);
        for _ in 0..400 {
            wait(&mut waits, 100_000);
        }
        assert!(waits.expected() > 60_000, "{}", waits.expected());
    }

    #[test]
    fn waits_that_end_at_once_are_soon_expected_to() {
        let mut waits = waits();
        (0..1_000).for_each(|_| wait(&mut waits, 40_000));
        (0..320).for_each(|_| wait(&mut waits, 500));
        assert!(waits.expected() < 3_000, "{}", waits.expected());
        // Work without a wait before it says nothing.
        let before = waits.expected();
        waits.worked(Stamp(9_000_000));
        assert_eq!(waits.expected(), before);
        assert_eq!(waits.waited(Stamp(9_000_000)), 0);
        assert_eq!(waits.waited(Stamp(9_000_700)), 700);
    }
}
