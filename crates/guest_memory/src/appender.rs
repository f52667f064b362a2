//! Fills a buffer with ranges of client memory: what popping a descriptor chain does for each descriptor.
//!
//! Two ways. [`Appender`] takes every range that is in the memory. [`Filler`] takes those in a region that was looked up
//! lately, while the buffer has room, which is nearly all of them: for it a range costs a comparison and a store, and
//! what it refuses is begun anew with an appender. Tests: in `table`, one against the other.

use std::marker::PhantomData;

use zerocopy::FromBytes;

use crate::buffer::{IoBuffer, Segment};
use crate::table::Hits;
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

    /// Segments that were appended.
    pub fn count(&self) -> usize {
        self.buffer.segment_count()
    }

    /// What was appended so far is the buffer's first half.
    pub fn begin_second_half(&mut self) {
        self.buffer.begin_second_half();
    }

    /// Opens the buffer's window to all that was appended.
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

/// Fills a buffer with ranges that need no search and no room to be made. It is small and stays in registers: nothing
/// that it calls takes its address. A buffer whose filler was not finished has to be filled anew before it is used.
pub struct Filler<'a> {
    buffer: &'a mut IoBuffer,
    hits: &'a Hits,
    /// Where segments go, the start of the buffer's space for them; how many are there, and how many may be.
    segments: *mut Segment,
    count: usize,
    most: usize,
}

impl<'a> Filler<'a> {
    #[inline(always)]
    pub(crate) fn new(view: &'a GuestView, buffer: &'a mut IoBuffer, most: usize) -> Filler<'a> {
        buffer.refill(view);
        let space = buffer.segments_mut();
        Filler {
            hits: view.hits(),
            segments: space.as_mut_ptr(),
            count: 0,
            most: space.capacity().min(most),
            buffer,
        }
    }

    /// Appends the range at a guest-physical address; false: it cannot, and the buffer has to be filled otherwise.
    #[inline(always)]
    #[must_use]
    pub fn append(&mut self, address: u64, length: u32) -> bool {
        let Some(host) = self.hits.find(address, u64::from(length)) else {
            return false;
        };
        if self.count == self.most {
            return false;
        }
        // SAFETY: there is room: `most` is at most the vector's capacity, and nobody else touches its space while `buffer` is
        // borrowed here. Nothing that may lie there wants to be dropped.
        unsafe {
            let next = self.segments.add(self.count);
            next.write(Segment::new(host, length as usize));
        }
        self.count += 1;
        true
    }

    /// How many were appended.
    #[inline(always)]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Makes what was appended, `total` bytes, the buffer's, and its window; gives the number of segments, of which the first
    /// `middle` are the first half.
    #[inline(always)]
    pub fn finish(self, total: usize, middle: usize) -> usize {
        // SAFETY: so many were written from the vector's start on, and no more than its capacity.
        unsafe { self.buffer.segments_mut().set_len(self.count) }
        self.buffer.filled(total, middle);
        self.count
    }

    /// To fill the buffer with what the entries of a table of so many bytes name, if they are whole ones and all of them lie in a
    /// region that was looked up lately, and nothing was appended before.
    #[inline(always)]
    pub fn table<T: FromBytes + Copy>(
        mut self,
        address: u64,
        bytes: u32,
    ) -> Option<TableFiller<'a, T>> {
        let entries = self.hits.find(address, u64::from(bytes))?;
        let bytes = bytes as usize;
        if self.count > 0 || !bytes.is_multiple_of(size_of::<T>()) {
            return None;
        }
        let length = bytes / size_of::<T>();
        self.most = self.most.min(length);
        Some(TableFiller {
            filler: self,
            entries,
            length,
            of: PhantomData,
        })
    }
}

/// Fills a buffer with one range for each entry of a table in client memory, in the table's order. Entries are read where
/// the count of ranges says: where a client says that the next one is, no read waits for.
pub struct TableFiller<'a, T> {
    /// Takes no more than there are entries.
    filler: Filler<'a>,
    /// The entries, wholly in one region, which the view keeps mapped.
    entries: *const u8,
    length: usize,
    of: PhantomData<T>,
}

impl<T: FromBytes + Copy> TableFiller<'_, T> {
    /// The entry of the next range, copied: the client may change it meanwhile. `None`: there is none, or no room for its range.
    #[inline(always)]
    pub fn entry(&self) -> Option<T> {
        let index = self.filler.count;
        if index == self.filler.most {
            return None;
        }
        let offset = index * size_of::<T>();
        // SAFETY: the count, 0 at first, never passes `most`, which is at most the table's length: so this is an entry, in a region
        // that the view keeps mapped.
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

    /// Has every entry got its range?
    #[inline(always)]
    pub fn is_whole(&self) -> bool {
        self.filler.count == self.length
    }

    /// As [`Filler::finish`].
    #[inline(always)]
    pub fn finish(self, total: usize, middle: usize) -> usize {
        self.filler.finish(total, middle)
    }
}
