//! `cargo fuzz run iscsi_initiator`: the body is `fuzz_targets::iscsi_initiator`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_targets::iscsi_initiator::run(data));
