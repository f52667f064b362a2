//! A worker's handles on the disks of its sources, and the context of running sources.

mod error_policy;
mod replacing;
mod unaligned;

use std::ops::Range;
use std::sync::Arc;

use bdev::{
    Attach, AttachFailure, Barrier, BlockDevice, Condition, Conditions, Disk, Finished, IoChannel,
    LockWaits, Prefetch, RecorderView, Submission, Throttle, Wake,
};
use block::{IoError, IoErrorKind, IoRequest};
use guest_memory::IoBuffer;
use latency::{Clock, QueueRecord, Stamp};
use uring::{Owner, Ring};

use crate::admission::Deferred;
use crate::attaching::{Absent, Held, HeldIo, Locking, Retry};
use crate::drain::Drain;
use crate::ledger::{DiskRecord, Ledger};
use crate::pacing::{Limited, Pacing};
use crate::waiting::Waiting;
use crate::{SourceId, WorkerHandle};
use replacing::Others;
use unaligned::Unaligned;

/// A disk of one worker: an index into its open handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DiskHandle(u32);

impl DiskHandle {
    /// No disk; its I/O is refused.
    pub const NONE: DiskHandle = DiskHandle(u32::MAX);
}

impl Default for DiskHandle {
    fn default() -> Self {
        DiskHandle::NONE
    }
}

/// Owner of an I/O: a slot of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// The source that submitted it.
    pub source: SourceId,
    /// Slot number of that source.
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

/// Receiver of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listener {
    /// None; the number is free.
    Free,
    /// The worker's mailbox.
    Mailbox,
    /// A source's kick descriptor.
    Kick(SourceId),
    /// An I/O of a disk handle.
    Disk(u32),
    /// The retry timer for attaching to a disk.
    Retry(u32),
    /// A source's own operations on the ring.
    Source(SourceId),
    /// The limits timer; the token holds the timer's number and the disk's handle.
    Pace,
    /// The I/O timeout timer; the token is the disk's handle.
    Late,
}

/// Owner of all limits timers; see [`Io::new`].
pub(crate) const PACE: Owner = Owner(1);
/// Owner of all I/O timeout timers.
pub(crate) const LATE: Owner = Owner(2);

/// The device that a handle is attached to.
struct Attachment {
    /// Ring owners of the channel's layers.
    owners: Vec<Owner>,
    /// Generation of the disk's device; see [`Disk::device_and_generation`].
    generation: u64,
    /// Channels of earlier devices and of the prepared next one; see `replacing.rs`.
    others: Others,
    /// Set while the device is not attached.
    retry: Option<Retry>,
    /// Locks that attaching waits for.
    lock_waits: LockWaits,
}

/// Use of a handle by sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Usage {
    Open {
        users: usize,
    },
    /// The last user has closed the handle. Operations on the ring are still ending.
    Closing,
}

impl Usage {
    fn is_open(self) -> bool {
        self != Usage::Closing
    }

    fn has_users(self) -> bool {
        matches!(self, Usage::Open { users } if users > 0)
    }

    fn add_user(&mut self) {
        if let Usage::Open { users } = self {
            *users += 1;
        }
    }

    fn remove_user(&mut self) {
        if let Usage::Open { users } = self {
            *users -= 1;
        }
    }
}

/// A disk in use by sources of the worker. The path of an I/O: `admission.rs`.
pub(crate) struct OpenDisk {
    pub disk: Arc<Disk>,
    pub channel: Box<dyn IoChannel>,
    attachment: Attachment,
    usage: Usage,
    pub drain: Drain,
    pub record: Arc<DiskRecord>,
    pub conditions: Arc<Conditions>,
    pub throttle: Arc<Throttle>,
    pub recorder: RecorderView,
    pub pacing: Pacing,
    /// I/Os that wait for a range to be released, or for the disk to open.
    pub deferred: Vec<Deferred>,
    waiting: Waiting,
    pub unaligned: Unaligned,
    /// The I/O timeout timer is running.
    late_timer: bool,
    /// Number of the worker.
    worker: u32,
}

impl OpenDisk {
    /// Returns true if the handle has no users and no I/O.
    #[inline]
    fn is_unused(&self) -> bool {
        !self.usage.has_users()
            && self.in_flight() == 0
            && self.deferred.is_empty()
            && self.pacing.is_empty()
            && self.waiting.is_empty()
            && self.unaligned.is_empty()
    }

    /// Accounts for I/Os that the channel has ended: those from index `from` on.
    #[inline(always)]
    fn account(&mut self, ring: &mut Ring, handle: u32, finished: &mut Vec<Finished>, from: usize) {
        if self.waiting.has_in_flight() {
            self.hold_failed(finished, from);
        }
        if self.unaligned.is_empty() {
            for one in &mut finished[from..] {
                one.tag = self.drain.finished(one.tag);
                self.record.finished(&one.outcome);
            }
        } else {
            self.finish_with_unaligned(ring, handle, finished, from);
        }
    }
}

/// Registers a listener and returns its number as the owner of operations.
fn listen(listeners: &mut Vec<Listener>, listener: Listener) -> Owner {
    let free = listeners.iter().position(|l| *l == Listener::Free);
    let index = free.unwrap_or_else(|| {
        listeners.push(Listener::Free);
        listeners.len() - 1
    });
    listeners[index] = listener;
    Owner(u32::try_from(index).expect("fewer listeners than descriptors"))
}

/// Attaches to a device for the handle with this index. The caller must release the returned owners, even if attaching
/// fails.
fn attach_to(
    device: &dyn BlockDevice,
    ring: &mut Ring,
    listeners: &mut Vec<Listener>,
    index: u32,
    waits: &mut LockWaits,
) -> (std::io::Result<Box<dyn IoChannel>>, Vec<Owner>) {
    let mut owners = Vec::new();
    let mut next_owner = || {
        let owner = listen(listeners, Listener::Disk(index));
        owners.push(owner);
        owner
    };
    let attach = Attach::new(ring, &mut next_owner);
    let attached = device.attach(&mut attach.without_waiting(waits));
    (attached, owners)
}

/// Context of running sources: the worker's ring, disks and clock.
pub struct Io {
    pub(crate) ring: Ring,
    pub(crate) clock: Clock,
    pub(crate) listeners: Vec<Listener>,
    /// Sources record the stages of their requests.
    pub(crate) recording: bool,
    /// I/Os accepted by disks and not finished.
    pub(crate) pending: usize,
    /// Those of them that wait for limits.
    pub(crate) limited: Limited,
    disks: Vec<Option<OpenDisk>>,
    /// Number of disks that use prefetch hints.
    prefetching: usize,
    /// An acquirer of a range waits for data that is being sent from a disk's memory.
    reclaims_borrowed: bool,
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
            limited: Limited::default(),
            disks: Vec::new(),
            prefetching: 0,
            reclaims_borrowed: false,
        }
    }

    /// Returns the time in ticks.
    #[inline]
    pub fn now(&self) -> Stamp {
        self.clock.now()
    }

    /// Returns true if sources record the stages of their requests.
    pub fn is_recording(&self) -> bool {
        self.recording
    }

    /// Returns the worker's clock.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Registers a source's measurements that start after the source.
    pub fn register(&self, record: Arc<QueueRecord>) {
        self.ledger.register(record);
    }

    /// Returns the worker's ring, for a source's own operations.
    pub fn ring(&mut self) -> &mut Ring {
        &mut self.ring
    }

    /// Allocates an owner for a source's own operations; their completions are passed to [`crate::Source::completed`].
    pub fn own(&mut self, source: SourceId) -> Owner {
        self.listen(Listener::Source(source))
    }

    /// Releases an owner from [`Io::own`]. None of its operations may be in flight.
    pub fn disown(&mut self, owner: Owner) {
        self.unlisten(owner);
    }

    pub(crate) fn listen(&mut self, listener: Listener) -> Owner {
        listen(&mut self.listeners, listener)
    }

    pub(crate) fn unlisten(&mut self, owner: Owner) {
        self.listeners[owner.0 as usize] = Listener::Free;
    }

    /// Opens this worker's handle on a disk, which is attached at the first use. Each call needs one call of [`Io::close`].
    /// If the device cannot be attached, I/O fails until it can; see [`Disk::state`].
    pub fn open(&mut self, disk: &Arc<Disk>) -> DiskHandle {
        let same = |open: &Option<OpenDisk>| {
            let open = open.as_ref();
            open.is_some_and(|open| open.usage.is_open() && Arc::ptr_eq(&open.disk, disk))
        };
        if let Some(index) = self.disks.iter().position(same) {
            let open = self.disks[index].as_mut().expect("found above");
            open.usage.add_user();
            return DiskHandle(index as u32);
        }
        let free = self.disks.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.disks.push(None);
            self.disks.len() - 1
        });
        let worker = self.worker.clone();
        let wake: Wake = Arc::new(move || worker.send(move |w| w.io().locks_changed(index as u32)));
        self.disks[index] = Some(OpenDisk {
            disk: disk.clone(),
            channel: Box::new(Absent),
            attachment: Attachment {
                owners: Vec::new(),
                generation: 0,
                others: Others::default(),
                retry: None,
                lock_waits: LockWaits::new(wake),
            },
            usage: Usage::Open { users: 1 },
            drain: Drain::new(disk.range_locks(), &self.worker, index as u32),
            record: self.ledger.disk(disk),
            conditions: disk.conditions().clone(),
            throttle: disk.throttle().clone(),
            recorder: RecorderView::new(disk.recorder()),
            pacing: Pacing::new(&self.clock, &self.limited),
            deferred: Vec::new(),
            waiting: Waiting::default(),
            unaligned: Unaligned::new(&self.worker, disk.info().io_alignment),
            late_timer: false,
            worker: self.worker.index(),
        });
        self.attach(index);
        DiskHandle(index as u32)
    }

    /// Attaches to a disk's device, or schedules a retry.
    fn attach(&mut self, index: usize) {
        let Some(open) = self.disks[index].as_mut() else {
            return;
        };
        let (device, generation) = open.disk.device_and_generation();
        let (attached, owners) = attach_to(
            &*device,
            &mut self.ring,
            &mut self.listeners,
            index as u32,
            &mut open.attachment.lock_waits,
        );
        let worker = self.worker.index();
        if !open.attachment.lock_waits.is_pending() {
            open.attachment.lock_waits.clear();
        }
        match attached {
            Ok(channel) => {
                self.prefetching += usize::from(channel.wants_prefetch());
                (open.channel, open.attachment.owners) = (channel, owners);
                open.attachment.generation = generation;
                if let Some(retry) = open.attachment.retry.take() {
                    let disk = open.disk.name();
                    if retry.is_shown {
                        tracing::info!(disk, worker, "attached to the device");
                        open.disk.state().cleared(worker);
                    }
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
        let (disk, now) = (open.disk.name(), self.clock.elapsed());
        let failure = match error.kind() {
            _ if open.attachment.lock_waits.is_pending() => AttachFailure::Locking,
            std::io::ErrorKind::ResourceBusy => AttachFailure::Locked,
            _ => AttachFailure::Other,
        };
        let first = open.attachment.retry.is_none();
        let retry = open.attachment.retry.get_or_insert_with(|| {
            let owner = listen(&mut self.listeners, Listener::Retry(index as u32));
            Retry::begin(&mut self.ring, owner, now, failure)
        });
        if first && failure == AttachFailure::Locking {
            // Usually the locks are taken at once. A later attempt reports a file system that does not answer.
            open.channel = Box::new(Locking {
                held: retry.held.clone(),
                retry: retry.owner,
            });
            return;
        }
        let on_error = open.disk.on_error().word();
        // The conflict of the last attempt stays the reason until this one has a result.
        let is_repeated =
            failure == AttachFailure::Locking && retry.failure() != AttachFailure::Locking;
        let is_new = !std::mem::replace(&mut retry.is_shown, true);
        if !first {
            retry.again(&mut self.ring, failure);
        }
        match failure {
            _ if !is_new => {}
            AttachFailure::Locked => {
                tracing::warn!(disk, worker, on_error, "waiting for a lock: {error}");
            }
            _ => tracing::error!(
                disk,
                worker,
                on_error,
                "cannot attach to the device: {error}"
            ),
        }
        let is_late = retry.end_lock_wait(open.disk.lock_timeout(), now);
        if is_late {
            let waited = retry.waited(now);
            tracing::error!(
                disk,
                worker,
                ?waited,
                "lock_timeout exceeded, requests fail until the lock is free: {error}"
            );
        }
        if is_repeated && !is_late {
            return;
        }
        if retry.failure() != AttachFailure::Locking {
            open.channel = Box::new(Absent);
        }
        let state = open.disk.state();
        state.failed(worker, retry.failure(), error.to_string(), retry.wait());
    }

    /// Retries to attach to a disk. On success, I/Os that wait for the device continue.
    #[cold]
    pub(crate) fn attach_again(&mut self, disk: u32, finished: &mut Vec<Finished>) {
        let Some(Some(open)) = self.disks.get_mut(disk as usize) else {
            return;
        };
        if open.usage.is_open() {
            let retry = open.attachment.retry.as_ref();
            let held = retry.map(|retry| retry.held.clone());
            self.attach(disk as usize);
            if let Some(held) = held.filter(|held| !held.borrow().is_empty()) {
                self.continue_held(disk, &held, finished);
            }
            if let Some(Some(open)) = self.disks.get_mut(disk as usize) {
                match open.attachment.retry.as_ref().map(Retry::failure) {
                    None => open.resume_waiting(&mut self.ring, disk, finished),
                    Some(AttachFailure::LockTimeout) => open.fail_waiting(finished, |_| true),
                    Some(AttachFailure::Locking | AttachFailure::Locked | AttachFailure::Other) => {
                    }
                }
            }
            return;
        }
        if let Some(retry) = open.attachment.retry.take() {
            self.unlisten_all(&[retry.owner]);
        }
        self.close_unused(disk);
    }

    /// Attaches at once after an attempt to take the locks of a disk has ended.
    #[cold]
    pub(crate) fn locks_changed(&mut self, disk: u32) {
        if let Some(Some(open)) = self.disks.get(disk as usize)
            && let Some(retry) = &open.attachment.retry
        {
            retry.cancel(&mut self.ring);
        }
    }

    /// Submits I/Os that have waited for locks. Without the locks they fail; while these are still being taken, only cancelled I/Os end.
    #[cold]
    fn continue_held(&mut self, disk: u32, held: &Held, finished: &mut Vec<Finished>) {
        let Some(Some(open)) = self.disks.get_mut(disk as usize) else {
            return;
        };
        let failure = open.attachment.retry.as_ref().map(Retry::failure);
        let is_locking = failure == Some(AttachFailure::Locking);
        let ended: Vec<HeldIo> = held
            .borrow_mut()
            .extract_if(.., |io| io.is_cancelled || !is_locking)
            .collect();
        let before = finished.len();
        for HeldIo {
            request,
            mut buffer,
            tag,
            is_cancelled,
        } in ended
        {
            let submitted = match is_cancelled {
                true => Submission::Done(Err(IoErrorKind::Cancelled.into())),
                // Fails if the channel is still absent.
                false => open
                    .channel
                    .submit(&mut self.ring, &request, &mut buffer, tag),
            };
            if let Submission::Done(outcome) = submitted {
                finished.push(Finished {
                    tag,
                    buffer,
                    outcome,
                });
            }
        }
        open.account(&mut self.ring, disk, finished, before);
        if open.is_unused() {
            self.close_unused(disk);
        }
    }

    fn unlisten_all(&mut self, owners: &[Owner]) {
        for &owner in owners {
            // Otherwise a late completion would be attributed to the next user of the number.
            assert!(
                self.ring.is_done_with(owner),
                "a disk's channel was closed with operations in flight"
            );
            self.unlisten(owner);
        }
    }

    /// Releases a handle from [`Io::open`]. The last release closes it after its I/O has finished.
    pub fn close(&mut self, handle: DiskHandle) {
        if let Some(Some(open)) = self.disks.get_mut(handle.0 as usize) {
            open.usage.remove_user();
            self.close_unused(handle.0);
        }
    }

    /// Returns true if any handle is not completely closed.
    pub(crate) fn has_disks(&self) -> bool {
        self.disks.iter().any(Option::is_some)
    }

    /// Returns true if `handle` belongs to `disk`.
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
        if open.usage.is_open() {
            open.usage = Usage::Closing;
            open.attachment.others.close(&mut self.ring);
            self.prefetching -= usize::from(open.channel.wants_prefetch());
            open.channel.close(&mut self.ring);
            open.attachment.lock_waits.clear();
            if let Some(retry) = &open.attachment.retry {
                retry.cancel(&mut self.ring);
                open.disk.state().cleared(self.worker.index());
            }
        }
        let closed = open.attachment.others.take_closed();
        let is_closed = open.channel.is_closed()
            && open.attachment.retry.is_none()
            && open.attachment.others.is_empty();
        let closed = closed.into_iter();
        let gone = is_closed.then(|| slot.take()).flatten();
        let owners = closed.chain(gone.into_iter().map(|open| open.attachment.owners));
        for owners in owners.collect::<Vec<_>>() {
            self.unlisten_all(&owners);
        }
    }

    /// Returns true if a disk uses prefetch hints.
    #[inline(always)]
    pub fn wants_prefetch(&self) -> bool {
        self.prefetching > 0
    }

    /// Announces an I/O that is usually submitted soon; see [`IoChannel::prefetch`].
    #[inline]
    pub fn prefetch(&self, handle: DiskHandle, request: &IoRequest, soon: Prefetch) {
        if let Some(Some(open)) = self.disks.get(handle.0 as usize) {
            open.channel.prefetch(request, soon);
        }
    }

    /// Submits an I/O to a disk. The buffer's window is the range to read or write. If the I/O is pending, the buffer is
    /// taken and returned through [`crate::Source::finish`].
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
        open.record.record_request(request);
        // Each branch returns a value of its own, so the branch of success copies no error.
        match open.submit(&mut self.ring, request, buffer, tag.pack(), handle.0) {
            Submission::Done(Ok(())) => Submission::Done(Ok(())),
            Submission::Pending => {
                self.pending += 1;
                open.record.pended();
                Submission::Pending
            }
            Submission::Done(Err(error)) => {
                open.record.ended(&Err(error));
                Submission::Done(Err(error))
            }
        }
    }

    /// Points the buffer at the data of a read if the disk's content is in memory; see [`IoChannel::borrow`]. The data must
    /// be returned on [`crate::Source::return_borrowed`].
    #[inline]
    pub fn borrow(
        &mut self,
        handle: DiskHandle,
        request: &IoRequest,
        buffer: &mut IoBuffer,
    ) -> bool {
        match self.disks.get_mut(handle.0 as usize) {
            // Only while the conditions are clear. Disks with limits queue their reads, closed disks refuse them, and held
            // ranges require copies.
            Some(Some(open)) if open.conditions.is_clear_for_aligned() => {
                let seen = open.channel.borrow(request, buffer);
                if seen {
                    open.record.record_request(request);
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
            match open.attachment.others.is_empty() {
                true => open.channel.complete(&mut self.ring, completion, finished),
                false => open.complete_by_owner(&mut self.ring, completion, finished),
            }
            open.account(&mut self.ring, disk, finished, before);
            if open.is_unused() {
                self.close_unused(disk);
            } else if !open.attachment.others.is_empty() {
                self.take_closed(disk);
            }
        }
    }

    /// Starts the I/Os that the limits admit after a limits timer has fired. `token` is the timer's token.
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

    /// Prepares a source for its end: its I/Os that wait for limits start at once, and its failed I/Os that wait are
    /// reported.
    pub(crate) fn end_source(&mut self, source: SourceId, finished: &mut Vec<Finished>) {
        for disk in 0..self.disks.len() {
            let Some(open) = &mut self.disks[disk] else {
                continue;
            };
            for (waited, deferred) in open.pacing.end_source(source.0) {
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

    /// Removes the state of a source that has ended.
    pub(crate) fn remove_source(&mut self, source: SourceId) {
        let open = self.disks.iter_mut().flatten();
        open.for_each(|open| open.pacing.remove_source(source.0));
    }

    /// Starts draining a disk for an acquirer of a range.
    pub(crate) fn begin_drain(&mut self, disk: u32, barrier: Barrier) {
        if let Some(Some(open)) = self.disks.get_mut(disk as usize) {
            let (in_flight, borrowed) = (open.in_flight(), open.channel.is_borrowed());
            self.reclaims_borrowed |= borrowed;
            open.drain.begin(barrier, in_flight, borrowed);
        }
    }

    /// Returns true if an acquirer of a range waits for data that sources send from a disk's memory.
    #[inline]
    pub(crate) fn reclaims_borrowed(&self) -> bool {
        self.reclaims_borrowed
    }

    /// Returns the memory of held ranges with acquirers that wait for borrowed data.
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
                    // The memory of a grown disk is not contiguous.
                    let step = geometry.block_size();
                    for from in (range.start..end).step_by(step as usize) {
                        find(from, from + u64::from(step));
                    }
                }
            }
        }
        held
    }

    /// Reports the result of taking borrowed data back. If nothing is `still` borrowed, the acquirers continue.
    pub(crate) fn finish_reclaim(&mut self, still: bool) {
        self.reclaims_borrowed = still;
        if !still {
            let open = self.disks.iter_mut().flatten();
            open.filter(|open| open.drain.waits_for_borrowed())
                .for_each(|open| open.drain.returned());
        }
    }

    /// Repeats the admission of deferred I/Os after a range was released or the disk was opened.
    pub(crate) fn resume_deferred(&mut self, disk: u32, finished: &mut Vec<Finished>) {
        let Some(Some(open)) = self.disks.get_mut(disk as usize) else {
            return;
        };
        for deferred in std::mem::take(&mut open.deferred) {
            open.resume(&mut self.ring, deferred, disk, finished);
        }
        // Failed I/Os do not wait for a closed disk to open again; it refuses them.
        if open.conditions.has(Condition::Closed) && !open.waiting.is_empty() {
            open.resume_waiting(&mut self.ring, disk, finished);
        }
        if open.is_unused() {
            self.close_unused(disk);
        }
    }
}
