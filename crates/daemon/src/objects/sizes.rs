//! Disks that other programs resize: block devices that grow, files that shrink. The owner adopts the size and notifies clients.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bdev::Disk;

use super::changes::Change;
use super::draining::Reply;
use super::owner::{Live, Owner};
use super::refusal::{Fault, Refusal};
use super::{Manager, Message};
use crate::blocking_call::blocking;
use config::Config;

/// Maximum wait for a file system that does not respond. After it, the reader gets the old size.
const PATIENCE: Duration = Duration::from_secs(1);

/// Set while a thread checks the sizes of disks.
#[derive(Debug, Default)]
pub(super) struct Looking(AtomicBool);

/// Returns the disks without a configured size, which follow the size of their device.
fn following(config: &Config) -> impl Iterator<Item = &str> {
    let disks = config.disks.iter();
    let following = disks.filter(|disk| disk.backend.size().is_none());
    following.map(|disk| disk.name.as_str())
}

/// Returns the names of such disks if clients have read another size. May block.
fn changed(live: &Live) -> Vec<String> {
    let has_changed = |name: &&str| {
        let disk = live.disks.get(*name);
        disk.is_some_and(|disk| disk.has_other_size())
    };
    let changed = following(&live.config).filter(has_changed);
    changed.map(str::to_owned).collect()
}

impl Manager {
    /// Adopts the sizes of block devices and files for disks without a configured size. Waits at most one second.
    pub async fn follow_sizes(&self, live: Live) {
        // At most one thread waits for a file system that does not respond.
        let looking = Arc::clone(&self.looking);
        if looking.0.swap(true, Ordering::Relaxed) {
            return;
        }
        let messages = self.messages.clone();
        let of_thread = Arc::clone(&looking);
        let look = blocking(move || {
            let changed = changed(&live);
            of_thread.0.store(false, Ordering::Relaxed);
            let (followed, done) = tokio::sync::oneshot::channel();
            if !changed.is_empty() {
                let message: Message = Box::new(move |owner| {
                    owner.adopt_sizes(&changed);
                    // The reader may be gone.
                    followed.send(()).ok();
                });
                // Fails at the end of the daemon, without an owner.
                messages.send(message).ok();
            }
            done
        });
        let followed = async {
            match look.await {
                Ok(done) => drop(done.await),
                // The next call tries again.
                Err(_) => looking.0.store(false, Ordering::Relaxed),
            }
        };
        tokio::time::timeout(PATIENCE, followed).await.ok();
    }
}

impl Owner {
    /// Adopts the sizes of these disks, unless configured.
    fn adopt_sizes(&mut self, names: &[String]) {
        for name in names {
            let is_following = self.configs.wanted.disk(name);
            if is_following.is_some_and(|disk| disk.backend.size().is_none())
                && let Err(error) = self.adopt_size(name)
            {
                tracing::debug!(disk = name, "cannot adopt the changed size: {error}");
            }
        }
    }

    /// Returns a reply to a reload that first adopts changed sizes, on a helper thread.
    pub(super) fn after_sizes(&self, reply: Reply) -> Reply {
        let (live, helpers, messages) = (
            Arc::clone(&self.live),
            self.helpers.clone(),
            self.messages.clone(),
        );
        Box::new(move |made| {
            let look = move || {
                let live = live.read().unwrap_or_else(PoisonError::into_inner).clone();
                let changed = changed(&live);
                let message: Message = Box::new(move |owner| {
                    owner.adopt_sizes(&changed);
                    reply(made);
                });
                // Sending fails only if the owner's thread has ended. The daemon then ends too.
                messages.send(message).ok();
            };
            if let Err(error) = helpers.run("sizes of disks", look) {
                tracing::error!("cannot start a thread to check the sizes of disks: {error}");
            }
        })
    }

    /// Adopts the present size of the block device with this number, or of all block devices, for disks without a configured size.
    pub(crate) fn device_changed(&mut self, number: Option<(u32, u32)>) {
        let is_meant = |name: &&str| {
            let device = self.disks.open.get(*name).map(|disk| disk.device());
            let medium = device.as_ref().and_then(|device| device.medium());
            let found = medium.and_then(bdev::Medium::device_number);
            found.is_some_and(|found| number.is_none_or(|number| number == found))
        };
        let names = following(&self.configs.wanted)
            .filter(is_meant)
            .map(str::to_owned);
        for name in names.collect::<Vec<_>>() {
            self.followed(&name);
        }
    }

    /// Adopts the size of a disk's block device or file, as it was last read ([`bdev::Disk::found_size`]). Replaces a configured size.
    ///
    /// # Errors
    /// Nothing has changed then.
    pub fn follow_disk(&mut self, name: &str) -> Result<(), Refusal> {
        let no_disk = || Refusal::NotFound(Fault::new(format!("there is no disk `{name}`")));
        let (Some(disk), Some(config)) =
            (self.disks.open.get(name), self.configs.wanted.disk(name))
        else {
            return Err(no_disk());
        };
        if self.drains.resizes(name) {
            let fault = Fault::new(format!("disk {name} is being resized"));
            return Err(Refusal::Conflict(vec![fault.help(super::draining::HELP)]));
        }
        let failed = |error: &dyn std::fmt::Display| {
            Refusal::Failed(vec![Fault::new(format!("disk {name}: {error}"))])
        };
        let follows = config.backend.follows_size(is_on_device(disk));
        let Some(follows) = follows else {
            let word = config.backend.word();
            let detail = format!(
                "a {word} disk cannot follow the size of a file or device; hint: give a size"
            );
            return Err(Refusal::Invalid(vec![Fault::at("/size", detail)]));
        };
        let found = disk.known_size().map_err(|error| failed(&error))?;
        if config
            .backend
            .size()
            .is_some_and(|configured| configured != found)
        {
            let configured_size = self
                .configs
                .base
                .disk(name)
                .and_then(|disk| disk.backend.size());
            let change = Change::ResizeDisk(name.to_owned(), found);
            let mut next = change.next(&self.configs.wanted, true)?;
            if follows && configured_size != Some(found) {
                follow_size_of(&mut next, name);
            }
            self.keep(&next, false)?;
            self.set_config(next);
        }
        let followed = self.adopt_size(name).map_err(|error| failed(&error));
        self.publish();
        followed
    }

    /// Adopts a changed size, as it was last read, and notifies clients.
    pub(super) fn adopt_size(&mut self, name: &str) -> Result<(), bdev::ResizeError> {
        let Some(disk) = self.disks.open.get(name) else {
            return Ok(());
        };
        // During a resize, the disk's capacity and its device's size change at different times.
        if self.drains.resizes(name) {
            return Ok(());
        }
        let before = disk.info().geometry.capacity_bytes();
        let Some(now) = disk.follow_size()? else {
            return Ok(());
        };
        if now < before {
            tracing::warn!(
                disk = name,
                before,
                now,
                "disk has shrunk outside of the daemon, the data beyond its new end is lost"
            );
        } else {
            tracing::info!(
                disk = name,
                before,
                now,
                "disk has grown outside of the daemon"
            );
        }
        self.notify_resized(name);
        self.event_bus.publish_size(name, now);
        Ok(())
    }
}

/// Returns true for a disk on a block device of this machine.
pub(super) fn is_on_device(disk: &Disk) -> bool {
    let device = disk.device();
    let medium = device.medium();
    medium.is_some_and(|medium| medium.device_number().is_some())
}

/// Removes the configured size, so that the disk follows the size of its device.
fn follow_size_of(config: &mut Config, name: &str) {
    if let Some(disk) = config.disks.iter_mut().find(|disk| disk.name == name) {
        disk.backend = disk.backend.with_size(None);
    }
}
