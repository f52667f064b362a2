//! Bytes on their way to a client that may be slow: appended by one thread, written by another.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A queue of bytes. What bounds it is known to who appends.
#[derive(Debug, Default)]
pub struct Outbox {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    bytes: Vec<u8>,
    is_closed: bool,
}

impl Outbox {
    /// Starts a thread that writes to `stream` what is appended, until [`Outbox::close`], and then shuts it down.
    pub fn to(stream: UnixStream) -> Arc<Outbox> {
        let outbox = Arc::new(Outbox::default());
        let own = Arc::clone(&outbox);
        std::thread::spawn(move || own.write_to(stream));
        outbox
    }

    /// Appends what `put` puts.
    pub fn append(&self, put: impl FnOnce(&mut Vec<u8>)) {
        let mut queue = self.lock();
        if !queue.is_closed {
            put(&mut queue.bytes);
            self.changed.notify_one();
        }
    }

    /// Bytes that wait.
    pub fn waiting(&self) -> usize {
        self.lock().bytes.len()
    }

    /// Nothing more comes.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_one();
    }

    fn write_to(&self, mut stream: UnixStream) {
        loop {
            let queue = self.lock();
            let queue = self
                .changed
                .wait_while(queue, |queue| queue.bytes.is_empty() && !queue.is_closed);
            let mut queue = queue.unwrap_or_else(PoisonError::into_inner);
            let bytes = std::mem::take(&mut queue.bytes);
            drop(queue);
            if bytes.is_empty() || stream.write_all(&bytes).is_err() {
                break;
            }
        }
        self.close();
        self.lock().bytes = Vec::new();
        // The other side may have gone first.
        stream.shutdown(std::net::Shutdown::Both).unwrap_or(());
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
