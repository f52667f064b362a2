//! What wakes a worker from another thread: an eventfd.
//!
//! Shared by the worker, whose ring watches it, and by whoever has something for the worker. Never blocks.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};

use crate::{Owner, Ring, WatchId};

/// Wakes the worker whose ring [watches](Ring::watch_event) it.
#[derive(Debug)]
pub struct Event(OwnedFd);

impl Event {
    /// Not notified yet.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub fn new() -> io::Result<Event> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Event(eventfd(0, flags)?))
    }

    /// Completes a watch. Several notifications may be one completion.
    pub fn notify(&self) {
        // Only a counter at its maximum refuses, and then a notification is pending anyway.
        rustix::io::write(&self.0, &1u64.to_ne_bytes()).ok();
    }
}

impl Ring {
    /// Watches an event until [`Ring::unwatch`]; it need not be cleared.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub fn watch_event(&mut self, owner: Owner, token: u64, event: &Event) -> io::Result<WatchId> {
        let fd = event.0.try_clone()?;
        Ok(self.watch(owner, token, fd))
    }
}
