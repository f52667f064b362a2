//! Disks that change by themselves: an image that another client resizes, or that is back. The owner takes the new size over and tells
//! clients; I/O that waits for a device that is back goes on.

use std::sync::Arc;

use bdev::{Disk, DiskState};

use super::Message;
use super::owner::Owner;
use config::BlockDeviceConfig;

impl Owner {
    /// Follows the size of a disk that comes.
    pub(super) fn follow_size(&self, name: &str, disk: &Arc<Disk>) {
        let messages = self.messages.clone();
        let name = name.to_owned();
        disk.device().on_change(Box::new(move || {
            let name = name.clone();
            let message: Message = Box::new(move |owner| owner.followed(&name));
            // Without an owner nobody is left to be told.
            messages.send(message).ok();
        }));
        // What has changed before that.
        let name = disk.name().to_owned();
        let message: Message = Box::new(move |owner| owner.followed(&name));
        self.messages.send(message).ok();
    }

    /// A disk may have another size than its clients know, or be back.
    pub(super) fn followed(&mut self, name: &str) {
        // A file disk with a configured size may be a part of a larger block device.
        // The search through the configuration is for devices that can be files: there may be thousands of others.
        let disk = self.disks.get(name);
        let may_be_file = disk.is_some_and(|disk| !["null", "ram"].contains(&disk.device().kind()));
        let is_part = may_be_file
            && self.config.disk(name).is_some_and(|disk| {
                let is_file = matches!(disk.backend, BlockDeviceConfig::File { .. });
                is_file && disk.backend.size().is_some()
            });
        if !is_part && let Err(error) = self.take_size_over(name) {
            tracing::warn!("disk {name}: its size cannot be followed: {error}");
        }
        if let Some(disk) = self.disks.get(name)
            && disk.state().waiting().is_some()
            && disk.device().state() == DiskState::Ready
        {
            self.resume(disk);
        }
    }
}
