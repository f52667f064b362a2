//! The clock for stamps: the processor's time stamp counter if it is invariant, otherwise CLOCK_MONOTONIC.
//!
//! [`Clock::now`] returns raw ticks without conversion; reports convert to nanoseconds. Clones of a clock, and all real
//! clocks of a process, share one calibration, so their stamps are comparable.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A point in time in raw ticks of a [`Clock`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp(pub u64);

impl Stamp {
    /// Returns the ticks from `earlier` to this stamp; 0 if the counters of two processors disagree about the order.
    #[inline]
    pub const fn since(self, earlier: Stamp) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Creates stamps and converts ticks to nanoseconds.
#[derive(Clone, Debug)]
pub struct Clock {
    source: quanta::Clock,
}

impl Clock {
    /// Creates the fastest available clock. The first call in a process calibrates for up to about 200 ms and therefore
    /// belongs to start-up, outside any queue.
    pub fn new() -> Self {
        Clock {
            source: quanta::Clock::new(),
        }
    }

    /// Creates a clock that starts at 0 and is moved only by its [`SimulatedTime`]; one tick is one nanosecond.
    pub fn simulated() -> (Self, SimulatedTime) {
        let (source, hand) = quanta::Clock::mock();
        (Clock { source }, SimulatedTime { hand })
    }

    /// Creates a clock that always returns 0, to measure the cost of stamps by comparison.
    pub fn stopped() -> Self {
        Clock::simulated().0
    }

    /// Returns the current time in raw ticks. Costs about 10 ns on bare metal; no system call if the counter is invariant.
    #[inline]
    pub fn now(&self) -> Stamp {
        Stamp(self.source.raw())
    }

    /// Returns the process-wide real clock, for uses off the request path: log limits, displayed times.
    pub fn shared() -> &'static Clock {
        static SHARED: OnceLock<Clock> = OnceLock::new();
        SHARED.get_or_init(Clock::new)
    }

    /// Returns the time since the clock's zero, which all real clocks of a process share.
    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.nanos(self.now().0))
    }

    /// Converts ticks to nanoseconds, for reports.
    pub fn nanos(&self, ticks: u64) -> u64 {
        self.source.delta_as_nanos(0, ticks)
    }

    /// Converts a duration to ticks, for time-outs compared with stamps.
    pub fn ticks(&self, duration: Duration) -> u64 {
        const PROBE_TICKS: u64 = 1 << 40;
        let probe_ns = u128::from(self.nanos(PROBE_TICKS)).max(1);
        let ticks = duration.as_nanos().saturating_mul(u128::from(PROBE_TICKS)) / probe_ns;
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }
}

impl Default for Clock {
    fn default() -> Self {
        Clock::new()
    }
}

/// Moves a simulated [`Clock`] and all its clones.
#[derive(Clone, Debug)]
pub struct SimulatedTime {
    hand: Arc<quanta::Mock>,
}

impl SimulatedTime {
    /// Advances the time by `nanos`.
    pub fn advance(&self, nanos: u64) {
        self.hand.increment(nanos);
    }

    /// Sets the time, forwards or backwards.
    pub fn set(&self, nanos: u64) {
        let now = self.hand.value();
        match nanos.checked_sub(now) {
            Some(forward) => self.hand.increment(forward),
            None => self.hand.decrement(now - nanos),
        }
    }

    /// Returns the current time in nanoseconds.
    pub fn nanos(&self) -> u64 {
        self.hand.value()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulated_time_moves_every_clone_and_nothing_else_does() {
        let (clock, time) = Clock::simulated();
        let clone = clock.clone();
        assert_eq!(clock.now(), Stamp(0));
        time.advance(42);
        assert_eq!(clone.now(), Stamp(42));
        time.set(1000);
        time.set(7);
        assert_eq!((clock.now(), time.nanos()), (Stamp(7), 7));
        assert_eq!(clock.elapsed(), Duration::from_nanos(7));
        assert_eq!(clock.nanos(5), 5);
        assert_eq!(clock.ticks(Duration::from_secs(10)), 10_000_000_000);
        assert_eq!(Clock::stopped().now(), Stamp(0));
    }

    #[test]
    fn stamps_in_the_wrong_order_give_zero() {
        assert_eq!(Stamp(5).since(Stamp(9)), 0);
        assert_eq!(Stamp(9).since(Stamp(5)), 4);
    }

    #[test]
    fn real_clock_goes_forward_and_converts_both_ways() {
        let clock = Clock::new();
        let before = clock.now();
        assert!(clock.now() >= before);
        let back = clock.nanos(clock.ticks(Duration::from_secs(1)));
        assert!(
            back.abs_diff(1_000_000_000) < 1000,
            "one second became {back} ns"
        );
    }
}
