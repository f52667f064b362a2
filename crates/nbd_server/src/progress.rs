//! Slow clients: a timer of the connection observes incomplete requests and unsent output.
//!
//! Time is counted in ticks of the timer and not by a clock, so that a daemon that was suspended drops no client. A transfer may be slow, but
//! not slower than a minimum rate. A client that sends or reads single bytes is dropped like one that is silent.

use std::time::Duration;

use crate::limits::ServerLimits;

/// Number of ticks within the shorter time limit.
const TICKS: u32 = 4;
/// Minimum rate of a transfer after the time limit, in bytes per second: that of a slow network.
const RATE_MIN: u64 = 16 << 10;
/// Minimum rate while others wait for the memory of the transfer.
const RATE_MIN_SHORT: u64 = 1 << 20;
/// Number of time limits after which the observation of a fast transfer restarts. A client that stops gets no credit for earlier speed.
const LIMITS_MAX: u32 = 4;

/// A transfer that the client has to continue, as seen at ticks in a row.
#[derive(Debug, Default)]
struct Watched {
    /// The transfer when it was first seen.
    first: Option<Position>,
    /// Ticks since then.
    ticks: u32,
}

/// Present state of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    /// Number of the transfer.
    pub number: u64,
    /// Bytes that have moved, from any fixed point.
    pub moved: u64,
    /// Bytes that will be added to `moved` in one step, or end the transfer.
    pub at_once: u64,
}

/// Reason for dropping a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slow {
    /// Too slow for any network.
    Always,
    /// Below the minimum rate that applies while others wait for memory.
    Shortage,
}

impl Slow {
    /// Returns the reason for log messages.
    pub fn reason(self) -> &'static str {
        match self {
            Slow::Always => "no response from the client within the time limit",
            Slow::Shortage => "client is too slow while other clients wait for memory",
        }
    }
}

/// Progress of the client of one connection.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// A tick is due.
    pub has_timer: bool,
    /// Input and output.
    transfers: [Watched; 2],
    /// Input and output while other connections wait for memory.
    during_shortage: [Watched; 2],
}

impl Progress {
    /// Returns the interval of ticks.
    pub fn interval(limits: &ServerLimits) -> Duration {
        limits.silent_time.min(limits.shortage_time) / TICKS
    }

    /// Observes the transfers in progress: input and output. `is_short`: others wait for memory that this connection uses.
    pub fn tick(
        &mut self,
        limits: &ServerLimits,
        transfers: [Option<Position>; 2],
        is_short: bool,
    ) -> Option<Slow> {
        self.has_timer = false;
        let interval = Progress::interval(limits);
        let mut slow = None;
        let rules = [
            (Slow::Shortage, limits.shortage_time, RATE_MIN_SHORT),
            (Slow::Always, limits.silent_time, RATE_MIN),
        ];
        for (reason, time, rate) in rules {
            let (watched, applies) = match reason {
                Slow::Always => (&mut self.transfers, true),
                Slow::Shortage => (&mut self.during_shortage, is_short),
            };
            for (watched, transfer) in watched.iter_mut().zip(transfers) {
                if watched.observe(transfer.filter(|_| applies), interval, time, rate) {
                    slow = Some(reason);
                }
            }
        }
        slow
    }
}

impl Watched {
    /// Observes the transfer. Returns true if it took longer than `allowed` and the time of its bytes at the minimum rate.
    fn observe(
        &mut self,
        now: Option<Position>,
        interval: Duration,
        allowed: Duration,
        rate: u64,
    ) -> bool {
        let same = self.first.zip(now);
        let Some((first, now)) = same.filter(|(first, now)| first.number == now.number) else {
            *self = Watched {
                first: now,
                ticks: 0,
            };
            return false;
        };
        self.ticks = self.ticks.saturating_add(1);
        let time = interval.saturating_mul(self.ticks);
        // A silent client keeps its memory for twice the limit at most.
        let step = Duration::from_millis(now.at_once.saturating_mul(1000) / rate).min(allowed);
        let Some(beyond) = time.checked_sub(allowed.saturating_add(step)) else {
            return false;
        };
        let needed = u128::from(rate) * beyond.as_millis() / 1000;
        let is_slow = u128::from(now.moved.saturating_sub(first.moved)) <= needed;
        if !is_slow && time >= allowed.saturating_mul(LIMITS_MAX) {
            *self = Watched {
                first: Some(now),
                ticks: 0,
            };
        }
        is_slow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a client that moves `rate` bytes per second for an hour. Returns the second and the reason of its end.
    fn dropped(rate: u64, is_short: bool) -> Option<(u64, Slow)> {
        let limits = ServerLimits::default();
        let step = Progress::interval(&limits);
        let mut progress = Progress::default();
        for tick in 0..1440u32 {
            let time = step * tick;
            let moved = rate * time.as_millis() as u64 / 1000;
            let position = Some(Position {
                number: 1,
                moved,
                at_once: 0,
            });
            if let Some(slow) = progress.tick(&limits, [position, None], is_short) {
                return Some((time.as_secs(), slow));
            }
        }
        None
    }

    #[test]
    fn silent_and_dripping_clients_are_dropped_in_time() {
        assert_eq!(dropped(0, false), Some((60, Slow::Always)));
        assert_eq!(dropped(1, false), Some((62, Slow::Always)));
        assert_eq!(dropped(RATE_MIN / 2, false), Some((120, Slow::Always)));
        assert_eq!(dropped(RATE_MIN, false), None);
        assert_eq!(dropped(0, true), Some((10, Slow::Shortage)));
        assert_eq!(dropped(100_000, true), Some((12, Slow::Shortage)));
        assert_eq!(dropped(RATE_MIN_SHORT, true), None);
    }

    #[test]
    fn a_slow_transfer_has_its_time_when_a_shortage_begins() {
        let limits = ServerLimits::default();
        let mut progress = Progress::default();
        let tick = |progress: &mut Progress, step: u64, is_short| {
            let position = Position {
                number: 1,
                moved: step * 256_000,
                at_once: 0,
            };
            progress.tick(&limits, [Some(position), None], is_short)
        };
        assert!((0..40).all(|step| tick(&mut progress, step, false).is_none()));
        assert!((40..44).all(|step| tick(&mut progress, step, true).is_none()));
        assert!((44..47).any(|step| tick(&mut progress, step, true) == Some(Slow::Shortage)));
    }

    #[test]
    fn fast_client_that_stops_is_dropped_in_time() {
        let limits = ServerLimits::default();
        let step = Progress::interval(&limits);
        let mut progress = Progress::default();
        let dropped = (0..1440u32).find(|tick| {
            let position = Position {
                number: 1,
                moved: u64::from(*tick > 0) << 40,
                at_once: 0,
            };
            progress
                .tick(&limits, [Some(position), None], false)
                .is_some()
        });
        assert_eq!(dropped.map(|tick| (step * tick).as_secs()), Some(300));
    }

    #[test]
    fn long_message_has_its_time_up_to_twice_the_limit() {
        let limits = ServerLimits::default();
        let step = Progress::interval(&limits);
        for (is_short, seconds) in [(false, 60 + 60), (true, 10 + 1)] {
            let mut progress = Progress::default();
            let dropped = (0..1440u32).find(|_| {
                let position = Position {
                    number: 1,
                    moved: 0,
                    at_once: 1 << 20,
                };
                progress
                    .tick(&limits, [None, Some(position)], is_short)
                    .is_some()
            });
            let dropped = dropped.map(|tick| (step * tick).as_millis());
            assert!(dropped.is_some_and(|dropped| dropped.abs_diff(seconds * 1000) <= 2500));
        }
    }

    #[test]
    fn a_further_request_starts_the_time_again() {
        let limits = ServerLimits::default();
        let mut progress = Progress::default();
        for number in 1..1000 {
            let position = Some(Position {
                number,
                moved: 0,
                at_once: 0,
            });
            let slow = progress.tick(&limits, [position; 2], true);
            assert_eq!(slow, None);
        }
    }
}
