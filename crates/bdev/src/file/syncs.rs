//! Concurrent syncs of one worker. The kernel reports a failure only to the first sync that checks: one that succeeded beside another may
//! have had nothing left to write. Its success counts only after all overlapping syncs have ended.

use std::collections::VecDeque;

/// Syncs in flight, and I/Os that wait for them.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    begun: u64,
    /// Numbers of the syncs in flight, ascending.
    in_flight: VecDeque<u64>,
    /// I/Os with a successful sync, each with the next sync's number at that time.
    held: VecDeque<(u64, u32)>,
}

impl Syncs {
    /// Registers a sync and returns its number.
    pub fn begin(&mut self) -> u64 {
        let number = self.begun;
        self.begun += 1;
        self.in_flight.push_back(number);
        number
    }

    /// Registers the end of a sync, with any result.
    pub fn end(&mut self, number: u64) {
        if let Ok(at) = self.in_flight.binary_search(&number) {
            self.in_flight.remove(at);
        }
    }

    /// Returns true if an I/O with a successful sync must wait for others.
    pub fn holds(&mut self, index: u32) -> bool {
        let waits = !self.in_flight.is_empty();
        if waits {
            self.held.push_back((self.begun, index));
        }
        waits
    }

    /// Returns an I/O that need not wait any longer.
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
    fn successful_sync_waits_only_for_concurrent_syncs() {
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
