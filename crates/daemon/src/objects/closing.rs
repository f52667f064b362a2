//! Work that ends a change and may block: disks are shrunk, and devices that nothing needs are closed, on helper threads. The owner makes
//! other changes meanwhile, and the change is answered afterwards.

use std::sync::{Arc, Mutex, PoisonError};

use bdev::{BlockDevice, Disk, ResizeError, Shrinking};

use super::Message;
use super::draining::{Drained, Reply};
use super::owner::{ChangeResult, Owner};
use super::refusal::Refusal;
use super::state_store::Resizing;
use crate::disks::OpenDevice;

/// A device to close.
pub(crate) enum ToClose {
    /// A removed disk.
    Removed(Arc<Disk>),
    /// A disk of a change that failed. A file that was created for it is removed.
    Abandoned(Arc<Disk>),
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
            ToClose::Abandoned(disk) => disk.device().remove_if_created(),
            ToClose::Refused(device) => device.remove_if_created(),
            ToClose::Unused(device) => drop(device),
        }
    }
}

/// State of the change in progress. Changes run one after the other.
#[derive(Default)]
pub(super) struct CurrentChange {
    /// Objects drained for the change.
    pub drained: Drained,
    /// Devices to close on a helper thread.
    pub closing: Vec<ToClose>,
    /// Disks to shrink on helper threads after the change.
    shrinking: Vec<(Arc<Disk>, Shrinking)>,
}

impl CurrentChange {
    /// Closes the devices of a start that failed. The process ends, so no thread does it.
    pub fn close_here(&mut self) {
        self.closing.drain(..).for_each(ToClose::close);
    }

    /// Returns true if a disk is shrunk after the change.
    pub fn shrinks_later(&self, name: &str) -> bool {
        self.shrinking.iter().any(|(disk, _)| disk.name() == name)
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
            closing: std::mem::take(&mut self.current.closing),
            reply,
        };
        let shrinking = std::mem::take(&mut self.current.shrinking);
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
            if let Err(error) = self
                .helpers
                .run(&self.configs.blocking_storage(&name), shrink)
            {
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
            ToClose::Removed(disk) | ToClose::Abandoned(disk) => Some(disk.name().to_owned()),
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

    /// Leaves disks to [`Owner::reply_when_done`], with their record for a crash.
    pub(super) fn shrink_later(&mut self, shrinking: Vec<(Arc<Disk>, Shrinking)>) {
        let resizing = shrinking.iter().map(|(disk, shrinking)| Resizing {
            disk: disk.name().to_owned(),
            from: shrinking.size_before(),
            to: shrinking.size(),
        });
        self.resizes.extend(resizing);
        self.current.shrinking.extend(shrinking);
    }

    fn end_shrink(&mut self, number: u64, disk: &str, shrunk: Result<(), ResizeError>) {
        self.drains.end(number);
        match shrunk {
            Ok(()) => {
                self.resizes.end(std::iter::once(disk));
                self.notify_resized(disk);
                if let Some(known) = self.disks.open.get(disk) {
                    let size = known.info().geometry.capacity_bytes();
                    self.event_bus.publish_size(disk, size);
                }
            }
            Err(error) => {
                tracing::error!(
                    disk,
                    "cannot resize the disk before the next start: {error}"
                );
                // The record stays in the file for the next start.
                self.resizes.remove(std::iter::once(disk));
            }
        }
        self.publish();
    }
}
