//! A logical unit as what a disk's identity belongs to: its own designator, wherever it is reached.

use std::io;
use std::os::fd::OwnedFd;

use block::Identity;
use iscsi_initiator::{UnitAddress, UnitInfo};
use sha2::{Digest, Sha256};

use crate::{IdentityRecord, Medium, Stamp};

/// The key of a unit. Every daemon that serves it has the same one.
pub(super) struct UnitMedium {
    key: String,
}

impl UnitMedium {
    pub fn of(address: &UnitAddress, info: &UnitInfo) -> UnitMedium {
        let key = match (&info.naa, &info.serial) {
            (Some(naa), _) => format!("iscsi:naa.{naa}"),
            // Serial numbers are unique for their vendor and product at best: a target's units may all have the same.
            (None, serial) => {
                let serial = serial.as_deref().unwrap_or_default();
                format!("iscsi:{}/{}/{serial}", address.target, address.lun)
            }
        };
        UnitMedium { key }
    }
}

impl Medium for UnitMedium {
    fn key(&self) -> String {
        self.key.clone()
    }

    fn own_identity(&self) -> Option<Identity> {
        let digest = Sha256::digest(&self.key);
        let bits = digest.iter().take(16);
        let bits = bits.fold(0, |bits: u128, byte| bits << 8 | u128::from(*byte));
        Some(Identity::from_random_bits(bits))
    }

    fn stamp(&self) -> Option<Stamp> {
        None
    }

    fn attribute(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn set_attribute(&self, _bytes: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn is_copy_of(&self, _record: &IdentityRecord) -> bool {
        false
    }

    fn reopen(&self) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_the_same_at_every_portal_if_it_has_a_designator() {
        let address = |text: &str| text.parse::<UnitAddress>().unwrap();
        let (one, other) = (
            address("iscsi://192.0.2.1/iqn.2026-11.org.example:a/0"),
            address("iscsi://192.0.2.2/iqn.2026-11.org.example:b/1"),
        );
        let named = UnitInfo {
            naa: Some("3a5b000000000001".to_owned()),
            ..UnitInfo::default()
        };
        let identity =
            |address: &UnitAddress, info: &UnitInfo| UnitMedium::of(address, info).own_identity();
        assert_eq!(identity(&one, &named), identity(&other, &named));
        let unnamed = UnitInfo::default();
        assert_ne!(identity(&one, &unnamed), identity(&other, &unnamed));
        assert_ne!(identity(&one, &unnamed), identity(&one, &named));
    }
}
