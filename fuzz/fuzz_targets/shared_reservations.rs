//! `cargo fuzz run shared_reservations`: the body is `fuzz_targets::shared_reservations`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_targets::shared_reservations::run(data));
