//! A bitmap in shared memory. Several threads set bits concurrently; another process may map it later.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::Mapping;

const WORD: u64 = 64;

/// Bits in a mapping, in native words of 64 bits. Setting a bit that is already set costs one load.
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
    /// Number of bytes that `bits` bits occupy.
    pub const fn bytes(bits: u64) -> u64 {
        bits.div_ceil(WORD) * 8
    }

    /// Uses the first `bits` bits of a mapping.
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

    /// Number of bits.
    pub fn len(&self) -> u64 {
        self.bits
    }

    /// Returns true if there are no bits.
    pub fn is_empty(&self) -> bool {
        self.bits == 0
    }

    /// Returns true if the file of the mapping was truncated; the bits are then invalid.
    pub fn is_poisoned(&self) -> bool {
        self.mapping.is_poisoned()
    }

    #[inline]
    fn word(&self, index: u64) -> &AtomicU64 {
        assert!(index * WORD < self.bits, "a bit that there is not");
        // SAFETY: `new` checked that the words of all bits are in the mapping. The mapping is page-aligned, so each word is aligned, and it
        // lives as long as the reference. All users of this memory access it as atomic words.
        unsafe { AtomicU64::from_ptr(self.mapping.base().cast::<u64>().add(index as usize)) }
    }

    /// Sets bits `from..to`. Bits beyond the last one are ignored.
    #[inline]
    pub fn set(&self, from: u64, to: u64) {
        let to = to.min(self.bits);
        let mut at = from;
        while at < to {
            let (index, first) = (at / WORD, at % WORD);
            let count = (WORD - first).min(to - at);
            let mask = (u64::MAX >> (WORD - count)) << first;
            let word = self.word(index);
            // Most bits are already set, and a cache line that is only read stays shared between cores.
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

    /// Returns true if the bit is set or does not exist.
    pub fn is_set(&self, bit: u64) -> bool {
        bit >= self.bits || self.word(bit / WORD).load(Ordering::Acquire) >> (bit % WORD) & 1 == 1
    }

    /// First set bit at or after `from`, or the number of bits.
    pub fn next_set(&self, from: u64) -> u64 {
        self.next(from, |word| word)
    }

    /// First clear bit at or after `from`, or the number of bits.
    pub fn next_clear(&self, from: u64) -> u64 {
        self.next(from, |word| !word)
    }

    fn next(&self, from: u64, transform: impl Fn(u64) -> u64) -> u64 {
        let mut at = from;
        while at < self.bits {
            let word = transform(self.word(at / WORD).load(Ordering::Acquire)) >> (at % WORD);
            if word != 0 {
                return (at + u64::from(word.trailing_zeros())).min(self.bits);
            }
            at = (at / WORD + 1) * WORD;
        }
        self.bits
    }

    /// Returns the number of set bits. The first call reads all bits. Bits that are set during that call may be counted twice. Bits that
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
        // A change of a word that bypasses `set` is not counted.
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
        assert!(bits.is_set(200), "unknown bits must be checked");
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
