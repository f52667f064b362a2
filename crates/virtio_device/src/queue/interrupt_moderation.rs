//! Decides when to read the driver's interrupt suppression fields.
//!
//! A read right after the store of the used index needs a full barrier, or both sides could miss each other (virtio 1.3, 2.7.10). The
//! barrier waits until the driver's core releases the cache line of the used index: a tenth of the cost of an iteration with few requests.
//! A polling driver wants no interrupts: its answers are published at once, and the read is deferred until `PATIENCE` is over or the worker
//! is about to sleep. Otherwise the read is immediate. Figures: `docs/performance.md`.

use std::time::Duration;

use latency::{Clock, Stamp};

use super::Queue;
use crate::protocol::Protocol;
use uring::HeldUp;

/// After this many suppressed notifications in a row the driver is assumed to poll. An interrupt handler that finds more answers on each
/// pass may suppress them for some iterations.
const QUIET: u32 = 64;
/// Maximum delay of the interrupt for a driver that has stopped polling, while other sources occupy the worker.
const PATIENCE: Duration = Duration::from_micros(5);

/// Observed interrupt suppression of a driver.
pub(super) struct InterruptModeration {
    /// Number of suppressed notifications in a row.
    quiet: u32,
    /// Time of the first published answers with a deferred suppression check, if any.
    shown: Stamp,
    /// [`PATIENCE`] in ticks.
    patience: u64,
}

impl InterruptModeration {
    pub(super) fn new(clock: &Clock) -> InterruptModeration {
        InterruptModeration {
            quiet: 0,
            shown: Stamp::default(),
            patience: clock.ticks(PATIENCE),
        }
    }

    /// Returns true if the check may be deferred.
    #[inline(always)]
    fn later(&self) -> bool {
        self.quiet >= QUIET
    }

    /// Records that the iteration begun at `now` published the first answers with a deferred check.
    #[inline(always)]
    fn shown(&mut self, now: Stamp) {
        self.shown = now;
    }

    /// Returns true if the deferred check is due.
    #[inline(always)]
    fn is_due(&self, now: Stamp) -> bool {
        now.since(self.shown) >= self.patience
    }

    /// Records whether the driver wanted an interrupt.
    #[inline(always)]
    fn heard(&mut self, wanted: bool) {
        self.quiet = if wanted {
            0
        } else {
            self.quiet.saturating_add(1)
        };
    }
}

impl<P: Protocol> Queue<P> {
    /// Checks the suppression of answers published without a check, if the check is due.
    #[inline(always)]
    pub(super) fn ask_in_time(&mut self, now: Stamp) {
        if self.ring.is_unasked() && self.interrupt_moderation.is_due(now) {
            self.ask();
        }
    }

    /// Checks the suppression of answers published without a check. Interrupts the driver if it wants that.
    #[inline(never)]
    pub(super) fn ask(&mut self) {
        if self.ring.is_unasked() {
            let wanted = self.ring.ask();
            self.interrupt_moderation.heard(wanted);
            if wanted && self.call.is_some() {
                self.tell();
            }
        }
    }

    /// Interrupts the driver.
    #[inline]
    pub(super) fn tell(&mut self) {
        let Some(call) = &self.call else { return };
        let sent = call.send();
        self.measurement.timeline.counters().notifications.add(1);
        if sent == Err(HeldUp) {
            self.held_up();
        }
    }

    /// Publishes the pushed answers. Returns true if the driver wants an interrupt now.
    #[inline(always)]
    pub(super) fn show(&mut self) -> bool {
        if self.broken || self.done.is_empty() {
            return false;
        }
        if self.ring.must_ask() {
            self.ask();
        }
        if !self.interrupt_moderation.later() {
            let wanted = self.ring.publish();
            self.interrupt_moderation.heard(wanted);
            return wanted;
        }
        if !self.ring.is_unasked() {
            self.interrupt_moderation.shown(self.noticed);
        }
        self.ring.publish_unasked();
        false
    }
}
