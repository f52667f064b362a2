//! Slot table of a queue: one slot per ring entry, allocated once.
//!
//! Slots are taken last-in first-out, so that a queue at depth d touches d slots. A chain ID that is already in flight is a driver error
//! and is detected here.

use guest_memory::GuestView;
use latency::{Operation, Part, Stamp};
use virtqueue::Chain;

use crate::protocol::{Request, Step};

/// Stage of the request in a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Stage {
    /// No unanswered request.
    #[default]
    Free,
    /// Parsed. The first step is in the slot's `step`, because it is not an I/O on the chain's buffer.
    Parsed,
    /// I/O on the chain's buffer: before its submission, in flight, or complete.
    Data,
    /// I/O on scratch memory, in flight.
    Scratch,
    /// Waiting for [`crate::Queue::resume_waiting`] or [`crate::Queue::proceed`].
    Waiting,
    /// Ready for its response.
    Done,
    /// Ready for its response. The request continues in the background afterwards.
    Detaching,
}

/// One slot. It is cache-line aligned; the fields that each request needs are in the first three lines.
#[repr(C, align(64))]
pub(crate) struct Slot<S> {
    pub operation: Operation,
    pub stage: Stage,
    /// Answered without an error.
    pub good: bool,
    /// The I/O was pending, so its stamps are recorded one by one.
    pub was_pending: bool,
    pub bytes: u32,
    /// Partition of its measurements, while requests in flight address several disks.
    pub part: Part,
    /// Disk offset of its first I/O in bytes.
    pub offset: u64,
    pub request: Request<S>,
    /// First step of a request in [`Stage::Parsed`].
    pub step: Option<Step>,
    pub noticed: Stamp,
    pub popped: Stamp,
    pub parsed: Stamp,
    pub submitted: Stamp,
}

// Four cache lines with the largest state of a device type.
const _: () = assert!(size_of::<Slot<[u64; 8]>>() == 256);

impl<S: Default> Default for Slot<S> {
    fn default() -> Self {
        Slot {
            request: Request::default(),
            step: None,
            operation: Operation::Other,
            part: Part::REST,
            bytes: 0,
            offset: 0,
            noticed: Stamp::default(),
            popped: Stamp::default(),
            parsed: Stamp::default(),
            submitted: Stamp::default(),
            stage: Stage::Free,
            good: false,
            was_pending: false,
        }
    }
}

impl<S> Slot<S> {
    /// Begins with another step than an I/O on the chain's buffer.
    #[inline(never)]
    pub fn set_first_step(&mut self, step: Step) {
        if !matches!(step, Step::Scratch(_)) {
            self.offset = 0;
        }
        self.step = Some(step);
        self.stage = Stage::Parsed;
    }
}

/// Result of filling a slot.
pub(crate) enum Fill<E> {
    /// Slot that now holds a chain, and the chain's bytes.
    Filled(u16, u64),
    /// No slot is free.
    Full,
    /// The ring is empty.
    Empty,
    /// This chain ID is already in flight.
    DuplicateId(u16),
    /// Free slot with a chain that cannot be served, or without one if the ring is broken.
    Failed(u16, E),
}

pub(crate) struct Slots<S> {
    slots: Vec<Slot<S>>,
    free: Vec<u16>,
    /// Indexed by chain ID: the chain is in flight.
    busy: Vec<bool>,
    /// The guest memory was replaced. Requests of that time may still pin the old memory.
    memory_replaced: bool,
}

impl<S: Default> Slots<S> {
    pub fn new(size: u16) -> Slots<S> {
        Slots {
            slots: std::iter::repeat_with(Slot::default)
                .take(usize::from(size))
                .collect(),
            free: (0..size).rev().collect(),
            busy: vec![false; usize::from(size)],
            memory_replaced: false,
        }
    }

    #[inline]
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    #[inline]
    pub fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Prefetches the buffer start of the last request in the next free slot. With few requests in flight, the next request usually has the
    /// same buffer.
    #[inline(always)]
    pub fn prefetch_next(&self) {
        if let Some(&index) = self.free.last() {
            self.slots[usize::from(index)]
                .request
                .chain
                .buffer
                .prefetch();
        }
    }

    /// Takes a free slot for the chain from `pop` and marks the chain ID as busy. `separate_response`: prefetches the response line before the
    /// header. In the reverse order, a processor that fetches lines in pairs would fetch the response line for reading.
    #[inline(always)]
    pub fn fill<E>(
        &mut self,
        separate_response: bool,
        pop: impl FnOnce(&mut Chain) -> Result<bool, E>,
    ) -> Fill<E> {
        let Some(&index) = self.free.last() else {
            return Fill::Full;
        };
        let slot = &mut self.slots[usize::from(index)];
        let chain = &mut slot.request.chain;
        match pop(chain) {
            Ok(true) => {}
            Ok(false) => return Fill::Empty,
            Err(error) => return Fill::Failed(index, error),
        }
        if separate_response {
            chain.buffer.prefetch_second_half();
        }
        chain.buffer.prefetch();
        let (id, bytes) = (chain.id, chain.buffer.total_len() as u64);
        let busy = self.busy.get_mut(usize::from(id));
        let Some(busy) = busy.filter(|busy| !**busy) else {
            chain.clear();
            return Fill::DuplicateId(id);
        };
        *busy = true;
        slot.stage = Stage::Data;
        self.free.pop();
        Fill::Filled(index, bytes)
    }

    /// Returns true if a chain with this ID is in flight, or if the ID is out of range.
    pub fn is_busy(&self, id: u16) -> bool {
        self.busy.get(usize::from(id)).is_none_or(|busy| *busy)
    }

    /// Answers a request with `answer`. Releases its slot and its chain ID, which the driver may reuse, and its memory, except for memory of
    /// `view`, the current table.
    #[inline(always)]
    pub fn answer_and_release(
        &mut self,
        index: u16,
        view: &GuestView,
        answer: impl FnOnce(&mut Slot<S>),
    ) {
        let slot = &mut self.slots[usize::from(index)];
        answer(slot);
        let id = slot.request.chain.id;
        if let Some(busy) = self.busy.get_mut(usize::from(id)) {
            *busy = false;
        }
        if self.memory_replaced {
            slot.request.chain.recycle(view);
        }
        slot.stage = Stage::Free;
        self.free.push(index);
    }

    /// Releases the pins of free slots. Called when the guest memory is replaced.
    pub fn unpin(&mut self) {
        self.memory_replaced = true;
        for index in &self.free {
            self.slots[usize::from(*index)].request.chain.clear();
        }
    }

    #[inline(always)]
    pub fn get(&mut self, index: u16) -> &mut Slot<S> {
        &mut self.slots[usize::from(index)]
    }

    /// Iterates over all slots, including free ones.
    pub fn all(&mut self) -> impl Iterator<Item = &mut Slot<S>> {
        self.slots.iter_mut()
    }

    /// Iterates over all unanswered requests, for searches such as task management.
    pub fn active(&mut self) -> impl Iterator<Item = (u16, &mut Slot<S>)> {
        let numbered = (0..).zip(&mut self.slots);
        numbered.filter(|(_, slot)| slot.stage != Stage::Free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(slots: &mut Slots<()>, id: u16) -> Fill<()> {
        slots.fill(true, |chain| {
            chain.id = id;
            Ok(true)
        })
    }

    #[test]
    fn an_id_in_flight_twice_is_noticed_until_it_is_released() {
        let mut slots = Slots::<()>::new(128);
        let Fill::Filled(first, _) = fill(&mut slots, 100) else {
            panic!("a free slot")
        };
        assert!(matches!(fill(&mut slots, 100), Fill::DuplicateId(100)));
        assert_eq!(slots.in_flight(), 1);
        let view = GuestView::new(Default::default());
        slots.answer_and_release(first, &view, |_| ());
        assert!(matches!(fill(&mut slots, 100), Fill::Filled(..)));
        assert_eq!(slots.in_flight(), 1);
    }

    #[test]
    fn there_are_as_many_slots_as_entries() {
        let mut slots = Slots::<()>::new(4);
        for id in 0..4 {
            assert!(matches!(fill(&mut slots, id), Fill::Filled(..)));
        }
        assert!(!slots.has_free());
        assert!(matches!(fill(&mut slots, 0), Fill::Full));
    }

    #[test]
    fn without_a_chain_no_slot_is_taken() {
        let mut slots = Slots::<()>::new(4);
        assert!(matches!(
            slots.fill(false, |_| Ok::<_, ()>(false)),
            Fill::Empty
        ));
        assert!(matches!(slots.fill(false, |_| Err(7)), Fill::Failed(_, 7)));
        assert_eq!(slots.in_flight(), 0);
    }
}
