//! The window of a buffer: the part of a chain's memory that an I/O reads or writes.
//!
//! Nearly all drivers split their descriptors at the window's borders, which are then found by one or two comparisons.
//! Otherwise a segment is split. Offsets are asserted, because they never come from a peer.

use super::{IoBuffer, Segment};

impl IoBuffer {
    /// Sets the window to `length` bytes from byte `start` of the whole buffer. Splits a segment that contains a border.
    ///
    /// # Panics
    /// When the range lies outside of the buffer.
    #[inline(always)]
    pub fn set_window(&mut self, start: usize, length: usize) {
        assert!(
            length <= self.total && start <= self.total - length,
            "window outside of buffer"
        );
        self.first = self.border(start) as u32;
        // Searches from the end, because few or no segments follow the data.
        self.end = self.border_back(self.total - start - length) as u32;
        self.window = length;
    }

    /// Sets the window to the first half without its first segment, a header of `skip` bytes. Returns false, without effect,
    /// if that segment has another length.
    ///
    /// `length` is the number of bytes after the header. Fast path of [`set_window`](Self::set_window).
    #[inline(always)]
    #[must_use]
    pub fn window_in_first_half(&mut self, skip: usize, length: usize) -> bool {
        let near = self.middle > 0 && self.segments.first().is_some_and(|s| s.length == skip);
        if near {
            (self.first, self.end, self.window) = (1, self.middle, length);
            debug_assert!(self.is_whole(), "half of another length");
        }
        near
    }

    /// Same as [`window_in_first_half`](Self::window_in_first_half), for the second half, whose first segment is a response
    /// of `skip` bytes.
    #[inline(always)]
    #[must_use]
    pub fn window_in_second_half(&mut self, skip: usize, length: usize) -> bool {
        let near = self.half().is_some_and(|s| s.length == skip);
        if near {
            (self.first, self.end) = (self.middle + 1, self.segments.len() as u32);
            self.window = length;
            debug_assert!(self.is_whole(), "half of another length");
        }
        near
    }

    /// Returns true if the window's length equals the sum of its segments.
    fn is_whole(&self) -> bool {
        self.segments().iter().map(Segment::len).sum::<usize>() == self.window
    }

    /// Returns the index of the segment that starts `skip` bytes after the start. Splits a segment if necessary.
    #[inline(always)]
    fn border(&mut self, skip: usize) -> usize {
        // The layout of nearly all drivers: a header, or a header and a response, before the data.
        match &self.segments[..] {
            [first, ..] if first.length == skip => 1,
            [first, second, ..] if skip.checked_sub(first.length) == Some(second.length) => 2,
            _ => self.border_anywhere(skip),
        }
    }

    #[inline(never)]
    fn border_anywhere(&mut self, mut skip: usize) -> usize {
        let mut index = 0;
        while skip > 0 {
            // The caller has checked `skip` against the total length.
            let length = self.segments[index].length;
            if skip < length {
                return self.split(index, skip);
            }
            skip -= length;
            index += 1;
        }
        index
    }

    /// Returns the index after the segment that ends `skip` bytes before the end. Splits a segment if necessary.
    #[inline(always)]
    fn border_back(&mut self, skip: usize) -> usize {
        match &self.segments[..] {
            all if skip == 0 => all.len(),
            [before @ .., last] if last.length == skip => before.len(),
            _ => self.border_back_anywhere(skip),
        }
    }

    #[inline(never)]
    fn border_back_anywhere(&mut self, mut skip: usize) -> usize {
        let mut index = self.segments.len();
        while skip > 0 {
            let length = self.segments[index - 1].length;
            if skip < length {
                return self.split(index - 1, length - skip);
            }
            skip -= length;
            index -= 1;
        }
        index
    }

    #[cold]
    fn split(&mut self, index: usize, at: usize) -> usize {
        let whole = self.segments[index];
        // SAFETY: `at` is below the segment's length.
        let rest = Segment::new(unsafe { whole.base.add(at) }, whole.length - at);
        self.segments[index].length = at;
        self.segments.insert(index + 1, rest);
        if index < self.middle as usize {
            self.middle += 1;
        }
        index + 1
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::buffer::tests::buffer_of;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn window_reads_like_a_flat_slice(
            lengths in prop::collection::vec(1usize..40, 1..8), a in 0usize..300, b in 0usize..300
        ) {
            let mut buffer = buffer_of(&lengths);
            let total = buffer.total_len();
            let (start, length) = (a.min(total), b.min(total - a.min(total)));
            buffer.set_window(start, length);
            prop_assert_eq!(buffer.segments().iter().map(Segment::len).sum::<usize>(), length);
            let mut got = vec![0; length];
            buffer.read_at(0, &mut got);
            let want: Vec<u8> = (start..start + length).map(|i| i as u8).collect();
            prop_assert_eq!(&got, &want);
            if length > 1 {
                let part = buffer.slice(1, length - 1);
                let mut got = vec![0; length - 1];
                part.read_at(0, &mut got);
                prop_assert_eq!(&got[..], &want[1..]);
            }
            let other = IoBuffer::owned(length + 1);
            prop_assert_eq!(buffer.copy_to(&other), length);
            let mut got = vec![0; length];
            other.read_at(0, &mut got);
            prop_assert_eq!(&got, &want);
            buffer.set_window(0, total);
            prop_assert_eq!(buffer.len(), total);
        }
    }

    proptest! {
        #[test]
        fn window_between_two_segments_splits_none(lengths in prop::collection::vec(1usize..30, 1..7), a in 0usize..7, b in 0usize..7) {
            let mut buffer = buffer_of(&lengths);
            let (first, end) = (a.min(b).min(lengths.len()), a.max(b).min(lengths.len()));
            let (start, length) = (lengths[..first].iter().sum(), lengths[first..end].iter().sum());
            buffer.set_window(start, length);
            // An empty window may be on either side of a border.
            if length > 0 {
                let got: Vec<_> = buffer.segments().iter().map(Segment::len).collect();
                prop_assert_eq!(&got[..], &lengths[first..end]);
            }
            prop_assert_eq!((buffer.len(), buffer.segments.len()), (length, lengths.len()));
        }
    }

    proptest! {
        #[test]
        fn windows_in_a_half_are_what_set_window_gives(
            lengths in prop::collection::vec(1usize..6, 1..7), middle in 0usize..7, skip in 1usize..6, second: bool
        ) {
            let (mut near, mut whole) = (buffer_of(&lengths), buffer_of(&lengths));
            let middle = middle.min(lengths.len());
            near.filled(near.total_len(), middle);
            let before: usize = lengths[..middle].iter().sum();
            let (half, start) = match second {
                false => (before, skip),
                true => (near.total_len() - before, before + skip),
            };
            let Some(length) = half.checked_sub(skip) else { return Ok(()) };
            let done = match second {
                false => near.window_in_first_half(skip, length),
                true => near.window_in_second_half(skip, length),
            };
            let header = if second { middle } else { 0 };
            prop_assert_eq!(done, lengths[header] == skip);
            if done {
                whole.set_window(start, length);
                prop_assert_eq!(near.len(), whole.len());
                let got: Vec<_> = near.segments().iter().map(Segment::len).collect();
                let want: Vec<_> = whole.segments().iter().map(Segment::len).collect();
                prop_assert!(length == 0 || got == want);
                let (mut a, mut b) = (vec![0; length], vec![0; length]);
                near.read_at(0, &mut a);
                whole.read_at(0, &mut b);
                prop_assert_eq!(a, b);
            }
        }
    }
}
