//! An image as what a disk's identity belongs to: its cluster, pool, id and snapshot's id, which no rename changes.

use std::io;
use std::os::fd::OwnedFd;

use block::Identity;
use librbd::{Error, Image};
use sha2::{Digest, Sha256};
use std::sync::Arc;

use crate::{IdentityRecord, Medium, Stamp};

/// The key of an image or snapshot. Every daemon that serves the image has the same one.
pub(super) struct ImageMedium {
    key: String,
    id: String,
}

impl ImageMedium {
    /// Asks the cluster; may block.
    pub(super) fn of(image: &Arc<Image>) -> Result<ImageMedium, Error> {
        let name = image.name();
        let mut key = format!("rbd:{}/{}", image.cluster().fsid(), image.pool_id());
        if let Some(namespace) = &name.namespace {
            key = format!("{key}/{namespace}");
        }
        let id = image.id()?;
        key = format!("{key}/{id}");
        if let Some(snapshot) = image.snapshot_id()? {
            key = format!("{key}@{snapshot}");
        }
        Ok(ImageMedium { key, id })
    }

    /// The image's own identifier in its pool.
    pub(super) fn id(&self) -> &str {
        &self.id
    }
}

impl Medium for ImageMedium {
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

    /// Copies and clones take the metadata of an image with them, which would give them its identity.
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
        let identity = |key: &str| {
            let medium = ImageMedium {
                key: key.to_owned(),
                id: String::new(),
            };
            medium.own_identity().unwrap()
        };
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
