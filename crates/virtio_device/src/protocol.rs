//! What a device type does with a request: the part of a queue that differs between virtio-blk and virtio-scsi.
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
use virtqueue::{Chain, ErrorPlace};

/// A request, in the slot that it keeps from its first hop to its last: hops hand on which slot, not what is in it. What each
/// request needs lies together, and what few need at the end of the state.
#[derive(Default)]
#[repr(C)]
pub struct Request<S> {
    /// What is asked of a disk next: for [`Step::Data`] and [`Step::Scratch`].
    pub job: Job,
    /// Its memory.
    pub chain: Chain,
    /// What its device type remembers of it; it holds what the slot's last request left.
    pub state: S,
}

/// A chain that holds no request of the device type: the peer's fault. It is refused: see [`Protocol::refuse`].
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
    type State: Default;

    /// May a queue serve several disks? Then each of them is measured by itself.
    const SEVERAL_DISKS: bool = false;

    /// Does the answer begin what the device writes of a chain, in a cache line of its own?
    const ANSWERED_APART: bool = false;

    /// Which of several disks a request is for, once it has begun.
    fn disk_number(&self, _request: &Request<Self::State>) -> DiskNumber {
        DiskNumber::NONE
    }

    /// Has a request begun, since this was asked last, that is for another disk than the one before it?
    #[inline(always)]
    fn disk_changed(&mut self) -> bool {
        false
    }

    /// The next request counts as one for another disk.
    fn forget_disk(&mut self) {}

    /// The name of a disk that a request was for; `None` when it has gone.
    fn disk_name(&self, _number: DiskNumber) -> Option<String> {
        None
    }

    /// A batch of requests is about to begin: time to look at what changes between iterations only.
    #[inline(always)]
    fn look(&mut self) {}

    /// Reads a request. Sets the window of the chain's buffer to the data when there is any.
    ///
    /// # Errors
    /// [`Malformed`], when the chain has no whole header or no room for an answer.
    fn begin(
        &mut self,
        io: &mut Io,
        request: &mut Request<Self::State>,
        tag: Tag,
    ) -> Result<Start, Malformed>;

    /// The step's I/O has ended; `scratch` is the memory of a [`Step::Scratch`].
    fn resume(
        &mut self,
        io: &mut Io,
        request: &mut Request<Self::State>,
        outcome: IoOutcome,
        scratch: Option<IoBuffer>,
    ) -> Step;

    /// As [`Protocol::resume`] after a [`Step::Data`].
    #[inline(always)]
    fn resume_data(
        &mut self,
        io: &mut Io,
        request: &mut Request<Self::State>,
        outcome: IoOutcome,
    ) -> Step {
        self.resume(io, request, outcome, None)
    }

    /// Goes on after [`Step::AnswerAndGoOn`], without a chain.
    fn go_on(&mut self, _io: &mut Io, _request: &mut Request<Self::State>) -> Step {
        Step::Over
    }

    /// Which of several logical units a request is for.
    fn unit(&self, _request: &Request<Self::State>) -> Option<UnitAddress> {
        None
    }

    /// The queue is being stopped: what is in flight is to end soon.
    fn stop(&mut self) {}

    /// Writes the answer into the chain.
    fn answer(&mut self, request: &mut Request<Self::State>) -> Answer;

    /// The driver may see all that was answered so far.
    #[inline(always)]
    fn shown(&mut self) {}

    /// Writes an error into a chain that cannot be served, if there is a place for it; gives the bytes written. The place begins
    /// behind the chain's readable bytes. Nothing else is known of the request, and it has not begun.
    fn refuse(&mut self, request: &mut Request<Self::State>, place: ErrorPlace) -> u32;

    /// May chains be taken now? A queue that holds buffers for events says no until there is an event.
    fn wants_chains(&self) -> bool {
        true
    }

    /// Most chains that it wants to take in one go.
    fn batch_limit(&self) -> usize {
        usize::MAX
    }

    /// A disk is being taken out of the process: close the handle on it, if there is one.
    fn let_go(&mut self, _io: &mut Io, _disk: &Arc<Disk>) {}

    /// The queue has stopped and nothing is in flight: let go of disks.
    fn close(&mut self, io: &mut Io);
}
