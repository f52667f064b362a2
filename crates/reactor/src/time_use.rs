//! Accounts a worker's time: work, polling with a result, polling without one, sleep.
//!
//! The worker adds each period to its own counters when it ends. Other threads read them at any time. A sleep and a long
//! poll are included before they end.

use std::time::Duration;

use latency::{Clock, Stamp, Word};

/// Polling time after which a poll that still runs is counted as polling without a result.
const LONG_POLL: Duration = Duration::from_millis(1);
/// Marks the word of sleeps while the worker sleeps.
const ASLEEP: u64 = 1;

/// Counters of one worker, in ticks. The worker writes them.
#[derive(Debug, Default)]
pub(crate) struct TimeWords {
    work: Word,
    poll_found: Word,
    poll_empty: Word,
    /// Twice the time asleep. While the worker sleeps: twice the stamp that the time asleep counts from, plus [`ASLEEP`].
    sleep: Word,
}

/// Durations by activity since the start, in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TimeSums {
    pub work: u64,
    pub poll_found: u64,
    pub poll_empty: u64,
    pub sleep: u64,
}

impl TimeWords {
    /// Reads the counters, on any thread.
    pub fn sums(&self, now: Stamp) -> TimeSums {
        let sleep = self.sleep.get();
        TimeSums {
            work: self.work.get(),
            poll_found: self.poll_found.get(),
            poll_empty: self.poll_empty.get(),
            sleep: match sleep & ASLEEP {
                0 => sleep / 2,
                _ => now.since(Stamp(sleep / 2)),
            },
        }
    }
}

#[derive(Clone, Copy)]
enum Activity {
    Working,
    Polling,
    Sleeping,
}

/// Present activity of a worker.
pub(crate) struct TimeUse {
    activity: Activity,
    since: Stamp,
    long_poll: u64,
}

impl TimeUse {
    pub fn new(clock: &Clock) -> TimeUse {
        TimeUse {
            activity: Activity::Working,
            since: clock.now(),
            long_poll: clock.ticks(LONG_POLL),
        }
    }

    fn passed(&mut self, now: Stamp) -> u64 {
        let passed = now.since(self.since);
        self.since = now;
        passed
    }

    /// Records an iteration that began at `noticed`.
    #[inline]
    pub fn iterated(&mut self, worked: bool, noticed: Stamp, words: &TimeWords) {
        match self.activity {
            Activity::Polling if worked => words.poll_found.add(self.passed(noticed)),
            Activity::Polling if noticed.since(self.since) < self.long_poll => return,
            Activity::Polling => words.poll_empty.add(self.passed(noticed)),
            Activity::Working | Activity::Sleeping => words.work.add(self.passed(noticed)),
        }
        self.activity = match worked {
            true => Activity::Working,
            false => Activity::Polling,
        };
    }

    /// Records that the worker sleeps from `now` on.
    #[inline]
    pub fn sleeping(&mut self, now: Stamp, words: &TimeWords) {
        let word = match self.activity {
            Activity::Polling => &words.poll_empty,
            Activity::Working | Activity::Sleeping => &words.work,
        };
        word.add(self.passed(now));
        let slept = words.sleep.get() / 2;
        words.sleep.set(now.since(Stamp(slept)) * 2 + ASLEEP);
        self.activity = Activity::Sleeping;
    }

    /// Records a wake-up, unless the worker did not sleep.
    #[inline]
    pub fn woke(&mut self, now: Stamp, words: &TimeWords) {
        if let Activity::Sleeping = self.activity {
            let counts_from = Stamp(words.sleep.get() / 2);
            words.sleep.set(now.since(counts_from) * 2);
            self.since = now;
            self.activity = Activity::Working;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> (TimeUse, TimeWords, latency::SimulatedTime) {
        let (clock, time) = Clock::simulated();
        time.set(1_000_000);
        (TimeUse::new(&clock), TimeWords::default(), time)
    }

    fn sums(words: &TimeWords, now: u64) -> [u64; 4] {
        let sums = words.sums(Stamp(now));
        [sums.work, sums.poll_found, sums.poll_empty, sums.sleep]
    }

    #[test]
    fn each_period_is_counted_once() {
        let (mut time, words, _) = account();
        let at = |ns: u64| Stamp(1_000_000 + ns);
        time.iterated(true, at(100), &words);
        time.iterated(false, at(300), &words);
        time.iterated(false, at(350), &words);
        time.iterated(true, at(400), &words);
        assert_eq!(sums(&words, 1_000_400), [300, 100, 0, 0]);
        time.iterated(false, at(500), &words);
        time.iterated(false, at(600), &words);
        time.sleeping(at(700), &words);
        assert_eq!(sums(&words, 1_000_700), [400, 100, 200, 0]);
        assert_eq!(sums(&words, 1_005_700), [400, 100, 200, 5_000]);
        time.woke(at(10_700), &words);
        assert_eq!(sums(&words, 1_020_000), [400, 100, 200, 10_000]);
        time.iterated(true, at(10_700), &words);
        time.sleeping(at(10_900), &words);
        time.woke(at(11_000), &words);
        assert_eq!(sums(&words, 1_020_000), [600, 100, 200, 10_100]);
        // An empty wake-up, and a sleep without polling.
        time.iterated(false, at(11_000), &words);
        time.sleeping(at(11_050), &words);
        assert_eq!(sums(&words, 1_011_050), [600, 100, 250, 10_100]);
    }

    #[test]
    fn poll_without_an_end_is_counted_while_it_runs() {
        let (mut time, words, _) = account();
        for ms in 0..=10 {
            time.iterated(false, Stamp(1_000_000 + ms * 1_000_000), &words);
        }
        assert_eq!(sums(&words, 11_000_000), [0, 0, 10_000_000, 0]);
    }
}
