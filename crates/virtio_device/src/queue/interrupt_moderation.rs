//! When a driver is asked whether it wants to be told of its answers.
//!
//! InterruptModeration waits until the driver's core has let go of the used index' line, for else both sides could miss each other (virtio 1.3,
//! 2.7.10): a tenth of what an iteration of a few requests costs. A driver that polls wants to be told of nothing. It is shown its
//! answers at once and asked later: when `PATIENCE` is over, and before the worker sleeps. A driver that wanted to be told lately
//! is asked at once. Figures: `docs/performance.md`.

use std::time::Duration;

use latency::{Clock, Stamp};

use super::Queue;
use crate::protocol::Protocol;
use uring::HeldUp;

/// A driver that has wanted to be told of nothing so often, one time after the other, polls. An interrupt handler that finds more
/// answers each time that it looks may do so for some iterations.
const QUIET: u32 = 64;
/// A driver that polls no longer is told so much later, at most, while others keep its queue's worker busy.
const PATIENCE: Duration = Duration::from_micros(5);

/// What a queue knows of how its driver wants to be told.
pub(super) struct InterruptModeration {
    /// How often it has wanted to be told of nothing since it last wanted to.
    quiet: u32,
    /// When it was shown the first answers of which it was not asked, if there are any.
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

    /// Is there no hurry to ask?
    #[inline(always)]
    fn later(&self) -> bool {
        self.quiet >= QUIET
    }

    /// It is shown answers in the iteration that began `now`, the first ones of which it is not asked.
    #[inline(always)]
    fn shown(&mut self, now: Stamp) {
        self.shown = now;
    }

    /// Has it been shown answers long enough ago?
    #[inline(always)]
    fn is_due(&self, now: Stamp) -> bool {
        now.since(self.shown) >= self.patience
    }

    /// What it said.
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
    /// Asks the driver, if it is time to, of what it was shown unasked.
    #[inline(always)]
    pub(super) fn ask_in_time(&mut self, now: Stamp) {
        if self.ring.is_unasked() && self.interrupt_moderation.is_due(now) {
            self.ask();
        }
    }

    /// Asks the driver of what it was shown unasked, and tells it if it wants to be told.
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
        self.timeline.counters().notifications.add(1);
        if sent == Err(HeldUp) {
            self.held_up();
        }
    }

    /// Shows the driver the answers that were pushed; says whether it wants to be told of them now.
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
