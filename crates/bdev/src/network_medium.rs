//! A medium that is the same on every host: an image of a cluster or a unit of a target. Its name there is its key and determines the
//! identity. The address of an NBD export is a key without an identity, because other hosts may have another export at it.

use std::io;
use std::os::fd::OwnedFd;

use block::Identity;
use iscsi_initiator::KnownUnits;
use sha2::{Digest, Sha256};

use crate::{IdentityRecord, Medium, Stamp};

/// A medium with the same key in every daemon.
pub(crate) struct NetworkMedium {
    key: String,
    /// The key determines the identity.
    is_global: bool,
    units: Option<KnownUnits>,
}

impl NetworkMedium {
    pub fn new(key: String) -> NetworkMedium {
        NetworkMedium {
            key,
            is_global: true,
            units: None,
        }
    }

    /// Creates a medium with a key that may name other content on another host. Its identity is random and stored by the daemon.
    pub fn of_this_host(key: String) -> NetworkMedium {
        let is_global = false;
        NetworkMedium {
            is_global,
            ..NetworkMedium::new(key)
        }
    }

    /// Adds the units that the disk has used.
    pub fn with_units(self, units: KnownUnits) -> NetworkMedium {
        let units = Some(units);
        NetworkMedium { units, ..self }
    }
}

impl Medium for NetworkMedium {
    fn key(&self) -> String {
        self.key.clone()
    }

    fn own_identity(&self) -> Option<Identity> {
        if !self.is_global {
            return None;
        }
        let digest = Sha256::digest(&self.key);
        let bits = digest.iter().take(16);
        let bits = bits.fold(0, |bits: u128, byte| bits << 8 | u128::from(*byte));
        Some(Identity::from_random_bits(bits))
    }

    fn known_units(&self) -> Option<&KnownUnits> {
        self.units.as_ref()
    }

    fn stamp(&self) -> Option<Stamp> {
        None
    }

    fn attribute(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(None)
    }

    /// Copies and clones of an image would include the attribute and get its identity; a unit stores none.
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
    fn the_identity_depends_on_the_key_alone() {
        let identity = |key: &str| NetworkMedium::new(key.to_owned()).own_identity().unwrap();
        let image = identity("rbd:9cb3a0c5-1111-4222-8333-444455556666/2/10b8e1f0d7");
        assert_eq!(
            image,
            identity("rbd:9cb3a0c5-1111-4222-8333-444455556666/2/10b8e1f0d7")
        );
        let other = identity("rbd:9cb3a0c5-1111-4222-8333-444455556666/2/10b8e1f0d8");
        assert_ne!(image, other);
        assert_ne!(image.naa(), other.naa());
        assert_ne!(image.serial(), other.serial());
    }
}
