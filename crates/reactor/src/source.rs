//! The interface of a worker's sources.
//!
//! ```text
//!   kick or poll -> ready? -> drain -> (submit)            finish <- reaped
//!                               |                             |
//!                               +---------> publish <---------+      arm, when idle
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

/// Identifies a source of a worker by its place and a generation, because places are reused. A message to a removed source
/// therefore never reaches a later source in the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceId(pub(crate) u32);

impl SourceId {
    const INDEX_BITS: u32 = 20;
    const NTH_BITS: u32 = u32::BITS - SourceId::INDEX_BITS - crate::drain::MARKS;

    /// Creates the id of the `nth` source that the worker added, modulo 1,024, at this place.
    pub(crate) fn new(index: usize, nth: u32) -> SourceId {
        assert!(
            index < 1 << SourceId::INDEX_BITS,
            "more sources than descriptors"
        );
        let nth = nth % (1 << SourceId::NTH_BITS);
        SourceId(index as u32 | nth << SourceId::INDEX_BITS)
    }

    /// Returns the place in the worker, unique among current sources.
    #[inline(always)]
    pub fn index(self) -> u32 {
        self.0 & ((1 << SourceId::INDEX_BITS) - 1)
    }
}

/// A queue or connection, owned by one worker. All methods run on the worker's thread and must not block. A source that is not polled,
/// such as a connection, does not implement the other methods for polling and kicks.
pub trait Source: Any {
    /// Returns false if the ring reports all work of the source. Such a source is never hot, and its worker uses the polling
    /// limit for connections unless other sources are hot.
    fn is_polled(&self) -> bool {
        true
    }

    /// Returns true if there is work without a notification. Costs a load or two, because it is called in every polling
    /// iteration, with the time `now`.
    fn ready(&mut self, now: Stamp) -> bool {
        let _ = now;
        false
    }

    /// Takes a bounded number of requests, parses them and submits them, hop by hop. The rest makes [`Source::ready`] true.
    fn drain(&mut self, io: &mut Io, noticed: Stamp) {
        let _ = (io, noticed);
    }

    /// Handles the end of a pending I/O; `slot` is the slot of its submission.
    fn finish(
        &mut self,
        io: &mut Io,
        slot: u32,
        buffer: IoBuffer,
        outcome: IoOutcome,
        reaped: Stamp,
    );

    /// Handles the completion of one of the source's own operations; see [`Io::own`].
    fn completed(&mut self, io: &mut Io, completion: uring::Completion, noticed: Stamp) {
        let _ = (io, completion, noticed);
    }

    /// Publishes all completed requests and notifies the client once. Called at the end of each iteration that drained the
    /// source or finished one of its I/Os.
    fn publish(&mut self, io: &mut Io);

    /// Executes the notifications that [`Source::publish`] deferred. Called before the worker sleeps or removes the source.
    fn flush_notifications(&mut self) {}

    /// Requests a notification from the client. Returns true if work arrived in the meantime and the worker must not sleep.
    fn arm(&mut self) -> bool {
        false
    }

    /// Suppresses the client's notifications while the worker polls.
    fn disarm(&mut self) {}

    /// Handles a readable kick descriptor.
    fn kicked(&mut self) {}

    /// Returns the number of unanswered requests.
    fn in_flight(&self) -> usize;

    /// Returns the descriptor that becomes readable when the client needs attention. `None`: the source is always polled
    /// while hot, and never wakes its worker.
    fn kick(&self) -> Option<RingFd> {
        None
    }

    /// Handles a kick descriptor that has hung up or cannot be polled; it is no longer watched.
    fn kick_lost(&mut self) {}

    /// Handles the truncation of a client's memory. A source that uses this memory ends itself.
    fn memory_lost(&mut self) {}

    /// Copies borrowed data for an acquirer of a range, which must not write to memory that is still being sent after
    /// [`Io::borrow`]. All data in one of the address ranges is replaced by a copy. Returns true if that was not possible
    /// yet; the call is repeated in the next iteration.
    fn return_borrowed(&mut self, io: &mut Io, held: &[Range<usize>]) -> bool {
        let _ = (io, held);
        false
    }

    /// Closes the handle on a disk that is being removed from the process.
    fn close_disk(&mut self, io: &mut Io, disk: &Arc<Disk>) {
        let _ = (io, disk);
    }

    /// Stops accepting requests. The source drains and is then removed.
    fn stop(&mut self);

    /// Releases disks after the source has stopped and has no I/O in flight.
    fn closed(&mut self, io: &mut Io);

    /// Enables or disables the recording of times. Called once, before the first iteration.
    fn set_recording(&mut self, recording: bool) {
        let _ = recording;
    }

    /// Returns the record of latencies and counters. A source that creates it after its start passes it to
    /// [`Io::register`].
    fn record(&self) -> Option<Arc<QueueRecord>>;
}
