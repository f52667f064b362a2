//! Wakes a worker from another thread: an eventfd, or a flag for a simulated ring.
//!
//! Shared by the worker, whose ring watches it, and the notifying threads. Never blocks.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};

use crate::kernel::Kernel;
use crate::{Owner, Ring, WatchId};
#[cfg(feature = "simulated")]
use {crate::slab::Use, guest_memory::IoBuffer};

/// Wakes the worker that [watches](Ring::watch_event) this event on its ring.
#[derive(Debug)]
pub struct Event(Kind);

#[derive(Debug)]
enum Kind {
    Descriptor(OwnedFd),
    #[cfg(feature = "simulated")]
    Flag(std::sync::Arc<std::sync::atomic::AtomicBool>),
}

impl Event {
    /// Creates an event that is not notified.
    ///
    /// # Errors
    /// When no descriptor is available.
    pub fn new() -> io::Result<Event> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Event(Kind::Descriptor(eventfd(0, flags)?)))
    }

    /// Completes a watch. Several notifications may share a completion.
    pub fn notify(&self) {
        match &self.0 {
            // The write fails only if the counter is at its maximum; then a notification is pending
            // anyway.
            Kind::Descriptor(fd) => drop(rustix::io::write(fd, &1u64.to_ne_bytes())),
            #[cfg(feature = "simulated")]
            Kind::Flag(flag) => flag.store(true, std::sync::atomic::Ordering::Release),
        }
    }
}

impl Ring {
    /// Creates an event of the kind that this ring and other rings of its kind can watch.
    ///
    /// # Errors
    /// When no descriptor is available.
    pub fn event(&self) -> io::Result<Event> {
        match &self.io {
            Kernel::Real(_) => Event::new(),
            #[cfg(feature = "simulated")]
            Kernel::Simulated(_) => Ok(Event(Kind::Flag(std::sync::Arc::default()))),
        }
    }

    /// Watches an event until [`Ring::unwatch`]. The event need not be cleared.
    ///
    /// # Errors
    /// When no descriptor is available.
    pub fn watch_event(&mut self, owner: Owner, token: u64, event: &Event) -> io::Result<WatchId> {
        match &event.0 {
            Kind::Descriptor(fd) => {
                let fd = fd.try_clone()?;
                Ok(self.watch(owner, token, fd))
            }
            #[cfg(feature = "simulated")]
            Kind::Flag(flag) => {
                let slot = self.occupy(owner, token, Use::Watch, None, IoBuffer::default());
                self.watches += 1;
                match &mut self.io {
                    Kernel::Simulated(kernel) => {
                        kernel.begin(slot, crate::simulated::Work::Notified(flag.clone()));
                    }
                    Kernel::Real(_) => panic!("event of a simulated ring"),
                }
                Ok(self.watch_id(slot))
            }
        }
    }
}
