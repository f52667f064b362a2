//! A checked range of client memory for ring structures: resolved once, then accessed field by field.
//!
//! Fields that publish other data (indices, flags, events) are loaded and stored atomically. The published data (descriptors, ring
//! elements, entries of in-flight regions) are copied by volatile loads into types for which every bit pattern is valid. A
//! concurrent write by the client can only tear the copy, which is checked after copying. Bounds are asserted: callers mask
//! indices from a peer first.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{Mapping, volatile};

/// A range of a mapping, kept mapped.
pub struct RingMemory {
    base: NonNull<u8>,
    length: usize,
    mapping: Arc<Mapping>,
}

// SAFETY: plain shared memory kept alive by the Arc; see `Mapping`.
unsafe impl Send for RingMemory {}

impl RingMemory {
    /// Creates a range of `mapping`.
    ///
    /// # Panics
    /// When the range lies outside of the mapping.
    pub fn new(mapping: Arc<Mapping>, offset: usize, length: usize) -> RingMemory {
        let base =
            NonNull::new(mapping.checked(offset, length)).expect("mappings do not start at null");
        RingMemory {
            base,
            length,
            mapping,
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns true if the range is empty.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns true if the client truncated the file of the mapping.
    pub fn is_poisoned(&self) -> bool {
        self.mapping.is_poisoned()
    }

    /// Returns true if the start is a multiple of `alignment` bytes.
    pub fn is_aligned(&self, alignment: usize) -> bool {
        self.base.as_ptr() as usize & (alignment - 1) == 0
    }

    #[inline(always)]
    fn at<T>(&self, offset: usize) -> *mut T {
        assert!(
            size_of::<T>() <= self.length && offset <= self.length - size_of::<T>(),
            "ring access outside of its range"
        );
        // SAFETY: inside of the range, which is inside of the mapping.
        unsafe { self.base.as_ptr().add(offset).cast() }
    }

    /// Reads a plain value. The client may change it, so read each value once.
    #[inline(always)]
    pub fn read<T: FromBytes + Copy>(&self, offset: usize) -> T {
        let at = self.at::<T>(offset);
        // SAFETY: `at` checked the range.
        unsafe { volatile::load(at) }
    }

    /// Writes a plain value.
    #[inline(always)]
    pub fn write<T: IntoBytes + Immutable + KnownLayout>(&self, offset: usize, value: T) {
        let at = self.at::<T>(offset);
        // SAFETY: `at` checked the range; IntoBytes means that no padding leaves uninitialised bytes.
        unsafe { at.write_unaligned(value) }
    }

    /// Writes zeroes to a range.
    pub fn clear(&self, offset: usize, length: usize) {
        let words = length / 8;
        (0..words).for_each(|word| self.write(offset + 8 * word, 0u64));
        (8 * words..length).for_each(|at| self.write(offset + at, 0u8));
    }

    /// Reads a little-endian `u16` and orders every later load after it.
    #[inline(always)]
    pub fn load_acquire_u16(&self, offset: usize) -> u16 {
        u16::from_le(self.atomic_u16(offset).load(Ordering::Acquire))
    }

    /// Reads a little-endian `u16` without ordering.
    #[inline(always)]
    pub fn load_relaxed_u16(&self, offset: usize) -> u16 {
        u16::from_le(self.atomic_u16(offset).load(Ordering::Relaxed))
    }

    /// Writes a little-endian `u16` after every earlier store.
    #[inline(always)]
    pub fn store_release_u16(&self, offset: usize, value: u16) {
        self.atomic_u16(offset)
            .store(value.to_le(), Ordering::Release);
    }

    /// Writes a little-endian `u16` after every earlier store and before every later [`load_ordered_u16`](Self::load_ordered_u16),
    /// for two sides that each write and then read the other's value. Uses one exchange, which costs less than a fence.
    #[inline(always)]
    pub fn store_ordered_u16(&self, offset: usize, value: u16) {
        self.atomic_u16(offset)
            .swap(value.to_le(), Ordering::SeqCst);
    }

    /// Reads a little-endian `u16` after every earlier [`store_ordered_u16`](Self::store_ordered_u16).
    #[inline(always)]
    pub fn load_ordered_u16(&self, offset: usize) -> u16 {
        u16::from_le(self.atomic_u16(offset).load(Ordering::SeqCst))
    }

    /// Reads a little-endian `u32` and orders every later load after it.
    #[inline(always)]
    pub fn load_acquire_u32(&self, offset: usize) -> u32 {
        let at = self.at::<u32>(offset);
        assert!(at.is_aligned(), "unaligned atomic in a ring");
        // SAFETY: in range and aligned; memory that another process writes is read atomically.
        u32::from_le(unsafe { AtomicU32::from_ptr(at) }.load(Ordering::Acquire))
    }

    /// Writes a little-endian `u64` atomically, after every earlier store.
    #[inline(always)]
    pub fn store_release_u64(&self, offset: usize, value: u64) {
        let at = self.at::<u64>(offset);
        assert!(at.is_aligned(), "unaligned atomic in a ring");
        // SAFETY: in range and aligned; the client sees either the whole value or none of it.
        unsafe { AtomicU64::from_ptr(at) }.store(value.to_le(), Ordering::Release);
    }

    #[inline(always)]
    fn atomic_u16(&self, offset: usize) -> &AtomicU16 {
        let at = self.at::<u16>(offset);
        assert!(at.is_aligned(), "unaligned atomic in a ring");
        // SAFETY: in range and aligned, and the mapping outlives `self`.
        unsafe { AtomicU16::from_ptr(at) }
    }

    /// Prefetches the cache line at `offset`. Does nothing outside of the range.
    #[inline(always)]
    pub fn prefetch(&self, offset: usize) {
        if offset < self.length {
            // SAFETY: inside of the range.
            crate::buffer::prefetch_line(unsafe { self.base.as_ptr().add(offset) });
        }
    }

    /// Same as [`prefetch`](Self::prefetch), for a line to be written.
    #[inline(always)]
    pub fn prefetch_to_write(&self, offset: usize) {
        if offset < self.length {
            // SAFETY: inside of the range.
            crate::buffer::prefetch_line_to_write(unsafe { self.base.as_ptr().add(offset) });
        }
    }

    /// Returns the `count` entries of one type that begin at `offset`.
    ///
    /// # Panics
    /// When they do not lie in the range, or `count` is not a power of two.
    pub fn entries<T>(&self, offset: usize, count: usize) -> RingEntries<T> {
        assert!(count.is_power_of_two(), "{count} entries in a ring");
        let bytes = count.checked_mul(size_of::<T>());
        assert!(
            bytes.is_some_and(|bytes| bytes <= self.length && offset <= self.length - bytes),
            "ring entries outside of their range"
        );
        RingEntries {
            // SAFETY: inside of the range.
            base: unsafe { self.base.add(offset) },
            mask: count - 1,
            mapping: self.mapping.clone(),
            entry_type: PhantomData,
        }
    }
}

/// A power of two of entries of one type. Indices are taken modulo their number, so every index is valid.
pub struct RingEntries<T> {
    base: NonNull<u8>,
    mask: usize,
    mapping: Arc<Mapping>,
    entry_type: PhantomData<T>,
}

// SAFETY: as `RingMemory`; no `T` is held.
unsafe impl<T> Send for RingEntries<T> {}

impl<T> RingEntries<T> {
    /// Returns true if the client truncated the file of the mapping.
    pub fn is_poisoned(&self) -> bool {
        self.mapping.is_poisoned()
    }

    #[inline(always)]
    fn at(&self, index: u16) -> *mut T {
        let offset = (usize::from(index) & self.mask) * size_of::<T>();
        // SAFETY: below the number of entries, all of which are inside of the mapping.
        unsafe { self.base.as_ptr().add(offset).cast() }
    }

    /// Reads an entry. The client may change it, so read each entry once.
    #[inline(always)]
    pub fn read(&self, index: u16) -> T
    where
        T: FromBytes + Copy,
    {
        // SAFETY: as in `RingMemory::read`.
        unsafe { volatile::load(self.at(index)) }
    }

    /// Writes an entry.
    #[inline(always)]
    pub fn write(&self, index: u16, value: T)
    where
        T: IntoBytes + Immutable + KnownLayout,
    {
        // SAFETY: as in `RingMemory::write`.
        unsafe { self.at(index).write_unaligned(value) }
    }

    /// Writes entries from `index` on, unless they already have these values, and returns true if it wrote. A cache line that is
    /// only read stays shared between both cores.
    ///
    /// # Panics
    /// When there are more values than entries.
    #[inline]
    pub fn update(&self, index: u16, values: &[T]) -> bool
    where
        T: IntoBytes + Immutable + KnownLayout,
    {
        let count = self.mask + 1;
        assert!(values.len() <= count, "{} entries of {count}", values.len());
        let (end, start) =
            values.split_at(values.len().min(count - (usize::from(index) & self.mask)));
        self.update_run(index, end) | self.update_run(0, start)
    }

    /// Same as [`update`](Self::update), for values that do not wrap around.
    #[inline(always)]
    fn update_run(&self, index: u16, values: &[T]) -> bool
    where
        T: IntoBytes + Immutable + KnownLayout,
    {
        let at = self.at(index);
        // SAFETY: as in `RingMemory::read`; `update` has split the values where the entries end.
        let differs = unsafe { volatile::differs(at.cast(), values.as_bytes()) };
        if differs {
            // SAFETY: as in `RingMemory::write`, for `values.len()` entries.
            unsafe { at.copy_from_nonoverlapping(values.as_ptr(), values.len()) }
        }
        differs
    }

    /// Prefetches the cache line of an entry.
    #[inline(always)]
    pub fn prefetch(&self, index: u16) {
        crate::buffer::prefetch_line(self.at(index).cast());
    }

    /// Prefetches the cache line of an entry for writing.
    #[inline(always)]
    pub fn prefetch_to_write(&self, index: u16) {
        crate::buffer::prefetch_line_to_write(self.at(index).cast());
    }
}

impl std::fmt::Debug for RingMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RingMemory")
            .field("base", &self.base)
            .field("length", &self.length)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_little_endian_and_shared() {
        let mapping = Mapping::anonymous(4096).unwrap();
        let a = RingMemory::new(mapping.clone(), 16, 64);
        let b = RingMemory::new(mapping.clone(), 0, 4096);
        a.store_release_u16(2, 0x1234);
        assert_eq!(b.load_acquire_u16(18), 0x1234);
        assert_eq!(b.read::<[u8; 2]>(18), [0x34, 0x12]);
    }

    #[test]
    fn entries_are_indexed_modulo_their_number() {
        let mapping = Mapping::anonymous(4096).unwrap();
        let ring = RingMemory::new(mapping, 16, 36);
        let entries = ring.entries::<[u8; 4]>(4, 8);
        entries.write(9, [1, 2, 3, 4]);
        assert_eq!(entries.read(1), [1, 2, 3, 4]);
        assert_eq!(entries.read(0xfff9), [1, 2, 3, 4]);
        assert_eq!(ring.read::<[u8; 4]>(8), [1, 2, 3, 4]);
        entries.write(7, [5; 4]);
        assert_eq!(ring.read::<[u8; 4]>(32), [5; 4]);
    }

    #[test]
    fn unchanged_entries_are_not_written() {
        let mapping = Mapping::anonymous(4096).unwrap();
        let entries = RingMemory::new(mapping, 16, 36).entries::<[u8; 4]>(4, 8);
        assert!(!entries.update(3, &[]));
        let values = [[1; 4], [2; 4], [3; 4]];
        assert!(entries.update(14, &values), "round the end");
        assert_eq!(
            [6, 7, 0, 1].map(|i| entries.read(i)),
            [[1; 4], [2; 4], [3; 4], [0; 4]]
        );
        assert!(!entries.update(6, &values));
        for i in 6..9 {
            entries.write(i, [9; 4]);
            assert!(entries.update(6, &values), "{i} is another one");
            assert_eq!(entries.read(i), values[usize::from(i) - 6]);
        }
    }

    #[test]
    #[should_panic(expected = "9 entries of 8")]
    fn more_entries_than_there_are_are_refused() {
        let mapping = Mapping::anonymous(4096).unwrap();
        RingMemory::new(mapping, 16, 36)
            .entries::<[u8; 4]>(4, 8)
            .update(0, &[[0; 4]; 9]);
    }

    #[test]
    #[should_panic(expected = "entries outside of their range")]
    fn entries_past_the_range_are_refused() {
        let mapping = Mapping::anonymous(4096).unwrap();
        RingMemory::new(mapping, 16, 36).entries::<[u8; 4]>(5, 8);
    }

    #[test]
    #[should_panic(expected = "outside of its range")]
    fn access_past_the_range_panics_even_inside_of_the_mapping() {
        let mapping = Mapping::anonymous(4096).unwrap();
        RingMemory::new(mapping, 0, 16).read::<u16>(15);
    }
}
