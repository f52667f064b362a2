//! Handling of driver errors (`docs/adr/0003-a-broken-queue-ends-its-session.md`). A request that cannot be served gets an error response,
//! if it has room for one, and the queue continues. A ring that cannot be trusted ends its queue. Nothing here is on the normal request
//! path. Tests: `crates/vhost_user/tests/refusals.rs`.

use std::fmt::Display;
use std::time::Duration;

use reactor::RateLimit;
use virtqueue::{PopError, ResponseSpace};

use super::Queue;
use crate::device::Breach;
use crate::protocol::{Malformed, Protocol};
use uring::Blocked;

/// Bytes that a refused request counts in a batch. Its chain may have been walked twice, and a driver may send an endless sequence of them.
pub(super) const REFUSED_BYTES: u64 = 1 << 20;

/// One line per second for all queues: a hostile driver must not fill the log.
static BROKEN_LOG: RateLimit = RateLimit::new(Duration::from_secs(1));
static REFUSED_LOG: RateLimit = RateLimit::new(Duration::from_secs(1));

impl<P: Protocol> Queue<P> {
    pub(super) fn end(&mut self, why: &dyn Display) {
        self.end_with(Breach::Rules, why);
    }

    /// Ends a queue because of its front end. The driver is not at fault.
    #[cold]
    pub(super) fn end_by_front_end(&mut self, why: &dyn Display) {
        self.end_with(Breach::FrontEnd, why);
    }

    #[cold]
    pub(super) fn end_blocked(&mut self) {
        self.signals.call = None;
        self.end_with(Breach::Blocked, &"interrupt delivery blocked a worker");
    }

    fn end_with(&mut self, mut breach: Breach, why: &dyn Display) {
        if !self.lifecycle.set_broken() {
            return;
        }
        self.measurement.timeline.counters().malformed.add(1);
        if let Some(suppressed) = BROKEN_LOG.pass() {
            let labels = self.measurement.timeline.labels();
            let cause = match breach {
                Breach::Rules => "driver violated the protocol",
                Breach::FrontEnd => "front end violated the protocol",
                Breach::Blocked => "front end blocked a worker",
            };
            tracing::warn!(
                export = labels.export,
                queue = self.index,
                suppressed,
                "{cause}, queue stopped: {why}"
            );
        }
        if let Some(error) = self.signals.error.take()
            && error.send() == Err(Blocked)
        {
            breach = Breach::Blocked;
        }
        (self.signals.on_broken)(breach, &why.to_string());
    }

    /// Handles a failed pop into the free slot `index`. Returns false if the queue has ended.
    #[cold]
    pub(super) fn refuse_popped(&mut self, index: u16, error: PopError) -> bool {
        let id = self.slots.get(index).request.chain.id;
        match error {
            PopError::Queue(error) => self.end(&error),
            PopError::Request(_) if self.slots.is_busy(id) => {
                self.end(&format_args!("chain {id} is already in flight"));
            }
            PopError::Request(refusal) => self.refuse(index, refusal.space, &refusal.error),
        }
        self.slots.get(index).request.chain.clear();
        !self.lifecycle.is_broken()
    }

    /// Refuses a chain without a valid request. The request is finished.
    #[cold]
    pub(super) fn refuse_malformed(&mut self, index: u16, malformed: Malformed) {
        let writable = self.slots.get(index).request.chain.writable;
        let space = ResponseSpace {
            front: writable,
            last: writable > 0,
        };
        self.refuse(index, space, &malformed.0);
        self.slots
            .answer_and_release(index, &self.ring.view, |_| ());
    }

    /// Writes the error response and returns the slot's chain immediately.
    fn refuse(&mut self, index: u16, space: ResponseSpace, why: &dyn Display) {
        self.measurement.timeline.counters().malformed.add(1);
        if let Some(suppressed) = REFUSED_LOG.pass() {
            let labels = self.measurement.timeline.labels();
            tracing::warn!(
                export = labels.export,
                queue = self.index,
                suppressed,
                "request refused: {why}"
            );
        }
        let request = &mut self.slots.get(index).request;
        let written = self.protocol.refuse(request, space);
        let (id, descriptors) = (request.chain.id, request.chain.descriptors);
        self.mark_chain(index);
        if !self.lifecycle.is_broken() {
            self.ring.queue.push(id, descriptors, written);
            if self.ring.queue.publish() {
                self.interrupt_driver();
            }
        }
    }
}
