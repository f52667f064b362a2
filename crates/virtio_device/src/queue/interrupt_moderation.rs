//! Decides when to read the driver's interrupt suppression fields.
//!
//! A read right after the store of the used index needs a full barrier, or both sides could miss each other (virtio 1.3, 2.7.10). The
//! barrier waits until the driver's core releases the cache line of the used index: a tenth of the cost of an iteration with few requests.
//! A polling driver wants no interrupts: its answers are published at once, and the read is deferred until `CHECK_DELAY_MAX` is over or the worker
//! is about to sleep. Otherwise the read is immediate. Figures: `docs/performance.md`.

use std::time::Duration;

use latency::{Clock, Stamp};

use super::Queue;
use crate::protocol::Protocol;
use uring::Blocked;

/// After this many suppressed notifications in a row the driver is assumed to poll. An interrupt handler that finds more answers on each
/// pass may suppress them for some iterations.
const SUPPRESSED_MIN: u32 = 64;
/// Maximum delay of the interrupt for a driver that has stopped polling, while other sources occupy the worker.
const CHECK_DELAY_MAX: Duration = Duration::from_micros(5);

/// Observed interrupt suppression of a driver.
pub(super) struct InterruptModeration {
    /// Number of suppressed notifications in a row.
    suppressed: u32,
    /// Time of the first published answers with a deferred suppression check, if any.
    published_at: Stamp,
    /// [`CHECK_DELAY_MAX`] in ticks.
    delay_max: u64,
}

impl InterruptModeration {
    pub(super) fn new(clock: &Clock) -> InterruptModeration {
        InterruptModeration {
            suppressed: 0,
            published_at: Stamp::default(),
            delay_max: clock.ticks(CHECK_DELAY_MAX),
        }
    }

    /// Returns true if the check may be deferred.
    #[inline(always)]
    fn may_defer(&self) -> bool {
        self.suppressed >= SUPPRESSED_MIN
    }

    /// Records that the iteration begun at `now` published the first answers with a deferred check.
    #[inline(always)]
    fn record_published(&mut self, now: Stamp) {
        self.published_at = now;
    }

    /// Returns true if the deferred check is due.
    #[inline(always)]
    fn is_due(&self, now: Stamp) -> bool {
        now.since(self.published_at) >= self.delay_max
    }

    /// Records whether the driver wanted an interrupt.
    #[inline(always)]
    fn record_check(&mut self, wanted: bool) {
        self.suppressed = if wanted {
            0
        } else {
            self.suppressed.saturating_add(1)
        };
    }
}

impl<P: Protocol> Queue<P> {
    /// Checks the suppression of answers published without a check, if the check is due.
    #[inline(always)]
    pub(super) fn check_suppression_if_due(&mut self, now: Stamp) {
        if self.ring.queue.is_unchecked() && self.ring.moderation.is_due(now) {
            self.check_suppression();
        }
    }

    /// Checks the suppression of answers published without a check. Interrupts the driver if it wants that.
    #[inline(never)]
    pub(super) fn check_suppression(&mut self) {
        if self.ring.queue.is_unchecked() {
            let wanted = self.ring.queue.check_suppression();
            self.ring.moderation.record_check(wanted);
            if wanted && self.signals.call.is_some() {
                self.interrupt_driver();
            }
        }
    }

    /// Interrupts the driver.
    #[inline]
    pub(super) fn interrupt_driver(&mut self) {
        let Some(call) = &self.signals.call else {
            return;
        };
        let sent = call.send();
        self.measurement.timeline.counters().notifications.add(1);
        if sent == Err(Blocked) {
            self.end_blocked();
        }
    }

    /// Publishes the pushed answers. Returns true if the driver wants an interrupt now.
    #[inline(always)]
    pub(super) fn publish_answers(&mut self) -> bool {
        if self.lifecycle.is_broken() || self.batch.done.is_empty() {
            return false;
        }
        if self.ring.queue.must_check_suppression() {
            self.check_suppression();
        }
        if !self.ring.moderation.may_defer() {
            let wanted = self.ring.queue.publish();
            self.ring.moderation.record_check(wanted);
            return wanted;
        }
        if !self.ring.queue.is_unchecked() {
            self.ring
                .moderation
                .record_published(self.measurement.noticed);
        }
        self.ring.queue.publish_unchecked();
        false
    }
}
