//! The polling window for one kind of client.

/// First number of near misses before a trial, and the largest.
const MISSES_FIRST: u32 = 4;
const MISSES_MAX: u32 = 256;
/// Idle times up to this multiple of the maximum are near misses.
const NEAR: u64 = 2;

/// A polling time that adapts to the idle times between two requests, in ticks.
///
/// The window doubles after an idle time in its second half or after a sleep within the maximum. It halves, and finally
/// closes, after a longer idle time.
///
/// A sleep makes the idle time longer than polling would have: by the wake-up, and by the client's own wait. Without a
/// trial, a closed window could therefore stay closed although polling would pay. After some near misses the window opens
/// fully for one idle time. A trial that finds no work doubles the number of near misses before the next one.
pub(super) struct Window {
    first: u64,
    max: u64,
    now: u64,
    trial: bool,
    /// Near misses before the next trial.
    misses_left: u32,
    misses: u32,
}

impl Window {
    /// Creates an open window of at most `max`. `first` is the smallest size above 0.
    pub fn new(max: u64, first: u64) -> Window {
        Window {
            first: first.min(max),
            max,
            now: max,
            trial: false,
            misses_left: MISSES_FIRST,
            misses: MISSES_FIRST,
        }
    }

    /// Returns the present size; 0: closed.
    #[inline]
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Returns the largest size.
    #[inline]
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Adapts to an idle time.
    #[inline]
    pub fn learn(&mut self, idle: u64) {
        if idle > self.max {
            self.miss(idle);
        } else {
            if std::mem::take(&mut self.trial) && idle <= self.now {
                self.misses = MISSES_FIRST;
            }
            if idle > self.now / 2 {
                self.now = (self.now * 2).clamp(self.first, self.max);
            }
        }
    }

    fn miss(&mut self, idle: u64) {
        if std::mem::take(&mut self.trial) {
            self.now = 0;
            self.misses = (self.misses * 2).min(MISSES_MAX);
            self.misses_left = self.misses;
        } else if self.now > 0 {
            self.now = match self.now / 2 {
                short if short < self.first => 0,
                half => half,
            };
            self.misses_left = self.misses;
        } else if idle <= self.max.saturating_mul(NEAR) {
            self.misses_left = self.misses_left.saturating_sub(1);
            if self.misses_left == 0 {
                self.now = self.max;
                self.trial = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window() -> Window {
        Window::new(50_000, 4_000)
    }

    fn closed() -> Window {
        let mut window = window();
        for _ in 0..4 {
            window.learn(1_000_000);
        }
        assert_eq!(window.now(), 0);
        window
    }

    #[test]
    fn long_idle_times_close_it_and_short_ones_open_it() {
        let mut window = window();
        for size in [25_000, 12_500, 6_250, 0, 0] {
            window.learn(1_000_000);
            assert_eq!(window.now(), size);
        }
        for size in [4_000, 8_000, 16_000, 32_000, 50_000, 50_000] {
            window.learn(49_000);
            assert_eq!(window.now(), size);
        }
    }

    #[test]
    fn late_work_widens_it_and_early_work_does_not() {
        let mut window = window();
        window.learn(60_000);
        for (idle, size) in [(12_500, 25_000), (12_501, 50_000), (1, 50_000)] {
            window.learn(idle);
            assert_eq!(window.now(), size);
        }
    }

    /// A closed-loop client with idle times of 60 us if the worker sleeps, and 20 us if it polls.
    #[test]
    fn trial_finds_a_client_that_only_sleeps_make_slow() {
        let mut window = closed();
        let mut slept = 0;
        while window.now() < 20_000 {
            window.learn(60_000);
            slept += 1;
        }
        assert_eq!(slept, 4);
        for _ in 0..1_000 {
            window.learn(20_000);
            assert_eq!(window.now(), 50_000);
        }
    }

    #[test]
    fn trials_without_a_result_become_rare() {
        let mut window = closed();
        let polled: usize = (0..10_000)
            .map(|_| {
                let polls = window.now() > 0;
                window.learn(90_000);
                usize::from(polls)
            })
            .sum();
        assert!((40..60).contains(&polled), "{polled} of 10,000");
        // A client that pauses for longer than a near miss causes no trial.
        let mut window = closed();
        for _ in 0..10_000 {
            window.learn(100_001);
            assert_eq!(window.now(), 0);
        }
    }

    #[test]
    fn window_without_a_maximum_stays_closed() {
        let mut window = Window::new(0, 4_000);
        for idle in [0, 1, 10_000] {
            window.learn(idle);
            assert_eq!(window.now(), 0);
        }
    }
}
