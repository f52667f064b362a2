//! A disk's identity: 128 random bits, created once and stored with the disk. All identifiers that clients see derive from
//! it, never from a name.

use std::fmt;
use std::str::FromStr;

/// A UUID of version 4 (RFC 9562, 5.4).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity(u128);

/// Positions of the hyphens in `xxxxxxxx-xxxx-4xxx-yxxx-xxxxxxxxxxxx`.
const HYPHENS: [usize; 4] = [8, 13, 18, 23];
const TEXT_BYTES: usize = 36;

impl Identity {
    /// Identity of a block device that has none.
    pub const UNSET: Identity = Identity::from_random_bits(0);

    /// Creates a random identity.
    ///
    /// # Panics
    /// If the system has no random numbers.
    pub fn random() -> Identity {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("the system gives random numbers");
        Identity::from_random_bits(u128::from_be_bytes(bytes))
    }

    /// Creates an identity from `bits`; six bits are replaced by the version and variant of a random UUID.
    pub const fn from_random_bits(bits: u128) -> Identity {
        let version = (bits & !(0xf << 76)) | (0x4 << 76);
        Identity((version & !(0x3 << 62)) | (0x2 << 62))
    }

    /// Returns the first 20 hexadecimal digits, the length of virtio-blk's `GET_ID` (virtio 1.3, 5.2.6).
    pub fn serial(self) -> String {
        format!("{:020x}", self.0 >> 48)
    }

    /// Returns NAA 3h, locally assigned (SPC-5, 7.7.6.6.4), with the last 15 hexadecimal digits, which are all random.
    pub const fn naa(self) -> u64 {
        (3 << 60) | (self.0 as u64 & ((1 << 60) - 1))
    }

    /// Returns the bits.
    pub const fn bits(self) -> u128 {
        self.0
    }

    /// Returns all 32 hexadecimal digits, without hyphens.
    pub fn digits(self) -> String {
        format!("{:032x}", self.0)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = self.0;
        write!(
            f,
            "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            bits >> 96,
            bits >> 80 & 0xffff,
            bits >> 64 & 0xffff,
            bits >> 48 & 0xffff,
            bits & 0xffff_ffff_ffff
        )
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is not an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoIdentity;

impl FromStr for Identity {
    type Err = NoIdentity;

    /// Parses the `Display` form of [`Identity`] in upper or lower case. Refuses zeroes and other UUIDs that are not
    /// random.
    fn from_str(text: &str) -> Result<Identity, NoIdentity> {
        if text.len() != TEXT_BYTES {
            return Err(NoIdentity);
        }
        let mut bits = 0;
        for (at, byte) in text.bytes().enumerate() {
            if HYPHENS.contains(&at) {
                if byte != b'-' {
                    return Err(NoIdentity);
                }
                continue;
            }
            let digit = char::from(byte).to_digit(16).ok_or(NoIdentity)?;
            bits = bits << 4 | u128::from(digit);
        }
        let identity = Identity(bits);
        match identity == Identity::from_random_bits(bits) {
            true => Ok(identity),
            false => Err(NoIdentity),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "6f9619ff-8b86-4011-b42d-00c04fc964ff";

    #[test]
    fn serial_and_naa_are_its_first_and_last_digits() {
        let identity: Identity = TEXT.parse().unwrap();
        assert_eq!(identity.to_string(), TEXT);
        assert_eq!(identity.serial(), "6f9619ff8b864011b42d");
        assert_eq!(identity.naa(), 0x342d_00c0_4fc9_64ff);
        assert_eq!(identity.digits(), "6f9619ff8b864011b42d00c04fc964ff");
    }

    #[test]
    fn random_ones_differ_and_are_uuids_of_version_4() {
        let (one, other) = (Identity::random(), Identity::random());
        assert_ne!(one, other);
        assert_ne!(one.serial(), other.serial());
        assert_ne!(one.naa(), other.naa());
        assert_eq!(one.naa() >> 60, 3);
        let text = one.to_string();
        assert_eq!(text.as_bytes()[14], b'4');
        assert!(b"89ab".contains(&text.as_bytes()[19]));
        assert_eq!(text.parse(), Ok(one));
    }

    #[test]
    fn non_random_uuid_is_refused() {
        for text in [
            "",
            "d0",
            "6f9619ff8b864011b42d00c04fc964ff",
            "6f9619ff-8b86-4011-b42d-00c04fc964f",
            "6f9619ff-8b86-4011-b42d-00c04fc964ffa",
            "6f9619ff-8b86-1011-b42d-00c04fc964ff",
            "6f9619ff-8b86-4011-042d-00c04fc964ff",
            "6f9619ff-8b86-4011-b42d+00c04fc964ff",
            "6f9619ff-8b86-4011-b42d-00c04fc964fg",
            "00000000-0000-0000-0000-000000000000",
            "6f9619ff-8b86-4011-b42d-00c04fc964\u{fc}",
        ] {
            assert_eq!(text.parse::<Identity>(), Err(NoIdentity), "{text}");
        }
        assert!(TEXT.to_uppercase().parse::<Identity>().is_ok());
    }
}
