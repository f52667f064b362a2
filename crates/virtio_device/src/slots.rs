//! A queue's slot table: as many requests as the ring has entries, made once.
//!
//! Slots are taken last-in first-out, so that a queue at depth d touches d slots. A chain whose ID is in flight
//! already is the driver's fault and is detected here.

use guest_memory::GuestView;
use latency::{Operation, Part, Stamp};
use virtqueue::Chain;

use crate::protocol::{Request, Step};

/// A request's place. It begins with a cache line, and what each request needs lies in the first three.
#[repr(C, align(64))]
pub(crate) struct Slot<S> {
    pub operation: Operation,
    /// It was answered without an error.
    pub good: bool,
    /// It begins with another step than [`Step::Data`].
    pub otherwise: bool,
    /// Its I/O runs on scratch memory, not on the chain's buffer.
    pub scratch: bool,
    /// Its I/O was pending, so its stamps are recorded one by one.
    pub pended: bool,
    /// It waits for [`crate::Queue::resume_waiting`].
    pub waiting: bool,
    /// Once answered, it goes on without its driver.
    pub goes_on: bool,
    /// It holds a request that has not been answered.
    pub active: bool,
    pub bytes: u32,
    /// Whose measurements it belongs to, while those in flight are of several disks.
    pub part: Part,
    /// First byte of its first I/O on the disk.
    pub offset: u64,
    pub request: Request<S>,
    /// What is to be done next, between two hops of a batch, if `otherwise`.
    pub step: Option<Step>,
    pub noticed: Stamp,
    pub popped: Stamp,
    pub parsed: Stamp,
    pub submitted: Stamp,
}

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
            good: false,
            otherwise: false,
            scratch: false,
            pended: false,
            waiting: false,
            goes_on: false,
            active: false,
        }
    }
}

impl<S> Slot<S> {
    /// Begins with another step than an I/O on the chain's buffer.
    #[inline(never)]
    pub fn begin_otherwise(&mut self, step: Step) {
        if !matches!(step, Step::Scratch(_)) {
            self.offset = 0;
        }
        self.step = Some(step);
        self.otherwise = true;
    }

    #[inline(always)]
    fn make_free(&mut self) {
        (self.scratch, self.waiting, self.goes_on) = (false, false, false);
    }
}

/// What came of filling a slot.
pub(crate) enum Fill<E> {
    /// This slot holds a chain now, of so many bytes.
    Filled(u16, u64),
    /// No slot was free.
    Full,
    /// There was no chain.
    Empty,
    /// The chain's ID is in flight already.
    Twice(u16),
    /// This free slot holds a chain that cannot be served, or nothing where the ring is broken.
    Failed(u16, E),
}

pub(crate) struct Slots<S> {
    slots: Vec<Slot<S>>,
    free: Vec<u16>,
    /// By chain ID: is it in flight?
    busy: Vec<bool>,
    /// What was in flight when the memory was changed may have pinned the memory before.
    changed: bool,
}

impl<S: Default> Slots<S> {
    pub fn new(size: u16) -> Slots<S> {
        Slots {
            slots: std::iter::repeat_with(Slot::default)
                .take(usize::from(size))
                .collect(),
            free: (0..size).rev().collect(),
            busy: vec![false; usize::from(size)],
            changed: false,
        }
    }

    /// Requests in flight.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    #[inline]
    pub fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Fetches what the last request of the next slot to be taken began with: where few are in flight, the next one lies
    /// there as a rule.
    #[inline(always)]
    pub fn guess(&self) {
        if let Some(&index) = self.free.last() {
            self.slots[usize::from(index)]
                .request
                .chain
                .buffer
                .prefetch();
        }
    }

    /// Takes a free slot for the chain that `pop` gives, and notes the chain's ID. `answered_apart`: the line of its answer is asked
    /// for, too, before that of its header, with which a processor that fetches lines in pairs would take it for reading.
    #[inline(always)]
    pub fn fill<E>(
        &mut self,
        answered_apart: bool,
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
        if answered_apart {
            chain.buffer.prefetch_half();
        }
        chain.buffer.prefetch();
        let (id, bytes) = (chain.id, chain.buffer.total_len() as u64);
        let busy = self.busy.get_mut(usize::from(id));
        let Some(busy) = busy.filter(|busy| !**busy) else {
            chain.clear();
            return Fill::Twice(id);
        };
        *busy = true;
        slot.active = true;
        self.free.pop();
        Fill::Filled(index, bytes)
    }

    /// Is a chain with this ID in flight?
    pub fn is_busy(&self, id: u16) -> bool {
        self.busy.get(usize::from(id)).is_none_or(|busy| *busy)
    }

    /// The driver may use the request's ID again, for it has been answered; its memory is let go, but for what is of
    /// the memory in use, `view`.
    #[inline(always)]
    pub fn answered(&mut self, index: u16, view: &GuestView) -> &mut Slot<S> {
        self.answer(index, view, |_| ()).0
    }

    /// As [`Slots::answered`], of a request that is answered by `how`.
    #[inline(always)]
    fn answer<R>(
        &mut self,
        index: u16,
        view: &GuestView,
        how: impl FnOnce(&mut Slot<S>) -> R,
    ) -> (&mut Slot<S>, R) {
        let slot = &mut self.slots[usize::from(index)];
        let result = how(slot);
        let id = slot.request.chain.id;
        if let Some(busy) = self.busy.get_mut(usize::from(id)) {
            *busy = false;
        }
        if self.changed {
            slot.request.chain.recycle(view);
        }
        slot.active = false;
        (slot, result)
    }

    /// Answers a request by `how`. Its ID is free again, and its slot unless the request goes on: is it free?
    #[inline(always)]
    pub fn answer_and_release(
        &mut self,
        index: u16,
        view: &GuestView,
        how: impl FnOnce(&mut Slot<S>),
    ) -> bool {
        let (slot, ()) = self.answer(index, view, how);
        let free = !slot.goes_on;
        if free {
            slot.make_free();
            self.free.push(index);
        }
        free
    }

    /// An answered request goes on without a chain; which one it had can still be told.
    pub fn let_go(&mut self, index: u16) {
        let chain = &mut self.slots[usize::from(index)].request.chain;
        chain.buffer.clear();
        (chain.readable, chain.writable) = (0, 0);
    }

    /// Lets go of the pins that free slots keep: the memory in use is another from now on.
    pub fn unpin(&mut self) {
        self.changed = true;
        for index in &self.free {
            self.slots[usize::from(*index)].request.chain.clear();
        }
    }

    /// The slot of a request that was answered before is free again. What is told of it stands until it is taken again.
    #[inline(always)]
    pub fn free_slot(&mut self, index: u16) {
        self.slots[usize::from(index)].make_free();
        self.free.push(index);
    }

    #[inline(always)]
    pub fn get(&mut self, index: u16) -> &mut Slot<S> {
        &mut self.slots[usize::from(index)]
    }

    /// Every slot, free ones too.
    pub fn all(&mut self) -> impl Iterator<Item = &mut Slot<S>> {
        self.slots.iter_mut()
    }

    /// Every request in flight that is not answered yet, for look-ups that walk them (task management).
    pub fn active(&mut self) -> impl Iterator<Item = (u16, &mut Slot<S>)> {
        let numbered = (0..).zip(&mut self.slots);
        numbered.filter(|(_, slot)| slot.active)
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
        assert!(matches!(fill(&mut slots, 100), Fill::Twice(100)));
        assert_eq!(slots.in_flight(), 1);
        let view = GuestView::new(Default::default());
        assert!(slots.answer_and_release(first, &view, |_| ()));
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
