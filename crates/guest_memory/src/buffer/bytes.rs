//! Copies bytes to and from buffers. Ranges are asserted, because they never come from a peer.

use std::rc::Rc;

use super::{IoBuffer, Pin};
use crate::{Mapping, copy};

impl IoBuffer {
    /// Copies from byte `offset` of the whole buffer, including outside of the window.
    ///
    /// # Panics
    /// When the range lies outside of the buffer.
    #[inline]
    pub fn read_whole(&self, offset: usize, into: &mut [u8]) {
        let all = 0..self.segments.len();
        let length = into.len();
        self.walk(all, offset, length, |segment, done| {
            // SAFETY: the segment is memory kept by `self.keep`; `into` is exclusively borrowed and long enough.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    segment.base,
                    into.as_mut_ptr().add(done),
                    segment.length,
                )
            }
        });
    }

    /// Copies to byte `offset` of the whole buffer, including outside of the window.
    ///
    /// # Panics
    /// When the range lies outside of the buffer.
    #[inline]
    pub fn write_whole(&self, offset: usize, from: &[u8]) {
        self.walk(
            0..self.segments.len(),
            offset,
            from.len(),
            |segment, done| {
                // SAFETY: as in `read_whole`, in the other direction.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        from.as_ptr().add(done),
                        segment.base,
                        segment.length,
                    )
                }
            },
        );
    }

    /// Copies from byte `offset` of the window.
    ///
    /// # Panics
    /// When the range lies outside of the window.
    #[inline]
    pub fn read_at(&self, offset: usize, into: &mut [u8]) {
        let length = into.len();
        self.walk(self.range(), offset, length, |segment, done| {
            // SAFETY: as in `read_whole`.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    segment.base,
                    into.as_mut_ptr().add(done),
                    segment.length,
                )
            }
        });
    }

    /// Copies to byte `offset` of the window.
    ///
    /// # Panics
    /// When the range lies outside of the window.
    #[inline]
    pub fn write_at(&self, offset: usize, from: &[u8]) {
        self.walk(self.range(), offset, from.len(), |segment, done| {
            // SAFETY: as in `read_whole`, in the other direction.
            unsafe {
                std::ptr::copy_nonoverlapping(from.as_ptr().add(done), segment.base, segment.length)
            }
        });
    }

    /// Returns the bytes of a buffer made by [`IoBuffer::owned`]. `None` if a slice, a clone or an I/O shares its memory.
    pub fn owned_bytes(&mut self) -> Option<&mut [u8]> {
        let Pin::Owned(memory) = &mut self.pin else {
            return None;
        };
        Rc::get_mut(memory)?;
        let [segment] = &self.segments[self.first as usize..self.end as usize] else {
            return None;
        };
        // SAFETY: the segment lies in the memory, which is initialised. No other buffer shares the memory, and this buffer is
        // exclusively borrowed.
        Some(unsafe { std::slice::from_raw_parts_mut(segment.base, segment.length) })
    }

    /// Sets a range of the window to one byte.
    ///
    /// # Panics
    /// When the range lies outside of the window.
    pub fn fill(&self, offset: usize, length: usize, byte: u8) {
        self.walk(self.range(), offset, length, |segment, _| {
            // SAFETY: the segment is memory kept by `self.keep`.
            unsafe { std::ptr::write_bytes(segment.base, byte, segment.length) }
        });
    }

    /// Copies the window to another buffer's window, up to the shorter length. Returns the number of bytes copied.
    pub fn copy_to(&self, other: &IoBuffer) -> usize {
        let length = self.window.min(other.window);
        self.walk(self.range(), 0, length, |from, before| {
            other.walk(other.range(), before, from.length, |into, done| {
                // SAFETY: both segments are memory kept by their buffers. The client may have pointed them at the same place;
                // `copy` allows overlap.
                unsafe { std::ptr::copy(from.base.add(done), into.base, into.length) }
            });
        });
        length
    }

    /// Copies `length` bytes from byte `from` of the whole buffer to byte `into` of another whole buffer.
    ///
    /// # Panics
    /// When a range lies outside of its buffer.
    pub fn copy_part(&self, from: usize, other: &IoBuffer, into: usize, length: usize) {
        let (all, others) = (self.segments.len(), other.segments.len());
        self.walk(0..all, from, length, |from, before| {
            other.walk(0..others, into + before, from.length, |to, done| {
                // SAFETY: as in `copy_to`.
                unsafe { std::ptr::copy(from.base.add(done), to.base, to.length) }
            });
        });
    }

    /// Fills the window from a mapping (read of a RAM disk).
    ///
    /// # Panics
    /// When the range lies outside of the mapping, or this buffer refers to a mapping itself.
    #[inline]
    pub fn fill_from(&self, mapping: &Mapping, offset: usize) {
        assert!(!self.may_be_in(mapping), "a disk is read into itself");
        let from = mapping.checked(offset, self.window);
        self.walk(self.range(), 0, self.window, |segment, done| {
            // SAFETY: both ranges are mapped and kept. They belong to different mappings: buffers that refer to the RAM disk's
            // memory were refused above.
            unsafe { copy::to_client(from.add(done), segment.base, segment.length) }
        });
    }

    /// Copies the window to a mapping (write of a RAM disk).
    ///
    /// # Panics
    /// When the range lies outside of the mapping, or this buffer refers to a mapping itself.
    #[inline]
    pub fn drain_to(&self, mapping: &Mapping, offset: usize) {
        assert!(!self.may_be_in(mapping), "a disk is written from itself");
        let into = mapping.checked(offset, self.window);
        self.walk(self.range(), 0, self.window, |segment, done| {
            // SAFETY: as in `fill_from`, in the other direction.
            unsafe { copy::from_client(segment.base, into.add(done), segment.length) }
        });
    }

    /// Returns true if the buffer may be a range of this mapping.
    #[inline]
    fn may_be_in(&self, mapping: &Mapping) -> bool {
        match &self.pin {
            Pin::View(_) => true,
            Pin::Mapping(held) => std::ptr::eq(&raw const **held, mapping),
            Pin::Unpinned | Pin::Guest(_) | Pin::Owned(_) => false,
        }
    }

    #[inline]
    pub(super) fn is_view(&self) -> bool {
        matches!(self.pin, Pin::View(_))
    }
}
