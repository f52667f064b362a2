//! The object beside an image with the state that its daemons share.
//!
//! | bytes | content |
//! |---|---|
//! | 8 | `LunState` |
//! | 8 | version, incremented by each replacement |
//! | 16 | random, new with each replacement |
//! | 2 | number of members; for each: 16 bytes instance, 2 bytes length, client address |
//! | 4 | length of the state, then the state |
//!
//! The first 32 bytes guard a replacement. Every client that may write the pool can write anything here: every length is checked.

use crate::STATE_MAX;

const MAGIC: [u8; 8] = *b"LunState";

/// Length in bytes of the prefix that differs between records.
pub(super) const GUARD_LENGTH: usize = 32;

pub(super) const MEMBERS_MAX: usize = 64;

/// Maximum length of an address in bytes; Ceph lists all addresses of a client.
const ADDRESS_MAX: usize = 512;

/// Maximum version. It never wraps around: daemons would see an earlier state.
const VERSION_MAX: u64 = u64::MAX / 2;

/// Maximum length of a record in bytes.
pub(super) const RECORD_MAX: usize =
    GUARD_LENGTH + 2 + MEMBERS_MAX * (16 + 2 + ADDRESS_MAX) + 4 + STATE_MAX;

/// A member: one daemon since it has joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Random, new with each join.
    pub instance: [u8; 16],
    /// Client address for the blocklist of the cluster.
    pub address: String,
}

/// Content of the object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedRecord {
    /// Number of replacements.
    pub version: u64,
    /// Random. Distinguishes records of one version if the object was created again.
    pub nonce: [u8; 16],
    /// Members.
    pub members: Vec<Member>,
    /// Shared state, opaque to this module.
    pub state: Vec<u8>,
}

impl SharedRecord {
    /// Parses the output of [`SharedRecord::encode`]; `None` for anything different.
    pub fn decode(bytes: &[u8]) -> Option<SharedRecord> {
        let (magic, rest) = bytes.split_first_chunk::<8>()?;
        let (version, rest) = rest.split_first_chunk::<8>()?;
        let (nonce, rest) = rest.split_first_chunk::<16>()?;
        let (count, mut rest) = rest.split_first_chunk::<2>()?;
        let count = usize::from(u16::from_be_bytes(*count));
        let version = u64::from_be_bytes(*version);
        if *magic != MAGIC || version > VERSION_MAX || count > MEMBERS_MAX {
            return None;
        }
        let mut members = Vec::new();
        for _ in 0..count {
            let (instance, more) = rest.split_first_chunk::<16>()?;
            let (length, more) = more.split_first_chunk::<2>()?;
            let length = usize::from(u16::from_be_bytes(*length));
            let (address, more) = more.split_at_checked(length)?;
            if length > ADDRESS_MAX {
                return None;
            }
            members.push(Member {
                instance: *instance,
                address: std::str::from_utf8(address).ok()?.to_owned(),
            });
            rest = more;
        }
        let (length, state) = rest.split_first_chunk::<4>()?;
        let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
        if length > STATE_MAX || state.len() != length {
            return None;
        }
        Some(SharedRecord {
            version,
            nonce: *nonce,
            members,
            state: state.to_vec(),
        })
    }

    /// Encodes the record; `None` if it is too large.
    pub fn encode(&self) -> Option<Vec<u8>> {
        if self.members.len() > MEMBERS_MAX
            || self.state.len() > STATE_MAX
            || self.version > VERSION_MAX
        {
            return None;
        }
        let mut bytes = self.guard().to_vec();
        bytes.extend((self.members.len() as u16).to_be_bytes());
        for member in &self.members {
            if member.address.len() > ADDRESS_MAX {
                return None;
            }
            bytes.extend(member.instance);
            bytes.extend((member.address.len() as u16).to_be_bytes());
            bytes.extend(member.address.as_bytes());
        }
        bytes.extend((self.state.len() as u32).to_be_bytes());
        bytes.extend(&self.state);
        Some(bytes)
    }

    /// Returns the first bytes of the object while this record is in it.
    pub(super) fn guard(&self) -> [u8; GUARD_LENGTH] {
        let mut guard = [0; GUARD_LENGTH];
        guard[..8].copy_from_slice(&MAGIC);
        guard[8..16].copy_from_slice(&self.version.to_be_bytes());
        guard[16..].copy_from_slice(&self.nonce);
        guard
    }

    /// Returns the successor: next version, new nonce.
    pub(super) fn next(&self) -> SharedRecord {
        SharedRecord {
            version: self.version + 1,
            nonce: super::peers::random(),
            ..self.clone()
        }
    }

    pub(super) fn has(&self, instance: &[u8; 16]) -> bool {
        self.members.iter().any(|one| one.instance == *instance)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn members() -> impl Strategy<Value = Vec<Member>> {
        let member = (any::<[u8; 16]>(), "[a-z0-9:/.,]{0,64}");
        let member = member.prop_map(|(instance, address)| Member { instance, address });
        vec(member, 0..5)
    }

    fn record() -> impl Strategy<Value = SharedRecord> {
        let fields = (
            0..=VERSION_MAX,
            any::<[u8; 16]>(),
            members(),
            vec(any::<u8>(), 0..100),
        );
        fields.prop_map(|(version, nonce, members, state)| SharedRecord {
            version,
            nonce,
            members,
            state,
        })
    }

    proptest! {
        #[test]
        fn whole_record_is_decoded_and_a_truncated_one_refused(record in record()) {
            let bytes = record.encode().unwrap();
            prop_assert_eq!(&bytes[..GUARD_LENGTH], &record.guard());
            prop_assert_eq!(SharedRecord::decode(&bytes), Some(record.clone()));
            for length in 0..bytes.len() {
                prop_assert_eq!(SharedRecord::decode(&bytes[..length]), None);
            }
            prop_assert_eq!(SharedRecord::decode(&[&bytes[..], &[0]].concat()), None);
        }

        #[test]
        fn decoded_bytes_encode_to_the_same_record(
            mut bytes in vec(any::<u8>(), 0..200),
            is_record in any::<bool>(),
        ) {
            if is_record && bytes.len() > 40 {
                bytes[..8].copy_from_slice(&MAGIC);
                bytes[32..34].copy_from_slice(&[0, 1]);
            }
            if let Some(record) = SharedRecord::decode(&bytes) {
                prop_assert_eq!(record.encode(), Some(bytes));
            }
        }
    }

    fn sample() -> SharedRecord {
        SharedRecord {
            version: 0x0102,
            nonce: [7; 16],
            members: vec![Member {
                instance: [9; 16],
                address: "a/1".to_owned(),
            }],
            state: vec![5, 6],
        }
    }

    #[test]
    fn record_of_each_release_is_decoded() {
        let releases = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/compat");
        let mut decoded = 0;
        for entry in std::fs::read_dir(releases).unwrap() {
            let path = entry.unwrap().path().join("rbd-record.hex");
            let Ok(text) = std::fs::read_to_string(&path) else {
                continue;
            };
            let digits = text.split_whitespace();
            let bytes: Vec<u8> = digits
                .map(|byte| u8::from_str_radix(byte, 16).unwrap())
                .collect();
            let record = SharedRecord::decode(&bytes);
            assert_eq!(record, Some(sample()), "{}", path.display());
            decoded += 1;
        }
        assert!(decoded > 0);
    }

    #[test]
    fn record_has_the_documented_bytes() {
        let record = sample();
        let mut expected = b"LunState\0\0\0\0\0\0\x01\x02".to_vec();
        expected.extend([7; 16]);
        expected.extend([0, 1]);
        expected.extend([9; 16]);
        expected.extend(b"\0\x03a/1\0\0\0\x02\x05\x06");
        assert_eq!(record.encode(), Some(expected));
        let next = record.next();
        assert_eq!((next.version, &next.members), (0x0103, &record.members));
        assert_ne!(next.nonce, record.nonce);
    }

    #[test]
    fn too_large_record_is_refused_in_both_directions() {
        let state = |length| SharedRecord {
            state: vec![0; length],
            ..SharedRecord::default()
        };
        let largest = state(STATE_MAX).encode().unwrap();
        assert!(SharedRecord::decode(&largest).is_some() && largest.len() <= RECORD_MAX);
        assert_eq!(state(STATE_MAX + 1).encode(), None);
        let member = |length| Member {
            instance: [0; 16],
            address: "a".repeat(length),
        };
        let members = |members| SharedRecord {
            members,
            ..SharedRecord::default()
        };
        let most = members(vec![member(ADDRESS_MAX); MEMBERS_MAX]);
        assert!(SharedRecord::decode(&most.encode().unwrap()).is_some());
        assert_eq!(members(vec![member(1); MEMBERS_MAX + 1]).encode(), None);
        assert_eq!(members(vec![member(ADDRESS_MAX + 1)]).encode(), None);
        let last = SharedRecord {
            version: VERSION_MAX,
            ..SharedRecord::default()
        };
        let mut bytes = last.encode().unwrap();
        assert_eq!(SharedRecord::decode(&bytes).as_ref(), Some(&last));
        assert_eq!(last.next().encode(), None);
        bytes[8] |= 0x80;
        assert_eq!(SharedRecord::decode(&bytes), None);
    }
}
