//! Wait loop of a transport's accepting thread: waits for a connection on one of its listeners, or for a change of the
//! listeners.
//!
//! Shared by that thread and the threads that change its listeners. The transport itself accepts connections.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// Wakes and ends an accepting thread.
pub struct Accepting {
    changed: OwnedFd,
    ending: AtomicBool,
}

impl Accepting {
    /// Creates the state of one accepting thread.
    ///
    /// # Errors
    /// If no file descriptor is available.
    pub fn new() -> io::Result<Accepting> {
        Ok(Accepting {
            changed: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            ending: false.into(),
        })
    }

    /// Wakes the thread to check its state again.
    pub fn wake(&self) {
        // A full counter also wakes the thread.
        rustix::io::write(&self.changed, &1u64.to_ne_bytes()).ok();
    }

    /// Ends the thread.
    pub fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Returns true until [`Accepting::end`] is called.
    pub fn is_accepting(&self) -> bool {
        !self.ending.load(Ordering::SeqCst)
    }

    /// Sleeps until a listener has a connection, the thread is woken, or the timeout expires. `waits_for` is used in log
    /// messages.
    pub fn wait<L: AsFd>(&self, listeners: &[Arc<L>], timeout: Option<Duration>, waits_for: &str) {
        self.wait_with(listeners, &[], timeout, waits_for);
    }

    /// As `wait`; input on one of `others` also ends the sleep.
    pub fn wait_with<L: AsFd>(
        &self,
        listeners: &[Arc<L>],
        others: &[BorrowedFd<'_>],
        timeout: Option<Duration>,
        waits_for: &str,
    ) {
        let mut waits = Vec::with_capacity(1 + listeners.len() + others.len());
        waits.push(PollFd::new(&self.changed, PollFlags::IN));
        waits.extend(listeners.iter().map(|l| PollFd::new(l, PollFlags::IN)));
        waits.extend(others.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match poll(&mut waits, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                tracing::error!("cannot poll for {waits_for}: {errno}");
                std::thread::sleep(Duration::from_secs(1));
            }
        }
        rustix::io::read(&self.changed, &mut [0u8; 8]).ok();
    }

    /// Returns the result of an accept. Passes errors to `refuse`, except if no client waits or the listener was closed meanwhile.
    pub fn accepted<T>(result: io::Result<T>, refuse: impl FnOnce(&io::Error)) -> Option<T> {
        let error = match result {
            Ok(accepted) => return Some(accepted),
            Err(error) => error,
        };
        if !matches!(
            error.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::InvalidInput
        ) {
            refuse(&error);
            // For example out of descriptors: the client stays in the backlog.
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn connection_or_wake_up_ends_the_wait() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listeners = [Arc::new(UnixListener::bind(&path).unwrap())];
        let accepting = Accepting::new().unwrap();
        let _comer = UnixStream::connect(&path).unwrap();
        accepting.wait(&listeners, None, "nobody");
        listeners[0].accept().unwrap();
        accepting.wake();
        accepting.wait(&listeners, None, "nobody");
        accepting.wait(&listeners, Some(Duration::from_millis(1)), "nobody");
        assert!(accepting.is_accepting());
        accepting.end();
        accepting.wait(&listeners, None, "nobody");
        assert!(!accepting.is_accepting());
    }
}
