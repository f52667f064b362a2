//! Copies between a RAM disk and client memory: nearly the whole cost of a RAM disk's I/O.
//!
//! Short pieces are left to `memcpy`. A long one is bound by how many cache lines of the disk are under way at a time. On
//! Intel's processors one sequence of addresses does not keep as many under way as a core can have: there it is copied as
//! eight, side by side, and the disk's end, which is not in a cache, is fetched ahead, with AVX2 where the processor has it, else
//! SSE2. A Zen 4 needs no such help, `memcpy` is fastest there, and so it is taken for all others. Stores that bypass the cache lost for reads, for the client
//! looks at its data soon, and on older processors; newer ones, known by AVX-512 with bfloat16, write whole lines past the
//! cache to a disk, one after the other. Where it is known which copy comes next, its first lines are asked for before the one
//! before it is made. Figures: `docs/performance.md`.

use crate::buffer::{prefetch_line, prefetch_line_to_write};

/// From so many bytes on a piece counts as long.
const LONG: usize = 32 << 10;

const LINE: usize = 64;

/// Lines of a disk that are asked for when it is known that a copy of them comes next. What the processor needs then is where
/// they are; it goes on by itself, and more lines only hold up the copy that is made meanwhile. Lines to be written come later.
const READ_NEXT: usize = 8;
const WRITTEN_NEXT: usize = 16;

/// [`to_client`] comes next, after something else: asks for lines that it begins with. Any address is allowed.
#[inline]
pub(crate) fn expect_to_client(from: *const u8, length: usize) {
    expect::<true>(from, length);
}

/// As [`expect_to_client`], for [`from_client`].
#[inline]
pub(crate) fn expect_from_client(into: *const u8, length: usize) {
    expect::<false>(into, length);
}

#[inline(always)]
fn expect<const FETCH_SOURCE: bool>(disk: *const u8, length: usize) {
    #[cfg(target_arch = "x86_64")]
    if length >= LONG {
        return long::expect::<FETCH_SOURCE>(disk);
    }
    first_lines::<FETCH_SOURCE>(disk, length);
}

/// Asks for the first lines of a range of a disk.
#[inline(always)]
fn first_lines<const FETCH_SOURCE: bool>(disk: *const u8, length: usize) {
    let most = if FETCH_SOURCE {
        READ_NEXT
    } else {
        WRITTEN_NEXT
    };
    for at in (0..length.min(most * LINE)).step_by(LINE) {
        fetch::<FETCH_SOURCE>(disk.wrapping_add(at));
    }
}

#[inline(always)]
fn fetch<const FETCH_SOURCE: bool>(line: *const u8) {
    match FETCH_SOURCE {
        true => prefetch_line(line),
        false => prefetch_line_to_write(line),
    }
}

/// From the disk to the client.
///
/// # Safety
/// Both ranges must be mapped for `length` bytes and must not overlap.
#[inline]
pub unsafe fn to_client(from: *const u8, into: *mut u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy::<true>(from, into, length) }
}

/// From the client to the disk.
///
/// # Safety
/// As [`to_client`].
#[inline]
pub unsafe fn from_client(from: *const u8, into: *mut u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy::<false>(from, into, length) }
}

/// Data of a request are copied without volatile loads: they are not parsed, so a copy that a client tears by writing at the same
/// time has bytes that the client wrote, and no other effect.
///
/// `FETCH_SOURCE`: it is what is copied from that is fetched ahead, not what is copied to.
#[inline]
unsafe fn copy<const FETCH_SOURCE: bool>(from: *const u8, into: *mut u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if length >= LONG {
            return long::copy::<FETCH_SOURCE>(from, into, length);
        }
        std::ptr::copy_nonoverlapping(from, into, length);
    }
}

#[cfg(target_arch = "x86_64")]
mod long {
    use core::arch::x86_64::{
        __cpuid, __m128i, __m256i, __m512i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence,
        _mm_storeu_si128, _mm256_loadu_si256, _mm256_storeu_si256, _mm512_loadu_si512,
        _mm512_storeu_si512, _mm512_stream_si512,
    };
    use std::sync::OnceLock;

    use super::{LINE, fetch, first_lines};

    const STREAMS: usize = 8;
    /// A page each: the processor's own prefetching ends with it.
    const STREAM: usize = 4096;
    /// How far ahead of its copying a stream of the disk is fetched; processors that have AVX-512 for this have more lines under
    /// way.
    const READ_AHEAD: usize = 256;
    const READ_AHEAD_AVX512: usize = 512;
    const WRITE_AHEAD: usize = 128;
    const BLOCK: usize = STREAMS * STREAM;
    /// Bytes of each stream that are asked for when it is known that a copy comes next.
    const STREAM_NEXT: usize = 128;

    /// What is fastest on this processor.
    #[derive(Clone, Copy)]
    enum Way {
        Memcpy,
        /// Stores past the cache to a disk, else `memcpy`.
        Past,
        Sse2,
        Avx2,
        Avx512,
    }

    /// "GenuineIntel", as CPUID says it in EBX, EDX and ECX.
    const INTEL: [u32; 3] = [0x756e_6547, 0x4965_6e69, 0x6c65_746e];

    fn way() -> Way {
        static WAY: OnceLock<Way> = OnceLock::new();
        *WAY.get_or_init(|| {
            // Newer compilers know that any x86-64 has this leaf.
            #[allow(unused_unsafe)]
            // SAFETY: every processor with 64-bit mode has CPUID, whose leaf 0 always is there.
            let vendor = unsafe { __cpuid(0) };
            let is_intel = [vendor.ebx, vendor.edx, vendor.ecx] == INTEL;
            // AVX-512 alone says little: its first processors are slowed down by it.
            let has_avx512 =
                is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512f");
            match (is_intel, has_avx512) {
                (true, true) => Way::Avx512,
                (true, false) if is_x86_feature_detected!("avx2") => Way::Avx2,
                (true, false) => Way::Sse2,
                (false, true) => Way::Past,
                (false, false) => Way::Memcpy,
            }
        })
    }

    /// What [`copy`] begins with.
    pub(super) fn expect<const FETCH_SOURCE: bool>(disk: *const u8) {
        match way() {
            // Its stores do not want the lines.
            Way::Avx512 | Way::Past if !FETCH_SOURCE => {}
            Way::Past | Way::Memcpy => first_lines::<FETCH_SOURCE>(disk, super::LONG),
            Way::Avx512 | Way::Avx2 | Way::Sse2 => {
                for stream in (0..BLOCK).step_by(STREAM) {
                    for place in (0..STREAM_NEXT).step_by(LINE) {
                        fetch::<FETCH_SOURCE>(disk.wrapping_add(stream + place));
                    }
                }
            }
        }
    }

    /// # Safety
    /// As [`super::to_client`].
    pub(super) unsafe fn copy<const FETCH_SOURCE: bool>(
        from: *const u8,
        into: *mut u8,
        length: usize,
    ) {
        // SAFETY: the caller's promise; what a processor must have for a way was found where it was chosen.
        unsafe {
            match way() {
                Way::Avx512 => with_avx512::<FETCH_SOURCE>(from, into, length),
                Way::Avx2 => with_avx2::<FETCH_SOURCE>(from, into, length),
                Way::Sse2 => with_sse2::<FETCH_SOURCE>(from, into, length),
                Way::Past if !FETCH_SOURCE => with_past(from, into, length),
                Way::Past | Way::Memcpy => std::ptr::copy_nonoverlapping(from, into, length),
            }
        }
    }

    /// Whole lines, past the cache to a disk.
    ///
    /// # Safety
    /// As [`copy`], and the processor must have AVX-512.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn with_avx512<const FETCH_SOURCE: bool>(
        from: *const u8,
        into: *mut u8,
        length: usize,
    ) {
        if !FETCH_SOURCE && into.addr().is_multiple_of(LINE) {
            // SAFETY: the caller's promise.
            return unsafe { with_past(from, into, length) };
        }
        // SAFETY: the caller's promise; the line has room for the register, which needs no alignment.
        let line = |from: *const u8, into: *mut u8| unsafe {
            _mm512_storeu_si512(into.cast(), _mm512_loadu_si512(from.cast()));
        };
        // SAFETY: the caller's promise.
        unsafe { side_by_side::<FETCH_SOURCE, READ_AHEAD_AVX512>(from, into, length, line) }
    }

    /// Whole lines past the cache; where lines do not begin where the copy does, as ever.
    ///
    /// # Safety
    /// As [`copy`], and the processor must have AVX-512.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn with_past(from: *const u8, into: *mut u8, length: usize) {
        let done = match into.addr().is_multiple_of(LINE) {
            true => length - length % LINE,
            false => 0,
        };
        for at in (0..done).step_by(LINE) {
            // SAFETY: a line from `at` on is below `length`, which the caller says is mapped in both; where it goes it is a cache
            // line, as this store has it.
            unsafe {
                let line = _mm512_loadu_si512(from.add(at).cast());
                _mm512_stream_si512(into.add(at).cast::<__m512i>(), line);
            }
        }
        // What went past the cache has no order with later stores but by this.
        _mm_sfence();
        // SAFETY: the rest of the caller's ranges.
        unsafe { std::ptr::copy_nonoverlapping(from.add(done), into.add(done), length - done) }
    }

    /// # Safety
    /// As [`copy`], and the processor must have AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn with_avx2<const FETCH_SOURCE: bool>(
        from: *const u8,
        into: *mut u8,
        length: usize,
    ) {
        // SAFETY: the caller's promise; the line has room for two registers, which need no alignment.
        let line = |from: *const u8, into: *mut u8| unsafe {
            let (from, into) = (from.cast::<__m256i>(), into.cast::<__m256i>());
            let (low, high) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
            _mm256_storeu_si256(into, low);
            _mm256_storeu_si256(into.add(1), high);
        };
        // SAFETY: the caller's promise.
        unsafe { side_by_side::<FETCH_SOURCE, READ_AHEAD>(from, into, length, line) }
    }

    /// # Safety
    /// As [`copy`].
    pub(super) unsafe fn with_sse2<const FETCH_SOURCE: bool>(
        from: *const u8,
        into: *mut u8,
        length: usize,
    ) {
        // SAFETY: the caller's promise; the line has room for four registers, which need no alignment.
        let line = |from: *const u8, into: *mut u8| unsafe {
            let (from, into) = (from.cast::<__m128i>(), into.cast::<__m128i>());
            let line: [__m128i; 4] = std::array::from_fn(|i| _mm_loadu_si128(from.add(i)));
            for (i, part) in line.into_iter().enumerate() {
                _mm_storeu_si128(into.add(i), part);
            }
        };
        // SAFETY: the caller's promise.
        unsafe { side_by_side::<FETCH_SOURCE, READ_AHEAD>(from, into, length, line) }
    }

    /// # Safety
    /// As [`copy`]; `line` copies one cache line.
    #[inline(always)]
    unsafe fn side_by_side<const FETCH_SOURCE: bool, const AHEAD: usize>(
        from: *const u8,
        into: *mut u8,
        length: usize,
        line: impl Fn(*const u8, *mut u8),
    ) {
        let (disk, ahead) = match FETCH_SOURCE {
            true => (from, AHEAD),
            false => (into.cast_const(), WRITE_AHEAD),
        };
        let done = length - length % BLOCK;
        for block in (0..done).step_by(BLOCK) {
            // What is fetched at the end of the streams is where those of the next block begin, if there is one.
            let jump = if block + BLOCK < done {
                BLOCK - STREAM
            } else {
                0
            };
            for place in (0..STREAM).step_by(LINE) {
                let fetched = place + ahead;
                let fetched = if fetched < STREAM {
                    fetched
                } else {
                    fetched + jump
                };
                for stream in (block..block + BLOCK).step_by(STREAM) {
                    let at = stream + place;
                    // SAFETY: a prefetch is a hint that raises no fault for any address; `at` and the line behind it are
                    // below `length`, which the caller says is mapped in both.
                    unsafe {
                        _mm_prefetch::<_MM_HINT_T0>(disk.wrapping_add(stream + fetched).cast());
                        line(from.add(at), into.add(at));
                    }
                }
            }
        }
        // SAFETY: the rest of the caller's ranges.
        unsafe { std::ptr::copy_nonoverlapping(from.add(done), into.add(done), length - done) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Way = unsafe fn(*const u8, *mut u8, usize);

    /// All that this processor can do, whichever it would choose.
    fn ways() -> Vec<Way> {
        let mut ways: Vec<Way> = vec![to_client, from_client];
        #[cfg(target_arch = "x86_64")]
        {
            ways.push(long::with_sse2::<true>);
            ways.push(long::with_sse2::<false>);
            if is_x86_feature_detected!("avx2") {
                ways.push(long::with_avx2::<true>);
                ways.push(long::with_avx2::<false>);
            }
            if is_x86_feature_detected!("avx512f") {
                ways.push(long::with_avx512::<true>);
                ways.push(long::with_avx512::<false>);
                ways.push(long::with_past);
            }
        }
        ways
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_byte_arrives_and_no_other_is_touched(
            length in prop_oneof![0usize..200, LONG - 70..LONG + 70, 0usize..5 * LONG],
            (skip_from, skip_into) in (0usize..80, 0usize..80),
        ) {
            let from: Vec<u8> = (0..skip_from + length).map(|i| (i * 31 + i / 251) as u8).collect();
            let mut into = vec![0xa5; skip_into + length + 80];
            for way in ways() {
                into.fill(0xa5);
                // SAFETY: both are as long as said, and apart.
                unsafe { way(from.as_ptr().add(skip_from), into.as_mut_ptr().add(skip_into), length) };
                prop_assert_eq!(&into[skip_into..skip_into + length], &from[skip_from..]);
                prop_assert!(into[..skip_into].iter().all(|byte| *byte == 0xa5));
                prop_assert!(into[skip_into + length..].iter().all(|byte| *byte == 0xa5));
            }
        }
    }
}
