//! CHAP (RFC 1994, RFC 7143, 12.1): algorithms, responses, secrets.
//!
//! A [`Secret`] never shows itself; answers are compared in constant time.

use md5::Md5;
use sha1::Sha1;
use sha2::Sha256;
use sha3::Sha3_256;
use smallvec::SmallVec;
use subtle::ConstantTimeEq;

/// The longest name or challenge that is taken (RFC 7143, 12.1.3: up to 1,024 bytes).
pub const CHALLENGE_MAX: usize = 1024;

/// A shared secret. `Debug` shows nothing of it, not even its length.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// A secret of these bytes.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Secret(bytes.into())
    }

    /// Are two secrets the same? In constant time for equal lengths.
    pub fn matches(&self, other: &Secret) -> bool {
        self.0.ct_eq(&other.0).into()
    }

    /// Shorter than the 96 bits that RFC 7143, 9.2.1 asks for?
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

    /// The registered number.
    pub const fn number(self) -> u8 {
        match self {
            Algorithm::Md5 => 5,
            Algorithm::Sha1 => 6,
            Algorithm::Sha256 => 7,
            Algorithm::Sha3 => 8,
        }
    }

    /// The algorithm of a registered number.
    pub fn from_number(number: u64) -> Option<Self> {
        Algorithm::ALL
            .into_iter()
            .find(|algorithm| u64::from(algorithm.number()) == number)
    }

    /// Bytes of a response, and of the challenges that we make.
    pub const fn length(self) -> usize {
        match self {
            Algorithm::Md5 => 16,
            Algorithm::Sha1 => 20,
            Algorithm::Sha256 | Algorithm::Sha3 => 32,
        }
    }

    /// The response to a challenge: the hash over identifier, secret and challenge.
    pub fn respond(self, identifier: u8, secret: &Secret, challenge: &[u8]) -> Response {
        match self {
            Algorithm::Md5 => hash::<Md5>(identifier, secret, challenge),
            Algorithm::Sha1 => hash::<Sha1>(identifier, secret, challenge),
            Algorithm::Sha256 => hash::<Sha256>(identifier, secret, challenge),
            Algorithm::Sha3 => hash::<Sha3_256>(identifier, secret, challenge),
        }
    }

    /// Is this the right response? In constant time.
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

    /// Values computed with Python's hashlib over the bytes 01 "secretsecret" 00..0f.
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
