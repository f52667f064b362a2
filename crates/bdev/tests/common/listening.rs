//! A layer that records announced I/Os, for tests.

use std::sync::{Arc, Mutex};

use bdev::{Attach, BlockDevice, Finished, IoChannel, Layer, Prefetch, Submission, Tag};
use block::IoRequest;
use guest_memory::IoBuffer;
use uring::{Completion, Ring};

const BLOCK: u64 = 512;

/// Announcements and I/Os, by first block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Announcement {
    Later(u64),
    Next(u64),
    Now(u64),
}

pub type Announcements = Arc<Mutex<Vec<Announcement>>>;

/// A layer that records announcements, whether the device below uses them or not.
pub struct Recording {
    pub inner: Arc<dyn BlockDevice>,
    pub announced: Announcements,
}

impl Layer for Recording {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn layer_kind(&self) -> &'static str {
        "listening"
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> std::io::Result<Box<dyn IoChannel>> {
        Ok(Box::new(ListeningChannel {
            inner: self.inner.attach(attach)?,
            announced: self.announced.clone(),
        }))
    }
}

struct ListeningChannel {
    inner: Box<dyn IoChannel>,
    announced: Announcements,
}

impl ListeningChannel {
    fn note(&self, announced: Announcement) {
        self.announced.lock().unwrap().push(announced);
    }
}

impl IoChannel for ListeningChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        self.note(Announcement::Now(io.offset / BLOCK));
        self.inner.submit(ring, io, buffer, tag)
    }

    fn wants_prefetch(&self) -> bool {
        true
    }

    fn prefetch(&self, io: &IoRequest, soon: Prefetch) {
        let block = io.offset / BLOCK;
        self.note(match soon {
            Prefetch::Next => Announcement::Next(block),
            Prefetch::Later => Announcement::Later(block),
        });
        self.inner.prefetch(io, soon);
    }

    fn borrow(&self, io: &IoRequest, buffer: &mut IoBuffer) -> bool {
        self.note(Announcement::Now(io.offset / BLOCK));
        self.inner.borrow(io, buffer)
    }

    fn is_borrowed(&self) -> bool {
        self.inner.is_borrowed()
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        self.inner.complete(ring, completion, finished);
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}
