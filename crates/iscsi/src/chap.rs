//! CHAP (RFC 1994; RFC 7143, 12.1): algorithms, responses, secrets, and the challenges of unfinished logins.
//!
//! A [`Secret`] is never printed. Responses are compared in constant time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use md5::Md5;
use sha1::Sha1;
use sha2::Sha256;
use sha3::Sha3_256;
use smallvec::SmallVec;
use subtle::ConstantTimeEq;

/// Maximum length of a name or challenge in bytes (RFC 7143, 12.1.3).
pub const CHALLENGE_MAX: usize = 1024;

/// A shared secret. `Debug` prints neither the secret nor its length.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Creates a secret from `bytes`.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Secret(bytes.into())
    }

    /// Returns true if both secrets are equal. Takes constant time for equal lengths.
    pub fn matches(&self, other: &Secret) -> bool {
        self.0.ct_eq(&other.0).into()
    }

    /// Returns true if the secret has less than 96 bits, the minimum of RFC 7143, 9.2.1.
    pub fn is_short(&self) -> bool {
        self.0.len() < 12
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// CHAP algorithms by their registered numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// 5: CHAP with MD5
    Md5,
    /// 6: SHA-1
    Sha1,
    /// 7: SHA-256
    Sha256,
    /// 8: SHA3-256
    Sha3,
}

/// A response, at most 32 bytes.
pub type Response = SmallVec<[u8; 32]>;

impl Algorithm {
    /// All algorithms, weakest first.
    pub const ALL: [Algorithm; 4] = [
        Algorithm::Md5,
        Algorithm::Sha1,
        Algorithm::Sha256,
        Algorithm::Sha3,
    ];

    /// Returns the name for configurations and messages.
    pub const fn word(self) -> &'static str {
        match self {
            Algorithm::Md5 => "md5",
            Algorithm::Sha1 => "sha1",
            Algorithm::Sha256 => "sha256",
            Algorithm::Sha3 => "sha3-256",
        }
    }

    /// Returns all algorithms, strongest first.
    pub fn strongest_first() -> Vec<Algorithm> {
        Algorithm::ALL.into_iter().rev().collect()
    }

    /// Parses names in order of preference, separated by blanks or commas. Case is ignored, and `sha-256` is an alias of
    /// `sha256`. Returns `None` for an empty list, an unknown name or a repeated name.
    pub fn parse_list(text: &str) -> Option<Vec<Algorithm>> {
        let mut algorithms = Vec::new();
        for name in text.split([' ', ',']).filter(|name| !name.is_empty()) {
            let name = name.to_ascii_lowercase();
            let word = match name.as_str() {
                "sha-1" => "sha1",
                "sha-256" => "sha256",
                "sha3" => "sha3-256",
                other => other,
            };
            let algorithm = Algorithm::ALL.into_iter().find(|one| one.word() == word)?;
            if algorithms.contains(&algorithm) {
                return None;
            }
            algorithms.push(algorithm);
        }
        (!algorithms.is_empty()).then_some(algorithms)
    }

    /// Formats a list in the syntax of [`Algorithm::parse_list`].
    pub fn list(algorithms: &[Algorithm]) -> String {
        let words: Vec<&str> = algorithms.iter().map(|one| one.word()).collect();
        words.join(" ")
    }

    /// Returns the registered number.
    pub const fn number(self) -> u8 {
        match self {
            Algorithm::Md5 => 5,
            Algorithm::Sha1 => 6,
            Algorithm::Sha256 => 7,
            Algorithm::Sha3 => 8,
        }
    }

    /// Returns the algorithm with the registered number `number`.
    pub fn from_number(number: u64) -> Option<Self> {
        Algorithm::ALL
            .into_iter()
            .find(|algorithm| u64::from(algorithm.number()) == number)
    }

    /// Returns the length of a response, and of our challenges, in bytes.
    pub const fn length(self) -> usize {
        match self {
            Algorithm::Md5 => 16,
            Algorithm::Sha1 => 20,
            Algorithm::Sha256 | Algorithm::Sha3 => 32,
        }
    }

    /// Computes the response to a challenge: the hash over identifier, secret and challenge.
    pub fn respond(self, identifier: u8, secret: &Secret, challenge: &[u8]) -> Response {
        match self {
            Algorithm::Md5 => hash::<Md5>(identifier, secret, challenge),
            Algorithm::Sha1 => hash::<Sha1>(identifier, secret, challenge),
            Algorithm::Sha256 => hash::<Sha256>(identifier, secret, challenge),
            Algorithm::Sha3 => hash::<Sha3_256>(identifier, secret, challenge),
        }
    }

    /// Returns true if the response is correct. Takes constant time.
    pub fn verify(
        self,
        identifier: u8,
        secret: &Secret,
        challenge: &[u8],
        response: &[u8],
    ) -> bool {
        self.respond(identifier, secret, challenge)
            .ct_eq(response)
            .into()
    }
}

/// Challenges that this process sent in one role, in logins that have not ended.
///
/// A peer without the secret can obtain a response to our challenge only by sending the same challenge back, on this
/// connection or another one (RFC 7143, 9.2.1). Initiator and target have separate sets, because a daemon may log in to its
/// own target.
#[derive(Debug, Default)]
pub struct OutstandingChallenges(Mutex<Option<HashMap<Vec<u8>, usize>>>);

/// Challenges sent as initiator.
pub static INITIATOR_CHALLENGES: OutstandingChallenges = OutstandingChallenges::new();
/// Challenges sent as target.
pub static TARGET_CHALLENGES: OutstandingChallenges = OutstandingChallenges::new();

impl OutstandingChallenges {
    /// Creates an empty set.
    pub const fn new() -> Self {
        OutstandingChallenges(Mutex::new(None))
    }

    /// Adds a challenge. It is removed when the returned value and all its clones are dropped.
    pub fn add(&'static self, bytes: Vec<u8>) -> OutstandingChallenge {
        self.count(&bytes, |count| count + 1);
        OutstandingChallenge(Arc::new(Entry { set: self, bytes }))
    }

    /// Returns true if an unfinished login sent this challenge.
    pub fn contains(&self, bytes: &[u8]) -> bool {
        let challenges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        challenges
            .as_ref()
            .is_some_and(|challenges| challenges.contains_key(bytes))
    }

    fn count(&self, bytes: &[u8], change: fn(usize) -> usize) {
        let mut challenges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let challenges = challenges.get_or_insert_default();
        let count = change(challenges.get(bytes).copied().unwrap_or(0));
        match count {
            0 => drop(challenges.remove(bytes)),
            count => drop(challenges.insert(bytes.to_vec(), count)),
        }
    }
}

#[derive(Debug)]
struct Entry {
    set: &'static OutstandingChallenges,
    bytes: Vec<u8>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.set.count(&self.bytes, |count| count.saturating_sub(1));
    }
}

/// A challenge of an unfinished login.
#[derive(Clone, Debug)]
pub struct OutstandingChallenge(Arc<Entry>);

impl OutstandingChallenge {
    /// Returns the bytes of the challenge.
    pub fn bytes(&self) -> &[u8] {
        &self.0.bytes
    }
}

fn hash<D: sha2::Digest>(identifier: u8, secret: &Secret, challenge: &[u8]) -> Response {
    let mut hash = D::new();
    hash.update([identifier]);
    hash.update(&secret.0);
    hash.update(challenge);
    SmallVec::from_slice(&hash.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::to_hex;

    /// The expected values were computed with Python's hashlib over the bytes 01 "secretsecret" 00..0f.
    #[test]
    fn responses_are_hashes_over_identifier_secret_and_challenge() {
        let challenge: Vec<u8> = (0..16).collect();
        let secret = Secret::new("secretsecret");
        let hex = |algorithm: Algorithm| to_hex(&algorithm.respond(1, &secret, &challenge));
        assert_eq!(hex(Algorithm::Md5), "0x226dc576c33f04ff9c3a200ffe35f442");
        assert_eq!(
            hex(Algorithm::Sha1),
            "0xae35ac1694de2cf7e68e790fbface9a28501fed7"
        );
        assert_eq!(
            hex(Algorithm::Sha256),
            "0x024aef34e176668b34ec2bf7f5525e3bf7f0e94d7cec77cb07d08c3d5a8e23ca"
        );
        assert_eq!(
            hex(Algorithm::Sha3),
            "0xe2bd0aba5f885a39aa4fbebccc63203c2f728f034cbaf009b44c2f0c5544f172"
        );
    }

    #[test]
    fn registered_numbers_are_5_to_8() {
        let numbers: Vec<u8> = Algorithm::ALL
            .iter()
            .map(|algorithm| algorithm.number())
            .collect();
        assert_eq!(numbers, [5, 6, 7, 8]);
        assert_eq!(Algorithm::from_number(56), None);
        assert_eq!(Algorithm::from_number(7), Some(Algorithm::Sha256));
    }

    #[test]
    fn lists_of_algorithms_are_names_in_order() {
        let parsed = Algorithm::parse_list("SHA3-256,SHA256 sha-1,MD5").unwrap();
        let numbers: Vec<u8> = parsed.iter().map(|one| one.number()).collect();
        assert_eq!(numbers, [8, 7, 6, 5]);
        assert_eq!(Algorithm::list(&parsed), "sha3-256 sha256 sha1 md5");
        assert_eq!(
            Algorithm::parse_list("md5 sha1"),
            Some(vec![Algorithm::Md5, Algorithm::Sha1])
        );
        for wrong in ["", " ", "sha512", "md5 md5", "5", "md5;sha1"] {
            assert_eq!(Algorithm::parse_list(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn challenge_is_outstanding_until_its_last_login_ends() {
        static SET: OutstandingChallenges = OutstandingChallenges::new();
        let first = SET.add(vec![1; 16]);
        let second = SET.add(vec![1; 16]);
        assert!(SET.contains(&[1; 16]) && !SET.contains(&[2; 16]));
        drop(first.clone());
        drop(first);
        assert!(SET.contains(&[1; 16]), "the second login has not ended");
        drop(second);
        assert!(!SET.contains(&[1; 16]));
    }

    #[test]
    fn wrong_response_or_length_does_not_verify() {
        let secret = Secret::new("secretsecret");
        let mut right = Algorithm::Md5.respond(9, &secret, b"challenge");
        assert!(Algorithm::Md5.verify(9, &secret, b"challenge", &right));
        assert!(!Algorithm::Md5.verify(8, &secret, b"challenge", &right));
        assert!(!Algorithm::Md5.verify(9, &secret, b"challenge", &right[..15]));
        right[0] ^= 1;
        assert!(!Algorithm::Md5.verify(9, &secret, b"challenge", &right));
    }

    #[test]
    fn debug_shows_nothing_of_a_secret() {
        assert_eq!(format!("{:?}", Secret::new("very secret")), "Secret(..)");
    }
}
