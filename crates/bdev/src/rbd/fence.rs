//! A client that the cluster has blocklisted, and its way back.
//!
//! Whoever adds the entry relies on it that nothing is written any more. A new connection would have another address, and pass
//! by it: the image is opened again only when the cluster answers the old connection, so when the entry has been removed or has
//! expired. Until then I/O fails. Another daemon that has excluded this one ([`super::peers`]) relies on no more than that nothing of
//! the old connection is written: then the image is opened again at once, over a new one. Runs on a thread of its own while a client is blocklisted; workers only start it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use librbd::{Cluster, Image};

use super::medium::ImageMedium;
use super::{Shared, lock};
use crate::{DiskState, Medium, OpenError};

/// The first wait; each later one is twice as long, up to the longest.
const WAIT_FIRST: Duration = Duration::from_secs(1);
const WAIT_LONGEST: Duration = Duration::from_secs(30);

/// How long the image, once it is open again, waits for what this daemon has missed of the state that daemons share.
const JOIN_LIMIT: Duration = Duration::from_secs(30);

/// A key of the image's metadata that need not be there: asking for it is asking the cluster.
const ASKED: &str = "lunette.fence";

/// Whether this client is blocklisted, as far as I/O has found out.
#[derive(Default)]
pub(super) struct Fence {
    is_up: AtomicBool,
    /// Why the image is not there, and when it is tried next.
    away: Mutex<Option<(String, Instant)>>,
}

impl Fence {
    pub(super) fn state(&self) -> DiskState {
        match &*self.away.lock().unwrap_or_else(PoisonError::into_inner) {
            None => DiskState::Ready,
            Some((reason, next_try)) => DiskState::Unavailable {
                reason: reason.clone(),
                next_try: next_try.saturating_duration_since(Instant::now()),
            },
        }
    }

    fn set(&self, away: Option<(String, Instant)>) {
        *self.away.lock().unwrap_or_else(PoisonError::into_inner) = away;
    }
}

impl Shared {
    /// An I/O on the image of this generation has failed because the client is blocklisted. Does not block.
    pub(super) fn found_fence(self: &Arc<Shared>, generation: u64) {
        if generation != self.generation() || self.fence.is_up.swap(true, Ordering::AcqRel) {
            return;
        }
        let fenced = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("rbd-fence".to_owned());
        if let Err(error) = thread.spawn(move || come_back(&fenced)) {
            // The next I/O tries again.
            self.fence.is_up.store(false, Ordering::Release);
            tracing::error!(image = %self.options.image, "no thread to open the image again: {error}");
        }
    }

    /// Opens the image again, once the cluster serves this client. The disk is ready before the first I/O on it ends.
    fn reopen(&self) -> Result<(), OpenError> {
        let before = self.image();
        let peers = self.peers();
        if peers.is_none() {
            before.metadata(ASKED)?;
        }
        before.cluster().retire();
        let cluster = Cluster::connect(&self.options.cluster)?;
        let image = Image::open(&cluster, &self.options.image, self.options.read_only)?;
        if ImageMedium::of(&image)?.key() != self.medium.key() {
            return Err(OpenError::Image {
                image: image.name().to_string(),
                what: "another image has this name".to_owned(),
            });
        }
        if let Some(peers) = &peers
            && !peers.is_excluded(&image)
        {
            before.metadata(ASKED)?;
        }
        let shape = image.shape()?;
        lock::take(&image, self.options.lock, &shape, self.write_cache)?;
        self.size.follow(&image)?;
        self.replace_image(image);
        if let Some(peers) = &peers {
            // I/O that waits goes on when the disk is ready: what others have aborted meanwhile has to end before.
            peers.wait_until_current(JOIN_LIMIT);
        }
        self.fence.set(None);
        self.size.changed(shape.size);
        Ok(())
    }
}

fn come_back(fenced: &Weak<Shared>) {
    let (mut wait, mut reason) = (WAIT_FIRST, "this client is blocklisted".to_owned());
    loop {
        match fenced.upgrade() {
            None => return,
            Some(shared) if wait == WAIT_FIRST => {
                tracing::error!(image = %shared.options.image, "{reason}: I/O fails; hint: see `ceph osd blocklist ls`");
                shared.fence.set(Some((reason, Instant::now() + wait)));
            }
            Some(shared) => shared.fence.set(Some((reason, Instant::now() + wait))),
        }
        std::thread::sleep(wait);
        let Some(shared) = fenced.upgrade() else {
            return;
        };
        match shared.reopen() {
            Ok(()) => {
                tracing::info!(image = %shared.options.image, "the image is open again");
                shared.fence.is_up.store(false, Ordering::Release);
                return;
            }
            Err(error) => reason = error.to_string(),
        }
        wait = (wait * 2).min(WAIT_LONGEST);
    }
}
