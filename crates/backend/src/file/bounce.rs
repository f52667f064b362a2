//! Aligned memory for requests whose own memory the device cannot take, and zeroes to write.
//!
//! Owned by one handle. Requests larger than a bounce buffer go through it piece by piece. Buffers are made when
//! first needed and kept, up to a few: aligned clients never make one.

use guest_memory::IoBuffer;

/// Bytes of a bounce buffer, and of the zeroes written at once.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// Buffers kept for the next unaligned request.
const KEPT_MAX: usize = 8;

#[derive(Default)]
pub(crate) struct Bounce {
    free: Vec<IoBuffer>,
    zeroes: Option<IoBuffer>,
}

impl Bounce {
    /// A page-aligned buffer with a window of `length` bytes, at most [`PIECE_BYTES`].
    pub(crate) fn take(&mut self, length: usize) -> IoBuffer {
        // Most unaligned requests are small: a buffer is as large as it was first needed, in steps.
        let fits = |buffer: &IoBuffer| buffer.total_len() >= length;
        let mut buffer = match self.free.iter().rposition(fits) {
            Some(index) => self.free.swap_remove(index),
            None => IoBuffer::owned(length.max(64 << 10).next_power_of_two()),
        };
        buffer.set_window(0, length);
        buffer
    }

    pub(crate) fn give_back(&mut self, buffer: IoBuffer) {
        if self.free.len() < KEPT_MAX {
            self.free.push(buffer);
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
        let small = bounce.take(512);
        let address = small.segments()[0].base();
        bounce.give_back(small);
        let large = bounce.take(PIECE_BYTES);
        assert_eq!((large.len(), large.segments().len()), (PIECE_BYTES, 1));
        let small = bounce.take(4096);
        assert_eq!(small.segments()[0].base(), address);
        assert!(small.is_aligned(4096));
    }
}
