//! Requests between two steps: waiting for an event, or deferred in favour of other work.

use reactor::Io;

use super::Queue;
use crate::protocol::{Protocol, Request, Step};
use crate::slots::Stage;

impl<P: Protocol> Queue<P> {
    /// Calls `with` for the state of each request in flight. The `bool` argument is true if the request waits ([`Step::Wait`]). If `with`
    /// returns true for a waiting request, the request is answered. The caller must wake the source afterwards.
    pub fn for_each_request(&mut self, mut with: impl FnMut(&mut P, &mut P::State, bool) -> bool) {
        for (index, slot) in self.slots.active() {
            let waits = slot.stage == Stage::Waiting;
            if with(&mut self.protocol, &mut slot.request.state, waits) && waits {
                slot.stage = Stage::Done;
                self.batch.done.push(index);
            }
        }
    }

    /// Returns the device type's state of the request in a slot.
    pub fn state(&mut self, slot: u32) -> Option<&P::State> {
        let index = u16::try_from(slot).ok()?;
        Some(&self.slots.get(index).request.state)
    }

    /// Returns the slot if its request waits and `matches` accepts it.
    fn waiting(&mut self, slot: u32, matches: impl FnOnce(&P::State) -> bool) -> Option<u16> {
        let index = u16::try_from(slot).ok()?;
        let slot = self.slots.get(index);
        let is_match = slot.stage == Stage::Waiting && matches(&slot.request.state);
        if is_match {
            slot.stage = Stage::Done;
        }
        is_match.then_some(index)
    }

    /// Ends the [`Step::Wait`] of a request and sets its result. Does nothing if another request uses the slot by now. The caller must wake
    /// the source afterwards.
    pub fn resume_waiting(
        &mut self,
        slot: u32,
        matches: impl FnOnce(&P::State) -> bool,
        result: impl FnOnce(&mut P::State),
    ) {
        if let Some(index) = self.waiting(slot, matches) {
            result(&mut self.slots.get(index).request.state);
            self.batch.done.push(index);
        }
    }

    /// Continues a request after [`Step::Wait`] with the step that `next` returns. Does nothing if another request uses the slot by now.
    /// The caller must wake the source afterwards.
    pub fn proceed(
        &mut self,
        io: &mut Io,
        slot: u32,
        matches: impl FnOnce(&P::State) -> bool,
        next: impl FnOnce(&mut P, &mut Io, &mut Request<P::State>) -> Step,
    ) {
        let Some(index) = self.waiting(slot, matches) else {
            return;
        };
        let slot = self.slots.get(index);
        let step = next(&mut self.protocol, io, &mut slot.request);
        self.continue_with(io, index, step);
    }

    /// Continues requests that yielded in an earlier iteration.
    #[cold]
    pub(super) fn continue_yielded(&mut self, io: &mut Io) {
        for _ in 0..self.batch.yielded.len() {
            if self.batch.pace.is_exhausted() {
                return;
            }
            let Some((index, step)) = self.batch.yielded.pop_front() else {
                return;
            };
            self.continue_with(io, index, step);
        }
    }
}
