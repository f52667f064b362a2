//! Aligned memory for requests with unsuitable memory, and zeroes to write.
//!
//! Owned by one handle. Large requests pass through a buffer piece by piece. Buffers are allocated on first use, and a few are retained:
//! aligned clients never allocate one. They are handed out as slices, because a window would leave unaligned segment borders for the next
//! user.

use guest_memory::IoBuffer;

/// Size in bytes of the largest buffer, and of the zeroes per write.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// Smallest buffer in bytes: most unaligned requests are small.
const SMALLEST_BYTES: usize = 64 << 10;

/// Maximum number of free buffers retained for later requests.
const KEPT_MAX: usize = 8;

#[derive(Default)]
pub(crate) struct Bounce {
    /// Buffers in use and free; empty if released.
    buffers: Vec<IoBuffer>,
    free: Vec<u32>,
    zeroes: Option<IoBuffer>,
}

/// Number of a bounce buffer in use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BounceSlot(u32);

impl Bounce {
    /// Returns `length` bytes, at most [`PIECE_BYTES`], page-aligned, in one segment.
    pub(crate) fn take(&mut self, length: usize) -> (BounceSlot, IoBuffer) {
        let fits = |&index: &u32| self.buffers[index as usize].len() >= length;
        let index = match self.free.iter().rposition(fits) {
            Some(at) => self.free.swap_remove(at),
            None => self.grow(length),
        };
        let whole = &self.buffers[index as usize];
        (BounceSlot(index), whole.slice(0, length))
    }

    #[cold]
    fn grow(&mut self, length: usize) -> u32 {
        let buffer = IoBuffer::owned(length.max(SMALLEST_BYTES).next_power_of_two());
        // Replaces a free buffer that is released or too small.
        let index = self.free.pop().unwrap_or_else(|| {
            self.buffers.push(IoBuffer::default());
            self.buffers.len() as u32 - 1
        });
        self.buffers[index as usize] = buffer;
        index
    }

    pub(crate) fn give_back(&mut self, slot: BounceSlot) {
        let is_kept = |&&index: &&u32| !self.buffers[index as usize].is_empty();
        if self.free.iter().filter(is_kept).count() >= KEPT_MAX {
            self.buffers[slot.0 as usize] = IoBuffer::default();
        }
        self.free.push(slot.0);
    }

    /// Returns zeroes. Callers must not write to the buffer.
    pub(crate) fn zeroes(&mut self, length: usize) -> IoBuffer {
        self.zeroes
            .get_or_insert_with(|| IoBuffer::owned(PIECE_BYTES))
            .slice(0, length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_buffers_of_sufficient_size_are_reused() {
        let mut bounce = Bounce::default();
        let (slot, small) = bounce.take(512);
        let address = small.segments()[0].base();
        let (large, slice) = bounce.take(PIECE_BYTES);
        assert_eq!((slice.len(), slice.segments().len()), (PIECE_BYTES, 1));
        bounce.give_back(slot);
        let (_slot, small) = bounce.take(4096);
        assert_eq!(small.segments()[0].base(), address);
        assert!(small.is_aligned(4096));
        bounce.give_back(large);
    }

    #[test]
    fn memory_of_many_unaligned_requests_is_freed() {
        let mut bounce = Bounce::default();
        let slots: Vec<BounceSlot> = (0..100).map(|_| bounce.take(PIECE_BYTES).0).collect();
        for one in slots {
            bounce.give_back(one);
        }
        let kept: usize = bounce.buffers.iter().map(IoBuffer::len).sum();
        assert_eq!(kept, KEPT_MAX * PIECE_BYTES);
        let again: Vec<usize> = (0..100).map(|_| bounce.take(600).1.len()).collect();
        assert!(again.iter().all(|&length| length == 600));
        assert_eq!(bounce.buffers.len(), 100);
        let (slot, slice) = bounce.take(600);
        let address = slice.segments()[0].base();
        bounce.give_back(slot);
        assert_eq!(bounce.take(600).1.segments()[0].base(), address);
    }
}
