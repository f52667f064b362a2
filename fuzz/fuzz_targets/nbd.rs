//! `cargo fuzz run nbd`: the body is `fuzz_targets::nbd`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_targets::nbd::run(data));
