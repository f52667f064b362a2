//! Requests in flight of a split queue, in memory that outlives this process: the region of vhost-user's `GET_INFLIGHT_FD` ("In-flight I/O
//! tracking", queue region for split virtqueues).
//!
//! A device that starts on a region with requests repeats them in their original order, without the answered ones. The front end owns the
//! region and can write to it: each value is read once and checked. A wrong value can only break the front end's own queue.

use std::collections::VecDeque;

use guest_memory::RingMemory;
use zerocopy::little_endian::{U16, U64};

use crate::QueueError;
use crate::interrupted::crash_point;

/// Offsets in a queue's part: features are 8 bytes of zero before the version.
const VERSION: usize = 8;
const ENTRIES: usize = 10;
const LAST_HEAD: usize = 12;
const USED_INDEX: usize = 14;
const STATES: usize = 16;
/// Offsets in a descriptor's state.
const STATE_SIZE: usize = 16;
const NEXT: usize = 6;
const COUNTER: usize = 8;
/// The only version of the layout; 0 means unused.
const LAYOUT_VERSION: u16 = 1;
/// Parts of a region begin at multiples of a cache line.
const ALIGNMENT: usize = 64;

/// One split queue's part of an in-flight region.
pub struct Inflight {
    part: RingMemory,
    size: u16,
    counter: u64,
    /// Last answered head, the start of the list of heads answered since the last publication.
    last: u16,
    answered: Vec<u16>,
    /// Heads that an earlier device took and never answered.
    unanswered: VecDeque<u16>,
}

impl Inflight {
    /// Returns the length of a queue's part for `size` entries.
    pub fn stride(size: u16) -> usize {
        (STATES + STATE_SIZE * usize::from(size)).next_multiple_of(ALIGNMENT)
    }

    /// Returns true if a request of a queue of `size` entries is unanswered.
    pub fn has_requests(part: &RingMemory, size: u16) -> bool {
        let mut states = (0..usize::from(size)).map(|entry| STATES + STATE_SIZE * entry);
        states.any(|at| part.read::<u8>(at) != 0)
    }

    /// Resets the part of a stopped queue, unless a request is in flight. The queue may start again with other features, for example
    /// packed.
    pub fn reset_unused(part: &RingMemory, size: u16) {
        if part.len() >= Inflight::stride(size) && !Inflight::has_requests(part, size) {
            part.store_release_u16(VERSION, 0);
            // The whole part: parts of the other queue type have other offsets.
            part.clear(0, Inflight::stride(size));
        }
    }

    /// Takes over a queue's part. `used` is the used index in the ring: the last index that the previous device published.
    ///
    /// # Errors
    /// Fails if the part is too small for `size` entries, or has content that no device writes.
    pub(crate) fn new(part: RingMemory, size: u16, used: u16) -> Result<Inflight, QueueError> {
        let invalid = |reason| QueueError::Inflight { reason };
        if part.len() < STATES + STATE_SIZE * usize::from(size) || !part.is_aligned(ALIGNMENT) {
            return Err(invalid("it is too small for the queue"));
        }
        let mut tracked = Inflight {
            part,
            size,
            counter: 0,
            last: 0,
            answered: Vec::with_capacity(usize::from(size)),
            unanswered: VecDeque::new(),
        };
        match tracked.word(VERSION) {
            0 => tracked.begin(used),
            LAYOUT_VERSION if tracked.word(ENTRIES) == size => tracked.recover(used)?,
            // Another size: the driver has created a new queue, unrelated to the region.
            LAYOUT_VERSION => tracked.begin(used),
            _ => return Err(invalid("its version is unknown")),
        }
        Ok(tracked)
    }

    fn begin(&mut self, used: u16) {
        for head in 0..self.size {
            self.part.write::<u8>(self.state(head), 0);
        }
        self.part.write(ENTRIES, U16::new(self.size));
        self.part.write(LAST_HEAD, U16::new(0));
        self.part.store_release_u16(USED_INDEX, used);
        self.part.store_release_u16(VERSION, LAYOUT_VERSION);
    }

    fn recover(&mut self, used: u16) -> Result<(), QueueError> {
        self.last = self.word(LAST_HEAD) % self.size;
        // The previous device stopped after publishing a batch and before recording that here: the batch was answered.
        let batch = used.wrapping_sub(self.word(USED_INDEX));
        if batch <= self.size {
            let mut head = self.last;
            for _ in 0..batch {
                let at = self.state(head);
                self.part.write::<u8>(at, 0);
                head = self.word(at + NEXT) % self.size;
            }
        }
        self.part.store_release_u16(USED_INDEX, used);
        let mut taken: Vec<(u64, u16)> = (0..self.size)
            .filter(|head| self.part.read::<u8>(self.state(*head)) == 1)
            .map(|head| {
                let counter = self.part.read::<U64>(self.state(head) + COUNTER);
                (counter.get(), head)
            })
            .collect();
        taken.sort_unstable();
        self.counter = taken
            .last()
            .map_or(0, |(counter, _)| counter.wrapping_add(1));
        self.unanswered = taken.into_iter().map(|(_, head)| head).collect();
        Ok(())
    }

    fn word(&self, offset: usize) -> u16 {
        self.part.load_relaxed_u16(offset)
    }

    #[inline]
    fn state(&self, head: u16) -> usize {
        STATES + STATE_SIZE * usize::from(head)
    }

    /// Returns the requests to repeat.
    pub(crate) fn take_unanswered(&mut self) -> VecDeque<u16> {
        std::mem::take(&mut self.unanswered)
    }

    /// Records that a chain was popped. `head` is below the queue size.
    #[inline]
    pub(crate) fn record_popped(&mut self, head: u16) {
        let at = self.state(head);
        self.part.write(at + COUNTER, U64::new(self.counter));
        crash_point();
        self.counter = self.counter.wrapping_add(1);
        self.part.write::<u8>(at, 1);
    }

    /// Records that a chain will be answered with the next batch.
    #[inline]
    pub(crate) fn record_pushed(&mut self, head: u16) {
        let at = self.state(head);
        self.part.store_release_u16(at + NEXT, self.last);
        crash_point();
        self.part.store_release_u16(LAST_HEAD, head);
        self.last = head;
        self.answered.push(head);
    }

    /// Records that a batch was published; `used` is the published index.
    #[inline]
    pub(crate) fn record_published(&mut self, used: u16) {
        for head in self.answered.drain(..) {
            let at = STATES + STATE_SIZE * usize::from(head);
            self.part.write::<u8>(at, 0);
            crash_point();
        }
        self.part.store_release_u16(USED_INDEX, used);
    }
}
