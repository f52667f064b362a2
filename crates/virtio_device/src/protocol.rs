//! Request handling that differs between virtio-blk and virtio-scsi.
//!
//! ```text
//!   begin -> Step::Data | Step::Scratch -> (I/O) -> resume -> Step ... -> Step::Answer -> answer -> bytes written
//!         -> Step::Wait -> (Queue::resume_waiting) -> answer
//!                       -> (Queue::proceed) -> Step ...
//! ```

use std::sync::Arc;

use bdev::Disk;
use block::IoOutcome;
use guest_memory::IoBuffer;
use latency::{DiskNumber, Operation, UnitAddress};
use reactor::{Io, Tag};
pub use reactor::{Job, Step};
use virtqueue::{Chain, ResponseSpace};

/// A request in its slot, for its whole life: hops pass the slot number only. Fields that each request needs are adjacent; rarely needed
/// fields are at the end of the state.
#[derive(Default)]
#[repr(C)]
pub struct Request<S> {
    /// The next I/O on a disk, for [`Step::Data`] and [`Step::Scratch`].
    pub job: Job,
    /// The descriptor chain.
    pub chain: Chain,
    /// State of the device type. It still contains values of the slot's previous request.
    pub state: S,
}

/// A chain without a valid request header, by the driver's fault. It is refused with [`Protocol::refuse`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// A request after parsing.
pub struct ParsedRequest {
    /// First step.
    pub step: Step,
    /// Operation for the statistics.
    pub operation: Operation,
    /// Data length in bytes.
    pub bytes: u32,
}

/// Result of a finished request.
pub struct Answer {
    /// Bytes written to the chain's device-writable part (virtio 1.3, 2.7.8.2).
    pub written: u32,
    /// True if the status reports success.
    pub good: bool,
}

/// The device type's part of one queue.
pub trait Protocol: 'static {
    /// Per-request state. Later requests of the same slot reuse it.
    type State: Default;

    /// A queue may serve several disks, which are then measured separately.
    const MULTIPLE_DISKS: bool = false;

    /// The response is the first device-writable part of a chain, in a cache line of its own.
    const SEPARATE_RESPONSE: bool = false;

    /// Returns the number of the disk that a parsed request addresses.
    fn disk_number(&self, _request: &Request<Self::State>) -> DiskNumber {
        DiskNumber::NONE
    }

    /// Returns true if a request parsed since the last call addresses another disk than its predecessor.
    #[inline(always)]
    fn disk_changed(&mut self) -> bool {
        false
    }

    /// Makes the next request count as one for another disk.
    fn forget_disk(&mut self) {}

    /// Returns the name of a request's disk, or `None` if the disk is gone.
    fn disk_name(&self, _number: DiskNumber) -> Option<String> {
        None
    }

    /// Called before each batch. Checks state that changes between iterations only.
    #[inline(always)]
    fn refresh(&mut self) {}

    /// Parses a request. Sets the window of the chain's buffer to the data, if there is any.
    ///
    /// # Errors
    /// [`Malformed`] if the chain has no complete header or no room for a response.
    fn parse(
        &mut self,
        io: &mut Io,
        request: &mut Request<Self::State>,
        tag: Tag,
    ) -> Result<ParsedRequest, Malformed>;

    /// Handles the end of a step's I/O. `scratch` is the memory of a [`Step::Scratch`].
    fn resume(
        &mut self,
        io: &mut Io,
        request: &mut Request<Self::State>,
        outcome: IoOutcome,
        scratch: Option<IoBuffer>,
    ) -> Step;

    /// Like [`Protocol::resume`], after a [`Step::Data`].
    #[inline(always)]
    fn resume_data(
        &mut self,
        io: &mut Io,
        request: &mut Request<Self::State>,
        outcome: IoOutcome,
    ) -> Step {
        self.resume(io, request, outcome, None)
    }

    /// Continues a request in the background after its response was written, for [`Step::AnswerAndDetach`].
    fn detach(&mut self, _request: &mut Request<Self::State>) {}

    /// Returns the logical unit that a request addresses, if the device has several.
    fn unit(&self, _request: &Request<Self::State>) -> Option<UnitAddress> {
        None
    }

    /// Called when the queue is being stopped. Requests in flight must end soon.
    fn stop(&mut self) {}

    /// Writes the response into the chain.
    fn answer(&mut self, request: &mut Request<Self::State>) -> Answer;

    /// Called when all answers so far are visible to the driver.
    #[inline(always)]
    fn answers_published(&mut self) {}

    /// Writes an error response into a chain that cannot be served, if it has room for one. Returns the bytes written. `space` begins
    /// behind the readable bytes. The request has not been parsed.
    fn refuse(&mut self, request: &mut Request<Self::State>, space: ResponseSpace) -> u32;

    /// Returns true if chains may be popped. A queue with event buffers returns false until there is an event.
    fn wants_chains(&self) -> bool {
        true
    }

    /// Returns the maximum number of chains per batch.
    fn batch_limit(&self) -> usize {
        usize::MAX
    }

    /// Closes the handle of a disk that is being removed from the process.
    fn close_disk(&mut self, _io: &mut Io, _disk: &Arc<Disk>) {}

    /// Closes all disks. The queue has stopped and has nothing in flight.
    fn close(&mut self, io: &mut Io);
}
