//! One worker's I/Os on a disk with an error policy ([`bdev::ErrorPolicy`]): those in flight are remembered, so that one that takes
//! too long can be cancelled, and those that have failed wait here, with their buffers, until the disk is resumed, the device is
//! back, or their source has no use for them.
//!
//! A waiting I/O is not in flight: acquirers of a range do not wait for it, and it passes admission again when it goes on.
//! Owned by the worker's handle on the disk; nothing here is touched while the disk reports its errors.

use std::collections::HashMap;
use std::time::Duration;

use bdev::{Disk, Finished, Tag};
use block::{IoError, IoErrorKind, IoRequest};
use guest_memory::IoBuffer;

use crate::admission::Deferred;

/// An I/O that has failed, and how.
struct Waiter {
    deferred: Deferred,
    error: IoError,
}

/// An I/O that the device has.
struct InFlight {
    request: IoRequest,
    /// By which the channel knows it.
    channel_tag: Tag,
    /// On the worker's clock.
    since: Duration,
    /// It took too long, and the device was asked to cancel it.
    is_late: bool,
}

/// What an I/O was that has ended.
pub(crate) struct Remembered {
    pub request: IoRequest,
    /// It took too long: that it was cancelled means this.
    pub is_late: bool,
}

/// The I/Os of one disk.
#[derive(Default)]
pub(crate) struct Waiting {
    /// In flight, by tag.
    in_flight: HashMap<Tag, InFlight>,
    waiters: Vec<Waiter>,
    /// Those that do not wait any more: their sources hear of it in the next iteration.
    ended: Vec<Finished>,
}

impl Waiting {
    /// Remembers an I/O that is pending, and that the channel knows by another tag.
    pub fn pended(&mut self, tag: Tag, channel_tag: Tag, request: &IoRequest, now: Duration) {
        let in_flight = InFlight {
            request: *request,
            channel_tag,
            since: now,
            is_late: false,
        };
        self.in_flight.insert(tag, in_flight);
    }

    /// Hands out those that have taken `timeout`, each once, by the channel's tags. Returns how long the next one has, if any.
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

    /// Are any I/Os in flight remembered?
    #[inline]
    pub fn has_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// An I/O has ended: what it was, if it was remembered.
    pub fn finished(&mut self, tag: Tag) -> Option<Remembered> {
        let InFlight {
            request, is_late, ..
        } = self.in_flight.remove(&tag)?;
        Some(Remembered { request, is_late })
    }

    /// An I/O that has failed begins to wait.
    pub fn wait(&mut self, request: &IoRequest, buffer: &mut IoBuffer, tag: Tag, error: IoError) {
        let deferred = Deferred {
            request: *request,
            buffer: std::mem::take(buffer),
            tag,
            is_paid: true,
        };
        self.waiters.push(Waiter { deferred, error });
    }

    /// All that wait, to be submitted again.
    pub fn take(&mut self) -> impl Iterator<Item = Deferred> + use<> {
        let waiters = std::mem::take(&mut self.waiters);
        waiters.into_iter().map(|waiter| waiter.deferred)
    }

    /// Ends the wait of those that are meant, with the errors that they have met.
    pub fn fail(&mut self, is_meant: impl FnMut(Tag) -> bool) -> Vec<Finished> {
        self.end(is_meant, |error| error)
    }

    /// Ends the wait of those that are meant as cancelled; [`Waiting::take_ended`] gives them. False: there are none.
    pub fn cancel(&mut self, is_meant: impl FnMut(Tag) -> bool) -> bool {
        let ended = self.end(is_meant, |_| IoErrorKind::Cancelled.into());
        let any = !ended.is_empty();
        self.ended.extend(ended);
        any
    }

    fn end(
        &mut self,
        mut is_meant: impl FnMut(Tag) -> bool,
        outcome: impl Fn(IoError) -> IoError,
    ) -> Vec<Finished> {
        let meant = self
            .waiters
            .extract_if(.., |waiter| is_meant(waiter.deferred.tag));
        let ended = meant.map(|Waiter { deferred, error }| Finished {
            tag: deferred.tag,
            buffer: deferred.buffer,
            outcome: Err(outcome(error)),
        });
        ended.collect()
    }

    /// What [`Waiting::cancel`] has ended.
    pub fn take_ended(&mut self) -> Vec<Finished> {
        std::mem::take(&mut self.ended)
    }

    /// Does nothing wait, nor anybody have to hear that it does not any more?
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty() && self.ended.is_empty()
    }

    /// Shows on the disk how many of worker `who`'s I/Os wait.
    pub fn show(&self, disk: &Disk, who: u32) {
        let last = self.waiters.last().map(|waiter| waiter.error);
        let error = last.unwrap_or(IoErrorKind::Cancelled.into());
        disk.state().waits(who, self.waiters.len(), error);
    }
}
