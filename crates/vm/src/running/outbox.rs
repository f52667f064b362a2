//! Output queue of a slow client: one thread appends, another one writes.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A queue of bytes. The appending thread bounds its size.
#[derive(Debug, Default)]
pub struct Outbox {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    bytes: Vec<u8>,
    is_closed: bool,
    is_paused: bool,
    /// Stream for all further bytes.
    next: Option<UnixStream>,
}

impl Outbox {
    /// Starts a thread that writes appended bytes to `stream` until [`Outbox::close`], and then shuts the stream down.
    pub fn to(stream: UnixStream) -> Arc<Outbox> {
        let outbox = Arc::new(Outbox::default());
        let own = Arc::clone(&outbox);
        std::thread::spawn(move || own.write_to(stream));
        outbox
    }

    /// Appends the bytes that `put` adds.
    pub fn append(&self, put: impl FnOnce(&mut Vec<u8>)) {
        let mut queue = self.lock();
        if !queue.is_closed {
            put(&mut queue.bytes);
            self.changed.notify_one();
        }
    }

    /// Returns the number of queued bytes.
    pub fn waiting(&self) -> usize {
        self.lock().bytes.len()
    }

    /// Stores appended bytes until [`Outbox::resume`].
    pub fn pause(&self) {
        self.lock().is_paused = true;
    }

    /// Resumes writing, to another stream if there is one.
    pub fn resume(&self, next: Option<UnixStream>) {
        let mut queue = self.lock();
        queue.is_paused = false;
        // The stream of an earlier call may not be in use yet.
        queue.next = next.or(queue.next.take());
        self.changed.notify_one();
    }

    /// Ends the queue after the bytes appended so far.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_one();
    }

    fn write_to(&self, mut stream: UnixStream) {
        loop {
            let queue = self.lock();
            let queue = self.changed.wait_while(queue, |queue| {
                (queue.bytes.is_empty() || queue.is_paused) && !queue.is_closed
            });
            let mut queue = queue.unwrap_or_else(PoisonError::into_inner);
            let bytes = std::mem::take(&mut queue.bytes);
            stream = queue.next.take().unwrap_or(stream);
            drop(queue);
            if bytes.is_empty() || stream.write_all(&bytes).is_err() {
                break;
            }
        }
        self.close();
        self.lock().bytes = Vec::new();
        // The other side may have closed first.
        stream.shutdown(std::net::Shutdown::Both).unwrap_or(());
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// No bytes are written between the two pauses.
    #[test]
    fn stream_of_a_migration_stays_after_a_later_cancelled_one() {
        let (first, _first_peer) = UnixStream::pair().unwrap();
        let (second, mut second_peer) = UnixStream::pair().unwrap();
        let outbox = Outbox::to(first);
        outbox.pause();
        outbox.resume(Some(second));
        outbox.pause();
        outbox.resume(None);
        outbox.append(|bytes| bytes.extend(b"frame"));
        let mut bytes = [0; 5];
        second_peer
            .set_read_timeout(Some(std::time::Duration::from_secs(20)))
            .unwrap();
        second_peer.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"frame");
    }
}
