//! Tracks which workers may still access released clusters, because of an older map.
//!
//! Each I/O carries the generation of its start. Releasing clusters begins a new generation; the clusters are free once all I/O of earlier
//! generations has ended. At most two generations have I/O, because the owner begins no third one. A worker writes only its own cache line,
//! when it begins I/O after a pause or in a new generation.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The worker has no I/O.
const IDLE: u64 = u64::MAX;

/// The workers of an image.
#[derive(Debug, Default)]
pub(super) struct Readers {
    generation: AtomicU64,
    each: Mutex<Vec<Weak<Oldest>>>,
}

/// Oldest generation of the worker's I/O.
#[derive(Debug)]
#[repr(align(128))]
struct Oldest(AtomicU64);

impl Readers {
    /// Begins a generation for all later I/O.
    pub fn begin_generation(&self) -> u64 {
        self.generation.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Returns true if all I/O from before this generation has ended.
    pub fn are_past(&self, generation: u64) -> bool {
        fence(Ordering::SeqCst);
        let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
        each.retain(|oldest| oldest.strong_count() > 0);
        let mut alive = each.iter().filter_map(Weak::upgrade);
        alive.all(|oldest| oldest.0.load(Ordering::SeqCst) >= generation)
    }

    /// Returns true if any worker has a channel.
    pub fn has_any(&self) -> bool {
        let each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
        each.iter().any(|oldest| oldest.strong_count() > 0)
    }

    /// Registers a worker.
    pub fn add(&self) -> Reader {
        let oldest = Arc::new(Oldest(AtomicU64::new(IDLE)));
        let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
        each.push(Arc::downgrade(&oldest));
        Reader {
            oldest,
            now: 0,
            now_count: 0,
            before: 0,
            before_count: 0,
        }
    }
}

/// I/O counts of one worker, by generation.
#[derive(Debug)]
pub(super) struct Reader {
    oldest: Arc<Oldest>,
    now: u64,
    now_count: usize,
    before: u64,
    before_count: usize,
}

impl Reader {
    /// Registers the start of an I/O and returns its generation.
    #[inline]
    pub fn begin(&mut self, readers: &Readers) -> u64 {
        let generation = readers.generation.load(Ordering::SeqCst);
        if self.now_count == 0 || self.now != generation {
            self.enter(generation);
        }
        self.now_count += 1;
        self.now
    }

    #[cold]
    fn enter(&mut self, generation: u64) {
        if self.now_count > 0 {
            assert_eq!(self.before_count, 0, "three generations have I/O");
            (self.before, self.before_count) = (self.now, self.now_count);
            self.now_count = 0;
        }
        self.now = generation;
        if self.before_count == 0 {
            self.oldest.0.store(generation, Ordering::SeqCst);
        }
        // Before the map is read: either the owner sees this store, or this worker sees the owner's changes.
        fence(Ordering::SeqCst);
    }

    /// Registers the end of an I/O of this generation.
    #[inline]
    pub fn end(&mut self, generation: u64) {
        if generation == self.now {
            self.now_count -= 1;
            if self.now_count > 0 || self.before_count > 0 {
                return;
            }
        } else {
            self.before_count -= 1;
            if self.before_count > 0 {
                return;
            }
        }
        let oldest = if self.now_count > 0 { self.now } else { IDLE };
        self.oldest.0.store(oldest, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_ends_after_all_its_io() {
        let readers = Readers::default();
        let (mut one, mut two) = (readers.add(), readers.add());
        let first = one.begin(&readers);
        let generation = readers.begin_generation();
        let later = two.begin(&readers);
        assert!(!readers.are_past(generation));
        let beside = one.begin(&readers);
        assert!(first < beside && beside == later && !readers.are_past(generation));
        one.end(first);
        assert!(readers.are_past(generation));
        // Later I/O of the other worker does not delay the generation.
        let next = readers.begin_generation();
        assert!(!readers.are_past(next));
        one.end(beside);
        two.end(later);
        assert!(readers.are_past(next));
        let again = one.begin(&readers);
        assert!(again == next && readers.are_past(next));
        one.end(again);
        drop(one);
        assert!(readers.are_past(next + 1));
    }
}
