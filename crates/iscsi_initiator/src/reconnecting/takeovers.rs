//! Detects another host with the same initiator name and ISID: each login ends the session of the other host (RFC 7143,
//! 6.3.5).

use std::time::{Duration, Instant};

use crate::session::SessionError;
use crate::unit::CommandError;

/// Maximum age of a session that may have been taken over when the target ends it.
const SHORT: Duration = Duration::from_secs(30);
/// Number of consecutive short sessions that cause a warning.
const IN_A_ROW: u32 = 3;
/// Minimum interval between two warnings.
const AGAIN: Duration = Duration::from_secs(600);

/// Counter of consecutive short sessions of a unit.
#[derive(Debug)]
pub(super) struct Takeovers {
    /// Start of the session.
    pub since: Instant,
    short: u32,
    warned: Option<Instant>,
}

impl Takeovers {
    pub fn new(now: Instant) -> Takeovers {
        Takeovers {
            since: now,
            short: 0,
            warned: None,
        }
    }

    /// Counts the end of a session. Returns true if a warning is due.
    pub fn session_ended(&mut self, error: &CommandError, now: Instant) -> bool {
        let is_by_target = matches!(
            error,
            CommandError::Session(SessionError::Lost { .. } | SessionError::Dismissed { .. })
        );
        if !is_by_target || now.duration_since(self.since) >= SHORT {
            self.short = 0;
            return false;
        }
        self.short += 1;
        let is_early = |at: Instant| now.duration_since(at) < AGAIN;
        if self.short < IN_A_ROW || self.warned.is_some_and(is_early) {
            return false;
        }
        self.warned = Some(now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_sessions_in_a_row_are_warned_of_once() {
        let begin = Instant::now();
        let mut takeovers = Takeovers::new(begin);
        let lost = CommandError::Session(SessionError::Dismissed {
            portal: "192.0.2.1".parse().unwrap(),
        });
        let silent = CommandError::Session(SessionError::Silent {
            portal: "192.0.2.1".parse().unwrap(),
            waited: Duration::ZERO,
        });
        let after = |seconds| begin + Duration::from_secs(seconds);
        let mut ends = |error: &CommandError, since: u64, end: u64| {
            takeovers.since = after(since);
            takeovers.session_ended(error, after(end))
        };
        assert!(!ends(&lost, 0, 5) && !ends(&lost, 5, 10));
        assert!(!ends(&lost, 10, 60), "a session that lasted");
        assert!(!ends(&lost, 60, 65) && !ends(&lost, 65, 70));
        assert!(!ends(&silent, 70, 75), "the target did not answer");
        assert!(!ends(&lost, 75, 80) && !ends(&lost, 80, 85));
        assert!(ends(&lost, 85, 90));
        assert!(!ends(&lost, 90, 95), "warned of already");
        assert!(ends(&lost, 700, 705));
    }
}
