//! `cargo fuzz run iscsi_text`: the body is `fuzz_targets::iscsi_text`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_targets::iscsi_text::run(data));
