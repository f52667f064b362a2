//! What a worker serves.
//!
//! ```text
//!   kick or poll -> ready? -> drain -> (submit)            finish <- reaped
//!                               |                             |
//!                               +---------> publish <---------+      arm, when there is nothing to do
//! ```

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use bdev::Disk;
use block::IoOutcome;
use guest_memory::IoBuffer;
use latency::{QueueRecord, Stamp};
use uring::RingFd;

use crate::Io;

/// A source of a worker: its place there, which another source may have had before and may have afterwards, and which of these
/// it is. A message that comes when the source is gone so finds nobody, and not whoever has its place by then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceId(pub(crate) u32);

impl SourceId {
    const PLACE_BITS: u32 = 20;
    const NTH_BITS: u32 = u32::BITS - SourceId::PLACE_BITS - crate::drain::MARKS;

    /// The `nth` source that a worker ever took on, counted modulo 1,024, at this place.
    pub(crate) fn new(place: usize, nth: u32) -> SourceId {
        assert!(
            place < 1 << SourceId::PLACE_BITS,
            "more sources than descriptors"
        );
        let nth = nth % (1 << SourceId::NTH_BITS);
        SourceId(place as u32 | nth << SourceId::PLACE_BITS)
    }

    /// Its place in its worker: no two sources have the same one at the same time.
    #[inline(always)]
    pub fn place(self) -> u32 {
        self.0 & ((1 << SourceId::PLACE_BITS) - 1)
    }
}

/// A queue or connection, owned by one worker. All methods run on the worker's thread; none may block.
pub trait Source: Any {
    /// Is there something to take, without being told? A load or two; called on every iteration while polling, whose time it is `now`.
    fn ready(&mut self, now: Stamp) -> bool;

    /// Takes what is there up to a bound, parses it and submits it, hop by hop. Whatever is left makes
    /// [`Source::ready`] true.
    fn drain(&mut self, io: &mut Io, noticed: Stamp);

    /// An I/O that was pending has finished; `slot` is the one it was submitted with.
    fn finish(
        &mut self,
        io: &mut Io,
        slot: u32,
        buffer: IoBuffer,
        outcome: IoOutcome,
        reaped: Stamp,
    );

    /// An operation of its own has completed: see [`Io::own`].
    fn completed(&mut self, io: &mut Io, completion: uring::Completion, noticed: Stamp) {
        let _ = (io, completion, noticed);
    }

    /// Answers everything that is done and notifies the client once. Called at the end of each iteration in which
    /// the source was drained or finished.
    fn publish(&mut self, io: &mut Io);

    /// Does at once what [`Source::publish`] has left for later: the worker is about to sleep, or to let go of the source.
    fn flush_notifications(&mut self) {}

    /// Asks the client for a notification; true when work came meanwhile and the worker must not sleep.
    fn arm(&mut self) -> bool;

    /// Tells the client that notifications are not needed while the worker polls.
    fn disarm(&mut self);

    /// Its kick descriptor became readable.
    fn kicked(&mut self) {}

    /// Requests taken and not yet answered.
    fn in_flight(&self) -> usize;

    /// The descriptor that becomes readable when the client wants attention; `None`: the source is always polled
    /// when it is hot, and never wakes its worker.
    fn kick(&self) -> Option<RingFd>;

    /// The kick descriptor has hung up, or is none that can be waited for; it is not watched any more.
    fn kick_lost(&mut self) {}

    /// Some client's memory was found truncated; a source whose own it is ends itself.
    fn memory_lost(&mut self) {}

    /// Somebody acquires a range of a disk, and must not write to what is still being sent from where [`Io::borrow`] has pointed. A
    /// copy takes the place of all that lies in one of these ranges of addresses. True: that could not be done yet, and is asked
    /// again in the next iteration.
    fn give_back(&mut self, io: &mut Io, held: &[Range<usize>]) -> bool {
        let _ = (io, held);
        false
    }

    /// A disk is being taken out of the process: close the handle on it, if there is one.
    fn let_go(&mut self, io: &mut Io, disk: &Arc<Disk>) {
        let _ = (io, disk);
    }

    /// No new requests from now on: the source drains and is then taken out.
    fn stop(&mut self);

    /// The source has stopped and nothing is in flight: last chance to let go of disks.
    fn closed(&mut self, io: &mut Io);

    /// Are times to be recorded? Said once, before its first iteration.
    fn set_recording(&mut self, recording: bool) {
        let _ = recording;
    }

    /// Where it writes its latencies and counters. One that has it later than at its start gives it to
    /// [`Io::register`].
    fn record(&self) -> Option<Arc<QueueRecord>>;
}
