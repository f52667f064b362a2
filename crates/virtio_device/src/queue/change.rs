//! Control-plane changes to a queue, applied between two iterations of its worker.

use guest_memory::GuestView;
use uring::RingFd;
use virtqueue::QueueError;

use super::Queue;
use crate::device::{QueueChange, QueueControl};
use crate::protocol::Protocol;
use uring::{Blocked, Signal};

impl<P: Protocol> QueueControl for Queue<P> {
    fn change(&mut self, change: QueueChange) -> Result<(), QueueError> {
        match change {
            QueueChange::Memory(memory) => {
                self.check_suppression();
                if let Err(error) = self.ring.set_memory(&memory) {
                    self.end(&error);
                    return Err(error);
                }
                self.view = GuestView::new(memory);
                self.slots.unpin();
            }
            QueueChange::Call(call) => {
                self.call = call.map(Signal::new);
                // Without this interrupt the driver would miss answers from before it set the call eventfd.
                if let Some(call) = &self.call
                    && call.send() == Err(Blocked)
                {
                    self.end_blocked();
                }
            }
            QueueChange::Kick(kick) => self.kick = kick.map(RingFd::from),
            QueueChange::Error(error) => self.error = error.map(Signal::new),
            QueueChange::Enabled(enabled) => self.enabled = enabled,
            QueueChange::Log(log) => self.set_log(log),
        }
        Ok(())
    }

    fn retain_failed(&mut self) {
        self.retains_failed = self.is_tracked;
    }

    fn base(&self) -> u32 {
        self.ring.base()
    }
}
