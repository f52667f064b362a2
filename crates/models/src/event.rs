//! The eventfd that wakes a worker, and the other names of `uring` that the source files use.

use loom::sync::{Condvar, Mutex};

/// Counter that is zero or not.
#[derive(Default)]
pub struct Event {
    rang: Mutex<bool>,
    changed: Condvar,
}

impl Event {
    /// Adds to the counter.
    pub fn notify(&self) {
        *self.rang.lock().unwrap() = true;
        self.changed.notify_one();
    }

    /// Waits until the counter is not zero, and sets it to zero.
    pub fn wait(&self) {
        let mut rang = self.rang.lock().unwrap();
        while !*rang {
            rang = self.changed.wait(rang).unwrap();
        }
        *rang = false;
    }
}

/// Not part of any model.
pub struct Ring;
/// Not part of any model.
pub struct Owner;
/// Not part of any model.
pub struct WatchId;

impl Ring {
    /// Fails.
    pub fn watch_event(&mut self, _: Owner, _: u64, _: &Event) -> std::io::Result<WatchId> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}
