//! Sleeping through most of the time that a disk takes, while the worker polls.
//!
//! A worker that has I/O under way and nothing else to do knows about how long that lasts: where that is longer than it may
//! poll it sleeps until shortly before,
//! with its clients' notifications on, and polls for the rest. It wakes by itself, so waking costs no time of the
//! request's; an I/O that ends earlier wakes it too. What it expects follows the shorter ones of the waits it has seen, whatever
//! ended them: where work comes quickly it never sleeps. Figures: `docs/performance.md`.

use std::time::Duration;

use timeline::{Clock, Stamp};

/// So long before the expected end it is awake again, in nanoseconds: what waking takes, and some for chance.
const AWAKE_BEFORE_NS: u64 = 2_500;

/// Shorter naps are not worth their two system calls, in nanoseconds.
const SHORTEST_NS: u64 = 3_000;

/// By so much a wait that was longer than expected changes what is expected, in nanoseconds.
const STEP_NS: u64 = 40;

/// A wait that was shorter counts so much more: one in four is.
const SHORTER_COUNTS: u64 = 3;

pub(crate) struct Naps {
    clock: Clock,
    awake_before: u64,
    shortest: u64,
    step: u64,
    /// How long a wait lasts that is shorter than three out of four, in ticks.
    expected: u64,
    /// The wait that goes on, if there is one.
    began: Option<Stamp>,
}

impl Naps {
    pub(crate) fn new(clock: &Clock) -> Naps {
        let ticks = |ns: u64| clock.ticks(Duration::from_nanos(ns));
        Naps {
            awake_before: ticks(AWAKE_BEFORE_NS),
            shortest: ticks(SHORTEST_NS),
            step: ticks(STEP_NS),
            expected: 0,
            began: None,
            clock: clock.clone(),
        }
    }

    /// How long a wait lasts, as far as is known, in ticks.
    #[inline]
    pub(crate) fn expected(&self) -> u64 {
        self.expected
    }

    /// There is nothing to do but to wait for a disk: how long to sleep first. At most one nap per wait.
    #[inline]
    pub(crate) fn nap(&mut self, now: Stamp) -> Option<Duration> {
        if self.began.is_some() {
            return None;
        }
        self.began = Some(now);
        let nap = self.expected.checked_sub(self.awake_before)?;
        (nap >= self.shortest).then(|| Duration::from_nanos(self.clock.nanos(nap)))
    }

    /// There is work: a wait, if there was one, is over.
    #[inline]
    pub(crate) fn worked(&mut self, now: Stamp) {
        if let Some(began) = self.began.take() {
            self.learn(now.since(began));
        }
    }

    fn learn(&mut self, waited: u64) {
        self.expected = if waited > self.expected {
            self.expected + self.step
        } else {
            self.expected.saturating_sub(SHORTER_COUNTS * self.step)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naps() -> Naps {
        let (clock, _) = Clock::simulated();
        Naps::new(&clock)
    }

    /// A wait of so many nanoseconds, and the nap in it.
    fn wait(naps: &mut Naps, ns: u64) -> Option<Duration> {
        let nap = naps.nap(Stamp(1_000));
        assert_eq!(naps.nap(Stamp(1_000)), None, "one nap per wait");
        naps.worked(Stamp(1_000 + ns));
        nap
    }

    #[test]
    fn nap_ends_before_the_shorter_ones_of_the_waits_seen() {
        let mut naps = naps();
        assert_eq!(wait(&mut naps, 16_000), None, "nothing is known yet");
        for round in 0..4_000 {
            // Every fifth takes 16 us, the others up to twice as long.
            wait(&mut naps, 16_000 + round % 5 * 4_000);
        }
        let nap = wait(&mut naps, 20_000).expect("a nap").as_nanos() as u64;
        let end = nap + AWAKE_BEFORE_NS;
        assert!((15_000..21_000).contains(&end), "{end}");
    }

    #[test]
    fn waits_that_end_at_once_soon_bring_no_naps() {
        let mut naps = naps();
        for _ in 0..1_000 {
            wait(&mut naps, 40_000);
        }
        assert!(wait(&mut naps, 500).is_some());
        let tried = (0..1_000).position(|_| wait(&mut naps, 500).is_none());
        assert!(tried.is_some_and(|tried| tried < 320), "{tried:?}");
        // Work without a wait before it says nothing.
        let before = naps.expected;
        naps.worked(Stamp(9_000_000));
        assert_eq!(naps.expected, before);
    }

    #[test]
    fn disk_of_a_few_microseconds_is_polled_for() {
        let mut naps = naps();
        assert!((0..10_000).all(|_| wait(&mut naps, 5_000).is_none()));
    }
}
