//! The event queue (virtio 1.3, 5.6.6.3): reports added, removed and changed units to the driver.
//!
//! The driver's buffers stay in the ring until there is an event. Events without a buffer wait, up to a limit. Further events are dropped,
//! and the next event reports the loss. The first event of a restarted queue or a returning front end does the same if there were events
//! meanwhile. A buffer that is too short for an event is returned with as much as fits of "no event, events missed", and the event waits
//! for another buffer.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::IoOutcome;
use guest_memory::IoBuffer;
use latency::Operation;
use reactor::{Io, Tag};
use virtio_device::{Answer, Malformed, ParsedRequest, Protocol, Request, Step};
use virtqueue::ResponseSpace;

use crate::request::{self, Address, EVENT_SIZE};

/// Maximum number of events that wait for a buffer. Linux provides eight buffers.
const MAX_WAITING: usize = 64;

/// VIRTIO_SCSI_T_EVENTS_MISSED.
const EVENTS_MISSED: u32 = 0x8000_0000;
/// VIRTIO_SCSI_T_TRANSPORT_RESET.
const TRANSPORT_RESET: u32 = 1;
/// VIRTIO_SCSI_T_PARAM_CHANGE.
const PARAM_CHANGE: u32 = 3;
/// VIRTIO_SCSI_EVT_RESET_RESCAN.
const RESET_RESCAN: u32 = 1;
/// VIRTIO_SCSI_EVT_RESET_REMOVED.
const RESET_REMOVED: u32 = 2;

/// An event for the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A unit was added.
    Added,
    /// A unit was removed.
    Removed,
    /// A unit has changed, described by an additional sense code and qualifier.
    Changed {
        /// ASC.
        code: u8,
        /// ASCQ.
        qualifier: u8,
    },
}

impl Event {
    pub(crate) fn encode(self, target: u8, lun: u16) -> [u8; EVENT_SIZE] {
        let (kind, reason) = match self {
            Event::Added => (TRANSPORT_RESET, RESET_RESCAN),
            Event::Removed => (TRANSPORT_RESET, RESET_REMOVED),
            Event::Changed { code, qualifier } => {
                (PARAM_CHANGE, u32::from(code) | u32::from(qualifier) << 8)
            }
        };
        request::event(kind, Address::encode(target, lun), reason)
    }
}

/// Loss of events between two runs of the driver's event queue.
#[derive(Debug, Default)]
pub(crate) struct Unheard {
    /// A driver uses the event queue, or used it and may continue.
    driver: AtomicBool,
    missed: AtomicBool,
}

impl Unheard {
    /// Records an event without an event queue.
    pub(crate) fn note(&self) {
        if self.driver.load(Ordering::Acquire) {
            self.missed.store(true, Ordering::Release);
        }
    }

    /// Forgets a driver that will not continue.
    pub(crate) fn forget(&self) {
        self.driver.store(false, Ordering::Release);
        self.missed.store(false, Ordering::Release);
    }
}

/// The event queue's [`Protocol`].
pub(crate) struct EventQueue {
    waiting: VecDeque<[u8; EVENT_SIZE]>,
    missed: bool,
    wanted: Wanted,
    unheard: Arc<Unheard>,
}

/// Kinds of events that the driver has negotiated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// VIRTIO_SCSI_F_HOTPLUG.
    pub hotplug: bool,
    /// VIRTIO_SCSI_F_CHANGE.
    pub change: bool,
}

impl EventQueue {
    /// Creates the queue of a driver that may have missed events.
    pub(crate) fn new(unheard: Arc<Unheard>, wanted: Wanted) -> EventQueue {
        unheard.driver.store(true, Ordering::Release);
        let missed = unheard.missed.swap(false, Ordering::AcqRel);
        EventQueue {
            waiting: VecDeque::new(),
            missed: missed && (wanted.hotplug || wanted.change),
            wanted,
            unheard,
        }
    }

    pub(crate) fn post(&mut self, event: Event, target: u8, lun: u16) {
        // 5.6.6.3: no events without the negotiated feature.
        let wanted = match event {
            Event::Added | Event::Removed => self.wanted.hotplug,
            Event::Changed { .. } => self.wanted.change,
        };
        if !wanted {
            return;
        }
        if self.waiting.len() < MAX_WAITING {
            self.waiting.push_back(event.encode(target, lun));
        } else {
            self.missed = true;
        }
    }
}

impl Protocol for EventQueue {
    type State = ();

    fn parse(
        &mut self,
        _io: &mut Io,
        _request: &mut Request<()>,
        _: Tag,
    ) -> Result<ParsedRequest, Malformed> {
        Ok(ParsedRequest {
            step: Step::Answer,
            operation: Operation::Other,
            bytes: 0,
        })
    }

    fn resume(
        &mut self,
        _: &mut Io,
        _: &mut Request<()>,
        _: IoOutcome,
        _: Option<IoBuffer>,
    ) -> Step {
        Step::Answer
    }

    fn answer(&mut self, request: &mut Request<()>) -> Answer {
        let chain = &request.chain;
        let (at, room) = (chain.readable as usize, chain.writable as usize);
        if room < EVENT_SIZE {
            // VIRTIO_SCSI_T_NO_EVENT.
            let event = request::event(EVENTS_MISSED, [0; 8], 0);
            chain.buffer.write_whole(at, &event[..room]);
            return Answer {
                written: room as u32,
                good: false,
            };
        }
        // More buffers than events may have been popped: the rest report VIRTIO_SCSI_T_NO_EVENT.
        let mut event = self.waiting.pop_front().unwrap_or([0; EVENT_SIZE]);
        if self.waiting.is_empty() && std::mem::take(&mut self.missed) {
            let kind = u32::from_le_bytes([event[0], event[1], event[2], event[3]]) | EVENTS_MISSED;
            event[0..4].copy_from_slice(&kind.to_le_bytes());
        }
        chain.buffer.write_whole(at, &event);
        Answer {
            written: EVENT_SIZE as u32,
            good: true,
        }
    }

    /// Writes nothing into a buffer that cannot hold an event.
    fn refuse(&mut self, _: &mut Request<()>, _: ResponseSpace) -> u32 {
        0
    }

    fn wants_chains(&self) -> bool {
        self.missed || !self.waiting.is_empty()
    }

    fn batch_limit(&self) -> usize {
        self.waiting.len().max(usize::from(self.missed))
    }

    fn close(&mut self, _io: &mut Io) {}
}

impl Drop for EventQueue {
    fn drop(&mut self) {
        if self.wants_chains() {
            self.unheard.note();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_those_of_5_6_6_3() {
        assert_eq!(Event::Added.encode(1, 2)[..8], [1, 0, 0, 0, 1, 1, 0, 2]);
        assert_eq!(Event::Added.encode(1, 2)[12..], [1, 0, 0, 0]);
        assert_eq!(Event::Removed.encode(0, 0)[12..], [2, 0, 0, 0]);
        let resized = Event::Changed {
            code: 0x2a,
            qualifier: 9,
        }
        .encode(0, 0);
        assert_eq!((resized[0], &resized[12..]), (3, &[0x2a, 9, 0, 0][..]));
    }

    #[test]
    fn events_beyond_the_bound_are_counted_as_missed() {
        let (hotplug, change) = (true, true);
        let mut queue = EventQueue::new(Arc::default(), Wanted { hotplug, change });
        for _ in 0..MAX_WAITING + 1 {
            queue.post(Event::Added, 0, 1);
        }
        assert_eq!(queue.waiting.len(), MAX_WAITING);
        assert!(queue.missed);
    }
}
