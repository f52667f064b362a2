//! The current size of a disk: one word shared by all its users.

use std::sync::atomic::{AtomicU64, Ordering};

/// Size of a disk in bytes. Read for every I/O, written when the disk grows or shrinks.
#[derive(Debug)]
pub struct Capacity(AtomicU64);

impl Capacity {
    /// Creates a capacity of `bytes`.
    pub const fn new(bytes: u64) -> Capacity {
        Capacity(AtomicU64::new(bytes))
    }

    /// Returns the current size in bytes. A reader of a larger size also sees everything prepared for it (acquire).
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Sets the size in bytes.
    pub fn set(&self, bytes: u64) {
        self.0.store(bytes, Ordering::Release);
    }
}

/// Knowledge of the size of a disk that several daemons use in turns. Clients see the adopted size; another daemon may have changed the size
/// since then.
#[derive(Debug, Default)]
pub struct SizeKnowledge {
    /// Number of turns of this daemon that have ended, plus one.
    turn: AtomicU64,
    /// Number of the turn that has read the size for clients.
    adopted: AtomicU64,
}

impl SizeKnowledge {
    /// Creates the knowledge before the first turn: the size is not known.
    pub const fn before_turns() -> SizeKnowledge {
        SizeKnowledge {
            turn: AtomicU64::new(1),
            adopted: AtomicU64::new(0),
        }
    }

    /// Returns true if clients see the present size. Otherwise only the device can check ranges.
    pub fn is_known(&self) -> bool {
        self.adopted.load(Ordering::Acquire) == self.turn.load(Ordering::Acquire)
    }

    /// Returns the number of the present or next turn.
    pub fn turn(&self) -> u64 {
        self.turn.load(Ordering::Acquire)
    }

    /// Ends a turn.
    pub fn end_turn(&self) {
        self.turn.fetch_add(1, Ordering::AcqRel);
    }

    /// Records that clients see the size of this turn.
    pub fn adopt(&self, turn: u64) {
        self.adopted.store(turn, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_is_known_in_the_turn_that_adopted_it() {
        assert!(SizeKnowledge::default().is_known(), "no other daemon");
        let knowledge = SizeKnowledge::before_turns();
        assert!(!knowledge.is_known());
        let first = knowledge.turn();
        knowledge.adopt(first);
        assert!(knowledge.is_known());
        knowledge.end_turn();
        assert!(!knowledge.is_known());
        knowledge.adopt(first);
        assert!(!knowledge.is_known(), "adopted late");
        knowledge.adopt(knowledge.turn());
        assert!(knowledge.is_known());
    }
}
