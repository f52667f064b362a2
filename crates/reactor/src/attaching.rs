//! A disk whose device could not be attached to: its I/O fails, and the worker tries again by itself, less and less often.

use std::time::Duration;

use bdev::{Finished, IoChannel, Submission, Tag};
use block::{IoErrorKind, IoRequest};
use guest_memory::IoBuffer;
use uring::{Completion, Owner, Ring};

/// The first wait; each later one is twice as long, up to the longest.
const WAIT_FIRST: Duration = Duration::from_millis(100);
const WAIT_LONGEST: Duration = Duration::from_secs(30);

/// Stands where the channel would be.
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
    /// After the first attempt.
    pub fn begin(ring: &mut Ring, owner: Owner) -> Retry {
        let retry = Retry {
            owner,
            wait: WAIT_FIRST,
        };
        ring.timer(owner, 0, retry.wait);
        retry
    }

    /// After another one, once the timer has fired.
    pub fn again(&mut self, ring: &mut Ring) {
        self.wait = (self.wait * 2).min(WAIT_LONGEST);
        ring.timer(self.owner, 0, self.wait);
    }

    /// Has the timer fire at once.
    pub fn cancel(&self, ring: &mut Ring) {
        ring.cancel(self.owner, 0);
    }

    /// How long the present wait is.
    pub fn wait(&self) -> Duration {
        self.wait
    }
}
