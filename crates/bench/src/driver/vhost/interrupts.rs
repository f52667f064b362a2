//! The event descriptor that a device signals as its interrupt. The bench wakes its own threads through the same descriptor, and these
//! wake-ups do not count as interrupts.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::Result;
use rustix::event::{EventfdFlags, eventfd};

/// Value that a [`Waker`] adds to the counter. A device adds 1, so the lower half of the counter is the number of interrupts.
const WAKE_UP: u64 = 1 << 32;

pub(super) struct Interrupts {
    descriptor: OwnedFd,
    count: u64,
}

impl Interrupts {
    pub fn new() -> Result<Interrupts> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Interrupts {
            descriptor: eventfd(0, flags)?,
            count: 0,
        })
    }

    /// Returns the number of interrupts so far.
    pub fn count(&mut self) -> u64 {
        let mut counter = [0; 8];
        // An error means no interrupts since the last call.
        if rustix::io::read(&self.descriptor, &mut counter).is_ok() {
            self.count += u64::from_ne_bytes(counter) % WAKE_UP;
        }
        self.count
    }

    pub fn waker(&self) -> Result<Waker> {
        Ok(Waker(self.descriptor.try_clone()?))
    }
}

impl AsFd for Interrupts {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Wakes a thread that waits for an interrupt.
pub struct Waker(OwnedFd);

impl Waker {
    /// Wakes the thread.
    pub fn wake(&self) {
        // A full counter means that a wake-up is already pending.
        rustix::io::write(&self.0, &WAKE_UP.to_ne_bytes()).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wake_ups_do_not_count_as_interrupts() -> Result<()> {
        let mut interrupts = Interrupts::new()?;
        let waker = interrupts.waker()?;
        waker.wake();
        assert_eq!(interrupts.count(), 0);
        for _ in 0..3 {
            waker.wake();
            rustix::io::write(&interrupts, &1u64.to_ne_bytes())?;
        }
        assert_eq!((interrupts.count(), interrupts.count()), (3, 3));
        Ok(())
    }
}
