//! `cargo fuzz run iscsi_login`: the body is `fuzz_targets::iscsi_login`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_targets::iscsi_login::run(data));
