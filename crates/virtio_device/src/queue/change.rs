//! Control-plane changes to a queue, applied between two iterations of its worker.

use guest_memory::GuestView;
use uring::RingFd;
use virtqueue::QueueError;

use super::{Failures, Queue};
use crate::device::{QueueChange, QueueControl};
use crate::protocol::Protocol;
use uring::{Blocked, Signal};

impl<P: Protocol> QueueControl for Queue<P> {
    fn change(&mut self, change: QueueChange) -> Result<(), QueueError> {
        match change {
            QueueChange::Memory(memory) => {
                self.check_suppression();
                if let Err(error) = self.ring.queue.set_memory(&memory) {
                    self.end_by_front_end(&error);
                    return Err(error);
                }
                self.ring.view = GuestView::new(memory);
                self.slots.unpin();
            }
            QueueChange::Call(call) => {
                self.signals.call = call.map(Signal::new);
                // Without this interrupt the driver would miss answers from before it set the call eventfd.
                if let Some(call) = &self.signals.call
                    && call.send() == Err(Blocked)
                {
                    self.end_blocked();
                }
            }
            QueueChange::Kick(kick) => self.signals.kick = kick.map(RingFd::from),
            QueueChange::Error(error) => self.signals.error = error.map(Signal::new),
            QueueChange::Enabled(enabled) => self.lifecycle.enable(enabled),
            QueueChange::Log(log) => self.set_log(log),
        }
        Ok(())
    }

    fn retain_failed(&mut self) {
        if self.failures == Failures::Tracked {
            self.failures = Failures::Retained;
        }
    }

    fn base(&self) -> u32 {
        self.ring.queue.base()
    }

    fn is_idle(&self) -> bool {
        self.slots.in_flight() == 0 && !(self.accepts() && self.ring.queue.available() > 0)
    }
}
