//! A disk with a device that cannot be attached: its I/O fails, and the worker retries with exponential backoff.

use std::time::Duration;

use bdev::{Finished, IoChannel, Submission, Tag};
use block::{IoErrorKind, IoRequest};
use guest_memory::IoBuffer;
use uring::{Completion, Owner, Ring};

/// First and longest wait. Each wait is twice as long as the one before.
const WAIT_FIRST: Duration = Duration::from_millis(100);
const WAIT_LONGEST: Duration = Duration::from_secs(30);

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
    wait: Duration,
}

impl Retry {
    /// Starts the wait after the first attempt.
    pub fn begin(ring: &mut Ring, owner: Owner) -> Retry {
        let retry = Retry {
            owner,
            wait: WAIT_FIRST,
        };
        ring.timer(owner, 0, retry.wait);
        retry
    }

    /// Starts the wait after another failed attempt, when the timer has fired.
    pub fn again(&mut self, ring: &mut Ring) {
        self.wait = (self.wait * 2).min(WAIT_LONGEST);
        ring.timer(self.owner, 0, self.wait);
    }

    /// Makes the timer fire at once.
    pub fn cancel(&self, ring: &mut Ring) {
        ring.cancel(self.owner, 0);
    }

    /// Returns the current wait.
    pub fn wait(&self) -> Duration {
        self.wait
    }
}
