//! Answers of a device's thread to a worker, signalled by an event on its ring.

use std::io;
use std::sync::PoisonError;

use uring::{Event, Owner, Ring, WatchId};

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

    /// Watches the event on a worker's ring.
    pub fn watch(&self, ring: &mut Ring, owner: Owner) -> io::Result<WatchId> {
        ring.watch_event(owner, 0, &self.event)
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

    /// Watches the event again after the kernel has ended the watch, possibly for lack of memory. `None`: the channel closes.
    #[cold]
    pub fn watch_again(&self, ring: &mut Ring, owner: Owner, watch: &mut Option<WatchId>) {
        if watch.is_none() {
            return;
        }
        match self.watch(ring, owner) {
            Ok(again) => *watch = Some(again),
            Err(error) => tracing::error!("cannot watch for completions of a disk: {error}"),
        }
    }
}
