//! `cargo fuzz run iscsi_pdu`: the body is `fuzz_targets::iscsi_pdu`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_targets::iscsi_pdu::run(data));
