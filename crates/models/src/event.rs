//! The eventfd that wakes a worker.

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
