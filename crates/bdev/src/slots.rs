//! Slots of a channel's I/Os in flight. Completions name an I/O by the index of its slot.

use std::ops::{Index, IndexMut};

/// Slots, and a list of those that are free. A free slot has the values of its last I/O. Allocates nothing after the number of slots has
/// reached the maximum of I/Os in flight.
pub(crate) struct Slots<T> {
    slots: Vec<T>,
    free: Vec<u32>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Slots {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slots<T> {
    /// Stores `slot` and returns its index.
    #[inline]
    pub fn occupy(&mut self, slot: T) -> u32 {
        match self.free.pop() {
            Some(index) => {
                self.slots[index as usize] = slot;
                index
            }
            None => self.push(slot),
        }
    }

    /// Returns the index of a free slot with its last values, or of a `new` one: for large slots.
    #[inline]
    pub fn reuse(&mut self, new: impl FnOnce() -> T) -> u32 {
        match self.free.pop() {
            Some(index) => index,
            None => self.push(new()),
        }
    }

    fn push(&mut self, slot: T) -> u32 {
        self.slots.push(slot);
        self.free.reserve(self.slots.len());
        self.slots.len() as u32 - 1
    }

    /// Frees a slot, which must be occupied.
    #[inline]
    pub fn release(&mut self, index: u32) {
        self.free.push(index);
    }

    /// Returns the number of occupied slots.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns the first occupied slot that `is_meant`. Searches all slots.
    pub fn find(&self, is_meant: impl Fn(&T) -> bool) -> Option<u32> {
        let mut all = (0..).zip(&self.slots);
        let found = all.find(|(index, slot)| is_meant(slot) && !self.free.contains(index));
        found.map(|(index, _)| index)
    }

    /// Returns all slots, also free ones.
    pub fn all(&self) -> &[T] {
        &self.slots
    }

    /// Returns all slots for modification, also free ones.
    pub fn all_mut(&mut self) -> &mut [T] {
        &mut self.slots
    }
}

impl<T> Index<u32> for Slots<T> {
    type Output = T;

    #[inline]
    fn index(&self, index: u32) -> &T {
        &self.slots[index as usize]
    }
}

impl<T> IndexMut<u32> for Slots<T> {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut T {
        &mut self.slots[index as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_slots_are_occupied_again_before_others_are_made() {
        let mut slots = Slots::default();
        assert_eq!(
            [slots.occupy('a'), slots.occupy('b'), slots.len() as u32],
            [0, 1, 2]
        );
        slots.release(0);
        assert_eq!(
            (slots.len(), slots[0], slots.find(|one| *one == 'a')),
            (1, 'a', None)
        );
        assert_eq!(slots.find(|one| *one == 'b'), Some(1));
        assert_eq!(slots.reuse(|| 'c'), 0);
        assert_eq!((slots[0], slots.reuse(|| 'c')), ('a', 2));
        assert_eq!((slots.all(), slots.len()), (&['a', 'b', 'c'][..], 3));
    }

    #[test]
    fn release_of_every_slot_does_not_allocate() {
        let mut slots = Slots::default();
        for _ in 0..100 {
            slots.occupy(0);
        }
        let capacity = slots.free.capacity();
        (0..100).for_each(|index| slots.release(index));
        assert_eq!((slots.free.capacity(), slots.len()), (capacity, 0));
    }
}
