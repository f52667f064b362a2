//! A queue's slot table: as many requests as the ring has entries, made once.
//!
//! Slots are taken last-in first-out, so that a queue at depth d touches d slots. A chain whose ID is in flight
//! already is the driver's fault and is detected here.

use guest_memory::GuestView;
use timeline::{Operation, Stamp};
use virtqueue::Chain;

/// A request's place.
pub(crate) struct Slot<R> {
    pub chain: Chain,
    pub request: R,
    pub operation: Operation,
    pub bytes: u32,
    /// First byte of its first I/O on the disk.
    pub offset: u64,
    pub noticed: Stamp,
    pub popped: Stamp,
    pub parsed: Stamp,
    pub submitted: Stamp,
    /// It was answered without an error.
    pub good: bool,
    /// Its I/O runs on scratch memory, not on the chain's buffer.
    pub scratch: bool,
    /// Its I/O was pending, so its stamps are recorded one by one.
    pub pended: bool,
    /// It waits for [`crate::Queue::resume_waiting`].
    pub waiting: bool,
    /// It holds a request that has not been answered.
    pub active: bool,
    /// Once answered, it goes on without its driver.
    pub goes_on: bool,
}

impl<R: Default> Default for Slot<R> {
    fn default() -> Self {
        Slot {
            chain: Chain::default(),
            request: R::default(),
            operation: Operation::Other,
            bytes: 0,
            offset: 0,
            noticed: Stamp::default(),
            popped: Stamp::default(),
            parsed: Stamp::default(),
            submitted: Stamp::default(),
            good: false,
            scratch: false,
            pended: false,
            waiting: false,
            active: false,
            goes_on: false,
        }
    }
}

pub(crate) struct Slots<R> {
    slots: Vec<Slot<R>>,
    free: Vec<u16>,
    /// One bit per chain ID in flight.
    busy: Vec<u64>,
}

impl<R: Default> Slots<R> {
    pub fn new(size: u16) -> Slots<R> {
        Slots {
            slots: std::iter::repeat_with(Slot::default)
                .take(usize::from(size))
                .collect(),
            free: (0..size).rev().collect(),
            busy: vec![0; usize::from(size).div_ceil(64)],
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

    /// Takes a free slot, to be filled.
    #[inline]
    pub fn take(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Gives back a slot that was taken and not filled.
    #[inline]
    pub fn untake(&mut self, index: u16) {
        self.free.push(index);
    }

    /// Notes the chain ID of a filled slot; false when that ID is in flight already.
    #[inline]
    pub fn note(&mut self, index: u16) -> bool {
        let id = usize::from(self.slots[usize::from(index)].chain.id);
        let Some(word) = self.busy.get_mut(id / 64) else {
            return false;
        };
        let bit = 1 << (id % 64);
        let new = *word & bit == 0;
        *word |= bit;
        self.slots[usize::from(index)].active = new;
        new
    }

    /// The driver may use the request's ID again, for it has been answered; its memory is let go, but for the pin on
    /// the memory in use, `view`.
    #[inline]
    pub fn answered(&mut self, index: u16, view: &GuestView) {
        let slot = &mut self.slots[usize::from(index)];
        let id = usize::from(slot.chain.id);
        if let Some(word) = self.busy.get_mut(id / 64) {
            *word &= !(1 << (id % 64));
        }
        slot.chain.recycle(view);
        slot.active = false;
    }

    /// Ends a request: its ID and slot are free again.
    #[inline]
    pub fn release(&mut self, index: u16, view: &GuestView) {
        self.answered(index, view);
        self.free_slot(index);
    }

    /// Lets go of the pins that free slots keep: the memory in use is another from now on.
    pub fn unpin(&mut self) {
        for index in &self.free {
            self.slots[usize::from(*index)].chain.clear();
        }
    }

    /// The slot of a request that was answered before is free again. What is told of it stands until it is taken again.
    #[inline]
    pub fn free_slot(&mut self, index: u16) {
        let slot = &mut self.slots[usize::from(index)];
        (slot.scratch, slot.waiting, slot.goes_on) = (false, false, false);
        self.free.push(index);
    }

    #[inline]
    pub fn get(&mut self, index: u16) -> &mut Slot<R> {
        &mut self.slots[usize::from(index)]
    }

    /// Every request in flight that is not answered yet, for look-ups that walk them (task management).
    pub fn active(&mut self) -> impl Iterator<Item = &mut Slot<R>> {
        self.slots.iter_mut().filter(|slot| slot.active)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_in_flight_twice_is_noticed_until_it_is_released() {
        let mut slots = Slots::<()>::new(128);
        let a = slots.take().unwrap();
        slots.get(a).chain.id = 100;
        assert!(slots.note(a));
        let b = slots.take().unwrap();
        slots.get(b).chain.id = 100;
        assert!(!slots.note(b));
        slots.untake(b);
        slots.get(a).chain.id = 100;
        slots.release(a, &GuestView::new(Default::default()));
        let c = slots.take().unwrap();
        slots.get(c).chain.id = 100;
        assert!(slots.note(c));
        assert_eq!(slots.in_flight(), 1);
    }

    #[test]
    fn there_are_as_many_slots_as_entries() {
        let mut slots = Slots::<()>::new(4);
        for _ in 0..4 {
            assert!(slots.take().is_some());
        }
        assert!(!slots.has_free());
        assert_eq!(slots.take(), None);
    }
}
