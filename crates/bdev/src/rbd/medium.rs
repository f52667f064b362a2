//! The medium of an image's identity: cluster, pool, image id and snapshot id, unchanged by a rename.

use std::sync::Arc;

use librbd::{Error, Image};

use crate::Medium;
use crate::network_medium::NetworkMedium;

/// An image or snapshot.
pub(super) struct ImageMedium {
    medium: NetworkMedium,
    id: String,
}

impl ImageMedium {
    /// Queries the cluster. May block.
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
        Ok(ImageMedium {
            medium: NetworkMedium::new(key),
            id,
        })
    }

    /// Returns the identifier of the image in its pool.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn medium(&self) -> &dyn Medium {
        &self.medium
    }

    pub(super) fn key(&self) -> String {
        self.medium.key()
    }
}
