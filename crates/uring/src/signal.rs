//! Writes to a descriptor of the front end: an interrupt, or an error notification.
//!
//! The counter may be full, and the front end may have made it blocking or may do so later. A blocked worker would
//! stall its other clients. A descriptor that is blocking from the start is polled before each write. One that becomes
//! blocking later is detected when the guard interrupts the write: see [`crate::guard`].

use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;

/// A descriptor to signal.
#[derive(Debug)]
pub struct Signal {
    fd: OwnedFd,
    blocks: bool,
}

/// The front end blocked the worker. The descriptor must not be written to any more.
#[derive(Debug, PartialEq, Eq)]
pub struct Blocked;

impl Signal {
    /// Uses an eventfd, or another descriptor passed as one.
    pub fn new(fd: OwnedFd) -> Signal {
        let blocks = !fcntl_getfl(&fd).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK));
        Signal { fd, blocks }
    }

    /// Signals without waiting. If the counter is full, a signal is pending anyway.
    ///
    /// # Errors
    /// When the write blocked nevertheless.
    #[inline]
    pub fn send(&self) -> Result<(), Blocked> {
        if self.blocks && !self.has_room() {
            return Ok(());
        }
        // Fails also if the counter is full or the peer is gone.
        match crate::guard::brief(|| rustix::io::write(&self.fd, &1u64.to_ne_bytes())) {
            Err(Errno::INTR) => Err(Blocked),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    #[cold]
    fn has_room(&self) -> bool {
        let mut wait = [PollFd::new(&self.fd, PollFlags::OUT)];
        poll(&mut wait, Some(&Timespec::default())).is_ok()
            && wait[0].revents().contains(PollFlags::OUT)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn counter(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn each_signal_counts_whether_the_descriptor_blocks_or_not() {
        for flags in [EventfdFlags::NONBLOCK, EventfdFlags::empty()] {
            let fd = eventfd(0, flags).unwrap();
            let signal = Signal::new(fd.try_clone().unwrap());
            signal.send().unwrap();
            signal.send().unwrap();
            assert_eq!(counter(&fd), 2);
        }
    }

    #[test]
    fn full_counter_that_blocks_is_left_alone() {
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let signal = Signal::new(fd.try_clone().unwrap());
        assert_eq!(signal.send(), Ok(()));
        assert_eq!(counter(&fd), u64::MAX - 1);
    }

    #[test]
    fn full_blocking_counter_delays_the_writer_briefly() {
        crate::guard::guard_this_thread().unwrap();
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let signal = Signal::new(fd.try_clone().unwrap());
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert_eq!(signal.send(), Ok(()));
        rustix::fs::fcntl_setfl(&fd, OFlags::empty()).unwrap();
        assert_eq!(signal.send(), Err(Blocked));
        assert_eq!(counter(&fd), u64::MAX - 1);
    }
}
