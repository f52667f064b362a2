//! Disks whose size others change: an image that another client resizes. The owner takes the new size over and tells clients.

use std::sync::{Arc, mpsc};

use bdev::Disk;

use super::Message;
use super::owner::Owner;

/// The way to the owner.
pub type Messages = mpsc::Sender<Message>;

impl Owner {
    /// From now on messages are read: sizes of all disks, also of those that come, are followed.
    pub fn follow_sizes(&mut self, messages: Messages) {
        self.messages = Some(messages);
        for (name, disk) in &self.disks {
            self.follow_size(name, disk);
        }
    }

    /// Follows the size of a disk that comes.
    pub(super) fn follow_size(&self, name: &str, disk: &Arc<Disk>) {
        let Some(messages) = self.messages.clone() else {
            return;
        };
        let name = name.to_owned();
        disk.engine().on_resized(Box::new(move || {
            let name = name.clone();
            let message: Message = Box::new(move |owner| owner.followed(&name));
            // Without an owner nobody is left to be told.
            messages.send(message).ok();
        }));
        // What has changed before that.
        if let Some(messages) = &self.messages {
            let name = disk.name().to_owned();
            let message: Message = Box::new(move |owner| owner.followed(&name));
            messages.send(message).ok();
        }
    }

    /// A disk may have another size than its clients know.
    pub(super) fn followed(&mut self, name: &str) {
        if let Err(error) = self.take_size_over(name) {
            tracing::warn!("disk {name}: its size cannot be followed: {error}");
        }
    }
}
