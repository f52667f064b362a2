//! Syncs of one worker that run at the same time. The kernel tells a failure to the first of them that looks, and to no other: one
//! that went well while another one ran may have had nothing left to write. What it says counts once all that ran beside it have ended.

use std::collections::VecDeque;

/// Those in flight, and those that wait for them.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    begun: u64,
    /// By number, in order.
    in_flight: VecDeque<u64>,
    /// I/Os whose sync went well, by the number that the next sync had then.
    held: VecDeque<(u64, u32)>,
}

impl Syncs {
    /// One begins: its number.
    pub fn begin(&mut self) -> u64 {
        let number = self.begun;
        self.begun += 1;
        self.in_flight.push_back(number);
        number
    }

    /// It has ended, in one way or another.
    pub fn end(&mut self, number: u64) {
        if let Ok(at) = self.in_flight.binary_search(&number) {
            self.in_flight.remove(at);
        }
    }

    /// The sync of this I/O went well; does it have to wait for those beside it?
    pub fn holds(&mut self, index: u32) -> bool {
        let waits = !self.in_flight.is_empty();
        if waits {
            self.held.push_back((self.begun, index));
        }
        waits
    }

    /// An I/O that has waited long enough.
    pub fn release(&mut self) -> Option<u32> {
        let (before, index) = *self.held.front()?;
        let first = self.in_flight.front();
        if first.is_some_and(|first| *first < before) {
            return None;
        }
        self.held.pop_front();
        Some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sync_that_went_well_waits_for_those_beside_it_alone() {
        let mut syncs = Syncs::default();
        let (a, b) = (syncs.begin(), syncs.begin());
        syncs.end(b);
        assert!(syncs.holds(7));
        let later = syncs.begin();
        assert_eq!(syncs.release(), None);
        syncs.end(a);
        assert_eq!(syncs.release(), Some(7));
        assert_eq!(syncs.release(), None);
        syncs.end(later);
        assert!(!syncs.holds(8), "nothing runs beside it");
    }
}
