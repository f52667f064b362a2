//! Watches existence and name of an image, through the object of its name.
//!
//! `rbd rename` and `rbd rm` remove that object, `rbd_id.NAME`, and the cluster notifies its watchers at once. librbd does not report a
//! missing header of an open image. No client sends notifications through this object that need an answer. One thread per open image waits,
//! and ends with the [`Presence`]. Tests: `tests/tests/rbd_faults.rs`.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::time::Duration;

use librbd::{Error, Image, ImageName, Object, Watch};

use super::SharedRbd;
use super::reopening::LossReason;

/// Time after which the cluster considers a watcher dead.
const WATCH_TIMEOUT: Duration = Duration::from_secs(30);

/// First pause between attempts to watch; doubles up to the longest.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_LONGEST: Duration = Duration::from_secs(30);

/// A wait without limit.
const FOR_EVER: Duration = Duration::from_secs(u64::MAX >> 1);

enum Event {
    Lost,
    Stop,
}

/// The watch on an image; dropping it ends the watch.
pub(super) struct Presence(Sender<Event>);

impl Drop for Presence {
    fn drop(&mut self) {
        // Fails only if the thread has ended already.
        self.0.send(Event::Stop).ok();
    }
}

/// Watches an image that has this generation or will get it. Does not block.
pub(super) fn follow(
    shared: Weak<SharedRbd>,
    image: &Arc<Image>,
    id: &str,
    generation: u64,
) -> Result<Presence, Error> {
    let (sender, events) = mpsc::channel();
    let mut follower = Follower {
        shared,
        image: Arc::downgrade(image),
        id: id.to_owned(),
        name: image.name().clone(),
        generation,
        sender: sender.clone(),
    };
    let thread = std::thread::Builder::new().name("rbd-presence".to_owned());
    let spawned = thread.spawn(move || follower.run(&events));
    spawned.map_err(|error| {
        let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
        failed("start a thread to watch the image", errno)
    })?;
    Ok(Presence(sender))
}

struct Follower {
    shared: Weak<SharedRbd>,
    image: Weak<Image>,
    id: String,
    /// Name under which the image was found last.
    name: ImageName,
    generation: u64,
    sender: Sender<Event>,
}

impl Follower {
    fn run(&mut self, events: &Receiver<Event>) {
        let mut retry = RETRY_FIRST;
        loop {
            let watch = self.watch();
            let wait = match &watch {
                Ok(_) => {
                    retry = RETRY_FIRST;
                    FOR_EVER
                }
                Err(error) => {
                    // A user with read access only may not watch.
                    if matches!(error.errno(), libc::EPERM | libc::EACCES | libc::EBADF) {
                        return;
                    }
                    if let Some(lost) = LossReason::of_errno(error.errno()) {
                        return self.lose(lost);
                    }
                    let before = retry;
                    retry = (retry * 2).min(RETRY_LONGEST);
                    before
                }
            };
            match events.recv_timeout(wait) {
                Ok(Event::Lost) | Err(RecvTimeoutError::Timeout) => {}
                Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Finds the image's current name and watches its object. ENOENT: the image was removed.
    fn watch(&mut self) -> Result<Watch, Error> {
        let image = self.image.upgrade();
        let image = image.ok_or_else(|| failed("watch a closed image", libc::EBADF))?;
        let pool = image.cluster().pool_of(&self.name)?;
        let found = pool.name_of(&self.id)?;
        let found = found.ok_or_else(|| failed("find the image", libc::ENOENT))?;
        if found != self.name.image {
            tracing::warn!(
                image = %image.name(),
                "image renamed to {found}: it stays in service, but a restart will not find it by its old name"
            );
            self.name.image = found;
        }
        let object = Object::beside(&image, &format!("rbd_id.{}", self.name.image))?;
        let (own, lost) = (Arc::clone(&object), self.sender.clone());
        let watch = object.watch(
            WATCH_TIMEOUT,
            move |notification| own.acknowledge(&notification, &[]),
            move |_| drop(lost.send(Event::Lost)),
        );
        watch.map_err(|error| match error.errno() {
            // The image is in the trash and has no name, or was just renamed.
            libc::ENOENT => failed("watch the name of the image", libc::EAGAIN),
            _ => error,
        })
    }

    fn lose(&self, lost: LossReason) {
        if let Some(shared) = self.shared.upgrade() {
            shared.lose(self.generation, lost);
        }
    }
}

fn failed(operation: &str, errno: i32) -> Error {
    Error::Failed {
        operation: operation.to_owned(),
        errno,
        hint: String::new(),
    }
}
