//! Limits log lines about events that a peer can cause: one per interval or a short burst; further ones are counted.

use std::sync::Mutex;
use std::time::Duration;

use latency::Clock;

/// Selects the events to log.
#[derive(Debug)]
pub struct RateLimit {
    interval: Duration,
    /// Number of events that pass at once after a pause.
    burst: u32,
    state: Mutex<RateLimitState>,
}

#[derive(Debug)]
struct RateLimitState {
    /// Remaining events of the burst, as of `since`.
    left: u32,
    since: Option<Duration>,
    suppressed: u64,
}

impl RateLimit {
    /// Allows one event per `interval`.
    pub const fn new(interval: Duration) -> RateLimit {
        RateLimit::with_burst(interval, 1)
    }

    /// Allows one event per `interval`; unused ones accumulate up to `burst`.
    pub const fn with_burst(interval: Duration, burst: u32) -> RateLimit {
        RateLimit {
            interval,
            burst,
            state: Mutex::new(RateLimitState {
                left: burst,
                since: None,
                suppressed: 0,
            }),
        }
    }

    /// Counts an event. Returns `Some(n)` if it is to be logged, where `n` is the number of suppressed events before it.
    pub fn pass(&self) -> Option<u64> {
        self.pass_at(Clock::shared().elapsed())
    }

    fn pass_at(&self, now: Duration) -> Option<u64> {
        let mut state = self
            .state
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let since = *state.since.get_or_insert(now);
        let passed = now.saturating_sub(since).as_nanos();
        let earned = passed.checked_div(self.interval.as_nanos()).unwrap_or(1);
        if earned > 0 {
            let earned = u32::try_from(earned).unwrap_or(u32::MAX);
            state.left = state.left.saturating_add(earned).min(self.burst);
            state.since = Some(now);
        }
        if state.left == 0 {
            state.suppressed += 1;
            return None;
        }
        state.left -= 1;
        Some(std::mem::take(&mut state.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_event_passes_and_the_next_are_counted() {
        let limit = RateLimit::new(Duration::from_secs(3600));
        assert_eq!(limit.pass(), Some(0));
        assert_eq!(limit.pass(), None);
        assert_eq!(limit.pass(), None);
        assert_eq!(limit.state.lock().unwrap().suppressed, 2);
    }

    #[test]
    fn a_burst_passes_and_those_after_it_are_counted() {
        let limit = RateLimit::with_burst(Duration::from_secs(2), 3);
        let begin = Duration::from_secs(100);
        let passed: Vec<_> = (0..5).map(|_| limit.pass_at(begin)).collect();
        assert_eq!(passed, [Some(0), Some(0), Some(0), None, None]);
        assert_eq!(limit.pass_at(begin + Duration::from_secs(1)), None);
        assert_eq!(limit.pass_at(begin + Duration::from_secs(3)), Some(3));
    }

    #[test]
    fn after_the_interval_the_next_passes_with_the_count() {
        let limit = RateLimit::new(Duration::ZERO);
        assert_eq!(limit.pass(), Some(0));
        assert_eq!(limit.pass(), Some(0));
    }
}
