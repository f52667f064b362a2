//! What the owner of a request does next for it: the same for a virtqueue and for a connection.

use block::IoRequest;
use guest_memory::IoBuffer;

use crate::DiskHandle;

/// An I/O and the disk that is to do it.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// Which disk.
    pub disk: DiskHandle,
    /// What.
    pub io: IoRequest,
}

impl Default for Job {
    fn default() -> Self {
        Job {
            disk: DiskHandle::default(),
            io: IoRequest::flush(),
        }
    }
}

/// What to do next for a request.
#[derive(Debug)]
pub enum Step {
    /// Submit the request's job on the request's own buffer.
    Data,
    /// Submit the request's job on this memory, which is given back with the outcome.
    Scratch(Box<IoBuffer>),
    /// Nothing to do on a disk any more: write the answer.
    Answer,
    /// Write the answer now, and go on without the client.
    AnswerAndGoOn,
    /// A request that was answered before has ended.
    Over,
    /// Nothing, until what the request waits for is there.
    Wait,
}
