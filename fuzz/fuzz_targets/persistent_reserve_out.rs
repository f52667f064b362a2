//! `cargo fuzz run persistent_reserve_out`: the body is `fuzz_targets::persistent_reserve_out`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_targets::persistent_reserve_out::run(data));
