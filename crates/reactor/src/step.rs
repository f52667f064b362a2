//! The next action for a request, common to virtqueues and connections.

use block::IoRequest;
use guest_memory::IoBuffer;

use crate::DiskHandle;

/// An I/O and its disk.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// Handle of the disk.
    pub disk: DiskHandle,
    /// The I/O.
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

/// The next action for a request.
#[derive(Debug)]
pub enum Step {
    /// Submit the job with the request's own buffer.
    Data,
    /// Submit the job with this buffer, which is returned with the outcome.
    Scratch(Box<IoBuffer>),
    /// No further disk I/O: write the response.
    Answer,
    /// Write the response now and continue without the client.
    AnswerAndDetach,
    /// A detached request, answered earlier, has ended.
    Finished,
    /// Wait for an external event.
    Wait,
}
