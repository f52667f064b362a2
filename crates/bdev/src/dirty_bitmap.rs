//! Dirty bitmaps: the parts of a disk written since a point in time, for incremental backups.
//!
//! A bit covers 64 KiB and is set before a change is submitted. The bits are in a mapped file and survive a killed daemon; surviving a host
//! crash is up to the file's owner. Requests are recorded only while the disk has a bitmap ([`Condition::Recorded`]). A bitmap reports too
//! much, never too little: everything beyond its end counts as written.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use block::IoRequest;
use guest_memory::{Mapping, SharedBits};

use crate::conditions::{Condition, Conditions};

/// One bitmap.
pub struct DirtyBitmap {
    bits: SharedBits,
}

impl DirtyBitmap {
    /// Bytes of the disk per bit.
    pub const GRANULARITY: u64 = 64 << 10;

    /// Returns the bytes of the file for a disk of this size.
    pub fn file_bytes(disk_bytes: u64) -> u64 {
        SharedBits::bytes(disk_bytes.div_ceil(DirtyBitmap::GRANULARITY)).max(8)
    }

    /// Maps the bits in a file, made for a disk of this size.
    ///
    /// # Errors
    /// The file is too short, or mmap fails.
    pub fn map(file: &File, disk_bytes: u64) -> io::Result<DirtyBitmap> {
        let bits = disk_bytes.div_ceil(DirtyBitmap::GRANULARITY);
        let length = usize::try_from(DirtyBitmap::file_bytes(disk_bytes))
            .map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        let mapping = Mapping::shared_file(file.as_fd(), 0, length)?;
        Ok(DirtyBitmap {
            bits: SharedBits::new(mapping, bits),
        })
    }

    /// Marks bytes that are about to change.
    #[inline]
    pub fn mark(&self, offset: u64, length: u64) {
        let end = offset.saturating_add(length);
        self.bits.set(
            offset / DirtyBitmap::GRANULARITY,
            end.div_ceil(DirtyBitmap::GRANULARITY),
        );
    }

    /// Returns the end of the uniform piece at `offset`, at most `end`, and whether it is dirty.
    pub fn piece(&self, offset: u64, end: u64) -> (u64, bool) {
        let bit = offset / DirtyBitmap::GRANULARITY;
        let is_dirty = self.bits.is_set(bit);
        let next = match is_dirty {
            true if bit >= self.bits.len() => u64::MAX,
            true => self.bits.next_clear(bit),
            false => self.bits.next_set(bit),
        };
        // A dirty piece may continue beyond the end of the bits; the next call returns the rest.
        (
            next.saturating_mul(DirtyBitmap::GRANULARITY).min(end),
            is_dirty,
        )
    }

    /// Returns the dirty bytes of a disk of this size.
    pub fn dirty_bytes(&self, disk_bytes: u64) -> u64 {
        let covered = self.bits.len().saturating_mul(DirtyBitmap::GRANULARITY);
        let beyond = disk_bytes.saturating_sub(covered);
        let dirty = self.bits.count().saturating_mul(DirtyBitmap::GRANULARITY);
        dirty.saturating_add(beyond).min(disk_bytes)
    }

    /// Returns true if the file was truncated, which makes the bitmap useless.
    pub fn is_broken(&self) -> bool {
        self.bits.is_poisoned()
    }
}

impl std::fmt::Debug for DirtyBitmap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirtyBitmap")
            .field("bits", &self.bits.len())
            .finish_non_exhaustive()
    }
}

/// The bits of a bitmap at one moment, for a disk of fixed size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrozenBitmap {
    words: Box<[u64]>,
    disk_bytes: u64,
}

impl FrozenBitmap {
    /// Copies the present bits. The caller holds the disk.
    ///
    /// # Errors
    /// The file of the bitmap was truncated.
    pub fn copy(bitmap: &DirtyBitmap, disk_bytes: u64) -> io::Result<FrozenBitmap> {
        let bits = disk_bytes.div_ceil(DirtyBitmap::GRANULARITY);
        let mut words = vec![0; bits.div_ceil(64) as usize];
        let mut at = 0;
        while at < disk_bytes {
            let (end, is_dirty) = bitmap.piece(at, disk_bytes);
            if is_dirty {
                let first = at / DirtyBitmap::GRANULARITY;
                for bit in first..end.div_ceil(DirtyBitmap::GRANULARITY) {
                    words[(bit / 64) as usize] |= 1 << (bit % 64);
                }
            }
            at = end;
        }
        // Reads of a truncated file return zeroes.
        if bitmap.is_broken() {
            return Err(io::Error::other("its bitmap file was truncated"));
        }
        Ok(FrozenBitmap {
            words: words.into(),
            disk_bytes,
        })
    }

    /// Returns the end of the uniform piece at `offset`, at most `end`, and whether it is dirty. Bytes beyond the disk are dirty.
    pub fn piece(&self, offset: u64, end: u64) -> (u64, bool) {
        if offset >= self.disk_bytes {
            return (end, true);
        }
        let first = offset / DirtyBitmap::GRANULARITY;
        let word = |at: usize| self.words.get(at).copied().unwrap_or(u64::MAX);
        let mut at = usize::try_from(first / 64).unwrap_or(usize::MAX);
        let is_dirty = word(at) >> (first % 64) & 1 != 0;
        let uniform = if is_dirty { u64::MAX } else { 0 };
        // Bits that differ from the first one.
        let mut others = (word(at) ^ uniform) & u64::MAX << (first % 64);
        let last = end.div_ceil(DirtyBitmap::GRANULARITY) / 64;
        while others == 0 && at < self.words.len() && (at as u64) < last {
            at += 1;
            others = word(at) ^ uniform;
        }
        let next = match others {
            0 => u64::MAX,
            _ => (at as u64 * 64 + u64::from(others.trailing_zeros()))
                .saturating_mul(DirtyBitmap::GRANULARITY),
        };
        let next = match is_dirty {
            true => next,
            false => next.min(self.disk_bytes),
        };
        (next.min(end), is_dirty)
    }
}

/// The bitmaps that record the changes of a disk.
#[derive(Debug)]
pub struct Recorder {
    conditions: Arc<Conditions>,
    /// Incremented when the bitmaps are replaced.
    generation: AtomicU64,
    bitmaps: Mutex<Vec<Arc<DirtyBitmap>>>,
}

impl Recorder {
    pub(crate) fn new(conditions: Arc<Conditions>) -> Recorder {
        Recorder {
            conditions,
            generation: AtomicU64::new(0),
            bitmaps: Mutex::default(),
        }
    }

    /// Records in these bitmaps from now on. Changes in flight may be in none: the caller holds the disk ([`crate::Disk::hold`]), or it is
    /// unused.
    pub fn record_in(&self, bitmaps: Vec<Arc<DirtyBitmap>>) {
        let mut now = self.bitmaps.lock().unwrap_or_else(PoisonError::into_inner);
        self.conditions
            .set(Condition::Recorded, !bitmaps.is_empty());
        *now = bitmaps;
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Returns the present bitmaps.
    pub fn bitmaps(&self) -> Vec<Arc<DirtyBitmap>> {
        let now = self.bitmaps.lock().unwrap_or_else(PoisonError::into_inner);
        now.clone()
    }

    /// Marks bytes that a change of the disk's size affects.
    pub(crate) fn mark(&self, offset: u64, length: u64) {
        self.bitmaps()
            .iter()
            .for_each(|bitmap| bitmap.mark(offset, length));
    }
}

/// A worker's view of a disk's bitmaps, which locks only after a replacement.
#[derive(Debug)]
pub struct RecorderView {
    recorder: Arc<Recorder>,
    generation: u64,
    bitmaps: Vec<Arc<DirtyBitmap>>,
}

impl RecorderView {
    /// Creates a view of this recorder.
    pub fn new(recorder: &Arc<Recorder>) -> RecorderView {
        RecorderView {
            recorder: Arc::clone(recorder),
            // Differs from every generation.
            generation: u64::MAX,
            bitmaps: Vec::new(),
        }
    }

    /// Records a request that is about to be submitted.
    #[inline]
    pub fn record(&mut self, request: &IoRequest) {
        if !request.modifies() {
            return;
        }
        let generation = self.recorder.generation.load(Ordering::Acquire);
        if generation != self.generation {
            self.follow(generation);
        }
        for bitmap in &self.bitmaps {
            bitmap.mark(request.offset, request.length);
        }
    }

    #[cold]
    fn follow(&mut self, generation: u64) {
        self.bitmaps = self.recorder.bitmaps();
        self.generation = generation;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = DirtyBitmap::GRANULARITY;

    fn bitmap(disk_bytes: u64) -> (File, Arc<DirtyBitmap>) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(DirtyBitmap::file_bytes(disk_bytes)).unwrap();
        let bitmap = DirtyBitmap::map(&file, disk_bytes).unwrap();
        (file, Arc::new(bitmap))
    }

    fn pieces(bitmap: &DirtyBitmap, end: u64) -> Vec<(u64, bool)> {
        let mut at = 0;
        let mut pieces = Vec::new();
        while at < end {
            let (next, is_dirty) = bitmap.piece(at, end);
            assert!(next > at);
            pieces.push((next, is_dirty));
            at = next;
        }
        pieces
    }

    #[test]
    fn touched_range_is_dirty_and_persists_in_the_file() {
        let size = 10 * CHUNK;
        let (file, bitmap) = bitmap(size);
        bitmap.mark(CHUNK - 1, 2);
        bitmap.mark(5 * CHUNK, 1);
        let wanted = [
            (2 * CHUNK, true),
            (5 * CHUNK, false),
            (6 * CHUNK, true),
            (size, false),
        ];
        assert_eq!(pieces(&bitmap, size), wanted);
        assert_eq!(bitmap.dirty_bytes(size), 3 * CHUNK);
        let again = DirtyBitmap::map(&file, size).unwrap();
        assert_eq!(pieces(&again, size), wanted);
    }

    #[test]
    fn range_added_by_growth_is_dirty() {
        let (_file, bitmap) = bitmap(2 * CHUNK + 512);
        // The last bit of the old size covers more bytes than the old disk had.
        bitmap.mark(3 * CHUNK, CHUNK);
        let wanted = [(3 * CHUNK, false), (9 * CHUNK, true)];
        assert_eq!(pieces(&bitmap, 9 * CHUNK), wanted);
        assert_eq!(bitmap.dirty_bytes(9 * CHUNK), 6 * CHUNK);
    }

    #[test]
    fn growth_marks_the_rest_of_the_last_chunk() {
        let size = 2 * CHUNK + 512;
        let device = crate::Null::create(crate::NullOptions {
            size,
            ..crate::NullOptions::default()
        });
        let disk = crate::Disk::new("d", None, Arc::new(device.unwrap())).unwrap();
        let (_file, bitmap) = bitmap(size);
        disk.recorder().record_in(vec![Arc::clone(&bitmap)]);
        disk.resize(3 * CHUNK).unwrap();
        let wanted = [(2 * CHUNK, false), (3 * CHUNK, true)];
        assert_eq!(pieces(&bitmap, 3 * CHUNK), wanted);
    }

    #[test]
    fn frozen_bits_are_those_of_one_moment() {
        let size = 200 * CHUNK + 512;
        let (_file, bitmap) = bitmap(size);
        for (from, chunks) in [(1, 2), (63, 2), (128, 64), (200, 1)] {
            bitmap.mark(from * CHUNK, chunks * CHUNK);
        }
        let wanted = pieces(&bitmap, size);
        let frozen = FrozenBitmap::copy(&bitmap, size).unwrap();
        bitmap.mark(10 * CHUNK, 1);
        let (mut at, mut found) = (0, Vec::new());
        while at < size {
            let (next, is_dirty) = frozen.piece(at, size);
            assert!(next > at);
            at = next;
            found.push((next, is_dirty));
        }
        assert_eq!(found, wanted);
        assert_eq!(frozen.piece(10 * CHUNK, size), (63 * CHUNK, false));
        assert_eq!(frozen.piece(5 * CHUNK + 1, 6 * CHUNK), (6 * CHUNK, false));
        // Bytes beyond the disk.
        assert_eq!(frozen.piece(201 * CHUNK, 900 * CHUNK), (900 * CHUNK, true));
        // A disk that has grown since its bitmap.
        let grown = FrozenBitmap::copy(&bitmap, 900 * CHUNK).unwrap();
        assert_eq!(grown.piece(300 * CHUNK, 900 * CHUNK), (900 * CHUNK, true));
    }

    #[test]
    fn a_file_that_is_too_short_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8).unwrap();
        assert!(DirtyBitmap::map(&file, 64 * CHUNK).is_ok());
        assert!(DirtyBitmap::map(&file, 65 * CHUNK).is_err());
    }

    #[test]
    fn changes_are_recorded_in_the_current_bitmaps() {
        let conditions = Arc::<Conditions>::default();
        let recorder = Arc::new(Recorder::new(Arc::clone(&conditions)));
        let mut view = RecorderView::new(&recorder);
        let (_a_file, a) = bitmap(4 * CHUNK);
        let (_b_file, b) = bitmap(4 * CHUNK);
        view.record(&IoRequest::write(0, 512));
        recorder.record_in(vec![Arc::clone(&a)]);
        assert!(conditions.has(Condition::Recorded));
        view.record(&IoRequest::read(0, 512));
        assert_eq!(a.dirty_bytes(4 * CHUNK), 0);
        view.record(&IoRequest::discard(CHUNK, 512));
        recorder.record_in(vec![Arc::clone(&a), Arc::clone(&b)]);
        view.record(&IoRequest::write_zeroes(2 * CHUNK, 512));
        recorder.mark(3 * CHUNK, u64::MAX);
        recorder.record_in(Vec::new());
        assert!(conditions.is_clear());
        assert_eq!(a.dirty_bytes(4 * CHUNK), 3 * CHUNK);
        assert_eq!(b.dirty_bytes(4 * CHUNK), 2 * CHUNK);
    }
}
