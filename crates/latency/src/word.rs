//! A counter that one thread writes and any thread may read.
//!
//! The owner loads, adds and stores: plain moves, no locked instruction. A reader gets a value that the word had, and
//! takes nothing but a shared copy of its cache line. Words that are read together may be of different moments.

use std::sync::atomic::{AtomicU64, Ordering};

/// One word. Only its owner may write it: a second writer loses counts, no more.
#[derive(Default)]
pub struct Word(AtomicU64);

impl Word {
    /// A word with a value.
    pub const fn new(value: u64) -> Self {
        Word(AtomicU64::new(value))
    }

    /// Its value, for anybody.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Sets it, for its owner.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Adds to it, for its owner.
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
        Word::new(self.get())
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
        let word = std::sync::Arc::new(Word::new(0));
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
