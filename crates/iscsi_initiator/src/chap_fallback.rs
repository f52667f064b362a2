//! Login retries with fewer CHAP algorithms, for targets that read only the first of a list, or choose one that they cannot
//! compute.
//!
//! Each attempt is a new connection, because a refused login ends it (RFC 7143, 11.13.5). Only algorithms of the
//! administrator's list are offered. A list that a target accepted is offered first at the next login.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use iscsi::chap::Algorithm;
use iscsi::initiator::InitiatorError;
use iscsi::login::{ChapProgress, LoginError};

use crate::session::SessionError;
use iscsi::address::Portal;

/// Portal and target of a session.
type Key = (String, Option<String>);

/// CHAP algorithm lists that targets accepted after refusing a longer one.
#[derive(Clone, Debug, Default)]
pub struct ChapMemory(Arc<Mutex<HashMap<Key, Vec<Algorithm>>>>);

impl ChapMemory {
    fn key(portal: &Portal, target: Option<&str>) -> Key {
        (portal.to_string(), target.map(str::to_owned))
    }

    fn lists(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Vec<Algorithm>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Login statuses that may result from the offered algorithms: initiator error, authentication failure, missing parameter,
/// invalid during login, and target error (RFC 7143, 11.13.5).
const OF_ALGORITHM: [u16; 5] = [0x0200, 0x0201, 0x0207, 0x020b, 0x0300];

/// Calls `log_in` with a list of algorithms, and with shorter ones while it fails for a reason that may be the list.
///
/// # Errors
/// The first error, which belongs to the longest list.
pub(crate) fn log_in_with<T>(
    (portal, target): (&Portal, Option<&str>),
    allowed: &[Algorithm],
    memory: &ChapMemory,
    mut log_in: impl FnMut(&[Algorithm]) -> Result<T, (SessionError, ChapProgress)>,
) -> Result<T, SessionError> {
    let key = ChapMemory::key(portal, target);
    let remembered = memory.lists().get(&key).cloned();
    let mut offered = remembered.unwrap_or_else(|| allowed.to_vec());
    let mut first_error = None;
    loop {
        let (error, progress) = match log_in(&offered) {
            Ok(session) => {
                if first_error.is_some() {
                    let algorithms = Algorithm::list(&offered);
                    let target = target.unwrap_or("discovery");
                    tracing::info!(target, %portal, algorithms, "CHAP login succeeded with fewer algorithms");
                    memory.lists().insert(key, offered);
                }
                return Ok(session);
            }
            Err(failed) => failed,
        };
        let next = shorter(&offered, &error, progress);
        if let Some(next) = &next {
            let (offered, next) = (Algorithm::list(&offered), Algorithm::list(next));
            let target = target.unwrap_or("discovery");
            tracing::warn!(target, %portal, offered, next, %error, "CHAP login failed, trying fewer algorithms");
        }
        let Some(next) = next else {
            // The target may have changed: the next login offers all algorithms again.
            memory.lists().remove(&key);
            return Err(first_error.unwrap_or(error));
        };
        offered = next;
        first_error.get_or_insert(error);
    }
}

/// Returns the remaining algorithms to offer, or `None` if the failure has another reason or none remains.
fn shorter(
    offered: &[Algorithm],
    error: &SessionError,
    progress: ChapProgress,
) -> Option<Vec<Algorithm>> {
    let may_be_of_list = match error {
        SessionError::Lost { .. } => true,
        SessionError::Login { error, .. } => match error {
            InitiatorError::Login(LoginError::Refused { status, .. }) => {
                OF_ALGORITHM.contains(status)
            }
            InitiatorError::Login(LoginError::Protocol(_)) | InitiatorError::Protocol(_) => true,
            _ => false,
        },
        _ => false,
    };
    if !may_be_of_list {
        return None;
    }
    let rest: Vec<Algorithm> = match progress {
        // The target may have read only the first one.
        ChapProgress::Offered => offered.iter().skip(1).copied().collect(),
        // The target may not support responses of this length.
        ChapProgress::Answered(used) => {
            let after = offered.iter().skip_while(|one| **one != used);
            let has_other_length = |one: &&Algorithm| one.length() != used.length();
            after.filter(has_other_length).copied().collect()
        }
        ChapProgress::NotOffered | ChapProgress::Passed => return None,
    };
    (!rest.is_empty()).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn login_error(error: InitiatorError) -> SessionError {
        SessionError::Login {
            target: "t".to_owned(),
            portal: "192.0.2.1".parse().unwrap(),
            initiator: "i".to_owned(),
            error,
        }
    }

    fn refused(status: u16) -> SessionError {
        login_error(InitiatorError::Login(LoginError::Refused {
            status,
            address: None,
        }))
    }

    fn closed() -> SessionError {
        SessionError::Lost {
            cid: 0,
            portal: "192.0.2.1".parse().unwrap(),
            error: std::io::ErrorKind::UnexpectedEof.into(),
        }
    }

    /// Logs in to a target. Returns the offered lists by registered numbers, and whether the login succeeded.
    fn offers(
        allowed: &[Algorithm],
        memory: &ChapMemory,
        target: impl Fn(&[u8]) -> Result<(), (SessionError, ChapProgress)>,
    ) -> (Vec<String>, bool) {
        let portal = "192.0.2.1".parse().unwrap();
        let mut offers = Vec::new();
        let result = log_in_with((&portal, Some("t")), allowed, memory, |algorithms| {
            let numbers: Vec<u8> = algorithms.iter().map(|one| one.number()).collect();
            let words: Vec<String> = numbers.iter().map(u8::to_string).collect();
            offers.push(words.join(","));
            target(&numbers)
        });
        (offers, result.is_ok())
    }

    /// A target that reads only the first algorithm.
    fn takes_md5_alone(offered: &[u8]) -> Result<(), (SessionError, ChapProgress)> {
        match offered {
            [5, ..] => Ok(()),
            _ => Err((refused(0x0201), ChapProgress::Offered)),
        }
    }

    #[test]
    fn target_that_takes_one_algorithm_gets_it_and_is_remembered() {
        let (all, memory) = (Algorithm::strongest_first(), ChapMemory::default());
        let (offered, success) = offers(&all, &memory, takes_md5_alone);
        assert_eq!(offered, ["8,7,6,5", "7,6,5", "6,5", "5"]);
        assert!(success);
        // Clones of the options share the memory.
        let again = offers(&all, &memory.clone(), takes_md5_alone);
        assert_eq!(again, (vec!["5".to_owned()], true));
        // The target was replaced: its remembered list fails, and the next login offers all again.
        let sha_alone = |offered: &[u8]| match offered {
            [8, ..] => Ok(()),
            _ => Err((refused(0x0201), ChapProgress::Offered)),
        };
        assert_eq!(
            offers(&all, &memory, sha_alone),
            (vec!["5".to_owned()], false)
        );
        assert_eq!(
            offers(&all, &memory, sha_alone),
            (vec!["8,7,6,5".to_owned()], true)
        );
    }

    #[test]
    fn failed_algorithm_is_left_out_with_those_of_its_length() {
        let (all, memory) = (Algorithm::strongest_first(), ChapMemory::default());
        for failure in [
            || refused(0x0200),
            || refused(0x0201),
            || refused(0x0300),
            closed,
        ] {
            let memory = ChapMemory::default();
            let target = |offered: &[u8]| match offered {
                [8, 7, ..] => Err((failure(), ChapProgress::Answered(Algorithm::Sha256))),
                [6, ..] => Err((failure(), ChapProgress::Answered(Algorithm::Sha1))),
                _ => Ok(()),
            };
            let (offered, success) = offers(&all, &memory, target);
            assert_eq!(offered, ["8,7,6,5", "6,5", "5"]);
            assert!(success);
        }
        // A wrong secret: all lists are tried.
        let wrong = |offered: &[u8]| {
            let used = Algorithm::from_number(offered[0].into()).unwrap();
            Err((refused(0x0201), ChapProgress::Answered(used)))
        };
        let (offered, success) = offers(&all, &memory, wrong);
        assert_eq!((offered.len(), success), (3, false));
    }

    #[test]
    fn nothing_is_offered_that_is_not_allowed() {
        let memory = ChapMemory::default();
        let allowed = [Algorithm::Sha3, Algorithm::Sha256];
        let (offered, success) = offers(&allowed, &memory, takes_md5_alone);
        assert_eq!(offered, ["8,7", "7"]);
        assert!(!success);
        let (offered, _) = offers(&[Algorithm::Sha3], &memory, takes_md5_alone);
        assert_eq!(offered, ["8"]);
    }

    #[test]
    fn failure_of_another_reason_is_final() {
        let all = Algorithm::strongest_first();
        let own = |error| login_error(InitiatorError::Login(error));
        for (error, progress) in [
            // Authorization failure, not found, target removed, service unavailable, moved.
            (refused(0x0202), ChapProgress::Offered),
            (refused(0x0203), ChapProgress::Offered),
            (refused(0x0204), ChapProgress::Answered(Algorithm::Sha3)),
            (refused(0x0301), ChapProgress::Offered),
            (refused(0x0101), ChapProgress::Offered),
            (
                own(LoginError::TargetNotAuthentic),
                ChapProgress::Answered(Algorithm::Sha3),
            ),
            (own(LoginError::ReflectedChallenge), ChapProgress::Offered),
            (own(LoginError::EqualSecrets), ChapProgress::NotOffered),
            // Before or after CHAP.
            (refused(0x0201), ChapProgress::NotOffered),
            (closed(), ChapProgress::NotOffered),
            (closed(), ChapProgress::Passed),
        ] {
            let context = format!("{error} {progress:?}");
            let error = std::cell::RefCell::new(Some(error));
            let fails = |_: &[u8]| Err((error.borrow_mut().take().unwrap(), progress));
            let (offered, success) = offers(&all, &ChapMemory::default(), fails);
            assert_eq!((offered.len(), success), (1, false), "{context}");
        }
    }
}
