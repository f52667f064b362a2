//! Loads of plain values from memory that a client may change concurrently.
//!
//! The compiler may load a plain value several times, so a field could be checked in one load and used from another. A volatile load
//! happens once. Values are loaded in words of eight, four, two and one bytes, by unaligned `mov`. A word can mix bytes of two writes
//! of the client, and two words can be of different times; every caller checks its copy.

use std::mem::MaybeUninit;

use zerocopy::FromBytes;

/// A word at any address. Its loads and stores are single instructions on x86-64 and AArch64.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Word<T: Copy>(T);

/// Copies the word at `from + at`.
///
/// # Safety
/// `from` must be mapped and `into` valid for writes, both up to the end of the word, and must not overlap.
#[inline(always)]
unsafe fn word<T: Copy>(from: *const u8, into: *mut u8, at: usize) {
    // SAFETY: the caller guarantees the conditions of `# Safety`; a packed type has no alignment.
    unsafe {
        let value = from.add(at).cast::<Word<T>>().read_volatile();
        into.add(at).cast::<Word<T>>().write(value);
    }
}

/// Copies bytes out of client memory. Loads each byte once.
///
/// # Safety
/// `from` must be mapped for `length` bytes, `into` must be valid for writes of `length` bytes, and they must not overlap.
#[inline(always)]
pub(crate) unsafe fn copy_out(from: *const u8, into: *mut u8, length: usize) {
    let mut at = 0;
    // SAFETY: each word ends at `length` at the latest.
    unsafe {
        while length - at >= 8 {
            word::<u64>(from, into, at);
            at += 8;
        }
        if length - at >= 4 {
            word::<u32>(from, into, at);
            at += 4;
        }
        if length - at >= 2 {
            word::<u16>(from, into, at);
            at += 2;
        }
        if length - at >= 1 {
            word::<u8>(from, into, at);
        }
    }
}

/// Returns true if memory of a client differs from these bytes. Loads each byte once.
///
/// # Safety
/// `from` must be mapped for the length of `bytes`.
#[inline(always)]
pub(crate) unsafe fn differs(from: *const u8, bytes: &[u8]) -> bool {
    let words = bytes.chunks_exact(size_of::<u64>());
    let rest = words.remainder();
    let mut difference = 0;
    let mut at = 0;
    for word in words {
        let mut client = [0; size_of::<u64>()];
        // SAFETY: the word ends inside of `bytes`, and the caller guarantees as much client memory.
        unsafe { copy_out(from.add(at), client.as_mut_ptr(), client.len()) };
        let mut own = [0; size_of::<u64>()];
        own.copy_from_slice(word);
        difference |= u64::from_ne_bytes(client) ^ u64::from_ne_bytes(own);
        at += size_of::<u64>();
    }
    for byte in rest {
        let mut client = [0; 1];
        // SAFETY: as for the words.
        unsafe { copy_out(from.add(at), client.as_mut_ptr(), client.len()) };
        difference |= u64::from(client[0] ^ byte);
        at += 1;
    }
    difference != 0
}

/// Loads a value. Loads each byte once.
///
/// # Safety
/// `from` must be mapped for the size of the value.
#[inline(always)]
pub(crate) unsafe fn load<T: FromBytes>(from: *const T) -> T {
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: the caller guarantees the conditions of `# Safety` for `from`; `value` has the same size and is local memory. All of its bytes are written, and any
    // bytes are a valid value of a FromBytes type.
    unsafe {
        copy_out(from.cast(), value.as_mut_ptr().cast(), size_of::<T>());
        value.assume_init()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use crate::{Mapping, RingMemory};

    #[test]
    fn every_length_is_copied_whole_from_every_alignment() {
        let from: Vec<u8> = (0..64).collect();
        for start in 0..8 {
            for length in 0..40 {
                let mut into = [0xa5; 48];
                // SAFETY: both have at least `length` bytes.
                unsafe { super::copy_out(from[start..].as_ptr(), into.as_mut_ptr(), length) };
                assert_eq!(into[..length], from[start..start + length]);
                assert!(into[length..].iter().all(|byte| *byte == 0xa5));
            }
        }
    }

    #[test]
    fn difference_in_any_byte_is_found() {
        let bytes: Vec<u8> = (0..40).collect();
        for length in 0..40 {
            let mut other = bytes[..length].to_vec();
            // SAFETY: both have `length` bytes.
            assert!(!unsafe { super::differs(bytes.as_ptr(), &other) });
            for at in 0..length {
                other[at] ^= 1;
                // SAFETY: as above.
                assert!(unsafe { super::differs(bytes.as_ptr(), &other) });
                other[at] ^= 1;
            }
        }
    }

    /// A client flips a descriptor between two values. Each aligned word of a copy is one of the two, never a mixture.
    #[test]
    fn words_of_a_copy_are_whole_while_a_client_writes() {
        let mapping = Mapping::anonymous(4096).unwrap();
        let ring = RingMemory::new(mapping.clone(), 0, 4096);
        let entries = ring.entries::<[u8; 16]>(0, 4);
        let (good, bad) = (u64::MAX / 0xff, u64::MAX);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let ring = RingMemory::new(mapping.clone(), 0, 4096);
                while !done.load(Ordering::Relaxed) {
                    for word in [good, bad] {
                        ring.store_release_u64(0, word);
                        ring.store_release_u64(8, word);
                    }
                }
            });
            let mut torn = 0;
            for _ in 0..20_000 {
                for value in [entries.read(0), ring.read::<[u8; 16]>(0)] {
                    let (low, high) = value.split_at(8);
                    // An aligned word is never torn.
                    torn += [low, high]
                        .iter()
                        .filter(|second_half| ***second_half != [second_half[0]; 8])
                        .count();
                }
            }
            done.store(true, Ordering::Relaxed);
            assert_eq!(torn, 0);
        });
    }
}
