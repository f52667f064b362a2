//! Retry state of a listener that cannot be opened yet: an iSCSI portal, a vhost-user socket, or a listener of the API or of metrics.
//! Control plane only.

use std::fmt::Display;
use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;

/// Delay before the first retry. Each further delay doubles, up to `DELAY_MAX`.
const DELAY_FIRST: Duration = Duration::from_secs(1);
const DELAY_MAX: Duration = Duration::from_secs(10);

/// Retry state of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry {
    /// The error of the last attempt.
    pub reason: String,
    /// Time of the next attempt.
    pub next_try: Instant,
    delay: Duration,
}

impl Retry {
    /// Returns the state after the first failed attempt.
    pub fn first(error: &impl Display, now: Instant) -> Retry {
        Retry {
            reason: error.to_string(),
            next_try: now + DELAY_FIRST,
            delay: DELAY_FIRST,
        }
    }

    /// Records another failed attempt.
    pub fn again(&mut self, error: &impl Display, now: Instant) {
        self.reason = error.to_string();
        self.delay = (self.delay * 2).min(DELAY_MAX);
        self.next_try = now + self.delay;
    }

    /// Returns true if it is time for the next attempt.
    pub fn is_due(&self, now: Instant) -> bool {
        self.next_try <= now
    }
}

/// Returns true if a later attempt to bind a TCP socket may succeed without a change of the configuration: the address is not
/// assigned yet, its interface is missing, or another socket uses it.
pub fn address_can_heal(error: &io::Error) -> bool {
    let healing = [Errno::ADDRNOTAVAIL, Errno::ADDRINUSE, Errno::NODEV];
    healing
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_from_1_s_to_10_s() {
        let mut now = Instant::now();
        let mut retry = Retry::first(&"missing", now);
        let mut delays = Vec::new();
        for _ in 0..6 {
            assert!(!retry.is_due(now));
            delays.push((retry.next_try - now).as_secs());
            now = retry.next_try;
            assert!(retry.is_due(now));
            retry.again(&"still missing", now);
        }
        assert_eq!(delays, [1, 2, 4, 8, 10, 10]);
        assert_eq!(retry.reason, "still missing");
    }

    #[test]
    fn only_errors_of_a_missing_or_used_address_can_heal() {
        let heals = |errno: Errno| address_can_heal(&errno.into());
        assert!(heals(Errno::ADDRNOTAVAIL) && heals(Errno::ADDRINUSE) && heals(Errno::NODEV));
        assert!(!heals(Errno::ACCESS) && !heals(Errno::AFNOSUPPORT) && !heals(Errno::MFILE));
    }
}
