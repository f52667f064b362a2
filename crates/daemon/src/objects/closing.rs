//! Work that ends a change and may block: disks are shrunk, and devices that nothing needs are closed, on helper threads. The owner makes
//! other changes meanwhile, and the change is answered afterwards.

use std::sync::{Arc, Mutex, PoisonError};

use bdev::{BlockDevice, Disk, ResizeError, Shrinking};

use super::Message;
use super::draining::Reply;
use super::owner::{ChangeResult, Owner};
use super::refusal::Refusal;
use super::state_store::Resizing;
use crate::disks::OpenDevice;

/// A device to close.
pub(crate) enum ToClose {
    /// A removed disk.
    Removed(Arc<Disk>),
    /// A disk of a change that failed. A file that was created for it is removed.
    NotMade(Arc<Disk>),
    /// A device that was refused. A file that was created for it is removed.
    Refused(Arc<dyn BlockDevice>),
    /// An attempt that nothing needs.
    Unused(OpenDevice),
}

impl ToClose {
    /// Closes the device. May block.
    pub fn close(self) {
        match self {
            ToClose::Removed(disk) => drop(disk),
            ToClose::NotMade(disk) => disk.device().remove_if_created(),
            ToClose::Refused(device) => device.remove_if_created(),
            ToClose::Unused(device) => drop(device),
        }
    }
}

/// Rest of a change after its disks are shrunk.
struct Rest {
    result: Result<ChangeResult, Refusal>,
    closing: Vec<ToClose>,
    reply: Reply,
}

impl Owner {
    /// Replies when the disks of the change are shrunk and the devices that it does not need are closed.
    pub(super) fn reply_when_done(&mut self, result: Result<ChangeResult, Refusal>, reply: Reply) {
        let rest = Rest {
            result,
            closing: std::mem::take(&mut self.closing),
            reply,
        };
        let shrinking = std::mem::take(&mut self.shrinking);
        if shrinking.is_empty() {
            return self.reply_when_closed(rest);
        }
        // The last disk that is shrunk continues with the rest.
        let rest = Arc::new(Mutex::new(rest));
        for (disk, shrinking) in shrinking {
            let name = disk.name().to_owned();
            let number = self.drains.begin_shrink(&name);
            let (messages, rest) = (self.messages.clone(), Arc::clone(&rest));
            let shrink = move || {
                let shrunk = disk.shrink(shrinking);
                let message: Message = Box::new(move |owner| {
                    owner.end_shrink(number, disk.name(), shrunk);
                    if let Some(rest) = Arc::into_inner(rest) {
                        let rest = rest.into_inner();
                        owner.reply_when_closed(rest.unwrap_or_else(PoisonError::into_inner));
                    }
                });
                // Without an owner the daemon ends. The next start shrinks the disk.
                messages.send(message).ok();
            };
            if let Err(error) = self.helpers.run(&self.blocking_place(&name), shrink) {
                let error = ResizeError::System {
                    size: 0,
                    source: error,
                };
                self.end_shrink(number, &name, Err(error));
            }
        }
        self.publish();
    }

    /// Closes devices on a helper thread and replies then: their files are free.
    fn reply_when_closed(&mut self, rest: Rest) {
        let Rest {
            result,
            closing,
            reply,
        } = rest;
        if closing.is_empty() {
            return reply(result);
        }
        let place = closing.iter().find_map(|one| match one {
            ToClose::Removed(disk) | ToClose::NotMade(disk) => Some(disk.name().to_owned()),
            ToClose::Refused(_) | ToClose::Unused(_) => None,
        });
        let close = move || {
            closing.into_iter().for_each(ToClose::close);
            reply(result);
        };
        // Without a thread the disks are closed here, and the caller gets no reply.
        if let Err(error) = self.helpers.run(&place.unwrap_or_default(), close) {
            tracing::error!("cannot start a thread to close disks: {error}");
        }
    }

    /// Closes devices of a start that failed. The process ends, so no thread does it.
    pub(super) fn close_here(&mut self) {
        self.closing.drain(..).for_each(ToClose::close);
    }

    /// Returns the place of a disk's storage for [`crate::helper_threads::HelperThreads`].
    pub(super) fn blocking_place(&self, disk: &str) -> String {
        let place = self.config.disk(disk);
        let place = place.and_then(|disk| disk.backend.blocking_place());
        place.unwrap_or_else(|| disk.to_owned())
    }

    /// Returns true if a change of the disk's size may block.
    pub(super) fn may_block(&self, disk: &str) -> bool {
        let config = self.config.disk(disk);
        config.is_some_and(|disk| disk.backend.blocking_place().is_some())
    }

    /// Leaves disks to [`Owner::reply_when_done`], with their record for a crash.
    pub(super) fn shrink_later(&mut self, shrinking: Vec<(Arc<Disk>, Shrinking)>) {
        let resizing = shrinking.iter().map(|(disk, shrinking)| Resizing {
            disk: disk.name().to_owned(),
            from: shrinking.size_before(),
            to: shrinking.size(),
        });
        self.growing.extend(resizing);
        self.shrinking.extend(shrinking);
    }

    /// Returns true if the current change leaves a disk to [`Owner::reply_when_done`].
    pub(super) fn shrinks_later(&self, name: &str) -> bool {
        self.shrinking.iter().any(|(disk, _)| disk.name() == name)
    }

    fn end_shrink(&mut self, number: u64, disk: &str, shrunk: Result<(), ResizeError>) {
        self.drains.end(number);
        match shrunk {
            Ok(()) => {
                self.end_growth(std::iter::once(disk));
                self.resized(disk);
                if let Some(known) = self.disks.get(disk) {
                    let size = known.info().geometry.capacity_bytes();
                    self.event_bus.tell_size(disk, size);
                }
            }
            Err(error) => {
                tracing::error!(
                    disk,
                    "cannot resize the disk before the next start: {error}"
                );
                // The record stays in the file for the next start.
                self.growing.retain(|growing| growing.disk != disk);
            }
        }
        self.publish();
    }
}
