//! Fills a buffer with ranges of client memory, one per descriptor of a chain.
//!
//! [`Appender`] accepts any range of the memory. [`Filler`] accepts ranges in a recently used region, while the buffer has
//! capacity: nearly all ranges, at the cost of a comparison and a store. If it refuses a range, the caller starts over with an
//! appender. Tests: in `table`, which compares the two.

use std::marker::PhantomData;

use zerocopy::FromBytes;

use crate::buffer::{IoBuffer, Segment};
use crate::table::RecentRegions;
use crate::{GuestView, MemoryError, volatile};

/// Appends ranges of client memory to a buffer that pins it.
pub struct Appender<'a> {
    view: &'a GuestView,
    buffer: &'a mut IoBuffer,
}

impl<'a> Appender<'a> {
    pub(crate) fn new(view: &'a GuestView, buffer: &'a mut IoBuffer) -> Appender<'a> {
        buffer.start(view);
        Appender { view, buffer }
    }

    /// Appends the range at a guest-physical address.
    ///
    /// # Errors
    /// [`MemoryError::NotMapped`]; the buffer may then hold a part of the range.
    pub fn append(&mut self, address: u64, length: u32) -> Result<(), MemoryError> {
        let buffer = &mut *self.buffer;
        let append = |segment| buffer.extend(segment);
        self.view.segments(address, u64::from(length), append)
    }

    /// Number of segments appended.
    pub fn count(&self) -> usize {
        self.buffer.segment_count()
    }

    /// Marks the end of the buffer's first half.
    pub fn begin_second_half(&mut self) {
        self.buffer.begin_second_half();
    }

    /// Opens the buffer's window to all appended bytes.
    pub fn finish(self) {
        self.buffer.open();
    }

    /// As [`GuestView::read`].
    ///
    /// # Errors
    /// [`MemoryError::NotMapped`].
    pub fn read<T: FromBytes>(&mut self, address: u64) -> Result<T, MemoryError> {
        self.view.read(address)
    }
}

/// Fast path of [`Appender`]: fills a buffer without a region search or an allocation. No callee takes its address, which keeps it
/// in registers. If [`Filler::finish`] was not called, the buffer must be filled again before use.
pub struct Filler<'a> {
    buffer: &'a mut IoBuffer,
    recent_regions: &'a RecentRegions,
    /// Start of the buffer's segment storage, segments written, and their maximum.
    segments: *mut Segment,
    count: usize,
    limit: usize,
}

impl<'a> Filler<'a> {
    #[inline(always)]
    pub(crate) fn new(view: &'a GuestView, buffer: &'a mut IoBuffer, limit: usize) -> Filler<'a> {
        buffer.refill(view);
        let space = buffer.segments_mut();
        Filler {
            recent_regions: view.recent_regions(),
            segments: space.as_mut_ptr(),
            count: 0,
            limit: space.capacity().min(limit),
            buffer,
        }
    }

    /// Appends the range at a guest-physical address. Returns false if the range is not in a recently used region or the buffer is
    /// full; the buffer must then be filled by an appender.
    #[inline(always)]
    #[must_use]
    pub fn append(&mut self, address: u64, length: u32) -> bool {
        let Some(host) = self.recent_regions.find(address, u64::from(length)) else {
            return false;
        };
        if self.count == self.limit {
            return false;
        }
        // SAFETY: `count < limit`, and `limit` is at most the vector's capacity. `buffer` is borrowed, so no other code accesses its
        // storage. `Segment` has no destructor.
        unsafe {
            let next = self.segments.add(self.count);
            next.write(Segment::new(host, length as usize));
        }
        self.count += 1;
        true
    }

    /// Number of segments appended.
    #[inline(always)]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Completes the buffer with `total` bytes, the first `middle` segments as its first half, and a window over all bytes. Returns
    /// the number of segments.
    #[inline(always)]
    pub fn finish(self, total: usize, middle: usize) -> usize {
        // SAFETY: `count` segments were written from the vector's start, and `count` is at most its capacity.
        unsafe { self.buffer.segments_mut().set_len(self.count) }
        self.buffer.filled(total, middle);
        self.count
    }

    /// Converts the filler to one that reads its ranges from a table of `bytes` bytes in client memory. Returns `None` if ranges
    /// were appended before, the size is not a multiple of the entry size, or the table is not in a recently used region.
    #[inline(always)]
    pub fn table<T: FromBytes + Copy>(
        mut self,
        address: u64,
        bytes: u32,
    ) -> Option<TableFiller<'a, T>> {
        let entries = self.recent_regions.find(address, u64::from(bytes))?;
        let bytes = bytes as usize;
        if self.count > 0 || !bytes.is_multiple_of(size_of::<T>()) {
            return None;
        }
        let length = bytes / size_of::<T>();
        self.limit = self.limit.min(length);
        Some(TableFiller {
            filler: self,
            entries,
            length,
            entry_type: PhantomData,
        })
    }
}

/// Fills a buffer with one range for each entry of a table in client memory, in table order. The address of an entry follows from
/// the number of ranges, so the load does not depend on a value that the client wrote.
pub struct TableFiller<'a, T> {
    /// Limited to the number of entries.
    filler: Filler<'a>,
    /// First entry. All entries are in one region, which the view keeps mapped.
    entries: *const u8,
    length: usize,
    entry_type: PhantomData<T>,
}

impl<T: FromBytes + Copy> TableFiller<'_, T> {
    /// Returns a copy of the next range's entry; the client may change the original. `None` after the last entry, or if the buffer
    /// is full.
    #[inline(always)]
    pub fn entry(&self) -> Option<T> {
        let index = self.filler.count;
        if index == self.filler.limit {
            return None;
        }
        let offset = index * size_of::<T>();
        // SAFETY: `count` never exceeds `limit`, which is at most the table's length. The entry is therefore in a region that the
        // view keeps mapped.
        Some(unsafe { volatile::load(self.entries.add(offset).cast::<T>()) })
    }

    /// As [`Filler::append`].
    #[inline(always)]
    #[must_use]
    pub fn append(&mut self, address: u64, length: u32) -> bool {
        self.filler.append(address, length)
    }

    /// As [`Filler::count`].
    #[inline(always)]
    pub fn count(&self) -> usize {
        self.filler.count()
    }

    /// Returns true if every entry has its range.
    #[inline(always)]
    pub fn is_complete(&self) -> bool {
        self.filler.count == self.length
    }

    /// As [`Filler::finish`].
    #[inline(always)]
    pub fn finish(self, total: usize, middle: usize) -> usize {
        self.filler.finish(total, middle)
    }
}
