//! `cargo fuzz run chain`: the body is `fuzz_targets::chain`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_targets::chain::run(data));
