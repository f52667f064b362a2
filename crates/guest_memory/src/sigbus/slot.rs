//! A slot of the SIGBUS handler's table. The handler reads slots while other threads change them.

use crate::sync::{AtomicU32, AtomicUsize, Ordering, fence};

/// States of a slot, in the lower bits of its word. The upper bits count its claims.
pub(super) const FREE: u32 = 0;
const CLAIMED: u32 = 1;
pub(super) const WATCHED: u32 = 2;
pub(super) const POISONED: u32 = 3;
const STATE: u32 = 3;
const CLAIM: u32 = 4;

/// A watched range, or a free slot. The handler may read it while another thread changes it.
pub(super) struct Slot {
    pub(super) word: AtomicU32,
    pub(super) start: AtomicUsize,
    pub(super) length: AtomicUsize,
}

impl Slot {
    pub(super) fn state(&self) -> u32 {
        self.word.load(Ordering::Acquire) & STATE
    }

    pub(super) fn claim(&self) -> bool {
        let word = self.word.load(Ordering::Relaxed);
        let claimed = (word & !STATE).wrapping_add(CLAIM) | CLAIMED;
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        word & STATE == FREE
            && (self.word)
                .compare_exchange(word, claimed, success, failure)
                .is_ok()
    }

    /// Sets the range of a claimed slot.
    pub(super) fn watch(&self, start: usize, length: usize) {
        // A reader that sees the new range also sees the changed word.
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.length.store(length, Ordering::Relaxed);
        self.set_state(WATCHED);
    }

    pub(super) fn set_state(&self, state: u32) {
        let claims = self.word.load(Ordering::Relaxed) & !STATE;
        self.word.store(claims | state, Ordering::Release);
    }

    /// Returns the watched range. `None` also if the slot changes during the call, so start and length always belong to one
    /// mapping.
    pub(super) fn range(&self) -> Option<(usize, usize)> {
        let before = self.word.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        let length = self.length.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let after = self.word.load(Ordering::Relaxed);
        let is_stable = before & !STATE == after & !STATE;
        (before & STATE >= WATCHED && is_stable).then_some((start, length))
    }
}
