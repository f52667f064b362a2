//! Copies between a RAM disk and client memory: nearly the whole cost of a RAM disk's I/O.
//!
//! Short pieces use `memcpy`. The speed of long copies is limited by the number of outstanding cache misses on the disk's side. On Intel
//! processors one sequential stream does not reach the maximum of a core: the copy runs as eight parallel streams, and the disk's lines,
//! which are not cached, are prefetched. It uses AVX2 if available, otherwise SSE2. On Zen 4 `memcpy` is fastest; it is the default for all
//! other processors.
//!
//! Non-temporal stores were slower for reads, because the client soon uses its data, and on older processors. Newer processors (with
//! AVX-512 bfloat16) write whole lines to the disk with non-temporal stores, sequentially. If the next copy is known, its first lines are
//! prefetched before the current copy. Figures: `docs/performance.md`.

use crate::buffer::{prefetch_line, prefetch_line_to_write};

/// Minimum length of a long piece, in bytes.
const LONG: usize = 32 << 10;

const LINE: usize = 64;

/// Number of lines to prefetch for the next copy. The first lines save the address translation, after which the hardware prefetcher
/// continues; more lines delay the current copy. Lines to be written take longer to arrive.
const READ_NEXT: usize = 8;
const WRITTEN_NEXT: usize = 16;

/// Prefetches the first lines for a later [`to_client`]. Any address is allowed.
#[inline]
pub(crate) fn prefetch_to_client(from: *const u8, length: usize) {
    expect::<true>(from, length);
}

/// Same as [`prefetch_to_client`], for [`from_client`].
#[inline]
pub(crate) fn prefetch_from_client(into: *const u8, length: usize) {
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

/// Prefetches the first lines of a range of a disk.
#[inline(always)]
fn first_lines<const FETCH_SOURCE: bool>(disk: *const u8, length: usize) {
    let limit = if FETCH_SOURCE {
        READ_NEXT
    } else {
        WRITTEN_NEXT
    };
    for at in (0..length.min(limit * LINE)).step_by(LINE) {
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

/// Copies from the disk to the client.
///
/// # Safety
/// Both ranges must be mapped for `length` bytes and must not overlap.
#[inline]
pub unsafe fn to_client(from: *const u8, into: *mut u8, length: usize) {
    // SAFETY: the caller guarantees the conditions of `# Safety`.
    unsafe { copy::<true>(from, into, length) }
}

/// Copies from the client to the disk.
///
/// # Safety
/// As [`to_client`].
#[inline]
pub unsafe fn from_client(from: *const u8, into: *mut u8, length: usize) {
    // SAFETY: the caller guarantees the conditions of `# Safety`.
    unsafe { copy::<false>(from, into, length) }
}

/// Copies without volatile loads. Data are not parsed: a concurrent write by the client can only mix bytes that the client wrote.
///
/// `FETCH_SOURCE` selects the prefetched side: the source (true) or the destination.
#[inline]
unsafe fn copy<const FETCH_SOURCE: bool>(from: *const u8, into: *mut u8, length: usize) {
    // SAFETY: the caller guarantees the conditions of `# Safety`.
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
    /// Bytes per stream: one page, where hardware prefetching ends.
    const STREAM: usize = 4096;
    /// Prefetch distance within a stream of the disk, in bytes. Processors with AVX-512 support more outstanding misses.
    const READ_AHEAD: usize = 256;
    const READ_AHEAD_AVX512: usize = 512;
    const WRITE_AHEAD: usize = 128;
    const BLOCK: usize = STREAMS * STREAM;
    /// Bytes of each stream to prefetch for the next copy.
    const STREAM_NEXT: usize = 128;

    /// Copy method, selected by processor.
    #[derive(Clone, Copy)]
    enum CopyMethod {
        Memcpy,
        /// Non-temporal stores to a disk, `memcpy` from it.
        Past,
        Sse2,
        Avx2,
        Avx512,
    }

    /// "GenuineIntel" in EBX, EDX and ECX of CPUID.
    const INTEL: [u32; 3] = [0x756e_6547, 0x4965_6e69, 0x6c65_746e];

    fn method() -> CopyMethod {
        static METHOD: OnceLock<CopyMethod> = OnceLock::new();
        *METHOD.get_or_init(|| {
            // Newer compilers treat `__cpuid` as safe on x86-64.
            #[allow(unused_unsafe)]
            // SAFETY: every processor with 64-bit mode has CPUID and its leaf 0.
            let vendor = unsafe { __cpuid(0) };
            let is_intel = [vendor.ebx, vendor.edx, vendor.ecx] == INTEL;
            // AVX-512 alone is not sufficient: the first processors that have it run slower with it.
            let has_avx512 =
                is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512f");
            match (is_intel, has_avx512) {
                (true, true) => CopyMethod::Avx512,
                (true, false) if is_x86_feature_detected!("avx2") => CopyMethod::Avx2,
                (true, false) => CopyMethod::Sse2,
                (false, true) => CopyMethod::Past,
                (false, false) => CopyMethod::Memcpy,
            }
        })
    }

    /// Prefetches the lines that [`copy`] accesses first.
    pub(super) fn expect<const FETCH_SOURCE: bool>(disk: *const u8) {
        match method() {
            // Non-temporal stores do not read the lines.
            CopyMethod::Avx512 | CopyMethod::Past if !FETCH_SOURCE => {}
            CopyMethod::Past | CopyMethod::Memcpy => first_lines::<FETCH_SOURCE>(disk, super::LONG),
            CopyMethod::Avx512 | CopyMethod::Avx2 | CopyMethod::Sse2 => {
                for stream in (0..BLOCK).step_by(STREAM) {
                    for offset in (0..STREAM_NEXT).step_by(LINE) {
                        fetch::<FETCH_SOURCE>(disk.wrapping_add(stream + offset));
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
        // SAFETY: the caller's promise; `method` checked that the processor supports the method.
        unsafe {
            match method() {
                CopyMethod::Avx512 => with_avx512::<FETCH_SOURCE>(from, into, length),
                CopyMethod::Avx2 => with_avx2::<FETCH_SOURCE>(from, into, length),
                CopyMethod::Sse2 => with_sse2::<FETCH_SOURCE>(from, into, length),
                CopyMethod::Past if !FETCH_SOURCE => with_past(from, into, length),
                CopyMethod::Past | CopyMethod::Memcpy => {
                    std::ptr::copy_nonoverlapping(from, into, length)
                }
            }
        }
    }

    /// Copies whole lines; to a disk with non-temporal stores.
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
            // SAFETY: the caller guarantees the conditions of `# Safety`.
            return unsafe { with_past(from, into, length) };
        }
        // SAFETY: the caller's promise; a line has the size of the register, which needs no alignment.
        let line = |from: *const u8, into: *mut u8| unsafe {
            _mm512_storeu_si512(into.cast(), _mm512_loadu_si512(from.cast()));
        };
        // SAFETY: the caller guarantees the conditions of `# Safety`.
        unsafe { side_by_side::<FETCH_SOURCE, READ_AHEAD_AVX512>(from, into, length, line) }
    }

    /// Copies whole lines with non-temporal stores. Uses `memcpy` if the destination is not aligned to a line.
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
            // SAFETY: the line at `at` ends within `length`, for which both ranges are mapped by the caller's promise. Its destination is
            // aligned to a cache line, as this store requires.
            unsafe {
                let line = _mm512_loadu_si512(from.add(at).cast());
                _mm512_stream_si512(into.add(at).cast::<__m512i>(), line);
            }
        }
        // Orders the non-temporal stores before later stores.
        // The function is unsafe in Rust 1.89, the oldest supported compiler, and safe in Rust 1.95.
        #[allow(unused_unsafe)]
        // SAFETY: every x86-64 CPU has SFENCE, which accesses no memory.
        unsafe {
            _mm_sfence();
        }
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
        // SAFETY: the caller's promise; a line has the size of two registers, which need no alignment.
        let line = |from: *const u8, into: *mut u8| unsafe {
            let (from, into) = (from.cast::<__m256i>(), into.cast::<__m256i>());
            let (low, high) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
            _mm256_storeu_si256(into, low);
            _mm256_storeu_si256(into.add(1), high);
        };
        // SAFETY: the caller guarantees the conditions of `# Safety`.
        unsafe { side_by_side::<FETCH_SOURCE, READ_AHEAD>(from, into, length, line) }
    }

    /// # Safety
    /// As [`copy`].
    pub(super) unsafe fn with_sse2<const FETCH_SOURCE: bool>(
        from: *const u8,
        into: *mut u8,
        length: usize,
    ) {
        // SAFETY: the caller's promise; a line has the size of four registers, which need no alignment.
        let line = |from: *const u8, into: *mut u8| unsafe {
            let (from, into) = (from.cast::<__m128i>(), into.cast::<__m128i>());
            let line: [__m128i; 4] = std::array::from_fn(|i| _mm_loadu_si128(from.add(i)));
            for (i, part) in line.into_iter().enumerate() {
                _mm_storeu_si128(into.add(i), part);
            }
        };
        // SAFETY: the caller guarantees the conditions of `# Safety`.
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
            // The prefetch at the end of the streams targets the start of the next block's streams, if there is a next block.
            let jump = if block + BLOCK < done {
                BLOCK - STREAM
            } else {
                0
            };
            for offset in (0..STREAM).step_by(LINE) {
                let fetched = offset + ahead;
                let fetched = if fetched < STREAM {
                    fetched
                } else {
                    fetched + jump
                };
                for stream in (block..block + BLOCK).step_by(STREAM) {
                    let at = stream + offset;
                    // SAFETY: a prefetch is a hint that raises no fault for any address. The line at `at` ends within `length`, for which
                    // both ranges are mapped by the caller's promise.
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

    type CopyMethod = unsafe fn(*const u8, *mut u8, usize);

    /// All methods that this processor supports.
    fn methods() -> Vec<CopyMethod> {
        let mut methods: Vec<CopyMethod> = vec![to_client, from_client];
        #[cfg(target_arch = "x86_64")]
        {
            methods.push(long::with_sse2::<true>);
            methods.push(long::with_sse2::<false>);
            if is_x86_feature_detected!("avx2") {
                methods.push(long::with_avx2::<true>);
                methods.push(long::with_avx2::<false>);
            }
            if is_x86_feature_detected!("avx512f") {
                methods.push(long::with_avx512::<true>);
                methods.push(long::with_avx512::<false>);
                methods.push(long::with_past);
            }
        }
        methods
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
            for method in methods() {
                into.fill(0xa5);
                // SAFETY: both buffers have these lengths and do not overlap.
                unsafe { method(from.as_ptr().add(skip_from), into.as_mut_ptr().add(skip_into), length) };
                prop_assert_eq!(&into[skip_into..skip_into + length], &from[skip_from..]);
                prop_assert!(into[..skip_into].iter().all(|byte| *byte == 0xa5));
                prop_assert!(into[skip_into + length..].iter().all(|byte| *byte == 0xa5));
            }
        }
    }
}
