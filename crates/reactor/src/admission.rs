//! Admission of an I/O on a disk: checks that the disk is open, then range locks, then limits. An admitted I/O is recorded
//! if the disk has a dirty bitmap, and is submitted to the channel.
//!
//! One load of the disk's [`bdev::Conditions`] covers the common case, where all of them are clear. Otherwise
//! [`OpenDisk::admit`] runs the checks from top to bottom. An I/O that has to wait is deferred, and all checks are repeated
//! when the condition has changed. An I/O is charged to the limits once. Owned by the worker. Tests:
//! `tests/held_ranges.rs`, `pacing.rs`, and `drain.rs`, which counts the I/Os in flight meanwhile.

use bdev::{Admission, Condition, Finished, Submission, Tag};
use block::{IoErrorKind, IoFlags, IoRequest};
use guest_memory::IoBuffer;
use uring::Ring;

use crate::disks::{OpenDisk, PACE, Tag as Owned};

/// An I/O that waits for admission.
pub(crate) struct Deferred {
    pub request: IoRequest,
    pub buffer: IoBuffer,
    pub tag: Tag,
    /// The I/O was charged to the limits.
    pub is_paid: bool,
}

/// Result of [`OpenDisk::admit`].
enum Verdict {
    Start,
    /// The I/O waits until a range is released or the disk opens.
    WaitForLock,
    WaitForLimits,
    Fail(IoErrorKind),
}

impl OpenDisk {
    /// Submits an I/O, or defers it. A deferred I/O also counts as pending.
    #[inline(always)]
    pub fn submit(
        &mut self,
        ring: &mut Ring,
        request: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
        handle: u32,
    ) -> Submission {
        if self.may_start_at_once(request) {
            return self.start(ring, request, buffer, tag);
        }
        self.submit_admitted(ring, request, buffer, tag, handle, false)
    }

    /// Returns true if the I/O needs no admission. Only disks of coarse alignment check that of the I/O.
    #[inline(always)]
    fn may_start_at_once(&self, request: &IoRequest) -> bool {
        self.conditions.is_clear()
            || self.conditions.is_clear_for_aligned() && self.unaligned.takes(request)
    }

    #[cold]
    fn submit_admitted(
        &mut self,
        ring: &mut Ring,
        request: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
        handle: u32,
        is_paid: bool,
    ) -> Submission {
        let verdict = self.admit(request, tag, is_paid);
        let mut deferred = |is_paid| Deferred {
            request: *request,
            buffer: std::mem::take(buffer),
            tag,
            is_paid,
        };
        match verdict {
            Verdict::Start if !self.unaligned.takes(request) && request.touches_data() => {
                return self.begin_unaligned(ring, request, buffer, tag, handle);
            }
            Verdict::Start => {
                if self.conditions.has(Condition::Recorded) {
                    self.recorder.record(request);
                }
                let submitted = self.start_counted(ring, request, buffer, tag);
                return match self.conditions.has(Condition::Tracked) {
                    true => self.track(submitted, ring, request, buffer, tag, handle),
                    false => submitted,
                };
            }
            Verdict::Fail(kind) => return Submission::Done(Err(kind.into())),
            Verdict::WaitForLock => self.deferred.push(deferred(is_paid)),
            Verdict::WaitForLimits => {
                // The I/O is charged while it waits in the queue of its source.
                let source = Owned::unpack(tag).source.0;
                self.pacing.wait(source, deferred(true));
                self.arm(ring, handle);
            }
        }
        Submission::Pending
    }

    fn admit(&mut self, request: &IoRequest, tag: Tag, is_paid: bool) -> Verdict {
        let locks = self.disk.range_locks();
        if self.conditions.has(Condition::Closed) {
            match locks.admit_closed(request) {
                Admission::Proceed => {}
                Admission::Defer => return Verdict::WaitForLock,
                Admission::Reject => return Verdict::Fail(IoErrorKind::Closed),
            }
        }
        if self.conditions.has(Condition::Locked)
            && !request.flags.has(IoFlags::HOLDER)
            && request.touches_data()
            && locks.holds(request.offset, request.length)
        {
            return Verdict::WaitForLock;
        }
        if self.conditions.has(Condition::Limited) && !is_paid {
            let source = Owned::unpack(tag).source.0;
            if !self.pacing.may_start(&self.throttle, source, request) {
                return Verdict::WaitForLimits;
            }
        }
        Verdict::Start
    }

    /// Repeats the admission of a deferred I/O.
    pub fn resume(
        &mut self,
        ring: &mut Ring,
        deferred: Deferred,
        handle: u32,
        finished: &mut Vec<Finished>,
    ) {
        let Deferred {
            request,
            mut buffer,
            tag,
            is_paid,
        } = deferred;
        if self.unaligned.has(tag) {
            if let Some(one) = self.restart_unaligned(ring, handle, tag) {
                self.record.finished(&one.outcome);
                finished.push(one);
            }
            return;
        }
        let submitted = if self.may_start_at_once(&request) {
            self.start(ring, &request, &mut buffer, tag)
        } else {
            self.submit_admitted(ring, &request, &mut buffer, tag, handle, is_paid)
        };
        if let Submission::Done(outcome) = submitted {
            self.record.finished(&outcome);
            finished.push(Finished {
                tag,
                buffer,
                outcome,
            });
        }
    }

    /// Submits a step of a read-modify-write, which was charged to the limits as a whole.
    pub(crate) fn submit_part(
        &mut self,
        ring: &mut Ring,
        request: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
        handle: u32,
    ) -> Submission {
        match self.conditions.is_clear_for_aligned() {
            true => self.start(ring, request, buffer, tag),
            false => self.submit_admitted(ring, request, buffer, tag, handle, true),
        }
    }

    #[inline]
    fn start(
        &mut self,
        ring: &mut Ring,
        request: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        match request.touches_data() {
            false => self.start_uncounted(ring, request, buffer, tag),
            true => self.channel.submit(ring, request, buffer, tag),
        }
    }

    /// Submits an I/O to the channel while the disk's conditions are not clear, so that acquirers of ranges can wait for
    /// it.
    fn start_counted(
        &mut self,
        ring: &mut Ring,
        request: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        if !request.touches_data() {
            return self.start_uncounted(ring, request, buffer, tag);
        }
        let counted = self.drain.counted_tag(tag);
        let submitted = self.channel.submit(ring, request, buffer, counted);
        if matches!(submitted, Submission::Pending) {
            self.drain.pended();
        }
        submitted
    }

    /// Submits a flush or a block status request, which acquirers of a range do not wait for; its tag is marked separately.
    fn start_uncounted(
        &mut self,
        ring: &mut Ring,
        request: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        let tag = self.drain.flush_tag(tag);
        let submitted = self.channel.submit(ring, request, buffer, tag);
        if matches!(submitted, Submission::Pending) {
            self.drain.flush_pended();
        }
        submitted
    }

    /// Sets the timer for the next I/O that the limits admit.
    pub fn arm(&mut self, ring: &mut Ring, handle: u32) {
        if let Some((after, number)) = self.pacing.timer() {
            let token = u64::from(number) << 32 | u64::from(handle);
            ring.timer(PACE, token, after);
        }
    }
}
