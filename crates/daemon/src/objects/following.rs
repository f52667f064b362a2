//! Disks that change without a request: a resized image or a device that is available again. The owner adopts the size, notifies clients
//! and resumes waiting I/O.

use std::sync::Arc;

use bdev::{Disk, DiskState};

use super::Message;
use super::owner::Owner;

impl Owner {
    /// Follows the size of a new disk.
    pub(super) fn follow_size(&self, name: &str, disk: &Arc<Disk>) {
        if let Some(remote) = disk.device().capabilities().remote {
            let messages = self.messages.clone();
            let name = name.to_owned();
            remote.on_change(Box::new(move || {
                let name = name.clone();
                let message: Message = Box::new(move |owner| owner.followed(&name));
                // Fails at the end of the daemon, without an owner.
                messages.send(message).ok();
            }));
        }
        // Handles changes before the callback was registered.
        let name = disk.name().to_owned();
        let message: Message = Box::new(move |owner| owner.followed(&name));
        self.messages.send(message).ok();
    }

    /// Adopts the size of a changed disk and resumes its I/O if the device is available.
    pub(super) fn followed(&mut self, name: &str) {
        if !self.configs.has_sized_file(name)
            && let Err(error) = self.adopt_size(name)
        {
            tracing::warn!(disk = name, "cannot adopt the changed size: {error}");
        }
        if let Some(disk) = self.disks.open.get(name)
            && disk.state().waiting().is_some()
            && disk.device().state() == DiskState::Ready
        {
            self.disks.resume(disk);
        }
    }
}
