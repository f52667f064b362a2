//! Answers of a device's thread to a worker, signalled by an event on its ring.

use std::sync::PoisonError;

use uring::Event;

use crate::sync::Mutex;

/// Answers by the worker's command number.
pub(crate) struct Inbox<T> {
    waiting: Mutex<Vec<(u64, T)>>,
    pub(crate) event: Event,
}

impl<T> Inbox<T> {
    /// Creates the inbox of a worker that watches `event`.
    pub fn new(event: Event) -> Inbox<T> {
        Inbox {
            waiting: Mutex::default(),
            event,
        }
    }

    /// Adds an answer, on any thread; wakes the worker for the first one.
    pub fn put(&self, token: u64, answer: T) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = waiting.is_empty();
        waiting.push((token, answer));
        drop(waiting);
        if is_first {
            self.event.notify();
        }
    }

    /// Moves all answers into an empty list and reuses that list's memory. Called by the worker.
    pub fn take(&self, into: &mut Vec<(u64, T)>) {
        debug_assert!(into.is_empty(), "the destination list is not empty");
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut *waiting, into);
    }
}
