//! Copies between a RAM disk and client memory: nearly the whole cost of a RAM disk's I/O.
//!
//! Short pieces are left to `memcpy`. A long one is bound by how many cache lines of the disk are under way at a time, and
//! one sequence of addresses does not keep as many under way as a core can have: so it is copied as eight, side by side.
//! SSE2, which every x86-64 has; wider registers gave no more. Stores that bypass the cache were tried and lost: the
//! client reads its data soon. Figures: `docs/performance.md`.

/// From so many bytes on a piece counts as long.
const LONG: usize = 32 << 10;

/// From the disk to the client.
///
/// # Safety
/// Both ranges must be mapped for `length` bytes and must not overlap.
#[inline]
pub unsafe fn to_client(from: *const u8, into: *mut u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy(from, into, length) }
}

/// From the client to the disk.
///
/// # Safety
/// As [`to_client`].
#[inline]
pub unsafe fn from_client(from: *const u8, into: *mut u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy(from, into, length) }
}

#[inline]
unsafe fn copy(from: *const u8, into: *mut u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        if length >= LONG {
            copy_long(from, into, length);
        } else {
            std::ptr::copy_nonoverlapping(from, into, length);
        }
    }
}

#[cfg(target_arch = "x86_64")]
unsafe fn copy_long(from: *const u8, into: *mut u8, length: usize) {
    use core::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_storeu_si128};
    const STREAMS: usize = 8;
    /// A page each: the processor's own prefetching ends with it.
    const STREAM: usize = 4096;
    const LINE: usize = 64;
    /// How far ahead of its copying a stream is fetched.
    const AHEAD: usize = 256;
    const BLOCK: usize = STREAMS * STREAM;
    let blocks = length / BLOCK;
    for block in 0..blocks {
        for line in (0..STREAM).step_by(LINE) {
            for stream in 0..STREAMS {
                let at = block * BLOCK + stream * STREAM + line;
                crate::buffer::prefetch_line(from.wrapping_add(at + AHEAD));
                // SAFETY: `at` and the line behind it are below `length`, which the caller says is mapped in both;
                // these loads and stores need no alignment.
                unsafe {
                    let (from, into) = (from.add(at), into.add(at));
                    let (from, into) = (from.cast::<__m128i>(), into.cast::<__m128i>());
                    let line: [__m128i; 4] = std::array::from_fn(|i| _mm_loadu_si128(from.add(i)));
                    for (i, part) in line.into_iter().enumerate() {
                        _mm_storeu_si128(into.add(i), part);
                    }
                }
            }
        }
    }
    let done = blocks * BLOCK;
    // SAFETY: the rest of the caller's ranges.
    unsafe { std::ptr::copy_nonoverlapping(from.add(done), into.add(done), length - done) }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_long(from: *const u8, into: *mut u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, into, length) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_byte_arrives_and_no_other_is_touched(
            length in prop_oneof![0usize..200, LONG - 70..LONG + 70, 0usize..5 * LONG],
            (skip_from, skip_into) in (0usize..80, 0usize..80),
        ) {
            let from: Vec<u8> = (0..skip_from + length).map(|i| (i * 31 + i / 251) as u8).collect();
            let mut into = vec![0xa5; skip_into + length + 80];
            // SAFETY: both are as long as said, and apart.
            unsafe { copy(from.as_ptr().add(skip_from), into.as_mut_ptr().add(skip_into), length) };
            prop_assert_eq!(&into[skip_into..skip_into + length], &from[skip_from..]);
            prop_assert!(into[..skip_into].iter().all(|byte| *byte == 0xa5));
            prop_assert!(into[skip_into + length..].iter().all(|byte| *byte == 0xa5));
        }
    }
}
