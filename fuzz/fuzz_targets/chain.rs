//! Any bytes as a virtqueue in a client's memory: split and packed rings, chains, indirect tables.
//!
//! `cargo fuzz run chain`. The body is shared with a property test of `virtqueue`, and tells what must hold.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    virtqueue::fuzzing::ring_of_bytes(data);
});
