//! Write access of other clients to a disk's image.

use std::sync::Arc;

pub use block::RbdLock;
use librbd::{Image, ImageShape, LockMode};

use crate::OpenError;

/// Features that need a single writer, with the bits of `RBD_FEATURE_*`.
const ONE_WRITER: [(u64, &str); 4] = [
    (1 << 6, "journaling"),
    (1 << 4, "fast-diff"),
    (1 << 3, "object-map"),
    (EXCLUSIVE_LOCK, "exclusive-lock"),
];
const EXCLUSIVE_LOCK: u64 = 1 << 2;

/// Takes the lock of a mode, or refuses an image that does not support it. May block.
pub(super) fn take(
    image: &Arc<Image>,
    lock: RbdLock,
    shape: &ImageShape,
    write_cache: bool,
) -> Result<(), OpenError> {
    let refused = |reason: String| {
        Err(OpenError::Image {
            image: image.name().to_string(),
            reason,
        })
    };
    let has_lock = shape.features & EXCLUSIVE_LOCK != 0;
    match lock {
        RbdLock::Cooperative => Ok(()),
        RbdLock::Exclusive if image.is_read_only() => {
            refused("a read-only disk takes no lock; hint: omit lock=".to_owned())
        }
        RbdLock::Exclusive if !has_lock => refused(format!(
            "the image has no exclusive lock; hint: rbd feature enable {} exclusive-lock",
            image.name()
        )),
        RbdLock::Exclusive => Ok(image.acquire_lock(LockMode::Exclusive)?),
        RbdLock::Shared if has_lock => refused(one_writer(shape.features, image)),
        RbdLock::Shared if write_cache => refused(format!(
            "rbd_cache is on, and the caches of several clients are not coherent; hint: rbd config image set {} rbd_cache false",
            image.name()
        )),
        RbdLock::Shared => Ok(()),
    }
}

fn one_writer(features: u64, image: &Image) -> String {
    let named = ONE_WRITER.iter().filter(|(bit, _)| features & bit != 0);
    let names: Vec<&str> = named.map(|(_, name)| *name).collect();
    format!(
        "features of the image require a single writer; hint: rbd feature disable {} {}",
        image.name(),
        names.join(" ")
    )
}
