//! The target's side of CHAP in the security stage (RFC 7143, 12.1).

use std::fmt;

use crate::chap::{Algorithm, CHALLENGE_MAX, OutstandingChallenge, Secret, TARGET_CHALLENGES};
use crate::pdu::LoginStatus;
use crate::text::{Pair, parse_binary, parse_list, parse_number, push_pair, to_hex};

use super::{Admission, ChapUser, TargetPolicy, Visitor};

#[derive(Clone)]
enum ChapState {
    /// AuthMethod is not negotiated yet.
    Start,
    /// CHAP was chosen; CHAP_A is expected.
    Method,
    /// The challenge was sent; CHAP_N and CHAP_R are expected.
    Challenged {
        algorithm: Algorithm,
        identifier: u8,
        challenge: OutstandingChallenge,
    },
    /// Authentication succeeded or is not required.
    Done,
}

/// Reason of a failed authentication, for the target's log. The initiator receives only the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChapFailure {
    /// The initiator does not offer CHAP, so it has no user.
    NoUser,
    /// No offered algorithm is allowed.
    NoAlgorithm,
    /// The target has no such user for this initiator.
    UnknownUser,
    /// The response does not match the user's secret.
    WrongResponse,
    /// The initiator authenticates the target, but the user has no target secret.
    NoTargetSecret,
    /// Initiator and target have the same secret, or the initiator repeated a challenge (RFC 7143, 9.2.1).
    Reflection,
    /// A key is missing or malformed.
    Malformed,
}

impl fmt::Display for ChapFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ChapFailure::NoUser => "no user: the initiator does not offer CHAP",
            ChapFailure::NoAlgorithm => "no common CHAP algorithm",
            ChapFailure::UnknownUser => "no such user",
            ChapFailure::WrongResponse => "wrong response: the secrets differ",
            ChapFailure::NoTargetSecret => {
                "the initiator wants mutual CHAP, but the user has no target secret"
            }
            ChapFailure::Reflection => "initiator and target use the same secret or challenge",
            ChapFailure::Malformed => "missing or malformed CHAP key",
        })
    }
}

#[derive(Clone)]
pub(super) struct Authentication {
    state: ChapState,
    user: Option<String>,
    /// Name that the initiator claimed and reason of the failure.
    failure: Option<(Option<String>, ChapFailure)>,
}

fn value<'a>(pairs: &[Pair<'a>], key: &str) -> Option<&'a str> {
    pairs
        .iter()
        .find(|pair| pair.key == key)
        .map(|pair| pair.value)
}

impl Authentication {
    pub fn new() -> Self {
        Authentication {
            state: ChapState::Start,
            user: None,
            failure: None,
        }
    }

    /// Returns the claimed user and the reason of a failed authentication.
    pub fn failure(&self) -> Option<(Option<&str>, ChapFailure)> {
        let (user, failure) = self.failure.as_ref()?;
        Some((user.as_deref(), *failure))
    }

    fn fail(&mut self, failure: ChapFailure) -> LoginStatus {
        self.failure = Some((None, failure));
        LoginStatus::AuthenticationFailure
    }

    fn fail_user(&mut self, user: &str, failure: ChapFailure) -> LoginStatus {
        self.failure = Some((Some(user.to_owned()), failure));
        LoginStatus::AuthenticationFailure
    }

    /// Returns true if authentication succeeded or is not required.
    pub fn is_done(&self) -> bool {
        matches!(self.state, ChapState::Done)
    }

    /// Returns the CHAP user after successful authentication.
    pub fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    /// Returns true if `key` belongs to the security stage.
    pub fn owns(key: &str) -> bool {
        matches!(
            key,
            "AuthMethod" | "CHAP_A" | "CHAP_N" | "CHAP_R" | "CHAP_I" | "CHAP_C"
        ) || key.starts_with("KRB_")
            || key.starts_with("SPKM_")
            || key.starts_with("SRP_")
    }

    /// Ends the security stage without authentication, unless `admission` requires it.
    pub fn pass_without(&mut self, admission: &Admission) -> Result<(), LoginStatus> {
        match self.state {
            ChapState::Done => Ok(()),
            ChapState::Start if !admission.must_authenticate => {
                self.state = ChapState::Done;
                Ok(())
            }
            _ => Err(self.fail(ChapFailure::NoUser)),
        }
    }

    /// Processes the security keys of one request and appends the answers to `out`.
    pub fn step(
        &mut self,
        pairs: &[Pair<'_>],
        admission: &Admission,
        policy: &dyn TargetPolicy,
        visitor: &Visitor,
        out: &mut Vec<u8>,
    ) -> Result<(), LoginStatus> {
        // After any error below, the state remains `Method`: the initiator is not authenticated.
        match std::mem::replace(&mut self.state, ChapState::Method) {
            ChapState::Start => self.choose_method(pairs, admission, policy, out),
            ChapState::Method => self.challenge(pairs, admission, policy, out),
            ChapState::Challenged {
                algorithm,
                identifier,
                challenge,
            } => {
                let Some(name) = value(pairs, "CHAP_N") else {
                    return Err(self.fail(ChapFailure::Malformed));
                };
                let response =
                    value(pairs, "CHAP_R").and_then(|text| parse_binary(text, algorithm.length()));
                let response =
                    response.ok_or_else(|| self.fail_user(name, ChapFailure::Malformed))?;
                let users = policy.chap_users(visitor, name);
                let proves = |secret: &Secret| {
                    algorithm.verify(identifier, secret, challenge.bytes(), &response)
                };
                let mut failure = ChapFailure::WrongResponse;
                if users.is_empty() {
                    failure = ChapFailure::UnknownUser;
                    // An unknown user takes as long as a wrong secret.
                    proves(&Secret::new(""));
                }
                let user = users.into_iter().find(|user| proves(&user.secret));
                let user = user.ok_or_else(|| self.fail_user(name, failure))?;
                // Authentication fails if the initiator's response equals the one that a target would send to the same
                // challenge, even if this login does not authenticate the target (RFC 7143, 9.2.1).
                if has_one_secret(&user) || policy.is_secret_of_target(&user.secret) {
                    return Err(self.fail_user(name, ChapFailure::Reflection));
                }
                match (value(pairs, "CHAP_I"), value(pairs, "CHAP_C")) {
                    (None, None) => {}
                    (Some(their_identifier), Some(their_challenge)) => {
                        let identifier =
                            parse_number(their_identifier).and_then(|n| u8::try_from(n).ok());
                        let theirs = parse_binary(their_challenge, CHALLENGE_MAX);
                        let (Some(identifier), Some(theirs)) = (identifier, theirs) else {
                            return Err(self.fail_user(name, ChapFailure::Malformed));
                        };
                        let Some((own_name, secret)) = &user.mutual else {
                            return Err(self.fail_user(name, ChapFailure::NoTargetSecret));
                        };
                        // The initiator must not reuse a challenge of this target, from this connection or another one (RFC
                        // 7143, 9.2.1).
                        if TARGET_CHALLENGES.contains(&theirs) {
                            return Err(self.fail_user(name, ChapFailure::Reflection));
                        }
                        push_pair(out, "CHAP_N", own_name);
                        push_pair(
                            out,
                            "CHAP_R",
                            &to_hex(&algorithm.respond(identifier, secret, &theirs)),
                        );
                    }
                    _ => return Err(self.fail_user(name, ChapFailure::Malformed)),
                }
                self.user = Some(name.to_owned());
                self.state = ChapState::Done;
                Ok(())
            }
            ChapState::Done => Err(LoginStatus::InitiatorError),
        }
    }

    fn choose_method(
        &mut self,
        pairs: &[Pair<'_>],
        admission: &Admission,
        policy: &dyn TargetPolicy,
        out: &mut Vec<u8>,
    ) -> Result<(), LoginStatus> {
        let offered = value(pairs, "AuthMethod").and_then(parse_list);
        let offered = offered.ok_or_else(|| self.fail(ChapFailure::Malformed))?;
        // Also if the initiator prefers CHAP: initiators that were configured with another target's secret could log in
        // before CHAP was available.
        if !admission.must_authenticate && offered.contains(&"None") {
            push_pair(out, "AuthMethod", "None");
            self.state = ChapState::Done;
            return Ok(());
        }
        if admission.chap.is_empty() || !offered.contains(&"CHAP") {
            return Err(self.fail(ChapFailure::NoUser));
        }
        push_pair(out, "AuthMethod", "CHAP");
        self.state = ChapState::Method;
        if value(pairs, "CHAP_A").is_some() {
            return self.challenge(pairs, admission, policy, out);
        }
        Ok(())
    }

    fn challenge(
        &mut self,
        pairs: &[Pair<'_>],
        admission: &Admission,
        policy: &dyn TargetPolicy,
        out: &mut Vec<u8>,
    ) -> Result<(), LoginStatus> {
        let offered = value(pairs, "CHAP_A")
            .and_then(parse_list)
            .ok_or_else(|| self.fail(ChapFailure::Malformed))?;
        let known = offered
            .iter()
            .filter_map(|name| parse_number(name).and_then(Algorithm::from_number));
        let mut taken = known.filter(|algorithm| admission.chap.contains(algorithm));
        let algorithm = taken.next();
        let algorithm = algorithm.ok_or_else(|| self.fail(ChapFailure::NoAlgorithm))?;
        let mut identifier = [0];
        let mut challenge = vec![0; algorithm.length()];
        policy.random(&mut identifier);
        policy.random(&mut challenge);
        push_pair(out, "CHAP_A", &algorithm.number().to_string());
        push_pair(out, "CHAP_I", &identifier[0].to_string());
        push_pair(out, "CHAP_C", &to_hex(&challenge));
        self.state = ChapState::Challenged {
            algorithm,
            identifier: identifier[0],
            challenge: TARGET_CHALLENGES.add(challenge),
        };
        Ok(())
    }
}

/// Returns true if initiator and target authenticate with the same secret.
fn has_one_secret(user: &ChapUser) -> bool {
    user.mutual
        .as_ref()
        .is_some_and(|(_, secret)| secret.matches(&user.secret))
}

// Prints only the state: challenges and the user name stay private.
impl std::fmt::Debug for Authentication {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.state {
            ChapState::Start => "Authentication(start)",
            ChapState::Method => "Authentication(method)",
            ChapState::Challenged { .. } => "Authentication(challenged)",
            ChapState::Done => "Authentication(done)",
        })
    }
}
