//! Disks that change without a request: a resized image or a device that is available again. The owner adopts the size, notifies clients
//! and resumes waiting I/O.

use std::sync::Arc;

use bdev::{Disk, DiskState};

use super::Message;
use super::owner::Owner;
use super::sizes::is_on_device;

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
        let (messages, of_turns) = (self.messages.clone(), name.to_owned());
        disk.on_turn_begin(move |turn| {
            let name = of_turns.clone();
            let message: Message = Box::new(move |owner| owner.turn_begun(&name, turn));
            // Fails at the end of the daemon, without an owner.
            messages.send(message).ok();
        });
        // Handles changes before the callback was registered.
        let name = disk.name().to_owned();
        let message: Message = Box::new(move |owner| owner.followed(&name));
        self.messages.send(message).ok();
    }

    /// Adopts the size of a disk that another daemon may have changed before this turn. Replaces a configured size, except that of the first
    /// part of a block device.
    fn turn_begun(&mut self, name: &str, turn: u64) {
        let Some(disk) = self.disks.open.get(name).cloned() else {
            return;
        };
        let config = self.configs.wanted.disk(name);
        let is_sized = config.is_some_and(|disk| disk.backend.size().is_some());
        let is_part = is_sized && is_on_device(&disk);
        if is_sized
            && !is_part
            && disk.known_size().ok() != config.and_then(|disk| disk.backend.size())
            && let Err(refusal) = self.follow_disk(name)
        {
            tracing::warn!(
                disk = name,
                "cannot store the size that another daemon has set: {refusal}; hint: lunette disk resize {name}"
            );
        }
        // The guest may already use the new size.
        if !is_part && let Err(error) = self.adopt_size(name) {
            tracing::warn!(disk = name, "cannot adopt the changed size: {error}");
        }
        disk.size_adopted(turn);
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
