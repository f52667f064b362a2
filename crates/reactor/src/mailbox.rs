//! Messages to a worker, executed between its iterations: the only access from other threads.

use std::sync::{Arc, PoisonError};

use uring::Event;

use crate::Worker;
use crate::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering, mpsc};

type Message = Box<dyn FnOnce(&mut Worker) + Send>;

pub(crate) struct Mailbox {
    messages: Mutex<Vec<Message>>,
    closed: AtomicBool,
    bell: Event,
    /// Number of the worker's sources, for placement.
    pub(crate) sources: AtomicUsize,
}

impl Mailbox {
    pub(crate) fn new(bell: Event) -> Arc<Mailbox> {
        Arc::new(Mailbox {
            messages: Mutex::new(Vec::new()),
            closed: AtomicBool::new(false),
            bell,
            sources: AtomicUsize::new(0),
        })
    }

    pub(crate) fn bell(&self) -> &Event {
        &self.bell
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Message>> {
        // A panicking message ends the process, so a running worker never sees a poisoned lock.
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn take(&self) -> Vec<Message> {
        std::mem::take(&mut *self.lock())
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Rejects further messages and drops the waiting ones; their senders receive an error.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        drop(self.take());
    }
}

/// The worker ended before it executed the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerGone;

impl std::fmt::Display for WorkerGone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the worker has ended")
    }
}

impl std::error::Error for WorkerGone {}

/// Sends messages to one worker, from any thread.
#[derive(Clone)]
pub struct WorkerHandle {
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) index: u32,
}

impl WorkerHandle {
    /// Returns the worker's number, from 0.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Returns true if the worker has ended.
    pub fn has_ended(&self) -> bool {
        self.mailbox.is_closed()
    }

    /// Queues `message` for execution between two iterations and returns at once.
    pub fn send(&self, message: impl FnOnce(&mut Worker) + Send + 'static) {
        let mut messages = self.mailbox.lock();
        if self.mailbox.closed.load(Ordering::SeqCst) {
            return;
        }
        let first = messages.is_empty();
        messages.push(Box::new(message));
        drop(messages);
        if first {
            self.mailbox.bell.notify();
        }
    }

    /// Executes `message` between two iterations and returns its result.
    ///
    /// # Errors
    /// [`WorkerGone`] if the worker ends first.
    pub fn call<T: Send + 'static>(
        &self,
        message: impl FnOnce(&mut Worker) -> T + Send + 'static,
    ) -> Result<T, WorkerGone> {
        let (reply, answer) = mpsc::sync_channel(1);
        self.send(move |worker| {
            // Fails only if the caller no longer waits.
            drop(reply.send(message(worker)));
        });
        answer.recv().map_err(|_| WorkerGone)
    }
}

impl std::fmt::Debug for WorkerHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WorkerHandle({})", self.index)
    }
}
