//! Dirty log of a queue during a live migration: marks the memory of each answered request and of the ring.
//!
//! A request is marked when it is answered: after all of its writes, and before the driver sees the answer. Nothing here is called while
//! no log is set. Tests: `crates/vhost_user/tests/dirty_log.rs`.

use std::sync::Arc;

use guest_memory::DirtyLog;
use uring::{Blocked, Signal};
use virtqueue::Chain;

use super::Queue;
use crate::device::LogSetup;
use crate::protocol::Protocol;

/// Dirty log of a queue.
pub(super) struct QueueLog {
    pages: Arc<DirtyLog>,
    call: Option<Signal>,
}

impl QueueLog {
    /// Marks the device-writable part of a chain.
    pub(super) fn mark(&self, chain: &Chain) {
        chain.buffer.mark_writable(&self.pages);
    }
}

impl<P: Protocol> Queue<P> {
    /// Replaces or removes the log. Requests in flight are marked in the new one.
    pub(super) fn set_log(&mut self, setup: Option<LogSetup>) {
        let ring = setup
            .as_ref()
            .and_then(|setup| Some((setup.pages.clone(), setup.ring?)));
        self.ring.queue.set_log(ring);
        self.log = setup.map(|setup| QueueLog {
            pages: setup.pages,
            call: setup.call.map(Signal::new),
        });
    }

    /// Answers the completed requests and marks their memory.
    #[inline(never)]
    pub(super) fn answer_logged(&mut self) {
        match P::MULTIPLE_DISKS && self.sorting.is_mixed {
            true => self.answer_done::<true, true>(),
            false => self.answer_done::<false, true>(),
        }
    }

    /// Notifies the front end of marked pages. Ends the queue if the log is incomplete.
    #[inline(never)]
    pub(super) fn end_logged(&mut self) {
        let Some(log) = &self.log else { return };
        let sent = match &log.call {
            Some(call) => call.send(),
            None => Ok(()),
        };
        let fault = log.pages.fault();
        if sent == Err(Blocked) {
            self.end_blocked();
        }
        if let Some(fault) = fault {
            self.end_by_front_end(&fault);
        }
    }

    /// Marks the memory of a request that will not be answered by [`Queue::answer_logged`].
    pub(super) fn mark_chain(&mut self, index: u16) {
        if let Some(log) = &self.log {
            log.mark(&self.slots.get(index).request.chain);
        }
    }

    /// Ends the queue if the client truncated the file of the log.
    pub(super) fn check_log(&mut self) {
        if let Some(fault) = self.log.as_ref().and_then(|log| log.pages.fault()) {
            self.end_by_front_end(&fault);
        }
    }
}
