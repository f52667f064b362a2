//! Fast paths for request headers, responses and status bytes that are contiguous in memory, and for prefetching their cache lines.
//! Fragmented ones take the general path in `bytes`; a property test compares the two.

use super::{IoBuffer, Segment};

impl IoBuffer {
    /// The second half's first segment.
    #[inline(always)]
    pub(super) fn second_half(&self) -> Option<&Segment> {
        self.segments.get(self.middle as usize)
    }

    /// First `N` bytes of the whole buffer: the request header.
    ///
    /// # Panics
    /// When the buffer is shorter.
    #[inline(always)]
    pub fn front<const N: usize>(&self) -> [u8; N] {
        match self.segments.first() {
            // SAFETY: memory kept by `self.keep`, long enough; any bytes are a valid array of bytes.
            Some(first) if first.length >= N => unsafe { first.base.cast::<[u8; N]>().read() },
            _ => self.front_fragmented(),
        }
    }

    /// Same as [`front`](Self::front), if these bytes are contiguous; the caller then keeps the fields that it reads in registers.
    #[inline(always)]
    pub fn contiguous_front<const N: usize>(&self) -> Option<[u8; N]> {
        let first = self.segments.first().filter(|first| first.length >= N)?;
        // SAFETY: as in `front`.
        Some(unsafe { first.base.cast::<[u8; N]>().read() })
    }

    #[cold]
    fn front_fragmented<const N: usize>(&self) -> [u8; N] {
        let mut bytes = [0; N];
        self.read_whole(0, &mut bytes);
        bytes
    }

    /// Writes the last byte of the whole buffer: the request status.
    ///
    /// # Panics
    /// When the buffer is empty.
    #[inline(always)]
    pub fn write_last(&self, byte: u8) {
        let last = self.segments.last().expect("a buffer with a byte");
        assert!(last.length > 0, "segments are not empty");
        // SAFETY: inside of the segment, memory kept by `self.keep`.
        unsafe { last.base.add(last.length - 1).write(byte) }
    }

    /// Same as [`write_whole`](Self::write_whole), for a few bytes at the start of the second half (a response). `offset` is the
    /// length of the first half.
    #[inline(always)]
    pub fn write_second_half<const N: usize>(&self, offset: usize, from: [u8; N]) {
        match self.second_half() {
            Some(second_half) if second_half.length >= N => {
                // SAFETY: inside of the segment, memory kept by `self.keep`; an array of bytes needs no alignment.
                unsafe { second_half.base.cast::<[u8; N]>().write(from) }
            }
            _ => self.write_whole(offset, &from),
        }
    }

    /// Same as [`write_second_half`](Self::write_second_half), with `N` zeroes.
    #[inline(always)]
    pub fn clear_second_half<const N: usize>(&self, offset: usize) {
        match self.second_half() {
            Some(second_half) if second_half.length >= N => {
                // SAFETY: as in `write_second_half`.
                unsafe { second_half.base.cast::<[u8; N]>().write([0; N]) }
            }
            _ => self.clear_second_half_fragmented::<N>(offset),
        }
    }

    #[cold]
    fn clear_second_half_fragmented<const N: usize>(&self, offset: usize) {
        self.write_whole(offset, &[0; N]);
    }

    /// Prefetches the first cache line of the whole buffer: the request header.
    #[inline(always)]
    pub fn prefetch(&self) {
        if let Some(segment) = self.segments.first() {
            prefetch_line(segment.base);
        }
    }

    /// Prefetches, for writing, the cache line of the whole buffer's last byte.
    #[inline(always)]
    pub fn prefetch_last(&self) {
        if let Some(last) = self.segments.last() {
            prefetch_line_to_write(last.base.wrapping_add(last.length).wrapping_sub(1));
        }
    }

    /// Prefetches, for writing, the first cache line of the second half.
    #[inline(always)]
    pub fn prefetch_second_half(&self) {
        if let Some(second_half) = self.second_half() {
            prefetch_line_to_write(second_half.base);
        }
    }
}

/// Prefetches a cache line for writing; other cores lose their copy.
#[inline(always)]
pub(crate) fn prefetch_line_to_write(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: as in `prefetch_line`; processors without this instruction execute it as a no-op.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(any(not(target_arch = "x86_64"), miri))]
    let _ = address;
}

/// Prefetches a cache line. Any address is allowed, because a prefetch never faults.
#[inline(always)]
pub(crate) fn prefetch_line(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint: it has no effect on memory and raises no fault for any address.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::buffer_of;

    proptest! {
        #[test]
        fn contiguous_paths_agree_with_the_general_path(
            lengths in prop::collection::vec(1usize..30, 1..7), middle in 0usize..7, header: [u8; 12],
            clears: bool, windows in prop::collection::vec((0usize..90, 0usize..90), 0..3)
        ) {
            let (mut contiguous, general) = (buffer_of(&lengths), buffer_of(&lengths));
            let total = contiguous.total_len();
            let middle = middle.min(lengths.len());
            let at: usize = lengths[..middle].iter().sum();
            contiguous.filled(total, middle);
            // Splitting segments moves the first segment of the second half.
            for (start, length) in windows {
                contiguous.set_window(start.min(total), length.min(total - start.min(total)));
            }
            if at + 12 <= total && clears {
                contiguous.clear_second_half::<12>(at);
                general.write_whole(at, &[0; 12]);
            } else if at + 12 <= total {
                contiguous.write_second_half(at, header);
                general.write_whole(at, &header);
            }
            let (mut a, mut b) = (vec![0; total], vec![0; total]);
            contiguous.read_whole(0, &mut a);
            general.read_whole(0, &mut b);
            prop_assert_eq!(&a, &b);
            match contiguous.contiguous_front::<12>() {
                Some(front) => prop_assert_eq!(&front[..], &a[..12]),
                None => prop_assert!(contiguous.segments[0].length < 12),
            }
        }
    }
}
