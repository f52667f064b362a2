//! `cargo fuzz run cdb`: the body is `fuzz_targets::cdb`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_targets::cdb::run(data));
