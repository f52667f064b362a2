//! What a device type does with a request: the part of a queue that differs between virtio-blk and virtio-scsi.
//!
//! ```text
//!   begin -> Step::Data | Step::Scratch -> (I/O) -> resume -> Step ... -> Step::Answer -> answer -> bytes written
//!         -> Step::Wait -> (Queue::resume_waiting) -> answer
//! ```

use disk::{IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use reactor::{DiskHandle, Io, Tag};
use timeline::Operation;
use virtqueue::Chain;

/// What to do next for a request.
pub enum Step {
    /// An I/O on the window of the chain's buffer.
    Data(DiskHandle, IoRequest),
    /// An I/O on memory of the protocol's own; [`Protocol::resume`] gets it back.
    Scratch(DiskHandle, IoRequest, Box<IoBuffer>),
    /// Nothing to do on a disk any more: write the answer.
    Answer,
    /// Write the answer now, and go on without the driver: [`Protocol::go_on`] is next.
    AnswerAndGoOn,
    /// A request that was answered before has ended.
    Over,
    /// The answer depends on something else, which will call [`crate::Queue::resume_waiting`].
    Wait,
}

/// A chain in which not even an error can be answered: the peer's fault, and the end of its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// A request as it begins.
pub struct Start {
    /// What to do first.
    pub step: Step,
    /// How it is counted.
    pub operation: Operation,
    /// Bytes of data that it moves.
    pub bytes: u32,
}

/// A request as it ends.
pub struct Answer {
    /// Bytes of the chain's writable part that were written (virtio 1.3, 2.7.8.2).
    pub written: u32,
    /// Was it answered without an error?
    pub good: bool,
}

/// One queue's side of a device type.
pub trait Protocol: 'static {
    /// What a request needs to remember; reused by later requests of its slot.
    type Request: Default;

    /// Reads a request. Sets the window of the chain's buffer to the data when there is any.
    ///
    /// # Errors
    /// [`Malformed`], when the chain has no room for an answer.
    fn begin(
        &mut self,
        io: &mut Io,
        chain: &mut Chain,
        request: &mut Self::Request,
        tag: Tag,
    ) -> Result<Start, Malformed>;

    /// The step's I/O has ended; `scratch` is the memory of a [`Step::Scratch`].
    fn resume(
        &mut self,
        io: &mut Io,
        chain: &mut Chain,
        request: &mut Self::Request,
        outcome: IoOutcome,
        scratch: Option<IoBuffer>,
    ) -> Step;

    /// Goes on after [`Step::AnswerAndGoOn`]; `stopping`: the queue is being stopped, end soon.
    fn go_on(&mut self, _io: &mut Io, _request: &mut Self::Request, _stopping: bool) -> Step {
        Step::Over
    }

    /// Writes the answer into the chain.
    fn answer(&mut self, chain: &mut Chain, request: &mut Self::Request) -> Answer;

    /// May chains be taken now? A queue that holds buffers for events says no until there is an event.
    fn wants_chains(&self) -> bool {
        true
    }

    /// Most chains that it wants to take in one go.
    fn batch_limit(&self) -> usize {
        usize::MAX
    }

    /// The queue has stopped and nothing is in flight: let go of disks.
    fn close(&mut self, io: &mut Io);
}
