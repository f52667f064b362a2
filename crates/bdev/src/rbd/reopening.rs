//! Opens an image again after its client was blocklisted or the image was removed.
//!
//! The creator of a blocklist entry relies on the absence of further writes. A new connection would have another address and evade the
//! entry. Therefore the image is opened again only when the cluster answers the old connection: the entry was removed or has expired. A
//! daemon that has excluded this one ([`super::peers`]) relies only on the end of writes over the old connection: then the image is opened
//! again at once, over a new one.
//!
//! Until then I/O fails, even if librbd would execute it: objects of a removed image would be read as zeroes, and writes be lost. The image
//! must be the same and keep the promises made to clients; another one of its name is another disk. A thread started when the image is
//! opened does this: a thread started by a worker would inherit its sandbox and reach no cluster.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock, PoisonError, Weak};
use std::time::Duration;

use block::Backoff;
use librbd::{Cluster, Image};

use super::medium::ImageMedium;
use super::{RbdLock, Settings, SharedRbd, lock};
use crate::OpenError;
use crate::remote_state::RemoteState;

/// First pause between attempts; doubles up to the longest.
const WAIT_FIRST: Duration = Duration::from_secs(1);
const WAIT_LONGEST: Duration = Duration::from_secs(10);

/// Time limit for rejoining the shared state after the image is open again.
const JOIN_LIMIT: Duration = Duration::from_secs(30);

/// Metadata key that need not exist: reading it queries the cluster.
const ASKED: &str = "lunette.fence";

/// Reason why an image must be opened again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LossReason {
    Blocklisted,
    /// The header, the snapshot or the pool is gone.
    Removed,
}

impl LossReason {
    /// Classifies an errno of librbd, from I/O or the header.
    pub(super) fn of_errno(errno: i32) -> Option<LossReason> {
        match errno {
            libc::ESHUTDOWN => Some(LossReason::Blocklisted),
            libc::ENOENT => Some(LossReason::Removed),
            _ => None,
        }
    }

    fn reason(self) -> &'static str {
        match self {
            LossReason::Blocklisted => {
                "this client is blocklisted; hint: see `ceph osd blocklist ls`"
            }
            LossReason::Removed => "the image, its snapshot or its pool was removed",
        }
    }
}

/// Availability of the image, as reported by I/O or the header.
#[derive(Default)]
pub(super) struct Availability {
    is_unavailable: AtomicBool,
    /// Channel to the thread that opens the image again.
    loss: OnceLock<Sender<LossReason>>,
    pub(super) state: RemoteState,
}

impl SharedRbd {
    /// Marks the image of this generation as lost: it gets no more I/O. Does not block.
    pub(super) fn lose(self: &Arc<SharedRbd>, generation: u64, loss: LossReason) {
        if generation != self.generation()
            || self
                .availability
                .is_unavailable
                .swap(true, Ordering::AcqRel)
        {
            return;
        }
        // The thread receives as long as the image exists.
        if let Some(thread) = self.availability.loss.get() {
            thread.send(loss).ok();
        }
        self.close_image();
        // After the generation has changed: see `acknowledge`.
        self.lose_cache();
    }

    /// Starts the thread that opens a lost image again. It ends with the image.
    ///
    /// # Errors
    /// The system has no thread left.
    pub(super) fn start_reopening(self: &Arc<SharedRbd>) -> std::io::Result<()> {
        let (sender, losses) = channel();
        let weak = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("rbd-reopen".to_owned());
        thread.spawn(move || {
            while let Ok(loss) = losses.recv() {
                reopen_until_available(&weak, loss);
            }
        })?;
        // Set only here.
        self.availability.loss.set(sender).ok();
        Ok(())
    }

    /// Opens the image again, once the cluster serves this client, or has served it since it was `fenced`. The disk is ready before the
    /// first I/O on it ends.
    fn reopen(self: &Arc<SharedRbd>, fenced: &mut bool) -> Result<(), OpenError> {
        let before = self.image();
        let peers = self.peers();
        if *fenced {
            if peers.is_none() {
                before.metadata(ASKED)?;
                // From now on, breaking a lock of the old connection blocklists that connection again.
                *fenced = false;
            }
            before.cluster().retire();
        }
        let image = self.find_again(&Cluster::connect(&self.options.cluster)?)?;
        if *fenced
            && let Some(peers) = &peers
            && !peers.is_excluded(&image)
        {
            before.metadata(ASKED)?;
        }
        *fenced = false;
        let shape = image.shape()?;
        {
            let is_turn = self.is_turn.lock().unwrap_or_else(PoisonError::into_inner);
            let write_cache = self.settings.write_cache;
            if matches!(self.options.lock, RbdLock::Exclusive | RbdLock::WhileActive) {
                // If the old connection is usable again, its image may still have the lock, which it passes on to no client.
                before.release_lock().ok();
            }
            lock::take(&image, self.options.lock, &shape, write_cache, *is_turn)?;
            self.follow(&image, self.generation() + 1)?;
            self.replace_image(image);
            if *is_turn {
                // Another client may have had the lock since the image was lost.
                self.users.renew_turn();
            }
        }
        if let Some(peers) = &peers {
            // Waiting I/O continues when the disk is ready; I/O aborted by others in the meantime must end before.
            peers.wait_until_current(JOIN_LIMIT);
        }
        self.availability.state.set_ready();
        self.resized(shape.size);
        Ok(())
    }

    /// Opens the image by name and checks that it is the same one.
    fn find_again(&self, cluster: &Arc<Cluster>) -> Result<Arc<Image>, OpenError> {
        let (name, id) = (&self.options.image, self.medium.id());
        let refused = |reason: String| {
            let image = name.to_string();
            Err(OpenError::Image { image, reason })
        };
        let image = match Image::open(cluster, name, self.options.read_only) {
            Ok(image) => image,
            Err(error) if error.errno() == libc::ENOENT => {
                let pool = cluster.pool_of(name)?;
                let found = pool.name_of(id)?;
                let is_listed = match &found {
                    Some(found) => pool.images()?.contains(found),
                    None => false,
                };
                return refused(missing(name, id, found.as_deref(), is_listed));
            }
            Err(error) => return Err(error.into()),
        };
        if ImageMedium::of(&image)?.key() != self.medium.key() {
            return refused(
                "the name now belongs to another image or snapshot; hint: to serve that one, remove the disk and add it again"
                    .to_owned(),
            );
        }
        if !Settings::of(&image)?.keep(&self.settings) {
            return refused(
                "rbd_cache or rbd_skip_partial_discard was turned on while clients use the disk; hint: turn it off, or restart the daemon"
                    .to_owned(),
            );
        }
        Ok(image)
    }
}

/// Explains a missing image: its current name, or the trash if it is not listed.
fn missing(name: &librbd::ImageName, id: &str, found: Option<&str>, is_listed: bool) -> String {
    let mut pool = name.pool.clone();
    if let Some(namespace) = &name.namespace {
        pool = format!("{pool}/{namespace}");
    }
    match (found, &name.snapshot) {
        (None, _) => "the image was removed; hint: remove the disk".to_owned(),
        (Some(_), _) if !is_listed => format!(
            "the image is in the trash; hint: rbd trash restore {pool}/{id} --image {}",
            name.image
        ),
        (Some(now), _) if now != name.image => format!(
            "the image was renamed to {now}; hint: rbd rename {pool}/{now} {pool}/{}, or add the disk again by its new name",
            name.image
        ),
        (Some(_), Some(snapshot)) => {
            format!("the snapshot {snapshot} was removed; hint: remove the disk")
        }
        // The image was found again between the two lookups.
        (Some(_), None) => "the image was not found by its name".to_owned(),
    }
}

fn reopen_until_available(image: &Weak<SharedRbd>, loss: LossReason) {
    let mut backoff = Backoff::new(WAIT_FIRST, WAIT_LONGEST);
    let mut reason = loss.reason().to_owned();
    let (mut fenced, mut logged) = (loss == LossReason::Blocklisted, String::new());
    loop {
        let Some(shared) = image.upgrade() else {
            return;
        };
        if logged != reason {
            tracing::error!(image = %shared.options.image, "image unavailable, I/O fails: {reason}");
            logged.clone_from(&reason);
        }
        let wait = backoff.pause();
        shared.availability.state.set_unavailable(reason, wait);
        drop(shared);
        std::thread::sleep(wait);
        let Some(shared) = image.upgrade() else {
            return;
        };
        match shared.reopen(&mut fenced) {
            Ok(()) => {
                tracing::info!(image = %shared.options.image, "image opened again");
                shared
                    .availability
                    .is_unavailable
                    .store(false, Ordering::Release);
                return;
            }
            Err(error) => reason = error.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use librbd::ImageName;

    use super::*;

    #[test]
    fn error_of_a_missing_image_has_reason_and_hint() {
        let name = |text| ImageName::parse(text).unwrap();
        for (text, found, expected) in [
            ("p/a", None, "was removed"),
            (
                "p/n/a",
                Some("b"),
                "renamed to b; hint: rbd rename p/n/b p/n/a",
            ),
            ("p/a@s", Some("a"), "the snapshot s was removed"),
            ("p/a@s", Some("b"), "renamed to b"),
        ] {
            let reason = missing(&name(text), "10b8", found, true);
            assert!(reason.contains(expected), "{text}: {reason}");
        }
        let trash = "rbd trash restore p/n/10b8 --image a";
        for found in ["a", "b"] {
            assert!(missing(&name("p/n/a"), "10b8", Some(found), false).contains(trash));
        }
    }

    #[test]
    fn errno_classifies_a_lost_image() {
        assert_eq!(LossReason::of_errno(108), Some(LossReason::Blocklisted));
        assert_eq!(LossReason::of_errno(2), Some(LossReason::Removed));
        assert_eq!(LossReason::of_errno(5), None);
    }
}
