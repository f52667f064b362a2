//! Write access of other clients to a disk's image.
//!
//! With [`RbdLock::WhileActive`] the exclusive lock follows the use of the disk ([`crate::turn_lock`]). After the first
//! `rbd_lock_acquire`, librbd neither hands the lock over nor acquires it for a write, so a write without the lock fails.

use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

pub use block::RbdLock;
use librbd::{Error, Image, ImageShape, LockMode};

use super::{Rbd, SharedRbd};
use crate::turn_lock::{self, TurnLocks, Users};
use crate::{OnTurn, OpenError, TurnDevice};

/// Features that need a single writer, with the bits of `RBD_FEATURE_*`.
const ONE_WRITER: [(u64, &str); 4] = [
    (1 << 6, "journaling"),
    (1 << 4, "fast-diff"),
    (1 << 3, "object-map"),
    (EXCLUSIVE_LOCK, "exclusive-lock"),
];
const EXCLUSIVE_LOCK: u64 = 1 << 2;

/// Takes the lock of a mode, or refuses an image that does not support it. `is_turn`: the disk is in use. May block.
pub(super) fn take(
    image: &Arc<Image>,
    lock: RbdLock,
    shape: &ImageShape,
    write_cache: bool,
    is_turn: bool,
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
        RbdLock::Exclusive | RbdLock::WhileActive if image.is_read_only() => {
            refused("a read-only disk takes no lock; hint: omit lock=".to_owned())
        }
        RbdLock::Exclusive | RbdLock::WhileActive if !has_lock => refused(format!(
            "the image has no exclusive lock; hint: rbd feature enable {} exclusive-lock",
            image.name()
        )),
        RbdLock::WhileActive if !is_turn => Ok(()),
        RbdLock::Exclusive | RbdLock::WhileActive => Ok(image.acquire_lock(LockMode::Exclusive)?),
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

impl TurnLocks for SharedRbd {
    fn users(&self) -> &Users {
        &self.users
    }

    fn object(&self) -> String {
        format!("image {}", self.options.image)
    }

    fn lock_service(&self) -> &'static str {
        "the cluster (`ceph -s`) and the client that has the lock (`rbd lock ls`)"
    }

    fn begin_turn(&self) -> io::Result<()> {
        let mut is_turn = self.is_turn.lock().unwrap_or_else(PoisonError::into_inner);
        let image = self.image();
        image
            .wait_for_lock(LockMode::Exclusive)
            .map_err(|error| self.lock_error(error))?;
        *is_turn = true;
        self.size.changed(image.shape()?.size);
        Ok(())
    }

    fn end_turn(&self) -> io::Result<()> {
        let mut is_turn = self.is_turn.lock().unwrap_or_else(PoisonError::into_inner);
        *is_turn = false;
        match self.is_closed() {
            // Another client has broken the lock of a lost image.
            true => Ok(()),
            false => match self.cached.release_with(|| self.image().wait_for_unlock()) {
                // Another client has broken the lock, or an earlier attempt has released it.
                Err(error) if error.errno() == libc::EINVAL => Ok(()),
                released => Ok(released?),
            },
        }
    }
}

impl SharedRbd {
    fn lock_error(&self, error: Error) -> io::Error {
        match error.errno() {
            libc::EBUSY | libc::EROFS => {
                let image = &self.options.image;
                io::Error::new(
                    io::ErrorKind::ResourceBusy,
                    format!(
                        "image {image}: another client has the exclusive lock; hint: find the client with rbd lock ls {image}"
                    ),
                )
            }
            _ => error.into(),
        }
    }
}

impl TurnDevice for Rbd {
    fn wait_for_release(&self, until: Duration) {
        turn_lock::wait_for_release(&*self.shared, until);
    }

    fn on_turn(&self, on_turn: OnTurn) {
        self.shared.users.on_turn(on_turn);
    }

    fn release_error(&self) -> Option<String> {
        self.shared.users.release_error()
    }
}
