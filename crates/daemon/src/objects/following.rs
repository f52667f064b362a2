//! Disks that change by themselves: an image that another client resizes, or that is back. The owner takes the new size over and tells
//! clients; I/O that waits for a device that is back goes on.

use std::collections::HashSet;
use std::sync::Arc;

use bdev::{Disk, DiskState};

use super::Message;
use super::owner::Owner;
use config::{BlockDeviceConfig, Config, DiskConfig};

/// Names of file disks with a configured size. Such a disk does not follow the size of its block device, of which it may be a part.
pub(super) fn sized_files(config: &Config) -> HashSet<String> {
    let is_sized =
        |disk: &&DiskConfig| matches!(disk.backend, BlockDeviceConfig::File { size: Some(_), .. });
    let sized = config.disks.iter().filter(is_sized);
    sized.map(|disk| disk.name.clone()).collect()
}

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
        if !self.sized_files.contains(name)
            && let Err(error) = self.take_size_over(name)
        {
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
