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
        self.end = self.end_border(self.total - start - length) as u32;
        self.window = length;
    }

    /// Sets the window to the first half without its first segment, a header of `skip` bytes. Returns false, without effect,
    /// if that segment has another length.
    ///
    /// `length` is the number of bytes after the header. Fast path of [`set_window`](Self::set_window).
    #[inline(always)]
    #[must_use]
    pub fn window_in_first_half(&mut self, skip: usize, length: usize) -> bool {
        let matches = self.middle > 0 && self.segments.first().is_some_and(|s| s.length == skip);
        if matches {
            (self.first, self.end, self.window) = (1, self.middle, length);
            debug_assert!(self.is_complete(), "half of another length");
        }
        matches
    }

    /// Same as [`window_in_first_half`](Self::window_in_first_half), for the second half, whose first segment is a response
    /// of `skip` bytes.
    #[inline(always)]
    #[must_use]
    pub fn window_in_second_half(&mut self, skip: usize, length: usize) -> bool {
        let matches = self.second_half().is_some_and(|s| s.length == skip);
        if matches {
            (self.first, self.end) = (self.middle + 1, self.segments.len() as u32);
            self.window = length;
            debug_assert!(self.is_complete(), "half of another length");
        }
        matches
    }

    /// Returns true if the window's length equals the sum of its segments.
    fn is_complete(&self) -> bool {
        self.segments().iter().map(Segment::len).sum::<usize>() == self.window
    }

    /// Returns the index of the segment that starts `skip` bytes after the start. Splits a segment if necessary.
    #[inline(always)]
    fn border(&mut self, skip: usize) -> usize {
        // The layout of nearly all drivers: a header, or a header and a response, before the data.
        match &self.segments[..] {
            [first, ..] if first.length == skip => 1,
            [first, second, ..] if skip.checked_sub(first.length) == Some(second.length) => 2,
            _ => self.search_border(skip),
        }
    }

    #[inline(never)]
    fn search_border(&mut self, mut skip: usize) -> usize {
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
    fn end_border(&mut self, skip: usize) -> usize {
        match &self.segments[..] {
            all if skip == 0 => all.len(),
            [before @ .., last] if last.length == skip => before.len(),
            _ => self.search_end_border(skip),
        }
    }

    #[inline(never)]
    fn search_end_border(&mut self, mut skip: usize) -> usize {
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
            let mut read = vec![0; length];
            buffer.read_at(0, &mut read);
            let expected: Vec<u8> = (start..start + length).map(|i| i as u8).collect();
            prop_assert_eq!(&read, &expected);
            if length > 1 {
                let part = buffer.slice(1, length - 1);
                let mut read = vec![0; length - 1];
                part.read_at(0, &mut read);
                prop_assert_eq!(&read[..], &expected[1..]);
            }
            let other = IoBuffer::owned(length + 1);
            prop_assert_eq!(buffer.copy_to(&other), length);
            let mut read = vec![0; length];
            other.read_at(0, &mut read);
            prop_assert_eq!(&read, &expected);
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
                let read: Vec<_> = buffer.segments().iter().map(Segment::len).collect();
                prop_assert_eq!(&read[..], &lengths[first..end]);
            }
            prop_assert_eq!((buffer.len(), buffer.segments.len()), (length, lengths.len()));
        }
    }

    proptest! {
        #[test]
        fn windows_in_a_half_are_what_set_window_gives(
            lengths in prop::collection::vec(1usize..6, 1..7), middle in 0usize..7, skip in 1usize..6, second: bool
        ) {
            let (mut fast, mut general) = (buffer_of(&lengths), buffer_of(&lengths));
            let middle = middle.min(lengths.len());
            fast.filled(fast.total_len(), middle);
            let before: usize = lengths[..middle].iter().sum();
            let (second_half, start) = match second {
                false => (before, skip),
                true => (fast.total_len() - before, before + skip),
            };
            let Some(length) = second_half.checked_sub(skip) else { return Ok(()) };
            let done = match second {
                false => fast.window_in_first_half(skip, length),
                true => fast.window_in_second_half(skip, length),
            };
            let header = if second { middle } else { 0 };
            prop_assert_eq!(done, lengths[header] == skip);
            if done {
                general.set_window(start, length);
                prop_assert_eq!(fast.len(), general.len());
                let read: Vec<_> = fast.segments().iter().map(Segment::len).collect();
                let expected: Vec<_> = general.segments().iter().map(Segment::len).collect();
                prop_assert!(length == 0 || read == expected);
                let (mut a, mut b) = (vec![0; length], vec![0; length]);
                fast.read_at(0, &mut a);
                general.read_at(0, &mut b);
                prop_assert_eq!(a, b);
            }
        }
    }
}
