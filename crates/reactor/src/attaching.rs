//! A disk with a device that cannot be attached: its I/O fails, and the worker retries with exponential backoff.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use bdev::{AttachFailure, Finished, IoChannel, Submission, Tag};
use block::{IoErrorKind, IoRequest};
use guest_memory::IoBuffer;
use uring::{Completion, Owner, Ring};

/// First and longest wait. Each wait is twice as long as the one before.
const WAITS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(30));
/// First and longest wait for locks. The other side of a live migration releases them soon, and an attempt is cheap.
const LOCK_WAITS: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// Time after which an unanswered request for locks is reported.
const LOCKING_WAIT: Duration = Duration::from_secs(1);

/// I/Os that wait while the locks of their device are being taken.
pub(crate) type Held = Rc<RefCell<Vec<HeldIo>>>;

/// An I/O that waits for locks.
pub(crate) struct HeldIo {
    pub request: IoRequest,
    pub buffer: IoBuffer,
    pub tag: Tag,
    pub is_cancelled: bool,
}

/// Placeholder for the channel while locks are being taken. I/Os wait with every error policy.
pub(crate) struct Locking {
    pub held: Held,
    /// Owner of the retry timer.
    pub retry: Owner,
}

impl IoChannel for Locking {
    fn submit(
        &mut self,
        _: &mut Ring,
        request: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        self.held.borrow_mut().push(HeldIo {
            request: *request,
            buffer: std::mem::take(buffer),
            tag,
            is_cancelled: false,
        });
        Submission::Pending
    }

    fn complete(&mut self, _: &mut Ring, _: Completion, _: &mut Vec<Finished>) {}

    /// The worker ends the I/O when the timer fires.
    fn abort(&mut self, ring: &mut Ring, tag: Tag) {
        for io in self.held.borrow_mut().iter_mut() {
            io.is_cancelled |= io.tag == tag;
        }
        ring.cancel(self.retry, 0);
    }

    fn in_flight(&self) -> usize {
        self.held.borrow().len()
    }
}

/// Placeholder for the channel.
pub(crate) struct Absent;

impl IoChannel for Absent {
    fn submit(&mut self, _: &mut Ring, _: &IoRequest, _: &mut IoBuffer, _: Tag) -> Submission {
        Submission::Done(Err(IoErrorKind::Offline.into()))
    }

    fn complete(&mut self, _: &mut Ring, _: Completion, _: &mut Vec<Finished>) {}

    fn in_flight(&self) -> usize {
        0
    }
}

/// The wait before the next attempt; its timer is running.
pub(crate) struct Retry {
    pub owner: Owner,
    /// Time of the first attempt, on the worker's clock.
    since: Duration,
    wait: Duration,
    failure: AttachFailure,
    pub held: Held,
    /// The wait is in the log and in the disk's state.
    pub is_shown: bool,
}

impl Retry {
    /// Starts the wait after the first attempt.
    pub fn begin(ring: &mut Ring, owner: Owner, now: Duration, failure: AttachFailure) -> Retry {
        let (wait, _) = waits(failure);
        ring.timer(owner, 0, wait);
        Retry {
            owner,
            since: now,
            wait,
            failure,
            held: Held::default(),
            is_shown: false,
        }
    }

    /// Starts the wait after another failed attempt, when the timer has fired.
    pub fn again(&mut self, ring: &mut Ring, failure: AttachFailure) {
        if failure == AttachFailure::Locking {
            // The result of the attempt that has begun makes the timer fire.
            ring.timer(self.owner, 0, LOCKING_WAIT);
            return;
        }
        let (first, longest) = waits(failure);
        if self.failure == AttachFailure::Locking {
            self.wait = Duration::ZERO;
        }
        self.wait = (self.wait * 2).clamp(first, longest);
        ring.timer(self.owner, 0, self.wait);
        // A timeout lasts until the locks are free.
        if self.failure != AttachFailure::LockTimeout || failure != AttachFailure::Locked {
            self.failure = failure;
        }
    }

    /// Ends the wait for locks at its limit. Returns true if the wait ends now.
    pub fn end_lock_wait(&mut self, limit: Option<Duration>, now: Duration) -> bool {
        let is_late = limit.is_some_and(|limit| self.waited(now) >= limit);
        let waits = matches!(self.failure, AttachFailure::Locked | AttachFailure::Locking);
        let ends = is_late && waits;
        if ends {
            self.failure = AttachFailure::LockTimeout;
        }
        ends
    }

    /// Makes the timer fire at once.
    pub fn cancel(&self, ring: &mut Ring) {
        ring.cancel(self.owner, 0);
    }

    /// Returns the current wait.
    pub fn wait(&self) -> Duration {
        self.wait
    }

    /// Returns the time since the first attempt.
    pub fn waited(&self, now: Duration) -> Duration {
        now.saturating_sub(self.since)
    }

    /// Returns the failure of the last attempt.
    pub fn failure(&self) -> AttachFailure {
        self.failure
    }
}

fn waits(failure: AttachFailure) -> (Duration, Duration) {
    match failure {
        AttachFailure::Locking => (LOCKING_WAIT, LOCKING_WAIT),
        AttachFailure::Locked | AttachFailure::LockTimeout => LOCK_WAITS,
        AttachFailure::Other => WAITS,
    }
}
