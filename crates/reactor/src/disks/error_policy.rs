//! I/Os of disks with an error policy: when one has failed and begins to wait, when it goes on or ends, and when one takes too long.
//! What is remembered of them: [`crate::waiting`]. Tests: `tests/waiting.rs`.

use std::sync::Arc;

use bdev::{Disk, Finished, OnError, Submission};
use block::{IoError, IoErrorKind, IoRequest};
use guest_memory::IoBuffer;
use uring::Ring;

use super::{Io, LATE, OpenDisk, PACE, Tag};
use crate::SourceId;
use crate::drain::Drain;

impl OpenDisk {
    /// Remembers an I/O that is pending; one that has failed waits, where the disk's policy is so.
    #[cold]
    pub(crate) fn track(
        &mut self,
        submitted: Submission,
        ring: &mut Ring,
        request: &IoRequest,
        buffer: &mut IoBuffer,
        tag: bdev::Tag,
        handle: u32,
    ) -> Submission {
        match submitted {
            Submission::Pending => {
                let channel_tag = match request.touches_data() {
                    false => self.drain.flush_tag(tag),
                    true => self.drain.counted_tag(tag),
                };
                let now = self.pacing.clock().elapsed();
                self.waiting.pended(tag, channel_tag, request, now);
                if let (Some(timeout), false) = (self.disk.io_timeout(), self.late_timer) {
                    self.late_timer = true;
                    ring.timer(LATE, handle.into(), timeout);
                }
            }
            Submission::Done(Err(error)) if self.holds(error, tag) => {
                self.hold(request, buffer, tag, error);
                return Submission::Pending;
            }
            Submission::Done(_) => {}
        }
        submitted
    }

    /// Returns true if an I/O that has failed with this error waits. It does not wait if its source, or every source, is about to end. A
    /// step of a read-modify-write does not wait: the whole read-modify-write does.
    pub(super) fn holds(&self, error: IoError, tag: bdev::Tag) -> bool {
        self.users > 0
            && self.disk.on_error().holds(error)
            && !self.unaligned.has(tag)
            && !self.pacing.is_leaving(Tag::unpack(tag).source.0)
    }

    pub(super) fn hold(
        &mut self,
        request: &IoRequest,
        buffer: &mut IoBuffer,
        tag: bdev::Tag,
        error: IoError,
    ) {
        self.record.held(error);
        self.waiting.wait(request, buffer, tag, error);
        self.waiting.show(&self.disk, self.worker);
    }

    /// Takes out of `finished`, from `from` on, what has failed and waits.
    #[cold]
    pub(super) fn hold_failed(&mut self, finished: &mut Vec<Finished>, from: usize) {
        let mut index = from;
        while let Some(one) = finished.get_mut(index) {
            let tag = Drain::unmarked(one.tag);
            let remembered = self.waiting.finished(tag);
            if let (Some(known), Err(error)) = (&remembered, &mut one.outcome)
                && known.is_late
                && error.kind == IoErrorKind::Cancelled
            {
                *error = IoErrorKind::TimedOut.into();
            }
            match (remembered, one.outcome) {
                (Some(known), Err(error)) if self.holds(error, tag) => {
                    self.drain.finished(one.tag);
                    self.hold(&known.request, &mut one.buffer, tag, error);
                    finished.remove(index);
                }
                _ => index += 1,
            }
        }
    }

    /// Has the device cancel the I/Os that take longer than the disk allows. What it cannot cancel goes on.
    #[cold]
    fn cancel_late(&mut self, ring: &mut Ring, handle: u32) {
        self.late_timer = false;
        let Some(timeout) = self.disk.io_timeout() else {
            return;
        };
        let (now, channel) = (self.pacing.clock().elapsed(), &mut self.channel);
        let others = &mut self.others;
        let mut count = 0;
        let next = self.waiting.late(now, timeout, |tag| {
            count += 1;
            channel.abort(ring, tag);
            others.abort(ring, tag);
        });
        if count > 0 {
            self.record.late(count, timeout);
        }
        if let Some(next) = next {
            self.late_timer = true;
            ring.timer(LATE, handle.into(), next);
        }
    }

    /// Submits again all that has failed and waits.
    #[cold]
    pub(super) fn resume_waiting(
        &mut self,
        ring: &mut Ring,
        handle: u32,
        finished: &mut Vec<Finished>,
    ) {
        for deferred in self.waiting.take() {
            self.resume(ring, deferred, handle, finished);
        }
        self.waiting.show(&self.disk, self.worker);
    }

    /// Ends the wait of the I/Os that are meant: they fail with the errors that they have met.
    #[cold]
    pub(super) fn fail_waiting(
        &mut self,
        finished: &mut Vec<Finished>,
        is_meant: impl Fn(bdev::Tag) -> bool,
    ) {
        let failed = self.waiting.fail(is_meant);
        failed
            .iter()
            .for_each(|one| self.record.finished(&one.outcome));
        finished.extend(failed);
        self.waiting.show(&self.disk, self.worker);
    }
}

impl Io {
    /// Submits again what has failed on a disk and waits; a device that could not be attached to is tried again at once.
    #[cold]
    pub(crate) fn resume_disk(&mut self, disk: &Arc<Disk>, finished: &mut Vec<Finished>) {
        for (index, open) in self.disks.iter_mut().enumerate() {
            let Some(open) = open.as_mut().filter(|open| !open.closing) else {
                continue;
            };
            if !Arc::ptr_eq(&open.disk, disk) {
                continue;
            }
            match &open.retry {
                Some(retry) if disk.on_error() != OnError::Report => retry.cancel(&mut self.ring),
                _ => open.resume_waiting(&mut self.ring, index as u32, finished),
            }
        }
    }

    /// The timer for a disk's I/Os that take too long has fired. A disk that has the handle by now looks in vain.
    #[cold]
    pub(crate) fn cancel_late(&mut self, disk: u64) {
        if let Some(Some(open)) = self.disks.get_mut(disk as usize) {
            open.cancel_late(&mut self.ring, disk as u32);
        }
    }

    /// Ends the wait of all I/Os on a disk that have failed and wait: it is being taken out of the process.
    #[cold]
    pub(crate) fn fail_waiting(&mut self, disk: &Arc<Disk>, finished: &mut Vec<Finished>) {
        for index in 0..self.disks.len() {
            if let Some(open) = &mut self.disks[index]
                && Arc::ptr_eq(&open.disk, disk)
            {
                open.fail_waiting(finished, |_| true);
                if open.is_unused() {
                    self.close_unused(index as u32);
                }
            }
        }
    }

    /// Ends the wait of a source's I/Os in these slots that have failed and wait: their tasks were aborted. The source hears of
    /// it by [`crate::Source::finish`], in the next iteration. An I/O that a device has is left to the device. False: none waits.
    #[cold]
    pub fn cancel_waiting(
        &mut self,
        source: SourceId,
        mut is_meant: impl FnMut(u32) -> bool,
    ) -> bool {
        let mut any = false;
        for (index, open) in self.disks.iter_mut().enumerate() {
            let Some(open) = open else { continue };
            let cancelled = open.waiting.cancel(|tag| {
                let tag = Tag::unpack(tag);
                tag.source == source && is_meant(tag.slot)
            });
            any |= cancelled;
            if cancelled {
                open.waiting.show(&open.disk, open.worker);
                // No timer has this number: it only has the disk looked at.
                self.ring.nop(PACE, index as u64);
            }
        }
        any
    }
}
