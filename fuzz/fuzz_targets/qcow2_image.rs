//! `cargo fuzz run qcow2_image`: the body is `fuzz_targets::qcow2_image`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_targets::qcow2_image::run(data));
