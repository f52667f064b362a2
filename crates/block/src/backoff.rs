//! Pauses between attempts to reach a server.

use std::time::Duration;

/// Pause that doubles with each attempt, up to a maximum.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    max: Duration,
    tries: u32,
}

impl Backoff {
    /// Creates the state before the first attempt.
    pub const fn new(first: Duration, max: Duration) -> Backoff {
        Backoff {
            first,
            max,
            tries: 0,
        }
    }

    /// Returns the pause before the next attempt.
    pub fn pause(&mut self) -> Duration {
        let pause = self.first.saturating_mul(1 << self.tries.min(16));
        self.tries = self.tries.saturating_add(1);
        pause.min(self.max)
    }

    /// Starts again with the first pause.
    pub fn reset(&mut self) {
        self.tries = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_doubles_up_to_the_maximum() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(100), ms(1000));
        let pauses: Vec<Duration> = (0..6).map(|_| backoff.pause()).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1000, 1000].map(ms));
        for _ in 0..100 {
            backoff.pause();
        }
        assert_eq!(backoff.pause(), ms(1000));
        backoff.reset();
        assert_eq!(backoff.pause(), ms(100));
    }
}
