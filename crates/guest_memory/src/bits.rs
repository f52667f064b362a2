//! A bitmap in shared memory that several threads set bits in at once, and that another process may map later.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::Mapping;

const WORD: u64 = 64;

/// Bits in a mapping, each 64 of them a word of this machine. A bit that is set already costs a load.
pub struct SharedBits {
    mapping: Arc<Mapping>,
    bits: u64,
    /// Number of bits that are set, or [`UNCOUNTED`].
    counted: AtomicU64,
    /// Held by [`SharedBits::count`].
    counting: Mutex<()>,
}

/// No call has counted the bits yet.
const UNCOUNTED: u64 = u64::MAX;

impl SharedBits {
    /// Bytes that this many bits take.
    pub const fn bytes(bits: u64) -> u64 {
        bits.div_ceil(WORD) * 8
    }

    /// The first bits of a mapping.
    ///
    /// # Panics
    /// When the mapping is too short.
    pub fn new(mapping: Arc<Mapping>, bits: u64) -> SharedBits {
        assert!(
            SharedBits::bytes(bits) <= mapping.len() as u64,
            "a mapping too short for its bits"
        );
        SharedBits {
            mapping,
            bits,
            counted: AtomicU64::new(UNCOUNTED),
            counting: Mutex::default(),
        }
    }

    /// How many there are.
    pub fn len(&self) -> u64 {
        self.bits
    }

    /// Are there none?
    pub fn is_empty(&self) -> bool {
        self.bits == 0
    }

    /// Has somebody truncated the file behind them? Then they say nothing any more.
    pub fn is_poisoned(&self) -> bool {
        self.mapping.is_poisoned()
    }

    #[inline]
    fn word(&self, index: u64) -> &AtomicU64 {
        assert!(index * WORD < self.bits, "a bit that there is not");
        // SAFETY: `new` checked that the words of all bits lie in the mapping, which begins at a page, so each is aligned, and which
        // lives as long as the reference; all who share this memory use it as atomic words.
        unsafe { AtomicU64::from_ptr(self.mapping.base().cast::<u64>().add(index as usize)) }
    }

    /// Sets bits `from..to`. What is beyond the last one is no bit.
    #[inline]
    pub fn set(&self, from: u64, to: u64) {
        let to = to.min(self.bits);
        let mut at = from;
        while at < to {
            let (index, first) = (at / WORD, at % WORD);
            let count = (WORD - first).min(to - at);
            let mask = (u64::MAX >> (WORD - count)) << first;
            let word = self.word(index);
            // Most have been set before, and a cache line that is only read is everybody's.
            if word.load(Ordering::Relaxed) & mask != mask {
                let before = word.fetch_or(mask, Ordering::Release);
                if self.counted.load(Ordering::Relaxed) != UNCOUNTED {
                    let added = u64::from((mask & !before).count_ones());
                    self.counted.fetch_add(added, Ordering::Relaxed);
                }
            }
            at += count;
        }
    }

    /// Is this bit set? One that is not there is.
    pub fn is_set(&self, bit: u64) -> bool {
        bit >= self.bits || self.word(bit / WORD).load(Ordering::Acquire) >> (bit % WORD) & 1 == 1
    }

    /// The first bit from this one on that is set, or how many there are.
    pub fn next_set(&self, from: u64) -> u64 {
        self.next(from, |word| word)
    }

    /// The first bit from this one on that is not set, or how many there are.
    pub fn next_clear(&self, from: u64) -> u64 {
        self.next(from, |word| !word)
    }

    fn next(&self, from: u64, of: impl Fn(u64) -> u64) -> u64 {
        let mut at = from;
        while at < self.bits {
            let word = of(self.word(at / WORD).load(Ordering::Acquire)) >> (at % WORD);
            if word != 0 {
                return (at + u64::from(word.trailing_zeros())).min(self.bits);
            }
            at = (at / WORD + 1) * WORD;
        }
        self.bits
    }

    /// Returns the number of bits that are set. The first call reads all bits. Bits that are set meanwhile may be counted twice, and bits that
    /// another process sets later are not counted.
    pub fn count(&self) -> u64 {
        let _counting = self.counting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.counted.load(Ordering::Relaxed) == UNCOUNTED {
            self.counted.store(0, Ordering::Relaxed);
            let words = (0..self.bits.div_ceil(WORD)).map(|index| self.word(index));
            let ones = words.map(|word| u64::from(word.load(Ordering::Relaxed).count_ones()));
            self.counted.fetch_add(ones.sum(), Ordering::Relaxed);
        }
        self.counted.load(Ordering::Relaxed).min(self.bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(count: u64) -> SharedBits {
        SharedBits::new(Mapping::anonymous(4096).unwrap(), count)
    }

    #[test]
    fn count_follows_later_bits_and_reads_the_words_once() {
        let bits = bits(200);
        bits.set(3, 70);
        assert_eq!(bits.count(), 67);
        bits.set(60, 80);
        bits.set(199, 1000);
        assert_eq!(bits.count(), 78);
        // A word that changes without `set` is not read again.
        bits.word(2).store(u64::MAX, Ordering::Relaxed);
        assert_eq!(bits.count(), 78);
    }

    #[test]
    fn ranges_are_set_over_words_and_no_further() {
        for (from, to) in [(0, 1), (63, 65), (5, 200), (64, 128), (199, 1000), (7, 7)] {
            let bits = bits(200);
            bits.set(from, to);
            let set: Vec<u64> = (0..200).filter(|bit| bits.is_set(*bit)).collect();
            let wanted: Vec<u64> = (from..to.min(200)).collect();
            assert_eq!(set, wanted, "{from}..{to}");
            assert_eq!(bits.count(), wanted.len() as u64);
        }
    }

    #[test]
    fn next_of_each_kind_is_found() {
        let bits = bits(200);
        bits.set(70, 130);
        assert_eq!((bits.next_set(0), bits.next_set(71)), (70, 71));
        assert_eq!((bits.next_clear(0), bits.next_clear(70)), (0, 130));
        assert_eq!((bits.next_set(130), bits.next_set(500)), (200, 200));
        bits.set(130, 200);
        assert_eq!(bits.next_clear(70), 200);
        assert!(bits.is_set(200), "what is not there has to be looked at");
    }

    #[test]
    fn threads_set_bits_of_one_word() {
        let bits = bits(64);
        std::thread::scope(|scope| {
            for bit in 0..64 {
                let bits = &bits;
                scope.spawn(move || bits.set(bit, bit + 1));
            }
        });
        assert_eq!(bits.count(), 64);
    }
}
