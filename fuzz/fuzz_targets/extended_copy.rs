//! `cargo fuzz run extended_copy`: the body is `fuzz_targets::extended_copy`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_targets::extended_copy::run(data));
