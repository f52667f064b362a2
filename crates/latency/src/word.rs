//! A counter with one writer and any number of readers.
//!
//! The owner loads, adds and stores with plain moves, without locked instructions. A reader gets a past value of the word,
//! at the cost of a shared copy of its cache line. Words that are read together may be from different moments.

use crate::sync::{AtomicU64, Ordering};

/// One word. Only its owner may write it; a second writer would lose counts, but is memory-safe.
#[derive(Default)]
pub struct Word(pub(crate) AtomicU64);

impl Word {
    /// Returns the value, on any thread.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Sets the value; owner only.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Adds to the value; owner only.
    #[inline]
    pub fn add(&self, more: u64) {
        self.set(self.get().wrapping_add(more));
    }
}

impl std::fmt::Debug for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.get().fmt(f)
    }
}

impl Clone for Word {
    fn clone(&self) -> Self {
        let clone = Word::default();
        clone.set(self.get());
        clone
    }
}

impl PartialEq for Word {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl Eq for Word {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_sees_every_value_in_order() {
        let word = std::sync::Arc::new(Word::default());
        let reader = word.clone();
        let looking = std::thread::spawn(move || {
            let mut last = 0;
            while last < 100_000 {
                let now = reader.get();
                assert!(now >= last);
                last = now;
            }
        });
        for _ in 0..100_000 {
            word.add(1);
        }
        looking.join().unwrap();
        assert_eq!(Word::clone(&word), *word);
    }
}
