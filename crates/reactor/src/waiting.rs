//! One worker's I/Os on a disk with an error policy ([`bdev::ErrorPolicy`]). I/Os in flight are recorded, so that one
//! beyond the timeout can be cancelled. Failed I/Os wait here with their buffers until the disk is resumed, the device
//! returns, or their source drops them.
//!
//! A waiting I/O is not in flight: acquirers of a range do not wait for it, and it passes admission again when it
//! continues. Owned by the worker's handle on the disk; unused while the disk reports its errors.

use std::collections::HashMap;
use std::time::Duration;

use bdev::{Disk, Finished, Tag};
use block::{IoError, IoErrorKind, IoRequest};
use guest_memory::IoBuffer;

use crate::admission::Deferred;

struct Waiter {
    deferred: Deferred,
    error: IoError,
}

/// An I/O that the device is processing.
struct InFlight {
    request: IoRequest,
    /// Tag used by the channel.
    channel_tag: Tag,
    /// Start time on the worker's clock.
    since: Duration,
    /// The I/O exceeded the timeout, and the device was asked to cancel it.
    is_late: bool,
}

/// Record of an I/O that has ended.
pub(crate) struct Remembered {
    pub request: IoRequest,
    /// The I/O exceeded the timeout, so a cancellation is reported as a timeout.
    pub is_late: bool,
}

/// The recorded I/Os of one disk.
#[derive(Default)]
pub(crate) struct Waiting {
    /// In flight, by tag.
    in_flight: HashMap<Tag, InFlight>,
    waiters: Vec<Waiter>,
    /// Cancelled I/Os, reported to their sources in the next iteration.
    ended: Vec<Finished>,
}

impl Waiting {
    /// Records a pending I/O and its channel tag.
    pub fn pended(&mut self, tag: Tag, channel_tag: Tag, request: &IoRequest, now: Duration) {
        let in_flight = InFlight {
            request: *request,
            channel_tag,
            since: now,
            is_late: false,
        };
        self.in_flight.insert(tag, in_flight);
    }

    /// Passes each I/O beyond `timeout` to `late` once, by its channel tag. Returns the remaining time of the next one.
    pub fn late(
        &mut self,
        now: Duration,
        timeout: Duration,
        mut late: impl FnMut(Tag),
    ) -> Option<Duration> {
        let on_time = self.in_flight.values_mut().filter(|one| !one.is_late);
        let left = on_time.filter_map(|one| {
            let left = timeout.saturating_sub(now.saturating_sub(one.since));
            if left.is_zero() {
                one.is_late = true;
                late(one.channel_tag);
            }
            (!one.is_late).then_some(left)
        });
        left.min()
    }

    /// Returns true if any I/O in flight is recorded.
    #[inline]
    pub fn has_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Removes and returns the record of an I/O that has ended.
    pub fn finished(&mut self, tag: Tag) -> Option<Remembered> {
        let InFlight {
            request, is_late, ..
        } = self.in_flight.remove(&tag)?;
        Some(Remembered { request, is_late })
    }

    /// Adds a failed I/O to the waiting ones.
    pub fn wait(&mut self, request: &IoRequest, buffer: &mut IoBuffer, tag: Tag, error: IoError) {
        let deferred = Deferred {
            request: *request,
            buffer: std::mem::take(buffer),
            tag,
            is_paid: true,
        };
        self.waiters.push(Waiter { deferred, error });
    }

    /// Removes all waiting I/Os, to submit them again.
    pub fn take(&mut self) -> impl Iterator<Item = Deferred> + use<> {
        let waiters = std::mem::take(&mut self.waiters);
        waiters.into_iter().map(|waiter| waiter.deferred)
    }

    /// Ends the wait of the selected I/Os with their original errors.
    pub fn fail(&mut self, matches: impl FnMut(Tag) -> bool) -> Vec<Finished> {
        self.end(matches, |error| error)
    }

    /// Ends the wait of the selected I/Os as cancelled; [`Waiting::take_ended`] returns them. Returns false if there are
    /// none.
    pub fn cancel(&mut self, matches: impl FnMut(Tag) -> bool) -> bool {
        let ended = self.end(matches, |_| IoErrorKind::Cancelled.into());
        let any = !ended.is_empty();
        self.ended.extend(ended);
        any
    }

    fn end(
        &mut self,
        mut matches: impl FnMut(Tag) -> bool,
        outcome: impl Fn(IoError) -> IoError,
    ) -> Vec<Finished> {
        let meant = self
            .waiters
            .extract_if(.., |waiter| matches(waiter.deferred.tag));
        let ended = meant.map(|Waiter { deferred, error }| Finished {
            tag: deferred.tag,
            buffer: deferred.buffer,
            outcome: Err(outcome(error)),
        });
        ended.collect()
    }

    /// Returns the I/Os that [`Waiting::cancel`] ended.
    pub fn take_ended(&mut self) -> Vec<Finished> {
        std::mem::take(&mut self.ended)
    }

    /// Returns true if no I/O waits or is to be reported.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty() && self.ended.is_empty()
    }

    /// Publishes the number of waiting I/Os of worker `who` in the disk's state.
    pub fn show(&self, disk: &Disk, who: u32) {
        let last = self.waiters.last().map(|waiter| waiter.error);
        let error = last.unwrap_or(IoErrorKind::Cancelled.into());
        disk.state().waits(who, self.waiters.len(), error);
    }
}
