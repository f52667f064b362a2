//! I/Os of disks with an error policy: when a failed one waits, continues or ends, and when one exceeds the timeout. Their
//! records: [`crate::waiting`]. Tests: `tests/waiting.rs`.

use std::sync::Arc;

use bdev::{AttachFailure, Disk, Finished, OnError, Submission};
use block::{IoError, IoErrorKind, IoRequest};
use guest_memory::IoBuffer;
use uring::Ring;

use super::{Io, LATE, OpenDisk, PACE, Tag};
use crate::SourceId;
use crate::attaching::Retry;
use crate::drain::Drain;

impl OpenDisk {
    /// Records a pending I/O. A failed one waits if the disk's policy requires it.
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

    /// Returns true if an I/O that failed with this error waits. It does not wait if its source, or every source, is about
    /// to end, or after the time limit for the disk's locks. A step of a read-modify-write does not wait; the whole read-modify-write does.
    pub(super) fn holds(&self, error: IoError, tag: bdev::Tag) -> bool {
        self.usage.has_users()
            && !self.has_lock_timeout()
            && self.disk.on_error().holds(error)
            && !self.unaligned.has(tag)
            && !self.pacing.is_leaving(Tag::unpack(tag).source.0)
    }

    fn has_lock_timeout(&self) -> bool {
        let failure = self.attachment.retry.as_ref().map(Retry::failure);
        failure == Some(AttachFailure::LockTimeout)
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

    /// Moves failed I/Os that must wait out of `finished`, from index `from` on.
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

    /// Asks the device to cancel the I/Os beyond the disk's timeout. I/Os that cannot be cancelled continue.
    #[cold]
    fn cancel_late(&mut self, ring: &mut Ring, handle: u32) {
        self.late_timer = false;
        let Some(timeout) = self.disk.io_timeout() else {
            return;
        };
        let (now, channel) = (self.pacing.clock().elapsed(), &mut self.channel);
        let others = &mut self.attachment.others;
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

    /// Submits all failed and waiting I/Os again.
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

    /// Ends the wait of the selected I/Os; they fail with their original errors.
    #[cold]
    pub(super) fn fail_waiting(
        &mut self,
        finished: &mut Vec<Finished>,
        matches: impl Fn(bdev::Tag) -> bool,
    ) {
        let failed = self.waiting.fail(matches);
        failed
            .iter()
            .for_each(|one| self.record.finished_held(&one.outcome));
        finished.extend(failed);
        self.waiting.show(&self.disk, self.worker);
    }
}

impl Io {
    /// Submits the failed and waiting I/Os of a disk again. An unattached device is retried at once.
    #[cold]
    pub(crate) fn resume_disk(&mut self, disk: &Arc<Disk>, finished: &mut Vec<Finished>) {
        for (index, open) in self.disks.iter_mut().enumerate() {
            let Some(open) = open.as_mut().filter(|open| open.usage.is_open()) else {
                continue;
            };
            if !Arc::ptr_eq(&open.disk, disk) {
                continue;
            }
            match &open.attachment.retry {
                Some(retry) if disk.on_error() != OnError::Report => retry.cancel(&mut self.ring),
                _ => open.resume_waiting(&mut self.ring, index as u32, finished),
            }
        }
    }

    /// Handles the I/O timeout timer. If the handle now belongs to another disk, the check has no effect.
    #[cold]
    pub(crate) fn cancel_late(&mut self, disk: u64) {
        if let Some(Some(open)) = self.disks.get_mut(disk as usize) {
            open.cancel_late(&mut self.ring, disk as u32);
        }
    }

    /// Ends the wait of all failed I/Os on a disk that is being removed from the process.
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

    /// Ends the wait of a source's failed I/Os in these slots, whose tasks were aborted. [`crate::Source::finish`] reports
    /// them in the next iteration. I/Os in the device are not affected. Returns false if none waits.
    #[cold]
    pub fn cancel_waiting(
        &mut self,
        source: SourceId,
        mut matches: impl FnMut(u32) -> bool,
    ) -> bool {
        let mut any = false;
        for (index, open) in self.disks.iter_mut().enumerate() {
            let Some(open) = open else { continue };
            let cancelled = open.waiting.cancel(|tag| {
                let tag = Tag::unpack(tag);
                tag.source == source && matches(tag.slot)
            });
            any |= cancelled;
            if cancelled {
                open.waiting.show(&open.disk, open.worker);
                // No timer has this number; the operation only triggers a check of the disk.
                self.ring.nop(PACE, index as u64);
            }
        }
        any
    }
}
