//! Aligned memory for requests whose own memory the device cannot take, and zeroes to write.
//!
//! Owned by one handle. Requests larger than a bounce buffer go through it piece by piece. Buffers are made when
//! first needed and kept, up to a few: aligned clients never make one. Lent out as slices, because a window
//! would leave its borders behind as borders of segments, and those need not be aligned for the next user.

use guest_memory::IoBuffer;

/// Bytes of the largest bounce buffer, and of the zeroes written at once.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// Most unaligned requests are small.
const SMALLEST_BYTES: usize = 64 << 10;

/// Buffers kept for the next unaligned request.
const KEPT_MAX: usize = 8;

#[derive(Default)]
pub(crate) struct Bounce {
    free: Vec<IoBuffer>,
    zeroes: Option<IoBuffer>,
}

/// A bounce buffer that is lent: given back with [`Bounce::give_back`], or dropped.
#[derive(Default)]
pub(crate) struct Lent(IoBuffer);

impl Bounce {
    /// Page-aligned memory of `length` bytes, at most [`PIECE_BYTES`], in one segment.
    pub(crate) fn take(&mut self, length: usize) -> (Lent, IoBuffer) {
        let fits = |buffer: &IoBuffer| buffer.len() >= length;
        let whole = match self.free.iter().rposition(fits) {
            Some(index) => self.free.swap_remove(index),
            None => IoBuffer::owned(length.max(SMALLEST_BYTES).next_power_of_two()),
        };
        let slice = whole.slice(0, length);
        (Lent(whole), slice)
    }

    pub(crate) fn give_back(&mut self, lent: Lent) {
        if !lent.0.is_empty() && self.free.len() < KEPT_MAX {
            self.free.push(lent.0);
        }
    }

    /// Zeroes, to be written and not to be written to.
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
    fn buffers_are_used_again_and_only_if_they_are_large_enough() {
        let mut bounce = Bounce::default();
        let (lent, small) = bounce.take(512);
        let address = small.segments()[0].base();
        bounce.give_back(lent);
        let (_large, slice) = bounce.take(PIECE_BYTES);
        assert_eq!((slice.len(), slice.segments().len()), (PIECE_BYTES, 1));
        let (_lent, small) = bounce.take(4096);
        assert_eq!(small.segments()[0].base(), address);
        assert!(small.is_aligned(4096));
    }
}
