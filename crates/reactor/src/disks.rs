//! A worker's own handle on each disk that its sources use, and the context in which sources run.

mod error_policy;
mod replacing;
mod unaligned;

use std::ops::Range;
use std::sync::Arc;

use bdev::{
    Attach, Barrier, BlockDevice, Condition, Conditions, Disk, Finished, IoChannel, Prefetch,
    RecorderView, Submission, Throttle,
};
use block::{IoError, IoErrorKind, IoRequest};
use guest_memory::IoBuffer;
use latency::{Clock, QueueRecord, Stamp};
use uring::{Owner, Ring};

use crate::admission::Deferred;
use crate::attaching::{Absent, Retry};
use crate::drain::Drain;
use crate::ledger::{DiskRecord, Ledger};
use crate::pacing::Pacing;
use crate::waiting::Waiting;
use crate::{SourceId, WorkerHandle};
use replacing::Others;
use unaligned::Unaligned;

/// A disk as one worker sees it: an index into its open handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DiskHandle(u32);

impl DiskHandle {
    /// No disk: its I/O is refused.
    pub const NONE: DiskHandle = DiskHandle(u32::MAX);
}

impl Default for DiskHandle {
    fn default() -> Self {
        DiskHandle::NONE
    }
}

/// Who an I/O belongs to: a slot of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// The source that submitted it.
    pub source: SourceId,
    /// The source's own slot.
    pub slot: u32,
}

impl Tag {
    fn pack(self) -> bdev::Tag {
        bdev::Tag(u64::from(self.source.0) << 32 | u64::from(self.slot))
    }

    pub(crate) fn unpack(tag: bdev::Tag) -> Tag {
        Tag {
            source: SourceId((tag.0 >> 32) as u32),
            slot: tag.0 as u32,
        }
    }
}

/// Who hears of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listener {
    /// Nobody: the number may be given out again.
    Free,
    /// The worker itself: a message has come.
    Mailbox,
    /// A source's client kicked it.
    Kick(SourceId),
    /// A disk handle's I/O.
    Disk(u32),
    /// The wait for the next attempt to attach to a disk.
    Retry(u32),
    /// A source's own operations on the ring.
    Source(SourceId),
    /// I/Os that wait for a disk's limits; the token is the timer's number and the disk's handle.
    Pace,
    /// I/Os that take too long; the token is the disk's handle.
    Late,
}

/// The owner of all timers for limits: see [`Io::new`].
pub(crate) const PACE: Owner = Owner(1);
/// The owner of all timers for I/Os that take too long.
pub(crate) const LATE: Owner = Owner(2);

/// A disk that sources of the worker use. What becomes of an I/O on it: `admission.rs`.
pub(crate) struct OpenDisk {
    pub disk: Arc<Disk>,
    pub channel: Box<dyn IoChannel>,
    /// Of the channel's layers, each its own.
    owners: Vec<Owner>,
    /// Of the disk's device that the channel is of: see [`Disk::device_and_generation`].
    generation: u64,
    /// Channels of devices that it had before, or is about to have: see `replacing.rs`.
    others: Others,
    /// While there is none.
    retry: Option<Retry>,
    users: usize,
    /// It has no users any more, and ends what it has on the ring.
    closing: bool,
    pub drain: Drain,
    pub record: Arc<DiskRecord>,
    pub conditions: Arc<Conditions>,
    pub throttle: Arc<Throttle>,
    pub recorder: RecorderView,
    pub pacing: Pacing,
    /// I/Os that wait for a range to be released, or for the disk to open to them.
    pub deferred: Vec<Deferred>,
    waiting: Waiting,
    pub unaligned: Unaligned,
    /// A timer for I/Os that take too long is running.
    late_timer: bool,
    /// Of the worker.
    worker: u32,
}

impl OpenDisk {
    /// Has nobody a use for it, and is no I/O of it in flight?
    #[inline]
    fn is_unused(&self) -> bool {
        self.users == 0
            && self.in_flight() == 0
            && self.deferred.is_empty()
            && self.pacing.is_empty()
            && self.waiting.is_empty()
            && self.unaligned.is_empty()
    }
}

/// Enters a listener; its number is the owner of what it hears of.
fn listen(listeners: &mut Vec<Listener>, listener: Listener) -> Owner {
    let free = listeners.iter().position(|l| *l == Listener::Free);
    let index = free.unwrap_or_else(|| {
        listeners.push(Listener::Free);
        listeners.len() - 1
    });
    listeners[index] = listener;
    Owner(u32::try_from(index).expect("fewer listeners than descriptors"))
}

/// Attaches to a device for the handle with this index. The owners that it was given have to be taken back from it, also when that fails.
fn attach_to(
    device: &dyn BlockDevice,
    ring: &mut Ring,
    listeners: &mut Vec<Listener>,
    index: u32,
) -> (std::io::Result<Box<dyn IoChannel>>, Vec<Owner>) {
    let mut owners = Vec::new();
    let mut next_owner = || {
        let owner = listen(listeners, Listener::Disk(index));
        owners.push(owner);
        owner
    };
    let attached = device.attach(&mut Attach::new(ring, &mut next_owner));
    (attached, owners)
}

/// The context in which sources run: the worker's ring, disks and clock.
pub struct Io {
    pub(crate) ring: Ring,
    pub(crate) clock: Clock,
    pub(crate) listeners: Vec<Listener>,
    /// Sources record what their requests' stages take.
    pub(crate) recording: bool,
    /// I/Os that disks have taken and that are not finished.
    pub(crate) pending: usize,
    disks: Vec<Option<OpenDisk>>,
    /// How many of them want to know what comes next.
    prefetching: usize,
    /// An acquirer of a range waits for what is sent from a disk's memory.
    takes_back: bool,
    worker: WorkerHandle,
    ledger: Arc<Ledger>,
}

impl Io {
    pub(crate) fn new(ring: Ring, worker: WorkerHandle, ledger: Arc<Ledger>) -> Io {
        Io {
            ring,
            clock: ledger.clock().clone(),
            ledger,
            worker,
            listeners: vec![Listener::Mailbox, Listener::Pace, Listener::Late],
            recording: true,
            pending: 0,
            disks: Vec::new(),
            prefetching: 0,
            takes_back: false,
        }
    }

    /// The time, in ticks.
    #[inline]
    pub fn now(&self) -> Stamp {
        self.clock.now()
    }

    /// Do sources record what their requests' stages take?
    pub fn is_recording(&self) -> bool {
        self.recording
    }

    /// The worker's clock.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Makes a source's measurements known, when they begin later than the source.
    pub fn register(&self, record: Arc<QueueRecord>) {
        self.ledger.register(record);
    }

    /// The worker's ring, for a source's own operations.
    pub fn ring(&mut self) -> &mut Ring {
        &mut self.ring
    }

    /// An owner for a source's own operations: their completions go to [`crate::Source::completed`].
    pub fn own(&mut self, source: SourceId) -> Owner {
        self.listen(Listener::Source(source))
    }

    /// Gives back what [`Io::own`] gave, once none of its operations is in flight.
    pub fn disown(&mut self, owner: Owner) {
        self.unlisten(owner);
    }

    pub(crate) fn listen(&mut self, listener: Listener) -> Owner {
        listen(&mut self.listeners, listener)
    }

    pub(crate) fn unlisten(&mut self, owner: Owner) {
        self.listeners[owner.0 as usize] = Listener::Free;
    }

    /// This worker's handle on a disk, attached at the first use. Each call is matched by one of [`Io::close`]. When the device
    /// cannot be attached to, I/O fails until it can: see [`Disk::state`].
    pub fn open(&mut self, disk: &Arc<Disk>) -> DiskHandle {
        let same = |open: &Option<OpenDisk>| {
            let open = open.as_ref();
            open.is_some_and(|open| !open.closing && Arc::ptr_eq(&open.disk, disk))
        };
        if let Some(index) = self.disks.iter().position(same) {
            let open = self.disks[index].as_mut().expect("found above");
            open.users += 1;
            return DiskHandle(index as u32);
        }
        let free = self.disks.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.disks.push(None);
            self.disks.len() - 1
        });
        self.disks[index] = Some(OpenDisk {
            disk: disk.clone(),
            channel: Box::new(Absent),
            owners: Vec::new(),
            generation: 0,
            others: Others::default(),
            retry: None,
            users: 1,
            closing: false,
            drain: Drain::new(disk.range_locks(), &self.worker, index as u32),
            record: self.ledger.disk(disk),
            conditions: disk.conditions().clone(),
            throttle: disk.throttle().clone(),
            recorder: RecorderView::new(disk.recorder()),
            pacing: Pacing::new(&self.clock),
            deferred: Vec::new(),
            waiting: Waiting::default(),
            unaligned: Unaligned::new(&self.worker, disk.info().io_alignment),
            late_timer: false,
            worker: self.worker.index(),
        });
        self.attach(index);
        DiskHandle(index as u32)
    }

    /// Attaches to a disk's device, or tries again later.
    fn attach(&mut self, index: usize) {
        let Some(open) = self.disks[index].as_mut() else {
            return;
        };
        let (device, generation) = open.disk.device_and_generation();
        let (attached, owners) =
            attach_to(&*device, &mut self.ring, &mut self.listeners, index as u32);
        let worker = self.worker.index();
        match attached {
            Ok(channel) => {
                self.prefetching += usize::from(channel.wants_prefetch());
                (open.channel, open.owners) = (channel, owners);
                open.generation = generation;
                if let Some(retry) = open.retry.take() {
                    let disk = open.disk.name();
                    tracing::info!(disk, worker, "attached to the device");
                    open.disk.state().cleared(worker);
                    self.unlisten_all(&[retry.owner]);
                }
            }
            Err(error) => {
                self.attach_later(index, &error);
                self.unlisten_all(&owners);
            }
        }
    }

    #[cold]
    fn attach_later(&mut self, index: usize, error: &std::io::Error) {
        let Some(open) = self.disks[index].as_mut() else {
            return;
        };
        let worker = self.worker.index();
        let first = open.retry.is_none();
        let retry = open.retry.get_or_insert_with(|| {
            let owner = listen(&mut self.listeners, Listener::Retry(index as u32));
            Retry::begin(&mut self.ring, owner)
        });
        if first {
            let disk = open.disk.name();
            tracing::error!(
                disk,
                worker,
                on_error = open.disk.on_error().word(),
                "cannot attach to the device, I/O fails or waits: {error}"
            );
        } else {
            retry.again(&mut self.ring);
        }
        let state = open.disk.state();
        state.failed(worker, error.to_string(), retry.wait());
    }

    /// The wait for the next attempt to attach to a disk has ended. What waits for the device goes on when it is there.
    #[cold]
    pub(crate) fn attach_again(&mut self, disk: u32, finished: &mut Vec<Finished>) {
        let Some(Some(open)) = self.disks.get_mut(disk as usize) else {
            return;
        };
        if !open.closing {
            self.attach(disk as usize);
            if let Some(Some(open)) = self.disks.get_mut(disk as usize)
                && open.retry.is_none()
            {
                open.resume_waiting(&mut self.ring, disk, finished);
            }
            return;
        }
        if let Some(retry) = open.retry.take() {
            self.unlisten_all(&[retry.owner]);
        }
        self.close_unused(disk);
    }

    fn unlisten_all(&mut self, owners: &[Owner]) {
        for &owner in owners {
            // Else a completion that comes late would be taken for one of whoever has the number next.
            assert!(
                self.ring.is_done_with(owner),
                "a channel of a disk has closed with operations in flight"
            );
            self.unlisten(owner);
        }
    }

    /// Lets go of a handle that [`Io::open`] gave. It is closed with its last user, once its I/O has finished.
    pub fn close(&mut self, handle: DiskHandle) {
        if let Some(Some(open)) = self.disks.get_mut(handle.0 as usize) {
            open.users -= 1;
            self.close_unused(handle.0);
        }
    }

    /// Is any handle open, or not closed yet?
    pub(crate) fn has_disks(&self) -> bool {
        self.disks.iter().any(Option::is_some)
    }

    /// Is this a handle on that disk?
    pub fn is_of(&self, handle: DiskHandle, disk: &Arc<Disk>) -> bool {
        let open = self.disks.get(handle.0 as usize).and_then(Option::as_ref);
        open.is_some_and(|open| Arc::ptr_eq(&open.disk, disk))
    }

    #[cold]
    fn close_unused(&mut self, disk: u32) {
        let Some(slot) = self.disks.get_mut(disk as usize) else {
            return;
        };
        let Some(open) = slot.as_mut().filter(|open| open.is_unused()) else {
            return;
        };
        if !open.closing {
            open.closing = true;
            open.others.close(&mut self.ring);
            self.prefetching -= usize::from(open.channel.wants_prefetch());
            open.channel.close(&mut self.ring);
            if let Some(retry) = &open.retry {
                retry.cancel(&mut self.ring);
                open.disk.state().cleared(self.worker.index());
            }
        }
        let closed = open.others.take_closed();
        let is_closed = open.channel.is_closed() && open.retry.is_none() && open.others.is_empty();
        let closed = closed.into_iter();
        let gone = is_closed.then(|| slot.take()).flatten();
        let owners = closed.chain(gone.into_iter().map(|open| open.owners));
        for owners in owners.collect::<Vec<_>>() {
            self.unlisten_all(&owners);
        }
    }

    /// Is there a disk that wants to know what comes next?
    #[inline(always)]
    pub fn wants_prefetch(&self) -> bool {
        self.prefetching > 0
    }

    /// This I/O is submitted soon, as a rule: see [`IoChannel::expect`].
    #[inline]
    pub fn prefetch(&self, handle: DiskHandle, request: &IoRequest, soon: Prefetch) {
        if let Some(Some(open)) = self.disks.get(handle.0 as usize) {
            open.channel.prefetch(request, soon);
        }
    }

    /// Gives an I/O to a disk. The buffer's window is what is read or written; it is taken when the I/O is pending
    /// and comes back through [`crate::Source::finish`].
    #[inline(always)]
    pub fn submit(
        &mut self,
        handle: DiskHandle,
        request: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        let Some(Some(open)) = self.disks.get_mut(handle.0 as usize) else {
            return Submission::Done(Err(IoError::new(IoErrorKind::Offline)));
        };
        open.record.asked(request);
        let submitted = open.submit(&mut self.ring, request, buffer, tag.pack(), handle.0);
        match &submitted {
            Submission::Pending => {
                self.pending += 1;
                open.record.pended();
            }
            Submission::Done(outcome) => open.record.ended(outcome),
        }
        submitted
    }

    /// Points the buffer at what a read would bring, where the disk's content lies in memory: see [`IoChannel::borrow`]. It has to
    /// be given back when [`crate::Source::give_back`] says so.
    #[inline]
    pub fn borrow(
        &mut self,
        handle: DiskHandle,
        request: &IoRequest,
        buffer: &mut IoBuffer,
    ) -> bool {
        match self.disks.get_mut(handle.0 as usize) {
            // What has limits waits for its turn, and is read; what is closed refuses; while a range is held all is copied.
            Some(Some(open)) if open.conditions.is_clear() => {
                let seen = open.channel.borrow(request, buffer);
                if seen {
                    open.record.asked(request);
                    open.record.ended(&Ok(()));
                }
                seen
            }
            _ => false,
        }
    }

    pub(crate) fn complete(
        &mut self,
        disk: u32,
        completion: uring::Completion,
        finished: &mut Vec<Finished>,
    ) {
        if let Some(Some(open)) = self.disks.get_mut(disk as usize) {
            let before = finished.len();
            match open.others.is_empty() {
                true => open.channel.complete(&mut self.ring, completion, finished),
                false => open.complete_by_owner(&mut self.ring, completion, finished),
            }
            if open.waiting.has_in_flight() {
                open.hold_failed(finished, before);
            }
            if open.unaligned.is_empty() {
                for one in &mut finished[before..] {
                    one.tag = open.drain.finished(one.tag);
                    open.record.finished(&one.outcome);
                }
            } else {
                open.finish_with_unaligned(&mut self.ring, disk, finished, before);
            }
            if open.is_unused() {
                self.close_unused(disk);
            } else if !open.others.is_empty() {
                self.take_closed(disk);
            }
        }
    }

    /// A timer for a disk's limits has fired: what may start now does. `token` is what it was set with.
    pub(crate) fn pace(&mut self, token: u64, finished: &mut Vec<Finished>) {
        let (disk, number) = (token as u32, (token >> 32) as u32);
        let Some(Some(open)) = self.disks.get_mut(disk as usize) else {
            return;
        };
        open.pacing.fired(number);
        while let Some((waited, deferred)) = open.pacing.next(&open.throttle) {
            open.record.limited(waited);
            open.resume(&mut self.ring, deferred, disk, finished);
        }
        open.arm(&mut self.ring, disk);
        for one in open.waiting.take_ended() {
            open.record.finished(&one.outcome);
            finished.push(one);
        }
        if open.is_unused() {
            self.close_unused(disk);
        }
    }

    /// A source is about to end: what it has waiting for limits goes at once, and what has failed and waits fails.
    pub(crate) fn leave(&mut self, source: SourceId, finished: &mut Vec<Finished>) {
        for disk in 0..self.disks.len() {
            let Some(open) = &mut self.disks[disk] else {
                continue;
            };
            for (waited, deferred) in open.pacing.leave(source.0) {
                open.record.limited(waited);
                open.resume(&mut self.ring, deferred, disk as u32, finished);
            }
            if !open.waiting.is_empty() {
                open.fail_waiting(finished, |tag| Tag::unpack(tag).source == source);
            }
            if open.is_unused() {
                self.close_unused(disk as u32);
            }
        }
    }

    /// A source has ended.
    pub(crate) fn left(&mut self, source: SourceId) {
        let open = self.disks.iter_mut().flatten();
        open.for_each(|open| open.pacing.left(source.0));
    }

    /// A range of a disk is being acquired.
    pub(crate) fn begin_drain(&mut self, disk: u32, barrier: Barrier) {
        if let Some(Some(open)) = self.disks.get_mut(disk as usize) {
            let (in_flight, borrowed) = (open.in_flight(), open.channel.is_borrowed());
            self.takes_back |= borrowed;
            open.drain.begin(barrier, in_flight, borrowed);
        }
    }

    /// Does an acquirer of a range wait for what sources send from a disk's memory?
    #[inline]
    pub(crate) fn takes_back(&self) -> bool {
        self.takes_back
    }

    /// Where the held ranges lie in the memory of disks whose acquirers wait for what is sent from there.
    pub(crate) fn held_memory(&self) -> Vec<Range<usize>> {
        let mut held = Vec::new();
        let waiting = self
            .disks
            .iter()
            .flatten()
            .filter(|open| open.drain.waits_for_borrowed() && open.channel.is_borrowed());
        for open in waiting {
            let geometry = open.disk.info().geometry;
            let mut find = |from, to| {
                let (mut buffer, read) = (IoBuffer::default(), IoRequest::read(from, to - from));
                let found = from < to && open.channel.borrow(&read, &mut buffer);
                held.extend(buffer.view());
                found
            };
            for range in open.disk.range_locks().held() {
                let end = range.end.min(geometry.capacity_bytes());
                if !find(range.start, end) {
                    // The memory of a disk that has grown is not one piece.
                    let step = geometry.block_size();
                    for from in (range.start..end).step_by(step as usize) {
                        find(from, from + u64::from(step));
                    }
                }
            }
        }
        held
    }

    /// Nothing of [`Io::held_memory`] is sent any more, unless it is `still`: acquirers hear of it.
    pub(crate) fn gave_back(&mut self, still: bool) {
        self.takes_back = still;
        if !still {
            let open = self.disks.iter_mut().flatten();
            open.filter(|open| open.drain.waits_for_borrowed())
                .for_each(|open| open.drain.returned());
        }
    }

    /// A range of a disk was released, or it has opened: what was deferred is submitted anew.
    pub(crate) fn resume_deferred(&mut self, disk: u32, finished: &mut Vec<Finished>) {
        let Some(Some(open)) = self.disks.get_mut(disk as usize) else {
            return;
        };
        for deferred in std::mem::take(&mut open.deferred) {
            open.resume(&mut self.ring, deferred, disk, finished);
        }
        // What a closed disk refuses does not wait for it to be open again.
        if open.conditions.has(Condition::Closed) && !open.waiting.is_empty() {
            open.resume_waiting(&mut self.ring, disk, finished);
        }
        if open.is_unused() {
            self.close_unused(disk);
        }
    }
}
