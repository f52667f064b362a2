//! Fills a buffer with ranges of client memory: what popping a descriptor chain does for each descriptor.
//!
//! Two ways. [`Appender`] takes every range that is in the memory. [`Filler`] takes those in a region that was looked up
//! lately, while the buffer has room, which is nearly all of them: for it a range costs a comparison and a store, and
//! what it refuses is begun anew with an appender. Tests: in `table`, one against the other.

use std::marker::PhantomData;
use std::ptr::NonNull;

use zerocopy::FromBytes;

use crate::buffer::{IoBuffer, Segment};
use crate::table::Hits;
use crate::{GuestView, MemoryError};

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
    /// Where segments go, in the spare space of the buffer's; how many are there, and how many may be.
    segments: *mut Segment,
    count: usize,
    most: usize,
}

impl<'a> Filler<'a> {
    #[inline(always)]
    pub(crate) fn new(view: &'a GuestView, buffer: &'a mut IoBuffer, most: usize) -> Filler<'a> {
        buffer.refill(view);
        let spare = buffer.segments_mut().spare_capacity_mut();
        Filler {
            hits: view.hits(),
            segments: spare.as_mut_ptr().cast(),
            count: 0,
            most: spare.len().min(most),
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
        // SAFETY: there is room, in the spare space of the vector, which nobody else touches while `buffer` is
        // borrowed here.
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
        // SAFETY: so many were written from the vector's start on: it has been empty since `new`, so that its spare
        // space started there.
        unsafe { self.buffer.segments_mut().set_len(self.count) }
        self.buffer.filled(total, middle);
        self.count
    }

    /// `count` entries of one type, if all of them lie in a region that was looked up lately.
    #[inline(always)]
    pub fn table<T: FromBytes>(&self, address: u64, count: u32) -> Option<GuestTable<'a, T>> {
        let bytes = u64::from(count) * size_of::<T>() as u64;
        let host = self.hits.find(address, bytes)?;
        Some(GuestTable {
            first: NonNull::new(host)?,
            count,
            view: PhantomData,
        })
    }
}

/// Entries in client memory, wholly in one region; kept mapped by the view.
pub struct GuestTable<'a, T> {
    first: NonNull<u8>,
    count: u32,
    view: PhantomData<(&'a GuestView, T)>,
}

impl<T: FromBytes + Copy> GuestTable<'_, T> {
    /// One entry, copied: the client may change it meanwhile. `None`: there are not so many.
    #[inline(always)]
    pub fn read(&self, index: u32) -> Option<T> {
        if index >= self.count {
            return None;
        }
        let offset = index as usize * size_of::<T>();
        // SAFETY: below the count, so in a region, which the view keeps mapped; FromBytes makes any bytes a value.
        Some(unsafe { self.first.as_ptr().add(offset).cast::<T>().read_unaligned() })
    }
}
