//! One worker's I/Os on a disk whose errors may be held ([`bdev::OnError`]): those in flight are remembered, and those that have
//! failed wait here, with their buffers, until the disk is resumed, the device is back, or their source has no use for them.
//!
//! A waiting I/O is not in flight: acquirers of a range do not wait for it, and it passes admission again when it goes on.
//! Owned by the worker's handle on the disk; nothing here is touched while the disk reports its errors.

use std::collections::HashMap;

use bdev::{Disk, Finished, Tag};
use block::{IoError, IoErrorKind, IoRequest};
use guest_memory::IoBuffer;

use crate::admission::Deferred;

/// An I/O that has failed, and how.
struct Waiter {
    deferred: Deferred,
    error: IoError,
}

/// The I/Os of one disk.
#[derive(Default)]
pub(crate) struct Waiting {
    /// In flight, by tag.
    in_flight: HashMap<Tag, IoRequest>,
    waiters: Vec<Waiter>,
    /// Those that do not wait any more: their sources hear of it in the next iteration.
    ended: Vec<Finished>,
}

impl Waiting {
    /// Remembers an I/O that is pending.
    pub fn pended(&mut self, tag: Tag, request: &IoRequest) {
        self.in_flight.insert(tag, *request);
    }

    /// Are any I/Os in flight remembered?
    #[inline]
    pub fn has_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// An I/O has ended: what it was, if it was remembered.
    pub fn finished(&mut self, tag: Tag) -> Option<IoRequest> {
        self.in_flight.remove(&tag)
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
