//! Acknowledged changes that librbd may have in its cache (`rbd_cache`). The cache is lost with its image. A flush of the image that is
//! opened again succeeds, although changes before the loss are missing.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::file::Durability;

/// Changes and flushes of an image, of all workers. A flush covers the changes that were acknowledged before it began.
#[derive(Debug, Default)]
pub(super) struct CachedChanges {
    /// Number of the last flush that has begun.
    begun: AtomicU64,
    /// Number of the last flush that has succeeded.
    flushed: AtomicU64,
    /// Number of the first flush that covers all acknowledged changes.
    needed: AtomicU64,
    pub durability: Durability,
}

impl CachedChanges {
    /// Records an acknowledged change. Writes shared memory only for the first change after the begin of a flush.
    pub fn acknowledge(&self) {
        let needed = self.begun.load(Ordering::SeqCst) + 1;
        if self.needed.load(Ordering::SeqCst) < needed {
            self.needed.fetch_max(needed, Ordering::SeqCst);
        }
    }

    /// Returns the number of a flush that begins.
    pub fn begin_flush(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Records the success of a flush.
    pub fn end_flush(&self, number: u64) {
        self.flushed.fetch_max(number, Ordering::SeqCst);
    }

    /// Releases a lock without I/O in flight. librbd writes its cache before it releases a lock, as a flush does.
    pub fn release_with<E>(&self, release: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let number = self.begin_flush();
        release()?;
        self.end_flush(number);
        Ok(())
    }

    /// Returns true if no flush has covered some of the changes.
    pub fn has_unflushed(&self) -> bool {
        self.needed.load(Ordering::SeqCst) > self.flushed.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flush_covers_changes_acknowledged_before_it_began() {
        let changes = CachedChanges::default();
        assert!(!changes.has_unflushed());
        changes.acknowledge();
        assert!(changes.has_unflushed());
        let first = changes.begin_flush();
        changes.acknowledge();
        changes.end_flush(first);
        assert!(changes.has_unflushed(), "the second change");
        let (second, third) = (changes.begin_flush(), changes.begin_flush());
        changes.end_flush(third);
        assert!(!changes.has_unflushed());
        changes.end_flush(second);
        assert!(!changes.has_unflushed(), "an earlier flush that ends later");
        changes.acknowledge();
        assert!(changes.has_unflushed());
    }

    /// The guest of a live migration does not flush at its end in the source. A later loss of the unused image loses nothing.
    #[test]
    fn release_of_the_lock_covers_all_changes() {
        let changes = CachedChanges::default();
        changes.acknowledge();
        assert_eq!(changes.release_with(|| Err(libc::EIO)), Err(libc::EIO));
        assert!(changes.has_unflushed());
        assert_eq!(changes.release_with(|| Ok::<(), i32>(())), Ok(()));
        assert!(!changes.has_unflushed());
        changes.acknowledge();
        assert!(changes.has_unflushed(), "in the next turn");
    }
}
