//! Both words of an extended L2 entry in memory. Only the image's owner stores them; any thread loads them without a lock.

use crate::sync::{AtomicU64, Ordering};

/// Loads a consistent pair of both words of an entry.
///
/// Both words are loaded again. The second word alone does not suffice: between its loads, the owner can discard the cluster and allocate
/// another one, after which the second word is the same as before.
#[inline]
pub(crate) fn load(words: &[AtomicU64], index: usize) -> (u64, u64) {
    let (first, second) = (&words[2 * index], &words[2 * index + 1]);
    loop {
        let parts = second.load(Ordering::Acquire);
        let entry = first.load(Ordering::Acquire);
        if second.load(Ordering::Acquire) == parts && first.load(Ordering::Acquire) == entry {
            return (entry, parts);
        }
    }
}

/// Stores the second word, then the first one.
pub(crate) fn store_first_word_last(words: &[AtomicU64], index: usize, (entry, parts): (u64, u64)) {
    words[2 * index + 1].store(parts, Ordering::Release);
    words[2 * index].store(entry, Ordering::Release);
}

/// Stores the first word, then the second one.
pub(crate) fn store_second_word_last(
    words: &[AtomicU64],
    index: usize,
    (entry, parts): (u64, u64),
) {
    words[2 * index].store(entry, Ordering::Release);
    words[2 * index + 1].store(parts, Ordering::Release);
}
