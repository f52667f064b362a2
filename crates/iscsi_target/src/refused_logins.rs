//! Recent refused logins. They show an administrator why an initiator cannot connect.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use latency::Clock;

/// Maximum number of remembered pairs of target and initiator.
const REMEMBERED_MAX: usize = 64;

/// Refused logins of an initiator at a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedLogin {
    /// Requested target, in the configured spelling; `None` for a discovery session.
    pub target: Option<String>,
    /// Initiator name as sent, which may be forged.
    pub initiator: String,
    /// Address of the last attempt.
    pub address: String,
    /// Reason of the last refusal.
    pub reason: String,
    /// Number of refusals since the last session.
    pub count: u64,
    /// Time of the last attempt, on the shared clock.
    pub at: Duration,
}

impl RefusedLogin {
    /// Returns the time since the last attempt.
    pub fn age(&self) -> Duration {
        Clock::shared().elapsed().saturating_sub(self.at)
    }

    fn is_of(&self, target: Option<&str>, initiator: &str) -> bool {
        self.target.as_deref() == target && self.initiator == initiator
    }
}

/// Refused logins, ordered by the last attempt.
#[derive(Default)]
pub(crate) struct RefusedLogins(Mutex<Vec<RefusedLogin>>);

impl RefusedLogins {
    fn lock(&self) -> MutexGuard<'_, Vec<RefusedLogin>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a refusal. Forgets the oldest pair if there are too many.
    pub fn add(&self, mut refused: RefusedLogin) {
        let mut all = self.lock();
        let target = refused.target.as_deref();
        let before = all
            .iter()
            .position(|one| one.is_of(target, &refused.initiator));
        if let Some(before) = before {
            refused.count = refused.count.saturating_add(all.remove(before).count);
        } else if all.len() >= REMEMBERED_MAX {
            all.remove(0);
        }
        all.push(refused);
    }

    /// Forgets the refusals of an initiator that has a session now.
    pub fn forget(&self, target: &str, initiator: &str) {
        self.lock()
            .retain(|one| !one.is_of(Some(target), initiator));
    }

    /// Returns all remembered refusals.
    pub fn all(&self) -> Vec<RefusedLogin> {
        self.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(initiator: &str) -> RefusedLogin {
        RefusedLogin {
            target: Some("t".to_owned()),
            initiator: initiator.to_owned(),
            address: "192.0.2.1".to_owned(),
            reason: "not in the access list".to_owned(),
            count: 1,
            at: Duration::ZERO,
        }
    }

    #[test]
    fn attempts_are_counted_until_the_initiator_has_a_session() {
        let logins = RefusedLogins::default();
        for initiator in ["a", "b", "a"] {
            logins.add(refused(initiator));
        }
        let found: Vec<_> = logins
            .all()
            .into_iter()
            .map(|one| (one.initiator, one.count))
            .collect();
        assert_eq!(found, [("b".to_owned(), 1), ("a".to_owned(), 2)]);
        logins.forget("t", "a");
        logins.forget("other", "b");
        assert_eq!(logins.all().len(), 1);
    }

    #[test]
    fn memory_is_bounded() {
        let logins = RefusedLogins::default();
        for number in 0..=REMEMBERED_MAX {
            logins.add(refused(&number.to_string()));
        }
        let all = logins.all();
        assert_eq!(all.len(), REMEMBERED_MAX);
        assert_eq!(all[0].initiator, "1");
    }
}
