//! One log line per interval, however often a peer misbehaves; the rest are counted.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Decides which of many like events are logged.
#[derive(Debug)]
pub struct RateLimit {
    interval: Duration,
    state: Mutex<(Option<Instant>, u64)>,
}

impl RateLimit {
    /// At most one line per `interval`.
    pub const fn new(interval: Duration) -> RateLimit {
        RateLimit {
            interval,
            state: Mutex::new((None, 0)),
        }
    }

    /// Counts an event; `Some(n)`: log it, and say that `n` before it were not.
    pub fn pass(&self) -> Option<u64> {
        let mut state = self
            .state
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let now = Instant::now();
        if state
            .0
            .is_some_and(|last| now.duration_since(last) < self.interval)
        {
            state.1 += 1;
            return None;
        }
        Some(std::mem::replace(&mut *state, (Some(now), 0)).1)
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
        assert_eq!(limit.state.lock().unwrap().1, 2);
    }

    #[test]
    fn after_the_interval_the_next_passes_with_the_count() {
        let limit = RateLimit::new(Duration::ZERO);
        assert_eq!(limit.pass(), Some(0));
        assert_eq!(limit.pass(), Some(0));
    }
}
