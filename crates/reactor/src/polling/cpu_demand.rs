//! Detects that another thread wants the worker's CPU, and suspends polling meanwhile.
//!
//! A worker that polls while another thread is ready on its CPU waits on the run queue itself: after its time slice, or
//! after a wake-up. The worker reads its run delay at intervals while it polls. Delays add up, and a part of the elapsed
//! time is subtracted from their sum. If the sum exceeds a limit, polling is suspended. A thread that needs the CPU all
//! the time suspends polling within about three of its time slices. Daemons that run for a few milliseconds now and then do
//! not suspend it. Each further detection makes the pause four times longer. A pause that was followed by an undisturbed
//! time of the same length resets it.
//!
//! Waits for the CPU quota of a control group are part of the run delay.

use std::time::Duration;

use latency::{Clock, Stamp};
use uring::RunDelay;

/// Minimum interval between two readings.
const INTERVAL: Duration = Duration::from_millis(5);
/// Divisor of the elapsed time. The thread may wait for the CPU for as long as the quotient.
const PART: u64 = 16;
/// Wait for the CPU beyond that part, which suspends polling. The kernel's time slice is 3 ms.
const WAITED_MAX: Duration = Duration::from_millis(7);
/// Run delay of one wake-up on a CPU that no other thread wants.
const WAKE_UP: Duration = Duration::from_micros(5);
const PAUSE_FIRST: Duration = Duration::from_millis(32);
const PAUSE_GROWTH: u64 = 4;
const PAUSE_MAX: Duration = Duration::from_secs(2);

enum State {
    /// Polling is permitted since this time.
    Permitted(Stamp),
    /// Another thread wants the CPU. Polling is suspended until this time.
    Suspended(Stamp),
}

/// Demand of other threads for the worker's CPU. Times are in ticks.
pub(super) struct CpuDemand {
    interval: u64,
    wake_up: u64,
    waited_max: u64,
    /// Wait for the CPU beyond the permitted part of the time.
    waited: u64,
    pause: u64,
    pause_first: u64,
    pause_max: u64,
    clock: Clock,
    state: State,
    /// Last reading of the present interval.
    last: Option<(Stamp, RunDelay)>,
}

impl CpuDemand {
    pub fn new(clock: &Clock) -> CpuDemand {
        CpuDemand {
            interval: clock.ticks(INTERVAL),
            wake_up: clock.ticks(WAKE_UP),
            waited_max: clock.ticks(WAITED_MAX),
            waited: 0,
            pause: clock.ticks(PAUSE_FIRST),
            pause_first: clock.ticks(PAUSE_FIRST),
            pause_max: clock.ticks(PAUSE_MAX),
            clock: clock.clone(),
            state: State::Permitted(Stamp(0)),
            last: None,
        }
    }

    /// Returns true while polling is suspended, as of the last call of [`CpuDemand::permits`].
    #[inline]
    pub fn is_suspended(&self) -> bool {
        matches!(self.state, State::Suspended(_))
    }

    /// Returns true if the worker may poll. Ends a pause that is over.
    #[inline]
    pub fn permits(&mut self, now: Stamp) -> bool {
        match self.state {
            State::Permitted(_) => true,
            State::Suspended(until) if now < until => false,
            State::Suspended(_) => {
                self.state = State::Permitted(now);
                self.last = None;
                true
            }
        }
    }

    /// Returns true if the worker, which polls, must read its run delay.
    #[inline]
    pub fn is_reading_due(&self, now: Stamp) -> bool {
        self.last
            .is_none_or(|(at, _)| now.since(at) >= self.interval)
    }

    /// Records a reading. Returns true if it suspends polling.
    #[cold]
    pub fn read(&mut self, now: Stamp, delay: RunDelay) -> bool {
        let (Some((at, before)), State::Permitted(since)) =
            (self.last.replace((now, delay)), &self.state)
        else {
            return false;
        };
        let waited = delay.waited_ns.saturating_sub(before.waited_ns);
        let waited = self.clock.ticks(Duration::from_nanos(waited));
        let woken = delay.runs.saturating_sub(before.runs);
        let waited = waited.saturating_sub(woken.saturating_mul(self.wake_up));
        self.waited = (self.waited + waited).saturating_sub(now.since(at) / PART);
        if self.waited > self.waited_max {
            self.waited = 0;
            self.state = State::Suspended(Stamp(now.0.saturating_add(self.pause)));
            self.pause = (self.pause * PAUSE_GROWTH).min(self.pause_max);
            return true;
        }
        if self.waited == 0 && now.since(*since) >= self.pause {
            self.pause = self.pause_first;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn demand() -> CpuDemand {
        CpuDemand::new(&Clock::simulated().0)
    }

    fn delay(waited_ns: u64, runs: u64) -> RunDelay {
        RunDelay { waited_ns, runs }
    }

    #[test]
    fn run_delay_suspends_polling_for_longer_each_time() {
        let mut demand = demand();
        let (mut now, mut waited) = (0, 0);
        for pause in [32, 128, 512, 2_000, 2_000] {
            assert!(demand.permits(Stamp(now)) && demand.is_reading_due(Stamp(now)));
            assert!(!demand.read(Stamp(now), delay(waited, 0)), "first reading");
            assert!(!demand.is_reading_due(Stamp(now + 5 * MS - 1)));
            // The other thread runs for half of the time, in slices of 3 ms.
            for is_suspended in [false, false, true] {
                now += 6 * MS;
                waited += 3 * MS;
                assert!(demand.is_reading_due(Stamp(now)));
                let suspends = demand.read(Stamp(now), delay(waited, 1));
                assert_eq!(suspends, is_suspended);
            }
            assert!(demand.is_suspended());
            now += pause * MS;
            assert!(!demand.permits(Stamp(now - 1)));
        }
    }

    #[test]
    fn pause_is_short_again_after_an_undisturbed_time() {
        let mut demand = demand();
        let mut now = 0;
        let mut waited = 0;
        let mut disturb = |demand: &mut CpuDemand, now: &mut u64| {
            assert!(demand.permits(Stamp(*now)));
            demand.read(Stamp(*now), delay(waited, 0));
            *now += 20 * MS;
            waited += 10 * MS;
            assert!(demand.read(Stamp(*now), delay(waited, 0)));
            waited
        };
        disturb(&mut demand, &mut now);
        now += 32 * MS;
        let waited = disturb(&mut demand, &mut now);
        now += 128 * MS;
        assert!(demand.permits(Stamp(now)));
        for _ in 0..150 {
            assert!(!demand.read(Stamp(now), delay(waited, 0)));
            now += 5 * MS;
        }
        disturb(&mut demand, &mut now);
        assert!(!demand.permits(Stamp(now + 32 * MS - 1)));
        assert!(demand.permits(Stamp(now + 32 * MS)));
    }

    #[test]
    fn thread_with_an_eighth_of_the_cpu_suspends_polling_ever_longer() {
        let mut demand = demand();
        let (mut now, mut waited) = (0, 0);
        for pause in [32, 128, 512] {
            assert!(demand.permits(Stamp(now)));
            demand.read(Stamp(now), delay(waited, 0));
            // 3 ms of every 24 ms.
            let suspended = (1..100).find(|reading| {
                now += 6 * MS;
                waited += if reading % 4 == 0 { 3 * MS } else { 0 };
                demand.read(Stamp(now), delay(waited, 0))
            });
            assert!(suspended.is_some());
            now += pause * MS;
            assert!(!demand.permits(Stamp(now - 1)), "pause of {pause} ms");
        }
    }

    #[test]
    fn slices_of_threads_that_mostly_sleep_are_not_demand() {
        let mut demand = demand();
        let mut waited = 0;
        demand.read(Stamp(0), delay(0, 0));
        // Two threads run for 3 ms ten times a second, one after the other.
        for reading in 1..10_000 {
            if reading % 20 < 2 {
                waited += 3 * MS;
            }
            let now = Stamp(reading * 5 * MS);
            assert!(!demand.read(now, delay(waited, 0)), "reading {reading}");
        }
    }

    #[test]
    fn wake_ups_on_a_free_cpu_are_not_demand() {
        let mut demand = demand();
        demand.read(Stamp(0), delay(0, 0));
        // 10,000 wake-ups a second of 5 us each.
        for reading in 1..1_000 {
            let now = Stamp(reading * 5 * MS);
            assert!(!demand.read(now, delay(reading * 250_000, reading * 50)));
        }
        assert!(!demand.is_suspended());
    }
}
